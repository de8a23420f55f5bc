"""Tests of the FFI handlers: errors, and initialisation without memory access."""

import ctypes

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from tenon import _lib  # noqa: E402
from tenon.jax import QuantizeLayout, _ffi, _workspace  # noqa: E402
from tenon.jax.cpp_extensions import _primitives  # noqa: E402
from test_jax_quantize import (  # noqa: E402
    FP8,
    MODES,
    act_lu,
    backward,
    forward,
    numbers,
    quantize_dact_dbias,
    same,
)


def call(target, x, **changes):
    """Calls the forward handler like XLA, with custom attributes and results."""
    results = changes.pop("results", [(x.shape[0], x.shape[-1]), (0,), (0,), (0,), (1,)])
    dtypes = changes.pop("dtypes", [x.dtype] * 2 + [np.float32] * 3)
    attributes = dict(
        act="gelu",
        act_params=np.array([], np.float32),
        scaling_mode=0,
        quantize_layout=0,
        output_amax_when_no_scaling=False,
    )
    attributes |= changes
    attributes = {k: v for k, v in attributes.items() if v is not None}
    shapes = [jax.ShapeDtypeStruct(*p) for p in zip(results, dtypes, strict=True)]
    one = jnp.ones(1, jnp.float32)
    return jax.ffi.ffi_call(target, shapes, input_output_aliases={2: 4})(x, one, one, **attributes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"act": "gelux"}, "did you mean 'gelu'"),
        ({"act": "swiglu"}, "x has 1 in its last axis but one; swiglu has 2 inputs"),
        ({"act_params": np.ones(2, np.float32)}, "act_params has 2 numbers"),
        ({"act": "elu", "act_params": np.float32([np.nan])}, "alpha = nan is outside"),
        ({"scaling_mode": 6}, "scaling_mode = 6; it must be from 0 to 5"),
        ({"quantize_layout": -1}, "quantize_layout = -1"),
        ({"scaling_mode": None}, "scaling_mode cannot be read"),
        ({"is_dbias": True}, "no attribute 'is_dbias'"),
        ({"qantize_layout": 1}, "no attribute 'qantize_layout'"),
        ({"results": [(3, 9), (0,), (0,), (0,), (1,)]}, "data has 27 elements; it must have 3x8"),
        ({"dtypes": [np.int32] * 2 + [np.float32] * 3}, "XLA type number"),
        ({"scaling_mode": 1}, "scaled data are e4m3 or e5m2|scale_inv has 0 elements"),
        (
            {"results": [(3, 8), (0,), (0,), (0,), (2,)], "output_amax_when_no_scaling": True},
            "amax|alias",
        ),
    ],
    ids=str,
)
def test_handlers_check_what_they_get(changes, text):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text):
        jax.block_until_ready(call("tenon_act_lu_ffi", jnp.ones((3, 1, 8)), **changes))


def test_a_transposed_copy_without_scaling():
    x = numbers((3, 1, 8))
    shapes = [(3, 8), (8, 3), (0,), (0,), (1,)]
    y, turned, _, _, amax = call("tenon_act_lu_ffi", x, quantize_layout=2, results=shapes)
    np.testing.assert_array_equal(turned, y.T)
    assert amax[0] == 1  # the given value, because no amax is requested
    none = [(0,), *shapes[1:]]
    got = call("tenon_act_lu_ffi", x, quantize_layout=1, results=none)
    np.testing.assert_array_equal(got[1], y.T)


class Buffer(ctypes.Structure):
    """The first fields of XLA_FFI_Buffer."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    )


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("all", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class CallFrame(ctypes.Structure):
    """The first fields of XLA_FFI_CallFrame."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Buffers),
        ("rets", Buffers),
    )


