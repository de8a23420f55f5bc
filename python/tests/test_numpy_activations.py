"""Tests of activations on arrays against float64, forward and backward."""

import math
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tenon
from hypothesis import given, settings
from hypothesis import strategies as st

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]
# Half a unit in the last place, plus the error of native precision.
RELATIVE = {"float32": 3e-6, "float16": 2**-11 + 2**-13, "bfloat16": 2**-8 + 2**-11}

erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.maximum(x, 0)


def gated(f):
    return lambda a, b: f(a) * b


UNARY = {
    "gelu": gelu,
    "gelu_erf": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "silu": lambda x: x * sigmoid(x),
    "qgelu": lambda x: x * sigmoid(1.702 * x),
    "relu": relu,
    "srelu": lambda x: relu(x) ** 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
}
GATED = {
    **{
        name: gated(UNARY[f])
        for name, f in {
            "glu": "sigmoid",
            "geglu": "gelu",
            "geglu_erf": "gelu_erf",
            "swiglu": "silu",
            "reglu": "relu",
            "qgeglu": "qgelu",
            "sreglu": "srelu",
        }.items()
    },
    "clamped_swiglu": lambda a, b: (
        np.minimum(a, 7) * sigmoid(1.702 * np.minimum(a, 7)) * (np.clip(b, -7, 7) + 1)
    ),
    "situglu": lambda a, b: 4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25),
}


def slope(f, x, h=1e-6):
    return (f(x + h) - f(x - h)) / (2 * h)


def numbers(shape, dtype=np.float32, seed=0):
    """Values of the dtype. Their distance to kinks is larger than the step of the derivative."""
    x = np.random.default_rng(seed).normal(size=shape) * 2
    x = np.asarray(x + np.copysign(0.01, x)).astype(dtype)
    x[np.abs(x) == 3] = 2.5
    return x


def close(found, wanted, dtype=None, more=1.0):
    dtype = found.dtype if dtype is None else dtype
    relative = RELATIVE[np.dtype(dtype).name] * more
    scale = np.maximum(np.abs(wanted), 2e-2)
    error = np.abs(np.asarray(found, np.float64) - wanted) / scale
    assert found.shape == np.shape(wanted)
    assert not error.size or error.max() <= relative, error.max()


def test_every_built_in_activation_has_a_reference():
    # In a separate process, because other tests define names.
    code = "import tenon; print(*tenon.names())"
    builtin = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(builtin) == {*UNARY, *GATED}
    assert set(builtin) <= set(dir(tenon))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    f, x = getattr(tenon, name), numbers((3, 5, 7), dtype)
    grad = numbers((3, 5, 7), dtype, 1)
    exact, g = x.astype(np.float64), grad.astype(np.float64)
    close(f(x), UNARY[name](exact))
    found = f.backward(grad, x)
    close(found.dx, g * slope(UNARY[name], exact), more=2)
    assert found.db is None and found.dbias is None and found.dscale is None
    assert f(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATED)
def test_gated(name, dtype):
    f, x, grad = getattr(tenon, name), numbers((5, 12), dtype), numbers((5, 6), dtype, 1)
    exact, g = x.astype(np.float64), grad.astype(np.float64)
    a, b = exact[:, :6], exact[:, 6:]
    close(f(x), GATED[name](a, b))
    da = g * slope(lambda v: GATED[name](v, b), a)
    db = g * slope(lambda v: GATED[name](a, v), b)
    close(f.backward(grad, x).dx, np.concatenate([da, db], 1), more=3)
    apart = f.backward(grad, x[:, :6], x[:, 6:])
    close(apart.dx, da, more=3)
    close(apart.db, db, more=3)


def arranged(a, b, layout):
    if layout == "stacked":
        return np.concatenate([a, b], -1)
    if layout == "swapped":
        return np.concatenate([b, a], -1)
    k = int(layout[12:-1])
    blocks = [x.reshape(*x.shape[:-1], -1, k) for x in (a, b)]
    return np.stack(blocks, -2).reshape(*a.shape[:-1], -1)


