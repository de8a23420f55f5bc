"""The two FFI calls: shapes of results, attributes, sharding and batching."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._format import Scaling, encoding_shapes, scaling_of
from .. import _ffi, _workspace
from .._keys import Act
from .._sharding import Split, is_traced, place, vary, varying
from ..quantize import QuantizeLayout

_NOTHING: tuple[int, ...] = (0,)  # the shape of an unused result

NO_GRADIENT = (
    "act_lu: it has no derivative of its own; use tenon.jax.activation, which has one, or dact_lu "
    "for the gradient"
)
NO_SECOND = (
    "activation: a second derivative is not available; differentiate once, or write the "
    "activation in jax.numpy where more is needed"
)


class Encoding(NamedTuple):
    """The format of the output: dtype, scaling, layout, and options."""

    out_dtype: Any
    scaling: str = "none"
    layout: QuantizeLayout = QuantizeLayout.ROWWISE
    scale_dtype: Any = jnp.float32
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def mode(self) -> Scaling:
        """The properties of its scaling mode."""
        return scaling_of(self.scaling)

    def results(
        self, lead: tuple[int, ...], columns: tuple[int, ...]
    ) -> list[jax.ShapeDtypeStruct]:
        """data, columnwise data, scale_inv, columnwise scale_inv, amax of [*lead, *columns]."""
        rows, cols = (int(np.prod(n, dtype=np.int64)) for n in (lead, columns))
        data, scales = [], []
        for columnwise in (False, True):
            used = self.layout.has_colwise if columnwise else self.layout.has_rowwise
            transposed = columnwise and self.mode.transposes
            shape = columns + lead if transposed else lead + columns
            scale: tuple[int, ...] = (1,)
            if not self.mode.single:
                scale = encoding_shapes(self.scaling, rows, cols, columnwise)[1]
            data.append(jax.ShapeDtypeStruct(shape if used else _NOTHING, self.out_dtype))
            stored = used and self.scaling != "none"
            scales.append(jax.ShapeDtypeStruct(scale if stored else _NOTHING, self.scale_dtype))
        return [*data, *scales, jax.ShapeDtypeStruct((1,), jnp.float32)]


class _Primitive:
    """A target of libtenon. `bind` calls it, `abstract` gives the shapes of its results."""

    target: str


@dataclass(frozen=True)
class _Call:
    """A primitive with all arguments except arrays: dz (backward), x, scale (delayed)."""

    primitive: type[ActLuPrimitive] | type[DActLuDBiasQuantizePrimitive]
    target: str
    act: Act
    params: bytes  # f32 bytes, because equal values may differ in sign
    encoding: Encoding
    attributes: tuple[tuple[str, Any], ...]

    @property
    def _backward(self) -> bool:
        return self.primitive is DActLuDBiasQuantizePrimitive

    @property
    def _wants_dbias(self) -> bool:
        return ("is_dbias", True) in self.attributes

    @property
    def _wants_amax(self) -> bool:
        return self.encoding.mode.single or ("output_amax_when_no_scaling", True) in self.attributes

    @property
    def results(self) -> list[int]:
        """The indices of the used results."""
        rows, cols = self.encoding.layout.has_rowwise, self.encoding.layout.has_colwise
        scaled = self.encoding.scaling != "none"
        asked = (rows, cols, rows and scaled, cols and scaled, self._wants_amax)
        return [i for i, a in enumerate((*asked, self._wants_dbias)) if a]

    @property
    def folds(self) -> bool:
        # Rows are independent, so a batch of plain calls is one call with more rows. Scales, amax
        # and dbias belong to a whole tensor, so with them each element of a batch is one call.
        return self.results == [0] and self.encoding.scaling == "none"

    def split(self, *arrays: Any) -> Split | None:
        """Splits every axis except inputs. Modes that compute scales need the whole tensor."""
        given = self.encoding.mode.scale_given
        if self.encoding.scaling != "none" and not given:
            return None
        main = int(self._backward)
        lead = tuple(f"r{i}" for i in range(arrays[main].ndim - 2))
        columns = ("i", "h") if self._backward else ("h",)
        one = ("one",)
        operands = ((*lead, "h"),) * main + ((*lead, "i", "h"),)
        if given:
            operands += (one,)
        results = (lead + columns, columns + lead, one, one, one, ("i", "h"))
        joins = ("", "", "", "", "max", "sum")
        used = self.results
        whole = ("i", "one") if one in (*operands, *(results[i] for i in used)) else ("i",)
        return Split(
            operands, tuple(results[i] for i in used), tuple(joins[i] for i in used), main, whole
        )

    def run(self, *arrays: Any, partial: bool = False) -> tuple[jax.Array, ...]:
        """Runs the call. With `partial`, sums are f32."""
        attributes = dict(self.attributes)
        count = 1 + self._backward
        *dz, x = arrays[:count]
        if self._backward:
            results = DActLuDBiasQuantizePrimitive.abstract(x, self.encoding, self._wants_dbias)
        else:
            results = ActLuPrimitive.abstract(x, self.encoding)
        if partial:
            results[5] = jax.ShapeDtypeStruct(results[5].shape, jnp.float32)
        sums = results[5].dtype if self._backward else None
        size = _workspace.size_of(
            x, dz[0] if dz else None, self.act, self.encoding, attributes, sums
        )
        if size:  # result 7 of backward, optional result 6 of forward
            results = [*results[:6], jax.ShapeDtypeStruct((size,), jnp.uint8)]
        # A traced function must not capture arrays, or it cannot be partitioned.
        constant: Any = jax.lax.full if is_traced(arrays) else np.full
        scale = arrays[count] if len(arrays) > count else constant((1,), 1, np.float32)
        if self._wants_amax:
            amax, aliases = constant((1,), 0, np.float32), {count + 1: 4}
        else:
            # XLA would copy an unused amax from a constant, with an extra kernel. So any operand is
            # passed. It must not be empty: XLA (jaxlib 0.11.2) crashes then in a sharded loop.
            amax, aliases = scale, {}
            results[4] = jax.ShapeDtypeStruct(_NOTHING, jnp.float32)
        call = jax.ffi.ffi_call(
            self.target,
            results,
            vmap_method="broadcast_all" if self.folds else "sequential",
            input_output_aliases=aliases,
        )
        axes = varying(*arrays)
        made = call(
            *(vary(a, axes) for a in (*dz, x, scale, amax)),
            act=self.act.text,
            act_params=np.frombuffer(self.params, np.float32),
            scaling_mode=self.encoding.mode.number,
            quantize_layout=int(self.encoding.layout),
            **dict(self.encoding.options),
            **attributes,
        )
        return tuple(vary(made[i], axes) for i in self.results)

    def __call__(self, refusal: str, *arrays: Any) -> list[jax.Array | None]:
        """All results, None for unused ones. Differentiating raises an error with `refusal`."""
        made = iter(_without_gradient(functools.partial(place, self), refusal)(*arrays))
        used = self.results
        return [next(made) if i in used else None for i in range(6)]


def _without_gradient(
    primal: Callable[..., tuple[jax.Array, ...]], refusal: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """`primal`, which raises an error if it is differentiated."""
    function = jax.custom_vjp(primal)

    def forward(*_: Any) -> Any:
        raise NotImplementedError(refusal)

    def backward(*_: Any) -> Any:
        raise NotImplementedError(refusal)

    function.defvjp(forward, backward)
    return function


class ActLuPrimitive(_Primitive):
    """y = f(x) of x [..., inputs, H], encoded.

    Operands of the target: x, scale [1] (delayed scaling), amax [1]. Results: y [..., H],
    columnwise y, scale_inv, columnwise scale_inv, updated amax [1]. Unused results have no
    elements. If CUDA needs a workspace, it is the last result.
    """

    target = _ffi.ACT_LU

    @staticmethod
    def abstract(x: Any, encoding: Encoding) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the results."""
        return encoding.results(tuple(x.shape[:-2]), tuple(x.shape[-1:]))

    @classmethod
    def bind(
        cls,
        x: jax.Array,
        *scale: jax.Array,
        act: Act,
        encoding: Encoding,
        output_amax_when_no_scaling: bool = False,
        refusal: str = NO_GRADIENT,
    ) -> list[jax.Array | None]:
        """The results, None for unused ones. Differentiating raises an error with `refusal`."""
        asked = (("output_amax_when_no_scaling", output_amax_when_no_scaling),)
        return _Call(cls, cls.target, act, _bits(act.params), encoding, asked)(refusal, x, *scale)


