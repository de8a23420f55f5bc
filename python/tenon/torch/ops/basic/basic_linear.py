"""The op y = x·Wᵀ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...._lib import DTYPES
from ... import _call, _cuda
from ..._context import check_recipe, local, microbatch
from ..._quantized import initialise
from ...recipe import Float8CurrentScaling, QuantizerRole, Recipe
from .. import _kernels
from ..op import OperationContext, PartOperation, check_size, with_numbers

if TYPE_CHECKING:
    from ...quantizer import Quantizer

__all__ = ["BasicLinear"]

# A private function of torch. Without it every gradient overwrites.
_running_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# The backward pass that last overwrote the main_grad of a weight. Not an attribute of the weight,
# because other processes may load it, with passes of their own.
_overwritten: Any = WeakTensorKeyDictionary()


def _begins(weight: torch.Tensor) -> bool:
    """Whether dW overwrites main_grad. Other ops of this backward pass may share the weight."""
    if not getattr(weight, "overwrite_main_grad", False):
        return False
    now = _running_pass()
    if now >= 0 and _overwritten.get(weight) == now:
        return False
    _overwritten[weight] = now
    return True


class BasicLinear(PartOperation):
    """y = x·Wᵀ with W of shape [out_features, in_features]; dx = g·W, dW = gᵀ·x.

    It computes in the dtype of W, or of autocast. Forward quantizers 0 and 1 encode x and W,
    backward quantizer 0 encodes g: those that are set, else those of `recipe`, else those of the
    recipe of `autocast`. The products then use the encoded values. W is encoded in every forward
    pass, unless `weights_unchanged` or is_first_microbatch=False promises that it is the same. With
    `accumulate_into_main_grad`, dW is added to `weight.main_grad` and rounded only to its dtype.
    `weight.grad` is not changed. Every backward pass through the op adds dW, also that of
    `torch.autograd.grad` with other inputs. If `weight.overwrite_main_grad` is set, a backward pass
    first clears main_grad; ops that share the weight still add to each other. `accumulate="fast"`
    lets the tensor cores of Hopper sum products of FP8 operands, with about 14 bits.
    """

    op_name = "linear"
    parameter_names = ("weight",)
    _encodings = 0  # counts forward passes that encode the weight, while codes are kept

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        accumulate: str = "precise",
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if tensor_parallel_mode is not None or sequence_parallel or userbuffers_options:
            raise NotImplementedError(
                "BasicLinear: tensor and sequence parallelism are not offered yet; leave "
                "tensor_parallel_mode, sequence_parallel and userbuffers_options out"
            )
        check_size("BasicLinear", "in_features", in_features)
        check_size("BasicLinear", "out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        if accumulate not in ("precise", "fast"):
            raise ValueError(
                f"BasicLinear: accumulate={accumulate!r}; it must be 'precise' or 'fast'"
            )
        self.accumulate = accumulate
        if recipe is not None:
            check_recipe(recipe, "BasicLinear")
            self.recipe = recipe
        self._rng_state_tracker_function = rng_state_tracker_function
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"BasicLinear: dtype={weight.dtype}; it must be float32, float16 or bfloat16"
            )
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()
        if local.model_init is not None:
            self._quantise_weight(*local.model_init)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """x·Wᵀ. With is_first_microbatch=True codes of W are kept, with False they are used."""
        if is_first_microbatch is not None:
            with microbatch(is_first_microbatch):
                return super().forward(input, *extra_inputs, **kwargs)
        return super().forward(input, *extra_inputs, **kwargs)

    def reset_parameters(self) -> None:
        """Initialises W like nn.Linear: uniform in ±1/sqrt(in_features)."""
        uniform = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        if self._rng_state_tracker_function is None:
            initialise(self.weight, uniform)
        else:
            with self._rng_state_tracker_function().fork():
                initialise(self.weight, uniform)

    def _quantise_weight(self, recipe: Recipe, keep: bool) -> None:
        """Makes the weight a quantised tensor."""
        recipe, weight = self.own_recipe() or recipe, self.weight.detach()
        if weight.is_meta:
            raise NotImplementedError(
                "BasicLinear: quantized_model_init has no numbers to quantise on the meta device; "
                "make the module on a device, or load the weight as a QuantizedTensor"
            )
        if recipe.delayed():
            recipe = Float8CurrentScaling(fp8_format=recipe.fp8_format)
        quantizer = recipe.make_quantizer(QuantizerRole("linear", "weight"))
        if quantizer is None:
            return
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        self.weight = torch.nn.Parameter(quantizer(weight))
        if keep:
            self.weight.__dict__["_initial"] = weight.cpu().clone()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def plan_text(self) -> str:
        how = "" if self.accumulate == "precise" else f",accumulate={self.accumulate}"
        return f"linear({self.in_features},{self.out_features}{how})"

    def plan_cols(self, cols: int) -> int:
        return self.out_features

    def plan_width(self) -> int:
        return self.in_features

    def operands(
        self, ctx: OperationContext, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and W for the product, decoded if encoded. Saves the tensors for backward."""
        weight = with_numbers("BasicLinear", "weight", self.parameter(ctx, "weight"))
        if input_.shape[-1:] != (self.in_features,):
            columns = input_.shape[-1] if len(input_.shape) else "no"
            raise ValueError(
                f"BasicLinear: the input {tuple(input_.shape)} has {columns} columns, the weight "
                f"wants {self.in_features}"
            )
        dtype = _kernels.compute_dtype("BasicLinear", weight, input_)
        for i, t in enumerate((input_, weight)):
            self.calibrate("forward", i, t)
        # An encoded operand stays encoded and is decoded for each product.
        x = _kernels.encode(input_, self.quantizer_of("forward", 0))
        # W is encoded in every forward pass. Its address and version do not prove that it is
        # unchanged: fused optimisers, FSDP and writes to .data change neither.
        quantizer = self.quantizer_of("forward", 1)
        w: Any = weight.detach()
        if quantizer is not None and not _kernels.is_encoded(w):
            w = quantizer(w)
        x_plain, w_plain = _kernels.plain(x, dtype), _kernels.plain(w, dtype)
        _cuda.same("BasicLinear: the input", x_plain, "BasicLinear: weight", w_plain)
        if ctx.requires_grad:
            # If the weight is frozen, its gradient is not needed, so x is not saved.
            kept_x = None
            if self._high_precision():
                x_kept, w_kept = _kernels.plain(input_, dtype), _kernels.plain(weight, dtype)
            else:
                x_kept = x if _kernels.is_encoded(x) else x_plain
                w_kept = w if _kernels.is_encoded(w) else w_plain
            if weight.requires_grad:
                kept_x = x_kept
            ctx.save_for_backward(kept_x, w_kept)
            # Read by fusions of users, under the names of Transformer Engine.
            ctx.dtype, ctx.weight_requires_grad = dtype, weight.requires_grad
            ctx.input_quantizer = self.quantizer_of("forward", 0)
            ctx.weight_quantizer = quantizer
            ctx.grad_output_quantizer = self.quantizer_of("backward", 0)
            ctx.grad_input_quantizer = ctx.prev_op_grad_output_quantizer
            ctx.with_quantized_compute = _kernels.is_encoded(x) or _kernels.is_encoded(w)
        return x_plain, w_plain

    def _high_precision(self) -> bool:
        """Whether the backward pass multiplies the operands as they were before quantisation."""
        applied, _ = self.applied_now()
        return applied is not None and applied.recipe.backward_override == "high_precision"

    def get_input_quantizer(self) -> Quantizer | None:
        # Only this op has the input before and after quantisation.
        return None if self._high_precision() else super().get_input_quantizer()

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        x, w = self.operands(ctx, input_)
        if ctx.requires_grad:
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return _kernels.encode(_kernels.product(x, w), next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        return self.differentiate(ctx, grad_output)

    def differentiate(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
        scale: str | None = None,
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """The gradients of the op. `added` is added to that of the input.

        `scale` is the multiplication after the product as in a chain.
        """
        x, w = ctx.saved_tensors
        dtype: torch.dtype = w.dtype
        self.calibrate("backward", 0, grad_output)
        dy = _kernels.plain(_kernels.encode(grad_output, self.quantizer_of("backward", 0)), dtype)
        weight = self.parameter(ctx, "weight")
        target = None
        if x is not None and weight.requires_grad and self.accumulate_into_main_grad:
            dtype_of_sum = self.main_grad(weight).dtype
            target = self.target_of_grad(
                weight, dtype_of_sum if dtype_of_sum in _call.PLAIN else torch.float32
            )
        dx, dw = _kernels.product_backward(
            dy,
            None if x is None or not weight.requires_grad else _kernels.plain(x, dtype),
            _kernels.plain(w, dtype),
            ctx.input_requires_grad,
            target,
            weight.dtype,
            added=None if added is None else _kernels.plain(added, dtype),
            scale=scale,
        )
        if target is not None:
            self.delivered(weight, target)
            dw = None
        if dx is not None:
            dx = _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
        return dx, (dw,)

    def main_grad(self, weight: torch.Tensor) -> torch.Tensor:
        """The tensor that dW is added to."""
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise RuntimeError(
                "BasicLinear: accumulate_into_main_grad is set, but the weight has no main_grad; "
                "give it a tensor of the weight's shape"
            )
        if not isinstance(main_grad, torch.Tensor) or not main_grad.is_floating_point():
            kind = getattr(main_grad, "dtype", type(main_grad).__name__)
            raise TypeError(
                f"BasicLinear: weight.main_grad is {kind}; it must be a floating-point tensor"
            )
        if main_grad.shape != weight.shape:
            raise ValueError(
                f"BasicLinear: weight.main_grad has the shape {tuple(main_grad.shape)}; it must be "
                f"the weight's, {tuple(weight.shape)}"
            )
        _cuda.same("BasicLinear: weight", weight, "BasicLinear: weight.main_grad", main_grad)
        return main_grad

    def grad_request(self, weight: torch.Tensor) -> str:
        """The gradient of W that a plan writes: added to memory of the dtype of main_grad."""
        if getattr(weight, "main_grad", None) is None:  # it may be set before the backward pass
            return "+f32"
        dtype = self.main_grad(weight).dtype
        return "+" + DTYPES[_call.DTYPES[dtype]] if dtype in _call.PLAIN else "+f32"

    def target_of_grad(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The memory that a plan adds dW of `dtype` to."""
        main_grad = self.main_grad(weight)
        if main_grad.dtype != dtype or not main_grad.is_contiguous() or main_grad.is_neg():
            return torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        if _begins(weight):
            main_grad.zero_()
        return main_grad

    def delivered(self, weight: torch.Tensor, target: torch.Tensor) -> None:
        """Called after dW was added to `target`."""
        main_grad = self.main_grad(weight)
        if target is main_grad:
            torch.autograd.graph.increment_version(main_grad)
        elif _begins(weight):
            main_grad.copy_(target)
        else:
            main_grad.add_(target)
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
