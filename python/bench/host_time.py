"""Host time of small training steps and forward passes: Tenon and PyTorch eager, in turn.

Run it with `python python/bench/host_time.py`, on CUDA if there is a GPU. Each line has the least
time of a step on the host and the ratio to eager. It asserts nothing.

"node" is the time of the least Python node of autograd with the same parameters: it allocates the
results of both passes and computes nothing. "C" is the time inside of the library. The last lines
have steps under recipes and their ratio to the same chain without one.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import tenon.torch as tt
import tenon.torch.ops as ops
import torch
import torch.nn.functional as F
from tenon._lib import lib
from torch import nn

WIDTH, HIDDEN, ROWS = 64, 128, 16


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class GELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def block() -> nn.Module:
    residual, added = ops.MakeExtraOutput(), ops.AddExtraInput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    added.set_extra_input_channel(0, "residual")
    mlp = ops.Linear(WIDTH, HIDDEN), ops.GELU(), ops.Linear(HIDDEN, WIDTH)
    return ops.Sequential(residual, ops.LayerNorm(WIDTH), *mlp, added)


class Node(torch.autograd.Function):
    """Allocates the result of each pass and what a plan saves: one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *params, x.new_empty(ROWS, 2 * HIDDEN))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *params, _ = ctx.saved_tensors
        return torch.empty_like(x), *(torch.empty_like(p) for p in params)


class Least(nn.Module):
    """A module of one `Node`."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.params = list(like.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Node.apply(x, *self.params)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.params)


class Timed:
    """A function of the library with a clock."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        result = self.call(*args)
        self.seconds += time.perf_counter() - begin
        return result


def microseconds(call: Callable[[], Any], cuda: bool, number: int = 100) -> float:
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(number):
        call()
    end = time.perf_counter()
    if cuda:
        torch.cuda.synchronize()
    return (end - begin) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if cuda else {}
    torch.set_num_threads(1)
    models: dict[str, tuple[nn.Module, nn.Module]] = {
        "SwiGLU MLP": (
            SwiGLU(),
            ops.Sequential(
                ops.Linear(WIDTH, 2 * HIDDEN, bias=False),
                ops.SwiGLU(),
                ops.Linear(HIDDEN, WIDTH, bias=False),
            ),
        ),
        "GELU MLP": (
            GELU(),
            ops.Sequential(ops.Linear(WIDTH, HIDDEN), ops.GELU(), ops.Linear(HIDDEN, WIDTH)),
        ),
        "norm + GELU MLP + residual": (Block(), block()),
    }
    x = torch.randn(ROWS, WIDTH, **kind).requires_grad_()
    dy = torch.randn(ROWS, WIDTH, **kind)

    def step(model: nn.Module, params: list[torch.Tensor]) -> None:
        model(x).backward(dy)
        for p in (x, *params):
            p.grad = None

    def forward(model: nn.Module, params: list[torch.Tensor]) -> None:
        with torch.no_grad():
            model(x)

    timed = Timed(lib.tenon_plan_run)
    for name, pair in models.items():
        like, ours = (m.to(**kind) for m in pair)
        each: list[tuple[nn.Module, list[torch.Tensor]]] = [
            (m, list(m.parameters())) for m in (like, ours, Least(like))
        ]
        for what, call in (("step", step), ("forward, no_grad", forward)):
            times: list[list[float]] = [[], [], []]
            for _ in range(args.rounds):
                for (model, params), found in zip(each, times, strict=True):
                    found.append(microseconds(lambda: call(model, params), cuda))  # noqa: B023
            eager, tenon, node = (min(t) for t in times)
            lib.tenon_plan_run = timed
            microseconds(lambda: call(ours, each[1][1]), cuda)  # noqa: B023
            inside = [0.0] * 10
            for k in range(len(inside)):
                timed.seconds = 0.0
                microseconds(lambda: call(ours, each[1][1]), cuda)  # noqa: B023
                inside[k] = timed.seconds / 100 * 1e6
            lib.tenon_plan_run = timed.call
            print(
                f"{name:28}{what:18}eager {eager:7.1f} us  tenon {tenon:7.1f} us  "
                f"ratio {tenon / eager:.2f}  node {node:7.1f} us  C {min(inside):6.1f} us",
                flush=True,
            )
    recipes = {
        "delayed": tt.recipe.DelayedScaling(),
        "current": tt.recipe.Float8CurrentScaling(),
        "mxfp8": tt.recipe.MXFP8BlockScaling(),
        "block": tt.recipe.Float8BlockScaling(),
    }
    chains = [models["GELU MLP"][1], *(copy.deepcopy(models["GELU MLP"][1]) for _ in recipes)]

    def under(recipe: tt.recipe.Recipe | None, model: nn.Module) -> None:
        with tt.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(dy)
        for p in (x, *model.parameters()):
            p.grad = None

    kinds = [None, *recipes.values()]
    least = [float("inf")] * len(kinds)
    for _ in range(args.rounds):
        for i, (recipe, model) in enumerate(zip(kinds, chains, strict=True)):
            least[i] = min(least[i], microseconds(lambda: under(recipe, model), cuda))  # noqa: B023
    for name, t in zip(("none", *recipes), least, strict=True):
        print(f"GELU MLP, recipe {name:10} step  {t:7.1f} us  ratio {t / least[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
