"""Fused operations that stand for adjacent basic ops of given kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, ClassVar, TypeVar

from ..op import BasicOperation, FusedOperation, FusibleOperation, is_built_in

Made = TypeVar("Made", bound="Window")


class Window(FusedOperation):
    """Base class. `kinds` has the arguments of the class, in the order of the ops."""

    kinds: ClassVar[dict[str, type[BasicOperation]]]
    optional: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **members: Any) -> None:
        name = type(self).__name__
        ops: list[BasicOperation] = []
        for role, kind in self.kinds.items():
            op = members[role]
            if op is None and role in self.optional:
                continue
            if not isinstance(op, kind):
                raise TypeError(
                    f"{name}: {role} is a {type(op).__name__}; it must be of the class "
                    f"{kind.__name__}"
                )
            ops.append(op)
        super().__init__(ops)
        # Plain attributes, because the modules are already registered as basic_ops.
        self.__dict__.update(members)

    @classmethod
    def of(cls: type[Made], ops: Sequence[FusibleOperation]) -> Made | None:
        """The fused op for exactly these ops. None if they are of other kinds."""
        required = [role for role in cls.kinds if role not in cls.optional]
        left_out = len(cls.kinds) - len(ops)
        if len(ops) < 2 or left_out < 0:
            return None
        for missing in combinations(cls.optional, left_out):
            roles = [role for role in cls.kinds if role in required or role not in missing]
            if all(ours(op, cls.kinds[role]) for op, role in zip(ops, roles, strict=True)):
                return cls(**dict.fromkeys(missing), **dict(zip(roles, ops, strict=True)))
        return None


def replace(ops: Sequence[FusibleOperation], cls: type[Window]) -> list[FusibleOperation]:
    """From left to right, replaces ops by a `cls`, the longest first."""
    done: list[FusibleOperation] = []
    at = 0
    while at < len(ops):
        found = None
        for stop in range(min(at + len(cls.kinds), len(ops)), at + 1, -1):
            found = found or cls.of(ops[at:stop])
        done.append(ops[at] if found is None else found)
        at += 1 if found is None else len(found.basic_ops)
    return done


def ours(op: FusibleOperation | None, cls: type[BasicOperation]) -> bool:
    """Whether `op` is a `cls` without user code."""
    return isinstance(op, cls) and is_built_in(op)
