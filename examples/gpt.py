"""Trains a small GPT to ask questions, e.g. `python examples/gpt.py --recipe delayed`."""

import argparse
import os
import random

import tenon.torch as tt
import tenon.torch.ops as ops
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: tt.recipe.DelayedScaling(amax_history_len=16),
    "current": tt.recipe.Float8CurrentScaling,
    "mxfp8": tt.recipe.MXFP8BlockScaling,
    "block": tt.recipe.Float8BlockScaling,
}
WORDS = [
    *("does will can", "a the my", "big small old red", "cat dog bird fish horse"),
    *("see find like", "a the your", "ball tree house river stone?"),
]
WIDTH, HEADS, LENGTH, BATCH, CODES = 64, 4, 32, 16, 32


def text(step):
    """Random questions as codes, drawn by the number of the step: "can my old cat find a tree?"."""
    draw = random.Random(step)
    lines = [
        " ".join(draw.choice(w.split()) for _ in range(4) for w in WORDS) for _ in range(BATCH)
    ]
    starts = [draw.randrange(40) for _ in lines]
    rows = [line.encode()[at : at + LENGTH + 1] for line, at in zip(lines, starts, strict=True)]
    return torch.tensor([[code % CODES for code in row] for row in rows])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = tt.LayerNormLinear(WIDTH, 3 * WIDTH)
        self.out = tt.Linear(WIDTH, WIDTH)
        self.mlp = tt.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", normalization="RMSNorm")

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Linear(CODES, WIDTH, bias=False)
        self.place = torch.nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, CODES))

    def forward(self, ids, recipe):
        x = self.token(torch.nn.functional.one_hot(ids, CODES).float()) + self.place
        with tt.autocast(enabled=recipe is not None, recipe=recipe):
            x = self.blocks(x)
        return self.head(x)  # the last product keeps its precision


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--recipe", default="none", choices=RECIPES)
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", help="write a checkpoint after half of the steps")
    parser.add_argument("--resume", help="start from this checkpoint")
    args = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model, recipe, start = GPT().to(args.device), RECIPES[args.recipe](), 0
    optimizer = torch.optim.AdamW(model.parameters())
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    losses = []
    for step in range(start, args.steps):
        ids = text(step).to(args.device)
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / args.steps)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            scores = model(ids[:, :-1], recipe)
        loss = cross_entropy(scores.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1:4}  loss {loss.item():.9g}", flush=True)
        if args.save and 2 * (step + 1) == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, args.save)
    last = losses[-20:]
    print(f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.6f}")
    return losses


if __name__ == "__main__":
    main()
