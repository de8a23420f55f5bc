"""L2 normalisation of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import _kernels
from ..op import BasicOperation, OperationContext, check_number

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["L2Normalization"]


class L2Normalization(BasicOperation):
    """y = x·r with r = 1/sqrt(Σx² + eps) per row; dx = r·(g − x·r²·Σ x·g).

    `seq_length` and `micro_batch_size` are ignored. They exist for compatibility with Transformer
    Engine.
    """

    op_name = "l2norm"

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_number("L2Normalization", "eps", eps)
        if not eps >= 0:
            raise ValueError(f"L2Normalization: eps={eps}; it must be at least 0")
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"

    def plan_text(self) -> str:
        return f"l2norm(eps={self.eps!r})"

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        dtype = _kernels.compute_dtype("L2Normalization", input_)
        x = _kernels.foldable(_kernels.plain(input_, dtype))
        y, r = _kernels.l2_normalization(x, dtype, self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(x, r)
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        x, r = ctx.saved_tensors
        dx = _kernels.l2_normalization_backward(_kernels.plain(grad_output), x, r)
        return _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
