"""An op that quantises the tensor in a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _kernels
from ..op import BasicOperation, OperationContext

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["Quantize"]


class Quantize(BasicOperation):
    """y = decode(encode(x)), dx = decode(encode(g)), with the forward and the backward quantizer.

    Without quantizers of its own, it takes those of the recipe of `autocast`. Between two ops the
    encoded tensor is passed without decoding, and at the end of a chain it is the result. If
    possible, the previous op writes it directly. If a direction is off or has no quantizer, the op
    is the identity in it.
    """

    op_name = "quantize"

    def __init__(
        self,
        forward: bool = True,
        backward: bool = False,
        *,
        quantizer: Quantizer | None = None,
        grad_quantizer: Quantizer | None = None,
    ) -> None:
        super().__init__()
        self._on = {"forward": forward, "backward": backward or grad_quantizer is not None}
        if forward:
            self.set_quantizer("forward", 0, quantizer)
        if self._on["backward"]:
            self.set_quantizer("backward", 0, grad_quantizer)

    def num_quantizers(self, mode: str) -> int:
        return int(self._on[mode])

    def plan_text(self) -> str:
        return "quantize"

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        if self._on["forward"]:
            self.calibrate("forward", 0, input_)
        return _kernels.encode(input_, self.get_input_quantizer())

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        if self._on["backward"]:
            self.calibrate("backward", 0, grad_output)
        return _kernels.encode(grad_output, self.get_grad_output_quantizer())
