"""Activations on arrays: names, formulas and Python functions, forward and backward."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from ctypes import byref
from typing import Any, NamedTuple

import numpy as np

from . import _html, _lib
from ._array import Array, Operand, dtype_named, line, matrix, place, rows_of
from ._device import common, result
from ._expr import Expr, as_expr, number_text
from ._lib import BackwardArgs, ForwardArgs, check, encoded, lib, text_of
from ._quantize import Format, operand, output
from ._trace import inputs_of, trace

_NAME = r"[A-Za-z_]\w*"
# Matches a registered name, optionally with `@` and a tag of its definition, alone or with
# parameters. Every other text is a formula.
_NAMED = re.compile(rf"({_NAME}(?:@\w+)?)\s*(?:\(\s*{_NAME}\s*=[^=].*\))?", re.DOTALL)

_MOST_TEXTS, _LONG_TEXT = 1024, 1 << 14
_INFO: dict[str, dict[str, Any]] = {}  # key: pinned text
_PRIVATE: dict[str, str] = {}  # formula called by a traced function -> its private name
_NUMBERS = itertools.count()
# Text -> pinned text. `define` replaces the table. A thread that pins a text at that moment stores
# its result in the old table, which is no longer read.
_PINNED: dict[str, str] = {}
# Number of definitions so far. Results cached for a text are valid only for one generation.
generation = 0

# Argument names of the front ends. An activation parameter may not have one of these names.
_RESERVED = frozenset(
    ("act", "b", "bias", "cache_quantized_input", "dbias", "dscale", "dtype", "glu_interleave_size")
    + ("grad", "layout", "out", "out_dtype", "precision", "quantize", "quantizer", "rounding")
    + ("scale", "self", "x")
)


class Gradients(NamedTuple):
    """The results of a backward call. Gradients that were not requested are None."""

    dx: Any
    db: Any = None
    dbias: Array | None = None
    dscale: Array | None = None


def activation_info(text: Any) -> dict[str, Any]:
    """Name, inputs (1 or 2), scaled, parameters (name, value, bounds) and formula."""
    key = resolve(text)
    found = _INFO.get(key)
    if found is None:
        found = _info(encoded(key, "activation: the text"))
        if len(_INFO) >= _MOST_TEXTS:
            _INFO.clear()
        _INFO[key] = found
    return found


def _info(text: bytes) -> dict[str, Any]:
    c = _lib.Activation()
    check(lib.tenon_activation_info(text, byref(c)))
    return {
        "name": c.name.decode(),
        "inputs": c.inputs,
        "scaled": bool(c.scaled),
        "parameters": [
            {
                "name": p.name.decode(),
                "value": _decimal(p.value),
                "least": _decimal(p.least),
                "most": _decimal(p.most),
            }
            for p in c.parameters[: c.parameter_count]
        ],
        "formula": c.formula.decode(),
    }


def _decimal(value: float) -> float | None:
    """The shortest decimal that rounds to this float32. None if the value is not finite."""
    return float(str(np.float32(value))) if np.isfinite(value) else None


def names() -> list[str]:
    """The registered activations, built-in ones first."""
    everything = text_of(lib.tenon_names).split()
    return [n for n in everything if not n.startswith("_")]


def pinned(text: str) -> str:
    """Tags each user-defined name with `@` and its definition, so that the meaning is fixed."""
    if isinstance(text, str) and len(text) > _LONG_TEXT:  # too many spaces, or an invalid text
        text = text.strip()
    known = _PINNED
    found = known.get(text)
    if found is None:
        found = text_of(lib.tenon_pinned, encoded(text, "activation: the text"))
        if len(text) > _LONG_TEXT:
            return found
        if len(known) >= _MOST_TEXTS:
            known.clear()
        known[text] = found
    return found


def resolve(act: Any) -> str:
    """Converts a name, a formula, a Python function or an Activation to a pinned text."""
    if isinstance(act, str):
        return pinned(act)
    if isinstance(act, Activation):
        return act.text
    if not callable(act):
        raise TypeError(
            f"activation: a {type(act).__name__}; pass a name, a formula such as "
            "'x*sigmoid(x)', or a function of one or two expressions"
        )
    inputs, parameters = inputs_of(act)
    if len(inputs) not in (1, 2):
        raise ValueError(
            f"activation: {getattr(act, '__name__', act)} takes {len(inputs)} inputs "
            f"({', '.join(inputs)}); an activation has one (x) or two (a and b), further ones need "
            "a number as default, or use tenon.fuse"
        )
    _check_parameters(getattr(act, "__name__", "activation"), parameters)
    return trace(act, ("x",) if len(inputs) == 1 else ("a", "b"))


def _check_parameters(name: str, parameters: Iterable[str]) -> None:
    for p in parameters:
        if p in _RESERVED:
            raise ValueError(
                f"{name}: a parameter is named {p!r}, which is an argument of every activation; "
                f"give it another name than {', '.join(sorted(_RESERVED))}"
            )


def activation(act: Any, /, **parameters: float) -> Activation:
    """An activation from a name, a formula text, a Python function or another Activation.

    >>> tenon.activation("elu", alpha=0.5)
    >>> tenon.activation("x*sigmoid(beta*x); beta = 1", beta=2.0)
    >>> tenon.activation(lambda x: x * tenon.sigmoid(1.702 * x))
    """
    found = Activation(resolve(act))
    return found._with(parameters) if parameters else found


def define(name: str, formula: str | Callable[..., Any] | Activation) -> Activation:
    """Registers a name for a formula or a Python function, in this and in every other front end.

    User-defined names may be redefined. Built-in names and formula functions may not.

    >>> tenon.define("soft_step", "x*sigmoid(beta*x) + 0.1*tanh(x); beta = 1.5")
    >>> tenon.soft_step(x, beta=2.0)
    """
    if not isinstance(name, str):
        raise TypeError(f"define: the name is a {type(name).__name__}; pass a text and a formula")
    from . import __all__ as taken

    if name in (*taken, "torch", "jax"):
        raise ValueError(f"define: tenon.{name} is something else already; choose another name")
    given = Activation(resolve(formula))
    _check_parameters(name, given.parameters)
    around, _, named = given._parts()
    text = given.text
    if around or named:  # not a formula by itself, but a call of it is one
        text = given._expression(*map(Expr, ("x",) if given.inputs == 1 else ("a", "b"))).text
    _define(name, text)
    return Activation(name)


def _define(name: str, text: str) -> None:
    global _PINNED, generation
    check(lib.tenon_define(encoded(name, "define: the name"), text.encode()))
    _PINNED = {}
    generation += 1


def _encoded(op: str, layout: Any) -> bytes:
    if not isinstance(layout, str):
        raise TypeError(
            f"{op}: the layout is a {type(layout).__name__}; use 'stacked', 'swapped' or "
            "'interleaved(k)'"
        )
    return encoded(layout, f"{op}: the layout")


def _inside(text: str, outer: str) -> str | None:
    """The text inside `outer(…)`. None if the parenthesis does not close at the end of the text."""
    if not text.startswith(outer + "(") or not text.endswith(")"):
        return None
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == ")" and depth == 0 and i + 1 < len(text):
            return None
    return text[len(outer) + 1 : -1]


class Activation:
    """An activation: y = f(x + bias)*scale, or f(a + bias_a, b + bias_b)*scale for a gated input.

    Call it on an array of any shape. The last dimension is the columns. `.backward` computes the
    gradients, `.gated()` is f(a)*b, `.scaled()` is f(…)*s with one s per row.
    """

    __slots__ = ("__weakref__", "text")  # jax.jit keeps weak references to functions

    def __init__(self, text: str) -> None:
        self.text = pinned(text)
        activation_info(self.text)  # raises an error for an invalid text now

    @property
    def name(self) -> str:
        """Its name, or the first characters of its formula."""
        return str(activation_info(self.text)["name"])

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def formula(self) -> str:
        """The formula in evaluation order. Shared subexpressions t1, t2, … come first."""
        return str(activation_info(self.text)["formula"])

    @property
    def inputs(self) -> int:
        """The number of inputs: 1, or 2 for a gated activation."""
        return int(activation_info(self.text)["inputs"])

    @property
    def is_scaled(self) -> bool:
        """Whether it takes a scale per row."""
        return bool(activation_info(self.text)["scaled"])

    @property
    def parameters(self) -> dict[str, float]:
        """The names and values of its parameters."""
        return {p["name"]: p["value"] for p in activation_info(self.text)["parameters"]}

    def _parts(self) -> tuple[str, str, bool]:
        """The outer calls, e.g. "scaled(gated(", the core, and whether the core is a name."""
        around, core = "", self.text
        while True:
            for outer in ("gated", "scaled"):
                inner = _inside(core, outer)
                if inner is not None:
                    around, core = around + outer + "(", inner.strip()
                    break
            else:
                break
        # A single input is a formula: the identity.
        named = core not in ("x", "a", "b") and _NAMED.fullmatch(core)
        return around, named.group(1) if named else core, bool(named)

    def _with(self, given: dict[str, float]) -> Activation:
        values = self.parameters
        for name, value in given.items():
            if name not in values:
                known = ", ".join(values) or "none"
                raise TypeError(f"{self.name}: no parameter {name!r}; it has {known}")
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{self.name}: {name} = {value!r}; it must be a number")
            values[name] = float(value)
        around, core, named = self._parts()
        text = {n: number_text(v) if np.isfinite(v) else str(v) for n, v in values.items()}
        if named:
            core += "(" + ", ".join(f"{n}={v}" for n, v in text.items()) + ")"
        else:
            core = core.partition(";")[0] + "".join(f"; {n} = {v}" for n, v in text.items())
        return Activation(around + core + ")" * around.count("("))

    def _called(self, *inputs: Any) -> Expr:
        """Applies the core to expressions."""
        _, core, named = self._parts()
        if not named:
            text = core
            core = _PRIVATE.get(text, "")
            if not core:
                name = f"_formula_{next(_NUMBERS)}"
                _define(name, text)
                core = _PRIVATE[text] = pinned(name)
        values = list(self.parameters.values())
        if values == list(Activation(core).parameters.values()):
            values = []  # use the defaults
        return Expr(f"{core}({', '.join(as_expr(e).text for e in (*inputs, *values))})")

    def _expression(self, x: Any, b: Any = None, bias: Any = None, scale: Any = None) -> Expr:
        if (b is None) != (self.inputs == 1):
            raise TypeError(
                f"{self.name}: {self.inputs} inputs are needed in a traced function; "
                + ("leave b out" if self.inputs == 1 else f"write {self.name}(a, b)")
            )
        if bias is not None:
            if b is not None:
                raise TypeError(f"{self.name}: add the bias to a and b in a traced function")
            x = x + bias
        if (scale is not None) != self.is_scaled:
            raise TypeError(
                f"{self.name}: scale is "
                + ("missing" if self.is_scaled else "given, but it is not scaled")
            )
        gated = "gated(" in self._parts()[0]
        value = self._called(x) * b if gated else self._called(*((x,) if b is None else (x, b)))
        return value if scale is None else value * scale

    def gated(self) -> Activation:
        """f(a)*b for this unary f."""
        return Activation(f"gated({self.text})")

    def scaled(self) -> Activation:
        """f(…)*s with one value s per row."""
        return Activation(f"scaled({self.text})")

    def __call__(
        self,
        x: Any,
        b: Any = None,
        *,
        bias: Any = None,
        scale: Any = None,
        layout: str = "stacked",
        dtype: Any = None,
        quantize: Format | str | None = None,
        precision: str = "native",
        rounding: str = "once",
        **parameters: float,
    ) -> Any:
        """Computes y = f(x + bias)*scale in one pass.

        A gated f reads x [..., 2H] and returns [..., H]. `layout` is the order of the two halves in
        x: "stacked", "swapped" or "interleaved(k)". Instead, the second half can be passed as b.
        `scale` has one value per row. With `quantize`, e.g. "mxfp8", y is written in FP8 and
        returned as a Quantized. x and b may be Quantized. `dtype` defaults to the dtype of x.
        Parameters are keyword arguments.
        """
        if parameters:
            return self._with(parameters)(
                x, b, bias=bias, scale=scale, layout=layout, dtype=dtype, quantize=quantize,
                precision=precision, rounding=rounding,
            )  # fmt: skip
        if isinstance(x, Expr) or isinstance(b, Expr):
            return self._expression(x, b, bias, scale)
        op = self.name
        ins = self._inputs(op, x, b, bias, scale)
        first = ins["x"]
        out = first.dtype if dtype is None else dtype_named(op, dtype)
        shape = first.shape
        if self.inputs == 2 and b is None:
            shape = (*shape[:-1], rows_of(shape)[1] // 2)
        where = common(op, ((n, o.owner) for n, o in ins.items()))
        y, written = output(shape, out, quantize, where)
        args = ForwardArgs(layout=_encoded(op, layout))
        place(args, y=written, **{n: o.c for n, o in ins.items()})
        where.run(lib.tenon_forward, (precision, rounding), self.text.encode(), byref(args))
        return result(y)

    def backward(
        self,
        grad: Any,
        x: Any,
        b: Any = None,
        *,
        bias: Any = None,
        scale: Any = None,
        layout: str = "stacked",
        dbias: bool | None = None,
        dscale: bool | None = None,
        dtype: Any = None,
        quantize: Format | str | None = None,
        precision: str = "native",
        rounding: str = "once",
        **parameters: float,
    ) -> Gradients:
        """Computes dx = grad*f'(x + bias)*scale, db, dbias and dscale in one pass.

        dbias is the column sums of dx. db is computed if b is given. dbias and dscale are computed
        if bias and scale are given, or as requested with `dbias` and `dscale`. dx has the layout of
        x and, by default, its dtype. `quantize` writes dx and db in FP8.
        """
        if parameters:
            return self._with(parameters).backward(
                grad, x, b, bias=bias, scale=scale, layout=layout, dbias=dbias, dscale=dscale,
                dtype=dtype, quantize=quantize, precision=precision, rounding=rounding,
            )  # fmt: skip
        op = f"{self.name} backward"
        ins = self._inputs(op, x, b, bias, scale)
        g = operand(op, "grad", grad)
        out = ins["x"].dtype if dtype is None else dtype_named(op, dtype)
        where = common(op, (*((n, o.owner) for n, o in ins.items()), ("grad", g.owner)))
        outs: dict[str, Any] = {}
        made: dict[str, Any] = {}
        made["dx"], outs["dx"] = output(ins["x"].shape, out, quantize, where)
        if b is not None:
            made["db"], outs["db"] = output(ins["b"].shape, out, quantize, where)
        if bias is not None if dbias is None else dbias:
            cols = rows_of(ins["x"].shape)[1] + (rows_of(ins["b"].shape)[1] if "b" in ins else 0)
            like = ins.get("bias")
            sums = where.empty(like.shape if like else (cols,), like.dtype if like else g.dtype)
            made["dbias"], outs["dbias"] = sums, matrix(sums, 1, sums.size)
        if scale is not None if dscale is None else dscale:
            like = ins.get("scale")
            rows = rows_of(ins["x"].shape)[0]
            sums = where.empty(like.shape if like else (rows,), like.dtype if like else g.dtype)
            made["dscale"], outs["dscale"] = sums, matrix(sums, sums.size, 1)
        args = BackwardArgs(layout=_encoded(op, layout))
        place(args, grad=g.c, **outs, **{n: o.c for n, o in ins.items()})
        where.run(lib.tenon_backward, (precision, rounding), self.text.encode(), byref(args))
        return Gradients(**{name: result(t) for name, t in made.items()})

    def _inputs(self, op: str, x: Any, b: Any, bias: Any, scale: Any) -> dict[str, Operand]:
        found = {"x": operand(op, "x", x)}
        if b is not None:
            found["b"] = operand(op, "b", b)
        if bias is not None:
            found["bias"] = line(op, "bias", bias)
        if scale is not None:
            found["scale"] = line(op, "scale", scale, column=True)
        return found

    def show(self, backward: bool = False) -> _html.Text:
        """The formula, derivative, error bound and code (with `backward`, of the derivative)."""
        return _html.Text(text_of(lib.tenon_show, self.text.encode(), int(backward)))

    def __repr__(self) -> str:
        return f"tenon.activation({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def _repr_html_(self) -> str:
        picture = ""
        if self.inputs == 1 and not self.is_scaled:
            x = np.linspace(-5, 5, 121, dtype=np.float32)
            lines = {"f": self(x).tolist(), "f'": self.backward(np.ones_like(x), x).dx.tolist()}
            picture = _html.curves(x.tolist(), lines, ("#1f5fa8", "#c2571a"))
        return picture + _html.pre(self.show())


def show(act: Any, backward: bool = False) -> _html.Text:
    """The formula, derivative, error bound and code of an activation as readable text."""
    if hasattr(act, "formula") and hasattr(act, "show"):
        return act.show(backward)  # type: ignore[no-any-return]
    return activation(act).show(backward)


__all__ = [
    "Activation",
    "Gradients",
    "activation",
    "activation_info",
    "define",
    "names",
    "resolve",
    "show",
]
