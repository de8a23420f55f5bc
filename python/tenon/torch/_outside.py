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
