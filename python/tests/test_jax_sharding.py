"""Tests of tenon.jax on sharded arrays with eight CPU devices: the unsharded bits, without
gathering.
"""

import functools
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from tenon.jax import (  # noqa: E402
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    Float8BlockScaleQuantizer,
    QuantizeLayout,
    act_lu,
    activation,
    dact_lu,
    quantize_dact_dbias,
)

# These tests mostly compile, so LLVM optimisations would only cost time.
jax.config.update("jax_disable_most_optimizations", True)
DEVICES = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(DEVICES) < 8, reason="JAX started with fewer than 8 devices")
STRICT = {"precision": "strict"}
KEYS = (("gelu",), ("silu", "linear"))
# Specs for x [B, T, inputs, H]. The last two split axes that a call needs whole, or its columns.
SPECS = (
    P("d"),
    P(None, "d"),
    P("d", "t"),
    P(("d", "t")),
    P(None, None, None, "t"),
    P("d", None, "t"),
)
QUANTIZERS = {
    "delayed": lambda layout: DelayedScaleQuantizer(
        q_layout=layout, scale=jnp.full(1, 3.7, jnp.float32)
    ),
    "current": lambda layout: CurrentScaleQuantizer(q_layout=layout),
    "mxfp8": lambda layout: BlockScaleQuantizer(q_layout=layout),
    "block1x128": lambda layout: Float8BlockScaleQuantizer(q_layout=layout),
    "block128x128": lambda layout: Float8BlockScaleQuantizer(q_layout=layout, block_scaling_dim=2),
}


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("d", "t"), axis_types=(kind,) * 2, devices=DEVICES[:8])


@pytest.fixture(autouse=True)
def on_cpu():
    """Uses the CPU, also if JAX has a GPU."""
    with jax.default_device(DEVICES[0]):
        yield


def numbers(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray((np.random.default_rng(seed).normal(size=shape) * 2).astype(dtype))


def same(got, want):
    """Checks for equal bits, leaf by leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize]
        np.testing.assert_array_equal(a.view(kind), b.view(kind))


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def communication(function, *arrays):
    """The collectives in a compiled function."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    named = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return set(re.findall(named, text))


def is_split(array, mesh, spec):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


def value(x, key=KEYS[1], **options):
    return (activation(x, key, **STRICT, **options) ** 2).sum()


@pytest.mark.parametrize("key", KEYS, ids="+".join)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_jit_has_the_bits_of_the_whole(spec, key):
    mesh = mesh_of()
    x, dz = numbers((8, 8, len(key), 6), jnp.bfloat16), numbers((8, 8, 6), jnp.bfloat16, 1)
    if len(key) == 1:
        spec = P(*(s if i != 2 else None for i, s in enumerate(spec)))
    xs, dzs = put(x, mesh, spec), put(dz, mesh, P(*spec[:2]))
    forward = functools.partial(act_lu, activation_type=key, **STRICT)
    backward = functools.partial(dact_lu, activation_type=key, **STRICT)
    same(jax.jit(forward)(xs), forward(x))
    same(jax.jit(backward)(dzs, xs), backward(dz, x))
    same(forward(xs), forward(x))  # without jit
    same(backward(dzs, xs), backward(dz, x))
    same(jax.jit(forward, in_shardings=NamedSharding(mesh, spec))(x), forward(x))
    (dx, dbias), (_, sums) = (quantize_dact_dbias(*a, key, **STRICT) for a in ((dzs, xs), (dz, x)))
    same(dx, backward(dz, x))
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (dbias, sums)), rtol=2**-7)
    amax = act_lu(xs, key, output_amax_when_no_scaling=True, **STRICT)
    same(amax, act_lu(x, key, output_amax_when_no_scaling=True, **STRICT))


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_rows_are_not_gathered(spec):
    mesh = mesh_of()
    x, dz = put(numbers((8, 8, 2, 6)), mesh, spec), put(numbers((8, 8, 6), seed=1), mesh, spec)
    key = KEYS[1]
    forward = functools.partial(activation, activation_type=key)
    assert communication(forward, x) == set()
    assert is_split(jax.jit(forward)(x), mesh, spec)
    assert is_split(forward(x), mesh, spec)
    assert communication(jax.grad(value), x) == set()
    assert is_split(jax.jit(jax.grad(value))(x), mesh, spec)
    assert communication(jax.value_and_grad(value), x) == {"all-reduce"}  # for the value
    back = functools.partial(quantize_dact_dbias, activation_type=key)
    assert communication(back, dz, x) == {"all-reduce"}
    dx, dbias = jax.jit(back)(dz, x)
    assert is_split(dx, mesh, spec) and is_split(dbias, mesh, P())


