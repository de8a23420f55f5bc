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
from .._format import scaling_of
from .._plan import Format
from . import _call, _cuda, _watch
from ._dynamo import one_break
from ._quantized import FP8, Encode, QuantizedTensor, allocate, fp8_dtype_of

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "delayed_update",
]

_GROUP = "amax_reduction_group"
_NAMES = {dtype: name for name, dtype in FP8.items()}
_MODE_DEFAULT, _POWER_OF_TWO, _EXACT_SCALE = _lib.POWER_OF_TWO.values()


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


def _operand(x: torch.Tensor) -> Any:
    """An input, plain or encoded, for the C ABI."""
    if isinstance(x, QuantizedTensor):
        if x.is_matrix:
            return x.c_tensor()
        x = x.decode()
    return _call.view(_call.foldable(x), "x")


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The maximum of the bits of |x|, as float32 of one element."""
    found = torch.empty(1, dtype=torch.float32, device=x.device)
    plain = x.decode() if isinstance(x, QuantizedTensor) else x
    _call.quantize(None, x=_operand(plain), amax=_call.vector(found, "amax"))
    return found


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The memory of codes, scales or an amax as whole numbers."""
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int32)


def _count_writes(q: QuantizedTensor, itself: bool = False) -> None:
    """Tells autograd that codes were overwritten, which it may have saved."""
    for t in (*q.parts().values(), *((q,) if itself else ())):
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)


