"""Tests of torch.compile: one graph, the bits of eager calls, and never a stale graph."""

import copy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.functional as tf  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import jit, recipe  # noqa: E402


class Counter:
    """The backend aot_eager, which counts graphs and keeps their operators."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append([n.target for n in module.graph.nodes if n.op == "call_function"])
        return aot_eager(module, inputs)

    def chains(self):
        return sum(target is torch.ops.tenon.chain for graph in self.graphs for target in graph)


@pytest.fixture
def count():
    torch._dynamo.reset()
    yield Counter()
    torch._dynamo.reset()


def block(width=16, dtype=None):
    return ops.Sequential(
        ops.RMSNorm(width, dtype=dtype),
        ops.Linear(width, 2 * width, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(width, width, dtype=dtype),
    )


class TwoBlocks(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = block(width), block(width)
        self.head = torch.nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x * 2) + x
        return self.head(self.second(x) + x)


def residual():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return ops.Sequential(make, ops.Linear(16, 16), ops.GELU(), add)


def across_a_hook():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return hooked(ops.Sequential(make, ops.GELU(), ops.Linear(16, 16), add))


def parametrized():
    made = ops.Sequential(ops.Linear(16, 16), ops.GELU())
    torch.nn.utils.parametrizations.weight_norm(made[0], "weight")
    return made


def frozen():
    made = block()
    made[1].requires_grad_(False)
    return made


# Module, number of chains in its graph, extra inputs.
CASES = {
    "two blocks": (lambda: TwoBlocks(), 2, 0),
    "one block": (block, 1, 0),
    "bf16": (lambda: block(dtype=torch.bfloat16), 1, 0),
    "residual": (residual, 1, 0),
    "channel across a hook": (across_a_hook, 2, 0),
    "extra tensors": (
        lambda: ops.Sequential(
            ops.MakeExtraOutput(), ops.Linear(16, 16), ops.MakeExtraOutput(), ops.AddExtraInput()
        ),
        1,
        1,
    ),
    "scaled": (lambda: ops.Sequential(ops.Linear(16, 32), ops.ScaledSwiGLU()), 1, "scales"),
    "dropout": (lambda: ops.Sequential(ops.Linear(16, 16), ops.Dropout(0.5), ops.GELU()), 1, 0),
    "reshape": (lambda: ops.Sequential(ops.Linear(16, 32), ops.Reshape(-1, 2, 16)), 1, 0),
    "two dtypes": (
        lambda: ops.Sequential(ops.Linear(16, 16, dtype=torch.bfloat16), ops.Linear(16, 16)),
        2,
        0,
    ),
    "modules between": (
        lambda: ops.Sequential(ops.Linear(16, 16), torch.nn.Tanh(), ops.LayerNorm(16)),
        2,
        0,
    ),
    "hooked": (
        lambda: hooked(ops.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16))),
        3,
        0,
    ),
    "frozen": (frozen, 1, 0),
    "parametrized": (parametrized, 1, 0),
    "op": (ops.GELU, 1, 0),
    "norm": (lambda: ops.RMSNorm(16), 1, 0),
    "dropout alone": (lambda: ops.Dropout(0.25), 1, 0),
    "linear": (lambda: ops.Linear(16, 16), 1, 0),
    "reshape alone": (lambda: ops.Reshape(-1, 4), 0, 0),
    "te linear": (lambda: tt.Linear(16, 16, return_bias=True), 1, 0),
    "te split": (lambda: tt.Linear(16, 16, parameters_split=("a", "b")), 1, 0),
    "te norm linear": (
        lambda: tt.LayerNormLinear(16, 16, return_layernorm_output=True),
        1,
        0,
    ),
    "te mlp": (lambda: tt.LayerNormMLP(16, 32, activation="swiglu"), 1, 0),
}


def hooked(model):
    model[1].register_forward_hook(lambda module, args, y: y * 2)
    return model


def results(call, model, data, extras=(), seed=3):
    torch.manual_seed(seed)
    x = data.clone().requires_grad_()
    extras = [t.clone().requires_grad_() for t in extras]
    y = call(x, *extras)
    y = y if isinstance(y, tuple) else (y,)
    wanted = [x, *extras, *[p for p in model.parameters() if p.requires_grad]]
    total = sum((i + 1) * t.float().square().sum() for i, t in enumerate(y))
    return [*y, *torch.autograd.grad(total, wanted)]


def drawn(seed, *shape):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def data_for(name):
    data = drawn(1, 3, 4, 16)
    extras = CASES[name][2]
    made = [torch.rand(3, 4, 1)] if extras == "scales" else [data.flip(0)] * extras
    return data.to(torch.bfloat16) if name == "bf16" else data, made


def same(a, b):
    assert len(a) == len(b)
    for s, t in zip(a, b, strict=True):
        assert s.shape == t.shape and s.dtype == t.dtype
        assert torch.equal(s, t), (s - t).abs().max()


@pytest.mark.parametrize("name", CASES)
def test_one_graph_with_the_bits_of_eager_calls(name, count):
    made, chains, _ = CASES[name]
    torch.manual_seed(0)
    model = made()
    data, extras = data_for(name)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    same(results(model, model, data, extras), results(compiled, model, data, extras))
    assert len(count.graphs) == 1 and count.chains() == chains
    with torch.no_grad():
        torch.manual_seed(5)
        a = model(data, *extras)
        torch.manual_seed(5)
        b = compiled(data, *extras)
    same([*a] if isinstance(a, tuple) else [a], [*b] if isinstance(b, tuple) else [b])


def test_inductor_gives_the_bits_of_eager_calls():
    torch._dynamo.reset()
    model = residual()
    data = torch.randn(6, 16)
    compiled = torch.compile(model, fullgraph=True)
    same(results(model, model, data), results(compiled, model, data))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(mode):
    torch._dynamo.reset()
    model, data = block(), torch.randn(6, 16)
    same([model(data)], [torch.compile(model, fullgraph=True, mode=mode)(data)])


def test_no_recompilation_for_batch_sizes(count):
    model = TwoBlocks()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
    for batch in (2, 3, 8, 17, 64):
        data = torch.randn(batch, 5, 16)
        same(results(model, model, data), results(compiled, model, data))
    assert len(count.graphs) == 1


def test_one_graph_serves_equal_layers(count):
    """Compiled one by one, as is usual for long models."""
    layers = [TwoBlocks() for _ in range(10)]
    for layer in layers:
        layer.compile(backend=count, fullgraph=True)
    x = torch.randn(4, 16, requires_grad=True)
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    assert len(count.graphs) == 1


RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "most recent": recipe.DelayedScaling(amax_compute_algo="most_recent", margin=1),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "block": recipe.Float8BlockScaling(),
}


def train(model, call, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for i in range(steps):
        data = drawn(i, 8, 64) * (i + 1)
        loss = call(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tt.update_scales()
    return losses, model.state_dict()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_training_under_a_recipe(name, inside, count):
    """The autocast is around the compiled model, or in the graph, which then updates scales."""

    def under(call):
        def run(x):
            with tt.autocast(recipe=RECIPES[name]):
                return call(x)

        return run

    torch.manual_seed(0)
    model = TwoBlocks(64)
    twin = copy.deepcopy(model)
    losses, state = train(model, under(model))
    compile = dict(backend=count, fullgraph=True)  # noqa: C408
    call = (
        torch.compile(under(twin), **compile) if inside else under(torch.compile(twin, **compile))
    )
    compiled_losses, compiled_state = train(twin, call)
    same(losses, compiled_losses)
    assert state.keys() == compiled_state.keys()
    same(list(state.values()), list(compiled_state.values()))
    # A graph that updates scales is made again once the states exist.
    assert len(count.graphs) <= (2 if inside and name in ("delayed", "most recent") else 1)


def test_delayed_layers_share_a_graph(count):
    layers = torch.nn.ModuleList(block(32) for _ in range(10))
    of = RECIPES["delayed"]
    tt.create_state(layers, of)
    for layer in layers:
        layer.compile(backend=count, fullgraph=True)
    for _ in range(2):
        x = torch.randn(4, 32, requires_grad=True)
        with tt.autocast(recipe=of):
            for layer in layers:
                x = layer(x)
        x.sum().backward()
    tt.update_scales()
    assert len(count.graphs) == 1
    assert all((layer[1].basic_ops[0].forward_scale != 1).all() for layer in layers)
    assert all((layer[1].basic_ops[0].backward_scale != 1).all() for layer in layers)


def test_nan_stays_the_largest_amax(count):
    model = ops.Linear(16, 16)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for value in (float("nan"), 1.0):
        with tt.autocast(recipe=RECIPES["delayed"], update="manual"):
            y = compiled(torch.full((2, 16), value))
        y.backward(torch.full_like(y, value))
    linear = model.basic_ops[0]
    assert linear.forward_amax_history[0, 0].isnan()
    assert linear.backward_amax_history[0, 0].isnan()


def test_a_loaded_state_is_updated_by_its_first_call(count):
    of = RECIPES["delayed"]
    model = ops.Linear(16, 16)
    compiled = torch.compile(model, backend=count, fullgraph=True)

    def step(call):
        with tt.autocast(recipe=of):
            return call(torch.ones(2, 16))

    step(compiled).sum().backward()
    saved = copy.deepcopy(model.state_dict())
    other = ops.Linear(16, 16)
    other.load_state_dict(saved)
    model.load_state_dict(saved)
    found = []
    for call, of_call in ((other, other), (compiled, model)):
        found.append([step(call), *[t.clone() for t in of_call.state_dict().values()]])
    same(*found)
    assert (other.basic_ops[0].backward_scale != 1).all()


# A graph must not be used after a change of what it was made for.


def changed(model, change, back, data=None):
    torch._dynamo.reset()
    counter = Counter()
    data = torch.randn(4, 16) if data is None else data
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    same(results(model, model, data), results(compiled, model, data))
    before = results(model, model, data)
    change()
    after = results(compiled, model, data)
    same(results(model, model, data), after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=False))
    graphs = len(counter.graphs)
    assert graphs == 2
    back()
    same(before, results(compiled, model, data))
    return graphs, len(counter.graphs)


def test_a_changed_alpha():
    model = ops.Sequential(ops.Linear(16, 32), ops.ClampedSwiGLU())
    was = model[1].alpha
    found = changed(
        model, lambda: setattr(model[1], "alpha", 0.5), lambda: setattr(model[1], "alpha", was)
    )
    assert found == (2, 2)  # the first graph is used again


def test_train_and_eval():
    model = ops.Sequential(ops.Linear(16, 16), ops.Dropout(0.5))
    assert changed(model, model.eval, model.train) == (2, 2)


def test_a_changed_epsilon():
    model = ops.Sequential(ops.RMSNorm(16, eps=0.1), ops.GELU())
    assert changed(
        model, lambda: setattr(model[0], "eps", 3.0), lambda: setattr(model[0], "eps", 0.1)
    ) == (2, 2)


def test_a_set_quantizer():
    model = ops.Sequential(ops.Linear(16, 16), ops.GELU())
    linear = model[0].basic_ops[0]
    quantizer = tt.MXFP8Quantizer("e4m3")
    changed(
        model,
        lambda: linear.set_quantizer("forward", 0, quantizer),
        lambda: linear.set_quantizer("forward", 0, None),
    )


def test_a_changed_quantizer():
    model = ops.Sequential(ops.Linear(16, 16), ops.GELU())
    quantizer = tt.Float8CurrentScalingQuantizer("e4m3")
    model[0].basic_ops[0].set_quantizer("forward", 0, quantizer)
    changed(
        model,
        lambda: setattr(quantizer, "amax_epsilon", 100.0),
        lambda: setattr(quantizer, "amax_epsilon", 0.0),
    )


def test_an_own_recipe():
    model = ops.Sequential(ops.BasicLinear(16, 16), ops.GELU())
    changed(
        model,
        lambda: setattr(model[0], "recipe", recipe.MXFP8BlockScaling()),
        lambda: setattr(model[0], "recipe", None),
    )


def test_a_changed_formula():
    model = ops.Sequential(ops.Linear(16, 16), ops.Activation("x*sigmoid(x)"))
    first, second = model[1], ops.Activation("x*tanh(x)")

    def put(op):
        model[1] = op

    assert changed(model, lambda: put(second), lambda: put(first)) == (2, 2)


def test_a_changed_context(count):
    model, data = ops.Linear(64, 64), torch.randn(8, 64)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    seen = []
    for of in (None, recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling(), None):
        with tt.autocast(enabled=of is not None, recipe=of):
            same(results(model, model, data), results(compiled, model, data))
            seen.append(model(data))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert len(count.graphs) == 3  # the first one is used again
    with tt.autocast(recipe=recipe.MXFP8BlockScaling()):  # an equal recipe
        compiled(data.requires_grad_())
    assert len(count.graphs) == 3


def test_an_equal_recipe_in_each_step(count):
    compiled = torch.compile(ops.Linear(16, 16), backend=count, fullgraph=True)
    for _ in range(4):
        with tt.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
            compiled(torch.ones(2, 16)).sum().backward()
    assert len(count.graphs) == 1


def test_torch_autocast(count):
    model, data = block(), torch.randn(4, 16)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            same([model(data)], [compiled(data)])
    assert len(count.graphs) == 2


def test_a_fusion_that_is_registered_later(count):
    class Twice(ops.FusedOperation):
        def fuser_forward(self, ctxs, x, **keywords):
            return x * 2, [()]

    def fuse(found, *, recipe=None):
        return [Twice([op]) if isinstance(op, ops.GELU) else op for op in found]

    model, data = ops.Sequential(ops.GELU()), torch.randn(2, 16)
    compiled = torch.compile(model, backend=count)
    with torch.no_grad():
        compiled(data)
        ops.register_forward_fusion(fuse)
        try:
            assert torch.equal(compiled(data), data * 2)
        finally:
            ops.unregister_forward_fusion(fuse)
        same([model(data)], [compiled(data)])


# What is not compiled is one graph break, and fullgraph=True gives the reason.

BROKEN = {
    "Python": (lambda: ops.Sequential(ops.Linear(16, 16), Doubled()), "Doubled computes in Python"),
    "in place": (
        lambda: ops.Sequential(ops.Linear(16, 16), ops.AddExtraInput(in_place=True)),
        "writes over its extra input",
    ),
    "main_grad": (
        lambda: ops.BasicLinear(16, 16, accumulate_into_main_grad=True),
        "added to main_grad",
    ),
    "quantised output": (
        lambda: ops.Sequential(
            ops.Linear(16, 16), ops.Quantize(quantizer=tt.MXFP8Quantizer("e4m3"))
        ),
        "QuantizedTensor",
    ),
}


class Doubled(ops.BasicOperation):
    def op_forward(self, ctx, x, **_):
        return x * 2

    def op_backward(self, ctx, dy):
        return dy * 2, ()


def plain(t):
    return t.dequantize() if isinstance(t, tt.QuantizedTensor) else t


@pytest.mark.parametrize("name", BROKEN)
def test_one_break_with_a_reason(name, count):
    make, reason = BROKEN[name]
    model = make()
    extras = [torch.randn(4, 16)] if name == "in place" else []
    if name == "main_grad":
        model.weight.main_grad = torch.zeros(16, 16)
    data = torch.randn(4, 16)

    def call(x):
        return model(x + 1, *[t.clone() for t in extras])

    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(call, backend=count, fullgraph=True)(data)
    torch._dynamo.reset()
    count.graphs.clear()
    compiled = torch.compile(call, backend=count)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(plain(compiled(data)), plain(call(data)))
    assert len(count.graphs) == 1, count.graphs  # x + 1


def test_transforms_in_a_graph(count):
    model, data = block(), torch.randn(3, 4, 16)
    transformed = torch.func.vmap(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.func transforms it"):
        torch.compile(transformed, backend=count, fullgraph=True)(data)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(transformed, backend=count)(data), model(data))


# Functions: one graph break for each call.

bias = torch.linspace(-1, 1, 16)
fused = jit.lazy_compile(lambda x: torch.tanh(x) * x)
mxfp8 = tt.MXFP8Quantizer("e4m3")
current = tt.Float8CurrentScalingQuantizer("e4m3")

FUNCTIONS = {
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, count):
    function, graphs = FUNCTIONS[name]
    data = torch.randn(8, 16)
    found = []
    compiled = torch.compile(function, backend=count)
    for f in (function, compiled, compiled):
        x = data.clone().requires_grad_()
        y = f(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x])])
    assert len(count.graphs) == graphs, count.graphs
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_eager_calls_do_not_load_the_compiler():
    code = (
        "import sys, torch, tenon.torch.ops as ops, tenon.torch.functional as tf\n"
        "x = torch.ones(2, 4, requires_grad=True)\n"
        "(ops.Sequential(ops.Linear(4, 4), ops.GELU())(x) + tf.gelu(x)).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
