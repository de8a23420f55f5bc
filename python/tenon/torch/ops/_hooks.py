"""Ops that must be called as modules, because somebody waits for the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .op import FusibleOperation

_given = 0


def given() -> int:
    """A number that changes whenever an op gets a hook."""
    return _given


def counted(name: str) -> Callable[..., Any]:
    """The method `name` of torch.nn.Module, which registers a hook, with a count."""
    register = getattr(torch.nn.Module, name)

    @wraps(register)
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _given
        handle = register(self, *args, **kwargs)
        _given += 1
        return handle

    return method


def why_called(op: FusibleOperation) -> str:
    """Why `op` is called as a module of its own, and not fused; "" where it is not."""
    if op._forward_pre_hooks or op._forward_hooks:
        return "it has forward hooks"
    if op._backward_pre_hooks or op._backward_hooks:
        return "it has backward hooks"
    forward = op.__dict__.get("forward", type(op).forward)
    if not getattr(forward, "__module__", "").startswith(__package__ + "."):
        return "it has a forward of its own"
    return ""
