"""Activations of any formula: y = f(x), or f(a)*L(b) for the halves a and b of x.

`Scaled…` classes multiply each row by a scale.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ...._activation import activation
from .. import _kernels
from ..op import BackwardResult, BasicOperation, ExtraOutputs, OperationContext, count_change

if TYPE_CHECKING:
    from ...quantizer import Quantizer

# Parameter names of Transformer Engine that differ from the registry. Both are accepted.
_ALIASES = {"glu_linear_offset": "offset"}


class _ActivationOperation(BasicOperation, abc.ABC):
    """Base class of activations: the compute dtype, saved tensors, and quantised neighbours.

    The input is saved for the backward pass. With `cache_quantized_input`, its E4M3 encoding with
    1x128 power-of-two scales is saved instead. Nothing is saved without a backward pass.
    """

    # Whether the implementation accepts quantised tensors directly.
    _takes_encoded = False

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    @abc.abstractmethod
    def _activation_forward_impl(
        self, input_: torch.Tensor, quantizer: Quantizer | None
    ) -> torch.Tensor:
        """y = f(x), encoded by `quantizer` if it is not None."""

    @abc.abstractmethod
    def _activation_backward_impl(
        self, grad_output: torch.Tensor, input_: torch.Tensor, quantizer: Quantizer | None
    ) -> torch.Tensor:
        """dx = g*f'(x), encoded by `quantizer` if it is not None."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        dtype = _kernels.compute_dtype(type(self).__name__, input_)
        x = _kernels.foldable(input_)
        if x.dtype != dtype or not self._takes_encoded:
            x = _kernels.plain(x, dtype)
        y = self._activation_forward_impl(x, next_op_input_quantizer)
        if ctx.requires_grad:
            self.record(ctx, x)
            ctx.dtype = dtype
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return y

    def record(self, ctx: OperationContext, x: torch.Tensor) -> None:
        """Saves what the backward pass needs."""
        if ctx.requires_grad:
            ctx.save_for_backward(self.cached_input(x))
            # Parameters may change before the backward pass.
            ctx.kernel = self.__dict__.get("kernel")

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        (x,) = ctx.saved_tensors
        if not self._takes_encoded:
            x, grad_output = _kernels.plain(x), _kernels.plain(grad_output)
        dx = self._activation_backward_impl(grad_output, x, ctx.prev_op_grad_output_quantizer)
        return dx, ()

    def cached_input(self, x: torch.Tensor) -> Any:
        """`x` in the form that is saved for the backward pass."""
        if not self.cache_quantized_input or _kernels.is_encoded(x):
            return x
        return _cache_quantizer()(x)


@cache
def _cache_quantizer() -> Quantizer:
    from ...quantizer import Float8BlockQuantizer

    return Float8BlockQuantizer(
        torch.float8_e4m3fn,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=True,
        block_scaling_dim=1,
    )


class _Kernel:
    """The text of an activation for the C ABI, its parameters and its layout. Immutable."""

    def __init__(
        self, act: Any, params: dict[str, float], interleave: int | None, op: str, scaled: bool
    ) -> None:
        self.made = activation(act)
        if self.made.is_scaled:
            raise ValueError(
                f"{op}: {self.made.text!r} is scaled; give the activation alone to "
                "ops.ScaledActivation"
            )
        self.scaled = scaled
        self.params: dict[str, float] = self.made.parameters
        self._set({self.parameter(name) or name: value for name, value in params.items()})
        self.layout: bytes | None = None
        if interleave is not None:
            if not self.gated:
                raise ValueError(
                    f"{op}: glu_interleave_size={interleave}, but {self.made.name} is not gated; "
                    "leave it out"
                )
            if not isinstance(interleave, int) or interleave < 1:
                raise ValueError(
                    f"{op}: glu_interleave_size={interleave!r}; it must be a whole number, at "
                    "least 1, or None for halves side by side"
                )
            self.layout = f"interleaved({interleave})".encode()

    def parameter(self, name: str) -> str | None:
        """The name of a parameter in the registry."""
        name = _ALIASES.get(name, name)
        return name if name in self.params else None

    def _set(self, params: dict[str, float]) -> None:
        self.made = activation(self.made, **params)
        self.gated = self.made.inputs == 2
        self.params = self.made.parameters
        self.text = (self.made.scaled() if self.scaled else self.made).text.encode()
        self.chain_texts: dict[str | None, str] = {}

    def having(self, **params: float) -> _Kernel:
        """A copy with other parameter values."""
        other = copy.copy(self)
        other._set(params)
        return other

    def chain_text(self, name: str | None, keep: str | None) -> str:
        """The text of the op in a chain. `name` is its registry name, if the op's class has one."""
        params = [f"{key}={value!r}" for key, value in self.params.items()]
        if name is None or self.scaled:
            quoted = self.text.decode().replace("\\", "\\\\").replace('"', '\\"')
            name, params = "act", [f'"{quoted}"']
        if self.layout is not None:
            params.append(f'layout="{self.layout.decode()}"')
        if keep is not None:
            params.append(f"keep={keep}")
        return f"{name}({','.join(params)})" if params else name


