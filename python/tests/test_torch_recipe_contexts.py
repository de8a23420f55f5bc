"""Contexts of recipes: nesting, threads, recomputation, pipelines, weights that stay the same."""

import threading

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon._plan import FORWARD, Plan  # noqa: E402
from tenon.torch import recipe as R  # noqa: E402
from tenon.torch._context import local  # noqa: E402

DELAYED = R.DelayedScaling(amax_history_len=4)
RECIPES = {
    "delayed": DELAYED,
    "current": R.Float8CurrentScaling(),
    "mxfp8": R.MXFP8BlockScaling(),
    "block": R.Float8BlockScaling(),
}


class Opaque(ops.BasicOperation):
    """An op of a user, around which a chain is cut."""

    def op_forward(self, ctx, input_):
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return grad_output * 1


def mlp(seed=0, opaque=False):
    torch.manual_seed(seed)
    middle = [Opaque()] if opaque else []
    return ops.Sequential(ops.Linear(32, 64), ops.GELU(), *middle, ops.Linear(64, 32))


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_contexts_nest_and_end_with_an_exception():
    model, x = mlp(), torch.randn(4, 32)
    plain = model(x)
    with tt.autocast(recipe=R.MXFP8BlockScaling()):
        outer = model(x)
        with tt.autocast(enabled=False):
            equal(model(x), plain)
            with tt.autocast(recipe=R.Float8CurrentScaling()):
                inner = model(x)
        equal(model(x), outer)
    assert not torch.equal(outer, plain) and not torch.equal(inner, outer)
    equal(model(x), plain)
    with pytest.raises(KeyError):
        with tt.autocast(recipe=DELAYED):
            with tt.autocast(recipe=R.MXFP8BlockScaling()):
                raise KeyError
    assert local.depth == 0 and local.active is None
    equal(model(x), plain)
    context = tt.autocast(recipe=DELAYED)
    with context:
        with pytest.raises(RuntimeError, match="entered already"):
            context.__enter__()
    with context:  # one after the other
        pass
    assert local.depth == 0 and local.active is None


def test_arguments_are_those_of_transformer_engine():
    with tt.autocast(True, False, R.MXFP8BlockScaling(), None):
        assert local.active.recipe == R.MXFP8BlockScaling()
    with tt.fp8_autocast(enabled=True, fp8_recipe=DELAYED):
        assert local.active.recipe == DELAYED
    with tt.autocast():
        assert local.active.recipe == tt.get_default_recipe()
    with tt.autocast(False):
        assert local.active is None
    with pytest.raises(TypeError, match="recipe is a str; it must be one of tenon.torch.recipe"):
        tt.autocast(recipe="mxfp8")
    with pytest.raises(ValueError, match="update='never'"):
        tt.autocast(update="never")
    made = R.DelayedScaling(1, R.Format.E4M3, 16, "most_recent", None, False)
    assert (made.margin, made.amax_history_len, made.reduce_amax) == (1, 16, False)
    assert made.delayed() and made.float8_per_tensor_scaling() and not made.mxfp8()
    kinds = ("delayed", "float8_current_scaling", "mxfp8", "float8_block_scaling")
    for recipe, kind in zip(RECIPES.values(), kinds, strict=True):
        assert [k for k in (*kinds, "custom", "nvfp4") if getattr(recipe, k)()] == [kind]


