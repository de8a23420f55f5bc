"""The op surface of Transformer Engine: names, arguments, fused classes and what they compute."""

import inspect
import itertools

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from fp8_support import sum_error  # noqa: E402
from tenon.torch.ops import fused  # noqa: E402
from tenon.torch.quantizer import Float8CurrentScalingQuantizer  # noqa: E402

F = torch.nn.functional
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative to the size of the values: a few roundings to the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got, expected, dtype):
    """Compares with float64, relative to the largest value."""
    assert (got is None) == (expected is None)
    if got is None:
        return
    assert got.dtype == dtype and got.shape == expected.shape
    bound = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    error = (got.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= bound, (error, bound)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def names(listed):
    return [(type(op).__name__, indices) for op, indices in listed]


def lists(model):
    (group,) = model._module_groups
    return names(group._forward_ops), names(group._backward_ops)


# Chains, and the fused ops that TE's windows give them, by the indices of their basic ops.
CHAINS = {
    "linear bias add": (
        lambda d: [ops.BasicLinear(12, 20, dtype=d), ops.Bias(20, dtype=d), ops.AddExtraInput()],
        lambda x, e, w, b: F.linear(x, w, b) + e,
        {"ForwardLinearBiasAdd": [0, 1, 2]},
        {},
    ),
    "linear add": (
        lambda d: [ops.BasicLinear(12, 20, dtype=d), ops.AddExtraInput(in_place=True)],
        lambda x, e, w: F.linear(x, w) + e,
        {"ForwardLinearBiasAdd": [0, 1]},
        {},
    ),
    "linear scale add": (
        lambda d: [ops.BasicLinear(12, 20, dtype=d), ops.ConstantScale(0.5), ops.AddExtraInput()],
        lambda x, e, w: 0.5 * F.linear(x, w) + e,
        {"ForwardLinearScaleAdd": [0, 1, 2]},
        {"BackwardLinearScale": [0, 1]},
    ),
    "linear bias gelu": (
        lambda d: [ops.BasicLinear(12, 20, dtype=d), ops.Bias(20, dtype=d), ops.GELU()],
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        {"ForwardLinearBiasActivation": [0, 1, 2]},
        {"BackwardActivationBias": [1, 2]},
    ),
    "linear bias swiglu": (
        lambda d: [ops.BasicLinear(12, 20, dtype=d), ops.Bias(20, dtype=d), ops.SwiGLU()],
        lambda x, w, b: (lambda z: F.silu(z[..., :10]) * z[..., 10:])(F.linear(x, w, b)),
        {"ForwardLinearBiasActivation": [0, 1, 2]},
        {"BackwardActivationBias": [1, 2]},
    ),
    "fork linear": (
        lambda d: [ops.MakeExtraOutput(in_place=True), ops.BasicLinear(12, 20, dtype=d)],
        lambda x, w: (F.linear(x, w), x),
        {},
        {"BackwardLinearAdd": [0, 1]},
    ),
    "fork rmsnorm": (
        lambda d: [ops.MakeExtraOutput(), ops.RMSNorm(12, dtype=d)],
        lambda x, g: (F.rms_norm(x, (12,), g, 1e-5), x),
        {},
        {"BackwardAddRMSNorm": [0, 1]},
    ),
}


def run(model, given, grads):
    """Outputs, and gradients of the inputs and the parameters."""
    inputs = [t.clone().requires_grad_() for t in given]
    model.zero_grad()
    y = model(*inputs)
    y = y if isinstance(y, tuple) else (y,)
    torch.autograd.backward(y, [g.to(t.dtype) for g, t in zip(grads, y, strict=True)])
    found = [t.grad for t in inputs] + [p.grad for p in model.parameters()]
    return [t.detach() for t in y] + found


def expected(reference, given, parameters, grads):
    inputs = [t.double().requires_grad_() for t in given]
    weights = [p.detach().double().requires_grad_() for p in parameters]
    y = reference(*inputs, *weights)
    y = y if isinstance(y, tuple) else (y,)
    torch.autograd.backward(y, [g.double() for g in grads])
    return [t.detach() for t in y] + [t.grad for t in (*inputs, *weights)]


def sample(chain, dtype, lead):
    made, reference, _, _ = CHAINS[chain]
    model = ops.Sequential(*made(dtype))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    given = [normal(*lead, 12, dtype=dtype)]
    if "add" in chain:
        given.append(normal(*lead, 20, dtype=dtype))
    cols = [10 if "swiglu" in chain else 12 if "rmsnorm" in chain else 20]
    cols += [12] * ("fork" in chain)
    grads = [normal(*lead, c, dtype=dtype) for c in cols]
    return model, reference, given, grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(7,), (2, 3), (0,)])
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_named_fusions(chain, lead, dtype):
    model, reference, given, grads = sample(chain, dtype, lead)
    for a, b in zip(
        run(model, given, grads), expected(reference, given, model.parameters(), grads), strict=True
    ):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_named_fusions_by_hand(chain, dtype):
    """The fused op replaces the basic ops of one pass, as TE's do, with the same values."""
    _, _, forward, backward = CHAINS[chain]
    for direction, (name, at) in [
        *(("forward", item) for item in forward.items()),
        *(("backward", item) for item in backward.items()),
    ]:
        cls = getattr(fused, name)
        fuse = getattr(cls, f"fuse_{direction}_ops")
        seen = []

        def replace(ops, recipe=None, fuse=fuse, seen=seen):
            made = fuse(ops, recipe=recipe)
            seen.append([type(op).__name__ for op in made])
            return made

        register = getattr(ops, f"register_{direction}_fusion")
        unregister = getattr(ops, f"unregister_{direction}_fusion")
        register(replace)
        try:
            for lead in [(7,), (2, 3), (0,)]:
                model, reference, given, grads = sample(chain, dtype, lead)
                found = run(model, given, grads)
                for a, b in zip(
                    found, expected(reference, given, model.parameters(), grads), strict=True
                ):
                    close(a, b, dtype)
                listed = dict(lists(model)[direction == "backward"])
                assert listed[name] == at
        finally:
            unregister(replace)
        assert all(name in made for made in seen)


