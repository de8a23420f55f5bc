"""Checks the tensors of a backward pass, because kernels trust addresses and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Older torch keeps saved tensors until the node has run.
CLEARS = hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors")

Kind = tuple[torch.Size, torch.dtype, torch.device] | None


def kinds(tensors: Sequence[torch.Tensor | None]) -> list[Kind]:
    """The shape, dtype and device of each tensor."""
    return [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]


def check(
    op: str, then: Sequence[Kind], tensors: Sequence[Any], what: str = "saved tensor"
) -> None:
    """Raises an error if tensors differ in kind from those of the forward pass."""
    now = kinds(tensors)
    if now == then:
        return
    for i, (a, b) in enumerate(zip(now, then, strict=True)):
        if a != b:
            raise RuntimeError(
                f"{op}: {what} {i} is {_told(a)}, but it was {_told(b)} in the forward pass; "
                "saved_tensors_hooks must give back what they were given, and .data may get other "
                "values between the passes, but no other shape, dtype or device"
            )


def check_blocks(
    op: str,
    then: Sequence[tuple[int, torch.dtype]],
    blocks: Sequence[torch.Tensor],
    device: torch.device,
) -> None:
    """The same for one-dimensional tensors, by size and dtype."""
    for (size, dtype), t in zip(then, blocks, strict=True):
        if t.dtype != dtype or t.numel() != size or t.device != device:
            check(op, [(torch.Size((n,)), kind, device) for n, kind in then], blocks)


def check_gradient(op: str, name: str, grad: Any, shape: Sequence[int], device: Any) -> None:
    """Raises an error if the shape or device of a gradient differs from that of its tensor."""
    if isinstance(grad, torch.Tensor) and (
        not grad.is_floating_point() or grad.layout is not torch.strided
    ):
        raise RuntimeError(
            f"{op}: the gradient of {name} is {grad.dtype}, {grad.layout}; it must be a dense "
            "floating-point tensor"
        )
    if grad.shape != shape or grad.device != device:
        raise RuntimeError(
            f"{op}: the gradient of {name} has the shape {tuple(grad.shape)} on {grad.device}; it "
            f"must be {tuple(shape)} on {device}, as {name} is"
        )


# Private functions of torch. Without them every saved tensor counts as reachable.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def hooked() -> bool:
    """Whether hooks get the tensors that are saved now."""
    return _top_hooks is None or _top_hooks(False) is not None


def addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Where saved tensors are that only the graph can reach. None if hooks get them."""
    if hooked():
        return None
    return [t.data_ptr() for t in tensors]


def overwritable(then: list[int] | None, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether this backward pass is the last one that reads the saved tensors."""
    if then is None or _keeps_graph is None or _keeps_graph():
        return False
    return then == [t.data_ptr() for t in tensors]


def kept() -> bool:
    """Whether another backward pass through this graph may follow."""
    return _keeps_graph is None or bool(_keeps_graph())


def _told(kind: Kind) -> str:
    return "None" if kind is None else f"{tuple(kind[0])} {kind[1]} on {kind[2]}"
