"""Bias, dropout and residual in one pass. The backward pass recomputes the mask."""

from __future__ import annotations

from typing import Any

import torch

from .. import _lib
from . import _call, _saved, _watch
from ._dynamo import one_break
from ._once import Gradients, once

Tensor = torch.Tensor


def random_state(columns: int, like: Tensor) -> Tensor:
    """A random state for one call, on the device of `like`: seed, offset, row0, col0, columns.

    The seed is drawn by torch. On CUDA it is drawn on the device, so each replay of a graph draws a
    new one.
    """
    least, most, device = -(2**63), 2**63 - 1, like.device
    if like.is_cpu:
        seed = torch.randint(least, most, (), device=device).item()
        return torch.tensor((seed, 0, 0, 0, columns), device=device)
    state = torch.zeros(5, dtype=torch.int64, device=device)
    state[4:].fill_(columns)
    torch.randint(least, most, (1,), dtype=torch.int64, device=device, out=state[:1])
    return state


def _check_random(random: Tensor) -> Tensor:
    ok = isinstance(random, Tensor) and random.dtype == torch.int64
    if not ok or random.shape != (5,) or not random.is_contiguous():
        told = (
            f"{random.dtype} of shape {tuple(random.shape)} on {random.device}"
            if isinstance(random, Tensor)
            else repr(random)
        )
        raise ValueError(
            f"tenon: dropout: random is {told}; it must be five int64 numbers where x is: seed, "
            "offset, row0, col0 and the columns of the whole tensor"
        )
    return random


def _forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    random: Tensor | None,
    options: _lib.Options,
) -> Tensor:
    """y = residual + dropout(x + bias). Without a state nothing is dropped."""
    dtype = x.dtype
    for t in (bias, residual):
        if t is not None:
            dtype = torch.promote_types(dtype, t.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    _call.bias_dropout_add(
        p,
        random is not None,
        random,
        options,
        x=_call.view(_call.foldable(x), "x"),
        bias=None if bias is None else _call.row(bias, "bias"),
        residual=None if residual is None else _call.view(_call.foldable(residual), "residual"),
        y=_call.view(y, "y"),
    )
    return y


def _backward(
    grad: Tensor,
    like: tuple[tuple[torch.Size, torch.dtype] | None, ...],
    p: float,
    random: Tensor | None,
    options: _lib.Options,
) -> Gradients:
    """The gradients of x, bias and residual, with the shapes and dtypes of `like`."""
    device = grad.device
    out = [None if o is None else torch.empty(o[0], dtype=o[1], device=device) for o in like]
    _call.bias_dropout_add_backward(
        p,
        random is not None,
        random,
        options,
        grad=_call.view(_call.foldable(grad), "grad"),
        **{
            name: make(t, name)
            for name, make, t in zip(
                ("dx", "dbias", "dresidual"),
                (_call.view, _call.vector, _call.view),
                out,
                strict=True,
            )
            if t is not None
        },
    )
    return tuple(out)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        p: float,
        random: Tensor | None,
        options: _lib.Options,
    ) -> Tensor:
        # The call advances the state. The backward pass needs the state from before.
        random_then = None if random is None else random.clone()
        ctx.save_for_backward(random_then)
        ctx.kinds = _saved.kinds((random_then,))
        ctx.like = tuple(None if t is None else (t.shape, t.dtype) for t in (x, bias, residual))
        ctx.p, ctx.options = p, options
        return _forward(x, bias, residual, p, random, options)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (random,) = ctx.saved_tensors
        _saved.check("tenon: bias_dropout_add", ctx.kinds, (random,))
        grad, p, options = grads[0], ctx.p, ctx.options
        like = [one if n else None for one, n in zip(ctx.like, ctx.needs_input_grad, strict=False)]
        # The gradient of residual is grad. If nothing is dropped, dx is also grad.
        given: list[Tensor | None] = [None, None, None]
        for i in (0, 2):
            one = like[i]
            if one is not None and one[1] == grad.dtype and (i == 2 or random is None):
                given[i], like[i] = grad, None
        if any(one is not None for one in like):
            found = once(
                "bias_dropout_add",
                lambda: _backward(grad, tuple(like), p, random, options),
                (grad,),
            )
            given = [g if f is None else f for g, f in zip(given, found, strict=True)]
        return *given, None, None, None


@one_break
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    training: bool = True,
    random: Tensor | None = None,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> Tensor:
    """y = residual + dropout(x + bias): keeps an element with probability 1 - p, divided by 1 - p.

    x and residual have the same shape, and bias is [K]. bias and residual may be None. If
    `training` is False, nothing is dropped. `random` is a state of five int64 values (seed, offset,
    row0, col0, columns) on the device of x. A training call increments its offset by one on the
    device. Without `random`, the seed is drawn with torch.randint, so torch.manual_seed makes it
    reproducible.
    """
    for t, name in ((x, "x"), (bias, "bias"), (residual, "residual")):
        if not isinstance(t, Tensor) and (t is not None or name == "x"):
            raise _call.refusal(t, name)
    _watch.check("bias_dropout_add", x, bias, residual)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"tenon: bias_dropout_add: residual has shape {tuple(residual.shape)}, x "
            f"{tuple(x.shape)}; they must be equal"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"tenon: bias_dropout_add: p={p}; a probability lies in [0, 1]")
    options = _lib.options(precision, rounding)
    if not training:
        random = None
    elif random is not None:
        _check_random(random)
    elif p > 0:
        random = random_state(x.shape[-1] if x.dim() else 1, x)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        return _BiasDropoutAdd.apply(x, bias, residual, p, random, options)
    return _forward(x, bias, residual, p, random, options)


def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, random: Tensor | None = None
) -> Tensor:
    """y = dropout(x): x/(1 - p) with probability 1 - p, else 0. In evaluation y = x.

    `random` as for bias_dropout_add.
    """
    if not training and isinstance(x, Tensor):
        if not 0 <= p <= 1:
            raise ValueError(f"tenon: dropout: p={p}; a probability lies in [0, 1]")
        return x
    return bias_dropout_add(x, None, None, p, training, random)
