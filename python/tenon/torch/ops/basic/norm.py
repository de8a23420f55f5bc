"""Layer norm and RMS norm of rows with a trainable gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import _call, _cuda, _saved
from .. import _kernels
from ..op import OperationContext, PartOperation, check_number, with_numbers

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(PartOperation):
    """Base class of LayerNorm and RMSNorm. Outside of a Sequential, each is a plan of one op.

    The weight is not saved. The backward pass reads the same tensor as the forward pass. It raises
    an error if the tensor was modified in place since. `sm_margin` is ignored. It exists for
    compatibility with Transformer Engine.
    """

    op_name: str
    statistics: tuple[str, ...]  # one value per row each; saved after the input
    weights: dict[str, tuple[str, float]]  # name in a plan -> parameter, initial value

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        shape: Any = normalized_shape
        shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not shape or not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(
                f"{name}: normalized_shape={normalized_shape!r}; it must be a whole number, at "
                "least 1, or a list of such"
            )
        check_number(name, "eps", eps)
        if not eps >= 0:
            raise ValueError(f"{name}: eps={eps}; it must be at least 0")
        self.normalized_shape: tuple[int, ...] = shape
        self.parameter_names = tuple(parameter for parameter, _ in self.weights.values())
        self.eps = float(eps)
        self.zero_centered_gamma = bool(zero_centered_gamma)
        for parameter, _ in self.weights.values():
            made = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            if made.dtype not in _call.PLAIN:
                raise TypeError(
                    f"{name}: dtype={made.dtype}; it must be float32, float16 or bfloat16"
                )
            self.register_parameter(parameter, torch.nn.Parameter(made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weight = 1, or 0 if zero-centred, and bias = 0."""
        for name, value in self.weights.values():
            centered = name == "weight" and self.zero_centered_gamma
            torch.nn.init.constant_(getattr(self, name), value - centered)

    def extra_repr(self) -> str:
        shape = ", ".join(map(str, self.normalized_shape))
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{shape}, eps={self.eps:g}{centered}"

    def width(self) -> int:
        """The number of elements that are normalised together."""
        return math.prod(self.normalized_shape)

    plan_width = width

    def _text(self) -> str:
        centered = ",zero_centered_gamma=true" if self.zero_centered_gamma else ""
        return f"{self.op_name}({self.width()},eps={self.eps!r}{centered})"

    def plan_text(self) -> str | None:
        return self._text() if len(self.normalized_shape) == 1 else None

    def _weights(self, ctx: OperationContext, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for key, (name, _) in self.weights.items():
            p = with_numbers(type(self).__name__, name, self.parameter(ctx, name)).detach()
            told = f"{type(self).__name__}: {name}"
            if p.dtype not in _call.PLAIN:
                raise _call.refusal(p, told)
            _cuda.same(f"{type(self).__name__}: the input", x, told, p)
            if p.shape != self.normalized_shape:
                raise ValueError(f"{told} is {tuple(p.shape)}; it must be {self.normalized_shape}")
            # All parameters of a plan have the same dtype.
            found[key] = _call.contiguous(p.to(found["gamma"].dtype) if found else p)
        return found

    def _versions(self, ctx: OperationContext) -> list[int]:
        """The in-place version of each parameter. Backward reads parameters again."""
        found = [self.parameter(ctx, name) for name, _ in self.weights.values()]
        return [0 if p.is_inference() else p._version for p in found]

    def _check(self, x: Any) -> torch.dtype:
        """The compute dtype. Raises an error if `x` does not end in normalized_shape."""
        name, shape = type(self).__name__, self.normalized_shape
        dtype = _kernels.compute_dtype(name, x)
        if tuple(x.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"{name}: the input {tuple(x.shape)} does not end in {shape}, which is "
                "normalized_shape"
            )
        return dtype

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        name, dtype = type(self).__name__, self._check(input_)
        x = _kernels.plain(input_, dtype)
        if not _call.dense(x):
            raise _call.refusal(x, f"{name}: the input")
        x = _call.contiguous(x)
        statistics = self.statistics if ctx.requires_grad else ()
        weights = self._weights(ctx, x)
        y, *made = _kernels.norm(self._text(), x, weights, statistics)
        if ctx.requires_grad:
            ctx.save_for_backward(x, *made)
            ctx.weights = _saved.kinds(list(weights.values()))
            ctx.versions = self._versions(ctx)
            ctx.dtype = dtype
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        return self.differentiate(ctx, grad_output)

    def differentiate(
        self, ctx: OperationContext, grad_output: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """The gradients of the op. `added` is added to that of the input."""
        x, *made = ctx.saved_tensors
        name, weights = type(self).__name__, self._weights(ctx, x)
        self._check(x)
        _saved.check_gradient(name, "its output", grad_output, x.shape, x.device)
        made = [t if t.dim() == 1 else t.reshape(-1) for t in made]
        rows = torch.Size((x.numel() // self.width(),)), torch.float32, x.device
        _saved.check(name, [rows] * len(self.statistics), made, "statistic")
        if hasattr(ctx, "weights"):  # not set after a user's forward fusion
            _saved.check(name, ctx.weights, list(weights.values()), "parameter")
            if ctx.versions != self._versions(ctx):
                raise RuntimeError(
                    f"{name}: a parameter was modified by an in-place operation between the "
                    "forward and the backward pass, which reads it; call backward first"
                )
        parameters = [self.parameter(ctx, name) for name, _ in self.weights.values()]
        dx, grads = _kernels.norm_backward(
            self._text(),
            _call.contiguous(_kernels.plain(grad_output, x.dtype)),
            _call.contiguous(x),
            {n: _call.contiguous(t) for n, t in zip(self.statistics, made, strict=True)},
            weights,
            ctx.input_requires_grad,
            [p.requires_grad for p in parameters],
            None if added is None else _call.contiguous(_kernels.plain(added, x.dtype)),
        )
        if dx is not None:
            dx = _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
        of_params = [
            None if g is None else g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)
        ]
        return dx, of_params


class LayerNorm(Norm):
    """y = (x − mean)·r·weight + bias with r = 1/sqrt(variance + eps), over `normalized_shape`.

    With `zero_centered_gamma` the factor is 1 + weight.
    """

    op_name = "layernorm"
    statistics = ("mean", "rstdev")
    weights = {"gamma": ("weight", 1.0), "beta": ("bias", 0.0)}


class RMSNorm(Norm):
    """y = x·r·weight with r = 1/sqrt(mean of x² + eps), over `normalized_shape`.

    With `zero_centered_gamma` the factor is 1 + weight.
    """

    op_name = "rmsnorm"
    statistics = ("rstdev",)
    weights = {"gamma": ("weight", 1.0)}
