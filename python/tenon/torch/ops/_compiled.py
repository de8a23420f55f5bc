"""Ops as operators of torch: what torch.compile and other tracers see of a call.

`run` is traced. It reads tensors and settings of modules, so that graphs have guards on them, and
calls `tenon::chain`. What follows from settings alone is computed by `layout` and `lower`, which
are not traced: their results are constants of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules import module as modules_of_torch

from .. import _outside, _watch
from .._context import Active, by_text, local
from .._delayed import make_leaf, raise_amax
from .._quantized import QuantizedTensor
from . import _kernels, _registry
from ._operator import chain, plan_text, scaled
from ._recipes import KEYS, Bound
from .basic import AddExtraInput, Identity, MakeExtraOutput, Reshape
from .fuser import OperationFuser
from .op import BasicOperation, FusedOperation, basic_ops, changes, is_built_in
from .segment import Cut, Segment
from .sequential import Sequential

if TYPE_CHECKING:
    from .fuser import Stage

__all__ = ["run"]

_FREE = (Identity, MakeExtraOutput, Reshape)
_MOST = 256


class Kind(NamedTuple):
    """What a plan depends on of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


# Constants.


class _Broken(Exception):
    """A call that no operator expresses, with the reason."""


def _parts(owner: Any) -> list[tuple[Any, Any]]:
    """The fusers and modules of a call, with the extra tensors that they take and return."""
    if isinstance(owner, FusedOperation):
        if owner._hooks != 0 or owner._parts is not None:
            owner._find_hooks()
        if owner._parts is not None:
            owner = owner._parts
    if isinstance(owner, Sequential):
        groups = owner.groups()
        return [(part, routes) for (part, _), routes in zip(groups, owner._routes, strict=True)]
    fuser = owner._alone()
    return [(fuser, fuser._routes)]


def _flat(owner: Any) -> tuple[list[BasicOperation], list[torch.nn.Module]]:
    """The basic ops of a call, in order, and its modules. Also traced."""
    modules = list(owner._modules.values()) if isinstance(owner, Sequential) else [owner]
    ops: list[BasicOperation] = []
    for module in modules:
        if isinstance(module, FusedOperation):
            _add(module, ops)
        elif isinstance(module, BasicOperation):
            ops.append(module)
    return ops, modules


def _add(module: Any, ops: list[Any]) -> None:
    for part in module.basic_ops:
        if isinstance(part, FusedOperation):
            _add(part, ops)
        else:
            ops.append(part)


def layout(owner: Any, settings: Any) -> Any:
    """The parts of a call, or the reason why it is not compiled.

    A part is ("module", its number), ("op", its number, …) or ("fuser", …, its stages), with the
    channels that it reads and writes.
    """
    try:
        return _layout(owner)
    except _Broken as e:
        return _because(owner, settings, e)


def _because(owner: Any, settings: Any, e: _Broken) -> str:
    """Notes the reason why calls of `owner` with these settings are not compiled."""
    reason = f"tenon: {type(owner).__name__}: {e}"
    _outside.because(reason)
    owner.__dict__["_uncompiled"] = (settings, reason)
    return reason


def _layout(owner: Any) -> Any:
    ops, modules = _flat(owner)
    parts: list[Any] = []
    for g, (part, routes) in enumerate(_parts(owner)):
        channels = tuple(routes.fed), tuple(routes.given)
        if isinstance(part, OperationFuser):
            first = next(i for i, op in enumerate(ops) if op is part._basic_ops[0])
            made = tuple(routes.outputs)
            parts.append(("fuser", g, first, *channels, made, _stages(part)))
        elif isinstance(part, BasicOperation):
            at = next(i for i, op in enumerate(ops) if op is part)
            parts.append(("op", at, *channels))
        else:
            at = next(i for i, module in enumerate(modules) if module is part)
            parts.append(("module", at, *channels))
    return tuple(parts)


