"""Whose matrix product is taken."""

from __future__ import annotations

import os

import torch

__all__ = ["torch_multiplies"]

_chosen: dict[torch.dtype, bool] = {}


def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether linears of `dtype` stay torch's, so that plans end before them and begin behind."""
    found = _chosen.get(dtype)
    if found is None:
        found = _chosen[dtype] = _choose(dtype)
    return found


def _choose(dtype: torch.dtype) -> bool:
    """On a CPU with AMX, oneDNN's bf16 product is level with Tenon's for two threads and ahead of
    it for many (bench/RESULTS.md); everywhere else a plan's product is the quicker one, or nearly
    so and with its epilogue. TENON_TORCH_GEMM=torch or tenon decides for every dtype."""
    given = os.environ.get("TENON_TORCH_GEMM", "")
    if given not in ("", "tenon", "torch"):
        raise ValueError(
            f"tenon: TENON_TORCH_GEMM={given!r}; it must be 'torch', 'tenon', or not be set"
        )
    if given:
        return given == "torch"
    return dtype == torch.bfloat16 and torch.get_num_threads() > 2 and _has_amx()


def _has_amx() -> bool:
    """Whether oneDNN may use AMX."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return (limit in ("DEFAULT", "ALL") or "AMX" in limit) and bool(supported())
