"""Activation keys: tuples as in Transformer Engine, names, formulas and functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._numpy import activation_info, resolve

ActivationType = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
ActParams = Mapping[str, float] | Iterable[float] | None

# Names of Transformer Engine: the one pair that is not f(a)·b, and the one renamed parameter.
_PAIRS = {("clamped_silu", "clamped_linear"): "clamped_swiglu"}
_PARAMETERS = {"glu_linear_offset": "offset"}


@dataclass(frozen=True)
class Act:
    """A resolved key: its name in the library, inputs (1 or 2) and parameter values."""

    text: str
    name: str
    inputs: int
    params: tuple[float, ...]


def act_of(op: str, activation_type: ActivationType, act_params: ActParams = None) -> Act:
    """The checked activation of a key. `op` names the caller in messages."""
    text = _text(op, activation_type)
    info = activation_info(text)
    if info["scaled"]:
        raise ValueError(
            f"{op}: {info['name']} needs one scale a row, which has no place here; use the "
            "activation without scaled(...) and multiply its result"
        )
    return Act(text, info["name"], info["inputs"], _values(op, info, act_params))


def _text(op: str, key: ActivationType) -> str:
    if isinstance(key, str) or not isinstance(key, Sequence):
        return _traced(op, key)
    names = tuple(key)
    if len(names) == 1:
        return _traced(op, names[0])
    if len(names) != 2:
        raise ValueError(
            f"{op}: activation_type = {names!r} has {len(names)} entries; it must be (f,), "
            "(f, 'linear') or ('clamped_silu', 'clamped_linear')"
        )
    first, second = names
    if isinstance(first, str) and isinstance(second, str) and (first, second) in _PAIRS:
        return _PAIRS[first, second]
    if second != "linear":
        raise ValueError(
            f"{op}: activation_type = {names!r} is not known; a pair is (f, 'linear') for f(a)*b "
            "or ('clamped_silu', 'clamped_linear'); write any other one as a formula of a and b, "
            "e.g. ('silu(a)*tanh(b)',)"
        )
    return f"gated({_traced(op, first)})"


def _traced(op: str, f: str | Callable[..., Any]) -> str:
    try:
        return resolve(f)
    except TypeError as e:
        raise TypeError(
            f"{op}: activation_type has {f!r}, which cannot be made a formula ({e}); use a "
            "registered name, a formula text, or a function of tenon's words (tenon.exp, "
            "tenon.sigmoid, ...) and + - * /"
        ) from e


def _values(op: str, info: Mapping[str, Any], given: ActParams) -> tuple[float, ...]:
    parameters = info["parameters"]
    names = [p["name"] for p in parameters]
    values = [float(p["value"]) for p in parameters]
    if isinstance(given, Mapping):
        for key, value in given.items():
            name = _PARAMETERS.get(key, key) if key not in names else key
            if name not in names:
                raise ValueError(
                    f"{op}: act_params has {key!r}, but {info['name']} has "
                    f"{'the parameters ' + ', '.join(names) if names else 'no parameters'}"
                )
            values[names.index(name)] = _number(op, name, value)
    elif given is not None:
        if not isinstance(given, Iterable):
            raise TypeError(
                f"{op}: act_params is a {type(given).__name__}; it must be a dict, or all "
                "parameters in order"
            )
        numbers = list(given)
        if len(numbers) != len(names):
            raise ValueError(
                f"{op}: act_params has {len(numbers)} numbers, but {info['name']} has "
                f"{len(names)} parameters ({', '.join(names) or 'none'}); give one for each, or "
                "a dict of those that differ"
            )
        values = [_number(op, name, v) for name, v in zip(names, numbers, strict=True)]
    for p, value in zip(parameters, values, strict=True):
        least = -math.inf if p["least"] is None else p["least"]
        most = math.inf if p["most"] is None else p["most"]
        if not np.float32(least) <= np.float32(value) <= np.float32(most):
            raise ValueError(
                f"{op}: {info['name']}: {p['name']} = {value} is outside [{least}, {most}]; give "
                "a value inside"
            )
    return tuple(values)


def _number(op: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except Exception as e:
        raise TypeError(
            f"{op}: act_params: {name} = {value!r}; parameters are numbers known while tracing, "
            "not arrays of the traced function"
        ) from e
