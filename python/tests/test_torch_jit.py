"""Tests of tenon.torch.jit against torch in float64, and of the compilation decisions."""

import functools
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
import tenon.torch.functional as F  # noqa: E402
import torch.nn.functional as nn  # noqa: E402
from tenon.torch import jit  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
REFERENCE = {
    "gelu": functools.partial(nn.gelu, approximate="tanh"),
    "silu": nn.silu,
    "relu": nn.relu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "srelu": lambda x: nn.relu(x) ** 2,
}
SHAPES = [(9,), (5, 9), (2, 3, 9), (2, 1, 3, 9), (0, 9)]


def close(got, expected, dtype):
    assert got.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
    )


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def wide(t):
    return t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t


@pytest.mark.compiles
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REFERENCE)
def test_family(name, dtype, shape):
    torch.manual_seed(0)
    x, bias, g = leaf(*shape, dtype=dtype), leaf(9, dtype=dtype), torch.randn(shape).to(dtype)
    x64, bias64 = wide(x), wide(bias)
    expected = REFERENCE[name](x64 + bias64)
    expected.backward(g.double())

    for suffix in ("_fused_", "_fused"):
        y = getattr(jit, f"bias_{name}{suffix}")(x, bias)
        close(y, expected, dtype)
        x.grad = bias.grad = None
        y.backward(g)
        close(x.grad, x64.grad, dtype)
        close(bias.grad, bias64.grad, dtype)
        dbias, dx = getattr(jit, f"bgrad_d{name}{suffix}")(g, x.detach(), bias.detach())
        assert torch.equal(dx, x.grad) and torch.equal(dbias, bias.grad)

        plain = getattr(jit, f"{name}{suffix}")(x)
        close(plain, REFERENCE[name](x64), dtype)
        x.grad = None
        plain.backward(g)
        assert torch.equal(getattr(jit, f"d{name}{suffix}")(g, x.detach()), x.grad)


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("bias", [None, torch.empty(0)], ids=["None", "empty"])
def test_no_bias(name, bias):
    x, g = torch.randn(3, 5), torch.randn(3, 5)
    plain = getattr(jit, f"{name}_fused_")(x)
    assert torch.equal(getattr(jit, f"bias_{name}_fused")(x, bias), plain)
    dbias, dx = getattr(jit, f"bgrad_d{name}_fused")(g, x, bias)
    assert dbias is None and torch.equal(dx, getattr(jit, f"d{name}_fused_")(g, x))


def test_gradient_functions_are_not_differentiable():
    x, g = leaf(3, 5), torch.randn(3, 5)
    with pytest.raises(NotImplementedError, match="dgelu.*second derivative"):
        jit.dgelu_fused_(g, x).sum().backward()
    with pytest.raises(NotImplementedError, match="bgrad_dsilu"):
        jit.bgrad_dsilu_fused_(g, x, torch.ones(5))[1].sum().backward()


@pytest.mark.compiles
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2normalization(dtype, shape):
    x, g, eps = leaf(*shape, dtype=dtype), torch.randn(shape).to(dtype), 1e-3
    x64 = wide(x)
    r64 = torch.rsqrt((x64 * x64).sum(-1, keepdim=True) + eps)
    (x64 * r64).backward(g.double())
    y = jit.l2normalization_fused_(x, eps)
    close(y, x64 * r64, dtype)
    again, r = jit.l2normalization_fwd_fused_(x, eps)
    assert torch.equal(again, y) and r.dtype == torch.float32 and not r.requires_grad
    close(r, r64, torch.float32)
    y.backward(g)
    close(x.grad, x64.grad, dtype)
    dx = jit.l2normalization_backward_fused_(g, x.detach(), r, eps)
    assert torch.equal(dx, x.grad)
    assert torch.equal(jit.l2normalization_fused(x, eps), y)


