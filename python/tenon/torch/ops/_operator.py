"""The operators of plans: `tenon::chain` and `tenon::chain_backward`.

    chain(Tensor[] tensors, str plan) -> Tensor[]
    chain_backward(Tensor[] tensors, str plan) -> Tensor[]

They are functional: no result is an argument, and nothing is written but results. `plan` is the
request of the plan as text, with its fingerprint and the version of this package, so that a graph
is only run by the plan that it was made for. Tensors are matrices: rows x columns.

chain takes the input, the parameters and the extra inputs, then, if the plan has them: the scales
of delayed scaling in one tensor, one leaf for the amax of each quantised gradient, and the seed of
dropouts. It gives the output, the extra outputs, the saved tensors, with 8-bit numbers as bytes,
and the amax of delayed scaling in one tensor. chain_backward takes the gradients of the outputs,
the tensors that the backward pass reads, the saved tensors and the scales. It gives the gradients
that it computes, and the amax of gradients.

Behind its outputs, the chain of a plan with a backward pass gives an empty tensor, which
chain_backward takes as its last one. It depends on all arguments, so that autograd finds that a
gradient does, also where it is computed from saved tensors only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.utils.flop_counter

from ..._lib import lib as library
from ..._plan import BACKWARD, FORWARD, Encoding, Format, OpFormats, Plan
from .. import _call, _cuda, _watch
from ._plan_memory import TYPES, PlanMemory

__all__ = ["chain", "operators", "plan_text", "scaled"]

Tensors = list[torch.Tensor]
_MOST = 512
# Raise the number when the tensors of the operators change: caches of compiled graphs hold it.
_VERSION: str = library.tenon_version().decode() + "/1"


def plan_text(plan: Plan, columns: int = 0) -> str:
    """The text from which `_Chain` makes an equal plan, in any process.

    `columns`: those of the random stream of its dropouts.
    """
    given = {"tenon": _VERSION, "fingerprint": plan.fingerprint, **plan.request}
    if columns:
        given["dropout_columns"] = columns
    return json.dumps(given, separators=(",", ":"))


def _format(given: Any) -> Format | None:
    return None if given is None else Format(*given)


def _encoding(given: Any) -> Encoding | None:
    return None if given is None else Encoding(Format(*given[0]), *given[1:])


def _op_formats(given: Any) -> OpFormats | None:
    if given is None:
        return None
    x, w, dy = map(_format, given[:3])
    return OpFormats(x, w, dy, _encoding(given[3]), *given[4:])


def _plan_of(given: dict[str, Any]) -> Plan:
    """The plan of a text. Raises an error if this process makes another one."""
    version, fingerprint = given.pop("tenon"), given.pop("fingerprint")
    what = f"tenon::chain: a compiled or exported graph has the plan of {given['chain']!r}"
    if version != _VERSION:
        raise RuntimeError(
            f"{what} by Tenon {version}, but this is Tenon {_VERSION}; compile or export it again"
        )
    if "input_encoding" in given:
        given["input_encoding"] = _encoding(given["input_encoding"])
    if "op_formats" in given:
        given["op_formats"] = [_op_formats(one) for one in given["op_formats"]]
    allocate = _cuda.allocate_here if given.get("device") == "cuda" else None
    plan = Plan(**given, allocate=allocate)
    if plan.fingerprint != fingerprint:
        raise RuntimeError(
            f"{what} with the fingerprint {fingerprint}, but here it has {plan.fingerprint}: "
            "another processor, library of products or definition of an activation computes other "
            "bits; compile or export it again on this machine"
        )
    return plan


def scaled(plan: Plan) -> list[tuple[int, int, str]]:
    """The delayed quantizers of a plan: the buffer of the scale, the op, the tensor of the op.

    The op is the number in the name of its state, which its label gives.
    """
    found = []
    names = {b.name for b in plan.buffers}
    for i, b in enumerate(plan.buffers):
        owner, _, end = b.name.rpartition(".")
        if b.role == "state" and end == "scale" and owner + ".amax" in names:
            tensor = owner.partition(".")[2] or ("dy" if owner.startswith("d") else "x")
            found.append((i, int(owner.partition(".")[0].lstrip("dq")), tensor))
    return found


class _Chain:
    """A plan and where the tensors of the operators are among its buffers."""

    def __init__(self, text: str) -> None:
        given = json.loads(text)
        self.columns: int = given.pop("dropout_columns", 0)
        plan = self.plan = _plan_of(given)
        buffers = self.buffers = plan.buffers
        names = [b.name for b in buffers]
        at = {name: i for i, name in enumerate(names)}
        of: dict[str, list[int]] = {}
        for i, b in enumerate(buffers):
            of.setdefault(b.role, []).append(i)
        inputs = [i for i in of["input"] if names[i].partition(".")[0] == "x"]
        self.extra_in = of.get("extra_in", [])
        self.given = [*inputs, *of.get("param", []), *self.extra_in]
        self.made = [*of["output"], *of.get("extra_out", [])]
        states = scaled(plan)
        self.scales = [i for i, _, _ in states]
        # The amax of each scale, and whether it is that of a gradient.
        self.amax = [(at[names[i].removesuffix("scale") + "amax"], t == "dy") for i, _, t in states]
        self.amax_forward = [i for i, gradient in self.amax if not gradient]
        self.amax_backward = [i for i, gradient in self.amax if gradient]
        known = {*self.scales, *[i for i, _ in self.amax]}
        self.memory = PlanMemory(plan, known)
        self.saved = self.memory.saved
        self.padded = [k for k, i in enumerate((*self.made, *self.saved)) if buffers[i].rows[2] > 1]
        self.rng = at.get("rng")
        self.backward = "dy" in at
        self.kept = [i for i in (*self.given, *self.made) if buffers[i].reads_backward]
        # Gradients: of the outputs, of the given tensors, and those of them that are written.
        self.dy = [at.get("dy", -1), *[at.get("d" + names[i]) for i in of.get("extra_out", [])]]
        # What chain_backward reads, without the scales and the tie.
        self.reads = [*[i for i in self.dy if i is not None], *self.kept, *self.saved]
        self.known_sizes: dict[tuple[int, int, int], list[tuple[int, torch.dtype, int]]] = {}
        self.results: list[int | None] = []
        for i in self.given:
            found = at.get("dx") if i == inputs[0] else at.get("d" + names[i])
            same = None if found is None else buffers[found].same_as
            self.results.append(found if same is None else same)
        handed = {i for i in self.dy if i is not None}
        computed = [i for i in self.results if i is not None and i not in handed]
        self.written = list(dict.fromkeys(computed))
        self.count = len(self.given) + bool(self.scales) + len(self.amax_backward)
        self.count += self.rng is not None

    def shape(self, i: int, rows: Any) -> tuple[Any, Any]:
        b = self.buffers[i]
        if b.rows == (1, 1, 1, 0):
            return (b.cols, rows) if b.rows_inside else (rows, b.cols)
        return b.shape(rows)

    def rows(self, i: int, t: torch.Tensor) -> Any:
        """The rows of a call whose buffer `i` is `t`."""
        mul, div, _, _ = self.buffers[i].rows
        rows = t.shape[1] if self.buffers[i].rows_inside else t.shape[0]
        return rows if mul == div == 1 else rows * div // mul

    def dtype(self, i: int) -> torch.dtype:
        kind = TYPES[self.buffers[i].dtype]
        return torch.uint8 if kind.itemsize == 1 else kind

    def empty(self, indices: Sequence[Any], rows: Any, device: torch.device) -> Tensors:
        return [
            torch.empty(self.shape(i, rows), dtype=self.dtype(i), device=device) for i in indices
        ]

    def sizes(self, of: Sequence[int], rows: int) -> list[tuple[int, torch.dtype, int]]:
        """Buffer, dtype and number of elements of tensors in a call with `rows` rows."""
        known = self.known_sizes.get((len(of), of[0], rows))
        if known is None:
            if len(self.known_sizes) >= _MOST:
                self.known_sizes.clear()
            shapes = [self.shape(i, rows) for i in of]
            known = [(i, self.dtype(i), r * c) for i, (r, c) in zip(of, shapes, strict=True)]
            self.known_sizes[len(of), of[0], rows] = known
        return known

    def read(
        self, told: str, of: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[int, Tensors]:
        """The rows of a call, and its tensors as kernels read them: they trust addresses."""
        first = tensors[0]
        if first.dim() != 2:
            raise ValueError(f"{told}: tensor 0 is {tuple(first.shape)}; it must be a matrix")
        rows, device = self.rows(of[0], first), first.device
        read: Tensors = []
        for (i, dtype, count), t in zip(self.sizes(of, rows), tensors, strict=False):
            if t.dtype != dtype or t.numel() != count or t.device != device:
                raise ValueError(
                    f"{told}: tensor {len(read)}, {self.buffers[i].name}, is {t.dtype} "
                    f"{tuple(t.shape)} on {t.device}; it must be {dtype} {self.shape(i, rows)} on "
                    f"{device}"
                )
            read.append(_call.contiguous(t))
        return rows, read

    def check_count(self, told: str, wanted: int, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != wanted:
            raise ValueError(f"{told}: {len(tensors)} tensors; this plan takes {wanted}")

    def place_state(
        self, memory: list[int], scales: torch.Tensor | None, like: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        """Gives the state its memory. Returns the amax, and what must live during the call."""
        if scales is None:
            return like, []
        amax = torch.zeros(len(self.amax), dtype=torch.float32, device=like.device)
        scales = _call.contiguous(scales)
        first, second = scales.data_ptr(), amax.data_ptr()
        for k, i in enumerate(self.scales):
            memory[i] = first + 4 * k
        for k, (i, _) in enumerate(self.amax):
            memory[i] = second + 4 * k
        return amax, [scales]

    def amax_of(self, amax: torch.Tensor, gradient: bool) -> Tensors:
        chosen = [k for k, (_, of_gradient) in enumerate(self.amax) if of_gradient == gradient]
        if not chosen:
            return []
        if len(chosen) == len(self.amax):
            return [amax]
        return [torch.cat([amax[k : k + 1] for k in chosen])]

    def run_forward(self, tensors: Tensors) -> Tensors:
        told = "tenon::chain"
        self.check_count(told, self.count, tensors)
        rows, read = self.read(told, self.given, tensors)
        x, own = tensors[0], len(self.given)
        device = x.device
        made = self.empty([*self.made, *self.saved], rows, device)
        for k in self.padded:
            made[k].zero_()  # padding, which kernels do not write
        memory = [0] * len(self.buffers)
        for i, t in zip(self.given, read, strict=True):
            memory[i] = t.data_ptr()
        for i, t in zip((*self.made, *self.saved), made, strict=True):
            same = self.buffers[i].same_as
            if same is None:
                memory[i] = t.data_ptr()
            else:
                t.copy_(read[self.given.index(same)].view(t.shape))
        amax, alive = self.place_state(memory, tensors[own] if self.scales else None, x)
        if self.rng is not None:
            seed = tensors[-1]
            if x.is_cpu:
                state = torch.tensor((int(seed), 0, 0, 0, self.columns))
            else:
                state = torch.zeros(5, dtype=torch.int64, device=device)
                state[:1].copy_(seed)
                state[4:].fill_(self.columns)
            alive.append(state)
            memory[self.rng] = state.data_ptr()
        self.memory.layout(rows, x.is_cpu).run(FORWARD, memory, x, {})
        return self.results_of(made, x, self.amax_of(amax, False))

    def run_backward(self, tensors: Tensors) -> Tensors:
        told, reads = "tenon::chain_backward", self.reads
        self.check_count(told, len(reads) + bool(self.scales) + 1, tensors)
        rows, read = self.read(told, reads, tensors)
        like = tensors[0]
        made = self.empty(self.written, rows, like.device)
        memory = [0] * len(self.buffers)
        for i, t in zip((*reads, *self.written), (*read, *made), strict=True):
            memory[i] = t.data_ptr()
        amax, alive = self.place_state(memory, tensors[-2] if self.scales else None, like)
        self.memory.layout(rows, like.is_cpu).run(BACKWARD, memory, like, {})
        del alive
        return [*made, *self.amax_of(amax, True)]

    def fake_forward(self, tensors: Tensors) -> Tensors:
        self.check_count("tenon::chain", self.count, tensors)
        x = tensors[0]
        rows = self.rows(self.given[0], x)
        made = self.empty([*self.made, *self.saved], rows, x.device)
        count = len(self.amax_forward)
        amax = [x.new_empty(count, dtype=torch.float32)] if count else []
        return self.results_of(made, x, amax)

    def results_of(self, made: Tensors, x: torch.Tensor, amax: Tensors) -> Tensors:
        outputs = len(self.made)
        tie = [x.new_empty(0, dtype=torch.float32)] if self.backward else []
        return [*made[:outputs], *tie, *made[outputs:], *amax]

    def fake_backward(self, tensors: Tensors) -> Tensors:
        like = tensors[0]
        made = self.empty(self.written, self.rows(self.reads[0], like), like.device)
        count = len(self.amax_backward)
        return made + ([like.new_empty(count, dtype=torch.float32)] if count else [])

    def to_save(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Tensors:
        """What the backward pass reads, in the order of chain_backward."""
        outputs = len(self.made)
        known = dict(zip(self.given, tensors, strict=False))
        known.update(zip(self.made, made, strict=False))
        tie, saved = made[outputs], made[outputs + 1 : outputs + 1 + len(self.saved)]
        scales = [tensors[len(self.given)]] if self.scales else []
        return [*[known[i] for i in self.kept], *saved, *scales, tie]

    def gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        shapes: Sequence[Any],
        of_outputs: Sequence[Any],
        device: torch.device,
        run: Any,
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors of a call."""
        known: dict[int, torch.Tensor] = {}
        for i, g, shape in zip(self.dy, grads, of_outputs, strict=False):
            if i is not None:
                kind = TYPES[self.buffers[i].dtype]
                known[i] = torch.zeros(shape, dtype=kind, device=device) if g is None else g
        amax: list[torch.Tensor | None] = [None] * len(self.amax_backward)
        if self.written or amax:
            made = run([*known.values(), *saved])
            known.update(zip(self.written, made, strict=False))
            if amax:
                amax = list(made[-1].split(1))
        results: list[torch.Tensor | None] = []
        for i, found, shape in zip(self.given, self.results, shapes, strict=False):
            if found is None:
                results.append(None)
                continue
            g = known[found].reshape(shape)
            kind = TYPES[self.buffers[i].dtype]
            results.append(g if g.dtype == kind else g.to(kind))
        scales = [None] if self.scales else []
        return [*results, *scales, *amax, *([] if self.rng is None else [None])]


