"""Whose matrix product is taken."""

from __future__ import annotations

import os

import torch

__all__ = ["torch_multiplies"]

_chosen: dict[tuple[torch.dtype, bool], bool] = {}


def torch_multiplies(dtype: torch.dtype, on_cpu: bool) -> bool:
    """Whether linears of `dtype` stay torch's, so that plans end before them and begin behind."""
    found = _chosen.get((dtype, on_cpu))
    if found is None:
        found = _chosen[dtype, on_cpu] = _choose(dtype, on_cpu)
    return found


def _choose(dtype: torch.dtype, on_cpu: bool) -> bool:
    """On CUDA torch's product is cuBLAS, which a plan's own does not reach. On a CPU with AMX and
    many threads oneDNN's bf16 product was ahead in a loop without pauses (bench/RESULTS.md);
    everywhere else a plan's product is the quicker one, or nearly so and with its epilogue.
    TENON_TORCH_GEMM=torch or tenon decides for every dtype and device."""
    given = os.environ.get("TENON_TORCH_GEMM", "")
    if given not in ("", "tenon", "torch"):
        raise ValueError(
            f"tenon: TENON_TORCH_GEMM={given!r}; it must be 'torch', 'tenon', or not be set"
        )
    if given:
        return given == "torch"
    if not on_cpu:
        return True
    return dtype == torch.bfloat16 and torch.get_num_threads() > 2 and _has_amx()


def _has_amx() -> bool:
    """Whether oneDNN may use AMX."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return (limit in ("DEFAULT", "ALL") or "AMX" in limit) and bool(supported())
