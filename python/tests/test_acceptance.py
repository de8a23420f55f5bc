"""Five typical first programs of a user of Transformer Engine."""

import pytest

torch = pytest.importorskip("torch")


def test_a_gated_mlp_trains():
    import tenon.torch.ops as ops

    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, target = torch.randn(64, 16), torch.randn(64, 16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_basic_operation_of_ones_own():
    import tenon.torch.ops as ops

    class Double(ops.BasicOperation):
        def op_forward(self, ctx, input_, **kwargs):
            ctx.save_for_backward(input_)
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            assert len(ctx.saved_tensors) == 1
            return grad_output * 2

    model = ops.Sequential(ops.GELU(), Double())
    x = torch.randn(5, 7, dtype=torch.float64).float().requires_grad_()
    y = model(x)
    y.sum().backward()
    again = x.detach().double().requires_grad_()
    expected = 2 * torch.nn.functional.gelu(again, approximate="tanh")
    expected.sum().backward()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), again.grad, rtol=1e-5, atol=1e-5)


def test_linear_bias_gelu_fuse_by_themselves():
    import tenon.torch as tt
    import tenon.torch.ops as ops

    model = ops.Sequential(ops.BasicLinear(8, 16), ops.Bias(16), ops.GELU())
    x = torch.randn(4, 8)
    y = model(x)
    told = repr(model) + tt.explain(model, x)
    assert "Segment(BasicLinear, Bias, GELU)" in told and "gemm linear+bias+gelu" in told
    weight, bias = (p.double() for p in model.parameters())
    expected = torch.nn.functional.gelu(x.double() @ weight.T + bias, approximate="tanh")
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


def test_jit_functions():
    from tenon.torch.jit import bias_gelu_fused_, get_bias_dropout_add, set_jit_fusion_options

    set_jit_fusion_options()
    x, b, r = torch.randn(6, 10), torch.randn(10), torch.randn(6, 10)
    expected = torch.nn.functional.gelu((x + b).double(), approximate="tanh")
    torch.testing.assert_close(bias_gelu_fused_(x, b).double(), expected, rtol=1e-5, atol=1e-5)
    y = get_bias_dropout_add(True)(x, b, r, 0.1)
    kept = ((y - r) / ((x + b) / 0.9)).double()
    assert torch.all((kept.abs() < 1e-3) | ((kept - 1).abs() < 1e-3))


def test_a_jax_activation():
    jax = pytest.importorskip("jax")
    from tenon.jax.cpp_extensions.activation import act_lu

    x = jax.random.normal(jax.random.key(0), (4, 1, 16))
    y = act_lu(x, activation_type=("gelu",))
    expected = jax.nn.gelu(x[:, 0, :], approximate=True)
    assert y.shape == (4, 16)
    assert float(abs(y - expected).max()) < 1e-5
