"""Quantised tensors and quantizers.

A quantizer defines the 8-bit format, the scaling mode, and which of the two encodings (rowwise,
columnwise) are written. For codes q and scales s, q = cast(x*s) in every mode. The value is
q*scale_inv with scale_inv = 1/s, stored with the codes. Argument names are those of Transformer
Engine.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .. import _lib
from .._format import encoding_shapes, scaling_of
from .._plan import Format
from . import _call, _cuda, _watch
from ._dynamo import one_break
from ._quantized import FP8, Quantize, QuantizedTensor, fp8_dtype_of

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "delayed_update",
]

_CPU = torch.device("cpu")
_NAMES = {dtype: name for name, dtype in FP8.items()}
_SCALE_DTYPES = {"f32": torch.float32, "e8m0": torch.uint8}
_MODE_DEFAULT, _POWER_OF_TWO, _EXACT_SCALE = _lib.POWER_OF_TWO.values()


def _folded(shape: Sequence[int]) -> tuple[int, int]:
    if not shape:
        raise ValueError(
            "tenon: a 0-d tensor has no rows to quantise; give it one dimension, x.reshape(1)"
        )
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]


def _one_number(t: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.float32 or t.numel() != 1:
        told = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)
        raise ValueError(f"tenon: {name} is {told}; it must be a float32 tensor of one number")
    _check_written(t, name)
    return t


class _Number:
    """An attribute that is a float32 tensor of one number. Kernels read and write its memory."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type) -> Any:
        return self if of is None else of.__dict__.get(self._name)

    def __set__(self, of: Any, value: Any) -> None:
        of.__dict__[self._name] = _one_number(value, f"{type(of).__name__}: {self._name}")


class _NumberOrNone(_Number):
    def __set__(self, of: Any, value: Any) -> None:
        if value is None:
            of.__dict__[self._name] = None
        else:
            super().__set__(of, value)


def _check_written(t: torch.Tensor, name: str) -> None:
    """Checks a tensor that a call writes in place."""
    if t.is_neg():
        raise ValueError(
            f"tenon: {name} has torch's negative bit, but is written in place; pass a copy without "
            "it, by .resolve_neg()"
        )


