"""Tests of tenon.jax with quantizers: every mode, layout and dtype has the bits of the C ABI."""

import ctypes
import functools
import itertools
import os

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from tenon import _lib  # noqa: E402
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
LAYOUTS = list(QuantizeLayout)
# The C ABI runs on the CPU. A GPU has the same bits only in strict precision.
PRECISION = "strict" if os.environ.get("TENON_TEST_DEVICE") == "cuda" else "native"
act_lu, activation, quantize_dact_dbias = (
    functools.partial(f, precision=PRECISION) for f in (act_lu, activation, quantize_dact_dbias)
)
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
MODES = {
    "delayed": lambda d, q: DelayedScaleQuantizer(d, q, scale=jnp.full(1, 3.7, jnp.float32)),
    "current": CurrentScaleQuantizer,
    "current, powers": functools.partial(
        CurrentScaleQuantizer, force_pow_2_scales=True, amax_epsilon=5.0
    ),
    "mxfp8": BlockScaleQuantizer,
    "mxfp8, swizzled": functools.partial(BlockScaleQuantizer, swizzled=True),
    "block1x128": Float8BlockScaleQuantizer,
    "block128x128": functools.partial(Float8BlockScaleQuantizer, block_scaling_dim=2),
    "block1x128, exact": functools.partial(
        Float8BlockScaleQuantizer, force_pow_2_scales=False, amax_epsilon=0.5
    ),
}
KEYS = {("gelu",): "gelu", ("silu", "linear"): "gated(silu)"}


def bits(a):
    """The bits as integers, because NaN is not equal to itself."""
    a = np.asarray(a)
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize])


