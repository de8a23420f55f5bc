"""Tenon for PyTorch: `ops` (modules that fuse), `functional`, `jit`, and quantizers.

>>> import tenon.torch.ops as ops
>>> model = ops.Sequential(ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16))
"""

from __future__ import annotations

import importlib
from typing import Any

from . import ops
from .ops._explain import explain

__all__ = ["explain", "functional", "jit", "ops", "quantizer", "recipe"]

_PUBLIC = (
    *("quantizer", "_available", "_checkpoint", "_context", "_convert", "_delayed", "modules"),
)


def __getattr__(name: str) -> Any:
    # Submodules are imported at first use, so `import tenon.torch` stays fast.
    if name in ("functional", "jit", "quantizer", "recipe"):
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("_"):
        for module in _PUBLIC:
            found = importlib.import_module(f"{__name__}.{module}")
            if name in found.__all__:
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = [importlib.import_module(f"{__name__}.{module}").__all__ for module in _PUBLIC]
    return sorted({*globals(), *__all__, *(name for each in names for name in each)})
