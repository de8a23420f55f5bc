"""Converts torch functions to formulas: calls them with symbols that record the operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as nn

from .._trace import Condition, Expr, as_expr
from .._trace import where as choose

__all__ = ["Symbol", "Unknown", "formula"]


class Unknown(Exception):
    """The function contains an operation that no formula can express."""


_ROUND = {torch.float16: "f16", torch.bfloat16: "bf16"}


class Symbol:
    """An argument, or a value computed from arguments, while a function is traced."""

    __slots__ = ("dtype", "expr")

    def __init__(self, expr: Expr, dtype: torch.dtype) -> None:
        self.expr, self.dtype = expr, dtype

    # isinstance(x, torch.Tensor) must be true, so that the function takes the branch for tensors.
    __class__ = property(lambda self: torch.Tensor)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        known = _FUNCTIONS.get(function)
        if known is None:
            raise Unknown(f"{getattr(function, '__name__', function)} is no word of formulas")
        return known(*arguments, **(keywords or {}))

    def __getattr__(self, name: str) -> Any:
        known = _METHODS.get(name)
        if known is None:
            raise Unknown(f"a tensor's {name} is no word of formulas")
        return lambda *arguments, **keywords: known(self, *arguments, **keywords)

    def __bool__(self) -> bool:
        raise Unknown("it branches on a value")

    __float__ = __int__ = __index__ = __len__ = __bool__  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise Unknown("it takes a tensor apart")

    def __getitem__(self, index: Any) -> Any:
        raise Unknown("it takes a tensor apart")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise Unknown("it writes into a tensor")

    def __neg__(self) -> Symbol:
        return Symbol(-self.expr, self.dtype)

    def __abs__(self) -> Symbol:
        return _one(operator.abs)(self)

    def __pow__(self, power: Any) -> Symbol:
        return _power(self, power)


class _Truth:
    """A comparison of symbols, for torch.where."""

    __slots__ = ("condition",)

    def __init__(self, condition: Condition) -> None:
        self.condition = condition

    __class__ = property(lambda self: torch.Tensor)  # type: ignore[assignment]
    __torch_function__ = Symbol.__torch_function__

    def __bool__(self) -> bool:
        raise Unknown("it branches on a value")

    def __getattr__(self, name: str) -> Any:
        raise Unknown(f"a comparison's {name} is no word of formulas")


def _is_number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def _operand(v: Any) -> Expr:
    if type(v) is Symbol:
        return v.expr
    if _is_number(v):
        try:
            return as_expr(v)
        except ValueError as e:
            raise Unknown(str(e)) from None
    if type(v) is _Truth:
        raise Unknown("it calculates with a comparison")
    raise Unknown(f"a {type(v).__name__} that is no argument takes part")


def _made(function: Callable[..., Any], *operands: Any) -> Symbol:
    """function(operands), with torch's result dtype."""
    dtypes = [v.dtype for v in operands if type(v) is Symbol]
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    try:
        return Symbol(function(*map(_operand, operands)), dtype)
    except (TypeError, ValueError) as e:
        raise Unknown(str(e)) from None


def _one(function: Callable[[Any], Expr]) -> Callable[..., Symbol]:
    def word(x: Any, *, inplace: bool = False) -> Symbol:
        if inplace:
            raise Unknown("it writes into a tensor")
        return _made(function, x)

    return word


def _called(name: str) -> Callable[..., Expr]:
    """The text of a call of a formula function or a registered activation."""

    def call(*arguments: Any) -> Expr:
        return Expr(f"{name}({', '.join(as_expr(a).text for a in arguments)})")

    return call


def _two(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Symbol]:
    return lambda a, b: _made(function, a, b)


def _compared(relation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Truth]:
    return lambda a, b: _Truth(relation(_operand(a), _operand(b)))


def _with_alpha(sign: Callable[[Any, Any], Any]) -> Callable[..., Symbol]:
    """a + alpha*b, a - alpha*b."""

    def call(a: Any, b: Any, *, alpha: float = 1) -> Symbol:
        return _made(sign, a, b if alpha == 1 else _made(operator.mul, b, alpha))

    return call


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode is not None:
        raise Unknown(f"a division with rounding_mode={rounding_mode!r} is no word of formulas")
    return _made(operator.truediv, a, b)