def _stages(fuser: OperationFuser) -> tuple[Any, ...]:
    """(first op, end, parameters, extra inputs) of each part of a fuser that is lowered at once."""
    forward, backward = fuser.plan()
    stages: list[Any] = []
    for stage in (*forward, *backward):
        if isinstance(stage.op, FusedOperation) and not isinstance(stage.op, Segment):
            raise _Broken(f"{type(stage.op).__name__} is a fusion of its own, in Python")
    for stage in forward:
        op = stage.op
        if not isinstance(op, Segment) and not _plans(op):
            raise _Broken(f"{type(op).__name__} computes in Python")
        for b in basic_ops(op):
            if getattr(b, "accumulate_into_main_grad", False):
                raise _Broken("a gradient that is added to main_grad is written in place")
            if isinstance(b, AddExtraInput) and b.in_place:
                raise _Broken("AddExtraInput(in_place=True) writes over its extra input")
        segment = _segment(fuser, stage.start, stage.stop)
        params = tuple((stage.start + i, name) for i, name in segment._named)
        extras = tuple(fuser._routes.sources[stage.start + i][slot] for i, slot in segment.given)
        stages.append((stage.start, stage.stop, params, extras))
    return tuple(stages)


def _plans(op: Any) -> bool:
    return is_built_in(op) and type(op).plan_text is not BasicOperation.plan_text


_segments: Any = weakref.WeakKeyDictionary()


def _segment(fuser: OperationFuser, start: int, stop: int) -> Segment:
    known = _segments.setdefault(fuser, {})
    found = known.get((start, stop))
    if found is None:
        for stage in fuser.plan()[0]:
            if isinstance(stage.op, Segment) and (stage.start, stage.stop) == (start, stop):
                found = stage.op
    if found is None:
        found = Segment(fuser._basic_ops[start:stop], start, fuser._routes)
    known[start, stop] = found
    return found


# The contexts that graphs were made for. They stay alive, so that equal ones are the same.
_actives: dict[str, Active] = {}


def lower(
    owner: Any,
    settings: Any,
    group: int,
    start: int,
    stop: int,
    kinds: Any,
    count: int,
    grad: bool,
    active_text: str,
) -> Any:
    """The stages of ops [start, stop) of a fuser, or the reason why they are not compiled.

    `kinds`: of the input, of `count` parameters, of the extra inputs.
    """
    active = _active(active_text)
    x, *rest = [Kind(*kind) for kind in kinds]
    params, extras = rest[:count], rest[count:]
    fuser: OperationFuser = _parts(owner)[group][0]
    before = local.active
    local.active = active
    try:
        return _lower(fuser, start, stop, x, params, extras, grad)
    except _Broken as e:
        return _because(owner, settings, e)
    finally:
        local.active = before


def _lower(
    fuser: OperationFuser,
    start: int,
    stop: int,
    x: Kind,
    params: Sequence[Any],
    extras: Sequence[Any],
    grad: bool,
) -> Any:
    bound = fuser.tracker.bound(changes())
    if bound.calibrating and bound.on:
        raise _Broken("autocast(calibrating=True) collects amax in Python")
    whole = _segment(fuser, start, stop)
    names = [(start + i, name) for i, name in whole._named]
    sources = [fuser._routes.sources[start + i][slot] for i, slot in whole.given]
    of_params = dict(zip(names, params, strict=True))
    of_sources: dict[Any, Kind] = dict(zip(sources, extras, strict=True))
    made: list[Any] = []
    _lower_segment(whole, fuser, x, of_params, of_sources, grad, bound, made)
    return tuple(made)


def _fit(bound: Bound, device: torch.device, updating: bool) -> None:
    new = [a for a in bound.delayed if a.state is not None and not a.state.buffers]
    if new and (_watch.modes() or _watch.transforming()):
        raise RuntimeError(
            "tenon: a recipe of delayed scaling needs its state before a model is traced; call "
            "tenon.torch.create_state(model) first"
        )
    bound.fit(device)
    for state in bound.states:
        state.active = bound.active
        if not updating:
            state.enter_graphs()


