"""The activation classes of Transformer Engine, under the same names.

σ is the sigmoid. In gated activations a is the activated half of the input and b the linear half. a
is the first half, or alternates with b in groups of `glu_interleave_size` columns.
"""

from __future__ import annotations

from ._activation import (
    Activation,
    ScaledActivation,
    _ActivationOperation,
    _Named,
    _ScaledNamed,
)

__all__ = [
    "Activation",
    "ClampedSwiGLU",
    "GEGLU",
    "GELU",
    "GELUErf",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ReGLU",
    "ReLU",
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


class GELU(_Named):
    """y = x·Φ(x), with the tanh approximation of the normal distribution function Φ."""

    act = "gelu"


class GELUErf(_Named):
    """y = x·Φ(x), with the exact normal distribution function Φ."""

    act = "gelu_erf"


class SiLU(_Named):
    """y = x·σ(x)."""

    act = "silu"


class QGELU(_Named):
    """y = x·σ(1.702·x), the quick GELU."""

    act = "qgelu"


class ReLU(_Named):
    """y = max(0, x)."""

    act = "relu"


class SReLU(_Named):
    """y = max(0, x)², the squared ReLU."""

    act = "srelu"


class GLU(_Named):
    """y = σ(a)·b."""

    act = "glu"


class GEGLU(_Named):
    """y = gelu(a)·b."""

    act = "geglu"


class SwiGLU(_Named):
    """y = a·σ(a)·b."""

    act = "swiglu"


class ReGLU(_Named):
    """y = max(0, a)·b."""

    act = "reglu"


class QGEGLU(_Named):
    """y = a·σ(1.702·a)·b."""

    act = "qgeglu"


class SReGLU(_Named):
    """y = max(0, a)²·b."""

    act = "sreglu"


class ClampedSwiGLU(_Named):
    """y = w·σ(alpha·w)·(clamp(b, −limit, limit) + glu_linear_offset), w = min(a, limit).

    limit = 7, alpha = 1.702 and glu_linear_offset = 1 are the defaults.
    """

    act = "clamped_swiglu"


class SiTUGLU(_Named):
    """y = beta1·tanh(a/beta1)·σ(a)·beta2·tanh(b/beta2). Defaults: beta1 = 4, beta2 = 25."""

    act = "situglu"


class ScaledSwiGLU(_ScaledNamed):
    """y = a·σ(a)·b·s. The extra input s has one value per row."""

    act = "swiglu"


class ScaledClampedQGeGLU(_ScaledNamed):
    """y = `ClampedSwiGLU` times s. The extra input s has one value per row."""

    act = "clamped_swiglu"


class ScaledSiTUGLU(_ScaledNamed):
    """y = `SiTUGLU` times s. The extra input s has one value per row."""

    act = "situglu"


class ScaledSReLU(_ScaledNamed):
    """y = max(0, x)²·s. The extra input s has one value per row."""

    act = "srelu"
