"""Tests of tenon::chain and tenon::chain_backward: opcheck, exporters, transforms and modes."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import recipe  # noqa: E402

chain = torch.ops.tenon.chain
ROOT = Path(__file__).resolve().parents[2]


def block(width=16):
    return ops.Sequential(
        ops.RMSNorm(width),
        ops.Linear(width, 2 * width),
        ops.SwiGLU(),
        ops.Linear(width, width, bias=False),
    )


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the arguments of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tenon":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def channels():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip")
    add.set_extra_input_channel(0, "skip")
    return ops.Sequential(ops.Bias(16), make, ops.GELU(), add)


def frozen():
    made = block()
    made[1].requires_grad_(False)
    made[3].weight.requires_grad_(False)
    return made


PLANS = {
    "plain": (block, None, 0),
    "one op": (ops.GELU, None, 0),
    "channels": (channels, None, 0),
    "dropout": (lambda: ops.Sequential(ops.Bias(16), ops.Dropout(0.5)), None, 0),
    "frozen": (frozen, None, 0),
    "extra": (
        lambda: ops.Sequential(ops.MakeExtraOutput(), ops.GELU(), ops.AddExtraInput()),
        None,
        1,
    ),
    "reshape": (
        lambda: ops.Sequential(ops.Linear(16, 32), ops.Reshape(-1, 16), ops.GELU()),
        None,
        0,
    ),
    "delayed": (block, recipe.DelayedScaling(), 0),
    "current": (block, recipe.Float8CurrentScaling(), 0),
    "mxfp8": (block, recipe.MXFP8BlockScaling(), 0),
    "block": (block, recipe.Float8BlockScaling(), 0),
}


def record(name):
    make, of, count = PLANS[name]
    model = make()
    x = torch.randn(4, 16, requires_grad=True)
    extras = [torch.randn(4, 16, requires_grad=True)] * count
    if of is not None:
        tt.create_state(model, of) if of.delayed() else None
    seen = Recorder()
    with seen, tt.autocast(enabled=of is not None, recipe=of or recipe.DelayedScaling()):
        y = model(x, *extras)
        y = y if isinstance(y, tuple) else (y,)
        sum(t.square().sum() for t in y).backward()
    return seen.calls


@pytest.mark.parametrize("name", PLANS)
def test_opcheck(name):
    calls = record(name)
    assert [func for func, _ in calls] == [chain.default, torch.ops.tenon.chain_backward.default]
    for func, (tensors, text) in calls:
        own = [t.detach() for t in tensors]
        if func == chain.default:
            own = [t.requires_grad_(s.requires_grad) for s, t in zip(tensors, own, strict=True)]
        torch.library.opcheck(func, (own, text))


@pytest.mark.parametrize("name", PLANS)
def test_the_bits_of_eager_calls(name):
    """Also that an operator writes no argument."""
    make, of, count = PLANS[name]
    torch.manual_seed(0)
    model = make()
    if of is not None and of.delayed():
        tt.create_state(model, of)
    data = [torch.randn(2, 3, 16) for _ in range(1 + count)]
    found = []
    for mode in (None, Recorder()):
        torch.manual_seed(1)
        given = [t.clone().requires_grad_() for t in data]
        with tt.autocast(
            enabled=of is not None, recipe=of or recipe.DelayedScaling(), update="manual"
        ):
            if mode is None:
                y = model(*given)
            else:
                with mode:
                    y = model(*given)
        y = y if isinstance(y, tuple) else (y,)
        wanted = [p for p in (*given, *model.parameters()) if p.requires_grad]
        found.append([*y, *torch.autograd.grad(sum(t.square().sum() for t in y), wanted)])
        assert all(torch.equal(a, b) for a, b in zip(given, data, strict=True))
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def test_the_plan_says_what_differs():
    _, (tensors, text) = record("plain")[0]
    given = json.loads(text)
    assert given["tenon"] and given["fingerprint"] and given["chain"].startswith("rmsnorm")
    with pytest.raises(RuntimeError, match=r"by Tenon 0\.0\.9/1, but this is Tenon"):
        chain(tensors, json.dumps({**given, "tenon": "0.0.9/1"}))
    with pytest.raises(RuntimeError, match="with the fingerprint 00, but here it has .*again"):
        chain(tensors, json.dumps({**given, "fingerprint": "00"}))


def test_wrong_tensors_are_errors():
    _, (tensors, text) = record("plain")[0]
    with pytest.raises(ValueError, match="4 tensors; this plan takes 5"):
        chain(tensors[:-1], text)
    with pytest.raises(ValueError, match=r"tensor 2, linear1.weight, is torch.float64 \(32, 16\)"):
        chain([*tensors[:2], tensors[2].double(), *tensors[3:]], text)
    with pytest.raises(ValueError, match="tensor 4"):
        chain([*tensors[:4], torch.ones(3, 16)], text)
    with pytest.raises(ValueError, match="must be a matrix"):
        chain([torch.ones(16), *tensors[1:]], text)
    with pytest.raises(ValueError, match="no tensors"):
        chain([], text)


def test_strided_and_empty_tensors():
    _, (tensors, text) = record("plain")[0]
    wide = torch.randn(8, 32)
    x = wide[::2, ::2]
    given = [t.detach() for t in tensors[1:]]
    a, b = chain([x, *given], text), chain([x.contiguous(), *given], text)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert chain([x[:0], *given], text)[0].shape == (0, 16)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model, x = block(), torch.randn(2, 3, 16)
    batch = torch.export.Dim("batch")
    made = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    assert [n.target for n in made.graph.nodes].count(chain.default) == 1
    for rows in (2, 5, 32):
        x = torch.randn(rows, 3, 16)
        assert torch.equal(made.module()(x), model(x))


PROGRAM = """
import sys, torch, tenon.torch, tenon.torch.ops as ops
from torch._dynamo.utils import counters

