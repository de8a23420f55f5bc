"""Tests of tenon.jax without quantisation: values and gradients against plain JAX in float64."""

import functools
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import tenon  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from tenon.jax import act_lu, activation, dact_lu, quantize_dact_dbias  # noqa: E402
from tenon.jax.cpp_extensions.activation import (  # noqa: E402
    ActLuPrimitive,
    AmaxScope,
    DActLuDBiasQuantizePrimitive,
)

# These tests mostly compile, so LLVM optimisations would only cost time.
jax.config.update("jax_disable_most_optimizations", True)
sigmoid = jax.nn.sigmoid
UNARY = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "hardswish": jax.nn.hard_swish,
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.01),
    "elu": jax.nn.elu,
}
TE_UNARY = ("gelu", "silu", "relu", "quick_gelu", "squared_relu")


def gated(f):
    return lambda a, b: f(a) * b


def clamped(limit=7.0, alpha=1.702, offset=1.0):
    def f(a, b):
        a = jnp.minimum(a, limit)
        return a * sigmoid(alpha * a) * (jnp.clip(b, -limit, limit) + offset)

    return f


# Key -> the same function in plain JAX.
REFERENCES = {(name,): f for name, f in UNARY.items()}
REFERENCES |= {(name, "linear"): gated(UNARY[name]) for name in (*TE_UNARY, "mish", "elu")}
REFERENCES |= {
    ("sigmoid", "linear"): gated(sigmoid),
    ("clamped_silu", "clamped_linear"): clamped(),
    ("swiglu",): gated(jax.nn.silu),
    ("situglu",): lambda a, b: 4 * jnp.tanh(a / 4) * sigmoid(a) * 25 * jnp.tanh(b / 25),
    ("x*sigmoid(2*x)",): lambda x: x * sigmoid(2 * x),
    ("x*sigmoid(beta*x); beta = 3", "linear"): gated(lambda x: x * sigmoid(3 * x)),
    ("tanh(a)*exp(b)",): lambda a, b: jnp.tanh(a) * jnp.exp(b),
}
# The relative error of one rounding, plus the errors of the formula functions.
TOLERANCE = {jnp.float32: 3e-6, jnp.float16: 1.5e-3, jnp.bfloat16: 1.2e-2}


def numbers(shape, dtype=jnp.float32, seed=0):
    # Away from 0, where relu and similar functions have no derivative.
    x = np.random.default_rng(seed).normal(size=shape) * 2
    return jnp.asarray(np.where(np.abs(x) < 0.05, 0.3, x).astype(dtype))


@functools.lru_cache
def plain(f):
    """f of x [M, inputs, H] and its gradient, compiled once for all dtypes."""

    def both(x, dz):
        y, pull = jax.vjp(lambda x: f(*(x[:, i] for i in range(x.shape[1]))), x)
        return y, pull(dz)[0]

    return jax.jit(both)


def reference(f, x, dz=None):
    """f of x [..., inputs, H] in float64, and the gradient for dz."""
    shape = x.shape[:-2] + x.shape[-1:]
    with jax.enable_x64(True):
        x64 = np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])
        dz64 = np.zeros(shape) if dz is None else np.asarray(dz, np.float64)
        y, dx = plain(f)(x64, dz64.reshape(-1, x.shape[-1]))
    y, dx = np.asarray(y).reshape(shape), np.asarray(dx).reshape(x.shape)
    return y if dz is None else (y, dx)


def close(got, want, dtype):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.compiles
@pytest.mark.parametrize("key", REFERENCES, ids="+".join)
def test_values_and_gradients(key):
    f = REFERENCES[key]
    inputs = 2 if len(key) == 2 or key[0] in ("swiglu", "situglu", "tanh(a)*exp(b)") else 1

    @jax.jit
    def run(x, dz):
        y, pull = jax.vjp(lambda x: activation(x, key), x)
        return (y, *pull(dz), *quantize_dact_dbias(dz, x, key, True))

    for dtype, lead in ((jnp.float32, (6,)), (jnp.bfloat16, (2, 3)), (jnp.float16, (1, 2, 3))):
        x = numbers((*lead, inputs, 7), dtype)
        dz = numbers((*lead, 7), dtype, 1)
        y, dx = reference(f, x, dz)
        got, grad, both, dbias = run(x, dz)
        assert got.dtype == dtype and grad.dtype == dtype and grad.shape == x.shape
        close(got, y, dtype)
        close(grad, dx, dtype)
        np.testing.assert_array_equal(both, grad)
        assert dbias.shape == (inputs, 7) and dbias.dtype == dtype
        close(dbias, dx.reshape(-1, inputs, 7).sum(0), dtype)
    # Without jit, and one row.
    np.testing.assert_array_equal(act_lu(x[0, 0, 0], key), got[0, 0, 0])


