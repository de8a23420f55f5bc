"""What tests on a CUDA device share: the same call on both devices, and bits compared.

TENON_TEST_DEVICE=cpu runs them without a GPU, against the CPU itself, to try the tests out.
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
    """Why a test cannot run here."""


def skip(why):
    if pytest is not None and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip(why)
    raise Skipped(why)


def needs_cuda():
    if DEVICE != "cuda":
        skip("it needs CUDA")


def numbers(*shape, dtype=None, seed=0, special=False):
    """Normal numbers on the CPU; with the ones that are easily lost if `special`."""
    made = 3 * torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    made = made.to(dtype or torch.float32)
    if special:
        lost = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-7, 88.0, -104.0]
        flat = made.view(-1)
        flat[: len(lost)] = torch.tensor(lost, device="cpu").to(made.dtype)
    return made


def same(there, here, what=""):
    """The bits of a CUDA tensor are those of a CPU tensor; any NaN is any NaN."""
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
    """Equal up to `relative` of the largest number."""
    assert there.device.type == DEVICE and there.shape == here.shape, what
    there, here = there.detach().cpu().double(), here.detach().double()
    most = (there - here).abs().max().item() if there.numel() else 0.0
    allowed = relative * max(here.abs().max().item(), 1e-3) if here.numel() else 0.0
    assert most <= allowed, f"{what}: off by {most}, allowed {allowed}"


def leaf(t, device):
    return t.detach().to(device).requires_grad_()


def both(function, *tensors):
    """(values, gradients) of function(*tensors) on both devices, with one gradient for all."""
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
    """A module, and its gradients, on both devices; equal bits unless `relative` is given.

    Of another dtype the CPU takes the same numbers in float32.
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
    """Every test among the names, or those whose names hold one of the words; 1 if one failed."""
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
