"""Converts NumPy arrays to matrices of the C ABI without copies. Leading dimensions become rows."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _device, _dlpack
from ._device import DeviceArray
from ._lib import DTYPE, DTYPES, Tensor, TensorPtr, View, ViewPtr

Array = npt.NDArray[Any]

# Names of dtypes in NumPy and ml_dtypes, in the order of _lib.DTYPES. Lookup by name delays the
# import of ml_dtypes until an array of one of its types is created.
NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
CODES = {name: code for code, name in enumerate(NAMES)}
PLAIN = NAMES[:3]
FP8 = NAMES[3:5]

F32 = np.dtype(np.float32)


def dtype_named(op: str, given: Any, allowed: tuple[str, ...] = PLAIN) -> np.dtype[Any]:
    """The dtype for "bf16", "bfloat16", a NumPy or ml_dtypes type, or a dtype."""
    name = given if isinstance(given, str) else ""
    if name in DTYPES:
        name = NAMES[DTYPE[name]]
    elif name not in NAMES:
        try:
            name = np.dtype(given).name
        except TypeError:
            name = str(given)
    if name not in allowed:
        known = ", ".join(f"'{DTYPES[CODES[n]]}' ({n})" for n in allowed)
        raise ValueError(f"{op}: dtype {given!r}; it must be one of {known}")
    if name in ("float32", "float16"):
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


@functools.cache
def code_of(dtype: np.dtype[Any]) -> int:
    """The number of a dtype in the C ABI. An unknown dtype gets a number after the last one."""
    return CODES.get(dtype.name, len(NAMES)) if dtype.isnative else len(NAMES)


def array(op: str, name: str, x: Any) -> Any:
    """Converts x to an array of float32, float16 or bfloat16, or raises an error with the remedy.

    The result is a NumPy array, or a DeviceArray on CUDA.
    """
    found = _found(op, name, x)
    dtype = found.dtype
    if code_of(dtype) < len(PLAIN):
        return found
    if dtype.name in PLAIN:
        raise TypeError(
            f"{op}: {name} is {dtype.str}, in the byte order of other machines; convert it with "
            f"{name}.astype(np.{dtype.name})"
        )
    if dtype.name in NAMES:
        raise TypeError(
            f"{op}: {name} is {dtype.name}, which means nothing without its scales; pass a "
            f"tenon.Quantized, or numbers: {name}.astype(np.float32)"
        )
    raise TypeError(
        f"{op}: {name} is {dtype.name}; Tenon computes on float32, float16 and bfloat16, so "
        f"convert it with {name}.astype(np.float32)"
    )


def _found(op: str, name: str, x: Any) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{op}: {name} is a masked array; fill it first, {name}.filled(0)")
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{op}: {name} is traced by JAX (jit, grad, vmap, ...) and has no numbers yet; inside "
            "such functions use tenon.jax, e.g. tenon.jax.activation(x[..., None, :], ('gelu',))"
        )
    if hasattr(x, "__dlpack__"):
        return _device.read(op, name, x) if _device.on_cuda(x) else _dlpack.read(op, name, x)
    if hasattr(x, "__array__"):
        return np.asarray(x)
    raise TypeError(
        f"{op}: {name} is a {type(x).__name__}; pass a NumPy array or an object with __dlpack__, "
        f"e.g. np.asarray({name}, np.float32)"
    )


def row_stride(x: Any) -> int | None:
    """The row stride in elements if leading dimensions fold into evenly spaced rows, else None."""
    cols = x.shape[-1] if x.ndim else 1
    if x.c_contiguous if isinstance(x, DeviceArray) else x.flags.c_contiguous:
        return cols
    if x.ndim < 2 or (cols > 1 and x.strides[-1] != x.itemsize):
        return None
    lead = [p for p in zip(x.shape[:-1], x.strides[:-1], strict=True) if p[0] != 1]
    if not lead:
        return cols
    if any(outer != n * step for (_, outer), (n, step) in zip(lead, lead[1:], strict=False)):
        return None
    step = lead[-1][1]
    fits = step >= cols * x.itemsize and step % x.itemsize == 0
    return int(step // x.itemsize) if fits else None


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of rows and columns of a shape. All leading dimensions are rows."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def matrix(x: Any, rows: int | None = None, cols: int | None = None) -> View:
    """A view of x, folded to 2-D or with another shape of equal size. x must have a row_stride."""
    if rows is None or cols is None:
        rows, cols = rows_of(x.shape)
        stride = row_stride(x)
        assert stride is not None
    else:
        stride = cols
    address = x.address if isinstance(x, DeviceArray) else x.ctypes.data
    return View(address, rows, cols, stride, code_of(x.dtype))


def contiguous(x: Any) -> Any:
    """x, or a row-major copy if x is not contiguous."""
    return x.contiguous() if isinstance(x, DeviceArray) else np.asarray(x, order="C")


def foldable(x: Any) -> Any:
    """x if it folds into rows without a copy, else a row-major copy."""
    return x if row_stride(x) is not None else contiguous(x)


class Operand(NamedTuple):
    """A tensor argument: its shape, its nominal dtype, and its struct for the C ABI."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    c: View | Tensor
    owner: object  # keeps the memory alive


def line(op: str, name: str, x: Any, column: bool = False) -> Operand:
    """All elements of an array as one row (a bias), or as one column (a scale per row)."""
    found = contiguous(array(op, name, x))
    n = found.size
    if not column and found.ndim and found.shape[-1] != n:
        raise ValueError(
            f"{op}: {name} has the shape {found.shape}; its numbers belong to columns and must lie "
            f"in the last dimension, pass {name}.reshape(-1)"
        )
    c = matrix(found, n, 1) if column else matrix(found, 1, n)
    return Operand(found.shape, found.dtype, c, found)


def in_place(op: str, name: str, x: Any) -> Array:
    """Checks a float32 array of the caller that a call writes in place."""
    if not isinstance(x, np.ndarray) or x.dtype != F32:
        what = x.dtype.name if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"{op}: {name} is {what}; it is written in place and must be float32")
    if not x.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; it is written in place, so pass a copy")
    if row_stride(x) is None:
        raise ValueError(
            f"{op}: {name} has strides {x.strides}; it is written in place, so its rows must be "
            "contiguous"
        )
    return x


def place(args: Any, **tensors: View | Tensor | None) -> None:
    """Fills a struct of arguments. Encoded tensors go to the fields with the suffix _encoded."""
    for name, c in tensors.items():
        if isinstance(c, Tensor):
            setattr(args, name + "_encoded", TensorPtr(c))
        elif c is not None:
            setattr(args, name, ViewPtr(c))
