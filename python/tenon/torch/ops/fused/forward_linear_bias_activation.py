"""y = f(x·Wᵀ + b) in one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import Activation, BasicLinear, Bias
from ..op import (
    BasicOperation,
    ExtraOutputs,
    FusibleOperation,
    OperationContext,
    with_numbers,
)
from ._window import Made, Window, ours, replace

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["ForwardLinearBiasActivation"]


class ForwardLinearBiasActivation(Window):
    """y = f(x·Wᵀ + b) as the plan of its ops, with x·Wᵀ + b as a second output.

    It saves the same tensors as `BasicLinear`, `Bias` and the activation. So their backward passes,
    fused or not, can follow. `bias` and `activation` may be None.
    """

    note = "one plan"
    kinds = {"linear": BasicLinear, "bias": Bias, "activation": BasicOperation}
    optional = frozenset(("bias", "activation"))
    linear: BasicLinear
    bias: Bias | None
    activation: BasicOperation | None

    def __init__(
        self,
        *,
        linear: BasicLinear,
        bias: Bias | None = None,
        activation: BasicOperation | None = None,
    ) -> None:
        if activation is not None and (activation.num_extra_inputs or activation.num_extra_outputs):
            raise ValueError(
                f"ForwardLinearBiasActivation: {type(activation).__name__} has extra tensors; the "
                "activation must have none"
            )
        super().__init__(linear=linear, bias=bias, activation=activation)
        # The text of a built-in activation, which joins the plan of the product.
        self._fuses = activation is not None and ours(activation, Activation)

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
        b: torch.Tensor | None = None
        if self.bias is not None:
            b = with_numbers("Bias", "bias", self.bias.parameter(basic_op_ctxs[1], "bias"))
            b = _kernels.plain(b.detach(), x.dtype)
        activation, ctx = self.activation, basic_op_ctxs[-1]
        following = next_op_input_quantizer
        if self._fuses and not basic_op_kwargs[-1]:
            assert isinstance(activation, Activation)
            y, z = _kernels.product_bias_activation(x, w, b, activation.plan_text())
            activation.record(ctx, z)
            y = _kernels.encode(y, following)
        else:
            y = _kernels.product_bias_activation(x, w, b, None)[0]
            if activation is None:
                y = _kernels.encode(y, following)
            else:
                preceding = ctx.prev_op_grad_output_quantizer
                y = activation.call_forward(ctx, y, preceding, following, basic_op_kwargs[-1])
        return y, [()] * len(basic_op_ctxs)

    @classmethod
    def of(cls: type[Made], ops: Sequence[FusibleOperation]) -> Made | None:
        # Only activations of this package, not every basic op without extra tensors.
        if isinstance(ops[-1], Bias) or ours(ops[-1], Activation):
            return super().of(ops)
        return None

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each BasicLinear with a Bias, an activation or both after it."""
        return replace(ops, ForwardLinearBiasActivation)
