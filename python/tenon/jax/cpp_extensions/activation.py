"""Activations and their gradients on JAX arrays, plain or quantised in the same pass.

x is [..., inputs, H]: inputs = 1, or 2 for a gated activation (a = x[..., 0, :] is activated,
b = x[..., 1, :] is linear).
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._lib import options as call_options
from .._keys import Act, ActivationType, ActParams, act_of
from ..quantize import DelayedScaleQuantizer, Quantizer, ScaledTensor
from ._primitives import NO_GRADIENT, ActLuPrimitive, DActLuDBiasQuantizePrimitive, Encoding

__all__ = [
    "ActLuPrimitive",
    "AmaxScope",
    "DActLuDBiasQuantizePrimitive",
    "act_lu",
    "dact_lu",
    "quantize_dact_dbias",
]

_PLAIN = tuple(np.dtype(t) for t in (jnp.float32, jnp.float16, jnp.bfloat16))


class AmaxScope(enum.Enum):
    """The devices over which an amax is joined."""

    LOCAL = 1
    TPSP = 2
    FSDP = 3


def act_lu(
    x: jax.Array,
    activation_type: ActivationType,
    quantizer: Quantizer | None = None,
    act_params: ActParams = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> Any:
    """y = f(x), or f(a)*b; [..., inputs, H] to [..., H].

    activation_type is a tuple: ("gelu",), ("silu", "linear") for silu(a)*b, ("clamped_silu",
    "clamped_linear"), any registered name, formula text or function, alone or before "linear".
    act_params are its parameters: a dict, or all of them in order. They are constants of the trace.

    Without a quantizer the result is an array of the dtype of x. With output_amax_when_no_scaling
    it is a pair of that array and the largest |y|, f32 [1]. With a quantizer it is a ScaledTensor,
    written in the same pass. transpose_batch_sequence names the order of leading axes. Results do
    not depend on it.
    """
    _check_scope("act_lu", amax_scope)
    act = act_of("act_lu", activation_type, act_params)
    wants_amax = output_amax_when_no_scaling
    return forward("act_lu", x, act, quantizer, wants_amax, (precision, rounding))


def dact_lu(
    dz: jax.Array,
    x: jax.Array,
    activation_type: ActivationType,
    quantizer: Quantizer | None = None,
    act_params: ActParams = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> Any:
    """dx = dz * f'(x). Gated: da = dz*b*f'(a), db = dz*f(a). dx is [..., inputs, H] like x.

    Arguments and results are those of `act_lu`. dz is [..., H].
    """
    _check_scope("dact_lu", amax_scope)
    act = act_of("dact_lu", activation_type, act_params)
    wants_amax = output_amax_when_no_scaling
    return backward("dact_lu", dz, x, act, False, quantizer, wants_amax, (precision, rounding))[0]


def quantize_dact_dbias(
    dz: jax.Array,
    x: jax.Array,
    activation_type: ActivationType = ("gelu",),
    is_dbias: bool = True,
    quantizer: Quantizer | None = None,
    act_params: ActParams = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> tuple[Any, jax.Array | None]:
    """(dx, dbias): dx as from `dact_lu`, dbias [inputs, H] its sums over all leading axes.

    The sums are over the fp32 values before dx is rounded or quantised. They have the dtype of x.
    Without is_dbias they are None.
    """
    op, wants_amax = "quantize_dact_dbias", output_amax_when_no_scaling
    _check_scope(op, amax_scope)
    act = act_of(op, activation_type, act_params)
    return backward(op, dz, x, act, is_dbias, quantizer, wants_amax, (precision, rounding))


def forward(
    op: str,
    x: jax.Array,
    act: Act,
    quantizer: Quantizer | None,
    wants_amax: bool = False,
    options: tuple[str, str] = ("native", "once"),
    refusal: str = NO_GRADIENT,
) -> Any:
    """`act_lu` of a resolved activation. `op` names it in messages."""
    x = _checked_x(op, x, act)
    results = ActLuPrimitive.bind(
        x,
        *_state(op, quantizer),
        act=act,
        encoding=_encoding(op, x, quantizer, options),
        output_amax_when_no_scaling=wants_amax and quantizer is None,
        refusal=refusal,
    )
    return _value(results, x, quantizer, 1, wants_amax)


def backward(
    op: str,
    dz: jax.Array,
    x: jax.Array,
    act: Act,
    is_dbias: bool = False,
    quantizer: Quantizer | None = None,
    wants_amax: bool = False,
    options: tuple[str, str] = ("native", "once"),
) -> tuple[Any, jax.Array | None]:
    """`quantize_dact_dbias` of a resolved activation."""
    x = _checked_x(op, x, act)
    dz = _plain(op, "dz", dz)
    expected = (*x.shape[:-2], x.shape[-1])
    if dz.shape != expected:
        raise ValueError(
            f"{op}: dz is {dz.shape} and x {x.shape}; dz must have the shape of the forward's "
            f"result, {expected}"
        )
    results = DActLuDBiasQuantizePrimitive.bind(
        dz,
        x,
        *_state(op, quantizer),
        act=act,
        encoding=_encoding(op, x, quantizer, options),
        is_dbias=bool(is_dbias),
        output_amax_when_no_scaling=wants_amax and quantizer is None,
    )
    return _value(results, x, quantizer, 2, wants_amax), results[5]


def _plain(op: str, name: str, value: Any) -> jax.Array:
    array = jnp.asarray(value)
    if array.dtype not in _PLAIN:
        raise TypeError(
            f"{op}: {name} is {array.dtype}; it must be float32, float16 or bfloat16, cast it "
            f"with {name}.astype(jnp.float32)"
        )
    return array


def _checked_x(op: str, x: Any, act: Act) -> jax.Array:
    array = _plain(op, "x", x)
    if array.ndim < 2 or array.shape[-2] != act.inputs:
        hint = "x[..., None, :]" if act.inputs == 1 else "jnp.stack([a, b], axis=-2)"
        raise ValueError(
            f"{op}: x is {array.shape}, but {act.name} has {act.inputs} "
            f"{'input' if act.inputs == 1 else 'inputs'}, so x must be [..., {act.inputs}, H]; "
            f"make it with {hint}"
        )
    return array


def _check_scope(op: str, scope: AmaxScope) -> None:
    if not isinstance(scope, AmaxScope):
        raise TypeError(f"{op}: amax_scope = {scope!r}; it must be an AmaxScope, e.g. LOCAL")
    if scope is not AmaxScope.LOCAL:
        raise NotImplementedError(
            f"{op}: amax_scope = {scope.name}; an amax is joined on one device here, use "
            "AmaxScope.LOCAL and jax.lax.pmax over the mesh axis"
        )


def check_quantizer(op: str, quantizer: Quantizer | None) -> None:
    """Raises an error if `quantizer` is not a quantizer."""
    if quantizer is None or (isinstance(quantizer, Quantizer) and quantizer.scaling):
        return
    raise TypeError(
        f"{op}: quantizer is a {type(quantizer).__name__}; it must be None or one of "
        "DelayedScaleQuantizer, CurrentScaleQuantizer, BlockScaleQuantizer, "
        "Float8BlockScaleQuantizer"
    )


def _encoding(
    op: str, x: jax.Array, quantizer: Quantizer | None, options: tuple[str, str]
) -> Encoding:
    chosen = call_options(*options)
    attributes: dict[str, Any] = {"precision": chosen.precision, "rounding": chosen.rounding}
    if quantizer is None:
        return Encoding(x.dtype, options=tuple(attributes.items()))
    check_quantizer(op, quantizer)
    return Encoding(
        quantizer.q_dtype,
        quantizer.scaling,
        quantizer.q_layout,
        quantizer.scale_dtype,
        tuple({**attributes, **quantizer.attributes()}.items()),
    )


def _state(op: str, quantizer: Quantizer | None) -> tuple[jax.Array, ...]:
    """The scale, for delayed scaling only."""
    if not isinstance(quantizer, DelayedScaleQuantizer):
        return ()
    scale = jnp.asarray(quantizer.scale)
    if scale.shape != (1,) or scale.dtype != jnp.float32:
        raise ValueError(
            f"{op}: the quantizer's scale is {scale.dtype}{list(scale.shape)}; it must be "
            "float32[1], one number for the tensor"
        )
    return (scale,)


def _value(
    results: list[jax.Array | None],
    x: jax.Array,
    quantizer: Quantizer | None,
    k_axes: int,
    wants_amax: bool,
) -> Any:
    data, columnwise, scale_inv, columnwise_scale_inv, amax = results[:5]
    if quantizer is None:
        return (data, amax) if wants_amax else data
    return ScaledTensor(
        data,
        scale_inv,
        columnwise,
        columnwise_scale_inv,
        amax,
        quantizer.scaling,
        np.dtype(x.dtype),
        k_axes,
        bool(getattr(quantizer, "swizzled", False)),
    )
