"""Differentiable functions of torch tensors. Each is one pass over memory, also its gradient.

Every registered activation is available by name, e.g. `gelu(x)` and `swiglu(x, bias=b)`, including
user-defined ones. `activation(act, x)` also takes a formula or a Python function.

Tensors are float32, float16 or bfloat16, of any shape, on the CPU or on CUDA. All tensors of a call
are on one device. Leading dimensions are rows. On CUDA, calls use the current stream and do not
synchronise. Strided tensors are read without a copy if their rows are evenly spaced.

torch.autocast does not cast inputs: arithmetic is float32, and results have the dtype of x unless
out_dtype is set. Only first derivatives are supported. A second derivative raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _activation, _lib
from .._activation import Activation, activation_info, resolve
from . import _call, _saved, _watch
from ._dropout import bias_dropout_add, dropout
from ._dynamo import one_break
from ._norm import l2normalization
from ._once import Gradients, once
from ._quantized import QuantizedTensor
from .quantizer import Quantizer

__all__ = [
    "activation",
    "bias_dropout_add",
    "dequantize",
    "dropout",
    "l2normalization",
    "quantize",
]

Tensor = torch.Tensor


class _Form(NamedTuple):
    """The properties of a call that do not depend on its tensors."""

    name: str
    act: bytes
    inputs: int
    layout: bytes | None
    options: _lib.Options
    generation: int  # generation of definitions at creation


# Key: arguments of a call. A new definition may change a name, so entries are then renewed.
_forms: dict[tuple[Any, ...], _Form] = {}
_MOST_FORMS = 1024


def _form(
    act: Any, layout: str, scaled: bool, precision: str, rounding: str, params: dict[str, Any]
) -> _Form:
    generation = _activation.generation
    made = Activation(resolve(act))
    if not isinstance(layout, str):
        raise TypeError(
            f"tenon: {made.name}: the layout is a {type(layout).__name__}; use 'stacked', "
            "'swapped' or 'interleaved(k)'"
        )
    for name, value in params.items():
        if isinstance(value, Tensor):
            raise TypeError(
                f"tenon: {made.name}: {name} is a tensor; parameters are numbers and get no "
                f"gradient, pass float({name})"
            )
    text = (made._with(params) if params else made).text
    found = activation_info(text)
    form = _Form(
        made.name,
        (f"scaled({text})" if scaled and not found["scaled"] else text).encode(),
        found["inputs"],
        None if layout == "stacked" else _lib.encoded(layout, f"tenon: {made.name}: the layout"),
        _lib.options(precision, rounding),
        generation,
    )
    if isinstance(act, (str, Activation)):  # functions are not cached, so that they can be freed
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        key = (act, layout, scaled, precision, rounding, *params.items())
        _forms[key] = form
    return form


def _known(key: tuple[Any, ...]) -> _Form | None:
    form = _forms.get(key)
    return form if form is not None and form.generation == _activation.generation else None


def _read(t: Tensor, name: str) -> Any:
    """Converts an input, plain or encoded, for the C ABI."""
    if not isinstance(t, Tensor):
        raise _call.refusal(t, name)
    if isinstance(t, QuantizedTensor):
        if t.is_matrix:
            return t.c_tensor()
        t = t.decode()
    return _call.view(_call.foldable(t), name)


def _plain_of(t: Any) -> Any:
    return t.decode() if isinstance(t, QuantizedTensor) else t


def _line(t: Tensor | None, name: str) -> Any:
    """A bias as one row."""
    if t is None:
        return None
    return _call.row(_plain_of(t), name)


def _column(t: Tensor | None, name: str) -> Any:
    """Values per row as one column."""
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise _call.refusal(t, name)
    t = _plain_of(t)
    # Shape [..., 1] or [...]. A strided vector is not copied.
    flat = t.squeeze(-1) if t.dim() == 2 and t.shape[-1] == 1 else t
    strided = flat.dim() == 1 and flat.stride(0) > 0
    return _call.column(flat if strided else t.contiguous(), name)


def _forward(
    form: _Form,
    x: Tensor,
    b: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    out_dtype: torch.dtype | None,
    quantizer: Quantizer | None,
) -> Tensor:
    """y, encoded if there is a quantizer."""
    if b is bias is scale is quantizer is form.layout is None and form.inputs == 1:
        if type(x) is not QuantizedTensor:
            try:
                y = torch.empty_like(x, dtype=out_dtype)
                if x.is_contiguous() or x.stride() == y.stride():
                    _call.elementwise(form.act, form.options, x, y)
                    return y
            except (RuntimeError, ValueError):
                if _call.dense(x):
                    raise
    shape, dtype = _out_shape(form, x, b), out_dtype or x.dtype
    if quantizer is None or not quantizer.fuses:
        y = torch.empty(shape, dtype=dtype, device=x.device)
        written: Any = _call.view(y, "out_dtype")
    else:
        y = quantizer.make_empty(shape, dtype=dtype, device=x.device)
        written = y.c_tensor(quantizer.written(x.device))
    _call.forward(
        form.act,
        form.options,
        form.layout,
        x=_read(x, "x"),
        b=None if b is None else _read(b, "b"),
        bias=_line(bias, "bias"),
        scale=_column(scale, "scale"),
        y=written,
    )
    if quantizer is not None and not quantizer.fuses:
        return quantizer.quantize(y)
    return y


class _Elementwise(torch.autograd.Function):
    """y = f(x) only. The most frequent call has the fewest arguments."""

    @staticmethod
    def forward(ctx: Any, form: _Form, x: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x)
        return _forward(form, x, None, None, None, None, None)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Tensor) -> Any:
        form, (grad,), (x,) = ctx.form, grads, ctx.saved_tensors
        # Autograd normally passes a grad with the shape and dtype of y, which are those of x.
        if x.dtype != grad.dtype or x.shape != grad.shape or x.device != grad.device:
            _saved.check(f"tenon: {form.name}", _saved.kinds((grad,)), (x,))
        return None, once(form.name, lambda: (_derivative(form, grad, x),), (grad, x))[0]


def _derivative(form: _Form, grad: Tensor, x: Tensor) -> Tensor:
    """dx = grad*f'(x)."""
    for t, name in ((grad, "grad"), (x, "x")):
        if not isinstance(t, Tensor):
            raise _call.refusal(t, name)
    grad = _plain_of(grad)
    if grad.shape != x.shape:
        raise ValueError(
            f"tenon: {form.name} backward: grad has shape {tuple(grad.shape)}, x "
            f"{tuple(x.shape)}; they must be equal"
        )
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given = {"grad": grad, "x": x, "dx": dx}
    if grad.is_contiguous() and x.is_contiguous():  # any split into rows is valid
        given = {name: _call.even(t) for name, t in given.items()}
    views = {name: _call.view(_call.foldable(t), name) for name, t in given.items()}
    _call.backward(form.act, form.options, None, **views)
    return dx


