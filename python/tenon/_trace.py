"""The formula functions, and the tracer of Python functions into formulas."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ._expr import Condition, Expr, as_expr, call, constant

__all__ = [
    "Condition",
    "Expr",
    "abs",
    "as_expr",
    "clamp",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "round",
    "rsqrt",
    "select",
    "sigmoid",
    "sqrt",
    "tanh",
    "trace",
    "where",
]


def _word(function: Callable[..., Expr]) -> Callable[..., Any]:
    """Makes a formula function that also accepts arrays and numbers, with its own kernel."""

    @functools.wraps(function)
    def word(*arguments: Any) -> Any:
        if any(isinstance(a, Expr) for a in arguments):
            return function(*arguments)
        from ._fused import evaluate

        return evaluate(word, arguments)

    return word


@_word
def abs(x: Any) -> Expr:  # noqa: A001
    """The absolute value of an expression or an array. Its derivative at 0 is 0."""
    return call("abs", x)


@_word
def sqrt(x: Any) -> Expr:
    """The square root of x."""
    return call("sqrt", x)


@_word
def rsqrt(x: Any) -> Expr:
    """1/sqrt(x)."""
    return call("rsqrt", x)


@_word
def exp(x: Any) -> Expr:
    """The exponential function of x."""
    return call("exp", x)


@_word
def expm1(x: Any) -> Expr:
    """exp(x) - 1 without cancellation near 0."""
    return call("expm1", x)


@_word
def log(x: Any) -> Expr:
    """The natural logarithm of x."""
    return call("log", x)


@_word
def log1p(x: Any) -> Expr:
    """log(1 + x) without cancellation near 0."""
    return call("log1p", x)


@_word
def sigmoid(x: Any) -> Expr:
    """1/(1 + exp(-x))."""
    return call("sigmoid", x)


@_word
def tanh(x: Any) -> Expr:
    """The hyperbolic tangent of x."""
    return call("tanh", x)


@_word
def erf(x: Any) -> Expr:
    """The error function, 2/sqrt(pi) times the integral of exp(-t²) from 0 to x."""
    return call("erf", x)


@_word
def erfc(x: Any) -> Expr:
    """1 - erf(x) without cancellation for large x."""
    return call("erfc", x)


@_word
def minimum(a: Any, b: Any) -> Expr:
    """The minimum of a and b. NaN if either is NaN. -0 < +0."""
    return call("min", a, b)


@_word
def maximum(a: Any, b: Any) -> Expr:
    """The maximum of a and b. NaN if either is NaN. -0 < +0."""
    return call("max", a, b)


@_word
def clamp(x: Any, low: Any, high: Any) -> Expr:
    """max(min(x, high), low). At a bound, the derivative is 1."""
    return call("clamp", x, low, high)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition is true, else b. The gradient of the other branch is exactly 0."""
    if isinstance(condition, bool):
        return a if condition else b
    if not isinstance(condition, Condition):
        raise TypeError(
            f"where: the condition is a {type(condition).__name__}; it must be a comparison of "
            "expressions inside a traced function (numpy.where chooses between arrays)"
        )
    return Expr(f"select({condition.text}, {as_expr(a).text}, {as_expr(b).text})")


select = where


def round(x: Any, dtype: Any) -> Any:  # noqa: A001
    """Rounds x to nearest even in bf16, f16, e4m3 or e5m2. Its derivative is 1."""
    names = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    given = str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]
    name = names.get(given, given)
    if name not in names.values():
        raise ValueError(f"round: dtype {dtype!r}; it must be 'bf16', 'f16', 'e4m3' or 'e5m2'")
    return _rounding(name)(x)


@functools.cache
def _rounding(name: str) -> Callable[[Any], Any]:
    @_word
    def rounded(x: Any) -> Expr:
        return Expr(f"round({as_expr(x).text}, {name})")

    return rounded


METHODS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(abs, sqrt, rsqrt, exp, expm1, log, log1p, sigmoid, tanh, erf, erfc),
        *(minimum, maximum, clamp, round),
    )
}

UFUNCS: dict[str, Callable[..., Any]] = {
    **{n: METHODS[n] for n in ("sqrt", "exp", "expm1", "log", "log1p", "tanh")},
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "negative": operator.neg,
    "positive": operator.pos,
    "power": operator.pow,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "absolute": abs,
    "fabs": abs,
    "minimum": minimum,
    "maximum": maximum,
    "clip": clamp,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


def inputs_of(function: Callable[..., Any]) -> tuple[list[str], dict[str, float]]:
    """The names of arguments without a default, and the arguments whose default is a number."""
    inputs: list[str] = []
    parameters: dict[str, float] = {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions have no signature
        name = _name(function)
        word = f"tenon.{name}" if name in METHODS else "Tenon's words (tenon.exp, tenon.tanh, …)"
        raise TypeError(
            f"trace: {name} is built in and has no signature; use {word}, or a Python function"
        ) from None
    for p in signature.parameters.values():
        numeric = isinstance(p.default, (int, float)) and not isinstance(p.default, bool)
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            raise TypeError(
                f"trace: {_name(function)} needs the keyword {p.name}; give it a default number to "
                "make it a parameter"
            )
        if numeric:
            parameters[p.name] = float(p.default)
        elif p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            inputs.append(p.name)
    return inputs, parameters


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def trace(function: Callable[..., Any], names: Sequence[str]) -> str:
    """The formula of a function that is called with expressions named `names`.

    Arguments with a number as default become parameters, `; name = value`. Other arguments keep
    their default.
    """
    _, parameters = inputs_of(function)
    result = function(*(Expr(n) for n in names), **{p: Expr(p) for p in parameters})
    if not isinstance(result, (Expr, int, float)):
        raise TypeError(
            f"trace: {_name(function)} returned a {type(result).__name__}; it must return one "
            "expression of its arguments"
        )
    return as_expr(result).text + "".join(
        f"; {name} = {constant(value).text}" for name, value in parameters.items()
    )
