"""Explains the steps of a module of operations, as text and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._html import Text, pre
from ..._plan import Encoding, Plan, frame
from .._context import autocast
from .._quantized import QuantizedTensor
from ..recipe import Recipe
from ._hooks import why_called
from .fuser import OperationFuser, Stage, stage_name
from .op import BasicOperation, FusibleOperation, basic_ops, changes
from .segment import Segment
from .sequential import Sequential

__all__ = ["explain", "page"]

_ROWS = 256  # rows in descriptions if no input is given
Shape = Sequence[int] | None


def explain(
    module: torch.nn.Module,
    input: torch.Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> str:
    """The forward and backward steps of `module`: the ops that each fuses, and what it runs.

    For a segment, the passes of its plan with their bytes and the saved tensors are listed. Nothing
    is computed. `input` provides shape, dtype and device, and whether the gradient of the input is
    needed. Without `input` it is not needed. With `recipe` it is as under that recipe. The numbers
    of a step are indices of basic ops in its sequence of operations.
    """
    whole = getattr(module, "_explained_as", None)  # modules of tenon.torch
    if whole is not None:
        module = whole()
    if recipe is not None:
        with autocast(recipe=recipe, update="manual"):
            return explain(module, input)
    if isinstance(module, Sequential):
        groups = module.groups()
    elif isinstance(module, FusibleOperation):
        groups = [(module, [0])]
    else:
        raise TypeError(
            f"explain: {type(module).__name__} is neither a tenon.torch.ops.Sequential nor an "
            "operation; give it one of its parts"
        )
    encoding = None
    if isinstance(input, QuantizedTensor) and input.is_matrix:
        encoding = input.plan_encoding()
    elif input is not None and not isinstance(input, torch.Tensor):
        raise TypeError(f"explain: input is a {type(input).__name__}; it must be a torch.Tensor")
    tensor: Any = input
    wanted = tensor is not None and tensor.requires_grad
    dtype = None if tensor is None else tensor.dtype
    shape: Shape = None if tensor is None else tensor.shape
    on_cpu = _on_cpu(module) if tensor is None else tensor.is_cpu
    lines: list[str] = []
    if encoding is None and tensor is not None and not tensor.is_contiguous():
        lines.append("copy: the input is strided, and plans read contiguous tensors")
    for part, indices in groups:
        where = f"{indices[0]}" if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        called = part if isinstance(part, FusibleOperation) else None
        if called is not None:
            part = called._alone()
        if not isinstance(part, OperationFuser):
            lines.append(f"module {where}: {type(part).__name__}, by itself")
            wanted = wanted or any(p.requires_grad for p in part.parameters())
            shape = None
            continue
        first, count = _first(part, wanted), part._num_basic_ops
        node = "one node of autograd" if first < count else "no gradient"
        why = called is not None and why_called(called)
        lines.append(f"modules {where}: {node}" + (f", called by itself: {why}" if why else ""))
        planned = _planned(part, shape, dtype, on_cpu, first, wanted, encoding)
        encoding = None
        for stage, plan, rows, behind in planned:
            if isinstance(plan, str):
                lines.append(f"  cut      {stage_name(stage)}: {plan}")
                continue
            if plan is not None:
                lines.append(_line("plan    ", stage))
                assert isinstance(stage.op, Segment)
                for name in stage.op.strided():
                    lines.append(f"    copy: {name} is strided, and plans read contiguous tensors")
                told = plan.describe(rows).rstrip().split("\n")
                lines += [("    " + line).rstrip() for line in told]
            else:
                lines.append(_line("forward ", stage))
            shape = behind
        _, backward = part.plan()
        lines += [
            _line("backward", stage)
            for stage in reversed(backward)
            if stage.stop > first and not isinstance(stage.op, Segment)
        ]
        wanted = wanted or first < count
    return Text("\n".join(lines))


def page(module: torch.nn.Module) -> str:
    """HTML for notebooks: the module, and the page of each of its plans."""
    ops = [op for op in module.modules() if isinstance(op, BasicOperation)]
    locked = [op._channels_locked for op in ops]
    try:
        shown = [pre(repr(module))]
        # Uses temporary objects, so that displaying a module does not change it.
        parts = list(module) if isinstance(module, Sequential) else [module]
        for part, _ in Sequential.of_parts(parts).groups():
            if isinstance(part, OperationFuser):
                first = _first(part, False)
                for _, plan, rows, _ in _planned(part, None, None, _on_cpu(part), first, False):
                    if isinstance(plan, Plan):
                        shown.append(frame(plan.html(rows)))
        return "".join(shown)
    except Exception:  # displaying a module must not raise an error
        return pre(object.__repr__(module))
    finally:
        for op, was in zip(ops, locked, strict=True):
            op._channels_locked = was


def _on_cpu(part: torch.nn.Module | OperationFuser) -> bool:
    """Whether calls run on the CPU if no input is given."""
    found = part.parameters()[0] if isinstance(part, OperationFuser) else part.parameters()
    return not any(p.is_cuda for p in found)


def _first(part: OperationFuser, wanted: bool) -> int:
    """The index of the first basic op that has a backward pass."""
    _, counts, first, _, _ = part.parameters()
    return len(counts) if not torch.is_grad_enabled() else 0 if wanted else first


def _planned(
    part: OperationFuser,
    shape: Shape,
    dtype: torch.dtype | None,
    on_cpu: bool,
    first: int,
    input_grad: bool,
    encoding: Encoding | None = None,
) -> Iterator[tuple[Stage, Plan | str | None, int, Shape]]:
    """The forward stages, each with its plan, its rows, and its output shape if known.

    A segment that is cut comes with the reason in place of a plan, followed by its parts.
    """
    if dtype is None:
        dtype = next((p.dtype for p in part.parameters()[0]), torch.get_default_dtype())
    stages, bound = list(part.plan()[0]), part.tracker.bound(changes())
    while stages:
        stage = stages.pop(0)
        plan: Plan | None = None
        rows = _ROWS if shape is None else math.prod(shape[:-1])
        if isinstance(stage.op, Segment):
            cols = stage.op.width() if shape is None else shape[-1] if len(shape) else None
            if cols:
                wants_dx = stage.start > first or (stage.start == first and input_grad)
                given = encoding if stage.start == 0 else None
                found = stage.op.explain(
                    cols, dtype, on_cpu, stage.stop > first, wants_dx, given, bound
                )
                if isinstance(found, list):
                    stages = found + stages
                    yield stage, found.why, rows, shape
                    continue
                plan = found
        shape = _behind(stage, shape)
        yield stage, plan, rows, shape


def _behind(stage: Stage, shape: Shape) -> Shape:
    for op in basic_ops(stage.op):
        shape = None if shape is None else op.output_shape(shape)
    return shape


def _line(direction: str, stage: Stage) -> str:
    at = f"{stage.start}" if stage.stop == stage.start + 1 else f"{stage.start}-{stage.stop - 1}"
    note: Any = getattr(stage.op, "note", None)
    return f"  {direction} {at:>5}  {stage_name(stage)}" + (f": {note}" if note else "")
