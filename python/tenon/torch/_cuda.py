"""Calls on CUDA: the device of the tensors, its current stream, and workspaces from torch.

No function synchronises with the device or reads from it, so every call can be captured in a graph.
Exception: the first product of a plan may be timed, but never during a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from .. import _lib

_MOST_OPTIONS = 1024
_options: dict[tuple[int, int, int, int], _lib.Options] = {}


class _Lent(threading.local):
    """Workspaces of the current call of this thread. Freed memory is reused on the same stream."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.error: BaseException | None = None


_lent = _Lent()


def _lend(device: int | None, size: int) -> int | None:
    try:
        made = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device or 0))
    except BaseException as e:  # exceptions must not cross the C ABI
        _lent.error = e
        return None
    _lent.tensors.append(made)
    return made.data_ptr()


_allocate = _lib.Allocate(_lend)

# For the runs of plans, in which the GPU of the tensors is current. It lends memory for timing.
allocate_here = _lib.Allocate(lambda _, size: _lend(torch.cuda.current_device(), size))


def _stream(device: int) -> int:
    """The handle of the current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


# A private function that torch's generated code also uses. It creates no Python object.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream)


# Likewise: the public function first checks whether CUDA was started.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def options(given: _lib.Options | None, device: int) -> _lib.Options:
    """`given` for a device and its current stream. Equal options are the same object."""
    precision, rounding = (0, 0) if given is None else (given.precision, given.rounding)
    key = (precision, rounding, device, _raw_stream(device))
    found = _options.get(key)
    if found is None:
        if len(_options) >= _MOST_OPTIONS:
            _options.clear()
        found = _options[key] = _lib.Options(
            precision=precision,
            rounding=rounding,
            device=_lib.DEVICE["cuda"],
            stream=key[3],
            allocate=_allocate,
            user=device,
        )
    return found


def on(device: torch.device) -> Any:
    """A context in which a GPU is current. Plans ask their device about kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_of(t: Any) -> Any:
    """The same for the GPU of `t`."""
    return on(t.device)


def run(
    function: Callable[..., int], device: int, given: _lib.Options | None, *arguments: Any
) -> int:
    """Calls function(*arguments, options) on a device. Returns the error code."""
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return run(function, device, given, *arguments)
    try:
        code = function(*arguments, options(given, device))
        if _lent.error is not None:
            raise _lent.error
        return code
    finally:
        if _lent.tensors or _lent.error is not None:
            _lent.tensors, _lent.error = [], None


def run_plan(
    plan: Any,
    device: int,
    pass_: int,
    rows: int,
    memory: Any,
    workspace: int,
    aligned: bool,
    step: int | None = None,
    unchanged: bool = False,
) -> None:
    """Runs a pass of a plan for CUDA, or one step of it.

    The result of a timing may differ between two processes.
    """
    if _current_device() != device:
        with torch.cuda.device(device):
            return run_plan(plan, device, pass_, rows, memory, workspace, aligned, step, unchanged)
    tune = not torch.are_deterministic_algorithms_enabled()
    stream = _raw_stream(device)
    plan.run(
        *(pass_, rows, memory, workspace, stream),
        weights_unchanged=unchanged,
        tune=tune,
        aligned=aligned,
        step=step,
    )
    # Without memory nothing is timed, which is no error.
    if _lent.tensors or _lent.error is not None:
        _lent.tensors, _lent.error = [], None


def index(tensors: Iterable[tuple[str, Any]]) -> int:
    """The common device of named tensors, plain or quantised. Raises an error if they differ."""
    found = [(name, t.device) for name, t in tensors if t is not None]
    first, device = next(((n, d) for n, d in found if d.type == "cuda"), found[0])
    for name, other in found:
        if other.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"tenon: {name} is on {other}; tensors are on the cpu or on cuda, move it with "
                ".cpu() or .cuda()"
            )
        if other != device:
            raise ValueError(
                f"tenon: {name} is on {other}, but {first} is on {device}; the tensors of a call "
                f"are on one device, move it with {name}.to('{device}')"
            )
    return int(device.index)


def same(first: str, t: Any, name: str, other: Any) -> None:
    """Raises an error if two tensors are on different devices."""
    if not (t.is_cpu and other.is_cpu) and t.device != other.device:
        index(((first, t), (name, other)))
