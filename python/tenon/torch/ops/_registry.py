"""The fusion functions, process-wide: those of ours and those that users register."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# Each takes the list of ops and gives it back with some of them fused.
FORWARD: list[Callable[..., Any]] = []
BACKWARD: list[Callable[..., Any]] = []
FORWARD_BACKWARD: list[Callable[..., Any]] = []
# Fusions of ours that save other tensors than the basic ops do. They see the stages of both
# directions last, and take only ops that nobody else took in either.
PAIRS: list[Callable[..., Any]] = []

_version = 0


def version() -> int:
    """A number that changes whenever a list does."""
    return _version


@lru_cache(maxsize=1024)
def _takes_recipe(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "recipe" or p.kind is p.VAR_KEYWORD for p in parameters)


def call(function: Callable[..., Any], ops: list[Any]) -> Any:
    """`function(ops, recipe=None)`, or `function(ops)` if it knows no recipe."""
    return function(ops, recipe=None) if _takes_recipe(function) else function(ops)


def _add(functions: list[Callable[..., Any]], function: Any, prepend: bool) -> None:
    global _version
    if not callable(function):
        raise TypeError(
            f"register a function (ops, *, recipe) -> ops; {function!r} cannot be called"
        )
    functions.insert(0 if prepend else len(functions), function)
    _version += 1


def _remove(functions: list[Callable[..., Any]], function: Any, name: str) -> None:
    global _version
    if function not in functions:
        raise ValueError(f"{name}: {function!r} is not registered; nothing was changed")
    functions.remove(function)
    _version += 1


def register_forward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the forward fusions, last, or first with `prepend`.

    `ops` are basic ops and what earlier fusions made of them. What func puts in their place must
    save what the basic ops would, since the backward pass is fused on its own.
    """
    _add(FORWARD, func, prepend)


def register_backward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the backward fusions, last, or first with `prepend`.

    `ops` are in forward order. What func makes reads what the basic ops save.
    """
    _add(BACKWARD, func, prepend)


def register_forward_backward_fusion(func: Callable[..., Any], prepend: bool = False) -> None:
    """Adds func(ops, *, recipe) -> ops to the fusions of both passes at once.

    They come before the others, and a fused op they make runs forward and backward.
    """
    _add(FORWARD_BACKWARD, func, prepend)


def unregister_forward_fusion(func: Callable[..., Any]) -> None:
    """Takes back `register_forward_fusion(func)`."""
    _remove(FORWARD, func, "unregister_forward_fusion")


def unregister_backward_fusion(func: Callable[..., Any]) -> None:
    """Takes back `register_backward_fusion(func)`."""
    _remove(BACKWARD, func, "unregister_backward_fusion")


def unregister_forward_backward_fusion(func: Callable[..., Any]) -> None:
    """Takes back `register_forward_backward_fusion(func)`."""
    _remove(FORWARD_BACKWARD, func, "unregister_forward_backward_fusion")
