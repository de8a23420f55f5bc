"""Tests of quantised tensors between ops: which op writes them, which reads them, and what is
saved.
"""

import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.ops as ops  # noqa: E402
from tenon._plan import FORWARD, Plan  # noqa: E402
from tenon.torch.quantizer import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
)

F = torch.nn.functional
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantizers(dtype):
    return {
        "delayed": Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), dtype),
        "current": Float8CurrentScalingQuantizer(dtype),
        "mxfp8": MXFP8Quantizer(dtype),
        "block1x128": Float8BlockQuantizer(dtype, block_scaling_dim=1),
        "block128x128": Float8BlockQuantizer(dtype),
    }


MODES = list(quantizers(E4M3))


def gelu(x):
    return F.gelu(x, approximate="tanh")


class Probe(ops.BasicOperation):
    """Has quantizers for both neighbours, and records its inputs."""

    def __init__(self, quantizer=None, grad_quantizer=None):
        super().__init__()
        self.seen = []
        self.set_quantizer("forward", 0, quantizer)
        self.set_quantizer("backward", 0, grad_quantizer)

    def num_quantizers(self, mode):
        return 1

    def op_forward(self, ctx, input_, **kwargs):
        self.seen.append(input_)
        return input_.dequantize() if isinstance(input_, QuantizedTensor) else input_ * 1

    def op_backward(self, ctx, grad_output):
        self.seen.append(grad_output)
        if isinstance(grad_output, QuantizedTensor):
            return grad_output.dequantize()
        return grad_output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_writes_what_its_neighbours_want(mode, dtype):
    before = Probe(grad_quantizer=quantizers(E5M2)[mode])
    after = Probe(quantizer=quantizers(E4M3)[mode])
    model = ops.Sequential(before, ops.GELU(), after)
    x = torch.randn(5, 160).to(dtype).requires_grad_()
    y = model(x)
    g = torch.randn_like(y)
    y.backward(g)
    (_, dz), (z, _) = before.seen, after.seen
    assert isinstance(z, QuantizedTensor) and isinstance(dz, QuantizedTensor)
    assert (z.scaling, z.fp8_dtype, dz.fp8_dtype) == (mode, E4M3, E5M2)
    # The same codes as quantising float32 results in a second step.
    exact = quantizers(E4M3)[mode](gelu(x.detach().double()).float())
    torch.testing.assert_close(
        z.dequantize(torch.float32), exact.dequantize(), rtol=0.13, atol=0.05
    )
    v = x.detach().double().requires_grad_()
    gelu(v).backward(g.double())
    exact = quantizers(E5M2)[mode](v.grad.float())
    torch.testing.assert_close(
        dz.dequantize(torch.float32), exact.dequantize(), rtol=0.26, atol=0.05
    )
    torch.testing.assert_close(x.grad.double(), v.grad, rtol=0.3, atol=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_bias_gradient_in_the_same_pass(mode):
    for activation in (ops.GELU(), ops.SwiGLU()):
        linear, bias = ops.BasicLinear(8, 32), ops.Bias(32)
        linear.set_quantizer("backward", 0, quantizers(E5M2)[mode])
        model = ops.Sequential(linear, bias, activation)
        x = torch.randn(6, 8, requires_grad=True)
        y = model(x)
        g = torch.randn_like(y)
        y.backward(g)
        (forward,), _ = model.groups()[0][0].describe()
        assert forward.startswith("Segment(BasicLinear, Bias, ")
        w, b = (p.detach().double().requires_grad_() for p in model.parameters())
        v = x.detach().double().requires_grad_()
        z = F.linear(v, w, b)
        f = gelu(z) if isinstance(activation, ops.GELU) else F.silu(z[:, :16]) * z[:, 16:]
        f.backward(g.double())
        # The bias gradient is summed before rounding to 8 bits.
        torch.testing.assert_close(bias.bias.grad.double(), b.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad.double(), v.grad, rtol=0.3, atol=0.2)


@pytest.mark.parametrize("mode", MODES)
def test_quantised_linear(mode):
    model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    for linear in (model[0].basic_ops[0], model[2].basic_ops[0]):
        linear.set_quantizer("forward", 0, quantizers(E4M3)[mode])
        linear.set_quantizer("forward", 1, quantizers(E4M3)[mode])
        linear.set_quantizer("backward", 0, quantizers(E5M2)[mode])
    x = torch.randn(8, 32, requires_grad=True)
    y = model(x)
    y.sum().backward()
    w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in model.parameters())
    v = x.detach().clone().requires_grad_()
    expected = F.linear(gelu(F.linear(v, w1, b1)), w2, b2)
    expected.sum().backward()
    torch.testing.assert_close(y, expected, rtol=0.2, atol=0.15)
    for actual, exact in zip([x, *model.parameters()], [v, w1, b1, w2, b2], strict=False):
        error = (actual.grad - exact.grad).norm() / exact.grad.norm()
        assert error < 0.12


