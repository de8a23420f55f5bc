"""Tests of sequences of operations as plans: one call forward, one backward, and special cases."""

import copy
import ctypes
import gc
import math
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

import tenon  # noqa: E402
import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon._plan import BACKWARD, BACKWARD_LAST, FORWARD, Plan  # noqa: E402
from tenon.torch import _cuda, _memory, quantizer  # noqa: E402
from tenon.torch.ops import _plan_memory, fuser  # noqa: E402
from tenon.torch.ops.segment import Segment  # noqa: E402

F = torch.nn.functional
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture
def runs(monkeypatch):
    """The passes of plans that ran, True for backward."""
    ran = []
    run = Plan.run

    def count(self, pass_, *args, **more):
        ran.append(pass_ != FORWARD)
        return run(self, pass_, *args, **more)

    monkeypatch.setattr(Plan, "run", count)
    return ran


def without_plans(monkeypatch):
    monkeypatch.setattr(fuser, "_with_segments", lambda forward, backward, _: (forward, backward))


def gated(f):
    return lambda x: f(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def interleaved(f, k):
    def apply(x):
        v = x.reshape(*x.shape[:-1], -1, 2, k)
        return (f(v[..., 0, :]) * v[..., 1, :]).flatten(-2)

    return apply


def gelu(x):
    return F.gelu(x, approximate="tanh")


def l2(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


# Name -> (ops, the same as functions of (x, next parameter, next extra input)). A function takes
# what it needs from the iterators p and e.
def linear(n, m):
    return ops.BasicLinear(n, m), lambda x, p, e: x @ next(p).T


def bias(n):
    return ops.Bias(n), lambda x, p, e: x + next(p)


def act(op, f):
    return op, lambda x, p, e: f(x)


def scaled(op, f):
    return op, lambda x, p, e: f(x) * next(e).reshape(*x.shape[:-1], 1)


def add():
    return ops.AddExtraInput(), lambda x, p, e: x + next(e)


def scale(c):
    return ops.ConstantScale(c), lambda x, p, e: c * x


def norm():
    return ops.L2Normalization(), lambda x, p, e: l2(x)


def scaled_norm(kind, n, centered=False, eps=1e-3):
    """LayerNorm or RMSNorm in plain torch."""

    def reference(x, p, e):
        if kind is ops.LayerNorm:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (next(p) + centered)
        return y + next(p) if kind is ops.LayerNorm else y

    return kind(n, eps=eps, zero_centered_gamma=centered), reference


def identity():
    return ops.Identity(), lambda x, p, e: x


def reshape(*shape):
    return ops.Reshape(*shape), lambda x, p, e: x.reshape(*shape)


def squared(x):
    return F.relu(x) ** 2


CHAINS = {
    "linear bias": (lambda: [linear(24, 20), bias(20)], ()),
    "linear bias gelu": (lambda: [linear(24, 16), bias(16), act(ops.GELU(), gelu)], ()),
    "linear gelu linear": (
        lambda: [linear(24, 16), act(ops.GELU(), gelu), linear(16, 5)],
        (),
    ),
    "mlp": (
        lambda: [
            *(linear(24, 64), bias(64), act(ops.SwiGLU(), gated(F.silu))),
            *(linear(32, 24), bias(24)),
        ],
        (),
    ),
    "interleaved": (
        lambda: [
            *(linear(24, 32), bias(32)),
            act(ops.GEGLU(glu_interleave_size=4), interleaved(gelu, 4)),
            linear(16, 24),
        ],
        (),
    ),
    "formulas": (
        lambda: [
            act(ops.Activation("x*sigmoid(x)"), F.silu),
            act(ops.Activation("elu", alpha=0.5), lambda x: F.elu(x, 0.5)),
            bias(24),
            act(ops.Activation(lambda x: x * tenon.tanh(x)), lambda x: x * torch.tanh(x)),
        ],
        (),
    ),
    "scales": (
        lambda: [bias(24), scaled(ops.ScaledSwiGLU(), gated(F.silu)), linear(12, 9)],
        ("rows",),
    ),
    "scaled": (
        lambda: [linear(24, 16), scaled(ops.ScaledSReLU(), squared), bias(16)],
        ("rows",),
    ),
    "residual": (lambda: [linear(24, 24), bias(24), scale(0.5), add()], ("whole",)),
    "two extras": (
        lambda: [
            *(add(), linear(24, 48), bias(48)),
            *(scaled(ops.ScaledSwiGLU(), gated(F.silu)), add()),
        ],
        ("whole", "rows", "whole"),
    ),
    "norm": (lambda: [norm(), linear(24, 16), bias(16)], ()),
    "norm behind": (lambda: [linear(24, 16), act(ops.SiLU(), F.silu), norm(), scale(3)], ()),
    "layer norm": (lambda: [scaled_norm(ops.LayerNorm, 24), linear(24, 16), bias(16)], ()),
    "rms norm": (lambda: [add(), scaled_norm(ops.RMSNorm, 24), linear(24, 16)], ("whole",)),
    "zero-centred norms": (
        lambda: [
            *(linear(24, 16), scaled_norm(ops.RMSNorm, 16, True), act(ops.SiLU(), F.silu)),
            *(scaled_norm(ops.LayerNorm, 16, True), scale(3)),
        ],
        (),
    ),
    "identity": (
        lambda: [identity(), bias(24), identity(), act(ops.ReLU(), F.relu), identity()],
        (),
    ),
    "reshape": (
        lambda: [linear(24, 16), reshape(-1, 8), bias(8), act(ops.GELU(), gelu)],
        (),
    ),
    "reshape around": (
        lambda: [reshape(-1, 12), bias(12), act(ops.GELU(), gelu), reshape(-1, 3, 24)],
        (),
    ),
    "deep": (
        lambda: [
            part for _ in range(4) for part in (linear(24, 24), bias(24), act(ops.GELU(), gelu))
        ],
        (),
    ),
}


def made(name, dtype, lead=(6, 3), seed=0):
    """A model, its reference, its input and its extra inputs, all with gradients."""
    torch.manual_seed(seed)
    build, kinds = CHAINS[name]
    parts = build()
    model = ops.Sequential([op for op, _ in parts]).to(dtype)
    for op, _ in parts:
        if isinstance(op, ops.Bias):
            torch.nn.init.normal_(op.bias)
        if isinstance(op, (ops.LayerNorm, ops.RMSNorm)):
            for p in op.parameters():
                torch.nn.init.uniform_(p, 0.5, 1.5)
    x = torch.randn(*lead, 24).to(dtype).requires_grad_()
    cols, extras = 24, []
    kinds = list(kinds)
    for op, _ in parts:
        if op.num_extra_inputs:
            shape = (*lead, cols) if kinds.pop(0) == "whole" else lead
            extras.append(torch.randn(shape).to(dtype).requires_grad_())
        cols = op.plan_cols(cols)

    def reference(x, parameters, extras):
        p, e = iter(parameters), iter(extras)
        for _, f in parts:
            x = f(x, p, e)
        return x

    return model, reference, x, extras


def doubled(tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def close(mine, exact, dtype, depth, terms=1):
    """Each stored value has an error of half a unit in the last place. `depth` of them follow in
    turn.

    CPU sums are trees. On other devices `terms` products are added in fp32 in any order.
    """
    order = 0.0 if mine.is_cpu else math.sqrt(terms) * EPS[torch.float32]
    bound = (depth * EPS[dtype] + order) * max(float(exact.abs().max()), 1e-3)
    error = float((mine.double() - exact).abs().max())
    assert error <= bound, (error, bound)


def check(model, reference, x, extras, depth=None):
    """Compares forward and all gradients with float64."""
    depth = depth or 4 + len(model)
    x64, *extras64 = doubled([x, *extras])
    parameters = list(model.parameters())
    parameters64 = doubled(parameters)
    y, exact = model(x, *extras), reference(x64, parameters64, extras64)
    assert y.shape == exact.shape and y.dtype == x.dtype
    close(y.detach(), exact.detach(), x.dtype, depth)
    g = torch.randn(y.shape).to(y.dtype)
    y.backward(g)
    exact.backward(g.double())
    pairs = zip([x, *extras, *parameters], [x64, *extras64, *parameters64], strict=True)
    for t, t64 in pairs:
        assert (t.grad is None) == (t64.grad is None)
        if t.grad is not None:
            assert t.grad.dtype == t.dtype
            close(t.grad, t64.grad, x.dtype, depth, x[..., 0].numel())


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_against_float64(name, dtype, runs):
    check(*made(name, dtype))
    assert runs == [False, True]


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3, 4), (300,)])
def test_any_rows_through_one_plan(lead, runs):
    for name in ("mlp", "residual"):
        check(*made(name, torch.float32, lead))
    assert runs == [False, True] * 2


