"""Element-wise work, casts and norms on the CPU: Tenon, PyTorch eager, torch.compile and XLA.

    python python/bench/cpu_peers.py --prepare                 # compile only
    python python/bench/cpu_peers.py --json peers.jsonl [--dtype bf16] [--filter gelu] [--part 1/6]

All sides run in one process with the same number of threads, in random order in every round. Each
line has the median of the rounds' ratios, the peer's time over Tenon's, with its 95 % interval.
Above 1 Tenon is faster. Results are new tensors, as in a program. By default freed memory is kept,
so that no side is charged for the first access to new pages. --fresh leaves the allocator as it
comes. The last lines are geometric means, and the cases in which a peer is faster. speedups.py
reads the file that --json appends to. It asserts nothing about times.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# All of these are read when the libraries are loaded. Otherwise torch's threads spin for 200 ms
# after a call, on the cores of the next side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ["TENON_THREADS"] = os.environ["NPROC"] = os.environ["OMP_NUM_THREADS"]  # NPROC: of XLA

import speedups
import tenon.torch.functional as F
import tenon.torch.ops as ops
import torch
import torch._functorch.config
import torch.nn.functional as nn
from tenon.torch import quantizer

THREADS = int(os.environ["OMP_NUM_THREADS"])
Call = Callable[[], Any]
Function = Callable[..., Any]
Tensor = torch.Tensor
P, EPS = 0.1, 1e-5
FP8, MOST = torch.float8_e4m3fn, 448.0
PAUSE = 5e-4  # seconds, in which the threads of the last side stop spinning
PEERS = {"eager": "torch.eager", "compile": "torch.compile", "xla": "xla"}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def keep_memory() -> None:
    """Freed memory stays with the process. One arena, because XLA allocates on its own threads."""
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)
    libc.mallopt(trim_threshold, (1 << 31) - 1)


def gated(act: Function) -> Function:
    def call(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return act(a) * b

    return call


def clamped_swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    w = a.clamp(max=7)
    return w * torch.sigmoid(1.702 * w) * (b.clamp(-7, 7) + 1)


def situglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * (25 * torch.tanh(b / 25))


UNARY: dict[str, Function] = {
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
GATED: dict[str, Function] = {
    "glu": nn.glu,  # its activated half is the second one
    "swiglu": gated(nn.silu),
    "geglu": gated(UNARY["gelu"]),
    "geglu_erf": gated(nn.gelu),
    "reglu": gated(nn.relu),
    "qgeglu": gated(UNARY["qgelu"]),
    "sreglu": gated(UNARY["srelu"]),
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
}


# Casts with the scales of spec and of torchao: codes and what a product needs to use them.


def encoded(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).clamp_(-MOST, MOST).to(FP8)  # in float32, because scale is


def amax_of(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)  # eager: a third of the time of abs().amax()
    return torch.maximum(-low, high).float()


def cast_delayed(x: Tensor, scale: Tensor) -> Any:
    return encoded(x, scale), amax_of(x)


def cast_current(x: Tensor, scale: Tensor) -> Any:
    scale = MOST / amax_of(x).reshape(1)
    return encoded(x, scale), scale.reciprocal()


def cast_mxfp8(x: Tensor, scale: Tensor) -> Any:
    blocks = x.view(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).float()
    # The least power of two that is not below amax/448, as an exponent. No code needs a clamp.
    exponent = ((amax * (1 / MOST)).view(torch.int32) + 0x7FFFFF >> 23).clamp(1, 253)
    factor = (254 - exponent << 23).view(torch.float32)
    return (blocks * factor).to(FP8).view(x.shape), exponent.to(torch.uint8)


def blockwise(x: Tensor, blocks: Tensor, dims: tuple[int, ...]) -> Any:
    amax = blocks.abs().amax(dims, keepdim=True).float()
    scale = ((MOST / amax).view(torch.int32) & 0x7F800000).view(torch.float32)
    return (blocks * scale).to(FP8).view(x.shape), scale.reciprocal()


def cast_1x128(x: Tensor, scale: Tensor) -> Any:
    return blockwise(x, x.view(x.shape[0], -1, 128), (-1,))


def cast_128x128(x: Tensor, scale: Tensor) -> Any:
    rows, cols = x.shape
    return blockwise(x, x.view(rows // 128, 128, cols // 128, 128), (1, 3))


CASTS: dict[str, tuple[Function, Function]] = {
    "delayed": (
        cast_delayed,
        lambda scale: quantizer.Float8Quantizer(scale, torch.zeros(1), "e4m3", columnwise=False),
    ),
    "current": (
        cast_current,
        lambda scale: quantizer.Float8CurrentScalingQuantizer("e4m3", columnwise=False),
    ),
    "mxfp8": (cast_mxfp8, lambda scale: quantizer.MXFP8Quantizer("e4m3", columnwise=False)),
    "block1x128": (
        cast_1x128,
        lambda scale: quantizer.Float8BlockQuantizer("e4m3", columnwise=False, block_scaling_dim=1),
    ),
    "block128x128": (
        cast_128x128,
        lambda scale: quantizer.Float8BlockQuantizer("e4m3", columnwise=False, block_scaling_dim=2),
    ),
}


class Xla:
    """The same functions for XLA, by their names in the tables above."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp = jax, jnp
        act = jax.nn
        unary = {
            "relu": act.relu,
            "srelu": lambda x: jnp.square(act.relu(x)),
            "leaky_relu": act.leaky_relu,
            "silu": act.silu,
            "qgelu": lambda x: x * act.sigmoid(1.702 * x),
            "sigmoid": act.sigmoid,
            "tanh": jnp.tanh,
            "gelu": act.gelu,
            "gelu_erf": lambda x: act.gelu(x, approximate=False),
            "hardswish": act.hard_swish,
            "softplus": act.softplus,
            "mish": act.mish,
            "elu": act.elu,
        }

        def halves(f: Function) -> Function:
            # The gradient of slices is several times as slow.
            return lambda x: f(*jnp.split(x, 2, axis=-1))

        def clamped(a: Any, b: Any) -> Any:
            w = jnp.minimum(a, 7)
            return w * act.sigmoid(1.702 * w) * (jnp.clip(b, -7, 7) + 1)

        def situ(a: Any, b: Any) -> Any:
            return 4 * jnp.tanh(a / 4) * act.sigmoid(a) * (25 * jnp.tanh(b / 25))

        products = {
            "swiglu": "silu",
            "geglu": "gelu",
            "geglu_erf": "gelu_erf",
            "reglu": "relu",
            "qgeglu": "qgelu",
            "sreglu": "srelu",
        }
        self.functions: dict[str, Function] = {
            **unary,
            **{name: halves(lambda a, b, f=unary[of]: f(a) * b) for name, of in products.items()},
            "glu": halves(lambda a, b: a * act.sigmoid(b)),
            "clamped_swiglu": halves(clamped),
            "situglu": halves(situ),
            "delayed": lambda x, s: (self.encoded(x, s), jnp.abs(x).max()),
            "current": self.current,
            "mxfp8": self.mxfp8,
            "block1x128": lambda x, s: self.blockwise(x, (x.shape[0], -1, 128), (-1,)),
            "block128x128": lambda x, s: self.blockwise(
                x, (x.shape[0] // 128, 128, x.shape[1] // 128, 128), (1, 3)
            ),
            "bias_dropout_add": self.bias_dropout_add,
            "rmsnorm": self.rmsnorm,
            "layernorm": self.layernorm,
        }
        self.key = jax.random.key(1, impl="rbg")  # faster here than the default

    def encoded(self, x: Any, scale: Any) -> Any:
        jnp = self.jnp
        return jnp.clip(x.astype(jnp.float32) * scale, -448, 448).astype(jnp.float8_e4m3fn)

    def current(self, x: Any, scale: Any) -> Any:
        scale = MOST / self.jnp.abs(x).max().astype(self.jnp.float32)
        return self.encoded(x, scale), 1 / scale

    def bits(self, x: Any, dtype: Any) -> Any:
        return self.jax.lax.bitcast_convert_type(x, dtype)

    def mxfp8(self, x: Any, scale: Any) -> Any:
        jnp = self.jnp
        blocks = x.reshape(x.shape[0], -1, 32)
        amax = jnp.abs(blocks).max(-1, keepdims=True).astype(jnp.float32)
        exponent = self.bits(amax * (1 / MOST), jnp.int32) + 0x7FFFFF >> 23
        exponent = jnp.clip(exponent, 1, 253)
        codes = (blocks * self.bits(254 - exponent << 23, jnp.float32)).astype(jnp.float8_e4m3fn)
        return codes.reshape(x.shape), exponent.astype(jnp.uint8)

    def blockwise(self, x: Any, shape: tuple[int, ...], dims: tuple[int, ...]) -> Any:
        jnp = self.jnp
        blocks = x.reshape(shape)
        amax = jnp.abs(blocks).max(dims, keepdims=True).astype(jnp.float32)
        scale = self.bits(self.bits(MOST / amax, jnp.int32) & 0x7F800000, jnp.float32)
        return (blocks * scale).astype(jnp.float8_e4m3fn).reshape(x.shape), 1 / scale

    def bias_dropout_add(self, x: Any, bias: Any, residual: Any) -> Any:
        kept = self.jax.random.bernoulli(self.key, 1 - P, x.shape)
        return residual + self.jnp.where(kept, (x + bias) / (1 - P), 0).astype(x.dtype)

    def rmsnorm(self, x: Any, gamma: Any) -> Any:
        h = x.astype(self.jnp.float32)
        rstdev = self.jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + EPS)
        return (h * rstdev * gamma).astype(x.dtype)

    def layernorm(self, x: Any, gamma: Any, beta: Any) -> Any:
        h = x.astype(self.jnp.float32)
        h = h - h.mean(-1, keepdims=True)
        rstdev = self.jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + EPS)
        return (h * rstdev * gamma + beta).astype(x.dtype)

    def array(self, t: Tensor) -> Any:
        return self.jnp.from_dlpack(t.detach())

    def forward(self, name: str, args: Sequence[Tensor]) -> Call:
        call, arrays = self.jax.jit(self.functions[name]), [self.array(a) for a in args]
        return lambda: self.jax.block_until_ready(call(*arrays))

    def backward(self, name: str, args: Sequence[Tensor], grad: Tensor) -> Call:
        """The faster of two: from the arguments, or from what JAX's forward pass saves.

        Not from less than the arguments, e.g. a mask: the timed forward pass does not write it. The
        mask of dropout counts, because random numbers take much longer.
        """
        jax, f = self.jax, self.functions[name]
        arrays, g = [self.array(a) for a in args], self.array(grad)
        whole = jax.jit(lambda args, g: jax.vjp(f, *args)[1](g))
        _, saved = jax.jit(lambda args: jax.vjp(f, *args))(arrays)
        second = jax.jit(lambda saved, g: saved(g))
        calls = [lambda: jax.block_until_ready(whole(arrays, g))]
        bytes_saved = sum(s.nbytes for s in jax.tree_util.tree_leaves(saved))
        if name == "bias_dropout_add" or bytes_saved >= sum(a.nbytes for a in arrays):
            calls.append(lambda: jax.block_until_ready(second(saved, g)))
        return fastest(calls)

    def version(self) -> str:
        """With the number of threads that compute."""
        tasks = Path("/proc/self/task")
        names = Counter((task / "comm").read_text().strip() for task in tasks.iterdir())
        return f"jax {self.jax.__version__}, {names['tf_XLAEigen']} threads"


