"""Tests of operations and fusions of users, together with built-in ones."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch.ops.fuser import OperationFuser  # noqa: E402
from test_torch_ops_fusion import compare, gelu, stages  # noqa: E402

F = torch.nn.functional


@contextlib.contextmanager
def registered(kind, function, **options):
    getattr(ops, f"register_{kind}_fusion")(function, **options)
    try:
        yield
    finally:
        getattr(ops, f"unregister_{kind}_fusion")(function)


class Double(ops.BasicOperation):
    def op_forward(self, ctx, input_, **kwargs):
        assert set(kwargs) == {"prev_op_grad_output_quantizer", "next_op_input_quantizer"}
        assert ctx.saved_tensors == ()
        ctx.save_for_backward(input_)
        ctx.anything = "kept"
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        assert len(ctx.saved_tensors) == 1 and ctx.anything == "kept"
        return grad_output * 2


def test_opaque_op_between_fusible_ones():
    model = ops.Sequential(
        ops.BasicLinear(4, 8), ops.Bias(8), Double(), ops.Bias(8), ops.GELU(), Double()
    )
    compare(
        model,
        lambda x, w, b, c: 2 * gelu(2 * F.linear(x, w, b) + c),
        torch.randn(3, 4),
    )
    forward, _ = stages(model)
    assert forward == ["Segment(BasicLinear, Bias)", "Double", "Segment(Bias, GELU)", "Double"]


def test_overridden_ops_are_respected():
    class Loud(ops.GELU):
        def op_forward(self, ctx, input_, **kwargs):
            return super().op_forward(ctx, input_) + 1

    class Impl(ops.GELU):
        def _activation_forward_impl(self, input_, quantizer):
            return super()._activation_forward_impl(input_, quantizer) + 1

    class OwnBackward(ops.GELU):
        def op_backward(self, ctx, grad_output):
            return grad_output * 0 + 3

    class OwnBias(ops.Bias):
        def op_forward(self, ctx, input_, **kwargs):
            return super().op_forward(ctx, input_) + 1

    class OwnLinear(ops.BasicLinear):
        def op_forward(self, ctx, input_, **kwargs):
            return super().op_forward(ctx, input_) + 1

    class Quiet(ops.GELU):
        """Overrides no method that runs."""

    def model(linear=ops.BasicLinear, bias=ops.Bias, activation=ops.GELU):
        return ops.Sequential(linear(4, 4), bias(4), activation())

    x = torch.randn(3, 4)
    for made in (model(activation=Loud), model(activation=Impl)):
        compare(made, lambda x, w, b: gelu(F.linear(x, w, b)) + 1, x)
        assert stages(made)[0] == ["Segment(BasicLinear, Bias)", type(made[2]).__name__]
    for made in (model(bias=OwnBias), model(linear=OwnLinear)):
        compare(made, lambda x, w, b: gelu(F.linear(x, w, b) + 1), x)
    made = model(activation=OwnBackward)
    v = x.clone().requires_grad_()
    made(v).sum().backward()
    torch.testing.assert_close(v.grad, 3 * made[0].weight.sum(0).expand(3, 4))
    made = model(activation=Quiet)
    made(x)
    assert stages(made)[0] == ["Segment(BasicLinear, Bias, Quiet)"]
    plain = ops.GELU()
    plain.op_forward = lambda ctx, input_, **_: input_ * 7
    torch.testing.assert_close(ops.Sequential(ops.Bias(4), plain)(x), 7 * x)


def test_an_activation_in_plain_torch():
    class Cube(ops.basic._ActivationOperation):
        def _activation_forward_impl(self, input_, quantizer):
            assert quantizer is None and isinstance(input_, torch.Tensor)
            return input_**3

        def _activation_backward_impl(self, grad_output, input_, quantizer):
            return 3 * grad_output * input_**2

    for cached in (False, True):
        op = Cube(cache_quantized_input=cached)
        x = torch.randn(2, 128, requires_grad=True)
        y = op(x)
        torch.testing.assert_close(y, x**3)
        y.sum().backward()
        tolerance = 0.15 if cached else 1e-5
        torch.testing.assert_close(x.grad, 3 * x**2, rtol=tolerance, atol=1e-2)
    with pytest.raises(TypeError, match="Cube.*float64"):
        Cube()(torch.randn(2, 2, dtype=torch.float64))
    with pytest.raises(TypeError):
        ops.basic._ActivationOperation()


def test_parameters_of_a_custom_op():
    class Gain(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor(2.0))

        def op_forward(self, ctx, input_):
            ctx.save_for_backward(input_, self.gain)
            return input_ * self.gain

        def op_backward(self, ctx, grad_output):
            x, gain = ctx.saved_tensors
            return grad_output * gain, [(grad_output * x).sum()]

    class Forgetful(Gain):
        def op_backward(self, ctx, grad_output):
            return grad_output

    class Generous(Gain):
        def op_backward(self, ctx, grad_output):
            return grad_output, (None, None)

    compare(ops.Sequential(ops.GELU(), Gain()), lambda x, g: gelu(x) * g, torch.randn(3, 4))
    compare(Gain(), lambda x, g: x * g, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="Forgetful.*tensor alone"):
        Forgetful()(torch.randn(2)).sum().backward()
    with pytest.raises(RuntimeError, match="Generous: 2 parameter gradients"):
        Generous()(torch.randn(2)).sum().backward()


def test_custom_op_with_extra_tensors():
    class Route(ops.BasicOperation):
        num_extra_inputs = 1
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs,
                          prev_op_grad_output_quantizer, next_op_input_quantizer,
                          basic_op_kwargs):  # fmt: skip
            ((extra,),) = basic_op_extra_inputs
            basic_op_ctxs[0].save_for_backward(input_, extra)
            return input_ * extra, [(input_ + extra,)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            x, extra = basic_op_ctxs[0].saved_tensors
            ((g,),) = basic_op_grad_extra_outputs
            return grad_output * extra + g, [()], [(grad_output * x + g,)]

    x, e = (torch.randn(3, requires_grad=True) for _ in range(2))
    y, o = ops.Sequential(ops.ConstantScale(2.0), Route())(x, e)
    torch.testing.assert_close(y, 2 * x * e)
    torch.testing.assert_close(o, 2 * x + e)
    (y + 2 * o).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (e + 2))
    torch.testing.assert_close(e.grad, 2 * x + 2)

    class Blind(ops.BasicOperation):
        num_extra_inputs = 1

        def op_forward(self, ctx, input_, **kwargs):
            return input_

    with pytest.raises(RuntimeError, match="define fuser_forward"):
        Blind()(x, e)


class ForwardDoubleGelu(ops.FusedOperation):
    """Forward only. Saves the same tensors as the basic ops."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        type(self).calls += 1
        double, activation = basic_op_ctxs
        double.save_for_backward(input_)
        double.anything = "kept"
        activation.save_for_backward(2 * input_)
        return gelu(2 * input_), [(), ()]