@pytest.mark.parametrize("layout", ["stacked", "swapped", "interleaved(1)", "interleaved(8)"])
def test_layouts_and_bias(layout):
    a, b, grad = (numbers((2, 3, 16), seed=s) for s in range(3))
    bias_a, bias_b = numbers(16, seed=3), numbers(16, seed=4)
    x, bias = arranged(a, b, layout), arranged(bias_a, bias_b, layout)
    y = tenon.swiglu(x, layout=layout, bias=bias)
    np.testing.assert_array_equal(y, tenon.swiglu(a + bias_a, b + bias_b))
    found = tenon.swiglu.backward(grad, x, layout=layout, bias=bias)
    da, db, *_ = tenon.swiglu.backward(grad, a + bias_a, b + bias_b)
    np.testing.assert_array_equal(found.dx, arranged(da, db, layout))
    np.testing.assert_allclose(found.dbias, found.dx.sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_bias_of_two_tensors():
    a, b, bias = numbers((4, 6)), numbers((4, 6), seed=1), numbers(12, seed=2)
    grad = numbers((4, 6), seed=3)
    y = tenon.geglu(a, b, bias=bias)
    np.testing.assert_array_equal(y, tenon.geglu(a + bias[:6], b + bias[6:]))
    found = tenon.geglu.backward(grad, a, b, bias=bias)
    both = np.concatenate([found.dx, found.db], 1)
    np.testing.assert_allclose(found.dbias, both.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_scaled(name):
    f = tenon.activation(name).scaled()
    x, s = numbers((2, 3, 8)), numbers((2, 3, 1), seed=1)
    plain = getattr(tenon, name)(x)
    y = f(x, scale=s)
    np.testing.assert_allclose(y, plain * s, rtol=1e-6)
    grad = numbers(y.shape, seed=2)
    found = f.backward(grad, x, scale=s)
    assert found.dscale.shape == s.shape
    wanted = (grad.astype(np.float64) * plain).sum(-1, keepdims=True)
    np.testing.assert_allclose(found.dscale, wanted, rtol=1e-4, atol=1e-5)
    rest = getattr(tenon, name).backward(grad * s, x).dx
    np.testing.assert_allclose(found.dx, rest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (0, 4), (3, 0), (2, 3, 5), (2, 1, 3, 4)])
def test_shapes(shape):
    x = numbers(shape)
    y = tenon.silu(x)
    close(y, UNARY["silu"](x.astype(np.float64)))
    found = tenon.silu.backward(np.ones(shape, np.float32), x, dbias=True)
    assert found.dx.shape == shape
    assert found.dbias.shape == (shape[-1] if shape else 1,)
    if x.size == 0:
        np.testing.assert_array_equal(found.dbias, 0)


STRIDED = {
    "columns": lambda x: x[:, :, ::2],
    "reversed": lambda x: x[::-1, :, ::-1],
    "rows": lambda x: x[:, ::2],
    "cut": lambda x: x[1:, :2, 1:5],
    "one row": lambda x: x[:, 1:2, 1:],
    "transposed": lambda x: x.transpose(2, 0, 1),
    "fortran": np.asfortranarray,
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one column": lambda x: x[:, :, 3:4],
    "scalar": lambda x: x[1, 2, 3],
}


@pytest.mark.parametrize("how", STRIDED)
def test_strides(how):
    x = STRIDED[how](numbers((4, 6, 8)))
    before = x.copy()
    np.testing.assert_array_equal(tenon.gelu(x), tenon.gelu(before))
    grad = STRIDED[how](numbers((4, 6, 8), seed=1))
    np.testing.assert_array_equal(
        tenon.gelu.backward(grad, x).dx, tenon.gelu.backward(grad.copy(), before).dx
    )
    np.testing.assert_array_equal(x, before)


def test_read_only_and_unaligned():
    x = numbers((3, 4))
    wanted = tenon.gelu(x)
    x.flags.writeable = False
    np.testing.assert_array_equal(tenon.gelu(x), wanted)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    raw[1:] = x.view(np.uint8).ravel()
    np.testing.assert_array_equal(tenon.gelu(raw[1:].view(np.float32).reshape(3, 4)), wanted)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(UNARY)),
)
def test_any_shape_and_dtypes(shape, dtype, out, name):
    x = numbers(shape, dtype, 7)
    y = getattr(tenon, name)(x, dtype=out)
    assert y.dtype == out
    close(y, UNARY[name](x.astype(np.float64)))


def test_parameters():
    x = numbers((3, 5))
    wanted = np.where(x > 0, x, 0.5 * np.expm1(x.astype(np.float64)))
    close(tenon.elu(x, alpha=0.5), wanted)
    f = tenon.activation("elu", alpha=0.5)
    close(f(x), wanted)
    assert f.parameters == {"alpha": 0.5} and tenon.elu.parameters == {"alpha": 1}
    close(f.gated()(x, x), wanted * x)
    g = tenon.activation("x*sigmoid(beta*x); beta = 1", beta=2)
    close(g(x), x * sigmoid(2.0 * x))
    close(g(x, beta=-1e-3), x * sigmoid(-1e-3 * x))
    close(g.gated().scaled()(x, x, scale=np.ones(3, np.float32), beta=3), x * sigmoid(3.0 * x) * x)
    with pytest.raises(TypeError, match="no parameter 'alpha'; it has none"):
        tenon.gelu(x, alpha=1.0)
    with pytest.raises(TypeError, match="alpha = '1'; it must be a number"):
        tenon.elu(x, alpha="1")
    with pytest.raises(ValueError, match="limit = -1 is outside"):
        tenon.clamped_swiglu(x[:, :4], limit=-1)


