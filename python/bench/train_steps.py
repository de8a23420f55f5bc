"""Training steps on CUDA: Tenon, PyTorch eager and torch.compile, interleaved in one process.

Run it with `python python/bench/train_steps.py` on a machine with a GPU. Each line has the median
time of a step (forward, loss, backward), the speedup over eager and over torch.compile, and the
peak memory above parameters and inputs. The line of the runner "products" has the time of the
matrix products of a step alone, which bounds every bf16 step. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from typing import Any

import tenon.torch.ops as ops
import torch
import torch.nn.functional as F
from tenon.torch import quantizer
from torch import nn


class SwiGLU(nn.Module):
    """The MLP of Llama: SwiGLU without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class GELU(nn.Module):
    """The MLP of GPT: tanh GELU with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """RMSNorm, SwiGLU MLP and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width, eps=1e-5), SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Scaled(torch.autograd.Function):
    """A Linear by torch._scaled_mm: dynamic tensor scales, precise accumulation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        qx, sx = encode(x, torch.float8_e4m3fn)
        qw, sw = encode(w, torch.float8_e4m3fn)
        ctx.save_for_backward(qx, sx, qw, sw)
        return torch._scaled_mm(qx, qw.t(), sx, sw, out_dtype=x.dtype, use_fast_accum=False)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qx, sx, qw, sw = ctx.saved_tensors
        qd, sd = encode(dy, torch.float8_e5m2)
        dx = torch._scaled_mm(
            qd, qw.t().contiguous().t(), sd, sw, out_dtype=dy.dtype, use_fast_accum=False
        )
        dw = torch._scaled_mm(
            qd.t().contiguous(),
            qx.t().contiguous().t(),
            sd,
            sx,
            out_dtype=dy.dtype,
            use_fast_accum=False,
        )
        return dx, dw


def encode(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).to(dtype), scale.reciprocal()


class ScaledMLP(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Scaled.apply(x, self.up.weight).chunk(2, -1)
        return Scaled.apply(F.silu(a) * b, self.down.weight)


KIND: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def linear(like: nn.Linear) -> ops.Linear:
    return ops.Linear(like.in_features, like.out_features, bias=like.bias is not None, **KIND)


def swiglu_ops(like: SwiGLU) -> nn.Module:
    return share(ops.Sequential(linear(like.up), ops.SwiGLU(), linear(like.down)), like)


def quantised(like: SwiGLU, recipe: str) -> nn.Module:
    """The SwiGLU MLP with the quantizers of a recipe."""
    model = swiglu_ops(like)

    def one(dtype: str, block: int) -> quantizer.Quantizer:
        if recipe == "delayed":
            state = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
            return quantizer.Float8Quantizer(*state, dtype)
        if recipe == "current":
            return quantizer.Float8CurrentScalingQuantizer(dtype)
        if recipe == "mxfp8":
            return quantizer.MXFP8Quantizer("e4m3")
        return quantizer.Float8BlockQuantizer("e4m3", block_scaling_dim=block)

    for op in model.modules():
        if isinstance(op, ops.BasicLinear):
            op.set_quantizer("forward", 0, one("e4m3", 1))
            op.set_quantizer("forward", 1, one("e4m3", 2))
            op.set_quantizer("backward", 0, one("e5m2", 1))
    return model


def gelu_ops(like: GELU) -> nn.Module:
    return share(ops.Sequential(linear(like.up), ops.GELU(), linear(like.down)), like)


def block_ops(like: Block) -> nn.Module:
    residual, added = ops.MakeExtraOutput(), ops.AddExtraInput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    added.set_extra_input_channel(0, "residual")
    norm = ops.RMSNorm(like.mlp.up.in_features, **KIND)
    mlp = linear(like.mlp.up), ops.SwiGLU(), linear(like.mlp.down)
    return share(ops.Sequential(residual, norm, *mlp, added), like)


def share(made: nn.Module, like: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p, q in zip(made.parameters(), like.parameters(), strict=True):
            p.copy_(q)
    return made


def step(
    model: Callable[..., Any], x: torch.Tensor, dy: torch.Tensor, params: list[torch.Tensor]
) -> None:
    for p in (x, *params):
        p.grad = None
    model(x).backward(dy)


class Products(nn.Module):
    """The three products of each linear of a training step, and nothing else."""

    def __init__(self, like: nn.Module, rows: int) -> None:
        super().__init__()
        self.weights = [m.weight.detach() for m in like.modules() if isinstance(m, nn.Linear)]
        self.x = [torch.randn(rows, w.shape[1], **KIND) for w in self.weights]
        self.dy = [torch.randn(rows, w.shape[0], **KIND) for w in self.weights]

    def forward(self, x: torch.Tensor) -> Products:
        for each, w in zip(self.x, self.weights, strict=True):
            torch.mm(each, w.t())
        return self

    def backward(self, dy: torch.Tensor) -> None:
        for each, gradient, w in zip(self.x, self.dy, self.weights, strict=True):
            torch.mm(gradient, w)
            torch.mm(gradient.t(), each)


def measure(name: str, models: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> None:
    dy = torch.randn_like(x)
    params = {k: list(m.parameters()) for k, m in models.items()}
    times: dict[str, list[float]] = {k: [] for k in models}
    peaks: dict[str, float] = {}
    for k in list(models):
        try:
            for _ in range(3):
                step(models[k], x, dy, params[k])
            torch.cuda.synchronize()
            for p in params[k]:
                p.grad = None
            x.grad = None
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(models[k], x, dy, params[k])
            torch.cuda.synchronize()
            peaks[k] = (torch.cuda.max_memory_allocated() - base) / 1e6
            for p in params[k]:
                p.grad = None
        except Exception as e:  # noqa: BLE001
            print(json.dumps({"model": name, "runner": k, "error": str(e)[:300]}), flush=True)
            del models[k], times[k]
    for _ in range(rounds):
        for k in random.sample(list(models), len(models)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(models[k], x, dy, params[k])
            end.record()
            end.synchronize()
            times[k].append(begin.elapsed_time(end))
            for p in params[k]:
                p.grad = None
    median = {k: statistics.median(t) for k, t in times.items()}
    for k in models:
        print(
            json.dumps(
                {
                    "model": name,
                    "runner": k,
                    "ms": round(median[k], 3),
                    **{
                        f"over_{o}": round(median[o] / median[k], 3)
                        for o in ("eager", "compile", "tenon", "scaled_mm", "products")
                        if o in median and o != k
                    },
                    "peak_mb": round(peaks[k]),
                }
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--models", nargs="*", default=["swiglu", "gelu", "block", "fp8"])
    args = parser.parse_args()
    torch.manual_seed(1)

    def cuda(m: nn.Module) -> nn.Module:
        return m.to("cuda", torch.bfloat16)

    x = torch.randn(args.rows, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[Any], nn.Module]]] = {
        "swiglu": (lambda: SwiGLU(4096, 14336), swiglu_ops),
        "gelu": (lambda: GELU(4096, 16384), gelu_ops),
        "block": (lambda: Block(4096, 14336), block_ops),
    }
    for kind in args.models:
        if kind == "fp8":
            like = cuda(SwiGLU(4096, 14336))
            scaled = cuda(ScaledMLP(4096, 14336))
            runners: dict[str, Any] = {
                "tenon": swiglu_ops(like),
                "scaled_mm": torch.compile(scaled),
            }
            runners |= {r: quantised(like, r) for r in ("delayed", "current", "block", "mxfp8")}
            measure("swiglu fp8", runners, x, args.rounds)
            continue
        make, ours = kinds[kind]
        like = cuda(make())
        compiled = cuda(make())
        measure(
            kind,
            {
                "eager": like,
                "compile": torch.compile(compiled),
                "tenon": ours(like),
                "products": Products(like, args.rows),
            },
            x,
            args.rounds,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
