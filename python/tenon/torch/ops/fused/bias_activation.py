"""y = f(x + b) in one kernel, and its backward pass in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import Activation, Bias
from ..op import BackwardResult, ExtraOutputs, FusedOperation, OperationContext
from ._window import ours
from .backward_activation_bias import BackwardActivationBias

if TYPE_CHECKING:
    from ...quantizer import Quantizer
    from ..fuser import Stage

__all__ = ["BiasActivation"]


class BiasActivation(FusedOperation):
    """y = f(x + b); dx = g·f'(x + b), db = column sums of dx. x + b is never stored.

    This op saves x and b. The basic ops save x + b. So it must run in both directions.
    """

    note = "one Tenon kernel"
    bias: Bias
    activation: Activation

    def __init__(self, *, bias: Bias, activation: Activation) -> None:
        super().__init__([bias, activation])
        self.__dict__.update(bias=bias, activation=activation)

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
        bias, activation = self.bias, self.activation
        kernel, b = activation.kernel, bias.numbers(basic_op_ctxs[0])
        dtype = _kernels.compute_dtype("BiasActivation", input_)
        x = _kernels.foldable(input_)
        y = _kernels.activation_forward(
            kernel.text,
            x,
            dtype,
            gated=kernel.gated,
            layout=kernel.layout,
            bias=b,
            quantizer=next_op_input_quantizer,
        )
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(x, b)
            basic_op_ctxs[1].kernel = kernel
        return y, [(), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        bias, activation = self.bias, self.activation
        x, b = basic_op_ctxs[1].saved_tensors
        trained = bias.parameter(basic_op_ctxs[0], "bias").requires_grad
        kernel = activation.kernel_of(basic_op_ctxs[1])
        dx, dbias, _ = _kernels.activation_backward(
            kernel.text,
            grad_output,
            x,
            layout=kernel.layout,
            bias=b,
            dbias_dtype=b.dtype if trained else None,
            quantizer=basic_op_ctxs[0].prev_op_grad_output_quantizer,
        )
        return dx, [(dbias,), ()], [(), ()]

    @staticmethod
    def fuse_pairs(forward: list[Stage], backward: list[Stage]) -> tuple[list[Stage], list[Stage]]:
        """Fuses each [Bias, activation] that is unfused in both directions."""
        from ..fuser import Stage

        for at in range(len(forward) - 1, 0, -1):
            bias, activation = forward[at - 1].op, forward[at].op
            if not ours(bias, Bias) or not ours(activation, Activation):
                continue
            assert isinstance(bias, Bias) and isinstance(activation, Activation)
            if activation.cache_quantized_input:
                continue
            start, stop = forward[at - 1].start, forward[at].stop
            behind = [s for s in backward if s.start < stop and s.stop > start]
            alone = [s.op for s in behind] == [bias, activation]
            if not alone and not isinstance(behind[0].op, BackwardActivationBias):
                continue
            stage = Stage(BiasActivation(bias=bias, activation=activation), start, stop, False)
            forward[at - 1 : at + 1] = [stage]
            place = backward.index(behind[0])
            backward[place : place + len(behind)] = [stage]
        return forward, backward
