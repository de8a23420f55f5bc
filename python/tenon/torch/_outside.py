"""Where torch.compile leaves its graph. Its tracer imports this; eager code does not, so that it
does not load the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """function(*arguments, **keywords): kernels of Tenon, which no graph holds."""
    return function(*arguments, **keywords)
