"""Tests that a backward pass uses the parameters of its forward pass."""

import copy

import pytest
import torch
from tenon.torch import ops


class Twice(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output


def layernorm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (4,), weight, bias, 1e-5)


def rmsnorm(x, weight):
    return torch.nn.functional.rms_norm(x, (4,), weight, 1e-5)


CASES = {
    "LayerNorm": (lambda: ops.LayerNorm(4), layernorm),
    "RMSNorm": (lambda: ops.RMSNorm(4), rmsnorm),
    "Bias": (lambda: ops.Bias(4), lambda x, bias: x + bias),
    "BasicLinear": (lambda: ops.BasicLinear(4, 4), lambda x, weight: x @ weight.T),
    "Linear": (lambda: ops.Linear(4, 4), lambda x, weight, bias: x @ weight.T + bias),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_functional_call(name, between, trained):
    make, reference = CASES[name]
    op = make().requires_grad_(trained)
    model = ops.Sequential(Twice(), op, Twice()) if between else op
    factor = 4 if between else 1
    names = [n for n, _ in op.named_parameters()]
    given = {n: torch.randn_like(p).requires_grad_() for n, p in op.named_parameters()}
    prefix = "1." if between else ""
    x, r = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    y = torch.func.functional_call(model, {prefix + n: t for n, t in given.items()}, x)
    found = torch.autograd.grad((y * r).sum(), [x, *given.values()])
    leaves = [t.detach().double().requires_grad_() for t in (x, *given.values())]
    exact = dict(zip(names, leaves[1:], strict=True))
    y = reference(2 * leaves[0] if between else leaves[0], **exact) * (2 if between else 1)
    wanted = torch.autograd.grad((y * r.double()).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * factor)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_parameters_written_in_place(name):
    op = CASES[name][0]()
    x = torch.randn(3, 4, requires_grad=True)
    y = op(x)
    with torch.no_grad():
        op.weight.mul_(2)
    with pytest.raises(RuntimeError, match=f"{name}: a parameter was modified by an in-place"):
        y.sum().backward()


def test_parts_of_a_linear():
    linear = ops.Linear(4, 4)
    part = linear.basic_ops[0]
    assert [n for n, _ in part.named_parameters()] == ["weight"]
    assert [n for n, _ in linear.named_parameters()] == ["weight", "bias"]
    part.requires_grad_(False)
    assert not linear.weight.requires_grad and linear.bias.requires_grad
    with pytest.raises(ValueError, match="this BasicLinear is part of a Linear"):
        ops.Sequential(part, ops.GELU())


@pytest.mark.parametrize("index", [0, 1])
def test_hooks_of_parts_in_a_copy(index):
    linear, seen = ops.Linear(4, 4), []
    linear.basic_ops[index].register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy.deepcopy(linear)(x), linear(x))
    assert len(seen) == 2
    torch.testing.assert_close(copy.deepcopy(linear)(x), linear(x))
    assert len(seen) == 4


def test_a_forward_that_is_set_later():
    model = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x = torch.randn(2, 4)
    y = model(x)
    before = model[0].forward
    model[0].forward = lambda z: before(z) * 0
    assert (model(x) == 0).all()
    del model[0].forward
    model[0].forward = before
    torch.testing.assert_close(model(x), y)


def test_hooks_of_all_modules():
    model = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x, seen = torch.randn(2, 4), []
    y = model(x)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        torch.testing.assert_close(model(x), y)
    finally:
        handle.remove()
    assert {"GELU", "Sequential"} <= set(seen)
    count = len(seen)
    torch.testing.assert_close(model(x), y)
    assert len(seen) == count


@pytest.mark.parametrize("kind", ["int", "complex", "sparse"])
@pytest.mark.parametrize("make", [ops.GELU, lambda: ops.LayerNorm(4), lambda: ops.Linear(4, 4)])
def test_gradients_that_are_no_dense_floats(kind, make):
    class Odd(Twice):
        def op_backward(self, ctx, grad_output):
            if kind == "sparse":
                return grad_output.to_sparse()
            return grad_output.to(torch.int32 if kind == "int" else torch.complex64)

    x = torch.randn(3, 4, requires_grad=True)
    y = ops.Sequential(make(), Odd())(x)
    with pytest.raises(RuntimeError, match="Odd: the gradient of its input is"):
        y.sum().backward()


def test_long_texts_are_not_kept():
    import tenon
    from tenon import _activation

    for i in range(3):
        assert tenon.activation(f"x*{i}.5" + " " * 1_000_000).inputs == 1
    assert all(len(text) < 1 << 15 for text in _activation._PINNED)
