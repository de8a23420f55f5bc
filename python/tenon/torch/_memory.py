"""Reuses the memory of plans on the CPU. First access to fresh pages costs about as much as a pass.

Blocks are torch tensors. A block is free when nothing references the tensors made from it.
"""

from __future__ import annotations

import threading
import weakref

import torch

_LEAST = 1 << 22  # bytes. malloc reuses smaller blocks itself.
_MOST_IDLE = 1 << 30


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class _Own(threading.local):
    def __init__(self) -> None:
        self.workspace = _bytes(0)


_own = _Own()
_idle: dict[int, list[torch.Tensor]] = {}  # key: size. The most recently used block is last.


def workspace(size: int) -> torch.Tensor:
    """At least `size` bytes for one call. The next call of this thread reuses them."""
    if size > _MOST_IDLE or torch.compiler.is_compiling():
        return _bytes(size)
    if size > _own.workspace.numel():
        _own.workspace = _bytes(size)
    return _own.workspace


def saved(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Like torch.empty, for tensors that live from the forward to the backward pass."""
    size = count * dtype.itemsize
    if size < _LEAST or torch.compiler.is_compiling():
        return torch.empty(count, dtype=dtype, device="cpu")
    try:
        block = _idle[size].pop()
    except (KeyError, IndexError):
        block = _bytes(size)
    lent = block.numpy()
    weakref.finalize(lent, _take_back, block).atexit = False
    return torch.frombuffer(lent, dtype=dtype)


def _take_back(block: torch.Tensor) -> None:
    # In a race between threads a block may go back to the allocator. No block is used twice.
    size = block.numel()
    blocks = _idle.pop(size, [])
    blocks.append(block)
    _idle[size] = blocks
    while sum(n * len(some) for n, some in list(_idle.items())) > _MOST_IDLE:
        _idle.pop(next(iter(_idle), 0), None)
