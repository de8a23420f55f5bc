"""The differentiable activation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ._keys import Act, ActivationType, ActParams, act_of
from ._sharding import largest, vary, varying
from .cpp_extensions._primitives import NO_SECOND
from .cpp_extensions.activation import backward, check_quantizer, forward
from .quantize import DelayedScaleQuantizer, Quantizer


def activation(
    x: jax.Array,
    activation_type: ActivationType,
    quantizer: Quantizer | None = None,
    act_params: ActParams = None,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> jax.Array:
    """y = f(x), or f(a)*b, of x [..., inputs, H]. Differentiable once, in reverse mode.

    dx = dz*f'(x). Gated: da = dz*b*f'(a), db = dz*f(a). activation_type and act_params are those of
    `act_lu`. With a quantizer y is quantised and dequantised, and the gradient passes through
    unchanged. The cotangent of a DelayedScaleQuantizer is the amax: slot 0 of amax_history, for
    `quantizer.update(amax)`.
    """
    act = act_of("activation", activation_type, act_params)
    check_quantizer("activation", quantizer)
    # Varying values get their type outside the rule, where transposing the cast adds gradients.
    x = jnp.asarray(x)
    x = vary(x, varying(x, *jax.tree.leaves(quantizer)))
    return _activation(x, quantizer, act, (precision, rounding))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _activation(
    x: jax.Array, quantizer: Quantizer | None, act: Act, options: tuple[str, str]
) -> jax.Array:
    return _forward(x, quantizer, act, options)[0]


def _forward(
    x: jax.Array, quantizer: Quantizer | None, act: Act, options: tuple[str, str]
) -> tuple[jax.Array, Any]:
    # Differentiating this function would be a second derivative of the activation.
    y = forward("activation", x, act, quantizer, False, options, NO_SECOND)
    if quantizer is None:
        return y, (x, None)
    found = None
    if isinstance(quantizer, DelayedScaleQuantizer):
        # Shards share the quantizer, so its cotangent is the largest amax, not the sum.
        amax, old = y.amax, jnp.asarray(quantizer.amax_history)
        over = varying(amax) - varying(old)
        amax = largest(amax, sorted(over)) if over else amax
        history = jnp.zeros_like(old).at[:1].set(amax)
        found = replace(quantizer, scale=jnp.zeros_like(quantizer.scale), amax_history=history)
    return y.dequantize(), (x, found)


def _backward(
    act: Act, options: tuple[str, str], saved: Any, dz: jax.Array
) -> tuple[jax.Array, Any]:
    x, found = saved
    return backward("activation", dz, x, act, options=options)[0], found


_activation.defvjp(_forward, _backward)
