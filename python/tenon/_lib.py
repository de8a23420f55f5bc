"""The C ABI through ctypes: structs, errors, and nothing that knows an array library."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "DEVICES",
    "DTYPES",
    "SCALINGS",
    "Allocate",
    "BackwardArgs",
    "DropoutArgs",
    "DropoutBackwardArgs",
    "ForwardArgs",
    "GradRequest",
    "Options",
    "PlanRequest",
    "QuantizeArgs",
    "Tensor",
    "View",
    "byref",
    "check",
    "encoded",
    "lib",
    "options",
    "text_of",
]

# Numbers of tenon_dtype, in order.
DTYPES = ("f32", "f16", "bf16", "e4m3", "e5m2", "e8m0")
DEVICES = {"cpu": 0, "cuda": 1}
SCALINGS = ("none", "delayed", "current", "mxfp8", "block1x128", "block128x128")


class View(ctypes.Structure):
    """A matrix in somebody's memory; rows lie `stride` elements apart."""

    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("stride", c_int64),
        ("dtype", c_int32),
    )


ViewPtr = POINTER(View)


class _Sized(ctypes.Structure):
    """Structs whose first field is their size."""

    _fields_: ClassVar[Any] = (("size", c_size_t),)

    def __init__(self, **fields: object) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


# Lends device memory for the time of a call: (user, bytes) -> address.
Allocate = CFUNCTYPE(c_void_p, c_void_p, c_size_t)


class Options(_Sized):
    _fields_ = (
        ("precision", c_int32),
        ("rounding", c_int32),
        ("device", c_int32),
        ("stream", c_void_p),
        ("allocate", Allocate),
        ("user", c_void_p),
    )


class Tensor(_Sized):
    _fields_ = (
        ("scaling", c_char_p),
        ("dtype", c_int32),
        ("power_of_two", c_int32),
        ("eps", c_float),
        ("swizzled", c_int32),
        ("amax_given", c_int32),
        ("data", ViewPtr),
        ("scale_inv", ViewPtr),
        ("columnwise_data", ViewPtr),
        ("columnwise_scale_inv", ViewPtr),
        ("scale", ViewPtr),
        ("amax", ViewPtr),
        ("health", ViewPtr),
    )


TensorPtr = POINTER(Tensor)


class ForwardArgs(_Sized):
    _fields_ = (
        *((name, ViewPtr) for name in ("x", "b", "bias", "scale", "y", "amax")),
        ("layout", c_char_p),
        *((name, TensorPtr) for name in ("x_encoded", "b_encoded", "y_encoded")),
    )


class BackwardArgs(_Sized):
    _fields_ = (
        *(
            (name, ViewPtr)
            for name in ("grad", "x", "b", "bias", "scale", "dx", "db", "dbias", "dscale", "amax")
        ),
        ("layout", c_char_p),
        *(
            (name, TensorPtr)
            for name in ("grad_encoded", "x_encoded", "b_encoded", "dx_encoded", "db_encoded")
        ),
    )


class QuantizeArgs(_Sized):
    _fields_ = (
        *((name, ViewPtr) for name in ("x", "y", "dbias", "amax")),
        ("x_encoded", TensorPtr),
        ("y_encoded", TensorPtr),
    )


class DropoutArgs(_Sized):
    _fields_ = (
        *((name, ViewPtr) for name in ("x", "bias", "residual", "y")),
        ("p", c_double),
        ("training", c_int32),
        ("random", POINTER(c_uint64)),
    )


class DropoutBackwardArgs(_Sized):
    _fields_ = (
        *((name, ViewPtr) for name in ("grad", "dx", "dbias", "dresidual")),
        ("p", c_double),
        ("training", c_int32),
        ("random", POINTER(c_uint64)),
    )


class GradRequest(ctypes.Structure):
    """What is asked of a gradient; all zero is the default."""

    _fields_ = tuple((name, c_int32) for name in ("unwanted", "dtype_given", "dtype", "accumulate"))


class PlanRequest(_Sized):
    _fields_ = (
        ("cols", c_int64),
        *((name, c_int32) for name in ("dtype", "parameter_dtype_given", "parameter_dtype")),
        ("recipe", c_char_p),
        *((n, c_int32) for n in ("recipe_e4m3", "evaluation", "forward_only", "no_input_grad")),
        ("keep", c_char_p),
        ("parameter_grads", POINTER(GradRequest)),
        ("parameter_grad_count", c_size_t),
        ("extra_grads", POINTER(GradRequest)),
        ("extra_grad_count", c_size_t),
        ("opaque_ops", c_void_p),
        ("opaque_op_count", c_size_t),
        ("collectives", c_void_p),
    )


