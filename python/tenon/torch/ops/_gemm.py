"""Chooses between the matrix product of torch and that of Tenon."""

from __future__ import annotations

import os

import torch

__all__ = ["torch_multiplies"]

_chosen: dict[tuple[torch.dtype, bool], bool] = {}


def torch_multiplies(dtype: torch.dtype, on_cpu: bool) -> bool:
    """Whether linears of `dtype` use torch's product. Plans then end before a linear."""
    found = _chosen.get((dtype, on_cpu))
    if found is None:
        found = _chosen[dtype, on_cpu] = _choose(dtype, on_cpu)
    return found


def _choose(dtype: torch.dtype, on_cpu: bool) -> bool:
    """Decides by device and dtype.

    - CUDA, f32: torch, because it may use TF32.
    - CPU with AMX and many threads, bf16: torch, because oneDNN was faster in back-to-back calls
      (bench/RESULTS.md).
    - Otherwise: Tenon, which is faster, or nearly as fast with a fused epilogue.

    TENON_TORCH_GEMM=torch or tenon overrides this for every dtype and device.
    """
    given = os.environ.get("TENON_TORCH_GEMM", "")
    if given not in ("", "tenon", "torch"):
        raise ValueError(
            f"tenon: TENON_TORCH_GEMM={given!r}; it must be 'torch', 'tenon', or not be set"
        )
    if given:
        return given == "torch"
    if not on_cpu:
        return dtype == torch.float32
    return dtype == torch.bfloat16 and torch.get_num_threads() > 2 and _has_amx()


def _has_amx() -> bool:
    """Whether oneDNN may use AMX."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return (limit in ("DEFAULT", "ALL") or "AMX" in limit) and bool(supported())
