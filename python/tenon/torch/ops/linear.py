"""A drop-in replacement for torch.nn.Linear."""

from __future__ import annotations

from typing import Any

import torch

from ..recipe import Recipe
from .basic import BasicLinear, Bias
from .op import FusedOperation, PartOperation

__all__ = ["Linear"]


class Linear(FusedOperation):
    """y = x·Wᵀ + b: a `BasicLinear` and, if `bias`, a `Bias`. Both fuse with their neighbours.

    `weight` and `bias` are parameters of this module, with the state-dict keys of torch.nn.Linear.
    The basic ops read them from here. W is initialised as in torch.nn.Linear, b is 0. A state dict
    with the keys `basic_ops.0.weight` and `basic_ops.1.bias` is also accepted. `recipe` wins over
    that of `autocast`.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
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
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            userbuffers_options=userbuffers_options,
            accumulate=accumulate,
            recipe=recipe,
        )
        ops: list[PartOperation] = [linear]
        if bias:
            ops.append(Bias(out_features, device=device, dtype=dtype))
        super().__init__(ops)
        self.in_features = in_features
        self.out_features = out_features
        for op in ops:
            op.move_parameters(self)
        if not bias:
            self.register_parameter("bias", None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and (value is None or len(self.basic_ops) < 2):
            raise ValueError(
                "Linear: whether it has a bias is fixed; make a Linear with bias=True or False"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Initialises W again and sets b to 0."""
        for op in self.basic_ops:
            op.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        bias = len(self.basic_ops) > 1
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # State-dict keys of the basic ops, as saved by Transformer Engine.
        for i, name in enumerate(("weight", "bias")):
            theirs = f"{prefix}basic_ops.{i}.{name}"
            if theirs in state_dict and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(theirs)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