@pytest.mark.parametrize(
    "make,error,match",
    [
        (lambda: R.DelayedScaling(fp8_format=R.Format.E5M2), ValueError, "use Format.HYBRID"),
        (lambda: R.MXFP8BlockScaling(fp8_format="e4m3"), TypeError, "fp8_format='e4m3'"),
        (lambda: R.DelayedScaling(fp8_dpa=True), NotImplementedError, "leave fp8_dpa out"),
        (lambda: R.Float8CurrentScaling(fp8_mha=True), NotImplementedError, "leave fp8_mha out"),
        (lambda: R.DelayedScaling(amax_compute_algo=max), NotImplementedError, "is a function"),
        (lambda: R.DelayedScaling(amax_compute_algo="min"), ValueError, "amax_compute_algo='min'"),
        (
            lambda: R.DelayedScaling(scaling_factor_compute_algo=max),
            NotImplementedError,
            "scaling_factor_compute_algo is a function",
        ),
        (lambda: R.DelayedScaling(amax_history_len=0), ValueError, "amax_history_len=0"),
        (lambda: R.DelayedScaling(margin=1.5), TypeError, "margin=1.5"),
        (lambda: R.DelayedScaling(margin=65), ValueError, "margin=65"),
        (
            lambda: R.DelayedScaling(backward_override="dequantized"),
            ValueError,
            "use Float8CurrentScaling",
        ),
        (lambda: R.MXFP8BlockScaling(backward_override="none"), ValueError, "backward_override"),
        (lambda: R.MXFP8BlockScaling(margin=1), ValueError, "leaves no margin"),
        (
            lambda: R.MXFP8BlockScaling(enable_2d_quantization=True),
            NotImplementedError,
            "Float8BlockScaling",
        ),
        (lambda: R.Float8BlockScaling(x_block_scaling_dim=3), ValueError, r"\[1, 2\]"),
        (lambda: R.CustomRecipe("mxfp8"), TypeError, "qfactory is a str"),
        (lambda: R.NVFP4BlockScaling(), AttributeError, "use MXFP8BlockScaling"),
        (lambda: ops.Linear(2, 2, recipe="mxfp8"), TypeError, "recipe is a str"),
        (lambda: tt.checkpoint(len, tp_group=1), NotImplementedError, "leave them out"),
    ],
)
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_what_runs_on_a_device():
    for ask in (tt.is_fp8_available, tt.is_mxfp8_available, tt.is_fp8_block_scaling_available):
        assert ask() is True
        told = ask(return_reason=True, device="cpu")
        assert told[0] is True and "products decode 8-bit operands" in told[1]
    assert tt.is_bf16_available(True, device="cpu") == (True, "bfloat16 on cpu")
    assert tt.get_default_fp8_recipe("cpu") == R.DelayedScaling()
    from tenon.torch._available import _how

    direct, told = _how("mxfp8", "cuda", 0, "sm_90a")
    assert not direct and "a pass decodes the operands" in told
    assert _how("mxfp8", "cuda", 0, "sm_100a")[0] and _how("delayed", "cuda", 0, "sm_90a")[0]


