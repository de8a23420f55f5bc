"""Tests of the state of quantizers, of ops with methods of their own, and of what explain shows."""

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.ops as ops  # noqa: E402
from tenon._plan import FORWARD, Plan, plan  # noqa: E402
from tenon.torch import explain  # noqa: E402
from tenon.torch.ops import _kernels  # noqa: E402
from tenon.torch.quantizer import (  # noqa: E402
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)
from torch.utils.checkpoint import checkpoint  # noqa: E402


def delayed():
    return Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16), torch.ones(2), 3.0],
    ids=str,
)
@pytest.mark.parametrize("name", ["scale", "amax"])
def test_state_is_checked_where_it_is_set(name, wrong):
    q = delayed()
    kept = getattr(q, name)
    with pytest.raises(ValueError, match=name):
        setattr(q, name, wrong)
    assert getattr(q, name) is kept
    current = Float8CurrentScalingQuantizer("e4m3")
    if name == "amax":
        with pytest.raises(ValueError, match="amax"):
            current.amax = wrong
        current.amax = torch.ones(1)
        current.amax = None


def test_new_state_is_used():
    q = delayed()
    linear = ops.BasicLinear(32, 16)
    linear.set_quantizer("forward", 0, q)
    model = ops.Sequential(linear, ops.ReLU())
    x = torch.randn(4, 32)
    model(x)
    q.scale, q.amax = torch.full((1,), 2.0), torch.zeros(1)
    model(x)
    assert q.amax.item() == x.abs().max().item()


def test_codes_written_again_are_seen_by_autograd():
    q = MXFP8Quantizer("e4m3")
    model = ops.Sequential(ops.Linear(64, 32), ops.GELU())
    encoded = q(torch.randn(8, 64))
    y = model(encoded)
    q.update_quantized(torch.zeros(8, 64), encoded)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_subclass_with_its_own_quantizer_or_preparation():
    calls = []

    class Own(ops.BasicLinear):
        def get_quantizer(self, mode, index):
            return MXFP8Quantizer("e4m3") if (mode, index) == ("forward", 0) else None

    class Prepared(ops.BasicLinear):
        def pre_fuser_forward(self, *, requires_grad):
            calls.append(requires_grad)

    x = torch.randn(5, 64)
    own = Own(64, 32)
    want = torch.nn.functional.linear(MXFP8Quantizer("e4m3")(x).dequantize(), own.weight)
    torch.testing.assert_close(ops.Sequential(own, ops.Identity())(x), want, rtol=1e-4, atol=1e-5)
    model = ops.Sequential(Prepared(64, 32), ops.GELU())
    for _ in range(3):
        model(x)
    assert calls == [True] * 3


def test_a_method_that_is_replaced_later_is_used():
    model = ops.Sequential(ops.BasicLinear(8, 8), ops.GELU())
    x = torch.randn(3, 8)
    model(x)
    model[0].op_forward = lambda ctx, input_, **kwargs: input_
    torch.testing.assert_close(
        model(x), torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6
    )


