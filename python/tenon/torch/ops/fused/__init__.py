"""Fused operations that users may construct and register. Each is a plan of its basic ops.

A fuser lists them in `_forward_ops` and `_backward_ops` where one step of a plan has their ops.
"""

from typing import Any

from .. import _missing
from .backward_activation_bias import BackwardActivationBias
from .backward_add_rmsnorm import BackwardAddRMSNorm
from .backward_linear_add import BackwardLinearAdd
from .backward_linear_scale import BackwardLinearScale
from .forward_linear_bias_activation import ForwardLinearBiasActivation
from .forward_linear_bias_add import ForwardLinearBiasAdd
from .forward_linear_scale_add import ForwardLinearScaleAdd

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]

# In the order in which a list of ops is searched for them.
FORWARD = (ForwardLinearBiasAdd, ForwardLinearBiasActivation, ForwardLinearScaleAdd)
BACKWARD = (BackwardLinearAdd, BackwardLinearScale, BackwardActivationBias, BackwardAddRMSNorm)


def __getattr__(name: str) -> Any:
    if name in _missing.CLASSES:
        return _missing.CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