def test_the_parts_alone():
    x, dz = numbers((2, 3, 2, 7)), numbers((2, 3, 7), seed=1)
    y, pull = jax.vjp(lambda x: activation(x, ("silu", "linear")), x)
    np.testing.assert_array_equal(act_lu(x, ("silu", "linear")), y)
    np.testing.assert_array_equal(dact_lu(dz, x, ("silu", "linear")), pull(dz)[0])
    dx, dbias = quantize_dact_dbias(dz, x, ("silu", "linear"), False)
    np.testing.assert_array_equal(dx, pull(dz)[0])
    assert dbias is None


def test_names_of_one_activation_are_one():
    x = numbers((3, 2, 5))
    for pair, name in (
        (("gelu", "linear"), "geglu"),
        (("sigmoid", "linear"), "glu"),
        (("quick_gelu", "linear"), "qgeglu"),
    ):
        np.testing.assert_array_equal(act_lu(x, pair), act_lu(x, (name,)))
        np.testing.assert_array_equal(act_lu(x, pair), act_lu(x, name))


def test_functions_and_definitions_of_ones_own():
    x = numbers((4, 1, 9))
    want = reference(lambda x: x * sigmoid(1.5 * x), x)
    close(activation(x, (lambda x: x * tenon.sigmoid(1.5 * x),)), want, jnp.float32)
    close(activation(x, tenon.activation(lambda x: x * tenon.sigmoid(1.5 * x))), want, jnp.float32)
    tenon.define("jax_test_act", "x*sigmoid(beta*x); beta = 1")
    close(activation(x, ("jax_test_act",), act_params={"beta": 1.5}), want, jnp.float32)
    x2 = numbers((4, 2, 9))
    want = reference(gated(lambda x: x * sigmoid(1.5 * x)), x2)
    pair = (lambda x: x * tenon.sigmoid(1.5 * x), "linear")
    close(activation(x2, pair), want, jnp.float32)


def test_parameters():
    x, key = numbers((6, 2, 8)), ("clamped_silu", "clamped_linear")
    want = reference(clamped(0.75, 1.702, 0.5), x)
    for params in (
        {"limit": 0.75, "glu_linear_offset": 0.5},
        {"limit": 0.75, "offset": 0.5},
        (0.75, 1.702, 0.5),
        np.array([0.75, 1.702, 0.5]),
    ):
        close(act_lu(x, key, act_params=params), want, jnp.float32)
        close(jax.jit(lambda x: activation(x, key, act_params=params))(x), want, jnp.float32)  # noqa: B023
    # Equal parameter values must stay separate parameters.
    close(act_lu(x, key, act_params=(1, 1, 1)), reference(clamped(1, 1, 1), x), jnp.float32)


@pytest.mark.parametrize("shape", [(0, 1, 5), (3, 1, 0), (0, 1, 0), (1, 1), (2, 0, 1, 3)], ids=str)
def test_nothing_to_do(shape):
    x = jnp.zeros(shape)
    y = activation(x, ("gelu",))
    assert y.shape == shape[:-2] + shape[-1:]
    dx, dbias = quantize_dact_dbias(jnp.ones(y.shape), x, ("gelu",))
    assert dx.shape == shape and dbias.shape == shape[-2:]
    if 0 in shape[:-2]:
        np.testing.assert_array_equal(dbias, 0)


def test_amax_without_scaling():
    x = numbers((3, 4, 1, 33))
    y, amax = act_lu(x, ("gelu",), output_amax_when_no_scaling=True)
    assert amax.shape == (1,) and amax[0] == jnp.abs(y).max()
    dx, amax = dact_lu(y, x, ("gelu",), output_amax_when_no_scaling=True)
    assert amax[0] == jnp.abs(dx).max()


def test_mixed_dtypes_and_strict_precision():
    x, dz = numbers((3, 1, 8), jnp.bfloat16), numbers((3, 8))
    dx = dact_lu(dz, x, ("silu",))
    assert dx.dtype == jnp.bfloat16
    close(dx, reference(jax.nn.silu, x, dz)[1], jnp.bfloat16)
    strict = act_lu(x, ("silu",), precision="strict")
    np.testing.assert_array_equal(strict, tenon.silu(np.asarray(x)[:, 0], precision="strict"))