def test_bias_quantises_its_gradient():
    before = Probe(grad_quantizer=MXFP8Quantizer(E5M2))
    model = ops.Sequential(before, ops.Bias(32), ops.Identity())
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x)
    g = torch.randn_like(y)
    y.backward(g)
    assert isinstance(before.seen[1], QuantizedTensor)
    torch.testing.assert_close(model[1].bias.grad, g.sum(0))
    torch.testing.assert_close(x.grad, g, rtol=0.13, atol=1e-3)


def test_quantize_op():
    q, g = quantizers(E4M3)["current"], quantizers(E5M2)["current"]
    x = torch.randn(4, 32, requires_grad=True)
    y = ops.Quantize(quantizer=q)(x)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, q(x.detach()).dequantize())
    grad = torch.randn(4, 32)
    y.backward(grad)
    assert torch.equal(x.grad, grad)
    x.grad = None
    ops.Quantize(forward=False, backward=True, grad_quantizer=g)(x).backward(grad)
    torch.testing.assert_close(x.grad, g(grad).dequantize())
    # The previous op writes the codes. The next op reads them.
    model = ops.Sequential(ops.GELU(), ops.Quantize(quantizer=q), ops.SiLU())
    torch.testing.assert_close(model(x), F.silu(q(gelu(x.detach())).dequantize()),
                               rtol=1e-4, atol=1e-5)  # fmt: skip
    assert ops.Quantize().num_quantizers("forward") == 1
    assert ops.Quantize().num_quantizers("backward") == 0


@pytest.mark.parametrize("mode", MODES)
def test_quantised_input(mode):
    q = quantizers(E4M3)[mode]
    x = torch.randn(4, 64, requires_grad=True)
    encoded = q(x)
    exact = encoded.dequantize().detach().requires_grad_()
    for op, f in ((ops.GELU(), gelu), (ops.SwiGLU(), lambda v: F.silu(v[:, :32]) * v[:, 32:]),
                  (ops.ConstantScale(2.0), lambda v: 2 * v)):  # fmt: skip
        y, expected = op(encoded), f(exact)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        g = torch.randn_like(y)
        (actual,) = torch.autograd.grad(y, x, g, retain_graph=True)  # straight-through
        (wanted,) = torch.autograd.grad(expected, exact, g)
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_reads_an_encoded_input(mode, usages, monkeypatch):
    """The codes are operands of the products: nothing is decoded or encoded again."""
    torch.manual_seed(0)
    q = quantizers(E4M3)[mode]
    q.set_usage(rowwise=usages[0], columnwise=usages[1])
    model = ops.Sequential(ops.Linear(64, 96), ops.SwiGLU(), ops.Linear(48, 32, bias=False))
    x = torch.randn(3, 5, 64, requires_grad=True)
    encoded = q(x)
    exact = encoded.dequantize().detach().requires_grad_()
    want = model(exact)
    g = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (exact, *model.parameters()), g)
    ran = []
    run = Plan.run

    def count(self, pass_, *args, **more):
        ran.append((self, pass_ != FORWARD))
        return run(self, pass_, *args, **more)

    monkeypatch.setattr(Plan, "run", count)
    monkeypatch.setattr(QuantizedTensor, "decode", None)
    y = model(encoded)
    made = torch.autograd.grad(y, (x, *model.parameters()), g)
    assert [backward for _, backward in ran] == [False, True]
    inputs = {b.name for b in ran[0][0].buffers if b.role == "input" and b.name[0] == "x"}
    assert inputs == {
        name + end
        for name, used in zip(("x", "x.t"), usages, strict=True)
        for end in ("", ".scale_inv")
        if used
    }
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    for mine, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_parts_of_an_encoded_input_are_checked():
    model = ops.Sequential(ops.Linear(64, 32), ops.GELU())
    q = quantizers(E4M3)["block1x128"]
    wrong = {
        "rowwise_data": lambda t: t.view(torch.int8),
        "rowwise_scale_inv": lambda t: t[:, :2],
        "columnwise_data": lambda t: t[:5],
        "columnwise_scale_inv": lambda t: t.to("meta"),
    }
    for name, change in wrong.items():
        x = q(torch.randn(6, 64))
        setattr(x, name, change(getattr(x, name)))
        with pytest.raises(ValueError, match="the input"):
            model(x)


