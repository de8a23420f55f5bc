"""Gradients that raise an error if they are differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _watch

Gradients = tuple[torch.Tensor | None, ...]


class _Once(torch.autograd.Function):
    """Adds the gradients to the graph of create_graph=True. Its backward raises an error."""

    @staticmethod
    def forward(
        ctx: Any, op: str, compute: Callable[[], Gradients], *tensors: torch.Tensor | None
    ) -> Gradients:
        ctx.op = op
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise NotImplementedError(
            f"tenon: {ctx.op}: a second derivative was asked for, and only the first one exists; "
            "call backward without create_graph=True, or write this part with torch operations"
        )


def once(
    op: str, compute: Callable[[], Gradients], tensors: Sequence[torch.Tensor | None]
) -> Gradients:
    """compute(), as a function of `tensors`. Differentiating the results raises an error."""
    _watch.check(op, *tensors)
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
        return _Once.apply(op, compute, *tensors)
    return compute()
