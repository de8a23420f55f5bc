"""Memory of plans on the CPU, used again: to touch fresh pages takes about as long as a pass.

Blocks are torch's; a block is idle once nothing refers to what was lent of it.
"""

from __future__ import annotations

import threading
import weakref

import torch

_LEAST = 1 << 22  # malloc keeps smaller ones itself
_MOST_IDLE = 1 << 30


class _Own(threading.local):
    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)


_own = _Own()
_idle: dict[int, list[torch.Tensor]] = {}


def workspace(size: int) -> torch.Tensor:
    """At least `size` bytes, until this thread asks again."""
    if size > _MOST_IDLE:
        return torch.empty(size, dtype=torch.uint8)
    if size > _own.workspace.numel():
        _own.workspace = torch.empty(size, dtype=torch.uint8)
    return _own.workspace


def saved(count: int, dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, for tensors that live from a forward to its backward."""
    size = count * dtype.itemsize
    if size < _LEAST:
        return torch.empty(count, dtype=dtype)
    try:
        block = _idle[size].pop()
    except (KeyError, IndexError):
        block = torch.empty(size, dtype=torch.uint8)
    lent = block.numpy()
    weakref.finalize(lent, _take_back, block).atexit = False
    return torch.frombuffer(lent, dtype=dtype)


def _take_back(block: torch.Tensor) -> None:
    size = block.numel()
    if size + sum(n * len(blocks) for n, blocks in list(_idle.items())) <= _MOST_IDLE:
        _idle.setdefault(size, []).append(block)
