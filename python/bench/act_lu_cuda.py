"""Measures the overhead of JAX on CUDA: act_lu against the same step through the C ABI.

Both run in this process on the same tensors, alternately. The time is from the first call until
the device is done, over enough calls that the start on the host is a small part. The programs of
JAX are CUDA graphs, call act_lu on several tensors and allocate their results. The calls of the
C ABI go to one stream and write existing tensors. Prints medians and asserts nothing:

    python python/bench/act_lu_cuda.py [bench.json]

With a file from `tenon bench --device cuda --save` on the same machine, it prints those results
too. They come from another process at another time, so clocks and memory may differ by a few
percent.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+FUSION")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import tenon.jax as tj  # noqa: E402
from tenon import _lib  # noqa: E402

KEYS = {"gelu": ("gelu",), "silu": ("silu",), "swiglu": ("silu", "linear")}
CALLS = 12  # per program, each on its own tensor
PROGRAMS = 16  # back to back


def driver() -> ctypes.CDLL:
    """libcuda with the context of JAX current, as the C ABI requires."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context):
        raise SystemExit("act_lu_cuda: the driver gives no context for device 0")
    return cuda


def kernels(name: str, inputs: list[jax.Array], outputs: list[jax.Array]) -> Callable[[], None]:
    """One call of the C ABI per pair of tensors."""
    options = _lib.Options(device=_lib.DEVICE["cuda"])
    bf16 = _lib.DTYPE["bf16"]

    def view(t: jax.Array) -> _lib.View:
        cols = t.size // t.shape[0]
        return _lib.View(t.unsafe_buffer_pointer(), t.shape[0], cols, cols, bf16)

    views = [(view(x), view(y)) for x, y in zip(inputs, outputs, strict=True)]
    calls = [_lib.ForwardArgs(x=_lib.ViewPtr(x), y=_lib.ViewPtr(y)) for x, y in views]

    def run() -> None:
        for call in calls:
            _lib.check(_lib.lib.tenon_forward(name.encode(), call, options))

    return run


def microseconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """The time per call in one shot."""
    start = time.perf_counter()
    for _ in range(PROGRAMS):
        run()
    wait()
    return 1e6 * (time.perf_counter() - start) / (PROGRAMS * CALLS)


def measure(name: str, rows: int, cols: int, shots: int) -> tuple[float, float]:
    """The medians of the call of the C ABI and of act_lu."""
    key = KEYS[name]

    @jax.jit
    def make(seed: int) -> jax.Array:
        numbers = jax.random.normal(jax.random.key(seed), (rows, len(key), cols), jnp.float32)
        return numbers.astype(jnp.bfloat16)

    tensors = [make(seed) for seed in range(CALLS)]
    program = jax.jit(lambda *all_of: [tj.act_lu(x, key) for x in all_of])
    written = latest = jax.block_until_ready(program(*tensors))
    bare = kernels(name, tensors, written)
    cuda = driver()

    def run() -> None:
        nonlocal latest
        latest = program(*tensors)

    results: tuple[list[float], list[float]] = ([], [])
    for _ in range(shots + 1):
        results[0].append(microseconds(bare, cuda.cuCtxSynchronize))
        results[1].append(microseconds(run, lambda: jax.block_until_ready(latest)))
    return statistics.median(results[0][1:]), statistics.median(results[1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", help="what `tenon bench --device cuda --save` wrote")
    parser.add_argument("--shape", default="16384x14336", help="rows x columns of the result")
    parser.add_argument("--shots", type=int, default=11)
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("act_lu_cuda: JAX sees no GPU here; run it on a machine with one")
    rows, cols = map(int, given.shape.split("x"))
    benched = {}
    if given.bench:
        with open(given.bench) as file:
            cases = [c for c in json.load(file)["cases"] if (c["rows"], c["cols"]) == (rows, cols)]
        benched = {c["case"]: c["us"] for c in cases}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {rows}x{cols}")
    print(f"{'case':<18}{'C ABI us':>10}{'act_lu us':>10}{'ratio':>8}{'bench us':>10}{'ratio':>8}")
    for name in KEYS:
        case = f"{name} bf16"
        bare, through = measure(name, rows, cols, given.shots)
        line = f"{case:<18}{bare:>10.1f}{through:>10.1f}{through / bare:>8.3f}"
        if case in benched:
            line += f"{benched[case]:>10.1f}{through / benched[case]:>8.3f}"
        print(line)


if __name__ == "__main__":
    main()
