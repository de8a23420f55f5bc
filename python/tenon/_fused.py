"""Fused functions: Python functions of arrays, traced and run as one kernel with a gradient."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from . import _html
from ._activation import Activation, activation
from ._array import F32, Array, array, dtype_named, foldable, matrix, rows_of
from ._device import HOST, DeviceArray, Host, common, ones_like, place_of, result
from ._expr import Expr, constant
from ._lib import View, lib, options, text_of
from ._trace import inputs_of, trace


class _Argument:
    """An argument of a call, and how it broadcasts to the result."""

    __slots__ = ("array", "given", "number", "shape")

    def __init__(self, op: str, name: str, x: Any) -> None:
        self.number = isinstance(x, (int, float)) and not isinstance(x, bool)
        # The dtype of a Python number does not affect the dtype of the result.
        self.given = np.asarray(x, F32) if self.number else array(op, name, x)
        self.shape: tuple[int, ...] = self.given.shape

    def move(self, where: Host) -> None:
        """Moves a Python number to the place of the arrays."""
        if self.number and where is not HOST:
            self.given = where.full((), float(self.given))

    def fit(self, shape: tuple[int, ...]) -> None:
        """Expands the argument to [M,K], [1,K], [M,1] or [1,1] for a result of `shape`."""
        lead, cols = self.shape[:-1], rows_of(self.shape)[1]
        x = self.given
        if math.prod(lead) != 1 and (1,) * (len(shape) - x.ndim) + lead != shape[:-1]:
            if isinstance(x, DeviceArray):
                raise NotImplementedError(
                    f"tenon: on CUDA an argument of shape {self.shape} does not broadcast to "
                    f"{shape}; expand its leading dimensions first, or all but the last to 1"
                )
            x = np.broadcast_to(x, (*shape[:-1], cols))  # only some leading dims match
        self.array = foldable(x)

    def gradient(self) -> Array:
        """Allocates the gradient of the expanded argument."""
        same = self.array.size == self.given.size
        where = place_of(self.given)
        return where.empty(self.array.shape, self.given.dtype if same else F32)  # type: ignore[no-any-return]

    def reduced(self, out: Array) -> Array:
        """Sums the gradient over the expanded dimensions, to the shape of the argument."""
        if out.size == self.given.size:
            return result(out.reshape(self.shape))  # type: ignore[no-any-return]
        own = (1,) * (out.ndim - len(self.shape)) + self.shape
        axes = tuple(i for i, n in enumerate(own) if n != out.shape[i])
        sums = out.sum(axis=axes, keepdims=True, dtype=F32)
        return sums.reshape(self.shape).astype(self.given.dtype)


class Fused:
    """A function of arrays as one kernel, with a derived gradient. Created by `tenon.fuse`.

    Arguments broadcast as in NumPy. Arguments with a number as default value are parameters, passed
    by keyword. The result has the dtype of the arguments, or float32 if these differ.
    """

    def __init__(
        self, function: Callable[..., Any], *, precision: str = "native", rounding: str = "once"
    ) -> None:
        if not callable(function):
            raise TypeError(
                f"fuse: a {type(function).__name__}; it takes a Python function of expressions"
            )
        functools.update_wrapper(self, function)
        self.name = str(getattr(function, "__name__", "fused")).strip("<>")
        self._function = function
        names, self.parameters = inputs_of(function)
        self.arguments = tuple(names)
        if not names:
            raise ValueError(f"fuse: {self.name} has no arguments; it needs at least one array")
        if "dtype" in (*names, *self.parameters):
            raise ValueError(
                f"fuse: {self.name} has an argument named 'dtype', which is that of the result; "
                "give it another name"
            )
        options(precision, rounding)  # raises an error for invalid options now
        self._how = (precision, rounding)
        self._formula: str | None = None

    @property
    def formula(self) -> str:
        """The formula text. The function is traced at first use."""
        if self._formula is None:
            self._formula = trace(self._function, self.arguments)
        return self._formula

    def _text(self, given: dict[str, float]) -> bytes:
        if not given:
            return self.formula.encode()
        for name, value in given.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise TypeError(f"{self.name}: no parameter {name!r}; it has {known}")
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{self.name}: {name} = {value!r}; it must be a number")
        values = {**self.parameters, **given}
        body = self.formula.partition(";")[0]
        return (
            body + "".join(f"; {n} = {constant(float(v)).text}" for n, v in values.items())
        ).encode()

    def _bound(
        self, given: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, float]]:
        """The arguments in order, and the parameters. Both may be passed as keywords."""
        rest = self.arguments[len(given) :]
        if all(n in keywords for n in rest):
            given = (*given, *(keywords.pop(n) for n in rest))
        for n in self.arguments:
            if n in keywords:
                raise TypeError(
                    f"{self.name}: the arguments {', '.join(self.arguments)} are each given once, "
                    f"by position or by keyword; here {n!r} is given twice or another is missing"
                )
        return given, keywords

    def _fitted(self, given: Sequence[Any]) -> tuple[list[_Argument], tuple[int, ...], Host]:
        if len(given) != len(self.arguments):
            raise TypeError(
                f"{self.name}: {len(given)} arguments given, it takes {len(self.arguments)} "
                f"({', '.join(self.arguments)})"
            )
        found = [_Argument(self.name, n, x) for n, x in zip(self.arguments, given, strict=True)]
        try:
            shape = np.broadcast_shapes(*(a.shape for a in found))
        except ValueError:
            shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(self.arguments, found, strict=True))
            raise ValueError(
                f"{self.name}: the shapes do not broadcast: {shapes}; dimensions must be equal or "
                "1, from the last one on"
            ) from None
        named = zip(self.arguments, found, strict=True)
        arrays = [(n, a.given) for n, a in named if not a.number]
        where = common(self.name, arrays) if arrays else HOST
        for a in found:
            a.move(where)
            a.fit(shape)
        return found, shape, where

    def _views(self, found: Sequence[_Argument]) -> tuple[Any, Any]:
        views = [matrix(a.array) for a in found]
        return (View * len(views))(*views), ", ".join(self.arguments).encode()

    def __call__(self, *given: Any, dtype: Any = None, **keywords: Any) -> Any:
        """Evaluates the function in one pass. Arrays may also be passed as keywords."""
        if any(isinstance(a, Expr) for a in (*given, *keywords.values())):
            return self._function(*given, **keywords)
        arguments, parameters = self._bound(given, keywords)
        found, shape, where = self._fitted(arguments)
        out = _common(arguments, found) if dtype is None else dtype_named(self.name, dtype)
        y = where.empty(shape, out)
        views, names = self._views(found)
        call = (self._text(parameters), names, views, len(found), matrix(y))
        where.run(lib.tenon_fused_forward, self._how, *call)
        return result(y)

    def grad(self, grad: Any, *given: Any, **keywords: Any) -> tuple[Array, ...]:
        """The gradients of the arguments, in order, for the gradient of the result.

        Each gradient has the shape and dtype of its argument. The gradient of a broadcast argument
        is summed over the broadcast dimensions.
        """
        arguments, parameters = self._bound(given, keywords)
        found, shape, where = self._fitted(arguments)
        g = foldable(array(f"{self.name} grad", "grad", grad))
        if g.shape != shape:
            raise ValueError(
                f"{self.name} grad: grad has the shape {g.shape}; it must be {shape}, that of the "
                "result"
            )
        views, names = self._views(found)
        common(f"{self.name} grad", ((self.arguments[0], found[0].given), ("grad", g)))
        made = [a.gradient() for a in found]
        outs = (View * len(made))(*map(matrix, made))
        call = (self._text(parameters), names, views, len(found), matrix(g), outs)
        where.run(lib.tenon_fused_backward, self._how, *call)
        return tuple(a.reduced(out) for a, out in zip(found, made, strict=True))

    def show(self, backward: bool = False) -> _html.Text:
        """The formula, its code, and its derivative for each argument, with error bounds."""
        parts = [f"{self.name}({', '.join(self.arguments)}) = {self.formula}\n"]
        for i, argument in enumerate(self.arguments):
            shown = self._by(argument, backward)
            value, derivative = shown.find("\nvalue"), shown.find("\nderivative")
            code = shown.find("\ncode of")
            # The value and its code are the same for all arguments, so they are shown once.
            parts.append(shown[value if i == 0 else derivative : code])
            if backward or argument == self.arguments[-1]:
                parts.append(shown[code:].rstrip("\n"))
        return _html.Text("".join(parts) + "\n")

    def _by(self, argument: str, backward: bool) -> str:
        # For the derivative by one argument, the function is an activation of that argument. The
        # other arguments are parameters.
        names = {a: a + "_" if a in ("x", "a", "b") else a for a in self.arguments}
        names[argument] = "x"
        body, semicolon, parameters = self.formula.partition(";")
        arguments = rf"\b({'|'.join(names)})\b(?!\s*\()"
        text = re.sub(arguments, lambda found: names[found[1]], body)
        text += "".join(f"; {n} = 1" for a, n in names.items() if a != argument)
        shown = text_of(lib.tenon_show, (text + semicolon + parameters).encode(), int(backward))
        renamed = ", ".join(f"{n} is {a}" for a, n in names.items() if n != a)
        told = f"derivative by {argument}" + (f" ({renamed})" if renamed else "")
        return shown.replace("\nderivative", "\n" + told, 1)

    def __repr__(self) -> str:
        return f"<tenon.fuse {self.name}({', '.join(self.arguments)}) = {self.formula}>"

    def _repr_html_(self) -> str:
        return _html.pre(self.show())


def _common(arguments: Sequence[Any], found: Sequence[_Argument]) -> np.dtype[Any]:
    """The dtype of the arrays, or float32 if they differ. Python numbers do not count."""
    pairs = zip(arguments, found, strict=True)
    dtypes = {a.given.dtype for x, a in pairs if not isinstance(x, (int, float))}
    return dtypes.pop() if len(dtypes) == 1 else F32


@overload
def fuse(function: Callable[..., Any], /) -> Fused: ...
@overload
def fuse(
    *, precision: str = "native", rounding: str = "once"
) -> Callable[[Callable[..., Any]], Fused]: ...
def fuse(
    function: Callable[..., Any] | None = None,
    /,
    *,
    precision: str = "native",
    rounding: str = "once",
) -> Any:
    """Compiles a Python function of arrays to one kernel, forward and backward.

    The function is traced into a formula at first use.

    >>> @tenon.fuse
    ... def bias_gelu(x, bias):
    ...     return tenon.gelu(x + bias)
    >>> y = bias_gelu(x, bias)
    >>> dx, dbias = bias_gelu.grad(dy, x, bias)
    """
    if function is None:
        return functools.partial(Fused, precision=precision, rounding=rounding)
    return Fused(function, precision=precision, rounding=rounding)


def grad(function: Any) -> Callable[..., Any]:
    """The derivative of an element-wise function: the gradients of the sum of its results.

    `function` is a Python function, a function from `tenon.fuse`, or an activation (also by name).
    The returned function takes the same arguments. It returns one array, or a tuple in the order of
    the arguments.

    >>> tenon.grad("gelu")(x)
    >>> dx, dbias = tenon.grad(lambda x, bias: tenon.gelu(x + bias))(x, bias)
    """
    if isinstance(function, (str, Activation)):
        f = activation(function)

        def of_activation(x: Any, b: Any = None, **settings: Any) -> Any:
            y = f(x, b, **settings)
            found = f.backward(ones_like(y), x, b, **settings)
            wanted = tuple(g for g in found if g is not None)
            return wanted if len(wanted) > 1 else wanted[0]

        return of_activation
    fused = function if isinstance(function, Fused) else Fused(function)

    def of_arguments(*arguments: Any, **parameters: float) -> Any:
        y = fused(*arguments, **parameters)
        found = fused.grad(ones_like(y), *arguments, **parameters)
        return found if len(found) > 1 else found[0]

    return of_arguments


_evaluator = functools.cache(Fused)


def evaluate(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Applies a formula function to arrays and numbers. Its kernel is cached."""
    return _evaluator(function)(*arguments)
