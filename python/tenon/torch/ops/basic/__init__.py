"""The basic operations."""

from .activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    GELUErf,
    ReGLU,
    ReLU,
    ScaledActivation,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
    _ActivationOperation,
)
from .add_extra_input import AddExtraInput
from .basic_linear import BasicLinear
from .bias import Bias
from .constant_scale import ConstantScale
from .dropout import Dropout
from .identity import Identity
from .l2normalization import L2Normalization
from .make_extra_output import MakeExtraOutput
from .norm import LayerNorm, RMSNorm
from .quantize import Quantize
from .reshape import Reshape

__all__ = [
    "Activation",
    "AddExtraInput",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GEGLU",
    "GELU",
    "GELUErf",
    "GLU",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "_ActivationOperation",
]