class Quantizer:
    """Base class of quantizers. There is one subclass per scaling mode.

    quantize(x), or a call of the object, encodes a tensor. make_empty(shape) allocates one, and
    update_quantized(x, q) writes it. set_usage(rowwise=, columnwise=) chooses the encodings.

    internal           results carry no gradient
    optimize_for_gemm  scales in the order of the tensor cores, where the mode has one
    """

    scaling: str
    internal = False
    optimize_for_gemm = False
    # All settings as a text, which graphs of torch.compile guard.
    _settings = ""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not isinstance(value, torch.Tensor):
            own = {n: v for n, v in self.__dict__.items() if not isinstance(v, torch.Tensor)}
            own.pop("_settings", None)
            self.__dict__["_settings"] = f"{type(self).__qualname__} {own}"

    def __init__(self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.fp8_dtype = fp8_dtype_of(fp8_dtype)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

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

    def on(self, device: torch.device) -> Quantizer:
        """The same settings for tensors on `device`. Scale and amax are copied there."""
        made, state = self.copy(), self._tensors()
        for name, t in state.items():
            setattr(made, name, t.to(device))
        return made if state else self

    def shared_by(self, group: Any) -> Quantizer:
        """The quantizer for the shards of one tensor on the ranks of `group`."""
        return self

    def is_quantizable(self, x: torch.Tensor) -> bool:
        """True for any shape with at least one dimension."""
        return x.dim() > 0

    @property
    def swizzled(self) -> bool:
        """Whether scales are written in the order of the tensor cores."""
        return self.optimize_for_gemm and scaling_of(self.scaling).scale_dtype == "e8m0"

    @property
    def fuses(self) -> bool:
        """Whether an op may write the codes itself. If not, its result is encoded after it."""
        return True

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of its state, by attribute."""
        return {}

    def written(self, device: torch.device) -> dict[str, Any]:
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

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Allocates a tensor of `shape` for numbers of `dtype`. The default device is torch's."""
        if not self.rowwise_usage and not self.columnwise_usage:
            raise ValueError(
                f"tenon: {type(self).__name__} has rowwise=False and columnwise=False; "
                "a tensor needs one, call set_usage(rowwise=True)"
            )
        if type(device) is not torch.device:
            device = torch.get_default_device() if device is None else torch.device(device)
        made = allocate(
            shape,
            dtype,
            self.fp8_dtype,
            self.scaling,
            self.rowwise_usage,
            self.columnwise_usage,
            device,
            self.swizzled,
            self,
            pin_memory,
        )
        made.requires_grad_(requires_grad)
        return made

    @one_break
    def quantize(
        self,
        x: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Encodes x in this format, in one pass (two passes if the scale is computed from x).

        The result has a straight-through gradient to x. A quantised x is re-encoded. `out` is
        written in place. `dtype` is the nominal dtype, by default that of x.
        """
        _watch.check(self, x)
        if not isinstance(x, torch.Tensor):
            raise _call.refusal(x, "x")
        if out is not None:
            self._check_out(out, x)
        dtype = dtype or x.dtype
        if x.requires_grad and torch.is_grad_enabled() and not self.internal:
            target: QuantizedTensor = Encode.apply(x, self, dtype, out)
            if out is not None:
                _count_writes(target)
            return target
        target = self.make_empty(x.shape, dtype=dtype, device=x.device) if out is None else out
        self.write(x, target)
        if out is not None:
            _count_writes(target, True)
        return target

    __call__ = quantize

    def write(self, x: torch.Tensor, target: QuantizedTensor) -> None:
        """Writes the encodings that `target` has, without checks."""
        _call.quantize(None, x=_operand(x), y=target.c_tensor(self.written(target.device)))

    def _check_out(self, out: Any, x: torch.Tensor, usages: bool = True) -> None:
        if not isinstance(out, QuantizedTensor):
            raise TypeError(
                f"tenon: out is a {type(out).__name__}; it must be a QuantizedTensor, make it with "
                "this quantizer's make_empty()"
            )
        same = out.scaling == self.scaling and out.fp8_dtype == self.fp8_dtype
        if out.shape != x.shape or not same or not out.is_matrix:
            raise ValueError(
                f"tenon: out is {out!r}, but the result is {tuple(x.shape)} {self.fp8_dtype} "
                f"{self.scaling}; leave out away, or make it with this quantizer's make_empty()"
            )
        has = out.rowwise_data is not None, out.columnwise_data is not None
        own = self.rowwise_usage, self.columnwise_usage
        if usages and (has != own or out.swizzled != self.swizzled):
            raise ValueError(
                f"tenon: out is {out!r}, swizzled={out.swizzled}, but {self!r}, "
                f"swizzled={self.swizzled} writes it; make it with this quantizer's make_empty()"
            )
        if out.device != x.device:
            raise ValueError(f"tenon: out is on {out.device} and x on {x.device}; use one device")

    @one_break
    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """dst = quantize(src) in place, in the encodings that dst has, without a gradient.

        A noop_flag of 1 leaves dst and the amax unchanged. It is read on its device.
        """
        _watch.check(self, src, dst)
        if not isinstance(src, torch.Tensor):
            raise _call.refusal(src, "src")
        self._check_out(dst, src, usages=False)
        if noop_flag is None:
            self.write(src, dst)
            _count_writes(dst, True)
            return dst
        _one_number(noop_flag, "noop_flag")
        if noop_flag.is_cpu:  # reading it costs nothing
            return dst if noop_flag.item() == 1 else self.update_quantized(src, dst)
        stays = (noop_flag == 1).reshape(())
        kept = [*dst.parts().values(), *self._tensors().values()]
        before = [_bits(t).clone() for t in kept]
        self.write(src, dst)
        for t, was in zip(kept, before, strict=True):
            _bits(t).copy_(torch.where(stays, was, _bits(t)))
        _count_writes(dst, True)
        return dst

    @one_break
    def calibrate(self, x: torch.Tensor) -> None:
        """Updates the statistics for later scales. Does nothing if scales come from the tensor."""

    # A process group is shared by copies, and is not pickled.
    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        made = memo[id(self)] = copy.copy(self)
        for name, value in self.__dict__.items():
            if name != _GROUP:
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    def __copy__(self) -> Quantizer:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in self.__dict__.items() if n != _GROUP}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A file may say anything: the attributes check their values.
        self.fp8_dtype = fp8_dtype_of(state["fp8_dtype"])
        if "scaling" in state:
            scaling_of(state["scaling"])
        for name, value in state.items():
            setattr(self, name, value)
        if hasattr(self, "use_existing_amax"):
            self.__dict__.setdefault(_GROUP, None)

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

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "amax": self.amax}

    def written(self, device: torch.device) -> dict[str, Any]:
        return self._tensors()

    def plan_format(self) -> Format | None:
        return self._format()

    def plan_state(self) -> dict[str, torch.Tensor]:
        return self._tensors()

    @one_break
    def calibrate(self, x: torch.Tensor) -> None:
        """amax = max(amax, max |x|)."""
        # Maximum of the bit patterns, so that NaN is the largest.
        bits = _bits(self.amax)
        bits.copy_(torch.maximum(bits, _bits(_amax(x)).reshape(bits.shape)))


class Float8CurrentScalingQuantizer(Quantizer):
    """Current scaling: scale = max(format)/max(max |x|, amax_epsilon), one value per tensor.

    The amax is computed first, so there are two passes. force_pow_2_scales rounds the scale down to
    a power of two. With use_existing_amax, the given `amax` (float32, one element) is read instead.
    Otherwise the computed amax is written to `amax`, if given. With with_amax_reduction, all ranks
    of amax_reduction_group (None: all ranks) share the largest amax, so each must call it.
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
        if use_existing_amax and amax is None:
            raise ValueError(
                "tenon: Float8CurrentScalingQuantizer: use_existing_amax=True without amax; give "
                "a float32 tensor of one number"
            )
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon
        self.use_existing_amax = use_existing_amax
        self.amax = amax

    @property
    def fuses(self) -> bool:
        return not self.with_amax_reduction

    def shared_by(self, group: Any) -> Quantizer:
        if self.with_amax_reduction:
            return self
        made = copy.copy(self)
        made.with_amax_reduction, made.amax_reduction_group = True, group
        return made

    def write(self, x: torch.Tensor, target: QuantizedTensor) -> None:
        fields = self.written(target.device)
        if self.with_amax_reduction and not self.use_existing_amax:
            found = _amax(x)
            torch.distributed.all_reduce(
                _bits(found), torch.distributed.ReduceOp.MAX, self.amax_reduction_group
            )
            if self.amax is not None:
                self.amax.copy_(found.view(self.amax.shape))
            fields.update(amax=found, amax_given=1)
        _call.quantize(None, x=_operand(x), y=target.c_tensor(fields))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.amax is None else {"amax": self.amax}

    def written(self, device: torch.device) -> dict[str, Any]:
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
        if self.amax is not None or self.with_amax_reduction:
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
        self.optimize_for_gemm = optimize_for_gemm

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

    def written(self, device: torch.device) -> dict[str, Any]:
        return {
            "eps": self.amax_epsilon,
            "power_of_two": _POWER_OF_TWO if self.force_pow_2_scales else _EXACT_SCALE,
        }

    def plan_format(self) -> Format | None:
        return self._format(eps=self.amax_epsilon, power_of_two=self.force_pow_2_scales)


def quantizer_like(q: QuantizedTensor) -> Quantizer:
    """A quantizer of the format of `q`. The scale of "delayed" is that of its codes."""
    sides: dict[str, Any] = {
        "rowwise": q.rowwise_data is not None,
        "columnwise": q.columnwise_data is not None,
    }
    if q.scaling == "delayed":
        assert q.rowwise_scale_inv is not None
        scale = q.rowwise_scale_inv.reciprocal()
        return Float8Quantizer(scale, torch.zeros_like(scale), q.fp8_dtype, **sides)
    if q.scaling == "current":
        return Float8CurrentScalingQuantizer(q.fp8_dtype, **sides)
    if q.scaling == "mxfp8":
        return MXFP8Quantizer(q.fp8_dtype, optimize_for_gemm=q.swizzled, **sides)
    dim = 1 if q.scaling == "block1x128" else 2
    return Float8BlockQuantizer(q.fp8_dtype, block_scaling_dim=dim, **sides)


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


torch.serialization.add_safe_globals(
    [Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer]
)