def make(alpha):
    torch.manual_seed(0)
    act = ops.ClampedSwiGLU(alpha=alpha)
    return ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 32), act, ops.Linear(16, 16))

def train(alpha):
    torch._dynamo.reset()
    counters.clear()
    torch.compile(make(alpha), fullgraph=True)(torch.ones(4, 16)).sum().backward()
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"], found["autograd_cache_bypass"]
"""
WRITE = """
found = train(1.7)
assert found == (0, 1, 0), found
model, batch = make(1.7), torch.export.Dim("batch", min=2, max=1024)
with torch.no_grad():
    made = torch.export.export(model, (torch.ones(4, 16),), dynamic_shapes=({0: batch},))
    torch.export.save(made, sys.argv[1] + "/exported.pt2")
    torch._inductor.aoti_compile_and_package(made, package_path=sys.argv[1] + "/package.pt2")
"""
READ = """
found = train(1.7), train(0.5)  # the other one is another plan
assert found == ((1, 0, 0), (0, 1, 0)), found
exported = torch.export.load(sys.argv[1] + "/exported.pt2").module()
package = torch._inductor.aoti_load_package(sys.argv[1] + "/package.pt2")
model = make(1.7)
with torch.no_grad():
    for rows in (2, 7, 64):
        x = torch.randn(rows, 16)
        assert torch.equal(exported(x), model(x)) and torch.equal(package(x), model(x))
