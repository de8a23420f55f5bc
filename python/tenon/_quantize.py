"""Quantised tensors: conversion of arrays to and from 8-bit codes with scales."""

from __future__ import annotations

import functools
import math
from ctypes import POINTER, byref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _html
from ._array import (
    F32,
    FP8,
    NAMES,
    Array,
    Operand,
    array,
    code_of,
    dtype_named,
    foldable,
    in_place,
    matrix,
    place,
    rows_of,
)
from ._device import HOST, DeviceArray, Host, common, on_cuda, place_of, read, result
from ._format import SCALINGS, encoding_shapes, scaling_of
from ._lib import DTYPES, POWER_OF_TWO, QuantizeArgs, Tensor, View, check, lib, options

_MODES = tuple(s for s in SCALINGS if s != "none")


@functools.cache
def _scale_dtype(scaling: str) -> np.dtype[Any]:
    return dtype_named("quantize", scaling_of(scaling).scale_dtype, NAMES)


def _shared(scaling: str) -> str:
    """Describes which elements share a scale."""
    mode = scaling_of(scaling)
    if mode.single:
        return "one scale from past steps" if mode.scale_given else "one scale for the tensor"
    kind = "a power of two" if mode.scale_dtype == "e8m0" else "a scale"
    return f"{kind} for each {mode.block[0]}x{mode.block[1]}"


class Health(NamedTuple):
    """The losses of a quantisation: counts of saturated, underflowed and non-finite values."""

    saturated: int
    flushed: int
    not_finite: int


@dataclass(frozen=True)
class Format:
    """How a tensor is quantised: q = cast(v*scale), scale_inv = 1/scale.

    - scaling: "delayed", "current", "mxfp8", "block1x128" or "block128x128". It may include the
      dtype: "e5m2:current".
    - scale: the multiplier of delayed scaling.
    - amax: with delayed scaling, a float32 array of one element, updated in place with the maximum.
      With current scaling, the amax to use.
    - eps: the lower limit of the amax, for current and block scaling.
    - power_of_two: whether scales are powers of two, for current and block scaling.
    - swizzled: stores the scales of mxfp8 in the order of the tensor cores.
    - health: counts the losses.
    """

    scaling: str
    dtype: Any = "e4m3"
    rowwise: bool = True
    columnwise: bool = False
    scale: Any = None
    amax: Any = None
    eps: float = 0.0
    power_of_two: bool | None = None
    swizzled: bool = False
    health: bool = False

    def __post_init__(self) -> None:
        scaling, dtype = self.scaling, self.dtype
        if isinstance(scaling, str) and ":" in scaling:
            dtype, _, scaling = scaling.partition(":")
        if scaling not in _MODES:
            raise ValueError(
                f"quantize: the scaling {scaling!r} is not known; use one of {', '.join(_MODES)}"
            )
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "quantize: neither rowwise nor columnwise is asked for; set one of them, or both"
            )
        object.__setattr__(self, "scaling", scaling)
        object.__setattr__(self, "dtype", dtype_named("quantize", dtype, FP8))

    @property
    def code(self) -> str:
        """The short name of the dtype, "e4m3" or "e5m2"."""
        return DTYPES[code_of(self.dtype)]

    def empty(self, shape: tuple[int, ...], dtype: Any = F32, where: Host = HOST) -> Quantized:
        """Allocates a Quantized of a shape, to be written by a call."""
        q = Quantized(self, shape, dtype)
        rows, cols = rows_of(shape)
        mode = scaling_of(self.scaling)
        for columnwise in (False, True):
            if not (self.columnwise if columnwise else self.rowwise):
                continue
            transposed = columnwise and mode.transposes
            data = where.empty((cols, *shape[:-1]) if transposed else shape, self.dtype)
            if columnwise and q.scale_inv is not None and mode.single:
                scale_inv = q.scale_inv
            else:
                scales = encoding_shapes(self.scaling, rows, cols, columnwise)[1]
                made = where.empty((1,) if mode.single else scales, _scale_dtype(self.scaling))
                scale_inv = result(made)
            if columnwise:
                q.columnwise_data, q.columnwise_scale_inv = result(data), scale_inv
            else:
                q.data, q.scale_inv = result(data), scale_inv
        if mode.scale_given:
            if self.scale is None:
                raise ValueError(
                    "quantize: delayed scaling needs its scale; give scale=, e.g. 1.0 in the "
                    "first step, or use 'current'"
                )
            q._scale = _one("scale", self.scale, where)
            if where is HOST and not q._scale[0] > 0:
                raise ValueError(f"quantize: scale={q._scale[0]}; it must be greater than 0")
            q.amax = result(where.full((1,), 0.0)) if self.amax is None else _cell(self.amax, where)
        elif mode.single:
            if self.scale is not None:
                raise ValueError(
                    "quantize: current finds its scale by itself; leave scale out, or use 'delayed'"
                )
            q.amax = _one("amax", 0.0 if self.amax is None else self.amax, where)
            if where is HOST and q.amax[0] < 0:
                raise ValueError(
                    f"quantize: amax={q.amax[0]}; it is the largest |x| and must be at least 0"
                )
        elif self.amax is not None or self.scale is not None:
            raise ValueError(
                f"quantize: {self.scaling} finds its scales by itself; leave scale and amax out, "
                "or use 'delayed' (scale) or 'current' (amax)"
            )
        if self.health:
            q._health = result(where.full((3,), 0.0))
        return q


