"""The workspace size of a call on CUDA. XLA needs every size before anything runs."""

from __future__ import annotations

import functools
import math
from ctypes import POINTER, byref, c_size_t
from typing import Any

import jax
import numpy as np

from .. import _lib
from .._array import CODES
from .._format import encoding_shapes, scaling_of
from .._lib import BackwardArgs, ForwardArgs, Options, Tensor, View

_PAGE = 4096


@functools.cache
def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def size_of(
    x: jax.Array,
    dz: jax.Array | None,
    act: Any,
    encoding: Any,
    attributes: dict[str, Any],
    sums: Any = None,
) -> int:
    """Bytes for a call on x [..., inputs, H], and on dz in backward. 0 without a CUDA device.

    `sums` is the dtype of dbias.
    """
    if not _has_cuda():
        return 0
    of_dz = None if dz is None else CODES[dz.dtype.name]
    of_sums = None if sums is None else CODES[np.dtype(sums).name]
    asked = tuple(attributes.items())
    return _measured(tuple(x.shape), CODES[x.dtype.name], of_dz, act, encoding, asked, of_sums)


@functools.lru_cache(maxsize=4096)
def _measured(
    shape: tuple[int, ...],
    code: int,
    of_dz: int | None,
    act: Any,
    encoding: Any,
    attributes: tuple[tuple[str, Any], ...],
    of_sums: int | None,
) -> int:
    asked, settings = dict(attributes), dict(encoding.options)
    rows, cols = math.prod(shape[:-2]), shape[-2] * shape[-1]
    width = shape[-1] if of_dz is None else cols  # columns of the output
    address = _PAGE

    def view(rows: int, cols: int, code: int) -> Any:
        nonlocal address
        made = View(address, rows, cols, cols, code)
        address += (rows * cols * 4 // _PAGE + 2) * _PAGE  # separate, and aligned as in XLA
        return POINTER(View)(made)

    mode = scaling_of(encoding.scaling)
    written = Tensor(
        scaling=encoding.scaling.encode(),
        dtype=CODES[np.dtype(encoding.out_dtype).name],
        power_of_two=settings.get("power_of_two", 0),
        eps=settings.get("eps", 0.0),
        swizzled=settings.get("swizzled", False),
    )
    for columnwise, prefix in ((False, ""), (True, "columnwise_")):
        if not (encoding.layout.has_colwise if columnwise else encoding.layout.has_rowwise):
            continue
        data, scales = encoding_shapes(encoding.scaling, rows, width, columnwise)
        setattr(written, prefix + "data", view(*data, written.dtype))
        if encoding.scaling != "none":
            setattr(written, prefix + "scale_inv", view(*scales, _lib.DTYPE[mode.scale_dtype]))
    if mode.single:
        if written.data and written.columnwise_data:
            written.columnwise_scale_inv = written.scale_inv
        written.amax = view(1, 1, 0)
    if mode.scale_given:
        written.scale = view(1, 1, 0)
    given: dict[str, Any] = {"x": view(rows, cols, code)}
    if asked.get("output_amax_when_no_scaling"):
        given["amax"] = view(1, 1, 0)
    options = Options(
        precision=settings.get("precision", 0),
        rounding=settings.get("rounding", 0),
        device=_lib.DEVICE["cuda"],
    )
    size = c_size_t()
    _lib.check(_lib.lib.tenon_measure_begin())
    try:
        # Errors of a call are ignored here: the real call reports them.
        if of_dz is None:
            call = ForwardArgs(y_encoded=POINTER(Tensor)(written), **given)
            _lib.lib.tenon_forward(act.text.encode(), byref(call), options)
        else:
            if asked["is_dbias"]:
                given["dbias"] = view(1, cols, code if of_sums is None else of_sums)
            given["grad"] = view(rows, shape[-1], of_dz)
            back = BackwardArgs(dx_encoded=POINTER(Tensor)(written), **given)
            _lib.lib.tenon_backward(act.text.encode(), byref(back), options)
    finally:
        _lib.check(_lib.lib.tenon_measure_end(byref(size)))
    return int(size.value)