class _KernelOperation(BasicOperation):
    """Common parts of activations that are Tenon kernels: parameters as attributes."""

    kernel: _Kernel

    def plan_text(self) -> str:
        kernel, keep = self.kernel, self.keep()
        text = kernel.chain_texts.get(keep)
        if text is None:
            text = kernel.chain_texts[keep] = kernel.chain_text(self.act, keep)
        return text

    def keep(self) -> str | None:
        """What a plan saves for the backward pass, if not the input."""
        return None

    def plan_cols(self, cols: int) -> int:
        return cols // 2 if self.kernel.gated else cols

    def kernel_of(self, ctx: OperationContext) -> _Kernel:
        """The kernel of the forward pass."""
        kernel: _Kernel = getattr(ctx, "kernel", self.kernel)
        return kernel

    def __getattr__(self, name: str) -> Any:
        kernel: _Kernel | None = self.__dict__.get("kernel")
        known = kernel and kernel.parameter(name)
        if kernel and known:
            return kernel.params[known]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        kernel: _Kernel | None = self.__dict__.get("kernel")
        known = kernel and kernel.parameter(name)
        if not kernel or not known:
            super().__setattr__(name, value)
            return
        self.__dict__["kernel"] = kernel.having(**{known: value})
        count_change()
        self.note_settings()

    def extra_repr(self) -> str:
        kernel = self.kernel
        shown = [f"{name}={value:g}" for name, value in kernel.params.items()]
        if self.act is None:
            shown.insert(0, repr(kernel.made.name))
        if kernel.layout is not None:
            shown.append(kernel.layout.decode())
        for option in ("cache_quantized_input", "activation_recompute_in_mlp"):
            if getattr(self, option, False):
                shown.append(f"{option}=True")
        return ", ".join(shown)

    # The registry name, in classes of one activation.
    act: str | None = None


class Activation(_KernelOperation, _ActivationOperation):
    """y = f(x) for any f: a registered name, a formula, or a Python function.

    A gated f(a, b) reads [.., 2H] and writes [.., H]. With `glu_interleave_size=k`, groups of k
    columns of a and of b alternate. Parameters are keywords: `Activation("elu", alpha=0.5)`.
    """

    _takes_encoded = True

    def __init__(
        self,
        act: str | Callable[..., Any] | Any,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
        **params: float,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.kernel = _Kernel(act, params, glu_interleave_size, type(self).__name__, False)

    def keep(self) -> str | None:
        return "fp8" if self.cache_quantized_input else None

    def _activation_forward_impl(
        self, input_: torch.Tensor, quantizer: Quantizer | None
    ) -> torch.Tensor:
        kernel = self.kernel
        y: torch.Tensor = _kernels.activation_forward(
            kernel.text,
            input_,
            input_.dtype,
            gated=kernel.gated,
            layout=kernel.layout,
            quantizer=quantizer,
        )
        return y

    def _activation_backward_impl(
        self, grad_output: torch.Tensor, input_: torch.Tensor, quantizer: Quantizer | None
    ) -> torch.Tensor:
        kernel = self.kernel
        dx: torch.Tensor = _kernels.activation_backward(
            kernel.text, grad_output, input_, layout=kernel.layout, quantizer=quantizer
        )[0]
        return dx

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        op, kernel = self, self.kernel_of(ctx)
        if kernel is not self.kernel:
            op = copy.copy(self)
            op.__dict__["kernel"] = kernel
        return _ActivationOperation.op_backward(op, ctx, grad_output)


class ScaledActivation(_KernelOperation):
    """y = f(x)*s for any f as in `Activation`. The extra input s has one value per row.

    dx = g*s*f'(x), ds = row sums of g*f(x). The scales keep their dtype. x and s are saved. With
    `activation_recompute_in_mlp`, y is not saved for a linear after it: the backward pass of the
    plan computes y again. A call of this op alone never saves y.
    """

    num_extra_inputs = 1
    channels_inside = False

    def __init__(
        self,
        act: str | Callable[..., Any] | Any,
        *,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
        **params: float,
    ) -> None:
        super().__init__()
        self.kernel = _Kernel(act, params, glu_interleave_size, type(self).__name__, True)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def keep(self) -> str | None:
        return "recompute" if self.activation_recompute_in_mlp else None

    def extra_fits(self, slot: int, shape: Sequence[int], lead: Sequence[int], cols: int) -> bool:
        return math.prod(shape) == math.prod(lead)

    def refuse_extra(self, slot: int, shape: Sequence[int], input_shape: Sequence[int]) -> None:
        raise ValueError(
            f"{type(self).__name__}: scales have shape {tuple(shape)}, but the input "
            f"{tuple(input_shape)} has {math.prod(input_shape[:-1])} rows; give one scale a row"
        )

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        name = type(self).__name__
        kernel = self.kernel
        (scales,) = basic_op_extra_inputs[0]
        dtype = _kernels.compute_dtype(name, input_)
        x = _kernels.foldable(input_)
        if x.dtype != dtype:
            x = _kernels.plain(x, dtype)
        scales = _kernels.row_scales(name, x, scales)
        y = _kernels.activation_forward(
            kernel.text,
            x,
            dtype,
            gated=kernel.gated,
            layout=kernel.layout,
            scales=scales,
            quantizer=next_op_input_quantizer,
        )
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.save_for_backward(x, scales)
            ctx.kernel, ctx.dtype = kernel, dtype
            ctx.extra_input_requires_grad = basic_op_extra_inputs[0][0].requires_grad
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return y, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        x, scales = ctx.saved_tensors
        kernel = self.kernel_of(ctx)
        dx, _, dscales = _kernels.activation_backward(
            kernel.text,
            grad_output,
            x,
            layout=kernel.layout,
            scales=scales,
            with_dscales=getattr(ctx, "extra_input_requires_grad", True),
            quantizer=ctx.prev_op_grad_output_quantizer,
        )
        return dx, [()], [(dscales,)]


class _Named(Activation):
    """An activation with its own class. `act` of the class is the registered name."""

    def __init__(
        self,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
        **params: float,
    ) -> None:
        super().__init__(
            self.act,
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
            **params,
        )


class _ScaledNamed(ScaledActivation):
    """A scaled activation with its own class."""

    def __init__(
        self,
        *,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
        **params: float,
    ) -> None:
        super().__init__(
            self.act,
            glu_interleave_size=glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            **params,
        )
