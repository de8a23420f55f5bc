"""Uses the package of this checkout with the library of its build tree, unless others are
installed.
"""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# TENON_TEST_DEVICE=cuda runs the tests of torch and JAX on the GPU. Otherwise they run on the CPU,
# also on machines where JAX would choose a GPU.
_ON_CUDA = os.environ.get("TENON_TEST_DEVICE") == "cuda"
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if _ON_CUDA else "cpu")
# Several CPU devices, for the sharding tests. JAX reads the variable at startup.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", *os.environ.get("XLA_FLAGS", "").split()]
)
if _ON_CUDA:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for torch
    import torch

    torch.set_default_device("cuda")
    # It uses CPU tensors that report another device.
    collect_ignore = ["test_torch_routing.py"]

_PYTHON = Path(__file__).resolve().parents[1]
_BUILT = _PYTHON.parent / "build" / "lib" / "libtenon.so"

if importlib.util.find_spec("tenon") is None:
    sys.path.insert(0, str(_PYTHON))
    # For programs that tests start.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
_origin = getattr(importlib.util.find_spec("tenon"), "origin", None)
_bundled = _origin is not None and (Path(_origin).parent / "lib" / "libtenon.so").exists()
if not _bundled and _BUILT.exists():
    os.environ.setdefault("TENON_LIBRARY", str(_BUILT))


@pytest.fixture(autouse=True)
def same_numbers():
    """Every run of a test draws the same numbers, so that a failure is seen again."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_configure(config):
    config.addinivalue_line("markers", "compiles: makes many kernels, on CUDA on all cores first")


def pytest_runtestloop(session):
    """Runs marked tests first in parallel, to compile kernels. On CUDA only.

    On CUDA most of the time is compilation, and a single test uses one core. All arguments of
    marked tests are parameters. Their results are ignored here and reported when they run again in
    order.
    """
    items = [i for i in session.items if i.get_closest_marker("compiles")]
    if not _ON_CUDA or session.config.option.collectonly or not items:
        return

    def run(item):
        torch.set_default_device("cuda")  # the setting is per thread
        with torch.autograd.set_multithreading_enabled(False):  # runs gradients in this thread
            item.function(**item.callspec.params)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for item in items:
            pool.submit(run, item)
