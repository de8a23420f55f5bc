"""Whose matrix product is taken."""

from __future__ import annotations

import os

__all__ = ["torch_multiplies"]

_chosen: dict[bool, bool] = {}


def torch_multiplies(on_cpu: bool) -> bool:
    """Whether linears stay torch's, so that plans end before them and begin behind."""
    found = _chosen.get(on_cpu)
    if found is None:
        found = _chosen[on_cpu] = _choose(on_cpu)
    return found


def _choose(on_cpu: bool) -> bool:
    """On a CPU a plan's product is the quicker one, or nearly so and with its epilogue
    (bench/RESULTS.md); on CUDA torch's is cuBLAS, which a plan's own product does not reach.
    TENON_TORCH_GEMM=torch or tenon decides for both."""
    given = os.environ.get("TENON_TORCH_GEMM", "")
    if given not in ("", "tenon", "torch"):
        raise ValueError(
            f"tenon: TENON_TORCH_GEMM={given!r}; it must be 'torch', 'tenon', or not be set"
        )
    return given == "torch" if given else not on_cpu