def numbers(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray((np.random.default_rng(seed).normal(size=shape) * 2).astype(dtype))


def code(a):
    names = {"float32": 0, "float16": 1, "bfloat16": 2}
    names |= {"float8_e4m3fn": 3, "float8_e5m2": 4, "float8_e8m0fnu": 5}
    return names[a.dtype.name]


class Reference:
    """One call of the C ABI on NumPy arrays. Keeps the memory of its pointers alive."""

    def __init__(self):
        self.kept = []

    def view(self, a, rows, cols):
        v = _lib.View(a.ctypes.data, rows, cols, cols, code(a))
        self.kept += [a, v]
        return ctypes.pointer(v)

    def encoded(self, q, rows, cols):
        """The results for a tensor of rows x cols, and their tenon_tensor."""
        t = _lib.Tensor(scaling=q.scaling.encode(), dtype=3 if q.q_dtype == FP8[0] else 4)
        attributes = q.attributes()
        t.power_of_two = attributes.get("power_of_two", 0)
        t.eps = attributes.get("eps", 0)
        t.swizzled = attributes.get("swizzled", False)
        out = {}
        for columnwise, prefix in ((False, ""), (True, "columnwise_")):
            if not (q.q_layout.has_colwise if columnwise else q.q_layout.has_rowwise):
                continue
            data, scales = (ctypes.c_int64 * 2)(), (ctypes.c_int64 * 2)()
            _lib.check(
                _lib.lib.tenon_encoding_shape(t.scaling, rows, cols, columnwise, data, scales)
            )
            for name, shape, dtype in (
                ("data", data, q.q_dtype),
                ("scale_inv", scales, q.scale_dtype),
            ):
                out[prefix + name] = np.empty(tuple(shape), dtype)
                setattr(t, prefix + name, self.view(out[prefix + name], *shape))
        if q.scaling in ("delayed", "current"):
            out["amax"] = np.zeros(1, np.float32)
            t.amax = self.view(out["amax"], 1, 1)
        if q.scaling == "delayed":
            t.scale = self.view(np.asarray(q.scale), 1, 1)
        self.kept.append(t)
        return out, ctypes.pointer(t)


def forward(text, x, q):
    x = np.asarray(x)
    rows, inputs, cols = np.prod(x.shape[:-2], dtype=int), *x.shape[-2:]
    r = Reference()
    out, y = r.encoded(q, rows, cols)
    args = _lib.ForwardArgs(x=r.view(x, rows, inputs * cols), y_encoded=y)
    _lib.check(_lib.lib.tenon_forward(text.encode(), args, _lib.options(PRECISION)))
    return out


def backward(text, dz, x, q):
    dz, x = np.asarray(dz), np.asarray(x)
    rows, inputs, cols = np.prod(x.shape[:-2], dtype=int), *x.shape[-2:]
    r = Reference()
    out, dx = r.encoded(q, rows, inputs * cols)
    out["dbias"] = np.empty((inputs, cols), x.dtype)
    args = _lib.BackwardArgs(
        grad=r.view(dz, rows, cols),
        x=r.view(x, rows, inputs * cols),
        dx_encoded=dx,
        dbias=r.view(out["dbias"], 1, inputs * cols),
    )
    _lib.check(_lib.lib.tenon_backward(text.encode(), args, _lib.options(PRECISION)))
    return out


def same(got, want):
    for name, value in want.items():
        a = getattr(got, name)
        assert np.asarray(a).dtype == value.dtype
        np.testing.assert_array_equal(bits(a).reshape(-1), bits(value).reshape(-1), name)
    for name in ("data", "scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
        assert (getattr(got, name) is None) == (name not in want), name


@functools.cache  # JAX compiles once for equal arguments
def both_passes(key):
    def run(x, dz, q):
        return act_lu(x, key, q), quantize_dact_dbias(dz, x, key, True, q)

    return jax.jit(run)


@pytest.mark.compiles
@pytest.mark.parametrize("key", KEYS, ids="+".join)
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_the_c_abi(mode, key):
    inputs = len(key)
    dtypes = itertools.cycle((jnp.float32, jnp.bfloat16, jnp.float16))
    for layout, fp8 in itertools.product(LAYOUTS, FP8):
        q = MODES[mode](fp8, layout)
        dtype = next(dtypes)
        x, dz = numbers((2, 67, inputs, 45), dtype), numbers((2, 67, 45), dtype, 1)
        y, (dx, dbias) = both_passes(key)(x, dz, q)
        want = backward(KEYS[key], dz, x, q)
        np.testing.assert_array_equal(bits(dbias), bits(want.pop("dbias")))
        same(y, forward(KEYS[key], x, q))
        same(dx, want)
        assert y.shape == (2, 67, 45) and dx.shape == x.shape
        if layout is QuantizeLayout.ROWWISE_COLWISE and mode not in ("mxfp8", "mxfp8, swizzled"):
            assert y.columnwise_data.shape == (45, 2, 67)
            assert dx.columnwise_data.shape == (inputs, 45, 2, 67)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", MODES)
def test_dequantize(mode):
    x = numbers((3, 40, 1, 50), jnp.bfloat16)
    exact = np.asarray(act_lu(x.astype(jnp.float32), ("gelu",)))
    for layout in (QuantizeLayout.ROWWISE, QuantizeLayout.COLWISE):
        y = act_lu(x, ("gelu",), MODES[mode](FP8[0], layout))
        assert y.dequantize().dtype == jnp.bfloat16
        got = np.asarray(y.dequantize(jnp.float32))
        # Half a step of e4m3, and its smallest value with one scale for the tensor.
        np.testing.assert_allclose(got, exact, rtol=2**-4 + 2**-8, atol=5e-3)
        if mode in ("delayed", "current"):
            data = y.data if layout == 0 else jnp.moveaxis(y.columnwise_data, 0, -1)
            scale = y.scale_inv if layout == 0 else y.columnwise_scale_inv
            np.testing.assert_array_equal(got, np.asarray(data, np.float32) * np.asarray(scale))


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["delayed", "current", "mxfp8", "block1x128", "block128x128"])
def test_vmap_equals_a_loop(mode):
    x = numbers((2, 3, 37, 2, 33))
    x = x.at[1].multiply(16)
    dz = numbers((3, 37, 33), seed=1)
    q = MODES[mode](FP8[0], QuantizeLayout.ROWWISE_COLWISE)
    key = ("silu", "linear")
    run = both_passes(key)
    want = jax.tree.map(lambda *a: np.stack(a), *(run(x[i], dz, q) for i in range(2)))
    for axis in (0, 1, 2, 3, 4) if mode == "mxfp8" else (4,):
        got = jax.vmap(run, (axis, None, None))(jnp.moveaxis(x, 0, axis), dz, q)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, want)
    back = got[0].dequantize()
    np.testing.assert_array_equal(back[1], jax.tree.map(lambda a: a[1], want[0]).dequantize())
    if mode == "delayed":
        scales = jnp.array([[1.0], [8.0]])
        got = jax.vmap(lambda s: act_lu(x[0], key, DelayedScaleQuantizer(scale=s)))(scales)
        for i, s in enumerate(scales):
            one = act_lu(x[0], key, DelayedScaleQuantizer(scale=s))
            np.testing.assert_array_equal(bits(got.data[i]), bits(one.data))
            np.testing.assert_array_equal(got.scale_inv[i], one.scale_inv)


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(0, 1, 5), (3, 1, 0), (0, 1, 0), (1, 1, 1)], ids=str)
def test_nothing_to_do(shape):
    x, dz = jnp.zeros(shape), jnp.zeros(shape[:-2] + shape[-1:])
    for make in MODES.values():
        q = make(FP8[0], QuantizeLayout.ROWWISE_COLWISE)
        same(act_lu(x, ("gelu",), q), forward("gelu", x, q))
        dx, dbias = quantize_dact_dbias(dz, x, ("gelu",), True, q)
        assert dx.shape == shape and dbias.shape == shape[-2:]
        assert act_lu(x, ("gelu",), q).dequantize().shape == dz.shape


