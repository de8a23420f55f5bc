"""The op y = x.reshape(shape)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import _kernels
from ..op import BasicOperation, OperationContext

__all__ = ["Reshape"]


class Reshape(BasicOperation):
    """y = x.reshape(shape), dx = g.reshape(x.shape). One dimension may be -1.

    The shape is `Reshape(2, 3)` or `Reshape((2, 3))`.
    """

    op_name = "reshape"

    def __init__(self, *shape: int | Iterable[int]) -> None:
        super().__init__()
        dims: list[int] = []
        for part in shape:
            dims.extend(part if isinstance(part, Iterable) else [part])
        for n in dims:
            if not isinstance(n, int):
                raise TypeError(
                    f"Reshape: {n!r} in the shape; dimensions are whole numbers, and one may be -1"
                )
        self.shape = tuple(dims)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))

    def plan_text(self) -> str | None:
        cols = self.shape[-1] if self.shape else 0
        return f"reshape({cols})" if cols > 0 else None

    def plan_cols(self, cols: int) -> int:
        return self.shape[-1]

    def plan_lead(self, lead: Sequence[int], cols: int) -> Sequence[int] | None:
        count, known = math.prod(lead) * cols, math.prod(n for n in self.shape if n != -1)
        rest, over = divmod(count, known) if known > 0 else (0, 1)
        if over or self.shape.count(-1) > 1 or (-1 not in self.shape and rest != 1):
            return None
        return tuple(rest if n == -1 else n for n in self.shape[:-1])

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        try:
            return tuple(torch.empty(tuple(shape), device="meta").reshape(self.shape).shape)
        except RuntimeError:
            return None

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        ctx.input_shape = input_.shape
        try:
            return _kernels.plain(input_).reshape(self.shape)
        except RuntimeError as e:
            raise ValueError(
                f"Reshape: the input {tuple(input_.shape)} does not become {self.shape}; the "
                "number of elements must be the same"
            ) from e

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> torch.Tensor:
        shape = getattr(ctx, "input_shape", None)
        if shape is None:
            raise RuntimeError(
                "Reshape: the shape of its input is not known; a fusion that runs a Reshape after "
                "ops of your own must set input_shape in the Reshape's context"
            )
        return _kernels.plain(grad_output).reshape(shape)
