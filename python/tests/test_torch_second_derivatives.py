"""Tests that second derivatives raise an error and are never silently 0."""

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.functional as tf  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import jit  # noqa: E402
from tenon.torch.quantizer import MXFP8Quantizer  # noqa: E402

A = torch.autograd.functional
F = torch.nn.functional
TOLD = "a second derivative was asked for, and only the first one exists"


class Square(ops.BasicOperation):
    """A user's op."""

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output


class Cube(ops.BasicOperation):
    """A user's op that keeps tensors as attributes."""

    def op_forward(self, ctx, input_, **unused):
        ctx.slope = 3 * input_.detach() ** 2
        return input_**3

    def op_backward(self, ctx, grad_output):
        return ctx.slope * grad_output


def cached():
    return ops.GELU(cache_quantized_input=True)


def quantised_linear():
    linear = ops.BasicLinear(32, 32)
    linear.set_quantizer("forward", 0, MXFP8Quantizer("e4m3"))
    linear.set_quantizer("forward", 1, MXFP8Quantizer("e4m3"))
    return linear


def residual():
    made, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    made.set_extra_output_channel(0, "r", output_to_caller=False)
    add.set_extra_input_channel(0, "r")
    return ops.Sequential(made, ops.GELU(), add)


def shaped():
    return ops.Sequential(ops.Reshape(-1, 16), ops.GELU(), ops.Reshape(-1, 32))


bias = torch.randn(32)
ones = torch.ones(4, 32)

