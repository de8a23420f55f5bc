"""Tests of operations as modules: torch tools that change parameters, and hooks."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

F = torch.nn.functional


def gelu(x):
    return F.gelu(x, approximate="tanh")


def twins(bias=True, **options):
    """An ops.Linear and a torch.nn.Linear with the same parameters."""
    mine, theirs = ops.Linear(6, 5, bias, **options), torch.nn.Linear(6, 5, bias, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def same(mine, theirs, steps=2):
    """Compares values, all gradients by name, and training steps with the torch module."""
    torch.manual_seed(1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, theirs)]
    for _ in range(steps):
        data, g = torch.randn(4, 6), torch.randn(4, 5)
        grads = []
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            x = data.clone().requires_grad_()
            y = model(x)
            optimizer.zero_grad()
            y.backward(g)
            grads.append({"x": x.grad, "y": y.detach()})
            grads[-1].update({n: p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
        assert list(grads[0]) == list(grads[1])
        for name in grads[0]:
            torch.testing.assert_close(grads[0][name], grads[1][name], msg=lambda m, n=name: n + m)


class Symmetric(torch.nn.Module):
    def forward(self, w):
        return w + 0.5 * w.flip(0)

    def right_inverse(self, w):
        return (w - 0.5 * w.flip(0)) / 0.75


class Shift(torch.nn.Module):
    def forward(self, w):
        return 2 * w + 1


# Each changes a linear in place and returns it.
CHANGES = {
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "two parametrizations": lambda m: parametrize.register_parametrization(
        parametrize.register_parametrization(m, "weight", Symmetric()), "bias", Shift()
    ),
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "old weight_norm": lambda m: torch.nn.utils.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "old spectral_norm": lambda m: torch.nn.utils.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
    "l1_unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.4),
    "prune bias": lambda m: prune.l1_unstructured(m, "bias", 0.4),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("chain", ["alone", "first", "in a chain"])
def test_reparametrized_linears(change, chain):
    mine, theirs = twins()
    for m in (mine, theirs):
        torch.manual_seed(0)
        CHANGES[change](m)
    if chain == "first":
        mine, theirs = ops.Sequential(mine, ops.GELU()), torch.nn.Sequential(theirs, Gelu())
    if chain == "in a chain":
        mine = ops.Sequential(ops.SiLU(), mine, ops.GELU(), ops.ConstantScale(0.5))
        theirs = torch.nn.Sequential(torch.nn.SiLU(), theirs, Gelu(), Half())
    same(mine, theirs)
    state = {n: t.shape for n, t in mine.state_dict().items()}
    assert state == {n: t.shape for n, t in theirs.state_dict().items()}


class Gelu(torch.nn.Module):
    def forward(self, x):
        return gelu(x)


class Half(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x


@pytest.mark.parametrize("fused", [True, False])
def test_parametrized_basic_ops(fused):
    linear, bias = ops.BasicLinear(6, 5), ops.Bias(5)
    layer, rms = ops.LayerNorm(5), ops.RMSNorm(5)
    for p in (bias.bias, layer.weight, layer.bias, rms.weight):
        torch.nn.init.normal_(p)
    for op, name in ((linear, "weight"), (bias, "bias"), (layer, "bias"), (rms, "weight")):
        parametrize.register_parametrization(op, name, Shift())
    parts = [linear, bias, ops.GELU(), layer, rms]
    model = ops.Sequential(parts) if fused else torch.nn.Sequential(*parts)
    x = torch.randn(4, 6, requires_grad=True)
    y = model(x)
    x64 = x.detach().double().requires_grad_()
    originals = [p.detach().double().requires_grad_() for p in model.parameters()]
    names = [n.split(".", 1)[1] for n, _ in model.named_parameters()]
    assert names == [
        *("parametrizations.weight.original", "parametrizations.bias.original", "weight"),
        *("parametrizations.bias.original", "parametrizations.weight.original"),
    ]
    w, b, gamma, beta, gain = originals
    z = gelu(F.linear(x64, 2 * w + 1, 2 * b + 1))
    z = F.layer_norm(z, (5,), gamma, 2 * beta + 1)
    z = z * torch.rsqrt((z * z).mean(-1, keepdim=True) + 1e-5) * (2 * gain + 1)
    torch.testing.assert_close(y.double(), z, rtol=1e-5, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    z.backward(g.double())
    for mine, exact in zip([x, *model.parameters()], [x64, *originals], strict=True):
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


class Times(ops.BasicOperation):
    """A user's op with two parameters."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((3,), 2.0))
        self.b = torch.nn.Parameter(torch.full((3,), 5.0))

    def op_forward(self, ctx, input_, **kwargs):
        a, b = self.parameter(ctx, "a"), self.parameter(ctx, "b")
        ctx.save_for_backward(input_, a)
        return input_ * a + b

    def op_backward(self, ctx, grad_output):
        x, a = ctx.saved_tensors
        return grad_output * a, ((grad_output * x).sum(0), grad_output.sum(0))