def test_from_text_and_functions():
    x = numbers((3, 4))

    def mine(z, beta=1.5):
        return z * tenon.sigmoid(beta * z) + 0.1 * tenon.tanh(z)

    exact = x.astype(np.float64)
    wanted = exact * sigmoid(1.5 * exact) + 0.1 * np.tanh(exact)
    f = tenon.activation(mine)
    assert f.text == "x*sigmoid(beta*x) + 0.1*tanh(x); beta = 1.5"
    close(f(x), wanted)
    defined = tenon.define("mine_step", mine)
    assert "mine_step" in tenon.names() and defined.parameters == {"beta": 1.5}
    close(tenon.mine_step(x), wanted)
    close(tenon.mine_step(x, beta=0.25), exact * sigmoid(exact / 4) + 0.1 * np.tanh(exact))
    gate = tenon.activation(lambda u, v: tenon.mine_step(u) * (v + 1))
    assert re.fullmatch(r"mine_step@\w+\(a\)\*\(b \+ 1\)", gate.text) and gate.inputs == 2
    close(gate(x, x), wanted * (exact + 1))
    tenon.define("mine_step", "x + 1")
    close(tenon.mine_step(x), exact + 1)
    close(defined(x), wanted)  # an existing activation does not change
    close(gate(x, x), wanted * (exact + 1))
    tenon.define("mine_gate", "gated(elu(alpha=0.5))")
    np.testing.assert_array_equal(
        tenon.mine_gate(x, x), tenon.activation("gated(elu)", alpha=0.5)(x, x)
    )
    tenon.define("mine_gelu", tenon.gelu)
    np.testing.assert_array_equal(tenon.mine_gelu(x), tenon.gelu(x))


def test_activations_inside_traced_functions():
    f = tenon.activation("x*sigmoid(beta*x); beta = 2")
    made = tenon.activation(lambda x: f(x) + tenon.elu(x, alpha=0.5) + tenon.relu(x))
    x = numbers((3, 4))
    close(made(x), f(x) + tenon.elu(x, alpha=0.5) + tenon.relu(x), more=2)
    assert not any(n.startswith("_") for n in tenon.names())
    gated = tenon.activation(lambda a, b: tenon.gelu.gated()(a, b))
    np.testing.assert_array_equal(gated(x, x), tenon.geglu(x, x))


def test_info_repr_and_show():
    info = tenon.activation_info("clamped_swiglu")
    assert info["inputs"] == 2 and [p["name"] for p in info["parameters"]] == [
        "limit",
        "alpha",
        "offset",
    ]
    assert tenon.activation_info(tenon.gelu.scaled())["scaled"]
    assert repr(tenon.activation("elu", alpha=0.5)) == "tenon.activation('elu(alpha=0.5)')"
    assert tenon.gelu == tenon.activation("gelu") and len({tenon.gelu, tenon.silu}) == 2
    text = tenon.show("swiglu")
    assert "derivative" in text and repr(text) == text and "<pre" in text._repr_html_()
    assert tenon.swiglu.show(backward=True) != text
    assert "<svg" in tenon.gelu._repr_html_() and "<pre" in tenon.swiglu._repr_html_()


def test_precision_and_rounding():
    x = numbers((64, 64))
    np.testing.assert_array_equal(
        tenon.gelu(x, precision="strict"), tenon.gelu(x, precision="strict", rounding="eager")
    )
    with pytest.raises(ValueError, match="precision='fast'; it must be"):
        tenon.gelu(x, precision="fast")


