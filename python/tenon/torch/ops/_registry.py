"""The process-wide lists of fusion functions that users register."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .._context import local

# Each takes the list of ops and returns it with some of them fused.
FORWARD: list[Callable[..., Any]] = []
BACKWARD: list[Callable[..., Any]] = []
FORWARD_BACKWARD: list[Callable[..., Any]] = []

_version = 0


def version() -> int:
    """A counter that changes when a list changes, or the methods of an op."""
    return _version


# The same as a text: torch.compile makes graphs for any number, but for one text.
token = "0"


def count_change() -> None:
    global _version, token
    _version += 1
    token = str(_version)


@lru_cache(maxsize=1024)
def _takes_recipe(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "recipe" or p.kind is p.VAR_KEYWORD for p in parameters)


def call(function: Callable[..., Any], ops: list[Any], recipe: Any) -> Any:
    """Calls `function(ops, recipe=recipe)`, or `function(ops)` if it has no recipe argument."""
    return function(ops, recipe=recipe) if _takes_recipe(function) else function(ops)


def recipe_read() -> Any:
    """The recipe of `autocast` if a function takes it, else None."""
    if FORWARD or BACKWARD or FORWARD_BACKWARD:
        if any(_takes_recipe(f) for each in (FORWARD, BACKWARD, FORWARD_BACKWARD) for f in each):
            return None if local.active is None else local.active.recipe
    return None


def _add(functions: list[Callable[..., Any]], function: Any, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(
            f"register a function (ops, *, recipe) -> ops; {function!r} cannot be called"
        )
    functions.insert(0 if prepend else len(functions), function)
    count_change()


def _remove(functions: list[Callable[..., Any]], function: Any, name: str) -> None:
    if function not in functions:
        raise ValueError(f"{name}: {function!r} is not registered; nothing was changed")
    functions.remove(function)
    count_change()


def register_forward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the forward fusions, last, or first with `prepend`.

    `recipe` is that of `autocast`, or None. Ops are fused again under another recipe.

    `ops` are basic ops and the fused ops of earlier fusions. A fused op from func must save the
    same tensors as its basic ops, because the backward pass is fused separately.
    """
    _add(FORWARD, func, prepend)


def register_backward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the backward fusions, last, or first with `prepend`.

    `ops` are in forward order. A fused op from func reads the tensors that the basic ops save.
    """
    _add(BACKWARD, func, prepend)


def register_forward_backward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the fusions of both passes.

    These fusions run before the others. Their fused ops run forward and backward.
    """
    _add(FORWARD_BACKWARD, func, prepend)


def unregister_forward_fusion(func: Callable[..., Any]) -> None:
    """Reverts `register_forward_fusion(func)`."""
    _remove(FORWARD, func, "unregister_forward_fusion")


def unregister_backward_fusion(func: Callable[..., Any]) -> None:
    """Reverts `register_backward_fusion(func)`."""
    _remove(BACKWARD, func, "unregister_backward_fusion")


def unregister_forward_backward_fusion(func: Callable[..., Any]) -> None:
    """Reverts `register_forward_backward_fusion(func)`."""
    _remove(FORWARD_BACKWARD, func, "unregister_forward_backward_fusion")