@lru_cache(maxsize=_MOST)
def _known(text: str, device: Any) -> _Chain:
    with _cuda.on(torch.device("cuda", device)) if device is not None else _cuda.on(_CPU):
        return _Chain(text)


_CPU = torch.device("cpu")


def _chain_of(text: str, tensors: Sequence[torch.Tensor]) -> _Chain:
    if not tensors:
        raise ValueError("tenon::chain: no tensors; the first one is the input")
    return _known(text, tensors[0].device.index if tensors[0].device.type == "cuda" else None)


_NO_SECOND = (
    "tenon::chain_backward: a second derivative was asked for, and only the first one exists; call "
    "backward without create_graph=True, or write this part with torch operations"
)


_NO_FORWARD = (
    "tenon::chain: forward-mode derivatives are not offered; use backward() or torch.func.grad, or "
    "write this part with torch operations"
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.text = inputs
    of = _chain_of(ctx.text, tensors)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[len(of.made) + of.backward :])
    if of.backward:
        ctx.save_for_backward(*of.to_save(tensors, output))
    ctx.shapes, ctx.of_outputs = [t.shape for t in tensors], [t.shape for t in output]
    ctx.device = tensors[0].device


def _gradients(ctx: Any, grads: Sequence[torch.Tensor | None], run: Any) -> Any:
    of = _known(ctx.text, ctx.device.index if ctx.device.type == "cuda" else None)
    if not of.backward:
        raise RuntimeError(
            "tenon::chain: its plan has no backward pass; make one with backward=True"
        )
    return of.gradients(grads, ctx.saved_tensors, ctx.shapes, ctx.of_outputs, ctx.device, run)


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> Any:
    def run(tensors: Tensors) -> Tensors:
        return torch.ops.tenon.chain_backward(tensors, ctx.text)  # type: ignore[no-any-return]

    return _gradients(ctx, grads, run), None