class Tensors:
    """The inputs of all cases of a dtype."""

    def __init__(self, dtype: torch.dtype, rows: int, cols: int) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape).to(dtype)

        self.x, self.wide, self.grad = (
            normal(rows, cols),
            normal(rows, 2 * cols),
            normal(rows, cols),
        )
        self.bias, self.offset, self.gain = normal(cols), normal(cols), 1 + normal(cols) / 8
        self.scale = torch.full((1,), 16.0)


def forward(function: Function, args: Sequence[Tensor]) -> Call:
    return lambda: function(*args)


def backward(function: Function, args: Sequence[Tensor], grad: Tensor) -> Call:
    inputs = [a if a.requires_grad else a.detach().requires_grad_() for a in args]
    with torch.enable_grad():
        y = function(*inputs)
    return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)


@dataclass
class Case:
    """One direction of an op. Nothing is compiled before `calls`."""

    op: str
    kind: str
    ours: Function
    theirs: Function
    args: list[Tensor]
    parameters: list[Tensor] = field(default_factory=list)  # those that `ours` has
    backward: bool = False

    def name(self, dtype: str) -> str:
        """As `tenon bench` names it."""
        if self.op in CASTS:
            return f"quantize {dtype} -> e4m3 {self.op} row"
        sums = " +dbias" if self.backward and self.op == "bias_dropout_add" else ""
        return f"{self.op}{'.bwd' if self.backward else ''} {dtype}{sums}"

    def calls(self, peers: Sequence[str], xla: Xla | None, grad: Tensor) -> dict[str, Call]:
        own = [*self.args[: len(self.args) - len(self.parameters)], *self.parameters]
        sides = {"tenon": (self.ours, own)}
        if "eager" in peers:
            sides["eager"] = (self.theirs, self.args)
        if "compile" in peers:
            sides["compile"] = (torch.compile(self.theirs, dynamic=False), self.args)
        made = {
            side: backward(f, args, grad) if self.backward else forward(f, args)
            for side, (f, args) in sides.items()
        }
        if xla and self.backward:
            made["xla"] = xla.backward(self.op, self.args, grad)
        elif xla:
            made["xla"] = xla.forward(self.op, self.args)
        return made


