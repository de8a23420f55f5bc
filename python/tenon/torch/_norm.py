"""L2 normalisation of rows, with its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .. import _lib
from . import _call, _saved, _watch
from ._dynamo import one_break
from ._once import once

Tensor = torch.Tensor


class _L2Normalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, options: _lib.Options) -> tuple[Tensor, Tensor]:
        y, r = _normalized(x, eps, options)
        ctx.options, ctx.kinds = options, _saved.kinds((x, r))
        ctx.save_for_backward(x, r)
        ctx.mark_non_differentiable(r)
        return y, r

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, r = saved = ctx.saved_tensors
        _saved.check("tenon: l2normalization", ctx.kinds, saved)
        grad, options = grads[0], ctx.options
        (dx,) = once(
            "l2normalization",
            lambda: (l2normalization_backward(grad, x, r, options),),
            (grad, x),
        )
        return dx, None, None


def _normalized(x: Tensor, eps: float, options: _lib.Options) -> tuple[Tensor, Tensor]:
    if not isinstance(x, Tensor):
        raise _call.refusal(x, "x")
    if x.dim() == 0:
        raise ValueError(
            "tenon: l2normalization: x is 0-d and has no last dimension; give it one, x.reshape(1)"
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    seen = _call.view(_call.foldable(x), "x")
    _call.l2_normalization(seen, _call.view(y), _call.column(r, "r"), eps, options)
    return y, r


def l2normalization_backward(
    grad: Tensor, x: Tensor, r: Tensor, options: _lib.Options | None = None
) -> Tensor:
    """dx = r*(grad - x*r^2*sum(x*grad)), summed over a row. r is from the forward call."""
    for t, name in ((grad, "grad_output"), (x, "x"), (r, "rsqrt_norm")):
        if not isinstance(t, Tensor):
            raise _call.refusal(t, name)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _call.l2_normalization_backward(
        _call.view(_call.foldable(grad), "grad"),
        _call.view(_call.foldable(x), "x"),
        _call.column(r.contiguous(), "r"),
        _call.view(dx),
        options,
    )
    return dx


@one_break
def l2normalization_forward(
    x: Tensor, eps: float = 1e-6, *, precision: str = "native", rounding: str = "once"
) -> tuple[Tensor, Tensor]:
    """(y, r) with r = rsqrt(sum(x^2) + eps), float32 [..., 1], and differentiable y = x*r."""
    _watch.check("l2normalization", x)
    options = _lib.options(precision, rounding)
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        return _L2Normalization.apply(x, eps, options)
    return _normalized(x, eps, options)


def l2normalization(
    x: Tensor, eps: float = 1e-6, *, precision: str = "native", rounding: str = "once"
) -> Tensor:
    """y = x*rsqrt(sum(x^2) + eps), summed over the last dimension."""
    return l2normalization_forward(x, eps, precision=precision, rounding=rounding)[0]
