"""The op y = x + extra input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..op import BackwardResult, BasicOperation, ExtraOutputs, OperationContext

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["AddExtraInput"]


class AddExtraInput(BasicOperation):
    """y = x + e. The extra input e has the shape of x. Both gradients are g.

    With `in_place`, y is e itself, overwritten, if this is the last op, no gradient is recorded, no
    tensor of the call requires one, and the caller provided e. A checkpoint that runs the op twice
    needs a fresh e each time.
    """

    op_name = "add"
    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def extra_repr(self) -> str:
        return "in_place=True" if self.in_place else ""

    def plan_text(self) -> str:
        return "add"

    def overwrites(self, x: torch.Tensor, extra: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the sum, of `dtype`, may be written over the extra input.

        No other tensor may have its memory. A checkpoint runs the forward pass again, with
        gradients, on the same tensors.
        """
        return (
            self.in_place
            and extra.dtype == dtype
            and extra.is_contiguous()
            and not extra.is_neg()
            and not (x.requires_grad or extra.requires_grad)
            and x.untyped_storage().data_ptr() != extra.untyped_storage().data_ptr()
        )

    @staticmethod
    def check(x: Any, extra: torch.Tensor) -> None:
        """Raises an error if x and the extra input do not match."""
        _kernels.compute_dtype("AddExtraInput", x, extra)
        if x.shape != extra.shape:
            raise ValueError(
                f"AddExtraInput: the input is {tuple(x.shape)}, the extra input "
                f"{tuple(extra.shape)}; they must have the same shape"
            )

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
        (extra,) = basic_op_extra_inputs[0]
        self.check(input_, extra)
        x = _kernels.plain(input_)
        # The tensor of a channel belongs to another op and may be the caller's input.
        own = 0 not in self._input_channels
        recorded = basic_op_ctxs[0].requires_grad or basic_op_ctxs[0]._wanted
        if (
            own
            and not recorded
            and self.overwrites(x, extra, torch.promote_types(x.dtype, extra.dtype))
        ):
            y = extra.add_(x)
        else:
            y = x + extra
        return _kernels.encode(y, next_op_input_quantizer), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        g = _kernels.plain(grad_output)
        return g, [()], [(g,)]
