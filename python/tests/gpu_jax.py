"""Compares the JAX front end on a GPU with its CPU handlers.

test_gpu.py runs it. It exits with 77 without a GPU.
"""

from __future__ import annotations

import os
import sys

import numpy as np

try:
    import jax
    import jax.numpy as jnp

    GPU = jax.devices(os.environ.get("TENON_TEST_DEVICE", "cuda"))[0]
    CPU = jax.devices("cpu")[0]
except (ImportError, RuntimeError) as e:
    print(f"no JAX with a GPU: {e}")
    sys.exit(77)

import tenon.jax as tj

KEYS = (("gelu",), ("silu", "linear"), ("clamped_silu", "clamped_linear"), ("relu",))


def numbers(*shape, dtype=jnp.float32, seed=0):
    return np.asarray(3 * np.random.default_rng(seed).standard_normal(shape), np.float32).astype(
        dtype
    )


def same(function, *arrays):
    """Checks that the compiled function(*arrays) has the same bits on both devices.

    It is called three times, so that a command buffer is recorded and replayed.
    """
    compiled = jax.jit(function)
    here = jax.tree.leaves(compiled(*jax.device_put(arrays, CPU)))
    for _ in range(3):
        there = jax.tree.leaves(compiled(*jax.device_put(arrays, GPU)))
        for i, (a, b) in enumerate(zip(there, here, strict=True)):
            assert a.devices() == {GPU}, f"result {i} is on {a.devices()}"
            a, b = np.asarray(a), np.asarray(b)
            assert a.shape == b.shape and a.dtype == b.dtype, f"result {i}"
            kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize]
            wrong = int((a.view(kind) != b.view(kind)).sum()) if a.size else 0
            assert wrong == 0, f"result {i}: {wrong} of {a.size} differ"


def quantizers():
    for layout in tj.QuantizeLayout:
        one = jnp.ones(1, jnp.float32)
        yield tj.DelayedScaleQuantizer(q_layout=layout, scale=4 * one)
        yield tj.CurrentScaleQuantizer(q_layout=layout)
        yield tj.BlockScaleQuantizer(q_layout=layout)
        yield tj.Float8BlockScaleQuantizer(q_layout=layout)


def plain():
    for key in KEYS:
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            x, dz = (
                numbers(6, 10, len(key), 48, dtype=dtype),
                numbers(6, 10, 48, dtype=dtype, seed=1),
            )
            same(lambda x: tj.act_lu(x, key, precision="strict"), x)  # noqa: B023
            same(lambda dz, x: tj.dact_lu(dz, x, key, precision="strict"), dz, x)  # noqa: B023


def sums_and_amax():
    x, dz = numbers(40, 2, 48), numbers(40, 48, seed=1)
    key = ("silu", "linear")
    same(lambda dz, x: tj.quantize_dact_dbias(dz, x, key, precision="strict"), dz, x)
    same(lambda x: tj.act_lu(x, key, output_amax_when_no_scaling=True, precision="strict"), x)


def quantised():
    x, dz = numbers(40, 2, 160), numbers(40, 160, seed=1)
    key = ("silu", "linear")
    for q in quantizers():
        same(lambda x: tj.act_lu(x, key, q, precision="strict"), x)  # noqa: B023
        same(lambda x: tj.act_lu(x, key, q, precision="strict").dequantize(), x)  # noqa: B023
        same(
            lambda dz, x: tj.quantize_dact_dbias(dz, x, key, quantizer=q, precision="strict"),  # noqa: B023
            *(dz, x),
        )


def gradients():
    x = numbers(12, 1, 64)
    same(jax.grad(lambda x: (tj.activation(x, ("gelu",), precision="strict") ** 2).sum()), x)
    same(jax.vmap(lambda x: tj.activation(x, ("gelu",), precision="strict")), numbers(3, 5, 1, 64))


def among_other_ops():
    """Several calls in one program, between kernels of XLA."""

    def layers(x):
        for _ in range(3):
            x = tj.activation(x * 0.5 + 1, ("gelu",))
            x = jnp.sin(x)[..., None, :]
        return x

    x = jax.device_put(numbers(32, 1, 256), GPU)
    compiled = jax.jit(layers)
    first = np.asarray(compiled(x))
    for _ in range(4):
        np.testing.assert_array_equal(np.asarray(compiled(x)), first)
    other = jax.device_put(numbers(32, 1, 256, seed=3), GPU)
    np.testing.assert_allclose(compiled(other), layers(other), rtol=1e-5, atol=1e-5)
    jax.jit(jax.grad(lambda x: layers(x).sum()))(x).block_until_ready()


failed = 0
for test in (plain, sums_and_amax, quantised, gradients, among_other_ops):
    try:
        test()
        print(f"passed  {test.__name__}", flush=True)
    except Exception as e:  # continue with the next test
        failed += 1
        print(f"failed  {test.__name__}: {type(e).__name__}: {e}", flush=True)
sys.exit(int(failed > 0))