def test_a_quantize_at_the_end_is_part_of_the_plan(monkeypatch):
    torch.manual_seed(0)
    q = quantizers(E4M3)["mxfp8"]
    model = ops.Sequential(ops.Linear(64, 32), ops.GELU(), ops.Quantize(quantizer=q))
    x = torch.randn(7, 64)
    want = q(ops.Sequential(*list(model)[:2])(x)).dequantize()
    ran = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *a, **k: (ran.append(self), run(self, *a, **k)))
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    assert len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37,), (2, 130), (3, 1, 32), (0, 4)])
def test_cache_quantized_input(shape, dtype):
    torch.manual_seed(0)  # a value below the smallest code would change its derivative
    packed = []
    for name, f in (("GELU", gelu), ("ReLU", F.relu), ("Activation", F.mish)):
        args = ("mish",) if name == "Activation" else ()
        op = getattr(ops, name)(*args, cache_quantized_input=True)
        x = torch.randn(shape).to(dtype).requires_grad_()
        packed.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t) or t, lambda t: t
        )
        with hooks:
            y = op(x)
        assert [t.dtype for t in packed] == [E4M3, torch.float32]
        assert all(float(s) == 0 or torch.frexp(s)[0] == 0.5 for s in packed[1].flatten())
        v = x.detach().double().requires_grad_()
        expected = f(v)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad.double(), v.grad, rtol=0.15, atol=0.12)


def test_nothing_is_cached_without_gradients(monkeypatch):
    from tenon.torch.ops.basic import _activation

    def refuse():
        raise AssertionError("quantised without need")

    monkeypatch.setattr(_activation, "_cache_quantizer", refuse)
    op = ops.SwiGLU(cache_quantized_input=True)
    x = torch.randn(2, 8)
    op(x)
    with torch.no_grad():
        op(x.requires_grad_())
    with pytest.raises(AssertionError):
        op(x)


def test_cached_input_behind_a_bias():
    model = ops.Sequential(ops.Bias(128), ops.GELU(cache_quantized_input=True))
    torch.nn.init.normal_(model[0].bias)
    x = torch.randn(4, 128, requires_grad=True)
    model(x).sum().backward()
    forward, backward = model.groups()[0][0].describe()
    assert forward == backward == ["Segment(Bias, GELU)"]
    v, b = (t.detach().double().requires_grad_() for t in (x, model[0].bias))
    gelu(v + b).sum().backward()
    torch.testing.assert_close(x.grad.double(), v.grad, rtol=0.15, atol=0.12)
    torch.testing.assert_close(model[0].bias.grad.double(), b.grad, rtol=0.15, atol=0.3)


def test_quantizer_slots():
    linear = ops.BasicLinear(4, 4)
    assert (linear.num_quantizers("forward"), linear.num_quantizers("backward")) == (2, 1)
    assert linear.get_input_quantizer() is None and linear.get_grad_output_quantizer() is None
    q = MXFP8Quantizer(E4M3)
    linear.set_quantizer("forward", 0, q)
    assert linear.get_quantizer("forward", 0) is q and linear.get_input_quantizer() is q
    assert ops.FusedOperation([linear, ops.Bias(4)]).get_input_quantizer() is q
    assert ops.GELU().get_input_quantizer() is None
    with pytest.raises(IndexError, match="it has 2"):
        linear.get_quantizer("forward", 2)
    with pytest.raises(ValueError, match="'forward' or 'backward'"):
        linear.get_quantizer("sideways", 0)


def _by_data(weight):
    weight.data.fill_(1.0)


def _by_numpy(weight):
    if not weight.is_cpu:
        pytest.skip("NumPy reads memory of the CPU")
    weight.detach().numpy()[...] = 1.0