def test_transformations_compose():
    x = numbers((4, 2, 6))
    f = jax.jit(lambda x: activation(x, ("silu", "linear")))
    np.testing.assert_array_equal(f(x), act_lu(x, ("silu", "linear")))
    check_grads(f, (x,), modes=["rev"], order=1, rtol=1e-2, atol=1e-2)
    check_grads(lambda x: activation(x, ("gelu",)), (x[:, :1],), modes=["rev"], order=1, rtol=1e-2)
    want = jax.grad(lambda x: f(x).sum())(x)
    _, rows = jax.lax.scan(lambda c, x: (c, jax.grad(lambda x: f(x).sum())(x)), 0, x)
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x), want)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: f(x).sum()))(x), want)
    # Another, non-differentiable call does not prevent differentiation.
    assert jax.grad(lambda s: (s * act_lu(x, ("gelu", "linear"))).sum())(1.0) != 0


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_vmap_equals_a_loop(axis):
    x = numbers((3, 4, 2, 5))
    x = jnp.moveaxis(jnp.concatenate([x[None], 2 * x[None]]), 0, axis)
    dz = numbers((2, 3, 4, 5), seed=2)
    batch = [jnp.take(x, i, axis) for i in range(2)]

    def f(x):
        return act_lu(x, ("gelu", "linear"))

    np.testing.assert_array_equal(jax.vmap(f, axis)(x), jnp.stack([f(b) for b in batch]))

    def back(dz, x):
        return quantize_dact_dbias(dz, x, ("gelu", "linear"), True)

    for got, want in (
        (jax.vmap(back, (0, axis))(dz, x), [back(d, b) for d, b in zip(dz, batch, strict=True)]),
        (jax.vmap(back, (None, axis))(dz[0], x), [back(dz[0], b) for b in batch]),
        (jax.vmap(back, (0, None))(dz, batch[0]), [back(d, batch[0]) for d in dz]),
    ):
        np.testing.assert_array_equal(got[0], jnp.stack([w[0] for w in want]))
        np.testing.assert_array_equal(got[1], jnp.stack([w[1] for w in want]))
    got = jax.vmap(lambda d, x: dact_lu(d, x, ("gelu", "linear")), (0, axis))(dz, x)
    want = jnp.stack([dact_lu(d, b, ("gelu", "linear")) for d, b in zip(dz, batch, strict=True)])
    np.testing.assert_array_equal(got, want)
    nested = jax.vmap(jax.vmap(lambda x: activation(x, ("relu", "linear"))))(batch[0])
    np.testing.assert_array_equal(nested, activation(batch[0], ("relu", "linear")))
    got = jax.vmap(lambda x: act_lu(x, ("gelu", "linear"), output_amax_when_no_scaling=True), axis)
    want = [jnp.abs(f(b)).max() for b in batch]
    np.testing.assert_array_equal(got(x)[1][:, 0], jnp.stack(want))