def _power(x: Any, power: Any) -> Symbol:
    if not _is_number(power) or type(x) is not Symbol:
        raise Unknown("a power whose exponent is a tensor is no word of formulas")
    return _made(lambda v: v**power, x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:  # noqa: A002
    if min is None and max is None:
        raise Unknown("a clamp without bounds is no word of formulas")
    # Same order as in torch: if min > max, the result is max.
    if min is not None:
        x = _made(_called("max"), x, min)
    return x if max is None else _made(_called("min"), x, max)


def _where(condition: Any, a: Any = None, b: Any = None) -> Symbol:
    if type(condition) is not _Truth or a is None or b is None:
        raise Unknown("where needs a comparison of the arguments and two values")
    symbols = [v for v in (a, b) if type(v) is Symbol]
    if not symbols:
        raise Unknown("where of two numbers has no dtype of an argument")
    return _made(lambda u, v: choose(condition.condition, u, v), a, b)


def _extreme(name: str) -> Callable[..., Symbol]:
    def call(a: Any, b: Any = None, **keywords: Any) -> Symbol:
        if keywords or b is None:
            raise Unknown(f"a {name} over a dimension is no word of formulas")
        return _made(_called(name), a, b)

    return call


def _gelu(x: Any, *, approximate: str = "none") -> Symbol:
    return _made(_called("gelu" if approximate == "tanh" else "gelu_erf"), x)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    if beta != 1 or threshold != 20:
        raise Unknown("softplus has beta=1 and threshold=20 here")
    return _made(_called("softplus"), x)


def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    return _parametric("elu", x, alpha, inplace)


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    return _parametric("leaky_relu", x, negative_slope, inplace)


def _parametric(name: str, x: Any, value: float, inplace: bool) -> Symbol:
    if inplace:
        raise Unknown("it writes into a tensor")
    return _made(_called(name), x, value)


def _unary(name: str) -> Callable[..., Symbol]:
    def call(x: Any, inplace: bool = False) -> Symbol:
        if inplace:
            raise Unknown("it writes into a tensor")
        return _made(_called(name), x)

    return call


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or (training and p > 0):
        raise Unknown("dropout draws random numbers")
    return x


def _to(x: Any, dtype: Any, *rest: Any, **keywords: Any) -> Symbol:
    target = dtype.dtype if type(dtype) is Symbol else dtype
    if target not in (torch.float32, *_ROUND) or rest or keywords:
        raise Unknown(f"to({dtype}) is no word of formulas")
    rounded = x.expr
    # Widening is exact. Narrowing rounds.
    if target in _ROUND and target != x.dtype:
        rounded = Expr(f"round({x.expr.text}, {_ROUND[target]})")
    return Symbol(rounded, target)


_WORDS = ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "erfc")

# Tensor methods. Most have the same name as a torch function.
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in (*_WORDS, "abs", "relu")},
    "absolute": _unary("abs"),
    "neg": _one(operator.neg),
    "negative": _one(operator.neg),
    "square": _one(lambda x: x * x),
    "reciprocal": _one(lambda x: 1.0 / x),
    "add": _with_alpha(operator.add),
    "sub": _with_alpha(operator.sub),
    "subtract": _with_alpha(operator.sub),
    "mul": _two(operator.mul),
    "multiply": _two(operator.mul),
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "pow": _power,
    "minimum": _two(_called("min")),
    "maximum": _two(_called("max")),
    "min": _extreme("min"),
    "max": _extreme("max"),
    "clamp": _clamp,
    "clip": _clamp,
    "where": lambda a, condition, b: _where(condition, a, b),
    **{name: _compared(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "to": _to,
    "type_as": _to,
    "float": lambda x: _to(x, torch.float32),
    "half": lambda x: _to(x, torch.float16),
    "bfloat16": lambda x: _to(x, torch.bfloat16),
    "contiguous": lambda x: x,
    "clone": lambda x: x,
}

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, n): f for n, f in _METHODS.items() if hasattr(torch, n)},
    torch.where: _where,
    torch.special.expit: _unary("sigmoid"),
    nn.gelu: _gelu,
    nn.softplus: _softplus,
    nn.elu: _elu,
    nn.leaky_relu: _leaky_relu,
    nn.dropout: _dropout,
    torch.dropout: lambda x, p, train: _dropout(x, p, train),
    **{
        getattr(nn, name): _unary(name)
        for name in ("relu", "silu", "mish", "hardswish", "sigmoid", "tanh")
    },
}


def _operators() -> None:
    """Defines the Python operators a + b and b + a. In-place a += b raises an error."""
    for name in ("add", "sub", "mul", "truediv"):
        function = getattr(operator, name)
        setattr(Symbol, f"__{name}__", lambda a, b, f=function: _made(f, a, b))
        setattr(Symbol, f"__r{name}__", lambda a, b, f=function: _made(f, b, a))

        def refused(a: Any, b: Any) -> Any:
            raise Unknown("it writes into a tensor")

        setattr(Symbol, f"__i{name}__", refused)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Symbol, f"__{name}__", _compared(getattr(operator, name)))


_operators()


def formula(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    symbols: Sequence[tuple[int, str, torch.dtype]],
) -> tuple[str, torch.dtype]:
    """The formula of function(*arguments) and its dtype. The given positions are symbols."""
    given = list(arguments)
    for place, name, dtype in symbols:
        given[place] = Symbol(Expr(name), dtype)
    result = function(*given)
    if type(result) is not Symbol:
        raise Unknown(f"it returns a {type(result).__name__}, and not one tensor")
    return result.expr.text, result.dtype
