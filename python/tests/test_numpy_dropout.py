"""Tests of dropout against a reference of its random stream, and of L2 normalisation of rows."""

import ml_dtypes
import numpy as np
import pytest
import tenon
from hypothesis import given, settings
from hypothesis import strategies as st

MASK = 2**32 - 1


def philox(counter, key):
    """Philox 4x32-10."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def factors(shape, p, random):
    """The factor of every element: 0, or 65536/(65536 - T)."""
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    columns = random.columns or random.col0 + cols
    threshold = int(np.round(65536 * p))
    scale = np.float32(65536 / (65536 - threshold)) if threshold < 65536 else np.float32(0)
    out = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for c in range(cols):
            i = (random.row0 + r) * columns + random.col0 + c
            group, offset = i // 8, random.offset
            key = (random.seed & MASK, random.seed >> 32)
            w = philox((group & MASK, group >> 32, offset & MASK, offset >> 32), key)
            u = (w[i % 8 // 2] >> (16 * (i % 2))) & 0xFFFF
            out[r, c] = scale if u >= threshold else 0
    return out.reshape(shape)


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def test_the_reference_is_philox():
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_forward_and_backward(dtype):
    x, bias, residual = numbers(2, 3, 8, dtype=dtype), numbers(8, dtype=dtype), numbers(2, 3, 8)
    residual = residual.astype(dtype)
    random = tenon.Random(2**40 + 17, offset=3)
    before = random.copy()
    y = tenon.bias_dropout_add(x, bias, residual, 0.25, random=random)
    assert random.offset == 4 and before.offset == 3 and y.dtype == dtype
    f = factors(x.shape, 0.25, before).astype(np.float64)
    wanted = residual.astype(float) + (x.astype(float) + bias.astype(float)) * f
    np.testing.assert_allclose(
        y.astype(float), wanted, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-6
    )
    found = tenon.bias_dropout_add_backward(
        residual, 0.25, random=before, dbias=True, dresidual=True
    )
    eps = float(ml_dtypes.finfo(dtype).eps)
    dx = residual.astype(float) * f
    np.testing.assert_allclose(found.dx.astype(float), dx, rtol=eps)
    np.testing.assert_allclose(found.dbias.astype(float), dx.sum((0, 1)), rtol=eps, atol=1e-5)
    np.testing.assert_array_equal(found.dresidual, residual)
    assert before.offset == 3


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 2),
    st.floats(0, 1),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_stream(seed, offset, p, shape):
    x = np.ones(shape, np.float32)
    random = tenon.Random(seed, offset)
    wanted = factors(tuple(shape), p, random)
    np.testing.assert_array_equal(tenon.dropout(x, p, random=random), wanted)
    back = tenon.dropout_backward(x, p, random=tenon.Random(seed, offset))
    np.testing.assert_array_equal(back, wanted)


def test_shards_draw_what_the_whole_would():
    x = numbers(4, 10)
    whole = tenon.dropout(x, 0.5, random=tenon.Random(7))
    part = tenon.dropout(x[1:3, 4:9], 0.5, random=tenon.Random(7, row0=1, col0=4, columns=10))
    np.testing.assert_array_equal(part, whole[1:3, 4:9])


def test_edges():
    x = numbers(3, 4)
    random = tenon.Random(1)
    np.testing.assert_array_equal(tenon.dropout(x, 0.0, random=random), x)
    np.testing.assert_array_equal(tenon.dropout(x, 1.0, random=random), 0)
    np.testing.assert_array_equal(tenon.dropout(x, 0.5, training=False), x)
    inference = tenon.get_bias_dropout_add(False)
    np.testing.assert_array_equal(inference(x, x[0], x, 0.5), x + (x + x[0]))
    assert tenon.dropout(numbers(0, 4), 0.5, random=random).shape == (0, 4)
    assert tenon.dropout(np.float32(2), 0.0, random=random) == 2
    assert tenon.Random().seed != tenon.Random().seed
    strided = numbers(6, 8)[::2, ::-1]
    np.testing.assert_array_equal(
        tenon.dropout(strided, 0.5, random=tenon.Random(3)),
        tenon.dropout(strided.copy(), 0.5, random=tenon.Random(3)),
    )


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4), (2, 1, 3, 5), (0, 4), ()])
def test_l2_normalization(shape):
    x, g = numbers(*shape), numbers(*shape, seed=1)
    exact, grad = x.astype(np.float64), g.astype(np.float64)
    eps = 1e-3
    r = 1 / np.sqrt((exact**2).sum(-1, keepdims=True) + eps) if shape else (exact**2 + eps) ** -0.5
    np.testing.assert_allclose(tenon.l2_normalization(x, eps), exact * r, rtol=2e-6, atol=1e-7)
    y, found = tenon.l2_normalization_forward(x, eps)
    np.testing.assert_allclose(found, r, rtol=2e-6)
    assert found.shape == r.shape
    inner = (exact * grad).sum(-1, keepdims=True) if shape else exact * grad
    wanted = r * (grad - exact * r**2 * inner)
    for given_ in (found, None):
        dx = tenon.l2_normalization_backward(g, x, given_, eps)
        np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5)


X = np.ones((2, 4), np.float32)
BAD = [
    (lambda: tenon.dropout(X, 0.5), TypeError, "random is missing; training needs a state"),
    (lambda: tenon.dropout(X, 0.5, random=7), TypeError, "random is a int"),
    (lambda: tenon.dropout(X, 1.5, random=tenon.Random(0)), ValueError, "p = 1.5"),
    (
        lambda: tenon.dropout(X, 0.5, random=tenon.Random(0, columns=3)),
        ValueError,
        "columns = 3",
    ),
    (lambda: tenon.dropout(X.astype(float), 0.5), TypeError, "x is float64"),
    (
        lambda: tenon.bias_dropout_add(X, None, X[:1]),
        ValueError,
        r"residual has the shape \(1, 4\)",
    ),
    (lambda: tenon.bias_dropout_add(X, X[0, :3], training=False), ValueError, "bias is 1x3"),
    (lambda: tenon.Random(-5), ValueError, "seed = -5; it must lie in"),
    (lambda: tenon.Random(0.5), TypeError, "seed is a float"),
    (lambda: tenon.l2_normalization(X, -1.0), ValueError, "eps = -1"),
    (lambda: tenon.l2_normalization_backward(X[:1], X), ValueError, "grad has the shape"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