def without_data(handler, frame):
    """The result of a handler before XLA has memory for its buffers."""
    sides = (frame.contents.args, frame.contents.rets)
    buffers = [side.all[i].contents for side in sides for i in range(side.count)]
    data = [b.data for b in buffers]
    for b in buffers:
        b.data = None
    error = handler(frame)
    for b, address in zip(buffers, data, strict=True):
        b.data = address
    return error


@pytest.fixture
def on_cpu():
    """Uses the CPU, also if JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mode", ["delayed", "current", "mxfp8", "block1x128", "block128x128"])
def test_initialising_touches_nothing(mode, monkeypatch):
    # XLA initialises only on CUDA, so this test uses the executing handler for both stages.
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
    seen, kept = [], []
    for target, symbol in (
        (_ffi.ACT_LU, "tenon_ActLu"),
        (_ffi.DACT_LU, "tenon_DActLuDBiasQuantize"),
        (_ffi.DEQUANTIZE, "tenon_Dequantize"),
    ):
        address = [
            ctypes.cast(getattr(_lib.lib, symbol + s), ctypes.c_void_p).value
            for s in ("", "Initialize")
        ]
        execute, initialise = map(handler, address)

        def both(frame, execute=execute, initialise=initialise, symbol=symbol):
            if not frame.contents.extension:  # otherwise XLA requests metadata
                stage = frame.contents.stage
                frame.contents.stage = stage - 1
                seen.append((symbol, without_data(initialise, frame) or initialise(frame)))
                frame.contents.stage = stage
            return execute(frame)

        kept.append(handler(both))
        name = f"{target}_{mode}"
        pointer = ctypes.cast(kept[-1], ctypes.c_void_p).value
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")
    monkeypatch.setattr(_primitives.ActLuPrimitive, "target", f"{_ffi.ACT_LU}_{mode}")
    back = _primitives.DActLuDBiasQuantizePrimitive
    monkeypatch.setattr(back, "target", f"{_ffi.DACT_LU}_{mode}")
    monkeypatch.setattr(_ffi, "DEQUANTIZE", f"{_ffi.DEQUANTIZE}_{mode}")
    q = MODES[mode](FP8[0], QuantizeLayout.ROWWISE_COLWISE)
    x, dz = numbers((9, 2, 40)), numbers((9, 40), seed=1)
    y = act_lu(x, ("silu", "linear"), q)
    same(y, forward("gated(silu)", x, q))
    dx, dbias = quantize_dact_dbias(dz, x, ("silu", "linear"), True, q)
    want = backward("gated(silu)", dz, x, q)
    np.testing.assert_array_equal(dbias, want.pop("dbias"))
    same(dx, want)
    jax.block_until_ready(y.dequantize())
    assert [s for s, _ in seen] == ["tenon_ActLu", "tenon_DActLuDBiasQuantize", "tenon_Dequantize"]
    assert not any(error for _, error in seen)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mode", MODES)
def test_a_workspace_for_cuda_changes_nothing(mode, monkeypatch):
    """If JAX has a GPU, results include a workspace for the CUDA kernels."""
    monkeypatch.setattr(_workspace, "_has_cuda", lambda: True)
    q = MODES[mode](FP8[0], QuantizeLayout.ROWWISE_COLWISE)
    x, dz = numbers((300, 2, 40)), numbers((300, 40), seed=1)
    seen = []
    measured = _workspace._measured
    monkeypatch.setattr(
        _workspace, "_measured", lambda *a: seen.append(measured(*a)) or max(seen[-1], 64)
    )
    key = ("silu", "linear")
    y = act_lu(x, key, q)
    same(y, forward("gated(silu)", x, q))
    dx, dbias = quantize_dact_dbias(dz, x, key, True, q)
    want = backward("gated(silu)", dz, x, q)
    np.testing.assert_array_equal(dbias, want.pop("dbias"))
    same(dx, want)
    # Sums over blocks of at most 128 rows are stored in fp32.
    assert len(seen) == 2 and seen[1] >= 3 * 80 * 4
