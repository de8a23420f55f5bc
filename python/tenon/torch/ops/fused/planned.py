"""A sequence of basic ops as a plan: one call forward, one call backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...._lib import DTYPES
from ...._ops import ops as registry
from ...._plan import BACKWARD, BACKWARD_LAST, FORWARD, Plan
from ... import _call, _memory, _saved
from ..._dropout import random_state
from .. import _gemm, _kernels
from ..basic import BasicLinear, Dropout, Identity, MakeExtraOutput, Reshape
from ..op import (
    BackwardResult,
    BasicOperation,
    ExtraOutputs,
    FusedOperation,
    OperationContext,
    basic_ops,
    is_ours,
)

if TYPE_CHECKING:
    from ...quantizer import Quantizer
    from .._routes import Routes
    from ..fuser import Stage

__all__ = ["Planned", "plan_runs"]

_TYPES = {DTYPES[number]: dtype for dtype, number in _call.DTYPES.items()} | {"u64": torch.int64}
_NAMES = {dtype: DTYPES[_call.DTYPES[dtype]] for dtype in _call.PLAIN}
_MOST = 64  # cached plans per sequence of ops, and cached row counts per plan
_ALIGNED = 256  # bytes: the largest alignment that cuBLASLt distinguishes

_TENSORS = (torch.Tensor, torch.nn.Parameter)

# By op: whether each parameter may have several rows. Other parameters are 1-D in torch.
_MATRICES = {op.name: [p.rows is not None for p in op.parameters] for op in registry()}

# Ops without computation. A plan of only these ops would just copy.
_FREE = (Identity, MakeExtraOutput, Reshape)


class _Layout:
    """Positions of saved buffers (one tensor per dtype), and the workspace size of each pass."""

    def __init__(self, plan: Plan, saved: Sequence[int], rows: int) -> None:
        sizes, _ = plan.sizes(rows)
        self.workspace = [plan.workspace(p, rows) for p in (FORWARD, BACKWARD, BACKWARD_LAST)]
        ends: dict[torch.dtype, int] = {}
        self.places: list[tuple[int, int, int]] = []  # buffer, tensor, byte
        for i in saved:
            dtype = _TYPES[plan.buffers[i].dtype]
            begin = -(-ends.setdefault(dtype, 0) // _ALIGNED) * _ALIGNED
            self.places.append((i, list(ends).index(dtype), begin))
            ends[dtype] = begin + sizes[i]
        self.blocks = [(end // dtype.itemsize, dtype) for dtype, end in ends.items()]


class _Ready:
    """A plan with the indices of its buffers."""

    def __init__(self, plan: Plan, ops: Sequence[BasicOperation], cols: int) -> None:
        self.plan = plan
        self.memory = ctypes.c_void_p * len(plan.buffers)
        names = [b.name for b in plan.buffers]
        at = {name: i for i, name in enumerate(names)}
        of: dict[str, list[int]] = {}
        for i, b in enumerate(plan.buffers):
            of.setdefault(b.role, []).append(i)
        self.params, self.extra_in = of.get("param", []), of.get("extra_in", [])
        self.extra_out, self.saved = of.get("extra_out", []), of.get("saved", [])
        self.rng, self.dx = at.get("rng"), at.get("dx")
        self.dy = at.get("dy", -1)  # -1 in a plan without backward
        self.dparams, self.dextra_in, self.dextra_out = (
            [at.get("d" + names[i]) for i in group]
            for group in (self.params, self.extra_in, self.extra_out)
        )
        # The tensors of a forward call, and which of them the backward pass reads.
        self.tensors = [at["x"], *of["output"], *self.params, *self.extra_in, *self.extra_out]
        self.kept = [k for k, i in enumerate(self.tensors) if plan.buffers[i].reads_backward]
        self._layouts: dict[int, _Layout] = {}
        matrices = [m for op in ops if op.parameter_names for m in _MATRICES[op.op_name or ""]]
        self.shapes = [
            b.shape(0) if matrix else (b.cols,)
            for matrix, b in zip(matrices, (plan.buffers[i] for i in self.params), strict=True)
        ]
        self.cols = [cols]  # columns of the input of each op, then of the output
        for op in ops:
            self.cols.append(op.plan_cols(self.cols[-1]))
        # The random stream depends on the number of columns of the dropout's input.
        self.dropout_cols = next(
            (c for op, c in zip(ops, self.cols, strict=False) if isinstance(op, Dropout)),
            max(self.cols),
        )

    def layout(self, rows: int) -> _Layout:
        """The memory that a call with `rows` rows needs from torch's allocator."""
        known = self._layouts.get(rows)
        if known is None:
            if len(self._layouts) >= _MOST:
                self._layouts.clear()
            known = self._layouts[rows] = _Layout(self.plan, self.saved, rows)
        return known