def test_a_second_derivative_is_refused():
    x = numbers((2, 1, 3))

    def first(x):
        return jax.grad(lambda x: activation(x, ("gelu",)).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.grad(first)(x)
    with pytest.raises(NotImplementedError, match="tenon.jax.activation"):
        jax.grad(lambda x: act_lu(x, ("gelu",)).sum())(x)
    with pytest.raises(TypeError):
        jax.jvp(lambda x: activation(x, ("gelu",)), (x,), (x,))


X1, X2 = jnp.ones((3, 1, 4)), jnp.ones((3, 2, 4))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: act_lu(X2, ("gelu",)), ValueError, r"act_lu: x is \(3, 2, 4\).*\[..., 1, H\]"),
        (lambda: act_lu(X1, ("gelu", "linear")), ValueError, r"inputs.*jnp.stack"),
        (lambda: act_lu(jnp.ones(4), ("gelu",)), ValueError, r"\(4,\)"),
        (lambda: act_lu(X1, ("gelux",)), ValueError, "did you mean 'gelu'"),
        (lambda: act_lu(X1, ("gelu", "tanh")), ValueError, "formula of a and b"),
        (lambda: act_lu(X1, ("linear", "gelu")), ValueError, "a pair is"),
        (lambda: act_lu(X1, ("gelu", "linear", "x")), ValueError, "3 entries"),
        (lambda: act_lu(X1, ("swiglu", "linear")), ValueError, "not unary"),
        (lambda: act_lu(X1, ("x +",)), ValueError, "column"),
        (lambda: act_lu(X1, ("scaled(gelu)",)), ValueError, "one scale a row"),
        (lambda: act_lu(X1, (3,)), TypeError, "activation_type has 3"),
        (lambda: act_lu(X1, (jax.nn.silu,)), TypeError, "tenon's words"),
        (lambda: act_lu(X1.astype(jnp.int32), ("gelu",)), TypeError, "x is int32"),
        (lambda: act_lu(X1, ("elu",), act_params={"slope": 1}), ValueError, "'slope'.*alpha"),
        (lambda: act_lu(X1, ("elu",), act_params=(1, 2)), ValueError, "2 numbers"),
        (lambda: act_lu(X1, ("elu",), act_params={"alpha": "q"}), TypeError, "alpha"),
        (
            lambda: act_lu(X2, ("clamped_swiglu",), act_params={"limit": -1}),
            ValueError,
            "limit = -1.0 is outside",
        ),
        (lambda: act_lu(X1, ("elu",), act_params={"alpha": np.nan}), ValueError, "outside"),
        (
            lambda: jax.jit(lambda p: act_lu(X1, ("elu",), act_params={"alpha": p}))(1.0),
            TypeError,
            "known while tracing",
        ),
        (lambda: act_lu(X1, ("gelu",), quantizer="e4m3"), TypeError, "DelayedScaleQuantizer"),
        (lambda: act_lu(X1, ("gelu",), precision="fast"), ValueError, "precision"),
        (
            lambda: act_lu(X1, ("gelu",), amax_scope=AmaxScope.TPSP),
            NotImplementedError,
            "AmaxScope.LOCAL",
        ),
        (lambda: dact_lu(X1, X1, ("gelu",)), ValueError, r"dz is \(3, 1, 4\).*\(3, 4\)"),
        (lambda: dact_lu(X1[:, 0].astype(int), X1, ("gelu",)), TypeError, "dz is int32"),
        (lambda: activation(X2, ("gelu",)), ValueError, "activation: x is.*x must be"),
        (lambda: activation(X1, ("gelu",), quantizer="e4m3"), TypeError, "activation: quantizer"),
    ],
)
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
    # The error is raised during tracing, not at run time.
    with pytest.raises(error, match=text):
        jax.eval_shape(call)


FUSED = tenon.fuse(lambda x, y: x * tenon.sigmoid(y))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.jit(tenon.gelu)(x),
        lambda x: jax.jit(lambda x: tenon.gelu.backward(x, x).dx)(x),
        lambda x: jax.jit(lambda b: tenon.gelu(np.ones((2, 4), np.float32), bias=b))(x[0]),
        lambda x: jax.grad(lambda x: tenon.gelu(x).sum())(x),
        lambda x: jax.vmap(tenon.gelu)(x),
        lambda x: jax.jit(FUSED)(x, x),
        lambda x: jax.jit(lambda x: FUSED.grad(x, x, x))(x),
        lambda x: jax.jit(lambda x: tenon.quantize(x, "mxfp8").data)(x),
        lambda x: jax.jit(tenon.l2_normalization)(x),
    ],
)
def test_functions_of_arrays_in_memory_point_to_tenon_jax(call):
    with pytest.raises(TypeError, match=r"traced by JAX.*use tenon\.jax"):
        call(jnp.ones((3, 4)))


def test_the_activation_that_the_message_names_is_the_same():
    x = numbers((3, 4))
    want = tenon.gelu(np.asarray(x))
    np.testing.assert_array_equal(
        jax.jit(lambda x: activation(x[..., None, :], ("gelu",)))(x), want
    )


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="x is float64"):
        act_lu(jnp.ones((2, 1, 3), jnp.float64), ("gelu",))


def test_primitives_know_their_shapes():
    from tenon.jax.cpp_extensions._primitives import Encoding

    x = jax.ShapeDtypeStruct((3, 5, 2, 7), jnp.bfloat16)
    shapes = [r.shape for r in ActLuPrimitive.abstract(x, Encoding(x.dtype))]
    assert shapes == [(3, 5, 7), (0,), (0,), (0,), (1,)]
    results = DActLuDBiasQuantizePrimitive.abstract(x, Encoding(x.dtype), True)
    assert [r.shape for r in results] == [x.shape, (0,), (0,), (0,), (1,), (2, 7), (0,)]


def test_a_library_without_handlers_says_so():
    program = """
import ctypes, tenon._lib as _lib
class Without:
    def __init__(self, lib): self._lib = lib
    def __getattr__(self, name):
        if name.startswith("tenon_ActLu"): raise AttributeError(name)
        return getattr(self._lib, name)
_lib.lib = Without(_lib.lib)
try:
    import tenon.jax
except ImportError as e:
    print("TENON_XLA_INCLUDE_DIR" in str(e) and "tenon_ActLu" in str(e))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "True", run.stderr
