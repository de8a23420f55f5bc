"""Tests of every basic op against plain torch in float64: values and gradients."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import tenon  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402

F = torch.nn.functional
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Values have one rounding. Gradients of f16 and bf16 inputs too.
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def gelu(x):
    return F.gelu(x, approximate="tanh")


def srelu(x):
    return F.relu(x) ** 2


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def halves(x, k=None):
    if k is None:
        return x.chunk(2, dim=-1)
    blocks = x.reshape(*x.shape[:-1], -1, 2, k)
    half = (*x.shape[:-1], x.shape[-1] // 2)
    return blocks[..., 0, :].reshape(half), blocks[..., 1, :].reshape(half)


def gate(f, linear=lambda b: b):
    def gated(x, k=None):
        a, b = halves(x, k)
        return f(a) * linear(b)

    return gated


def clamped(limit=7.0, alpha=1.702, offset=1.0):
    def silu(a):
        w = torch.clamp(a, max=limit)
        return w * torch.sigmoid(alpha * w)

    return gate(silu, lambda b: torch.clamp(b, -limit, limit) + offset)


def situ(beta1=4.0, beta2=25.0):
    return gate(
        lambda a: beta1 * torch.tanh(a / beta1) * torch.sigmoid(a),
        lambda b: beta2 * torch.tanh(b / beta2),
    )


ACTIVATIONS = {
    "GELU": ({}, gelu),
    "GELUErf": ({}, F.gelu),
    "SiLU": ({}, F.silu),
    "QGELU": ({}, qgelu),
    "ReLU": ({}, F.relu),
    "SReLU": ({}, srelu),
    "GLU": ({}, gate(torch.sigmoid)),
    "GEGLU": ({}, gate(gelu)),
    "SwiGLU": ({}, gate(F.silu)),
    "ReGLU": ({}, gate(F.relu)),
    "QGEGLU": ({}, gate(qgelu)),
    "SReGLU": ({}, gate(srelu)),
    "ClampedSwiGLU": (
        {"limit": 0.75, "alpha": 1.5, "glu_linear_offset": 0.5},
        clamped(0.75, 1.5, 0.5),
    ),
    "SiTUGLU": ({"beta1": 2.0, "beta2": 3.0}, situ(2.0, 3.0)),
}
SCALED = {
    "ScaledSwiGLU": ({}, gate(F.silu)),
    "ScaledClampedQGeGLU": ({"limit": 2.0}, clamped(2.0)),
    "ScaledSiTUGLU": ({}, situ()),
    "ScaledSReLU": ({}, srelu),
}
SHAPES = [(38,), (3, 14), (2, 5, 6), (2, 1, 3, 34), (0, 6), (2, 0, 4)]


def data(shape, dtype, seed=0, grad=True):
    x = torch.randn(
        shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    ).to(dtype)
    return x.requires_grad_(grad)


def double(x):
    return x.detach().double().requires_grad_(x.requires_grad)


def close(actual, expected, dtype, factor=1.0):
    assert actual.shape == expected.shape
    tolerance = {k: v * factor for k, v in TOLERANCE[dtype].items()}
    torch.testing.assert_close(actual.double(), expected.double(), **tolerance)


def check(op, reference, x, *extra, factor=1.0):
    """Compares values, dtype, and the gradients of x, extra inputs and parameters."""
    y = op(x, *extra)
    x64, extra64 = double(x), [double(e) for e in extra]
    parameters = {n: double(p) for n, p in op.named_parameters()}
    y64 = reference(x64, *extra64, **{n.rpartition(".")[2]: p for n, p in parameters.items()})
    assert y.dtype == x.dtype
    close(y, y64, x.dtype, factor)
    g = data(y.shape, y.dtype, 7, grad=False)
    y.backward(g)
    y64.backward(g.double())
    for actual, expected in [(x, x64), *zip(extra, extra64, strict=False)]:
        if expected.grad is None:
            assert actual.grad is None
        else:
            assert actual.grad.dtype == actual.dtype
            close(actual.grad, expected.grad, x.dtype, factor)
    for name, p in op.named_parameters():
        close(p.grad, parameters[name].grad, x.dtype, factor * 4)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, shape, dtype):
    options, reference = ACTIVATIONS[name]
    check(getattr(ops, name)(**options), reference, data(shape, dtype))


@pytest.mark.parametrize("name", ["GELU", "SwiGLU", "ClampedSwiGLU"])
def test_activations_of_strided_inputs(name):
    options, reference = ACTIVATIONS[name]
    op = getattr(ops, name)(**options)
    base = torch.randn(6, 5, 8)
    for x in (base[:, :, :6], base.transpose(0, 1), base[::2], base.permute(2, 1, 0), base[0].t(),
              base[:1, :1].expand(3, 4, 8)):  # fmt: skip
        x = x.detach()
        if x.shape[-1] % 2:
            x = x[..., :-1]
        leaf = torch.empty(0).set_(x).requires_grad_()
        assert leaf.stride() == x.stride()
        expected = double(x)
        expected.requires_grad_()
        y, y64 = op(leaf), reference(expected)
        close(y, y64, torch.float32)
        (grad,) = torch.autograd.grad(y.sum(), leaf)  # an expanded gradient
        (grad64,) = torch.autograd.grad(y64.sum(), expected)
        close(grad, grad64, torch.float32)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", ["SwiGLU", "ClampedSwiGLU", "SiTUGLU"])
def test_interleaved_halves(name, k):
    options, reference = ACTIVATIONS[name]
    op = getattr(ops, name)(glu_interleave_size=k, **options)
    check(op, lambda x: reference(x, k), data((3, 16), torch.float32))


@pytest.mark.compiles
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 8), (0, 4)])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations(name, shape, dtype, scale_dtype):
    options, reference = SCALED[name]
    x, s = data(shape, dtype), data(shape[:-1], scale_dtype, 1)
    op = getattr(ops, name)(**options)
    y = op(x, s)
    x64, s64 = double(x), double(s)
    y64 = reference(x64) * s64.unsqueeze(-1)
    close(y, y64, dtype)
    y.sum().backward()
    y64.sum().backward()
    close(x.grad, x64.grad, dtype)
    assert s.grad.dtype == scale_dtype
    close(s.grad, s64.grad, scale_dtype if scale_dtype != torch.float32 else dtype, 4)


def test_scaled_activation_without_gradient_of_scales():
    x, s = data((4, 6), torch.float32), torch.rand(4)
    ops.ScaledSReLU()(x, s).sum().backward()
    x64 = double(x)
    (srelu(x64) * s.double().unsqueeze(-1)).sum().backward()
    close(x.grad, x64.grad, torch.float32)
    x, s = data((4, 6), torch.float32, grad=False), torch.rand(4, 1).requires_grad_()
    ops.ScaledSReLU()(x, s).sum().backward()
    assert s.grad.shape == (4, 1)


def test_activations_of_ones_own():
    tenon.define("torch_ops_test_act", "x*sigmoid(beta*x); beta = 1.5")

    def soft(x, beta=1.5):
        return x * tenon.sigmoid(beta * x)

    x = data((4, 6), torch.float32)
    for act in ("torch_ops_test_act", "x*sigmoid(beta*x); beta = 1.5", soft):
        check(ops.Activation(act), lambda v: v * torch.sigmoid(1.5 * v), data((4, 6), x.dtype))
        op = ops.Activation(act, beta=0.5)
        assert op.beta == 0.5
        check(op, lambda v: v * torch.sigmoid(0.5 * v), data((4, 6), x.dtype))
    check(ops.Activation("mish"), F.mish, data((4, 6), x.dtype))
    check(ops.Activation("gated(mish)"), gate(F.mish), data((4, 6), x.dtype))
    check(ops.Activation("elu", alpha=0.5), lambda v: F.elu(v, 0.5), data((4, 6), x.dtype))
    check(ops.Activation("a*tanh(b)", glu_interleave_size=1),
          lambda v: v[..., ::2] * torch.tanh(v[..., 1::2]), data((4, 6), x.dtype))  # fmt: skip
    s = torch.rand(4).requires_grad_()
    check(ops.ScaledActivation("mish"), lambda v, u: F.mish(v) * u.unsqueeze(-1),
          data((4, 6), x.dtype), s)  # fmt: skip


def test_parameters_are_attributes():
    op = ops.ClampedSwiGLU(limit=5.0)
    assert (op.limit, op.glu_linear_offset, op.offset) == (5.0, 1.0, 1.0)
    op.limit = 0.5
    check(op, clamped(0.5), data((3, 8), torch.float32))
    with pytest.raises(ValueError, match="limit"):
        op.limit = -1.0
    assert op.limit == 0.5
    assert "limit=0.5" in repr(op)
    with pytest.raises(AttributeError):
        _ = op.beta1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (2, 2, 2, 6), (0, 6)])
def test_bias(shape, dtype):
    op = ops.Bias(6, dtype=dtype)
    torch.nn.init.normal_(op.bias)
    check(op, lambda x, bias: x + bias, data(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (2, 2, 2, 6), (0, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, dtype, bias):
    torch.manual_seed(3)
    op = ops.Linear(6, 5, bias=bias, dtype=dtype)
    if bias:
        torch.nn.init.normal_(op.bias)
    check(op, lambda x, weight, bias=None: F.linear(x, weight, bias), data(shape, dtype), factor=2)
    basic = ops.BasicLinear(6, 5, dtype=dtype)
    check(basic, lambda x, weight: F.linear(x, weight), data(shape, dtype), factor=2)


def test_linear_is_a_linear():
    torch.manual_seed(0)
    given = torch.nn.Linear(4, 3)
    op = ops.Linear(4, 3)
    assert list(op.state_dict()) == ["weight", "bias"]
    op.load_state_dict(given.state_dict())
    x = torch.randn(2, 4)
    torch.testing.assert_close(op(x), given(x))
    op.weight = torch.nn.Parameter(torch.ones(3, 4))
    assert op.basic_ops[0].weight is op.weight and len(list(op.parameters())) == 2
    with pytest.raises(ValueError, match="bias"):
        op.bias = None
    bound = 1 / math.sqrt(64)
    weight = ops.BasicLinear(64, 64).weight
    assert weight.abs().max() <= bound and weight.abs().max() > 0.9 * bound


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (-1, ValueError, "in_features=-1; it must be at least 1"),
        (0, ValueError, "in_features=0"),
        (4.5, TypeError, "in_features=4.5; it must be a whole number"),
        ("4", TypeError, "in_features='4'"),
        (True, TypeError, "in_features=True"),
    ],
)
def test_widths_of_a_linear(size, error, match):
    with pytest.raises(error, match=match):
        ops.Linear(size, 4)


def test_what_a_constant_scale_is():
    with pytest.raises(TypeError, match="scale='a'; it must be a number"):
        ops.ConstantScale("a")
    with pytest.raises(ValueError, match="it must be one number"):
        ops.ConstantScale(torch.ones(2))
    x = torch.randn(2, 4)
    torch.testing.assert_close(ops.ConstantScale(torch.tensor(2.0))(x), 2 * x)


@pytest.mark.parametrize(
    ("main_grad", "error", "match"),
    [
        (torch.ones(2, 3, 4), ValueError, r"\(2, 3, 4\); it must be the weight's, \(3, 4\)"),
        (torch.ones(12), ValueError, r"shape \(12,\)"),
        (torch.ones(3, 4, dtype=torch.int32), TypeError, "main_grad is torch.int32"),
        ("here", TypeError, "main_grad is str"),
    ],
    ids=str,
)
def test_main_grads_that_do_not_fit(main_grad, error, match):
    for model in (
        ops.BasicLinear(4, 3, accumulate_into_main_grad=True),
        ops.Sequential(ops.Linear(4, 3, accumulate_into_main_grad=True), ops.GELU()),
    ):
        next(model.parameters()).main_grad = main_grad
        with pytest.raises(error, match=match):
            model(torch.randn(2, 4)).sum().backward()


def test_main_grad():
    op = ops.BasicLinear(4, 3, accumulate_into_main_grad=True)
    with pytest.raises(RuntimeError, match="main_grad"):
        op(torch.randn(2, 4)).sum().backward()
    op.weight.main_grad = torch.ones(3, 4)
    op.weight.grad_added_to_main_grad = False
    x = torch.randn(2, 4)
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.main_grad, 1 + x.sum(0).expand(3, 4))
    assert op.weight.grad is None and op.weight.grad_added_to_main_grad
    op.weight.overwrite_main_grad = True
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.main_grad, x.sum(0).expand(3, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_ops(dtype):
    shape = (3, 2, 6)
    check(ops.ConstantScale(0.375), lambda x: 0.375 * x, data(shape, dtype))
    check(ops.Identity(), lambda x: x * 1, data(shape, dtype))
    check(ops.Reshape(6, -1), lambda x: x.reshape(6, -1), data(shape, dtype))
    check(ops.Reshape((3, 12)), lambda x: x.reshape(3, 12), data(shape, dtype))
    check(ops.Quantize(), lambda x: x * 1, data(shape, dtype))
    check(ops.AddExtraInput(), lambda x, e: x + e, data(shape, dtype), data(shape, dtype, 5))
    for case in (shape, (7,), (2, 3), (0, 4), (2, 2, 2, 3)):
        x = data(case, dtype)
        check(ops.L2Normalization(eps=1e-3),
              lambda v: v * torch.rsqrt((v * v).sum(-1, keepdim=True) + 1e-3), x)  # fmt: skip


def layer_norm(x, weight, bias, eps=1e-5, axes=(-1,)):
    x = x - x.mean(axes, keepdim=True)
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + eps) * weight + bias


def rms_norm(x, weight, eps=1e-5, axes=(-1,)):
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
def test_norms(centered, dtype):
    for kind, f in ((ops.LayerNorm, layer_norm), (ops.RMSNorm, rms_norm)):
        for shape in ((5, 16), (16,), (2, 3, 16), (300, 16), (0, 16)):
            for of_weights in (dtype, torch.float32):
                op = kind(16, eps=1e-3, zero_centered_gamma=centered, dtype=of_weights)
                assert all(p[0].item() == (n == "weight" and not centered)
                           for n, p in op.named_parameters())  # fmt: skip
                for p in op.parameters():
                    torch.nn.init.uniform_(p, 0.5, 1.5)

                def reference(x, weight, f=f, **rest):
                    return f(x, weight + centered, eps=1e-3, **rest)

                check(op, reference, data(shape, dtype), factor=4)


def test_norms_over_several_dimensions():
    for kind, f in ((ops.LayerNorm, layer_norm), (ops.RMSNorm, rms_norm)):
        op = kind((3, 8))
        torch.nn.init.normal_(op.weight)
        x = data((4, 3, 8), torch.float32)
        check(op, lambda x, f=f, **p: f(x, axes=(-2, -1), **p), x, factor=4)
        op.zero_grad()
        wide = torch.randn(8, 3, 4).permute(2, 1, 0).requires_grad_()
        check(op, lambda x, f=f, **p: f(x, axes=(-2, -1), **p), wide, factor=8)


def test_what_norms_save_and_frozen_weights():
    x, g = torch.randn(5, 8), torch.randn(5, 8)
    for kind, f, count in ((ops.LayerNorm, layer_norm, 3), (ops.RMSNorm, rms_norm, 2)):
        for frozen in range(4):
            op = kind(8)
            for i, p in enumerate(op.parameters()):
                p.requires_grad_(not frozen >> i & 1)
            for input_grad in (True, False):
                ctx = ops.OperationContext()
                ctx.input_requires_grad = input_grad
                op.op_forward(ctx, x)
                assert len(ctx.saved_tensors) == count and ctx.saved_tensors[0] is x
                r = ctx.saved_tensors[-1].double()
                x64 = double(x).requires_grad_()
                centre = x64.mean(-1) if kind is ops.LayerNorm else torch.zeros(5).double()
                variance = (x64 - centre[:, None]).square().mean(-1)
                close(r, torch.rsqrt(variance + 1e-5).detach(), torch.float32)
                if count == 3:
                    close(ctx.saved_tensors[1], centre.detach(), torch.float32)
                parameters = {n: double(p) for n, p in op.named_parameters()}
                f(x64, **parameters).backward(g.double())
                dx, grads = op.op_backward(ctx, g)
                assert (dx is not None) == input_grad
                if input_grad:
                    close(dx, x64.grad, torch.float32, 4)
                for mine, exact in zip(grads, parameters.values(), strict=True):
                    assert (mine is None) == (exact.grad is None)
                    if mine is not None:
                        close(mine, exact.grad, torch.float32, 4)
    with torch.no_grad():
        assert not ops.LayerNorm(8)(x).requires_grad


def test_mistakes_of_norms():
    for call, told in (
        (lambda: ops.LayerNorm(0), "LayerNorm: normalized_shape=0"),
        (lambda: ops.RMSNorm("8"), "RMSNorm: normalized_shape='8'"),
        (lambda: ops.RMSNorm(()), "RMSNorm: normalized_shape="),
        (lambda: ops.RMSNorm(8, eps="a"), "RMSNorm: eps='a'; it must be a number"),
        (lambda: ops.RMSNorm(8, eps=-1.0), "RMSNorm: eps=-1.0"),
        (lambda: ops.RMSNorm(8, dtype=torch.float64), "RMSNorm: dtype=torch.float64"),
        (lambda: ops.RMSNorm(8)(torch.ones(2, 4)), "RMSNorm: the input .* does not end in"),
        (lambda: ops.LayerNorm(8)(torch.tensor(1.0)), "LayerNorm: the input .* does not end in"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            call()
    op = ops.Sequential(ops.RMSNorm(8), ops.GELU())
    op[0].weight.data = torch.ones(4)
    with pytest.raises(ValueError, match=r"RMSNorm: weight is \(4,\); it must be \(8,\)"):
        op(torch.ones(2, 8))


def test_make_extra_output():
    x = data((3, 4), torch.float32)
    y, extra = ops.MakeExtraOutput()(x)
    (2 * y + 3 * extra).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 5.0))
    x = data((3, 4), torch.float32)
    y, extra = ops.MakeExtraOutput()(x)
    extra.sum().backward()  # y is unused
    torch.testing.assert_close(x.grad, torch.ones(3, 4))


def test_add_in_place():
    op = ops.AddExtraInput(in_place=True)
    x, e = torch.ones(2, 3), torch.ones(2, 3)
    with torch.no_grad():
        y = op(x, e)
    assert y.data_ptr() == e.data_ptr()
    x.requires_grad_()
    y = op(x, e)
    assert y.data_ptr() != e.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (16, 33), (4, 5, 6), (0, 3)])
def test_dropout(shape, dtype):
    op = ops.Dropout(0.25)
    torch.manual_seed(11)
    x = data(shape, dtype)
    y = op(x)
    kept = y != 0
    close(y, torch.where(kept, x.double() / 0.75, 0.0), dtype)
    y.sum().backward()
    close(x.grad, torch.where(kept, 1 / 0.75, 0.0), dtype)
    torch.manual_seed(11)
    assert torch.equal(op(x), y) and (x.numel() == 0 or not torch.equal(op(x), y))
    op.eval()
    assert torch.equal(op(x), x)
    assert torch.equal(ops.Dropout(0.0)(x), x)
    assert torch.equal(ops.Dropout(1.0)(x), torch.zeros_like(x))


def test_dropout_rate():
    y = ops.Dropout(0.1)(torch.ones(400, 500))
    assert abs((y == 0).double().mean().item() - 0.1) < 0.005


def test_wrong_dtypes():
    for op in (ops.GELU(), ops.SwiGLU(), ops.Bias(4), ops.BasicLinear(4, 4), ops.ConstantScale(2.0),
               ops.Dropout(0.5), ops.L2Normalization(), ops.LayerNorm(4),
               ops.RMSNorm(4)):  # fmt: skip
        name = type(op).__name__
        for dtype in (torch.float64, torch.int32):
            with pytest.raises(TypeError, match=rf"{name}.*{dtype}.*float32"):
                op(torch.ones(2, 4).to(dtype))
        with pytest.raises(TypeError, match="torch.Tensor"):
            op([1.0, 2.0])
    with pytest.raises(TypeError, match="scales"):
        ops.ScaledSReLU()(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))


def test_wrong_values():
    with pytest.raises(ValueError, match="even"):
        ops.SwiGLU()(torch.ones(2, 3))
    with pytest.raises(ValueError, match="5 columns"):
        ops.Linear(4, 3)(torch.ones(2, 5))
    with pytest.raises(ValueError, match="bias"):
        ops.Bias(3)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="p=1.5"):
        ops.Dropout(1.5)
    with pytest.raises(ValueError, match="2 rows"):
        ops.ScaledSwiGLU()(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match="same shape"):
        ops.AddExtraInput()(torch.ones(2, 4), torch.ones(1, 4))
    with pytest.raises(ValueError, match="extra inputs"):
        ops.AddExtraInput()(torch.ones(2, 4))
    with pytest.raises(ValueError, match="Reshape"):
        ops.Reshape(5)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="not gated"):
        ops.GELU(glu_interleave_size=2)
    with pytest.raises(ValueError, match="glu_interleave_size=0"):
        ops.SwiGLU(glu_interleave_size=0)
    with pytest.raises(ValueError, match="limit"):
        ops.ClampedSwiGLU(limit=-1.0)
    with pytest.raises(TypeError, match="no parameter 'gamma'"):
        ops.ClampedSwiGLU(gamma=1.0)
    with pytest.raises(ValueError, match="ScaledActivation"):
        ops.Activation("scaled(gelu)")
    with pytest.raises(ValueError, match="not known"):
        ops.Activation("nothing_of_that_name")
    with pytest.raises(TypeError, match="float64"):
        ops.BasicLinear(2, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="parallel"):
        ops.Linear(2, 2, tensor_parallel_mode="column")


def test_copies():
    for op in (ops.ClampedSwiGLU(limit=3.0), ops.Linear(4, 4), ops.Bias(4)):
        op(torch.ones(2, 4))
        twin = copy.deepcopy(op)
        assert repr(twin) == repr(op)
        assert torch.equal(twin(torch.ones(2, 4)), op(torch.ones(2, 4)))


def test_wrong_device():
    for op in (ops.GELU(), ops.SwiGLU(), ops.Linear(4, 4), ops.Bias(4), ops.L2Normalization()):
        with pytest.raises(NotImplementedError, match=r"meta.*\.cpu\(\)"):
            op(torch.empty(2, 4, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_dtypes(dtype):
    x, e = data((3, 4), dtype), data((3, 4), torch.float32, 2)
    for op in (ops.AddExtraInput(), ops.Sequential(ops.Dropout(0.0), ops.AddExtraInput())):
        y = op(x, e)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, x.float() + e)
        x.grad = e.grad = None
        y.sum().backward()
        assert (x.grad.dtype, e.grad.dtype) == (dtype, torch.float32)
    bias = ops.Bias(4)
    torch.nn.init.normal_(bias.bias)
    y = bias(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, (x.float() + bias.bias).to(dtype))
    y.sum().backward()
    assert bias.bias.grad.dtype == torch.float32
    linear = ops.Linear(4, 2)  # computes in the dtype of the weight, like Transformer Engine
    assert linear(x).dtype == torch.float32
    linear(x).sum().backward()
    assert x.grad.dtype == dtype


def test_numbers_without_dimensions():
    torch.testing.assert_close(ops.ReLU()(torch.tensor(2.0)), torch.tensor(2.0))
    x = torch.tensor(0.5, requires_grad=True)
    ops.Sequential(ops.Bias(1), ops.SReLU())(x).backward()
    torch.testing.assert_close(x.grad, torch.tensor(1.0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_constants_of_the_forward_pass(bias, linear):
    op = ops.Activation("elu", alpha=2.0)
    before = [ops.BasicLinear(8, 8)] * linear + [ops.Bias(8)] * bias
    model = ops.Sequential(*before, op)
    if linear:
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(8))
    x = torch.full((4, 8), -1.0, requires_grad=True)
    y = model(x)
    op.alpha = 100.0
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2 / math.e))
    scaled = ops.ScaledActivation("elu", alpha=2.0)
    y = scaled(x, torch.ones(4))
    scaled.alpha = 100.0
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.grad)
    scale = ops.ConstantScale(2.0)
    y = scale(x)
    scale.scale = 100.0
    assert (torch.autograd.grad(y.sum(), x)[0] == 2).all()


def test_definition_of_the_forward_pass():
    tenon.define("ops_defined", "x*c; c = 2")
    op = ops.Activation("ops_defined")
    models = (op, ops.Sequential(ops.Bias(8), op), lambda x: scaled(x, torch.ones(4)))
    scaled = ops.ScaledActivation("ops_defined", c=2.0)
    x = torch.randn(4, 8, requires_grad=True)
    results = [model(x) for model in models]
    tenon.define("ops_defined", "x*c*c; c = 5")
    for y in results:
        assert (torch.autograd.grad(y.sum(), x)[0] == 2).all()
    # An op keeps the definition at its construction. A new op has the new definition.
    for model in models:
        assert (torch.autograd.grad(model(x).sum(), x)[0] == 2).all()
    op.c = 3.0
    assert (torch.autograd.grad(op(x).sum(), x)[0] == 3).all()
    fresh = ops.Activation("ops_defined")
    assert (torch.autograd.grad(fresh(x).sum(), x)[0] == 25).all() and fresh.c == 5


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: ops.Dropout(None), "Dropout: p=None; it must be a number"),
        (lambda: ops.Dropout("a"), "Dropout: p='a'; it must be a number"),
        (lambda: ops.L2Normalization(eps="a"), "L2Normalization: eps='a'; it must be a number"),
        (lambda: ops.SwiGLU(glu_interleave_size="a"), "SwiGLU: glu_interleave_size='a'; it must"),
        (lambda: ops.Reshape(None), "Reshape: None in the shape; dimensions are whole numbers"),
        (lambda: ops.Reshape("ab"), "Reshape: 'a' in the shape; dimensions are whole numbers"),
        (lambda: ops.Sequential(torch.relu), "Sequential: .* is not a torch.nn.Module; wrap it"),
    ],
)
def test_wrong_arguments_are_told(make, told):
    with pytest.raises((TypeError, ValueError), match=told):
        make()


def test_forward_mode_and_tracers_are_refused():
    from torch.autograd import forward_ad

    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="tangent would be lost"):
                model(forward_ad.make_dual(x, torch.ones_like(x)))
        with pytest.raises(NotImplementedError, match="see nothing of Tenon's kernels"):
            torch.jit.trace(model, (x,))


def test_extra_inputs_are_tensors():
    with pytest.raises(TypeError, match="an extra input is a NoneType"):
        ops.AddExtraInput()(torch.ones(2, 4), None)


def test_in_place_addition_spares_the_input():
    x = torch.ones(2, 4)
    fork, add = ops.MakeExtraOutput(), ops.AddExtraInput(in_place=True)
    fork.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    model = ops.Sequential(fork, ops.ReLU(), add)
    assert (model(x) == 2).all() and (x == 1).all()