def test_rows_change_and_the_plan_stays():
    model, reference, _, _ = made("mlp", torch.float32)
    for rows in (1, 7, 64, 7):
        model.zero_grad()
        check(model, reference, torch.randn(rows, 24, requires_grad=True), [])
    assert len(the_plan(model)._ready) == 1
    assert model(torch.randn(0, 24)).shape == (0, 24)
    x = torch.randn(0, 24, requires_grad=True)
    model.zero_grad()
    model(x).sum().backward()
    assert x.grad.shape == (0, 24)
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in model.parameters())


def the_plan(model, dtype=torch.float32):
    ((part, _),) = model.groups()
    (stage,) = part.plan()[0]
    assert isinstance(stage.op, Segment)
    return stage.op


def test_frozen_parameters_and_inputs(runs):
    for frozen in range(16):
        model, reference, x, _ = made("mlp", torch.float32)
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(not frozen >> i & 1)
        for wanted in (True, False):
            if frozen == 15 and not wanted:
                continue
            model.zero_grad()
            check(model, reference, x.detach().requires_grad_(wanted), [])
    assert set(runs) == {False, True}


def test_extra_inputs_without_gradients():
    for wanted in ((True, False, False), (False, True, False), (False, False, False)):
        model, reference, x, extras = made("two extras", torch.float32)
        extras = [t.detach().requires_grad_(w) for t, w in zip(extras, wanted, strict=True)]
        check(model, reference, x, extras)


def test_nothing_is_saved_without_gradients(runs):
    model, reference, x, _ = made("mlp", torch.float32)
    with torch.no_grad():
        y = model(x)
    close(y, reference(*doubled([x]), doubled(model.parameters()), []).detach(), x.dtype, 8)
    assert not y.requires_grad and runs == [False]
    ready = list(the_plan(model)._ready.values())
    assert [r.memory.saved for r in ready] == [[]]
    model.requires_grad_(False)
    assert not model(x.detach()).requires_grad


def test_a_step_leaves_no_cycles():
    """Saved tensors and gradients are freed by reference counts."""
    model, _, x, _ = made("mlp", torch.float32)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y = model(x)
            seen = weakref.ref(y.grad_fn)
            y.sum().backward()
            grads = [weakref.ref(p.grad) for p in model.parameters()]
            del y
            model.zero_grad()
            assert seen() is None and all(g() is None for g in grads)
    finally:
        gc.enable()


def test_strided_inputs_and_gradients():
    model, reference, x, extras = made("residual", torch.float32)
    wide = torch.randn(3, 24, 6).permute(2, 0, 1).requires_grad_()
    other = torch.randn(6, 3, 48)[..., ::2].requires_grad_()
    assert not wide.is_contiguous() and not other.is_contiguous()
    wide.retain_grad()
    check(model, reference, wide.detach().requires_grad_(), [other.detach().requires_grad_()])
    y = model(x, *extras)
    y.backward(torch.ones(()).expand(y.shape))
    again = model(x, *extras)
    expected = torch.autograd.grad(again, x, torch.ones(y.shape))[0]
    assert torch.equal(x.grad, expected)


