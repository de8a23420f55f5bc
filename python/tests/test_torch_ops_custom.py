"""Operations and fusions of the user's own, among ours."""

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
    assert forward == [
        "ForwardLinearBiasActivation(BasicLinear, Bias)",
        "Double",
        "BiasActivation(Bias, GELU)",
        "Double",
    ]


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
        """Overrides nothing that runs."""

    def model(linear=ops.BasicLinear, bias=ops.Bias, activation=ops.GELU):
        return ops.Sequential(linear(4, 4), bias(4), activation())

    x = torch.randn(3, 4)
    for made in (model(activation=Loud), model(activation=Impl)):
        compare(made, lambda x, w, b: gelu(F.linear(x, w, b)) + 1, x)
        assert stages(made)[0] == ["ForwardLinearBiasActivation(BasicLinear, Bias)",
                                   type(made[2]).__name__]  # fmt: skip
    for made in (model(bias=OwnBias), model(linear=OwnLinear)):
        compare(made, lambda x, w, b: gelu(F.linear(x, w, b) + 1), x)
    made = model(activation=OwnBackward)
    v = x.clone().requires_grad_()
    made(v).sum().backward()
    torch.testing.assert_close(v.grad, 3 * made[0].weight.sum(0).expand(3, 4))
    made = model(activation=Quiet)
    made(x)
    assert stages(made)[0] == ["ForwardLinearBiasActivation(BasicLinear, Bias, Quiet)"]
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
    """Forward only; saves what the basic ops save."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        type(self).calls += 1
        double, activation = basic_op_ctxs
        double.save_for_backward(input_)
        double.anything = "kept"
        activation.save_for_backward(2 * input_)
        return gelu(2 * input_), [(), ()]


class BackwardDoubleGelu(ops.FusedOperation):
    """Backward only; reads what the basic ops save."""

    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        type(self).calls += 1
        (z,) = basic_op_ctxs[1].saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (grad,) = torch.autograd.grad(gelu(z), z, grad_output)
        return 2 * grad, [(), ()], [(), ()]


class BothDoubleGelu(ForwardDoubleGelu):
    """Both directions; saves what it likes."""

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
        compare(model, expected, x)  # an existing fuser picks it up
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
    """A backward fusion of the user's takes [Bias, GELU] away from ours, and finds x + b saved."""

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
        assert stages(linear)[1] == ["BasicLinear", "Mine(Bias, GELU)"]
    compare(model, lambda x, b: gelu(x + b), x)
    assert stages(model) == (["BiasActivation(Bias, GELU)"],) * 2


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
