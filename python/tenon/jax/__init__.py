"""Tenon in JAX: activations with FP8 outputs and bias gradients; plain, gated or user-defined.

>>> from tenon.jax import activation
>>> y = activation(x, ("silu", "linear"))            # x [..., 2, H], differentiable
>>> q = act_lu(x, ("gelu",), BlockScaleQuantizer())  # MXFP8, one pass
"""

from . import _ffi as _ffi  # registers the handlers, or says why it cannot
from ._activation import activation
from .cpp_extensions.activation import AmaxScope, act_lu, dact_lu, quantize_dact_dbias
from .quantize import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    Float8BlockScaleQuantizer,
    QuantizeLayout,
    Quantizer,
    ScaledTensor,
)

__all__ = [
    "AmaxScope",
    "BlockScaleQuantizer",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "Float8BlockScaleQuantizer",
    "QuantizeLayout",
    "Quantizer",
    "ScaledTensor",
    "act_lu",
    "activation",
    "dact_lu",
    "quantize_dact_dbias",
]
