"""dx of an RMS norm + the gradient of an extra output, in one plan."""

from __future__ import annotations

from typing import Any

from ..basic import MakeExtraOutput, RMSNorm
from ..op import FusibleOperation
from ._backward_add import BackwardAdd
from ._window import replace

__all__ = ["BackwardAddRMSNorm"]


class BackwardAddRMSNorm(BackwardAdd):
    """Backward of an extra output before an RMSNorm: dx = norm' + the gradient of that output."""

    kinds = {"add": MakeExtraOutput, "norm": RMSNorm}
    add: MakeExtraOutput
    norm: RMSNorm

    def __init__(self, *, add: MakeExtraOutput, norm: RMSNorm) -> None:
        super().__init__(add=add, norm=norm)

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """Replaces each [MakeExtraOutput, RMSNorm]."""
        return replace(ops, BackwardAddRMSNorm)
