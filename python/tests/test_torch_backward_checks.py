"""Tests that the inputs of a backward pass are checked before a kernel reads them."""

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.functional as tf  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import jit  # noqa: E402
from tenon.torch.quantizer import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
)

ROWS, COLS = 64, 32
REFUSED = (RuntimeError, ValueError, TypeError, NotImplementedError)


class Wrong(ops.BasicOperation):
    """The identity with a custom gradient."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def op_forward(self, ctx, input_, **unused):
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return self.gradient(grad_output)


GRADIENTS = {
    "1 x 1": lambda g: g[:1, :1],
    "fewer rows": lambda g: g[:3],
    "more columns": lambda g: torch.cat((g, g), -1),
    "transposed": lambda g: g.t().contiguous(),
    "flat": lambda g: g.reshape(-1),
    "empty": lambda g: g[:0],
    "another device": lambda g: g.to("meta"),
    "a number": lambda g: 1.0,
    "nothing": lambda g: None,
}
BEFORE = {
    "planned": lambda: [ops.Linear(COLS, COLS), ops.GELU(), ops.Linear(COLS, COLS)],
    "RMSNorm": lambda: [ops.RMSNorm(COLS)],
    "LayerNorm": lambda: [ops.LayerNorm(COLS)],
    "GELU": lambda: [ops.GELU()],
    "Bias": lambda: [ops.Bias(COLS)],
    "Dropout": lambda: [ops.Dropout(0.5)],
    "bias, dropout": lambda: [ops.Bias(COLS), ops.Dropout(0.5)],
    "L2": lambda: [ops.L2Normalization()],
    "bias, activation": lambda: [ops.Bias(COLS), ops.SiLU()],
    "linear": lambda: [ops.BasicLinear(COLS, COLS)],
    "nothing": lambda: [],
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_of_user_ops(before, gradient):
    model = ops.Sequential(*BEFORE[before](), Wrong(GRADIENTS[gradient]), ops.SiLU())
    x = torch.randn(ROWS, COLS, requires_grad=True)
    y = model(x)
    with pytest.raises((RuntimeError, TypeError), match="Wrong"):
        y.sum().backward()


class Fewer(ops.BasicOperation):
    """Returns fewer rows than its input, and a gradient with as many."""

    def op_forward(self, ctx, input_, **unused):
        return input_[:2]

    def op_backward(self, ctx, grad_output):
        return grad_output


@pytest.mark.parametrize("after", BEFORE)
def test_rows_of_user_ops(after):
    model = ops.Sequential(ops.RMSNorm(COLS), Fewer(), *BEFORE[after]())
    y = model(torch.randn(ROWS, COLS, requires_grad=True))
    assert y.shape == (2, COLS)
    with pytest.raises(RuntimeError, match=r"Fewer: the gradient of its input .*\(2, 32\)"):
        y.sum().backward()


def test_norms_with_a_forward_of_ones_own():
    class Short(ops.RMSNorm):
        def op_forward(self, ctx, input_, **unused):
            return super().op_forward(ctx, input_)[:2]

    class Saves(ops.RMSNorm):
        def op_forward(self, ctx, input_, **unused):
            y = super().op_forward(ctx, input_)
            x, r = ctx.saved_tensors
            ctx.save_for_backward(x, self.change(r))
            return y

    x = torch.randn(ROWS, COLS, requires_grad=True)
    with pytest.raises(RuntimeError, match="Short: the gradient of its output"):
        Short(COLS)(x).sum().backward()
    for change in (lambda r: r[:1], lambda r: r.half(), lambda r: r.double(), lambda r: r[:0]):
        op = Saves(COLS)
        op.change = change
        with pytest.raises(RuntimeError, match="Saves: statistic 0"):
            op(x).sum().backward()


class ChannelGradient(ops.BasicOperation):
    num_extra_inputs = 1

    def __init__(self, change):
        super().__init__()
        self.change = change

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        return input_ + basic_op_extra_inputs[0][0], [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output, [()], [(self.change(grad_output),)]


@pytest.mark.parametrize("change", [lambda g: g[:1], lambda g: g[:1, :1], lambda g: g.sum()])
@pytest.mark.parametrize("planned", [False, True])
def test_gradients_of_channels(change, planned):
    """A gradient of another shape would be broadcast, or read past its end."""
    made, add = ops.MakeExtraOutput(), ChannelGradient(change)
    made.set_extra_output_channel(0, "r", output_to_caller=False)
    add.set_extra_input_channel(0, "r")
    before = [ops.Linear(COLS, COLS), ops.GELU()] if planned else []
    model = ops.Sequential(*before, made, ops.SiLU(), ops.GELU(), add)
    y = model(torch.randn(ROWS, COLS, requires_grad=True))
    with pytest.raises(RuntimeError, match="ChannelGradient: the gradient of an extra input"):
        y.sum().backward()


def scaled(x):
    return ops.ScaledSReLU()(x, torch.ones(ROWS, requires_grad=True))


def quantised():
    linear = ops.BasicLinear(COLS, COLS)
    for slot in (0, 1):
        linear.set_quantizer("forward", slot, MXFP8Quantizer("e4m3"))
    return ops.Sequential(linear, ops.GELU(cache_quantized_input=True))


def bias():
    return torch.randn(COLS, requires_grad=True)


CALLS = {
    **{name: lambda make=make: ops.Sequential(*make()) for name, make in BEFORE.items() if make()},
    "scaled": lambda: scaled,
    "quantised": quantised,
    "cached": lambda: ops.GELU(cache_quantized_input=True),
    "functional": lambda: tf.gelu,
    "functional with bias": lambda: lambda x: tf.gelu(x, bias=bias()),
    "functional of two": lambda: lambda x: tf.swiglu(x, b=x.detach()),
    "functional scaled": lambda: lambda x: tf.srelu(x, scale=torch.ones(ROWS)),
    "dropout": lambda: lambda x: tf.dropout(x, 0.5),
    "bias_dropout_add": lambda: lambda x: tf.bias_dropout_add(x, bias(), x, 0.5),
    "l2normalization": lambda: lambda x: tf.l2normalization(x),
    "lazy": lambda: jit.lazy_compile(lambda x: torch.tanh(x) * x),
    "bias_gelu_fused": lambda: lambda x: jit.bias_gelu_fused(x, bias()),
}
del CALLS["Bias"]  # it saves nothing
UNPACKS = {
    "another dtype": lambda t: t.to(torch.float16 if t.is_floating_point() else torch.int32),
    "a wider dtype": lambda t: t.double() if t.is_floating_point() else t.short(),
    "another size": lambda t: t.reshape(-1)[:1],
    "fewer rows": lambda t: t[:1],
    "another device": lambda t: t.to("meta"),
    "flat": lambda t: torch.stack((t, t)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("unpack", UNPACKS)
def test_saved_tensors_that_come_back_as_others(call, unpack):
    model = CALLS[call]()
    x = torch.randn(ROWS, COLS, requires_grad=True)
    change = UNPACKS[unpack]
    # Each saved tensor separately, then all of them.
    count = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: count.append(t) or t, lambda t: t):
        model(x)
    assert count
    for which in (*range(len(count)), None):
        numbers = iter(range(100))
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, n=numbers: (next(n), t),
            lambda k, w=which: change(k[1]) if w is None or k[0] == w else k[1],
        )
        with hooks:
            y = model(x)
        if which is not None and change(count[which]).shape == count[which].shape:
            if change(count[which]).dtype == count[which].dtype and unpack != "another device":
                continue
        with pytest.raises(RuntimeError, match="saved tensor .* in the forward pass"):
            y.sum().backward()


@pytest.mark.parametrize("call", ["planned", "linear", "RMSNorm", "LayerNorm"])
def test_parameters_that_change_between_the_passes(call):
    others = (
        lambda p: p.data.bfloat16(),
        lambda p: p.data.double(),
        lambda p: p.data.reshape(-1)[:1],
    )
    for other in others:
        model = ops.Sequential(*BEFORE[call]())
        y = model(torch.randn(ROWS, COLS, requires_grad=True))
        for p in model.parameters():
            p.data = other(p)
        with pytest.raises(REFUSED, match="BasicLinear|Linear|RMSNorm|LayerNorm|tensor|size"):
            y.sum().backward()


def test_hooks_that_change_only_strides():
    """Saved tensors may have any strides."""

    def spread(t):
        if not t.dim():
            return t
        wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        wide[..., ::2] = t
        return wide[..., ::2]

    for name, make in CALLS.items():
        if name in ("quantised", "cached"):  # torch has no strided writes of 8-bit types
            continue
        model = make()
        x = torch.randn(ROWS // 4, 4, COLS, requires_grad=True)
        if name in ("scaled", "functional scaled"):
            x = x.detach().reshape(ROWS, COLS).requires_grad_()
        g = torch.randn_like(x)
        torch.manual_seed(3)
        (wanted,) = torch.autograd.grad(model(x), x, g)
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, spread):
            y = model(x)
        try:
            (found,) = torch.autograd.grad(y, x, g)
        except ValueError as e:  # a random state must be contiguous
            assert "random" in str(e)
            continue
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "quantizer",
    [MXFP8Quantizer("e4m3"), Float8CurrentScalingQuantizer("e4m3"), Float8BlockQuantizer("e4m3")],
)
def test_quantised_tensors_whose_parts_changed(quantizer):
    changes = {
        "fewer rows": lambda t: t.view(torch.uint8)[:1].view(t.dtype),
        "flat": lambda t: t.reshape(-1)[:1],
        "empty": lambda t: t[:0],
        "another dtype": lambda t: t.to(torch.float16),
        "none": lambda t: None,
        "another device": lambda t: t.to("meta"),
    }
    for part in ("rowwise_data", "rowwise_scale_inv"):
        for name, change in changes.items():
            q = quantizer(torch.randn(256, 256))
            t = getattr(q, part)
            if t.numel() == 1 and name in ("fewer rows", "flat"):
                continue  # one scale for the tensor
            if name == "none" and part == "rowwise_data":
                q.columnwise_data = None
            if name == "none" and part == "rowwise_scale_inv":
                q.columnwise_scale_inv = None  # both encodings share one scale
            setattr(q, part, change(t))
            with pytest.raises((*REFUSED, AttributeError)):
                q.dequantize()
            with pytest.raises((*REFUSED, AttributeError)):
                ops.GELU()(q)
