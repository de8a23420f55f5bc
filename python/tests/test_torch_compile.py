"""Tests of torch.compile around Tenon: one graph break, correct values and gradients. Other
tracers raise errors.
"""

import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.functional as tf  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import jit  # noqa: E402


class Counter:
    """A backend that runs graphs unchanged and counts them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append([n.target for n in module.graph.nodes if n.op.startswith("call")])
        return module.forward


@pytest.fixture
def count():
    torch._dynamo.reset()
    yield Counter()
    torch._dynamo.reset()


def block():
    return ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 32), ops.SwiGLU(), ops.Linear(16, 16))


class TwoBlocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = block(), block(), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x * 2) + x
        return self.head(self.second(x) + x)


def residual():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return ops.Sequential(make, ops.Linear(16, 16), ops.GELU(), add)


bias = torch.linspace(-1, 1, 16)
fused = jit.lazy_compile(lambda x: torch.tanh(x) * x)
mxfp8 = tt.MXFP8Quantizer("e4m3")
current = tt.Float8CurrentScalingQuantizer("e4m3")

# Each reads x. The torch operations around those of Tenon are separate graphs.
CASES = {
    "two blocks": (TwoBlocks(), 3),
    "one block": (block(), 0),
    "residual": (residual(), 0),
    "op": (ops.GELU(), 0),
    "linear": (ops.Linear(16, 16), 0),
    "linear between": ((lambda m: lambda x: m(x + 1) * 2)(ops.Linear(16, 16)), 2),
    "gelu": (lambda x: tf.gelu(x + 1) * 2, 2),
    "swiglu": (lambda x: tf.swiglu(x + 1, bias=bias) * 2, 2),
    "activation": (lambda x: tf.activation("x*sigmoid(x)", x + 1) * 2, 2),
    "bias_dropout_add": (lambda x: tf.bias_dropout_add(x + 1, bias, x, 0.0) * 2, 2),
    "l2normalization": (lambda x: tf.l2normalization(x + 1) * 2, 2),
    "jit": (lambda x: jit.bias_gelu_fused_(x + 1, bias) * 2, 2),
    "jit gradient": (lambda x: jit.dgelu_fused_(x.detach() + 1, x.detach()) + x, 2),
    "fuse": (lambda x: fused(x + 1) * 2, 1),
    "quantizer": (lambda x: mxfp8(x).dequantize(), 0),
    "quantised activation": (lambda x: tf.gelu(x, quantizer=current).dequantize(), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_one_break_for_each_call(name, count):
    function, graphs = CASES[name]
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    data = torch.randn(8, 16)
    results = []
    compiled = torch.compile(function, backend=count)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for f in (function, compiled, compiled):
            x = data.clone().requires_grad_()
            y = f(x)
            g = torch.autograd.grad(y.square().sum(), [x, *parameters])
            results.append([y.detach(), *g])
    assert not warned, [str(w.message) for w in warned]
    assert len(count.graphs) == graphs, count.graphs
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            if name == "fuse":  # inlined as torch operations
                torch.testing.assert_close(a, b)
            else:
                assert torch.equal(a, b)


def test_a_compiled_training_step(count):
    """Backward runs inside of the compiled function, and is also not traced."""
    model, twin = block(), block()
    twin.load_state_dict(model.state_dict())
    data = torch.randn(8, 16)

    def step(m, x):
        y = m(x * 2) + 1
        y.square().sum().backward()
        return y.detach()

    expected = step(twin, data)
    compiled = torch.compile(step, backend=count)
    for _ in range(3):
        model.zero_grad()
        assert torch.equal(compiled(model, data), expected)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert len(count.graphs) <= 3, count.graphs


def test_eager_calls_do_not_load_the_compiler():
    code = (
        "import sys, torch, tenon.torch.ops as ops, tenon.torch.functional as tf\n"
        "x = torch.ones(2, 4, requires_grad=True)\n"
        "(ops.Sequential(ops.Linear(4, 4), ops.GELU())(x) + tf.gelu(x)).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


# Calls that cannot run a kernel raise an error.

CALLS = {
    "Linear \\+ Bias \\+ GELU": ops.Sequential(ops.Linear(4, 4), ops.GELU()),
    "RMSNorm": ops.RMSNorm(4),
    "Dropout": ops.Dropout(0.5),
    "gelu": tf.gelu,
    "swiglu": lambda x: tf.swiglu(x, bias=torch.ones(4)),
    "bias_dropout_add": lambda x: tf.bias_dropout_add(x, None, None, 0.5),
    "l2normalization": tf.l2normalization,
    "dgelu": lambda x: jit.dgelu_fused_(x, x),
    "MXFP8Quantizer": tt.MXFP8Quantizer("e4m3"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused(name, grad):
    call = CALLS[name]
    if isinstance(call, torch.nn.Module):
        call.requires_grad_(grad)
    told = f"{name}.*: torch.func.vmap.*fold the batch into the rows"
    with pytest.raises(NotImplementedError, match=told):
        torch.func.vmap(call, randomness="different")(torch.ones(3, 2, 4))
    if "Quantizer" not in name:
        with pytest.raises(NotImplementedError, match=told):
            torch.func.grad(lambda x: call(x).sum())(torch.ones(2, 4))
        with pytest.raises(NotImplementedError, match=f"{name}.*: "):
            torch.func.jacfwd(call)(torch.ones(2, 4))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_are_refused(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.ones(2, 4))
    told = f"{name}.*: the tensors are fake"
    with pytest.raises(NotImplementedError, match=told):
        CALLS[name](fake)
    with mode, pytest.raises(NotImplementedError, match=told):
        CALLS[name](torch.ones(2, 4))


@pytest.mark.parametrize("name", ["Linear \\+ Bias \\+ GELU", "RMSNorm", "Dropout"])
@pytest.mark.filterwarnings("ignore")
def test_exporters_and_scripts_are_refused(name):
    module, x = CALLS[name], torch.ones(2, 4)
    with pytest.raises(NotImplementedError, match=f"{name}.*: .*torch.export"):
        torch.export.export(module, (x,), strict=False)
    with pytest.raises(NotImplementedError, match="(Sequential|" + name + ").*: .*onnx.export see"):
        torch.onnx.export(module, (x,), "/dev/null", dynamo=False)
    for scripted in (module, torch.nn.Sequential(torch.nn.ReLU(), module)):
        with pytest.raises(NotImplementedError, match=r": torch.jit.script cannot compile"):
            torch.jit.script(scripted)
