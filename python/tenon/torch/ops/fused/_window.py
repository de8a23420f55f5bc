"""Replaces sequences of ops in a list."""

from __future__ import annotations

from collections.abc import Callable

from ..op import BasicOperation, FusibleOperation, is_built_in

Maker = Callable[[list[FusibleOperation]], tuple[FusibleOperation, int] | None]


def replace(ops: list[FusibleOperation], make: Maker) -> list[FusibleOperation]:
    """From left to right, `make(the rest)` returns a fused op and how many ops it replaces."""
    done: list[FusibleOperation] = []
    at = 0
    while at < len(ops):
        found = make(ops[at:])
        if found is None:
            done.append(ops[at])
            at += 1
        else:
            done.append(found[0])
            at += found[1]
    return done


def ours(op: FusibleOperation | None, cls: type[BasicOperation]) -> bool:
    """Whether `op` is a `cls` without user code."""
    return isinstance(op, cls) and is_built_in(op)