@pytest.mark.parametrize("chain", CHAINS)
def test_lists_are_what_the_plan_does(chain):
    made, _, forward, backward = CHAINS[chain]
    model, _, given, grads = sample(chain, torch.float32, (4,))
    run(model, given, grads)
    plan = model._module_groups[0].plan()[0][0].op.last().json()
    for listed, direction, wanted in zip(
        lists(model), ("forward", "backward"), (forward, backward), strict=True
    ):
        assert sorted(i for _, at in listed for i in at) == list(range(len(model)))
        steps = [set(step["ops"]) for step in plan[direction]]
        for name, at in listed:
            assert len(at) == 1 or (name in wanted and any(set(at) <= step for step in steps))
        for name, at in wanted.items():
            held = any(set(at) <= step for step in steps)
            assert ((name, at) in listed) == held
    # Backward runs from the last op to the first.
    assert [at[0] for _, at in lists(model)[1]] == sorted(
        (at[0] for _, at in lists(model)[1]), reverse=True
    )


def test_lists_of_a_longer_chain():
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.RMSNorm(16), ops.Linear(16, 32), ops.SwiGLU(),
        ops.Linear(16, 16), ops.AddExtraInput(),
    )  # fmt: skip
    model[0].set_extra_output_channel(0, "residual", output_to_caller=False)
    model[-1].set_extra_input_channel(0, "residual")
    x = normal(5, 16).requires_grad_()
    model(x).sum().backward()
    forward, backward = lists(model)
    assert forward == [
        ("MakeExtraOutput", [0]),
        ("RMSNorm", [1]),
        ("ForwardLinearBiasActivation", [2, 3, 4]),
        ("ForwardLinearBiasAdd", [5, 6, 7]),
    ]
    assert backward == [
        ("AddExtraInput", [7]),
        ("Bias", [6]),
        ("BasicLinear", [5]),
        ("BackwardActivationBias", [3, 4]),
        ("BasicLinear", [2]),
        ("BackwardAddRMSNorm", [0, 1]),
    ]


