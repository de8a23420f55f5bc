"""Tenon for PyTorch: `ops` (modules that fuse), `functional`, `jit`, and quantizers.

>>> import tenon.torch.ops as ops
>>> model = ops.Sequential(ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16))
"""

from __future__ import annotations

import importlib
from typing import Any

from . import ops
from .ops._explain import explain

__all__ = ["explain", "functional", "jit", "ops", "quantizer"]


def __getattr__(name: str) -> Any:
    # Submodules are imported at first use, so `import tenon.torch` stays fast.
    if name in ("functional", "jit", "quantizer"):
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("_"):
        quantizer = importlib.import_module(f"{__name__}.quantizer")
        if name in quantizer.__all__:
            return getattr(quantizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