def test_columns_are_not_gathered():
    """The hidden axis of a tensor-parallel layer."""
    mesh = mesh_of()
    x, dz = numbers((8, 2, 6)), numbers((8, 6), seed=1)
    xs, dzs = put(x, mesh, P("d", None, "t")), put(dz, mesh, P("d", "t"))
    forward = functools.partial(activation, activation_type=KEYS[1], **STRICT)
    back = functools.partial(quantize_dact_dbias, activation_type=KEYS[1], **STRICT)
    assert communication(forward, xs) == set() and communication(jax.grad(value), xs) == set()
    same(jax.jit(forward)(xs), forward(x))
    same(jax.jit(jax.grad(value))(xs), jax.grad(value)(x))
    dx, dbias = jax.jit(back)(dzs, xs)
    same(dx, back(dz, x)[0])
    assert is_split(dbias, mesh, P(None, "t")) and is_split(dx, mesh, P("d", None, "t"))


def test_a_layer_in_a_sharded_step():
    mesh = mesh_of()
    x, w = numbers((16, 8)), numbers((8, 2, 6), seed=1)

    def loss(w, x):
        return (activation(jnp.einsum("mk,kih->mih", x, w), ("silu", "linear")) ** 2).sum()

    step = jax.value_and_grad(loss)
    placed = put(w, mesh, P(None, None, "t")), put(x, mesh, P("d"))
    assert communication(step, *placed) == {"all-reduce"}
    for got, want in zip(jax.jit(step)(*placed), step(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_partial_sums_are_added_before_they_are_rounded():
    """Sums of bfloat16 gradients on eight devices. Each partial sum would round coarsely."""
    mesh = mesh_of()
    dz = np.ones((8, 64), np.float32)
    dz[:, :33] = 1.0078125  # the next bfloat16 after 1
    x = jnp.ones((8, 64, 1, 3), jnp.bfloat16)
    dz = jnp.asarray(np.repeat(dz[..., None], 3, -1), jnp.bfloat16)
    exact = np.float64(np.asarray(dz, np.float64)).sum((0, 1))
    want = np.broadcast_to(exact.astype(jnp.bfloat16), (1, 3))
    xs, dzs = put(x, mesh, P(("d", "t"))), put(dz, mesh, P(("d", "t")))
    back = jax.jit(lambda dz, x: quantize_dact_dbias(dz, x, ("x",)))
    np.testing.assert_array_equal(np.asarray(back(dz, x)[1]), want)
    np.testing.assert_array_equal(np.asarray(back(dzs, xs)[1]), want)


def test_parts_of_unequal_size_are_never_summed_with_their_padding():
    mesh = mesh_of()
    x, dz = numbers((16, 1, 6)), numbers((16, 6), seed=1)
    xs, dzs = put(x, mesh, P("d")), put(dz, mesh, P("d"))
    key = ("x + 1e6",)  # far from 0 for padding

    @jax.jit
    def run(dz, x):
        found = quantize_dact_dbias(dz[:10], x[:10], ("x",), **STRICT)
        return found, act_lu(x[:10] - 2e6, key, output_amax_when_no_scaling=True, **STRICT)

    (dx, dbias), (y, amax) = run(dzs, xs)
    (want_dx, want), (want_y, want_amax) = run(dz, x)
    same((dx, y, amax), (want_dx, want_y, want_amax))
    np.testing.assert_allclose(dbias, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", list(QuantizeLayout), ids=lambda v: v.name)
@pytest.mark.parametrize("mode", QUANTIZERS)
def test_quantised_results_are_those_of_the_whole(mode, layout):
    mesh = mesh_of()
    x, dz = numbers((8, 4, 2, 32)), numbers((8, 4, 32), seed=1)
    x = x.at[5, 3].multiply(16)  # one shard has the largest value
    q = QUANTIZERS[mode](layout)

    @jax.jit
    def run(dz, x, q):
        y = act_lu(x, KEYS[1], q, **STRICT)
        dx, dbias = quantize_dact_dbias(dz, x, KEYS[1], True, q, **STRICT)
        return y, dx, y.dequantize(), dbias

    want = run(dz, x, q)
    for spec in (P("d"), P("d", "t"), P("d", None, None, "t")):
        rows = P(*spec[:2], *spec[3:])
        got = run(put(dz, mesh, rows), put(x, mesh, spec), q)
        same(got[:3], want[:3])
        np.testing.assert_allclose(got[3], want[3], rtol=1e-5, atol=1e-5)
        if mode == "delayed" and layout.has_rowwise:
            assert is_split(got[0].data, mesh, rows) and is_split(got[2], mesh, rows)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_the_amax_of_a_gradient_is_the_largest(kind):
    """The cotangent of a DelayedScaleQuantizer that all shards share."""
    mesh = mesh_of(kind)
    x = numbers((16, 1, 6)).at[9].multiply(8)

    def loss(q, x):
        return activation(x, ("gelu",), q, **STRICT).sum()

    q = DelayedScaleQuantizer(amax_history=jnp.zeros(4))
    want = jax.grad(loss)(q, x).amax_history
    assert want[0] == jnp.abs(act_lu(x, ("gelu",))).max()
    with jax.set_mesh(mesh):
        xs = put(x, mesh, P("d"))
        same(jax.jit(jax.grad(loss))(q, xs).amax_history, want)
        inside = jax.shard_map(jax.grad(loss), in_specs=(P(), P("d")), out_specs=P())
        same(jax.jit(inside)(q, xs).amax_history, want)
        sharded = jax.shard_map(
            lambda q, x: jax.lax.psum(loss(q, x), "d"), in_specs=(P(), P("d")), out_specs=P()
        )
        same(jax.jit(jax.grad(sharded))(q, xs).amax_history, want)


WAYS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: jax.jit(
        lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), jnp.float32(0), x[None])[0]
    ),
    "vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(x).sum()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_gradients_under_transformations(kind, way):
    mesh = mesh_of(kind)
    x = numbers((8, 8, 2, 6))
    f = WAYS[way](value)
    if way == "scan" and kind is AxisType.Explicit:
        f = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, value(x)), 0, x[None])[1].sum())
    want = jax.grad(f)(x)
    with jax.set_mesh(mesh):
        for spec in (P("d"), P(None, "d"), P("d", "t"), P("d", None, None, "t")):
            if way == "vmap" and kind is AxisType.Explicit and spec[0] is None:
                continue
            same(jax.grad(f)(put(x, mesh, spec)), want)


