"""A shortened run of examples/gpt.py: recipes against bf16, and resuming from a checkpoint."""

import importlib.util
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEVICE = "cuda" if os.environ.get("TENON_TEST_DEVICE") == "cuda" else "cpu"
if not EXAMPLES.exists():
    pytest.skip("the examples are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLES / "gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    was = torch.are_deterministic_algorithms_enabled()
    default = torch.get_default_device()
    torch.set_default_device("cpu")  # as in the program
    yield lambda *arguments: module.main(["--device", DEVICE, *map(str, arguments)])
    torch.set_default_device(default)
    torch.use_deterministic_algorithms(was)


@pytest.fixture(scope="module")
def bf16(gpt):
    return gpt("--steps", 30)


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8", "block"])
def test_losses_and_resuming(recipe, gpt, bf16, tmp_path):
    path = tmp_path / "checkpoint.pt"
    dtype = "f32" if recipe == "none" else "bf16"
    losses = gpt("--recipe", recipe, "--dtype", dtype, "--steps", 30, "--save", path)
    assert losses[-1] < 0.6 * losses[0]
    mean, reference = sum(losses[-5:]) / 5, sum(bf16[-5:]) / 5
    assert abs(mean - reference) <= 0.02 * reference
    resumed = gpt("--recipe", recipe, "--dtype", dtype, "--steps", 30, "--resume", path)
    assert resumed == losses[15:]
