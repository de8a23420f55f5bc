"""The gradients of c·x·Wᵀ in one plan."""

from __future__ import annotations

from typing import Any

import torch

from ..basic import BasicLinear, ConstantScale
from ..op import BackwardResult, FusibleOperation, OperationContext
from ._window import Window, replace

__all__ = ["BackwardLinearScale"]


class BackwardLinearScale(Window):
    """Backward of c·x·Wᵀ: dx = c·g·W and dW = c·gᵀ·x."""

    note = "one plan"
    kinds = {"linear": BasicLinear, "scale": ConstantScale}
    linear: BasicLinear
    scale: ConstantScale

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__(linear=linear, scale=scale)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        ctx, of_scale = basic_op_ctxs
        text = self.scale.text_of(getattr(of_scale, "scale", self.scale.scale))
        if text is None or self.linear.quantizer_of("backward", 0) is not None:
            # The linear encodes c·g.
            grad = self.scale.op_backward(of_scale, grad_output)
            dx, grads = self.linear.op_backward(ctx, grad)
        else:
            dx, grads = self.linear.differentiate(ctx, grad_output, scale=text)
        return dx, [grads, ()], [(), ()]

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [BasicLinear, ConstantScale]."""
        return replace(ops, BackwardLinearScale)
