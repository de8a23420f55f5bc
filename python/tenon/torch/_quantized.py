"""The quantised tensor: codes, scales, and a straight-through gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .. import _lib
from .._format import scaling_of
from .._plan import Encoding, Format
from . import _call, _cuda, _watch
from ._dynamo import one_break

_PARTS = ("data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_dtype_of(given: Any) -> torch.dtype:
    """The 8-bit torch dtype for a dtype, for "e4m3"/"e5m2", or for an enum with such a name."""
    if given in FP8.values():
        return given
    text = given if isinstance(given, str) else getattr(given, "name", "")
    for name, dtype in FP8.items():
        if name in str(text).lower():
            return dtype
    raise ValueError(
        f"tenon: fp8_dtype={given!r}; it must be torch.float8_e4m3fn or torch.float8_e5m2, "
        "or 'e4m3' or 'e5m2'"
    )


class QuantizedTensor:
    """8-bit codes with their scales: x = data*scale_inv.

    data                 codes of `shape`, rowwise; None if only the columnwise encoding exists
    scale_inv            float32, or uint8 holding E8M0 for "mxfp8"
    columnwise_data      codes for a GEMM that sums over rows: [K, M], for "mxfp8" like data
    columnwise_scale_inv its scales; the same tensor as scale_inv if there is only one scale
    shape, dtype         of the original tensor; leading dimensions are folded into rows
    fp8_dtype, scaling   of the codes; scaling is "delayed", "current", "mxfp8", "block1x128",
                         "block128x128"

    It is not a torch.Tensor. The gradient of `dequantize()` is passed unchanged to the tensor that
    was quantised (straight-through). Copies and pickles are detached.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fp8_dtype: Any,
        scaling: str,
        *,
        data: torch.Tensor | None = None,
        scale_inv: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        columnwise_scale_inv: torch.Tensor | None = None,
        swizzled: bool = False,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.fp8_dtype = fp8_dtype_of(fp8_dtype)
        self.scaling = scaling
        self.data = data
        self.scale_inv = scale_inv
        self.columnwise_data = columnwise_data
        self.columnwise_scale_inv = columnwise_scale_inv
        self.swizzled = swizzled
        # Carries the gradient: a tensor of `shape` in the graph, without its own memory.
        self._handle: torch.Tensor | None = None
        # Fields that a quantizer adds for the call that writes this tensor.
        self._write: dict[str, Any] = {}

    @property
    def requires_grad(self) -> bool:
        return self._handle is not None and self._handle.requires_grad

    @property
    def device(self) -> torch.device:
        data = self.columnwise_data if self.data is None else self.data
        return torch.device("cpu") if data is None else data.device

    @property
    def is_cpu(self) -> bool:
        data = self.columnwise_data if self.data is None else self.data
        return data is None or data.is_cpu

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = {id(t): t for t in self.tensors() if t is not None}
        return sum(t.numel() * t.element_size() for t in parts.values())

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """data, scale_inv, columnwise_data, columnwise_scale_inv."""
        return self.data, self.scale_inv, self.columnwise_data, self.columnwise_scale_inv

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def plan_encoding(self) -> Encoding:
        """The formats of the codes, for a plan that reads them."""
        name = next(name for name, dtype in FP8.items() if dtype == self.fp8_dtype)
        return Encoding(
            # fp32 scales of blocks may be any numbers.
            Format(self.scaling, name, power_of_two=False if "block" in self.scaling else None),
            self.data is not None,
            self.columnwise_data is not None,
            self.swizzled,
        )

    def plan_parts(self, name: str) -> dict[str, torch.Tensor | None]:
        """The tensors by the names of a plan's buffers."""
        data, scale, columns, their_scale = self.tensors()
        if scaling_of(self.scaling).single:  # one scale for both encodings
            scale = scale if their_scale is None else their_scale
            their_scale = scale
        parts = {"": data, ".scale_inv": scale, ".t": columns, ".t.scale_inv": their_scale}
        return {name + end: t for end, t in parts.items()}

    def c_tensor(self) -> _lib.Tensor:
        """The struct for the C ABI. It keeps the views and this object alive."""
        fields = dict(self._write)
        own = (*self.tensors(), fields.get("scale"), fields.get("amax"))
        for t in own:
            if t is not None and not t.is_cpu:
                _cuda.index(zip((*_PARTS, "scale", "amax"), own, strict=True))
                break
        pointers = {
            name: _call.pointer(_call.memory(t, name))
            for name, t in (
                ("data", self.data),
                ("columnwise_data", self.columnwise_data),
                ("scale_inv", self.scale_inv),
                ("columnwise_scale_inv", self.columnwise_scale_inv),
            )
            if t is not None
        }
        for name in ("scale", "amax"):
            if name in fields:
                fields[name] = _call.pointer(_call.vector(fields[name], name))
        result = _lib.Tensor(
            scaling=self.scaling.encode(),
            dtype=_call.DTYPES[self.fp8_dtype],
            swizzled=int(self.swizzled),
            **pointers,
            **fields,
        )
        result.owner = self  # type: ignore[attr-defined]
        return result

    @one_break
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x = data*scale_inv as a plain tensor of `dtype`, by default that of the original tensor.

        Its gradient is passed unchanged to the tensor that was quantised.
        """
        _watch.check("dequantize", self._handle)
        if self._handle is not None and torch.is_grad_enabled():
            return Dequantize.apply(self._handle, self, dtype)
        return self.to_plain(dtype)

    def to_plain(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of dequantize(), without a gradient."""
        y = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        _call.quantize(None, x=self.c_tensor(), y=_call.view(y, "dtype"))
        return y

    def detach(self) -> QuantizedTensor:
        """The same codes, without a gradient."""
        other = copy.copy(self)
        other._handle = None
        return other

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot pickle 8-bit floats, so they are stored as bytes.
        codes = {
            name: None if t is None else t.view(torch.uint8)
            for name, t in (("data", self.data), ("columnwise_data", self.columnwise_data))
        }
        return {**self.__dict__, **codes, "_handle": None, "_write": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ("data", "columnwise_data"):
            if state[name] is not None:
                setattr(self, name, state[name].view(self.fp8_dtype))

    def __copy__(self) -> QuantizedTensor:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        sides = [
            side
            for side, t in (("rowwise", self.data), ("columnwise", self.columnwise_data))
            if t is not None
        ]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, scaling={self.scaling!r}, {'+'.join(sides)}{grad})"
        )


def handle(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that only carries a gradient: one element of memory for any shape."""
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype, device=device)


class Quantize(torch.autograd.Function):
    """Straight-through gradient: d quantize(x)/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: QuantizedTensor) -> torch.Tensor:
        _call.quantize(None, x=_call.view(_call.foldable(x), "x"), y=out.c_tensor())
        return handle(out.shape, out.dtype, out.device)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, origin: torch.Tensor, q: QuantizedTensor, dtype: torch.dtype | None
    ) -> torch.Tensor:
        return q.to_plain(dtype)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None
