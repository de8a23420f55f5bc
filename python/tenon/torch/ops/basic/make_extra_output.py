"""Returns the main tensor also as an extra output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..op import BackwardResult, BasicOperation, ExtraOutputs, OperationContext

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["MakeExtraOutput"]


class MakeExtraOutput(BasicOperation):
    """y = x and the extra output e = x; dx = g + the gradient of e.

    `in_place` is ignored: gradients are added out of place. It exists for compatibility with
    Transformer Engine.
    """

    op_name = "make_extra_output"
    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def plan_text(self) -> str:
        return "make_extra_output"

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        basic_op_ctxs[0].prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        x = _kernels.plain(input_)
        return _kernels.encode(x, next_op_input_quantizer), [(x,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        g = _kernels.plain(grad_output)
        (extra,) = basic_op_grad_extra_outputs[0]
        dx = g if extra is None else g + extra
        return _kernels.encode(dx, basic_op_ctxs[0].prev_op_grad_output_quantizer), [()], [()]
