"""The op y = c·x."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..op import BasicOperation, OperationContext, check_number

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["ConstantScale"]


class ConstantScale(BasicOperation):
    """y = scale·x, dx = scale·g, for a number `scale`."""

    op_name = "scale"

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not isinstance(scale, torch.Tensor):
            check_number("ConstantScale", "scale", scale)
        elif scale.numel() != 1:
            raise ValueError(
                f"ConstantScale: scale has the shape {tuple(scale.shape)}; it must be one number"
            )
        self.scale = scale

    def extra_repr(self) -> str:
        return f"{self.scale:g}"

    def plan_text(self) -> str | None:
        return self.text_of(self.scale)

    @staticmethod
    def text_of(scale: Any) -> str | None:
        """The text of the op in a chain. A text has no tensors and infinities, which are valid."""
        finite = type(scale) in (int, float) and math.isfinite(scale)
        return f"scale({scale!r})" if finite else None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        dtype = _kernels.compute_dtype("ConstantScale", input_)
        if ctx.requires_grad:
            ctx.scale = self.scale  # may change before the backward pass
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        y = _kernels.plain(_kernels.plain(input_) * self.scale, dtype)
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        # If a user's fusion ran the forward pass, nothing was saved for this op.
        dx = _kernels.plain(grad_output) * getattr(ctx, "scale", self.scale)
        return _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
