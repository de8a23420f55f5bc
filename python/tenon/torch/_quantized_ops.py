"""The operations of torch on quantised tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .._format import scaling_of
from . import _call
from ._quantized import PARTS, QuantizedTensor, allocate, like
from ._rows import rows_of

_aten = torch.ops.aten
_Handler = Callable[[Any, Any, Any], Any]
_HANDLERS: dict[Any, _Handler] = {}


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` for arguments of which some are quantised."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    elif func.namespace == "c10d":
        return _collective(func, args, kwargs)
    return _on_numbers(func, args, kwargs)


def _on_numbers(func: Any, args: Any, kwargs: Any, written: Any = None) -> Any:
    """`func` on decoded numbers. What it writes in place is encoded again.

    `written` is a function that gives the arguments that it writes; by default its schema does.
    """
    seen: dict[int, tuple[QuantizedTensor, torch.Tensor]] = {}

    def numbers(q: QuantizedTensor) -> torch.Tensor:
        if id(q) not in seen:
            seen[id(q)] = q, q.decode()
        return seen[id(q)][1]

    plain_args, plain_kwargs = tree_map_only(QuantizedTensor, numbers, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if written is not None:
        targets = written(result)
    elif func._schema.is_mutable:
        targets = _written(func, args, kwargs)
    elif func.is_view:
        (q,) = [of for of, _ in seen.values()]
        return tree_map_only(torch.Tensor, lambda t: NumbersView(t, q), result)
    else:
        return result
    given = {}
    for q in targets:
        if isinstance(q, QuantizedTensor):
            values = seen[id(q)][1]
            _check_same(func, values, q)
            _encode(values, q)
            given[id(values)] = q
    return tree_map_only(torch.Tensor, lambda t: given.get(id(t), t), result)


def _check_same(func: Any, values: torch.Tensor, target: torch.Tensor) -> None:
    if values.shape != target.shape or values.dtype != target.dtype:
        raise NotImplementedError(
            f"tenon: {func}: it changes the shape or the dtype of a QuantizedTensor in "
            "place; call it on the numbers, q.dequantize()"
        )


class NumbersView(torch.Tensor):
    """A view of the decoded numbers of `source`, e.g. q[0] or q.t().

    It has the numbers of the time when it was made, in memory of its own. What is written to it is
    written to `source` too.
    """

    numbers: torch.Tensor
    source: QuantizedTensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, source: QuantizedTensor) -> NumbersView:
        made: NumbersView = torch.Tensor._make_subclass(cls, numbers)
        made.numbers, made.source = numbers, source
        return made

    def __init__(self, *unused: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _on_views(func, args, kwargs or {})

    # Outside of this process, or as an array, it is a plain tensor.
    def numpy(self, *, force: bool = False) -> Any:
        return self.numbers.detach().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.numbers.clone().requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.numbers)


def _on_views(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` where some arguments are views of decoded numbers."""
    targets = _written(func, args, kwargs) if func._schema.is_mutable else []
    targets = [t for t in targets if isinstance(t, NumbersView)]
    # Views of one tensor that are written together are views of the same new numbers.
    whole: dict[int, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for view in targets:
        now, source = view.numbers, view.source
        if now.dtype != source.dtype:
            raise NotImplementedError(
                f"tenon: {func}: it writes a {now.dtype} view of a QuantizedTensor of "
                f"{source.dtype}; write to q.dequantize(), then q.copy_() that"
            )
        if id(source) not in whole:
            whole[id(source)] = source.decode()
        seen[id(view)] = whole[id(source)].as_strided(
            now.size(), now.stride(), now.storage_offset()
        )

    def numbers(view: NumbersView) -> torch.Tensor:
        return seen.get(id(view), view.numbers)

    plain_args, plain_kwargs = tree_map_only(NumbersView, numbers, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if func.is_view and not targets:
        source = args[0].source
        return tree_map_only(torch.Tensor, lambda t: NumbersView(t, source), result)
    given = {}
    for view in targets:
        _check_same(func, seen[id(view)], view)
        given[id(seen[id(view)])] = view
    for source in {id(view.source): view.source for view in targets}.values():
        source.copy_(whole[id(source)])
    for view in targets:
        now = view.numbers
        rounded = view.source.decode()
        now.copy_(rounded.as_strided(now.size(), now.stride(), now.storage_offset()))
    return tree_map_only(torch.Tensor, lambda t: given.get(id(t), t), result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that `func` writes."""
    found: list[Any] = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(a.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _encode(values: torch.Tensor, q: QuantizedTensor) -> None:
    """Encodes `values` in the memory of `q`, which may be a view of the encoded matrix."""
    if not q.is_meta:
        if not q.is_matrix:
            values = values.reshape(q.matrix)
            q.encoder().update_quantized(values, like(q, q.tensors(), q.matrix))
        else:
            q.encoder().update_quantized(values, q)
        if q.part_of is not None:
            _write_whole(q, values)


def _write_whole(part: QuantizedTensor, values: torch.Tensor) -> None:
    """Writes rows of a tensor there too, and takes their codes from there."""
    assert part.part_of is not None
    (whole, begin), rows = part.part_of, part.matrix[0]
    numbers = whole.decode()
    numbers.view(whole.matrix)[begin : begin + rows] = values.reshape(part.matrix)
    _encode(numbers, whole)
    for own, now in zip(part.tensors(), rows_of(whole, begin, begin + rows) or (), strict=False):
        if own is not None and now is not None:
            own.copy_(now.view(own.shape))


def _handles(*overloads: Any) -> Callable[[_Handler], _Handler]:
    """Registers a handler. It returns NotImplemented for arguments that need the numbers."""

    def take(handler: _Handler) -> _Handler:
        for overload in overloads:
            _HANDLERS[overload] = handler
        return handler

    return take


def _mapped(q: QuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The parts, changed. A shared scale stays shared."""
    made = {name: change(t) for name, t in q.parts().items()}
    return [made.get(name) for name in PARTS]


@_handles(_aten.detach.default, _aten.alias.default)
def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    made = like(args[0], args[0].tensors())
    made.part_of = args[0].part_of
    return made


@_handles(_aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return like(args[0], _mapped(args[0], torch.clone))


def _viewed(q: QuantizedTensor, shape: Any) -> QuantizedTensor:
    """The same codes in another shape of as many elements."""
    data, scale, columns, their_scale = q.tensors()
    if len(shape) and shape[-1] == q.matrix[1]:
        data = data if data is None else data.view(shape)
        if not scaling_of(q.scaling).transposes and columns is not None:
            columns = columns.view(shape)
    made = like(q, (data, scale, columns, their_scale), shape)
    made.part_of = q.part_of
    return made


@_handles(_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    # torch computes the shape from one number.
    blank = torch.empty((), device="meta").expand(args[0].shape)
    return _viewed(args[0], torch.reshape(blank, args[1]).shape)


@_handles(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    blank = torch.empty((), device="meta").expand(args[0].shape)
    return _viewed(args[0], func(blank, *args[1:], **kwargs).shape)


@_handles(_aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    q, size, stride, *offset = args
    blank = torch.empty(size, device="meta")
    same = blank.numel() == q.numel() and tuple(stride) == blank.stride()
    if not same or any(offset) or kwargs.get("storage_offset"):
        return NotImplemented
    return _viewed(q, blank.shape)


@_handles(_aten.expand.default)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    q, size = args[:2]
    if len(size) < q.dim():
        return NotImplemented
    wanted = size[len(size) - q.dim() :]
    if any(n not in (-1, m) for n, m in zip(wanted, q.shape, strict=True)):
        return NotImplemented
    if any(n != 1 for n in size[: len(size) - q.dim()]):
        return NotImplemented
    return _viewed(q, (*size[: len(size) - q.dim()], *q.shape))


@_handles(_aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    q, dim, begin, end, step = list(args) + [0, None, None, 1][len(args) - 1 :]
    if kwargs or dim not in (0, -q.dim()) or step != 1:
        return NotImplemented
    begin, end, _ = slice(begin, end).indices(q.shape[0])
    return _part(q, begin, max(begin, end))


@_handles(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    q, sizes, dim = (*args, 0)[:3]
    dim = kwargs.get("dim", dim)
    if dim not in (0, -q.dim()):
        return NotImplemented
    blank = torch.empty((), device="meta").expand(q.shape)
    found, begin = [], 0
    for piece in func(blank, sizes):
        part = _part(q, begin, begin + piece.shape[0])
        if part is NotImplemented:
            return NotImplemented
        found.append(part)
        begin += piece.shape[0]
    return found


def _part(q: QuantizedTensor, begin: int, end: int) -> Any:
    """q[begin:end] along the first dimension: an alias if it is all, else a copy of the codes.

    A write to the copy is a write to `q` too.
    """
    if begin == 0 and end == q.shape[0]:
        return _alias(None, (q,), None)
    if q.dim() < 2 or not q.is_matrix:
        return NotImplemented
    rows = q.matrix[0] // q.shape[0]  # the range is not all, so the dimension is not 0
    parts = rows_of(q, begin * rows, end * rows)
    if parts is None:
        return NotImplemented
    shape, matrix = (end - begin, *q.shape[1:]), ((end - begin) * rows, q.matrix[1])
    made = like(q, parts, matrix, matrix=matrix)
    made.part_of = q, begin * rows
    return _viewed(made, shape)


@_handles(_aten._pin_memory.default)
def _pin(func: Any, args: Any, kwargs: Any) -> Any:
    return like(args[0], _mapped(args[0], lambda t: func(t, *args[1:], **kwargs)))


@_handles(_aten.is_pinned.default, _aten.record_stream.default)
def _of_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions of the memory of a tensor, which is that of its parts."""
    found = [func(t, *args[1:], **kwargs) for t in args[0].parts().values()]
    return all(found) if func is _aten.is_pinned.default else None


@_handles(_aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    q, more = args[0], dict(kwargs)
    dtype = more.pop("dtype", None) or q.dtype
    layout, memory = more.pop("layout", None), more.pop("memory_format", None)
    if (
        dtype not in _call.PLAIN
        or layout not in (None, torch.strided)
        or memory not in (None, torch.preserve_format, torch.contiguous_format)
    ):
        return NotImplemented
    made = like(q, _mapped(q, lambda t: func(t, **more)), dtype=dtype)
    if made.quantizer is not None and made.device != q.device:
        made.quantizer = made.quantizer.on(made.device)
    return made


@_handles(_aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    q, source = args[:2]
    if not isinstance(q, QuantizedTensor):
        return func(q, source.decode(), *args[2:], **kwargs)
    if isinstance(source, QuantizedTensor) and q.same_format(source):
        theirs = source.parts()
        for name, t in q.parts().items():
            t.copy_(theirs[name], *args[2:], **kwargs)
        if q.part_of is not None:
            _write_whole(q, q.decode())
        return q
    values = source.decode() if isinstance(source, QuantizedTensor) else source.detach()
    values = values.to(device=q.device, dtype=q.dtype).expand(q.shape)
    _encode(values, q)
    return q


@_handles(
    *(
        getattr(_aten, name).default
        for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                     "randn_like", "new_full", "new_ones", "new_empty_strided")
    ),
)  # fmt: skip
def _plain_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain tensors that have only the shape, dtype and device of a quantised one."""
    q, *others = args
    blank = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return func(blank, *others, **kwargs)


@_handles(_aten.new_zeros.default, _aten.new_empty.default)
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """Quantised if only the number of rows differs, e.g. a padded shard. Otherwise plain."""
    q, size = args[:2]
    dtype = kwargs.get("dtype") or q.dtype
    whole = len(size) > 1 and q.is_matrix and list(size[1:]) == list(q.shape[1:])
    if not whole or dtype not in _call.PLAIN or kwargs.get("layout") not in (None, torch.strided):
        return _plain_like(func, args, kwargs)
    has = q.rowwise_data is not None, q.columnwise_data is not None
    device = torch.device(kwargs.get("device") or q.device)
    made = allocate(
        *(size, dtype, q.fp8_dtype, q.scaling, *has, device, q.swizzled, q.quantizer),
        pin_memory=bool(kwargs.get("pin_memory")),
    )
    for name, t in made.parts().items():
        if name == PARTS[1] and scaling_of(q.scaling).single:
            t.copy_(q.parts()[name])  # one scale, also for a shard without rows
        else:
            t.view(torch.uint8).zero_() if t.element_size() == 1 else t.zero_()
    return made


@_handles(_aten.index_select.default)
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    q = args[0]
    if not isinstance(q, QuantizedTensor) or args[2].numel():
        return NotImplemented
    blank = torch.empty((), dtype=q.dtype, device=q.device).expand(q.shape)
    return func(blank, *args[1:])


# Collectives that only move tensors, by the number of leading arguments that hold them. Their
# schemas do not tell what they write.
_MOVES = {"broadcast_": 1, "send": 1, "recv_": 1, "allgather_": 2, "gather_": 2, "scatter_": 2,
          "alltoall_": 2}  # fmt: skip
_READS = ("send", "barrier", "monitored_barrier_")


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch.distributed: on the parts if it moves tensors, else on the numbers."""
    name = func._schema.name.partition("::")[2]
    count = _MOVES.get(name, 0)
    tensors = _leaves(args[:count])
    first = tensors[0] if tensors else None
    if isinstance(first, QuantizedTensor) and all(
        isinstance(t, QuantizedTensor) and _names(t) == _names(first) for t in tensors
    ):
        result = None
        for part in first.parts():
            if result is not None:  # the caller waits for the last part, and may do so once only
                _work(result).wait()
            moved = tree_map_only(QuantizedTensor, _bytes_of(part), args[:count])
            result = func(*moved, *args[count:], **kwargs)
    else:

        def written(result: Any) -> list[Any]:
            _work(result).wait()
            return [] if name in _READS else _leaves(args[:1])

        result = _on_numbers(func, args, kwargs, written)
    return (args[0], result[1]) if isinstance(result, tuple) else result


def _bytes_of(part: str) -> Callable[[QuantizedTensor], torch.Tensor]:
    """A part of a tensor. Codes are bytes, which every backend can send."""

    def find(q: QuantizedTensor) -> torch.Tensor:
        t = q.parts()[part]
        return t.view(torch.uint8) if t.element_size() == 1 else t

    return find


def _names(q: QuantizedTensor) -> Any:
    return q.scaling, q.fp8_dtype, q.swizzled, tuple(q.parts())


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _leaves(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def _work(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else result
