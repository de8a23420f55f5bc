"""Which recipes the library runs on a device, and how. The answers are read from plans."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch

from .._plan import Plan
from . import _cuda
from .recipe import DelayedScaling, MXFP8BlockScaling, Recipe

__all__ = [
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
]


@functools.cache
def _how(recipe: str, kind: str, index: int | None, target: str | None = None) -> tuple[bool, str]:
    """Whether the products of a recipe read codes themselves, and how they are computed."""
    if kind == "cpu":
        return False, "on the CPU, products decode 8-bit operands while they read them"
    # A plan is for the GPU that is current while it is made.
    with nullcontext() if target else _cuda.on(torch.device(f"{kind}:{index}")):
        plan = Plan(
            "linear(512,512)", dtype="bf16", recipe=recipe, device=kind, target=target
        ).json(512)
    split = [s for s in plan["forward"] if s["name"].endswith(".a")]
    if not split:
        return True, "products read the codes"
    why = "; ".join(r["why"] for r in split[0]["refused"])
    return False, f"a pass decodes the operands of each product, because {why}"


def _answer(told: bool, what: str, recipe: str, device: Any) -> Any:
    if not told:
        return True
    found = _device(device)
    return True, f"{what} on {found}: {_how(recipe, found.type, found.index)[1]}"


def _device(device: Any) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def is_fp8_available(return_reason: bool = False, *, device: Any = None) -> Any:
    """True: delayed and current scaling run on every device. With `return_reason`: (True, how)."""
    return _answer(return_reason, "FP8", "delayed", device)


def is_mxfp8_available(return_reason: bool = False, *, device: Any = None) -> Any:
    """True: MXFP8 runs on every device. With `return_reason`: (True, how)."""
    return _answer(return_reason, "MXFP8", "mxfp8", device)


def is_fp8_block_scaling_available(return_reason: bool = False, *, device: Any = None) -> Any:
    """True: block scaling runs on every device. With `return_reason`: (True, how)."""
    return _answer(return_reason, "block scaling", "block", device)


def is_bf16_available(return_reason: bool = False, *, device: Any = None) -> Any:
    """True: bfloat16 runs on every device. With `return_reason`: (True, how)."""
    return (True, f"bfloat16 on {_device(device)}") if return_reason else True


def get_default_fp8_recipe(device: Any = None) -> Recipe:
    """MXFP8 where products read its codes (Blackwell), else delayed scaling."""
    found = _device(device)
    return MXFP8BlockScaling() if _how("mxfp8", found.type, found.index)[0] else DelayedScaling()


def get_default_recipe(device: Any = None) -> Recipe:
    """The recipe of `autocast` without one: that of `get_default_fp8_recipe`."""
    return get_default_fp8_recipe(device)
