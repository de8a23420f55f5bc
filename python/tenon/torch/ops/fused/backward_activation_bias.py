"""dx = g·f'(x) and its column sums in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from .. import _kernels
from ..basic import Activation, Bias
from ..op import BackwardResult, FusibleOperation, OperationContext
from ._window import Window, replace

__all__ = ["BackwardActivationBias"]


class BackwardActivationBias(Window):
    """Backward of f(x + b): dx = g·f'(z) and db = column sums of dx. f saved z = x + b.

    dx is written in the encoding of the previous op's quantizer.
    """

    note = "one Tenon kernel"
    kinds = {"bias": Bias, "activation": Activation}
    bias: Bias
    activation: Activation

    def __init__(self, *, bias: Bias, activation: Activation) -> None:
        super().__init__(bias=bias, activation=activation)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        bias, activation = self.bias, self.activation
        (z,) = basic_op_ctxs[1].saved_tensors
        kernel = activation.kernel_of(basic_op_ctxs[1])
        b = bias.parameter(basic_op_ctxs[0], "bias")
        dx, dbias, _ = _kernels.activation_backward(
            kernel.text,
            grad_output,
            z,
            layout=kernel.layout,
            dbias_dtype=b.dtype if b.requires_grad else None,
            quantizer=basic_op_ctxs[0].prev_op_grad_output_quantizer,
        )
        return dx, [(dbias,), ()], [(), ()]

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [Bias, activation]."""
        return replace(ops, BackwardActivationBias)
