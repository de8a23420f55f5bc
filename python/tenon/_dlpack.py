"""DLPack import and export, including the dtypes that NumPy does not support.

NumPy creates and reads the capsules. For bfloat16 and the 8-bit types, NumPy sees unsigned integers
of the same size. This module replaces the type code in the capsule.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from typing import Any

import numpy as np
import numpy.typing as npt


class _Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Versioned(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_UNSIGNED = 1
# DLDataType codes that NumPy rejects -> the type names in ml_dtypes.
_TYPES = {4: "bfloat16", 10: "float8_e4m3fn", 12: "float8_e5m2", 14: "float8_e8m0fnu"}
_CODES = {name: code for code, name in _TYPES.items()}
_HOST = (1, 3)  # DLPack device types: CPU memory, CUDA pinned host memory

_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = c_char_p
_api.PyCapsule_GetName.argtypes = [py_object]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [py_object, c_char_p]


def _tensor(capsule: Any) -> _Tensor:
    name = _api.PyCapsule_GetName(capsule)
    address = _api.PyCapsule_GetPointer(capsule, name)
    if name == b"dltensor_versioned":
        return _Versioned.from_address(address).tensor
    return _Tensor.from_address(address)


class _Capsule:
    """Wraps a capsule in the object that numpy.from_dlpack expects."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def read(op: str, name: str, x: Any) -> npt.NDArray[Any]:
    """The memory of any object with __dlpack__ as a NumPy array, without a copy."""
    try:
        device = x.__dlpack_device__()
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{op}: {name} cannot be read by DLPack: {e}") from e
    if int(device[0]) not in _HOST:
        raise NotImplementedError(
            f"{op}: {name} is on the DLPack device {tuple(map(int, device))}; arrays are on the "
            "CPU or on CUDA, so move it there first"
        )
    try:
        capsule = x.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{op}: {name} gives no DLPack capsule: {e}") from e
    tensor = _tensor(capsule)
    special = _TYPES.get(tensor.code)
    if special is not None:
        tensor.code = _UNSIGNED
    try:
        array = np.from_dlpack(_Capsule(capsule, (int(device[0]), int(device[1]))))  # type: ignore[arg-type]
    except (BufferError, RuntimeError) as e:
        raise TypeError(
            f"{op}: {name} has a DLPack type that NumPy does not know (code {tensor.code}, "
            f"{tensor.bits} bits); convert it to float32 first"
        ) from e
    if special is None:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, special))


class Exported:
    """An array for DLPack consumers, e.g. torch.from_dlpack(tenon.to_dlpack(a)), without a copy."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self._code = _CODES.get(array.dtype.name)
        unsigned = {1: np.uint8, 2: np.uint16}
        self._plain = array if self._code is None else array.view(unsigned[array.itemsize])

    def __repr__(self) -> str:
        return f"<tenon.to_dlpack of {self._array.dtype.name}{list(self._array.shape)}>"

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._plain.__dlpack__(**keywords)
        if self._code is not None:
            _tensor(capsule).code = self._code
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._plain.__dlpack_device__()


def to_dlpack(array: npt.NDArray[Any]) -> Exported:
    """Wraps a NumPy array, also of an ml_dtypes type, in an object with __dlpack__.

    >>> torch.from_dlpack(tenon.to_dlpack(q.data))
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"to_dlpack: a {type(array).__name__}; pass a NumPy array, e.g. the .data of a "
            "tenon.Quantized"
        )
    return Exported(array)
