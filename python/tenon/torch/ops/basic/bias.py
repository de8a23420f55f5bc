"""The op y = x + b."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..op import OperationContext, PartOperation, with_numbers

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["Bias"]


class Bias(PartOperation):
    """y = x + b with one trainable value per column. db is the column sum of the gradient.

    The output has the dtype of the input, or of autocast if enabled. The sum is rounded once.
    """

    op_name = "bias"
    parameter_names = ("bias",)

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        if tensor_parallel or tensor_parallel_group is not None:
            raise NotImplementedError(
                "Bias: tensor parallelism is not offered yet; leave tensor_parallel out"
            )
        self.local_size = size
        self.bias = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets b = 0."""
        torch.nn.init.zeros_(self.bias)

    def numbers(self, ctx: OperationContext) -> torch.Tensor:
        """b for a kernel call."""
        return with_numbers("Bias", "bias", self.parameter(ctx, "bias")).detach()

    def extra_repr(self) -> str:
        return str(self.local_size)

    def plan_text(self) -> str:
        return "bias"

    def plan_width(self) -> int:
        return self.local_size

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        dtype = _kernels.compute_dtype("Bias", input_)
        if ctx.requires_grad:
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
            ctx.grad_input_quantizer = prev_op_grad_output_quantizer
        y = _kernels.bias_dropout_add(_kernels.plain(input_), dtype, bias=self.numbers(ctx))
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        dy = _kernels.plain(grad_output)
        quantizer = ctx.prev_op_grad_output_quantizer
        bias = self.parameter(ctx, "bias")
        if not bias.requires_grad:
            return _kernels.encode(dy, quantizer), (None,)
        if quantizer is not None:
            dx, dbias = _kernels.bias_gradient_quantize(dy, bias.dtype, quantizer)
            return dx, (dbias,)
        return dy, (_kernels.bias_dropout_add_backward(dy, dbias_dtype=bias.dtype)[1],)
