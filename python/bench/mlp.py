"""A training step of a SwiGLU MLP: tenon.torch against PyTorch eager, alternately in one process.

    python python/bench/mlp.py [threads]

Milliseconds of forward and backward with the default allocator of torch, medians of rounds. The
ratio is the time of torch over the time of Tenon: the median of rounds, with the ratio of the best
rounds in brackets.
"""

import statistics
import sys
import time

import tenon
import tenon.torch.ops as te
import torch

ROWS = 4096


def eager(width, dtype):
    """The layers of torch, with both halves in one product as in TE and Tenon."""
    up = torch.nn.Linear(width, 8 * width, bias=False, dtype=dtype)
    down = torch.nn.Linear(4 * width, width, bias=False, dtype=dtype)

    def call(x):
        gate, linear = up(x).chunk(2, dim=-1)
        return down(torch.nn.functional.silu(gate) * linear)

    return call, [up.weight, down.weight]


def fused(width, dtype):
    model = te.Sequential(
        te.Linear(width, 8 * width, bias=False, dtype=dtype),
        te.SwiGLU(),
        te.Linear(4 * width, width, bias=False, dtype=dtype),
    )
    return model, [p for p in model.parameters() if p.ndim == 2]


def step(call, x, dy, parameters):
    """A timed step after one that wakes the threads. Starts when the other side's threads sleep."""
    time.sleep(0.3)  # an OpenMP runtime may keep its threads busy for 200 ms
    call(x).backward(dy)
    start = time.perf_counter()
    call(x).backward(dy)
    elapsed = time.perf_counter() - start
    for p in (x, *parameters):
        p.grad = None
    return elapsed


def measure(width, dtype, rounds):
    x = torch.randn(ROWS, width).to(dtype).requires_grad_()
    dy = torch.randn(ROWS, width).to(dtype)
    models = [fused(width, dtype), eager(width, dtype)]
    with torch.no_grad():
        for ours, theirs in zip(models[0][1], models[1][1], strict=True):
            theirs.copy_(ours)
    gap = (models[0][0](x).float() - models[1][0](x).float()).norm()
    relative = gap / models[1][0](x).float().norm()
    times = [[], []]
    for r in range(rounds + 1):
        for kept, (call, parameters) in zip(times, models, strict=True):
            elapsed = step(call, x, dy, parameters)
            if r > 0:
                kept.append(elapsed)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    ours, theirs = (1e3 * statistics.median(t) for t in times)
    best = min(times[1]) / min(times[0])
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name:9} width {width:5}  tenon {ours:8.1f} ms  torch {theirs:8.1f} ms  "
        f"ratio {ratio:5.2f} ({best:.2f})  outputs apart by {relative:.1e}"
    )


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads()
    torch.set_num_threads(threads)
    tenon.set_threads(threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for width in (256, 1024):
            measure(width, dtype, 15 if width < 1024 else 5)


if __name__ == "__main__":
    main()
