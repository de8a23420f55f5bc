"""Tests of traced functions: their texts, values, broadcasting and gradients."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import tenon
from hypothesis import given, settings
from hypothesis import strategies as st
from tenon._trace import Expr, trace

RNG = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


TEXTS = [
    (lambda x, y: x + y, "x + y"),
    (lambda x, y: x - (y - x), "x - (y - x)"),
    (lambda x, y: x - y - x, "x - y - x"),
    (lambda x, y: (x + y) * 2, "(x + y)*2"),
    (lambda x, y: x / (y * x) / y, "x/(y*x)/y"),
    (lambda x, y: -(x + y), "-(x + y)"),
    (lambda x, y: -x * y, "-x*y"),
    (lambda x, y: -(x * y), "-(x*y)"),
    (lambda x, y: -(-x), "-(-x)"),  # noqa: B002
    (lambda x, y: +x - -2, "x - -2"),
    (lambda x, y: 1 - x, "1 - x"),
    (lambda x, y: 0.5 / x, "0.5/x"),
    (lambda x, y: x**2 + y**0.5 + x**-1, "x*x + sqrt(y) + 1/x"),
    (lambda x, y: tenon.where(x > 0, x, -y), "select(x > 0, x, -y)"),
    (lambda x, y: tenon.where(1 >= x, 1, 0), "select(x <= 1, 1, 0)"),
    (lambda x, y: tenon.select(x == y, x.exp(), y.tanh()), "select(x == y, exp(x), tanh(y))"),
    (lambda x, y: tenon.clamp(tenon.maximum(x, 0), -1, y), "clamp(max(x, 0), -1, y)"),
    (lambda x, y: tenon.minimum(2, x), "min(2, x)"),
    (
        lambda x, y: tenon.round(x, "bf16") + tenon.round(y, np.float16),
        "round(x, bf16) + round(y, f16)",
    ),
    (lambda x, y: tenon.gelu(x + y), "gelu(x + y)"),
    (lambda x, y: tenon.elu(x, alpha=0.5), "elu(x, 0.5)"),
    (lambda x, y: tenon.swiglu(x, y), "swiglu(x, y)"),
    (lambda x, y: tenon.gelu(x, bias=y), "gelu(x + y)"),
    (lambda x, y: np.where(x > y, np.tanh(x), np.float32(2) * y), "select(x > y, tanh(x), 2*y)"),
    (lambda x, y: np.maximum(x, 0) + np.square(y), "max(x, 0) + y*y"),
    (lambda x, y: abs(x) * tenon.rsqrt(y), "abs(x)*rsqrt(y)"),
    (lambda x, y: 1e-30 * x + 1e20 * y, "1e-30*x + 1e+20*y"),
    (lambda x, y, k=2: k * x, "k*x; k = 2"),
    (lambda x, y, *, k=-0.25, how="tanh": k * x if how == "tanh" else y, "k*x; k = -0.25"),
]


@pytest.mark.parametrize("function, text", TEXTS, ids=[t for _, t in TEXTS])
def test_texts(function, text):
    assert trace(function, ("x", "y")) == text
    assert tenon.fuse(function).formula == text
    tenon.fuse(function)(numbers(2, 3), numbers(2, 3))  # the library parses it


# Random expressions: the text must have the value that Python computes in float64.
_leaf = st.sampled_from(["x", "y", "0.5", "2", "-1.25"])
_tree = st.recursive(
    _leaf,
    lambda t: st.one_of(
        st.tuples(st.sampled_from("+-*"), t, t).map(lambda o: f"({o[1]} {o[0]} {o[2]})"),
        t.map(lambda a: f"(-{a})"),
        t.map(lambda a: f"T.tanh({a})"),
        st.tuples(t, t, t).map(lambda o: f"T.where({o[0]} < {o[1]}, {o[2]}, {o[0]})"),
        st.tuples(t, t).map(lambda o: f"T.maximum({o[0]}, {o[1]})"),
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(_tree)
def test_random_expressions(source):
    def at(x, y, words):
        return eval(source, {"T": words, "x": x, "y": y})  # noqa: S307

    def fused(x, y):
        result = at(x, y, tenon)
        return result if isinstance(result, Expr) else x * 0 + result

    x, y = numbers(3, 5), numbers(3, 5)
    try:
        wanted = np.broadcast_to(at(x.astype(np.float64), y.astype(np.float64), np), x.shape)
        found = tenon.fuse(fused)(x, y)
    except TypeError as e:  # a function of constants only
        assert "where" in str(e) or "float" in str(e)
        return
    scale = np.maximum(np.abs(wanted), 1)
    # Near a comparison the two may differ because of rounding, so some elements are allowed to.
    assert np.mean(np.abs(found - wanted) > 1e-4 * scale) < 0.2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_bias_gelu(dtype):
    @tenon.fuse
    def f(x, bias):
        """A bias and an activation."""
        return tenon.gelu(x + bias)

    x, bias, grad = (
        numbers(2, 3, 8, dtype=dtype),
        numbers(8, dtype=dtype),
        numbers(2, 3, 8, dtype=dtype),
    )
    y = f(x, bias)
    assert y.dtype == dtype and f.__name__ == "f" and f.__doc__ == "A bias and an activation."
    np.testing.assert_array_equal(y, tenon.gelu(x, bias=bias))
    dx, dbias = f.grad(grad, x, bias)
    wanted = tenon.gelu.backward(grad, x, bias=bias)
    np.testing.assert_array_equal(dx, wanted.dx)
    np.testing.assert_array_equal(dbias, wanted.dbias)
    assert dbias.dtype == dtype


SHAPES = [
    ((4, 6), (6,)),
    ((2, 3, 6), (6,)),
    ((2, 3, 6), (2, 3, 1)),
    ((2, 3, 6), (3, 1)),
    ((2, 3, 6), (3, 6)),
    ((2, 3, 6), (2, 1, 6)),
    ((2, 3, 6), (1, 1, 6)),
    ((2, 3, 6), (1, 3, 1)),
    ((2, 3, 6), ()),
    ((2, 3, 6), (1,)),
    ((6,), (4, 1)),
    ((1,), (5,)),
    ((), ()),
    ((0, 6), (6,)),
    ((0, 3, 6), (3, 1)),
    ((2, 3, 4, 5), (2, 3, 1, 5)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasts(shapes):
    def body(a, b):
        return a * np.tanh(a + 2 * b)

    x, y = (numbers(*s) for s in shapes)
    f = tenon.fuse(body)
    wanted = body(x.astype(np.float64), y.astype(np.float64))
    found = f(x, y)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    grad = numbers(*wanted.shape)
    t = np.tanh(x.astype(np.float64) + 2 * y)
    full = [grad * (t + x * (1 - t**2)), grad * 2 * x * (1 - t**2)]
    for given_, g, w in zip((x, y), f.grad(grad, x, y), full, strict=True):
        axes = tuple(range(w.ndim - given_.ndim))
        own = w.sum(axes)
        own = own.sum(
            tuple(i for i, n in enumerate(given_.shape) if n != own.shape[i]), keepdims=True
        )
        assert g.shape == given_.shape
        np.testing.assert_allclose(g, own, rtol=2e-5, atol=2e-5)


def test_numbers_strides_and_dtypes():
    f = tenon.fuse(lambda x, s: x * s)
    x = numbers(4, 6, dtype=np.float16)
    assert f(x, 2.0).dtype == np.float16 and f(x, np.float32(2)).dtype == np.float32
    assert f(x, 2, dtype="bf16").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(f(x[::2, ::-1], 2), x[::2, ::-1] * np.float16(2))
    dx, ds = f.grad(np.ones_like(x), x, 2.0)
    assert ds.shape == () and abs(float(ds) - x.astype(float).sum()) < 1e-2
    np.testing.assert_array_equal(dx, np.full_like(x, 2))


def test_parameters_and_options():
    @tenon.fuse(precision="strict", rounding="eager")
    def f(x, residual, slope=0.5):
        return residual + tenon.where(x > 0, x, slope * x)

    x, r = numbers(3, 5), numbers(3, 5)
    for slope in (0.5, -2.0):
        wanted = r + np.where(x > 0, x, np.float32(slope) * x)
        np.testing.assert_allclose(f(x, r, slope=slope), wanted, rtol=1e-6, atol=1e-7)
    dx, dr = f.grad(np.ones_like(x), x, r, slope=0.25)
    np.testing.assert_array_equal(dx, np.where(x > 0, 1, 0.25).astype(np.float32))
    np.testing.assert_array_equal(dr, 1)
    assert f.parameters == {"slope": 0.5} and f.arguments == ("x", "residual")
    nested = tenon.fuse(lambda x, y: f(x, y, slope=0.125) * 2)
    assert nested.formula == "(y + select(x > 0, x, 0.125*x))*2"
    with pytest.raises(TypeError, match="no parameter 'beta'; it has slope"):
        f(x, r, beta=1)


def test_grad():
    x, b = numbers(3, 5), numbers(5)
    np.testing.assert_allclose(tenon.grad("tanh")(x), 1 - np.tanh(x) ** 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tenon.grad(tenon.elu)(x, alpha=0.5), tenon.elu.backward(
        np.ones_like(x), x, alpha=0.5).dx)  # fmt: skip
    dx, db = tenon.grad(lambda x, b: x * b)(x, b)
    np.testing.assert_array_equal(dx, np.broadcast_to(b, x.shape))
    np.testing.assert_allclose(db, x.sum(0), rtol=1e-6)
    da, dg = tenon.grad("swiglu")(x, x)
    assert da.shape == dg.shape == x.shape
    np.testing.assert_array_equal(tenon.grad(tenon.fuse(lambda x: 3 * x))(x), np.full_like(x, 3))


def test_words_on_arrays():
    x = np.abs(numbers(3, 4)) + 0.1
    exact = x.astype(np.float64)
    for name in ("abs", "sqrt", "exp", "expm1", "log", "log1p"):
        np.testing.assert_allclose(
            getattr(tenon, name)(x), getattr(np, name)(exact), rtol=2e-6, atol=1e-7
        )
    erf = np.vectorize(math.erf)(exact)
    np.testing.assert_allclose(tenon.erf(x), erf, rtol=1e-6)
    np.testing.assert_allclose(tenon.erfc(x), 1 - erf, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(tenon.rsqrt(x), exact**-0.5, rtol=1e-6)
    np.testing.assert_array_equal(tenon.maximum(x, 1.0), np.maximum(x, 1))
    np.testing.assert_array_equal(tenon.minimum(x, x[0]), np.minimum(x, x[0]))
    np.testing.assert_array_equal(tenon.clamp(x, 0.5, 1), np.clip(x, 0.5, 1))
    bf16 = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(tenon.round(x, "bf16"), bf16)
    assert tenon.exp(1.0) == np.float32(math.e)


def test_shown():
    @tenon.fuse
    def f(x, bias, residual):
        return residual + tenon.gelu(x + bias)

    assert repr(f) == "<tenon.fuse f(x, bias, residual) = residual + gelu(x + bias)>"
    text = f.show()
    assert tenon.show(f) == text
    for part in ("f(x, bias, residual) =", "derivative by x", "derivative by bias", "by residual"):
        assert part in text
    assert "code of the derivative" in f.show(backward=True) and "<pre" in f._repr_html_()
    assert copy.copy(f).formula == f.formula


def grows(x):
    for _ in range(20):
        x = x * x
    return x


A = np.ones((2, 3), np.float32)
BAD = [
    (lambda: trace(lambda x: x if x > 0 else -x, "x"), TypeError, r"tenon.where\(x > 0, a, b\)"),
    (lambda: trace(lambda x: x if x else -x, "x"), TypeError, "truth of x is not known"),
    (lambda: trace(lambda x: tenon.where(0 < x < 1, x, 0), "x"), TypeError, "chained"),
    (lambda: trace(lambda x: math.exp(x), "x"), TypeError, "no value while tracing"),
    (lambda: trace(lambda x: np.sin(x), "x"), TypeError, "numpy.sin is not a word"),
    (lambda: trace(lambda x: x.sin(), "x"), AttributeError, "no 'sin'; it has"),
    (lambda: trace(lambda x: x + A, "x"), TypeError, "numpy.add|a ndarray"),
    (lambda: trace(lambda x: x * True, "x"), TypeError, "a bool in a traced"),
    (lambda: trace(lambda x: x**1.5, "x"), TypeError, "powers are whole numbers"),
    (lambda: trace(lambda x: x + math.inf, "x"), ValueError, "constant inf has no literal"),
    (lambda: trace(lambda x: (x, x), "x"), TypeError, "returned a tuple"),
    (lambda: trace(lambda x: (x > 0) * x, "x"), TypeError, "unsupported|not a number"),
    (lambda: trace(lambda x: x + (x > 0), "x"), TypeError, "is not a number; use tenon.where"),
    (lambda: trace(grows, "x"), ValueError, "beyond 4096 bytes"),
    (lambda: trace(lambda x: tenon.swiglu(x), "x"), TypeError, r"write swiglu\(a, b\)"),
    (lambda: trace(lambda x: tenon.round(x, "f64"), "x"), ValueError, "round: dtype 'f64'"),
    (lambda: tenon.where(A > 0, A, A), TypeError, "numpy.where"),
    (lambda: tenon.fuse(3), TypeError, "a int; it takes a Python function"),
    (lambda: tenon.fuse(lambda: 1), ValueError, "has no arguments"),
    (lambda: tenon.fuse(lambda x, *, k: x), TypeError, "needs the keyword k"),
    (lambda: tenon.fuse(lambda x, y: x)(A), TypeError, r"1 arguments given, it takes 2 \(x, y\)"),
    (lambda: tenon.fuse(lambda x, y: x + y)(A, A[:, :2]), ValueError, "do not broadcast: x"),
    (lambda: tenon.fuse(lambda x: x)(A.astype(int)), TypeError, "x is int64"),
    (lambda: tenon.fuse(lambda x: x).grad(A[:1], A), ValueError, r"grad has the shape \(1, 3\)"),
    (lambda: tenon.fuse(lambda tanh: tanh)(A), ValueError, "'tanh' cannot name an argument"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_arrays_by_keyword():
    @tenon.fuse
    def f(x, bias, slope=2.0):
        return (x + bias) * slope

    x, bias = np.ones((4, 8), np.float32), np.arange(8, dtype=np.float32)
    for y in (f(x, bias=bias), f(bias=bias, x=x), f(x=x, bias=bias, slope=2.0)):
        np.testing.assert_array_equal(y, f(x, bias))
    ones = np.ones_like(x)
    dx, dbias = f.grad(ones, x, bias=bias, slope=3.0)
    assert (dx == 3).all() and (dbias == 12).all()
    np.testing.assert_array_equal(tenon.grad(f)(x, bias=bias)[1], tenon.grad(f)(x, bias)[1])
    with pytest.raises(TypeError, match="'bias' is given twice or another is missing"):
        f(x, bias, bias=bias)
    with pytest.raises(TypeError, match="'bias' is given twice or another is missing"):
        f(bias=bias)
    with pytest.raises(ValueError, match="named 'dtype'"):
        tenon.fuse(lambda x, dtype=1.0: x * dtype)
    with pytest.raises(TypeError, match="max is built in"):
        tenon.fuse(max)
