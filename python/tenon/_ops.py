"""The ops of a chain other than activations, with their schemas."""

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
    """An argument of an op in a chain: `name=value`, or by position."""

    name: str
    # "columns": columns of the input, checked if given. "count": integer >= 1. Others: number,
    # flag, text.
    kind: str
    required: bool
    value: float | None  # default of a number or a flag
    least: float
    most: float


class OpParameter(NamedTuple):
    """A trainable tensor of the op, with as many columns as the input of the op."""

    name: str
    rows: str | None  # the argument that sets its number of rows. None: one row.


class OpExtra(NamedTuple):
    """A tensor that the op reads in addition to its input."""

    name: str
    kind: str  # tensor: shape of the input; column: one value per row; scalar: one value


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
    """All ops that a chain may contain except activations (`names()`), with their schemas."""
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
