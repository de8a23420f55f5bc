"""Rows of quantised tensors: parts along the first dimension, and the all-gather of FSDP2."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._format import encoding_shapes, scaling_of
from . import _call

if TYPE_CHECKING:
    from ._quantized import QuantizedTensor


class _Side(NamedTuple):
    """One encoding: along which dimension of its codes and of its scales the rows lie."""

    codes: int
    scales: int | None  # None: one scale for the tensor
    unit: int  # rows that share a scale


@functools.cache
def _side(scaling: str, columnwise: bool) -> _Side:
    mode = scaling_of(scaling)
    (height, _), (more, _) = (encoding_shapes(scaling, m, 128, columnwise)[0] for m in (256, 512))
    codes = int(height == more)
    if mode.single:
        return _Side(codes, None, 1)
    few, many = (encoding_shapes(scaling, m, 128, columnwise)[1] for m in (4096, 8192))
    unit = mode.block[0]
    if columnwise and unit == 1:
        unit = mode.block[1]
    return _Side(codes, int(few[0] == many[0]), unit)


def _sides(q: QuantizedTensor) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Each encoding: whether columnwise, its codes as a matrix, its scales."""
    found: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
    data, scale, columns, their_scale = q.tensors()
    for columnwise, (t, s) in enumerate(((data, scale), (columns, their_scale))):
        if t is not None:
            shape = encoding_shapes(q.scaling, *q.matrix, bool(columnwise))[0]
            found.append((columnwise, t.view(shape), s))
    return found


def _padded(scaling: str, rows: int, cols: int, columnwise: int, own: torch.Tensor) -> torch.Tensor:
    """Scales of the rows only, as a tensor of the mode's shape, with zeros as padding."""
    shape = encoding_shapes(scaling, rows, cols, bool(columnwise))[1]
    made = torch.zeros(shape, dtype=own.dtype, device=own.device)
    made[: own.shape[0], : own.shape[1]] = own
    return made


