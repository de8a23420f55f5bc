"""Products of tenon beside torch.mm: runs gemm_bench and torch in turn, prints GFLOP/s and ratios.

    python python/bench/gemm.py build/gemm_bench [threads]
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time

import torch

NAME = re.compile(r"(f32|bf16) plain (\d+)x(\d+)x(\d+) (nn|nt)")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def tenon(program, threads):
    """GFLOP/s of every plain product that the program measures."""
    env = dict(os.environ, TENON_THREADS=str(threads), OMP_NUM_THREADS=str(threads))
    command = [program, "--benchmark_filter=plain", "--benchmark_format=json"]
    text = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    rows = json.loads(text)["benchmarks"]
    return {NAME.match(row["name"]).groups(): row["tenon"] for row in rows}


def mm(dtype, m, n, k, layout):
    """The median of torch's GFLOP/s."""
    a = torch.rand(m, k).sub_(0.5).to(DTYPES[dtype])
    b = torch.rand(n, k).sub_(0.5).to(DTYPES[dtype]).t()
    b = b if layout == "nt" else b.contiguous()
    times = []
    for _ in range(3 + (12 if m >= 512 else 40)):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2e-9 * m * n * k / statistics.median(times[3:])


def main():
    program = sys.argv[1]
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else torch.get_num_threads()
    torch.set_num_threads(threads)
    first = tenon(program, threads)
    peer = {key: mm(key[0], *map(int, key[1:4]), key[4]) for key in first}
    second = tenon(program, threads)  # before and after: a neighbour's minute shows
    print(f"{'product':32} {'tenon':>8} {'again':>8} {'torch':>8} {'ratio':>6}")
    for key, rate in peer.items():
        best = max(first[key], second[key])
        name = f"{key[0]} {key[1]}x{key[2]}x{key[3]} {key[4]}"
        print(f"{name:32} {first[key]:8.1f} {second[key]:8.1f} {rate:8.1f} {best / rate:6.2f}")


if __name__ == "__main__":
    main()