def test_a_checkpoint_keeps_the_sum_that_it_adds_to():
    model = ops.Sequential(ops.Linear(24, 24), ops.AddExtraInput(in_place=True))

    def square(x, e):
        return model(x, e).square()

    x, e = torch.randn(5, 24, requires_grad=True), torch.randn(5, 24, requires_grad=True)
    want = torch.autograd.grad(square(x, e).sum(), (x, e))
    kept = e.detach().clone()
    checkpoint(square, x, e, use_reentrant=True).sum().backward()
    assert torch.equal(e, kept)
    for got, exact in zip((x.grad, e.grad), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    # Without gradients the memory is reused.
    with torch.no_grad():
        given = e.detach().clone()
        assert model(x.detach(), given).data_ptr() == given.data_ptr()


@pytest.mark.parametrize("kind", ["alone", "sequential", "fused", "cut", "cut segment"])
def test_a_sum_in_place_in_a_reentrant_checkpoint(kind):
    add = ops.AddExtraInput(in_place=True)
    model = {
        "alone": add,
        "sequential": ops.Sequential(add),
        "fused": ops.Sequential(ops.Linear(24, 24), add),
        "cut": ops.Sequential(ops.Linear(24, 24).bfloat16(), add),
        "cut segment": ops.Sequential(ops.Linear(24, 24).bfloat16(), ops.Linear(24, 24), add),
    }[kind]
    x, e = torch.randn(5, 24, requires_grad=True), torch.ones(5, 24)
    want = torch.autograd.grad((model(x, e.clone()) ** 2).sum(), x)[0]
    checkpoint(lambda a, b: (model(a, b) ** 2).sum(), x, e, use_reentrant=True).backward()
    assert torch.equal(e, torch.ones(5, 24))
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_sum_in_place_keeps_what_is_not_its_own():
    add, x = ops.AddExtraInput(in_place=True), torch.randn(4, 8)
    for model in (add, ops.Sequential(ops.Bias(8), add)):
        row = torch.ones(1, 8).expand(4, 8)
        torch.testing.assert_close(model(x, row), x + 1)
        assert model(x, torch.ones(4, 8).half()).dtype == torch.float32
        p = torch.nn.Parameter(torch.ones(4, 8))
        model(x, p)
        assert torch.equal(p, torch.ones(4, 8))
        kept = x.clone()
        torch.testing.assert_close(model(x, x), 2 * x)
        assert torch.equal(x, kept)


def test_a_subclass_with_its_own_parameter():
    class Twice(ops.Bias):
        def parameter(self, ctx, name):
            return super().parameter(ctx, name) * 2

    bias, x = Twice(64), torch.randn(5, 64)
    torch.nn.init.normal_(bias.bias)
    for model in (bias, ops.Sequential(bias), ops.Sequential(bias, ops.ConstantScale(1.0))):
        torch.testing.assert_close(model(x), x + 2 * bias.bias)


def test_a_subclass_without_quantizers():
    class Plain(ops.BasicLinear):
        def num_quantizers(self, mode):
            return 0

    linear, x = Plain(16, 8), torch.randn(3, 16, requires_grad=True)
    y = ops.Sequential(linear, ops.ReLU())(x)
    torch.testing.assert_close(y, torch.relu(x @ linear.weight.t()))
    y.sum().backward()


def test_explain_shows_copies_and_encoded_inputs():
    model = ops.Sequential(ops.Linear(64, 32), ops.GELU())
    assert "copy:" in explain(model, torch.randn(64, 8).t())
    assert "copy:" not in explain(model, torch.randn(8, 64))
    model[0].weight = torch.nn.Parameter(torch.randn(64, 32).t())
    assert "copy: weight of BasicLinear is strided" in explain(model, torch.randn(8, 64))
    q = MXFP8Quantizer("e4m3")
    told = str(explain(model, q(torch.randn(8, 64))))
    assert "8 x 64 e4m3 mxfp8 rowcol, computed in f32" in told


def test_plans_of_single_ops_are_made_on_their_gpu(monkeypatch):
    made, current = [], []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    def record(*_, **__):
        made.append(current[-1])
        return SimpleNamespace(buffers=[SimpleNamespace(name="y", role="output", cols=4)])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(_kernels, "Plan", record)
    gpus = [torch.device("cuda", index) for index in (0, 1, 0)]
    for gpu in gpus:
        x = SimpleNamespace(is_cpu=False, dtype=torch.float32, device=gpu)
        _kernels._alone("linear(4,4):gpu", x, torch.float32, True, None)
    assert made == gpus[:2]


def test_tensors_that_a_plan_cannot_read_are_named_in_every_call():
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    model(torch.randn(3, 8))
    with pytest.raises(NotImplementedError, match="the input is sparse_coo"):
        model(torch.randn(3, 8).to_sparse())


def test_prepare():
    p = plan("linear(16,8) gelu dropout(0.5)", cols=16, recipe="current")
    p.prepare(5)
    p.prepare(0)
    with pytest.raises(ValueError):
        p.prepare(-1)
    with pytest.raises(TypeError):
        p.prepare("5")


def test_fast_sums_are_asked_for_by_name():
    assert ops.Linear(8, 8, accumulate="fast")(torch.randn(2, 8)).shape == (2, 8)
    assert "accumulate=fast" in ops.BasicLinear(8, 8, accumulate="fast").plan_text()
    with pytest.raises(ValueError, match="precise"):
        ops.Linear(8, 8, accumulate="quick")


def test_quantised_ops_of_a_sequential_are_one_plan(monkeypatch):
    ran = []
    run = Plan.run
    monkeypatch.setattr(
        Plan, "run", lambda self, p, *a, **k: (ran.append(p), run(self, p, *a, **k))
    )
    linear = ops.BasicLinear(32, 16)
    linear.set_quantizer("forward", 1, delayed())
    ops.Sequential(linear, ops.Bias(16), ops.ReLU())(torch.randn(4, 32))
    assert ran == [FORWARD]
