"""Detects forward-mode AD, torch.func transforms and tracers, which cannot see into a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx

_in_jit_trace: Any = torch._C._is_tracing
_num_modes: Any = torch._C._len_torch_dispatch_stack
_fake_mode = torch._C._TorchDispatchModeKey.FAKE
_transforming: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_TORCH = "or write this part with torch operations"


_NO_TANGENT = (
    "forward-mode derivatives are not offered, and the tangent would be lost; use backward() or "
    f"torch.autograd.grad, {_TORCH}"
)


def _has_tangent(tensors: Any) -> bool:
    return forward_ad._current_level >= 0 and any(
        isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None
        for t in tensors
    )


def check_forward_mode(op: str, *tensors: Any) -> None:
    """Raises an error under forward-mode AD."""
    if _has_tangent(tensors):
        raise NotImplementedError(f"tenon: {op}: {_NO_TANGENT}")


def watched(*tensors: Any) -> str:
    """Why a kernel on these tensors would not be recorded, with the remedy. "" if it would."""
    if _in_jit_trace() or fx._is_fx_tracing_flag:
        return (
            "torch.jit.trace, make_fx, torch.export and torch.onnx.export see nothing of Tenon's "
            f"kernels; leave this part out of what is traced, {_TORCH}"
        )
    fake = torch._C._get_dispatch_mode(_fake_mode) if _num_modes() else None
    if fake is not None or any(type(t).__name__ == "FakeTensor" for t in tensors):
        return (
            "the tensors are fake: torch.export, torch.onnx.export and FakeTensorMode run no "
            f"kernel, and Tenon's are no operators of torch; leave this part out, {_TORCH}"
        )
    if _has_tangent(tensors):
        return _NO_TANGENT
    if _transforming():  # under a transform torch.empty also returns no memory
        return (
            "torch.func.vmap, grad, vjp, jvp and their kin see nothing of Tenon's kernels; fold "
            "the batch into the rows, which kernels keep apart, and use backward() or "
            f"torch.autograd.grad, {_TORCH}"
        )
    return ""


modes = _num_modes
transforming = _transforming


def traced(t: Any) -> bool:
    """Whether torch should see a call as an operator."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return bool(_num_modes()) or _transforming() or type(t).__name__ == "FakeTensor"


def check(op: Any, *tensors: Any) -> None:
    """Raises an error with the reason from `watched`. `op` is a name, or str(op) is."""
    if (
        _in_jit_trace()
        or fx._is_fx_tracing_flag
        or forward_ad._current_level >= 0
        or _transforming()
        or _num_modes()
        or type(tensors[0]).__name__ == "FakeTensor"
    ):
        _refuse(op, *tensors)


def check_tracers(op: str, *tensors: Any) -> None:
    """Raises an error under tracers that would run a kernel without recording it."""
    if _in_jit_trace() or fx._is_fx_tracing_flag or forward_ad._current_level >= 0:
        _refuse(op, *tensors)


def _refuse(op: Any, *tensors: Any) -> None:
    why = watched(*tensors)
    if why:
        raise NotImplementedError(f"tenon: {op}: {why}")


def not_scriptable(module: torch.nn.Module) -> Any:
    """Raises an error for torch.jit.script."""
    raise NotImplementedError(
        f"tenon: {type(module).__name__}: torch.jit.script cannot compile operations, which are "
        f"Python and kernels; leave this module out of what is scripted, {_TORCH}"
    )
