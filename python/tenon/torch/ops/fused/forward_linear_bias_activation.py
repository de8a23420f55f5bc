"""y = f(x·Wᵀ + b) in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import Activation, BasicLinear, Bias
from ..op import (
    BasicOperation,
    ExtraOutputs,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    with_numbers,
)
from ._window import ours, replace

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["ForwardLinearBiasActivation"]


class ForwardLinearBiasActivation(FusedOperation):
    """y = f(x·Wᵀ + b): the matrix product adds the bias, the activation is one kernel.

    It saves the same tensors as `BasicLinear`, `Bias` and the activation. So their backward passes,
    fused or not, can follow. `bias` and `activation` may be None.
    """

    note = "one GEMM with bias, then one Tenon kernel"
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
        ops: list[BasicOperation] = [linear]
        if bias is not None:
            ops.append(bias)
        if activation is not None:
            if activation.num_extra_inputs or activation.num_extra_outputs:
                raise ValueError(
                    f"ForwardLinearBiasActivation: {type(activation).__name__} has extra tensors; "
                    "the activation must have none"
                )
            ops.append(activation)
        super().__init__(ops)
        # Plain attributes, because the modules are already registered as basic_ops.
        self.__dict__.update(linear=linear, bias=bias, activation=activation)
        # The op_forward of a built-in op takes both quantizers, so no signature lookup is needed.
        self._quick = activation is not None and ours(activation, Activation)

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
            b = self.bias.parameter(basic_op_ctxs[1], "bias")
            if with_numbers("Bias", "bias", b).dtype != x.dtype:
                b = b.to(x.dtype)
        y = torch.nn.functional.linear(x, w, b)
        if self.activation is None:
            y = _kernels.encode(y, next_op_input_quantizer)
        else:
            ctx, kwargs = basic_op_ctxs[-1], basic_op_kwargs[-1]
            before, behind = ctx.prev_op_grad_output_quantizer, next_op_input_quantizer
            if self._quick and not kwargs:
                y = self.activation.op_forward(
                    ctx, y, prev_op_grad_output_quantizer=before, next_op_input_quantizer=behind
                )
            else:
                y = self.activation.call_forward(ctx, y, before, behind, kwargs)
        return y, [()] * len(basic_op_ctxs)

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [BasicLinear, Bias] and [BasicLinear, Bias, activation]."""

        def make(rest: list[FusibleOperation]) -> tuple[FusibleOperation, int] | None:
            linear, bias = rest[0], rest[1] if len(rest) > 1 else None
            if not ours(linear, BasicLinear) or not ours(bias, Bias):
                return None
            assert isinstance(linear, BasicLinear) and isinstance(bias, Bias)
            activation = rest[2] if len(rest) > 2 and ours(rest[2], Activation) else None
            assert activation is None or isinstance(activation, Activation)
            fused = ForwardLinearBiasActivation(linear=linear, bias=bias, activation=activation)
            return fused, 2 if activation is None else 3

        return replace(ops, make)
