"""Training steps and inference of MLPs on the CPU: Tenon, PyTorch eager and torch.compile.

    python python/bench/mlp.py [--threads 2] [--dtype f32 bf16] [--models swiglu256 ...] [--fresh]
                               [--products]

All sides run in one process, in random order in every round. Each line has the median of the
rounds' ratios with the interval that holds 95 % of the medians of resampled rounds: the time of
each peer over that of Tenon (above 1 Tenon is faster), and the time of Tenon over the bound
1.03 x products + 1.2 x element-wise bytes at the speed of a copy (below 1 Tenon meets it). Each
product alone is timed with Tenon, torch.mm and oneDNN, and the best of the three counts. Bytes are
those of one pass for each element-wise op and norm. By default freed memory is kept; --fresh leaves
the allocator as it comes. --products also prints the speed of each product. It asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

# First: it sets OMP_WAIT_POLICY, which torch reads when it is loaded.
from cpu_peers import interval, keep_memory, seconds  # isort: skip

import tenon
import tenon.torch.ops as te
import torch
import torch.nn.functional as nn

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
Call = Callable[[], Any]


class Gated(torch.nn.Module):
    """Both halves in one product, as in Tenon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 8 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = self.up(x).chunk(2, dim=-1)
        return self.down(nn.silu(gate) * linear)


class Block(torch.nn.Module):
    """A norm, a gated MLP and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(width, eps=EPS), Gated(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def gelu(width: int) -> torch.nn.Module:
    up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(up, torch.nn.GELU(approximate="tanh"), down)


def fused_gated(width: int) -> list[Any]:
    up = te.Linear(width, 8 * width, bias=False)
    return [up, te.SwiGLU(), te.Linear(4 * width, width, bias=False)]


def fused_gelu(width: int) -> torch.nn.Module:
    return te.Sequential(te.Linear(width, 4 * width), te.GELU(), te.Linear(4 * width, width))


def fused_block(width: int) -> torch.nn.Module:
    residual, added = te.MakeExtraOutput(), te.AddExtraInput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    added.set_extra_input_channel(0, "residual")
    return te.Sequential(residual, te.RMSNorm(width, eps=EPS), *fused_gated(width), added)


class Model(NamedTuple):
    ours: Callable[[int], torch.nn.Module]
    theirs: Callable[[int], torch.nn.Module]
    width: int
    up: int  # columns of the first product, in widths
    # Values that element-wise ops and norms read and write per row, in widths: forward and
    # backward. A sum over rows of what another op reads is part of that op.
    moved: tuple[int, int]


MODELS = {
    "swiglu256": Model(lambda w: te.Sequential(*fused_gated(w)), Gated, 256, 8, (12, 20)),
    "swiglu1024": Model(lambda w: te.Sequential(*fused_gated(w)), Gated, 1024, 8, (12, 20)),
    "gelu768": Model(fused_gelu, gelu, 768, 4, (8, 13)),
    "block512": Model(fused_block, Block, 512, 8, (17, 26)),
}


def products(model: Model, rows: int, backward: bool) -> list[tuple[str, int, int, int]]:
    """Kind, rows, output columns and input columns of each linear's products."""
    kinds = ("forward", "dgrad", "wgrad") if backward else ("forward",)
    linears = (model.up * model.width, model.width), (model.width, 4 * model.width)
    return [(kind, rows, out, inner) for kind in kinds for out, inner in linears]


def product_calls(
    kind: str, rows: int, out: int, inner: int, dtype: torch.dtype
) -> dict[str, Call]:
    """The product of a linear alone, by library."""
    x, dy = torch.randn(rows, inner).to(dtype), torch.randn(rows, out).to(dtype)
    weight = (torch.randn(out, inner) / inner**0.5).to(dtype)
    name = next(n for n, d in DTYPES.items() if d == dtype)
    plan = tenon.plan(
        f"linear({inner},{out})",
        dtype=name,
        backward=kind != "forward",
        input_grad=kind == "dgrad",
        parameter_grads=[kind == "wgrad"],
    )
    results = {"y": dy, "dx": torch.empty_like(x), "dlinear0.weight": torch.empty_like(weight)}
    tensors = {"x": x, "dy": dy, "linear0.weight": weight} | results
    if kind == "forward":
        tensors["y"] = torch.empty_like(dy)
        a, b, c = x, weight.t(), torch.empty_like(dy)
    elif kind == "dgrad":
        a, b, c = dy, weight, torch.empty_like(x)
    else:
        a, b, c = dy.t(), x, torch.empty_like(weight)
    memory = (ctypes.c_void_p * len(plan.buffers))(
        *[tensors[buffer.name].data_ptr() for buffer in plan.buffers]
    )
    workspace = torch.empty(max(plan.sizes(rows)[1], 1), dtype=torch.uint8)

    def ours(kept: Any = tensors) -> None:
        plan.run(int(kind != "forward"), rows, memory, workspace.data_ptr())

    calls: dict[str, Call] = {"tenon": ours, "mm": lambda: torch.mm(a, b, out=c)}
    if dtype == torch.float32:  # torch.mm itself uses oneDNN for bf16
        linear = torch.ops.mkldnn._linear_pointwise
        calls["onednn"] = lambda: linear(a, b.t(), None, "none", [], "")
    return calls


