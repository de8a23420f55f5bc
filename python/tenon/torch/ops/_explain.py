"""What a module made of operations runs, in words."""

from __future__ import annotations

from typing import Any

import torch

from .fuser import OperationFuser, Stage, stage_name
from .op import FusibleOperation
from .sequential import Sequential

__all__ = ["explain"]


def explain(module: torch.nn.Module, input: torch.Tensor | None = None) -> str:
    """The steps of `module` forward and backward: which ops each fuses, and what it runs.

    Nothing is computed. `input` says whether a gradient of the input is wanted; without it none
    is. A step's numbers are those of basic ops within the run of operations it belongs to.
    """
    wanted = input is not None and isinstance(input, torch.Tensor) and input.requires_grad
    if isinstance(module, Sequential):
        groups = module.groups()
    elif isinstance(module, FusibleOperation):
        groups = [(module._alone(), [0])]
    else:
        raise TypeError(
            f"explain: {type(module).__name__} is neither a tenon.torch.ops.Sequential nor an "
            "operation; give it one of its parts"
        )
    lines: list[str] = []
    for part, indices in groups:
        where = f"{indices[0]}" if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        if not isinstance(part, OperationFuser):
            lines.append(f"module {where}: {type(part).__name__}, by itself")
            wanted = wanted or any(p.requires_grad for p in part.parameters())
            continue
        _, counts, first = part.parameters()
        if not torch.is_grad_enabled():
            first = len(counts)
        elif wanted:
            first = 0
        forward, backward = part.plan()
        node = "one node of autograd" if first < len(counts) else "no gradient"
        lines.append(f"modules {where}: {node}")
        lines += [_line("forward ", stage) for stage in forward]
        lines += [_line("backward", stage) for stage in reversed(backward) if stage.stop > first]
        wanted = wanted or first < len(counts)
    return "\n".join(lines)


def _line(direction: str, stage: Stage) -> str:
    at = f"{stage.start}" if stage.stop == stage.start + 1 else f"{stage.start}-{stage.stop - 1}"
    note: Any = getattr(stage.op, "note", None)
    return f"  {direction} {at:>5}  {stage_name(stage)}" + (f": {note}" if note else "")
