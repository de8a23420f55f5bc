"""Plans: a chain of ops compiled to few passes, forward and backward, for any number of rows."""

from __future__ import annotations

import ctypes
import html
import inspect
import json
import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _lib
from ._c_abi import ENCODINGS, PASS, RUN, OpRequest
from ._c_abi import Encoding as CEncoding
from ._c_abi import Format as CFormat
from ._html import Text
from ._lib import (
    DTYPE,
    DTYPES,
    ROLES,
    GradRequest,
    Options,
    PlanRequest,
    byref,
    check,
    encoded,
    lib,
    list_of,
    options,
    text_of,
)

__all__ = [
    "BACKWARD",
    "BACKWARD_LAST",
    "FORWARD",
    "Buffer",
    "Encoding",
    "Format",
    "OpFormats",
    "Plan",
    "frame",
    "plan",
]

# The passes of a plan. The last backward pass may overwrite saved buffers.
FORWARD, BACKWARD, BACKWARD_LAST = PASS["forward"], PASS["backward"], PASS["backward_last"]
_WEIGHTS_UNCHANGED, _NO_TUNING = RUN["weights_unchanged"], RUN["no_tuning"]
_ALIGNED, _SEPARATE = RUN["aligned"], RUN["separate"]

_PLAIN = ("f32", "f16", "bf16")
_SIZES = 64  # row counts whose sizes a plan caches