class Copy:
    """Bytes per second of a copy by all threads: the better of memmove's and torch's."""

    def __init__(self, threads: int, size: int = 1 << 27) -> None:
        self.a, self.b = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
        self.pool, self.part = ThreadPoolExecutor(threads), size // threads
        self.size, self.threads = size, threads

    def move(self) -> None:
        def part(i: int) -> None:
            at = i * self.part
            ctypes.memmove(self.b.data_ptr() + at, self.a.data_ptr() + at, self.part)

        list(self.pool.map(part, range(self.threads)))

    def speed(self) -> float:
        return 2 * self.size / min(seconds(self.move), seconds(lambda: self.b.copy_(self.a)))


def step_of(
    module: Callable[..., Any], x: torch.Tensor, dy: torch.Tensor, params: list[torch.Tensor]
) -> Call:
    def step() -> None:
        module(x).backward(dy)
        for p in (x, *params):
            p.grad = None

    return step


def inference_of(module: Callable[..., Any], x: torch.Tensor) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return module(x)

    return call


def sides_of(model: Model, rows: int, dtype: torch.dtype, backward: bool, peers: list[str]) -> Any:
    ours, theirs = (make(model.width).to(dtype) for make in (model.ours, model.theirs))
    params = [p for p in ours.parameters() if p.numel()]
    with torch.no_grad():
        for p, q in zip(params, theirs.parameters(), strict=True):
            q.copy_(p)
    x = torch.randn(rows, model.width).to(dtype).requires_grad_(backward)
    dy = torch.randn(rows, model.width).to(dtype)
    with torch.no_grad():
        gap = (ours(x).float() - theirs(x).float()).norm() / theirs(x).float().norm()
    if gap > (1e-5 if dtype == torch.float32 else 2e-2):
        raise SystemExit(f"the results of the models differ by {gap:.1e}")
    modules: dict[str, Any] = {"tenon": ours}
    if "eager" in peers:
        modules["eager"] = theirs
    if "compile" in peers:
        modules["compile"] = torch.compile(theirs, dynamic=False)
    if not backward:
        return {name: inference_of(m, x) for name, m in modules.items()}
    return {
        name: step_of(m, x, dy, list((ours if name == "tenon" else theirs).parameters()))
        for name, m in modules.items()
    }


def told(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):5.2f} [{low:.2f}, {high:.2f}]"


def measure(name: str, model: Model, dtype: str, backward: bool, given: Any, copy: Copy) -> None:
    kind, rows = DTYPES[dtype], given.rows
    sides = sides_of(model, rows, kind, backward, given.peers)
    alone = (
        [] if given.no_bound else [product_calls(*p, kind) for p in products(model, rows, backward)]
    )
    calls = list(sides.items()) + [((i, k), c) for i, p in enumerate(alone) for k, c in p.items()]
    times: dict[Any, list[float]] = {key: [] for key, _ in calls}
    copies: list[float] = []
    for _, call in calls:
        call()
        call()
    for _ in range(given.rounds):
        for key, call in random.sample(calls, len(calls)):
            times[key].append(seconds(call))
        copies.append(copy.speed())
    mine = times["tenon"]
    line = f"{name:11}{dtype:5}{'step' if backward else 'no_grad':8}"
    line += f"tenon {statistics.median(mine) * 1e3:8.2f} ms"
    for side in list(sides)[1:]:
        ratios = [t / o for t, o in zip(times[side], mine, strict=True)]
        line += f"  {side} {told(ratios)}"
    if alone:
        best = [min(p, key=lambda k: statistics.median(times[i, k])) for i, p in enumerate(alone)]
        sums = [sum(times[i, k][r] for i, k in enumerate(best)) for r in range(given.rounds)]
        moved = rows * model.width * kind.itemsize * sum(model.moved[: 1 + backward])
        bounds = [1.03 * s + 1.2 * moved / c for s, c in zip(sums, copies, strict=True)]
        line += f"  bound {told([o / b for o, b in zip(mine, bounds, strict=True)])}"
        products_ms, copy_ms = (
            statistics.median(sums) * 1e3,
            moved / statistics.median(copies) * 1e3,
        )
        line += f"  products {products_ms:.2f} ms ({' '.join(best)})  bytes {copy_ms:.2f} ms"
    print(line, flush=True)
    for i, (part, *sizes) in enumerate(products(model, rows, backward) if given.products else ()):
        flops = 2e-9 * math.prod(sizes)
        speeds = "  ".join(f"{k} {flops / statistics.median(times[i, k]):.0f}" for k in alone[i])
        print(f"  {part:8}{'x'.join(map(str, sizes)):16}GFLOP/s  {speeds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--modes", nargs="+", default=["step", "no_grad"])
    parser.add_argument("--peers", nargs="*", default=["eager", "compile"])
    parser.add_argument("--products", action="store_true", help="the speed of each product")
    parser.add_argument("--no-bound", action="store_true", help="without products and copies")
    parser.add_argument("--fresh", action="store_true", help="torch's allocator as it comes")
    given = parser.parse_args()
    if given.products and given.no_bound:
        parser.error("--products prints what --no-bound leaves out; give one of them")
    if not given.fresh:
        keep_memory()
    torch.set_num_threads(given.threads)
    tenon.set_threads(given.threads)
    torch.manual_seed(1)
    copy = Copy(given.threads)
    print(
        f"torch {torch.__version__}, {given.threads} threads, {given.rows} rows, "
        f"{'new' if given.fresh else 'kept'} memory, copy {copy.speed() / 1e9:.1f} GB/s"
    )
    for dtype in given.dtype:
        for name in given.models:
            for mode in given.modes:
                measure(name, MODELS[name], dtype, mode == "step", given, copy)


if __name__ == "__main__":
    main()
