"""State dicts with delayed state, quantised parameters, and reductions over ranks."""

import copy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import recipe as R  # noqa: E402

DELAYED = R.DelayedScaling(amax_history_len=4)
RECIPES = {
    "delayed": DELAYED,
    "current": R.Float8CurrentScaling(),
    "mxfp8": R.MXFP8BlockScaling(),
    "block": R.Float8BlockScaling(),
}
STATE = ("forward_amax_history", "forward_scale", "backward_amax_history", "backward_scale")


def mlp(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(
        ops.Linear(32, 64), ops.GELU(), ops.LayerNorm(64), ops.Linear(64, 32), ops.Quantize()
    )


class Own(torch.nn.Module):
    """A module of a user with a chain in it."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = torch.nn.Linear(32, 32)
        self.chain = mlp(seed)

    def forward(self, x):
        y = self.chain(self.head(x))
        return y.dequantize() if isinstance(y, tt.QuantizedTensor) else y


def steps(model, optimizer, count, recipe=DELAYED, begin=0):
    losses = []
    for i in range(begin, begin + count):
        generator = torch.Generator(torch.get_default_device()).manual_seed(i)
        x = torch.randn(16, 32, generator=generator) * (1 + i)
        optimizer.zero_grad()
        with tt.autocast(recipe=recipe):
            y = model(x)
        loss = (y - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def same(model, other):
    one, two = model.state_dict(), other.state_dict()
    assert list(one) == list(two)
    torch.testing.assert_close(list(one.values()), list(two.values()), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["torch.save", "assign", "deepcopy", "to"])
@pytest.mark.parametrize("make", [mlp, Own])
def test_a_resumed_run_has_the_same_bits(make, how, tmp_path):
    model = make()
    optimizer = adam(model)
    steps(model, optimizer, 4)
    if how == "deepcopy":
        other = copy.deepcopy(model)
        resumed = adam(other)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "to":
        other, resumed = model, optimizer
        wanted = copy.deepcopy(model)
        theirs = adam(wanted)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model, optimizer = wanted, theirs
        other.to("cpu", torch.float32).to(torch.get_default_device())
    else:
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
        loaded, of_optimizer = torch.load(tmp_path / "state", weights_only=True)
        assert all(type(t) is torch.Tensor for t in loaded.values())
        other = make(seed=1)
        other.load_state_dict(loaded, assign=how == "assign")
        resumed = adam(other)
        resumed.load_state_dict(of_optimizer)
    same(model, other)
    assert steps(model, optimizer, 4, begin=4) == steps(other, resumed, 4, begin=4)
    tt.update_scales()
    same(model, other)


def test_names_and_shapes_of_the_state():
    model = mlp()
    plain = list(model.state_dict())
    assert plain == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    steps(model, adam(model), 1)
    found = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in plain}
    of_linear = dict(zip(STATE, [(4, 2), (2,), (4, 1), (1,)], strict=True))
    want = {f"{i}.basic_ops.0.{k}": v for i in (0, 3) for k, v in of_linear.items()}
    want |= {"4.forward_amax_history": (4, 1), "4.forward_scale": (1,)}
    assert found == want


def test_plain_checkpoints_load_and_state_stays():
    class Plain(torch.nn.Sequential):
        pass

    plain = Plain(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64),
                  torch.nn.Linear(64, 32), torch.nn.Identity())  # fmt: skip
    model = mlp()
    assert model.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    plain.load_state_dict(model.state_dict(), strict=True)
    steps(model, adam(model), 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert model.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]) == ("amax" in k or "scale" in k), k
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**plain.state_dict(), "1.forward_scale": torch.ones(1)})


KEY = "3.basic_ops.0."


def without(name):
    return lambda state: state.pop(KEY + name)


def changed(name, function):
    return lambda state: state.update({KEY + name: function(state[KEY + name])})


HOSTILE = {
    "no history": (without("forward_amax_history"), "forward_amax_history"),
    "no scale": (without("backward_scale"), "backward_scale"),
    "NaN scale": (changed("forward_scale", lambda t: t * float("nan")), "forward_scale"),
    "infinite scale": (changed("backward_scale", lambda t: t * float("inf")), "backward_scale"),
    "negative scale": (changed("forward_scale", torch.neg), "forward_scale"),
    "zero scale": (changed("forward_scale", torch.zeros_like), "forward_scale"),
    "shape": (changed("forward_scale", lambda t: t[:1]), "forward_scale"),
    "columns": (changed("backward_amax_history", lambda t: t.repeat(1, 2)), "backward_amax"),
    "empty": (changed("forward_amax_history", lambda t: t[:0]), "forward_amax_history"),
    "dimensions": (changed("forward_amax_history", torch.flatten), "forward_amax_history"),
    "dtype": (changed("forward_scale", torch.Tensor.double), "forward_scale"),
    "negative amax": (changed("forward_amax_history", lambda t: t - 100), "forward_amax_history"),
    "no tensor": (changed("forward_scale", lambda t: [1.0, 2.0]), "forward_scale"),
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_changes_nothing(name, ran):
    model, source = mlp(), mlp(1)
    steps(source, adam(source), 3)
    if ran:
        steps(model, adam(model), 2)
    change, key = HOSTILE[name]
    state = dict(source.state_dict())
    change(state)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=(KEY + key).replace(".", r"\.")):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match=(KEY + key).replace(".", r"\.")):
        tt.check_state(torch.nn.Sequential(model), {"0." + k: v for k, v in state.items()})
    after = model.state_dict()
    assert list(after) == list(before)
    torch.testing.assert_close(list(after.values()), list(before.values()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["no scale", "NaN scale"])
def test_a_converted_model_and_a_module_check_all_parts_first(name):
    def converted():
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        return tt.convert(model, log=None), "1.basic_ops.0."

    def module():
        return tt.LayerNormLinear(32, 32), "chain.1."

    for make in (converted, module):
        model, key = make()
        steps(model, adam(model), 3)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        key = next(k for k in state if k.endswith("forward_scale") and k.startswith(key[:2]))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        wrong = {k: v + 1 for k, v in state.items()}
        if name == "no scale":
            del wrong[key]
        else:
            wrong[key] = wrong[key] * float("nan")
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            model.load_state_dict(wrong)
        after = model.state_dict()
        torch.testing.assert_close(list(after.values()), list(before.values()), rtol=0, atol=0)


def test_a_loaded_state_may_have_another_history_length_and_non_finite_amax():
    source, model = mlp(), mlp(1)
    steps(source, adam(source), 3)
    state = dict(source.state_dict())
    state[KEY + "forward_amax_history"] = state[KEY + "forward_amax_history"].clone()
    state[KEY + "forward_amax_history"][2, 0] = float("nan")
    steps(model, adam(model), 2, R.DelayedScaling(amax_history_len=7))
    model.load_state_dict(state)
    history = model[3].basic_ops[0].forward_amax_history
    assert history.shape == (4, 2) and history[2, 0].isnan()
    steps(model, adam(model), 1, R.DelayedScaling(amax_history_len=7))
    assert len(model[3].basic_ops[0].forward_amax_history) == 7


def test_the_state_stays_float32_and_moves():
    model = mlp()
    steps(model, adam(model), 3)
    linear = model[0].basic_ops[0]
    before = [getattr(linear, name).clone() for name in STATE]
    for change in (model.bfloat16, model.half, model.double, lambda: model.type(torch.float16)):
        change()
        after = [getattr(linear, name) for name in STATE]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    model.float()
    model.to("meta")
    assert all(getattr(linear, name).is_meta for name in STATE)
    model.to_empty(device="cpu")
    assert (linear.forward_scale == 1).all() and (linear.backward_amax_history == 0).all()


def test_state_of_a_model_that_has_not_run():
    source = mlp()
    steps(source, adam(source), 3)
    model = mlp(1)
    tt.create_state(model, DELAYED)
    assert list(model.state_dict()) == list(source.state_dict())
    for k, v in model.state_dict().items():  # in place, as torch.distributed.checkpoint
        v.copy_(source.state_dict()[k])
    assert [getattr(model[0].basic_ops[0], name).data_ptr() for name in STATE]
    with pytest.raises(TypeError, match="only DelayedScaling has state"):
        tt.create_state(model, R.MXFP8BlockScaling())


def test_distributed_checkpoint(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    source, model = mlp(), mlp(1)
    optimizer = adam(source)
    steps(source, optimizer, 3)
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    tt.create_state(model, DELAYED)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    model.load_state_dict(state["model"])
    same(model, source)


@pytest.mark.parametrize("name", RECIPES)
def test_quantised_parameters_train_like_weights_that_are_quantised_in_each_step(name):
    """The optimiser sees the decoded weight, and its result is encoded."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    with tt.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    torch.manual_seed(0)
    plain = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    assert not isinstance(plain[0].weight, tt.QuantizedTensor)
    pairs = []
    for i in (0, 2):
        q, w = model[i].weight, plain[i].weight
        assert isinstance(q, tt.QuantizedTensor) and isinstance(q, torch.nn.Parameter)
        assert torch.equal(q.get_high_precision_init_val(), w.cpu())
        q.clear_high_precision_init_val()
        assert q.get_high_precision_init_val() is None
        pairs.append((q, w, q.quantizer))
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    torch.manual_seed(1)
    for _ in range(10):
        x = torch.randn(16, 32)
        with torch.no_grad():
            for _, w, quantizer in pairs:
                w.copy_(quantizer(w.detach()).dequantize())
        losses = []
        for m, optimizer in ((model, mine), (plain, theirs)):
            optimizer.zero_grad()
            with tt.autocast(recipe=recipe if name != "delayed" else R.Float8CurrentScaling()):
                loss = (m(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_quantized_model_init_nests_and_refuses():
    with tt.quantized_model_init(), tt.quantized_model_init(enabled=False):
        assert not isinstance(ops.Linear(32, 32).weight, tt.QuantizedTensor)
    with tt.fp8_model_init(recipe=R.MXFP8BlockScaling()):
        module = tt.LayerNormMLP(32, 64)
        assert module.fc1_weight.scaling == "mxfp8" and module.fc2_weight.scaling == "mxfp8"
        own = ops.Linear(32, 32, recipe=R.Float8BlockScaling())
        assert own.weight.scaling == "block128x128"
        with pytest.raises(NotImplementedError, match="parameters_split"):
            tt.Linear(32, 96, parameters_split=("q", "k", "v"))
        with pytest.raises(NotImplementedError, match="meta device"):
            ops.Linear(32, 32, device="meta")
        with torch.no_grad():
            assert ops.Linear(32, 32).weight.columnwise_data is None
    with tt.quantized_model_init(recipe=R.CustomRecipe(lambda role: None)):
        assert not isinstance(ops.Linear(32, 32).weight, tt.QuantizedTensor)
    with pytest.raises(TypeError, match="recipe is a str"):
        tt.quantized_model_init(recipe="mxfp8")


_RANKS = """
import sys, torch, torch.distributed as dist
import tenon.torch as tt, tenon.torch.ops as ops
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
alone = dist.new_group([0]), dist.new_group([1])
R = tt.recipe
def scales(model):
    names = ("forward_scale", "backward_scale")
    return torch.cat([getattr(op, n) for op in model.modules() for n in names if hasattr(op, n)])
def train(recipe, group, factors):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    for i in range(4):
        for factor in factors:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * factor
            x.requires_grad_()
            with tt.autocast(recipe=recipe, amax_reduction_group=group, update="manual"):
                y = model(x)
            y.square().sum().backward()
        tt.update_scales()
    return scales(model)
recipe = R.DelayedScaling(amax_history_len=4)
reduced = train(recipe, None, [1.0 + 2 * rank])
both = [torch.empty_like(reduced) for _ in range(2)]
dist.all_gather(both, reduced)
assert torch.equal(*both), both
local = train(R.DelayedScaling(amax_history_len=4, reduce_amax=False), None, [1.0 + 2 * rank])
dist.all_gather(both, local)
assert not torch.equal(*both)
assert torch.equal(train(recipe, alone[rank], [1.0 + 2 * rank]), local)
# The inputs are x and 3x: the first amax is the maximum over both.
first = ops.BasicLinear(32, 8)
x = torch.full((2, 32), 1.0 + 2 * rank, requires_grad=True)
with tt.autocast(recipe=recipe):
    y = first(x)
y.backward(torch.full_like(y, float("nan") if rank else 1.0))
with tt.autocast(recipe=recipe):
    pass
assert first.forward_amax_history[-1, 0] == 3 and first.forward_scale[0] == torch.tensor(448.0) / 3
assert first.backward_amax_history[-1, 0].isnan() and first.backward_scale == 1
dist.barrier()
dist.destroy_process_group()
print("compared", file=sys.stderr)
"""


def test_amax_are_reduced_over_ranks(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    command = [sys.executable, "-c", _RANKS, str(tmp_path / "store")]
    options = {"stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, rank], **options) for rank in ("0", "1")]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    for text in told:
        assert "compared" in text, text[-3000:]
