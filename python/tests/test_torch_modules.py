"""The modules with Transformer Engine's arguments, and `convert`."""

import copy
import inspect
import io
import re

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402

F = torch.nn.functional
nn = torch.nn
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}

ACTIVATIONS = {
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "qgelu": lambda z: z * torch.sigmoid(1.702 * z),
    "srelu": lambda z: F.relu(z).square(),
}
GATES = {
    "geglu": ACTIVATIONS["gelu"],
    "qgeglu": ACTIVATIONS["qgelu"],
    "reglu": F.relu,
    "sreglu": ACTIVATIONS["srelu"],
    "swiglu": F.silu,
    "glu": torch.sigmoid,
}


def gated(f):
    return lambda z: f(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]


def clamped(z):
    a, b = z.chunk(2, -1)
    a = a.clamp(max=7.0)
    return a * torch.sigmoid(1.702 * a) * (b.clamp(-7.0, 7.0) + 1)


FUNCTIONS = {**ACTIVATIONS, **{n: gated(f) for n, f in GATES.items()}, "clamped_swiglu": clamped}


def normed(kind, x, p, eps, zero_centered):
    gamma = p["layer_norm_weight"] + zero_centered
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], gamma, eps)
    return F.layer_norm(x, x.shape[-1:], gamma, p["layer_norm_bias"], eps)