def test_the_same_bits_as_op_by_op(monkeypatch):
    """Without products, a plan in float32 rounds exactly like the ops one by one."""
    torch.manual_seed(0)
    x = torch.randn(33, 40, requires_grad=True)
    r = torch.randn(33, 40, requires_grad=True)
    model = ops.Sequential(
        ops.Bias(40), ops.GELU(), ops.ConstantScale(0.3), ops.Dropout(0.25), ops.AddExtraInput()
    )
    torch.nn.init.normal_(model[0].bias)
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    y = model(x, r)
    g = torch.randn(y.shape)
    mine = torch.autograd.grad(y, [x, r, *model.parameters()], g)
    assert len(the_plan(model)._ready) == 1
    state = torch.random.get_rng_state()
    without_plans(monkeypatch)
    torch.manual_seed(3)
    same = other(x, r)
    theirs = torch.autograd.grad(same, [x, r, *other.parameters()], g)
    torch.manual_seed(3)
    other(x, r)
    torch.randn(y.shape)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(y, same)
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        assert torch.equal(a, b)
    close(mine[2], theirs[2].double(), torch.float32, 33)


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_dropout_draws_what_it_draws_alone(dtype, monkeypatch):
    """The same seed drops the same elements, with and without plans, and with any other ops."""
    torch.manual_seed(0)
    model = ops.Sequential(
        *(ops.Linear(16, 24), ops.GELU(), ops.Dropout(0.5), ops.AddExtraInput()),
        *(ops.Identity(), ops.ConstantScale(2)),
    ).to(dtype)
    x, r = torch.randn(50, 16).to(dtype), torch.zeros(50, 24).to(dtype)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    y = model(x, r)
    after = torch.rand(())
    without_plans(monkeypatch)
    torch.manual_seed(1)
    same = other(x, r)
    assert torch.equal(after, torch.rand(()))
    assert torch.equal(y == 0, same == 0) and 0.3 < (y == 0).float().mean() < 0.7
    close(y.detach(), same.detach().double(), dtype, 8)


def test_several_dropouts_in_one_plan(runs):
    """Their masks are independent, also of rows that a narrower dropout shares a stream with."""
    model = ops.Sequential(
        *(ops.Dropout(0.5), ops.Bias(64), ops.SwiGLU(), ops.Dropout(0.25), ops.Dropout(0.5)),
        ops.ConstantScale(2.0),
    )
    torch.nn.init.ones_(model[1].bias)
    x = torch.ones(400, 64, requires_grad=True)
    y = model(x)
    g = torch.ones_like(y)
    y.backward(g)
    assert runs == [False, True]
    # x of the plan after the first dropout is 0 or 2.
    a, b = (y.detach().double(), x.grad.double())
    levels = {F.silu(torch.tensor(z)).item() * w for z in (1.0, 3.0) for w in (1.0, 3.0)}
    exact = torch.tensor([0.0, *(v * 2 / 0.5 / 0.75 for v in sorted(levels))]).double()
    assert (a.unsqueeze(-1) - exact).abs().amin(-1).max() < 1e-5
    dropped = (a == 0).double()
    # P(dropped) = 1 - 0.75*0.5. Five standard deviations of 12,800 draws.
    assert abs(dropped.mean() - 0.625) < 5 * math.sqrt(0.625 * 0.375 / dropped.numel())
    # Elements of adjacent rows, and of columns at the widths of the two streams, are independent.
    for other in (dropped.roll(1, 0), dropped.roll(1, 1), dropped.flatten().roll(64).view(400, 32)):
        both = ((dropped - 0.625) * (other - 0.625)).mean()
        assert abs(both) < 5 * 0.625 * 0.375 / math.sqrt(dropped.numel())
    # A dropped output has no gradient. Others have one, unless the first dropout took their input.
    da, db = b[:, :32], b[:, 32:]
    assert not da[dropped.bool()].any() and not db[dropped.bool()].any()
    assert 0.4 < (da[~dropped.bool()] != 0).double().mean() < 0.6


def test_dropout_gradient_and_evaluation(runs):
    model = ops.Sequential(ops.Linear(16, 16), ops.Dropout(0.5))
    x = torch.randn(9, 16, requires_grad=True)
    y = model(x)
    kept = y.detach() != 0
    assert 0.2 < kept.float().mean() < 0.8
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, (2.0 * kept) @ model[0].weight.detach())
    model.eval()
    expected = F.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), expected)
    state = torch.random.get_rng_state()
    model(x)
    assert torch.equal(state, torch.random.get_rng_state())
    model.train()
    model[1].p = 0.0
    torch.testing.assert_close(model(x), expected)
    assert len(runs) == 5


@pytest.mark.parametrize("shown", [True, False])
def test_channels_and_extra_outputs(shown, runs):
    make, plus = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=shown)
    plus.set_extra_input_channel(0, "skip")
    model = ops.Sequential(
        *(make, ops.Linear(8, 16), ops.GELU(), ops.MakeExtraOutput(), ops.Linear(16, 8), plus)
    )
    x = torch.randn(5, 8, requires_grad=True)
    x64, *p64 = doubled([x, *model.parameters()])
    h64 = gelu(F.linear(x64, *p64[:2]))
    exact = F.linear(h64, *p64[2:]) + x64
    outputs64 = [exact, *([x64] if shown else []), h64]
    outputs = model(x)
    assert len(outputs) == len(outputs64)
    for a, b in zip(outputs, outputs64, strict=True):
        close(a.detach(), b.detach(), torch.float32, 12)
    grads = [torch.randn(t.shape) for t in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(outputs64, [g.double() for g in grads])
    for a, b in zip([x, *model.parameters()], [x64, *p64], strict=True):
        close(a.grad, b.grad, torch.float32, 16)
    assert runs == [False, True]
    # An unused output has no gradient.
    assert torch.autograd.grad(model(x)[-1].sum(), x)[0].shape == x.shape


class Triple(ops.BasicOperation):
    """A user's op. It splits a sequence of ops into two plans."""

    def op_forward(self, ctx, input_, **kwargs):
        return 3 * input_

    def op_backward(self, ctx, grad_output):
        return 3 * grad_output


def test_an_op_of_the_users_between(runs):
    make, plus = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "over", output_to_caller=False)
    plus.set_extra_input_channel(0, "over")
    model = ops.Sequential(
        ops.Linear(8, 8), ops.GELU(), make, Triple(), ops.Linear(8, 8), plus, ops.SiLU()
    )

    def reference(x, p, e):
        h = gelu(F.linear(x, *p[:2]))
        return F.silu(F.linear(3 * h, *p[2:]) + h)

    check(model, reference, torch.randn(6, 8, requires_grad=True), [], depth=24)
    assert runs == [False, False, True, True]
    runs.clear()
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    y = model(torch.randn(6, 8))
    y.sum().backward()
    assert runs == [False, False, True]


