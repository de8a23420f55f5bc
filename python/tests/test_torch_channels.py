"""Tests of gradients through channels and extra tensors, against plain torch in float64."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.ops as ops  # noqa: E402

F = torch.nn.functional
ROWS = 5

SCALED = {
    "ScaledSReLU": (lambda: ops.ScaledSReLU(), lambda x: F.relu(x) ** 2, 1),
    "ScaledSwiGLU": (lambda: ops.ScaledSwiGLU(), lambda x: _halves(x, F.silu), 2),
    "ScaledActivation": (
        lambda: ops.ScaledActivation("tanh"),
        torch.tanh,
        1,
    ),
    "ScaledSiTUGLU": (
        lambda: ops.ScaledSiTUGLU(),
        lambda x: _halves(
            x, lambda a: 4 * torch.tanh(a / 4) * torch.sigmoid(a), lambda b: 25 * torch.tanh(b / 25)
        ),
        2,
    ),
    "ScaledClampedQGeGLU": (
        lambda: ops.ScaledClampedQGeGLU(),
        lambda x: _halves(
            x,
            lambda a: a.clamp(max=7) * torch.sigmoid(1.702 * a.clamp(max=7)),
            lambda b: b.clamp(-7, 7) + 1,
        ),
        2,
    ),
}


def _halves(x, f, g=lambda b: b):
    a, b = x.chunk(2, -1)
    return f(a) * g(b)


class UserScale(ops.BasicOperation):
    """y = x·s as for Transformer Engine: computes only the requested gradients."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ctx, (s,) = basic_op_ctxs[0], basic_op_extra_inputs[0]
        ctx.s_requires_grad, ctx.x_requires_grad = s.requires_grad, input_.requires_grad
        ctx.save_for_backward(input_, s)
        return input_ * s, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, s = basic_op_ctxs[0].saved_tensors
        ctx = basic_op_ctxs[0]
        ds = (grad_output * x).sum(-1, keepdim=True) if ctx.s_requires_grad else None
        dx = grad_output * s if ctx.x_requires_grad else torch.zeros_like(grad_output)
        return dx, [()], [(ds,)]


class UserSine(ops.BasicOperation):
    """An op that checks whether its input needs a gradient. Plans cannot include it."""

    def op_forward(self, ctx, input_, **unused):
        ctx.wanted = input_.requires_grad
        ctx.save_for_backward(input_)
        return torch.sin(input_)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * torch.cos(x) if ctx.wanted else torch.zeros_like(grad_output)


def make(name, shown):
    op = ops.MakeExtraOutput()
    op.set_extra_output_channel(0, name, output_to_caller=shown)
    return op


def read(op, name):
    op.set_extra_input_channel(0, name)
    return op