class Quantizer:
    """Base class of quantizers. There is one subclass per scaling mode.

    quantize(x), or a call of the object, encodes a tensor. empty(shape, dtype) allocates one for an
    op to write, and finish(q) is called after that. set_usage(rowwise=, columnwise=) chooses the
    encodings.
    """

    scaling: str

    def __init__(self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.fp8_dtype = fp8_dtype_of(fp8_dtype)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.swizzled = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Sets the encodings that are written from now on. None: no change."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """Another object with the same settings. It shares the scale and amax tensors."""
        return copy.copy(self)

    def is_quantizable(self, x: torch.Tensor) -> bool:
        """True for any shape with at least one dimension."""
        return x.dim() > 0

    def _written(self, device: torch.device) -> dict[str, Any]:
        """Fields of tenon_tensor other than memory, for the call that writes."""
        return {}

    def plan_format(self) -> Format | None:
        """The format of this quantizer in a plan. None if a plan does not have it."""
        return None

    def plan_state(self) -> dict[str, torch.Tensor]:
        """The tensors that a plan reads and writes, by the end of their names."""
        return {}

    def _format(self, **rule: Any) -> Format | None:
        if not type(self).__module__.startswith(__package__ or ""):
            return None  # a subclass may encode in another way
        return Format(self.scaling, _NAMES[self.fp8_dtype], **rule)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ) -> QuantizedTensor:
        """Allocates a tensor of `shape` that represents values of `dtype`."""
        if not self.rowwise_usage and not self.columnwise_usage:
            raise ValueError(
                f"tenon: {type(self).__name__} has rowwise=False and columnwise=False; "
                "a tensor needs one, call set_usage(rowwise=True)"
            )
        rows, cols = _folded(shape)
        out = QuantizedTensor(shape, dtype, self.fp8_dtype, self.scaling, swizzled=self.swizzled)
        out._write = self._written(device)
        mode = scaling_of(self.scaling)
        scale_dtype = _SCALE_DTYPES[mode.scale_dtype]
        if self.rowwise_usage:
            _, scales = encoding_shapes(self.scaling, rows, cols, False)
            out.data = torch.empty(tuple(shape), dtype=self.fp8_dtype, device=device)
            out.scale_inv = torch.empty(scales, dtype=scale_dtype, device=device)
        if self.columnwise_usage:
            data, scales = encoding_shapes(self.scaling, rows, cols, True)
            like = data if mode.transposes else tuple(shape)
            out.columnwise_data = torch.empty(like, dtype=self.fp8_dtype, device=device)
            out.columnwise_scale_inv = torch.empty(scales, dtype=scale_dtype, device=device)
        if mode.single:
            out.scale_inv = torch.empty(1, dtype=scale_dtype, device=device)
            out.columnwise_scale_inv = out.scale_inv
        return out

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Same as empty(), without a gradient. The default device is the CPU."""
        return self.empty(shape, dtype, _CPU if device is None else torch.device(device))

    def finish(self, q: QuantizedTensor) -> QuantizedTensor:
        """Called after an op has written `q`. Drops references to the quantizer's tensors."""
        q._write = {}
        return q

    @one_break
    def quantize(
        self,
        x: torch.Tensor | QuantizedTensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Encodes x in this format, in one pass (two passes if the scale is computed from x).

        The result has a straight-through gradient to x. A quantised x is re-encoded. `out` is
        written in place. `dtype` is the nominal dtype, by default that of x.
        """
        _watch.check(self, x)
        if isinstance(x, QuantizedTensor):
            target = self._target(out, x, dtype or x.dtype)
            _call.quantize(None, x=x.c_tensor(), y=target.c_tensor())
            target._handle = x._handle
            return self._finished(target, out)
        if not isinstance(x, torch.Tensor):
            raise _call.refusal(x, "x")
        target = self._target(out, x, dtype or x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            target._handle = Quantize.apply(x, target)
        else:
            _call.quantize(None, x=_call.view(_call.foldable(x), "x"), y=target.c_tensor())
            target._handle = None
        return self._finished(target, out)

    __call__ = quantize

    def _finished(self, target: QuantizedTensor, out: QuantizedTensor | None) -> QuantizedTensor:
        if out is not None:  # autograd must see that saved codes were overwritten
            for t in target.tensors():
                if t is not None:
                    torch.autograd.graph.increment_version(t)
        return self.finish(target)

    def _target(
        self, out: QuantizedTensor | None, x: torch.Tensor | QuantizedTensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        shape = x.shape
        if out is None:
            return self.empty(shape, dtype, x.device)
        if not isinstance(out, QuantizedTensor):
            raise TypeError(
                f"tenon: out is a {type(out).__name__}; it must be a QuantizedTensor, make it with "
                "this quantizer's empty()"
            )
        if out.shape != shape or out.scaling != self.scaling or out.fp8_dtype != self.fp8_dtype:
            raise ValueError(
                f"tenon: out is {out!r}, but the result is {tuple(shape)} {self.fp8_dtype} "
                f"{self.scaling}; leave out away, or make it with this quantizer's empty()"
            )
        usages = out.data is not None, out.columnwise_data is not None
        if usages != (self.rowwise_usage, self.columnwise_usage) or out.swizzled != self.swizzled:
            raise ValueError(
                f"tenon: out is {out!r}, swizzled={out.swizzled}, but {self!r}, "
                f"swizzled={self.swizzled} writes it; make it with this quantizer's empty()"
            )
        out._write = self._written(out.device)
        return out

    @one_break
    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """dst = quantize(src) in place. A noop_flag of 1 leaves dst unchanged."""
        if noop_flag is not None and noop_flag.item() == 1:
            return dst
        return self.quantize(src, out=dst)

    @one_break
    def calibrate(self, x: torch.Tensor) -> None:
        """Updates the statistics for later scales. Does nothing if scales come from the tensor."""

    def __repr__(self) -> str:
        name = next(name for name, dtype in FP8.items() if dtype == self.fp8_dtype)
        return (
            f"{type(self).__name__}({name}, rowwise={self.rowwise_usage}, "
            f"columnwise={self.columnwise_usage})"
        )


class Float8Quantizer(Quantizer):
    """Delayed scaling: q = cast(x*scale) with the given scale, one value per tensor.

    In the same pass `scale` is read and `amax` is updated: amax = max(amax, max |x|). Both are
    float32 tensors of one element owned by the caller, e.g. slot 0 of a history. See
    delayed_update().
    """

    scaling = "delayed"
    scale, amax = _Number(), _Number()

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax = scale, amax

    def _written(self, device: torch.device) -> dict[str, Any]:
        return {"scale": self.scale, "amax": self.amax}

    def plan_format(self) -> Format | None:
        return self._format()

    def plan_state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "amax": self.amax}

    @one_break
    def calibrate(self, x: torch.Tensor) -> None:
        """amax = max(amax, max |x|)."""
        found = torch.empty(1, dtype=torch.float32, device=x.device)
        _call.quantize(None, x=_call.view(_call.foldable(x), "x"), amax=_call.vector(found, "amax"))
        # Maximum of the bit patterns, so that NaN is the largest.
        bits = self.amax.view(torch.int32)
        bits.copy_(torch.maximum(bits, found.view(torch.int32).reshape(bits.shape)))


class Float8CurrentScalingQuantizer(Quantizer):
    """Current scaling: scale = max(format)/max(max |x|, amax_epsilon), one value per tensor.

    The amax is computed first, so there are two passes. force_pow_2_scales rounds the scale down to
    a power of two. With use_existing_amax, the given `amax` (float32, one element) is read instead.
    Otherwise the computed amax is written to `amax`, if given.
    """

    scaling = "current"
    amax = _NumberOrNone()

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if with_amax_reduction or amax_reduction_group is not None:
            raise NotImplementedError(
                "tenon: Float8CurrentScalingQuantizer: with_amax_reduction=True; the amax is not "
                "reduced over ranks here: reduce it yourself and pass use_existing_amax=True, amax="
            )
        if use_existing_amax and amax is None:
            raise ValueError(
                "tenon: Float8CurrentScalingQuantizer: use_existing_amax=True without amax; give "
                "a float32 tensor of one number"
            )
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon
        self.use_existing_amax = use_existing_amax
        self.amax = amax

    def _written(self, device: torch.device) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "eps": self.amax_epsilon,
            "power_of_two": _POWER_OF_TWO if self.force_pow_2_scales else _MODE_DEFAULT,
        }
        if self.amax is not None:
            fields.update(amax=self.amax, amax_given=int(self.use_existing_amax))
        elif device.type != "cpu":  # the library allocates it on the CPU only
            fields["amax"] = torch.empty(1, dtype=torch.float32, device=device)
        return fields

    def plan_format(self) -> Format | None:
        if self.amax is not None:
            return None
        return self._format(eps=self.amax_epsilon, power_of_two=self.force_pow_2_scales or None)


class MXFP8Quantizer(Quantizer):
    """MXFP8: one power of two per 32 adjacent elements of a row (rowwise) or a column (columnwise).

    Scales are E8M0 codes in uint8: code e is 2^(e - 127). optimize_for_gemm writes them in the
    order of the tensor cores (swizzled).
    """

    scaling = "mxfp8"

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if with_2d_quantization:
            raise NotImplementedError(
                "tenon: MXFP8Quantizer: with_2d_quantization=True; scales of squares are offered "
                "by Float8BlockQuantizer(block_scaling_dim=2)"
            )
        self.swizzled = optimize_for_gemm

    def plan_format(self) -> Format | None:
        return self._format()  # a plan chooses the order of its scales


class Float8BlockQuantizer(Quantizer):
    """Block scaling: scale = max(format)/max(max |x|, amax_epsilon) per block.

    block_scaling_dim=1: 128 adjacent elements of a row (rowwise) or a column (columnwise).
    block_scaling_dim=2: blocks of 128 x 128. Scales are float32, and powers of two unless
    force_pow_2_scales=False.
    """

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(
                f"tenon: Float8BlockQuantizer: block_scaling_dim={block_scaling_dim}; it must be "
                "1 (1x128) or 2 (128x128)"
            )
        self.scaling = "block1x128" if block_scaling_dim == 1 else "block128x128"
        self.block_scaling_dim = block_scaling_dim
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales

    def _written(self, device: torch.device) -> dict[str, Any]:
        return {
            "eps": self.amax_epsilon,
            "power_of_two": _POWER_OF_TWO if self.force_pow_2_scales else _EXACT_SCALE,
        }

    def plan_format(self) -> Format | None:
        return self._format(eps=self.amax_epsilon, power_of_two=self.force_pow_2_scales)


@one_break
def delayed_update(
    history: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: Any = "e4m3",
    *,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """Updates scales in place from a history of amax, between two steps of delayed scaling.

    history is float32 [L, n] (or [L]), scale is float32 [n]. Row 0 is the amax of the calls since
    the last update. It moves to the end and is cleared, older rows move up, and scale =
    max(format)*2^-margin/amax. amax is the largest finite value of the history, or of row 0 for
    amax_compute_algo="most_recent". A column whose row 0 is 0 is not changed.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(
            f"tenon: delayed_update: amax_compute_algo={amax_compute_algo!r}; it must be 'max' or "
            "'most_recent'"
        )
    for t, name in ((history, "history"), (scale, "scale")):
        if not isinstance(t, torch.Tensor):
            raise _call.refusal(t, f"delayed_update: {name}")
        _check_written(t, name)
    if not isinstance(margin, int) or isinstance(margin, bool):
        raise TypeError(
            f"tenon: delayed_update: margin={margin!r}; it must be a whole number, of powers of two"
        )
    if history.dim() not in (1, 2) or not (scale.is_contiguous() or scale.dim() < 2):
        raise ValueError(
            f"tenon: delayed_update: history has shape {tuple(history.shape)} and scale "
            f"{tuple(scale.shape)}; they must be [L, n] and [n]"
        )
    rows = history if history.dim() == 2 else history.unsqueeze(1)
    row = scale.reshape(1, -1)
    if not (history.is_cpu and scale.is_cpu):
        _update_there(rows, row, fp8_dtype_of(fp8_dtype), margin, amax_compute_algo == "max")
        return
    past, now = _call.view(rows, "history"), _call.view(row, "scale")
    code = _call.DTYPES[fp8_dtype_of(fp8_dtype)]
    recent = int(amax_compute_algo == "most_recent")
    _lib.check(_lib.lib.tenon_delayed_update(past, now, code, margin, recent, None))


def _update_there(
    history: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, margin: int, largest: bool
) -> None:
    """The update on devices other than the CPU, with torch kernels. Nothing is read back."""
    if history.dtype != torch.float32 or scale.dtype != torch.float32:
        raise TypeError(
            f"tenon: delayed_update: history is {history.dtype} and scale {scale.dtype}; they must "
            "be float32"
        )
    _cuda.same("history", history, "scale", scale)
    if not len(history) or scale.shape != (1, history.shape[1]):
        raise ValueError(
            f"tenon: delayed_update: history is {tuple(history.shape)} and scale has "
            f"{scale.numel()} numbers; they must be [L, n] with L ≥ 1, and [n]"
        )
    if abs(margin) > 64:
        raise ValueError(f"tenon: delayed_update: margin={margin}; it must lie in [-64, 64]")
    top = torch.finfo(dtype).max * 2.0**-margin
    rolled, made = updated(history, scale, top, largest)
    scale.copy_(made)
    history.copy_(rolled)


def updated(
    history: torch.Tensor, scale: torch.Tensor, top: float, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next history [..., L, n] and scale [..., 1, n], by torch kernels."""
    last, old = history[..., :1, :], history[..., 1:, :]
    seen = history if largest else last
    most = torch.where(seen.isfinite(), seen, 0.0).amax(-2, keepdim=True)
    made = torch.full_like(most, top).div_(most).clamp_(max=torch.finfo(torch.float32).max)
    scale = torch.where(most > 0, made, scale).where(last != 0, scale)
    rolled = torch.cat((torch.zeros_like(last), old[..., 1:, :], last), -2)
    rolled = rolled[..., : history.shape[-2], :]
    return torch.where(last != 0, rolled, history), scale