class Planned(FusedOperation):
    """Adjacent basic ops that run as a plan, with their whole backward pass.

    `fuser_forward` returns NotImplemented for unsupported calls: other dtypes and devices,
    autocast, quantised neighbours and operands, and keywords. It also does so for invalid calls, so
    that the op itself reports the error.
    """

    note = "one call forward, one backward"

    def __init__(self, ops: Sequence[BasicOperation], start: int, routes: Routes) -> None:
        super().__init__(ops)
        stop = start + len(ops)
        self._ops = list(ops)
        self._routed = not routes.plain
        self._none: ExtraOutputs = [()] * len(ops)
        self._reshapes = any(type(op).plan_lead is not BasicOperation.plan_lead for op in ops)
        self._modal = [op for op in ops if op.has_modes]
        self._linears = any(isinstance(op, BasicLinear) for op in ops)
        self._named = [(i, name) for i, op in enumerate(ops) for name in op.parameter_names or ()]
        self._holders = [ops[i].parameter_holder()._parameters for i, _ in self._named]
        # Channels that begin and end in this plan are internal. Other extra tensors are its
        # arguments.
        read_here = {s for sources in routes.sources[start:stop] for s in sources}
        read_later = {s for sources in routes.sources[stop:] for s in sources}
        # Text before and after each op.
        self._before, self._behind = [""] * len(ops), [""] * len(ops)
        self._given: list[tuple[int, int]] = []  # extra inputs: op, slot
        self._made: list[tuple[int, int]] = []  # extra outputs of the plan
        self._dropped: list[int] = []  # ops with an unused extra output
        self._served = True
        for i, op in enumerate(ops):
            for slot, source in enumerate(routes.sources[start + i]):
                if isinstance(source, tuple) and source[0] >= start:
                    self._behind[i] += f"<c{source[0]}_{source[1]}"
                else:
                    self._given.append((i, slot))
            for slot in range(op.num_extra_outputs):
                key = (start + i, slot)
                leaves = key in routes.outputs or key in read_later
                if leaves:
                    self._made.append((i, slot))
                if key in read_here:
                    self._before[i] = "make_extra_output " if leaves else ""
                    self._behind[i] += f">c{key[0]}_{key[1]}"
                    # An extra output that is used twice is written as two ops. Only MakeExtraOutput
                    # can be.
                    self._served = self._served and (isinstance(op, MakeExtraOutput) or not leaves)
                elif not leaves and isinstance(op, MakeExtraOutput):
                    self._dropped.append(i)
                elif not leaves:
                    self._made.append((i, slot))
        self._ready: dict[Any, _Ready | None] = {}

    def ready(
        self,
        cols: int,
        dtype: torch.dtype,
        on_cpu: bool,
        params: Sequence[torch.Tensor],
        extra_grads: Sequence[bool],
        backward: bool,
        input_grad: bool,
    ) -> _Ready | None:
        """The plan for such a call, or None if it is not supported."""
        texts = [op.plan_text() for op in self._ops]
        modes = {op.training for op in self._modal}  # all ops of a plan have the same mode
        if None in texts or not self._served or len(modes) > 1:
            return None
        training = modes != {False}
        for i in self._dropped:
            texts[i] = "identity"
        of_params = params[0].dtype if params else dtype
        wanted: tuple[bool | str, ...] = ()
        if backward:
            named = zip(self._named, params, strict=True)
            wanted = tuple([p.requires_grad and self._dtype_of_grad(i, p) for (i, _), p in named])
        key = (
            *(*texts, cols, dtype, on_cpu, of_params, training),
            *(wanted, *extra_grads, backward, input_grad),
        )
        try:
            return self._ready[key]
        except KeyError:
            pass
        made: _Ready | None = None
        try:
            around = zip(self._before, texts, self._behind, strict=True)
            plan = Plan(
                " ".join([f"{before}{text}{behind}" for before, text, behind in around]),
                cols=cols,
                dtype=_NAMES[dtype],
                parameter_dtype=_NAMES[of_params],
                training=training,
                backward=backward,
                input_grad=input_grad,
                parameter_grads=wanted,
                extra_grads=extra_grads,
                device="cpu" if on_cpu else "cuda",
            )
        except (ValueError, NotImplementedError):
            pass  # the ops report the error, if there is one
        else:
            made = _Ready(plan, self._ops, cols)
        if len(self._ready) >= _MOST:
            self._ready.clear()
        self._ready[key] = made
        return made

    def _dtype_of_grad(self, i: int, p: torch.Tensor) -> bool | str:
        """The dtype of a parameter's gradient for op `i`. True: the parameter's dtype."""
        op = self._ops[i]
        main_grad = op.main_grad(p) if isinstance(op, BasicLinear) else None
        return True if main_grad is None else _NAMES.get(main_grad.dtype, "f32")

    def params(
        self,
        dtype: torch.dtype,
        device: torch.device | None,
        ctxs: Sequence[OperationContext] | None = None,
    ) -> list[torch.Tensor] | None:
        """The parameters, if a plan for inputs of `dtype` can read them. No device: any device."""
        found: list[torch.Tensor] = []
        for (i, name), holder in zip(self._named, self._holders, strict=True):
            p: Any = holder.get(name)
            if p is None:
                computed = ctxs[i]._computed if ctxs else None
                p = getattr(self._ops[i], name) if computed is None else computed[name]
            if (
                type(p) not in _TENSORS
                or (device is not None and p.device != device)
                or not p.is_contiguous()
                or p.is_neg()
                or (found and p.dtype != found[0].dtype)
            ):
                return None
            found.append(p)
        if found and (found[0].dtype not in _NAMES or (self._linears and found[0].dtype != dtype)):
            return None
        return found

    def _leads(self, shape: Sequence[int], cols: Sequence[int]) -> list[Sequence[int]] | None:
        """The leading dimensions of the input of each op, and of the output."""
        leads: list[Sequence[int]] = [shape]
        for op, width in zip(self._ops, cols, strict=False):
            lead = op.plan_lead(leads[-1], width)
            if lead is None:
                return None
            leads.append(lead)
        return leads

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        x, no = input_, NotImplemented
        if (
            next_op_input_quantizer is not None
            or prev_op_grad_output_quantizer is not None
            or not _plain(x, x.dtype)
            or not x.numel()
            or any(basic_op_kwargs)
            or torch.is_autocast_enabled("cpu" if x.is_cpu else "cuda")
            or (self._linears and _gemm.torch_multiplies(x.dtype, x.is_cpu))
        ):
            return no
        params = self.params(x.dtype, x.device, basic_op_ctxs)
        if params is None:
            return no
        extras = [basic_op_extra_inputs[i][slot] for i, slot in self._given]
        if not all([_plain(t, x.dtype) and t.device == x.device for t in extras]):
            return no
        return self.run(basic_op_ctxs, x, params, extras)

    def run(
        self,
        basic_op_ctxs: list[OperationContext],
        x: torch.Tensor,
        params: list[torch.Tensor],
        extras: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        """The forward pass for tensors that a plan can read. Extra tensors by op and slot."""
        no, input_shape = NotImplemented, x.shape
        extra_shapes = [t.shape for t in extras]
        dtype, device, lead, cols = x.dtype, x.device, x.shape[:-1], x.shape[-1]
        wanted = [
            basic_op_ctxs[i].requires_grad and t.requires_grad
            for (i, _), t in zip(self._given, extras, strict=True)
        ]
        extras = [_call.contiguous(t) for t in extras]
        first, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        wants_dx = first.requires_grad and first.input_requires_grad
        ready = self.ready(cols, dtype, x.is_cpu, params, wanted, last.requires_grad, wants_dx)
        if ready is None or [p.shape for p in params] != ready.shapes:
            return no
        leads = self._leads(lead, ready.cols) if self._reshapes else None
        if self._reshapes and leads is None:
            return no
        for (i, slot), t in zip(self._given, extras, strict=True):
            here = lead if leads is None else leads[i]
            if not self._ops[i].extra_fits(slot, t.shape, here, ready.cols[i]):
                return no

        rows = x.numel() // cols
        x = _call.contiguous(x)
        shape = (*(lead if leads is None else leads[-1]), ready.cols[-1])
        y = torch.empty(shape, dtype=dtype, device=device)
        made: list[torch.Tensor] = []
        for i, _ in self._made:
            shape = (*(lead if leads is None else leads[i]), ready.cols[i])
            made.append(torch.empty(shape, dtype=dtype, device=device))
        layout = ready.layout(rows)
        saved = [
            _memory.saved(size, kind) if x.is_cpu else torch.empty(size, dtype=kind, device=device)
            for size, kind in layout.blocks
        ]
        memory = ready.memory()
        tensors = [x, y, *params, *extras, *made]
        for i, t in zip(ready.tensors, tensors, strict=True):
            memory[i] = t.data_ptr()
        for i, block, begin in layout.places:
            memory[i] = saved[block].data_ptr() + begin
        if ready.rng is not None:
            random = random_state(ready.dropout_cols, x)
            memory[ready.rng] = random.data_ptr()
        _kernels.run_plan(ready.plan, FORWARD, rows, memory, layout.workspace[FORWARD], x)

        if last.requires_grad:
            last.save_for_backward(*[tensors[i] for i in ready.kept], *saved)
            last.ready, last.rows, last.input_shape = ready, rows, input_shape
            last.output, last.made = (y.shape, device), [t.shape for t in made]
            last.extra_shapes, last.saved_at = extra_shapes, _saved.addresses(saved)
            last.overwritten = False
        if not self._routed:
            return y, self._none
        outputs: list[list[Any]] = [[None] * op.num_extra_outputs for op in self._ops]
        for (i, slot), t in zip(self._made, made, strict=True):
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
        if ctx.overwritten:
            raise RuntimeError(
                f"{self.told()}: an earlier backward pass of this graph failed after it had "
                "overwritten its saved tensors; run the forward pass again, or keep the graph with "
                "retain_graph=True"
            )
        ready: _Ready = ctx.ready
        rows: int = ctx.rows
        buffers = ready.plan.buffers
        dtype = _TYPES[buffers[ready.dy].dtype]
        memory = ready.memory()
        shape, device = ctx.output
        _saved.check_gradient(self.told(), "its output", grad_output, shape, device)
        alive = [_call.contiguous(_kernels.plain(grad_output, dtype))]
        memory[ready.dy] = alive[0].data_ptr()
        layout = ready.layout(rows)
        # Hooks may have changed the strides.
        kept = [_call.contiguous(t) for t in ctx.saved_tensors]
        for i, t in zip(ready.kept, kept, strict=False):
            memory[ready.tensors[i]] = t.data_ptr()
        for i, block, begin in layout.places:
            memory[i] = kept[len(ready.kept) + block].data_ptr() + begin
        for at, (i, slot), shape in zip(ready.dextra_out, self._made, ctx.made, strict=True):
            if at is None:
                continue
            given = basic_op_grad_extra_outputs[i][slot]
            if given is None:
                given = torch.zeros(shape, dtype=dtype, device=device)
            _saved.check_gradient(self.told(), "an extra output", given, shape, device)
            alive.append(_call.contiguous(_kernels.plain(given, dtype)))
            memory[at] = alive[-1].data_ptr()

        def gradient(at: int | None, shape: Sequence[int]) -> torch.Tensor | None:
            if at is None:
                return None
            made = torch.empty(shape, dtype=_TYPES[buffers[at].dtype], device=device)
            memory[at] = made.data_ptr()
            return made

        dx = gradient(ready.dx, ctx.input_shape)
        of_params = list(map(gradient, ready.dparams, ready.shapes))
        of_extras = list(map(gradient, ready.dextra_in, ctx.extra_shapes))
        own = kept[len(ready.kept) :]
        pass_ = BACKWARD_LAST if _saved.overwritable(ctx.saved_at, own) else BACKWARD
        ctx.overwritten = pass_ == BACKWARD_LAST
        _kernels.run_plan(ready.plan, pass_, rows, memory, layout.workspace[pass_], alive[0])

        params: list[list[Any]] = [[] for _ in self._ops]
        for (i, _), grad in zip(self._named, of_params, strict=True):
            op = self._ops[i]
            if grad is not None and isinstance(op, BasicLinear):
                grad = op.deliver(op.parameter(basic_op_ctxs[i], "weight"), grad)
            params[i].append(grad)
        extras: list[list[Any]] = [[None] * op.num_extra_inputs for op in self._ops]
        for (i, slot), grad in zip(self._given, of_extras, strict=True):
            extras[i][slot] = grad
        return dx, params, extras

    def told(self) -> str:
        return " + ".join(type(op).__name__ for op in self._ops)

    def width(self) -> int | None:
        """The columns of the input, if the ops define them."""
        for op in self._ops:
            width = op.plan_width()
            if width is not None:
                return width
            if op.plan_cols(2) != 2:
                break
        return None

    def explain(
        self, cols: int, dtype: torch.dtype, on_cpu: bool, backward: bool, input_grad: bool
    ) -> Plan | None:
        """The plan for inputs of this kind, with gradients of all extra inputs."""
        params = self.params(dtype, None) if dtype in _NAMES else None
        if params is None or (self._linears and _gemm.torch_multiplies(dtype, on_cpu)):
            return None
        extra_grads = [backward] * len(self._given)
        ready = self.ready(cols, dtype, on_cpu, params, extra_grads, backward, input_grad)
        return None if ready is None else ready.plan


def _plain(t: Any, dtype: torch.dtype) -> bool:
    """Whether a plan can read `t`, possibly after a copy to contiguous memory."""
    return (
        type(t) in _TENSORS
        and t.dtype == dtype
        and dtype in _NAMES
        and (t.is_cpu or t.is_cuda)
        and t.layout is torch.strided
        and t.dim() > 0
    )


def plan_runs(
    forward: list[Stage], backward: list[Stage], routes: Routes, with_linears: bool
) -> tuple[list[Stage], list[Stage]]:
    """Replaces sequences of unfused built-in ops by plans."""
    from ..fuser import Stage

    for start, stop in _runs(forward, backward, with_linears):
        inside = [[s for s in list_ if start <= s.start < stop] for list_ in (forward, backward)]
        ops = [b for s in inside[0] for b in basic_ops(s.op)]
        stage = Stage(Planned(ops, start, routes), start, stop, False)
        stage.instead = (inside[0], inside[1])
        forward, backward = (
            [s for s in list_ if s.start < start] + [stage] + [s for s in list_ if s.start >= stop]
            for list_ in (forward, backward)
        )
    return forward, backward


def _runs(forward: list[Stage], backward: list[Stage], with_linears: bool) -> list[tuple[int, int]]:
    """The start and end of each plan. They are at boundaries of stages in both passes.

    A plan has one random stream, so it contains at most one dropout. It ends before a second
    dropout, or at a linear between the two if there is one.
    """
    ops = [b for stage in forward for b in basic_ops(stage.op)]
    takes = [is_ours(op) and type(op).plan_text is not BasicOperation.plan_text for op in ops]
    for stage in (*forward, *backward):
        if not is_ours(stage.op):
            takes[stage.start : stage.stop] = [False] * len(stage.indices)
    if not with_linears:
        takes = [t and not isinstance(op, BasicLinear) for t, op in zip(takes, ops, strict=True)]
    borders = sorted({s.start for s in forward} & {s.start for s in backward})
    runs: list[tuple[int, int]] = []
    start = linear = None  # start of the open sequence; a linear in it after its dropout
    dropped = False
    for begin, end in zip(borders, (*borders[1:], len(ops)), strict=True):
        dropouts = sum(isinstance(op, Dropout) for op in ops[begin:end])
        if not all(takes[begin:end]) or dropouts > 1:
            if start is not None:
                runs.append((start, begin))
            start, linear, dropped = None, None, False
            continue
        if start is None:
            start = begin
        if dropouts and dropped:
            cut = begin if linear is None else linear
            runs.append((start, cut))
            start, linear = cut, None
        elif dropped and linear is None and isinstance(ops[begin], BasicLinear):
            linear = begin
        dropped = dropped or dropouts > 0
    if start is not None:
        runs.append((start, len(ops)))
    return [
        (start, stop)
        for start, stop in runs
        if sum(not isinstance(op, _FREE) for op in ops[start:stop]) > 1
    ]