class NamedTimes(Times):
    parameter_names = ("a", "b")


def test_parametrized_ops_of_the_users():
    x = torch.randn(4, 3)
    for change in (
        lambda op: parametrize.register_parametrization(op, "a", Shift()),
        lambda op: prune.l1_unstructured(op, "a", 1),
    ):
        op = Times()
        change(op)
        with pytest.raises(NotImplementedError, match=r"Times: .*parameter_names = "):
            op(x)
        with pytest.raises(NotImplementedError, match=r"Times: .*parameter_names = "):
            ops.Sequential(op, ops.GELU())(x)
    op = NamedTimes()
    parametrize.register_parametrization(op, "a", Shift())
    op(x).sum().backward()
    torch.testing.assert_close(op.b.grad, torch.full((3,), 4.0))
    torch.testing.assert_close(op.parametrizations.a.original.grad, 2 * x.sum(0))


def test_a_parameter_that_is_gone():
    op = ops.Bias(3)
    op.bias = None
    with pytest.raises(TypeError, match="Bias: bias is a NoneType; it must be a parameter"):
        op(torch.ones(2, 3))


@pytest.mark.parametrize("bias", [True, False])
def test_names_and_state_of_a_linear(bias):
    mine, theirs = twins(bias)
    names = ["weight", "bias"] if bias else ["weight"]
    assert [n for n, _ in mine.named_parameters()] == names
    state = mine.state_dict()
    assert list(state) == names == list(theirs.state_dict())
    assert state._metadata[""] == theirs.state_dict()._metadata[""]
    assert all(torch.equal(state[n], theirs.state_dict()[n]) for n in names)
    theirs.load_state_dict(state, strict=True)
    old = {f"basic_ops.{i}.{n}": torch.randn_like(state[n]) for i, n in enumerate(names)}
    assert not any(mine.load_state_dict(old, strict=True))
    loaded = mine.state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in zip(names, old.values(), strict=True))
    mine.load_state_dict({n: t + 1 for n, t in state.items()}, assign=True)
    assert torch.equal(mine(torch.zeros(1, 6)), mine.bias[None] if bias else torch.zeros(1, 5))
    x = torch.randn(2, 6)
    assert torch.equal(mine.basic_ops[0].weight, state["weight"] + 1)
    torch.testing.assert_close(mine(x), F.linear(x, *(state[n] + 1 for n in names)))
    with pytest.raises(RuntimeError, match="Unexpected key.*other"):
        mine.load_state_dict({**state, "other": x}, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key.*basic_ops.0.weight"):
        mine.load_state_dict({**state, **old}, strict=True)
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        mine.load_state_dict({}, strict=True)
    deep = ops.Sequential(ops.Linear(6, 5, bias), ops.GELU())
    assert list(deep.state_dict()) == [f"0.{n}" for n in names]
    deep.load_state_dict({f"0.{n}": t for n, t in old.items()})


def test_the_parts_of_a_linear_read_its_parameters():
    op = ops.Linear(6, 5)
    basic, bias = op.basic_ops
    assert basic.weight is op.weight and bias.bias is op.bias
    assert [n for n, _ in basic.named_parameters()] == ["weight"]
    assert [n for n, _ in bias.named_parameters()] == ["bias"]
    basic.weight = torch.nn.Parameter(torch.ones(5, 6))
    assert basic.weight is op.weight and len(list(op.parameters())) == 2
    x = torch.randn(3, 6)
    torch.testing.assert_close(basic(x), F.linear(x, op.weight))
    op.double()
    assert basic.weight.dtype == torch.float64
    op.bfloat16()
    assert op(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("change", [None, *list(CHANGES)[:3]])
def test_copies_of_a_linear(change):
    mine, _ = twins()
    if change:
        CHANGES[change](mine)
    model = ops.Sequential(mine, ops.GELU())
    x = torch.randn(3, 6)
    y = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(x), y) and not torch.equal(twin(x), y)
    if change is None:
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(x), y)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again(x), y) and again[0].basic_ops[0].weight is again[0].weight