class DActLuDBiasQuantizePrimitive(_Primitive):
    """dx = dz * f'(x) of x [..., inputs, H], encoded, and dbias, the sums of dx over the rows.

    Operands of the target: dz [..., H], x, scale [1], amax [1]. Results: dx [..., inputs, H],
    columnwise dx, scale_inv, columnwise scale_inv, updated amax [1], dbias [inputs, H], workspace
    (for CUDA).
    """

    target = _ffi.DACT_LU

    @staticmethod
    def abstract(x: Any, encoding: Encoding, is_dbias: bool) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the results."""
        columns = tuple(x.shape[-2:])
        return [
            *encoding.results(tuple(x.shape[:-2]), columns),
            jax.ShapeDtypeStruct(columns if is_dbias else _NOTHING, x.dtype),
            jax.ShapeDtypeStruct(_NOTHING, jnp.float32),
        ]

    @classmethod
    def bind(
        cls,
        dz: jax.Array,
        x: jax.Array,
        *scale: jax.Array,
        act: Act,
        encoding: Encoding,
        is_dbias: bool,
        output_amax_when_no_scaling: bool = False,
        refusal: str = NO_SECOND,
    ) -> list[jax.Array | None]:
        """The results, None for unused ones. Differentiating raises an error with `refusal`."""
        asked = (
            ("is_dbias", is_dbias),
            ("output_amax_when_no_scaling", output_amax_when_no_scaling),
        )
        call = _Call(cls, cls.target, act, _bits(act.params), encoding, asked)
        return call(refusal, dz, x, *scale)


def _bits(params: tuple[float, ...]) -> bytes:
    return np.asarray(params, np.float32).tobytes()
