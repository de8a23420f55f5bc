"""The overhead of a call: tiny tensors, microseconds per call, compared with torch.

Run it with `python python/bench/overhead.py`. It prints a table and asserts nothing.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import tenon.torch.functional as F
import torch
import torch.nn.functional as nn
from tenon.torch import jit
from tenon.torch.quantizer import MXFP8Quantizer


def microseconds(call: Callable[[], Any], rounds: int, number: int) -> float:
    """The minimum of several rounds, because other processes only add time."""
    call()
    return min(timeit.repeat(call, number=number, repeat=rounds)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--number", type=int, default=200)
    given = parser.parse_args()
    torch.manual_seed(0)
    x, bias, gated = torch.randn(4, 8), torch.randn(8), torch.randn(4, 16)
    with_grad = x.clone().requires_grad_()
    quantizer = MXFP8Quantizer("e4m3", columnwise=False)
    ones = torch.ones_like(x)
    fused = jit.jit_fuser(lambda x, bias: torch.tanh(x + bias) * 2)

    def backward(f: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(f(with_grad), with_grad, ones)

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return nn.silu(a) * b

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return nn.gelu(x, approximate="tanh")

    rows: list[tuple[str, Callable[[], Any], Callable[[], Any] | None]] = [
        ("gelu", lambda: F.gelu(x), lambda: gelu(x)),
        ("gelu, requires_grad", lambda: F.gelu(with_grad), lambda: gelu(with_grad)),
        ("gelu, forward + backward", backward(F.gelu), backward(gelu)),
        ("gelu + bias", lambda: F.gelu(x, bias=bias), lambda: gelu(x + bias)),
        ("swiglu", lambda: F.swiglu(gated), lambda: swiglu(gated)),
        ("gelu -> mxfp8", lambda: F.gelu(x, quantizer=quantizer), None),
        (
            "bias + dropout + add",
            lambda: F.bias_dropout_add(x, bias, x, 0.1, True),
            lambda: x + nn.dropout(x + bias, 0.1, True),
        ),
        ("l2normalization", lambda: F.l2normalization(x), lambda: nn.normalize(x, dim=-1)),
        (
            "jit_fuser: 2*tanh(x + bias)",
            lambda: fused(x, bias),
            lambda: torch.tanh(x + bias) * 2,
        ),
    ]
    try:
        import tenon.torch.ops as ops
    except ImportError:
        pass
    else:
        ours = ops.Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8), ops.GELU())
        theirs = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.GELU()
        )
        rows.append(("Sequential of 2 Linear, 2 GELU", lambda: ours(x), lambda: theirs(x)))
        tensors = [with_grad, *ours.parameters()], [with_grad, *theirs.parameters()]
        rows.append(
            (
                "the same, forward + backward",
                lambda: torch.autograd.grad(ours(with_grad), tensors[0], ones),
                lambda: torch.autograd.grad(theirs(with_grad), tensors[1], ones),
            )
        )
        basic = ops.Sequential(
            ops.BasicLinear(8, 16), ops.Bias(16), ops.GELU(), ops.BasicLinear(16, 8)
        )
        same = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8, bias=False)
        )
        rows.append(("Sequential of 4 basic ops", lambda: basic(x), lambda: same(x)))
    print(f"microseconds a call, [4, 8] float32, least of {given.rounds} rounds")
    print(f"{'':32}{'tenon':>9}{'torch':>9}")
    for name, ours_call, torch_call in rows:
        us = microseconds(ours_call, given.rounds, given.number)
        them = "" if torch_call is None else microseconds(torch_call, given.rounds, given.number)
        print(f"{name:32}{us:9.1f}" + (f"{them:9.1f}" if them else ""))


if __name__ == "__main__":
    main()
