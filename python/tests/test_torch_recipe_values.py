"""Recipes against a float64 model that quantises, decodes and multiplies, and the update rule."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from fp8_support import sum_error  # noqa: E402
from tenon._plan import FORWARD, Plan  # noqa: E402
from tenon.torch import recipe as R  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {
    "delayed": R.DelayedScaling(amax_history_len=4),
    "delayed e4m3": R.DelayedScaling(fp8_format=R.Format.E4M3, amax_history_len=4),
    "current": R.Float8CurrentScaling(),
    "current pow2": R.Float8CurrentScaling(use_power_2_scales=True),
    "mxfp8": R.MXFP8BlockScaling(),
    "mxfp8 hybrid": R.MXFP8BlockScaling(fp8_format=R.Format.HYBRID),
    "block": R.Float8BlockScaling(),
    "block f32": R.Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1),
}


def coded(x, dtype, scale):
    """x after encoding and decoding, in float64, by torch's own conversion."""
    top = torch.finfo(dtype).max
    codes = (x.float() * scale).clamp(-top, top).to(dtype)
    return codes.double() * (torch.tensor(1.0) / scale).double()


def scale_of(amax, dtype, pow2):
    # Not number / tensor, which multiplies by a rounded reciprocal.
    scale = torch.tensor(torch.finfo(dtype).max) / amax.float()
    scale = torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))
    if pow2:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return scale


def per_block(x, rows, cols, rule):
    """Applies `rule` to each block of rows x cols."""
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            part = x[i : i + rows, j : j + cols]
            out[i : i + rows, j : j + cols] = rule(part)
    return out


def quantised(recipe, x, tensor, columnwise=False, scale=None):
    """What a product of the recipe reads of x, where it sums along rows or along columns."""
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[recipe.fp8_dtype(tensor)]
    if recipe.delayed():
        return coded(x, dtype, scale)
    if recipe.float8_current_scaling():
        return coded(x, dtype, scale_of(x.abs().amax(), dtype, recipe.use_power_2_scales))
    if recipe.mxfp8():

        def rule(part):
            p = part.abs().amax().float() * np.float32(1 / torch.finfo(dtype).max)
            mantissa, exponent = torch.frexp(p)  # rounded up to a power of two
            up = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            return coded(part, dtype, torch.tensor(1.0) / up)

        return per_block(x, *((32, 1) if columnwise else (1, 32)), rule)
    pow2 = not recipe.use_f32_scales
    dims = (128, 128) if recipe.block_scaling_dim(tensor) == 2 else (1, 128)
    return per_block(
        x,
        *(dims[::-1] if columnwise else dims),
        lambda part: coded(part, dtype, scale_of(part.abs().amax(), dtype, pow2)),
    )