def _refuse_second(ctx: Any, grads: Any) -> Any:
    raise NotImplementedError(_NO_SECOND)


def _chain(tensors: Tensors, plan: str) -> Tensors:
    return _chain_of(plan, tensors).run_forward(tensors)


def _chain_backward(tensors: Tensors, plan: str) -> Tensors:
    return _chain_of(plan, tensors).run_backward(tensors)


def _fake_chain(tensors: Tensors, plan: str) -> Tensors:
    return _chain_of(plan, tensors).fake_forward(tensors)


def _fake_chain_backward(tensors: Tensors, plan: str) -> Tensors:
    return _chain_of(plan, tensors).fake_backward(tensors)


operators = torch.library.Library("tenon", "DEF")
for _name, _real, _fake in (
    ("chain", _chain, _fake_chain),
    ("chain_backward", _chain_backward, _fake_chain_backward),
):
    operators.define(
        f"{_name}(Tensor[] tensors, str plan) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
    )
    operators.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tenon::{_name}", _fake, lib=operators)
torch.library.register_autograd("tenon::chain", _backward, setup_context=_setup, lib=operators)
torch.library.register_autograd("tenon::chain_backward", _refuse_second, lib=operators)


def _flops(tensors: Any, text: str, backward: bool) -> int:
    """The count for torch.utils.flop_counter, which gives shapes in place of tensors."""
    of = _known(text, None)
    shape = tensors[0]
    rows = shape[0] if not backward else of.rows(of.reads[0], torch.empty(shape, device="meta"))
    return sum(
        int(step["flops"]) for step in of.plan.json(rows)["backward" if backward else "forward"]
    )


