"""y = x·Wᵀ + b + e in one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import AddExtraInput, BasicLinear, Bias
from ..op import ExtraOutputs, FusibleOperation, OperationContext, with_numbers
from ._window import Window, replace

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["ForwardLinearBiasAdd"]


class ForwardLinearBiasAdd(Window):
    """y = x·Wᵀ + b + e for the extra input e. `bias` may be None.

    It saves the same tensors as `BasicLinear`. The result never overwrites e.
    """

    note = "one plan"
    kinds = {"linear": BasicLinear, "bias": Bias, "add": AddExtraInput}
    optional = frozenset(("bias",))
    linear: BasicLinear
    bias: Bias | None
    add: AddExtraInput

    def __init__(
        self, *, linear: BasicLinear, bias: Bias | None = None, add: AddExtraInput
    ) -> None:
        super().__init__(linear=linear, bias=bias, add=add)

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
        (extra,) = basic_op_extra_inputs[-1]
        bias: torch.Tensor | None = None
        if self.bias is not None:
            bias = with_numbers("Bias", "bias", self.bias.parameter(basic_op_ctxs[1], "bias"))
            bias = _kernels.plain(bias.detach(), x.dtype)
        y = summed(x, w, extra, bias=bias)
        return _kernels.encode(y, next_op_input_quantizer), [()] * len(basic_op_ctxs)

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [BasicLinear, AddExtraInput] and [BasicLinear, Bias, AddExtraInput]."""
        return replace(ops, ForwardLinearBiasAdd)


def summed(x: torch.Tensor, w: torch.Tensor, extra: torch.Tensor, **terms: Any) -> torch.Tensor:
    """A product with an extra input added. A wider extra input widens the sum, as the op's does."""
    shape = (*x.shape[:-1], w.shape[0])
    AddExtraInput.check(torch.empty(shape, dtype=x.dtype, device="meta"), extra)
    if extra.dtype == x.dtype:
        return _kernels.product_and_sum(x, w, extra, **terms)
    nothing = torch.zeros(shape, dtype=x.dtype, device=x.device)
    return _kernels.product_and_sum(x, w, nothing, **terms) + extra