def rows_of(q: QuantizedTensor, begin: int, end: int) -> list[torch.Tensor | None] | None:
    """Copies of the parts of rows [begin, end). None if they begin inside of a block."""
    cols = q.matrix[1]
    parts: list[torch.Tensor | None] = [None] * 4
    for columnwise, codes, scale in _sides(q):
        side = _side(q.scaling, bool(columnwise))
        if q.swizzled or begin % side.unit:  # the last block may be a part of one
            return None
        cut = codes.view(torch.uint8).narrow(side.codes, begin, end - begin)
        parts[2 * columnwise] = cut.clone(memory_format=torch.contiguous_format).view(codes.dtype)
        assert scale is not None
        if side.scales is None:
            parts[1] = scale.clone()
        else:
            count = -(-end // side.unit) - begin // side.unit
            own = scale.narrow(side.scales, begin // side.unit, count)
            parts[2 * columnwise + 1] = _padded(q.scaling, end - begin, cols, columnwise, own)
    return parts


def _exact(scaling: str) -> bool:
    """Whether both encodings have the same codes, transposed."""
    mode = scaling_of(scaling)
    return mode.transposes and (mode.single or mode.block[0] == mode.block[1])


def other_encoding(
    q: QuantizedTensor, columnwise: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The codes and scales of an encoding that `q` does not have."""
    from ._quantized import allocate

    ((_, codes, scale),) = _sides(q)
    if _exact(q.scaling):
        turned = codes.view(torch.uint8).t().contiguous().view(codes.dtype)
        if not columnwise and q.is_matrix:
            turned = turned.view(q.shape)
        assert scale is not None
        if scale.numel() == 1 and scaling_of(q.scaling).single:
            return turned, scale
        rows, cols = q.matrix
        unit = scaling_of(q.scaling).block[0]
        count = (-(-rows // unit), -(-cols // unit))
        own = scale[: count[int(not columnwise)], : count[int(columnwise)]]
        return turned, _padded(q.scaling, rows, cols, int(columnwise), own.t())
    shape = q.shape if q.is_matrix else q.matrix
    made = allocate(
        shape,
        q.dtype,
        q.fp8_dtype,
        q.scaling,
        not columnwise,
        columnwise,
        q.device,
        q.swizzled,
        q.quantizer,
    )
    q.encoder().write(q, made)
    data, scale, columns, their_scale = made.tensors()
    return (columns, their_scale) if columnwise else (data, scale)  # type: ignore[return-value]


# What FSDP2 moves: for each encoding the codes as bytes, rows first, and then the scales of the
# rows, rows first. A columnwise encoding with the codes of the rowwise one is made from it.


def _moved(q: QuantizedTensor) -> list[int]:
    """The encodings that move."""
    both = q.rowwise_data is not None and q.columnwise_data is not None
    if both and _exact(q.scaling):
        return [0]
    return [columnwise for columnwise, _, _ in _sides(q)]


def for_gather(
    q: QuantizedTensor, mesh: Any, outer_size: Any, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """The tensors that FSDP2 gathers, and what `gathered` needs. The same checks on every rank."""
    ranks = mesh.size()
    rows, length = 1, outer_size[0]
    for n in outer_size[:-1]:
        rows *= n
    if length % ranks:
        raise ValueError(
            f"tenon: FSDP2: a quantised parameter of {tuple(outer_size)} has {length} rows on "
            f"{ranks} ranks; quantised parameters need the same number of rows on each rank, so "
            "choose a size that the ranks divide, or leave this parameter plain"
        )
    if q.swizzled:
        raise ValueError(
            "tenon: FSDP2: a quantised parameter has swizzled scales, whose rows are mixed; make "
            "it with optimize_for_gemm=False"
        )
    own = rows // ranks
    for columnwise in _moved(q):
        unit = _side(q.scaling, bool(columnwise)).unit
        if own % unit and ranks > 1:
            raise ValueError(
                f"tenon: FSDP2: a {q.scaling} parameter of {tuple(outer_size)} has {own} rows on "
                f"each of {ranks} ranks, which cut its blocks of {unit} rows; choose a size that "
                f"{unit * ranks} divides, only rowwise codes, or another scaling"
            )
    quantizer = q.quantizer
    if quantizer is not None and ranks > 1:
        # Shards of one tensor share its scale.
        q.quantizer = quantizer.shared_by(mesh.get_group())
    moved: list[torch.Tensor] = []
    for columnwise, codes, scale in _sides(q):
        if columnwise not in _moved(q):
            continue
        side = _side(q.scaling, bool(columnwise))
        data = codes.view(torch.uint8)
        moved.append(data.t().contiguous() if side.codes else data)
        assert scale is not None
        if side.scales is None:
            moved.append(scale.view(1))
        else:
            count = -(-own // side.unit)
            mine = scale.narrow(side.scales, 0, count)
            moved.append((mine.t() if side.scales else mine).contiguous())
    return tuple(moved), (tuple(outer_size), dtype if dtype in _call.PLAIN else q.dtype)


def gathered(q: QuantizedTensor, outputs: tuple[torch.Tensor, ...], metadata: Any, out: Any) -> Any:
    """The whole tensor and those of its parts that are not memory of `outputs`."""
    from ._quantized import PARTS, wrap

    shape, dtype = metadata
    rows = 1
    for n in shape[:-1]:
        rows *= n
    cols = shape[-1]
    parts: list[torch.Tensor | None] = [None] * 4
    for columnwise, codes, scales in zip(_moved(q), outputs[::2], outputs[1::2], strict=True):
        side = _side(q.scaling, bool(columnwise))
        data = codes.view(q.fp8_dtype)
        if side.codes:
            data = codes.t().contiguous().view(q.fp8_dtype)
        elif not columnwise or not scaling_of(q.scaling).transposes:
            data = data.view(shape)
        if side.scales is None:
            _same(scales.view(torch.int32))
            made = scales.view(-1)[:1].clone()
        else:
            mine = scales.t() if side.scales else scales
            made = _padded(q.scaling, rows, cols, columnwise, mine)
        parts[2 * columnwise] = data
        parts[1 if side.scales is None else 2 * columnwise + 1] = made
    whole = wrap(
        *(shape, dtype, q.fp8_dtype, q.scaling, parts, q.swizzled, q.quantizer, (rows, cols))
    )
    if len(_moved(q)) == 1 and len(_sides(q)) == 2:
        whole.columnwise_data, scale = other_encoding(whole, True)
        if not scaling_of(q.scaling).single:
            whole.columnwise_scale_inv = scale
    taken = {t.untyped_storage().data_ptr() for t in outputs}
    fresh = {
        name: t
        for name, t in whole.parts().items()
        if t.numel() and t.untyped_storage().data_ptr() not in taken
    }
    if out is None:
        return whole, tuple(fresh.values())
    target = out if hasattr(out, PARTS[0]) else out._local_tensor
    for name, t in fresh.items():
        part = getattr(target, name)
        # The same scales as before, if a graph saved them: memory is freed between the passes.
        with torch.autograd._unsafe_preserve_version_counter(part):
            part.copy_(t)
    return None


def _same(scales: torch.Tensor) -> None:
    """Raises an error if the shards of a tensor with one scale have several."""
    told = (
        "tenon: FSDP2: the shards of a quantised parameter have several scales, but its mode has "
        "one; update the scales of all ranks together, e.g. with a reduced amax"
    )
    same = (scales == scales.view(-1)[0]).all()
    if scales.is_cpu:
        if not same:
            raise ValueError(told)
    else:  # without waiting for the device
        torch._assert_async(same, told)