def cases(t: Tensors) -> Iterator[Case]:
    rows, cols = t.x.shape
    both: list[Case] = []
    for name, act in UNARY.items():
        both.append(Case(name, "activations", getattr(F, name), act, [t.x]))
    for name, act in GATED.items():
        ours = getattr(F, name)
        if name == "glu":
            ours = lambda x, f=ours: f(x, layout="swapped")  # noqa: E731
        both.append(Case(name, "gated", ours, act, [t.wide]))
    both.append(
        Case(
            "bias_dropout_add",
            "dropout and norms",
            lambda x, b, r: F.bias_dropout_add(x, b, r, P, True),
            lambda x, b, r: r + nn.dropout(x + b, P, training=True),
            [t.x, t.bias, t.grad],
        )
    )
    norms: dict[str, tuple[Any, Function, list[Tensor]]] = {
        "rmsnorm": (ops.RMSNorm, lambda x, g: nn.rms_norm(x, (cols,), g, EPS), [t.gain]),
        "layernorm": (
            ops.LayerNorm,
            lambda x, g, b: nn.layer_norm(x, (cols,), g, b, EPS),
            [t.gain, t.offset],
        ),
    }
    for name, (module, theirs, parameters) in norms.items():
        norm = module(cols, eps=EPS, dtype=t.x.dtype)
        own = list(norm.parameters())
        for to, value in zip(own, parameters, strict=True):
            to.copy_(value)
        ours = lambda x, *_, norm=norm: norm(x)  # noqa: E731
        both.append(Case(name, "dropout and norms", ours, theirs, [t.x, *parameters], own))
    for case in both:
        yield case
        yield replace(case, backward=True)
    for name, (theirs, made) in CASTS.items():
        encoder = made(t.scale)
        yield Case(name, "casts", lambda x, scale, e=encoder: e.quantize(x), theirs, [t.x, t.scale])


