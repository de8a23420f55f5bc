"""The gradient of an op's input + the gradient of an extra output before it, in one plan."""

from __future__ import annotations

from typing import Any

import torch

from .. import _kernels
from ..op import BackwardResult, OperationContext
from ._window import Window


class BackwardAdd(Window):
    """Base class of [MakeExtraOutput, op], for ops with `differentiate`."""

    note = "one plan"

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        op: Any = self.basic_ops[1]
        (extra,) = basic_op_grad_extra_outputs[0]
        dx, grads = op.differentiate(basic_op_ctxs[1], grad_output, added=extra)
        if dx is not None:
            dx = _kernels.encode(dx, basic_op_ctxs[0].prev_op_grad_output_quantizer)
        return dx, [(), grads], [(), ()]
