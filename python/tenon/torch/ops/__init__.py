"""Operations that fuse with their neighbours: `Sequential(Linear(…), SwiGLU(), Linear(…))`."""

from typing import Any

from . import _missing, _operator, basic, from_schema, fused
from .basic import *  # noqa: F403
from .from_schema import *  # noqa: F403
from .fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_backward_fusion,
    unregister_forward_backward_fusion,
    unregister_forward_fusion,
)
from .linear import Linear
from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from .sequential import Sequential

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "Sequential",
    "fused",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_backward_fusion",
    "unregister_forward_backward_fusion",
    "unregister_forward_fusion",
]
__all__ += basic.__all__
del _operator  # its import registers the operators of torch
__all__ += from_schema.__all__


def __getattr__(name: str) -> Any:
    if name in _missing.CLASSES:
        return _missing.CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
