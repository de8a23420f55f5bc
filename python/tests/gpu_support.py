"""Common code of the tests on a CUDA device: runs the same call on both devices and compares bits.

TENON_TEST_DEVICE=cpu runs them without a GPU, against the CPU itself, to check the tests.
"""

from __future__ import annotations

import copy
import os
import traceback

import torch

try:
    import pytest
except ImportError:
    pytest = None

DEVICE = os.environ.get("TENON_TEST_DEVICE", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WHY_NOT = ""
if DEVICE == "cuda" and not torch.cuda.is_available():
    WHY_NOT = "torch sees no CUDA device"
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Skipped(Exception):
    """The reason why a test cannot run."""


def skip(why):
    if pytest is not None and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip(why)
    raise Skipped(why)


def needs_cuda():
    if DEVICE != "cuda":
        skip("it needs CUDA")


def numbers(*shape, dtype=None, seed=0, special=False):
    """Normally distributed values on the CPU. With `special`, also values that are easily lost."""
    made = 3 * torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    made = made.to(dtype or torch.float32)
    if special:
        lost = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-7, 88.0, -104.0]
        flat = made.view(-1)
        flat[: len(lost)] = torch.tensor(lost, device="cpu").to(made.dtype)
    return made


def same(there, here, what=""):
    """Checks that a CUDA tensor has the bits of a CPU tensor. All NaNs are equal."""
    assert (there.device.type, here.device.type) == (DEVICE, "cpu"), f"{what}: {there.device}"
    there = there.detach().cpu()
    here = here.detach()
    assert there.shape == here.shape and there.dtype == here.dtype, what
    kind = getattr(torch, INTEGERS[here.element_size()])
    equal = there.contiguous().view(kind) == here.contiguous().view(kind)
    if here.dtype in DTYPES:
        equal |= there.isnan() & here.isnan()
    if not equal.all():
        at = tuple((~equal).nonzero()[0].tolist())
        wrong = int((~equal).sum())
        raise AssertionError(f"{what}: {wrong} differ, first at {at}: {there[at]}, not {here[at]}")


def close(there, here, relative, what=""):
    """Checks equality up to `relative` times the largest value."""
    assert there.device.type == DEVICE and there.shape == here.shape, what
    there, here = there.detach().cpu().double(), here.detach().double()
    most = (there - here).abs().max().item() if there.numel() else 0.0
    allowed = relative * max(here.abs().max().item(), 1e-3) if here.numel() else 0.0
    assert most <= allowed, f"{what}: off by {most}, allowed {allowed}"


def leaf(t, device):
    return t.detach().to(device).requires_grad_()


def both(function, *tensors):
    """(values, gradients) of function(*tensors) on both devices, with the same output gradient."""
    found = []
    for device in (DEVICE, "cpu"):
        given = [None if t is None else leaf(t, device) for t in tensors]
        y = function(*given)
        grad = numbers(*y.shape, dtype=y.dtype, seed=9).to(device)
        y.backward(grad)
        found.append([y, *(t.grad for t in given if t is not None)])
    return found


def all_same(function, *tensors, what=""):
    for i, (there, here) in enumerate(zip(*both(function, *tensors), strict=True)):
        same(there, here, f"{what}, result {i}")


def raises(kind, text, call):
    try:
        call()
    except kind as e:
        assert text in str(e), f"{text!r} is not in {e}"
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


def on_both(model, x, *extras, relative=None, what="", dtype=None):
    """Compares a module and its gradients on both devices. Bits must be equal unless `relative` is
    given.

    For another dtype, the CPU uses the same values in float32.
    """
    results = []
    for device in (DEVICE, "cpu"):
        module, given = copy.deepcopy(model), [x, *extras]
        if dtype is not None:
            module, given = module.to(dtype), [t.to(dtype) for t in given]
        if device == "cpu":
            module, given = module.float(), [t.float() for t in given]
        module, given = module.to(device), [leaf(t, device) for t in given]
        y = module(*given)
        y.backward(numbers(*y.shape, dtype=dtype, seed=9).to(device, y.dtype))
        results.append([y, *(t.grad for t in given), *(p.grad for p in module.parameters())])
    for i, (there, here) in enumerate(zip(*results, strict=True)):
        if relative is None:
            same(there, here, f"{what}, result {i}")
        else:
            close(there, here, relative, f"{what}, result {i}")


def main(tests, wanted):
    """Runs all tests, or those whose names contain one of the words. Returns 1 if one failed."""
    if WHY_NOT:
        print(f"skipped: {WHY_NOT}")
        return 0
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for name, test in list(tests.items()):
        if not name.startswith("test_") or (wanted and not any(w in name for w in wanted)):
            continue
        try:
            test()
            how = "passed"
        except Skipped as e:
            how = "skipped"
            print(f"{name}: {e}")
        except Exception:
            how = "failed"
            traceback.print_exc()
        counts[how] += 1
        print(f"{how:8}{name}", flush=True)
    print(", ".join(f"{count} {how}" for how, count in counts.items()))
    return int(counts["failed"] > 0)