def _one(name: str, value: Any, where: Host) -> Any:
    if not isinstance(value, (int, float)):
        found = array("quantize", name, value)
        if found.size != 1:
            raise ValueError(
                f"quantize: {name} has {found.size} elements; it is one number for the tensor"
            )
        if isinstance(found, DeviceArray):  # used as it is: never read back to the host
            return result(_there(name, found, where))
        value = float(found.reshape(()).astype(F32))
    return result(where.full((1,), value))


def _there(name: str, found: Any, where: Host) -> Any:
    if place_of(found) != where or found.dtype != F32:
        raise ValueError(
            f"quantize: {name} is {found.dtype.name} on {place_of(found).name}; it must be "
            f"float32 on {where.name}, where x is"
        )
    return found


def _cell(amax: Any, where: Host) -> Any:
    if where is HOST:
        found = in_place("quantize", "amax", amax)
    else:
        found = _there("amax", array("quantize", "amax", amax), where)
    if found.size != 1:
        raise ValueError(
            f"quantize: amax has {found.size} elements; pass the tensor's own, history[0, i:i+1]"
        )
    return result(found)


class Quantized:
    """A tensor of FP8 codes and scales. Its values are `data*scale_inv`, per block.

    `data` and `scale_inv` are the rowwise encoding. `columnwise_data` and `columnwise_scale_inv`
    are the columnwise encoding (transposed, except for mxfp8). One of the two may be None. `shape`
    and `dtype` are those of the original tensor. `amax` is the result of delayed and current
    scaling.
    """

    def __init__(
        self,
        format: Format | str,  # noqa: A002
        shape: tuple[int, ...],
        dtype: Any = F32,
        *,
        data: Array | None = None,
        scale_inv: Array | None = None,
        columnwise_data: Array | None = None,
        columnwise_scale_inv: Array | None = None,
    ) -> None:
        self.format = format if isinstance(format, Format) else _read_format(format)
        self.shape = tuple(shape)
        self.dtype = dtype_named("Quantized", dtype)
        self.data, self.scale_inv = data, scale_inv
        self.columnwise_data, self.columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self.amax: Array | None = None
        self._scale: Array | None = None
        self._health: Array | None = None

    @property
    def scaling(self) -> str:
        """The scaling mode, e.g. "mxfp8"."""
        return self.format.scaling

    @property
    def health(self) -> Health | None:
        """The counts of losses, if the format has `health`."""
        return None if self._health is None else Health(*(int(v) for v in self._health))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales. A scale shared by two encodings counts once."""
        arrays = (self.data, self.scale_inv, self.columnwise_data, self.columnwise_scale_inv)
        return sum(a.nbytes for a in {id(a): a for a in arrays if a is not None}.values())

    def c_tensor(self, *, written: bool = False) -> Tensor:
        """The struct of the C ABI for these arrays. It keeps them alive."""
        f, owners = self.format, []
        rows, cols = rows_of(self.shape)

        def view(given: Any, shape: tuple[int, int], coded: Any = F32) -> Any:
            if given is None:
                return None
            if isinstance(given, np.ndarray) or not on_cuda(given):
                x: Any = np.asarray(given, order="C")
            else:
                x = read("Quantized", "a part", given, coded).contiguous()
            owners.append(x)
            if x.size != shape[0] * shape[1]:
                raise ValueError(
                    f"Quantized: an array of {x.size} elements where {shape[0]}x{shape[1]} belong; "
                    f"{self.scaling} of shape {self.shape} decides that"
                )
            return POINTER(View)(matrix(x, *shape))

        data, scales = encoding_shapes(self.scaling, rows, cols, False)
        columnwise_data, columnwise_scales = encoding_shapes(self.scaling, rows, cols, True)
        kind = _scale_dtype(self.scaling)
        t = Tensor(
            scaling=self.scaling.encode(),
            dtype=code_of(f.dtype),
            swizzled=f.swizzled,
            data=view(self.data, data, f.dtype),
            scale_inv=view(self.scale_inv, scales, kind),
            columnwise_data=view(self.columnwise_data, columnwise_data, f.dtype),
            columnwise_scale_inv=view(self.columnwise_scale_inv, columnwise_scales, kind),
        )
        if written:
            if f.power_of_two is not None:
                t.power_of_two = POWER_OF_TWO["power_of_two" if f.power_of_two else "exact_scale"]
            t.eps = f.eps
            mode = scaling_of(self.scaling)
            t.amax_given = mode.single and not mode.scale_given and f.amax is not None
            t.scale = view(self._scale, (1, 1))
            t.amax = view(self.amax, (1, 1))
            t.health = view(self._health, (1, 3))
        t.owners = owners
        common("Quantized", ((f"part {i} of its memory", x) for i, x in enumerate(owners)))
        return t

    def where(self) -> Host:
        """The place of its arrays."""
        data = self.columnwise_data if self.data is None else self.data
        if data is None or isinstance(data, np.ndarray) or not on_cuda(data):
            return HOST
        return read("Quantized", "data", data, self.format.dtype).place

    def dequantize(self, dtype: Any = None) -> Array:
        """The values data*scale_inv in `dtype`, by default the dtype of the original tensor."""
        where = self.where()
        kind = self.dtype if dtype is None else dtype_named("dequantize", dtype)
        y = where.empty(self.shape, kind)
        _run(self.c_tensor(), matrix(y), where)
        return result(y)  # type: ignore[no-any-return]

    def requantize(self, format: Format | str, **settings: Any) -> Quantized:  # noqa: A002
        """Converts to another format in one pass. Settings as for tenon.quantize."""
        where = self.where()
        q = _read_format(format, **settings).empty(self.shape, self.dtype, where)
        _run(self.c_tensor(), q.c_tensor(written=True), where)
        return q

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.dequantize()
        return found if dtype is None else found.astype(dtype)

    def _facts(self) -> list[tuple[str, str]]:
        f, n = self.format, math.prod(self.shape) * self.dtype.itemsize
        sides = {"rowwise": self.data, "columnwise": self.columnwise_data}
        facts = [
            ("shape", "x".join(map(str, self.shape)) or "one number"),
            ("numbers", f"{f.dtype.name}, was {self.dtype.name}"),
            ("scaling", f"{f.scaling}, {_shared(f.scaling)}"),
            ("encodings", " and ".join(s for s, a in sides.items() if a is not None) or "none"),
            ("bytes", f"{self.nbytes} ({n} as {self.dtype.name})"),
        ]
        if scaling_of(f.scaling).single and self.scale_inv is not None:
            facts.append(("scale_inv", f"{float(self.scale_inv.reshape(-1)[0]):g}"))
        if self.amax is not None:
            facts.append(("amax", f"{float(self.amax.reshape(-1)[0]):g}"))
        if self.health is not None:
            s, z, bad = self.health
            facts.append(("lost", f"{s} saturated, {z} flushed to zero, {bad} not finite"))
        return facts

    def __repr__(self) -> str:
        return "Quantized(" + "; ".join(f"{k}: {v}" for k, v in self._facts()) + ")"

    def _repr_html_(self) -> str:
        return _html.table("Quantized", self._facts())


def _read_format(given: Format | str, **settings: Any) -> Format:
    if isinstance(given, Format):
        if settings:
            raise TypeError(
                f"quantize: a Format and {', '.join(settings)} are both given; set them in the "
                "Format"
            )
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"quantize: the format is a {type(given).__name__}; pass e.g. 'mxfp8', "
            "'e5m2:current' or a tenon.Format"
        )
    return Format(given, **settings)


def _run(x: View | Tensor, y: View | Tensor, where: Host) -> None:
    args = QuantizeArgs()
    place(args, x=x, y=y)
    where.run(lib.tenon_quantize, ("native", "once"), byref(args))


def operand(op: str, name: str, x: Any) -> Operand:
    """Converts an array or a Quantized to the input of a call."""
    if isinstance(x, Quantized):
        c = x.c_tensor()
        return Operand(x.shape, x.dtype, c, c.owners[0] if c.owners else x)
    found = foldable(array(op, name, x))
    return Operand(found.shape, found.dtype, matrix(found), found)


def output(
    shape: tuple[int, ...], dtype: Any, quantize: Format | str | None, where: Host
) -> tuple[Any, View | Tensor]:
    """Allocates the result of a call, plain or encoded. Returns it with its struct."""
    if quantize is None:
        y = where.empty(shape, dtype)
        return y, matrix(y)
    q = _read_format(quantize).empty(shape, dtype, where)
    return q, q.c_tensor(written=True)


def quantize(
    x: Any,
    format: Format | str,  # noqa: A002
    *,
    dtype: Any = "e4m3",
    rowwise: bool = True,
    columnwise: bool = False,
    scale: Any = None,
    amax: Any = None,
    eps: float = 0.0,
    power_of_two: bool | None = None,
    swizzled: bool = False,
    health: bool = False,
) -> Quantized:
    """Quantises x to FP8: q = cast(v*scale), with scale_inv = 1/scale.

    `format` is "delayed", "current", "mxfp8", "block1x128" or "block128x128", one of these with a
    dtype ("e5m2:current"), or a `Format`, which already contains the other settings. x is an array,
    an object with __dlpack__, or another Quantized.

    >>> q = tenon.quantize(x, "mxfp8", columnwise=True)
    >>> q.data, q.scale_inv, q.dequantize()
    """
    if isinstance(format, str):
        format = Format(  # noqa: A001
            *(format, dtype, rowwise, columnwise, scale, amax, eps, power_of_two, swizzled, health)
        )
    elif isinstance(format, Format):
        given = (dtype, rowwise, columnwise, scale, amax, eps, power_of_two, swizzled, health)
        if given != ("e4m3", True, False, None, None, 0.0, None, False, False):
            raise TypeError(
                "quantize: a Format and further settings are both given; set them in the Format"
            )
    source = operand("quantize", "x", x)
    where = place_of(source.owner)
    q = _read_format(format).empty(source.shape, source.dtype, where)
    _run(source.c, q.c_tensor(written=True), where)
    return q


def dequantize(x: Quantized, dtype: Any = None) -> Array:
    """The values data*scale_inv in `dtype`, by default the dtype of the original tensor."""
    if not isinstance(x, Quantized):
        raise TypeError(
            f"dequantize: x is a {type(x).__name__}; it takes a tenon.Quantized (codes alone have "
            "no scale)"
        )
    return x.dequantize(dtype)


def delayed_update(
    history: Array,
    scale: Array,
    dtype: Any = "e4m3",
    *,
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """Updates scales in place from a history of amax: scale = max(dtype)*2^-margin / amax.

    `history` is float32 [L, n] (or [L] for one tensor). `scale` is float32 [n]. Row 0 is the amax
    since the last update. It moves to the end, and older rows move up. amax is the largest finite
    entry, or that of row 0 if `most_recent`.
    """
    op = "delayed_update"
    for name, x in (("history", history), ("scale", scale)):
        if not isinstance(x, np.ndarray) and on_cuda(x):
            raise NotImplementedError(
                f"{op}: {name} is on CUDA; here the update is the CPU's, use "
                "tenon.torch.quantizer.delayed_update for tensors of torch"
            )
    h, s = in_place(op, "history", history), in_place(op, "scale", scale)
    if not isinstance(margin, (int, np.integer)) or isinstance(margin, bool):
        raise TypeError(f"{op}: margin={margin!r}; it must be a whole number, of powers of two")
    if h.ndim not in (1, 2):
        raise ValueError(f"{op}: history has {h.ndim} dimensions; it must be [L, n] or [L]")
    code = code_of(dtype_named(op, dtype, FP8))
    # The history of one tensor is a column.
    past = matrix(h) if h.ndim == 2 else matrix(h, h.size, 1)
    if s.ndim > 1 or not s.flags.c_contiguous:
        raise ValueError(f"{op}: scale has the shape {s.shape}; it must be [n] and contiguous")
    new = matrix(s, 1, s.size)
    check(lib.tenon_delayed_update(past, new, code, int(margin), int(most_recent), options()))
