"""The modules of Transformer Engine: each is one `ops.Sequential`, and so one plan.

>>> import tenon.torch as tt
>>> mlp = tt.LayerNormMLP(64, 256, activation="swiglu", normalization="RMSNorm")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from . import ops
from ._delayed import check_state
from ._quantized import QuantizedTensor, initialise
from .ops.basic.norm import Norm
from .ops.op import PartOperation, check_size

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]

Initialise = Callable[[torch.Tensor], Any]
_NORMS: dict[str, type[Norm]] = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}
_normal = partial(torch.nn.init.normal_, mean=0.0, std=0.023)

# Arguments for parallelism and Userbuffers, with the values that ask for nothing.
_NOTHING: dict[str, Any] = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "parallel_mode": None,
    "set_parallel_mode": False,
    "return_layernorm_output_gathered": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
}


def _refuse(module: str, given: Mapping[str, Any]) -> None:
    for name, nothing in _NOTHING.items():
        if name in given and given[name] is not nothing and given[name] != nothing:
            raise NotImplementedError(
                f"{module}: {name}={given[name]!r} is not available: tensor and sequence "
                "parallelism come with distribution, Userbuffers are out of scope; leave "
                f"{name}={nothing!r}"
            )


class _NormModule:
    """The arguments of the norms of Transformer Engine, with those of older versions."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        name = type(self).__name__
        _refuse(name, {"sequence_parallel": sequence_parallel or False})
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None or (normalized_shape is not None and hidden_size is not None):
            raise TypeError(f"{name}: give either normalized_shape or hidden_size")
        if dtype is not None and params_dtype is not None and dtype != params_dtype:
            raise ValueError(f"{name}: dtype={dtype} and params_dtype={params_dtype}; give one")
        super().__init__(
            shape,  # type: ignore[call-arg]
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
            dtype=dtype or params_dtype,
            sm_margin=sm_margin,
        )


class LayerNorm(_NormModule, ops.LayerNorm):
    """`ops.LayerNorm` with the arguments of Transformer Engine's module.

    `hidden_size` and `params_dtype` are older names of `normalized_shape` and `dtype`.
    """


class RMSNorm(_NormModule, ops.RMSNorm):
    """`ops.RMSNorm` with the arguments of Transformer Engine's module, as in `LayerNorm`."""


class _Module(torch.nn.Module):
    """A module that is one chain. The parameters are its own, under Transformer Engine's names."""

    chain: ops.Sequential
    # State-dict keys of other modules with the same meaning.
    _other_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        _refuse(type(self).__name__, arguments)
        # Parameters that are made of others: see `_split`.
        self._parts: dict[str, list[str]] = {}
        # Parameters and their initial values.
        self._initial: list[tuple[str, Initialise]] = []
        self._tracker = arguments.get("get_rng_state_tracker")
        tracker_name = arguments.get("rng_tracker_name")
        self._tracker_name = [] if tracker_name is None else [tracker_name]
        if arguments.get("name") is not None:
            self.name = arguments["name"]

    def _adopt(self, op: PartOperation, names: dict[str, str], *initial: Initialise | None) -> None:
        """Moves the parameters of `op` here. `initial`: their initial values, default: the op's."""
        op.move_parameters(self, names)
        for name, value in zip(op.parameter_names or (), initial, strict=False):
            if value is not None:
                self._initial.append((names[name], value))

    def _split(self, name: str, parts: Mapping[str, int]) -> None:
        """Replaces a parameter by parameters with its rows. It is put together in every call."""
        whole = self._parameters.pop(name)
        if isinstance(whole, QuantizedTensor):
            raise NotImplementedError(
                f"{type(self).__name__}: parameters_split under quantized_model_init is not "
                "offered, since a call puts the parts together; leave one of them out"
            )
        names = [f"{part}_{name}" for part in parts]
        if whole is None:
            for part in names:
                self.register_parameter(part, None)
            return
        for part, rows in zip(names, whole.detach().split(list(parts.values())), strict=True):
            self.register_parameter(part, torch.nn.Parameter(rows.clone()))
        self._parts[name] = names
        self._initial = [
            entry
            for key, value in self._initial
            for entry in ([(part, value) for part in names] if key == name else [(key, value)])
        ]

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {}).get(name)
        if parts is not None:
            return torch.cat([getattr(self, part) for part in parts])
        return super().__getattr__(name)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Sets the initial values again. With `defer_init` it does nothing."""
        if defer_init:
            return
        for op in self.chain.modules():
            if isinstance(op, Norm):
                op.reset_parameters()
        for name, value in self._initial:
            parameter = getattr(self, name)
            if parameter.is_meta:
                continue
            if self._tracker is None:
                initialise(parameter, value)
            else:
                with self._tracker().fork(*self._tracker_name):
                    initialise(parameter, value)

    def _explained_as(self) -> ops.Sequential:
        return self.chain

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Refuses every group but None: tensor parallelism comes with distribution."""
        _refuse(type(self).__name__, {"tp_group": tp_group})

    def _run(self, inp: torch.Tensor, is_first_microbatch: bool | None) -> Any:
        if is_first_microbatch is None:
            return self.chain(inp)
        return self.chain(inp, is_first_microbatch=is_first_microbatch)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for theirs, ours in self._other_keys.items():
            if prefix + theirs in state_dict and prefix + ours not in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        check_state(self, state_dict, prefix)  # of all parts, before anything is copied
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _plain_output(module: str, fp8_output: bool, fp8_grad: bool) -> None:
    if fp8_output or fp8_grad:
        raise NotImplementedError(
            f"{module}: fp8_output and fp8_grad are not available; end an ops.Sequential with "
            "ops.Quantize for an encoded output"
        )


