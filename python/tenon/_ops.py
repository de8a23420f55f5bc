"""The ops that a chain may name besides activations, with their schemas."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ._c_abi import ARGUMENT_KIND, EXTRA_KIND
from ._c_abi import Op as _Op
from ._lib import lib, list_of

__all__ = ["Op", "OpArgument", "OpExtra", "OpParameter", "ops"]

_ARGUMENTS = [name.removeprefix("argument_") for name in ARGUMENT_KIND]
_EXTRAS = [name.removeprefix("extra_") for name in EXTRA_KIND]


class OpArgument(NamedTuple):
    """What an op is given in a chain: `name=value`, or by position."""

    name: str
    # columns: those of the op's input, checked if given; count: a whole number from 1; number; flag
    # or text.
    kind: str
    required: bool
    value: float | None  # of a number or a flag that is not given
    least: float
    most: float


class OpParameter(NamedTuple):
    """A tensor that the op learns, with as many columns as its input."""

    name: str
    rows: str | None  # the argument that says how many rows it has; None: one


class OpExtra(NamedTuple):
    """A tensor that the op reads besides its input."""

    name: str
    kind: str  # tensor: of the input's shape; column: one value a row; scalar: one value


class Op(NamedTuple):
    """An op of the registry."""

    name: str
    summary: str
    arguments: tuple[OpArgument, ...]
    parameters: tuple[OpParameter, ...]
    extra_inputs: tuple[OpExtra, ...]
    extra_outputs: int


@cache
def ops() -> tuple[Op, ...]:
    """All ops that a chain may name besides activations (`names()`), with their schemas."""
    return tuple(map(_op, list_of(lib.tenon_ops, _Op)))


def _op(c: _Op) -> Op:
    return Op(
        c.name.decode(),
        c.summary.decode(),
        tuple(
            OpArgument(
                a.name.decode(),
                _ARGUMENTS[a.kind],
                bool(a.required),
                a.value if not a.required and _ARGUMENTS[a.kind] in ("number", "flag") else None,
                a.least,
                a.most,
            )
            for a in c.arguments[: c.argument_count]
        ),
        tuple(
            OpParameter(p.name.decode(), p.rows.decode() if p.rows else None)
            for p in c.parameters[: c.parameter_count]
        ),
        tuple(
            OpExtra(e.name.decode(), _EXTRAS[e.kind]) for e in c.extra_inputs[: c.extra_input_count]
        ),
        c.extra_output_count,
    )
