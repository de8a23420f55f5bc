"""FP8 products on CUDA: a plan's linear on encoded tensors and torch._scaled_mm, interleaved.

Run it with `python python/bench/fp8_products.py` on a machine with a GPU. Each line has the median
time of a call and the ratio to `_scaled_mm` with the same sums. It asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
from collections.abc import Callable

import torch
from tenon._plan import FORWARD, Encoding, Format, OpFormats, plan

ROWS = 8192
SHAPES = ((28672, 4096), (4096, 14336), (16384, 4096), (4096, 16384))
Call = Callable[[], object]


def tenon_product(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, accumulate: str
) -> tuple[Call, torch.Tensor]:
    """The product of encoded tensors with one scale each, as a plan."""
    rows, (n, k) = x.shape[0], w.shape
    given = Encoding(Format("current", "e4m3"))
    p = plan(
        f"linear({k},{n},accumulate={accumulate})",
        dtype="bf16",
        device="cuda",
        input_encoding=given,
        op_formats=[OpFormats(weight_encoding=given)],
        backward=False,
    )
    y = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    tensors = {"x": x, "y": y, "linear0.weight": w}
    addresses = [tensors.get(b.name, scale).data_ptr() for b in p.buffers]
    memory = (ctypes.c_void_p * len(addresses))(*addresses)
    _, bytes_ = p.sizes(rows)
    workspace = torch.empty(bytes_ + 256, dtype=torch.uint8, device="cuda")
    at = workspace.data_ptr() + -workspace.data_ptr() % 256
    stream = torch.cuda.current_stream().cuda_stream

    def call(keep: torch.Tensor = workspace) -> None:
        p.run(FORWARD, rows, memory, at, stream=stream)

    return call, y


def microseconds(call: Call, number: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / number * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    one = torch.ones(1, device="cuda")
    for n, k in SHAPES:
        x, w = (torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn) for m in (ROWS, n))
        for accumulate in ("precise", "fast"):
            mine, y = tenon_product(x, w, one, accumulate)

            def scaled(fast: bool = accumulate == "fast", x: torch.Tensor = x, w: torch.Tensor = w):
                return torch._scaled_mm(
                    x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
                )

            want = x[:64].double() @ w.double().t()
            errors = []
            for call in (mine, scaled):
                got = call()
                got = y if got is None else got
                errors.append(((got[:64].double() - want).norm() / want.norm()).item())
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(args.rounds):
                for i in random.sample((0, 1), 2):
                    times[i].append(microseconds((mine, scaled)[i], 5))
            ours, theirs = (statistics.median(t) for t in times)
            print(
                f"{ROWS}x{n}x{k} {accumulate:8} tenon {ours:7.1f} us  _scaled_mm {theirs:7.1f} us  "
                f"ratio {ours / theirs:.3f}  errors {errors[0]:.1e} {errors[1]:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
