"""Tenon kernels on whole tensors, shared by basic and fused ops."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ... import _lib
from ..._plan import Plan
from .. import _call, _cuda, _memory
from .._quantized import QuantizedTensor

if TYPE_CHECKING:
    from ..quantizer import Quantizer

_OPTIONS = _lib.options()
_PLAIN = frozenset(_call.PLAIN)


def compute_dtype(op: str, *tensors: Any) -> torch.dtype:
    """The compute dtype of an op: autocast's if enabled, else that of the first tensor."""
    for t in tensors:
        if t.dtype not in _PLAIN:
            raise TypeError(
                f"{op}: the input is {t.dtype}; it must be float32, float16 or bfloat16, convert "
                "it with .to(dtype)"
            )
    kind = "cpu" if tensors[0].is_cpu else "cuda"
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype in _PLAIN:
            return dtype
    first: torch.dtype = tensors[0].dtype
    return first


def plain(t: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`t` as a plain tensor: dequantised if it is encoded, cast to `dtype` if given."""
    if isinstance(t, QuantizedTensor) or not isinstance(t, torch.Tensor):
        t = t.dequantize(dtype=dtype)
    return t if dtype is None or t.dtype == dtype else t.to(dtype)


def is_encoded(t: Any) -> bool:
    """Whether `t` is encoded: a QuantizedTensor, or another object that can be dequantised."""
    return isinstance(t, QuantizedTensor) or not isinstance(t, torch.Tensor)


def foldable(t: Any) -> Any:
    """`t` with evenly spaced rows, as kernels read it."""
    if is_encoded(t):
        return t if getattr(t, "is_matrix", True) else t.dequantize()
    return _call.foldable(t)


def encode(y: torch.Tensor, quantizer: Quantizer | None) -> Any:
    """Encodes `y` with the quantizer of the next op, if there is one."""
    return y if quantizer is None or is_encoded(y) else quantizer(y)


def _operand(t: Any, name: str) -> Any:
    return t.c_tensor() if isinstance(t, QuantizedTensor) else _call.view(t, name)


def _output(
    shape: Any, dtype: torch.dtype, quantizer: Quantizer | None, like: Any, name: str
) -> tuple[Any, Any]:
    """Allocates the output of a call, on the device of `like`. The second value is for the call."""
    if quantizer is None or not getattr(quantizer, "fuses", False):
        y = torch.empty(shape, dtype=dtype, device=like.device)
        return y, _call.view(y, name)
    encoded = quantizer.make_empty(shape, dtype=dtype, device=like.device)
    return encoded, encoded.c_tensor(quantizer.written(like.device))


class _Frame:
    """The argument structs of y = f(x + bias), linked once. A call only fills in the views."""

    __slots__ = ("args", "bias", "x", "y")

    def __init__(self, with_bias: bool) -> None:
        self.x, self.y, self.bias = _lib.View(), _lib.View(), _lib.View()
        self.args = _lib.ForwardArgs(x=_lib.ViewPtr(self.x), y=_lib.ViewPtr(self.y))
        if with_bias:
            self.args.bias = _lib.ViewPtr(self.bias)


# Frames not in use, without and with a bias.
_frames: tuple[list[_Frame], list[_Frame]] = ([], [])


def _plain_forward(
    act: bytes,
    x: torch.Tensor,
    y: torch.Tensor,
    layout: bytes | None,
    bias: torch.Tensor | None,
) -> None:
    """y = f(x + bias) for contiguous tensors. Same as `_call.forward`, in half the time."""
    dtypes = _call.DTYPES
    if bias is not None and bias.dtype not in _PLAIN:
        raise _call.refusal(bias, "bias")
    x = _call.resolved(x)
    if bias is not None:
        bias = _call.resolved(bias)
    free = _frames[bias is not None]
    try:
        frame = free.pop()
    except IndexError:
        frame = _Frame(bias is not None)
    v, w = frame.x, frame.y
    v.data, w.data = x.data_ptr(), y.data_ptr()
    v.cols = v.stride = cols = x.shape[-1] if x.dim() else 1
    w.cols = w.stride = y.shape[-1] if y.dim() else 1
    v.rows = w.rows = x.numel() // cols if cols else 0
    v.dtype, w.dtype = dtypes[x.dtype], dtypes[y.dtype]
    if bias is not None:
        b = frame.bias
        b.data, b.rows, b.dtype = bias.data_ptr(), 1, dtypes[bias.dtype]
        b.cols = b.stride = bias.numel()
    frame.args.layout = layout
    if x.is_cpu and (bias is None or bias.is_cpu):
        code = _lib.lib.tenon_forward(act, frame.args, _OPTIONS)
    else:
        there = _cuda.index((("x", x), ("bias", bias)))
        code = _cuda.run(_lib.lib.tenon_forward, there, _OPTIONS, act, frame.args)
    free.append(frame)
    if code:
        _lib.check(code)


def row_scales(op: str, x: Any, scales: torch.Tensor) -> torch.Tensor:
    """The scales of a scaled activation, contiguous, one per row of `x`."""
    if scales.dtype not in _call.PLAIN:
        raise TypeError(f"{op}: scales are {scales.dtype}; use float32, float16 or bfloat16")
    rows = 1
    for n in x.shape[:-1]:
        rows *= n
    if scales.numel() != rows:
        raise ValueError(
            f"{op}: scales have shape {tuple(scales.shape)}, but the input {tuple(x.shape)} has "
            f"{rows} rows; give one scale a row"
        )
    return scales.contiguous()


def activation_forward(
    act: bytes,
    x: Any,
    dtype: torch.dtype,
    *,
    gated: bool,
    layout: bytes | None = None,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
) -> Any:
    """y = f(x + bias)*scales in one pass, encoded by `quantizer` if given."""
    shape = x.shape
    if gated:
        shape = (*shape[:-1], shape[-1] // 2) if len(shape) else (0,)
    if quantizer is None and scales is None and type(x) is torch.Tensor and x.is_contiguous():
        if bias is None or bias.is_contiguous():
            if gated:
                y = torch.empty(shape, dtype=dtype, device=x.device)
            else:
                y = torch.empty_like(x, dtype=dtype)
            if gated or bias is not None:
                _plain_forward(act, x, y, layout, bias)
            else:
                _call.elementwise(act, _OPTIONS, x, y)
            return y
    x = foldable(x)
    y, written = _output(shape, dtype, quantizer, x, "y")
    views = {"x": _operand(x, "x"), "y": written}
    if bias is not None:
        views["bias"] = _call.row(bias, "bias")
    if scales is not None:
        views["scale"] = _call.column(scales, "scales")
    _call.forward(act, _OPTIONS, layout, **views)
    return encode(y, quantizer)


def activation_backward(
    act: bytes,
    grad: Any,
    x: Any,
    *,
    layout: bytes | None = None,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    dbias_dtype: torch.dtype | None = None,
    with_dscales: bool = False,
    quantizer: Quantizer | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dbias, dscales) in one pass. dx has the dtype of x, or is encoded by `quantizer`."""
    grad, x = foldable(grad), foldable(x)
    dx, written = _output(x.shape, x.dtype, quantizer, x, "dx")
    dbias = dscales = None
    views = {
        "grad": _operand(grad, "grad"),
        "x": _operand(x, "x"),
        "dx": written,
    }
    if bias is not None:
        views["bias"] = _call.row(bias, "bias")
    if dbias_dtype is not None:
        cols = x.shape[-1] if len(x.shape) else 1
        dbias = torch.empty(cols, dtype=dbias_dtype, device=x.device)
        views["dbias"] = _call.vector(dbias, "dbias")
    if scales is not None:
        views["scale"] = _call.column(scales, "scales")
        if with_dscales:
            dscales = torch.empty(scales.shape, dtype=scales.dtype, device=scales.device)
            views["dscale"] = _call.column(dscales, "dscales")
    _call.backward(act, _OPTIONS, layout, **views)
    return encode(dx, quantizer), dbias, dscales


def bias_dropout_add(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    p: float = 0.0,
    random: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = residual + dropout(x + bias). Without `random` nothing is dropped."""
    x = _call.foldable(x)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    views = {"x": _call.view(x, "x"), "y": _call.view(y, "y")}
    if bias is not None:
        views["bias"] = _call.row(bias, "bias")
    if residual is not None:
        residual = _call.foldable(residual)
        views["residual"] = _call.view(residual, "residual")
    # The call advances the state. The backward pass needs the state from before.
    state = None if random is None else random.clone()
    _call.bias_dropout_add(p, random is not None, state, _OPTIONS, **views)
    return y


def bias_dropout_add_backward(
    grad: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    dbias_dtype: torch.dtype | None = None,
    p: float = 0.0,
    random: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx of `dtype`, dbias of `dbias_dtype`). Each is computed only if its dtype is given."""
    grad = _call.foldable(grad)
    views = {"grad": _call.view(grad, "grad")}
    dx = dbias = None
    if dtype is not None:
        dx = torch.empty(grad.shape, dtype=dtype, device=grad.device)
        views["dx"] = _call.view(dx, "dx")
    if dbias_dtype is not None:
        cols = grad.shape[-1] if grad.dim() else 1
        dbias = torch.empty(cols, dtype=dbias_dtype, device=grad.device)
        views["dbias"] = _call.vector(dbias, "dbias")
    _call.bias_dropout_add_backward(p, random is not None, random, _OPTIONS, **views)
    return dx, dbias


def bias_gradient_quantize(
    grad: torch.Tensor, dbias_dtype: torch.dtype, quantizer: Quantizer
) -> tuple[Any, torch.Tensor]:
    """(`grad` encoded, its column sums) in one pass."""
    grad = _call.foldable(grad)
    fuses = getattr(quantizer, "fuses", False)
    encoded, written = (
        _output(grad.shape, grad.dtype, quantizer, grad, "dx") if fuses else (grad, None)
    )
    dbias = torch.empty(grad.shape[-1], dtype=dbias_dtype, device=grad.device)
    views: dict[str, Any] = {"x": _call.view(grad, "grad"), "dbias": _call.vector(dbias, "dbias")}
    if fuses:
        views["y"] = written
    _call.quantize(_OPTIONS, **views)
    return encode(encoded, quantizer), dbias


def l2_normalization(
    x: torch.Tensor, dtype: torch.dtype, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, r) with y = x*r and r = rsqrt(sum x^2 + eps) per row."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    r = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    _call.l2_normalization(
        _call.view(x, "x"), _call.view(y, "y"), _call.column(r, "r"), eps, _OPTIONS
    )
    return y, r


def l2_normalization_backward(grad: torch.Tensor, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """dx = r*(g - x*r^2*sum(x*g))."""
    grad, x = _call.foldable(grad), _call.foldable(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _call.l2_normalization_backward(
        _call.view(grad, "grad"),
        _call.view(x, "x"),
        _call.column(r, "r"),
        _call.view(dx, "dx"),
        _OPTIONS,
    )
    return dx


def run_plan(
    plan: Plan,
    pass_: int,
    rows: int,
    memory: Any,
    size: int,
    like: torch.Tensor,
    aligned: bool = False,
    step: int | None = None,
    workspace: int | None = None,
    unchanged: bool = False,
) -> None:
    """Runs a pass of a plan, or one step of it, on the device of `like`.

    Without the address of a workspace it gets one of `size` bytes. `unchanged`: `memory` has the
    codes of the weights already.
    """
    if workspace is None:
        own = (
            _memory.workspace(size)
            if like.is_cpu
            else torch.empty(size, dtype=torch.uint8, device=like.device)
        )
        workspace = own.data_ptr()
    if like.is_cpu:
        plan.run(pass_, rows, memory, workspace, step=step, weights_unchanged=unchanged)
        return
    _cuda.run_plan(
        plan, like.device.index, pass_, rows, memory, workspace, aligned, step, unchanged
    )


class _Alone:
    """A plan of one op, or of a few. Without a backward pass if `wanted` is None."""

    def __init__(
        self,
        text: str,
        dtype: int,
        of_weights: int,
        input_grad: bool,
        wanted: Any,
        device: torch.device,
    ) -> None:
        # A plan is for the GPU that is current while it is made.
        with _cuda.on(device):
            self.plan = Plan(
                text,
                dtype=_lib.DTYPES[dtype],
                parameter_dtype=_lib.DTYPES[of_weights],
                backward=wanted is not None,
                input_grad=input_grad,
                parameter_grads=wanted or (),
                device=device.type,
                allocate=None if device.type == "cpu" else _cuda.allocate_here,
            )
        # Names without that of the op, which is the first one, or after a make_extra_output.
        ops = text.split(" ")
        at = int(ops[0] == "make_extra_output")
        op = f"{ops[at].partition('(')[0]}{at}."
        self.names = [b.name.replace(op, "") for b in self.plan.buffers]
        self.width = next(b.cols for b in self.plan.buffers if b.role == "output")

    def run(
        self, backward: bool, rows: int, tensors: dict[str, torch.Tensor | None], like: torch.Tensor
    ) -> None:
        """Runs one pass on contiguous tensors. Their keys are the names of the buffers."""
        memory = (c_void_p * len(self.names))()
        for i, name in enumerate(self.names):
            t = tensors.get(name)
            if t is not None:
                memory[i] = t.data_ptr()
        run_plan(self.plan, backward, rows, memory, self.plan.sizes(rows)[1], like)


_known = lru_cache(maxsize=256)(_Alone)


def _alone(
    text: str, x: torch.Tensor, of_weights: torch.dtype, input_grad: bool, wanted: Any
) -> _Alone:
    dtypes = _call.DTYPES
    return _known(text, dtypes[x.dtype], dtypes[of_weights], input_grad, wanted, x.device)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ for tensors of one dtype."""
    return product_bias_activation(x, w, None, None)[0]


def product_and_sum(
    x: torch.Tensor,
    w: torch.Tensor,
    extra: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: str | None = None,
) -> torch.Tensor:
    """x·Wᵀ + bias + extra or x·Wᵀ·c + extra. `scale` is the multiplication by c as in a chain."""
    x, w, extra = (_call.contiguous(t) for t in (x, w, extra))
    out, inner = w.shape
    parts = [
        f"linear({inner},{out})",
        *([scale] if scale else []),
        *(["bias"] * (bias is not None)),
    ]
    plan = _alone(" ".join([*parts, "add"]), x, w.dtype, True, None)
    y = torch.empty((*x.shape[:-1], out), dtype=x.dtype, device=x.device)
    tensors: dict[str, torch.Tensor | None] = {"x": x, "weight": w, "extra0": extra, "y": y}
    tensors["bias1.bias"] = None if bias is None else _call.contiguous(bias)
    plan.run(False, x.numel() // inner, tensors, x)
    return y


def product_bias_activation(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, act: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(f(z), z) with z = x·Wᵀ + b, for tensors of one dtype. `act` is f as in a chain."""
    x, w = _call.contiguous(x), _call.contiguous(w)
    out, inner = w.shape
    text = f"linear({inner},{out})" + (" bias" if b is not None else "")
    if act is not None:
        text += " make_extra_output " + act
    plan = _alone(text, x, w.dtype, True, None)
    lead = x.shape[:-1]
    y = torch.empty((*lead, plan.width), dtype=x.dtype, device=x.device)
    z = y if act is None else torch.empty((*lead, out), dtype=x.dtype, device=x.device)
    tensors: dict[str, torch.Tensor | None] = {"x": x, "weight": w, "y": y, "extra_out0": z}
    tensors["bias1.bias"] = None if b is None else _call.contiguous(b)
    plan.run(False, x.numel() // inner, tensors, x)
    return y, z


def product_backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor,
    input_grad: bool,
    target: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    added: torch.Tensor | None = None,
    scale: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dW of `dtype`). Without x there is no dW. dW is added to `target` if given.

    `added` is added to dx. `scale` is a multiplication after the product as in a chain.
    """
    dy, w = _call.contiguous(dy), _call.contiguous(w)
    out, inner = w.shape
    dx = torch.empty((*dy.shape[:-1], inner), dtype=dy.dtype, device=dy.device)
    dw, wanted = target, ""
    if x is not None:
        x = _call.contiguous(x)
        wanted = ("+" if target is not None else "") + _lib.DTYPES[
            _call.DTYPES[dtype if target is None else target.dtype]
        ]
        if dw is None:
            dw = torch.empty(w.shape, dtype=dtype, device=w.device)
    if input_grad or wanted:
        parts = ["make_extra_output"] * (added is not None)
        parts += [f"linear({inner},{out})", *([scale] if scale else [])]
        plan = _alone(" ".join(parts), dy, w.dtype, input_grad, (wanted or False,))
        tensors = {"dy": dy, "x": x, "weight": w, "dx": dx, "dweight": dw}
        tensors["dextra_out0"] = None if added is None else _call.contiguous(added)
        plan.run(True, dy.numel() // out, tensors, dy)
    return dx if input_grad else None, dw


def norm(
    text: str,
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    statistics: Sequence[str],
) -> list[torch.Tensor]:
    """[y, *statistics] of a contiguous x.

    `text` is the norm as in a chain. Weights and statistics have the names of its buffers.
    """
    gamma = weights["gamma"]
    wanted = (True,) * len(weights) if statistics else None
    plan = _alone(text, x, gamma.dtype, True, wanted)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // gamma.numel()
    made = {n: torch.empty(rows, dtype=torch.float32, device=x.device) for n in statistics}
    if rows:
        plan.run(False, rows, {"x": x, "y": y, **weights, **made}, x)
    return [y, *made.values()]


def norm_backward(
    text: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    statistics: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    input_grad: bool,
    wanted: Sequence[bool],
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dx, the requested gradients of the weights). Tensors are contiguous.

    `added` is added to dx.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if input_grad else None
    grads = {
        "d" + name: torch.zeros_like(w) if want else None
        for (name, w), want in zip(weights.items(), wanted, strict=True)
    }
    if x.numel() and (input_grad or any(wanted)):
        gamma = weights["gamma"]
        if added is not None:
            text = f"make_extra_output {text}"
        plan = _alone(text, x, gamma.dtype, input_grad, tuple(wanted))
        tensors = {"x": x, "dy": grad, "dx": dx, **statistics, **weights, **grads}
        tensors["dextra_out0"] = added
        plan.run(True, x.numel() // gamma.numel(), tensors, x)
    return dx, list(grads.values())
