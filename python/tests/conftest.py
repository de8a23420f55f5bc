"""The package of this checkout with the library of its build tree, unless others are installed."""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# TENON_TEST_DEVICE=cuda runs the tests of torch and JAX on the GPU; else they are the CPU's, also
# on machines where JAX would choose a GPU.
_ON_CUDA = os.environ.get("TENON_TEST_DEVICE") == "cuda"
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if _ON_CUDA else "cpu")
# Several devices, of the CPU, for what is sharded; read when JAX starts.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", *os.environ.get("XLA_FLAGS", "").split()]
)
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


def pytest_configure(config):
    config.addinivalue_line("markers", "compiles: makes many kernels, on CUDA on all cores first")


def pytest_runtestloop(session):
    """On CUDA most of the time goes into compiling, which tests one by one leave to one core.

    Marked tests, whose arguments are all parameters, run once before the others, many at a time;
    what they say is heard when they run again, in their turn.
    """
    items = [i for i in session.items if i.get_closest_marker("compiles")]
    if not _ON_CUDA or session.config.option.collectonly or not items:
        return

    def run(item):
        torch.set_default_device("cuda")  # a setting of the thread
        with torch.autograd.set_multithreading_enabled(False):  # gradients too are this thread's
            item.function(**item.callspec.params)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for item in items:
            pool.submit(run, item)
