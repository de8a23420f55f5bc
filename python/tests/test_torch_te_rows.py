"""The ops and the tracking rows of Transformer Engine: each has a test, on the CPU and on CUDA.

The cases compare values and gradients of every op with float64, in every dtype and under every
recipe. `ROWS` names the tests of each row; a row without a test fails.
"""

import functools
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch.ops import fused  # noqa: E402

F = torch.nn.functional
HERE = Path(__file__).resolve().parent
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
RECIPES = {
    "none": lambda: None,
    "delayed": lambda: tt.recipe.DelayedScaling(amax_history_len=8),
    "current": tt.recipe.Float8CurrentScaling,
    "mxfp8": tt.recipe.MXFP8BlockScaling,
    "block": tt.recipe.Float8BlockScaling,
}
# Bounds of |error| / |exact| as root mean squares. Plain: a few roundings to the dtype, at half a
# unit each. Recipes: an operand in e4m3 has an error of at most 2^-4 / sqrt(3) = 0.036, a gradient
# in e5m2 of 0.072. A case has up to four operands forward, and a squared activation doubles errors.
PLAIN = {"f32": 2e-6, "f16": 3e-3, "bf16": 2.5e-2}
QUANTISED = {"forward": 0.16, "backward": 0.32}


def halves(x, k=None):
    if k is None:
        return x.chunk(2, -1)
    x = x.reshape(*x.shape[:-1], -1, 2, k)
    return x[..., 0, :].flatten(-2), x[..., 1, :].flatten(-2)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def squared(x):
    return F.relu(x).square()


def clamped(x):
    a, b = halves(x)
    return quick(a.clamp(max=7.0)) * (b.clamp(-7.0, 7.0) + 1)


def situ(x):
    a, b = halves(x)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def gate(f, k=None):
    return lambda x: f(halves(x, k)[0]) * halves(x, k)[1]


UNARY = {"GELU": tanh_gelu, "GELUErf": F.gelu, "SiLU": F.silu, "ReLU": F.relu, "QGELU": quick,
         "SReLU": squared}  # fmt: skip
GATED = {"GLU": gate(torch.sigmoid), "GEGLU": gate(tanh_gelu), "SwiGLU": gate(F.silu),
         "ReGLU": gate(F.relu), "QGEGLU": gate(quick), "SReGLU": gate(squared),
         "ClampedSwiGLU": clamped, "SiTUGLU": situ}  # fmt: skip
SCALED = {"ScaledSwiGLU": gate(F.silu), "ScaledSiTUGLU": situ, "ScaledClampedQGeGLU": clamped,
          "ScaledSReLU": squared}  # fmt: skip


class Case:
    """Two linears with `middle` between them, and the same in float64."""

    def __init__(self, middle, function, cols=64, extra=None, rough=False):
        self.middle, self.function, self.cols = middle, function, cols
        self.extra, self.rough = extra, rough

    def ops(self, dtype):
        made = self.middle(dtype)
        made = made if isinstance(made, list) else [made]
        return [
            ops.BasicLinear(48, 64, dtype=dtype),
            *made,
            ops.BasicLinear(self.cols, 32, dtype=dtype),
        ]

    def reference(self, x, *rest):
        extras = rest[: 1 if self.extra else 0]
        first, *middle, last = rest[len(extras) :]
        return F.linear(self.function(F.linear(x, first), *extras, *middle), last)


class Chain(Case):
    """A whole chain, for fused ops at its ends."""

    def __init__(self, made, function, extra=None):
        super().__init__(made, function, extra=extra)

    def ops(self, dtype):
        return self.middle(dtype)

    def reference(self, x, *rest):
        return self.function(x, *rest)