# Functions of [4, 32] whose second derivative is not 0.
MODELS = {
    "gelu op": ops.GELU,
    "cached": cached,
    "swiglu op": ops.SwiGLU,
    "norm": lambda: ops.RMSNorm(32),
    "layer norm": lambda: ops.LayerNorm(32),
    "l2": ops.L2Normalization,
    "user op": Square,
    "user op with attributes": Cube,
    "user op in a chain": lambda: ops.Sequential(ops.Identity(), Square(), ops.Bias(32)),
    "planned": lambda: ops.Sequential(ops.Linear(32, 8), ops.GELU(), ops.Linear(8, 32)),
    "bias and activation": lambda: ops.Sequential(ops.Bias(32), ops.SiLU()),
    "quantised": lambda: ops.Sequential(quantised_linear(), ops.GELU()),
    "dropout": lambda: ops.Sequential(ops.Dropout(0.5), ops.GELU()),
    "residual": residual,
    "reshaped": shaped,
    "modules between": lambda: ops.Sequential(torch.nn.Linear(32, 32), ops.GELU()),
    "scaled": lambda: lambda x: ops.ScaledSReLU()(x, x.mean(-1)),
    "functional": lambda: tf.gelu,
    "functional with bias": lambda: lambda x: tf.gelu(x, bias=bias),
    "functional of two tensors": lambda: lambda x: tf.swiglu(x, b=x),
    "functional scaled": lambda: lambda x: tf.srelu(x, scale=x.mean(-1)),
    "functional quantised": lambda: (
        lambda x: tf.gelu(x, quantizer=MXFP8Quantizer("e4m3")).dequantize()
    ),
    "bias_gelu_fused": lambda: lambda x: jit.bias_gelu_fused(x, bias),
    "l2normalization": lambda: lambda x: jit.l2normalization_fused(x, 1e-6),
    "lazy": lambda: jit.lazy_compile(lambda x: torch.tanh(x) * x),
    "after dropout": lambda: lambda x: tf.gelu(tf.dropout(x, 0.5)),
    "before dropout": lambda: lambda x: tf.dropout(tf.gelu(x), 0.5),
    "bias_dropout_add": lambda: lambda x: tf.bias_dropout_add(tf.silu(x), bias, x, 0.5),
    "quantize": lambda: lambda x: tf.gelu(tf.dequantize(tf.quantize(x, MXFP8Quantizer("e4m3")))),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def total(f):
    return lambda x: f(x).sum()


def test_functional_hessian(model):
    with pytest.raises(NotImplementedError, match=TOLD):
        A.hessian(total(model), torch.randn(4, 32))


@pytest.mark.parametrize("create_graph", [False, True])
def test_functional_vhp_and_hvp(model, create_graph):
    x = torch.randn(4, 32, requires_grad=create_graph)
    for product in (A.vhp, A.hvp):
        with pytest.raises(NotImplementedError, match=TOLD):
            product(total(model), x, ones, create_graph=create_graph)


def test_with_respect_to_a_tensor_between(model):
    """The tensor of the derivative is neither a leaf nor the input of the op."""
    leaf = torch.randn(4, 32, requires_grad=True)
    between = leaf * 1.5
    (dx,) = torch.autograd.grad(model(between + 0.5).sum(), between, create_graph=True)
    with pytest.raises(NotImplementedError, match=TOLD):
        torch.autograd.grad(dx.sum(), between, allow_unused=True)


def test_gradient_penalty(model):
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(NotImplementedError, match=TOLD):
        (dx**2).sum().backward()


def test_first_derivatives_are_unchanged(model):
    x = torch.randn(4, 32)
    torch.manual_seed(1)
    plain = A.jacobian(total(model), x)
    torch.manual_seed(1)
    recorded = A.jacobian(total(model), x.clone().requires_grad_(), create_graph=True)
    assert torch.equal(plain, recorded)
    v = x.clone().requires_grad_()
    torch.manual_seed(1)
    model(v).sum().backward(create_graph=True)
    assert torch.equal(plain, v.grad)
    v.grad = None  # breaks a reference cycle of torch


def test_of_parameters():
    """Through weights only: the input needs no gradient."""
    x = torch.randn(4, 32)
    for made in (
        ops.Sequential(ops.Linear(32, 32), ops.GELU()),
        ops.Sequential(ops.LayerNorm(32), ops.GELU()),
        ops.Sequential(ops.BasicLinear(32, 32), ops.BasicLinear(32, 32)),
    ):
        parameters = list(made.parameters())
        grads = torch.autograd.grad(made(x).sum(), parameters, create_graph=True)
        for g in grads:
            for p in parameters:
                with pytest.raises(NotImplementedError, match=TOLD):
                    torch.autograd.grad(g.sum(), p, allow_unused=True, retain_graph=True)


def test_of_extra_inputs_and_outputs():
    x, s = torch.randn(4, 32, requires_grad=True), torch.randn(4, requires_grad=True)
    made = ops.Sequential(ops.MakeExtraOutput(), ops.ScaledActivation("gelu"))
    y, extra = made(x, s)
    for of in (y, extra):
        g = torch.autograd.grad(of.sum(), (x, s), create_graph=True, allow_unused=True)
        for t in g:
            for wrt in (x, s):
                if t is not None:
                    with pytest.raises(NotImplementedError, match=TOLD):
                        torch.autograd.grad(t.sum(), wrt, allow_unused=True, retain_graph=True)


def test_through_the_gradient():
    """The incoming gradient may depend on the tensor of the derivative."""
    for f in (ops.GELU(), tf.gelu, lambda x: tf.dropout(x, 0.5), ops.Bias(32)):
        x = torch.randn(4, 32, requires_grad=True)
        g = torch.randn(4, 32, requires_grad=True)
        (dx,) = torch.autograd.grad(f(x), x, g, create_graph=True)
        with pytest.raises(NotImplementedError, match=TOLD):
            torch.autograd.grad(dx.sum(), g)


def test_derivatives_as_functions():
    """Differentiating a derivative function of jit by any argument raises an error."""
    x, r = torch.randn(4, 32), torch.rand(4, 1)
    for call, tensors in (
        (jit.dgelu_fused, (torch.randn(4, 32), x)),
        (lambda *t: jit.bgrad_dgelu_fused(*t)[1], (torch.randn(4, 32), x, bias)),
        (lambda *t: jit.l2normalization_backward_fused(*t, 1e-6), (torch.randn(4, 32), x, r)),
    ):
        for i in range(len(tensors)):
            given = [t.clone().requires_grad_(i == j) for j, t in enumerate(tensors)]
            with pytest.raises(NotImplementedError, match=TOLD):
                call(*given).sum().backward()


def test_linear_functions_are_torchs():
    """If the second derivative is 0, the result is torch's 0, or an error."""
    for f in (lambda x: tf.dropout(x, 0.5), lambda x: tf.bias_dropout_add(x, bias, x, 0.5)):
        found = A.hessian(total(f), torch.randn(2, 32))
        assert (found == 0).all()
    q = MXFP8Quantizer("e4m3")
    x = torch.randn(1, 32)
    found = A.hessian(lambda x: (tf.dequantize(tf.quantize(x, q)) ** 2).sum(), x)
    assert torch.equal(found.reshape(32, 32), 2 * torch.eye(32))  # straight-through


def test_func_transforms_are_refused(request, model):
    x = torch.randn(4, 32)
    twice = torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))
    for hessian in twice:
        if "lazy" in request.node.name:  # called as a torch function
            exact = A.hessian(lambda x: (torch.tanh(x) * x).sum(), x.double())
            torch.testing.assert_close(hessian(total(model))(x), exact.float())
            continue
        with pytest.raises((NotImplementedError, RuntimeError)):
            hessian(total(model))(x)


def test_nothing_is_kept_alive():
    """The mechanism for the error keeps no input alive and makes no cycle."""
    import gc
    import weakref

    model = ops.Sequential(ops.Bias(32), ops.Dropout(0.5))
    gc.collect()
    gc.disable()
    try:
        leaf = torch.randn(4, 32, requires_grad=True)
        between = leaf * 2
        y = model(between)
        kept, node = weakref.ref(between.untyped_storage()), weakref.ref(y.grad_fn)
        del between
        assert kept() is None
        del y
        assert node() is None
    finally:
        gc.enable()
