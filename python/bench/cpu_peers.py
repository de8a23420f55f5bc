"""Element-wise work on the CPU: Tenon against PyTorch eager, torch.compile and XLA, in one process.

    python python/bench/cpu_peers.py [--dtype bf16] [--filter silu] [--peers eager compile xla]

Each line has the median of the rounds' ratios, the peer's time over Tenon's, with the interval that
holds 95 % of the medians of resampled rounds. Above 1 Tenon is faster. Results are new tensors, as
in a program. By default freed memory is kept, so that no side is charged for the first access to
new pages; --fresh leaves the allocator as it comes. The last lines are geometric means. It asserts
nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

# Otherwise torch's threads spin for 200 ms after a call, on the cores of the next side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tenon.torch.functional as F
import tenon.torch.ops as ops
import torch
import torch._functorch.config
import torch.nn.functional as nn

Call = Callable[[], Any]
P, EPS = 0.1, 1e-5
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return act(a) * b

    return call


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": nn.relu,
    "srelu": lambda x: nn.relu(x).square(),
    "leaky_relu": nn.leaky_relu,
    "silu": nn.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": lambda x: nn.gelu(x, approximate="tanh"),
    "gelu_erf": nn.gelu,
    "hardswish": nn.hardswish,
    "softplus": nn.softplus,
    "mish": nn.mish,
    "elu": nn.elu,
}
GATED = {
    "glu": UNARY["sigmoid"],
    "swiglu": UNARY["silu"],
    "geglu": UNARY["gelu"],
    "geglu_erf": UNARY["gelu_erf"],
    "reglu": UNARY["relu"],
    "qgeglu": UNARY["qgelu"],
    "sreglu": UNARY["srelu"],
}


def cases(dtype: torch.dtype, rows: int, cols: int, peers: list[str]) -> dict[str, dict[str, Call]]:
    """By case, then by side: the calls to time."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    found: dict[str, dict[str, Call]] = {}
    x, wide, grad, bias = (
        tensor(rows, cols),
        tensor(rows, 2 * cols),
        tensor(rows, cols),
        tensor(cols),
    )

    def sides(
        ours: Callable[..., Any], theirs: Callable[..., Any]
    ) -> dict[str, Callable[..., Any]]:
        made: dict[str, Callable[..., Any]] = {"tenon": ours}
        if "eager" in peers:
            made["eager"] = theirs
        if "compile" in peers:
            made["compile"] = torch.compile(theirs, dynamic=False)
        return made

    def forward(name: str, each: dict[str, Callable[..., Any]], *args: torch.Tensor) -> None:
        found[name] = {side: (lambda f=f: f(*args)) for side, f in each.items()}

    def backward(name: str, each: dict[str, Callable[..., Any]], *args: torch.Tensor) -> None:
        calls: dict[str, Call] = {}
        for side, f in each.items():
            inputs = [a.detach().requires_grad_() for a in args]
            with torch.enable_grad():
                y = f(*inputs)
            calls[side] = lambda y=y, inputs=inputs: torch.autograd.grad(
                y, inputs, grad, retain_graph=True
            )
        found[f"{name} bwd"] = calls

    for name, act in UNARY.items():
        each = sides(getattr(F, name), act)
        forward(name, each, x)
        backward(name, each, x)
    for name, act in GATED.items():
        each = sides(getattr(F, name), gated(act))
        forward(name, each, wide)
        backward(name, each, wide)
    added = sides(
        lambda x, b, r: F.bias_dropout_add(x, b, r, P, True),
        lambda x, b, r: r + nn.dropout(x + b, P, training=True),
    )
    forward("bias_dropout_add", added, x, bias, grad)
    shape = (cols,)
    for name, op, theirs in (
        ("rmsnorm", ops.RMSNorm(cols, eps=EPS, dtype=dtype), None),
        ("layernorm", ops.LayerNorm(cols, eps=EPS, dtype=dtype), None),
    ):
        weight = torch.nn.Parameter(torch.ones(cols, dtype=dtype))
        offset = torch.nn.Parameter(torch.zeros(cols, dtype=dtype))
        if name == "rmsnorm":
            theirs = lambda x, w=weight: nn.rms_norm(x, shape, w, EPS)  # noqa: E731
        else:
            theirs = lambda x, w=weight, b=offset: nn.layer_norm(x, shape, w, b, EPS)  # noqa: E731
        each = sides(op, theirs)
        forward(name, each, x)
        backward(name, each, x)
    if "xla" in peers:
        add_xla(found, x, wide)
    return found


def add_xla(found: dict[str, dict[str, Call]], x: torch.Tensor, wide: torch.Tensor) -> None:
    import jax
    import jax.numpy as jnp

    acts = {
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
        "gelu": jax.nn.gelu,
        "softplus": jax.nn.softplus,
        "mish": jax.nn.mish,
        "elu": jax.nn.elu,
    }
    jx, jw = (jnp.from_dlpack(t) for t in (x, wide))
    for name, act in acts.items():
        f = jax.jit(act)
        found[name]["xla"] = lambda f=f: f(jx).block_until_ready()
    for name, act in (("swiglu", jax.nn.silu), ("geglu", jax.nn.gelu), ("reglu", jax.nn.relu)):
        half = wide.shape[1] // 2
        g = jax.jit(lambda w, act=act, half=half: act(w[:, :half]) * w[:, half:])
        found[name]["xla"] = lambda g=g: g(jw).block_until_ready()


def seconds(call: Call) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def interval(ratios: list[float], draws: int = 400) -> tuple[float, float]:
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "f32"])
    parser.add_argument("--filter", nargs="*", default=[], help="cases with one of these words")
    parser.add_argument("--peers", nargs="+", default=["eager", "compile"])
    parser.add_argument("--fresh", action="store_true", help="new pages for every result")
    parser.add_argument("--json", help="write everything to this file")
    given = parser.parse_args()
    if not given.fresh:
        keep_memory()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    torch._functorch.config.donated_buffer = False  # a graph runs in every round
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{given.rows}x{given.cols}, {'new' if given.fresh else 'kept'} memory"
    )
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    results: list[dict[str, Any]] = []
    for dtype in given.dtype:
        for name, each in cases(dtypes[dtype], given.rows, given.cols, given.peers).items():
            if given.filter and not any(word in name for word in given.filter):
                continue
            for call in each.values():
                call()
                call()
            times: dict[str, list[float]] = {side: [] for side in each}
            for _ in range(given.rounds):
                for side in random.sample(list(each), len(each)):
                    times[side].append(seconds(each[side]))
            line = f"{name:24}{dtype:6}tenon {statistics.median(times['tenon']) * 1e3:8.2f} ms"
            for side in each:
                if side == "tenon":
                    continue
                ratios = [p / o for p, o in zip(times[side], times["tenon"], strict=True)]
                low, high = interval(ratios)
                median = statistics.median(ratios)
                line += f"  {side} {median:6.2f} [{low:.2f}, {high:.2f}]"
                results.append({"case": name, "dtype": dtype, "peer": side, "ratio": median})
            print(line, flush=True)
    for dtype in given.dtype:
        for peer in given.peers:
            logs = [
                math.log(r["ratio"]) for r in results if (r["dtype"], r["peer"]) == (dtype, peer)
            ]
            if logs:
                print(f"geometric mean {dtype} {peer}: {math.exp(statistics.mean(logs)):.2f}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
