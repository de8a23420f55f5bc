"""Tests how calls on CUDA are made, without a GPU: CPU tensors that report another device."""

import ctypes
import os

import pytest

torch = pytest.importorskip("torch")

import tenon  # noqa: E402
from tenon import _lib, _plan  # noqa: E402
from tenon.torch import _cuda, functional, ops, quantizer  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TENON_TEST_DEVICE") == "cuda", reason="its tensors are the CPU's"
)
STREAM = 0x55


@pytest.fixture
def elsewhere(monkeypatch):
    """Records the arguments of C ABI calls: functions and options, and the devices of plans."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda t: False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(quantizer.QuantizedTensor, "is_cpu", property(lambda q: False))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_cuda, "_raw_stream", lambda device: STREAM + device)
    monkeypatch.setattr(_cuda, "index", lambda tensors: 0)
    real = _cuda.options

    def options(given, device):
        seen.append(real(given, device))
        there = seen[-1]
        return _lib.options(
            ("native", "strict")[there.precision], ("once", "eager")[there.rounding]
        )

    def of_plan(precision, rounding, device):
        seen.append(device)
        return _lib.options(precision, rounding)

    def run_plan(plan, device, pass_, rows, memory, workspace, aligned, step, unchanged):
        plan.run(pass_, rows, memory, workspace, step=step, weights_unchanged=unchanged)

    monkeypatch.setattr(_cuda, "options", options)
    monkeypatch.setattr(_cuda, "run_plan", run_plan)
    monkeypatch.setattr(_plan, "options", of_plan)
    return seen


def _calls(seen, count):
    assert len(seen) == count
    for there in seen:
        assert there.device == _lib.DEVICE["cuda"] and there.stream == STREAM
        assert there.allocate and not there.user


def test_functions_take_the_stream(elsewhere):
    x = torch.randn(4, 64, requires_grad=True)
    functional.gelu(x).sum().backward()
    _calls(elsewhere, 2)
    bias = torch.randn(64, requires_grad=True)
    functional.swiglu(x, bias=bias, precision="strict").sum().backward()
    _calls(elsewhere, 4)
    assert elsewhere[-1].precision == 1
    functional.bias_dropout_add(x, bias, x, 0.1).sum().backward()
    functional.l2normalization(x).sum().backward()
    functional.quantize(x, quantizer.MXFP8Quantizer("e4m3")).dequantize().sum().backward()
    _calls(elsewhere, 10)
    # Equal calls share their options.
    assert len({id(o) for o in elsewhere}) == 2


def test_plans_take_the_stream(elsewhere):
    model = ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.RMSNorm(16), ops.Linear(16, 8))
    model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert elsewhere == ["cuda"]
    both = ops.Sequential(ops.RMSNorm(16), ops.SwiGLU(), ops.ConstantScale(2.0))
    elsewhere.clear()
    both(torch.randn(3, 16, requires_grad=True)).sum().backward()
    assert elsewhere == ["cuda"]


def test_current_scaling_has_a_place_for_its_amax():
    made = quantizer.Float8CurrentScalingQuantizer("e4m3")
    assert "amax" not in made.written(torch.device("cpu"))
    there = made.written(torch.device("meta"))
    assert there["amax"].device.type == "meta" and there["amax"].shape == (1,)


def test_another_device_is_entered(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1 if entered[-1:] == [1] else 0)
    monkeypatch.setattr(_cuda, "_raw_stream", lambda device: STREAM + device)
    given = []
    assert _cuda.run(lambda *a: given.append(a) or 0, 1, None, "argument") == 0
    assert entered == [1, None]
    ((argument, options),) = given
    assert argument == "argument" and options.stream == STREAM + 1 and options.user == 1


def test_workspaces_are_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_cuda, "_raw_stream", lambda device: STREAM)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))

    def call(options):
        address = options.allocate(options.user, 1000)
        ctypes.memset(address, 1, 1000)
        assert len(_cuda._lent.tensors) == 1
        return 0

    assert _cuda.run(call, 0, None) == 0
    assert not _cuda._lent.tensors

    def fails(size, dtype, device):
        raise MemoryError("no memory")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(MemoryError, match="no memory"):
        _cuda.run(lambda options: int(not options.allocate(options.user, 8)), 0, None)
    assert _cuda._lent.error is None


class _Somewhere:
    """An object with only the device of a tensor."""

    def __init__(self, device):
        self.device = torch.device(device)


def test_devices_must_agree():
    on, other, cpu = (_Somewhere(d) for d in ("cuda:0", "cuda:1", "cpu"))
    assert _cuda.index((("x", on), ("bias", None), ("y", on))) == 0
    with pytest.raises(ValueError, match=r"bias is on cpu, but x is on cuda:0.*bias\.to\('cuda:0'"):
        _cuda.index((("x", on), ("bias", cpu)))
    with pytest.raises(ValueError, match="x is on cpu, but bias is on cuda:1"):
        _cuda.index((("x", cpu), ("bias", other)))
    with pytest.raises(ValueError, match="y is on cuda:1, but x is on cuda:0"):
        _cuda.index((("x", on), ("y", other)))
    x = torch.ones(2, 4)
    for call in (
        lambda: functional.gelu(x, bias=torch.ones(4, device="meta")),
        lambda: functional.gelu(x.to("meta")),
        lambda: functional.dropout(x.to("meta"), 0.1, random=torch.ones(5, dtype=torch.int64)),
        lambda: functional.quantize(x.to("meta"), quantizer.MXFP8Quantizer("e4m3")),
        lambda: ops.LayerNorm(4)(x.to("meta")),
        lambda: ops.Linear(4, 4)(x.to("meta")),
    ):
        with pytest.raises(NotImplementedError, match="is on meta; tensors are on the cpu or on"):
            call()


def test_the_update_without_the_library():
    """On CUDA, torch kernels update delayed scales. On the CPU they give the bits of the
    library.
    """
    history = torch.rand(6, 5) * 10
    history[0, 1], history[0, 2], history[2, 3], history[0, 4] = 0, torch.inf, torch.nan, 1e-42
    for algorithm in ("max", "most_recent"):
        for length in (1, 2, 6):
            expected = history[:length].clone(), torch.rand(5) + 0.5
            found = expected[0].clone(), expected[1].clone()
            for _ in range(2):
                quantizer.delayed_update(*expected, margin=1, amax_compute_algo=algorithm)
                e4m3 = torch.float8_e4m3fn
                quantizer._update_there(found[0], found[1][None], e4m3, 1, algorithm == "max")
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_plan_for_cuda_needs_no_gpu():
    told = tenon.plan("rmsnorm(64) swiglu", cols=64, dtype="bf16", device="cuda")
    assert told.json()["device"] == "cuda"
    with pytest.raises(ValueError, match="device='tpu'; it must be 'cpu' or 'cuda'"):
        tenon.plan("gelu", cols=8, device="tpu")