def test_vmap_inside_jit_is_split():
    mesh = mesh_of()
    x, dz = numbers((8, 8, 2, 6)), numbers((8, 8, 6), seed=1)
    xs, dzs = put(x, mesh, P("d")), put(dz, mesh, P("d"))
    forward = jax.vmap(lambda x: act_lu(x, KEYS[1], **STRICT))
    assert communication(forward, xs) == set()
    assert is_split(jax.jit(forward)(xs), mesh, P("d"))
    same(jax.jit(forward)(xs), forward(x))
    back = jax.vmap(lambda dz, x: quantize_dact_dbias(dz, x, KEYS[1], **STRICT), (0, None))
    same(jax.jit(back)(dzs, x[0]), back(dz, x[0]))
    across = jax.vmap(lambda x: act_lu(x, KEYS[1], **STRICT), 1, 1)
    assert communication(across, xs) == set()
    same(jax.jit(across)(xs), forward(x))


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("d", "t"), P(None, None, "t")], ids=str)
def test_explicit_meshes_keep_their_types(spec):
    mesh = mesh_of(AxisType.Explicit)
    x, dz = numbers((8, 8, 2, 6)), numbers((8, 8, 6), seed=1)
    rows = P(*spec[:2])
    seen = []

    def run(dz, x):
        y, pull = jax.vjp(lambda x: activation(x, KEYS[1], **STRICT), x)
        seen.append((jax.typeof(y).sharding.spec, jax.typeof(pull(dz)[0]).sharding.spec))
        dx, dbias = quantize_dact_dbias(dz, x, KEYS[1], **STRICT)
        return y, pull(dz)[0], dx, dbias, act_lu(x, KEYS[1], CurrentScaleQuantizer(), **STRICT)

    want = run(dz, x)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(put(dz, mesh, rows), put(x, mesh, spec))
        eager = run(put(dz, mesh, rows), put(x, mesh, spec))
    for found in (got, eager):
        same(found[:3], want[:3])
        same(found[4], want[4])
        np.testing.assert_allclose(found[3], want[3], rtol=1e-5, atol=1e-5)
    padded = [P(*s, *(None,) * (n - len(s))) for s, n in ((rows, 3), (spec, 4))]
    assert [tuple(s) for s in seen[1]] == [tuple(s) for s in padded]
    same(act_lu(put(x, mesh, spec), KEYS[1], **STRICT), want[0])  # no mesh is set


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [{"d", "t"}, {"d"}], ids=["manual", "partly manual"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_inside_shard_map(kind, axes, check_vma):
    mesh = mesh_of(kind)
    x, dz = numbers((8, 8, 2, 6)), numbers((8, 8, 6), seed=1)
    spec = P("d", "t") if "t" in axes else P("d")
    shard = functools.partial(
        jax.shard_map, mesh=mesh, axis_names=axes, check_vma=check_vma, in_specs=spec
    )

    def both(dz, x):
        dx, dbias = quantize_dact_dbias(dz, x, KEYS[1], **STRICT)
        q = CurrentScaleQuantizer(q_layout=QuantizeLayout.ROWWISE_COLWISE)
        return dx, jax.lax.psum(dbias, tuple(axes)), act_lu(x, KEYS[1], q, **STRICT).dequantize()

    want = jax.grad(value)(x)
    with jax.set_mesh(mesh):
        for placed in (P(), P("d"), P("d", "t"), P(None, None, None, "t")):
            if kind is AxisType.Explicit and tuple(placed)[: len(spec)] != tuple(spec):
                continue  # such a shard_map requires matching shardings
            xs = put(x, mesh, placed)
            same(jax.jit(shard(jax.grad(value), out_specs=spec))(xs), want)
            total = shard(lambda x: jax.lax.psum(value(x), tuple(axes)), out_specs=P())
            same(jax.jit(jax.grad(total))(xs), want)
            mapped = shard(lambda x: jax.vmap(jax.grad(value))(x), out_specs=spec)
            same(jax.jit(mapped)(xs), want)
            again = shard(jax.grad(jax.checkpoint(value)), out_specs=spec)
            same(jax.jit(again)(xs), want)
            dzs = put(dz, mesh, P(*placed[:2]))
            parts = shard(both, out_specs=(spec, P(), spec))
            dx, dbias, _ = jax.jit(parts)(dzs, xs)
            same(dx, dact_lu(dz, x, KEYS[1], **STRICT))
            sums = quantize_dact_dbias(dz, x, KEYS[1], **STRICT)[1]
            np.testing.assert_allclose(dbias, sums, rtol=1e-5, atol=1e-5)


def test_results_vary_as_operands_do():
    """A result that differs between devices must have a type that varies over devices."""
    mesh = mesh_of()
    x = numbers((8, 1, 6))
    wrong = jax.shard_map(lambda x: act_lu(x, ("gelu",)), mesh=mesh, in_specs=P("d"), out_specs=P())
    with pytest.raises(ValueError, match="replication|varying"):
        wrong(x)
    q = DelayedScaleQuantizer()
    wrong = jax.shard_map(
        lambda x: act_lu(x, ("gelu",), q).amax, mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    with pytest.raises(ValueError, match="replication|varying"):
        wrong(x)
    # Replicated operands combined with varying ones.
    mixed = jax.shard_map(
        lambda dz, x: dact_lu(dz, x, ("gelu",), **STRICT),
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    )
    dz = numbers((8, 6), seed=1)
    want = dact_lu(dz, jnp.concatenate([x[:2]] * 4), ("gelu",), **STRICT)
    same(mixed(dz, x[:2]), want)


def test_nothing_to_do():
    mesh = mesh_of()
    for shape in ((0, 1, 5), (8, 1, 0)):
        x = put(jnp.zeros(shape), mesh, P("d"))
        run = jax.jit(lambda x: quantize_dact_dbias(x[:, 0], x, ("gelu",)))
        dx, dbias = run(x)
        assert dx.shape == shape and dbias.shape == shape[1:] and not dbias.any()


def test_one_device_has_one_call():
    x, dz = numbers((8, 8, 2, 6)), numbers((8, 8, 6), seed=1)
    for run, arrays in (
        (lambda x: activation(x, KEYS[1]), (x,)),
        (lambda dz, x: quantize_dact_dbias(dz, x, KEYS[1]), (dz, x)),
        (lambda x: act_lu(x, KEYS[1], CurrentScaleQuantizer()).data, (x,)),
    ):
        text = jax.jit(run).lower(*arrays).compile().as_text()
        entry = text[text.index("ENTRY") :]
        found = set(re.findall(r" ([a-z][a-z-]*)\(", entry))
        extra = {"copy"} if "scaling_mode = 2" in entry else set()  # copy of the initial amax
        assert (
            found <= {"parameter", "constant", "custom-call", "get-tuple-element", "tuple"} | extra
        )
        assert entry.count(" custom-call(") == 1


def test_second_derivatives_of_sharded_arrays_are_refused():
    mesh = mesh_of()
    x = put(numbers((8, 1, 6)), mesh, P("d"))
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.jit(jax.grad(lambda x: jax.grad(lambda x: activation(x, ("gelu",)).sum())(x).sum()))(x)
    with pytest.raises(NotImplementedError, match="tenon.jax.activation"):
        jax.jit(jax.grad(lambda x: act_lu(x, ("gelu",)).sum()))(x)
