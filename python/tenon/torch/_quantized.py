"""The quantised tensor: a torch.Tensor whose numbers are 8-bit codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from .. import _lib
from .._format import SCALINGS, encoding_shapes, scaling_of
from .._plan import Encoding, Format
from . import _call, _cuda, _watch
from ._dynamo import one_break

if TYPE_CHECKING:
    from .quantizer import Quantizer

PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_CODES = (PARTS[0], PARTS[2])
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALE_DTYPES = {"f32": torch.float32, "e8m0": torch.uint8}


def fp8_dtype_of(given: Any) -> torch.dtype:
    """The 8-bit torch dtype for a dtype, for "e4m3"/"e5m2", or for an enum with such a name."""
    if given in FP8.values():
        return given
    text = given if isinstance(given, str) else getattr(given, "name", "")
    for name, dtype in FP8.items():
        if name in str(text).lower():
            return dtype
    raise ValueError(
        f"tenon: fp8_dtype={given!r}; it must be torch.float8_e4m3fn or torch.float8_e5m2, "
        "or 'e4m3' or 'e5m2'"
    )


def folded(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of `shape`, whose leading dimensions are rows."""
    if not shape:
        raise ValueError(
            "tenon: a 0-d tensor has no rows to quantise; give it one dimension, x.reshape(1)"
        )
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]


