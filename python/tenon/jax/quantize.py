"""Quantizers and quantised tensors, as pytrees.

A quantizer sets the encoding of a tensor: dtype, scaling mode, rowwise, columnwise or both. A
ScaledTensor holds the codes and scale_inv = 1/scale. value = code * scale_inv.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._array import NAMES
from .._format import scaling_of
from .._lib import DTYPE, POWER_OF_TWO
from . import _ffi
from ._sharding import Split, place, vary, varying

__all__ = [
    "BlockScaleQuantizer",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "Float8BlockScaleQuantizer",
    "QuantizeLayout",
    "Quantizer",
    "ScaledTensor",
]

_NAMES: dict[Any, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_PLAIN = tuple(np.dtype(t) for t in (jnp.float32, jnp.float16, jnp.bfloat16))
_FP8 = tuple(np.dtype(t) for t in _NAMES.values())


class QuantizeLayout(enum.IntEnum):
    """The encodings to write. A GEMM that sums over the rows reads columnwise ones."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2

    @property
    def has_rowwise(self) -> bool:
        return self is not QuantizeLayout.COLWISE

    @property
    def has_colwise(self) -> bool:
        return self is not QuantizeLayout.ROWWISE


@dataclass(frozen=True)
class ScaledTensor:
    """An encoded tensor [..., K]. Absent parts are None.

    data and columnwise_data are FP8 codes. scale_inv and columnwise_scale_inv are their scales, in
    the shapes of the scaling mode for M x K, with leading dimensions folded into M. Columnwise data
    is transposed, [K, ...], except with mxfp8. amax is the largest |value| if the mode has it.
    """

    data: jax.Array | None
    scale_inv: jax.Array | None
    columnwise_data: jax.Array | None
    columnwise_scale_inv: jax.Array | None
    amax: jax.Array | None
    scaling: str
    dtype: np.dtype
    k_axes: int = 1  # number of axes that are columns: 2 for [..., inputs, H]
    swizzled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor before encoding."""
        if self.data is not None:
            return self.data.shape
        assert self.columnwise_data is not None
        shape = self.columnwise_data.shape
        if not scaling_of(self.scaling).transposes:
            return shape
        return shape[self.k_axes :] + shape[: self.k_axes]

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """code * scale_inv, in `dtype` or the original dtype. Uses rowwise data if present."""
        wanted = np.dtype(self.dtype if dtype is None else dtype)
        if wanted not in _PLAIN:
            raise TypeError(
                f"dequantize: dtype = {wanted}; it must be float32, float16 or bfloat16"
            )
        columnwise = self.data is None
        data = self.columnwise_data if columnwise else self.data
        scales = self.columnwise_scale_inv if columnwise else self.scale_inv
        assert data is not None and scales is not None
        if scales.ndim > (1 if scaling_of(self.scaling).single else 2):
            # Made under vmap: data and scales have one more leading axis.
            return jax.vmap(lambda t: t.dequantize(dtype))(self)
        call = _Dequantize(self.scaling, columnwise, self.swizzled, self.k_axes, wanted)
        return place(call, data, scales)[0]


jax.tree_util.register_dataclass(
    ScaledTensor,
    data_fields=["data", "scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"],
    meta_fields=["scaling", "dtype", "k_axes", "swizzled"],
)


@dataclass(frozen=True)
class _Dequantize:
    """The call of `ScaledTensor.dequantize`, on data and scales."""

    scaling: str
    columnwise: bool
    swizzled: bool
    k_axes: int
    dtype: np.dtype
    folds: ClassVar[bool] = False

    def _shape(self, data: Any) -> tuple[int, ...]:
        shape = tuple(data.shape)
        if not self.columnwise or not scaling_of(self.scaling).transposes:
            return shape
        return shape[self.k_axes :] + shape[: self.k_axes]

    def split(self, *arrays: Any) -> Split | None:
        """Splits along every axis if the tensor has one scale."""
        if not scaling_of(self.scaling).single:
            return None
        names = tuple(f"r{i}" for i in range(arrays[0].ndim))
        turned = names[self.k_axes :] + names[: self.k_axes] if self.columnwise else names
        return Split((names, ("one",)), (turned,), ("",), 0, ("one",))

    def run(self, *arrays: Any, partial: bool = False) -> tuple[jax.Array, ...]:
        """Runs the call."""
        axes = varying(*arrays)
        shape = self._shape(arrays[0])
        cut = len(shape) - self.k_axes
        call = jax.ffi.ffi_call(
            _ffi.DEQUANTIZE, jax.ShapeDtypeStruct(shape, self.dtype), vmap_method="sequential"
        )
        made = call(
            *(vary(a, axes) for a in arrays),
            scaling_mode=scaling_of(self.scaling).number,
            columnwise=self.columnwise,
            swizzled=self.swizzled,
            rows=math.prod(shape[:cut]),
            columns=math.prod(shape[cut:]),
        )
        return (vary(made, axes),)


@dataclass(frozen=True)
class Quantizer:
    """How a tensor is encoded in FP8. Use one of the subclasses.

    q_dtype is float8_e4m3fn or float8_e5m2 (or "e4m3", "e5m2"). q_layout is a QuantizeLayout.
    """

    q_dtype: Any = jnp.float8_e4m3fn
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE

    scaling: ClassVar[str] = ""

    def __post_init__(self) -> None:
        name = type(self).__name__
        try:
            dtype = np.dtype(_NAMES.get(self.q_dtype, self.q_dtype))
            known = dtype in _FP8
        except TypeError:
            known = False
        if not known:
            raise TypeError(
                f"{name}: q_dtype = {self.q_dtype!r}; it must be jnp.float8_e4m3fn or "
                "jnp.float8_e5m2"
            )
        object.__setattr__(self, "q_dtype", dtype)
        try:
            object.__setattr__(self, "q_layout", QuantizeLayout(self.q_layout))
        except ValueError as e:
            raise ValueError(
                f"{name}: q_layout = {self.q_layout!r}; it must be a QuantizeLayout: ROWWISE, "
                "COLWISE or ROWWISE_COLWISE"
            ) from e
        epsilon = getattr(self, "amax_epsilon", 0.0)
        if not 0 <= epsilon < np.inf:
            raise ValueError(
                f"{name}: amax_epsilon = {epsilon}; it must be finite and not negative"
            )

    @property
    def scale_dtype(self) -> Any:
        """The dtype of scale_inv."""
        return getattr(jnp, NAMES[DTYPE[scaling_of(self.scaling).scale_dtype]])

    def attributes(self) -> dict[str, Any]:
        """The optional FFI attributes of the format."""
        return {}

    def quantize(self, x: jax.Array) -> ScaledTensor:
        """x [..., K] encoded: code = cast(x * scale)."""
        from .cpp_extensions.activation import act_lu

        return act_lu(jnp.expand_dims(x, -2), ("x",), quantizer=self)


@dataclass(frozen=True)
class CurrentScaleQuantizer(Quantizer):
    """One scale for the tensor, from its own amax: scale = max / amax.

    amax_epsilon is the lower limit of the amax. force_pow_2_scales rounds the scale down to a power
    of two.
    """

    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    scaling: ClassVar[str] = "current"

    def attributes(self) -> dict[str, Any]:
        return _own_rule(self)


@dataclass(frozen=True)
class DelayedScaleQuantizer(Quantizer):
    """One scale for the tensor, from the amax of past steps: code = cast(x * scale).

    scale [1] and amax_history [L] are f32 and traced. `update` gives the quantizer of the next
    step. margin makes scales 2^margin smaller. amax_compute_algo is "max" (over the history) or
    "most_recent".
    """

    scale: jax.Array = field(default_factory=lambda: jnp.ones((1,), jnp.float32))
    amax_history: jax.Array = field(default_factory=lambda: jnp.zeros((1024,), jnp.float32))
    margin: int = 0
    amax_compute_algo: str = "max"

    scaling: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaleQuantizer: amax_compute_algo = {self.amax_compute_algo!r}; it must "
                "be 'max' or 'most_recent'"
            )
        if int(self.margin) != self.margin:
            raise ValueError(
                f"DelayedScaleQuantizer: margin = {self.margin}; it must be a whole number"
            )

    def update(self, amax: jax.Array | None = None) -> DelayedScaleQuantizer:
        """The quantizer after a step with `amax` (of one ScaledTensor, or of several).

        Let last = max(amax, history[0]). If last is 0, nothing changes. Otherwise the history
        rolls and ends with last, slot 0 becomes 0, and scale = max_of_q_dtype * 2^-margin / amax,
        over the finite entries. A pure function.
        """
        old = jnp.asarray(self.amax_history, jnp.float32)
        scale = jnp.asarray(self.scale, jnp.float32)
        if old.ndim != 1 or old.size == 0 or scale.shape != (1,):
            raise ValueError(
                f"DelayedScaleQuantizer.update: amax_history is {old.shape} and scale "
                f"{scale.shape}; they must be (L,) with L >= 1 and (1,), under vmap one each"
            )
        found = old[:1] if amax is None else jnp.append(jnp.ravel(amax).astype(jnp.float32), old[0])
        last = _largest(found)
        rolled = [old[2:], last[None]] if old.size > 1 else []
        history = jnp.concatenate([jnp.zeros(1, jnp.float32), *rolled])
        window = last[None]
        if self.amax_compute_algo == "max":
            window = jnp.concatenate([window, old[1:]])
        largest = jnp.max(jnp.where(jnp.isfinite(window), window, 0))
        top = np.float32(float(jnp.finfo(self.q_dtype).max) * 2.0 ** -int(self.margin))
        limit = np.finfo(np.float32).max
        new = jnp.where(largest > 0, jnp.minimum(_quotient(float(top), largest), limit), scale[0])
        idle = last == 0
        return replace(
            self,
            scale=jnp.where(idle, scale, new[None]),
            amax_history=jnp.where(idle, old, history),
        )


@dataclass(frozen=True)
class BlockScaleQuantizer(Quantizer):
    """MXFP8: a power-of-two scale (E8M0) for each 1x32 elements, columnwise 32x1.

    With swizzled=True scales are in the order of the tensor cores.
    """

    swizzled: bool = False

    scaling: ClassVar[str] = "mxfp8"

    def attributes(self) -> dict[str, Any]:
        return {"swizzled": self.swizzled}


@dataclass(frozen=True)
class Float8BlockScaleQuantizer(Quantizer):
    """An f32 scale for each 1x128 elements (columnwise 128x1), or for each 128x128.

    block_scaling_dim is 1 or 2. Scales are powers of two unless force_pow_2_scales is False.
    """

    block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(
                f"Float8BlockScaleQuantizer: block_scaling_dim = {self.block_scaling_dim!r}; it "
                "must be 1 (1x128) or 2 (128x128)"
            )

    @property
    def scaling(self) -> str:  # type: ignore[override]
        return "block1x128" if self.block_scaling_dim == 1 else "block128x128"

    def attributes(self) -> dict[str, Any]:
        return _own_rule(self)


def _own_rule(q: CurrentScaleQuantizer | Float8BlockScaleQuantizer) -> dict[str, Any]:
    return {
        "power_of_two": POWER_OF_TWO["power_of_two" if q.force_pow_2_scales else "exact_scale"],
        "eps": np.float32(q.amax_epsilon),
    }


def _quotient(top: float, x: jax.Array) -> jax.Array:
    """top / x, correctly rounded. The division of XLA is so only on the CPU."""
    from .cpp_extensions.activation import act_lu

    y = act_lu(x[None, None], ("top/x; top = 1",), act_params={"top": top}, precision="strict")
    return jnp.squeeze(y)


def _largest(amax: jax.Array) -> jax.Array:
    """The maximum of the bits: NaN is the largest."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(amax), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


for _class, _data, _meta in (
    (CurrentScaleQuantizer, [], ["force_pow_2_scales", "amax_epsilon"]),
    (DelayedScaleQuantizer, ["scale", "amax_history"], ["margin", "amax_compute_algo"]),
    (BlockScaleQuantizer, [], ["swizzled"]),
    (
        Float8BlockScaleQuantizer,
        [],
        ["block_scaling_dim", "force_pow_2_scales", "amax_epsilon"],
    ),
):
    jax.tree_util.register_dataclass(
        _class, data_fields=_data, meta_fields=["q_dtype", "q_layout", *_meta]
    )
