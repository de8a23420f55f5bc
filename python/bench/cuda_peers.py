"""Peers of `tenon bench --device cuda`: PyTorch eager, torch.compile and Transformer Engine.

Run it with `python python/bench/cuda_peers.py` on a machine with a GPU. Transformer Engine is
optional. A CUDA graph replays each call over rotating buffers, all calls in random order. It
prints medians and asserts nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as nn

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], Any]
EPS = 1e-5
P = 0.1
LEAST_LAUNCHES = 6


@dataclass
class Op:
    """A measured op: bytes read and written per element of M x K, and the eager formula."""

    name: str
    mix: str
    bytes: int
    call: Call
    te: str = ""  # name in the extension of Transformer Engine


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.chunk(2, -1)
    return a, b


def swiglu(t: Tensors) -> torch.Tensor:
    a, b = halves(t["wide"])
    return nn.silu(a) * b


def dswiglu(t: Tensors) -> torch.Tensor:
    a, b = halves(t["wide"])
    g = t["grad"]
    da = torch.ops.aten.silu_backward(g * b, a)
    return torch.cat((da, g * nn.silu(a)), -1)


OPS = [
    Op("copy", "2:2", 4, lambda t: t["y"].copy_(t["x"])),
    Op("gelu fwd", "2:2", 4, lambda t: nn.gelu(t["x"], approximate="tanh"), "gelu"),
    Op("silu fwd", "2:2", 4, lambda t: nn.silu(t["x"]), "silu"),
    Op("swiglu fwd", "4:2", 6, swiglu, "swiglu"),
    Op(
        "gelu bwd",
        "4:2",
        6,
        lambda t: torch.ops.aten.gelu_backward(t["grad"], t["x"], approximate="tanh"),
        "dgelu",
    ),
    Op("swiglu bwd", "6:4", 10, dswiglu, "dswiglu"),
    Op(
        "bias_dropout_add fwd",
        "4:2",
        6,
        lambda t: t["grad"] + nn.dropout(t["x"] + t["bias"], P, training=True),
    ),
    Op(
        "rmsnorm fwd",
        "2:2",
        4,
        lambda t: nn.rms_norm(t["x"], (t["x"].shape[-1],), t["bias"], EPS),
    ),
]


@dataclass
class Timed:
    op: Op
    peer: str
    graph: torch.cuda.CUDAGraph
    launches: int
    times: list[float] = field(default_factory=list)


def te_call(op: Op, cols: int) -> Call | None:
    """The kernel of Transformer Engine for the op, or None."""
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        tex = importlib.import_module("transformer_engine_torch")
    except Exception:  # a broken install counts as missing
        return None
    if op.name == "rmsnorm fwd":
        module = te.RMSNorm(cols, eps=EPS, params_dtype=torch.bfloat16, device="cuda")
        return lambda t: module(t["x"])
    kernel = getattr(tex, op.te, None) if op.te else None
    if kernel is None:
        return None
    source = "wide" if "swiglu" in op.name else "x"
    if op.name.endswith("bwd"):
        return lambda t: kernel(t["grad"], t[source], None)
    return lambda t: kernel(t[source], None)


def calls(op: Op, cols: int, peers: list[str]) -> Iterator[tuple[str, Call]]:
    if "eager" in peers or op.name == "copy":
        yield "eager", op.call
    if op.name == "copy":
        return
    if "compile" in peers:
        yield "compile", torch.compile(op.call, mode="max-autotune-no-cudagraphs", dynamic=False)
    if "te" in peers and (call := te_call(op, cols)):
        yield "te", call


def make_set(rows: int, cols: int) -> Tensors:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return {
        "wide": normal(rows, 2 * cols),
        "x": normal(rows, cols),
        "grad": normal(rows, cols),
        "y": torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16),
        "bias": normal(cols),
    }


def captured(op: Op, peer: str, call: Call, sets: list[Tensors]) -> Timed:
    launches = max(1, -(-LEAST_LAUNCHES // len(sets))) * len(sets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for t in sets:
            call(t)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        # A result is held until the next launch of its set, so that no result reuses memory in L2.
        held: list[Any] = [None] * len(sets)
        for i in range(launches):
            held[i % len(sets)] = call(sets[i % len(sets)])
        del held
    return Timed(op, peer, graph, launches)


def shoot(timed: list[Timed], keep: bool) -> None:
    order = random.sample(timed, len(timed))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
    marks[0].record()
    for i, t in enumerate(order):
        t.graph.replay()
        marks[i + 1].record()
    torch.cuda.synchronize()
    for i, t in enumerate(order):
        if keep:
            t.times.append(1e3 * marks[i].elapsed_time(marks[i + 1]) / t.launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--shots", type=int, default=11)
    parser.add_argument("--filter", default="", help="only ops whose name contains this")
    parser.add_argument("--peers", nargs="+", default=["eager", "compile", "te"])
    parser.add_argument("--json", help="write everything to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_peers: torch sees no GPU here; run it on a machine with one")
    torch.manual_seed(1)
    random.seed(1)
    elements = given.rows * given.cols
    count = max(3, -(-600_000_000 // (8 * elements)))
    sets = [make_set(given.rows, given.cols) for _ in range(count)]
    timed: list[Timed] = []
    for op in OPS:
        if op.name != "copy" and given.filter not in op.name:
            continue
        for peer, call in calls(op, given.cols, given.peers):
            try:
                timed.append(captured(op, peer, call, sets))
            except Exception as error:  # skip a failing peer and keep the others
                reason = (str(error).splitlines() or [""])[0]
                print(f"{op.name} {peer}: left out, {type(error).__name__}: {reason}")
    for shot in range(given.shots + 1):
        shoot(timed, keep=shot > 0)

    results: list[dict[str, Any]] = []
    copies = timed[0].times
    for t in timed:
        us = statistics.median(t.times)
        ratios = (c * t.op.bytes / 4 / own for c, own in zip(copies, t.times, strict=True))
        results.append(
            {
                "case": t.op.name,
                "peer": t.peer,
                "mix": t.op.mix,
                "us": us,
                "tbps": t.op.bytes * elements / us * 1e-6,
                "share_of_copy": statistics.median(ratios),
            }
        )
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {given.rows}x{given.cols} bf16")
    print(f"{'case':<24}{'peer':<10}{'mix':<8}{'us':>8}{'TB/s':>7}{'of copy':>9}")
    for r in results:
        print(
            f"{r['case']:<24}{r['peer']:<10}{r['mix']:<8}{r['us']:>8.1f}{r['tbps']:>7.2f}"
            f"{100 * r['share_of_copy']:>8.1f}%"
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(
                {"device": name, "torch": torch.__version__, "cases": results}, file, indent=1
            )


if __name__ == "__main__":
    main()
