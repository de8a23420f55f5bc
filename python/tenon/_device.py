"""Where arrays are: NumPy arrays on the host, torch and CuPy arrays on CUDA, without copies.

A call runs on the device of its arrays. Its results are arrays of the library of the first
argument. On CUDA, a call uses that library's current stream and does not synchronise.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_uint64, cast
from typing import Any

import numpy as np

from ._lib import DEVICE, Options, check, options

_CUDA = (2, 13)  # DLPack device types: CUDA memory, CUDA managed memory
_LIBRARIES = ("torch", "cupy")
_F32 = np.dtype(np.float32)


class Host:
    """Host memory, with NumPy arrays."""

    name = "the cpu"

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def full(self, shape: Sequence[int], value: float) -> Any:
        return np.full(shape, value, _F32)

    def numbers(self, values: Sequence[int]) -> Any:
        """uint64 values in the form that the C ABI takes."""
        return (c_uint64 * len(values))(*values)

    def run(self, function: Callable[..., int], how: tuple[str, str], *arguments: Any) -> None:
        """Calls function(*arguments, options) with a precision and a rounding mode."""
        check(function(*arguments, options(*how)))


HOST = Host()


class Cuda(Host):
    """A CUDA device, accessed through torch or CuPy."""

    def __init__(self, library: str, index: int) -> None:
        self.module, self.index = importlib.import_module(library), index
        self.is_torch = library == "torch"
        self.name = f"cuda:{index}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cuda) and other.index == self.index

    def __hash__(self) -> int:
        return self.index

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        shape = tuple(shape)
        if self.is_torch:
            kind = getattr(self.module, dtype.name)
            return DeviceArray(self.module.empty(shape, dtype=kind, device=self.name), self, dtype)
        if dtype.name == "bfloat16":
            raise NotImplementedError(
                "tenon: CuPy has no bfloat16; ask for float16 or float32, or pass a torch tensor"
            )
        with self.module.cuda.Device(self.index):
            kind = dtype if dtype.itemsize > 1 else np.uint8  # CuPy has no 8-bit floats
            return DeviceArray(self.module.empty(shape, dtype=kind), self, dtype)

    def full(self, shape: Sequence[int], value: float) -> Any:
        made = self.empty(shape, _F32)
        made.source[...] = value
        return made

    def numbers(self, values: Sequence[int]) -> Any:
        given = np.array(values, np.uint64).view(np.int64)
        if self.is_torch:
            made = self.module.from_numpy(given).to(self.name)
        else:
            with self.module.cuda.Device(self.index):
                made = self.module.asarray(given)
        found = cast(_address(made), POINTER(c_uint64))
        found.owner = made  # type: ignore[attr-defined]
        return found

    def run(self, function: Callable[..., int], how: tuple[str, str], *arguments: Any) -> None:
        chosen = options(*how)
        if self.is_torch:
            from .torch import _cuda

            check(_cuda.run(function, self.index, chosen, *arguments))
            return
        with self.module.cuda.Device(self.index):
            there = Options(
                precision=chosen.precision,
                rounding=chosen.rounding,
                device=DEVICE["cuda"],
                stream=self.module.cuda.get_current_stream().ptr,
            )
            check(function(*arguments, there))


class DeviceArray:
    """An array on CUDA with the NumPy attributes that describe its memory."""

    def __init__(self, source: Any, place: Cuda, dtype: np.dtype[Any]) -> None:
        self.source, self.place, self.dtype = source, place, dtype
        self.shape: tuple[int, ...] = tuple(source.shape)
        self.ndim, self.size, self.itemsize = len(self.shape), math.prod(self.shape), dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        if self.place.is_torch:
            return tuple(n * self.itemsize for n in self.source.stride())
        return tuple(self.source.strides)

    @property
    def address(self) -> int:
        return _address(self.source)

    @property
    def c_contiguous(self) -> bool:
        if self.place.is_torch:
            return bool(self.source.is_contiguous())
        return bool(self.source.flags.c_contiguous)

    def contiguous(self) -> DeviceArray:
        """This array, or a row-major copy if it is not contiguous."""
        if self.c_contiguous:
            return self
        with_rows = (
            self.source.contiguous()
            if self.place.is_torch
            else self.place.module.ascontiguousarray(self.source)
        )
        return DeviceArray(with_rows, self.place, self.dtype)

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        return DeviceArray(self.source.reshape(tuple(shape)), self.place, self.dtype)


def _address(source: Any) -> int:
    return int(source.data_ptr() if hasattr(source, "data_ptr") else source.data.ptr)


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def on_cuda(x: Any) -> bool:
    """Whether __dlpack_device__ reports CUDA memory."""
    try:
        return int(x.__dlpack_device__()[0]) in _CUDA
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return False


def _sees_cuda(library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and (library != "torch" or module.cuda.is_available())


def read(op: str, name: str, x: Any, coded: np.dtype[Any] | None = None) -> DeviceArray:
    """Reads an array on CUDA. `coded` is the dtype of its bytes if its library lacks that dtype."""
    if _library_of(x) not in _LIBRARIES:
        # By the DLPack protocol, the consumer's current stream waits for the producer's stream.
        consumer = next((n for n in _LIBRARIES if _sees_cuda(n)), None)
        if consumer is None:
            raise NotImplementedError(
                f"{op}: {name} is a {type(x).__name__} on {tuple(map(int, x.__dlpack_device__()))};"
                " arrays on CUDA need a torch or CuPy that sees the device, whose arrays the "
                "results are: import one of them, or use tenon.jax for JAX"
            )
        x = sys.modules[consumer].from_dlpack(x)
    place = Cuda(_library_of(x), int(x.device.index if _library_of(x) == "torch" else x.device.id))
    if place.is_torch:
        x = x.detach()
        kind = str(x.dtype).removeprefix("torch.")
    else:
        kind = x.dtype.name
    if coded is not None and kind == "uint8":
        return DeviceArray(x, place, coded)
    try:
        return DeviceArray(x, place, np.dtype(kind))
    except TypeError:
        import ml_dtypes

        if hasattr(ml_dtypes, kind):
            return DeviceArray(x, place, np.dtype(getattr(ml_dtypes, kind)))
    raise TypeError(f"{op}: {name} is {kind}; convert it to float32 first")


def place_of(x: Any) -> Host:
    """The place of an array. Anything that is not an array is on the host."""
    return x.place if isinstance(x, DeviceArray) else HOST


def common(op: str, arrays: Iterable[tuple[str, Any]]) -> Host:
    """The common place of the named arrays of a call. Raises an error if they differ."""
    found = [(name, place_of(x)) for name, x in arrays]
    if not found:
        return HOST
    first, place = next(((n, p) for n, p in found if p is not HOST), found[0])
    for name, other in found:
        if other != place:
            raise ValueError(
                f"{op}: {name} is on {other.name}, but {first} is on {place.name}; the arrays of a "
                f"call are in one place, move {name} there"
            )
    return place


def result(x: Any) -> Any:
    """Converts a result to an array of the caller's library."""
    return x.source if isinstance(x, DeviceArray) else x


def ones_like(x: Any) -> Any:
    """An array of ones like x, in the same place and of the same library."""
    library = _library_of(x)
    return (sys.modules[library] if library in _LIBRARIES else np).ones_like(x)
