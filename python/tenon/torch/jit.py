"""Fused functions under the names of Transformer Engine.

Each is one pass over memory, forward and backward. Names that end in an underscore require a bias.
The same names without the underscore accept None or an empty tensor as no bias. The functions for
silu, relu, qgelu and srelu are those of gelu with another formula. `tenon.show(name)` prints it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _call, _norm, functional
from ._dropout import bias_dropout_add
from ._dynamo import no_torch_dynamo, one_break
from ._fuse import lazy_compile as _lazy_compile
from ._once import once

__all__ = [
    "bgrad_dgelu_fused",
    "bgrad_dgelu_fused_",
    "bgrad_dqgelu_fused",
    "bgrad_dqgelu_fused_",
    "bgrad_drelu_fused",
    "bgrad_drelu_fused_",
    "bgrad_dsilu_fused",
    "bgrad_dsilu_fused_",
    "bgrad_dsrelu_fused",
    "bgrad_dsrelu_fused_",
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "bias_gelu_fused",
    "bias_gelu_fused_",
    "bias_qgelu_fused",
    "bias_qgelu_fused_",
    "bias_relu_fused",
    "bias_relu_fused_",
    "bias_silu_fused",
    "bias_silu_fused_",
    "bias_srelu_fused",
    "bias_srelu_fused_",
    "dgelu_fused",
    "dgelu_fused_",
    "dqgelu_fused",
    "dqgelu_fused_",
    "drelu_fused",
    "drelu_fused_",
    "dropout_fuser",
    "dsilu_fused",
    "dsilu_fused_",
    "dsrelu_fused",
    "dsrelu_fused_",
    "gelu_fused",
    "gelu_fused_",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "lazy_compile",
    "no_torch_dynamo",
    "qgelu_fused",
    "qgelu_fused_",
    "relu_fused",
    "relu_fused_",
    "set_jit_fusion_options",
    "silu_fused",
    "silu_fused_",
    "srelu_fused",
    "srelu_fused_",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
]

Tensor = torch.Tensor
Function = Callable[..., Any]


def lazy_compile(func: Function) -> Function:
    """Compiles func at its first call for each combination of dtypes.

    A function that only uses supported operations (+ - * /, exp, tanh, sigmoid, erf, where, clamp,
    maximum, the activations of torch.nn.functional, …) becomes one Tenon kernel with a derived
    gradient. Arguments broadcast. Any other function is compiled with torch.compile.

    A plain call is used if torch.compile fails, during tracing by another torch.compile or an ONNX
    export, and with TENON_JIT=0. `func.how` is the decision and its reason. A kernel rounds only
    when it stores. Numbers are constants of the kernel. If the arguments of maximum or minimum are
    equal, the first one gets the gradient.
    """
    return _lazy_compile(func)


def jit_fuser(func: Function) -> Function:
    """Another name of lazy_compile, for use as a decorator."""
    return _lazy_compile(func)


def dropout_fuser(func: Function) -> Function:
    """lazy_compile for functions with dropout. In training, torch.compile fuses them.

    residual + dropout(x + bias) is one Tenon kernel: use bias_dropout_add.
    """
    return _lazy_compile(func)


def set_jit_fusion_options() -> None:
    """Does nothing. There are no fusion options. It exists so that scripts need no change."""


class _Family(NamedTuple):
    """The eight functions of one activation f."""

    bias_act_: Function
    act_: Function
    bgrad_dact_: Function
    dact_: Function
    bias_act: Function
    act: Function
    bgrad_dact: Function
    dact: Function


def _family(name: str) -> _Family:
    form = functional._form(name, "stacked", False, "native", "once", {})
    of = getattr(functional, name)

    def bias_act_(inp: Tensor, bias: Tensor) -> Tensor:
        return of(inp, bias=bias)

    def act_(inp: Tensor) -> Tensor:
        return of(inp)

    def bgrad_dact_(grad_output: Tensor, inp: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor | None, ...]:
            for t, called in ((grad_output, "grad_output"), (inp, "inp"), (bias, "bias")):
                if not isinstance(t, Tensor):
                    raise _call.refusal(t, called)
            needs = (True, False, True, False)
            return functional._backward(form, grad_output, inp, None, bias, None, needs)

        dx, _, dbias, _ = once(f"bgrad_d{name}", compute, (grad_output, inp, bias))
        assert dx is not None and dbias is not None
        return dbias, dx

    def dact_(grad_output: Tensor, inp: Tensor) -> Tensor:
        (dx,) = once(
            f"d{name}",
            lambda: (functional._derivative(form, grad_output, inp),),
            (grad_output, inp),
        )
        assert dx is not None
        return dx

    def bias_act(inp: Tensor, bias: Tensor | None) -> Tensor:
        b = _given(bias)
        return act_(inp) if b is None else bias_act_(inp, b)

    def bgrad_dact(
        grad_output: Tensor, inp: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        b = _given(bias)
        return (None, dact_(grad_output, inp)) if b is None else bgrad_dact_(grad_output, inp, b)

    def documented(function: Function, called: str, doc: str) -> Function:
        @functools.wraps(function)
        def alias(*arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                from ._outside import call

                return call(function, *arguments, **keywords)
            return function(*arguments, **keywords)

        alias.__name__ = alias.__qualname__ = called
        alias.__doc__ = doc
        return alias

    empty = " A bias of None or without elements is no bias."
    value, biased = f"y = {name}(inp).", f"y = {name}(inp + bias)."
    d = f"dx = grad_output*{name}'(inp)."
    both = f"(dbias, dx): dx = grad_output*{name}'(inp + bias), dbias = dx summed over all rows."
    none = " Without a bias dbias is None."
    return _Family(
        documented(bias_act_, f"bias_{name}_fused_", biased),
        documented(act_, f"{name}_fused_", value),
        documented(bgrad_dact_, f"bgrad_d{name}_fused_", both),
        documented(dact_, f"d{name}_fused_", d),
        documented(bias_act, f"bias_{name}_fused", biased + empty),
        documented(act_, f"{name}_fused", value),
        documented(bgrad_dact, f"bgrad_d{name}_fused", both + empty + none),
        documented(dact_, f"d{name}_fused", d),
    )


(
    bias_gelu_fused_,
    gelu_fused_,
    bgrad_dgelu_fused_,
    dgelu_fused_,
    bias_gelu_fused,
    gelu_fused,
    bgrad_dgelu_fused,
    dgelu_fused,
) = _family("gelu")
(
    bias_silu_fused_,
    silu_fused_,
    bgrad_dsilu_fused_,
    dsilu_fused_,
    bias_silu_fused,
    silu_fused,
    bgrad_dsilu_fused,
    dsilu_fused,
) = _family("silu")
(
    bias_relu_fused_,
    relu_fused_,
    bgrad_drelu_fused_,
    drelu_fused_,
    bias_relu_fused,
    relu_fused,
    bgrad_drelu_fused,
    drelu_fused,
) = _family("relu")
(
    bias_qgelu_fused_,
    qgelu_fused_,
    bgrad_dqgelu_fused_,
    dqgelu_fused_,
    bias_qgelu_fused,
    qgelu_fused,
    bgrad_dqgelu_fused,
    dqgelu_fused,
) = _family("qgelu")
(
    bias_srelu_fused_,
    srelu_fused_,
    bgrad_dsrelu_fused_,
    dsrelu_fused_,
    bias_srelu_fused,
    srelu_fused,
    bgrad_dsrelu_fused,
    dsrelu_fused,
) = _family("srelu")


def l2normalization_fused_(x: Tensor, eps: float) -> Tensor:
    """y = x*rsqrt(sum(x^2) + eps), summed over the last dimension."""
    return _norm.l2normalization(x, eps)


def l2normalization_fwd_fused_(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r) with r = rsqrt(sum(x^2) + eps), float32 [..., 1], and y = x*r."""
    return _norm.l2normalization_forward(x, eps)