def test_a_channel_without_a_gradient(runs):
    class Ignore(ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            return input_ + 0, [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
            return grad_output, [()], [(None,)]

    make, ignore = ops.MakeExtraOutput(), Ignore()
    make.set_extra_output_channel(0, "lost", output_to_caller=False)
    ignore.set_extra_input_channel(0, "lost")
    model = ops.Sequential(ops.Linear(8, 8), make, ops.GELU(), ignore)
    x = torch.randn(6, 8, requires_grad=True)
    check(model, lambda x, p, e: gelu(F.linear(x, *p)), x, [])
    assert runs == [False, True]


def test_a_fusion_of_the_users_comes_first(runs):
    class Theirs(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            basic_op_ctxs[0].save_for_backward(input_)
            return gelu(input_ + self.basic_ops[0].bias), [(), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
            (x,) = basic_op_ctxs[0].saved_tensors
            with torch.enable_grad():
                z = (x.detach() + self.basic_ops[0].bias.detach()).requires_grad_()
                (dx,) = torch.autograd.grad(gelu(z), z, grad_output)
            return dx, [(dx.sum(0),), ()], [(), ()]

    def fuse(given, **unused):
        at = next((i for i, op in enumerate(given) if isinstance(op, ops.GELU)), None)
        if not at:
            return given
        return [*given[: at - 1], Theirs(given[at - 1 : at + 1]), *given[at + 1 :]]

    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.SiLU())

    def reference(x, p, e):
        return F.silu(F.linear(gelu(F.linear(x, *p[:2])), *p[2:]))

    x = torch.randn(6, 8, requires_grad=True)
    check(model, reference, x, [])
    assert runs == [False, True]
    ops.register_forward_backward_fusion(fuse)
    try:
        runs.clear()
        model.zero_grad()
        check(model, reference, x.detach().requires_grad_(), [])
        assert runs == [False, False, True, True]
        assert [type(s.op).__name__ for s in model.groups()[0][0].plan()[0]] == [
            *("Segment", "Theirs", "Segment")
        ]
    finally:
        ops.unregister_forward_backward_fusion(fuse)


def test_a_subclass_of_the_users_is_left_alone(runs):
    class Louder(ops.GELU):
        def _activation_forward_impl(self, input_, quantizer):
            return 2 * super()._activation_forward_impl(input_, quantizer)

    model = ops.Sequential(ops.Bias(8), Louder(), ops.Bias(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), 2 * gelu(x))
    assert not runs


def test_saved_tensors_go_through_hooks(runs):
    model, _, x, _ = made("mlp", torch.float32)
    tensors = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), tensors)
    seen = []

    def pack(t):
        seen.append(t.clone())
        return len(seen) - 1

    def unpack(i):  # the same values, column-major
        t = seen[i]
        return t.t().contiguous().t() if t.dim() == 2 else t

    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        torch.autograd.graph.save_on_cpu(),
    ):
        with hooks:
            y = model(x)
        for a, b in zip(torch.autograd.grad(y.sum(), tensors), expected, strict=True):
            assert torch.equal(a, b)
    assert runs == [False, True] * 3
    # x, two weights, and one tensor for everything that the plan saves.
    assert len(seen) == 4 and sum(t.numel() for t in seen[-1:]) == 18 * (64 + 32)
    y = model(x)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_twice_and_second_derivatives():
    model, _, x, _ = made("mlp", torch.float32)
    y = model(x).sum()
    (a,) = torch.autograd.grad(y, x, retain_graph=True)
    (b,) = torch.autograd.grad(y, x)
    assert torch.equal(a, b)
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad(overwrite, runs):
    model = ops.Sequential(ops.Linear(8, 4, accumulate_into_main_grad=True), ops.GELU())
    weight, x = model[0].weight, torch.randn(5, 8)
    weight.main_grad = torch.ones(4, 8)
    weight.overwrite_main_grad = overwrite
    weight.grad_added_to_main_grad = False
    y = model(x)
    g = torch.randn(y.shape)
    y.backward(g)
    w64, b64 = doubled(model.parameters())
    gelu(F.linear(x.double(), w64, b64)).backward(g.double())
    close(weight.main_grad, w64.grad + (not overwrite), torch.float32, 8)
    assert weight.grad is None and weight.grad_added_to_main_grad and runs == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["one plan", "several calls", "no plan"])
def test_main_grad_of_a_shared_weight_is_overwritten_once(kind, dtype, monkeypatch):
    """A backward pass replaces main_grad by the sum of the gradients of all ops."""
    if kind == "no plan":
        without_plans(monkeypatch)
    first, last = (ops.BasicLinear(8, 8, accumulate_into_main_grad=True) for _ in range(2))
    weight = last.weight = first.weight
    parts = [first, ops.GELU(), last]
    if kind == "several calls":
        parts.insert(2, torch.nn.Identity())
    model = ops.Sequential(*parts)
    weight.main_grad = torch.full((8, 8), 5.0, dtype=dtype)
    weight.overwrite_main_grad = True
    for _ in range(2):
        x, g = torch.randn(5, 8), torch.randn(5, 8)
        (w64,) = doubled([weight])
        F.linear(gelu(F.linear(x.double(), w64)), w64).backward(g.double())
        model(x).backward(g)
        close(weight.main_grad, w64.grad, torch.float32, 16)


