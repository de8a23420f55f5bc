"""The scaling modes of the library, and the shapes of encodings."""

from __future__ import annotations

import functools
from ctypes import c_int64
from typing import NamedTuple

from . import _lib

__all__ = ["SCALINGS", "Scaling", "encoding_shapes", "scaling_of"]


class Scaling(NamedTuple):
    """The properties of a scaling mode."""

    name: str
    number: int  # index in the table of the library
    scale_dtype: str  # "f32" or "e8m0"
    single: bool  # both encodings share one scale for the whole tensor
    scale_given: bool  # the caller provides the scale. Other modes compute it.
    transposes: bool  # columnwise data are [K, M]
    block: tuple[int, int]  # elements that share a scale, rowwise. (0, 0) without blocks.


SCALINGS = {
    mode.name: mode
    for mode in (
        Scaling(
            s.name.decode(),
            number,
            _lib.DTYPES[s.scale_dtype],
            bool(s.single),
            bool(s.scale_given),
            bool(s.transposes),
            (s.block_rows[0], s.block_cols[0]),
        )
        for number, s in enumerate(_lib.list_of(_lib.lib.tenon_scalings, _lib.Scaling))
    )
}


def scaling_of(name: str) -> Scaling:
    """Looks up a scaling mode by name."""
    try:
        return SCALINGS[name]
    except KeyError:
        known = ", ".join(SCALINGS)
        raise ValueError(f"tenon: the scaling {name!r} is not known; use one of {known}") from None


@functools.lru_cache(maxsize=4096)
def encoding_shapes(
    scaling: str, rows: int, cols: int, columnwise: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of data and scale_inv for one encoding of a rows x cols tensor."""
    data, scales = (c_int64 * 2)(), (c_int64 * 2)()
    _lib.check(
        _lib.lib.tenon_encoding_shape(scaling.encode(), rows, cols, columnwise, data, scales)
    )
    return (data[0], data[1]), (scales[0], scales[1])
