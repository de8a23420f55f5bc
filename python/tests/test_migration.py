"""Every row of docs/migration.md: the right column against the left one, or against its meaning."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch import functional as TF  # noqa: E402

F, nn = torch.nn.functional, torch.nn
PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
if not PAGE.exists():
    pytest.skip("the documents are not here", allow_module_level=True)


def rows():
    section = ""
    for line in PAGE.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            section = line[3:]
        cells = re.fullmatch(r"\| `(.*?)` \| `(.*?)` \|(.*)\|", line)
        if cells:
            yield section, cells[1], cells[2]


ROWS = list(rows())


def silu_gate(a, b):
    return F.silu(a) * b


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def clamped(x):
    a, b = x[..., :8].clamp(max=7.0), x[..., 8:].clamp(-7.0, 7.0)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def linear(x, p):
    return F.linear(x, p["weight"], p["bias"])


def norm(x, p):
    return F.layer_norm(x, (16,), p["layer_norm_weight"], p["layer_norm_bias"], 1e-5)


def mlp(x, p, f):
    return F.linear(f(F.linear(norm(x, p), p["fc1_weight"], p["fc1_bias"])), p["fc2_weight"],
                    p["fc2_bias"])  # fmt: skip


def liger_mlp(f):
    def run(x, p):
        gate, up = p["0.weight"][:32], p["0.weight"][32:]
        return F.linear(f(F.linear(x, gate)) * F.linear(x, up), p["2.weight"])

    return run


# What the left column computes, where it is not torch: a function of inputs and parameters.
MEANING = {
    "te.Linear(16, 8)": linear,
    "te.LayerNorm(16)": lambda x, p: F.layer_norm(x, (16,), p["weight"], p["bias"], 1e-5),
    "te.RMSNorm(16)": lambda x, p: F.rms_norm(x, (16,), p["weight"], 1e-5),
    "te.LayerNormLinear(16, 8)": lambda x, p: linear(norm(x, p), p),
    "te.LayerNormMLP(16, 32)": lambda x, p: mlp(x, p, tanh_gelu),
    'te.LayerNormMLP(16, 32, activation="swiglu")': lambda x, p: mlp(
        x, p, lambda z: silu_gate(z[..., :32], z[..., 32:])
    ),
    "te.ops.Sequential(te.ops.Linear(16, 8), te.ops.GELU())": lambda x, p: tanh_gelu(
        F.linear(x, p["0.weight"], p["0.bias"])
    ),
    "te.ops.ReLU()": lambda x, p: F.relu(x),
    "te.ops.QGELU()": lambda x, p: x * torch.sigmoid(1.702 * x),
    "te.ops.SReLU()": lambda x, p: F.relu(x).square(),
    "te.ops.SwiGLU()": lambda x, p: silu_gate(x[..., :8], x[..., 8:]),
    "te.ops.ClampedSwiGLU()": lambda x, p: clamped(x),
    "te.ops.SwiGLU(cache_quantized_input=True)": lambda x, p: silu_gate(x[..., :8], x[..., 8:]),
    "te.jit.bias_gelu_fused_": lambda x, p: tanh_gelu(x + 1),
    "LigerRMSNorm(16)": lambda x, p: F.rms_norm(x, (16,), p["weight"], 1e-6),
    'LigerRMSNorm(16, offset=1.0, init_fn="zeros")': lambda x, p: F.rms_norm(
        x, (16,), 1 + p["weight"], 1e-6
    ),
    "LigerLayerNorm(16)": lambda x, p: F.layer_norm(x, (16,), p["weight"], p["bias"], 1e-6),
    "LigerSiLUMulFunction.apply(a, b)": lambda a, b, p: silu_gate(a, b),
    "LigerGELUMulFunction.apply(a, b)": lambda a, b, p: tanh_gelu(a) * b,
    "LigerSwiGLUMLP(config)": liger_mlp(F.silu),
    "LigerGEGLUMLP(config)": liger_mlp(tanh_gelu),
    "convert_to_float8_training(model)": lambda x, p: F.linear(x, p["0.weight"], p["0.bias"]),
    "MXLinear": lambda x, p: F.linear(x, p["0.weight"], p["0.bias"]),
}

# Contexts and recipes: the right column makes them, and a linear runs under them.
RECIPES = ("te.autocast", "te.fp8_autocast", "DelayedScaling", "Float8Current", "MXFP8Block",
           "Float8Block")  # fmt: skip
ROUGH = ("MXLinear", "convert_to_float8_training(model)")  # FP8 products


def evaluated(text):
    names = {"torch": torch, "nn": nn, "F": F, "tt": tt, "ops": ops, "TF": TF}
    return eval(text, {**names, "recipe": tt.recipe.Float8CurrentScaling()})  # noqa: S307


def gradients(function, inputs, parameters, g):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, [*inputs, *parameters], g, allow_unused=True)]


@pytest.mark.parametrize("section, theirs, ours", ROWS, ids=[f"{s}: {t}" for s, t, _ in ROWS])
def test_row(section, theirs, ours):
    torch.manual_seed(0)
    new = evaluated(ours)
    if theirs.startswith(RECIPES):
        module = ops.Linear(16, 8)
        x = torch.randn(32, 16)
        made = new if hasattr(new, "__enter__") else tt.autocast(recipe=new)
        plain = module(x)
        with made:
            y = module(x)
        error = ((y - plain).norm() / plain.norm()).item()
        assert 1e-4 < error < 0.1  # quantised: 2^-4 at most for each of two operands
        return
    count = 2 if theirs.endswith("apply(a, b)") else 1
    given = [torch.randn(4, 16) for _ in range(count)]
    mine, wanted = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    named = dict(new.named_parameters()) if isinstance(new, nn.Module) else {}
    for p in named.values():
        torch.nn.init.normal_(p, std=0.5)
    if theirs in MEANING:
        copies = {n: p.detach().clone().requires_grad_() for n, p in named.items()}

        def old(*inputs):
            return MEANING[theirs](*inputs, copies)

        parameters = list(copies.values())
    else:
        assert section == "From torch.nn", f"{theirs}: write its meaning in MEANING"
        old = evaluated(theirs)
        parameters = list(old.parameters()) if isinstance(old, nn.Module) else []
        for p in parameters:
            torch.nn.init.normal_(p, std=0.5)
        if parameters:
            new.load_state_dict(old.state_dict())  # by the names of the left column
    g = torch.randn_like(new(*given))
    left = gradients(old, wanted, parameters, g)
    right = gradients(new, mine, list(named.values()), g)
    # An input that is cached as e4m3, or FP8 operands.
    rough = theirs in ROUGH or "cache_quantized_input" in theirs
    for a, b in zip(right, left, strict=True):
        if rough:
            assert ((a - b).norm() / b.norm()).item() < 0.15
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_page_has_every_library_and_no_meaning_is_unused():
    assert {s for s, _, _ in ROWS} == {
        "From torch.nn", "From Transformer Engine", "From Liger", "From torchao"
    }  # fmt: skip
    assert set(MEANING) <= {theirs for _, theirs, _ in ROWS}
    tables = [line for line in PAGE.read_text(encoding="utf-8").split("\n") if line[:3] == "| `"]
    assert len(tables) == len(ROWS) > 50
