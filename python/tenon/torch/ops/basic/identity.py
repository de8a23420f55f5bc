"""The op y = x."""

from __future__ import annotations

from typing import Any

import torch

from ..op import BasicOperation, OperationContext

__all__ = ["Identity"]


class Identity(BasicOperation):
    """y = x, dx = g."""

    op_name = "identity"

    def plan_text(self) -> str:
        return "identity"

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        return grad_output