@pytest.mark.parametrize("planned", [True, False])
def test_main_grad_of_another_dtype(planned, monkeypatch):
    """It gets the sum in its own dtype, without rounding to the dtype of the weight."""
    if not planned:
        without_plans(monkeypatch)
    torch.manual_seed(0)
    linear_ = ops.BasicLinear(8, 4, accumulate_into_main_grad=True, dtype=torch.bfloat16)
    model = ops.Sequential(linear_, ops.ConstantScale(1.0))
    x = torch.randn(64, 8).to(torch.bfloat16)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        main_grad = linear_.weight.main_grad = torch.ones(4, 8, dtype=dtype)
        y = model(x)
        g = torch.randn(y.shape).to(torch.bfloat16)
        y.backward(g)
        exact = 1 + g.double().T @ x.double()
        close(main_grad, exact, torch.float32 if dtype == torch.float64 else dtype, 64)
    linear_.weight.main_grad = torch.zeros(4, 8, dtype=torch.bfloat16)
    y = model(x)
    linear_.weight.main_grad = torch.zeros(4, 8)  # not the tensor of the forward pass
    y.backward(g)
    close(linear_.weight.main_grad, g.double().T @ x.double(), torch.bfloat16, 4)


@pytest.fixture
def passes(monkeypatch):
    """The numbers of the backward passes that ran."""
    ran = []
    run = Plan.run

    def count(self, pass_, *args, **more):
        if pass_ != FORWARD:
            ran.append(pass_)
        return run(self, pass_, *args, **more)

    monkeypatch.setattr(Plan, "run", count)
    return ran


