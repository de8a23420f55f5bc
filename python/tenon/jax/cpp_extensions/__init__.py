"""The calls of libtenon from JAX, under the names of Transformer Engine."""

from .activation import (
    ActLuPrimitive,
    AmaxScope,
    DActLuDBiasQuantizePrimitive,
    act_lu,
    dact_lu,
    quantize_dact_dbias,
)

__all__ = [
    "ActLuPrimitive",
    "AmaxScope",
    "DActLuDBiasQuantizePrimitive",
    "act_lu",
    "dact_lu",
    "quantize_dact_dbias",
]
