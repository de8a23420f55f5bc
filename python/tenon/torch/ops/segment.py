"""A segment: adjacent built-in ops that run as one plan, with one call per pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..._lib import DTYPES
from ..._ops import ops as registry
from ..._plan import BACKWARD, BACKWARD_LAST, FORWARD, Buffer, Encoding, OpFormats, Plan
from .. import _call, _cuda, _saved, _watch
from .._context import in_backward, local
from .._dropout import random_state
from .._dynamo import one_break
from .._once import once
from .._quantized import FP8, QuantizedTensor, allocate
from .._quantized_ops import NumbersView
from . import _kernels
from ._plan_memory import TYPES, PlanMemory
from ._recipes import KEYS, Bound, Moment, may_be_recomputed
from ._stand_ins import stand_in
from .basic import (
    AddExtraInput,
    BasicLinear,
    Dropout,
    Identity,
    MakeExtraOutput,
    Quantize,
    Reshape,
)
from .op import (
    BackwardResult,
    BasicOperation,
    ExtraOutputs,
    FusedOperation,
    OperationContext,
    changes,
    with_numbers,
)

if TYPE_CHECKING:
    from ..quantizer import Quantizer
    from ._routes import Routes
    from .fuser import Stage

__all__ = ["Segment"]

_NAMES = {dtype: DTYPES[_call.DTYPES[dtype]] for dtype in _call.PLAIN}
_MOST = 64  # cached plans per segment
_TENSORS = (torch.Tensor, torch.nn.Parameter, QuantizedTensor, NumbersView)

# By op: whether each parameter may have several rows. Other parameters are 1-D in torch.
_MATRICES = {op.name: [p.rows is not None for p in op.parameters] for op in registry()}

# Ops without computation. A plan of only these ops would just copy.
_FREE = (Identity, MakeExtraOutput, Reshape)


class _Ready:
    """A plan with the indices of its buffers."""

    def __init__(self, plan: Plan, segment: Segment, cols: int, dtype: torch.dtype) -> None:
        ops = segment.ops
        self.plan, self.dtype = plan, dtype
        names = [b.name for b in plan.buffers]
        at = {name: i for i, name in enumerate(names)}
        of: dict[str, list[int]] = {}
        for i, b in enumerate(plan.buffers):
            of.setdefault(b.role, []).append(i)
        self.count = len(names)
        # An encoded weight has several buffers, which begin with its name.
        params: dict[str, list[int]] = {}
        for i in of.get("param", []):
            params.setdefault(".".join(names[i].split(".")[:2]), []).append(i)
        self.packed = {
            k: [(names[i].removeprefix(name), plan.buffers[i]) for i in group]
            for k, (name, group) in enumerate(params.items())
            if TYPES[plan.buffers[group[0]].dtype] not in _NAMES
        }
        self.extra_in = of.get("extra_in", [])
        self.extra_out = of.get("extra_out", [])
        self.made_as = [plan.buffers[i].same_as for i in self.extra_out]  # x, or None
        # State of quantizers: buffer, op, tensor of the op, end of the name. Other state is encoded
        # weights.
        self.state: list[tuple[int, int, str, str]] = []
        for i in of.get("state", []):
            owner, _, end = names[i].rpartition(".")
            tensor = owner.partition(".")[2] or ("dy" if owner.startswith("d") else "x")
            if end in ("scale", "amax") and owner + ".scale" in at:
                self.state.append((i, int(owner.partition(".")[0].lstrip("dq")), tensor, end))
        quantizers = {i for i, *_ in self.state}
        self.weights = [i for i in of.get("state", []) if i not in quantizers]
        self.memory = PlanMemory(plan, quantizers)
        # With codes of weights that are kept: they have memory of their own.
        self.kept_memory = PlanMemory(plan, {*quantizers, *self.weights}) if self.weights else None
        # The tensors of quantizers in the last call: by bound and its number of fits.
        self.last_state: tuple[Any, int, list[tuple[int, torch.Tensor]]] = (None, 0, [])
        self.rng, self.dx = at.get("rng"), at.get("dx")
        self.dy = at.get("dy", -1)  # -1 in a plan without backward
        self.dparams = [at.get("d" + name) for name in params]
        self.dextra_in, self.dextra_out = (
            [at.get("d" + names[i]) for i in group] for group in (self.extra_in, self.extra_out)
        )
        # Gradients of the input, of the parameters and of the extra inputs: the buffer that holds
        # each, which may be dy, the gradient of an extra output or another gradient. None: none.
        self.results: list[int | None] = []
        for made in (self.dx, *self.dparams, *self.dextra_in):
            same = None if made is None else plan.buffers[made].same_as
            self.results.append(made if same is None else same)
        # Those that a backward pass writes: result, buffer, dtype.
        self.written: list[tuple[int, int, torch.dtype]] = []
        taken = {self.dy, *self.dextra_out}
        for k, made in enumerate(self.results):
            if made is not None and made not in taken:
                taken.add(made)
                self.written.append((k, made, TYPES[plan.buffers[made].dtype]))
        # The tensors of a forward call, and which of them the backward pass reads.
        # The input. An encoded one has several buffers.
        inputs = [i for i in of["input"] if names[i].partition(".")[0] == "x"]
        self.parts = {names[i][1:]: plan.buffers[i] for i in inputs}
        # A quantize at the end gives codes: its outputs by the ends of their names.
        self.output = [names[i][1:] for i in of["output"]]
        self.encodes: tuple[torch.dtype, str] | None = None
        held = [i for group in params.values() for i in group]
        self.tensors = [*inputs, *of["output"], *held, *self.extra_in, *self.extra_out]
        self.dtypes = [TYPES[plan.buffers[i].dtype] for i in self.tensors]
        self.kept = [k for k, i in enumerate(self.tensors) if plan.buffers[i].reads_backward]
        matrices = [m for op in ops if op.parameter_names for m in _MATRICES[op.op_name or ""]]
        self.shapes = [
            torch.Size(b.shape(0) if matrix else (b.cols,))
            for matrix, b in zip(
                matrices, (plan.buffers[g[0]] for g in params.values()), strict=True
            )
        ]
        for k in self.packed:  # columnwise codes may be transposed
            op: Any = ops[segment._named[k][0]]
            self.shapes[k] = torch.Size((op.out_features, op.in_features))
        # Where the input, the parameters and the extra inputs are among the tensors. None: encoded.
        at_ = len(inputs) + len(of["output"])
        self.positions: list[int | None] = [0 if len(inputs) == 1 else None]
        for k, group in enumerate(params.values()):
            self.positions.append(None if k in self.packed else at_)
            at_ += len(group)
        self.positions += range(at_, at_ + len(self.extra_in))
        self.cols = [cols]  # columns of the input of each op, then of the output
        for op in ops:
            self.cols.append(op.plan_cols(self.cols[-1]))
        # Dropouts share one random stream. Its rows must hold the widest of them.
        drops = [c for op, c in zip(ops, self.cols, strict=False) if isinstance(op, Dropout)]
        self.dropout_cols = max(drops or self.cols)

    def saves(self, k: int | None, t: torch.Tensor) -> bool:
        """Whether tensor `k` of a forward call is saved itself, or nothing is."""
        if not self.kept and not self.memory.saved:
            return True
        return k is not None and k in self.kept and t.dtype == self.dtypes[k] and t.is_contiguous()


class _Run:
    """What the backward pass of one call needs, in addition to saved tensors."""

    __slots__ = (
        "blocks_at",
        "device",
        "extras",
        "input",
        "kinds",
        "made",
        "main_grads",
        "memory",
        "moment",
        "output",
        "overwritten",
        "params",
        "ready",
        "rows",
        "state",
        "weights",
    )
    ready: _Ready
    memory: PlanMemory
    moment: Moment | None  # the quantizers and scales; None after the last backward pass
    weights: _Weights | None  # the codes of weights that are kept
    rows: int
    input: tuple[torch.Size, torch.dtype]
    output: Sequence[int]
    made: list[Sequence[int]]  # shapes of the extra outputs
    extras: list[tuple[torch.Size, torch.dtype]]
    params: list[torch.dtype]
    main_grads: list[tuple[int, BasicLinear, torch.Tensor]]  # weights with a main_grad
    state: list[tuple[int, torch.Tensor]]  # tensors of quantizers, by buffer, as in ready.state
    device: torch.device
    kinds: list[Any]
    blocks_at: list[int] | None
    overwritten: bool


class _Formats:
    """The ops with quantizers and their formats. None: a plan does not have them."""

    def __init__(self, of: tuple[tuple[int, OpFormats | None], ...]) -> None:
        self.of = of


class _Weights:
    """Codes of the weights of a plan that later calls read."""

    used = False  # whether any call ever kept codes

    def __init__(
        self, ready: _Ready, owner: Any, encodings: list[int], epochs: list[Any], device: Any
    ) -> None:
        _Weights.used = True
        self.owner, self.encodings, self.epochs = owner, encodings, epochs
        sizes, _ = ready.plan.sizes(1)  # those of weights do not depend on the rows
        self.codes = [
            (i, torch.empty(sizes[i], dtype=torch.uint8, device=device)) for i in ready.weights
        ]
        # By pass: whether it has encoded them.
        self.done = [False, False]


class Cut(list["Stage"]):
    """The stages that a call of a segment is cut into, and the reason."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class Segment(FusedOperation):
    """Adjacent built-in ops as one plan.

    A call that one plan cannot express is cut into several segments and single ops: parts with
    another dtype, tensors without columns, quantizers that a plan does not have.
    """

    note = "one call forward, one backward"

    def __init__(self, ops: Sequence[BasicOperation], start: int, routes: Routes) -> None:
        super().__init__(ops)
        stop = start + len(ops)
        self.ops = list(ops)
        self._told = " + ".join(type(op).__name__ for op in ops)
        self._start, self._routes = start, routes
        self._routed = not routes.plain
        self._none: ExtraOutputs = [()] * len(ops)
        self._reshapes = any(type(op).plan_lead is not BasicOperation.plan_lead for op in ops)
        self._named = [(i, name) for i, op in enumerate(ops) for name in op.parameter_names or ()]
        self._holders = [
            (ops[i].parameter_holder()._parameters, ops[i], name, ops[i].parameter_key(name))
            for i, name in self._named
        ]
        self._weights = [
            (k, op) for k, (i, _) in enumerate(self._named) if isinstance(op := ops[i], BasicLinear)
        ]
        # Channels that begin and end in this segment are internal. Other extra tensors are its
        # arguments.
        read_here = {s for sources in routes.sources[start:stop] for s in sources}
        read_later = {s for sources in routes.sources[stop:] for s in sources}
        # Text before and after each op.
        self._before, self._behind = [""] * len(ops), [""] * len(ops)
        self.given: list[tuple[int, int]] = []  # extra inputs: op, slot
        self.made: list[tuple[int, int]] = []  # extra outputs
        self._dropped: list[int] = []  # ops with an unused extra output
        self._sources: dict[int, tuple[int, int]] = {}  # internal channels: reader, writer
        for i, op in enumerate(ops):
            for slot, source in enumerate(routes.sources[start + i]):
                if isinstance(source, tuple) and source[0] >= start:
                    self._behind[i] += f"<c{source[0]}_{source[1]}"
                    self._sources[i] = (source[0] - start, source[1])
                else:
                    self.given.append((i, slot))
            for slot in range(op.num_extra_outputs):
                key = (start + i, slot)
                leaves = key in routes.outputs or key in read_later
                if leaves:
                    self.made.append((i, slot))
                if key in read_here:
                    self._before[i] = "make_extra_output " if leaves else ""
                    self._behind[i] += f">c{key[0]}_{key[1]}"
                    assert isinstance(op, MakeExtraOutput) or not leaves
                elif not leaves and isinstance(op, MakeExtraOutput):
                    self._dropped.append(i)
                elif not leaves:
                    self.made.append((i, slot))
        # The extra input whose memory the last op may reuse for the output.
        last = ops[-1]
        self._in_place = -1
        if isinstance(last, AddExtraInput) and (len(ops) - 1, 0) in self.given:
            if 0 not in last._input_channels:
                self._in_place = self.given.index((len(ops) - 1, 0))
        self._ready: dict[Any, _Ready | Cut] = {}
        self._last: _Ready | Cut | None = None
        self._kept: dict[_Ready, _Weights] = {}
        # The settings of the ops, read again after a change.
        self._seen, self._text = -1, tuple[str | None, ...]()
        self._modes: list[bool | None] = []
        # The formats of ops by what they follow from, and by themselves.
        self._bounds: dict[Bound | None, _Formats] = {}
        self._known_formats: dict[Any, _Formats] = {}
        self._config: tuple[Any, ...] = ()

    def texts(self) -> tuple[str | None, ...]:
        """The chain text of each op. None for an op that a plan does not have."""
        seen = changes()
        if seen != self._seen:
            texts = [op.plan_text() for op in self.ops]
            for i in self._dropped:
                texts[i] = "identity"
            modes = [op.training if op.has_modes else None for op in self.ops]
            self._bounds.clear()
            # Not by attribute: setting one counts as a change of an operation.
            self.__dict__.update(_seen=seen, _text=tuple(texts), _modes=modes)
            self.__dict__["_config"] = (*texts, *modes)
        return self._text

    def parameters_of(self, ctxs: Sequence[OperationContext] | None = None) -> list[torch.Tensor]:
        """The parameters of the ops, in the order of the plan."""
        found = []
        for holder, op, name, key in self._holders:
            p: Any = holder.get(key)
            if p is None:
                p = getattr(op, name)
            found.append(p)
        if ctxs is not None:
            for k, (i, name) in enumerate(self._named):
                computed = ctxs[i]._computed
                if computed is not None:
                    found[k] = computed[name]
        return found

    def strided(self) -> list[str]:
        """The parameters that every call copies, because a plan reads contiguous ones."""
        params = zip(self._named, self.parameters_of(), strict=True)
        return [
            f"{name} of {type(self.ops[i]).__name__}"
            for (i, name), p in params
            if not p.is_contiguous()
        ]

    def find(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        backward: bool,
        input_grad: bool,
        extra_grads: Sequence[bool],
        device: str | None = None,
        encoding: Encoding | None = None,
        bound: Bound | None = None,
    ) -> _Ready | Cut:
        """The plan for a call, or the stages that it is cut into. Default device: that of x.

        `encoding` is set if x is encoded. `bound` has the quantizers of all ops of the fuser.
        """
        kind = device or ("cpu" if x.is_cpu else "cuda")
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        wanted: list[Any] = [backward and p.requires_grad for p in params]
        for k, op in self._weights if backward else ():
            if op.accumulate_into_main_grad and wanted[k]:
                wanted[k] = op.grad_request(params[k])
        self.texts()
        formats = self._formats(bound)
        weights: dict[int, Encoding] = {}
        for k, _ in self._weights:
            weight = params[k]
            if type(weight) is QuantizedTensor:
                weights[self._named[k][0]] = weight.plan_encoding()
        key = (
            *(self._config, x.shape[-1] if x.dim() else 0, x.dtype, autocast, encoding),
            *weights.items(),
            *(kind, x.device.index),
            *[p.dtype for p in params],
            *wanted,
            *[t.dtype for t in extras],
            *(*extra_grads, backward, input_grad),
            formats,
        )
        found = self._ready.get(key)
        if found is None:
            if device is None:
                self._check_operands(x, params, extras)
            request = {
                "input_encoding": encoding,
                "backward": backward,
                "input_grad": input_grad,
                "parameter_grads": wanted,
                "extra_grads": extra_grads,
                "device": kind,
            }
            # A plan is for the GPU that is current while it is made.
            with _cuda.device_of(x):
                found = self._make(x, params, extras, autocast, formats, weights, request)
            if len(self._ready) >= _MOST:
                self._ready.clear()
            self._ready[key] = found
        self.__dict__["_last"] = found
        return found

    def last(self) -> Plan | Cut:
        """What the last call ran. Before a call: the plan for an input of a parameter's dtype."""
        if self._last is None:
            params = self.parameters_of()
            dtype = params[0].dtype if params else torch.get_default_dtype()
            on_cpu = not any(p.is_cuda for p in params)
            return self.explain(self.width() or 2, dtype, on_cpu, True, True)
        return self._last if isinstance(self._last, Cut) else self._last.plan

    def steps(self, plan: Plan, direction: str) -> list[set[int]]:
        """The ops that each step of `plan` runs, by their places in this segment."""
        places: list[int | None] = []
        for i, before in enumerate(self._before):
            places += [None, i] if before else [i]
        ops = [[places[k] for k in step["ops"]] for step in plan.json()[direction]]
        return [{i for i in step if i is not None} for step in ops]

    def _make(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
        formats: _Formats,
        weights: dict[int, Encoding],
        request: dict[str, Any],
    ) -> _Ready | Cut:
        texts, of_ops = list(self.texts()), dict(formats.of)
        for i, found in of_ops.items():
            if found is None:  # a plan does not have its quantizers
                texts[i] = None
        of_linears = dict(of_ops)
        for i, of_weight in weights.items():
            given = of_ops.get(i) or OpFormats()
            of_linears[i] = given._replace(weight=None, weight_encoding=of_weight)
        flow = self._dtypes(x.dtype, params, extras, autocast)
        cols = x.shape[-1] if x.dim() else 0
        if cols == 0:
            every = [(i, i + 1) for i in range(len(self.ops))]
            return self._stages(every, "its input has no columns", texts)
        modes = {mode for mode in self._modes if mode is not None}
        if None in texts or len(modes) > 1 or any(dtype != flow[0] for dtype in flow):
            return self._stages(*self.parts(texts, flow), texts)
        dtype = flow[0]
        self._check_widths(cols)
        # Quantised ops have labels, which begin the names of the state of their quantizers.
        labels = [f":q{i}" if i in of_ops else "" for i in range(len(texts))]
        around = zip(self._before, texts, self._behind, labels, strict=True)
        quantising = [i for i, op in enumerate(self.ops) if isinstance(op, (BasicLinear, Quantize))]
        plan = Plan(
            " ".join([f"{before}{text}{behind}{label}" for before, text, behind, label in around]),
            cols=cols,
            dtype=_NAMES[dtype],
            input_dtype=_NAMES[x.dtype],
            parameter_dtypes=[_NAMES[p.dtype] for p in params],
            extra_dtypes=[_NAMES[t.dtype] for t in extras],
            op_formats=[of_linears.get(i) for i in quantising],
            training=modes != {False},
            allocate=None if request["device"] == "cpu" else _cuda.allocate_here,
            **request,
        )
        made, last = _Ready(plan, self, cols, dtype), of_ops.get(len(self.ops) - 1)
        if isinstance(self.ops[-1], Quantize) and last is not None and last.input is not None:
            made.encodes = FP8[last.input.dtype], last.input.scaling
        return made

    def _formats(self, bound: Bound | None) -> _Formats:
        """The formats of the ops with quantizers. Equal ones are the same object."""
        known = self._bounds.get(bound)
        if known is not None:
            return known
        start, stop = self._start, self._start + len(self.ops)
        mine = [] if bound is None else [i for i in bound.quantised if start <= i < stop]
        made = _Formats(
            tuple([(i - start, self._format(bound, i - start)) for i in mine if bound is not None])
        )
        made = self._known_formats.setdefault(made.of, made)
        if bound is None or bound.fixed:  # others may change at any time
            if len(self._bounds) >= _MOST:
                self._bounds.clear()
            self._bounds[bound] = made
        return made

    def _format(self, bound: Bound, i: int) -> OpFormats | None:
        formats, quantizer = bound.formats(self._start + i), None
        if i == len(self.ops) - 1:
            quantizer = self._encoder(bound)
        if quantizer is None or formats is None:
            return formats
        if quantizer.swizzled:  # a plan gives scales in the plain order
            return None
        return formats._replace(**quantizer.get_usages())

    def _encoder(self, of: Bound | Moment) -> Any:
        """The quantizer of a Quantize at the end, whose codes are the output."""
        if not isinstance(self.ops[-1], Quantize):
            return None
        return of.quantizers(self._start + len(self.ops) - 1).get(("forward", 0))

    def _state(
        self, ready: _Ready, device: torch.device, moment: Moment
    ) -> list[tuple[int, torch.Tensor]]:
        """The tensors of quantizers that a plan reads and writes, by buffer."""
        bound, fixed = moment.bound, moment.bound.fixed and moment.current()
        of, fits, found = ready.last_state
        if fixed and of is bound and fits == bound.fits:
            return found
        found = []
        quantizers = {op: moment.quantizers(self._start + op) for _, op, _, _ in ready.state}
        for i, op, tensor, end in ready.state:
            t = quantizers[op][KEYS[tensor]].plan_state()[end]
            if t.device != device:
                name = type(self.ops[op]).__name__
                raise ValueError(
                    f"{name}: the {end} of its quantizer is on {t.device}, but the input is "
                    f"on {device}; move the module to {device}, or make its quantizers there"
                )
            found.append((i, t))
        if fixed:
            ready.last_state = bound, bound.fits, found
        return found

    def _check_operands(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
    ) -> None:
        """Raises an error for tensors that a plan cannot read, with the name of their op."""
        name = self.told()
        _kernels.compute_dtype(name, x)
        _readable(f"{name}: the input", x)
        for (i, slot), t in zip(self.given, extras, strict=True):
            told = f"{type(self.ops[i]).__name__}: extra input {slot}"
            _kernels.compute_dtype(told, t)
            _readable(told, t)
        for (i, what), p in zip(self._named, params, strict=True):
            op = type(self.ops[i]).__name__
            with_numbers(op, what, p)
            _kernels.compute_dtype(f"{op}: {what}", p)
            _readable(f"{op}: {what}", p)

    def _parts_of(
        self, told: str, x: QuantizedTensor, buffers: Iterable[tuple[str, Buffer]], rows: int
    ) -> list[torch.Tensor]:
        """The codes and scales of an encoded tensor, in the order of the plan's buffers."""
        given, inputs = x.plan_parts(""), []
        for name, buffer in buffers:
            t, dtype = given[name], TYPES[buffer.dtype]
            bytes_ = 1 if buffer.dtype == "e8m0" else None  # E8M0 codes come as bytes
            if (
                t is None
                or (t.element_size() != bytes_ if bytes_ else t.dtype != dtype)
                or t.numel() != math.prod(buffer.shape(rows))
                or t.device != x.device
            ):
                is_ = "missing" if t is None else f"{t.dtype}, {tuple(t.shape)} on {t.device}"
                raise ValueError(
                    f"{told} {x!r}: the part {name[1:] or 'data'} is {is_}; it must be {dtype}, "
                    f"{buffer.shape(rows)} on {x.device}"
                )
            inputs.append(_call.contiguous(t))
        return inputs

    def _params_of(self, ready: _Ready, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of parameters of which some are encoded."""
        found: list[torch.Tensor] = []
        for k, p in enumerate(params):
            if k in ready.packed:
                assert isinstance(p, QuantizedTensor)
                told = f"{type(self.ops[self._named[k][0]]).__name__}: {self._named[k][1]}"
                found += self._parts_of(told, p, ready.packed[k], p.matrix[0])
            else:
                found.append(_tensor(p, p.dtype))
        return found

    def _check_widths(self, cols: int) -> None:
        for op in self.ops:
            width = op.plan_width()
            if width not in (None, cols):
                raise ValueError(
                    f"{type(op).__name__}: its input has {cols} columns; it must have {width}"
                )
            cols = op.plan_cols(cols)

    def _dtypes(
        self,
        dtype: torch.dtype,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
    ) -> list[torch.dtype]:
        """The dtype of the output of each op.

        Autocast sets it for all ops. Otherwise a linear computes in the dtype of its weight, and a
        sum has the larger of its two dtypes.
        """
        if autocast in _NAMES:
            assert autocast is not None
            return [autocast] * len(self.ops)
        weights = {self._named[k][0]: params[k].dtype for k, _ in self._weights}
        added = {i: t.dtype for (i, _), t in zip(self.given, extras, strict=True)}
        flow: list[torch.dtype] = []
        for i, op in enumerate(self.ops):
            dtype = weights.get(i, dtype)
            if isinstance(op, AddExtraInput):
                other = added[i] if i in added else flow[self._sources[i][0]]
                dtype = torch.promote_types(dtype, other)
            flow.append(dtype)
        return flow

    def parts(
        self, texts: Sequence[str | None], flow: Sequence[torch.dtype]
    ) -> tuple[list[tuple[int, int]], str]:
        """Cuts where the dtype or the mode changes, and around ops that a plan does not have.

        The second value gives the reasons.
        """
        cuts, mode, whys = [0], self._modes[0], list[str]()
        if texts[0] is None:
            whys.append(f"a plan does not have the quantizers of {type(self.ops[0]).__name__}")
        for i in range(1, len(texts)):
            here = self._modes[i]
            before, after = (type(op).__name__ for op in self.ops[i - 1 : i + 1])
            unknown = [n for n, t in ((before, texts[i - 1]), (after, texts[i])) if t is None]
            why = ""
            if unknown:
                why = f"a plan does not have the quantizers of {unknown[0]}"
            elif flow[i] != flow[i - 1]:
                why = f"{before} gives {_NAMES[flow[i - 1]]} and {after} {_NAMES[flow[i]]}"
            elif here is not None and mode is not None and here != mode:
                why = f"{after} is in another mode (train or eval) than an op before it"
            if why:
                cuts.append(i)
                mode = None
                if why not in whys:
                    whys.append(why)
            mode = mode if here is None else here
        return list(zip(cuts, (*cuts[1:], len(texts)), strict=True)), "; ".join(whys)

    def _stages(
        self, parts: Sequence[tuple[int, int]], why: str, texts: Sequence[str | None]
    ) -> Cut:
        """The parts as segments of their own. A part of one op that computes is called alone."""
        from .fuser import Stage, stage_of

        stages = Cut(why)
        for begin, end in parts:
            ops, start = self.ops[begin:end], self._start + begin
            if not ops:
                continue
            if texts[begin] is not None and worth_a_plan(ops) and len(ops) < len(self.ops):
                stages.append(Stage(Segment(ops, start, self._routes), start, start + len(ops)))
            else:
                stages += [stage_of(op, start + i) for i, op in enumerate(ops)]
        return stages

    def _leads(self, shape: Sequence[int], cols: Sequence[int]) -> list[Sequence[int]]:
        """The leading dimensions of the input of each op, and of the output."""
        leads: list[Sequence[int]] = [shape]
        for op, width in zip(self.ops, cols, strict=False):
            lead = op.plan_lead(leads[-1], width)
            if lead is None:
                raise ValueError(
                    f"{type(op).__name__}: an input of shape {(*leads[-1], width)} does not become "
                    f"({op.extra_repr()}); the number of elements must be the same"
                )
            leads.append(lead)
        return leads

    def forward_pass(
        self,
        ready: _Ready,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        record: bool,
        keep_extras: bool = False,
        moment: Moment | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], _Run | None]:
        """(output, extra outputs, tensors to save, data for the backward pass).

        With `keep_extras` no extra input is overwritten. `moment` has the quantizers.
        """
        try:
            return self._forward_pass(ready, x, params, extras, record, keep_extras, moment)
        except (RuntimeError, TypeError, ValueError):
            # Kinds of tensors that no plan reads are checked for a new plan only.
            self._check_operands(x, params, extras)
            raise

    def _forward_pass(
        self,
        ready: _Ready,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        record: bool,
        keep_extras: bool,
        moment: Moment | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], _Run | None]:
        given: Any = x
        device, dtype = x.device, ready.dtype
        shape, widths, on_cpu = x.shape, ready.cols, x.is_cpu
        lead, cols = shape[:-1], widths[0]
        if [p.shape for p in params] != ready.shapes:
            self._wrong_parameter(ready, params)
        for (i, what), p in zip(self._named, params, strict=True):
            if p.device != device:
                op = type(self.ops[i]).__name__
                with_numbers(op, what, p)
                _cuda.same(f"{op}: the input", x, f"{op}: {what}", p)
        leads = self._leads(lead, widths) if self._reshapes else None
        for (i, slot), t in zip(self.given, extras, strict=True):
            here = lead if leads is None else leads[i]
            if not self.ops[i].extra_fits(slot, t.shape, here, widths[i]):
                self.ops[i].refuse_extra(slot, t.shape, (*here, widths[i]))
            if t.device != device:
                op = type(self.ops[i]).__name__
                _cuda.same(f"{op}: the input", x, f"{op}: extra input {slot}", t)
        rows = x.numel() // cols
        if ready.positions[0] is None:
            parts = ready.parts.items()
            inputs = self._parts_of(f"{self.told()}: the input", given, parts, rows)
        else:
            inputs = [_tensor(x, x.dtype)]
        if ready.packed:
            params_read = self._params_of(ready, params)
        else:
            params_read = [_tensor(p, p.dtype) for p in params]
        extras_read = [_tensor(t, t.dtype) for t in extras]
        of_memory, weights = ready.memory, None
        if ready.kept_memory is not None:
            weights = self._weights_of(ready, moment, device)
            if weights is not None:
                of_memory = ready.kept_memory
        layout = of_memory.layout(rows, on_cpu)
        place = self._in_place
        overwrites = (
            place >= 0
            and not record
            and not keep_extras
            and self._overwrites(place, given, extras, (*inputs, *params_read, *extras_read), dtype)
        )
        size = (*(lead if leads is None else leads[-1]), widths[-1])
        if overwrites:
            y = extras[place]
            torch.autograd.graph.increment_version(y)
        elif ready.encodes is not None:
            assert moment is not None
            sides = "" in ready.output, ".t" in ready.output
            y = allocate(
                *(size, dtype, *ready.encodes, *sides, device), quantizer=self._encoder(moment)
            )
        else:
            y = torch.empty(size, dtype=dtype, device=device)
        outputs: list[Any] = [y]
        if ready.encodes is not None:
            outputs = [outputs[0].plan_parts("")[end] for end in ready.output]
        made = []
        for (i, _), of in zip(self.made, ready.made_as, strict=True):
            size = (*(lead if leads is None else leads[i]), widths[i])
            made.append(
                torch.empty(size, dtype=dtype, device=device) if of is None else given.view(size)
            )
        blocks = layout.saved_tensors(device)
        memory = [0] * ready.count
        tensors = [*inputs, *outputs, *params_read, *extras_read, *made]
        for i, t in zip(ready.tensors, tensors, strict=True):
            memory[i] = t.data_ptr()
        for i, of in zip(ready.extra_out, ready.made_as, strict=True):
            if of is not None:
                memory[i] = 0
        for i, block, begin in layout.places:
            memory[i] = blocks[block].data_ptr() + begin
        state: list[tuple[int, torch.Tensor]] = []
        if ready.state:
            assert moment is not None
            state = self._state(ready, device, moment)
            for i, t in state:
                memory[i] = t.data_ptr()
        if weights is not None:
            for i, t in weights.codes:
                memory[i] = t.data_ptr()
        if ready.rng is not None:
            random = random_state(ready.dropout_cols, y)
            memory[ready.rng] = random.data_ptr()
        layout.run(FORWARD, memory, y, {}, encoded=None if weights is None else weights.done)
        if weights is not None:
            weights.done[FORWARD] = True
        if not record:
            return y, made, [], None
        run = _Run()
        run.memory, run.moment, run.weights = of_memory, moment, weights
        run.ready, run.rows, run.device, run.state = ready, rows, device, state
        run.input, run.output = (shape, given.dtype), y.shape
        run.made = [t.shape for t in made]
        run.extras = [(t.shape, t.dtype) for t in extras]
        run.params = [p.dtype for p in params]
        run.main_grads = [
            (k, op, params[k])
            for k, op in self._weights
            if op.accumulate_into_main_grad and params[k].requires_grad
        ]
        kept = [tensors[k] for k in ready.kept]
        run.kinds = _saved.kinds(kept)
        run.blocks_at, run.overwritten = _saved.addresses(blocks), False
        return y, made, kept + blocks, run

    def backward_pass(
        self,
        run: _Run,
        saved: list[torch.Tensor],
        grad: torch.Tensor | None,
        grads_made: Sequence[torch.Tensor | None],
    ) -> tuple[Any, list[Any], list[Any]]:
        """The gradients of the input, of the parameters and of the extra inputs.

        Empties `saved`, so that memory is free after its last step if nothing else refers to it.
        """
        if run.overwritten:
            raise RuntimeError(
                f"{self.told()}: an earlier backward pass of this graph failed after it had "
                "overwritten its saved tensors; run the forward pass again, or keep the graph with "
                "retain_graph=True"
            )
        ready, device = run.ready, run.device
        dtype, count = ready.dtype, len(ready.kept)
        kept, blocks = saved[:count], [_call.contiguous(t) for t in saved[count:]]
        saved.clear()
        if _saved.kinds(kept) != run.kinds:
            _saved.check(self.told(), run.kinds, kept)
        layout = run.memory.layout(run.rows, device.type == "cpu")
        _saved.check_blocks(self.told(), layout.blocks, blocks, device)
        memory = [0] * ready.count
        for i, t in run.state:
            memory[i] = t.data_ptr()
        moment, weights = run.moment, run.weights
        if moment is not None and not moment.current():
            # The scales were updated since. A step that encodes a weight needs those of forward.
            then = self._state(ready, device, moment)
            for (i, t), (_, _, tensor, _) in zip(then, ready.state, strict=True):
                if tensor != "dy":
                    memory[i] = t.data_ptr()
        if weights is not None:
            for i, t in weights.codes:
                memory[i] = t.data_ptr()
        # By buffer: dy and the gradients of extra outputs, which may be handed on, then those that
        # are written.
        known: dict[int, torch.Tensor] = {}
        told = "its output"
        outputs = (ready.dy, *ready.dextra_out), (grad, *grads_made), (run.output, *run.made)
        for at, g, shape in zip(*outputs, strict=True):
            if at is not None:
                if g is None:
                    g = torch.zeros(shape, dtype=dtype, device=device)
                else:
                    _saved.check_gradient(self.told(), told, g, shape, device)
                    g = _tensor(_kernels.plain(g), dtype)
                known[at] = g
                memory[at] = g.data_ptr()
            told = "an extra output"
        last = _saved.overwritable(run.blocks_at, blocks)
        held: dict[int, torch.Tensor] = {}
        # No other variable may refer to these tensors, so that they can be freed.
        for n, k in enumerate(ready.kept):
            i = ready.tensors[k]
            held[i] = _call.contiguous(kept[n])  # hooks may have changed the strides
            memory[i] = held[i].data_ptr()
        for i, block, begin in layout.places:
            held[i] = blocks[block]
            memory[i] = held[i].data_ptr() + begin
        kept.clear()
        blocks.clear()

        shapes = [run.input[0], *ready.shapes, *[shape for shape, _ in run.extras]]
        results = list(ready.results)
        direct: list[tuple[BasicLinear, torch.Tensor, torch.Tensor]] = []
        for k, op, weight in run.main_grads:
            at = results[k + 1]
            if at is not None:
                target = op.target_of_grad(weight, TYPES[ready.plan.buffers[at].dtype])
                memory[at] = target.data_ptr()
                direct.append((op, weight, target))
                results[k + 1] = None
        waiting = [(i, shapes[k], kind) for k, i, kind in ready.written if results[k] is not None]
        if layout.separate:
            later = {i: (shape, kind) for i, shape, kind in waiting}

            def allocate(i: int) -> None:
                if i in later:
                    shape, kind = later[i]
                    known[i] = torch.empty(shape, dtype=kind, device=device)
                    memory[i] = known[i].data_ptr()

            write: Any = allocate
        else:
            write = None
            for i, shape, kind in waiting:
                made = known[i] = torch.empty(shape, dtype=kind, device=device)
                memory[i] = made.data_ptr()
        run.overwritten = last
        done = None if weights is None else weights.done
        layout.run(BACKWARD_LAST if last else BACKWARD, memory, known[ready.dy], held, write, done)
        if weights is not None:
            weights.done[BACKWARD] = True
        if last or not _saved.kept():
            run.moment = run.weights = None
        for op, weight, target in direct:
            op.delivered(weight, target)
        found: list[torch.Tensor | None] = []
        types = [run.input[1], *run.params, *[kind for _, kind in run.extras]]
        for at, shape, kind in zip(results, shapes, types, strict=True):
            if at is None:
                found.append(None)
                continue
            made = known[at]
            if made.shape != shape:
                made = made.view(shape)
            found.append(made if made.dtype == kind else made.to(kind))
        params = len(run.params) + 1
        return found[0], found[1:params], found[params:]

    def call(self, moment: Moment, x: torch.Tensor, *extras: torch.Tensor) -> Any:
        """Runs the segment as a node of the autograd graph. NotImplemented if it must be cut."""
        params = self.parameters_of()
        _watch.check(self, x, *extras, *params)
        encoding = None
        if type(x) is QuantizedTensor:
            if x.is_matrix:
                encoding = x.plan_encoding()
            else:
                x = x.dequantize()
        record = input_grad = False
        extra_grads: list[bool] = []
        if torch.is_grad_enabled():
            input_grad = x.requires_grad
            extra_grads = [t.requires_grad for t in extras]
            record = input_grad or any(extra_grads) or any([p.requires_grad for p in params])
        else:
            extra_grads = [False] * len(extras)
        bound, backward = moment.bound, record
        if bound.on and not record and may_be_recomputed():
            # By the plan of the recomputation. Another may round differently before it quantises.
            input_grad, extra_grads = x.requires_grad, [t.requires_grad for t in extras]
            backward = input_grad or any(extra_grads) or any([p.requires_grad for p in params])
        ready = self.find(
            x, params, extras, backward, input_grad, extra_grads, None, encoding, bound
        )
        if isinstance(ready, list):
            return NotImplemented
        if not record:
            y, made, _, _ = self.forward_pass(ready, x, params, extras, False, moment=moment)
            return (y, *made) if made else y
        # A second derivative must find inputs that the gradients may depend on, also if they are
        # not saved. Leaf tensors are found through the node.
        hidden = [
            stand_in(t)
            for k, t in zip(ready.positions, (x, *params, *extras), strict=True)
            if t.requires_grad and not t.is_leaf and not ready.saves(k, t)
        ]
        return _apply(self, ready, moment, hidden, x, *extras, *params)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        """(output, extra outputs), or the stages that the call is cut into."""
        encoding, x = None, input_
        if isinstance(input_, QuantizedTensor) and input_.is_matrix:
            encoding = input_.plan_encoding()
        else:
            x = _kernels.plain(input_)
        params = self.parameters_of(basic_op_ctxs)
        extras = [basic_op_extra_inputs[i][slot] for i, slot in self.given]
        wanted = [
            basic_op_ctxs[i].requires_grad and t.requires_grad
            for (i, _), t in zip(self.given, extras, strict=True)
        ]
        first, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        input_grad = first.requires_grad and first.input_requires_grad
        moment: Moment = local.call.moment
        backward = last.requires_grad
        if moment.bound.on and not backward and may_be_recomputed():
            input_grad, wanted = x.requires_grad, [t.requires_grad for t in extras]
            backward = any([p.requires_grad for p in params])
        ready = self.find(
            *(x, params, extras, backward, input_grad, wanted),
            encoding=encoding,
            bound=moment.bound,
        )
        if isinstance(ready, list):
            return ready
        y, made, saved, run = self.forward_pass(
            ready, x, params, extras, last.requires_grad, last._wanted, moment
        )
        if run is not None:
            last.save_for_backward(*saved)
            last.run, last.grad_quantizer = run, prev_op_grad_output_quantizer
        y = _kernels.encode(y, next_op_input_quantizer)
        if not self._routed:
            return y, self._none
        outputs: list[list[Any]] = [[None] * op.num_extra_outputs for op in self.ops]
        for (i, slot), t in zip(self.made, made, strict=True):
            outputs[i][slot] = t
        return y, outputs

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        ctx = basic_op_ctxs[-1]
        grads_made = [basic_op_grad_extra_outputs[i][slot] for i, slot in self.made]
        saved, ctx.saved_tensors = list(ctx.saved_tensors), ()
        dx, of_params, of_extras = self.backward_pass(ctx.run, saved, grad_output, grads_made)
        if dx is not None:
            dx = _kernels.encode(dx, ctx.grad_quantizer)
        params: list[list[Any]] = [[] for _ in self.ops]
        for (i, _), grad in zip(self._named, of_params, strict=True):
            params[i].append(grad)
        extras: list[list[Any]] = [[None] * op.num_extra_inputs for op in self.ops]
        for (i, slot), grad in zip(self.given, of_extras, strict=True):
            extras[i][slot] = grad
        return dx, params, extras

    def explain(
        self,
        cols: int,
        dtype: torch.dtype,
        on_cpu: bool,
        backward: bool,
        input_grad: bool,
        encoding: Encoding | None = None,
        bound: Bound | None = None,
    ) -> Plan | Cut:
        """The plan for inputs of this kind, with gradients of all extra inputs."""
        device = "cpu" if on_cpu else "cuda"
        x = torch.empty(1, cols, dtype=dtype, device="meta")
        _kernels.compute_dtype(self.told(), x)
        extras = [x] * len(self.given)
        wanted = [backward] * len(extras)
        params = self.parameters_of()
        found = self.find(x, params, extras, backward, input_grad, wanted, device, encoding, bound)
        return found if isinstance(found, Cut) else found.plan

    def _weights_of(
        self, ready: _Ready, moment: Moment | None, device: torch.device
    ) -> _Weights | None:
        """The codes of weights for a call that keeps them. None: the call encodes its own."""
        promise = local.weights
        if promise is None or promise is True:
            if _Weights.used and in_backward() < 0:
                self._kept.clear()
                for _, op in self._weights:
                    op.__dict__["_encodings"] = op._encodings + 1
        if promise is None or moment is None:
            return None
        for k, _ in self._weights:
            given = moment.bound.given[self._start + self._named[k][0]].get(("forward", 1))
            if getattr(given, "scaling", "") == "delayed":
                return None  # its scale changes whenever its owner wants
        owner = None if isinstance(promise, bool) else promise
        encodings = [op._encodings for _, op in self._weights]
        known = self._kept.get(ready)
        if (
            known is None
            or known.owner is not owner
            or known.encodings != encodings
            or known.epochs != moment.epochs
        ):
            known = _Weights(ready, owner, encodings, moment.epochs, device)
            self._kept[ready] = known
        return known

    def _overwrites(
        self,
        place: int,
        x: torch.Tensor,
        extras: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> bool:
        """Whether the output may be written over extra input `place`: see `AddExtraInput`."""
        last, extra = self.ops[-1], extras[place]
        assert isinstance(last, AddExtraInput)
        if not last.in_place or any([t.requires_grad for t in (x, *extras)]):
            return False
        # Of the tensors that are read, only the extra input itself may have its memory.
        own = extra.untyped_storage().data_ptr()
        if sum(t.untyped_storage().data_ptr() == own for t in read) != 1:
            return False
        return last.overwrites(torch.empty(0), extra, dtype)

    def told(self) -> str:
        return self._told

    __str__ = told

    def width(self) -> int | None:
        """The columns of the input, if the ops define them."""
        for op in self.ops:
            width = op.plan_width()
            if width is not None:
                return width
            if op.plan_cols(2) != 2:
                break
        return None

    def _wrong_parameter(self, ready: _Ready, params: Sequence[torch.Tensor]) -> None:
        for (i, name), p, shape in zip(self._named, params, ready.shapes, strict=True):
            if p.shape != shape:
                raise ValueError(
                    f"{type(self.ops[i]).__name__}: {name} is {tuple(p.shape)}; it must be "
                    f"{tuple(shape)}"
                )


def worth_a_plan(ops: Sequence[BasicOperation]) -> bool:
    """Whether a segment of these ops is better than calls of single ops."""
    computing = [op for op in ops if not isinstance(op, _FREE)]
    if any(isinstance(op, BasicLinear) for op in computing):
        return True
    # The gradient of an extra output is added in the backward pass of the next op.
    return len(computing) > 1 or (len(computing) > 0 and isinstance(ops[0], MakeExtraOutput))


def _tensor(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t` as a plan reads it: decoded, contiguous and of `dtype`."""
    if type(t) is QuantizedTensor:
        return t.decode(dtype)
    if t.dtype != dtype:
        t = t.detach().to(dtype)
    return t.contiguous() if not t.is_neg() else t.resolve_neg().contiguous()


def _readable(told: str, t: torch.Tensor) -> None:
    """Raises an error for tensors without plain memory, such as DTensor and sparse tensors."""
    if not _call.dense(t):
        raise _call.refusal(t, told)
    own = type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own and type(t) not in _TENSORS:
        raise TypeError(
            f"{told} is a {type(t).__name__}; it must be a plain tensor, e.g. the local tensor of "
            "a DTensor by .to_local()"
        )


class _Node(torch.autograd.Function):
    """A segment as one node. Parameters are inputs, so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        segment: Segment,
        ready: _Ready,
        moment: Moment,
        hidden: Any,
        x: Any,
        *tensors: Any,
    ) -> Any:
        count = len(segment.given)
        y, made, saved, run = segment.forward_pass(
            ready, x, tensors[count:], tensors[:count], True, moment=moment
        )
        ctx.save_for_backward(*saved)
        ctx.segment, ctx.run, ctx.hidden = segment, run, hidden
        ctx.set_materialize_grads(False)
        return (y, *made) if made else y

    @staticmethod
    @one_break
    def backward(ctx: Any, *grads: Any) -> Any:
        segment, saved = ctx.segment, list(ctx.saved_tensors)

        def compute() -> tuple[Any, ...]:
            dx, params, extras = segment.backward_pass(ctx.run, saved, grads[0], grads[1:])
            return dx, *extras, *params

        if torch.is_grad_enabled():
            # The tensors that the gradients depend on. Saved inputs have their own history.
            nodes = [node for node, _ in ctx.next_functions]
            leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            watched = (*grads, *saved, *leaves, *ctx.hidden)
            return (None, None, None, None, *once(str(segment), compute, watched))
        if _saved.CLEARS:
            ctx.maybe_clear_saved_tensors()  # does nothing if the graph is kept
        return (None, None, None, None, *compute())


# Function.apply searches for torch.func tensors in Python, which takes 10% of a small call. Outside
# of torch.func transforms there are none, and `_watch.check` refuses calls inside of them.
_apply: Any = getattr(super(torch.autograd.Function, _Node), "apply", _Node.apply)
