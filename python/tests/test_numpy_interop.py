"""Tests of DLPack import and export, the module, the command, and threads."""

import copy
import os
import pickle
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import tenon

X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def python(code, **environment):
    paths = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_tensors(name):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X).to(getattr(torch, name))
    y = tenon.gelu(x)
    assert isinstance(y, np.ndarray) and y.dtype.name == name
    back = torch.from_dlpack(tenon.to_dlpack(y))
    assert back.dtype == x.dtype and back.data_ptr() == y.ctypes.data
    np.testing.assert_array_equal(tenon.gelu(x[:, ::2]), tenon.gelu(x)[:, ::2])
    np.testing.assert_array_equal(tenon.gelu(x.T), tenon.gelu(x).T)
    with pytest.raises(ValueError, match="gelu: x gives no DLPack capsule.*detach"):
        tenon.gelu(x.requires_grad_())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_fp8(name):
    torch = pytest.importorskip("torch")
    q = tenon.quantize(X, "mxfp8", dtype=getattr(ml_dtypes, name))
    there = torch.from_dlpack(tenon.to_dlpack(q.data))
    assert there.dtype == getattr(torch, name)
    np.testing.assert_array_equal(there.float().numpy(), q.data.astype(np.float32))
    from tenon._dlpack import read

    again = read("test", "x", there)
    assert again.dtype == q.data.dtype and again.ctypes.data == q.data.ctypes.data
    if hasattr(torch, "float8_e8m0fnu"):
        scales = torch.from_dlpack(tenon.to_dlpack(q.scale_inv))
        assert scales.dtype == torch.float8_e8m0fnu
    with pytest.raises(TypeError, match="without its scales"):
        tenon.gelu(there)


def test_memory_stays_alive():
    torch = pytest.importorskip("torch")
    there = torch.from_dlpack(tenon.to_dlpack(tenon.gelu(X).astype(ml_dtypes.bfloat16)))
    np.zeros(10**6)
    wanted = tenon.gelu(X).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(there.float().numpy(), wanted)
    inner = np.from_dlpack(tenon.to_dlpack(X[:, 1:]))
    np.testing.assert_array_equal(inner, X[:, 1:])


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    here = jax.devices("cpu")[0]  # NumPy cannot read results on other devices
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        y = tenon.swiglu(jnp.asarray(X, dtype, device=here))
        assert y.dtype == dtype and y.shape == (3, 4)
    with pytest.raises(TypeError, match="x is int32"):
        tenon.gelu(jnp.ones(3, jnp.int32, device=here))


def test_other_devices_are_refused():
    class Elsewhere:
        def __dlpack_device__(self):
            return (10, 0)

        def __dlpack__(self):
            raise AssertionError

    with pytest.raises(NotImplementedError, match=r"gelu: x is on the DLPack device \(10, 0\)"):
        tenon.gelu(Elsewhere())
    with pytest.raises(TypeError, match="to_dlpack: a list"):
        tenon.to_dlpack([1.0])


def test_objects_with_array():
    class Boxed:
        def __array__(self, dtype=None, copy=None):
            return X

    np.testing.assert_array_equal(tenon.gelu(Boxed()), tenon.gelu(X))


def test_import_is_light_and_quick():
    code = """
import sys, time
start = time.process_time()
import tenon
print(time.process_time() - start)
assert not {"torch", "jax", "numpy", "ml_dtypes"} & set(sys.modules), "imports too much"
tenon.gelu
assert not {"torch", "jax"} & set(sys.modules)
"""
    seconds = []
    for _ in range(3):
        done = python(code)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    print(f"import tenon: {min(seconds) * 1e3:.0f} ms")
    assert min(seconds) < 0.15


def test_names_of_the_module():
    assert {"gelu", "quantize", "fuse", "exp"} <= set(dir(tenon))
    for name in tenon.__all__:
        assert getattr(tenon, name) is not None
        assert name.startswith("__") or name == "Array" or getattr(tenon, name).__doc__, name
    assert tenon.quick_gelu(X).tolist() == tenon.qgelu(X).tolist()
    assert tenon.__version__.count(".") == 2
    namespace: dict[str, object] = {}
    exec("from tenon import *", namespace)  # noqa: S102
    assert namespace["quantize"] is tenon.quantize


def test_a_missing_library_says_what_to_do():
    done = python("import tenon", TENON_LIBRARY="/nowhere/libtenon.so")
    assert done.returncode and "set TENON_LIBRARY" in done.stderr


def test_copies_and_pickles():
    q = tenon.quantize(X, "mxfp8")
    for again in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    assert pickle.loads(pickle.dumps(tenon.gelu)) == tenon.gelu


def test_threads():
    before = tenon.threads()
    tenon.set_threads(2)
    assert tenon.threads() == 2
    tenon.set_threads(0)
    assert tenon.threads() == before
    with pytest.raises(ValueError, match="set_threads"):
        tenon.set_threads(-1)


def test_the_command(tmp_path):
    program = tmp_path / "tenon"
    program.write_text('#!/bin/sh\necho "ran $*"\nexit 3\n')
    program.chmod(0o755)
    run = "import sys; sys.argv = ['tenon', 'show', 'gelu']; import runpy; "
    run += "runpy.run_module('tenon', run_name='__main__')"
    done = python(run, TENON_COMMAND=str(program))
    assert done.stdout == "ran show gelu\n" and done.returncode == 3
    missing = python(run, TENON_COMMAND=str(tmp_path / "none"))
    assert missing.returncode == 1 and "set TENON_COMMAND" in missing.stderr


def test_calls_are_not_slow():
    x = np.zeros((4, 4), np.float32)
    gelu = tenon.gelu
    gelu(x)
    start = time.perf_counter()
    for _ in range(200):
        gelu(x)
    each = (time.perf_counter() - start) / 200
    print(f"tenon.gelu of a 4x4 array: {each * 1e6:.0f} us")
    assert each < 1e-3


def test_dlpack_refusals():
    torch = pytest.importorskip("torch")
    refused = (ValueError, TypeError, NotImplementedError)
    zeros = torch.zeros(3, 3, device="cpu")
    for x in (
        zeros.to_sparse(),
        zeros.to(torch.complex64).conj(),
        zeros.to(torch.float8_e4m3fnuz),
        torch.zeros(3, device="meta"),
    ):
        with pytest.raises(refused, match="gelu: x"):
            tenon.gelu(x)


def test_threads_are_checked():
    for wrong, error in (
        (1.5, TypeError),
        (True, TypeError),
        (-1, ValueError),
        (10**6, ValueError),
    ):
        with pytest.raises(error, match="set_threads"):
            tenon.set_threads(wrong)