def test_tied_weights_and_vectors():
    mine, theirs = ops.Linear(4, 4), torch.nn.Linear(4, 4)
    second, other = ops.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight, other.weight = mine.weight, theirs.weight
    model, reference = ops.Sequential(mine, ops.GELU(), second), torch.nn.Sequential(theirs, Gelu())
    reference.append(other)
    assert len(list(model.parameters())) == 3
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.bias"]
    model.load_state_dict(reference.state_dict())
    assert second.weight is mine.weight
    vector = torch.randn(24)
    for m in (model, reference):
        torch.nn.utils.vector_to_parameters(vector, m.parameters())
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), vector)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)
    y = torch.func.functional_call(model, {"0.weight": torch.eye(4)}, (x,))
    torch.testing.assert_close(
        y, torch.func.functional_call(reference, {"0.weight": torch.eye(4)}, (x,))
    )


def test_main_grad_of_a_parametrized_weight():
    op = ops.Linear(4, 3, accumulate_into_main_grad=True)
    parametrize.register_parametrization(op, "weight", Shift())
    y = op(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="the weight has no main_grad"):
        y.sum().backward()


# Hooks.


def block():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return ops.Sequential(make, ops.Linear(6, 8), ops.GELU(), ops.Linear(8, 6), add)


def test_forward_hooks_of_inner_ops():
    model = block()
    x = torch.randn(3, 6)
    y = model(x)
    seen = []
    hook = model[2].register_forward_hook(lambda m, args, out: seen.append((m, args, out)))
    torch.testing.assert_close(model(x), y)
    ((module, args, out),) = seen
    z = F.linear(x, model[1].weight, model[1].bias)
    assert module is model[2]
    torch.testing.assert_close(args[0], z)
    torch.testing.assert_close(out, gelu(z))
    told = tt.explain(model)
    assert "called by itself: it has forward hooks" in told
    hook.remove()
    model(x)
    assert len(seen) == 1 and len(model.groups()) == 1
    assert "called by itself" not in tt.explain(model)
    # The chain continues with the result of a hook.
    model[1].register_forward_pre_hook(lambda m, args: (2 * args[0],))
    model[2].register_forward_hook(lambda m, args, out: -out)
    z = F.linear(2 * x, model[1].weight, model[1].bias)
    torch.testing.assert_close(model(x), x + F.linear(-gelu(z), model[3].weight, model[3].bias))


@pytest.mark.parametrize("at", range(5))
def test_backward_hooks_of_inner_ops(at):
    model = block()
    x = torch.randn(3, 6, requires_grad=True)
    model(x).sum().backward()
    expected = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    seen = []
    model[at].register_full_backward_pre_hook(lambda m, g: seen.append(("pre", len(g))))
    model[at].register_full_backward_hook(lambda m, i, o: seen.append(("full", len(i))))
    model(x).sum().backward()
    assert [kind for kind, _ in seen] == ["pre", "full"]
    for mine, other in zip([x, *model.parameters()], expected, strict=True):
        torch.testing.assert_close(mine.grad, other)
    # A hook may change the gradient.
    model[1].register_full_backward_pre_hook(lambda m, g: tuple(0 * t for t in g))
    model.zero_grad()
    model(x).sum().backward()
    assert not model[1].weight.grad.any() and model[3].weight.grad.any()


