"""JAX's act_lu on CUDA beside `tenon bench --device cuda` for the same cases.

Run `tenon bench --device cuda --json bench.json`, then `python python/bench/act_lu_cuda.py
bench.json` on the same machine. Each program, a CUDA graph, calls act_lu on several tensors in
turn; it prints medians and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+FUSION")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import tenon.jax as tj  # noqa: E402

KEYS = {"gelu": ("gelu",), "silu": ("silu",), "swiglu": ("silu", "linear")}
CALLS = 12  # of a program, each on its own tensor
PROGRAMS = 4  # in a row, so that the host's part is hidden


def microseconds(key: tuple[str, ...], rows: int, cols: int, shots: int) -> float:
    """The median time of one act_lu."""

    @jax.jit
    def make(seed: int) -> jax.Array:
        numbers = jax.random.normal(jax.random.key(seed), (rows, len(key), cols), jnp.float32)
        return numbers.astype(jnp.bfloat16)

    tensors = [make(seed) for seed in range(CALLS)]
    program = jax.jit(lambda *all_of: [tj.act_lu(x, key) for x in all_of])
    jax.block_until_ready(program(*tensors))
    times = []
    for _ in range(shots + 1):
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            results = program(*tensors)
        jax.block_until_ready(results)
        times.append(1e6 * (time.perf_counter() - start) / (PROGRAMS * CALLS))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", help="what `tenon bench --device cuda --json` wrote")
    parser.add_argument("--shots", type=int, default=11)
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("act_lu_cuda: JAX sees no GPU here; run it on a machine with one")
    with open(given.bench) as file:
        cases = {c["case"]: c for c in json.load(file)["cases"]}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'case':<20}{'shape':<14}{'bench us':>10}{'jax us':>10}{'ratio':>8}")
    for name, key in KEYS.items():
        case = cases.get(f"{name} fwd bf16")
        if case is None:
            print(f"{name} fwd bf16: not in {given.bench}")
            continue
        us = microseconds(key, case["rows"], case["cols"], given.shots)
        shape = f"{case['rows']}x{case['cols']}"
        ratio = us / case["us"]
        print(f"{case['case']:<20}{shape:<14}{case['us']:>10.1f}{us:>10.1f}{ratio:>8.3f}")


if __name__ == "__main__":
    main()