def test_bias_dropout_add():
    x, bias, residual = leaf(6, 40), leaf(40), leaf(6, 40)
    torch.manual_seed(3)
    kept = F.dropout(torch.ones(6, 40), 0.1)
    for call in (
        jit.get_bias_dropout_add(True),
        jit.bias_dropout_add_fused_train_,
        jit.bias_dropout_add_fused_train,
        lambda *a: jit.bias_dropout_add(*a, True),
    ):
        torch.manual_seed(3)
        y = call(x, bias, residual, 0.1)
        close(y, residual + (x + bias) * kept, torch.float32)
    y.sum().backward()
    close(x.grad, kept, torch.float32)
    close(bias.grad, kept.sum(0), torch.float32)
    for call in (
        jit.get_bias_dropout_add(False),
        jit.bias_dropout_add_fused_inference_,
        jit.bias_dropout_add_fused_inference,
    ):
        close(call(x, bias, residual, 0.1), residual + x + bias, torch.float32)
        close(call(x, None, residual, 0.1), residual + x, torch.float32)
    with torch.no_grad():
        assert jit.bias_dropout_add_fused_train(x, bias, residual, 0.1).requires_grad
        assert not jit.bias_dropout_add_fused_train_(x, bias, residual, 0.1).requires_grad


def test_warmups_leave_the_random_state_alone():
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    jit.set_jit_fusion_options()
    jit.warmup_jit_bias_dropout_add(8, torch.float32, 2, 3)
    jit.warmup_jit_bias_dropout_add_all_dtypes(8, 2, 3)
    jit.warmup_jit_bias_gelu(8, torch.float32, 2, 3)
    jit.warmup_jit_bias_gelu_all_dtypes(8, 2, 3)
    jit.warmup_jit_l2normalization(8, torch.float32, 2, 3)
    jit.warmup_jit_l2normalization_all_dtypes(8, 2, 3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_name_is_documented():
    for name in jit.__all__:
        assert getattr(jit, name).__doc__, name
    assert "gelu'(inp + bias)" in jit.bgrad_dgelu_fused_.__doc__
    assert jit.bias_silu_fused_.__name__ == "bias_silu_fused_"


# Functions that become one kernel.


def bias_gelu(x, bias):
    return nn.gelu(x + bias)


def bias_gelu_tanh(x, bias):
    return nn.gelu(x + bias, approximate="tanh")


def transformer_engine_gelu(x, bias):
    x = x + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def branches(x, bias):
    return torch.where(x > bias, torch.exp(-x * x), torch.sigmoid(bias) / (1 + x.abs()))


def words(x, bias):
    y = torch.expm1(x * 0.1) + torch.log1p(x * x) - torch.erf(bias) + torch.erfc(x)
    return y * torch.rsqrt(bias * bias + 1) + torch.sqrt(x * x + 1) + (x * x + 2).log()


def bounds(x, bias):
    bias = bias + 0.0123  # avoids ties: torch would split the gradient
    return torch.maximum(x, bias) + torch.minimum(x, bias).clamp(-1.0, 0.5) + x.clamp(min=0.3)


def powers(x, bias):
    return x**2 + x.pow(3) + (bias * bias + 1) ** 0.5 + (x * x + 1) ** -0.5 + 1 / (2 + x.square())


def activations(x, bias):
    y = nn.silu(x) + nn.relu(bias) + nn.softplus(x) + nn.mish(x) + nn.hardswish(bias)
    return y + nn.elu(x, 0.5) + nn.leaky_relu(x, 0.2) + torch.tanh(x) + x.sigmoid() + nn.elu(x)


def methods(x, bias):
    y = x.add(bias, alpha=2).sub(1).mul(x).div(3).neg()
    return torch.add(y, bias).tanh() + torch.mul(2, x) - (3 - x) + nn.dropout(x, 0.5, False)


KERNELS = (
    bias_gelu,
    bias_gelu_tanh,
    transformer_engine_gelu,
    branches,
    words,
    bounds,
    powers,
    activations,
    methods,
)


@pytest.mark.compiles
@pytest.mark.parametrize("shapes", [((9,), (9,)), ((4, 9), (9,)), ((2, 3, 9), (2, 3, 1)),
                                    ((2, 3, 9), ()), ((2, 3, 9), (3, 1)), ((2, 1, 3, 9), (1, 9)),
                                    ((5, 1), (9,)), ((0, 9), (9,))], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.__name__)
def test_one_kernel(function, dtype, shapes):
    torch.manual_seed(5)
    fused = jit.jit_fuser(function)
    assert fused.how == "deferred" and fused.__name__ == function.__name__
    inputs = [leaf(*s, dtype=dtype) for s in shapes]
    wides = [wide(t) for t in inputs]
    y, expected = fused(*inputs), function(*wides)
    assert fused.how.startswith("tenon: "), fused.how
    assert y.dtype == dtype
    close(y, expected, dtype)
    g = torch.randn(y.shape).to(dtype)
    y.backward(g)
    expected.backward(g.double())
    for t, w in zip(inputs, wides, strict=True):
        if w.grad is None:  # only used in comparisons
            assert not t.grad.any()
        else:
            close(t.grad, w.grad, dtype)


def test_strided_arguments_and_needed_gradients():
    fused = jit.lazy_compile(bias_gelu)
    x = torch.randn(6, 4, 10)
    for view in (x.permute(2, 1, 0), x[..., 1:7], x[::2], x[..., ::3]):
        bias = leaf(view.shape[-1])
        y = fused(view, bias)
        close(y, nn.gelu(view.double() + bias.double()), torch.float32)
        y.sum().backward()
        assert bias.grad.shape == bias.shape
    with torch.no_grad():
        assert fused(x, torch.ones(10)).grad_fn is None


def test_dtypes_are_those_of_torch():
    def mixed(x, y):
        return x * y

    def narrow(x):
        return (x.float() * 1.001).to(x.dtype) * 3

    x, y = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    fused = jit.jit_fuser(mixed)
    assert fused(x, y).dtype == torch.float32 and fused(x, x).dtype == torch.bfloat16
    fused = jit.jit_fuser(narrow)
    assert torch.equal(fused(x), narrow(x))
    assert "round(x0*1.001, bf16)" in fused.how


def test_numbers_defaults_and_keywords():
    def scaled(x, factor, *, offset=1.0, exact=True):
        y = nn.gelu(x) if exact else nn.silu(x)
        return factor * y + offset

    fused = jit.jit_fuser(scaled)
    x = torch.randn(3, 4)
    for arguments in ({}, {"exact": False}, {"offset": -2.5}):
        close(fused(x, 2.0, **arguments), scaled(x.double(), 2.0, **arguments), torch.float32)
        assert fused.how.startswith("tenon: ")
    with pytest.raises(TypeError, match="factor"):
        fused(x)


def test_second_derivatives_of_kernels_are_refused():
    x = leaf(3, 4)
    fused = jit.jit_fuser(bias_gelu)
    (dx,) = torch.autograd.grad(fused(x, torch.ones(4)).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="bias_gelu.*second derivative"):
        dx.sum().backward()


# Functions that do not become one kernel.


def softmax(x):
    return torch.softmax(x, -1)


def branching(x):
    return x * 2 if x.sum() > 0 else x


def in_place(x):
    x += 1
    return x


def two_results(x):
    return x + 1, x + 2


CAPTURED = torch.ones(4)


def captures(x):
    return x + CAPTURED


def drops(x):
    return nn.dropout(x, 0.5, True)


def long(x):
    for _ in range(13):
        x = x * x + x
    return x


@pytest.fixture
def compiled(monkeypatch):
    """Replaces torch.compile and records its calls."""
    seen = []

    def fake(function, **options):
        seen.append(function)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    return seen


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (softmax, "softmax"),
        (branching, "sum"),
        (in_place, "writes into"),
        (two_results, "returns a tuple"),
        (captures, "no argument"),
        (drops, "dropout"),
        (long, "bytes"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_other_functions_go_to_torch_compile(compiled, function, why):
    x = torch.randn(3, 4)
    fused = jit.dropout_fuser(function)
    torch.manual_seed(2)
    got = fused(x.clone())
    torch.manual_seed(2)
    expected = function(x.clone())
    assert compiled == [function]
    assert fused.how.startswith("torch.compile: ") and why in fused.how
    torch.testing.assert_close(got, expected, equal_nan=True)
    fused(x.clone())
    assert compiled == [function]  # compiled once


def test_arguments_that_no_kernel_takes(compiled):
    fused = jit.jit_fuser(bias_gelu)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(fused(x, x), bias_gelu(x, x)) and "float64" in fused.how
    y = torch.randn(3, 4)
    close(fused(y, y), bias_gelu(y, y), torch.float32)  # another signature has its own decision
    assert fused.how.startswith("tenon: ")


def test_a_failing_compiler_means_a_plain_call(monkeypatch):
    def broken(function, **options):
        def call(*arguments):
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    fused = jit.jit_fuser(softmax)
    x = torch.randn(3, 4)
    assert torch.equal(fused(x), softmax(x))
    assert fused.how.startswith("plain: ") and "RuntimeError" in fused.how
    assert torch.equal(fused(x), softmax(x))


def test_switched_off(monkeypatch, compiled):
    monkeypatch.setenv("TENON_JIT", "0")
    for function, x in ((softmax, torch.randn(3, 4)), (nn.silu, torch.randn(3, 4))):
        fused = jit.jit_fuser(function)
        assert torch.equal(fused(x), function(x))
        assert fused.how == "plain: TENON_JIT=0"
    assert compiled == []


def test_mistakes_of_the_caller_are_torchs_own(compiled):
    fused = jit.jit_fuser(bias_gelu)
    with pytest.raises(RuntimeError, match="size"):
        fused(torch.ones(3, 4), torch.ones(5))
    close(fused(torch.ones(3, 4), torch.ones(4)), nn.gelu(torch.full((3, 4), 2.0)), torch.float32)


def test_onnx_export_sees_the_function_itself(monkeypatch):
    calls = []

    def plain(x):
        calls.append(type(x))
        return x * 2

    fused, apart = jit.jit_fuser(plain), jit.no_torch_dynamo(plain)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    x = torch.ones(2)
    assert torch.equal(fused(x), x * 2) and fused.how == "deferred"
    assert torch.equal(apart(x), x * 2) and calls == [torch.Tensor] * 2


def test_importing_jit_does_not_load_dynamo():
    import subprocess

    code = "import sys, tenon.torch.jit; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_torch_dynamo_under_torch_compile():
    inside = []

    @jit.no_torch_dynamo
    def bare(x):
        inside.append(("bare", torch.compiler.is_compiling()))
        return x * 2

    @jit.no_torch_dynamo(recursive=False)
    def factory(x):
        inside.append(("factory", torch.compiler.is_compiling()))
        return x * 3

    @jit.no_torch_dynamo(when=lambda a: "many rows" if a["x"].shape[0] > 2 else None)
    def sometimes(x, k=1):
        return x * 4

    def function(x):
        return sometimes(factory(bare(x + 1))) + 1

    assert bare.__name__ == "bare"
    x = torch.randn(2, 3)
    torch.testing.assert_close(sometimes(x), x * 4)
    run = torch.compile(function, backend="eager")
    torch.testing.assert_close(run(x), (x + 1) * 24 + 1)
    assert inside == [("bare", False), ("factory", False)]
    with pytest.warns(UserWarning, match="sometimes is not compiled: many rows"):
        run(torch.randn(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(torch.randn(5, 3))
    with pytest.raises(TypeError, match="args"):

        @jit.no_torch_dynamo(when=lambda a: None)
        def any_number(*args):
            return args

    assert torch.equal(jit.no_torch_dynamo(False)(lambda x: x)(x), x)


def test_a_fused_function_inside_torch_compile_is_inlined():
    fused = jit.jit_fuser(bias_gelu)
    run = torch.compile(lambda x, b: fused(x * 2, b), backend="eager")
    x, b = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(run(x, b), bias_gelu(x * 2, b))


FACTOR = 2.0


def test_numbers_from_outside():
    global FACTOR
    inside = 3.0
    f = jit.jit_fuser(lambda x: torch.tanh(x) * FACTOR)
    g = jit.jit_fuser(lambda x: torch.tanh(x) * inside)
    x = torch.randn(4, 8)
    y = torch.tanh(x)
    torch.testing.assert_close(f(x), 2 * y)
    torch.testing.assert_close(g(x), 3 * y)
    FACTOR, inside = 4.0, 5.0
    torch.testing.assert_close(f(x), 4 * y)
    torch.testing.assert_close(g(x), 5 * y)


def test_constants_with_signs_and_clamps():
    f = jit.jit_fuser(lambda x, c: x * c)
    x = torch.ones(4)
    assert not f(x, 0.0).signbit().any() and f(x, -0.0).signbit().all()
    g = jit.jit_fuser(lambda x: torch.clamp(x, 3.0, 1.0))
    torch.testing.assert_close(g(x), torch.clamp(x, 3.0, 1.0))


def test_numbers_in_tensors_have_no_say_in_dtypes():
    f = jit.jit_fuser(lambda x, s: x * s)
    x, s = torch.ones(4, dtype=torch.bfloat16), torch.tensor(2.0)
    assert f(x, s).dtype == torch.bfloat16