def test_gradients_pass_straight_through():
    x = numbers((4, 1, 16))
    plain = jax.grad(lambda x: activation(x, ("gelu",)).sum())(x)
    for make in MODES.values():
        q = make(FP8[0], QuantizeLayout.ROWWISE)
        y, pull = jax.vjp(lambda x, q=q: activation(x, ("gelu",), q), x)
        np.testing.assert_array_equal(y, act_lu(x, ("gelu",), q).dequantize())
        np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], plain)
    # The amax is returned in the cotangent of the quantizer.
    q = DelayedScaleQuantizer()
    dq = jax.jit(jax.grad(lambda q, x: activation(x, ("gelu",), q).sum()))(q, x)
    assert dq.amax_history[0] == act_lu(x, ("gelu",), q).amax[0]
    assert not dq.amax_history[1:].any() and not dq.scale.any()


def test_quantize_alone():
    x = numbers((5, 70))
    for make in MODES.values():
        q = make(FP8[1], QuantizeLayout.ROWWISE)
        same(q.quantize(x), forward("x", x[:, None], q))


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_update(length, algo):
    rng = np.random.default_rng(length)
    step = jax.jit(lambda q, amax: q.update(amax))
    q = DelayedScaleQuantizer(
        FP8[1], amax_history=jnp.zeros(length), margin=1, amax_compute_algo=algo
    )
    history, scale = np.zeros((length, 1), np.float32), np.ones((1, 1), np.float32)
    for amax in (3.3, 0.0, 17.25, np.inf, 1e-3, np.nan, *rng.lognormal(size=8) * 10):
        r = Reference()
        history[0, 0] = amax  # an update sets it to 0
        views = r.view(history, length, 1), r.view(scale, 1, 1)
        _lib.check(_lib.lib.tenon_delayed_update(*views, 4, 1, algo == "most_recent", None))
        q = step(q, jnp.full(1, amax, jnp.float32))
        np.testing.assert_array_equal(q.amax_history, history[:, 0])
        np.testing.assert_array_equal(bits(q.scale), bits(scale[0]))
    # Slot 0 also counts, and so do several values at once.
    q = DelayedScaleQuantizer(amax_history=jnp.array([2.0, 0, 0, 0]))
    assert q.update().scale == 224 and q.update(jnp.array([1.0, 4.0])).scale == 112


def test_delayed_quantizer_in_a_scan():
    xs = numbers((6, 8, 1, 16)) * jnp.arange(1, 7)[:, None, None, None]

    def step(q, x):
        y = act_lu(x, ("gelu",), q)
        return q.update(y.amax), (y.scale_inv[0], y.amax[0])

    q, (scale_inv, amax) = jax.lax.scan(step, DelayedScaleQuantizer(), xs)
    want = [np.abs(act_lu(x, ("gelu",))).max() for x in xs]
    # FP8 results are native: gelu may err by 2^-12.5. Those in f32 are strict.
    np.testing.assert_allclose(amax, want, rtol=2**-12.5)
    # Each step uses the scale of the steps before it.
    top = np.maximum.accumulate(np.float32(amax))
    np.testing.assert_allclose(scale_inv, [1, *(top[:-1] / 448)], rtol=1e-6)
    assert q.scale == np.float32(448) / top[-1]


def test_pytrees():
    for make in MODES.values():
        q = make("e5m2", 2)
        leaves, tree = jax.tree.flatten(q)
        assert jax.tree.unflatten(tree, leaves) == q if not leaves else len(leaves) == 2
        assert q.q_dtype == FP8[1] and q.q_layout is QuantizeLayout.ROWWISE_COLWISE
        assert hash(tree) == hash(jax.tree.structure(q))
    y = jax.jit(lambda x: act_lu(x, ("gelu",), BlockScaleQuantizer()))(numbers((4, 1, 8)))
    assert jax.tree.structure(y) == jax.tree.structure(jax.tree.map(lambda a: a, y))
    assert y.scaling == "mxfp8" and y.columnwise_data is None and y.shape == (4, 8)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: CurrentScaleQuantizer(jnp.float16), TypeError, "q_dtype.*float8_e4m3fn"),
        (lambda: CurrentScaleQuantizer("e3m4"), TypeError, "q_dtype = 'e3m4'"),
        (lambda: BlockScaleQuantizer(q_layout=3), ValueError, "q_layout = 3.*ROWWISE"),
        (lambda: Float8BlockScaleQuantizer(block_scaling_dim=3), ValueError, "1x128"),
        (lambda: CurrentScaleQuantizer(amax_epsilon=-1.0), ValueError, "amax_epsilon = -1"),
        (lambda: DelayedScaleQuantizer(amax_compute_algo="last"), ValueError, "most_recent"),
        (lambda: DelayedScaleQuantizer(margin=0.5), ValueError, "whole number"),
        (
            lambda: act_lu(
                jnp.ones((2, 1, 3)), ("gelu",), DelayedScaleQuantizer(scale=jnp.ones(2))
            ),
            ValueError,
            r"float32\[1\]",
        ),
        (lambda: DelayedScaleQuantizer(amax_history=jnp.zeros((2, 2))).update(), ValueError, "L"),
        (
            lambda: dact_lu(jnp.ones((2, 3)), jnp.ones((2, 1, 3)), ("gelu",), FP8[0]),
            TypeError,
            "quantizer is a",
        ),
    ],
)
def test_mistakes_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()
