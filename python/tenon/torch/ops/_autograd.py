"""One call of a fuser: its forward and backward loops, and its node in the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _saved
from .._context import local
from .._dynamo import one_break
from .._once import once
from .._quantized import QuantizedTensor
from . import _kernels
from ._recipes import Moment
from ._stand_ins import stand_in
from .basic import Reshape
from .op import BasicOperation, OperationContext, check_result
from .segment import Segment

if TYPE_CHECKING:
    from .fuser import OperationFuser, Stage


class Call:
    """The data that one call of a fuser keeps from its forward to its backward pass."""

    input_requires_grad = False
    device_type = "cpu"
    kinds: list[_saved.Kind]  # of the saved tensors

    def __init__(
        self,
        fuser: OperationFuser,
        moment: Moment,
        forward: list[Stage],
        backward: list[Stage],
        num_parameters: list[int],
        first: int,
        kwargs: list[dict[str, Any]],
        computed: dict[int, dict[str, torch.Tensor]],
        given: dict[int, list[Any]],
    ) -> None:
        self.fuser, self.moment = fuser, moment
        self.basic_ops = fuser._basic_ops
        self.routes = fuser._routes
        self.forward_stages = forward
        self.backward_stages = backward
        self.num_parameters = num_parameters
        self.first = first
        self.kwargs = kwargs
        # Parameters that are not registered under their names, by op. While they are saved, their
        # names.
        self.computed: dict[int, Any] = computed
        self.given = given
        self.ctxs: list[OperationContext] = []
        self.packed: list[list[Any]] = []
        # Shape and device of the input of each forward stage, by its first op, and of each extra
        # output.
        self.inputs: dict[int, tuple[torch.Size, torch.device]] = {}
        self.extras: dict[tuple[int, int], tuple[torch.Size, torch.device]] = {}
        # The stages of a segment that was cut for this call, by its first op.
        self.cuts: dict[int, list[Stage]] = {}
        self.stand_ins: list[torch.Tensor] = []

    def name(self) -> str:
        return " + ".join(type(op).__name__ for op in self.basic_ops)

    def forward(self, input_: Any, extra_inputs: Sequence[torch.Tensor]) -> Any:
        """The output, or (output, *extra outputs)."""
        before, local.call = local.call, self
        try:
            return self._forward(input_, extra_inputs)
        finally:
            local.call = before

    def _forward(self, input_: Any, extra_inputs: Sequence[torch.Tensor]) -> Any:
        ops, fuser, count = self.basic_ops, self.fuser, len(self.basic_ops)
        ctxs = self.ctxs = [OperationContext() for _ in ops]
        for ctx in ctxs[: self.first]:
            ctx.requires_grad = ctx.input_requires_grad = False
        wanted = any([t.requires_grad for t in (input_, *extra_inputs)])
        for i in fuser._in_place:
            ctxs[i]._wanted = wanted
        for i, found in self.given.items():
            ctxs[i]._given = found
        for i, named in self.computed.items():
            ctxs[i]._computed = named
        if self.first < count:
            ctxs[self.first].input_requires_grad = self.input_requires_grad
        for i in fuser._encoded_grads:
            ctxs[i + 1].prev_op_grad_output_quantizer = ops[i].get_grad_output_quantizer()
        made: dict[tuple[int, int], Any] = {}
        x = self._through(self.forward_stages, input_, extra_inputs, made)
        if not isinstance(x, torch.Tensor):
            x = x.dequantize()
        if not self.routes.outputs:
            return x
        return (x, *(made[key] for key in self.routes.outputs))

    def _through(
        self,
        stages: list[Stage],
        x: Any,
        extra_inputs: Sequence[torch.Tensor],
        made: dict[tuple[int, int], Any],
    ) -> Any:
        """Applies the stages to x. Their extra outputs are stored in `made`."""
        ops, kwargs, ctxs = self.basic_ops, self.kwargs, self.ctxs
        fuser, count, plain = self.fuser, len(ops), self.routes.plain
        recorded = self.first < count
        for stage in stages:
            op, start, stop = stage.op, stage.start, stage.stop
            following = None
            if stop < count and fuser._encoded_inputs[stop]:
                following = ops[stop].get_input_quantizer()
            preceding = ctxs[start].prev_op_grad_output_quantizer
            if recorded:
                self.inputs[start] = x.shape, x.device
            if not stage.trusted:
                x = _asked(x, ctxs[start].input_requires_grad)
            if stage.quick and not kwargs[start]:
                x = op.op_forward(  # type: ignore[operator]
                    ctxs[start],
                    x,
                    prev_op_grad_output_quantizer=preceding,
                    next_op_input_quantizer=following,
                )
            elif stage.direct:
                assert isinstance(op, BasicOperation)
                x = op.call_forward(ctxs[start], x, preceding, following, kwargs[start])
            else:
                if not stage.trusted:
                    self._tell_shapes(stage, x.shape)
                result = op.fuser_forward(
                    ctxs[start:stop],
                    x,
                    basic_op_extra_inputs=[
                        () if plain else self._extra_inputs(i, extra_inputs, made)
                        for i in stage.indices
                    ],
                    prev_op_grad_output_quantizer=preceding,
                    next_op_input_quantizer=following,
                    basic_op_kwargs=kwargs[start:stop],
                )
                if isinstance(result, list):  # a segment that must be cut
                    self.cuts[start] = result
                    x = self._through(result, x, extra_inputs, made)
                    continue
                x, extras = result
                if not plain:
                    self._collect(stage, extras, made)
            if not stage.trusted:
                check_result(op, "op_forward" if stage.direct else "fuser_forward", x)
        return x

    def _extra_inputs(
        self, index: int, given: Sequence[torch.Tensor], made: dict[Any, Any]
    ) -> tuple[Any, ...]:
        """The extra inputs of a basic op. None for one that its own fused op computes."""
        return tuple(
            given[source]
            if isinstance(source, int)
            else _asked(made.get(source), source[0] >= self.first)
            for source in self.routes.sources[index]
        )

    def _collect(self, stage: Stage, extras: Any, made: dict[Any, Any]) -> None:
        name = type(stage.op).__name__
        if len(extras) != len(stage.indices):
            raise RuntimeError(
                f"{name}: fuser_forward gave extra outputs for {len(extras)} ops; it stands for "
                f"{len(stage.indices)}"
            )
        for index, outputs in zip(stage.indices, extras, strict=False):
            basic_op = self.basic_ops[index]
            outputs = tuple(outputs or ())
            if len(outputs) != basic_op.num_extra_outputs:
                raise RuntimeError(
                    f"{name}: {len(outputs)} extra outputs for {type(basic_op).__name__}; it has "
                    f"{basic_op.num_extra_outputs}"
                )
            for slot, tensor in enumerate(outputs):
                if not isinstance(tensor, torch.Tensor) and self._wanted(index, slot, stage.stop):
                    raise TypeError(
                        f"{name}: fuser_forward gave a {type(tensor).__name__} for extra output "
                        f"{slot} of {type(basic_op).__name__}; it must be a torch.Tensor, since "
                        "the caller or a later op reads it"
                    )
                made[index, slot] = tensor
                if tensor is not None:
                    check_result(stage.op, "fuser_forward", tensor)
                    self.extras[index, slot] = tensor.shape, tensor.device

    def _tell_shapes(self, stage: Stage, shape: Sequence[int] | None) -> None:
        """Passes the input shape to each Reshape in a user's fusion. Its backward pass needs it."""
        for i in stage.indices:
            op = self.basic_ops[i]
            if shape is None:
                return
            if isinstance(op, Reshape):
                self.ctxs[i].input_shape = shape
            shape = op.output_shape(shape)

    def _wanted(self, index: int, slot: int, stop: int) -> bool:
        """Whether the caller, or an op from `stop` on, reads an extra output."""
        routes = self.routes
        later = (source for sources in routes.sources[stop:] for source in sources)
        return (index, slot) in routes.outputs or (index, slot) in later

    def pack(self) -> list[torch.Tensor | None]:
        """Moves the saved tensors out of the contexts. Quantised tensors are split in parts."""
        flat: list[torch.Tensor | None] = []
        self.packed = []
        for ctx in self.ctxs:
            entries: list[Any] = []
            # An op without a backward pass needs no saved tensors.
            for saved in ctx.saved_tensors if ctx.requires_grad else ():
                if isinstance(saved, QuantizedTensor):
                    names, meta = saved.__tensor_flatten__()
                    flat.extend(saved.parts().values())
                    entries.append((names, meta, saved.shape))
                else:
                    flat.append(saved)
                    entries.append(None)
            self.packed.append(entries)
            ctx.saved_tensors = ()
        for i, named in self.computed.items():
            flat.extend(named.values())
            self.computed[i] = tuple(named)
            self.ctxs[i]._computed = None
        self.kinds = _saved.kinds(flat)
        return flat

    def forgets(self, t: torch.Tensor, flat: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients may depend on the input `t` although it was not saved."""
        if any(s is t for s in flat):
            return False
        # Built-in ops keep values only in saved tensors.
        numbers = any(s is not None and s.dtype.is_floating_point for s in flat)
        return numbers or not all(stage.trusted for stage in self.forward_stages)

    def unpack(self, flat: Sequence[torch.Tensor | None]) -> None:
        """Restores the saved tensors. Hooks and writes to .data may have changed them."""
        if _saved.kinds(flat) != self.kinds:
            _saved.check(self.name(), self.kinds, flat)
        at = 0
        for ctx, entries in zip(self.ctxs, self.packed, strict=False):
            saved: list[Any] = []
            for entry in entries:
                if entry is None:
                    saved.append(flat[at])
                    at += 1
                else:
                    names, meta, shape = entry
                    parts = dict(zip(names, flat[at : at + len(names)], strict=True))
                    at += len(names)
                    saved.append(QuantizedTensor.__tensor_unflatten__(parts, meta, shape, None))
            ctx.saved_tensors = tuple(saved)
        for i, names in self.computed.items():
            self.ctxs[i]._computed = dict(zip(names, flat[at:], strict=False))  # type: ignore[arg-type]
            at += len(names)

    def backward(self, grads: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """(input gradient, extra-input gradients, parameter gradients)."""
        before, local.call = local.call, self
        try:
            result = self._backward(grads)
        finally:
            local.call = before
        if not _saved.kept():
            self.moment = self.moment.bound.plain  # this forward pass is not open any more
        return result

    def _backward(self, grads: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        routes = self.routes
        grad = grads[0]
        # Gradients of extra outputs: from the caller, and from ops that read a channel.
        pending: dict[tuple[int, int], Any] = dict(zip(routes.outputs, grads[1:], strict=False))
        extra_grads: list[Any] = [None] * routes.num_inputs
        parameter_grads: list[Sequence[Any]] = [(None,) * n for n in self.num_parameters]
        for stage in self._reversed():
            op, start, stop = stage.op, stage.start, stage.stop
            if stop <= self.first:
                return None, extra_grads, [g for group in parameter_grads for g in group]
            if stage.direct:
                assert isinstance(op, BasicOperation)
                grad, grads_of_op = op.call_backward(self.ctxs[start], grad)
                self._place_parameters(op, start, grads_of_op, parameter_grads)
                if not stage.trusted:
                    self._check(stage, grad)
                continue
            grad, grads_of_ops, grads_of_extras = op.fuser_backward(
                self.ctxs[start:stop],
                grad,
                basic_op_grad_extra_outputs=[
                    self._grad_extra_outputs(i, pending) for i in stage.indices
                ],
            )
            for i, of_op in zip(stage.indices, grads_of_ops, strict=False):
                self._place_parameters(op, i, of_op, parameter_grads)
            for i, of_extras in zip(stage.indices, grads_of_extras or (), strict=False):
                self._place_extras(i, of_extras, pending, extra_grads)
            if not stage.trusted:
                self._check(stage, grad)
        if grad is not None:
            grad = _kernels.plain(grad)
        return grad, extra_grads, [g for group in parameter_grads for g in group]

    def _check(self, stage: Stage, grad: Any) -> None:
        """Checks the input gradient that an op outside of this package returned."""
        op, wanted = stage.op, self.ctxs[stage.start].input_requires_grad
        if grad is not None or wanted:
            check_result(op, "op_backward" if stage.direct else "fuser_backward", grad)
            if stage.start in self.inputs:
                _saved.check_gradient(
                    type(op).__name__, "its input", grad, *self.inputs[stage.start]
                )

    def _reversed(self) -> Iterator[Stage]:
        for stage in reversed(self.backward_stages):
            if stage.start in self.cuts and isinstance(stage.op, Segment):
                yield from reversed(self.cuts[stage.start])
            else:
                yield stage

    def _grad_extra_outputs(self, index: int, pending: dict[Any, Any]) -> tuple[Any, ...]:
        slots = range(self.basic_ops[index].num_extra_outputs)
        return tuple(pending.get((index, slot)) for slot in slots)

    def _place_parameters(
        self, op: Any, index: int, grads: Any, placed: list[Sequence[Any]]
    ) -> None:
        wanted = self.num_parameters[index]
        grads = tuple(grads or ())
        if len(grads) == wanted:
            placed[index] = grads
        elif grads or _trains(self.basic_ops[index]):
            raise RuntimeError(
                f"{type(op).__name__}: {len(grads)} parameter gradients for "
                f"{type(self.basic_ops[index]).__name__}; it has {wanted} parameters, give a "
                "gradient or None for each"
            )

    def _place_extras(
        self, index: int, grads: Any, pending: dict[tuple[int, int], Any], placed: list[Any]
    ) -> None:
        sources = self.routes.sources[index]
        grads = tuple(grads or ())
        if len(grads) != len(sources):
            raise RuntimeError(
                f"{type(self.basic_ops[index]).__name__}: {len(grads)} gradients of extra inputs; "
                f"it has {len(sources)}, give a gradient or None for each"
            )
        for source, grad in zip(sources, grads, strict=False):
            if isinstance(source, int):
                placed[source] = grad
            elif grad is not None:
                if source in self.extras:  # not if a fused op computed it internally
                    name = type(self.basic_ops[index]).__name__
                    _saved.check_gradient(name, "an extra input", grad, *self.extras[source])
                before = pending.get(source)
                pending[source] = grad if before is None else before + grad


def _asked(t: Any, wanted: bool) -> Any:
    """`t`, or an alias with `requires_grad` if a gradient is wanted.

    Autograd records nothing inside of an autograd function, so intermediate tensors have no
    `requires_grad`.
    """
    if not wanted or t is None or t.requires_grad:
        return t
    if isinstance(t, torch.Tensor):
        return t.detach().requires_grad_() if t.is_floating_point() else t
    return t


def _trains(op: BasicOperation) -> bool:
    return any(p.requires_grad for p in op.parameter_holder().parameters())


class FuserFunction(torch.autograd.Function):
    """A fuser call as one node. Parameters are inputs, so that autograd sees them."""

    @staticmethod
    def forward(func_ctx: Any, call: Call, input_: Any, *tensors: torch.Tensor) -> Any:
        outputs = call.forward(input_, tensors[: call.routes.num_inputs])
        saved = call.pack()
        func_ctx.save_for_backward(*saved)
        func_ctx.call = call
        # If gradients may depend on an input that is not saved, a second derivative must still find
        # that input. Leaf tensors are found through the node.
        for t in (input_, *tensors):
            if t is not None and t.requires_grad and not t.is_leaf and call.forgets(t, saved):
                call.stand_ins.append(t)
        if not call.routes.outputs:
            return outputs
        # Autograd requires a separate tensor for each output.
        seen: set[int] = set()
        distinct = []
        for y in outputs:
            distinct.append(y.detach() if id(y) in seen else y)
            seen.add(id(y))
        return tuple(distinct)

    @staticmethod
    @one_break
    def backward(func_ctx: Any, *grads: Any) -> Any:
        call: Call = func_ctx.call
        saved = list(func_ctx.saved_tensors)

        def compute() -> tuple[Any, ...]:
            call.unpack(saved)
            saved.clear()  # a segment frees its tensors after their last step
            try:
                # The dtypes were chosen in the forward pass. Autocast around backward() must not
                # change them.
                if torch.is_autocast_enabled(call.device_type):
                    with torch.autocast(call.device_type, enabled=False):
                        results = call.backward(grads)
                else:
                    results = call.backward(grads)
            finally:
                for ctx in call.ctxs:
                    ctx.saved_tensors = ()
                for i in call.computed:
                    call.ctxs[i]._computed = None
            grad_input, extras, parameters = results
            return grad_input, *extras, *parameters

        if torch.is_grad_enabled():
            # The tensors that the gradients depend on. Saved inputs have their own history.
            nodes = [node for node, _ in func_ctx.next_functions]
            leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            watched = (*grads, *saved, *leaves, *call.stand_ins)
            return (None, *once(call.name(), compute, watched))
        if _saved.CLEARS:
            func_ctx.maybe_clear_saved_tensors()  # does nothing if the graph is kept
        return (None, *compute())


# Function.apply searches for torch.func tensors in Python, which takes 10% of a small call. Outside
# of torch.func transforms there are none. If torch lacks these private functions, `apply` is used.
_direct: Any = getattr(super(torch.autograd.Function, FuserFunction), "apply", None)
_transforming: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


def run(call: Call, input_: Any, *tensors: torch.Tensor) -> Any:
    """`FuserFunction.apply`."""
    if _direct is None or _transforming is None or _transforming():
        result = FuserFunction.apply(call, input_, *tensors)
    else:
        result = _direct(call, input_, *tensors)
    if call.stand_ins:  # for the inputs; created here, because autograd records here
        call.stand_ins = [stand_in(t) for t in call.stand_ins]
    return result