def _by_new_data(weight):
    weight.data = torch.ones_like(weight)


def _by_a_fused_optimizer(weight):
    weight.grad = weight.detach() - 1.0
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def _in_inference_mode(weight):
    with torch.inference_mode():
        weight.detach().fill_(1.0)


WRITES = [_by_data, _by_numpy, _by_new_data, _by_a_fused_optimizer, _in_inference_mode]


@pytest.mark.parametrize("make", [ops.BasicLinear, ops.Linear])
@pytest.mark.parametrize("write", WRITES)
def test_a_weight_is_encoded_in_every_forward(make, write):
    """Also detects writes that do not change torch's version counter."""
    op = make(32, 32)
    basic = op if make is ops.BasicLinear else op.basic_ops[0]
    basic.set_quantizer("forward", 1, MXFP8Quantizer("e4m3"))
    x = torch.ones(4, 32, requires_grad=True)
    op(x)
    write(basic.weight)
    y = op(x)
    assert (y == 32).all()
    y.sum().backward()
    assert (x.grad == 32).all()


def test_a_delayed_scale_changes_under_an_unchanged_weight():
    """The scale of the first forward is 1, which loses most of this weight."""
    scale, amax = torch.ones(1), torch.zeros(1)
    op = ops.BasicLinear(32, 32)
    op.set_quantizer("forward", 1, Float8Quantizer(scale, amax, "e4m3"))
    with torch.no_grad():
        op.weight.copy_(torch.full((32, 32), 2.0**-12))
    x = torch.ones(4, 32)
    assert (op(x) == 0).all()
    scale.fill_(2.0**12)
    assert (op(x) == 32 * 2.0**-12).all()


@pytest.mark.parametrize("fused", [False, True])
def test_training_with_a_quantised_weight_follows_the_weight(fused):
    """After each step the output uses the current weight."""
    torch.manual_seed(0)
    quantizer = MXFP8Quantizer("e4m3")
    model = ops.Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
    for linear in model:
        linear.basic_ops[0].set_quantizer("forward", 1, quantizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    for _ in range(20):
        optimizer.zero_grad()
        y = model(x)
        expected = x
        for linear in model:
            w = quantizer(linear.weight.detach()).dequantize()
            expected = F.linear(expected, w, linear.bias.detach())
        torch.testing.assert_close(y, expected)
        ((y - target) ** 2).mean().backward()
        optimizer.step()


_FSDP = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import tenon.torch.ops as ops
from tenon.torch.quantizer import MXFP8Quantizer
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
torch.manual_seed(0)
def model():
    torch.manual_seed(0)
    blocks = [ops.Sequential(ops.Linear(32, 32), ops.GELU()) for _ in range(2)]
    for block in blocks:
        block[0].basic_ops[0].set_quantizer("forward", 1, MXFP8Quantizer("e4m3"))
    return torch.nn.Sequential(*blocks)
def sharded(made):
    mesh = init_device_mesh("cpu", (2,))
    for block in made:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(made, mesh=mesh)
x, target = torch.randn(64, 32), torch.randn(64, 32)
def losses(made):
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = ((made(x) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
alone, apart = losses(model()), losses(sharded(model()))
dist.destroy_process_group()
assert len(set(alone)) == 8
torch.testing.assert_close(torch.tensor(apart), torch.tensor(alone), rtol=1e-5, atol=0)
print("compared", file=sys.stderr)
"""


def test_a_sharded_weight_is_encoded_in_every_forward(tmp_path):
    """FSDP gathers the weight into reused memory without a version change."""
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    command = [sys.executable, "-c", _FSDP, str(tmp_path / "store")]
    # The library starts no threads of its own, so a thread that is left at the end is torch's.
    environment = {**os.environ, "TENON_THREADS": "1"}
    options = {"stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, rank], **options) for rank in ("0", "1")]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    # After the comparison torch sometimes ends with a running thread, also without this library.
    left = "compared\nterminate called without an active exception\n"
    for rank, text in zip(ranks, told, strict=True):
        aborted = rank.returncode == -signal.SIGABRT and text.endswith(left)
        assert aborted or (rank.returncode == 0 and "compared" in text), text[-3000:]


def test_quantizers_are_checked():
    with pytest.raises(TypeError, match="the quantizer is a str"):
        ops.BasicLinear(4, 4).set_quantizer("forward", 0, "mxfp8")