def _numbers(t: Any) -> Any:
    """Decodes a quantised tensor, with its gradient."""
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def _plain(form: _Form, x: Tensor) -> Tensor:
    """y = f(x), differentiable if x is."""
    # Tensors without memory raise an error in the call itself, so this check is not needed first.
    _watch.check_tracers(form.name, x)
    try:
        if x.requires_grad and torch.is_grad_enabled():
            return _Elementwise.apply(form, x)
        return _forward(form, x, None, None, None, None, None)
    except Exception:
        _watch.check(form.name, x)
        raise


def _out_shape(form: _Form, x: Any, b: Any) -> tuple[int, ...]:
    shape = tuple(x.shape)
    if form.inputs == 1 or b is not None:
        return shape
    if not shape:
        raise ValueError(
            f"tenon: {form.name}: x is 0-d, but a gated input holds two halves in its last "
            "dimension; give a and b as tensors, or at least two numbers"
        )
    return (*shape[:-1], shape[-1] // 2)


def _backward(
    form: _Form,
    grad: Tensor,
    x: Tensor,
    b: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Computes the required gradients of x, b, bias and scale."""
    tensors = (x, b, bias, scale)
    views = (_call.view, _call.view, _call.vector, _call.column)
    names = ("dx", "db", "dbias", "dscale")
    out = tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and needed else None
        for t, needed in zip(tensors, needs, strict=True)
    )
    _call.backward(
        form.act,
        form.options,
        form.layout,
        grad=_read(grad, "grad"),
        x=_read(x, "x"),
        b=None if b is None else _read(b, "b"),
        bias=_line(bias, "bias"),
        scale=_column(scale, "scale"),
        **{n: v(t, n) for n, v, t in zip(names, views, out, strict=True) if t is not None},
    )
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        x: Tensor,
        b: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        out_dtype: torch.dtype | None,
        quantizer: Quantizer | None,
    ) -> Tensor:
        ctx.form = form
        ctx.kinds = _saved.kinds((x, b, bias, scale))
        ctx.save_for_backward(x, b, bias, scale)
        return _forward(form, x, b, bias, scale, out_dtype, quantizer)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Tensor) -> Any:
        form, grad, needs = ctx.form, grads[0], ctx.needs_input_grad[1:5]
        x, b, bias, scale = saved = ctx.saved_tensors
        _saved.check(f"tenon: {form.name}", ctx.kinds, saved)
        found = once(
            form.name,
            lambda: _backward(form, grad, x, b, bias, scale, needs),
            (grad, x, b, bias, scale),
        )
        return None, *found, None, None


@one_break
def activation(
    act: str | Callable[..., Any] | Any,
    x: Tensor,
    *,
    b: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    layout: str = "stacked",
    quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "native",
    rounding: str = "once",
    **params: float,
) -> Any:
    """y = f(x + bias)*scale, with gradients of x, b, bias and scale.

    act        a registered name ("gelu"), a formula ("x*sigmoid(beta*x); beta = 1"), a Python
               function of expressions, or a tenon.Activation; params are its named parameters
    x          [..., K], plain or a QuantizedTensor; for a gated f(a, b) [..., 2H] in `layout`
               ("stacked", "swapped", "interleaved(k)"), or only the half a, with b; y is then
               [..., H]
    bias       [K] (gated: [2H] in the layout of x; if b is given, H values of a, then H of b)
    scale      one factor of y per row
    quantizer  writes y in its 8-bit format in the same pass; the result is a QuantizedTensor with
               the gradient of f (straight-through)
    out_dtype  dtype of y; default: dtype of x
    precision  "native" or "strict" (the same bits on every device)
    rounding   "once", or "eager": rounds as if bias and activation were two ops
    """
    try:
        key = (act, layout, scale is not None, precision, rounding, *params.items())
        form = _known(key)
    except TypeError:  # not hashable
        form = None
    if form is None:
        form = _form(act, layout, scale is not None, precision, rounding, params)
    if form.inputs == 1 and b is bias is scale is quantizer is out_dtype is None:
        if isinstance(x, Tensor) and type(x) is not QuantizedTensor:
            return _plain(form, x)
    for t, name in ((x, "x"), (b, "b"), (bias, "bias"), (scale, "scale")):
        if not isinstance(t, Tensor) and (t is not None or name == "x"):
            raise _call.refusal(t, name)
    _watch.check(form.name, x, b, bias, scale)
    if quantizer is not None:
        _check_quantizer(quantizer)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, b, bias, scale)
    ):
        x, b = _numbers(x), _numbers(b)
        y = _Activation.apply(form, x, b, bias, scale, out_dtype, quantizer)
        return y.detach() if quantizer is not None and quantizer.internal else y
    return _forward(form, x, b, bias, scale, out_dtype, quantizer)


def _check_quantizer(quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"tenon: quantizer is a {type(quantizer).__name__}; it must be one of "
            "tenon.torch.quantizer, e.g. MXFP8Quantizer('e4m3')"
        )


def _named(name: str) -> Callable[..., Any]:
    form = _form(name, "stacked", False, "native", "once", {})

    def function(x: Tensor, **options: Any) -> Any:
        nonlocal form
        if torch.compiler.is_dynamo_compiling():
            from ._outside import call

            return call(function, x, **options)
        if not options and isinstance(x, Tensor) and type(x) is not QuantizedTensor:
            if form.generation != _activation.generation:
                form = _form(name, "stacked", False, "native", "once", {})
            if form.inputs == 1:
                return _plain(form, x)
        return activation(name, x, **options)

    function.__name__ = function.__qualname__ = name
    found = activation_info(name)
    of = "x" if found["inputs"] == 1 else "a, b"
    function.__doc__ = f"""y = f(x + bias)*scale with f({of}): {found["formula"]}.

    Keywords b, bias, scale, layout, quantizer, out_dtype, precision, rounding and the activation's
    parameters are those of activation().
    """
    return function


def __getattr__(name: str) -> Callable[..., Any]:
    # One function per registered name. User-defined names are available after their definition.
    if not name.startswith("_"):
        try:
            known = activation_info(name)
        except (ValueError, NotImplementedError) as e:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {e}") from None
        if name not in ("x", "a", "b") and known:
            made = globals()[name] = _named(name)
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in _call.names() if not n.startswith("_"))})


def quantize(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """Quantises x in the quantizer's format, with a straight-through gradient."""
    _check_quantizer(quantizer)
    return quantizer.quantize(x)


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """x = codes*scale_inv as a plain tensor, with a straight-through gradient."""
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"tenon: dequantize: x is a {type(x).__name__}; it takes a QuantizedTensor")
    return x.dequantize(dtype)