CASES = {
    **{n: Case(lambda d, n=n: getattr(ops, n)(), f) for n, f in UNARY.items()},
    **{n: Case(lambda d, n=n: getattr(ops, n)(), f, 32) for n, f in GATED.items()},
    **{
        n: Case(lambda d, n=n: getattr(ops, n)(), lambda h, s, f=f: f(h) * s,
                64 if n == "ScaledSReLU" else 32, extra=(24, 1))
        for n, f in SCALED.items()
    },
    "SwiGLU interleaved": Case(
        lambda d: ops.SwiGLU(glu_interleave_size=8), gate(F.silu, 8), 32
    ),
    "ScaledSwiGLU interleaved": Case(
        lambda d: ops.ScaledSwiGLU(glu_interleave_size=32),
        lambda h, s: gate(F.silu, 32)(h) * s, 32,
        extra=(24, 1),
    ),
    "ScaledSwiGLU recomputed": Case(
        lambda d: ops.ScaledSwiGLU(activation_recompute_in_mlp=True),
        lambda h, s: gate(F.silu)(h) * s, 32, extra=(24, 1),
    ),
    "SwiGLU cached": Case(lambda d: ops.SwiGLU(cache_quantized_input=True), gate(F.silu), 32,
                          rough=True),
    "Bias": Case(lambda d: ops.Bias(64, dtype=d), lambda h, b: h + b),
    "LayerNorm": Case(
        lambda d: ops.LayerNorm(64, dtype=d), lambda h, g, b: F.layer_norm(h, (64,), g, b)
    ),
    "LayerNorm centred": Case(
        lambda d: ops.LayerNorm(64, zero_centered_gamma=True, dtype=d),
        lambda h, g, b: F.layer_norm(h, (64,), 1 + g, b),
    ),
    "RMSNorm": Case(
        lambda d: ops.RMSNorm(64, dtype=d), lambda h, g: F.rms_norm(h, (64,), g, 1e-5)
    ),
    "L2Normalization": Case(
        lambda d: ops.L2Normalization(),
        lambda h: h * torch.rsqrt(h.square().sum(-1, keepdim=True) + 1e-6),
    ),
    "ConstantScale": Case(lambda d: ops.ConstantScale(0.7), lambda h: 0.7 * h),
    "AddExtraInput": Case(lambda d: ops.AddExtraInput(), lambda h, e: h + e, extra=(24, 64)),
    "Reshape": Case(lambda d: ops.Reshape((12, 2, 64)), lambda h: h.reshape(12, 2, 64)),
    "Identity": Case(lambda d: ops.Identity(), lambda h: h),
    "Dropout": Case(lambda d: ops.Dropout(0.5).eval(), lambda h: h),
    "Quantize": Case(lambda d: ops.Quantize(), lambda h: h),
    "Activation": Case(lambda d: ops.Activation("x*tanh(x)"), lambda h: h * torch.tanh(h)),
    "BasicLinear": Chain(lambda d: [ops.BasicLinear(48, 32, dtype=d)], F.linear),
    "Linear": Chain(lambda d: [ops.Linear(48, 32, dtype=d)], F.linear),
    "ForwardLinearBiasActivation": Chain(
        lambda d: [ops.BasicLinear(48, 32, dtype=d), ops.Bias(32, dtype=d), ops.SiLU()],
        lambda x, w, b: F.silu(F.linear(x, w, b)),
    ),
    "ForwardLinearBiasAdd": Chain(
        lambda d: [ops.BasicLinear(48, 32, dtype=d), ops.Bias(32, dtype=d), ops.AddExtraInput()],
        lambda x, e, w, b: F.linear(x, w, b) + e, extra=(24, 32),
    ),
    "ForwardLinearScaleAdd": Chain(
        lambda d: [ops.BasicLinear(48, 32, dtype=d), ops.ConstantScale(0.5), ops.AddExtraInput()],
        lambda x, e, w: 0.5 * F.linear(x, w) + e, extra=(24, 32),
    ),
    "BackwardActivationBias": Chain(
        lambda d: [ops.Bias(48, dtype=d), ops.GELU(), ops.BasicLinear(48, 32, dtype=d)],
        lambda x, b, w: F.linear(tanh_gelu(x + b), w),
    ),
    "BackwardLinearScale": Chain(
        lambda d: [ops.BasicLinear(48, 32, dtype=d), ops.ConstantScale(0.5)],
        lambda x, w: 0.5 * F.linear(x, w),
    ),
    "BackwardLinearAdd": Chain(
        lambda d: [ops.MakeExtraOutput(), ops.BasicLinear(48, 32, dtype=d)],
        lambda x, w: (F.linear(x, w), x),
    ),
    "BackwardAddRMSNorm": Chain(
        lambda d: [ops.MakeExtraOutput(), ops.RMSNorm(48, dtype=d),
                   ops.BasicLinear(48, 32, dtype=d)],
        lambda x, g, w: (F.linear(F.rms_norm(x, (48,), g, 1e-5), w), x),
    ),
}  # fmt: skip


def error(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()


@functools.cache
def exact(name, dtype):
    """The case in float64: numbers, outputs and gradients."""
    torch.manual_seed(len(name))
    case, kind = CASES[name], DTYPES[dtype]
    module = ops.Sequential(*case.ops(kind))
    for p in module.parameters():
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.2)
    given = [torch.randn(24, 48).to(kind)]
    if case.extra:
        e = torch.rand(case.extra) + 0.5
        given.append(e if case.extra[1] == 1 else e.to(kind))
    state = {n: p.detach().clone() for n, p in module.named_parameters()}
    inputs = [t.double().requires_grad_() for t in (*given, *state.values())]
    outputs = case.reference(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn(t.shape).to(kind) for t in outputs]
    found = torch.autograd.grad(outputs, inputs, [g.double() for g in grads])
    return state, given, grads, [t.detach() for t in outputs], found


