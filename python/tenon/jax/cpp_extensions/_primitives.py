"""The two FFI calls: shapes of their results, their attributes, their behaviour under vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._lib import SCALINGS
from .. import _ffi, _workspace
from .._keys import Act
from ..quantize import QuantizeLayout

_NOTHING: tuple[int, ...] = (0,)  # the shape of a result that is not asked for

NO_GRADIENT = (
    "act_lu: it has no derivative of its own; use tenon.jax.activation, which has one, or dact_lu "
    "for the gradient"
)
NO_SECOND = (
    "activation: a second derivative is not available; differentiate once, or write the "
    "activation in jax.numpy where more is needed"
)


class Encoding(NamedTuple):
    """What is written: dtype and scaling of the result, its layout, and the format's options."""

    out_dtype: Any
    scaling: str = "none"
    layout: QuantizeLayout = QuantizeLayout.ROWWISE
    scale_dtype: Any = jnp.float32
    options: tuple[tuple[str, Any], ...] = ()

    def results(
        self, lead: tuple[int, ...], columns: tuple[int, ...]
    ) -> list[jax.ShapeDtypeStruct]:
        """data, columnwise data, scale_inv, columnwise scale_inv, amax of [*lead, *columns]."""
        rows, cols = (int(np.prod(n, dtype=np.int64)) for n in (lead, columns))
        data, scales = [], []
        for columnwise in (False, True):
            used = self.layout.has_colwise if columnwise else self.layout.has_rowwise
            turned = columnwise and _ffi.transposes(self.scaling)
            shape = columns + lead if turned else lead + columns
            scale: tuple[int, ...] = (1,)
            if self.scaling not in ("delayed", "current"):
                scale = _ffi.encoding_shapes(self.scaling, rows, cols, columnwise)[1]
            data.append(jax.ShapeDtypeStruct(shape if used else _NOTHING, self.out_dtype))
            stored = used and self.scaling != "none"
            scales.append(jax.ShapeDtypeStruct(scale if stored else _NOTHING, self.scale_dtype))
        return [*data, *scales, jax.ShapeDtypeStruct((1,), jnp.float32)]


class _Primitive:
    """A target of libtenon; `bind` calls it, `abstract` gives the shapes of its results."""

    target: str

    @classmethod
    def _call(
        cls,
        operands: Sequence[Any],
        results: Sequence[jax.ShapeDtypeStruct],
        folds: bool,
        refusal: str,
        act: Act,
        encoding: Encoding,
        **attributes: Any,
    ) -> list[jax.Array]:
        *dz, x, _, _ = operands
        size = _workspace.size_of(x, dz[0] if dz else None, act, encoding, attributes)
        if size:  # the seventh result of one target, a sixth that the other one may have
            results = [*results[:6], jax.ShapeDtypeStruct((size,), jnp.uint8)]
        aliases = {len(operands) - 1: 4}
        amax = encoding.scaling in ("delayed", "current")
        if not amax and not attributes["output_amax_when_no_scaling"]:
            # One that nobody reads would be copied from a constant, by a kernel of its own.
            aliases = {}
            operands = (*operands[:-1], np.zeros(_NOTHING, np.float32))
            results = [*results[:4], jax.ShapeDtypeStruct(_NOTHING, jnp.float32), *results[5:]]
        # Rows do not depend on one another, so a batch of plain ones folds into more rows; scales,
        # amax and dbias belong to the whole tensor, so there each element is a call of its own.
        call = jax.ffi.ffi_call(
            cls.target,
            list(results),
            vmap_method="broadcast_all" if folds else "sequential",
            input_output_aliases=aliases,
        )

        def primal(*arrays: jax.Array) -> list[jax.Array]:
            return list(
                call(
                    *arrays,
                    act=act.text,
                    act_params=np.asarray(act.params, np.float32),
                    scaling_mode=SCALINGS.index(encoding.scaling),
                    quantize_layout=int(encoding.layout),
                    **dict(encoding.options),
                    **attributes,
                )
            )

        return _without_gradient(primal, refusal)(*operands)


def _without_gradient(
    primal: Callable[..., list[jax.Array]], refusal: str
) -> Callable[..., list[jax.Array]]:
    """`primal`, which refuses to be differentiated."""
    function = jax.custom_vjp(primal)

    def forward(*_: Any) -> Any:
        raise NotImplementedError(refusal)

    def backward(*_: Any) -> Any:
        raise NotImplementedError(refusal)

    function.defvjp(forward, backward)
    return function


class ActLuPrimitive(_Primitive):
    """y = f(x) of x [..., inputs, H], encoded.

    Operands: x, scale [1] (delayed scaling), amax [1]. Results: y [..., H], columnwise y,
    scale_inv, columnwise scale_inv, updated amax [1]; those not asked for have no elements. Where
    CUDA needs one, a workspace follows.
    """

    target = _ffi.ACT_LU

    @staticmethod
    def abstract(x: Any, encoding: Encoding) -> list[jax.ShapeDtypeStruct]:
        """The results' shapes and dtypes."""
        return encoding.results(tuple(x.shape[:-2]), tuple(x.shape[-1:]))

    @classmethod
    def bind(
        cls,
        x: jax.Array,
        scale: jax.Array,
        amax: jax.Array,
        *,
        act: Act,
        encoding: Encoding,
        output_amax_when_no_scaling: bool = False,
        refusal: str = NO_GRADIENT,
    ) -> list[jax.Array]:
        """The call; `refusal` is what a differentiation raises."""
        return cls._call(
            (x, scale, amax),
            cls.abstract(x, encoding),
            _folds(encoding) and not output_amax_when_no_scaling,
            refusal,
            act,
            encoding,
            output_amax_when_no_scaling=output_amax_when_no_scaling,
        )


class DActLuDBiasQuantizePrimitive(_Primitive):
    """dx = dz * f'(x) of x [..., inputs, H], encoded, and dbias, its sums over the rows.

    Operands: dz [..., H], x, scale [1], amax [1]. Results: dx [..., inputs, H], columnwise dx,
    scale_inv, columnwise scale_inv, updated amax [1], dbias [inputs, H], workspace (for CUDA).
    """

    target = _ffi.DACT_LU

    @staticmethod
    def abstract(x: Any, encoding: Encoding, is_dbias: bool) -> list[jax.ShapeDtypeStruct]:
        """The results' shapes and dtypes."""
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
        scale: jax.Array,
        amax: jax.Array,
        *,
        act: Act,
        encoding: Encoding,
        is_dbias: bool,
        output_amax_when_no_scaling: bool = False,
        refusal: str = NO_SECOND,
    ) -> list[jax.Array]:
        """The call; `refusal` is what a differentiation raises."""
        return cls._call(
            (dz, x, scale, amax),
            cls.abstract(x, encoding, is_dbias),
            _folds(encoding) and not output_amax_when_no_scaling and not is_dbias,
            refusal,
            act,
            encoding,
            is_dbias=is_dbias,
            output_amax_when_no_scaling=output_amax_when_no_scaling,
        )


def _folds(encoding: Encoding) -> bool:
    return encoding.scaling == "none" and not encoding.layout.has_colwise
