"""Tests of FP8 tensors against a NumPy reference of the rules, for every mode and orientation."""

import ml_dtypes
import numpy as np
import pytest
import tenon
from hypothesis import given, settings
from hypothesis import strategies as st

E4M3, E5M2, E8M0 = (
    np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
)
LARGEST = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
TYPES = {"e4m3": E4M3, "e5m2": E5M2}
MODES = ["current", "mxfp8", "block1x128", "block128x128"]


def numbers(shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=shape) * 2)).astype(dtype)


def cast(v, dtype):
    top = LARGEST[dtype]
    return np.clip(v, -top, top).astype(TYPES[dtype])


def scale_of(amax, dtype, power_of_two):
    """The multiplier of current and block scaling, in float32."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    scale = np.float32(LARGEST[dtype] / np.float32(amax))
    if power_of_two:
        scale = np.float32(2.0 ** np.floor(np.log2(scale.astype(np.float64))))
    return scale


def blocks_of(mode, columnwise):
    return {
        "current": (10**9, 10**9),
        "mxfp8": (32, 1) if columnwise else (1, 32),
        "block1x128": (128, 1) if columnwise else (1, 128),
        "block128x128": (128, 128),
    }[mode]


def reference(x, mode, dtype, columnwise=False):
    """Codes [M, K] and the scale_inv of each block [blocks of rows, blocks of columns]."""
    x = x.astype(np.float32)
    (m, k), (bm, bk) = x.shape, blocks_of(mode, columnwise)
    codes = np.zeros(x.shape, TYPES[dtype])
    inverse = np.zeros((-(-m // bm), -(-k // bk)), np.float32)
    for i in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            part = np.s_[i * bm : (i + 1) * bm, j * bk : (j + 1) * bk]
            amax = np.abs(x[part]).max()
            if mode == "mxfp8":
                p = np.float32(amax * np.float32(1 / LARGEST[dtype]))
                e = 0 if p == 0 else max(int(np.ceil(np.log2(float(p)))) + 127, 0)
                scale, inverse[i, j] = np.float32(2.0 ** (127 - e)), np.float32(2.0 ** (e - 127))
            else:
                scale = scale_of(amax, dtype, mode.startswith("block"))
                inverse[i, j] = np.float32(1) / scale
            codes[part] = cast(x[part] * scale, dtype)
    return codes, inverse


def scales_of(q, columnwise):
    """scale_inv of a Quantized as [blocks of rows, blocks of columns]."""
    s = q.columnwise_scale_inv if columnwise else q.scale_inv
    m, k = int(np.prod(q.shape[:-1])), q.shape[-1]
    bm, bk = blocks_of(q.scaling, columnwise)
    rows, cols = -(-m // bm), -(-k // bk)
    s = s.astype(np.float32)
    if q.scaling == "current":
        return s.reshape(1, 1)
    if q.scaling == "block1x128" and not columnwise:
        return s[:cols, :rows].T
    if q.scaling == "block128x128" and columnwise:
        return s[:cols, :rows].T
    return s[:rows, :cols]


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (130, 260), (64, 128)])
def test_codes_and_scales(mode, dtype, shape):
    x = numbers(shape)
    q = tenon.quantize(x, mode, dtype=dtype, columnwise=True)
    for columnwise in (False, True):
        codes, inverse = reference(x, mode, dtype, columnwise)
        data = q.columnwise_data if columnwise else q.data
        if columnwise and mode != "mxfp8":
            data = data.T
        assert data.dtype == TYPES[dtype]
        np.testing.assert_array_equal(data.view(np.uint8), codes.view(np.uint8))
        np.testing.assert_array_equal(scales_of(q, columnwise), inverse)
    alone = tenon.quantize(x, mode, dtype=dtype, rowwise=False, columnwise=True)
    assert alone.data is None and alone.scale_inv is None
    np.testing.assert_array_equal(
        alone.columnwise_data.view(np.uint8), q.columnwise_data.view(np.uint8)
    )
    assert q.scale_inv.dtype == (E8M0 if mode == "mxfp8" else np.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sides", [{}, {"columnwise": True, "rowwise": False}])
def test_dequantize(mode, sides):
    x = numbers((3, 50, 70))
    q = tenon.quantize(x, mode, **sides)
    codes, inverse = reference(x.reshape(150, 70), mode, "e4m3", bool(sides))
    bm, bk = blocks_of(mode, bool(sides))
    rows, cols = np.arange(150) // bm, np.arange(70) // bk
    wanted = codes.astype(np.float32) * inverse[np.ix_(rows, cols)]
    np.testing.assert_array_equal(q.dequantize(), wanted.reshape(x.shape))
    assert tenon.dequantize(q, "bf16").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(q), wanted.reshape(x.shape))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(MODES),
    st.sampled_from(["e4m3", "e5m2"]),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_any_shape_survives(mode, dtype, shape, source):
    x = np.random.default_rng(3).normal(size=shape).astype(source)
    q = tenon.quantize(x, f"{dtype}:{mode}")
    back = q.dequantize()
    assert back.shape == x.shape and back.dtype == x.dtype and q.shape == x.shape
    if x.size:
        step = 2.0**-3 if dtype == "e5m2" else 2.0**-4
        error = np.abs(back.astype(np.float64) - x.astype(np.float64))
        assert (error <= np.abs(x.astype(np.float64)) * step * 1.01 + np.abs(x).max() * 2e-3).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_activation_into_fp8(mode, name):
    f, x = getattr(tenon, name), numbers((40, 64), 5)
    y = f(x, precision="strict")
    q = f(x, quantize=tenon.Format(mode, columnwise=True), precision="strict")
    wanted = tenon.quantize(y, mode, columnwise=True)
    for part in ("data", "scale_inv", "columnwise_data", "columnwise_scale_inv"):
        a, b = getattr(q, part), getattr(wanted, part)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    grad = numbers(y.shape, 6)
    plain = f.backward(grad, x, dbias=True, precision="strict")
    coded = f.backward(grad, x, dbias=True, quantize=f"e5m2:{mode}", precision="strict")
    wanted = tenon.quantize(plain.dx, mode, dtype="e5m2")
    np.testing.assert_array_equal(coded.dx.data.view(np.uint8), wanted.data.view(np.uint8))
    np.testing.assert_array_equal(coded.dbias, plain.dbias)


def test_encoded_inputs():
    x, grad = numbers((6, 64)), numbers((6, 32), 1)
    q, g = tenon.quantize(x, "block1x128"), tenon.quantize(grad, "mxfp8")
    np.testing.assert_array_equal(tenon.swiglu(q), tenon.swiglu(q.dequantize()))
    np.testing.assert_array_equal(
        tenon.swiglu.backward(g, q).dx, tenon.swiglu.backward(g.dequantize(), q.dequantize()).dx
    )
    again = q.requantize("current", dtype="e5m2")
    np.testing.assert_array_equal(
        again.data.view(np.uint8),
        tenon.quantize(q.dequantize(), "e5m2:current").data.view(np.uint8),
    )
    np.testing.assert_array_equal(tenon.quantize(q, "mxfp8").dequantize(), q.dequantize())


def test_strided_input():
    x = numbers((40, 64))
    for part in (x[::2, ::-1], x[5:20, 3:40], x.T):
        np.testing.assert_array_equal(
            tenon.quantize(part, "mxfp8").data.view(np.uint8),
            tenon.quantize(part.copy(), "mxfp8").data.view(np.uint8),
        )


def test_scale_rules():
    x = np.array([[0.1, -0.5, 2, 6], [-3, 0.25, 0.0001, 0.00001]], np.float32)
    q = tenon.quantize(x, "current")
    assert q.amax == 6 and q.scale_inv == np.float32(1) / (np.float32(448) / np.float32(6))
    assert tenon.quantize(x, "current", power_of_two=True).scale_inv == 1 / 64
    assert tenon.quantize(x, "block1x128", power_of_two=False).scale_inv[0, 0] == q.scale_inv
    assert tenon.quantize(x, "current", eps=7.0).scale_inv == np.float32(1 / np.float32(64))
    given = tenon.quantize(x, "current", amax=28.0)
    assert given.scale_inv == 1 / 16 and given.amax == 28
    assert tenon.quantize(x, "current", amax=np.float32(28)).scale_inv == 1 / 16


def test_swizzled_order():
    x = numbers((130, 256))
    plain = tenon.quantize(x, "mxfp8").scale_inv.view(np.uint8)
    q = tenon.quantize(x, "mxfp8", swizzled=True)
    tiles = plain.reshape(-1, 4, 32, plain.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    np.testing.assert_array_equal(q.scale_inv.view(np.uint8).ravel(), tiles.ravel())
    np.testing.assert_array_equal(q.dequantize(), tenon.quantize(x, "mxfp8").dequantize())


def test_health_and_story():
    x = np.array([[1, 1e-6, np.nan, 600, 0, np.inf]], np.float32)
    q = tenon.quantize(x, "delayed", scale=1.0, health=True)
    assert q.health == (1, 1, 2)
    for word in ("1x6", "float8_e4m3fn", "delayed", "rowwise", "1 saturated", "10 (24 as float32)"):
        assert word in repr(q), repr(q)
    assert "<table>" in q._repr_html_()
    assert tenon.quantize(x, "mxfp8").health is None


def test_delayed_scaling():
    x = numbers((8, 16))
    history, scale = np.zeros((4, 2), np.float32), np.ones(2, np.float32)
    q = tenon.quantize(x, "delayed", scale=scale[:1], amax=history[0, :1])
    np.testing.assert_array_equal(q.data.view(np.uint8), cast(x, "e4m3").view(np.uint8))
    assert history[0, 0] == np.abs(x).max() and history[0, 1] == 0
    tenon.gelu(x * 4, quantize=tenon.Format("delayed", scale=1.0, amax=history[0, :1]))
    amax = history[0, 0].copy()
    assert amax > np.abs(x).max()
    tenon.delayed_update(history, scale)
    assert scale[0] == np.float32(448) / amax and scale[1] == 1
    np.testing.assert_array_equal(history[:, 0], [0, 0, 0, amax])
    one = np.array([2.0, 8.0, 4.0], np.float32)
    most = np.ones(1, np.float32)
    tenon.delayed_update(one, most, "e5m2", margin=1, most_recent=True)
    assert most == 57344 / 2 / 2
    np.testing.assert_array_equal(one, [0, 4, 2])


def test_a_quantized_from_arrays():
    x = numbers((4, 64))
    q = tenon.quantize(x, "mxfp8")
    made = tenon.Quantized("mxfp8", x.shape, data=q.data, scale_inv=q.scale_inv)
    np.testing.assert_array_equal(made.dequantize(), q.dequantize())
    one = tenon.Quantized(
        "delayed", (2, 2), "bf16", data=np.ones((2, 2), E4M3), scale_inv=np.full(1, 0.5, np.float32)
    )
    np.testing.assert_array_equal(one.dequantize("f32"), np.full((2, 2), 0.5))


X = np.ones((2, 4), np.float32)
BAD = [
    (lambda: tenon.quantize(X, "mxfp4"), ValueError, "'mxfp4' is not known; use one of delayed"),
    (lambda: tenon.quantize(X, 8), TypeError, "the format is a int"),
    (lambda: tenon.quantize(X, "mxfp8", dtype="bf16"), ValueError, "dtype 'bf16'; it must be"),
    (lambda: tenon.quantize(X, "mxfp8", rowwise=False), ValueError, "neither rowwise nor"),
    (lambda: tenon.quantize(X, "delayed"), ValueError, "delayed scaling needs its scale"),
    (lambda: tenon.quantize(X, "mxfp8", scale=1.0), ValueError, "finds its scales by itself"),
    (lambda: tenon.quantize(X, "mxfp8", eps=1.0), ValueError, "eps = 1"),
    (lambda: tenon.quantize(X, "current", swizzled=True), ValueError, "mxfp8"),
    (lambda: tenon.quantize(X.astype(float), "mxfp8"), TypeError, "quantize: x is float64"),
    (lambda: tenon.quantize(X, "delayed", scale=X), ValueError, "scale has 8 elements"),
    (lambda: tenon.quantize(X, "delayed", scale=1.0, amax=1.0), TypeError, "written in place"),
    (lambda: tenon.dequantize(X), TypeError, "takes a tenon.Quantized"),
    (lambda: tenon.quantize(X, "mxfp8").requantize("none"), ValueError, "'none' is not known"),
    (lambda: tenon.delayed_update(X.astype(np.float16), X[0]), TypeError, "history is float16"),
    (lambda: tenon.delayed_update(X, np.ones(3, np.float32)), ValueError, "scale is 1x3"),
    (lambda: tenon.delayed_update(X[:, ::2], np.ones(2, np.float32)), ValueError, "strides"),
    (
        lambda: tenon.Quantized("mxfp8", (4, 4), data=np.ones(3, E4M3)).dequantize(),
        ValueError,
        "3 elements where 4x4 belong",
    ),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_read_only_state_is_refused():
    history = np.zeros((4, 1), np.float32)
    history.flags.writeable = False
    with pytest.raises(ValueError, match="history is read-only"):
        tenon.delayed_update(history, np.ones(1, np.float32))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_is_positive(scale):
    with pytest.raises(ValueError, match="scale=.*greater than 0"):
        tenon.quantize(np.ones((4, 8), np.float32), "delayed", scale=scale)


def test_given_amax():
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="amax=-3.0; it is the largest"):
        tenon.quantize(x, "current", amax=-3.0)
    # Defined by the specification.
    assert tenon.quantize(x, "current", amax=float("nan")).scale_inv[0] == 1
    with pytest.raises(ValueError, match="current finds its scale by itself"):
        tenon.quantize(x, "current", scale=2.0)
    with pytest.raises(TypeError, match="set them in the Format"):
        tenon.quantize(x, tenon.Format("mxfp8"), columnwise=True)


def test_delayed_update_arguments():
    history, scale = np.ones((4, 1), np.float32), np.ones(1, np.float32)
    with pytest.raises(TypeError, match="margin=0.5; it must be a whole number"):
        tenon.delayed_update(history, scale, margin=0.5)
    with pytest.raises(TypeError, match="history is NoneType"):
        tenon.delayed_update(None, None)
    tenon.delayed_update(history, scale, margin=np.int64(1))
    assert scale[0] == 224
