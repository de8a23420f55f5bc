"""Finds ops that must be called as modules because of hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as modules

if TYPE_CHECKING:
    from .op import FusibleOperation

_given = 0


def given() -> int:
    """A counter that changes when an op gets a hook, or a global module hook is added."""
    return 2 * _given + _on_all_modules()


def count_attribute(name: str) -> None:
    """Increments the counter for an attribute that changes how an op is called."""
    global _given
    if name == "forward":
        _given += 1


def _on_all_modules() -> bool:
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


def counted(name: str) -> Callable[..., Any]:
    """The method `name` of torch.nn.Module, which registers a hook, with a counter."""
    register = getattr(torch.nn.Module, name)

    @wraps(register)
    def method(self: FusibleOperation, *args: Any, **kwargs: Any) -> Any:
        global _given
        handle = register(self, *args, **kwargs)
        _given += 1
        self.note_settings()
        return handle

    return method


def why_called(op: FusibleOperation) -> str:
    """Why `op` is called as a module and not fused. "" if it can be fused."""
    if _on_all_modules():
        return "it is a module, and hooks of all modules are registered"
    if op._forward_pre_hooks or op._forward_hooks:
        return "it has forward hooks"
    if op._backward_pre_hooks or op._backward_hooks:
        return "it has backward hooks"
    forward = op.__dict__.get("forward", type(op).forward)
    if not getattr(forward, "__module__", "").startswith(__package__ + "."):
        return "it has a forward of its own"
    return ""
