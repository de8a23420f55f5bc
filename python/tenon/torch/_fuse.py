"""Functions of tensors compiled to one kernel each, at their first call."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _lib
from . import _call, _saved
from ._dynamo import one_break
from ._once import Gradients, once
from ._symbols import Unknown, formula
from ._watch import watched

Tensor = torch.Tensor

_MOST_KERNELS = 256
_CONSTANTS = (int, float, str, torch.dtype, type(None))  # bool is an int


class Kernel:
    """y = formula(arguments), with a derived gradient. Arguments broadcast as in torch."""

    __slots__ = ("arguments", "dtype", "name", "options", "text")

    def __init__(self, name: str, text: str, arguments: Sequence[str], dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.text, self.arguments = text.encode(), ", ".join(arguments).encode()
        self.options = _lib.options()

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Evaluates the formula on one element, so that the library reports its errors."""
        given = [_call.view(torch.ones(1, dtype=d, device="cpu")) for d in dtypes]
        y = _call.view(torch.empty(1, dtype=self.dtype, device="cpu"))
        _call.fused_forward(self.text, self.arguments, given, y, self.options)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        shape = tensors[0].shape
        shapes = [t.shape for t in tensors]
        if any(own != shape for own in shapes):
            shape = max(shapes, key=lambda own: (len(own), own.numel()))
            if not all(_fits(own, shape) for own in shapes):
                shape = torch.broadcast_shapes(*shapes)
                tensors = [t if _fits(t.shape, shape) else t.expand(shape) for t in tensors]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _Fused.apply(self, shape, *tensors)
        return self.forward(shape, tensors)

    def forward(self, shape: torch.Size, tensors: Sequence[Tensor]) -> Tensor:
        y = torch.empty(shape, dtype=self.dtype, device=tensors[0].device)
        *views, out = _views(shape, [*tensors, y])
        _call.fused_forward(self.text, self.arguments, views, out, self.options)
        return y

    def backward(self, grad: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]) -> Gradients:
        made = [
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if needed else None
            for t, needed in zip(tensors, needs, strict=True)
        ]
        wanted = [t for t in made if t is not None]
        views = _views(grad.shape, [*tensors, grad, *wanted])
        count = len(tensors)
        found = iter(views[count + 1 :])
        out = [None if t is None else next(found) for t in made]
        _call.fused_backward(
            self.text, self.arguments, views[:count], views[count], out, self.options
        )
        return tuple(made)


def _fits(own: torch.Size, shape: torch.Size) -> bool:
    """Whether `own` is the whole shape, one row, one value per row, or one value."""
    if own == shape:
        return True
    count = own.numel()
    return len(own) <= len(shape) and (
        count == 1
        or own[-1] == shape[-1] == count
        or (own[-1] == 1 and len(own) == len(shape) and own[:-1] == shape[:-1])
    )


def _views(shape: torch.Size, tensors: Sequence[Tensor]) -> list[_lib.View]:
    if all(t.shape == shape and t.is_contiguous() for t in tensors):
        return [_call.view(_call.even(t)) for t in tensors]
    return [_view(t, shape) for t in tensors]


def _view(t: Tensor, shape: torch.Size) -> _lib.View:
    own = t.shape
    if own == shape:
        return _call.view(_call.foldable(t))
    if t.numel() == 1 or own[-1] == shape[-1]:
        return _call.vector(t.contiguous(), "argument")
    return _call.column(t.contiguous(), "argument")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, shape: torch.Size, *tensors: Tensor) -> Tensor:
        ctx.kernel, ctx.kinds = kernel, _saved.kinds(tensors)
        ctx.save_for_backward(*tensors)
        return kernel.forward(shape, tensors)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kernel, tensors, needs = ctx.kernel, ctx.saved_tensors, ctx.needs_input_grad[2:]
        _saved.check(f"tenon: {kernel.name}", ctx.kinds, tensors)
        found = once(
            kernel.name,
            lambda: kernel.backward(grads[0], tensors, needs),
            (grads[0], *tensors),
        )
        return None, None, *found


