"""Loads libtenon with ctypes and handles errors and strings, without an array library."""

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

# Number -> name.
DTYPES = tuple(DTYPE)
ROLES = tuple(ROLE)

ViewPtr = POINTER(View)
TensorPtr = POINTER(Tensor)


def path_of_libtenon() -> Path:
    """The libtenon of this package. TENON_LIBRARY selects another one, e.g. of a build tree."""
    given = os.environ.get("TENON_LIBRARY")
    if given:
        return Path(given)
    return Path(__file__).parent / "lib" / "libtenon.so"


def _load() -> ctypes.CDLL:
    path = path_of_libtenon()
    try:
        # CDLL releases the GIL during calls. The C ABI uses no Python objects.
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

# tenon_code -> exception: invalid value, unsupported feature. Other codes are RuntimeError.
_ERRORS = {CODE["invalid_argument"]: ValueError, CODE["unsupported"]: NotImplementedError}


def check(code: int) -> None:
    """Raises an exception with the library's message if the code is an error."""
    if code:
        raise _ERRORS.get(code, RuntimeError)(lib.tenon_last_error().decode("utf-8", "replace"))


def encoded(text: Any, what: str) -> bytes:
    """Encodes a text for the C ABI. `what` names the text in error messages."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}; it must be a text")
    if "\0" in text:  # C strings end at the first NUL
        raise ValueError(f"{what} {text!r} holds a null character; leave it out")
    return text.encode()


def text_of(function: object, *arguments: object) -> str:
    """Calls a function that writes a text, with a buffer of the size that it reports."""
    size = c_size_t(1024)
    while True:  # a definition in another thread may change the size
        capacity = size.value
        buffer = ctypes.create_string_buffer(capacity)
        check(function(*arguments, buffer, capacity, byref(size)))  # type: ignore[operator]
        if size.value <= capacity:
            return buffer.value.decode()


def list_of(function: object, struct: type[ctypes.Structure], *arguments: object) -> Any:
    """Calls a function that writes structs, with an array of the length that it reports."""
    count = c_size_t()
    check(function(*arguments, None, 0, byref(count)))  # type: ignore[operator]
    found = (struct * count.value)()
    check(function(*arguments, found, count.value, None))  # type: ignore[operator]
    return found


_OPTIONS: dict[tuple[str, str, str], Options] = {}


def options(precision: str = "native", rounding: str = "once", device: str = "cpu") -> Options:
    """The options of a call on the CPU, or of a plan. Equal options are the same object."""
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
