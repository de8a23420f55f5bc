"""Training with quantizers on linears: each recipe is a plan, and trains like float32."""

import math

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon._plan import FORWARD, Plan  # noqa: E402
from tenon.torch import quantizer as q  # noqa: E402

RECIPES = ("delayed", "current", "mxfp8", "block")
# The relative error of a code: half a step of e4m3 and of e5m2.
E4M3, E5M2 = 2.0**-4, 2.0**-3


class Delayed:
    """The state of one delayed quantizer: a history of amax and a scale."""

    def __init__(self, dtype):
        self.history, self.scale, self.dtype = torch.zeros(16, 1), torch.ones(1), dtype

    def quantizer(self):
        return q.Float8Quantizer(self.scale, self.history[0], self.dtype)

    def update(self):
        q.delayed_update(self.history, self.scale, self.dtype)


def quantise(model, recipe):
    """Sets the quantizers of a recipe on every linear. Returns the delayed states."""
    states = []

    def one(dtype, block):
        if recipe == "delayed":
            states.append(Delayed(dtype))
            return states[-1].quantizer()
        if recipe == "current":
            return q.Float8CurrentScalingQuantizer(dtype)
        if recipe == "mxfp8":
            return q.MXFP8Quantizer("e4m3")
        return q.Float8BlockQuantizer("e4m3", block_scaling_dim=block)

    for op in model.modules():
        if isinstance(op, ops.BasicLinear):
            op.set_quantizer("forward", 0, one("e4m3", 1))
            op.set_quantizer("forward", 1, one("e4m3", 2))
            op.set_quantizer("backward", 0, one("e5m2", 1))
    return states


def mlp():
    return ops.Sequential(ops.Linear(32, 128), ops.SwiGLU(), ops.Linear(64, 32))


def block():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    inner = ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)
    return ops.Sequential(make, ops.RMSNorm(32), *inner, add)


MODELS = {"mlp": mlp, "block": block}


@pytest.fixture
def runs(monkeypatch):
    ran = []
    run = Plan.run

    def count(self, pass_, *args, **more):
        ran.append(pass_ != FORWARD)
        return run(self, pass_, *args, **more)

    monkeypatch.setattr(Plan, "run", count)
    return ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_is_one_plan(name, recipe, dtype, runs):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    plain = MODELS[name]().double()
    plain.load_state_dict(model.state_dict())
    states = quantise(model, recipe)
    x = torch.randn(50, 32).to(dtype).requires_grad_()
    g = torch.randn(50, 32).to(dtype)
    for _ in range(2 if states else 1):  # the first step finds the scales
        runs.clear()
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.backward(g)
        for state in states:
            assert state.history[0] > 0
            state.update()
    assert runs == [False, True]
    told = tt.explain(model, x)
    modes = {"block": ("block1x128", "block128x128")}.get(recipe, (recipe,))
    assert all(mode in told for mode in modes), told
    weights = dict(plain.named_parameters())
    x64 = x.detach().double().requires_grad_()
    exact = reference(name, x64, weights)
    exact.backward(g.double())
    # Codes on the longest path. Those before the activation count twice: |x·f'/f| may exceed 1.
    close(y, exact, 10, 0)
    close(x.grad, x64.grad, 16, 5)
    for key, p in model.named_parameters():
        close(p.grad, weights[key].grad, 16, 5)


def reference(name, x, w):
    F = torch.nn.functional
    if name == "mlp":
        a, b = F.linear(x, w["0.weight"], w["0.bias"]).chunk(2, -1)
        return F.linear(F.silu(a) * b, w["2.weight"], w["2.bias"])
    z = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w["1.weight"]
    h = F.gelu(F.linear(z, w["2.weight"], w["2.bias"]), approximate="tanh")
    return x + F.linear(h, w["4.weight"], w["4.bias"])


def close(mine, exact, e4m3, e5m2):
    """Compares the norm of the error with that of independent errors of so many codes.

    An error up to half a step e of a number with a mantissa in [1, 2) has the mean square e²/6.
    """
    error = (mine.detach().double() - exact.detach()).norm() / exact.detach().norm()
    allowed = math.sqrt((e4m3 * E4M3**2 + e5m2 * E5M2**2) / 6)
    assert error <= allowed, (error, allowed)


@pytest.mark.parametrize("name", MODELS)
def test_training_reaches_the_loss_of_float32(name):
    torch.manual_seed(0)
    data = torch.randn(256, 32)
    teacher = MODELS[name]()
    with torch.no_grad():
        # Noise in the data bounds the loss from below, as in a real data set.
        target = teacher(data) + 0.7 * torch.randn(256, 32)
    losses = {recipe: train(name, recipe, data, target) for recipe in ("none", *RECIPES)}
    for recipe in RECIPES:
        assert abs(losses[recipe] / losses["none"] - 1) <= 0.02, losses


def train(name, recipe, data, target):
    """The mean loss of the last 20 of 200 steps."""
    torch.manual_seed(1)
    model = MODELS[name]()
    states = quantise(model, recipe) if recipe != "none" else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    last = []
    for step in range(200):
        optimizer.zero_grad()
        loss = (model(data) - target).square().mean()
        loss.backward()
        optimizer.step()
        for state in states:
            state.update()
        if step >= 180:
            last.append(loss.item())
    return sum(last) / len(last)


def test_quantizers_that_a_plan_does_not_have():
    """They encode by themselves, and the rest is a plan."""
    torch.manual_seed(0)
    model = mlp()
    amax = torch.full((1,), 4.0)
    given = q.Float8CurrentScalingQuantizer("e4m3", use_existing_amax=True, amax=amax)
    model[0].basic_ops[0].set_quantizer("forward", 0, given)
    x = torch.randn(8, 32, requires_grad=True)
    y = model(x)
    y.sum().backward()
    coded = given(x.detach()).dequantize()
    a, b = torch.nn.functional.linear(coded, model[0].weight, model[0].bias).chunk(2, -1)
    z = torch.nn.functional.silu(a) * b
    expected = torch.nn.functional.linear(z, model[2].weight, model[2].bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert "BasicLinear" in tt.explain(model, x) and x.grad.isfinite().all()


def test_state_on_another_device_is_refused():
    model = mlp()
    state = torch.ones(1, device="meta")
    model[0].basic_ops[0].set_quantizer(
        "forward", 0, q.Float8Quantizer(state, torch.zeros(1, device="meta"), "e4m3")
    )
    with pytest.raises(ValueError, match="BasicLinear: the .* of its quantizer is on meta"):
        model(torch.randn(2, 32))