def test_only_the_last_backward_overwrites_saved_tensors(passes):
    """A kept graph, hooks and their tensors stay as they are."""
    model = ops.Sequential(ops.Linear(16, 32), ops.SwiGLU(), ops.Linear(16, 16))
    x = torch.randn(12, 16, requires_grad=True)
    wanted = [x, *model.parameters()]
    g = torch.randn(12, 16)
    y = model(x)
    expected = torch.autograd.grad(y, wanted, g, retain_graph=True)
    for last in (True, False):
        grads = torch.autograd.grad(y, wanted, g, retain_graph=last)
        assert all(map(torch.equal, grads, expected))
    assert passes == [BACKWARD, BACKWARD, BACKWARD_LAST]

    seen = []

    def pack(t):
        seen.append((t, t.clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert all(map(torch.equal, torch.autograd.grad(y, wanted, g), expected))
    assert passes[3:] == [BACKWARD]
    assert seen and all(torch.equal(t, copy) for t, copy in seen)


def test_a_failed_backward_is_not_repeated_on_overwritten_tensors():
    """torch keeps the saved tensors of a node that failed, so that it can run again."""
    model = ops.Sequential(ops.Linear(16, 32), ops.SwiGLU(), ops.Linear(16, 16))
    y = model(torch.randn(12, 16, requires_grad=True))

    def fail(grads, _):
        raise ArithmeticError("once")

    handle = y.grad_fn.register_hook(fail)
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    handle.remove()
    # Torch itself refuses it if its version lets us free saved tensors.
    with pytest.raises(RuntimeError, match="run the forward pass again|a second time"):
        y.sum().backward()


def negative(t):
    """The same values with the negative bit, so that memory holds the negated ones."""
    seen = torch._neg_view(-t.detach())
    # Memory between saved tensors is uninitialised and may hold NaN.
    assert seen.is_neg() and torch.equal(seen.nan_to_num(), t.nan_to_num())
    return seen


@pytest.mark.parametrize("name", ["two extras", "norm", "layer norm", "formulas"])
def test_tensors_with_the_negative_bit(name, runs):
    model, _, x, extras = made(name, torch.float32)
    y = model(x, *extras)
    g = torch.randn(y.shape)
    wanted = [x, *extras, *model.parameters()]
    expected = torch.autograd.grad(y, wanted, g)
    seen = [negative(t).requires_grad_() for t in (x, *extras)]
    again = model(*seen)
    assert torch.equal(again, y)
    grads = torch.autograd.grad(again, [*seen, *model.parameters()], negative(g))
    assert all(map(torch.equal, grads, expected)) and runs == [False, True] * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, negative):
        kept = model(x, *extras)
        assert all(map(torch.equal, torch.autograd.grad(kept, wanted, g), expected))
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            setattr(module, key, torch.nn.Parameter(negative(p)))
    torch.testing.assert_close(model(x, *extras), y)


def test_gradients_of_extra_outputs_with_the_negative_bit():
    model = ops.Sequential(ops.Bias(8), ops.MakeExtraOutput(), ops.GELU())
    x = torch.randn(3, 8, requires_grad=True)
    g, h = torch.randn(3, 8), torch.randn(3, 8)
    (expected,) = torch.autograd.grad(model(x), x, (g, h))
    (dx,) = torch.autograd.grad(model(x), x, (g, negative(h)))
    assert torch.equal(dx, expected)


def test_calls_of_other_kinds_are_plans(runs):
    """Autocast, mixed dtypes, sums in place: plans, cut where the dtype changes."""
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        small = ops.Sequential(ops.Linear(4, 4), ops.GELU())
        x = torch.randn(2, 4, requires_grad=True)
        y = small(x)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == small[0].weight.grad.dtype == torch.float32 and runs == [False, True]
    x64, w, b = (t.detach().double().requires_grad_() for t in (x, *small.parameters()))
    exact = gelu(F.linear(x64, w, b))
    exact.sum().backward()
    close(y.detach(), exact.detach(), torch.bfloat16, 6)
    close(x.grad, x64.grad, torch.bfloat16, 6)
    runs.clear()
    x = torch.randn(4, 32)
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    expected = gelu(F.linear(x, model[0].weight, model[0].bias))
    y = model(x.to(torch.bfloat16))  # a linear computes in the dtype of its weight
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    model[0].bias.data = model[0].bias.data.to(torch.bfloat16)
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    assert runs == [False] * 2
    extra = torch.randn(4, 32, dtype=torch.bfloat16)
    assert ops.Sequential(ops.GELU(), ops.AddExtraInput())(x, extra).dtype == torch.float32
    assert ops.Sequential(ops.GELU(), ops.AddExtraInput())(extra, x).dtype == torch.float32
    e = torch.zeros(4, 32)
    with torch.no_grad():
        y = ops.Sequential(ops.GELU(), ops.AddExtraInput(in_place=True))(x, e)
    assert y is e
    torch.testing.assert_close(e, gelu(x))
    e = torch.zeros(4, 32)
    recorded = ops.Sequential(ops.GELU(), ops.AddExtraInput(in_place=True))(x.requires_grad_(), e)
    assert recorded is not e and not e.any()


def test_parameters_of_another_dtype(runs):
    model = ops.Sequential(ops.Bias(8), ops.GELU(), ops.ConstantScale(2.0))
    torch.nn.init.normal_(model[0].bias)
    x = torch.randn(5, 8).to(torch.bfloat16).requires_grad_()
    check(model, lambda x, p, e: 2 * gelu(x + p[0]), x, [])
    assert runs == [False, True] and model[0].bias.grad.dtype == torch.float32


def test_mistakes_are_told_by_the_ops():
    model = ops.Sequential(ops.Linear(8, 16), ops.SwiGLU())
    with pytest.raises(ValueError, match="BasicLinear: its input has 9 columns; it must have 8"):
        model(torch.randn(3, 9))
    with pytest.raises(TypeError, match="BasicLinear.*: the input is torch.float64"):
        model(torch.randn(3, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="Bias: its input has 16 columns; it must have 8"):
        ops.Sequential(ops.Bias(8), ops.GELU())(torch.randn(3, 16))
    with pytest.raises(ValueError, match=r"BasicLinear: weight is \(16, 4\); it must be \(16, 8\)"):
        model[0].weight.data = torch.zeros(16, 4)
        model(torch.randn(3, 8))
    with pytest.raises(ValueError, match="even"):
        ops.Sequential(ops.Bias(7), ops.SwiGLU())(torch.randn(3, 7))
    with pytest.raises(ValueError, match="AddExtraInput.*same shape"):
        ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput())(torch.randn(3, 8), torch.randn(8))
    with pytest.raises(ValueError, match="give one scale a row"):
        ops.Sequential(ops.Bias(8), ops.ScaledSwiGLU())(torch.randn(3, 8), torch.randn(4))
    with pytest.raises(ValueError, match="Reshape"):
        ops.Sequential(ops.Linear(8, 8), ops.Reshape(-1, 5), ops.GELU())(torch.randn(3, 8))


def test_parameters_of_ops_may_change():
    model = ops.Sequential(ops.Activation("elu", alpha=1.0), ops.ConstantScale(2.0))
    x = torch.linspace(-2, 2, 12, requires_grad=True)
    torch.testing.assert_close(model(x), 2 * F.elu(x))
    y = model(x)
    model[0].alpha, model[1].scale = 0.5, 3.0
    torch.testing.assert_close(model(x), 3 * F.elu(x, 0.5))
    # Backward matches its forward.
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((2 * F.elu(x)).sum(), x)
    torch.testing.assert_close(dx, expected)


def test_definitions_of_built_models_stay(runs):
    tenon.define("planned_twice", "2*x*x")
    model = ops.Sequential(ops.Bias(6), ops.Activation("planned_twice"))
    x = torch.randn(3, 6, requires_grad=True)
    y = model(x)
    tenon.define("planned_twice", "3*x*x")
    torch.testing.assert_close(model(x), 2 * x * x)
    fresh = ops.Sequential(ops.Bias(6), ops.Activation("planned_twice"))
    torch.testing.assert_close(fresh(x), 3 * x * x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 4 * x)
    assert runs == [False, False, False, True]


def test_cached_inputs_are_saved_in_fp8(runs):
    model = ops.Sequential(ops.Bias(256), ops.GELU(cache_quantized_input=True), ops.Bias(256))
    x = torch.randn(4, 256, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        model(x)
    assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float32}
    assert sum(t.nbytes for t in saved) == 4 * 256 + 4 * 2 * 4
    y = model(x)
    y.sum().backward()
    x64 = x.detach().double().requires_grad_()
    gelu(x64).sum().backward()
    # An e4m3 input has a relative error of 1/16. The second derivative of gelu is below 1.2.
    error = (x.grad.double() - x64.grad).abs()
    assert bool((error <= 1.2 * x64.detach().abs() / 16 + 1e-2).all()) and float(error.max()) > 1e-4
    torch.testing.assert_close(y.detach(), gelu(x.detach()))
    assert runs == [False, False, True]


def test_numbers_as_a_text_says_them():
    x = torch.randn(5, 6)
    for c in (1e-5, -0.25, 1.0e20, 3, 0.1):
        y = ops.Sequential(ops.Identity(), ops.Bias(6), ops.ConstantScale(c))(x)
        torch.testing.assert_close(y, x * c)
    for c in (float("inf"), torch.tensor(2.0)):
        y = ops.Sequential(ops.Bias(6), ops.ConstantScale(c))(x)
        torch.testing.assert_close(y, x * c)


def test_copies_and_pickles(runs):
    model, reference, x, _ = made("mlp", torch.float32)
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        runs.clear()
        other.zero_grad()
        check(other, reference, x.detach().requires_grad_(), [])
        assert runs == [False, True]
        assert torch.equal(other(x), model(x))


def test_many_threads_at_once():
    model, _, x, _ = made("mlp", torch.float32, (64,))
    expected = model(x)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    wrong = []

    def work():
        for _ in range(20):
            mine = x.detach().requires_grad_()
            y = model(mine)
            (grad,) = torch.autograd.grad(y.sum(), mine)
            if not torch.equal(y, expected) or not torch.equal(grad, dx):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


on_cpu = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="torch keeps the memory of other devices"
)