# name: (result, arguments)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tenon_version": (c_char_p, []),
    "tenon_last_error": (c_char_p, []),
    "tenon_forward": (c_int, [c_char_p, POINTER(ForwardArgs), POINTER(Options)]),
    "tenon_backward": (c_int, [c_char_p, POINTER(BackwardArgs), POINTER(Options)]),
    "tenon_quantize": (c_int, [POINTER(QuantizeArgs), POINTER(Options)]),
    "tenon_encoding_shape": (
        c_int,
        [c_char_p, c_int64, c_int64, c_int32, POINTER(c_int64), POINTER(c_int64)],
    ),
    "tenon_delayed_update": (
        c_int,
        [ViewPtr, ViewPtr, c_int32, c_int32, c_int32, POINTER(Options)],
    ),
    "tenon_bias_dropout_add": (c_int, [POINTER(DropoutArgs), POINTER(Options)]),
    "tenon_bias_dropout_add_backward": (c_int, [POINTER(DropoutBackwardArgs), POINTER(Options)]),
    "tenon_fused_forward": (
        c_int,
        [c_char_p, c_char_p, ViewPtr, c_size_t, ViewPtr, POINTER(Options)],
    ),
    "tenon_fused_backward": (
        c_int,
        [c_char_p, c_char_p, ViewPtr, c_size_t, ViewPtr, ViewPtr, POINTER(Options)],
    ),
    "tenon_run": (c_int, [c_char_p, ViewPtr, c_size_t, ViewPtr, c_size_t, POINTER(Options)]),
    "tenon_l2_normalization": (c_int, [ViewPtr, ViewPtr, ViewPtr, c_float, POINTER(Options)]),
    "tenon_l2_normalization_backward": (
        c_int,
        [ViewPtr, ViewPtr, ViewPtr, ViewPtr, POINTER(Options)],
    ),
    "tenon_define": (c_int, [c_char_p, c_char_p]),
    "tenon_names": (c_int, [c_char_p, c_size_t, POINTER(c_size_t)]),
    "tenon_info": (c_int, [c_char_p, c_char_p, c_size_t, POINTER(c_size_t)]),
    "tenon_show": (c_int, [c_char_p, c_int32, c_char_p, c_size_t, POINTER(c_size_t)]),
    "tenon_plan_build": (
        c_int,
        [c_char_p, POINTER(PlanRequest), POINTER(Options), POINTER(c_void_p)],
    ),
    "tenon_plan_free": (None, [c_void_p]),
    "tenon_plan_describe": (
        c_int,
        [c_void_p, c_int64, c_char_p, c_char_p, c_size_t, POINTER(c_size_t)],
    ),
    "tenon_plan_sizes": (
        c_int,
        [c_void_p, c_int64, POINTER(c_int64), c_size_t, POINTER(c_int64)],
    ),
    "tenon_plan_run": (
        c_int,
        [c_void_p, c_int32, c_int64, POINTER(c_void_p), c_size_t, c_void_p, c_int32, c_void_p],
    ),
    "tenon_pinned": (c_int, [c_char_p, c_char_p, c_size_t, POINTER(c_size_t)]),
    "tenon_measure_begin": (c_int, []),
    "tenon_measure_end": (c_int, [POINTER(c_size_t)]),
    "tenon_set_threads": (c_int, [c_int32]),
    "tenon_threads": (c_int, []),
}


def path_of_libtenon() -> Path:
    """libtenon of this package; TENON_LIBRARY names another one, e.g. of a build tree."""
    given = os.environ.get("TENON_LIBRARY")
    if given:
        return Path(given)
    return Path(__file__).parent / "lib" / "libtenon.so"


def _load() -> ctypes.CDLL:
    path = path_of_libtenon()
    try:
        # The GIL is released during calls, as the C ABI touches no Python object.
        loaded = ctypes.CDLL(str(path))
    except OSError as e:
        raise ImportError(
            f"tenon: the library {path} cannot be loaded ({e}); install the wheel "
            "tenon-kernels, or set TENON_LIBRARY to the path of a built libtenon.so"
        ) from e
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


lib = _load()

# tenon_code to exception: a wrong value, something not offered, a machine that failed.
_ERRORS = {1: ValueError, 2: NotImplementedError}


def check(code: int) -> None:
    """Turns a code of the C ABI into an exception with its message."""
    if code:
        raise _ERRORS.get(code, RuntimeError)(lib.tenon_last_error().decode("utf-8", "replace"))


def encoded(text: Any, what: str) -> bytes:
    """A text as the C ABI takes it; `what` names it to the caller."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}; it must be a text")
    if "\0" in text:  # it would end there for C
        raise ValueError(f"{what} {text!r} holds a null character; leave it out")
    return text.encode()


def text_of(function: object, *arguments: object) -> str:
    """A text that a function writes into a buffer of the size it asks for."""
    size = c_size_t(1024)
    while True:  # another thread's definition may make it longer
        capacity = size.value
        buffer = ctypes.create_string_buffer(capacity)
        check(function(*arguments, buffer, capacity, byref(size)))  # type: ignore[operator]
        if size.value <= capacity:
            return buffer.value.decode()


_PRECISIONS = {"native": 0, "strict": 1}
_ROUNDINGS = {"once": 0, "eager": 1}
_OPTIONS: dict[tuple[str, str, str], Options] = {}


def options(precision: str = "native", rounding: str = "once", device: str = "cpu") -> Options:
    """Options of a call on the CPU, or of a plan; equal ones are one object."""
    found = _OPTIONS.get((precision, rounding, device))
    if found is None:
        if precision not in _PRECISIONS:
            raise ValueError(f"tenon: precision={precision!r}; it must be 'native' or 'strict'")
        if rounding not in _ROUNDINGS:
            raise ValueError(f"tenon: rounding={rounding!r}; it must be 'once' or 'eager'")
        if device not in DEVICES:
            raise ValueError(f"tenon: device={device!r}; it must be 'cpu' or 'cuda'")
        found = _OPTIONS[precision, rounding, device] = Options(
            precision=_PRECISIONS[precision],
            rounding=_ROUNDINGS[rounding],
            device=DEVICES[device],
        )
    return found
