"""Classes of Transformer Engine that Tenon does not have. Making one says what to use instead."""

from __future__ import annotations

from typing import Any

_GROUPED = "grouped ops are out of scope; use one Linear for each group"
_COLLECTIVE = "collectives come with distribution; call torch.distributed between two Sequentials"
_USERBUFFERS = "Userbuffers are out of scope; use BasicLinear"

_WHY = {
    "AllGather": _COLLECTIVE,
    "AllReduce": _COLLECTIVE,
    "GroupedLinear": _GROUPED,
    "GroupedMLP_CuTeGEMMGLU": _GROUPED,
    "GroupedMLP_CuTeGEMMUnary": _GROUPED,
    "MoeCombine": _GROUPED,
    "MoeDispatch": _GROUPED,
    "ReduceScatter": _COLLECTIVE,
    "UserbuffersBackwardLinear": _USERBUFFERS,
    "UserbuffersForwardLinear": _USERBUFFERS,
}


def _class(name: str, why: str) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: Tenon does not have it: {why}")

    return type(name, (), {"__init__": __init__, "__doc__": f"Not available: {why}."})


CLASSES = {name: _class(name, why) for name, why in _WHY.items()}
