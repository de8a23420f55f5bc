"""Calls of the C ABI on torch tensors, without copies. One function per C function.

A call runs on the device of its tensors. On CUDA it uses the current stream. A view references its
tensor, so a temporary copy lives as long as its view.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_uint64, cast
from typing import Any

import torch

from .. import _lib
from .._lib import (
    DTYPE,
    BackwardArgs,
    DropoutArgs,
    DropoutBackwardArgs,
    ForwardArgs,
    Options,
    QuantizeArgs,
    TensorPtr,
    View,
    ViewPtr,
    check,
    lib,
)
from . import _cuda

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN_CODES: dict[torch.dtype, int] = {
    torch.float32: DTYPE["f32"],
    torch.float16: DTYPE["f16"],
    torch.bfloat16: DTYPE["bf16"],
}
DTYPES: dict[torch.dtype, int] = {
    **_PLAIN_CODES,
    torch.float8_e4m3fn: DTYPE["e4m3"],
    torch.float8_e5m2: DTYPE["e5m2"],
    torch.uint8: DTYPE["e8m0"],  # scales
}
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES[torch.float8_e8m0fnu] = DTYPE["e8m0"]

_STRIDED = torch.strided
_LEAST_WIDTH = 64  # each row starts a loop, so short rows are slow
_RandomPtr = POINTER(c_uint64)


def _row_stride(t: torch.Tensor) -> int | None:
    """The row stride if leading dimensions fold into evenly spaced rows, else None."""
    shape, strides = t.shape, t.stride()
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    stride, reach = shape[-1], None
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:  # None, not 0: an expanded dimension has stride 0 and folds with no other
            stride = step
        elif step != reach:
            return None
        reach = step * size
    return stride if stride >= shape[-1] else None


def dense(t: torch.Tensor) -> bool:
    """Whether `t` is strided. Sparse and nested tensors are not."""
    return t.layout is _STRIDED and not t.is_nested


def resolved(t: torch.Tensor) -> torch.Tensor:
    """`t` without torch's lazy negative bit, so that its memory holds its values."""
    return t.resolve_neg() if t.is_neg() else t


def contiguous(t: torch.Tensor) -> torch.Tensor:
    """`t` as a contiguous tensor without the lazy negative bit."""
    return resolved(t).contiguous()


def foldable(t: torch.Tensor) -> torch.Tensor:
    """`t` if its leading dimensions fold into evenly spaced rows, else a copy."""
    if t.layout is not _STRIDED or t.is_nested:
        raise refusal(t, "a tensor")
    t = resolved(t)
    if t.is_contiguous() or _row_stride(t) is not None:
        return t
    return t.contiguous()


def even(t: torch.Tensor) -> torch.Tensor:
    """Reshapes a contiguous tensor to one row if its rows are short. For elementwise calls."""
    return t if t.dim() and t.shape[-1] >= _LEAST_WIDTH else t.view(-1)


def refusal(t: object, name: str) -> Exception:
    """The error for a `t` that cannot be read: not a tensor, unsupported dtype, or not dense."""
    if not isinstance(t, torch.Tensor):
        return TypeError(f"tenon: {name} is a {type(t).__name__}; it must be a torch.Tensor")
    if t.dtype not in _PLAIN_CODES:
        return TypeError(
            f"tenon: {name} is {t.dtype}; it must be float32, float16 or bfloat16, "
            "convert it with .to(torch.float32)"
        )
    kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
    return NotImplementedError(
        f"tenon: {name} is {kind}; it must be dense, make it so with .to_dense() or "
        "torch.nested.to_padded_tensor"
    )


def _fill(v: View, t: torch.Tensor, code: int) -> View:
    t = resolved(t)
    shape = t.shape
    cols = shape[-1] if shape else 1
    v.data = t.data_ptr()
    v.cols = v.stride = cols
    v.rows = t.numel() // cols if cols else _product(shape[:-1])
    v.dtype = code
    v.owner = t  # may be the only reference to a copy
    if not t.is_contiguous():
        stride = _row_stride(t)
        if stride is None:
            raise ValueError(
                f"tenon: a tensor of shape {tuple(shape)} and strides {t.stride()} has no evenly "
                "spaced rows; make it .contiguous()"
            )
        v.stride = stride
    return v


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for n in sizes:
        product *= n
    return product


def view(t: torch.Tensor, name: str = "tensor") -> View:
    """A view of a foldable, plain tensor as rows x last dimension. It keeps the tensor alive."""
    if not isinstance(t, torch.Tensor) or t.dtype not in _PLAIN_CODES:
        raise refusal(t, name)
    return _fill(View(), t, _PLAIN_CODES[t.dtype])