BAD = [
    (lambda: tenon.gelu(np.zeros(3)), TypeError, r"gelu: x is float64;.*astype\(np.float32\)"),
    (lambda: tenon.gelu(np.zeros(3, int)), TypeError, "gelu: x is int64"),
    (lambda: tenon.gelu(np.zeros(3, ">f4")), TypeError, "byte order.*astype"),
    (lambda: tenon.gelu([1.0]), TypeError, "gelu: x is a list; pass a NumPy array"),
    (lambda: tenon.gelu(1.0), TypeError, "gelu: x is a float"),
    (lambda: tenon.gelu(np.zeros(3, ml_dtypes.float8_e5m2)), TypeError, "without its scales"),
    (lambda: tenon.gelu(np.ma.zeros(3, np.float32)), TypeError, "masked array; fill it"),
    (lambda: tenon.gelu(np.zeros(3, np.float32), dtype="f64"), ValueError, "dtype 'f64'; it must"),
    (lambda: tenon.swiglu(np.zeros((2, 3), np.float32)), ValueError, "3 columns"),
    (lambda: tenon.swiglu(np.zeros(4, np.float32), layout="diagonal"), ValueError, "diagonal"),
    (lambda: tenon.swiglu(np.zeros(4, np.float32), layout=2), TypeError, "layout is a int"),
    (
        lambda: tenon.gelu(np.zeros((2, 3), np.float32), bias=np.zeros(4, np.float32)),
        ValueError,
        "bias is 1x4 but must be",
    ),
    (
        lambda: tenon.gelu.backward(np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32)),
        ValueError,
        "grad is 2x4",
    ),
    (lambda: tenon.activation("x +"), ValueError, "line 1, column 4"),
    (lambda: tenon.activation(3), TypeError, "a int; pass a name"),
    (lambda: tenon.activation(lambda x, y, z: x), ValueError, "takes 3 inputs"),
    (lambda: tenon.activation("swiglu").gated(), ValueError, "not unary"),
    (lambda: tenon.define("gelu", "x"), ValueError, "built in"),
    (lambda: tenon.define(lambda x: x, "x"), TypeError, "the name is a function"),
    (lambda: tenon.gelo, AttributeError, "did you mean 'gelu'"),
    (lambda: tenon.x, AttributeError, "has no attribute 'x'"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("word", ["scale", "bias", "layout", "dtype", "out", "rounding"])
def test_reserved_parameters(word):
    scope = {}
    exec(f"def f(x, {word}=2.0): return x * {word}", scope)
    for make in (tenon.activation, lambda f: tenon.define("reserved_parameter", f)):
        with pytest.raises(ValueError, match=f"'{word}'.*another name than act, b, bias"):
            make(scope["f"])
    with pytest.raises(ValueError, match=f"'{word}'.*another name"):
        tenon.define("reserved_parameter", f"x*{word}; {word} = 2")
    assert "reserved_parameter" not in tenon.names()


@pytest.mark.parametrize("name", ["quantize", "activation", "show", "torch", "jax"])
def test_names_of_functions_are_not_defined(name):
    with pytest.raises(ValueError, match=f"define: tenon.{name} is something else"):
        tenon.define(name, "x*2")


def test_definitions_hold_for_what_was_built_before():
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    tenon.define("held", "x*c; c = 2")
    built = [
        (tenon.held, 2 * x),
        (tenon.activation("held(c=3)"), 3 * x),
        (tenon.activation("gated( held )"), 2 * x[:4] * x[4:]),
        (tenon.activation("x*held (x)"), x * (2 * x)),
        (tenon.activation("x*held; held = 5"), 5 * x),  # a parameter
        (tenon.activation(lambda x: tenon.held(x, c=4)), 4 * x),
        (tenon.fuse(lambda y: tenon.activation("held")(y) + 1), 2 * x + 1),
    ]
    for f, wanted in built:
        np.testing.assert_array_equal(f(x), wanted)
    tenon.define("held", "x + held(x)")  # refers to the previous definition
    for f, wanted in built:
        np.testing.assert_array_equal(f(x), wanted)
    np.testing.assert_array_equal(tenon.held(x), 3 * x)
    assert not [n for n in tenon.names() if n.startswith("_")]


def test_null_characters():
    x = np.ones((2, 8), np.float32)
    for call in (
        lambda: tenon.activation("x\0y"),
        lambda: tenon.define("nul\0l", "x"),
        lambda: tenon.define("null", "x\0y"),
        lambda: tenon.swiglu(x, layout="swapped\0"),
    ):
        with pytest.raises(ValueError, match="null character"):
            call()


def test_a_bias_lies_in_the_last_dimension():
    x = np.ones((8, 8), np.float32)
    bias = np.arange(8, dtype=np.float32)
    for call in (
        lambda b: tenon.gelu(x, bias=b),
        lambda b: tenon.gelu.backward(x, x, bias=b),
        lambda b: tenon.bias_dropout_add(x, b, p=0.0, training=False),
    ):
        with pytest.raises(ValueError, match=r"bias has the shape \(8, 1\).*bias.reshape\(-1\)"):
            call(bias[:, None])
        call(bias[None])