def _norm(name: str, normalization: str, *args: Any, **kwargs: Any) -> Norm:
    if normalization not in _NORMS:
        raise ValueError(
            f"{name}: normalization={normalization!r}; it must be 'LayerNorm' or 'RMSNorm'"
        )
    return _NORMS[normalization](*args, **kwargs)


def _rows(module: str, given: Any, rows: int) -> dict[str, int]:
    """The names and rows of the parts of a weight."""
    if isinstance(given, str) or not isinstance(given, (Mapping, Sequence)):
        raise TypeError(
            f"{module}: parameters_split={given!r}; it must be a list of names, or a dict of names "
            "and rows"
        )
    equal = rows // max(len(given), 1)
    counts = given if isinstance(given, Mapping) else dict.fromkeys(given, equal)
    parts = {str(name).rstrip("_"): int(count) for name, count in counts.items()}
    wrong = len(parts) != len(given) or any(count < 1 for count in parts.values())
    if not parts or wrong or sum(parts.values()) != rows:
        raise ValueError(
            f"{module}: parameters_split={given!r} does not divide {rows} rows; give names for "
            "equal parts, or a dict of names and rows"
        )
    return parts


class Linear(_Module):
    """y = x·Wᵀ + b with Transformer Engine's arguments. For chains that fuse, use `ops.Linear`.

    W is normal with deviation 0.023 unless `init_method(weight)` sets it, b is 0. With
    `return_bias`, b is not added: the result is (x·Wᵀ, b). `parameters_split` makes several
    parameters of the rows of W and b, e.g. ("query", "key", "value"); a call copies them together.
    `fuse_wgrad_accumulation`: dW is added to `weight.main_grad`. Arguments for parallelism and
    Userbuffers must have their defaults. `device=None` is the default device.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    _other_keys = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initialise | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(locals())
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.chain = ops.Sequential.of_parts(
            _linear(
                self, "", in_features, out_features, fuse_wgrad_accumulation, init_method,
                bias, bias and not return_bias, params_dtype, device,
            )
        )  # fmt: skip
        if parameters_split is not None:
            _divide(self, parameters_split, out_features, fuse_wgrad_accumulation)
        self.reset_parameters(defer_init=False)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """y, or (y, bias)."""
        _plain_output("Linear", fp8_output, fp8_grad)
        y = self._run(inp, is_first_microbatch)
        return (y, _bias(self, "bias", y)) if self.return_bias else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, " + (
            f"bias={self.use_bias}"
        )


def _linear(
    whole: _Module,
    prefix: str,
    in_features: int,
    out_features: int,
    main_grad: bool,
    init_method: Initialise | None,
    has_bias: bool,
    adds_bias: bool,
    dtype: torch.dtype | None,
    device: Any,
) -> list[PartOperation]:
    """The ops of a linear, with parameters of `whole`. A bias may be a parameter only."""
    name = type(whole).__name__
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: params_dtype={dtype!r}; it must be a torch.dtype or None")
    if init_method is not None and not callable(init_method):
        raise TypeError(
            f"{name}: init_method={init_method!r}; it must be a function of the weight, or None"
        )
    linear = ops.BasicLinear(
        in_features, out_features, device=device, dtype=dtype, accumulate_into_main_grad=main_grad
    )
    whole._adopt(linear, {"weight": prefix + "weight"}, init_method or _normal)
    if not has_bias:
        whole.register_parameter(prefix + "bias", None)
        return [linear]
    bias = ops.Bias(out_features, device=device, dtype=dtype)
    whole._adopt(bias, {"bias": prefix + "bias"}, torch.nn.init.zeros_)
    return [linear, bias] if adds_bias else [linear]


def _divide(module: _Module, given: Any, rows: int, main_grad: bool) -> None:
    name = type(module).__name__
    if main_grad:
        raise NotImplementedError(
            f"{name}: parameters_split and fuse_wgrad_accumulation exclude each other; a part of a "
            "weight has no main_grad"
        )
    parts = _rows(name, given, rows)
    for parameter in ("weight", "bias"):
        module._split(parameter, parts)


def _bias(module: torch.nn.Module, name: str, like: torch.Tensor) -> torch.Tensor:
    """The bias that the caller adds: empty if there is none, as in Transformer Engine."""
    found: torch.Tensor | None = getattr(module, name, None)
    return like.new_empty(0) if found is None else found.to(like.dtype)


class LayerNormLinear(_Module):
    """y = norm(x)·Wᵀ + b with Transformer Engine's arguments: one plan.

    The parameters are `layer_norm_weight`, `layer_norm_bias` (LayerNorm only), `weight`, `bias`. A
    state dict of nn.Sequential(norm, nn.Linear) is also accepted. `return_layernorm_output` adds
    the output of the norm to the result. Other arguments are those of `Linear`.
    """

    _other_keys = {
        "0.weight": "layer_norm_weight",
        "0.bias": "layer_norm_bias",
        "1.weight": "weight",
        "1.bias": "bias",
    }

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Initialise | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(locals())
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        norm = _norm(
            "LayerNormLinear", normalization, in_features,
            eps=eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=params_dtype,
        )  # fmt: skip
        self._adopt(norm, {name: f"layer_norm_{name}" for name in norm.parameter_names or ()})
        linear = _linear(
            self, "", in_features, out_features, fuse_wgrad_accumulation, init_method,
            bias, bias and not return_bias, params_dtype, device,
        )  # fmt: skip
        fork = [ops.MakeExtraOutput()] if return_layernorm_output else []
        self.chain = ops.Sequential.of_parts([norm, *fork, *linear])
        if parameters_split is not None:
            _divide(self, parameters_split, out_features, fuse_wgrad_accumulation)
        self.reset_parameters(defer_init=False)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """y, then the bias with `return_bias`, then norm(x) with `return_layernorm_output`."""
        _plain_output("LayerNormLinear", fp8_output, fp8_grad)
        y = self._run(inp, is_first_microbatch)
        y, *normed = y if isinstance(y, tuple) else (y,)
        biases = [_bias(self, "bias", y)] if self.return_bias else []
        return (y, *biases, *normed) if biases or normed else y


class LayerNormMLP(_Module):
    """y = f(norm(x)·W₁ᵀ + b₁)·W₂ᵀ + b₂ with Transformer Engine's arguments: one plan.

    `activation` is a name of Transformer Engine or of the registry, a formula or an activation of
    Tenon, with parameters `activation_params`. If it is gated, fc1 has 2·ffn_hidden_size rows: the
    first half is activated. The parameters are `layer_norm_weight`, `layer_norm_bias`,
    `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`. A state dict of nn.Sequential(norm,
    nn.Linear, activation, nn.Linear) is also accepted. With `checkpoint` only x is saved, and the
    backward pass computes the rest again. `seq_length` and `micro_batch_size` are ignored. Other
    arguments are those of `Linear` and `LayerNormLinear`.
    """

    _other_keys = {
        "0.weight": "layer_norm_weight",
        "0.bias": "layer_norm_bias",
        "1.weight": "fc1_weight",
        "1.bias": "fc1_bias",
        "3.weight": "fc2_weight",
        "3.bias": "fc2_bias",
    }

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Initialise | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: Any = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        output_layer_init_method: Initialise | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(locals())
        check_size("LayerNormMLP", "hidden_size", hidden_size)
        check_size("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output, self.checkpoint = return_layernorm_output, checkpoint
        act = _activation(activation, activation_params or {})
        norm = _norm(
            "LayerNormMLP", normalization, hidden_size,
            eps=eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=params_dtype,
        )  # fmt: skip
        self._adopt(norm, {name: f"layer_norm_{name}" for name in norm.parameter_names or ()})
        wide = ffn_hidden_size * (2 if act.kernel.gated else 1)
        fc1 = _linear(
            self, "fc1_", hidden_size, wide, fuse_wgrad_accumulation, init_method,
            bias, bias, params_dtype, device,
        )  # fmt: skip
        fc2 = _linear(
            self, "fc2_", ffn_hidden_size, hidden_size, fuse_wgrad_accumulation,
            output_layer_init_method, bias, bias and not return_bias, params_dtype, device,
        )  # fmt: skip
        fork = [ops.MakeExtraOutput()] if return_layernorm_output else []
        self.chain = ops.Sequential.of_parts([norm, *fork, *fc1, act, *fc2])
        self.reset_parameters(defer_init=False)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y, then the bias with `return_bias`, then norm(x) with `return_layernorm_output`."""
        if self.checkpoint and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            y = checkpoint(self._run, inp, is_first_microbatch, use_reentrant=False)
        else:
            y = self._run(inp, is_first_microbatch)
        y, *normed = y if isinstance(y, tuple) else (y,)
        biases = [_bias(self, "fc2_bias", y)] if self.return_bias else []
        return (y, *biases, *normed) if biases or normed else y


def _activation(given: Any, params: Mapping[str, Any]) -> ops.Activation:
    if isinstance(given, ops.Activation):
        if params:
            raise ValueError("LayerNormMLP: activation_params belong to a name or a formula")
        return given
    if isinstance(given, torch.nn.Module):
        raise TypeError(
            f"LayerNormMLP: activation is a {type(given).__name__}; it must be a name, a formula "
            "or an ops.Activation"
        )
    return ops.Activation(given, **params)
