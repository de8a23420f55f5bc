"""y = residual + dropout(x + b) in one kernel, and its backward pass in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..basic import AddExtraInput, Bias, Dropout
from ..op import (
    BackwardResult,
    BasicOperation,
    ExtraOutputs,
    FusedOperation,
    FusibleOperation,
    OperationContext,
)
from ._window import ours, replace

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["BackwardBiasDropoutAdd", "ForwardBiasDropoutAdd"]


class _BiasDropoutAdd(FusedOperation):
    """[Bias] Dropout [AddExtraInput], at least two of them."""

    note = "one Tenon kernel"
    bias: Bias | None
    dropout: Dropout
    add: AddExtraInput | None

    def __init__(
        self, *, bias: Bias | None, dropout: Dropout, add: AddExtraInput | None = None
    ) -> None:
        ops: list[BasicOperation | None] = [bias, dropout, add]
        super().__init__([op for op in ops if op is not None])
        self.__dict__.update(bias=bias, dropout=dropout, add=add)

    def _dropout_ctx(self, ctxs: list[OperationContext]) -> OperationContext:
        return ctxs[0 if self.bias is None else 1]

    @classmethod
    def _fuse(cls, ops: list[FusibleOperation]) -> list[FusibleOperation]:
        def make(rest: list[FusibleOperation]) -> tuple[FusibleOperation, int] | None:
            bias = rest[0] if ours(rest[0], Bias) else None
            rest = rest[1:] if bias else rest
            if not rest or not ours(rest[0], Dropout):
                return None
            dropout = rest[0]
            add = rest[1] if len(rest) > 1 and ours(rest[1], AddExtraInput) else None
            assert isinstance(dropout, Dropout)
            assert bias is None or isinstance(bias, Bias)
            assert add is None or isinstance(add, AddExtraInput)
            count = 1 + (bias is not None) + (add is not None)
            return (cls(bias=bias, dropout=dropout, add=add), count) if count > 1 else None

        return replace(ops, make)


class ForwardBiasDropoutAdd(_BiasDropoutAdd):
    """y = residual + dropout(x + b). b and residual are optional. Saves the same as Dropout."""

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
        dtype = _kernels.compute_dtype("ForwardBiasDropoutAdd", input_)
        x = _kernels.plain(input_)
        residual = None
        if self.add is not None:
            (residual,) = basic_op_extra_inputs[-1]
            AddExtraInput.check(x, residual)
            dtype = torch.promote_types(dtype, residual.dtype)
        bias, dropout = self.bias, self.dropout
        state = dropout.draw(self._dropout_ctx(basic_op_ctxs), x)
        y = _kernels.bias_dropout_add(
            x,
            dtype,
            bias=None if bias is None else bias.numbers(basic_op_ctxs[0]),
            residual=residual,
            p=0.0 if state is None else dropout.p,
            random=state,
        )
        return _kernels.encode(y, next_op_input_quantizer), [()] * len(basic_op_ctxs)

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces [Bias, Dropout, AddExtraInput], also without the first or the last."""
        return ForwardBiasDropoutAdd._fuse(ops)


class BackwardBiasDropoutAdd(_BiasDropoutAdd):
    """dx = g/(1 − p) for kept elements, else 0. db = column sums of dx. d residual = g."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        g = _kernels.plain(grad_output)
        bias = self.bias
        p, state = self.dropout.drawn(self._dropout_ctx(basic_op_ctxs))
        dbias_dtype = None
        if bias is not None:
            b = bias.parameter(basic_op_ctxs[0], "bias")
            dbias_dtype = b.dtype if b.requires_grad else None
        dx: torch.Tensor | None = g
        dbias = None
        if state is not None or dbias_dtype is not None:
            made, dbias = _kernels.bias_dropout_add_backward(
                g,
                dtype=None if state is None else g.dtype,
                dbias_dtype=dbias_dtype,
                p=p,
                random=state,
            )
            dx = g if made is None else made
        assert dx is not None
        dx = _kernels.encode(dx, basic_op_ctxs[0].prev_op_grad_output_quantizer)
        parameters: list[Any] = [()] * len(basic_op_ctxs)
        extras: list[Any] = [()] * len(basic_op_ctxs)
        if bias is not None:
            parameters[0] = (dbias,)
        if self.add is not None:
            extras[-1] = (g,)
        return dx, parameters, extras

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces [Bias, Dropout, AddExtraInput], also without the first or the last."""
        return BackwardBiasDropoutAdd._fuse(ops)
