"""Recipes: how the input, the weight and the output gradient of a linear are quantised.

Names, arguments and their order are those of Transformer Engine. A recipe does not change after it
was made, and equal recipes count as the same one.

>>> import tenon.torch as tt
>>> with tt.autocast(recipe=tt.recipe.Float8CurrentScaling()):
...     pass
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable
from typing import Any

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "QuantizerRole",
    "Recipe",
]

_OVERRIDES = (None, "high_precision", "dequantized")
_MOST_HISTORY = 1 << 20


class Format(enum.Enum):
    """The 8-bit formats of a recipe: of forward tensors and of gradients."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")

    @property
    def forward(self) -> str:
        return self.value[0]

    @property
    def backward(self) -> str:
        return self.value[1]


@dataclasses.dataclass(frozen=True)
class MMParams:
    """Settings of a product in Transformer Engine.

    Products here are precise unless an op has accumulate="fast", so both values give the same sums.
    """

    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer of a `CustomRecipe` is for.

    `module_type` is "linear" or "quantize", or the class of a user's op. `tensor_type` is "input",
    "weight" or "grad_output". `name` is the attribute `name` of the module, if it has one.
    """

    module_type: str
    tensor_type: str
    name: str = ""


class Recipe:
    """Base class of recipes."""

    fp8_format: Format
    backward_override: str | None

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return self.delayed() or self.float8_current_scaling()

    def nvfp4(self) -> bool:
        return False

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)

    def fp8_dtype(self, tensor_type: str) -> str:
        """The 8-bit format of a tensor: "e4m3" or "e5m2"."""
        gradient = tensor_type.startswith("grad")
        return self.fp8_format.backward if gradient else self.fp8_format.forward

    def __getstate__(self) -> dict[str, Any]:
        # Without what a context has noted here.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def text(self) -> str:
        """The recipe as a text. Equal recipes have equal texts, and others have others."""
        return repr(self)

    def make_quantizer(self, role: QuantizerRole) -> Any:
        """A quantizer for a tensor, or None. That of a delayed recipe needs the state of an op."""
        raise NotImplementedError(f"{type(self).__name__}: it makes no quantizers")

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"{name}: fp8_format={self.fp8_format!r}; it must be Format.HYBRID or Format.E4M3"
            )
        if self.fp8_format is Format.E5M2:
            raise ValueError(
                f"{name}: fp8_format=Format.E5M2; forward tensors need the mantissa of e4m3, use "
                "Format.HYBRID for e5m2 gradients or Format.E4M3"
            )
        for option in ("fp8_dpa", "fp8_mha"):
            if getattr(self, option, False):
                raise NotImplementedError(
                    f"{name}: {option}=True; Tenon has no attention, leave {option} out"
                )
        if self.backward_override not in _OVERRIDES:
            raise ValueError(
                f"{name}: backward_override={self.backward_override!r}; it must be None, "
                "'high_precision' or 'dequantized'"
            )


def _whole(recipe: Recipe, name: str, least: int, most: int) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(recipe).__name__}: {name}={value!r}; it must be a whole number")
    if not least <= value <= most:
        raise ValueError(
            f"{type(recipe).__name__}: {name}={value}; it must lie in [{least}, {most}]"
        )


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale per tensor, computed from the largest values of earlier steps.

    The state of a module is in its buffers: a history of amax [amax_history_len, n] and scales [n].
    `autocast` updates all scales of the last step. `amax_compute_algo` is "max" (of the history) or
    "most_recent". `reduce_amax`: the maximum over `amax_reduction_group` of `autocast`.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, "margin", -64, 64)
        _whole(self, "amax_history_len", 1, _MOST_HISTORY)
        if callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None:
            option = "amax_compute_algo"
            if self.scaling_factor_compute_algo is not None:
                option = "scaling_factor_compute_algo"
            raise NotImplementedError(
                f"DelayedScaling: {option} is a function; scales are updated by one kernel for all "
                "layers: use amax_compute_algo='max' or 'most_recent', and margin"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling: amax_compute_algo={self.amax_compute_algo!r}; it must be "
                "'max' or 'most_recent'"
            )
        if self.backward_override is not None:
            raise ValueError(
                f"DelayedScaling: backward_override={self.backward_override!r}; the scales of "
                "gradients would have no history, use Float8CurrentScaling"
            )


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, computed from the tensor itself."""

    use_power_2_scales: bool = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def make_quantizer(self, role: QuantizerRole) -> Any:
        from .quantizer import Float8CurrentScalingQuantizer

        return Float8CurrentScalingQuantizer(
            self.fp8_dtype(role.tensor_type), force_pow_2_scales=self.use_power_2_scales
        )


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale per 32 elements."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin != 0:
            raise ValueError(
                f"MXFP8BlockScaling: margin={self.margin!r}; scales come from each block, which "
                "leaves no margin: leave it out"
            )
        if self.enable_2d_quantization:
            raise NotImplementedError(
                "MXFP8BlockScaling: enable_2d_quantization=True; scales of squares are offered by "
                "Float8BlockScaling, for weights"
            )

    def make_quantizer(self, role: QuantizerRole) -> Any:
        from .quantizer import MXFP8Quantizer

        return MXFP8Quantizer(self.fp8_dtype(role.tensor_type))


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """One float32 scale per 1x128 (dim 1) or 128x128 (dim 2) elements, by default powers of two."""

    use_f32_scales: bool = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(True)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            _whole(self, name, 1, 2)

    def block_scaling_dim(self, tensor_type: str) -> int:
        if tensor_type == "weight":
            return self.w_block_scaling_dim
        gradient = tensor_type.startswith("grad")
        return self.grad_block_scaling_dim if gradient else self.x_block_scaling_dim

    def make_quantizer(self, role: QuantizerRole) -> Any:
        from .quantizer import Float8BlockQuantizer

        return Float8BlockQuantizer(
            self.fp8_dtype(role.tensor_type),
            force_pow_2_scales=not self.use_f32_scales,
            block_scaling_dim=self.block_scaling_dim(role.tensor_type),
        )


_factories: dict[Any, int] = {}


@dataclasses.dataclass(frozen=True)
class CustomRecipe(Recipe):
    """The quantizers that a function makes.

    qfactory(QuantizerRole(module_type, tensor_type, name)) is called once for each tensor of each
    op. It returns a quantizer of tenon.torch.quantizer, or None: this tensor is not quantised.
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(
                f"CustomRecipe: qfactory is a {type(self.qfactory).__name__}; it must be a "
                "function of a QuantizerRole that returns a quantizer"
            )

    def text(self) -> str:
        # A number for each function that was ever used: an address may be used again.
        return f"{self!r} {_factories.setdefault(self.qfactory, len(_factories))}"

    def make_quantizer(self, role: QuantizerRole) -> Any:
        made = self.qfactory(role)
        if made is not None and not callable(getattr(made, "quantize", None)):
            raise TypeError(
                f"CustomRecipe: qfactory gave a {type(made).__name__} for {role}; it must return "
                "a quantizer of tenon.torch.quantizer, or None"
            )
        return made


def __getattr__(name: str) -> Any:
    if name in ("NVFP4BlockScaling", "NVFP4"):
        raise AttributeError(
            f"tenon.torch.recipe has no {name}: FP4 is not offered; use MXFP8BlockScaling"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
