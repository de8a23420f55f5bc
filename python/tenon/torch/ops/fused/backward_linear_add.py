"""dx = g·W + the gradient of an extra output, in one plan."""

from __future__ import annotations

from typing import Any

import torch

from .. import _kernels
from ..basic import BasicLinear, MakeExtraOutput
from ..op import BackwardResult, FusibleOperation, OperationContext
from ._window import Window, replace

__all__ = ["BackwardLinearAdd"]


class BackwardLinearAdd(Window):
    """Backward of an extra output before a linear: dx = g·W + the gradient of that output."""

    note = "one plan"
    kinds = {"backward_add": MakeExtraOutput, "linear": BasicLinear}
    backward_add: MakeExtraOutput
    linear: BasicLinear

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__(backward_add=backward_add, linear=linear)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        (extra,) = basic_op_grad_extra_outputs[0]
        dx, grads = self.linear.differentiate(basic_op_ctxs[1], grad_output, added=extra)
        if dx is not None:
            dx = _kernels.encode(dx, basic_op_ctxs[0].prev_op_grad_output_quantizer)
        return dx, [(), grads], [(), ()]

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [MakeExtraOutput, BasicLinear]."""
        return replace(ops, BackwardLinearAdd)