def _lower_segment(
    segment: Segment,
    fuser: OperationFuser,
    x: Kind,
    params: dict[Any, Kind],
    extras: dict[Any, Kind],
    grad: bool,
    bound: Bound,
    made: list[Any],
) -> Kind:
    """Appends the stages of a segment. Returns the kind of its output."""
    start, ops = segment._start, segment.ops
    if all(isinstance(op, _FREE) for op in ops):
        for i, op in enumerate(ops):
            shape = op.shape if isinstance(op, Reshape) else None
            made.append(("free", shape, (start + i, 0) if op.num_extra_outputs else None))
            for key in [(start + i, 0)] if op.num_extra_outputs else ():
                extras[key] = x
        return x
    told = segment.told()
    _kernels.compute_dtype(told, x)
    if not x.shape or x.shape[-1] == 0:
        raise _Broken(f"the input of {told} has no columns")
    names = [(start + i, name) for i, name in segment._named]
    sources = [fuser._routes.sources[start + i][slot] for i, slot in segment.given]
    own, given = [params[key] for key in names], [extras[key] for key in sources]
    for t in (*own, *given):
        _kernels.compute_dtype(told, t)
    wanted = [grad and t.requires_grad for t in given]
    input_grad = grad and x.requires_grad
    record = input_grad or any(wanted) or (grad and any(p.requires_grad for p in own))
    find: Any = segment.find
    ready = find(x, own, given, record, input_grad, wanted, x.device.type, bound=bound)
    if isinstance(ready, Cut):
        for part in ready:
            x = _lower_part(part, ready.why, fuser, x, params, extras, grad, bound, made)
        return x
    if ready.encodes is not None:
        raise _Broken("a Quantize at the end gives a QuantizedTensor")
    for (i, what), p, shape in zip(segment._named, own, ready.shapes, strict=True):
        if tuple(p.shape) != tuple(shape):
            raise ValueError(
                f"{type(ops[i]).__name__}: {what} is {tuple(p.shape)}; it must be {tuple(shape)}"
            )
    states = []
    for _, at, tensor in scaled(ready.plan):
        mode_and_index = KEYS[tensor]
        states.append((start + at, *mode_and_index, mode_and_index in bound.given[start + at]))
        if tensor == "dy":
            make_leaf(ops[at])
    shapes = [tuple(op.shape) if isinstance(op, Reshape) else None for op in ops]
    # By place in the segment: the last Reshape before it.
    last: list[Any] = [None]
    for shape in shapes:
        last.append(last[-1] if shape is None else shape)
    outs = [((start + i, slot), ready.cols[i], last[i]) for i, slot in segment.made]
    checked = [
        (source, start + i, slot, ready.cols[i])
        for source, (i, slot) in zip(sources, segment.given, strict=True)
        if last[i] is None
    ]
    columns = ready.dropout_cols if ready.rng is not None else 0
    made.append(
        (
            *("chain", plan_text(ready.plan, columns), ready.cols[0], ready.cols[-1], last[-1]),
            *(tuple(names), tuple(sources), tuple(checked), tuple(outs), tuple(states)),
            ready.rng is not None,
        )
    )
    result = Kind(ready.dtype, (1, ready.cols[-1]), record, x.device)
    for key, cols, _ in outs:
        extras[key] = result._replace(shape=(1, cols))
    return result


def _lower_part(
    part: Stage,
    why: str,
    fuser: OperationFuser,
    x: Kind,
    params: dict[Any, Kind],
    extras: dict[Any, Kind],
    grad: bool,
    bound: Bound,
    made: list[Any],
) -> Kind:
    if isinstance(part.op, Segment):
        return _lower_segment(part.op, fuser, x, params, extras, grad, bound, made)
    alone = _segment(fuser, part.start, part.stop)
    whole = len(alone.ops) == part.stop - part.start == len(fuser._basic_ops) == 1
    quantised = alone._formats(bound).of
    if any(formats is None for _, formats in quantised) or (whole and alone.texts()[0] is None):
        raise _Broken(why)
    if alone.texts()[0] is None and not isinstance(alone.ops[0], _FREE):
        raise _Broken(why)
    return _lower_segment(alone, fuser, x, params, extras, grad, bound, made)