@final
class QuantizedTensor(torch.Tensor):
    """8-bit codes with their scales, as a tensor of the numbers that they represent.

    rowwise_data          codes of `shape`; None if only the columnwise encoding exists
    rowwise_scale_inv     float32, or uint8 holding E8M0 for "mxfp8"
    columnwise_data       codes for a GEMM that sums over rows: [K, M], for "mxfp8" like
                          rowwise_data
    columnwise_scale_inv  its scales; the same tensor as rowwise_scale_inv if there is only one
                          scale
    fp8_dtype, scaling    of the codes; scaling is "delayed", "current", "mxfp8", "block1x128",
                          "block128x128"
    swizzled              whether the scales are in the order of the tensor cores
    quantizer             encodes what is written to the tensor; None: one of the same format

    `shape` and `dtype` are those of the numbers. Any operation of torch works: it reads the
    numbers, and what it writes in place is encoded again. `detach`, `clone`, `view`, `to`,
    `copy_` from equal formats, and parts along the first dimension keep the codes. Other views,
    such as t() or q[0], are decoded when they are made. What is written to a part or a view is
    encoded in this tensor. Gradients are plain.
    """

    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    fp8_dtype: torch.dtype
    scaling: str
    swizzled: bool
    quantizer: Quantizer | None
    # Rows and columns of the encoded matrix. A view has another shape.
    matrix: tuple[int, int]
    # The tensor of which this has some rows in copied codes, and the first row.
    part_of: tuple[QuantizedTensor, int] | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        fp8_dtype: Any,
        scaling: str,
        *,
        rowwise_data: torch.Tensor | None = None,
        rowwise_scale_inv: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        columnwise_scale_inv: torch.Tensor | None = None,
        swizzled: bool = False,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        parts = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        if dtype not in _call.PLAIN:
            raise TypeError(
                f"tenon: QuantizedTensor: dtype={dtype}; it must be float32, float16 or bfloat16, "
                "that of the numbers"
            )
        scaling_of(scaling)
        made = wrap(shape, dtype, fp8_dtype_of(fp8_dtype), scaling, parts, swizzled, quantizer)
        made.check_parts()
        made.requires_grad_(requires_grad)
        return made

    def __init__(self, *unused: Any, **keywords: Any) -> None:
        pass

    # Operations are dispatched below autograd only. Attributes then cost what they cost in torch.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        of = (self.dtype, self.fp8_dtype, self.scaling, self.swizzled, self.quantizer, self.matrix)
        return list(self.parts()), of

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], meta: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        dtype, fp8_dtype, scaling, swizzled, quantizer, matrix = meta
        parts = [inner.get(name) for name in PARTS]
        return wrap(outer_size, dtype, fp8_dtype, scaling, parts, swizzled, quantizer, matrix)

    @classmethod
    def __metadata_guard__(cls, meta: Any, other: Any) -> bool:
        """Whether torch.compile may use a graph for another tensor. Quantizers are not traced."""
        return meta[:4] == other[:4] and meta[5] == other[5]  # type: ignore[no-any-return]

    def parts(self) -> dict[str, torch.Tensor]:
        """The codes and scales that exist, by name. A shared scale is rowwise_scale_inv."""
        own = self.__dict__
        found = {name: own[name] for name in PARTS if own[name] is not None}
        if own[PARTS[1]] is own[PARTS[3]]:
            found.pop(PARTS[3], None)
        return found

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv."""
        return (
            self.rowwise_data,
            self.rowwise_scale_inv,
            self.columnwise_data,
            self.columnwise_scale_inv,
        )

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """rowwise_data and columnwise_data."""
        return self.rowwise_data, self.columnwise_data

    @property
    def is_matrix(self) -> bool:
        """Whether the last dimension is that of the encoded matrix. Kernels read only those."""
        return len(self.shape) > 0 and self.shape[-1] == self.matrix[1]

    def same_format(self, other: QuantizedTensor) -> bool:
        """Whether the codes of `other` may be copied here one by one."""
        return (
            self.matrix == other.matrix
            and self.scaling == other.scaling
            and self.fp8_dtype == other.fp8_dtype
            and self.swizzled == other.swizzled
            and [t is None for t in self.tensors()] == [t is None for t in other.tensors()]
        )

    def check_parts(self) -> None:
        """Raises an error for parts that do not encode a tensor of this shape."""
        mode, (rows, cols) = scaling_of(self.scaling), self.matrix
        device = self.device
        for columnwise, names in ((False, PARTS[:2]), (True, PARTS[2:])):
            data, scale = (getattr(self, name) for name in names)
            if data is None:
                if scale is not None and not mode.single:
                    raise ValueError(f"tenon: QuantizedTensor: {names[1]} without {names[0]}")
                continue
            shape, of_scale = encoding_shapes(self.scaling, rows, cols, columnwise)
            wanted = (
                (names[0], data, self.fp8_dtype, shape[0] * shape[1], tuple(shape)),
                (names[1], scale, SCALE_DTYPES[mode.scale_dtype], _product(of_scale), of_scale),
            )
            for name, t, dtype, count, told in wanted:
                if not isinstance(t, torch.Tensor):
                    raise TypeError(
                        f"tenon: QuantizedTensor: {name} is {t!r}; it must be a tensor of {dtype}"
                    )
                if t.dtype != dtype or t.numel() != count or t.device != device:
                    raise ValueError(
                        f"tenon: QuantizedTensor: {name} is {t.dtype}, {tuple(t.shape)} on "
                        f"{t.device}; for {self.scaling} of {rows} x {cols} it must be {dtype}, "
                        f"{told} on {device}"
                    )

    def plan_encoding(self) -> Encoding:
        """The formats of the codes, for a plan that reads them."""
        name = next(name for name, dtype in FP8.items() if dtype == self.fp8_dtype)
        return Encoding(
            # fp32 scales of blocks may be any numbers.
            Format(self.scaling, name, power_of_two=False if "block" in self.scaling else None),
            self.rowwise_data is not None,
            self.columnwise_data is not None,
            self.swizzled,
        )

    def plan_parts(self, name: str) -> dict[str, torch.Tensor | None]:
        """The tensors by the names of a plan's buffers."""
        data, scale, columns, their_scale = self.tensors()
        if scaling_of(self.scaling).single:  # one scale for both encodings
            scale = scale if their_scale is None else their_scale
            their_scale = scale
        parts = {"": data, ".scale_inv": scale, ".t": columns, ".t.scale_inv": their_scale}
        return {name + end: t for end, t in parts.items()}

    def c_tensor(self, fields: dict[str, Any] | None = None) -> _lib.Tensor:
        """The struct for the C ABI. It keeps the views and this object alive.

        `fields` are those that a quantizer adds for a call that writes this tensor.
        """
        data, scale, columns, their_scale = own = self.tensors()
        result = _lib.Tensor(
            scaling=_ENCODED[self.scaling],
            dtype=_call.DTYPES[self.fp8_dtype],
            swizzled=self.swizzled,
        )
        memory = _call.memory
        names: tuple[str, ...] = PARTS
        if data is not None:
            result.data = _lib.ViewPtr(memory(data, PARTS[0]))
        if scale is not None:
            result.scale_inv = _lib.ViewPtr(memory(scale, PARTS[1]))
        if columns is not None:
            result.columnwise_data = _lib.ViewPtr(memory(columns, PARTS[2]))
        if their_scale is not None:
            result.columnwise_scale_inv = _lib.ViewPtr(memory(their_scale, PARTS[3]))
        for name, value in fields.items() if fields else ():
            if isinstance(value, torch.Tensor):
                own, names = (*own, value), (*names, name)
                value = _lib.ViewPtr(_call.vector(value, name))
            setattr(result, name, value)
        for t in own:
            if t is not None and not t.is_cpu:
                _cuda.index(zip(names, own, strict=True))
                break
        result.owner = self  # type: ignore[attr-defined]
        return result

    @one_break
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers, codes times scale_inv, as a plain tensor. The default dtype is `dtype`.

        Its gradient is passed unchanged to this tensor.
        """
        _watch.check("dequantize", self)
        if self.requires_grad and torch.is_grad_enabled():
            return Dequantize.apply(self, dtype)
        return self.decode(dtype)

    def decode(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers of dequantize(), without a gradient."""
        if dtype is not None and dtype not in _call.PLAIN:
            return self.decode(torch.float32).to(dtype)
        shape = self.shape
        y = torch.empty(
            shape if self.is_matrix else self.matrix, dtype=dtype or self.dtype, device=self.device
        )
        if not self.is_meta:
            _call.quantize(None, x=self.c_tensor(), y=_call.view(y, "dtype"))
        return y if y.shape == shape else y.view(shape)

    def encoder(self) -> Quantizer:
        """The quantizer for what is written to this tensor."""
        if self.quantizer is not None:
            return self.quantizer
        from .quantizer import quantizer_like

        return quantizer_like(self)

    @one_break
    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Encodes `tensor` in place, with the quantizer's current scale.

        A noop_flag of 1 leaves this tensor unchanged.
        """
        return self.encoder().update_quantized(tensor, self, noop_flag=noop_flag)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Makes or drops encodings. None: no change.

        A made encoding has the codes of the other one, if both have the same blocks. Otherwise it
        encodes the decoded numbers.
        """
        from ._rows import other_encoding

        has = self.rowwise_data is not None, self.columnwise_data is not None
        given = (rowwise_usage, columnwise_usage)
        wanted = [h if g is None else g for h, g in zip(has, given, strict=True)]
        if not any(wanted):
            raise ValueError(
                "tenon: update_usage: neither rowwise nor columnwise; a tensor needs one encoding"
            )
        for columnwise, (there, wants) in enumerate(zip(has, wanted, strict=True)):
            if wants and not there:
                data, scale = other_encoding(self, bool(columnwise))
                setattr(self, PARTS[2 * columnwise], data)
                setattr(self, PARTS[2 * columnwise + 1], scale)
        for columnwise, (there, wants) in enumerate(zip(has, wanted, strict=True)):
            if there and not wants:
                setattr(self, PARTS[2 * columnwise], None)
                if not scaling_of(self.scaling).single:
                    setattr(self, PARTS[2 * columnwise + 1], None)

    @property
    def data(self) -> torch.Tensor:
        """This tensor without its gradient, as in torch. An assigned plain tensor is encoded."""
        found: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"tenon: data is assigned {tuple(value.shape)} on {value.device}; it must have the "
                f"shape {tuple(self.shape)} and be on {self.device}"
            )
        if isinstance(value, QuantizedTensor) and self.same_format(value):
            for name, t in zip(PARTS, value.tensors(), strict=True):
                setattr(self, name, t)
        else:
            self.detach().copy_(value)

    def tolist(self) -> Any:
        return self.decode().tolist()

    # The memory of the numbers does not exist.
    __dlpack_c_exchange_api__ = None

    def __dlpack__(self, *unused: Any, **keywords: Any) -> Any:
        raise BufferError(
            "tenon: a QuantizedTensor has no memory of numbers to share; share q.dequantize(), or "
            "its parts q.rowwise_data, q.rowwise_scale_inv"
        )

    # 8-bit all-gather of FSDP2.
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        from ._rows import for_gather

        return for_gather(self, mesh, outer_size, mp_policy.param_dtype or self.dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        from ._rows import gathered

        return gathered(self, all_gather_outputs, metadata, out)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The initial values, if `quantized_model_init` was told to preserve them."""
        return self.__dict__.get("_initial")

    def clear_high_precision_init_val(self) -> None:
        """Drops the initial values."""
        self.__dict__.pop("_initial", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The codes are stored as bytes, which every torch can pickle.
        parts = {
            name: t.view(torch.uint8) if name in _CODES else t for name, t in self.parts().items()
        }
        is_parameter = isinstance(self, torch.nn.Parameter)
        of = (tuple(self.shape), self.matrix, self.dtype, self.fp8_dtype, self.scaling)
        return unpickled, (*of, parts, self.swizzled, self.quantizer, self.requires_grad,
                           is_parameter)  # fmt: skip

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        codes = (("rowwise", self.rowwise_data), ("columnwise", self.columnwise_data))
        sides = "+".join(side for side, t in codes if t is not None)
        device = "" if self.is_cpu else f", device={self.device}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, scaling={self.scaling!r}, {sides}{device}{grad})"
        )


_ENCODED = {name: name.encode() for name in SCALINGS}


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for n in sizes:
        count *= n
    return count


def wrap(
    shape: Sequence[int],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    scaling: str,
    parts: Sequence[torch.Tensor | None],
    swizzled: bool,
    quantizer: Quantizer | None,
    matrix: tuple[int, int] | None = None,
) -> QuantizedTensor:
    """The tensor with these parts, without checks."""
    data, scale, columns, their_scale = parts
    like = columns if data is None else data
    if like is None:
        raise ValueError(
            "tenon: QuantizedTensor: neither rowwise_data nor columnwise_data; give one of them"
        )
    made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        QuantizedTensor, shape, dtype=dtype, device=like.device
    )
    if SCALINGS[scaling].single:  # one scale for both encodings
        scale = their_scale = their_scale if scale is None else scale
    made.__dict__.update(
        rowwise_data=data,
        rowwise_scale_inv=scale,
        columnwise_data=columns,
        columnwise_scale_inv=their_scale,
        fp8_dtype=fp8_dtype,
        scaling=scaling,
        swizzled=swizzled,
        quantizer=quantizer,
        matrix=matrix or folded(shape),
        part_of=None,
    )
    result: QuantizedTensor = made
    return result


def like(
    q: QuantizedTensor,
    parts: Sequence[torch.Tensor | None],
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    matrix: tuple[int, int] | None = None,
) -> QuantizedTensor:
    """A tensor in the format of `q` with other parts."""
    return wrap(
        q.shape if shape is None else shape,
        dtype or q.dtype,
        q.fp8_dtype,
        q.scaling,
        parts,
        q.swizzled,
        q.quantizer,
        matrix or q.matrix,
    )


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    scaling: str,
    rowwise: bool,
    columnwise: bool,
    device: torch.device,
    swizzled: bool = False,
    quantizer: Quantizer | None = None,
    pin_memory: bool = False,
) -> QuantizedTensor:
    """A tensor with uninitialised codes and scales."""
    rows, cols = folded(shape)
    mode = SCALINGS[scaling]
    scale_dtype = SCALE_DTYPES[mode.scale_dtype]
    empty = torch.empty
    if pin_memory:
        empty = functools.partial(empty, pin_memory=True)
    parts: list[torch.Tensor | None] = [None] * 4
    if rowwise:
        parts[0] = empty(shape, dtype=fp8_dtype, device=device)
        if not mode.single:
            _, scales = encoding_shapes(scaling, rows, cols, False)
            parts[1] = empty(scales, dtype=scale_dtype, device=device)
    if columnwise:
        data, scales = encoding_shapes(scaling, rows, cols, True)
        like = data if mode.transposes else shape
        parts[2] = empty(like, dtype=fp8_dtype, device=device)
        if not mode.single:
            parts[3] = empty(scales, dtype=scale_dtype, device=device)
    if mode.single:
        parts[1] = empty(1, dtype=scale_dtype, device=device)
    return wrap(shape, dtype, fp8_dtype, scaling, parts, swizzled, quantizer, (rows, cols))


def initialise(t: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> None:
    """Fills a parameter by a function that writes in place. A quantised one is encoded once."""
    with torch.no_grad():
        if not isinstance(t, QuantizedTensor):
            function(t)
            return
        plain = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        function(plain)
        t.copy_(plain)
        if "_initial" in t.__dict__:
            t.__dict__["_initial"] = plain.cpu()


def unpickled(
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    scaling: str,
    parts: dict[str, torch.Tensor],
    swizzled: bool,
    quantizer: Any,
    requires_grad: bool,
    is_parameter: bool,
) -> QuantizedTensor:
    """The tensor of `QuantizedTensor.__reduce_ex__`. Checks what a file says."""
    from .quantizer import Quantizer

    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise TypeError(f"tenon: QuantizedTensor: its quantizer is a {type(quantizer).__name__}")
    shape, matrix = tuple(map(int, shape)), (int(matrix[0]), int(matrix[1]))
    if dtype not in _call.PLAIN or _product(shape) != _product(matrix) or min(matrix) < 0:
        raise ValueError(
            f"tenon: QuantizedTensor: the stored tensor has dtype={dtype}, shape={shape} and a "
            f"matrix of {matrix}, which do not fit"
        )
    kind = fp8_dtype_of(fp8_dtype)
    own = [parts.get(name) for name in PARTS]
    for i in (0, 2):
        codes = own[i]
        if codes is not None:
            own[i] = codes.view(kind)
    scaling_of(scaling)
    made = wrap(shape, dtype, kind, scaling, own, bool(swizzled), quantizer, matrix)
    made.check_parts()
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)  # type: ignore[return-value]
    made.requires_grad_(requires_grad)
    return made


class Encode(torch.autograd.Function):
    """Straight-through gradient: d quantize(x)/dx = 1."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        out: QuantizedTensor | None,
    ) -> QuantizedTensor:
        if out is None:
            out = quantizer.make_empty(x.shape, dtype=dtype, device=x.device)
        else:
            ctx.mark_dirty(out)
        quantizer.write(x, out)
        return out

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, None


class Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        return q.decode(dtype)

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


from ._quantized_ops import dispatch  # noqa: E402  (it needs the class)

torch.serialization.add_safe_globals([unpickled])