@pytest.mark.compiles
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_op(name, dtype, recipe):
    state, given, grads, outputs, wanted = exact(name, dtype)
    case, made = CASES[name], RECIPES[recipe]()
    module = ops.Sequential(*case.ops(DTYPES[dtype]))
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(state[n])
    inputs = [t.clone().requires_grad_() for t in given]
    with tt.autocast(enabled=made is not None, recipe=made):
        y = module(*inputs)
    y = y if isinstance(y, tuple) else (y,)
    found = torch.autograd.grad(y, [*inputs, *module.parameters()], grads)
    for a, b in zip(y, outputs, strict=True):
        bound = PLAIN[dtype] if made is None else QUANTISED["forward"]
        assert a.dtype == DTYPES[dtype] and a.shape == b.shape and error(a, b) <= bound
    for a, b, t in zip(found, wanted, [*given, *state.values()], strict=True):
        # The cached input is e4m3 whatever the recipe.
        bound = PLAIN[dtype] if made is None and not case.rough else QUANTISED["backward"]
        assert a.dtype == t.dtype and a.shape == b.shape and error(a, b) <= bound
    if made is not None:  # it is quantised indeed
        assert max(error(a, b) for a, b in zip(y, outputs, strict=True)) > 5e-3


# The public names of te.md 5.6 and 5.7. Those without a case have a test of their own.
BASIC = """GELU SiLU ReLU QGELU SReLU GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU SiTUGLU ClampedSwiGLU
ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU ScaledSReLU BasicLinear Bias Quantize LayerNorm
RMSNorm L2Normalization Dropout AddExtraInput MakeExtraOutput ConstantScale Reshape Identity
AllGather ReduceScatter AllReduce GroupedLinear Linear""".split()
FUSED = """GroupedMLP_CuTeGEMMUnary GroupedMLP_CuTeGEMMGLU UserbuffersForwardLinear
ForwardLinearBiasAdd ForwardLinearBiasActivation ForwardLinearScaleAdd UserbuffersBackwardLinear
BackwardLinearAdd BackwardLinearScale BackwardActivationBias BackwardAddRMSNorm""".split()


def test_every_public_name_has_a_case():
    elsewhere = {"MakeExtraOutput"}  # in the cases of the backward fusions
    for where, listed in ((ops, BASIC), (fused, FUSED)):
        for name in listed:
            assert hasattr(where, name)
            refused = name in ops._missing.CLASSES
            assert refused or name in CASES or name in elsewhere, name


OUT = {
    "ACT-08": "grouped ops",
    "QNT-04": "32x32 blocks",
    "QNT-07": "NVFP4",
    "FUS-06": "NVFP4",
    "OPS-09": "Userbuffers",
    "OPS-10": "grouped ops",
    "OPS-11": "torch.compile comes with the next issue",
}