def test_lists_around_opaque_ops_and_cuts():
    class Own(ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2

    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), Own(), ops.Linear(8, 8), ops.ReLU())
    assert lists(model)[0][1] == ("Own", [3])  # before a call too
    model(normal(3, 8)).sum().backward()
    assert lists(model) == (
        [("ForwardLinearBiasActivation", [0, 1, 2]), ("Own", [3]),
         ("ForwardLinearBiasActivation", [4, 5, 6])],
        [("BackwardActivationBias", [5, 6]), ("BasicLinear", [4]), ("Own", [3]),
         ("BackwardActivationBias", [1, 2]), ("BasicLinear", [0])],
    )  # fmt: skip
    # A change of dtype cuts the segment: nothing is fused across it.
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8, dtype=torch.bfloat16))
    model(normal(3, 8)).sum().backward()
    assert lists(model)[0] == [
        ("ForwardLinearBiasActivation", [0, 1, 2]),
        ("ForwardLinearBiasActivation", [3, 4]),
    ]


def test_backward_fusions_with_quantizers():
    """A scale before a linear whose gradient is encoded: c·g is encoded, not g."""
    q = Float8CurrentScalingQuantizer(torch.float8_e5m2)
    x, g = normal(32, 12), normal(32, 20)
    grads = []
    for fusion in (None, fused.BackwardLinearScale.fuse_backward_ops):
        model = ops.Sequential(ops.BasicLinear(12, 20), ops.ConstantScale(0.3))
        torch.nn.init.constant_(model[0].weight, 0.1)
        model[0].set_quantizer("backward", 0, q.copy() if hasattr(q, "copy") else q)
        if fusion is not None:
            ops.register_backward_fusion(fusion)
        try:
            y = x.clone().requires_grad_()
            model(y).backward(g)
        finally:
            if fusion is not None:
                ops.unregister_backward_fusion(fusion)
        grads.append((y.grad, model[0].weight.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_main_grad_in_fused_backward():
    for fused_op, make in (
        (fused.BackwardLinearAdd, lambda linear: [ops.MakeExtraOutput(), linear]),
        (fused.BackwardLinearScale, lambda linear: [linear, ops.ConstantScale(2.0)]),
    ):
        linear = ops.BasicLinear(6, 4, accumulate_into_main_grad=True)
        linear.weight.main_grad = torch.ones(4, 6)
        model = ops.Sequential(*make(linear))
        ops.register_backward_fusion(fused_op.fuse_backward_ops)
        try:
            x = normal(5, 6)
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(torch.ones_like(y))
        finally:
            ops.unregister_backward_fusion(fused_op.fuse_backward_ops)
        factor = 2.0 if fused_op is fused.BackwardLinearScale else 1.0
        torch.testing.assert_close(
            linear.weight.main_grad, 1 + factor * x.sum(0).expand(4, 6), rtol=1e-5, atol=1e-5
        )
        assert linear.weight.grad is None


def test_fused_classes_check_their_ops():
    with pytest.raises(
        TypeError, match="ForwardLinearBiasAdd: add is a GELU; it must be of the class AddExtra"
    ):
        fused.ForwardLinearBiasAdd(linear=ops.BasicLinear(4, 4), add=ops.GELU())
    with pytest.raises(TypeError, match="linear is a Bias"):
        fused.BackwardLinearScale(linear=ops.Bias(4), scale=ops.ConstantScale(2.0))
    op = fused.ForwardLinearBiasAdd(linear=ops.BasicLinear(4, 4), add=ops.AddExtraInput())
    assert op.bias is None and len(op.basic_ops) == 2
    with pytest.raises(ValueError, match="same shape"):
        ops.Sequential(op)(normal(3, 4), normal(3, 5))


# Constructor arguments of TE's ops, in its order; those after "*" are keywords.
ARGUMENTS = {
    "GELU": "* cache_quantized_input",
    "SwiGLU": "* cache_quantized_input glu_interleave_size",
    "ScaledSwiGLU": "* glu_interleave_size",
    "BasicLinear": "in_features out_features * device dtype tensor_parallel_mode "
    "tensor_parallel_group sequence_parallel rng_state_tracker_function "
    "accumulate_into_main_grad userbuffers_options",
    "Linear": "in_features out_features bias * device dtype tensor_parallel_mode "
    "tensor_parallel_group sequence_parallel rng_state_tracker_function accumulate_into_main_grad",
    "Bias": "size * device dtype tensor_parallel tensor_parallel_group",
    "Quantize": "forward backward",
    "LayerNorm": "normalized_shape * eps device dtype zero_centered_gamma sm_margin",
    "RMSNorm": "normalized_shape * eps device dtype zero_centered_gamma sm_margin",
    "L2Normalization": "* eps seq_length micro_batch_size",
    "Dropout": "p",
    "AddExtraInput": "* in_place",
    "MakeExtraOutput": "* in_place",
    "ConstantScale": "scale",
    "Identity": "",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    ours = inspect.signature(getattr(ops, name)).parameters
    positional, _, named = ARGUMENTS[name].partition("*")
    at = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert at[: len(positional.split())] == positional.split()
    assert set(named.split()) <= set(ours)


def test_refused_classes():
    assert set(tt.ops._missing.CLASSES) >= {"GroupedLinear", "AllReduce", "AllGather"}
    for name in tt.ops._missing.CLASSES:
        with pytest.raises(NotImplementedError, match=f"{name}: Tenon does not have it"):
            getattr(ops, name)(1, group=None)
    with pytest.raises(NotImplementedError, match="UserbuffersForwardLinear"):
        fused.UserbuffersForwardLinear()
    assert not hasattr(ops, "GroupedQuux")
    for kwargs in (
        {"tensor_parallel_mode": "row"},
        {"sequence_parallel": True},
        {"userbuffers_options": {"comm_name": "qkv"}},
    ):
        with pytest.raises(NotImplementedError, match="leave"):
            ops.Linear(4, 4, **kwargs)


def test_slots_out_of_range_are_index_errors():
    linear = ops.BasicLinear(4, 4)
    for call in (
        lambda: linear.get_quantizer("forward", 2),
        lambda: linear.set_quantizer("backward", 1, None),
        lambda: ops.AddExtraInput().set_extra_input_channel(1, "a"),
        lambda: ops.MakeExtraOutput().set_extra_output_channel(-1, "a"),
        lambda: ops.Sequential(linear)[1],
    ):
        with pytest.raises(IndexError, match="it has 1|it has 2"):
            call()


class ReadsContext(ops.FusedOperation):
    """A backward fusion as users of TE write them: it reads the fields of the contexts."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        linear_ctx, bias_ctx, act_ctx = basic_op_ctxs
        x, w = linear_ctx.saved_tensors
        (z,) = act_ctx.saved_tensors
        assert linear_ctx.dtype == act_ctx.dtype == torch.float32
        assert linear_ctx.weight_requires_grad and not linear_ctx.with_quantized_compute
        assert linear_ctx.input_quantizer is None and linear_ctx.weight_quantizer is None
        assert linear_ctx.grad_output_quantizer is None
        assert bias_ctx.grad_input_quantizer is None
        assert act_ctx.prev_op_grad_output_quantizer is None
        dz = grad_output * (z > 0)
        dx = dz @ w if linear_ctx.input_requires_grad else None
        return dx, [(dz.T @ x,), (dz.sum(0),), ()], [(), (), ()]


def test_context_fields_of_user_fusions():
    def fuse(ops_, *, recipe=None):
        return [ReadsContext(ops_)]

    ops.register_backward_fusion(fuse)
    try:
        model = ops.Sequential(ops.BasicLinear(6, 5), ops.Bias(5), ops.ReLU())
        x, g = normal(4, 6), normal(4, 5)
        found = run(model, [x], [g])
    finally:
        ops.unregister_backward_fusion(fuse)
    reference = expected(lambda x, w, b: F.relu(F.linear(x, w, b)), [x], model.parameters(), [g])
    for a, b in zip(found, reference, strict=True):
        close(a, b, torch.float32)


class ReadsQuantizers(ops.FusedOperation):
    """A backward fusion that repeats what the linear did with its quantizers."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ctx, _ = basic_op_ctxs
        assert ctx.with_quantized_compute and ctx.dtype == torch.float32
        x, w = (t.dequantize() for t in ctx.saved_tensors)
        g = ctx.grad_output_quantizer(2 * grad_output).dequantize()
        assert ctx.input_quantizer is not None and ctx.weight_quantizer is not None
        return g @ w, [(g.T @ x,), ()], [(), ()]


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "MXFP8BlockScaling", "DelayedScaling"])
def test_context_fields_under_a_recipe(recipe):
    found = []
    torch.manual_seed(2)
    x, g = normal(32, 64).requires_grad_(), normal(32, 32)
    for fusion in (None, lambda ops_, *, recipe=None: [ReadsQuantizers(ops_)]):
        torch.manual_seed(3)
        model = ops.Sequential(ops.BasicLinear(64, 32), ops.ConstantScale(2.0))
        if fusion is not None:
            ops.register_backward_fusion(fusion)
        try:
            x.grad = None
            with tt.autocast(recipe=getattr(tt.recipe, recipe)()):
                y = model(x)
            y.backward(g)
        finally:
            if fusion is not None:
                ops.unregister_backward_fusion(fusion)
        found.append([y, x.grad, model[0].weight.grad])
    w, dy = model[0].weight.detach().abs(), 2 * g.abs()
    sizes = x.detach().abs() @ w.T, dy @ w, dy.T @ x.detach().abs()
    for a, b, size in zip(*found, sizes, strict=True):
        # Twice: for two sums, and for what the encoding adds to `size`.
        assert ((a - b).abs() <= 2 * sum_error(size, 64) + 1e-6 * b.abs()).all()


# The methods and attributes of te.md 5.1.
FRAMEWORK = {
    "OperationContext": "save_for_backward saved_tensors to_save requires_grad",
    "FusibleOperation": "is_fused_op pre_first_fuser_forward pre_fuser_forward get_input_quantizer "
    "get_grad_output_quantizer fuser_forward fuser_backward",
    "BasicOperation": "num_extra_inputs num_extra_outputs op_forward op_backward num_quantizers "
    "get_quantizer get_quantizer_roles set_extra_input_channel set_extra_output_channel forward",
    "FusedOperation": "forward",
    "Sequential": "append extend insert pop __getitem__ __setitem__ __delitem__ __add__ __iadd__ "
    "forward",
}


@pytest.mark.parametrize("name", FRAMEWORK)
def test_names_of_the_framework(name):
    for attribute in FRAMEWORK[name].split():
        assert hasattr(getattr(ops, name), attribute)


def test_contexts_save_under_both_names():
    ctx = ops.OperationContext()
    assert ctx.to_save == () and ctx.requires_grad
    x = normal(2)
    ctx.save_for_backward(x, None)
    assert ctx.to_save == ctx.saved_tensors == (x, None)
    ctx.to_save = (x,)
    assert ctx.saved_tensors == (x,)


def test_roles_of_quantizers():
    Role = tt.recipe.QuantizerRole

    class Named(ops.BasicLinear):
        def get_quantizer_roles(self, mode):
            if mode == "forward":
                return [Role("router", "input"), Role("router", "weight")]
            return [Role("router", "grad_output")] * self.wrong

    told = []

    def factory(role):
        told.append((role.module_type, role.tensor_type))
        return Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    for wrong in (1, 2):
        linear = Named(32, 32)
        linear.wrong = wrong
        with tt.autocast(recipe=tt.recipe.CustomRecipe(factory)):
            if wrong == 1:
                ops.Sequential(linear)(normal(32, 32)).sum().backward()
            else:
                with pytest.raises(ValueError, match="gave 2 roles; it has 1 backward"):
                    ops.Sequential(linear)(normal(32, 32))
    assert set(told) == {("router", t) for t in ("input", "weight", "grad_output")}


def test_public_names():
    names = set(dir(tt))
    assert names >= {"LayerNormMLP", "Linear", "autocast", "convert", "explain", "recipe"}
    assert all(hasattr(tt, name) for name in names)


def test_fusions_get_the_recipe():
    seen = []

    def fuse(listed, *, recipe):
        seen.append(recipe)
        return listed

    model, recipe = ops.Sequential(ops.Linear(32, 32)), tt.recipe.MXFP8BlockScaling()
    ops.register_forward_fusion(fuse)
    try:
        for _ in range(2):
            with tt.autocast(recipe=recipe):
                model(normal(4, 32))
            model._module_groups[0]._forward_ops  # noqa: B018  (fuses nothing again)
        assert seen == [recipe]
        model(normal(4, 32))
        assert seen == [recipe, None]
    finally:
        ops.unregister_forward_fusion(fuse)


def test_joint_fusions_next_to_plans():
    class Doubled(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            basic_op_ctxs[0].save_for_backward(input_)
            return input_.square(), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            (x,) = basic_op_ctxs[0].saved_tensors
            return 2 * x * grad_output, [()], [()]

    def fuse(listed, *, recipe=None):
        return [Doubled([op]) if isinstance(op, ops.Identity) else op for op in listed]

    ops.register_forward_backward_fusion(fuse)
    try:
        model = ops.Sequential(
            ops.Linear(8, 8), ops.GELU(), ops.Identity(), ops.RMSNorm(8), ops.Linear(8, 4)
        )
        x, g = normal(3, 8), normal(3, 4)
        found = run(model, [x], [g])
        forward, _ = lists(model)
        assert ("Doubled", [3]) in forward and ("ForwardLinearBiasActivation", [0, 1, 2]) in forward
    finally:
        ops.unregister_forward_backward_fusion(fuse)

    def reference(x, w1, b1, gamma, w2, b2):
        h = F.gelu(F.linear(x, w1, b1), approximate="tanh").square()
        return F.linear(F.rms_norm(h, (8,), gamma, 1e-5), w2, b2)

    for a, b in zip(found, expected(reference, [x], model.parameters(), [g]), strict=True):
        close(a, b, torch.float32)


def test_plain_modules_inside():
    model = ops.Sequential(
        ops.Linear(8, 8), ops.MakeExtraOutput(), torch.nn.Tanh(), ops.GELU(), torch.nn.Linear(8, 4),
        ops.AddExtraInput(), torch.nn.Sequential(ops.Bias(4)),
    )  # fmt: skip
    kinds = [type(part).__name__ for part in model._module_groups]
    assert kinds == ["OperationFuser", "Tanh", "OperationFuser", "Linear", "OperationFuser",
                     "Sequential"]  # fmt: skip
    x, e, grads = normal(3, 8), normal(3, 4), [normal(3, 4), normal(3, 8)]

    def reference(x, e, w1, b1, w2, b2, b3):
        h = F.linear(x, w1, b1)
        y = F.linear(F.gelu(torch.tanh(h), approximate="tanh"), w2, b2)
        return y + e + b3, h

    for a, b in zip(
        run(model, [x, e], grads), expected(reference, [x, e], model.parameters(), grads),
        strict=True,
    ):  # fmt: skip
        close(a, b, torch.float32)


SCALED = {
    "ScaledSwiGLU": lambda a, b: F.silu(a) * b,
    "ScaledSiTUGLU": lambda a, b: (
        4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
    ),
    "ScaledClampedQGeGLU": lambda a, b: (
        (lambda c: c * torch.sigmoid(1.702 * c))(a.clamp(max=7.0)) * (b.clamp(-7.0, 7.0) + 1)
    ),
    "ScaledSReLU": None,
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("interleave", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations_in_an_mlp(name, dtype, interleave, recompute):
    gated = SCALED[name] is not None
    if interleave and not gated:
        with pytest.raises(ValueError, match="not gated"):
            ops.ScaledSReLU(glu_interleave_size=4)
        return
    wide = 32 if gated else 16
    options = {} if interleave is None else {"glu_interleave_size": interleave}
    act = getattr(ops, name)(activation_recompute_in_mlp=recompute, **options)
    model = ops.Sequential(
        ops.BasicLinear(8, wide, dtype=dtype), act, ops.BasicLinear(16, 8, dtype=dtype)
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)

    def reference(x, s, w1, w2):
        z = F.linear(x, w1)
        if not gated:
            h = F.relu(z).square()
        elif interleave:
            z = z.reshape(*z.shape[:-1], -1, 2, interleave)
            h = SCALED[name](z[..., 0, :].flatten(-2), z[..., 1, :].flatten(-2))
        else:
            h = SCALED[name](*z.chunk(2, -1))
        return F.linear(h * s[..., None], w2)

    x, s, g = normal(3, 5, 8, dtype=dtype), torch.rand(3, 5), normal(3, 5, 8, dtype=dtype)
    found = run(model, [x, s], [g])
    wanted = expected(reference, [x, s], model.parameters(), [g])
    for a, b, kind in zip(found, wanted, [dtype, dtype, torch.float32, dtype, dtype], strict=True):
        bound = TOLERANCE[dtype] * 4 * b.abs().max().item()  # three roundings of hidden values
        assert a.dtype == kind and (a.double() - b).abs().max().item() <= bound
    text = tt.explain(model, x.requires_grad_())
    assert ("is computed again, as recompute asks" in text) == recompute
    assert ("activation_recompute_in_mlp=True" in repr(act)) == recompute


ACTIVATIONS = ("GELU", "GELUErf", "SiLU", "ReLU", "QGELU", "SReLU", "GLU", "GEGLU", "SwiGLU",
               "ReGLU", "QGEGLU", "SReGLU", "ClampedSwiGLU", "SiTUGLU")  # fmt: skip


@pytest.mark.parametrize("name, alone", itertools.product(ACTIVATIONS, (True, False)))
def test_cached_input_is_an_encoding_and_only_for_gradients(name, alone):
    op = getattr(ops, name)(cache_quantized_input=True)
    plain = getattr(ops, name)()
    model = op if alone else ops.Sequential(ops.Bias(256), op)
    x = normal(64, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(x).grad_fn is None
    saved = []

    def pack(t):
        saved.append(t.numel() * t.element_size())
        return t

    tracked = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(tracked)
    # One byte per value and one scale per 128, not two bytes per value.
    assert sum(saved) <= x.numel() * 1.1
    exact = x.clone().requires_grad_()
    z = plain(exact)
    torch.testing.assert_close(y, z)  # the forward value does not use the encoding
    y.backward(torch.ones_like(y))
    z.backward(torch.ones_like(z))
    # f' changes by at most about 2 per unit for these functions at these values.
    error = (tracked.grad.double() - exact.grad.double()).abs()
    assert error.mean() <= 0.1 * (exact.grad.double().abs().mean() + 1)
