"""dx of an RMS norm + the gradient of an extra output, in one plan."""

from __future__ import annotations

from typing import Any

import torch

from .. import _kernels
from ..basic import MakeExtraOutput, RMSNorm
from ..op import BackwardResult, FusibleOperation, OperationContext
from ._window import Window, replace

__all__ = ["BackwardAddRMSNorm"]


class BackwardAddRMSNorm(Window):
    """Backward of an extra output before an RMSNorm: dx = norm' + the gradient of that output."""

    note = "one plan"
    kinds = {"add": MakeExtraOutput, "norm": RMSNorm}
    add: MakeExtraOutput
    norm: RMSNorm

    def __init__(self, *, add: MakeExtraOutput, norm: RMSNorm) -> None:
        super().__init__(add=add, norm=norm)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        (extra,) = basic_op_grad_extra_outputs[0]
        dx, grads = self.norm.differentiate(basic_op_ctxs[1], grad_output, added=extra)
        if dx is not None:
            dx = _kernels.encode(dx, basic_op_ctxs[0].prev_op_grad_output_quantizer)
        return dx, [(), grads], [(), ()]

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [MakeExtraOutput, RMSNorm]."""
        return replace(ops, BackwardAddRMSNorm)
