"""Products of tenon's plans beside torch.mm, call by call in one process: GFLOP/s and ratios.

    python python/bench/gemm.py [threads]

Each call comes behind one that wakes its threads, once those of the other side sleep. The ratio is
torch's time over ours, the median of pairs, and in brackets the ratio of the bests.
"""

import ctypes
import statistics
import sys
import time

import tenon
import torch

SHAPES = [(2048, 2048, 2048), (4096, 2048, 256), (4096, 256, 1024), (128, 4096, 4096)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def timed(call):
    time.sleep(0.3)  # an OpenMP runtime may keep its threads busy for 200 ms
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name, rows, out, inner, rounds=10):
    dtype = DTYPES[name]
    plan = tenon.plan(f"linear({inner},{out})", dtype=name, backward=False)
    tensors = {
        "x": torch.randn(rows, inner).to(dtype),
        "linear0.weight": (torch.randn(out, inner) / inner**0.5).to(dtype),
        "y": torch.empty(rows, out, dtype=dtype),
    }
    addresses = [tensors[b.name].data_ptr() for b in plan.buffers]
    memory = (ctypes.c_void_p * len(addresses))(*addresses)
    workspace = torch.empty(max(plan.sizes(rows)[1], 1), dtype=torch.uint8)
    theirs = torch.empty(rows, out, dtype=dtype)
    calls = [
        lambda: plan.run(False, rows, memory, workspace.data_ptr()),
        lambda: torch.mm(tensors["x"], tensors["linear0.weight"].t(), out=theirs),
    ]
    times = [[], []]
    for _ in range(rounds):
        for kept, call in zip(times, calls, strict=True):
            kept.append(timed(call))
    flops = 2e-9 * rows * out * inner
    ours, peer = (flops / statistics.median(t) for t in times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    best = min(times[1]) / min(times[0])
    print(
        f"{name:5} {rows}x{out}x{inner:5}  tenon {ours:7.1f}  torch {peer:7.1f}  "
        f"ratio {ratio:5.2f} ({best:.2f})"
    )


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads()
    torch.set_num_threads(threads)
    tenon.set_threads(threads)
    for name in DTYPES:
        for shape in SHAPES:
            measure(name, *shape)


if __name__ == "__main__":
    main()