class BackwardDoubleGelu(ops.FusedOperation):
    """Backward only. Reads the tensors that the basic ops save."""

    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        type(self).calls += 1
        (z,) = basic_op_ctxs[1].saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (grad,) = torch.autograd.grad(gelu(z), z, grad_output)
        return 2 * grad, [(), ()], [(), ()]


class BothDoubleGelu(ForwardDoubleGelu):
    """Both directions. May save any tensors."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        type(self).calls += 1
        basic_op_ctxs[0].save_for_backward(input_)
        return gelu(2 * input_), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        type(self).calls += 1
        (x,) = basic_op_ctxs[0].saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(gelu(2 * x), x, grad_output)
        return grad, [(), ()], [(), ()]


def fusion(cls, with_recipe):
    def fuse(ops_):
        done, at = [], 0
        while at < len(ops_):
            pair = ops_[at : at + 2]
            if [type(op) for op in pair] == [Double, ops.GELU]:
                done.append(cls(pair))
                at += 2
            else:
                done.append(ops_[at])
                at += 1
        return done

    if not with_recipe:
        return fuse

    def fuse_with_recipe(ops_, *, recipe):
        assert recipe is None
        return fuse(ops_)

    return fuse_with_recipe


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize(
    ("kind", "cls", "calls"),
    [
        ("forward", ForwardDoubleGelu, 1),
        ("backward", BackwardDoubleGelu, 1),
        ("forward_backward", BothDoubleGelu, 2),
    ],
)
def test_user_fusions(kind, cls, calls, prepend):
    model = ops.Sequential(ops.Linear(4, 6), Double(), ops.GELU(), ops.Bias(6), ops.ReLU())

    def expected(x, w, b, c):
        return F.relu(gelu(2 * F.linear(x, w, b)) + c)

    x = torch.randn(3, 4)
    compare(model, expected, x)
    cls.calls = 0
    function = fusion(cls, with_recipe=prepend)
    with registered(kind, function, prepend=prepend):
        compare(model, expected, x)  # an existing fuser uses it
        assert cls.calls == calls
        names = stages(model)
        name = f"{cls.__name__}(Double, GELU)"
        assert (name in names[0]) == ("forward" in kind.split("_"))
        assert (name in names[1]) == ("backward" in kind.split("_"))
    compare(model, expected, x)
    assert cls.calls == calls
    assert not any(cls.__name__ in name for names in stages(model) for name in names)
    with pytest.raises(ValueError, match="not registered"):
        getattr(ops, f"unregister_{kind}_fusion")(function)


def test_user_fusions_before_ours():
    """A user's backward fusion takes [Bias, GELU] before the built-in one, and x + b is saved."""

    class Mine(ops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
            (z,) = basic_op_ctxs[1].saved_tensors
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                (grad,) = torch.autograd.grad(gelu(z), z, grad_output)
            return grad, [(grad.sum(0),), ()], [(), ()]

    def fuse(ops_):
        if [type(op) for op in ops_[-2:]] != [ops.Bias, ops.GELU]:
            return ops_
        return [*ops_[:-2], Mine(ops_[-2:])]

    model = ops.Sequential(ops.Bias(5), ops.GELU())
    torch.nn.init.normal_(model[0].bias)
    x = torch.randn(3, 5)
    with registered("backward", fuse, prepend=True):
        compare(model, lambda x, b: gelu(x + b), x)
        assert stages(model) == (["Bias", "GELU"], ["Mine(Bias, GELU)"])
        linear = ops.Sequential(ops.Linear(5, 5), ops.GELU())
        compare(linear, lambda x, w, b: gelu(F.linear(x, w, b)), x)
        assert stages(linear)[1] == ["Segment(BasicLinear)", "Mine(Bias, GELU)"]
    compare(model, lambda x, b: gelu(x + b), x)
    assert stages(model) == (["Segment(Bias, GELU)"],) * 2


def test_fused_op_of_ones_own_in_a_sequential():
    for cls in (ForwardDoubleGelu, BackwardDoubleGelu, BothDoubleGelu):
        cls.calls = 0
        model = ops.Sequential(ops.ConstantScale(0.5), cls([Double(), ops.GELU()]))
        compare(model, gelu, torch.randn(3, 4))
        assert cls.calls == (2 if cls is BothDoubleGelu else 1)
        compare(cls([Double(), ops.GELU()]), lambda x: gelu(2 * x), torch.randn(3, 4))


def test_wrong_fusions():
    model = ops.Sequential(ops.Identity(), ops.GELU())
    x = torch.randn(2, 2)
    with registered("forward", lambda ops_: ops_[:1]):
        with pytest.raises(RuntimeError, match="keep every basic op"):
            model(x)
    assert torch.equal(model(x), ops.GELU()(x))
    with pytest.raises(TypeError, match="cannot be called"):
        ops.register_forward_fusion(3)
    with pytest.raises(ValueError, match="at least one"):
        ops.FusedOperation([])
    with pytest.raises(NotImplementedError, match="op_forward"):
        ops.BasicOperation()(x)
    with pytest.raises(TypeError, match="explain"):
        tt.explain(torch.nn.Linear(2, 2))


def test_hooks_before_forward():
    seen = []

    class Hooked(ops.BasicOperation):
        def pre_first_fuser_forward(self):
            seen.append("first")

        def pre_fuser_forward(self, *, requires_grad):
            seen.append(requires_grad)

        def op_forward(self, ctx, input_):
            return input_ * 1

        def op_backward(self, ctx, grad_output):
            return grad_output

    fuser = OperationFuser([Hooked()])
    x = torch.randn(2)
    fuser(x)
    fuser(x.requires_grad_())
    assert seen == ["first", False, True]


def test_ops_run_alone_by_their_methods():
    ctx = ops.OperationContext()
    assert ctx.saved_tensors == () and ctx.requires_grad
    op, x = ops.GELU(), torch.randn(3, 4)
    y = op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    torch.testing.assert_close(y, gelu(x))
    assert len(ctx.saved_tensors) == 1 and ctx.saved_tensors[0] is x
    v = x.clone().requires_grad_()
    gelu(v).sum().backward()
    dx, grads = op.op_backward(ctx, torch.ones(3, 4))
    torch.testing.assert_close(dx, v.grad, rtol=1e-4, atol=1e-5)
    assert tuple(grads) == ()


def test_everything_says_what_it_is():
    for name in ops.__all__:
        thing = getattr(ops, name)
        assert thing.__doc__ and len(thing.__doc__) > 6, name
    from tenon.torch.ops import fused

    for name in fused.__all__:
        assert getattr(fused, name).__doc__, name


class Returning(ops.BasicOperation):
    def __init__(self, forward=None, backward=None, parameter=False):
        super().__init__()
        self.results = forward, backward
        if parameter:
            self.weight = torch.nn.Parameter(torch.ones(4))

    def op_forward(self, ctx, input_, **_):
        return self.results[0] or input_ * 1

    def op_backward(self, ctx, grad_output):
        backward = self.results[1]
        return backward(grad_output) if backward else grad_output


@pytest.mark.parametrize("around", [(), (ops.GELU(),)])
def test_results_that_are_no_tensors(around):
    x = torch.ones(2, 4, requires_grad=True)

    class Nothing(Returning):
        def op_forward(self, ctx, input_):
            return None

    for op, found in ((Nothing(), "NoneType"), (Returning(forward="a"), "str")):
        with pytest.raises(TypeError, match=f"{type(op).__name__}: op_forward gave a {found}"):
            ops.Sequential(op, *around)(x)
    for wrong, found in (
        (lambda g: None, "NoneType"),
        (lambda g: 1.0, "float"),
        (lambda g: (None, ()), "NoneType"),
    ):
        y = ops.Sequential(Returning(backward=wrong), *around)(x)
        with pytest.raises(TypeError, match=f"Returning: op_backward gave a {found}"):
            y.sum().backward()


def test_missing_parameter_gradients():
    x = torch.ones(2, 4, requires_grad=True)
    op = Returning(backward=lambda g: (g, ()), parameter=True)
    with pytest.raises(RuntimeError, match="0 parameter gradients for Returning; it has 1"):
        op(x).sum().backward()
    op.weight.requires_grad_(False)
    op(x).sum().backward()
    assert (x.grad == 1).all()


def test_keywords_of_fused_ops_are_checked():
    x = torch.ones(2, 4)
    bias, act = ops.Bias(4), ops.GELU()
    model = ops.Sequential(bias, act)
    for op in (bias, act):
        with pytest.raises(TypeError, match=f"{type(op).__name__}: op_forward takes no keyword"):
            model(x, op_kwargs={op: {"wrong": 1}})


# The tensors that each op saves. Fusions in one direction depend on them.


def _stats(x, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    return mean, torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)


def _norm(x, weight, eps=1e-5):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * r * weight, (x, r.reshape(-1))


def _layer(x, weight, bias):
    mean, r = _stats(x)
    return (x - mean) * r * weight + bias, (x, mean.reshape(-1), r.reshape(-1))


def _l2(x):
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x * r, (x, r)


def _swiglu(x):
    return F.silu(x[..., :4]) * x[..., 4:]


# Each op, y and its saved tensors in plain torch. Arguments: x, parameters, extra inputs.
SAVED = {
    "BasicLinear": (lambda: ops.BasicLinear(8, 5), lambda x, w: (F.linear(x, w), (x, w))),
    "Bias": (lambda: ops.Bias(8), lambda x, b: (x + b, ())),
    "GELU": (ops.GELU, lambda x: (F.gelu(x, approximate="tanh"), (x,))),
    "SwiGLU": (ops.SwiGLU, lambda x: (_swiglu(x), (x,))),
    "Activation": (lambda: ops.Activation("tanh"), lambda x: (torch.tanh(x), (x,))),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, lambda x, s: (_swiglu(x) * s[:, None], (x, s))),
    "LayerNorm": (lambda: ops.LayerNorm(8), _layer),
    "RMSNorm": (lambda: ops.RMSNorm(8), _norm),
    "L2Normalization": (ops.L2Normalization, _l2),
    "ConstantScale": (lambda: ops.ConstantScale(3.0), lambda x: (3 * x, ())),
    "AddExtraInput": (ops.AddExtraInput, lambda x, e: (x + e, ())),
    "MakeExtraOutput": (ops.MakeExtraOutput, lambda x: (x, ())),
    "Reshape": (lambda: ops.Reshape(-1, 4), lambda x: (x.reshape(-1, 4), ())),
    "Identity": (ops.Identity, lambda x: (x, ())),
    "Quantize": (ops.Quantize, lambda x: (x, ())),
}