def fit(owner: Any, active_text: str, device: Any, updating: bool) -> None:
    """Makes the states of delayed scaling fit the recipes, before they are traced.

    If the graph updates states, it adds them to those that graphs use when it runs.
    """
    before = local.active
    local.active = _active(active_text)
    try:
        for part, _ in _parts(owner):
            if isinstance(part, OperationFuser):
                bound = part.tracker.bound(changes())
                if bound.delayed and not bound.calibrating:
                    _fit(bound, torch.device(device), updating)
    finally:
        local.active = before


def _active(text: str) -> Active | None:
    return _actives.setdefault(text, by_text[text]) if text else None


def not_compiled(owner: Any, settings: Any, why: str) -> str:
    return _because(owner, settings, _Broken(why))


# What is traced.


def _parameter(op: Any, name: str) -> Any:
    return getattr(op.parameter_holder(), op.parameter_key(name))


def _fixed(n: Any) -> int:
    """A size as a number that the graph is for. int() of a symbol stays a symbol."""
    return len(range(n))


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(t, QuantizedTensor):
        return ()
    return t.dtype, tuple([_fixed(n) for n in t.shape]), t.requires_grad, t.device


def _input_kind(t: torch.Tensor) -> tuple[Any, ...]:
    cols = (_fixed(t.shape[-1]),) if t.dim() else ()
    return t.dtype, cols, t.requires_grad, t.device


def _settings(owner: Any, ops: Sequence[Any], device: str) -> tuple[Any, ...]:
    """Everything but tensors that a call depends on. Graphs are only used while it is the same."""
    found: list[Any] = [_registry.token]
    for name in _HOOKS:
        found.append(len(getattr(modules_of_torch, name)))
    for op in ops:
        found.append(op._settings)
        for each in op._quantizers.values():
            for quantizer in each.values():
                if quantizer is not None:
                    found.append(getattr(quantizer, "_settings", ""))
    active = local.active
    text = "" if active is None else active.text
    found.append(text)
    if text or any(["recipe " in op._settings for op in ops]):
        graphs = local.in_graphs
        owner._fit(tuple(found), text, device, graphs.updating)
        for op in ops:
            found.append(op._fitted)
            state = op._state
            if state is not None and op._fitted and not state.in_graphs:
                state.in_graphs = True
                graphs.states = (*graphs.states, state)
    return tuple(found)


_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def _scale(op: Any, mode: str, k: int, own: bool) -> torch.Tensor:
    if own:
        return op._quantizers[mode][k].scale  # type: ignore[no-any-return]
    scale = op.forward_scale if mode == "forward" else op.backward_scale
    return scale[k : k + 1]  # type: ignore[no-any-return]


def _chain(
    stage: Any,
    ops: Sequence[Any],
    params: dict[Any, torch.Tensor],
    x: torch.Tensor,
    extras: dict[Any, torch.Tensor],
) -> torch.Tensor:
    _, text, cols, out_cols, reshaped, names, sources, checked, outs, states, random = stage
    lead = tuple(x.shape[:-1])
    for source, i, slot, width in checked:
        t = extras[source]
        if not ops[i].extra_fits(slot, t.shape, lead, width):
            ops[i].refuse_extra(slot, t.shape, (*lead, width))
    tensors = [x.reshape(-1, cols)]
    tensors += [params[key] for key in names]
    for source in sources:
        t = extras[source]
        tensors.append(t)
    scales, leaves = [], []
    for i, mode, k, own in states:
        scales.append(_scale(ops[i], mode, k, own))
        if mode == "backward":
            leaves.append(ops[i]._gradient_amax)
    if scales:
        tensors.append(torch.cat(scales) if len(scales) > 1 else scales[0].clone())
        tensors += leaves
    if random:
        tensors.append(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device))
    made = chain(tensors, text)
    at = 0
    amax = made[-1]
    for i, mode, k, own in states:
        if mode == "forward":
            op = ops[i]
            target = op._quantizers[mode][k].amax if own else op.forward_amax_history[0, k : k + 1]
            raise_amax(target, amax[at : at + 1])
            at += 1
    for n, (key, width, shape) in enumerate(outs):
        extras[key] = made[1 + n].reshape((*(lead if shape is None else shape[:-1]), width))
    return made[0].reshape((*(lead if reshaped is None else reshaped[:-1]), out_cols))


