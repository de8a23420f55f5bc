"""What cannot see into a kernel: forward-mode derivatives and tracers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx

_in_jit_trace: Any = torch._C._is_tracing


def watched(*tensors: Any) -> str:
    """Why a kernel of these tensors would go unseen, with the remedy; "" if it would not."""
    if _in_jit_trace() or fx._is_fx_tracing_flag:
        return (
            "torch.jit.trace, make_fx and torch.export see nothing of Tenon's kernels; leave this "
            "part out of what is traced, or write it with torch operations"
        )
    if forward_ad._current_level >= 0:
        for t in tensors:
            if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
                return (
                    "forward-mode derivatives are not offered, and the tangent would be lost; use "
                    "backward() or torch.autograd.grad, or write this part with torch operations"
                )
    return ""


def check(*tensors: Any) -> None:
    """Refuses what `watched` tells."""
    if _in_jit_trace() or fx._is_fx_tracing_flag or forward_ad._current_level >= 0:
        why = watched(*tensors)
        if why:
            raise NotImplementedError(f"tenon: {why}")