@on_cpu
def test_saved_memory_is_used_again():
    """A later forward reuses the memory of a completed backward, never of a pending one."""
    model = ops.Sequential(ops.Linear(64, 4096), ops.GELU(), ops.Linear(4096, 64))
    x = torch.randn(1024, 64)
    reference = [torch.randn(1024, 64) for _ in range(3)]

    def gradients(y, dy):
        return [g.clone() for g in torch.autograd.grad(y, list(model.parameters()), dy)]

    alone = [gradients(model(x * (i + 1)), dy) for i, dy in enumerate(reference)]
    results = [model(x * (i + 1)) for i in range(3)]  # three graphs at once
    pairs = zip(results, reference, strict=True)
    for wanted, got in zip(alone, [gradients(y, dy) for y, dy in pairs], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    del results, pairs
    idle = {t.data_ptr() for blocks in _memory._idle.values() for t in blocks}
    assert idle
    y = model(x)
    left = {t.data_ptr() for blocks in _memory._idle.values() for t in blocks}
    assert left < idle
    for wanted, got in zip(alone[0], gradients(y, reference[0]), strict=True):
        assert torch.equal(wanted, got)


@on_cpu
def test_memory_that_is_not_kept(monkeypatch):
    """Workspaces above the limit are freed after their call. Cached blocks stay below the limit."""
    model = ops.Sequential(ops.Linear(64, 4096), ops.GELU(), ops.Linear(4096, 64))
    x = torch.randn(1024, 64)

    def gradients():
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    wanted = gradients()
    monkeypatch.setattr(_memory, "_MOST_IDLE", 0)
    for a, b in zip(wanted, gradients(), strict=True):
        assert torch.equal(a, b)
    assert not any(_memory._idle.values())
    monkeypatch.setattr(_memory, "_MOST_IDLE", 1 << 26)
    for rows in range(512, 1024, 64):
        model(torch.randn(rows, 64)).sum().backward()
    assert 0 < sum(n * len(blocks) for n, blocks in _memory._idle.items()) <= 1 << 26


def test_a_default_device_is_not_the_memory_of_plans():
    model = ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))
    x = torch.randn(4, 8)
    y = model(x)
    with torch.device("meta"):
        _memory._own.workspace = _memory._bytes(0)
        assert _memory.workspace(1 << 20).device.type == "cpu"
        assert _memory.saved(1 << 22, torch.float32).device.type == "cpu"
    assert torch.equal(model(x), y)


def test_compiled_with_large_saved_blocks():
    model = ops.Sequential(ops.Linear(64, 4096), ops.GELU(), ops.Linear(4096, 64))
    x = torch.randn(1024, 64)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="eager")
    for a, b in zip(
        wanted, torch.autograd.grad(compiled(x).sum(), list(model.parameters())), strict=True
    ):
        assert torch.equal(a, b)


def test_explain_shows_the_plan():
    model = ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))
    told = tt.explain(model, torch.randn(5, 8, requires_grad=True))
    assert "chain   linear(8,16) bias gelu linear(16,8) bias" in told
    assert "input   5 x 8 f32" in told and "forward: " in told
    assert "forward: 2 passes" in told or ", cuda, " in told  # there gelu is a second step
    assert "backward: " in told and "saved   " in told and "writes dx (f32)" in told
    model(torch.randn(5, 8))
    assert "forward: Segment(BasicLinear, Bias, GELU, BasicLinear, Bias)" in repr(model)
    told = tt.explain(model, torch.randn(2, 3, 8))
    assert "input   6 x 8 f32" in told and "writes dx" not in told
    assert "input   256 x 8 f32" in tt.explain(model)
    with torch.no_grad():
        assert "backward: " not in tt.explain(model, torch.randn(5, 8))
    with pytest.raises(TypeError, match="the input is torch.float64"):
        tt.explain(model, torch.randn(5, 8, dtype=torch.float64))
    assert "chain" not in tt.explain(ops.GELU(), torch.randn(5, 8))
    # A second plan after an op whose output shape is unknown.
    model = ops.Sequential(ops.Linear(8, 16), Triple(), ops.Linear(16, 8), ops.GELU())
    told = tt.explain(model, torch.randn(5, 8))
    assert "input   5 x 8" in told and "chain   linear(16,8) bias gelu" in told


def test_notebooks_show_the_plan():
    make = ops.MakeExtraOutput()
    model = ops.Sequential(ops.Linear(8, 16), make, ops.GELU())
    shown = model._repr_html_()
    assert shown.startswith("<pre") and "<iframe srcdoc=" in shown and "linear(8,16)" in shown
    make.set_extra_output_channel(0, "later")  # explain changed nothing
    assert model._groups is None
    assert "<iframe" in ops.Linear(8, 16)._repr_html_()
    for module in (ops.GELU(), ops.Sequential(), ops.Sequential(torch.nn.Linear(2, 2)), Triple()):
        assert module._repr_html_().startswith("<pre")
    model = ops.Sequential(ops.Linear(8, 16), ops.AddExtraInput())
    model[1].set_extra_input_channel(0, "nobody writes this")
    assert model._repr_html_().startswith("<pre")  # for any error in it


def test_plans_for_everybody():
    plan = tenon.plan("linear(512,2048) bias swiglu linear(1024,512)", dtype="bf16", rows=32)
    assert str(plan).startswith("chain   linear(512,2048) bias swiglu linear(1024,512)\n")
    assert "input   32 x 512 bf16" in repr(plan) and "input   7 x 512" in plan.describe(7)
    assert len(plan.json()["forward"]) == 2 and plan.json(4)["rows"] == 4
    assert "<html" in plan.html() and plan._repr_html_().startswith("<iframe")
    each, workspace = plan.sizes(4)
    assert len(each) == len(plan.buffers) and workspace >= 0
    for b, size in zip(plan.buffers, each, strict=True):
        width = {"f32": 4, "bf16": 2}[b.dtype]
        assert b.shape(4)[0] * b.shape(4)[1] * width == size
    assert not tenon.plan("gelu bias", cols=8, backward=False).json()["backward"]
    with pytest.raises(ValueError, match="there is no op of this name"):
        tenon.plan("linear(8,8) gleu")
    with pytest.raises(ValueError, match="give the columns"):
        tenon.plan("gelu bias")
    with pytest.raises(ValueError, match="dtype='f64'; it must be"):
        tenon.plan("linear(8,8)", dtype="f64")
    with pytest.raises(ValueError, match="use none, delayed, current, mxfp8 or block"):
        tenon.plan("linear(8,8)", recipe="fp4")
    with pytest.raises(TypeError, match="it must be a text"):
        tenon.plan(["linear(8,8)"])
    with pytest.raises(ValueError, match="give a multiple of 2"):
        tenon.plan("linear(8,8) reshape(16) bias").sizes(3)