def check_product(mine, a, b):
    """mine is a @ b but for the order of sums and one rounding."""
    exact, size = a @ b, a.abs() @ b.abs()
    bound = exact.abs() * torch.finfo(mine.dtype).eps + sum_error(size, a.shape[1], mine.dtype)
    error = (mine.detach().double() - exact).abs()
    assert (error <= bound).all(), error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_multiplies_what_its_recipe_encodes(name, dtype):
    """Only the order of sums and the rounding of results differ from the model."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    linear = ops.Linear(96, 160, dtype=dtype, bias=False)
    x = torch.randn(40, 96).to(dtype).requires_grad_()
    g = torch.randn(40, 160).to(dtype)
    for _ in range(3 if recipe.delayed() else 1):
        x.grad = linear.weight.grad = None
        with tt.autocast(recipe=recipe):
            y = linear(x)
        y.backward(g)
    sx = sw = sg = None
    if recipe.delayed():
        basic = linear.basic_ops[0]
        sx, sw = basic.forward_scale
        sg = basic.backward_scale
        top = torch.finfo(E4M3).max
        assert sx == torch.tensor(top) / x.detach().abs().max().float()
        assert sw == torch.tensor(top) / linear.weight.detach().abs().max().float()
    v, w = x.detach(), linear.weight.detach()
    pairs = [
        (y, quantised(recipe, v, "input", scale=sx), quantised(recipe, w, "weight", scale=sw).T),
        (
            x.grad,
            quantised(recipe, g, "grad_output", scale=sg),
            quantised(recipe, w, "weight", True, sw),
        ),
        (
            linear.weight.grad,
            quantised(recipe, g, "grad_output", True, sg).T,
            quantised(recipe, v, "input", True, sx),
        ),
    ]
    for mine, a, b in pairs:
        check_product(mine, a, b)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "make", [R.Float8CurrentScaling, R.MXFP8BlockScaling, R.Float8BlockScaling]
)
def test_backward_override(make, override):
    recipe = make(backward_override=override)
    torch.manual_seed(0)
    linear = ops.Linear(64, 96, bias=False)
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    with tt.autocast(recipe=recipe):
        y = linear(x)
    y.backward(g)
    v, w = x.detach(), linear.weight.detach()
    qx, qw = quantised(recipe, v, "input"), quantised(recipe, w, "weight")
    check_product(y, qx, qw.T)
    if override == "high_precision":
        dx, dw = g.double() @ w.double(), g.double().T @ v.double()
        torch.testing.assert_close(x.grad.double(), dx, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(linear.weight.grad.double(), dw, rtol=1e-5, atol=1e-4)
        return
    # The gradient is not quantised; the operands are those of the backward products.
    cx, cw = quantised(recipe, v, "input", True), quantised(recipe, w, "weight", True)
    choices = [(g.double() @ a, g.double().T @ b) for a in (qw, cw) for b in (qx, cx)]
    close = [
        torch.allclose(x.grad.double(), dx, rtol=1e-5, atol=1e-4)
        and torch.allclose(linear.weight.grad.double(), dw, rtol=1e-5, atol=1e-4)
        for dx, dw in choices
    ]
    assert any(close)


@pytest.mark.parametrize("name", RECIPES)
def test_a_chain_under_a_recipe_is_one_plan_and_nothing_is_built_again(name, monkeypatch):
    recipe = RECIPES[name]
    ran, built = [], []
    run, build = Plan.run, Plan.__init__
    monkeypatch.setattr(
        Plan, "run", lambda self, p, *a, **k: (ran.append(p != FORWARD), run(self, p, *a, **k))[1]
    )
    monkeypatch.setattr(
        Plan, "__init__", lambda self, *a, **k: (built.append(a), build(self, *a, **k))[1]
    )
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    for step in range(6):
        ran.clear()
        with tt.autocast(enabled=step % 2 == 0, recipe=recipe):
            y = model(x)
        y.sum().backward()
        assert ran == [False, True]
    assert len(built) == 2
    assert recipe.fp8_dtype("input") in tt.explain(model, x, recipe=recipe)


class Rule:
    """The update of spec.md 2 for one tensor, in NumPy."""

    def __init__(self, length, top, margin, algorithm):
        self.history, self.scale = np.zeros(length, np.float32), np.float32(1)
        self.top, self.margin, self.algorithm = np.float32(top), margin, algorithm

    def update(self):
        last = self.history[0]
        if last == 0:
            return
        seen = np.array([last, *self.history[1:]]) if self.algorithm == "max" else [last]
        finite = [a for a in seen if np.isfinite(a)]
        amax = max(finite, default=np.float32(0))
        if len(self.history) > 1:
            self.history[1:-1] = self.history[2:]
            self.history[-1] = last
        self.history[0] = 0
        if amax > 0:
            with np.errstate(over="ignore"):
                made = np.float32(np.float32(self.top * 2.0**-self.margin) / np.float32(amax))
            self.scale = min(made, np.finfo(np.float32).max)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length,margin", [(1, 0), (2, 1), (3, -2), (1024, 0)])
def test_updates_follow_the_rule_for_many_steps(length, margin, algorithm):
    recipe = R.DelayedScaling(margin, amax_history_len=length, amax_compute_algo=algorithm)
    linear = ops.BasicLinear(8, 16)
    rules = [Rule(length, top, margin, algorithm) for top in (448, 448, 57344)]
    generator = np.random.default_rng(length)
    special = [0.0, 0.0, float("nan"), float("inf"), 1e-38, 1e38, 2.0**-149]
    for step in range(60 if length < 9 else 1100):
        many = step > 50 and length > 9
        made = [
            special[generator.integers(len(special))]
            if generator.random() < 0.3
            else float(np.exp(generator.normal()))
            for _ in range(3)
        ]
        x, w, g = (np.float32(a) for a in made)
        with torch.no_grad():
            linear.weight.fill_(float(w))
        before = [rule.scale for rule in rules]
        for rule in rules:
            rule.update()
        with tt.autocast(recipe=recipe):
            y = linear(torch.full((1 if many else 4, 8), float(x), requires_grad=True))
        y.backward(torch.full_like(y, float(g)))
        del before
        for rule, amax in zip(rules, (x, w, g), strict=True):
            rule.history[0] = amax
        if many and step % 100:
            continue
        mine = torch.cat([linear.forward_scale, linear.backward_scale]).cpu()
        np.testing.assert_array_equal(mine.numpy(), [rule.scale for rule in rules])
        history = torch.cat([linear.forward_amax_history, linear.backward_amax_history], 1).cpu()
        wanted = np.stack([rule.history for rule in rules], 1)
        np.testing.assert_array_equal(history.numpy(), wanted)


def test_the_update_of_many_states_is_that_of_each():
    """The form for CUDA, which stacks the states of equal shape."""
    from tenon.torch.quantizer import delayed_update, updated

    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    for length in (1, 2, 5):
        histories = torch.rand(7, length, 2, generator=generator)
        histories[1, 0] = 0
        histories[2, 0] = float("nan")
        histories[3] = float("inf")
        scales = torch.rand(7, 2, generator=generator)
        for largest in (True, False):
            history, scale = updated(histories, scales.unsqueeze(1), 448.0 / 2, largest)
            for i in range(7):
                one, its = histories[i].clone(), scales[i].clone()
                algorithm = "max" if largest else "most_recent"
                delayed_update(one, its, "e4m3", margin=1, amax_compute_algo=algorithm)
                assert torch.equal(its, scale[i, 0])
                torch.testing.assert_close(one, history[i], rtol=0, atol=0, equal_nan=True)


def test_another_history_length_and_format():
    linear = ops.BasicLinear(8, 16)

    def step(recipe, value):
        with tt.autocast(recipe=recipe):
            y = linear(torch.full((2, 8), value, requires_grad=True))
        y.sum().backward()
        return linear.forward_amax_history[:, 0].tolist()

    for value in (1.0, 2.0, 3.0, 4.0):
        step(R.DelayedScaling(amax_history_len=4), value)
    # The oldest are dropped, and zeros are older than all.
    assert step(R.DelayedScaling(amax_history_len=3), 5.0) == [5.0, 3.0, 4.0]
    assert step(R.DelayedScaling(amax_history_len=5), 6.0) == [6.0, 0.0, 0.0, 4.0, 5.0]
    before = linear.backward_scale.clone()
    with tt.autocast(recipe=R.DelayedScaling(fp8_format=R.Format.E4M3), update="manual"):
        linear(torch.ones(2, 8))
    assert linear.backward_scale == before * (448 / 57344)


def test_a_custom_recipe_is_asked_once_for_each_tensor():
    from tenon.torch.quantizer import Float8CurrentScalingQuantizer, MXFP8Quantizer

    asked = []

    def factory(role):
        asked.append(role)
        if role.name == "head":
            return None
        if role.tensor_type == "weight":
            return MXFP8Quantizer("e4m3")
        return Float8CurrentScalingQuantizer("e4m3" if role.tensor_type == "input" else "e5m2")

    model = ops.Sequential(ops.Linear(32, 64), ops.ReLU(), ops.Linear(64, 32))
    model[2].name = "head"
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        with tt.autocast(recipe=R.CustomRecipe(factory)):
            y = model(x)
        y.sum().backward()
    types = ("input", "weight", "grad_output")
    assert asked == [R.QuantizerRole("linear", t, n) for n in ("", "head") for t in types]
    q = factory(R.QuantizerRole("linear", "weight", ""))
    w = q(model[0].weight.detach()).dequantize()
    v = factory(R.QuantizerRole("linear", "input", ""))(x.detach()).dequantize()
    want = model[2](torch.relu(torch.nn.functional.linear(v, w, model[0].bias)))
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="qfactory gave a str for QuantizerRole"):
        with tt.autocast(recipe=R.CustomRecipe(lambda role: "e4m3")):
            model(x)


def test_a_recipe_of_an_op_wins_and_a_set_quantizer_wins_over_it():
    from tenon.torch.quantizer import MXFP8Quantizer

    block = R.Float8BlockScaling()
    linear = ops.Linear(256, 64, bias=False, recipe=block)
    x = torch.randn(130, 256)
    operands = quantised(block, x, "input"), quantised(block, linear.weight.detach(), "weight").T
    for context in (tt.autocast(recipe=R.MXFP8BlockScaling()), tt.autocast(enabled=False)):
        with context:
            check_product(linear(x), *operands)
    assert "block128x128" in tt.explain(linear, x, recipe=R.MXFP8BlockScaling())
    linear.basic_ops[0].set_quantizer("forward", 1, MXFP8Quantizer("e4m3"))
    told = tt.explain(linear, x)
    assert "block128x128" not in told and "mxfp8" in told and "block1x128" in told
    linear.basic_ops[0].set_quantizer("forward", 1, None)
    assert "block128x128" in tt.explain(linear, x)


def test_calibration_computes_in_high_precision_and_collects_amax():
    torch.manual_seed(0)
    recipe = R.DelayedScaling(amax_history_len=4)
    model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    x = torch.randn(8, 32, requires_grad=True)
    want = model(x)
    wanted = torch.autograd.grad(want.square().sum(), tuple(model.parameters()))
    with tt.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = model(x)
    made = torch.autograd.grad(y.square().sum(), tuple(model.parameters()))
    torch.testing.assert_close((y, *made), (want, *wanted), rtol=1e-5, atol=1e-5)
    first, last = model[0].basic_ops[0], model[2].basic_ops[0]
    assert first.forward_amax_history[0, 0] == x.detach().abs().max()
    assert first.forward_amax_history[0, 1] == model[0].weight.detach().abs().max()
    assert (last.backward_amax_history[0] == (2 * y.detach()).abs().max()).all()
    with tt.autocast(recipe=recipe):
        model(x)
    assert first.forward_scale[0] == torch.tensor(448.0) / x.detach().abs().max()


def test_quantize_takes_the_quantizers_of_the_recipe():
    x = torch.randn(8, 64, requires_grad=True)
    model = ops.Sequential(ops.ConstantScale(2.0), ops.Quantize(True, True))
    assert torch.equal(model(x), 2 * x)
    for name in ("delayed", "current", "mxfp8"):
        recipe = RECIPES[name]
        for _ in range(2):
            x.grad = None
            with tt.autocast(recipe=recipe):
                y = model(x)
            g = torch.randn_like(y)
            y.backward(g)
        sx = sg = None
        if name == "delayed":
            sx, sg = model[1].forward_scale, torch.ones(1)
            assert sx == torch.tensor(448.0) / (2 * x.detach()).abs().max()
            sg = model[1].backward_scale
        want = quantised(recipe, 2 * x.detach(), "input", scale=sx).float()  # decoded to float32
        assert torch.equal(y.detach(), want)
        want = 2 * quantised(recipe, g, "grad_output", scale=sg)
        torch.testing.assert_close(x.grad.double(), want, rtol=1e-6, atol=0)