def check(module, reference, x, dtype):
    """Compares outputs and gradients with a float64 function of (x, parameters by name)."""
    mine = x.detach().clone().requires_grad_()
    theirs = x.detach().double().requires_grad_()
    parameters = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    got, wanted = module(mine), reference(theirs, parameters)
    got = got if isinstance(got, tuple) else (got,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(got) == len(wanted)
    grads = [torch.randn_like(y) for y in got]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(wanted, [g.double() for g in grads])
    pairs = [*zip(got, wanted, strict=True), (mine.grad, theirs.grad)]
    pairs += [(p.grad, parameters[n].grad) for n, p in module.named_parameters()]
    for a, b in pairs:
        assert a.dtype == dtype and a.shape == b.shape
        bound = TOLERANCE[dtype] * max(1.0, b.abs().max().item())
        assert (a.double() - b).abs().max().item() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias, return_bias", [(True, False), (False, False), (True, True)])
def test_linear(bias, return_bias, dtype):
    module = tt.Linear(12, 20, bias=bias, return_bias=return_bias, params_dtype=dtype)
    assert list(module.state_dict()) == ["weight"] + ["bias"] * bias
    if bias:
        assert not module.bias.any()
        nn.init.normal_(module.bias)

    def reference(x, p):
        y = F.linear(x, p["weight"], None if return_bias else p.get("bias"))
        return (y, p["bias"]) if return_bias else y

    for lead in [(7,), (2, 3), ()]:
        module.zero_grad()
        check(module, reference, torch.randn(*lead, 12).to(dtype), dtype)


def test_empty_bias_is_returned_as_in_te():
    y, bias = tt.Linear(4, 4, bias=False, return_bias=True)(torch.randn(2, 4))
    assert bias.numel() == 0 and bias.dtype == y.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_layernorm_linear(kind, centered, dtype):
    both = {"return_bias": True, "return_layernorm_output": True}
    for options in ({}, dict(list(both.items())[1:]), {"return_bias": True}, both, {"bias": False}):
        module = tt.LayerNormLinear(
            12, 20, eps=1e-3, normalization=kind, zero_centered_gamma=centered, params_dtype=dtype,
            **options,
        )  # fmt: skip
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)

        def reference(x, p, options=options):
            n = normed(kind, x, p, 1e-3, centered)
            y = F.linear(n, p["weight"], None if options.get("return_bias") else p.get("bias"))
            found = [y] + [p.get("bias")] * options.get("return_bias", False)
            return tuple(found + [n] * options.get("return_layernorm_output", False))

        check(module, reference, torch.randn(5, 12).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_layernorm_mlp(activation, dtype):
    for kind, bias in (("LayerNorm", True), ("RMSNorm", False)):
        module = tt.LayerNormMLP(
            8, 24, activation=activation, normalization=kind, bias=bias, params_dtype=dtype
        )
        wide = 24 if activation in ACTIVATIONS else 48
        assert module.fc1_weight.shape == (wide, 8) and module.fc2_weight.shape == (8, 24)
        for p in module.parameters():
            nn.init.normal_(p, std=0.4)

        def reference(x, p, kind=kind):
            h = F.linear(normed(kind, x, p, 1e-5, 0), p["fc1_weight"], p.get("fc1_bias"))
            return F.linear(FUNCTIONS[activation](h), p["fc2_weight"], p.get("fc2_bias"))

        check(module, reference, torch.randn(2, 3, 8).to(dtype), dtype)


def test_mlp_options():
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    plain = tt.LayerNormMLP(8, 16, activation="swiglu")
    same = tt.LayerNormMLP(8, 16, activation=ops.SwiGLU(), checkpoint=True,
                           return_layernorm_output=True, return_bias=True)  # fmt: skip
    same.load_state_dict(plain.state_dict())
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, (z, bias, n) = plain(a), same(b)
    assert torch.equal(y, z + bias)
    torch.testing.assert_close(n, F.layer_norm(x, (8,)))
    y.sum().backward(), z.sum().backward()
    assert torch.equal(a.grad, b.grad)
    # A formula, and parameters of an activation.
    formula = tt.LayerNormMLP(8, 16, activation="x*sigmoid(beta*x); beta = 1.702")
    named = tt.LayerNormMLP(8, 16, activation="qgelu")
    named.load_state_dict(formula.state_dict())
    torch.testing.assert_close(formula(x), named(x), rtol=1e-5, atol=1e-6)
    options = {"limit": 1.0, "alpha": 1.0, "glu_linear_offset": 0.0}
    mlp = tt.LayerNormMLP(8, 16, activation="clamped_swiglu", activation_params=options)
    assert mlp.chain[4 - 1].limit == 1.0 and mlp.chain[3].offset == 0.0
    with pytest.raises(TypeError, match="activation is a GELU; it must be a name"):
        tt.LayerNormMLP(8, 16, activation=nn.GELU())
    with pytest.raises(ValueError, match="activation_params belong"):
        tt.LayerNormMLP(8, 16, activation=ops.GELU(), activation_params={"alpha": 1})
    with pytest.raises(ValueError, match="normalization='Batch'"):
        tt.LayerNormMLP(8, 16, normalization="Batch")
    with pytest.raises(ValueError, match="at least 1"):
        tt.LayerNormMLP(8, 0)


def test_a_module_is_one_plan():
    for module in (tt.Linear(8, 8), tt.LayerNormLinear(8, 8), tt.LayerNormMLP(8, 8)):
        text = tt.explain(module.chain, torch.randn(4, 8, requires_grad=True))
        assert text.count(
            "one call forward, one backward"
        ) == 1 and "  forward" not in text.replace("    forward:", "")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_modules(kind):
    made = getattr(tt, kind)
    base = getattr(ops, kind)
    assert issubclass(made, base)
    for module in (made(8, 1e-3), made(hidden_size=8, eps=1e-3), made((8,), eps=1e-3, sm_margin=2)):
        x = torch.randn(3, 8)
        reference = base(8, eps=1e-3)
        assert torch.equal(module(x), reference(x))
        assert list(module.state_dict()) == list(reference.state_dict())
    assert made(8, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert not made(8, 1e-5, None, None, True).weight.any()
    text = tt.explain(ops.Sequential(made(8), ops.Linear(8, 8)))
    assert "one call forward" in text
    with pytest.raises(TypeError, match="either normalized_shape or hidden_size"):
        made()
    with pytest.raises(NotImplementedError, match="sequence_parallel=True"):
        made(8, sequence_parallel=True)
    with pytest.raises(ValueError, match="give one"):
        made(8, params_dtype=torch.float16, dtype=torch.float32)


# Transformer Engine's arguments in its order.
_UB = "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name"
ARGUMENTS = {
    "Linear": "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
    f"parallel_mode parameters_split device {_UB} delay_wgrad_compute symmetric_ar_type "
    "save_original_input name",
    "LayerNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma "
    "hidden_size",
    "RMSNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma "
    "hidden_size",
    "LayerNormLinear": "in_features out_features eps sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker init_method bias normalization return_bias "
    "params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered "
    "parameters_split zero_centered_gamma device",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps sequence_parallel return_bias "
    "get_rng_state_tracker tp_group tp_size init_method bias normalization activation "
    "activation_params output_layer_init_method fuse_wgrad_accumulation params_dtype "
    "return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size "
    "set_parallel_mode zero_centered_gamma device",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_in_the_order_of_te(name):
    ours = [
        n
        for n, p in inspect.signature(getattr(tt, name)).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    wanted = ARGUMENTS[name].split()
    assert ours[: len(wanted)] == wanted


@pytest.mark.parametrize(
    "given",
    [{"tp_size": 2}, {"tp_group": object()}, {"sequence_parallel": True}, {"parallel_mode": "row"},
     {"ub_overlap_ag": True}, {"ub_name": "qkv"}, {"delay_wgrad_compute": True},
     {"symmetric_ar_type": "two_shot"}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_parallel_arguments_are_refused(given):
    ((name, _),) = given.items()
    for make in (tt.Linear, tt.LayerNormLinear, tt.LayerNormMLP):
        if name not in inspect.signature(make).parameters:
            continue
        with pytest.raises(NotImplementedError, match=f"{make.__name__}: {name}="):
            make(8, 8, **given)
    module = tt.LayerNormMLP(8, 8)
    module.set_tensor_parallel_group(None)
    with pytest.raises(NotImplementedError, match="tp_group"):
        module.set_tensor_parallel_group(object())
    with pytest.raises(NotImplementedError, match="ops.Quantize"):
        tt.Linear(8, 8)(torch.randn(2, 8), fp8_output=True)


def test_initial_values():
    torch.manual_seed(0)
    mlp = tt.LayerNormMLP(64, 256)
    for weight in (mlp.fc1_weight, mlp.fc2_weight):
        assert 0.022 < weight.std().item() < 0.024
    assert not mlp.fc1_bias.any() and not mlp.fc2_bias.any()
    assert mlp.layer_norm_weight.eq(1).all() and not mlp.layer_norm_bias.any()
    mlp = tt.LayerNormMLP(
        4, 4, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_,
        zero_centered_gamma=True,
    )  # fmt: skip
    assert mlp.fc1_weight.eq(1).all() and not mlp.fc2_weight.any()
    assert not mlp.layer_norm_weight.any()
    nn.init.normal_(mlp.fc1_weight), nn.init.normal_(mlp.layer_norm_weight)
    mlp.reset_parameters()
    assert mlp.fc1_weight.eq(1).all() and not mlp.layer_norm_weight.any()

    forked = []

    class Tracker:
        def fork(self, name="default"):
            forked.append(name)
            return torch.random.fork_rng(devices=[])

    tt.Linear(4, 4, get_rng_state_tracker=Tracker, rng_tracker_name="model")
    assert set(forked) == {"model"}


def test_meta_device():
    mlp = tt.LayerNormMLP(8, 16, device="meta")
    assert all(p.is_meta for p in mlp.parameters())
    with pytest.raises(RuntimeError, match="meta device"):
        mlp(torch.randn(2, 8))
    mlp = mlp.to_empty(device=torch.get_default_device())
    mlp.reset_parameters()
    assert mlp(torch.randn(2, 8)).isfinite().all()


@pytest.mark.parametrize("parts", [("query", "key_", "value"), {"q": 8, "k_": 2, "v": 2}])
def test_parameters_split(parts):
    module = tt.LayerNormLinear(6, 12, parameters_split=parts)
    names = [n.rstrip("_") for n in parts]
    assert [n for n, _ in module.named_parameters()][2:] == [
        f"{n}_{p}" for p in ("weight", "bias") for n in names
    ]
    for p in module.parameters():
        nn.init.normal_(p)

    def reference(x, p):
        w = torch.cat([p[f"{n}_weight"] for n in names])
        b = torch.cat([p[f"{n}_bias"] for n in names])
        return F.linear(normed("LayerNorm", x, p, 1e-5, 0), w, b)

    check(module, reference, torch.randn(3, 6), torch.float32)
    module.reset_parameters()
    assert not getattr(module, f"{names[0]}_bias").any()
    with pytest.raises(ValueError, match="does not divide 12 rows"):
        tt.Linear(6, 12, parameters_split=("a", "b", "c", "d", "e"))
    with pytest.raises(NotImplementedError, match="exclude each other"):
        tt.Linear(6, 12, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)
    assert list(tt.Linear(6, 12, parameters_split=("a", "b"), bias=False).state_dict()) == [
        "a_weight", "b_weight"
    ]  # fmt: skip


def test_fuse_wgrad_accumulation():
    module = tt.LayerNormMLP(8, 16, fuse_wgrad_accumulation=True)
    x = torch.randn(4, 8)
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.ones_like(weight)
    module(x).sum().backward()
    plain = tt.LayerNormMLP(8, 16)
    plain.load_state_dict(module.state_dict())
    plain(x).sum().backward()
    for name in ("fc1_weight", "fc2_weight"):
        weight = getattr(module, name)
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, getattr(plain, name).grad + 1)


def test_state_of_other_modules():
    norm, fc1, fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    theirs = nn.Sequential(norm, fc1, nn.GELU(approximate="tanh"), fc2)
    ours = tt.LayerNormMLP(8, 16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    pair = tt.LayerNormLinear(8, 16)
    pair.load_state_dict(nn.Sequential(norm, fc1).state_dict())
    torch.testing.assert_close(pair(x), fc1(norm(x)))
    linear = tt.Linear(8, 16)
    linear.load_state_dict(fc1.state_dict())
    torch.testing.assert_close(linear(x), fc1(x))
    linear.load_state_dict({"basic_ops.0.weight": fc1.weight, "basic_ops.1.bias": fc1.bias})
    # Back: the names are those of nn.Linear.
    fc1.load_state_dict(linear.state_dict())
    # A wrong state names its keys.
    with pytest.raises(RuntimeError, match="fc2_bias"):
        ours.load_state_dict(nn.Sequential(norm, fc1).state_dict())
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    again = tt.LayerNormMLP(8, 16)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(again(x), ours(x))


def test_copies_and_whole_modules():
    module = tt.LayerNormMLP(8, 16, activation="geglu")
    x = torch.randn(3, 8)
    y = module(x)
    copied = copy.deepcopy(module)
    nn.init.zeros_(module.fc2_weight)
    assert torch.equal(copied(x), y)
    buffer = io.BytesIO()
    torch.save(copied, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), y)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert len(list(module.parameters())) == 6
    frozen = tt.LayerNormLinear(8, 4)
    frozen.requires_grad_(False)
    frozen(x.requires_grad_()).sum().backward()
    assert frozen.weight.grad is None and x.grad is not None


# convert


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.RMSNorm(8)
    )


def test_convert_keeps_what_users_have():
    m, x = model(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    before, keys = dict(m.named_parameters()), list(m.state_dict())
    reference = copy.deepcopy(m)
    m.eval()
    seen = []
    forward = m[1].register_forward_hook(lambda module, args, out: seen.append("forward"))
    m[3].register_full_backward_hook(lambda *a: seen.append("backward"))
    m[1].note = "user's"
    log = []
    assert tt.convert(m, log=log.append) is m
    assert [type(part) for part in m] == [
        ops.LayerNorm,
        ops.Linear,
        nn.GELU,
        ops.Linear,
        ops.RMSNorm,
    ]
    assert all(a is b for a, b in zip(before.values(), m.parameters(), strict=True))
    assert list(before) == [n for n, _ in m.named_parameters()] and keys == list(m.state_dict())
    assert not m[1].training and m[1].note == "user's"
    assert "replaced 4, left alone 0" in log[0] and "1: Linear -> ops.Linear" in log[0]
    torch.testing.assert_close(m(x), reference(x))
    m(x).sum().backward()
    assert seen == ["forward", "forward", "backward"]
    forward.remove()
    m(x)
    assert len(seen) == 3
    reference(x).sum().backward()
    for a, b in zip(m.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    old = m[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(m[1].weight, old)
    # Again: nothing.
    parts = list(m)
    tt.convert(m, log=log.append)
    assert list(m) == parts and "replaced 0, left alone 0" in log[1]
    m.load_state_dict(reference.state_dict())
    reference.load_state_dict(m.state_dict())
    torch.testing.assert_close(m(x), reference(x))


def test_convert_tied_and_nested(capsys):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.first = self.second = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))])

        def forward(self, i):
            h = self.second(self.first(self.embedding(i)))
            return self.head(self.blocks[0](h))

    m = Tied()
    i = torch.arange(6)
    y = m(i)
    count = len(list(m.parameters()))
    tt.convert(m)
    assert m.head.weight is m.embedding.weight and m.first is m.second
    assert len(list(m.parameters())) == count
    torch.testing.assert_close(m(i), y)
    out = capsys.readouterr().out
    assert "replaced 5, left alone 0" in out and "blocks.0.1: Linear -> ops.Linear" in out


def test_convert_leaves_alone():
    class Own(nn.Linear):
        pass

    class Patched(nn.Linear):
        pass

    odd = nn.Linear(4, 4)
    odd.forward = lambda x: x
    scaled = nn.Linear(4, 4)
    scaled.gain = nn.Parameter(torch.ones(1))
    m = nn.ModuleDict(
        {
            "own": Own(4, 4), "odd": odd, "wide": nn.Linear(4, 4, dtype=torch.float64),
            "plain": nn.LayerNorm(4, elementwise_affine=False), "scaled": scaled,
            "no_bias": nn.LayerNorm(4, bias=False),
            "computed": nn.utils.weight_norm(nn.Linear(4, 4)),
            "parametrized": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "by_filter": nn.Linear(4, 4), "taken": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )  # fmt: skip
    was = dict(m.named_modules())
    log = []
    tt.convert(m, filter=lambda name, module: name != "by_filter", log=log.append)
    assert "replaced 1, left alone 10" in log[0]
    assert {n for n, part in m.named_modules() if part is not was.get(n) and "." not in n} == {
        "taken"
    }
    for part in (
        "own: Own: a subclass",
        "odd: Linear: its forward",
        "wide: Linear: its weight is torch.float64",
        "plain: LayerNorm: it has no weight",
        "no_bias: LayerNorm: it has no bias",
        "computed: Linear: its weight is computed",
        "a parameter 'gain'",
        "parametrized: ParametrizedLinear: a subclass",
        "by_filter: Linear: by the filter",
        "attention.out_proj: NonDynamicallyQuantizableLinear: a subclass",
    ):
        assert part in log[0]
    with pytest.raises(TypeError, match="it must be a torch.nn.Module"):
        tt.convert([nn.Linear(4, 4)])
    with pytest.raises(TypeError, match="filter="):
        tt.convert(m, filter="taken")


def test_convert_of_one_module_and_of_an_encoder():
    linear = nn.Linear(4, 4)
    new = tt.convert(linear, log=None)
    assert type(new) is ops.Linear and new.weight is linear.weight
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    y = layer(x)
    tt.convert(layer, log=None)
    torch.testing.assert_close(layer(x), y)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y)
    # A filter that raises changes nothing.
    m = model()
    parts = list(m)

    def bad(name, module):
        if name == "3":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        tt.convert(m, filter=bad)
    assert list(m) == parts


@pytest.mark.parametrize("dtype", DTYPES)
def test_converted_norms_have_the_same_values(dtype):
    for make in (
        lambda: nn.RMSNorm(16, dtype=dtype),
        lambda: nn.RMSNorm(16, eps=1e-2, dtype=dtype),
        lambda: nn.LayerNorm(16, dtype=dtype),
        lambda: nn.LayerNorm((2, 8), dtype=dtype),
    ):
        norm = make()
        shape = (4, 2, 8) if len(norm.normalized_shape) == 2 else (4, 16)
        x = (torch.randn(shape) * 1e-3).to(dtype)  # so small that eps matters
        y = norm(x)
        torch.testing.assert_close(tt.convert(norm, log=None)(x), y, rtol=2e-2, atol=1e-3)


# recipes

RECIPES = {
    "delayed": lambda: tt.recipe.DelayedScaling(),
    "current": lambda: tt.recipe.Float8CurrentScaling(),
    "mxfp8": lambda: tt.recipe.MXFP8BlockScaling(),
    "block": lambda: tt.recipe.Float8BlockScaling(),
}


def distance(a, b):
    return (a.double() - b.double()).norm().item() / b.double().norm().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, dtype):
    torch.manual_seed(2)
    module = tt.LayerNormMLP(64, 128, activation="swiglu", params_dtype=dtype)
    plain = copy.deepcopy(module).double().float()
    x, g = torch.randn(32, 64).to(dtype), torch.randn(32, 64).to(dtype)
    with tt.autocast(recipe=RECIPES[name]()):
        y = module(x)
    y.backward(g)
    z = plain(x.float())
    z.backward(g.float())
    # Three roundings to e4m3 on the way forward, five on the way back, each about 2^-4 / sqrt(3)
    # relative at most; gradients of a hybrid recipe are e5m2, 2^-3 / sqrt(3).
    assert 0 < distance(y, z) < 0.1
    for (key, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert distance(p.grad, q.grad) < 0.2, key
    assert set(module.state_dict()) >= set(plain.state_dict())


def test_is_first_microbatch():
    recipe = tt.recipe.Float8CurrentScaling()
    for module in (tt.Linear(64, 64), tt.LayerNormLinear(64, 64), tt.LayerNormMLP(64, 64)):
        x = torch.randn(32, 64)
        with tt.autocast(recipe=recipe), torch.no_grad():
            first = module(x, is_first_microbatch=True)
            assert torch.equal(module(x, is_first_microbatch=False), first)
            # False promises that the weights are the same: their codes are not made again.
            for p in module.parameters():
                if p.dim() == 2:
                    p.mul_(0)
            assert torch.equal(module(x, is_first_microbatch=False), first)
            assert not torch.equal(module(x), first)
        assert torch.equal(module(x, is_first_microbatch=False), module(x))


@pytest.mark.parametrize("name", RECIPES)
def test_convert_with_a_recipe(name):
    m = model()
    x = torch.randn(32, 8)
    reference = m(x)
    tt.convert(m, RECIPES[name](), log=None)
    assert 1e-4 < distance(m(x), reference) < 0.1
    assert [part.basic_ops[0].recipe for part in (m[1], m[3])] == [RECIPES[name]()] * 2
    with pytest.raises(TypeError, match="recipe"):
        tt.convert(model(), "fp8", log=None)


def test_modules_are_explained():
    x = torch.randn(8, 64)
    block = tt.LayerNormMLP(64, 128)
    assert tt.explain(block, x) == tt.explain(block.chain, x) and "gemm" in tt.explain(block, x)


@pytest.mark.parametrize(
    "wrong, error, told",
    [
        (lambda: tt.Linear(4, 4, params_dtype="bf16"), TypeError, "params_dtype='bf16'"),
        (lambda: tt.LayerNormMLP(4, 8, init_method=3), TypeError, "init_method=3"),
        (lambda: tt.Linear(4, 4, parameters_split="ab"), TypeError, "parameters_split='ab'"),
        (lambda: tt.Linear(4, 4, parameters_split=2), TypeError, "parameters_split=2"),
        (lambda: tt.Linear(4, 4, parameters_split=[]), ValueError, "parameters_split="),
        (lambda: tt.Linear(4, 4, parameters_split={"a": -1, "b": 5}), ValueError, "-1"),
        (lambda: tt.update_scales(3), TypeError, "update_scales: module is a int"),
        (lambda: tt.create_state(3), TypeError, "create_state: module is a int"),
        (lambda: tt.check_state(3, {}), TypeError, "check_state: module is a int"),
        (lambda: tt.check_state(tt.Linear(4, 4), 3), TypeError, "state_dict is a int"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, told):
    with pytest.raises(error, match=re.escape(told)):
        wrong()
