"""Calls outside of the graph of torch.compile.

Only the tracer imports this module. Eager code does not, so it does not load the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """function(*arguments, **keywords). Tenon kernels cannot be part of a graph."""
    return function(*arguments, **keywords)


# Such calls by the reason why the function is not part of a graph.
calls: dict[str, Callable[..., Any]] = {}


def because(reason: str) -> None:
    """Makes calls[reason]. Errors of fullgraph=True show the reason."""
    if reason not in calls:

        def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            return function(*arguments, **keywords)

        calls[reason] = torch.compiler.disable(call, reason=reason)
