"""y = c·x·Wᵀ + e in one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import AddExtraInput, BasicLinear, ConstantScale
from ..op import ExtraOutputs, FusibleOperation, OperationContext
from ._window import Window, replace
from .forward_linear_bias_add import summed

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["ForwardLinearScaleAdd"]


class ForwardLinearScaleAdd(Window):
    """y = c·x·Wᵀ + e for the extra input e. It saves the same tensors as `BasicLinear`.

    The result never overwrites e.
    """

    note = "one plan"
    kinds = {"linear": BasicLinear, "scale": ConstantScale, "add": AddExtraInput}
    linear: BasicLinear
    scale: ConstantScale
    add: AddExtraInput

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__(linear=linear, scale=scale, add=add)

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
        x, w = self.linear.operands(basic_op_ctxs[0], input_)
        basic_op_ctxs[0].prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        basic_op_ctxs[1].scale = self.scale.scale  # may change before the backward pass
        (extra,) = basic_op_extra_inputs[-1]
        text = self.scale.plan_text()
        if text is None:  # a scale that no plan has, e.g. a tensor
            y = _kernels.plain(_kernels.product(x, w) * self.scale.scale, x.dtype) + extra
        else:
            y = summed(x, w, extra, scale=text)
        return _kernels.encode(y, next_op_input_quantizer), [()] * 3

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [BasicLinear, ConstantScale, AddExtraInput]."""
        return replace(ops, ForwardLinearScaleAdd)
