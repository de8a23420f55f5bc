"""The library through ctypes: loading, errors, texts, and nothing that knows an array library."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_size_t
from pathlib import Path
from typing import Any

from . import _c_abi
from ._c_abi import (
    CODE,
    DEVICE,
    DTYPE,
    POWER_OF_TWO,
    PRECISION,
    ROLE,
    ROUNDING,
    Activation,
    Allocate,
    BackwardArgs,
    Buffer,
    DropoutArgs,
    DropoutBackwardArgs,
    ForwardArgs,
    GradRequest,
    Options,
    PlanRequest,
    QuantizeArgs,
    Scaling,
    Tensor,
    View,
)

__all__ = [
    "DEVICE",
    "DTYPE",
    "DTYPES",
    "POWER_OF_TWO",
    "ROLES",
    "Activation",
    "Allocate",
    "BackwardArgs",
    "Buffer",
    "DropoutArgs",
    "DropoutBackwardArgs",
    "ForwardArgs",
    "GradRequest",
    "Options",
    "PlanRequest",
    "QuantizeArgs",
    "Scaling",
    "Tensor",
    "TensorPtr",
    "View",
    "ViewPtr",
    "byref",
    "check",
    "encoded",
    "lib",
    "list_of",
    "options",
    "text_of",
]

# Names by number.
DTYPES = tuple(DTYPE)
ROLES = tuple(ROLE)

ViewPtr = POINTER(View)
TensorPtr = POINTER(Tensor)


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
    for name, (result, *arguments) in _c_abi.SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


lib = _load()

# tenon_code to exception: a wrong value, something not offered, a machine that failed.
_ERRORS = {CODE["invalid_argument"]: ValueError, CODE["unsupported"]: NotImplementedError}


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


def list_of(function: object, struct: type[ctypes.Structure], *arguments: object) -> Any:
    """The structs that a function writes into a list of the length it tells."""
    count = c_size_t()
    check(function(*arguments, None, 0, byref(count)))  # type: ignore[operator]
    found = (struct * count.value)()
    check(function(*arguments, found, count.value, None))  # type: ignore[operator]
    return found


_OPTIONS: dict[tuple[str, str, str], Options] = {}


def options(precision: str = "native", rounding: str = "once", device: str = "cpu") -> Options:
    """Options of a call on the CPU, or of a plan; equal ones are one object."""
    found = _OPTIONS.get((precision, rounding, device))
    if found is None:
        if precision not in PRECISION:
            raise ValueError(f"tenon: precision={precision!r}; it must be 'native' or 'strict'")
        if rounding not in ROUNDING:
            raise ValueError(f"tenon: rounding={rounding!r}; it must be 'once' or 'eager'")
        if device not in DEVICE:
            raise ValueError(f"tenon: device={device!r}; it must be 'cpu' or 'cuda'")
        found = _OPTIONS[precision, rounding, device] = Options(
            precision=PRECISION[precision],
            rounding=ROUNDING[rounding],
            device=DEVICE[device],
        )
    return found