def memory(t: torch.Tensor, name: str = "tensor") -> View:
    """A view of a foldable tensor of any dtype in a quantised tensor, also codes and scales."""
    if not isinstance(t, torch.Tensor) or t.dtype not in DTYPES:
        raise refusal(t, name)
    if not t.is_contiguous() or t.is_neg():
        return _fill(View(), t, DTYPES[t.dtype])
    shape = t.shape
    cols = shape[-1] if shape else 1
    v = View(t.data_ptr(), t.numel() // cols if cols else _product(shape[:-1]), cols, cols)
    v.dtype = DTYPES[t.dtype]
    v.owner = t
    return v


def vector(t: torch.Tensor, name: str) -> View:
    """A contiguous tensor as one row."""
    if not isinstance(t, torch.Tensor) or t.dtype not in _PLAIN_CODES:
        raise refusal(t, name)
    t = resolved(t)
    n = t.numel()
    v = View(t.data_ptr(), 1, n, n, _PLAIN_CODES[t.dtype])
    v.owner = t
    return v


def row(t: torch.Tensor, name: str) -> View:
    """A bias as one row. All its elements are in the last dimension."""
    if not isinstance(t, torch.Tensor):
        raise refusal(t, name)
    if t.dim() and t.shape[-1] != t.numel():
        raise ValueError(
            f"tenon: {name} has shape {tuple(t.shape)}; its numbers belong to columns and must lie "
            f"in the last dimension, pass {name}.reshape(-1)"
        )
    return vector(t.contiguous(), name)


def column(t: torch.Tensor, name: str) -> View:
    """A contiguous tensor, or a strided 1-D tensor, as one column."""
    if not isinstance(t, torch.Tensor) or t.dtype not in _PLAIN_CODES:
        raise refusal(t, name)
    t = resolved(t)
    if t.dim() > 1:
        t = t.contiguous()
    stride = 1 if t.is_contiguous() else t.stride(0)
    v = View(t.data_ptr(), t.numel(), 1, stride, _PLAIN_CODES[t.dtype])
    v.owner = t
    return v


def pointer(v: View | None) -> Any:
    """A ctypes pointer that keeps its view alive. NULL for None."""
    return None if v is None else ViewPtr(v)


def _place(args: ctypes.Structure, views: dict[str, Any]) -> None:
    for name, v in views.items():
        if v is None:
            continue
        if isinstance(v, _lib.Tensor):
            setattr(args, name + "_encoded", TensorPtr(v))
        else:
            setattr(args, name, ViewPtr(v))


def _run(
    function: Any,
    options: Options | None,
    names: Iterable[str] | bytes,
    owners: Iterable[Any],
    *arguments: Any,
) -> None:
    """Calls function(*arguments, options) on the device of the named views or tensors."""
    for v in owners:
        if v is not None and not getattr(v, "owner", v).is_cpu:
            if isinstance(names, bytes):
                names = names.decode().split(", ")
            tensors = [None if v is None else getattr(v, "owner", v) for v in owners]
            there = _cuda.index(zip(names, tensors, strict=True))
            code = _cuda.run(function, there, options, *arguments)
            break
    else:
        code = function(*arguments, options)
    if code:
        check(code)


def forward(act: bytes, options: Options | None, layout: bytes | None = None, **views: Any) -> None:
    """tenon_forward. Views by field name of tenon_forward_args, encoded ones as _lib.Tensor."""
    args = ForwardArgs(layout=layout)
    _place(args, views)
    _run(lib.tenon_forward, options, views.keys(), views.values(), act, args)


def backward(
    act: bytes, options: Options | None, layout: bytes | None = None, **views: Any
) -> None:
    """tenon_backward. Views by field name of tenon_backward_args."""
    args = BackwardArgs(layout=layout)
    _place(args, views)
    _run(lib.tenon_backward, options, views.keys(), views.values(), act, args)


class _Frame:
    """The argument structs of y = f(x), linked once. A call only fills in the two views."""

    __slots__ = ("args", "x", "y")

    def __init__(self) -> None:
        self.x, self.y = View(), View()
        self.args = ForwardArgs(x=ViewPtr(self.x), y=ViewPtr(self.y))


# Frames not in use. The GIL is released during a call, so each call needs its own frame.
_frames: list[_Frame] = []


def elementwise(act: bytes, options: Options | None, x: torch.Tensor, y: torch.Tensor) -> None:
    """y = f(x) for two plain tensors of equal shape, contiguous or with equal dense strides."""
    dtype = x.dtype
    if dtype not in _PLAIN_CODES:
        raise refusal(x, "x")
    x = resolved(x)
    if y.dtype not in _PLAIN_CODES:
        raise refusal(y, "out_dtype")
    try:
        frame = _frames.pop()
    except IndexError:
        frame = _Frame()
    v, w = frame.x, frame.y
    v.data, w.data = x.data_ptr(), y.data_ptr()
    count = x.numel()
    cols = x.shape[-1] if x.is_contiguous() and x.dim() else count
    if cols < _LEAST_WIDTH:
        cols = count
    rows = count // cols if cols else 0
    v.rows = w.rows = rows
    v.cols = w.cols = v.stride = w.stride = cols
    v.dtype, w.dtype = _PLAIN_CODES[dtype], _PLAIN_CODES[y.dtype]
    if x.is_cpu:
        code = lib.tenon_forward(act, frame.args, options)
    else:
        there = _cuda.index((("x", x), ("y", y)))
        code = _cuda.run(lib.tenon_forward, there, options, act, frame.args)
    _frames.append(frame)
    if code:
        check(code)


def quantize(options: Options | None, **views: Any) -> None:
    """tenon_quantize with x, y, dbias, amax. Encoded tensors are _lib.Tensor."""
    args = QuantizeArgs()
    _place(args, views)
    _run(lib.tenon_quantize, options, views.keys(), views.values(), args)


def state_pointer(state: torch.Tensor) -> Any:
    """A pointer to the five int64 values of a random state. Calls update them in place."""
    if state.shape != (5,) or state.dtype != torch.int64 or not state.is_contiguous():
        raise ValueError(
            f"tenon: dropout: the random state is {state.dtype} of shape {tuple(state.shape)}; it "
            "must be five int64 numbers in a row"
        )
    return cast(state.data_ptr(), _RandomPtr)


def bias_dropout_add(
    p: float, training: bool, random: torch.Tensor | None, options: Options | None, **views: Any
) -> None:
    """tenon_bias_dropout_add with x, bias, residual, y."""
    args = DropoutArgs(p=p, training=int(training))
    _place(args, views)
    if random is not None:
        args.random = state_pointer(random)
    views["random"] = random
    _run(lib.tenon_bias_dropout_add, options, views.keys(), views.values(), args)


def bias_dropout_add_backward(
    p: float, training: bool, random: torch.Tensor | None, options: Options | None, **views: Any
) -> None:
    """tenon_bias_dropout_add_backward with grad, dx, dbias, dresidual."""
    args = DropoutBackwardArgs(p=p, training=int(training))
    _place(args, views)
    if random is not None:
        args.random = state_pointer(random)
    views["random"] = random
    _run(lib.tenon_bias_dropout_add_backward, options, views.keys(), views.values(), args)


def l2_normalization(
    x: View, y: View, r: View | None, eps: float, options: Options | None = None
) -> None:
    """tenon_l2_normalization: y = x*r with r = rsqrt(sum x^2 + eps) per row."""
    _run(lib.tenon_l2_normalization, options, ("x", "y", "r"), (x, y, r), x, y, r, eps)


def l2_normalization_backward(
    grad: View, x: View, r: View, dx: View, options: Options | None = None
) -> None:
    """tenon_l2_normalization_backward: dx = r*(grad - x*r^2*sum(x*grad))."""
    names, views = ("grad", "x", "r", "dx"), (grad, x, r, dx)
    _run(lib.tenon_l2_normalization_backward, options, names, views, *views)


def fused_forward(
    formula: bytes, arguments: bytes, views: Sequence[View], y: View, options: Options | None
) -> None:
    """tenon_fused_forward: y = formula(arguments)."""
    array = (View * len(views))(*views)
    call = (formula, arguments, array, len(views), y)
    _run(lib.tenon_fused_forward, options, arguments + b", y", (*views, y), *call)


def fused_backward(
    formula: bytes,
    arguments: bytes,
    views: Sequence[View],
    grad: View,
    gradients: Sequence[View | None],
    options: Options | None,
) -> None:
    """tenon_fused_backward: the gradients that are not None, each in its argument's shape."""
    array = (View * len(views))(*views)
    out = (View * len(views))(*(View() if g is None else g for g in gradients))
    call = (formula, arguments, array, len(views), grad, out)
    _run(lib.tenon_fused_backward, options, arguments + b", grad", (*views, grad), *call)


def names() -> list[str]:
    """The registered names, built-in ones first."""
    return _lib.text_of(lib.tenon_names).split()


__all__ = [
    "DTYPES",
    "PLAIN",
    "backward",
    "bias_dropout_add",
    "bias_dropout_add_backward",
    "byref",
    "column",
    "contiguous",
    "dense",
    "elementwise",
    "even",
    "foldable",
    "forward",
    "fused_backward",
    "fused_forward",
    "l2_normalization",
    "l2_normalization_backward",
    "memory",
    "names",
    "pointer",
    "quantize",
    "refusal",
    "resolved",
    "row",
    "state_pointer",
    "vector",
    "view",
]
