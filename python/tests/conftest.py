"""The package of this checkout with the library of its build tree, unless others are installed."""

import importlib.util
import os
import sys
from pathlib import Path

# TENON_TEST_DEVICE=cuda runs the tests of torch and JAX on the GPU; else they are the CPU's, also
# on machines where JAX would choose a GPU.
_ON_CUDA = os.environ.get("TENON_TEST_DEVICE") == "cuda"
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if _ON_CUDA else "cpu")
if _ON_CUDA:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    import torch

    torch.set_default_device("cuda")
    # Tensors of the CPU that pretend to be elsewhere.
    collect_ignore = ["test_torch_routing.py"]

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
