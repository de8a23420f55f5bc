"""The package of this checkout with the library of its build tree, unless others are installed."""

import importlib.util
import os
import sys
from pathlib import Path

# The handlers are those of the CPU, also on machines where JAX would choose a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_PYTHON = Path(__file__).resolve().parents[1]
_BUILT = _PYTHON.parent / "build" / "lib" / "libtenon.so"

if importlib.util.find_spec("tenon") is None:
    sys.path.insert(0, str(_PYTHON))
    # Programs that tests start find it too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
_origin = getattr(importlib.util.find_spec("tenon"), "origin", None)
_bundled = _origin is not None and (Path(_origin).parent / "lib" / "libtenon.so").exists()
if not _bundled and _BUILT.exists():
    os.environ.setdefault("TENON_LIBRARY", str(_BUILT))
