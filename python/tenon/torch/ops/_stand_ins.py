"""Tensors without memory that stand for others in the autograd graph."""

from __future__ import annotations

import torch

_nothing: dict[torch.device, torch.Tensor] = {}


def stand_in(t: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that depends on `t` in the autograd graph."""
    nothing = _nothing.get(t.device)
    if nothing is None:
        nothing = _nothing[t.device] = torch.empty(0, dtype=torch.int64, device=t.device)
    return (t if t.dim() else t.unsqueeze(0)).index_select(0, nothing)
