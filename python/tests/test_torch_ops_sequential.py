"""Tests of Sequential as a list, as one autograd node, and as a torch module."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402

F = torch.nn.functional


def mlp(**options):
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(8, 32, **options), ops.SwiGLU(), ops.Linear(16, 8, **options))


def reference(x, parameters):
    w1, b1, w2, b2 = parameters
    a, b = F.linear(x, w1, b1).chunk(2, dim=-1)
    return F.linear(F.silu(a) * b, w2, b2)


def test_values_and_gradients():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
        for shape in ((8,), (5, 8), (2, 3, 8), (2, 1, 2, 8), (0, 8)):
            model = mlp(dtype=dtype)
            x = torch.randn(shape).to(dtype).requires_grad_()
            y = model(x)
            x64 = x.detach().double().requires_grad_()
            parameters = [p.detach().double().requires_grad_() for p in model.parameters()]
            y64 = reference(x64, parameters)
            torch.testing.assert_close(y.double(), y64, rtol=tolerance, atol=tolerance)
            y.sum().backward()
            y64.sum().backward()
            for p, p64 in zip([x, *model.parameters()], [x64, *parameters], strict=False):
                assert p.grad.dtype == dtype
                torch.testing.assert_close(
                    p.grad.double(), p64.grad, rtol=4 * tolerance, atol=4 * tolerance
                )


def test_it_trains():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (
        all(b < a for a, b in zip(losses, losses[1:], strict=False))
        and losses[-1] < 0.8 * losses[0]
    )


def test_list_semantics():
    a, b, c, d = (ops.Identity() for _ in range(4))
    model = ops.Sequential(a, b)
    assert list(model.append(c)) == [a, b, c] and len(model) == 3
    assert model[0] is a and model[-1] is c and list(model[1:]) == [b, c]
    assert isinstance(model[1:], ops.Sequential)
    model.insert(1, d)
    assert list(model) == [a, d, b, c]
    assert model.pop(1) is d and list(model) == [a, b, c]
    model[0] = d
    assert list(model) == [d, b, c]
    del model[0]
    assert list(model) == [b, c] and list(model.state_dict()) == []
    del model[:1]
    assert list(model) == [c]
    both = ops.Sequential([a]) + ops.Sequential(b, c)
    assert list(both) == [a, b, c]
    both += [d]
    assert list(both) == [a, b, c, d]
    assert list(ops.Sequential({"first": a, "second": b}).named_children()) == [
        ("first", a),
        ("second", b),
    ]
    assert len(ops.Sequential()) == 0
    x = torch.randn(2, 2)
    assert ops.Sequential()(x) is x
    with pytest.raises(IndexError, match="index 7"):
        _ = model[7]
    with pytest.raises(TypeError, match="not a torch.nn.Module"):
        model.append(F.relu)


def test_changes_are_seen():
    model = ops.Sequential(ops.ReLU())
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), F.relu(x))
    model.append(ops.ConstantScale(2.0))
    torch.testing.assert_close(model(x), 2 * F.relu(x))
    model[0] = ops.Identity()
    torch.testing.assert_close(model(x), 2 * x)
    linear = ops.Linear(4, 4)
    model = ops.Sequential(linear)
    model(x)
    linear.weight = torch.nn.Parameter(torch.eye(4))
    torch.testing.assert_close(model(x), x)


def test_plain_modules_in_between():
    model = ops.Sequential(
        ops.Linear(4, 8), ops.GELU(), torch.nn.LayerNorm(8), ops.Linear(8, 4), ops.ReLU()
    )
    assert [len(indices) for _, indices in model.groups()] == [2, 1, 2]
    x = torch.randn(3, 4, requires_grad=True)
    y = model(x)
    w1, b1, _, _, w2, b2 = model.parameters()
    h = F.layer_norm(F.gelu(F.linear(x, w1, b1), approximate="tanh"), (8,))
    torch.testing.assert_close(y, F.relu(F.linear(h, w2, b2)))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "LayerNorm, by itself" in tt.explain(model, x)


def test_extra_tensors_from_left_to_right():
    model = ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        ops.ConstantScale(2.0),
        torch.nn.Identity(),
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
    )
    x, e1, e2 = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    y, o1, o2 = model(x, e1, e2)
    torch.testing.assert_close(o1, x + e1)
    torch.testing.assert_close(o2, 2 * (x + e1))
    torch.testing.assert_close(y, 2 * (x + e1) + e2)
    (y + 3 * o1 + 5 * o2).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 15.0))
    torch.testing.assert_close(e1.grad, torch.full((2, 3), 15.0))
    torch.testing.assert_close(e2.grad, torch.ones(2, 3))
    with pytest.raises(ValueError, match="1 extra inputs were given; its ops take 2"):
        model(x, e1)


def test_channels():
    def residual(shown):
        make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
        make.set_extra_output_channel(0, "skip", output_to_caller=shown)
        add.set_extra_input_channel(0, "skip")
        return ops.Sequential(make, ops.Linear(4, 4), ops.GELU(), add)

    model = residual(False)
    x = torch.randn(3, 4, requires_grad=True)
    y = model(x)
    w, b = model.parameters()
    x2 = x.detach().clone().requires_grad_()
    y2 = x2 + F.gelu(F.linear(x2, w, b), approximate="tanh")
    torch.testing.assert_close(y, y2)
    y.sum().backward()
    y2.sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    y, skip = residual(True)(x)
    torch.testing.assert_close(skip, x)
    (grad,) = torch.autograd.grad(skip.sum(), x)
    torch.testing.assert_close(grad, torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="cannot change"):
        model[0].set_extra_output_channel(0, "other")
    add = ops.AddExtraInput()
    add.set_extra_input_channel(0, "nowhere")
    with pytest.raises(ValueError, match="no earlier op writes"):
        ops.Sequential(add)(x)
    with pytest.raises(IndexError, match="it has 1"):
        add.set_extra_input_channel(1, "skip")


def test_channel_with_two_readers():
    make, first, second = ops.MakeExtraOutput(), ops.AddExtraInput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "x", output_to_caller=False)
    first.set_extra_input_channel(0, "x")
    second.set_extra_input_channel(0, "x")
    x = torch.randn(2, 3, requires_grad=True)
    y = ops.Sequential(make, ops.ConstantScale(2.0), first, ops.ConstantScale(3.0), second)(x)
    torch.testing.assert_close(y, 10 * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 10.0))


def test_op_kwargs():
    class Power(ops.BasicOperation):
        def op_forward(self, ctx, input_, *, exponent=1):
            ctx.exponent = exponent
            ctx.save_for_backward(input_)
            return input_**exponent

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            return grad_output * ctx.exponent * x ** (ctx.exponent - 1)

    power = Power()
    model = ops.Sequential(ops.Identity(), power)
    x = torch.rand(3, 2)
    torch.testing.assert_close(model(x), x)
    torch.testing.assert_close(model(x, op_kwargs={power: {"exponent": 2}}), x**2)
    torch.testing.assert_close(model(x, op_kwargs={1: {"exponent": 3}}), x**3)
    torch.testing.assert_close(power(x, exponent=2), x**2)
    with pytest.raises(TypeError, match="no keyword 'wrong'"):
        power(x, wrong=2)
    for key in (Power(), 0.5, "1"):
        with pytest.raises(ValueError, match="op_kwargs"):
            model(x, op_kwargs={key: {}})
    with pytest.raises(ValueError, match="op_kwargs"):
        ops.Sequential(ops.Linear(2, 2))(x, op_kwargs={0: {}})


def test_deepcopy_and_pickle():
    model = mlp()
    x = torch.randn(3, 8)
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), y)
        with torch.no_grad():
            twin[0].weight.zero_()
        assert not torch.equal(twin(x), y) and torch.equal(model(x), y)


def test_state_dict_round_trip():
    model = ops.Sequential(*mlp(), ops.BasicLinear(8, 4), ops.Bias(4))
    state = model.state_dict()
    assert list(state) == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "3.weight",
        "4.bias",
    ]
    x = torch.randn(3, 8)
    y = model(x)
    other = ops.Sequential(*mlp(), ops.BasicLinear(8, 4), ops.Bias(4))
    for p in other.parameters():
        torch.nn.init.normal_(p)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(x), y)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({}, strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = ops.Sequential(*mlp(), ops.Bias(8), ops.Dropout(0.0), ops.L2Normalization())
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, dtype):
        for part in model:
            assert part(torch.randn(3, 8 if not isinstance(part, ops.Linear)
                                    else part.in_features)).dtype == dtype  # fmt: skip
        y = model(x)
        assert y.dtype == dtype
        reference_y = reference(x, list(mlp().parameters()))
        assert reference_y.dtype == dtype
        y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    exact = ops.Sequential(*mlp(), ops.Bias(8), ops.L2Normalization())(x.detach())
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.05)
    with torch.autocast(torch.get_default_device().type, dtype):
        with torch.autocast(torch.get_default_device().type, enabled=False):
            assert model(x).dtype == torch.float32
    # Backward inside of autocast uses the dtypes of the forward pass.
    plain, inside = mlp(), mlp()
    plain(x).sum().backward()
    with torch.autocast(torch.get_default_device().type, enabled=False):
        y = inside(x)
    with torch.autocast(torch.get_default_device().type, dtype):
        y.sum().backward()
    assert torch.equal(plain[0].weight.grad, inside[0].weight.grad)


def test_no_grad():
    model = mlp()
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        y = model(torch.randn(3, 8))
    assert y.is_inference()
    model.requires_grad_(False)
    assert not model(x.detach()).requires_grad
    assert model(x).requires_grad


def test_pruning():
    saved = []

    class Watch(ops.BasicOperation):
        def op_forward(self, ctx, input_, **kwargs):
            saved.append((ctx.requires_grad, ctx.input_requires_grad))
            return input_ * 1

        def op_backward(self, ctx, grad_output):
            saved.append("backward")
            return grad_output

    model = ops.Sequential(Watch(), ops.Linear(4, 4), Watch())
    x = torch.randn(2, 4)
    model(x).sum().backward()
    assert saved == [(False, False), (True, True), "backward"]
    weight, bias = model.parameters()
    assert weight.grad is not None and bias.grad is not None
    weight.requires_grad_(False)
    weight.grad = bias.grad = None
    model(x).sum().backward()
    assert weight.grad is None and bias.grad is not None
    saved.clear()
    with torch.no_grad():
        model(x.requires_grad_())
    assert saved == [(False, False), (False, False)]


def test_frozen_parts_match_torch():
    for freeze in range(16):
        model = mlp()
        x = torch.randn(5, 8, requires_grad=bool(freeze & 1))
        parameters = list(model.parameters())
        for i, p in enumerate(parameters):
            p.requires_grad_(not freeze >> i & 1)
        copies = [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters]
        x2 = x.detach().clone().requires_grad_(x.requires_grad)
        y, y2 = model(x), reference(x2, copies)
        assert y.requires_grad == y2.requires_grad
        if not y.requires_grad:
            continue
        y.sum().backward()
        y2.sum().backward()
        for p, q in zip([x, *parameters], [x2, *copies], strict=False):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_gradient_accumulation():
    model = mlp()
    x = torch.randn(6, 8)
    model(x).sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in x.split(2):
        model(part).sum().backward()
    for p, g in zip(model.parameters(), whole, strict=False):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-5)


def test_retained_graph():
    model = mlp()
    x = torch.randn(3, 8, requires_grad=True)
    y = model(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_a_second_derivative_is_refused():
    for model in (ops.GELU(), mlp(), ops.Sequential(ops.ConstantScale(2.0), ops.GELU())):
        x = torch.randn(3, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad.sum().backward()


def test_save_on_cpu():
    model = ops.Sequential(*mlp(), ops.GELU(cache_quantized_input=True), ops.Dropout(0.5))
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(5)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    torch.manual_seed(5)
    with torch.autograd.graph.save_on_cpu():
        y = model(x)
    (moved,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(plain, moved)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(x)
    # x, two weights, two gated or hidden values, the parts of the encoded input, the random state
    assert any(t.dtype == torch.float8_e4m3fn for t in packed)
    assert any(t.dtype == torch.int64 for t in packed)


def test_saved_tensors_are_watched():
    model = mlp()
    y = model(torch.randn(3, 8, requires_grad=True))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoint():
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    x = torch.randn(3, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), x)
    assert torch.equal(plain, again)


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    model = mlp()
    inputs = [torch.randn(4, 8) for _ in range(16)]
    expected = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for y, e in zip(pool.map(model, inputs), expected, strict=False):
            assert torch.equal(y, e)


def test_a_list_module_is_one_module():
    modules = torch.nn.ModuleList([ops.GELU(), ops.ReLU()])
    assert len(ops.Sequential(ops.Sequential(modules))) == 1