def train(model, recipe, steps=5, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(16, 32)
    found = []
    for _ in range(steps):
        model.zero_grad()
        with tt.autocast(recipe=recipe):
            y = model(x)
        loss = y.square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        found.append(loss.detach())
    return [*found, *state(model).values()]


def test_four_modules_in_four_threads_have_their_own_recipes():
    alone = [train(mlp(i), r, 20, i) for i, r in enumerate(RECIPES.values())]
    models, together = [mlp(i) for i in range(4)], [None] * 4
    torch.manual_seed(0)
    inputs = []
    for i in range(4):
        torch.manual_seed(i)
        inputs.append(torch.randn(16, 32))
    begin = threading.Barrier(4)

    def run(i, recipe):
        begin.wait()
        found = []
        for _ in range(20):
            models[i].zero_grad()
            with tt.autocast(recipe=recipe):
                y = models[i](inputs[i])
            loss = y.square().mean()
            loss.backward()
            with torch.no_grad():
                for p in models[i].parameters():
                    p.sub_(0.1 * p.grad)
            found.append(loss.detach())
        together[i] = [*found, *state(models[i]).values()]

    threads = [threading.Thread(target=run, args=(i, r)) for i, r in enumerate(RECIPES.values())]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for one, other in zip(alone, together, strict=True):
        equal(other, one)


def test_backward_in_another_thread_and_another_context():
    """It uses what its forward pass used."""
    results = []
    for elsewhere in (False, True):
        model = mlp(opaque=True)
        torch.manual_seed(1)
        x = torch.randn(8, 32, requires_grad=True)
        with tt.autocast(recipe=R.MXFP8BlockScaling()):
            y = model(x)
        if elsewhere:

            def run(y=y):
                with tt.autocast(recipe=R.Float8CurrentScaling(backward_override="dequantized")):
                    y.sum().backward()

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            y.sum().backward()
        results.append([x.grad, *grads(model)])
    equal(results[1], results[0])


def pieces(model, how):
    """The model as a function, checkpointed or not."""
    if how == "none":
        return model
    if how.startswith("tenon"):
        return lambda x: tt.checkpoint(model, x, use_reentrant=how.endswith("reentrant"))
    return lambda x: torch.utils.checkpoint.checkpoint(
        model, x, use_reentrant=how.endswith("reentrant")
    )


HOWS = ["torch reentrant", "torch", "tenon reentrant", "tenon"]


@pytest.mark.parametrize("opaque", [False, True], ids=["plan", "cut"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("how", HOWS)
def test_a_checkpoint_changes_no_bit(how, name, opaque):
    found = []
    for way in ("none", how):
        model = mlp(opaque=opaque)
        f = pieces(model, way)
        torch.manual_seed(1)
        results = []
        for _ in range(4):
            x = torch.randn(8, 32, requires_grad=True)
            with tt.autocast(recipe=RECIPES[name]):
                y = f(x)
            y.square().sum().backward()
            results += [y.detach(), x.grad]
        found.append([*results, *grads(model), *state(model).values()])
    equal(found[1], found[0])


def pipeline(f, model, order, recipe=DELAYED, update="auto", recipes=None):
    """Two forward passes, each in its own autocast, then two backward passes in `order`."""
    torch.manual_seed(1)
    for _ in range(2):  # the scales
        with tt.autocast(recipe=recipe):
            y = model(torch.randn(8, 32, requires_grad=True))
        y.sum().backward()
    model.zero_grad()
    outputs, inputs = [], [torch.randn(8, 32) * s for s in (1.0, 9.0)]
    for i, x in enumerate(inputs):
        x.requires_grad_()
        with tt.autocast(recipe=recipes[i] if recipes else recipe, update=update):
            outputs.append(f(x))
    for i in order:
        outputs[i].square().sum().backward()
    return [x.grad for x in inputs] + [y.detach() for y in outputs] + grads(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("how", ["none", "tenon reentrant", "tenon"])
def test_pipelines_see_the_scales_of_their_forward_passes(how, order):
    """An update falls between the two forward passes."""
    found = []
    for way in ("none", how):
        model = mlp()
        found.append([*pipeline(pieces(model, way), model, order), *state(model).values()])
    equal(found[1], found[0])


@pytest.mark.parametrize("how", ["torch reentrant", "torch"])
def test_a_recomputation_that_is_ambiguous_is_refused(how):
    model = mlp()
    with pytest.raises(RuntimeError, match="use tenon.torch.checkpoint"):
        pipeline(pieces(model, how), model, (0, 1))
    for update in ("manual",):  # no update in between
        model, other = mlp(), mlp()
        equal(
            pipeline(pieces(model, how), model, (0, 1), update=update),
            pipeline(other, other, (0, 1), update=update),
        )
    recipes = R.MXFP8BlockScaling(), R.Float8CurrentScaling()
    with pytest.raises(RuntimeError, match="under other recipes"):
        model = mlp()
        pipeline(pieces(model, how), model, (0, 1), recipes=recipes)
    model, other = mlp(), mlp()
    equal(
        pipeline(pieces(model, how.replace("torch", "tenon")), model, (0, 1), recipes=recipes),
        pipeline(other, other, (0, 1), recipes=recipes),
    )


def test_an_update_between_the_passes_of_one_call():
    """Recomputed with the scales of forward, while only one pass is open."""
    found = []
    for way in ("none", "torch"):
        model = mlp()
        f = pieces(model, way)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(8, 32, requires_grad=True)
            with tt.autocast(recipe=DELAYED, update="manual"):
                y = f(x)
            tt.update_scales()
            y.square().sum().backward()
        found.append([x.grad, *grads(model), *state(model).values()])
    equal(found[1], found[0])


def test_states_that_are_updated_together(monkeypatch):
    """The form for CUDA: states of equal shape are stacked."""
    from tenon.torch._delayed import State

    found = []
    for together in (False, True):
        if together:
            monkeypatch.setattr(State, "on_cpu", lambda self: False)
        model = mlp(opaque=True)
        results = pipeline(pieces(model, "tenon"), model, (0, 1))
        found.append([*results, *train(model, DELAYED), *state(model).values()])
    equal(found[1], found[0])


def test_nested_and_disabled_contexts_do_not_update():
    model = mlp()
    basic = model[0].basic_ops[0]
    x = torch.randn(4, 32, requires_grad=True)
    with tt.autocast(recipe=DELAYED):
        model(x)
        with tt.autocast(recipe=DELAYED):
            model(x)
    assert (basic.forward_scale == 1).all() and (basic.forward_amax_history[0] > 0).all()
    with torch.no_grad(), tt.autocast(recipe=DELAYED):
        model(x)
    with tt.autocast(recipe=DELAYED, update="manual"):
        model(x)
    with tt.autocast(enabled=False):
        model(x)
    assert (basic.forward_scale == 1).all()
    other = mlp()
    with tt.autocast(recipe=DELAYED, update="manual"):
        other(x)
    tt.update_scales(other)
    assert (other[0].basic_ops[0].forward_scale != 1).all() and (basic.forward_scale == 1).all()
    with tt.autocast(recipe=DELAYED):
        assert (basic.forward_scale != 1).all()


def encoded(monkeypatch):
    """Counts runs of plans that encode their weights."""
    ran = []
    run = Plan.run

    def count(self, pass_, *args, weights_unchanged=False, **more):
        ran.append((pass_ != FORWARD, not weights_unchanged))
        return run(self, pass_, *args, weights_unchanged=weights_unchanged, **more)

    monkeypatch.setattr(Plan, "run", count)
    return ran


@pytest.mark.parametrize("name", RECIPES)
def test_microbatches_use_the_codes_of_the_first(name, monkeypatch):
    ran = encoded(monkeypatch)
    results = []
    for keeps in (False, True):
        model = mlp()
        torch.manual_seed(1)
        batches = torch.randn(3, 8, 32)
        found = []
        for step in range(3):
            ran.clear()
            for k, x in enumerate(batches):
                x = x.clone().requires_grad_()
                first = (k == 0) if keeps else None
                with tt.autocast(recipe=RECIPES[name], update="manual"):
                    y = model(x, is_first_microbatch=first)
                y.square().sum().backward()
                found += [y.detach(), x.grad]
            if keeps:
                assert [e for _, e in ran] == [True, True, False, False, False, False]
            else:
                assert all(e for _, e in ran)
            found += grads(model)
            model.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
            if name == "delayed":
                tt.update_scales()
            assert step < 3
        results.append(found)
    equal(results[1], results[0])


def test_codes_are_made_again_when_they_must_be(monkeypatch):
    ran = encoded(monkeypatch)
    model = mlp()
    x = torch.randn(8, 32)

    def call(first, recipe, x=x, **keywords):
        ran.clear()
        with tt.autocast(recipe=recipe, **keywords):
            y = model(x, is_first_microbatch=first)
        return y, ran[0][1]

    current = R.Float8CurrentScaling()
    assert call(False, current)[1]  # nothing was kept
    assert not call(False, current)[1]
    assert call(False, R.MXFP8BlockScaling())[1]  # another format
    assert not call(False, current)[1]
    assert call(None, current)[1]
    assert call(False, current)[1]  # a call in between may have seen another weight
    assert call(False, current, x.bfloat16())[1]  # another dtype of the chain
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert call(True, current)[1]
    equal(call(False, current)[0], call(None, current)[0])
    for _ in range(2):  # another scale
        y, fresh = call(False, DELAYED)
        assert fresh
        y.sum().backward()
    assert not call(False, DELAYED, update="manual")[1]
    tt.update_scales()
    y, fresh = call(False, DELAYED, update="manual")
    assert fresh
    equal(y, call(None, DELAYED, update="manual")[0])
    with pytest.raises(TypeError, match="is_first_microbatch=1"):
        model(x, is_first_microbatch=1)


def test_weights_unchanged(monkeypatch):
    ran = encoded(monkeypatch)
    model, x = mlp(), torch.randn(8, 32)
    recipe = R.MXFP8BlockScaling()

    def calls(n):
        ran.clear()
        with tt.autocast(recipe=recipe), torch.no_grad():
            return [model(x) for _ in range(n)], [e for _, e in ran]

    (want, *_), fresh = calls(2)
    assert fresh == [True, True]
    with tt.weights_unchanged():
        made, fresh = calls(3)
        assert fresh == [True, False, False]
        with tt.weights_unchanged():
            assert calls(1)[1] == [False]
    for y in made:
        equal(y, want)
    model[0].weight.data.mul_(2)
    with tt.weights_unchanged():  # another promise
        (y, _), fresh = calls(2)
    assert fresh == [True, False] and not torch.equal(y, want)
    assert calls(1)[1] == [True]


def test_frozen_weights():
    for name, recipe in RECIPES.items():
        found = []
        for frozen in (False, True):
            model = mlp()
            model[0].weight.requires_grad_(not frozen)
            torch.manual_seed(1)
            for _ in range(3):
                x = torch.randn(8, 32, requires_grad=True)
                model.zero_grad()
                with tt.autocast(recipe=recipe):
                    y = model(x)
                y.sum().backward()
            assert (model[0].weight.grad is None) == frozen, name
            found.append([y.detach(), x.grad, model[2].weight.grad])
        equal(found[1], found[0])


def test_a_model_may_switch_recipes_at_any_step():
    """Only the state of delayed scaling is kept."""
    model, other = mlp(), mlp()
    x = torch.randn(8, 32, requires_grad=True)
    for i in range(8):
        for m, recipes in ((model, list(RECIPES.values())), (other, [DELAYED])):
            if i % len(recipes) == 0 or m is model:
                with tt.autocast(recipe=recipes[i % len(recipes)]):
                    y = m(x)
                y.sum().backward()
    assert model[0].basic_ops[0].forward_scale[0] == 448 / x.detach().abs().max()


@pytest.mark.parametrize("name", RECIPES)
def test_inference_first_then_training(name):
    """State that inference makes is trained on."""
    model, other = mlp(), mlp()
    x = torch.randn(8, 32)
    for context in (torch.inference_mode, torch.no_grad):
        with context(), tt.autocast(recipe=RECIPES[name]):
            model(x)
    if name == "delayed":
        for basic in (model[0].basic_ops[0], model[2].basic_ops[0]):
            basic.forward_amax_history.zero_()  # of the calls above
    equal(train(model, RECIPES[name]), train(other, RECIPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_no_rows_and_autocast_of_torch(name):
    model = mlp()
    for rows in (0, 1, 5):
        x = torch.randn(rows, 32, requires_grad=True)
        with tt.autocast(recipe=RECIPES[name]), torch.autocast(x.device.type, torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert x.grad.shape == x.shape and x.grad.isfinite().all()
    for op in (model[0].basic_ops[0], model[2].basic_ops[0]) if name == "delayed" else ():
        assert op.forward_scale.isfinite().all() and op.forward_scale.dtype == torch.float32


def test_recipes_are_copied_and_freed():
    import copy
    import gc
    import pickle
    import weakref

    model, x = mlp(), torch.randn(4, 32, requires_grad=True)
    for recipe in RECIPES.values():
        with tt.autocast(recipe=recipe):
            model(x)
        for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
            assert other == recipe and hash(other) == hash(recipe)
    made = []
    for _ in range(200):
        recipe = R.CustomRecipe(lambda role: None)
        made.append(weakref.ref(recipe))
        with tt.autocast(recipe=recipe):
            model(x).sum().backward()
    del recipe
    gc.collect()
    assert sum(r() is not None for r in made) < 70  # those that caches hold


def test_states_of_a_deleted_model_are_not_kept():
    import gc
    import weakref

    model = mlp()
    with tt.autocast(recipe=DELAYED):
        y = model(torch.randn(4, 32, requires_grad=True))
    y.sum().backward()
    gone = weakref.ref(model[0].weight)
    del model, y
    gc.collect()
    assert gone() is None
    with tt.autocast(recipe=DELAYED):
        pass
    assert not local.used


def test_flags_of_contexts_are_bools():
    """A recipe as the first argument would be `enabled`, and another recipe would run."""
    for make in (tt.autocast, tt.fp8_autocast, tt.quantized_model_init, tt.fp8_model_init):
        with pytest.raises(TypeError, match="enabled=.*True or False"):
            make(tt.recipe.MXFP8BlockScaling())
    with pytest.raises(TypeError, match="calibrating='x'"):
        tt.autocast(calibrating="x")
