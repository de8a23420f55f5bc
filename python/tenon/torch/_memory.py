"""Memory of plans on the CPU, used again: to touch fresh pages takes about as long as a pass.

Blocks are torch's; a block is idle once nothing refers to what was lent of it.
"""

from __future__ import annotations

import threading
import weakref

import torch

_LEAST = 1 << 22  # malloc keeps smaller ones itself
_MOST_IDLE = 1 << 30


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class _Own(threading.local):
    def __init__(self) -> None:
        self.workspace = _bytes(0)


_own = _Own()
_idle: dict[int, list[torch.Tensor]] = {}  # by size, the one that was used last at the end


def workspace(size: int) -> torch.Tensor:
    """At least `size` bytes, for one call: this thread's next call has the same ones."""
    if size > _MOST_IDLE or torch.compiler.is_compiling():
        return _bytes(size)
    if size > _own.workspace.numel():
        _own.workspace = _bytes(size)
    return _own.workspace


def saved(count: int, dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, for tensors that live from a forward to its backward."""
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
    # Threads that meet here may lose a block to the allocator, never lend one twice.
    size = block.numel()
    blocks = _idle.pop(size, [])
    blocks.append(block)
    _idle[size] = blocks
    while sum(n * len(some) for n, some in list(_idle.items())) > _MOST_IDLE:
        _idle.pop(next(iter(_idle), 0), None)