def _signature(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a kernel: the dtypes of tensors, the values of all other arguments."""
    key: list[Any] = []
    # Dtypes of 0-d tensors, dtypes of other tensors.
    widths: tuple[set[torch.dtype], ...] = (set(), set())
    first: Tensor | None = None
    for a in arguments:
        if isinstance(a, Tensor):
            if a.dtype not in _call.PLAIN or not (a.is_cpu or a.is_cuda):
                raise Unknown(f"an argument is {a.dtype} on {a.device}")
            if first is None:
                first = a
            elif a.device != first.device:
                raise Unknown(f"arguments are on {first.device} and on {a.device}")
            key.append(a.dtype)
            widths[a.dim() > 0].add(a.dtype)
        elif isinstance(a, _CONSTANTS):
            key.append((type(a), str(a)))  # 0.0 == -0.0
        else:
            raise Unknown(f"an argument is a {type(a).__name__}")
    if widths[1] and not widths[0] <= widths[1]:
        raise Unknown("a 0-d tensor of another dtype takes part")  # torch ignores its dtype
    return tuple(key)


def _outside(function: Callable[..., Any]) -> Callable[[], tuple[Any, ...]]:
    """Reads the current values of the numbers in the function's module and closure."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {})
    names = [n for n in getattr(code, "co_names", ()) if _is_number(module.get(n))]
    cells = getattr(function, "__closure__", None) or ()
    if not names and not cells:
        return tuple

    def read() -> tuple[Any, ...]:
        found = [module.get(n) for n in names]
        for cell in cells:
            try:
                found.append(cell.cell_contents)
            except ValueError:  # empty cell
                found.append(None)
        return tuple((type(v), str(v)) if _is_number(v) else id(v) for v in found)

    return read


def _is_number(v: Any) -> bool:
    return isinstance(v, (int, float))


class Lazy:
    """How a function is called, and why: as a kernel, with torch.compile, or plainly."""

    def __init__(self, function: Callable[..., Any], tell: Callable[[str], None]) -> None:
        self.function, self.tell = function, tell
        self.name = getattr(function, "__name__", "function")
        self.kernels: dict[tuple[Any, ...], Kernel | None] = {}
        self.compiled: Callable[..., Any] | None = None
        self.plain = False
        try:
            self.signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # built-in functions have no signature
            self.signature = None
        parameters = self.signature.parameters.values() if self.signature else ()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # Fast path: with this many positional arguments no binding is needed.
        self.count = len(parameters) if all(p.kind in plain for p in parameters) else -1

    @functools.cached_property
    def outside(self) -> Callable[[], tuple[Any, ...]]:
        """Computed at the first call, when the module is complete."""
        return _outside(self.function)

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self.plain or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return self.function(*arguments, **keywords)
        if watched(*arguments, *keywords.values()):
            return self.function(*arguments, **keywords)
        try:
            given = self.bound(arguments, keywords)
            key = (*_signature(given), *self.outside())
        except Unknown as e:
            return self.otherwise(str(e), arguments, keywords)
        if key not in self.kernels:
            self.decide(key, given)
        kernel = self.kernels[key]
        if kernel is None or self.plain:
            return self.otherwise("", arguments, keywords)
        try:
            return kernel([a for a in given if isinstance(a, Tensor)])
        except RuntimeError:
            return self.function(*arguments, **keywords)  # torch reports the shape error

    def bound(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, including defaults."""
        if len(arguments) == self.count and not keywords:
            return arguments
        if self.signature is None:
            raise Unknown("it has no signature")
        try:
            call = self.signature.bind(*arguments, **keywords)
        except TypeError:
            self.function(*arguments, **keywords)  # raises Python's own error
            raise
        call.apply_defaults()
        kinds = {p.kind for p in self.signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise Unknown("it takes any number of arguments")
        return tuple(call.arguments.values())

    def decide(self, key: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Makes the kernel for this signature, or None."""
        if os.environ.get("TENON_JIT") == "0":
            self.plain = True
            self.kernels[key] = None
            self.tell("plain: TENON_JIT=0")
            return
        if len(self.kernels) >= _MOST_KERNELS:
            self.kernels.clear()
        tensors = [(i, f"x{i}", a.dtype) for i, a in enumerate(given) if isinstance(a, Tensor)]
        try:
            if not tensors:
                raise Unknown("no argument is a tensor")
            assert self.signature is not None
            names = list(self.signature.parameters)
            text, dtype = formula(self.called(names), given, tensors)
            kernel = Kernel(self.name, text, [name for _, name, _ in tensors], dtype)
            kernel.check([dtype for _, _, dtype in tensors])
        except Unknown as e:
            self.kernels[key] = None
            self.why = str(e)
        except Exception as e:  # an error in the function, or a formula that is too large
            self.kernels[key] = None
            self.why = f"{type(e).__name__}: {e}"
        else:
            self.kernels[key] = kernel
            self.tell(f"tenon: {text}")

    def called(self, names: list[str]) -> Callable[..., Any]:
        """The function with positional arguments only. Keyword-only ones are passed by name."""
        assert self.signature is not None
        only = [
            n
            for n, p in self.signature.parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        if not only:
            return self.function
        split = len(names) - len(only)
        return lambda *a: self.function(*a[:split], **dict(zip(only, a[split:], strict=True)))

    why = ""

    def otherwise(self, why: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Uses torch.compile, or a plain call if that fails."""
        why = why or self.why
        if self.plain or os.environ.get("TENON_JIT") == "0":
            self.plain = True
            self.tell("plain: TENON_JIT=0")
            return self.function(*arguments, **keywords)
        if self.compiled is not None:
            return self.compiled(*arguments, **keywords)
        try:
            compiled = torch.compile(self.function)
            result = compiled(*arguments, **keywords)
        except Exception as e:
            # Errors of the function itself are raised here.
            result = self.function(*arguments, **keywords)
            self.plain = True
            self.tell(f"plain: {why}; torch.compile failed: {type(e).__name__}")
            return result
        self.compiled = compiled
        self.tell(f"torch.compile: {why}")
        return result


def lazy_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles the function at its first call. See tenon.torch.jit.lazy_compile."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return lazy(arguments, keywords)

    def tell(how: str) -> None:
        wrapper.how = how  # type: ignore[attr-defined]

    lazy = Lazy(function, tell)
    tell("deferred")
    return wrapper