class Buffer(NamedTuple):
    """Memory that the caller provides for a run."""

    name: str
    role: str
    dtype: str
    # (mul, div, round, add): round_up(ceil_div(rows*mul, div), round) + add.
    rows: tuple[int, int, int, int]
    cols: int
    rows_inside: bool
    reads_backward: bool  # whether the backward pass reads it
    # The buffer whose memory it has. A result that is x, dy or another gradient is not written.
    same_as: int | None
    # By pass: the first and the last step that uses it, or (-1, -1).
    steps: tuple[tuple[int, int], tuple[int, int]]
    # The saved buffer whose memory it may have in a last backward pass with separate buffers.
    in_place: int | None
    initial: tuple[float, float]  # bounds of the uniform initial values of a parameter

    def shape(self, rows: int) -> tuple[int, int]:
        """Its two dimensions for a call with `rows` rows. The last one is contiguous."""
        mul, div, unit, add = self.rows
        count = -(-rows * mul // div)
        count = -(-count // unit) * unit + add
        return (self.cols, count) if self.rows_inside else (count, self.cols)


class Format(NamedTuple):
    """The format of an operand of a product, e.g. Format("mxfp8")."""

    scaling: str
    dtype: str = "e4m3"
    eps: float = 0.0
    power_of_two: bool | None = None  # default: that of the mode


class Encoding(NamedTuple):
    """The encodings of a tensor: rowwise, columnwise or both."""

    format: Format
    rowwise: bool = True
    columnwise: bool = False
    swizzled: bool = False  # mxfp8: scales in the order of the tensor cores


class OpFormats(NamedTuple):
    """The formats of one linear: input, weight, gradient of the output. None: not quantised.

    `weight_encoding` is set if the weight comes encoded. `rowwise` and `columnwise` are the
    encodings that a quantize at the end of a chain gives.
    """

    input: Format | None = None
    weight: Format | None = None
    gradient: Format | None = None
    weight_encoding: Encoding | None = None
    rowwise: bool = True
    columnwise: bool = False


class Plan:
    """A compiled chain. print() shows its description, and notebooks show its HTML page."""

    def __init__(
        self,
        chain: str,
        *,
        cols: int = 0,
        dtype: str = "f32",
        parameter_dtype: str | None = None,
        input_dtype: str | None = None,
        input_encoding: Encoding | None = None,
        output_decoded: bool = False,
        parameter_dtypes: Sequence[str] = (),
        extra_dtypes: Sequence[str] = (),
        op_formats: Sequence[OpFormats | None] = (),
        recipe: str = "none",
        keep: str = "input",
        training: bool = True,
        backward: bool = True,
        input_grad: bool = True,
        parameter_grads: Sequence[bool | str] = (),
        extra_grads: Sequence[bool | str] = (),
        precision: str = "native",
        rounding: str = "once",
        device: str = "cpu",
        target: str | None = None,
        rows: int = 256,
        allocate: Any = None,
    ) -> None:
        arguments = locals()
        # What `Plan` needs to make it again, without defaults.
        self.request: dict[str, Any] = {
            name: arguments[name]
            for name, p in _PARAMETERS.items()
            if name not in ("self", "allocate", "target", "rows") and arguments[name] != p.default
        }
        plain = [("dtype", dtype)]
        plain += [("parameter_dtype", parameter_dtype or dtype)]
        plain += [("input_dtype", input_dtype or dtype)]
        plain += [("parameter_dtypes", value) for value in parameter_dtypes]
        plain += [("extra_dtypes", value) for value in extra_dtypes]
        for name, value in plain:
            if value not in _PLAIN:
                raise ValueError(f"plan: {name}={value!r}; it must be 'f32', 'f16' or 'bf16'")
        self.rows = _count("rows", rows)  # default number of rows of descriptions
        request = PlanRequest(
            cols=_count("cols", cols),
            dtype=DTYPE[dtype],
            parameter_dtype_given=parameter_dtype is not None,
            parameter_dtype=DTYPE[parameter_dtype or dtype],
            recipe=encoded(recipe, "plan: the recipe"),
            evaluation=not training,
            forward_only=not backward,
            no_input_grad=not input_grad,
            keep=encoded(keep, "plan: keep"),
            parameter_grads=_requests("parameter_grads", parameter_grads),
            parameter_grad_count=len(parameter_grads),
            extra_grads=_requests("extra_grads", extra_grads),
            extra_grad_count=len(extra_grads),
            target=None if target is None else encoded(target, "plan: the target"),
            input_dtype_given=input_dtype is not None,
            input_dtype=DTYPE[input_dtype or dtype],
            parameter_dtypes=_numbers(parameter_dtypes),
            parameter_dtype_count=len(parameter_dtypes),
            extra_dtypes=_numbers(extra_dtypes),
            extra_dtype_count=len(extra_dtypes),
            op_requests=(OpRequest * len(op_formats))(*map(_op_request, op_formats)),
            op_request_count=len(op_formats),
            input_encoding=_encoding("input_encoding", input_encoding),
            output_decoded=output_decoded,
        )
        handle = ctypes.c_void_p()
        chosen = options(precision, rounding, device)
        if allocate is not None:
            self._allocate = allocate  # the plan calls it in its runs
            chosen = Options(
                precision=chosen.precision,
                rounding=chosen.rounding,
                device=chosen.device,
                allocate=allocate,
            )
        text = encoded(chain, "plan: the chain")
        check(lib.tenon_plan_build(text, request, chosen, byref(handle)))
        self._handle = handle
        weakref.finalize(self, lib.tenon_plan_free, handle)
        self.buffers = tuple(
            Buffer(
                b.name.decode(),
                ROLES[b.role],
                "u64" if b.random else DTYPES[b.dtype],
                (b.rows_mul, b.rows_div, b.rows_round, b.rows_add),
                b.cols,
                bool(b.rows_inside),
                bool(b.reads_backward),
                None if b.same_as < 0 else b.same_as,
                ((b.first_forward, b.last_forward), (b.first_backward, b.last_backward)),
                None if b.in_place < 0 else b.in_place,
                (b.initial_low, b.initial_high),
            )
            for b in list_of(lib.tenon_plan_buffers, _lib.Buffer, handle)
        )
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}

    def sizes(self, rows: int) -> tuple[tuple[int, ...], int]:
        """Bytes of each buffer and of the workspace. Raises an error if `rows` is not supported."""
        known = self._known.get(rows)
        if known is None:
            rows = _count("rows", rows)
            count = len(self.buffers)
            each, workspace = (ctypes.c_int64 * count)(), ctypes.c_int64()
            check(lib.tenon_plan_sizes(self._handle, rows, each, count, byref(workspace)))
            if len(self._known) >= _SIZES:
                self._known.clear()
            known = self._known[rows] = (tuple(each), workspace.value)
        return known

    def workspace(
        self, pass_: int, rows: int, *, aligned: bool = False, separate: bool = False
    ) -> int:
        """Bytes of the workspace of one pass. `aligned` and `separate` as in `run`."""
        size = ctypes.c_int64()
        flags, rows = (_ALIGNED if aligned else 0), _count("rows", rows)
        flags += _SEPARATE if separate else 0
        check(lib.tenon_plan_workspace(self._handle, pass_, rows, flags, byref(size)))
        return size.value

    def prepare(self, rows: int, stream: int | None = None) -> None:
        """Does the one-time work of later runs of `rows` rows: compiles kernels, times products.

        It runs each step once on scratch memory from the device's pool. Call it before a stream is
        captured in a CUDA graph.
        """
        check(lib.tenon_plan_prepare(self._handle, _count("rows", rows), None, stream))

    def run(
        self,
        pass_: int,
        rows: int,
        memory: Any,
        workspace: int | None,
        stream: int | None = None,
        *,
        weights_unchanged: bool = False,
        tune: bool = True,
        aligned: bool = False,
        step: int | None = None,
    ) -> None:
        """Runs one pass. `memory` is an array of c_void_p with one address per used buffer.

        Without `tune` a run on CUDA uses the first algorithm of each product that is not timed yet.
        `aligned` states that all addresses are multiples of 16 bytes: less workspace is enough.
        With `step` only that step runs, and workspace buffers have addresses of their own in
        `memory`; the workspace is then that of `separate`.
        """
        flags = (_WEIGHTS_UNCHANGED if weights_unchanged else 0) + (0 if tune else _NO_TUNING)
        if aligned:
            flags += _ALIGNED
        if step is not None:
            flags += _SEPARATE
            check(
                lib.tenon_plan_run_steps(
                    *(self._handle, pass_, step, step + 1, rows, memory, len(memory)),
                    *(workspace, flags, stream),
                )
            )
            return
        code = lib.tenon_plan_run(
            self._handle, pass_, rows, memory, len(memory), workspace, flags, stream
        )
        if code:
            check(code)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: equal ones promise equal bits for equal inputs, if strict.

        For products by a library only on the same kind of device, with TENON_TUNE=0.
        """
        return text_of(lib.tenon_plan_fingerprint, self._handle)

    def describe(self, rows: int | None = None) -> str:
        """A text for both passes: reads and writes of each step, bytes, saved tensors, reasons."""
        return Text(self._text("text", rows))

    def json(self, rows: int | None = None) -> Any:
        """The description as JSON."""
        return json.loads(self._text("json", rows))

    def html(self, rows: int | None = None) -> str:
        """The description as one self-contained HTML page."""
        return self._text("html", rows)

    def _text(self, format: str, rows: int | None) -> str:
        rows = self.rows if rows is None else _count("rows", rows)
        return text_of(lib.tenon_plan_describe, self._handle, rows, format.encode())

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return frame(self.html())


_PARAMETERS = inspect.signature(Plan.__init__).parameters


def _count(name: str, value: Any) -> int:
    """Checks that a number of rows or columns fits in 64 bits. ctypes would truncate it."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"plan: {name}={value!r}; it must be an int") from None
    if not 0 <= count < 2**63:
        raise ValueError(f"plan: {name}={count}; it must be from 0 to 2**63 - 1")
    return count


def _numbers(dtypes: Sequence[str]) -> Any:
    return (ctypes.c_int32 * len(dtypes))(*(DTYPE[name] for name in dtypes))


def _format(given: Format | None) -> CFormat:
    if given is None:
        return CFormat()
    if given.dtype not in DTYPE:
        raise ValueError(f"plan: the dtype of a format is {given.dtype!r}; use 'e4m3' or 'e5m2'")
    powers = {None: 0, True: 1, False: 2}
    return CFormat(
        scaling=encoded(given.scaling, "plan: the scaling of a format"),
        dtype=DTYPE[given.dtype],
        eps=given.eps,
        power_of_two=powers[given.power_of_two],
    )


def _encodings(name: str, rowwise: bool, columnwise: bool) -> int:
    if not rowwise and not columnwise:
        raise ValueError(f"plan: {name} is neither rowwise nor columnwise; give one of them")
    kind = "both" if rowwise and columnwise else "rowwise" if rowwise else "columnwise"
    return ENCODINGS[kind]


def _encoding(name: str, given: Encoding | None) -> Any:
    if given is None:
        return None
    return ctypes.pointer(
        CEncoding(
            format=_format(given.format),
            encodings=_encodings(name, given.rowwise, given.columnwise),
            swizzled=given.swizzled,
        )
    )


def _op_request(given: OpFormats | None) -> OpRequest:
    if given is None:
        return OpRequest()
    return OpRequest(
        recipe_given=1,
        input=_format(given.input),
        weight=_format(given.weight),
        gradient=_format(given.gradient),
        weight_encoding=_encoding("weight_encoding", given.weight_encoding),
        output=_encodings("an output", given.rowwise, given.columnwise),
    )


def _requests(name: str, wanted: Sequence[bool | str]) -> Any:
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise TypeError(f"plan: {name}={wanted!r}; give a list with an entry for each gradient")
    return (GradRequest * len(wanted))(*(_request(name, w) for w in wanted))


def _request(name: str, wanted: bool | str) -> GradRequest:
    if isinstance(wanted, str) and wanted.removeprefix("+") in _PLAIN:
        dtype = DTYPE[wanted.removeprefix("+")]
        return GradRequest(dtype_given=1, dtype=dtype, accumulate=wanted.startswith("+"))
    if not isinstance(wanted, bool):
        raise ValueError(
            f"plan: {name} has {wanted!r}; an entry is True, False, or the dtype that the gradient "
            "is wanted in, 'f32', 'f16' or 'bf16', after a '+' if it is added to memory"
        )
    return GradRequest(unwanted=not wanted)


def frame(page: str) -> str:
    """An HTML page inside an iframe, so that its style does not affect the outer page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox '
        'style="width:100%;height:40em;border:1px solid #ccc"></iframe>'
    )


def plan(chain: str, **request: Any) -> Plan:
    """Plans a chain of ops, e.g. plan("linear(512,2048) bias swiglu", dtype="bf16").

    `request` may contain:
    - cols: columns of the input, if the chain does not define them
    - dtype, parameter_dtype; input_dtype: of x, if it is not dtype
    - input_encoding: the Encoding of x, if it comes encoded
    - output_decoded: a quantize at the end gives the numbers that its codes represent
    - parameter_dtypes, extra_dtypes: of single parameters and extra inputs
    - op_formats: for each linear and quantize, its OpFormats, or None for those of the recipe
    - recipe: 'none', 'delayed', 'current', 'mxfp8' or 'block'
    - keep: 'input', 'fp8' or 'recompute'
    - training, backward, input_grad
    - parameter_grads, extra_grads: for each tensor, whether its gradient is needed, or its dtype;
      '+f32' adds it to the memory that the run is given
    - precision, rounding
    - device: 'cpu' or 'cuda'. 'cuda' needs no GPU here.
    - target: a machine to plan for, e.g. 'sm_90a' or 'avx512'. Such a plan cannot run.
    - rows: the number of rows for descriptions

    Nothing is computed.
    """
    return Plan(chain, **request)