@one_break
def l2normalization_backward_fused_(
    grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float
) -> Tensor:
    """dx = r*(grad_output - x*r^2*sum(x*grad_output)) with r = rsqrt_norm, which includes eps."""
    (dx,) = once(
        "l2normalization_backward",
        lambda: (_norm.l2normalization_backward(grad_output, x, rsqrt_norm),),
        (grad_output, x, rsqrt_norm),
    )
    assert dx is not None
    return dx


# These functions have no bias.
l2normalization_fused = l2normalization_fused_
l2normalization_fwd_fused = l2normalization_fwd_fused_
l2normalization_backward_fused = l2normalization_backward_fused_


def get_bias_dropout_add(training: bool) -> Callable[..., Tensor]:
    """A function of (x, bias, residual, p): residual + dropout(x + bias), with fixed `training`."""

    def bias_dropout_add_of(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        return bias_dropout_add(x, bias, residual, p, training)

    return bias_dropout_add_of


def bias_dropout_add_fused_train_(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float
) -> Tensor:
    """residual + dropout(x + bias, p) in training."""
    return bias_dropout_add(x, bias, residual, p, True)


def bias_dropout_add_fused_inference_(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float
) -> Tensor:
    """residual + x + bias: nothing is dropped."""
    return bias_dropout_add(x, bias, residual, p, False)


def bias_dropout_add_fused_train(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float
) -> Tensor:
    """residual + dropout(x + bias, p) in training, always with gradients enabled."""
    with torch.enable_grad():
        return bias_dropout_add(x, _given(bias), residual, p, True)


def bias_dropout_add_fused_inference(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float
) -> Tensor:
    """residual + x + bias: nothing is dropped."""
    return bias_dropout_add(x, _given(bias), residual, p, False)


def _given(bias: Tensor | None) -> Tensor | None:
    if bias is not None and not isinstance(bias, Tensor):
        raise _call.refusal(bias, "bias")
    return None if bias is None or bias.numel() == 0 else bias


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_Device = torch.device | str | None


def _warmed(run: Callable[[], Tensor], like: Tensor) -> None:
    """Compiles the kernels of a call and its gradient. Random states are restored."""
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        with torch.enable_grad():
            run().sum().backward()
        with torch.no_grad():
            run()


def warmup_jit_bias_dropout_add(
    hidden_size: int,
    dtype: torch.dtype,
    seq_length: int,
    micro_batch_size: int,
    *,
    device: _Device = None,
) -> None:
    """Compiles the kernels of bias_dropout_add for [seq_length, micro_batch_size, hidden_size].

    The default device is torch's.
    """
    shape = (seq_length, micro_batch_size, hidden_size)
    residual = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    bias = torch.ones(hidden_size, dtype=dtype, device=device, requires_grad=True)
    for needed in (False, True):
        x = torch.ones(shape, dtype=dtype, device=device, requires_grad=needed)
        for training in (False, True):
            _warmed(functools.partial(bias_dropout_add, x, bias, residual, 0.1, training), x)


def warmup_jit_bias_dropout_add_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int, *, device: _Device = None
) -> None:
    """warmup_jit_bias_dropout_add for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_dropout_add(hidden_size, dtype, seq_length, micro_batch_size, device=device)


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int,
    dtype: torch.dtype,
    seq_length: int,
    micro_batch_size: int,
    *,
    device: _Device = None,
) -> None:
    """Compiles the kernels of gelu with and without bias for [rows, ffn_hidden_size]."""
    shape = (seq_length * micro_batch_size, ffn_hidden_size_per_partition)
    width = ffn_hidden_size_per_partition
    bias = torch.ones(width, dtype=dtype, device=device, requires_grad=True)
    for needed in (False, True):
        inp = torch.ones(shape, dtype=dtype, device=device, requires_grad=needed)
        _warmed(functools.partial(bias_gelu_fused_, inp, bias), inp)
    _warmed(functools.partial(gelu_fused_, inp), inp)


def warmup_jit_bias_gelu_all_dtypes(
    ffn_hidden_size: int, seq_length: int, micro_batch_size: int, *, device: _Device = None
) -> None:
    """warmup_jit_bias_gelu for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_gelu(ffn_hidden_size, dtype, seq_length, micro_batch_size, device=device)


def warmup_jit_l2normalization(
    hidden_size: int,
    dtype: torch.dtype,
    seq_length: int,
    micro_batch_size: int,
    *,
    device: _Device = None,
) -> None:
    """Compiles the kernels of l2normalization for [rows, hidden_size]."""
    shape = (seq_length * micro_batch_size, hidden_size)
    x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    _warmed(functools.partial(l2normalization_fused_, x, 1e-6), x)


def warmup_jit_l2normalization_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int, *, device: _Device = None
) -> None:
    """warmup_jit_l2normalization for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_l2normalization(hidden_size, dtype, seq_length, micro_batch_size, device=device)
