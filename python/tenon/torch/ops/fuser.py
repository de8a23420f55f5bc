"""Fuses a list of operations and runs it as one node of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .. import _watch
from . import _registry
from ._autograd import Call, run
from ._recipes import Tracker
from ._registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_backward_fusion,
    unregister_forward_backward_fusion,
    unregister_forward_fusion,
)
from ._routes import Routes
from .basic import AddExtraInput, Quantize
from .op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    basic_ops,
    changes,
    is_built_in,
    keywords,
)
from .segment import Segment, worth_a_plan

__all__ = [
    "OperationFuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_backward_fusion",
    "unregister_forward_backward_fusion",
    "unregister_forward_fusion",
]

_QUANTIZERS = {"prev_op_grad_output_quantizer", "next_op_input_quantizer"}
_NOTHING: dict[str, Any] = {}


class Stage:
    """One entry of a fused list: an op, and the indices of its basic ops."""

    __slots__ = ("direct", "indices", "op", "quick", "start", "stop", "trusted")

    def __init__(self, op: FusibleOperation, start: int, stop: int, direct: bool = False) -> None:
        self.op = op
        self.start, self.stop = start, stop
        self.indices = range(start, stop)
        # Whether a basic op is called with op_forward. If `quick`, with both quantizers.
        self.direct = direct
        self.quick = False
        self.trusted = is_built_in(op)  # a built-in op takes no keywords and returns valid results
        if direct:
            taken = keywords(op.op_forward)  # type: ignore[operator]
            self.quick = taken is None or _QUANTIZERS <= taken


def stage_of(op: FusibleOperation, start: int, direction: str | None = None) -> Stage:
    """The stage of one op. `direction`: forward or backward; None: both."""
    own = any(_defines(op, "fuser_" + d) for d in ([direction] if direction else _DIRECTIONS))
    direct = (
        isinstance(op, BasicOperation)
        and not own
        and not (op.num_extra_inputs or op.num_extra_outputs)
    )
    return Stage(op, start, start + len(basic_ops(op)), direct)


_DIRECTIONS = ("forward", "backward")


class OperationFuser:
    """A list of operations, fused at the first call.

    A call returns the output, or (output, *extra outputs). Ops are fused again after a fusion is
    registered or unregistered. `before` and `after` are channels as in `Routes`.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        before: Container[str] = (),
        after: Container[str] = (),
    ) -> None:
        self._ops = list(ops)
        self._basic_ops: list[BasicOperation] = [b for op in ops for b in basic_ops(op)]
        self._num_basic_ops = len(self._basic_ops)
        self._no_kwargs = [_NOTHING] * self._num_basic_ops
        self._routes = Routes(self._basic_ops, before, after)
        self.tracker = Tracker(self._basic_ops)
        self.places = {op: i for i, op in enumerate(self._basic_ops)}
        for op in self._basic_ops:
            op._channels_locked = True
        self.num_extra_inputs = self._routes.num_inputs
        self.num_extra_outputs = len(self._routes.outputs)
        self._plan: tuple[list[Stage], list[Stage]] | None = None
        self._whole: Segment | None = None  # if all ops are one segment
        self._version: Any = None
        self._started = False
        self._prepared = [
            op
            for op in self._basic_ops
            if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        ]
        self._in_place = [
            i for i, op in enumerate(self._basic_ops) if isinstance(op, AddExtraInput)
        ]
        # Only these ops can have a quantizer for an encoding.
        self._encoded_inputs = [_may_have(op, "get_input_quantizer") for op in self._basic_ops]
        self._encoded_grads = [
            i
            for i, op in enumerate(self._basic_ops[:-1])
            if _may_have(op, "get_grad_output_quantizer")
        ]
        # Each op with the dict of its parameters, their names if the op defines them, and those in
        # the dict.
        self._holders = [
            (
                *(i, op, op.parameter_holder()._parameters, op.parameter_names),
                [op.parameter_key(name) for name in op.parameter_names or ()],
            )
            for i, op in enumerate(self._basic_ops)
        ]

    def parameters(
        self,
    ) -> tuple[
        list[torch.Tensor], list[int], int, dict[int, dict[str, torch.Tensor]], dict[int, list[Any]]
    ]:
        """All parameters of the call, in several forms.

        Returns all parameters, their number per basic op, and the first op with a trainable one.
        Then, by op and name, the parameters of ops with computed ones, e.g. by a parametrization.
        Then, by op, the parameters of ops that define names.
        """
        flat: list[torch.Tensor] = []
        counts = [0] * self._num_basic_ops
        first = self._num_basic_ops
        computed: dict[int, dict[str, torch.Tensor]] = {}
        given: dict[int, list[Any]] = {}
        for i, op, holder, names, keys in self._holders:
            before = len(flat)
            if names is None:
                found: Iterable[Any] = holder.values()
                if op._modules or op._forward_pre_hooks:
                    found = _registered(op)
            else:
                found = given[i] = [holder.get(key) for key in keys]
                if any([p is None for p in found]):
                    found = [_read(op, name) for name in names]
                    computed[i] = dict(zip(names, found, strict=True))
            for p in found:
                if p is not None:
                    flat.append(p)
                    if i < first and p.requires_grad:
                        first = i
            counts[i] = len(flat) - before
        return flat, counts, first, computed, given

    def plan(self) -> tuple[list[Stage], list[Stage]]:
        """(forward, backward) stages.

        Rebuilt when a fusion is registered or unregistered, or gets another recipe.
        """
        version = _registry.version(), _registry.recipe_read()
        if self._plan is None or self._version != version:
            made = _with_segments(*self._fuse(), self._routes)
            only = made[0][0].op if len(made[0]) == 1 else None
            self._whole = only if isinstance(only, Segment) else None
            self._plan, self._version = made, version
        return self._plan

    def _fuse(self) -> tuple[list[Stage], list[Stage]]:
        ops: list[FusibleOperation] = []
        for op in self._ops:
            # A fused op without its own code, such as Linear, is replaced by its basic ops.
            ops.extend([op] if runs_itself(op) else basic_ops(op))
        ops = self._apply(_registry.FORWARD_BACKWARD, ops)
        forward = self._apply(_registry.FORWARD, _expand(ops, "fuser_forward"))
        backward = self._apply(_registry.BACKWARD, _expand(ops, "fuser_backward"))
        return self._stages(forward, "forward"), self._stages(backward, "backward")

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The forward pass as (op, indices of its basic ops). See `fused_list`."""
        return fused_list((self._plan or self.plan())[0], "forward")

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The same for the backward pass, in the order in which it runs."""
        return fused_list((self._plan or self.plan())[1], "backward")[::-1]

    def _apply(
        self, functions: list[Callable[..., Any]], ops: list[FusibleOperation]
    ) -> list[FusibleOperation]:
        for function in functions:
            ops = list(_registry.call(function, ops, _registry.recipe_read()))
            if [b for op in ops for b in basic_ops(op)] != self._basic_ops:
                name = getattr(function, "__qualname__", repr(function))
                raise RuntimeError(
                    f"fusion {name}: it gave {[type(op).__name__ for op in ops]}, which does not "
                    f"stand for {[type(op).__name__ for op in self._basic_ops]}; a fusion must "
                    "keep every basic op, in order"
                )
        return ops

    @staticmethod
    def _stages(ops: list[FusibleOperation], direction: str) -> list[Stage]:
        stages: list[Stage] = []
        for op in ops:
            stages.append(stage_of(op, stages[-1].stop if stages else 0, direction))
        return stages

    def describe(self) -> tuple[list[str], list[str]]:
        """The fused lists as text: each op's name with its basic ops."""
        forward, backward = self.plan()
        return [stage_name(s) for s in forward], [stage_name(s) for s in backward]

    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        if len(extra_inputs) != self.num_extra_inputs:
            raise ValueError(
                f"{self._name()}: {len(extra_inputs)} extra inputs were given; it takes "
                f"{self.num_extra_inputs}"
            )
        for t in extra_inputs:
            if not isinstance(t, torch.Tensor):
                raise TypeError(
                    f"{self._name()}: an extra input is a {type(t).__name__}; it must be a "
                    "torch.Tensor"
                )
        if basic_op_kwargs is None:
            basic_op_kwargs = self._no_kwargs
        elif len(basic_op_kwargs) != self._num_basic_ops:
            raise ValueError(
                f"{self._name()}: basic_op_kwargs has {len(basic_op_kwargs)} entries; it takes one "
                f"for each of {self._num_basic_ops} basic ops"
            )
        if not self._started:
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
            self._started = True
        forward, backward = self.plan()
        whole, moment = self._whole, None
        if whole is not None and basic_op_kwargs is self._no_kwargs and not self._prepared:
            if isinstance(input, torch.Tensor):
                moment = self.tracker.now(changes(), input.device)
                result = whole.call(moment, input, *extra_inputs)
                if result is not NotImplemented:
                    return result
        if not isinstance(input, torch.Tensor):
            raise TypeError(
                f"{self._name()}: the input is a {type(input).__name__}; it must be a torch.Tensor"
            )
        flat, counts, first, computed, given = self.parameters()
        _watch.check(self, input, *extra_inputs, *flat)
        if not torch.is_grad_enabled():
            first = self._num_basic_ops
        elif input.requires_grad:
            first = 0
        else:
            for i, t in zip(self._routes.readers, extra_inputs, strict=True):
                if t.requires_grad and i < first:
                    first = i
        for op in self._prepared:
            op.pre_fuser_forward(requires_grad=self._basic_ops.index(op) >= first)
        if basic_op_kwargs is not self._no_kwargs:
            for stage in forward:
                for i in stage.indices if stage.trusted else ():
                    self._basic_ops[i].check_kwargs(basic_op_kwargs[i])
                    if basic_op_kwargs[i] and isinstance(stage.op, Segment):
                        raise TypeError(
                            f"{type(self._basic_ops[i]).__name__}: it takes no keywords in a "
                            f"Sequential; {', '.join(basic_op_kwargs[i])} was given"
                        )
        if moment is None:
            moment = self.tracker.now(changes(), input.device)
        call = Call(
            self, moment, forward, backward, counts, first, basic_op_kwargs, computed, given
        )
        if first == self._num_basic_ops:
            return call.forward(input, extra_inputs)
        call.input_requires_grad = input.requires_grad
        call.device_type = "cpu" if input.is_cpu else "cuda"
        return run(call, input, *extra_inputs, *flat)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copy of a module creates its own fuser at its first call."""

    def __str__(self) -> str:
        return self._name()

    def _name(self) -> str:
        return " + ".join(type(op).__name__ for op in self._ops)


def fused_list(stages: Iterable[Stage], direction: str) -> list[tuple[FusibleOperation, list[int]]]:
    """The stages as (op, indices of its basic ops), in the order of the basic ops.

    In a segment, adjacent ops that one step of the last call's plan runs are an op of `fused`, if
    they are of its kinds. Other ops are listed one by one.
    """
    listed: list[tuple[FusibleOperation, list[int]]] = []
    for stage in stages:
        if not isinstance(stage.op, Segment):
            listed.append((stage.op, list(stage.indices)))
            continue
        plan = stage.op.last()
        if isinstance(plan, list):
            listed += fused_list(plan, direction)
            continue
        ops, steps, at = stage.op.ops, stage.op.steps(plan, direction), 0
        while at < len(ops):
            found = _named(ops, at, steps, direction)
            count = 1 if found is None else len(found.basic_ops)
            indices = list(range(stage.start + at, stage.start + at + count))
            listed.append((ops[at] if found is None else found, indices))
            at += count
    return listed


def _named(
    ops: Sequence[BasicOperation], at: int, steps: Sequence[set[int]], direction: str
) -> FusedOperation | None:
    """The op of `fused` for the ops from `at` on that one step runs."""
    from .fused import BACKWARD, FORWARD

    for cls in FORWARD if direction == "forward" else BACKWARD:
        for stop in range(min(at + len(cls.kinds), len(ops)), at + 1, -1):
            if any(set(range(at, stop)) <= step for step in steps):
                made = cls.of(ops[at:stop])
                if made is not None:
                    return made
    return None


def stage_name(stage: Stage) -> str:
    """`Fused(Basic, Basic)` or `Basic`."""
    op = stage.op
    if not isinstance(op, FusedOperation):
        return type(op).__name__
    return f"{type(op).__name__}({', '.join(type(b).__name__ for b in op.basic_ops)})"


def runs_itself(op: FusibleOperation) -> bool:
    """Whether an op has its own code for a pass, not only basic ops."""
    return _defines(op, "fuser_forward") or _defines(op, "fuser_backward")


def _defines(op: FusibleOperation, method: str) -> bool:
    """Whether an op has its own `fuser_forward` or `fuser_backward`."""
    if method in op.__dict__:
        return True
    function = getattr(type(op), method)
    return function not in (getattr(BasicOperation, method), getattr(FusibleOperation, method))


def _read(op: BasicOperation, name: str) -> torch.Tensor:
    """Computes a parameter that is not registered under its name. The result must be a tensor."""
    found = getattr(op, name, None)
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"{type(op).__name__}: {name} is a {type(found).__name__}; it must be a parameter or "
            "a tensor"
        )
    return found


def _registered(op: BasicOperation) -> Iterator[torch.nn.Parameter]:
    """The parameters of an op that does not define their names."""
    reparametrized = "parametrizations" in op._modules or any(
        isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm))
        for hook in op._forward_pre_hooks.values()
    )
    if reparametrized:
        raise NotImplementedError(
            f"{type(op).__name__}: a parameter is parametrized or pruned, and it is not known "
            "which gradients op_backward gives; name them in the class in that order, e.g. "
            'parameter_names = ("weight",), and read them by self.parameter(ctx, "weight")'
        )
    return op.parameters()


def _may_have(op: BasicOperation, getter: str) -> bool:
    """Whether `getter` can return a quantizer."""
    return any(
        name in op.__dict__ or getattr(type(op), name) is not getattr(BasicOperation, name)
        for name in (getter, "get_quantizer", "num_quantizers")
    )


def _expand(ops: list[FusibleOperation], method: str) -> list[FusibleOperation]:
    """Replaces fused ops that do not run in this direction by their basic ops."""
    expanded: list[FusibleOperation] = []
    for op in ops:
        expanded.extend([op] if not op.is_fused_op or _defines(op, method) else basic_ops(op))
    return expanded


def _with_segments(
    forward: list[Stage], backward: list[Stage], routes: Routes
) -> tuple[list[Stage], list[Stage]]:
    """Replaces sequences of built-in ops that no fusion took by segments."""
    ops = [b for stage in forward for b in basic_ops(stage.op)]
    joins = [is_built_in(op) and type(op).plan_text is not BasicOperation.plan_text for op in ops]
    for stage in (*forward, *backward):
        if isinstance(stage.op, FusedOperation):
            joins[stage.start : stage.stop] = [False] * len(stage.indices)
    start = 0
    while start < len(ops):
        stop = start
        while stop < len(ops) and joins[stop] and not _reads_values(ops, stop, start, routes):
            stop += 1
        # An op after the segment gets the codes of a Quantize before it.
        while start < stop < len(ops) and isinstance(ops[stop - 1], Quantize):
            stop -= 1
        if stop > start and worth_a_plan(ops[start:stop]):
            stage = Stage(Segment(ops[start:stop], start, routes), start, stop)
            forward, backward = (
                [s for s in stages if s.start < start]
                + [stage]
                + [s for s in stages if s.start >= stop]
                for stages in (forward, backward)
            )
        start = max(stop, start + 1)
    return forward, backward


def _reads_values(ops: list[BasicOperation], at: int, start: int, routes: Routes) -> bool:
    """Whether an op reads one value per row from a channel that the segment from `start` writes.

    A channel inside of a plan carries whole tensors only.
    """
    if ops[at].channels_inside:
        return False
    return any(isinstance(s, tuple) and s[0] >= start for s in routes.sources[at])
