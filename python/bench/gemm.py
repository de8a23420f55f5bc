"""Products of Tenon plans against torch.mm, call by call in one process: GFLOP/s and ratios.

    python python/bench/gemm.py [threads]

The sides take turns. Each side calls back to back after the threads of the other side sleep. Its
first call is not counted. The ratio is the time of torch over the time of Tenon: the median over
the turns of the medians of their calls, with the ratio of the best calls in brackets. At the end
it prints the cost of a body: the time of a product with a body over that of the plain product,
call by call.
"""

import ctypes
import statistics
import sys
import time

import tenon
import torch

SHAPES = [(2048, 2048, 2048), (4096, 2048, 256), (4096, 256, 1024), (128, 4096, 4096)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turn(call, calls):
    time.sleep(0.3)  # an OpenMP runtime may keep its threads busy for 200 ms
    call()
    return [seconds(call) for _ in range(calls)]


def call_of(chain, name, rows, tensors):
    """A call of the plan of the chain, for inputs of dtype `name`. Missing tensors are created."""
    plan = tenon.plan(chain, dtype=name, backward=False)
    for b in plan.buffers:
        if b.name not in tensors:
            tensors[b.name] = torch.randn(b.shape(rows)).to(DTYPES[name])
    addresses = [tensors[b.name].data_ptr() for b in plan.buffers]
    memory = (ctypes.c_void_p * len(addresses))(*addresses)
    workspace = torch.empty(max(plan.sizes(rows)[1], 1), dtype=torch.uint8)

    def call(owned=tensors):  # keeps the tensors alive as long as the call
        plan.run(False, rows, memory, workspace.data_ptr())

    return call


def tensors_of(name, rows, out, inner):
    """Weights whose products have variance 1, similar to those of a trained layer."""
    dtype = DTYPES[name]
    return {
        "x": torch.randn(rows, inner).to(dtype),
        "linear0.weight": (torch.randn(out, inner) / inner**0.5).to(dtype),
    }


def measure(name, rows, out, inner, rounds=6, calls=8):
    tensors = tensors_of(name, rows, out, inner)
    theirs = torch.empty(rows, out, dtype=DTYPES[name])
    sides = [
        call_of(f"linear({inner},{out})", name, rows, tensors),
        lambda: torch.mm(tensors["x"], tensors["linear0.weight"].t(), out=theirs),
    ]
    medians, bests = [[], []], [[], []]
    for _ in range(rounds):
        for i, call in enumerate(sides):
            times = turn(call, calls)
            medians[i].append(statistics.median(times))
            bests[i].append(min(times))
    flops = 2e-9 * rows * out * inner
    ours, peer = (flops / statistics.median(m) for m in medians)
    ratio = statistics.median(b / a for a, b in zip(*medians, strict=True))
    best = min(bests[1]) / min(bests[0])
    print(
        f"{name:5} {rows}x{out}x{inner:5}  tenon {ours:7.1f}  torch {peer:7.1f}  "
        f"ratio {ratio:5.2f} ({best:.2f})"
    )


def bodies(size=2048, rounds=60):
    chain = f"linear({size},{size})"
    tensors = tensors_of("f32", size, size, size)
    calls = {"plain": call_of(chain, "f32", size, tensors)}
    for body in ("bias gelu", "swiglu"):
        own = {k: t for k, t in tensors.items() if k != "y"}
        calls[body] = call_of(f"{chain} {body}", "f32", size, own)
    times = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls) if i % 2 else reversed(calls):
            times[name].append(seconds(calls[name]))
    for name in list(calls)[1:]:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True))
        best = min(times[name]) / min(times["plain"])
        print(f"f32   {size}x{size}x{size:5}  {name} over plain {ratio:5.3f} ({best:.3f})")


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads()
    torch.set_num_threads(threads)
    tenon.set_threads(threads)
    for name in DTYPES:
        for shape in SHAPES:
            measure(name, *shape)
    bodies()


if __name__ == "__main__":
    main()