def _fuser(
    owner: Any,
    part: Any,
    settings: Any,
    all_ops: Sequence[Any],
    x: torch.Tensor,
    given: Sequence[torch.Tensor],
) -> Any:
    """(output, extra outputs), or the reason why it is not compiled."""
    _, group, first, _, _, outputs, stages = part
    ops = all_ops[first:]
    extras: dict[Any, torch.Tensor] = {}
    for n, t in enumerate(given):
        extras[n] = t
    grad = torch.is_grad_enabled()
    active = local.active
    text = "" if active is None else active.text
    for start, stop, names, sources in stages:
        params = {(i, name): _parameter(ops[i], name) for i, name in names}
        kinds = [_input_kind(x)]
        kinds += [_kind(params[key]) for key in names]
        kinds += [_input_kind(extras[source]) for source in sources]
        if () in kinds or isinstance(x, QuantizedTensor):
            return owner._not_compiled(settings, "its input or a weight is encoded")
        made = owner._lower(*(settings, group, start, stop, tuple(kinds), len(names), grad, text))
        if isinstance(made, str):
            return made
        for stage in made:
            if stage[0] == "chain":
                x = _chain(stage, ops, params, x, extras)
                continue
            _, shape, key = stage
            if shape is not None:
                x = x.reshape(shape)
            if key is not None:
                extras[key] = x
    return x, [extras[key] for key in outputs]


def run(owner: Any, x: torch.Tensor, extra_inputs: Sequence[torch.Tensor]) -> Any:
    """The call of a Sequential or an op. A `str`: the reason why it is not compiled."""
    ops, modules = _flat(owner)
    settings = _settings(owner, ops, str(x.device))
    if owner._uncompiled[0] == settings:
        return owner._uncompiled[1]
    parts = owner._layout(settings)
    if isinstance(parts, str):
        return parts
    callers = list(extra_inputs)
    taken = 0
    channels: dict[str, torch.Tensor] = {}
    shown_outputs: list[torch.Tensor] = []
    for part in parts:
        fed, given = part[3:5] if part[0] == "fuser" else part[2:4]
        extras = []
        for name in fed:
            if name is None:
                extras.append(callers[taken])
                taken += 1
            else:
                extras.append(channels[name])
        if part[0] == "fuser":
            found = _fuser(owner, part, settings, ops, x, extras)
            if isinstance(found, str):
                return found
            x, made = found
        else:
            y = (ops if part[0] == "op" else modules)[part[1]](x, *extras)
            x, made = (y[0], list(y[1:])) if given else (y, [])
        for (name, shown), t in zip(given, made):  # noqa: B905
            if name is not None:
                channels[name] = t
            if shown:
                shown_outputs.append(t)
    return (x, *shown_outputs) if shown_outputs else x


def traced(
    owner: Any, call: Any, x: torch.Tensor, extra_inputs: Sequence[torch.Tensor], keywords: Any
) -> Any:
    """`run`, or the plain call `call` where that is not possible."""
    if not torch.compiler.is_dynamo_compiling():
        _watch.check_forward_mode(type(owner).__name__, x, *extra_inputs)
    if torch.compiler.is_dynamo_compiling() and owner._transformed():
        found: Any = owner._not_compiled(None, "torch.func transforms it inside of a graph")
    elif keywords:
        found = owner._not_compiled(None, "keywords of ops are given")
    else:
        found = run(owner, x, extra_inputs)
    if not isinstance(found, str):
        return found
    if torch.compiler.is_dynamo_compiling():
        return _outside.calls[found](call, x, *extra_inputs, **keywords)
    raise NotImplementedError(
        f"{found}, so tracers, modes and transforms of torch see nothing of it; leave this part "
        "out of what is traced, or write it with torch operations"
    )