def compare(model, reference, x, *, frozen=(), x_grad=True):
    """Compares value, extra outputs and all gradients. `reference(x, *parameters)` is plain
    torch.
    """
    torch.manual_seed(1)
    for i, p in enumerate(model.parameters()):
        with torch.no_grad():
            p.copy_(torch.randn_like(p))
        p.requires_grad_(i not in frozen)
    x = x.clone().requires_grad_(x_grad)
    tensors = [x, *model.parameters()]
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    got, wanted = model(x), reference(*doubles)
    got = got if isinstance(got, tuple) else (got,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    gs = [torch.randn_like(a) for a in got]
    assert got[0].requires_grad == wanted[0].requires_grad
    if not got[0].requires_grad:
        return
    kept = [(a, g) for a, g in zip(got, gs, strict=True) if a.requires_grad]
    torch.autograd.backward([a for a, _ in kept], [g for _, g in kept])
    kept = [(b, g.double()) for b, g in zip(wanted, gs, strict=True) if b.requires_grad]
    torch.autograd.backward([b for b, _ in kept], [g for _, g in kept])
    for t, d in zip(tensors, doubles, strict=True):
        assert (t.grad is None) == (d.grad is None)
        if t.grad is not None:
            torch.testing.assert_close(t.grad.double(), d.grad, rtol=1e-4, atol=1e-4)


TRAINED = {
    "x": ((0, 1), True),
    "parameters": ((), False),
    "both": ((), True),
    "none": ((0, 1), False),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("opaque", [True, False])
def test_scales_from_a_channel(name, trained, shown, opaque):
    op, f, inputs = SCALED[name]
    frozen, x_grad = TRAINED[trained]
    middle = [UserSine()] if opaque else []
    model = ops.Sequential(
        ops.GELU(),
        make("s", shown),
        ops.Linear(1, 4 * inputs),
        *middle,
        read(op(), "s"),
    )

    def reference(x, w, b):
        s = F.gelu(x, approximate="tanh")
        y = F.linear(s, w, b)
        y = f(torch.sin(y) if opaque else y) * s
        return (y, s) if shown else y

    compare(model, reference, torch.randn(ROWS, 1), frozen=frozen, x_grad=x_grad)


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("shown", [True, False])
def test_user_ops_ask_what_needs_a_gradient(trained, shown):
    frozen, x_grad = TRAINED[trained]
    model = ops.Sequential(
        ops.Linear(3, 1),
        UserSine(),
        make("s", shown),
        ops.GELU(),
        read(UserScale(), "s"),
        UserSine(),
    )

    def reference(x, w, b):
        s = torch.sin(F.linear(x, w, b))
        y = torch.sin(F.gelu(s, approximate="tanh") * s)
        return (y, s) if shown else y

    compare(model, reference, torch.randn(ROWS, 3), frozen=frozen, x_grad=x_grad)


@pytest.mark.parametrize("trained", ["x", "both"])
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_residual_and_two_readers_of_one_channel(trained, opaque, shown):
    frozen, x_grad = TRAINED[trained]
    middle = [UserSine()] if opaque else [ops.SiLU()]
    model = ops.Sequential(
        ops.RMSNorm(6),
        make("r", shown),
        *middle,
        ops.BasicLinear(6, 6),
        read(ops.AddExtraInput(), "r"),
        ops.GELU(),
        read(ops.AddExtraInput(), "r"),
    )

    def reference(x, gain, w):
        r = F.rms_norm(x, (6,), gain, 1e-5)
        y = F.linear(torch.sin(r) if opaque else F.silu(r), w) + r
        y = F.gelu(y, approximate="tanh") + r
        return (y, r) if shown else y

    compare(model, reference, torch.randn(ROWS, 6), frozen=frozen, x_grad=x_grad)


def test_a_channel_before_everything_that_is_trained():
    """Values before the first trained parameter need no gradient."""
    asked = []

    class Asks(UserScale):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **rest):
            asked.append((input_.requires_grad, basic_op_extra_inputs[0][0].requires_grad))
            return super().fuser_forward(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **rest
            )

    def model():
        return ops.Sequential(
            ops.GELU(), make("s", False), ops.Linear(1, 4), read(Asks(), "s"), UserSine()
        )

    def reference(x, w, b):
        s = F.gelu(x, approximate="tanh")
        return torch.sin(F.linear(s, w, b) * s)

    x = torch.randn(ROWS, 1)
    for frozen, x_grad, told in (
        ((), False, (True, False)),
        ((0,), False, (True, False)),
        ((0, 1), True, (True, True)),
        ((0, 1), False, (False, False)),
    ):
        asked.clear()
        compare(model(), reference, x, frozen=frozen, x_grad=x_grad)
        assert asked == [told]
    made = model()
    with torch.no_grad():
        made(x.clone().requires_grad_())
    assert asked[-1] == (False, False)


def test_the_callers_tensors_are_left_alone():
    x = torch.randn(ROWS, 1, requires_grad=True)

    class Hands(ops.BasicOperation):
        """Returns its input and its extra input unchanged."""

        num_extra_inputs = num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            return basic_op_extra_inputs[0][0], [(input_,)]

        def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs, **unused):
            (g,) = basic_op_grad_extra_outputs[0]
            return g, [()], [(grad_output,)]

    model = ops.Sequential(
        ops.GELU(), make("s", True), ops.SiLU(), read(Hands(), "s"), ops.Identity()
    )
    y, s, silu = model(x)
    assert y.grad_fn is not None and s.grad_fn is not None and silu.grad_fn is not None
    assert not y.is_leaf and x.is_leaf
    gs = [torch.randn_like(t) for t in (y, s, silu)]
    torch.autograd.backward((y, s, silu), gs)
    v = x.detach().double().requires_grad_()
    t = F.gelu(v, approximate="tanh")
    torch.autograd.backward((t, t, F.silu(t)), [g.double() for g in gs])
    torch.testing.assert_close(x.grad.double(), v.grad, rtol=1e-4, atol=1e-5)
    del y, s, silu


def test_nothing_is_kept_alive():
    """A value whose requires_grad was read is freed with its graph."""
    import gc
    import weakref

    alive = []

    class Watched(UserSine):
        def op_forward(self, ctx, input_, **unused):
            alive.append(weakref.ref(input_))
            return super().op_forward(ctx, input_)

    model = ops.Sequential(ops.GELU(), Watched(), make("s", False), ops.SiLU())
    model.append(read(UserScale(), "s"))
    gc.disable()
    try:
        y = model(torch.randn(ROWS, 1, requires_grad=True))
        y.sum().backward()
        del y
        assert [r() for r in alive] == [None]
        model(torch.randn(ROWS, 1, requires_grad=True))
        assert [r() for r in alive] == [None, None]
    finally:
        gc.enable()


def test_quantised_values_say_it_too():
    asked = []

    class Asks(ops.BasicOperation):
        def num_quantizers(self, mode):
            return int(mode == "forward")

        def op_forward(self, ctx, input_, **unused):
            asked.append((type(input_).__name__, input_.requires_grad))
            return input_.dequantize() * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2

    from tenon.torch.quantizer import MXFP8Quantizer

    op = Asks()
    op.set_quantizer("forward", 0, MXFP8Quantizer("e4m3", columnwise=False))
    model = ops.Sequential(ops.GELU(), op, ops.GELU())
    for wanted, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            model(torch.randn(4, 32).requires_grad_(wanted))
        assert asked[-1] == ("QuantizedTensor", wanted and grad)
