"""Tests of the built-in fusions: what is fused, and equality with the ops one by one."""

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch.ops.fused.forward_linear_bias_activation import (  # noqa: E402
    ForwardLinearBiasActivation,
)

F = torch.nn.functional


def gelu(x):
    return F.gelu(x, approximate="tanh")


def stages(model):
    """The names of the fused lists of the only fuser."""
    ((fuser, _),) = model.groups()
    return fuser.describe()


def compare(model, reference, *inputs):
    """Compares a model with a function of (inputs, parameters) in float32. Returns the output."""
    mine = [t.detach().clone().requires_grad_() for t in inputs]
    theirs = [t.detach().clone().requires_grad_() for t in inputs]
    model.zero_grad()
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    y, expected = model(*mine), reference(*theirs, *parameters)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    expected.backward(g)
    for a, b in zip([*mine, *model.parameters()], [*theirs, *parameters], strict=False):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    return y


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
def test_linear_bias_activation(shape):
    model = ops.Sequential(ops.BasicLinear(8, 16), ops.Bias(16), ops.GELU())
    compare(model, lambda x, w, b: gelu(F.linear(x, w, b)), torch.randn(shape))
    assert stages(model) == (["Segment(BasicLinear, Bias, GELU)"],) * 2
    assert "Segment(BasicLinear, Bias, GELU)" in repr(model)
    told = tt.explain(model, torch.randn(shape))
    assert "forward: 1 pass" in told or ", cuda, " in told


def test_linear_bias_activation_by_hand():
    for activation in (ops.SiLU(), ops.Activation("mish"), None):
        for bias in (ops.Bias(16), None):
            linear = ops.BasicLinear(8, 16)
            op = ForwardLinearBiasActivation(linear=linear, bias=bias, activation=activation)
            f = {None: lambda z: z, "silu": F.silu, "mish": F.mish}[
                activation and activation.kernel.made.name
            ]
            compare(op, lambda x, w, b=None, f=f: f(F.linear(x, w, b)), torch.randn(3, 8))
    (fused,) = ForwardLinearBiasActivation.fuse_forward_ops([linear, ops.Bias(16), ops.GELU()])
    assert isinstance(fused, ForwardLinearBiasActivation)
    (fused,) = ForwardLinearBiasActivation.fuse_forward_ops([linear, ops.Bias(16)], recipe=None)
    assert isinstance(fused, ForwardLinearBiasActivation)
    with pytest.raises(ValueError, match="extra tensors"):
        ForwardLinearBiasActivation(linear=linear, activation=ops.ScaledSReLU())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 12), (0, 12)])
def test_bias_activation(shape, dtype):
    for op, f in (
        (ops.GELU(), gelu),
        (ops.SwiGLU(), lambda z: F.silu(z[..., :6]) * z[..., 6:]),
        (ops.SwiGLU(glu_interleave_size=2),
         lambda z: (lambda v: F.silu(v[..., 0, :]) * v[..., 1, :])(
             z.reshape(*z.shape[:-1], 3, 2, 2)).reshape(*z.shape[:-1], 6)),
    ):  # fmt: skip
        bias = ops.Bias(12, dtype=dtype)
        torch.nn.init.normal_(bias.bias)
        model = ops.Sequential(bias, op)
        x = torch.randn(shape).to(dtype).requires_grad_()
        y = model(x)
        x64, b64 = (t.detach().double().requires_grad_() for t in (x, bias.bias))
        y64 = f(x64 + b64)
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(y.double(), y64, rtol=tolerance, atol=tolerance)
        y.sum().backward()
        y64.sum().backward()
        for a, b in ((x, x64), (bias.bias, b64)):
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=4 * tolerance)
        assert stages(model) == ([f"Segment(Bias, {type(op).__name__})"],) * 2
        assert tt.explain(model, x).count(": 1 pass") == 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("shape", [(40,), (6, 10), (2, 3, 10)])
def test_bias_dropout_add(bias, add, shape):
    parts = [ops.Bias(shape[-1])] if bias else []
    if bias:
        torch.nn.init.normal_(parts[0].bias)
    parts.append(ops.Dropout(0.3))
    parts += [ops.AddExtraInput()] if add else []
    model = ops.Sequential(parts)
    x = torch.randn(shape, requires_grad=True)
    r = torch.randn(shape, requires_grad=True)
    extra = (r,) if add else ()
    y = model(x, *extra)
    if len(parts) > 1:
        forward, backward = stages(model)
        assert len(forward) == 1 and forward == backward and forward[0].startswith("Segment(")
        assert tt.explain(model, x).count(": 1 pass") == 2
    z = x.detach() + (parts[0].bias.detach() if bias else 0)
    dropped = y.detach() - (r.detach() if add else 0)
    kept = dropped.abs() > 1e-6 * (1 + z.abs())
    torch.testing.assert_close(dropped, torch.where(kept, z / 0.7, 0.0), rtol=1e-3, atol=1e-4)
    g = torch.randn(shape)
    y.backward(g)
    dx = torch.where(kept, g / 0.7, 0.0)
    torch.testing.assert_close(x.grad, dx, rtol=1e-3, atol=1e-5)
    if bias:
        expected = dx.reshape(-1, shape[-1]).sum(0)
        torch.testing.assert_close(parts[0].bias.grad, expected, rtol=1e-3, atol=1e-4)
    if add:
        torch.testing.assert_close(r.grad, g)
    model.eval()
    expected = z + (r.detach() if add else 0)
    torch.testing.assert_close(model(x, *extra), expected)
    # The same bits, fused or one by one.
    model.train()
    torch.manual_seed(1)
    fused = model(x, *extra)
    torch.manual_seed(1)
    value = x
    for part in parts:
        value = part(value, *(extra if isinstance(part, ops.AddExtraInput) else ()))
    torch.testing.assert_close(fused, value)


def test_whole_block_with_residual():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    model = ops.Sequential(
        make, ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8), ops.Dropout(0.0), add
    )
    compare(
        model,
        lambda x, w1, b1, w2, b2: x + F.linear(gelu(F.linear(x, w1, b1)), w2, b2),
        torch.randn(4, 8),
    )
    ((name,), _) = stages(model)
    assert name.startswith("Segment(MakeExtraOutput, BasicLinear, ") and "AddExtraInput" in name
