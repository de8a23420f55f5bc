"""dx = g·W + the gradient of an extra output, in one plan."""

from __future__ import annotations

from typing import Any

from ..basic import BasicLinear, MakeExtraOutput
from ..op import FusibleOperation
from ._backward_add import BackwardAdd
from ._window import replace

__all__ = ["BackwardLinearAdd"]


class BackwardLinearAdd(BackwardAdd):
    """Backward of an extra output before a linear: dx = g·W + the gradient of that output."""

    kinds = {"backward_add": MakeExtraOutput, "linear": BasicLinear}
    backward_add: MakeExtraOutput
    linear: BasicLinear

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__(backward_add=backward_add, linear=linear)

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [MakeExtraOutput, BasicLinear]."""
        return replace(ops, BackwardLinearAdd)