# The tests of each row, as file::test without "test_" and ".py".
ROWS = {
    "ACT-01": "torch_te_rows::op torch_functional::unary",
    "ACT-02": "torch_te_rows::op torch_functional::unary",
    "ACT-03": "torch_te_rows::op torch_functional::gated",
    "ACT-04": "torch_te_rows::op torch_ops_basic::parameters_are_attributes",
    "ACT-05": "torch_te_rows::op torch_functional::gated",
    "ACT-06": "torch_te_rows::op torch_ops_basic::scaled_activations",
    "ACT-07": "torch_te_rows::op torch_ops_basic::interleaved_halves",
    "ACT-09": "torch_te_rows::op numpy_activations::unary",
    "ACT-10": "torch_te_rows::op numpy_activations::gated",
    "QNT-01": "torch_quantizer::delayed_codes_scales_and_amax torch_quantizer::delayed_update",
    "QNT-02": "torch_quantizer::current_codes_and_scales",
    "QNT-03": "torch_quantizer::mxfp8_codes_and_scales torch_quantizer::round_trip",
    "QNT-05": "numpy_quantize::swizzled_order",
    "QNT-06": "torch_quantizer::block_codes_and_scales",
    "QNT-08": "numpy_quantize::dequantize torch_quantizer::round_trip",
    "QNT-09": "torch_quantizer::quantizer_methods",
    "QNT-10": "torch_modules::is_first_microbatch",
    "QNT-11": "torch_quantizer::round_trip",
    "FUS-01": "torch_quantizer::an_activation_writes_the_same_codes",
    "FUS-02": "torch_ops_quantized::an_activation_writes_what_its_neighbours_want",
    "FUS-03": "torch_ops_quantized::an_activation_writes_what_its_neighbours_want",
    "FUS-04": "torch_ops_quantized::an_activation_writes_what_its_neighbours_want",
    "FUS-05": "torch_ops_quantized::an_activation_writes_what_its_neighbours_want",
    "FUS-07": "torch_ops_quantized::bias_gradient_in_the_same_pass",
    "FUS-08": "torch_ops_quantized::bias_gradient_in_the_same_pass "
    "torch_ops_fusion::bias_activation",
    "FUS-09": "torch_ops_quantized::bias_gradient_in_the_same_pass",
    "FUS-10": "torch_ops_fusion::bias_activation torch_jit::family",
    "FUS-11": "torch_ops_fusion::linear_bias_activation torch_te_surface::lists_of_a_longer_chain",
    "OPS-01": "torch_te_surface::context_fields_of_user_fusions torch_ops_custom::"
    "opaque_op_between_fusible_ones",
    "OPS-02": "torch_te_surface::lists_are_what_the_plan_does torch_ops_custom::user_fusions",
    "OPS-03": "torch_te_surface::plain_modules_inside torch_ops_sequential::channels",
    "OPS-04": "torch_channels::a_residual_and_two_readers_of_one_channel",
    "OPS-05": "examples::losses_and_resuming torch_te_rows::op",
    "OPS-06": "torch_ops_custom::user_fusions torch_te_surface::joint_fusions_next_to_plans",
    "OPS-07": "torch_te_rows::op torch_te_rows::every_public_name_has_a_case",
    "OPS-08": "torch_te_surface::named_fusions_by_hand torch_te_rows::op",
    "OPS-12": "torch_ops_fusion::bias_activation torch_te_surface::chains_of_named_fusions",
    "OPS-13": "torch_modules::is_first_microbatch",
    "LIN-01": "torch_te_rows::op torch_ops_basic::linear",
    "LIN-02": "torch_ops_fusion::linear_bias_activation_by_hand torch_te_surface::"
    "named_fusions_by_hand",
    "LIN-03": "torch_ops_basic::main_grad torch_te_surface::main_grad_in_fused_backward",
    "LIN-04": "torch_te_rows::backward_override",
    "JIT-01": "torch_jit::family torch_jit::l2normalization torch_jit::bias_dropout_add",
    "JIT-02": "torch_jit::family",
    "JIT-03": "torch_jit::warmups_leave_the_random_state_alone torch_jit::"
    "no_torch_dynamo_under_torch_compile",
    "MEM-01": "torch_ops_quantized::cache_quantized_input torch_te_surface::"
    "cached_input_is_an_encoding_and_only_for_gradients",
    "MEM-02": "torch_te_rows::saved_tensors_on_the_host",
}
COUNTS = {"ACT": 10, "QNT": 11, "FUS": 11, "OPS": 13, "LIN": 4, "JIT": 3, "MEM": 2}


@pytest.mark.parametrize("row", [f"{k}-{i:02}" for k, n in COUNTS.items() for i in range(1, n + 1)])
def test_row_has_a_test(row):
    assert (row in ROWS) != (row in OUT), f"{row}: name its tests in ROWS"
    for name in ROWS.get(row, "").split():
        file, _, test = name.partition("::")
        text = (HERE / f"test_{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def test_{test}\(", text, re.M), f"{row}: {name} is no test"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "block"])
@pytest.mark.parametrize("how", ["high_precision", "dequantized"])
def test_backward_override(how, recipe, dtype):
    """LIN-04: gradients from operands in high precision, or from the decoded codes."""
    kind = DTYPES[dtype]
    linear = ops.BasicLinear(64, 32, dtype=kind)
    x, g = torch.randn(32, 64).to(kind), torch.randn(32, 32).to(kind)
    made = type(RECIPES[recipe]())(backward_override=how)
    a = x.clone().requires_grad_()
    with tt.autocast(recipe=made):
        y = ops.Sequential(linear)(a)
    dx, dw = torch.autograd.grad(y, [a, linear.weight], g)
    assert 5e-3 < error(y, F.linear(x.double(), linear.weight.detach().double())) < 0.16
    exact_dx, exact_dw = g.double() @ linear.weight.detach().double(), g.double().T @ x.double()
    for found, wanted in ((dx, exact_dx), (dw, exact_dw)):
        if how == "high_precision":
            assert error(found, wanted) <= PLAIN[dtype]
        else:  # one operand has the error of a code, the gradient has none
            assert 5e-3 < error(found, wanted) < 0.06


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_tensors_on_the_host(recipe):
    """MEM-02: offloading is torch's saved-tensor hooks, with the same bits."""
    made = RECIPES[recipe]()
    results = []
    for context in (torch.autograd.graph.save_on_cpu, None):
        torch.manual_seed(0)
        module = ops.Sequential(
            ops.RMSNorm(64), ops.Linear(64, 64), ops.SwiGLU(), ops.Linear(32, 64)
        )
        x = torch.randn(32, 64).requires_grad_()
        with tt.autocast(enabled=made is not None, recipe=made):
            if context is None:
                y = module(x)
            else:
                with context():
                    y = module(x)
        y.sum().backward()
        results.append([y, x.grad, *[p.grad for p in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