def _chain_flops(tensors: Any, plan: str, *_: Any, **__: Any) -> int:
    return _flops(tensors, plan, False)


def _chain_backward_flops(tensors: Any, plan: str, *_: Any, **__: Any) -> int:
    return _flops(tensors, plan, True)


torch.utils.flop_counter.register_flop_formula(torch.ops.tenon.chain)(_chain_flops)
torch.utils.flop_counter.register_flop_formula(torch.ops.tenon.chain_backward)(
    _chain_backward_flops
)


def chain(tensors: Tensors, text: str) -> Tensors:
    """tenon::chain, also under the transforms of torch.func."""
    if not torch.compiler.is_dynamo_compiling() and _watch.transforming():
        return list(_Transformed.apply(text, *tensors))
    return torch.ops.tenon.chain(tensors, text)  # type: ignore[no-any-return]


class _Transformed(torch.autograd.Function):
    """tenon::chain for torch.func, whose transforms fail for the gradients of operators."""

    @staticmethod
    def forward(text: str, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.ops.tenon.chain(list(tensors), text))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _setup(ctx, (inputs[1:], inputs[0]), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def run(tensors: Tensors) -> Tensors:
            return list(_TransformedBackward.apply(ctx.text, *tensors))

        return None, *_gradients(ctx, grads, run)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, text: str, *tensors: torch.Tensor) -> Any:
        of = _chain_of(text, tensors)
        dims = in_dims[1:]
        fed = len(of.given) - len(of.extra_in)
        first = sum(of.buffers[i].role == "input" for i in of.given)
        if any(d is not None for d in dims[first:fed]):
            raise NotImplementedError(
                "tenon::chain: torch.func.vmap over parameters is not offered; call the module "
                "once for each set of parameters, or write this part with torch operations"
            )
        if of.backward or of.rng is not None:
            return _one_by_one(_Transformed, info, dims, text, tensors, of, bool(of.amax_forward))
        # The batch becomes rows.
        size, folded = info.batch_size, list(tensors)
        for k, (d, t) in enumerate(zip(dims, tensors, strict=True)):
            if k < first or fed <= k < len(of.given):
                t = t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
                folded[k] = t.reshape(-1, t.shape[-1]) if k < first else t.reshape(-1)
        made = _Transformed.apply(text, *folded)  # no tie: there is no backward pass
        outs = [t.reshape(size, -1, t.shape[-1]) for t in made[: len(of.made)]]
        rest = made[len(of.made) :]
        return (*outs, *rest), (*[0 for _ in outs], *[None for _ in rest])


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(text: str, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.ops.tenon.chain_backward(list(tensors), text))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, text: str, *tensors: torch.Tensor) -> Any:
        of = _chain_of(text, tensors)
        dims = in_dims[1:]
        amax = bool(of.amax_backward)
        return _one_by_one(_TransformedBackward, info, dims, text, tensors, of, amax)


def _one_by_one(
    function: Any, info: Any, dims: Any, text: str, tensors: Any, of: _Chain, amax: bool
) -> Any:
    """A call for each element of a batch: saved tensors and gradients of single elements."""
    calls = []
    for n in range(info.batch_size):
        own = [t if d is None else t.select(d, n) for d, t in zip(dims, tensors, strict=True)]
        calls.append(function.apply(text, *own))
    made = [torch.stack(group) for group in zip(*calls, strict=True)]
    out_dims: list[int | None] = [0] * len(made)
    if amax:  # one for all, compared as bits
        made[-1] = made[-1].view(torch.int32).amax(0).view(torch.float32)
        out_dims[-1] = None
    return tuple(made), tuple(out_dims)