def first_rows(result: Any) -> Any:
    """The first rows of the first tensor of a result, in float32."""
    import numpy

    if isinstance(result, tuple):
        result = result[0]
    if isinstance(result, quantizer.QuantizedTensor):
        result = result.rowwise_data
    rows = result[:8]
    return rows.float().numpy() if isinstance(rows, Tensor) else numpy.asarray(rows, numpy.float32)


def check_equal(case: str, results: dict[str, Any], dtype: str) -> None:
    """Stops if a peer computes something else. Peers may round intermediate values and codes."""
    import numpy

    least = 0.13 if "->" in case else {"f32": 1e-3, "f16": 2e-2, "bf16": 8e-2}[dtype]
    if case.startswith("bias_dropout_add"):
        return  # other random numbers
    ours = first_rows(results["tenon"])
    for side, result in results.items():
        theirs = first_rows(result)
        # A quantile, because derivatives differ at kinks: that of hardswish at -3 and 3.
        error = numpy.quantile(abs(theirs - ours) / (1 + abs(ours)), 0.98)
        if not error <= least:
            raise SystemExit(f"cpu_peers: {case}: {side} differs from tenon by {error:.3g}")


def seconds(call: Call) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def fastest(calls: Sequence[Call]) -> Call:
    for call in calls:
        call()
    return min(calls, key=lambda call: statistics.median(seconds(call) for _ in range(3)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median. The number of values below the true median is binomial."""
    n, ordered = len(values), sorted(values)
    half = 1.96 * math.sqrt(n) / 2
    return ordered[max(0, math.floor(n / 2 - half))], ordered[min(n - 1, math.ceil(n / 2 + half))]


def processor() -> str:
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0].split(":")[1].strip() if names else platform.machine()


def progress(done: int, total: int, what: str) -> None:
    """A bar on stderr, on a terminal only. Without `what` it is cleared."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        text = f"[{bar:30}] {100 * done // total:3}% {what:.60}" if what else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def measured(case: str, calls: dict[str, Call], rounds: int, dtype: str) -> dict[str, Any]:
    """The line of a case in --json, as spec.md describes those of `tenon bench`."""
    for call in calls.values():
        call()
    check_equal(case, {side: call() for side, call in calls.items()}, dtype)
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(rounds):
        for side in random.sample(list(calls), len(calls)):
            times[side].append(seconds(calls[side]))
    line: dict[str, Any] = {"case": case, "time_us": 1e6 * statistics.median(times["tenon"])}
    line["peers"] = {}
    for side in calls:
        if side != "tenon":
            ratios = [p / o for p, o in zip(times[side], times["tenon"], strict=True)]
            low, high = interval(ratios)
            line["peers"][PEERS[side]] = {
                "time_us": 1e6 * statistics.median(times[side]),
                "speedup": statistics.median(ratios),
                "speedup_lo": low,
                "speedup_hi": high,
            }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "f32"], choices=list(DTYPES))
    parser.add_argument("--filter", nargs="*", default=[], help="cases with one of these words")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th case, from the I-th")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--fresh", action="store_true", help="new pages for every result")
    parser.add_argument("--prepare", action="store_true", help="compile all calls, time nothing")
    parser.add_argument("--json", help="append one object per case to this file")
    given = parser.parse_args()
    if given.rows % 128 or given.cols % 128:
        parser.error("--rows and --cols must be multiples of 128, as the blocks of the casts are")
    part, parts = (int(n) for n in given.part.split("/"))
    if not given.fresh:
        keep_memory()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    torch._dynamo.config.cache_size_limit = 1000
    torch._functorch.config.donated_buffer = False  # a graph runs in every round
    xla = Xla() if "xla" in given.peers else None
    memory = "fresh" if given.fresh else "kept"
    versions = {"torch.eager": f"torch {torch.__version__}", "torch.compile": ""}
    versions["torch.compile"] = versions["torch.eager"]
    lines: list[dict[str, Any]] = []
    for dtype in given.dtype:
        t = Tensors(DTYPES[dtype], given.rows, given.cols)
        chosen = [(case.name(dtype), case) for case in cases(t)]
        if given.filter:
            chosen = [c for c in chosen if any(word in c[0] for word in given.filter)]
        chosen = chosen[part - 1 :: parts]
        for i, (name, case) in enumerate(chosen):
            progress(i, len(chosen), name)
            calls = case.calls(given.peers, xla, t.grad)
            if given.prepare:
                for call in calls.values():
                    call()
                continue
            line = measured(name, calls, given.rounds, dtype)
            if xla:
                versions["xla"] = xla.version()
            for peer, p in line["peers"].items():
                p["version"] = versions[peer]
            line.update(
                rows=given.rows,
                cols=given.cols,
                dtype=dtype,
                kind=case.kind,
                device="cpu",
                processor=processor(),
                threads=THREADS,
                memory=memory,
                rounds=given.rounds,
            )
            progress(i, len(chosen), "")
            if not lines:
                print(
                    f"{', '.join(sorted(set(versions.values())))}; {THREADS} threads, "
                    f"{given.rows}x{given.cols}, {memory} memory, {processor()}"
                )
            lines.append(line)
            print(
                f"{name:40}tenon {line['time_us'] / 1e3:8.2f} ms"
                + "".join(
                    f"  {peer} {p['speedup']:6.2f} [{p['speedup_lo']:.2f}, {p['speedup_hi']:.2f}]"
                    for peer, p in line["peers"].items()
                ),
                flush=True,
            )
            if given.json:
                with open(given.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        progress(0, 1, "")
    if lines:
        results = speedups.merged(lines)
        print(f"\n{speedups.table(results)}\n\n{speedups.losses(results)}")


if __name__ == "__main__":
    main()
