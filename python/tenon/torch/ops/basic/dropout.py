"""Dropout with a counter-based random stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..._dropout import random_state
from .. import _kernels
from ..op import BasicOperation, OperationContext, check_number

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["Dropout"]


class Dropout(BasicOperation):
    """y = x/(1 − p) for kept elements, else 0. An element is dropped with probability p.

    In evaluation y = x. No mask is stored. The random state is saved, and the backward pass draws
    the same bits again. p is rounded to a multiple of 1/65536. The factor uses the rounded p.
    """

    op_name = "dropout"

    def __init__(self, p: float) -> None:
        super().__init__()
        check_number("Dropout", "p", p)
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout: p={p}; it must lie between 0 and 1")
        self.p = p

    def extra_repr(self) -> str:
        return f"p={self.p:g}"

    def plan_text(self) -> str:
        return f"dropout({self.p!r})" if self.training and self.p else "identity"

    def draw(self, ctx: OperationContext, x: torch.Tensor) -> torch.Tensor | None:
        """Draws and saves a random state for this call. None: nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        state = random_state(x.shape[-1] if x.dim() else 1, x)
        if ctx.requires_grad:
            ctx.save_for_backward(state)
            ctx.p = self.p
        return state

    def drawn(self, ctx: OperationContext) -> tuple[float, torch.Tensor | None]:
        """p and the random state of the forward call."""
        if not ctx.saved_tensors:
            return 0.0, None
        return getattr(ctx, "p", self.p), ctx.saved_tensors[0]

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        dtype = _kernels.compute_dtype("Dropout", input_)
        if ctx.requires_grad:
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        x = _kernels.plain(input_)
        state = self.draw(ctx, x)
        if state is None:
            y = _kernels.plain(x, dtype)
        else:
            y = _kernels.bias_dropout_add(x, dtype, p=self.p, random=state)
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        dy = _kernels.plain(grad_output)
        p, state = self.drawn(ctx)
        dx: torch.Tensor | None = dy
        if state is not None:
            dx, _ = _kernels.bias_dropout_add_backward(dy, dtype=dy.dtype, p=p, random=state)
        assert dx is not None
        return _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