def test_hooks_of_the_parts_of_a_linear():
    model, seen = block(), []
    x = torch.randn(3, 6)
    y = model(x)
    part = model[1].basic_ops[0]
    part.register_forward_hook(lambda m, args, out: seen.append(out))
    torch.testing.assert_close(model(x), y)
    torch.testing.assert_close(seen[0], F.linear(x, model[1].weight))
    alone = model[1](x)
    assert len(seen) == 2
    torch.testing.assert_close(alone, F.linear(x, model[1].weight, model[1].bias))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), y)
    assert len(seen) == 3

    class Both(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            return input_, [(), ()]

    fused = Both([ops.GELU(), ops.Identity()])
    fused.basic_ops[0].register_forward_hook(lambda *a: None)
    for module in (fused, ops.Sequential(fused)):
        with pytest.raises(RuntimeError, match="Both: GELU has forward hooks.*to Both itself"):
            module(x)


def test_hooked_ops_with_extra_tensors():
    """Channels, extra inputs, extra outputs and keywords work around a hooked op."""

    class Plus(ops.BasicOperation):
        def op_forward(self, ctx, input_, *, amount=0.0):
            return input_ + amount

        def op_backward(self, ctx, grad_output):
            return grad_output

    def build():
        make, shown, add, own = (
            ops.MakeExtraOutput(), ops.MakeExtraOutput(), ops.AddExtraInput(), ops.AddExtraInput(),
        )  # fmt: skip
        scaled = ops.ScaledSReLU()
        make.set_extra_output_channel(0, "a", output_to_caller=False)
        shown.set_extra_output_channel(0, "b")
        add.set_extra_input_channel(0, "a")
        own_b = ops.AddExtraInput()
        own_b.set_extra_input_channel(0, "b")
        return ops.Sequential(make, ops.GELU(), shown, scaled, own, Plus(), add, own_b)

    x, s, r = torch.randn(3, 4), torch.rand(3), torch.randn(3, 4)
    expected = build()(x, s, r, op_kwargs={5: {"amount": 2.0}})
    for at in range(8):
        model, seen = build(), []
        model[at].register_forward_hook(lambda *a, seen=seen: seen.append(1))
        y, b = model(x, s, r, op_kwargs={5: {"amount": 2.0}})
        torch.testing.assert_close((y, b), expected)
        assert seen == [1]
        with pytest.raises(ValueError, match="1 extra inputs were given; its ops take 2"):
            model(x, s)
    model = ops.Sequential(ops.GELU(), ops.AddExtraInput())
    model[1].set_extra_input_channel(0, "nowhere")
    model[0].register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="no earlier op writes"):
        model(x)


def test_a_hooked_op_keeps_its_hidden_output_to_itself():
    make, x = ops.MakeExtraOutput(), torch.randn(3, 4)
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    make.register_forward_hook(lambda *a: None)
    assert torch.equal(ops.Sequential(make)(x), x)


def test_ops_with_a_forward_of_their_own():
    class Loud(ops.GELU):
        def forward(self, input):
            return super().forward(input) + 1

    x = torch.randn(3, 4)
    torch.testing.assert_close(ops.Sequential(ops.SiLU(), Loud())(x), gelu(F.silu(x)) + 1)
    assert "it has a forward of its own" in tt.explain(ops.Sequential(Loud()))


def _fully_shard(rank, world, port, failed):
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_default_device("cpu")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for which in ("whole", "inner", "both", "norm"):
            torch.manual_seed(0)
            model = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 16), ops.SiLU(), ops.Linear(16, 8))
            plain = copy.deepcopy(model)
            if which in ("inner", "both"):
                fully_shard(model[1], mesh=mesh)
                fully_shard(model[3], mesh=mesh)
            if which == "norm":
                fully_shard(model[0], mesh=mesh)
            if which in ("whole", "both"):
                fully_shard(model, mesh=mesh)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                results = []
                for m, optimizer in zip((model, plain), optimizers, strict=True):
                    y = m(x)
                    y.square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(y.detach())
                torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
            names = [n for n, _ in model.named_parameters()]
            assert names == [n for n, _ in plain.named_parameters()]
    except BaseException as e:
        failed.put(f"rank {rank}: {type(e).__name__}: {e}")
        raise
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_fully_sharded_ops(world):
    """FSDP2 uses hooks: on the whole chain, and on ops inside of it."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    failed = context.SimpleQueue()
    ranks = [
        context.Process(target=_fully_shard, args=(rank, world, port, failed))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert failed.empty(), failed.get()
    assert all(process.exitcode == 0 for process in ranks)