"""


def test_a_second_process(tmp_path):
    """Exported programs, packages of AOTInductor and caches of compiled graphs."""
    for text in (WRITE, READ):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        subprocess.run(
            [sys.executable, "-c", PROGRAM + text, str(tmp_path)], check=True, env=environment
        )


def loss(model, parameters, x):
    return torch.func.functional_call(model, parameters, (x,)).square().sum()


def test_func_grad():
    model, x = block(), torch.randn(4, 16)
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(model(x).square().sum(), list(parameters.values()))
    found = torch.func.grad(functools.partial(loss, model))(parameters, x)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected, strict=True))
    x = x[:1]
    rows = [torch.autograd.grad(model(x.requires_grad_())[0, i], x)[0][0] for i in range(16)]
    assert torch.equal(torch.func.jacrev(model)(x.detach())[0, :, 0], torch.stack(rows))


def test_vmap():
    model, x = block(), torch.randn(5, 3, 16)
    assert torch.equal(torch.func.vmap(model)(x), model(x))
    with torch.no_grad():
        seen = Recorder()
        with seen:
            y = torch.func.vmap(model, in_dims=1, out_dims=1)(x)
        assert torch.equal(y, model(x)) and len(seen.calls) == 1
        scale = torch.rand(5, 3)
        scaled = ops.ScaledActivation("gelu")
        assert torch.equal(torch.func.vmap(scaled)(x, scale), scaled(x, scale))
        assert torch.equal(
            torch.func.vmap(scaled, in_dims=(0, None))(x, scale[0]),
            scaled(x, scale[:1].expand(5, 3)),
        )
    parameters = dict(model.named_parameters())
    each = torch.func.grad(functools.partial(loss, model))
    found = torch.func.vmap(each, in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        for name, g in each(parameters, x[i]).items():
            assert torch.equal(found[name][i], g)


def test_vmap_of_dropout():
    model, x = ops.Dropout(0.5), torch.ones(4, 64)
    different = torch.func.vmap(model, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    same = torch.func.vmap(model, randomness="same")(x)
    assert torch.equal(same[0], same[1])


def test_refused():
    model, x = block(), torch.randn(4, 16)
    parameters = dict(model.named_parameters())
    several = {name: p.expand(3, *p.shape) for name, p in parameters.items()}
    with pytest.raises(NotImplementedError, match="vmap over parameters.*call the module once"):
        torch.func.vmap(functools.partial(loss, model), in_dims=(0, None))(several, x)
    for call in (
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacfwd(model)(x),
        lambda: torch.func.hessian(lambda x: model(x).sum())(x),
    ):
        with pytest.raises(NotImplementedError, match=r"forward-mode.*use backward\(\)"):
            call()
    twice = torch.func.jacrev(torch.func.jacrev(lambda x: model(x).sum()))
    with pytest.raises(NotImplementedError, match="a second derivative was asked for"):
        twice(x)
    for of in (model, ops.Sequential(ops.Bias(16), ops.GELU()), ops.GELU()):
        given = x.clone().requires_grad_()
        with Recorder():
            y = of(given)
        (dx,) = torch.autograd.grad(y.sum(), given, create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative was asked for"):
            dx.sum().backward()


def test_fake_and_make_fx():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = block(), torch.randn(4, 16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for y in (model(mode.from_tensor(x)), mode.__enter__() and model(torch.ones(4, 16))):
        assert type(y).__name__ == "FakeTensor" and y.shape == (4, 16)
    mode.__exit__(None, None, None)
    graph = make_fx(model)(x)
    assert torch.equal(graph(x), model(x))
    assert chain.default in [n.target for n in graph.graph.nodes]


def test_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    model, x = block(), torch.randn(3, 4, 16)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 12 * (16 * 32 + 16 * 16)


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint(saved):
    from torch.utils import checkpoint as c

    model, x = block(), torch.randn(4, 16, requires_grad=True)
    asked = []

    def policy(context, op, *args, **kwargs):
        asked.append(op)
        keep = saved and op == chain.default
        return c.CheckpointPolicy.MUST_SAVE if keep else c.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(c.create_selective_checkpoint_contexts, policy)
    call = c.checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(call.square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert chain.default in asked


@pytest.mark.parametrize("make", [block, ops.GELU, lambda: ops.Dropout(0.5)])
@pytest.mark.filterwarnings("ignore")
def test_scripts_are_refused(make):
    model, x = make(), torch.ones(4, 16)
    for scripted in (model, torch.nn.Sequential(torch.nn.ReLU(), model)):
        with pytest.raises(NotImplementedError, match=r": torch.jit.script cannot compile"):
            torch.jit.script(scripted)
    with pytest.raises(NotImplementedError, match="torch.jit.trace"):
        torch.jit.trace(model, x)


def test_the_page_of_compatibility():
    """Every row names a test that exists."""
    rows = [
        line
        for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| what ")
    ]
    assert len(rows) > 15
    for row in rows:
        found = re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row)
        assert found, row
        text = (ROOT / "python" / "tests" / found[1]).read_text()
        assert f"def {found[2]}(" in text, row
