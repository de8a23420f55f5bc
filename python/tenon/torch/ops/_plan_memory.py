"""The memory of a segment's plan that torch allocates, and the runs of its passes."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch

from ..._lib import DTYPES
from ..._plan import BACKWARD_LAST, FORWARD, Plan
from .. import _call, _cuda, _memory
from . import _kernels

__all__ = ["ALIGNED", "TYPES", "Layout", "PlanMemory"]

TYPES = {DTYPES[number]: dtype for dtype, number in _call.DTYPES.items()} | {"u64": torch.int64}
ALIGNED = 256  # bytes: the largest alignment that cuBLASLt distinguishes
_CALL_ALIGNED = 16  # bytes: the alignment of an aligned run
_MOST = 64  # cached row counts per plan
# A pass on CUDA with at least so many bytes runs step by step, so that buffers are freed early.
# Smaller passes are bound by the host.
_LARGE = 1 << 26


def _in_parts(size: int, on_cpu: bool) -> bool:
    """Whether a pass runs step by step. On the CPU, fresh pages cost more than memory in use."""
    return not on_cpu and size >= _LARGE


class _Step(NamedTuple):
    """What happens around one step of a pass that runs step by step."""

    # Buffers to allocate before it: number, bytes, and the saved buffer that it overwrites.
    begin: list[tuple[int, int, int | None]]
    gradients: list[int]  # gradients that it is the first to write
    end: list[int]  # buffers that no later step uses


class PlanMemory:
    """The buffers of a plan that torch allocates."""

    def __init__(self, plan: Plan, quantizer_state: set[int]) -> None:
        self.plan = plan
        self.array = ctypes.c_void_p * len(plan.buffers)
        self.saved: list[int] = []
        # By pass: codes of weights that only this pass uses, and workspace buffers.
        self.passing: tuple[list[int], list[int]] = ([], [])
        self.workspace: tuple[list[int], list[int]] = ([], [])
        for i, b in enumerate(plan.buffers):
            forward, backward = (first >= 0 for first, _ in b.steps)
            here = [p for p, used in enumerate((forward, backward)) if used]
            if b.role == "saved" or (b.role == "state" and forward and backward):
                if i not in quantizer_state:
                    self.saved.append(i)
            elif b.role == "state" and i not in quantizer_state:
                for p in here:
                    self.passing[p].append(i)
            elif b.role == "workspace":
                for p in here:
                    self.workspace[p].append(i)
        self._layouts: dict[int, Layout] = {}

    def layout(self, rows: int, on_cpu: bool) -> Layout:
        """The memory of a call with `rows` rows."""
        known = self._layouts.get(rows)
        if known is None:
            if len(self._layouts) >= _MOST:
                self._layouts.clear()
            known = self._layouts[rows] = Layout(self, rows, on_cpu)
        return known


class Layout:
    """The memory of the calls with one number of rows."""

    def __init__(self, memory: PlanMemory, rows: int, on_cpu: bool) -> None:
        self._memory, self._rows, self._on_cpu = memory, rows, on_cpu
        plan = memory.plan
        self._sizes, _ = plan.sizes(rows)
        # Without the workspace of kernels: running in parts does not make it smaller.
        passes = zip(memory.passing, memory.workspace, strict=True)
        most = max([sum([self._sizes[i] for i in (*own, *shared)]) for own, shared in passes])
        self.separate = _in_parts(sum([self._sizes[i] for i in memory.saved]) + most, on_cpu)
        # Saved buffers, in one tensor per dtype or in one each: buffer, tensor, byte.
        self.places: list[tuple[int, int, int]] = []
        self.blocks: list[tuple[int, torch.dtype]] = []
        ends: dict[torch.dtype, int] = {}
        for i in memory.saved:
            dtype = TYPES[plan.buffers[i].dtype]
            if self.separate:
                self.places.append((i, len(self.blocks), 0))
                self.blocks.append((self._sizes[i] // dtype.itemsize, dtype))
                continue
            begin = -(-ends.setdefault(dtype, 0) // ALIGNED) * ALIGNED
            self.places.append((i, list(ends).index(dtype), begin))
            ends[dtype] = begin + self._sizes[i]
        self.blocks += [(end // dtype.itemsize, dtype) for dtype, end in ends.items()]
        # Codes of weights, in one tensor per pass: buffer, byte.
        self._passing: list[list[tuple[int, int]]] = [[], []]
        self._passing_bytes = [0, 0]
        for p, group in enumerate(memory.passing):
            for i in group:
                self._passing[p].append((i, self._passing_bytes[p]))
                self._passing_bytes[p] += -(-self._sizes[i] // ALIGNED) * ALIGNED
        self._workspace: dict[tuple[int, bool], int] = {}
        self._steps: dict[int, list[_Step]] = {}

    def saved_tensors(self, device: torch.device) -> list[torch.Tensor]:
        if self._on_cpu:
            return [_memory.saved(size, dtype) for size, dtype in self.blocks]
        return [torch.empty(size, dtype=dtype, device=device) for size, dtype in self.blocks]

    def run(
        self,
        pass_: int,
        memory: list[int],
        like: torch.Tensor,
        held: dict[int, torch.Tensor],
        gradient: Callable[[int], None] | None = None,
        encoded: list[bool] | None = None,
    ) -> None:
        """Runs one pass on the addresses of all buffers. 0: not used, or allocated here.

        `held` has the only references to tensors that this pass may free after their last step.
        `gradient` allocates a gradient and enters its address in `memory`. `encoded`: by pass,
        whether it finds its codes of weights.
        """
        unchanged = encoded is not None and encoded[int(pass_ != FORWARD)]
        # On CUDA, calls with unaligned addresses take slower kernels with more workspace.
        aligned = not self._on_cpu and reduce(operator.or_, memory) % _CALL_ALIGNED == 0
        plan, rows = self._memory.plan, self._rows
        size = self._workspace.get((pass_, aligned))
        if size is None:
            with _cuda.device_of(like):
                size = plan.workspace(pass_, rows, aligned=aligned, separate=self.separate)
            self._workspace[pass_, aligned] = size
        if not self.separate:
            p = int(pass_ != FORWARD)
            passing = None
            if self._passing_bytes[p]:
                passing = torch.empty(self._passing_bytes[p], dtype=torch.uint8, device=like.device)
                for i, begin in self._passing[p]:
                    memory[i] = passing.data_ptr() + begin
            array = self._memory.array(*memory)
            _kernels.run_plan(plan, pass_, rows, array, size, like, aligned, unchanged=unchanged)
            return
        workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
        own: dict[int, torch.Tensor] = {}
        for step, now in enumerate(self.steps(pass_)):
            for i, bytes_, over in now.begin:
                if over is None:
                    own[i] = torch.empty(bytes_, dtype=torch.uint8, device=like.device)
                    memory[i] = own[i].data_ptr()
                else:
                    memory[i] = memory[over]
            for i in now.gradients:
                if gradient is not None:
                    gradient(i)
            addresses = self._memory.array(*memory)
            _kernels.run_plan(
                *(plan, pass_, rows, addresses, size, like, aligned, step, workspace.data_ptr()),
                unchanged=unchanged,
            )
            for i in now.end:
                own.pop(i, None)
                held.pop(i, None)

    def steps(self, pass_: int) -> list[_Step]:
        """The steps of a pass, with the lifetimes of their buffers."""
        known = self._steps.get(pass_)
        if known is None:
            known = self._steps[pass_] = self._find_steps(pass_)
        return known

    def _find_steps(self, pass_: int) -> list[_Step]:
        memory, p = self._memory, int(pass_ != FORWARD)
        buffers = memory.plan.buffers
        steps = [_Step([], [], []) for _ in range(1 + max(b.steps[p][1] for b in buffers))]
        ends = {i: b.steps[p][1] for i, b in enumerate(buffers) if b.steps[p][1] >= 0}
        for i in (*memory.passing[p], *memory.workspace[p]):
            over = buffers[i].in_place if pass_ == BACKWARD_LAST else None
            steps[buffers[i].steps[p][0]].begin.append((i, self._sizes[i], over))
            if over is not None:
                ends[over] = ends.pop(i)
        for i, b in enumerate(buffers):
            if b.role == "grad" and b.steps[p][0] >= 0:
                steps[b.steps[p][0]].gradients.append(i)
        for i, end in ends.items():
            steps[end].end.append(i)
        return steps
