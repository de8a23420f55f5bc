"""Decorators that exclude functions from torch.compile."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def no_torch_dynamo(
    func: Function | bool | None = None,
    recursive: bool = True,
    when: Callable[[dict[str, Any]], str | None] | None = None,
) -> Any:
    """Excludes a function from torch.compile: @no_torch_dynamo, or @no_torch_dynamo(recursive=…).

    During an ONNX export it is a plain call. With `when`, the function is traced normally unless
    when(arguments by name) returns a reason. It then runs outside of the compiled graph, with one
    warning per reason. With recursive=False, functions that it calls may be compiled.
    """
    if isinstance(func, bool):  # no_torch_dynamo(False)
        return functools.partial(no_torch_dynamo, recursive=func, when=when)
    if func is None:
        return functools.partial(no_torch_dynamo, recursive=recursive, when=when)
    function: Function = func
    if when is not None:
        return _disabled_when(function, recursive, when)
    outside = torch.compiler.disable(function, recursive=recursive)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            return function(*arguments, **keywords)
        return outside(*arguments, **keywords)

    return wrapper


def one_break(function: Function) -> Function:
    """Makes the function one graph break of torch.compile, instead of one break per kernel."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from ._outside import call

            return call(function, *arguments, **keywords)
        return function(*arguments, **keywords)

    return wrapper


def _disabled_when(
    function: Function, recursive: bool, when: Callable[[dict[str, Any]], str | None]
) -> Function:
    signature = inspect.signature(function)
    kinds = {p.kind for p in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        raise TypeError(
            f"tenon: no_torch_dynamo: {function.__name__} takes *args, so `when` cannot name its "
            "arguments; give each a name"
        )
    outside = torch.compiler.disable(function, recursive=recursive)
    warn = torch.compiler.disable(_warn_once)
    names = list(signature.parameters)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return function(*arguments, **keywords)
        named = dict(zip(names, arguments, strict=False))
        named.update(keywords)
        reason = when(named)
        if reason is None:
            return function(*arguments, **keywords)
        warn(f"tenon: {function.__name__} is not compiled: {reason}")
        return outside(*arguments, **keywords)

    return wrapper


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