def _pair(made):
    def fuse(ops_, **unused):
        return [made(ops_)] if len(ops_) == 2 else ops_

    return fuse


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("second", [ops.Identity, lambda: ops.ConstantScale(0.5)])
def test_ops_run_backward_after_a_fusion_of_the_users(name, second):
    make, f = SAVED[name]
    op, last = make(), second()
    factor = 0.5 if isinstance(last, ops.ConstantScale) else 1.0
    for p in op.parameters():
        torch.nn.init.normal_(p)
    extras = {"ScaledSwiGLU": [(3,)], "AddExtraInput": [(3, 8)]}.get(name, [])
    extras = [torch.randn(s, requires_grad=True) for s in extras]
    outputs = op.num_extra_outputs

    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            given = (*(p.detach() for p in op.parameters()), *basic_op_extra_inputs[0])
            y, saved = f(input_, *given)
            if saved:
                basic_op_ctxs[0].save_for_backward(*saved)
            return factor * y, [(y,) if outputs else (), ()]

    x = torch.randn(3, 8, requires_grad=True)
    leaves = [x, *op.parameters(), *extras]
    with registered("forward", _pair(Forward)):
        model = ops.Sequential(op, last)
        y = model(x, *extras)
        y = sum(t.sin().sum() for t in y) if outputs else y.sin().sum()
        mine = torch.autograd.grad(y, leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y64, _ = f(*exact)
    loss = (factor * y64).sin().sum() + (y64.sin().sum() if outputs else 0)
    for a, b in zip(mine, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SAVED)
def test_a_backward_fusion_of_the_users_reads_what_ops_save(name):
    make, f = SAVED[name]
    op = make()
    extras = {"ScaledSwiGLU": [(3,)], "AddExtraInput": [(3, 8)]}.get(name, [])
    extras = [torch.randn(s, requires_grad=True) for s in extras]
    seen = []

    class Backward(ops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            seen.extend(basic_op_ctxs[0].saved_tensors)
            none = [None] * len(list(op.parameters()))
            return grad_output.new_zeros(3, 8), [none, ()], [[None] * op.num_extra_inputs, ()]

    x = torch.randn(3, 8, requires_grad=True)
    with registered("backward", _pair(Backward)):
        y = ops.Sequential(op, ops.Identity())(x, *extras)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    _, saved = f(x.detach(), *(p.detach() for p in op.parameters()), *extras)
    assert len(seen) == len(saved)
    for a, b in zip(seen, saved, strict=True):
        torch.testing.assert_close(a.reshape(-1), b.detach().reshape(-1), rtol=1e-5, atol=1e-6)


def test_a_reshape_inside_a_fusion_of_the_users():
    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            if isinstance(self.basic_ops[0], ops.SwiGLU):
                basic_op_ctxs[0].save_for_backward(input_)
                return _swiglu(input_).reshape(2, -1), [(), ()]
            return (2 * input_).reshape(2, -1), [(), ()]

    x = torch.randn(3, 8, requires_grad=True)
    with registered("forward", _pair(Forward)):
        ops.Sequential(ops.SwiGLU(), ops.Reshape(2, -1))(x).sum().backward()
        (expected,) = torch.autograd.grad(_swiglu(x).sum(), x)
        torch.testing.assert_close(x.grad, expected)
        y = ops.Sequential(Double(), ops.Reshape(2, -1))(x)
        with pytest.raises(RuntimeError, match="Reshape: the shape of its input is not known"):
            y.sum().backward()


def test_names_of_channels():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    for op, put in ((make, make.set_extra_output_channel), (add, add.set_extra_input_channel)):
        name = type(op).__name__
        with pytest.raises(ValueError, match=f"{name}: the channel of extra .* has an empty name"):
            put(0, "")
        for wrong in (123, None, b"skip"):
            with pytest.raises(TypeError, match=f"{name}: .* its name must be a string"):
                put(0, wrong)
        with pytest.raises(TypeError, match="its number is a whole number"):
            put("0", "skip")
    for wrong in ("no", 0, None):
        with pytest.raises(TypeError, match="output_to_caller=.*; it must be True or False"):
            make.set_extra_output_channel(0, "skip", output_to_caller=wrong)


@pytest.mark.parametrize("around", [(), (Double,)])
def test_a_hidden_channel_that_nobody_reads(around):
    make = ops.MakeExtraOutput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    parts = [ops.Linear(8, 8), make, *(a() for a in around), ops.GELU(), ops.Bias(8)]
    model, x = ops.Sequential(parts), torch.randn(3, 8, requires_grad=True)
    plain = ops.Sequential([p for p in parts if p is not make])
    assert torch.equal(model(x), plain(x))
    for a, b in zip(
        torch.autograd.grad(model(x).sum(), [x, *model.parameters()]),
        torch.autograd.grad(plain(x).sum(), [x, *model.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_fusion_that_gives_no_extra_output(grad, shown):
    class Nothing(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [(None,), ()]

    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=shown)
    add.set_extra_input_channel(0, "skip")

    def fuse(ops_, **unused):
        return [Nothing(ops_[:2]), *ops_[2:]] if isinstance(ops_[0], ops.MakeExtraOutput) else ops_

    with registered("forward", fuse):
        with pytest.raises(TypeError, match="Nothing: fuser_forward gave a NoneType for extra out"):
            ops.Sequential(make, ops.GELU(), add)(torch.randn(2, 3, requires_grad=grad))
        lonely = ops.MakeExtraOutput()
        lonely.set_extra_output_channel(0, "lonely", output_to_caller=False)
        x = torch.randn(2, 3, requires_grad=grad)
        assert torch.equal(ops.Sequential(lonely, ops.GELU())(x), x)


def test_a_dropout_inside_a_fusion_of_the_users():
    from tenon.torch import functional

    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            state = torch.tensor((7, 0, 0, 0, input_.shape[-1]))
            basic_op_ctxs[0].save_for_backward(state.clone())
            return functional.dropout(input_, 0.5, random=state), [(), ()]

    x = torch.rand(6, 8).add_(1).requires_grad_()
    with registered("forward", _pair(Forward)):
        y = ops.Sequential(ops.Dropout(0.5), ops.Identity())(x)
        y.sum().backward()
    assert 0 < y.count_nonzero() < y.numel()
    torch.testing.assert_close(x.grad, torch.where(y != 0, 2.0, 0.0))