def test_arguments_of_plans():
    text = "linear(8,8) bias"
    for error, told, call in (
        (ValueError, "the chain .* null character", lambda: tenon.plan("linear(4,8)\0bias")),
        (ValueError, "the recipe .* null character", lambda: tenon.plan(text, recipe="none\0x")),
        (ValueError, "keep .* null character", lambda: tenon.plan(text, keep="input\0")),
        (TypeError, "the recipe is a NoneType", lambda: tenon.plan(text, recipe=None)),
        (TypeError, "keep is a int", lambda: tenon.plan(text, keep=1)),
        (TypeError, "rows='3'", lambda: tenon.plan(text, rows="3")),
        (TypeError, "rows=2.5", lambda: tenon.plan(text, rows=2.5)),
        (TypeError, "rows='3'", lambda: tenon.plan(text).sizes("3")),
        (TypeError, "rows=2.5", lambda: tenon.plan(text).describe(2.5)),
        (TypeError, "cols=8.0", lambda: tenon.plan("bias", cols=8.0)),
        (ValueError, "cols=-1;", lambda: tenon.plan("bias", cols=-1)),
        (ValueError, f"cols={2**70};", lambda: tenon.plan("bias", cols=2**70)),
        (ValueError, f"rows={2**63};", lambda: tenon.plan(text).json(2**63)),
        (TypeError, "parameter_grads=True", lambda: tenon.plan(text, parameter_grads=True)),
        (ValueError, "extra_grads has 'f64'", lambda: tenon.plan(text, extra_grads=["f64"])),
    ):
        with pytest.raises(error, match=told):
            call()
    buffers = tenon.plan(text, dtype="bf16", parameter_grads=["f32", True]).buffers
    grads = {b.name: b.dtype for b in buffers if b.role == "grad"}
    assert grads == {"dx": "bf16", "dlinear0.weight": "f32", "dbias1.bias": "bf16"}


def test_runs_keep_codes_of_unchanged_weights():
    plan = Plan("linear(32,16)", recipe="current", backward=False)
    sizes, workspace = plan.sizes(1)
    tensors = [torch.ones(size // 4 + 1, device="cpu") for size in sizes]
    work = torch.empty(workspace + 1, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    at = {b.role: t for b, t in zip(plan.buffers, tensors, strict=True)}

    def run(**flags):
        plan.run(FORWARD, 1, memory, work.data_ptr(), **flags)
        return at["output"][0].item()

    assert run() == pytest.approx(32)
    at["param"].fill_(2)
    assert run(weights_unchanged=True, tune=False) == pytest.approx(32)
    assert run(tune=False) == pytest.approx(64)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_are_not_timed(monkeypatch, deterministic):
    class Recorder:
        def run(self, *_, tune, aligned, step, weights_unchanged):
            self.tune, self.aligned, self.step = tune, aligned, step

    plan = Recorder()
    monkeypatch.setattr(_cuda, "_current_device", lambda: 0)
    monkeypatch.setattr(_cuda, "_raw_stream", lambda device: 0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        _cuda.run_plan(plan, 0, FORWARD, 1, [], 0, False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert plan.tune is not deterministic and not plan.aligned


def _mlp(recipe, norm):
    torch.manual_seed(3)
    first = [ops.RMSNorm(64)] if norm else []
    model = ops.Sequential(
        *first, ops.Linear(64, 256), ops.SwiGLU(), ops.Dropout(0.1), ops.Linear(128, 64)
    )
    for op in model.modules():
        if recipe and isinstance(op, ops.BasicLinear):
            for mode, slot in (("forward", 0), ("forward", 1), ("backward", 0)):
                made = quantizer.MXFP8Quantizer("e4m3")
                if recipe == "current":
                    made = quantizer.Float8CurrentScalingQuantizer("e4m3")
                if recipe == "delayed":
                    made = quantizer.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
                op.set_quantizer(mode, slot, made)
    return model


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "mxfp8"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_passes_in_parts_give_the_same_bits(monkeypatch, recipe, keep, norm):
    def step(parts):
        monkeypatch.setattr(_plan_memory, "_in_parts", lambda size, on_cpu: parts)
        model = _mlp(recipe, norm)
        x = torch.randn(96, 64, requires_grad=True)
        found = []
        torch.manual_seed(5)
        y = model(x)
        for _ in range(2 if keep else 1):
            y.backward(torch.full_like(y, 0.5), retain_graph=keep)
            found += [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        return [y.detach(), *found]

    for a, b in zip(step(False), step(True), strict=True):
        assert torch.equal(a, b)


def test_parts_free_saved_tensors_during_the_backward_pass(monkeypatch):
    if not hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors"):
        pytest.skip("this torch keeps saved tensors until the node has run")
    monkeypatch.setattr(_plan_memory, "_in_parts", lambda size, on_cpu: True)
    alive, refs = [], []
    run = Plan.run

    def watched(self, pass_, *given, **more):
        if pass_ != FORWARD:
            alive.append([r() is not None for r in refs])
        run(self, pass_, *given, **more)

    made = _plan_memory.Layout.saved_tensors

    def saved(self, device):
        tensors = made(self, device)
        refs.extend(weakref.ref(t.untyped_storage()) for t in tensors)
        return tensors

    monkeypatch.setattr(Plan, "run", watched)
    monkeypatch.setattr(_plan_memory.Layout, "saved_tensors", saved)
    model = ops.Sequential(ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64))
    x = torch.randn(96, 64, requires_grad=True)
    model(x).sum().backward()
    # The gradient of the first linear's output overwrites the saved input of GELU. The input of the
    # second linear is free after its weight gradient.
    assert len(alive) > 3 and len(refs) == 2
    assert all(alive[0]) and not all(alive[-1])
