"""Expressions that record the operations applied to them as formula text."""

from __future__ import annotations

import math
from typing import Any

# Precedence levels of the grammar, lowest first. An operand of lower precedence gets parentheses.
_SUM, _PRODUCT, _NEGATION, _ATOM = range(4)

_MOST_BYTES = 4096  # of a formula. Shared parts are repeated in the text, so it may grow fast.


class Expr:
    """A scalar expression as formula text.

    It supports the operators + - * /, powers with small integer exponents, comparisons (which
    return a `Condition`), the formula functions of Tenon as functions or methods (`x.exp()`),
    registered activations, and the NumPy functions of the same meaning.
    """

    __slots__ = ("level", "text")

    def __init__(self, text: str, level: int = _ATOM) -> None:
        if len(text) > _MOST_BYTES:
            raise ValueError(
                f"trace: the formula grows beyond {_MOST_BYTES} bytes; name a part of it with "
                "tenon.define(name, part) and call that"
            )
        self.text = text
        self.level = level

    def __repr__(self) -> str:
        return f"Expr({self.text})"

    def _at(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"

    def __add__(self, other: Any) -> Expr:
        return _binary(self, "+", other)

    def __radd__(self, other: Any) -> Expr:
        return _binary(other, "+", self)

    def __sub__(self, other: Any) -> Expr:
        return _binary(self, "-", other)

    def __rsub__(self, other: Any) -> Expr:
        return _binary(other, "-", self)

    def __mul__(self, other: Any) -> Expr:
        return _binary(self, "*", other)

    def __rmul__(self, other: Any) -> Expr:
        return _binary(other, "*", self)

    def __truediv__(self, other: Any) -> Expr:
        return _binary(self, "/", other)

    def __rtruediv__(self, other: Any) -> Expr:
        return _binary(other, "/", self)

    def __neg__(self) -> Expr:
        return Expr("-" + self._at(_ATOM), _NEGATION)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return call("abs", self)

    def __pow__(self, power: Any) -> Expr:
        if power == 0.5:
            return call("sqrt", self)
        if power == -0.5:
            return call("rsqrt", self)
        if power == -1:
            return 1.0 / self
        if isinstance(power, (int, float)) and power in range(1, 9):
            result = self
            for _ in range(int(power) - 1):
                result = result * self
            return result
        raise TypeError(
            f"trace: {self.text} ** {power!r}; powers are whole numbers from 1 to 8, 0.5, -0.5 "
            "and -1; write others with tenon.exp and tenon.log"
        )

    def __lt__(self, other: Any) -> Condition:
        return Condition(self, "<", as_expr(other))

    def __le__(self, other: Any) -> Condition:
        return Condition(self, "<=", as_expr(other))

    def __gt__(self, other: Any) -> Condition:
        return Condition(self, ">", as_expr(other))

    def __ge__(self, other: Any) -> Condition:
        return Condition(self, ">=", as_expr(other))

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition(self, "==", as_expr(other))

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition(self, "!=", as_expr(other))

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError(
            f"trace: the truth of {self.text} is not known while tracing; choose between values "
            "with tenon.where(condition, a, b)"
        )

    def __float__(self) -> float:
        raise TypeError(
            f"trace: {self.text} has no value while tracing; use Tenon's words (tenon.exp, "
            "tenon.tanh, …) in place of functions of numbers"
        )

    __int__ = __index__ = __float__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        from ._trace import METHODS

        word = METHODS.get(name)
        if word is None:
            raise AttributeError(
                f"trace: an expression has no {name!r}; it has + - * / **, comparisons and the "
                f"words {', '.join(sorted(METHODS))}"
            )
        return lambda *arguments: word(self, *arguments)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        from ._trace import UFUNCS

        function = UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__" or keywords:
            raise TypeError(
                f"trace: numpy.{ufunc.__name__} is not a word of formulas; use Tenon's words "
                "(tenon.exp, tenon.maximum, …)"
            )
        return function(*(_plain(i) for i in inputs))

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        from ._trace import clamp, where

        known = {"where": where, "clip": clamp}.get(function.__name__)
        if known is None or keywords:
            raise TypeError(
                f"trace: numpy.{function.__name__} is not a word of formulas; use Tenon's words "
                "(tenon.where, tenon.clamp, …)"
            )
        return known(*arguments)


class Condition:
    """A comparison of two expressions, for `tenon.where`."""

    __slots__ = ("left", "relation", "right")

    def __init__(self, left: Expr, relation: str, right: Expr) -> None:
        self.left, self.relation, self.right = left, relation, right

    @property
    def text(self) -> str:
        """The comparison as text inside select(…)."""
        return f"{self.left.text} {self.relation} {self.right.text}"

    def __repr__(self) -> str:
        return f"Condition({self.text})"

    def __bool__(self) -> bool:
        raise TypeError(
            f"trace: the truth of {self.text} is not known while tracing; choose between values "
            f"with tenon.where({self.text}, a, b); chained comparisons need one each"
        )


def as_expr(value: Any) -> Expr:
    """Converts a number to a constant expression. Returns expressions unchanged."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Condition):
        raise TypeError(
            f"trace: the comparison {value.text} is not a number; use tenon.where({value.text}, "
            "1.0, 0.0)"
        )
    # Scalars of NumPy and similar libraries have ndim 0.
    number = isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
    if not number or isinstance(value, bool):
        raise TypeError(
            f"trace: a {type(value).__name__} in a traced function; it works on expressions and "
            "numbers, so pass arrays as arguments of the function"
        )
    return constant(float(value))


def _plain(value: Any) -> Any:
    """Converts a NumPy scalar to a Python number, because NumPy would call the expression back."""
    if isinstance(value, Expr):
        return value
    as_expr(value)  # raises an error unless value is a number or an expression
    return float(value)


def number_text(value: float) -> str:
    """Formats a number as a literal of the formula language."""
    if value == int(value) and math.fabs(value) < 1e15:
        return "-0" if value == 0 and math.copysign(1, value) < 0 else str(int(value))
    return repr(float(value))


def constant(value: float) -> Expr:
    if not math.isfinite(value):
        raise ValueError(
            f"trace: the constant {value} has no literal in a formula; use a finite number"
        )
    text = number_text(value)
    return Expr(text, _NEGATION if text.startswith("-") else _ATOM)


def _binary(left: Any, sign: str, right: Any) -> Expr:
    level = _SUM if sign in "+-" else _PRODUCT
    # Operators are left-associative. The grouping matters because of rounding.
    a, b = as_expr(left)._at(level), as_expr(right)._at(level + 1)
    return Expr(f"{a} {sign} {b}" if level == _SUM else f"{a}{sign}{b}", level)


def call(name: str, *arguments: Any) -> Expr:
    return Expr(f"{name}({', '.join(as_expr(a).text for a in arguments)})")
