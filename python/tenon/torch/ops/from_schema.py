"""Creates a class for every op of the registry that has none. Each runs as a plan of one op."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..._ops import Op, OpArgument
from ..._ops import ops as registry
from ..._plan import Plan
from .. import _call, _cuda
from . import _kernels, basic
from ._routes import ANY, Routes
from .op import (
    BackwardResult,
    BasicOperation,
    ExtraOutputs,
    Gradient,
    OperationContext,
    check_number,
    check_size,
    with_numbers,
)
from .segment import Segment

if TYPE_CHECKING:
    from ..quantizer import Quantizer

# These use torch process groups. A plan runs in one process.
_OF_GROUPS = ("all_gather", "all_reduce", "reduce_scatter")


class SchemaOperation(BasicOperation):
    """An op defined by its schema. A plan of this op runs both passes."""

    schema: Op
    has_modes = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        name = type(self).__name__
        try:
            bound = _signature(self.schema).bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{name}: {e}; it takes {_signature(self.schema)}") from None
        given = bound.arguments
        device, dtype = given.pop("device", None), given.pop("dtype", None)
        self.arguments: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        for a in self.schema.arguments:
            if a.name in self.arguments:
                _check(name, a, self.arguments[a.name])
        for p, shape in zip(self.schema.parameters, self._shapes(), strict=True):
            made = torch.empty(shape, device=device, dtype=dtype)
            if made.dtype not in _call.PLAIN:
                raise TypeError(
                    f"{name}: dtype={made.dtype}; it must be float32, float16 or bfloat16"
                )
            self.register_parameter(p.name, torch.nn.Parameter(made))
        self.reset_parameters()

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters: 1-D unless an argument sets the number of rows."""
        cols = self.plan_width() or 0
        rows = [None if p.rows is None else self.arguments[p.rows] for p in self.schema.parameters]
        return [(cols,) if n is None else (n, cols) for n in rows]

    def reset_parameters(self) -> None:
        """Sets the initial values from a plan of the op."""
        width = self.plan_width()
        if not self.schema.parameters or width is None:
            return
        buffers = [b for b in _plan(self._text(), width).buffers if b.role == "param"]
        for p, b in zip(self.schema.parameters, buffers, strict=True):
            torch.nn.init.uniform_(getattr(self, p.name), *b.initial)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())

    def _text(self) -> str:
        """The text of the op with its arguments in a chain."""
        given = ",".join(f"{name}={_written(value)}" for name, value in self.arguments.items())
        return f"{self.schema.name}({given})"

    def plan_text(self) -> str:
        return self._text()

    def plan_cols(self, cols: int) -> int:
        try:
            return _output(_plan(self._text(), cols)).cols
        except ValueError:  # invalid input; forward reports the error
            return 0

    def plan_width(self) -> int | None:
        found = (self.arguments.get(a.name) for a in self.schema.arguments if a.kind == "columns")
        return next(found, None)

    def plan_lead(self, lead: Sequence[int], cols: int) -> Sequence[int] | None:
        rows = _output(_plan(self._text(), cols)).rows
        if rows == (1, 1, 1, 0):
            return lead
        count = 1
        for n in lead:
            count *= n
        mul, div, _, _ = rows
        return None if count * mul % div else (count * mul // div,)

    def extra_fits(self, slot: int, shape: Sequence[int], lead: Sequence[int], cols: int) -> bool:
        wanted = {"tensor": (*lead, cols), "column": (*lead, 1), "scalar": (1,)}
        kind = self.schema.extra_inputs[slot].kind
        if kind == "tensor":
            return tuple(shape) == wanted[kind]
        return torch.Size(shape).numel() == torch.Size(wanted[kind]).numel()

    # The plan of this op only.
    _own_plan: Segment | None = None

    def _segment(self) -> Segment:
        found = self._own_plan
        if found is None:
            found = Segment([self], 0, Routes([self], ANY, ANY))
            self.__dict__["_own_plan"] = found  # not a submodule: this op is a submodule of it
        return found

    def _given(self, ctx: OperationContext, x: torch.Tensor) -> list[torch.Tensor]:
        """The parameters for a plan: contiguous, on the device of x, of one dtype."""
        name = type(self).__name__
        found: list[torch.Tensor] = []
        for p, shape in zip(self.schema.parameters, self._shapes(), strict=True):
            t = with_numbers(name, p.name, self.parameter(ctx, p.name))
            told = f"{name}: {p.name}"
            if t.dtype not in _call.PLAIN:
                raise _call.refusal(t, told)
            _cuda.same(f"{name}: the input", x, told, t)
            if t.shape != shape:
                raise ValueError(f"{told} is {tuple(t.shape)}; it must be {shape}")
            plain = _call.contiguous(t.detach().to(found[0].dtype if found else t.dtype))
            found.append(plain.requires_grad_(t.requires_grad))
        return found

    def _run_forward(
        self, ctx: OperationContext, input_: Any, extras: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """(output, extra outputs). Raises an error for invalid operands."""
        name = type(self).__name__
        dtype = _kernels.compute_dtype(name, input_, *extras)
        x = _kernels.plain(input_, dtype)
        for what, t in [("the input", x), *((f"extra input {i}", t) for i, t in enumerate(extras))]:
            if not _call.dense(t):
                raise _call.refusal(t, f"{name}: {what}")
            _cuda.same(f"{name}: the input", x, f"{name}: {what}", t)
        if not x.dim():
            raise ValueError(f"{name}: the input has no dimensions; it must have columns")
        lead, cols = x.shape[:-1], x.shape[-1]
        plan = _plan(self._text(), cols)  # raises an error for an invalid number of columns
        for i, t in enumerate(extras):
            if not self.extra_fits(i, t.shape, lead, cols):
                raise ValueError(
                    f"{name}: the input is {tuple(x.shape)}, extra input {i} is {tuple(t.shape)}; "
                    f"it must be {_KINDS[self.schema.extra_inputs[i].kind]}"
                )
        plan.sizes(lead.numel())  # raises an error for an invalid number of rows
        params = self._given(ctx, x)
        ctx.dtypes = [self.parameter(ctx, p.name).dtype for p in self.schema.parameters]
        ctx.extra_dtypes = [t.dtype for t in extras]
        if not x.numel():
            shape = (*(self.plan_lead(lead, cols) or ()), self.plan_cols(cols))
            ctx.empty = x.shape, x.dtype, [p.shape for p in params], [t.shape for t in extras]
            outputs = [torch.empty_like(x) for _ in range(self.num_extra_outputs)]
            return x.new_empty(shape), outputs
        plain = [_kernels.plain(t.detach(), dtype).requires_grad_(t.requires_grad) for t in extras]
        wanted = [ctx.requires_grad and t.requires_grad for t in plain]
        input_grad = ctx.requires_grad and ctx.input_requires_grad
        with torch.autocast("cpu" if x.is_cpu else "cuda", enabled=False):
            segment = self._segment()
            ready = segment.find(x, params, plain, ctx.requires_grad, input_grad, wanted)
            assert not isinstance(ready, list), "a plan has every op of the registry"
            y, made, saved, run = segment.forward_pass(ready, x, params, plain, ctx.requires_grad)
        if run is not None:
            ctx.save_for_backward(*saved)
            ctx.run = run
        return y, made

    def _run_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor, grads: Sequence[Any]
    ) -> tuple[Gradient, Sequence[Gradient], Sequence[Gradient]]:
        """The gradients of the input, of the parameters and of the extra inputs."""
        empty = getattr(ctx, "empty", None)
        if empty is not None:
            shape, dtype, *others = empty
            zeros = [[torch.zeros(s, device=grad_output.device) for s in each] for each in others]
            return (
                torch.zeros(shape, dtype=dtype, device=grad_output.device),
                _cast(zeros[0], ctx.dtypes),
                _cast(zeros[1], ctx.extra_dtypes),
            )
        if not hasattr(ctx, "run"):
            raise RuntimeError(
                f"{type(self).__name__}: its plan did not run forward; a fusion that covers it "
                "must run its op_forward, or define fuser_backward too"
            )
        dx, params, extras = self._segment().backward_pass(
            ctx.run, list(ctx.saved_tensors), grad_output, tuple(grads)
        )
        return dx, _cast(params, ctx.dtypes), _cast(extras, ctx.extra_dtypes)


class _Plain(SchemaOperation):
    """An op without extra tensors."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        y, _ = self._run_forward(ctx, input_, ())
        return _kernels.encode(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[Gradient, Sequence[Gradient]]:
        dx, params, _ = self._run_backward(ctx, grad_output, ())
        if dx is not None:
            dx = _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
        return dx, params


class _WithExtras(SchemaOperation):
    """An op with extra inputs or outputs."""

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
        ctx = basic_op_ctxs[0]
        ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        y, made = self._run_forward(ctx, input_, basic_op_extra_inputs[0])
        return _kernels.encode(y, next_op_input_quantizer), [made]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        dx, params, extras = self._run_backward(ctx, grad_output, basic_op_grad_extra_outputs[0])
        if dx is not None:
            dx = _kernels.encode(dx, ctx.prev_op_grad_output_quantizer)
        return dx, [params], [extras]


_KINDS = {"tensor": "of the same shape", "column": "one number a row", "scalar": "one number"}


@lru_cache(maxsize=1024)
def _plan(text: str, cols: int) -> Plan:
    """A plan of one op. It provides the shapes and initial values of parameters."""
    return Plan(text, cols=cols, backward=False)


def _output(plan: Plan) -> Any:
    return next(b for b in plan.buffers if b.role == "output")


def _cast(grads: Iterable[Any], dtypes: Iterable[torch.dtype]) -> list[Gradient]:
    found = zip(grads, dtypes, strict=True)
    return [None if g is None else _kernels.plain(g, dtype) for g, dtype in found]


def _check(name: str, a: OpArgument, value: Any) -> None:
    """Raises an error for a value of another kind. The plan checks its range."""
    if a.kind in ("columns", "count"):
        check_size(name, a.name, value)
    elif a.kind == "number":
        check_number(name, a.name, value)
    elif a.kind == "flag" and not isinstance(value, bool):
        raise TypeError(f"{name}: {a.name}={value!r}; it must be True or False")
    elif a.kind == "text" and not isinstance(value, str):
        raise TypeError(f"{name}: {a.name}={value!r}; it must be a text")


def _written(value: Any) -> str:
    """The text of a value in a chain."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(int(value) if isinstance(value, int) else float(value))


@cache
def _signature(schema: Op) -> inspect.Signature:
    """The arguments in order, then device and dtype of the parameters as keywords."""
    made = []
    for a in schema.arguments:
        # A module creates its parameters before it sees an input.
        required = a.required or (a.kind == "columns" and bool(schema.parameters))
        default = inspect.Parameter.empty if required else a.value
        if a.kind == "flag" and not required:
            default = bool(a.value)
        made.append(
            inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        )
    if schema.parameters:
        for name in ("device", "dtype"):
            made.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature(made)


def class_of(schema: Op, name: str | None = None) -> type[SchemaOperation]:
    """Creates the class of an op. Its name is `name`, or the op's name in CamelCase."""
    base = _WithExtras if schema.extra_inputs or schema.extra_outputs else _Plain
    made = type(
        name or "".join(part.capitalize() for part in schema.name.split("_")),
        (base,),
        {
            "__doc__": f"{schema.summary}\n\nA plan of this op alone runs both passes.",
            "__module__": __name__,
            "__signature__": _signature(schema),
            "schema": schema,
            "op_name": schema.name,
            "parameter_names": tuple(p.name for p in schema.parameters),
            "num_extra_inputs": len(schema.extra_inputs),
            "num_extra_outputs": schema.extra_outputs,
            "channels_inside": all(e.kind == "tensor" for e in schema.extra_inputs),
        },
    )
    return made


def _missing() -> list[Op]:
    """The ops of the registry that have no class in this package."""
    own = {getattr(getattr(basic, name), "op_name", None) for name in basic.__all__}
    return [op for op in registry() if op.name not in own and op.name not in _OF_GROUPS]


__all__: list[str] = []
for _made in map(class_of, _missing()):
    globals()[_made.__name__] = _made
    __all__ += [_made.__name__]
