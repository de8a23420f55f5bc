"""Tests of the front ends on a CUDA device: strict results have the bits of the CPU.

pytest runs it like any other file. `python3 python/tests/test_gpu.py [NAME…]` needs no pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
try:
    import pytest
except ImportError:
    pytest = None
else:
    pytest.importorskip("torch")

import tenon  # noqa: E402
import tenon.torch as tt  # noqa: E402
import torch  # noqa: E402
from gpu_support import (  # noqa: E402
    DEVICE,
    DTYPES,
    WHY_NOT,
    all_same,
    close,
    leaf,
    main,
    needs_cuda,
    numbers,
    on_both,
    raises,
    same,
    skip,
)
from tenon.torch import functional, jit, ops, quantizer  # noqa: E402

if pytest is not None:
    pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


def test_every_activation():
    for name in tenon.names():
        width = 2 if tenon.activation(name).inputs == 2 else 1
        for dtype in DTYPES:
            x = numbers(16, 40 * width, dtype=dtype, special=True)
            all_same(
                lambda x: functional.activation(name, x, precision="strict"),  # noqa: B023
                x,
                what=f"{name} {dtype}",
            )
    for name in ("gelu", "swiglu"):
        x, bias = numbers(33, 62, dtype=torch.bfloat16), numbers(62, dtype=torch.bfloat16, seed=1)
        all_same(
            lambda x, bias: functional.activation(name, x, bias=bias, precision="strict"),  # noqa: B023
            *(x, bias),
            what=f"{name} with bias",
        )


def test_forms_of_an_activation():
    strict = {"precision": "strict"}
    a, b = numbers(19, 24), numbers(19, 24, seed=1)
    bias, scale = numbers(48, seed=2), numbers(19, seed=3)
    act = functional.activation
    all_same(lambda a, b, bias: act("swiglu", a, b=b, bias=bias, **strict), a, b, bias, what="b")
    x = numbers(19, 48, seed=4)
    for layout in ("swapped", "interleaved(4)"):
        all_same(lambda x: act("geglu", x, layout=layout, **strict), x, what=layout)  # noqa: B023
    all_same(lambda x, s: act("gelu", x, scale=s, **strict), x, scale, what="scaled")
    all_same(lambda x: act("x*sigmoid(beta*x); beta = 1", x, beta=1.5, **strict), x, what="formula")
    eager = {**strict, "rounding": "eager"}
    h, k = x.bfloat16(), bias.bfloat16()
    all_same(lambda x, bias: act("gelu", x, bias=bias, **eager), h, k, what="eager")
    # Strided rows, a transposed copy, no rows, no columns.
    wide = numbers(8, 3, 96, seed=5)
    for what, view in (
        ("rows", lambda t: t[..., :48]),
        ("every other", lambda t: t[:, ::2]),
        ("transposed", lambda t: t.transpose(0, 2)),
        ("empty", lambda t: t[:0]),
    ):
        all_same(lambda t: act("gelu", view(t), **strict), wide, what=what)  # noqa: B023
    there = functional.gelu(wide.to(DEVICE), out_dtype=torch.bfloat16, precision="strict")
    here = functional.gelu(wide, out_dtype=torch.bfloat16, precision="strict")
    same(there, here, "out_dtype")


def test_native_against_float64():
    x = numbers(64, 256)
    for dtype, half in ((torch.float32, 2.0**-24), (torch.float16, 2.0**-11)):
        y = functional.silu(x.to(dtype).to(DEVICE)).cpu().double()
        exact = torch.nn.functional.silu(x.to(dtype).double())
        assert ((y - exact).abs() <= exact.abs() * 8 * half + 1e-7).all(), dtype
    y = functional.silu(x.bfloat16().to(DEVICE)).cpu().double()
    exact = torch.nn.functional.silu(x.bfloat16().double())
    # Half a bf16 step, plus the error of native precision.
    assert ((y - exact).abs() <= exact.abs() * (2.0**-8 + 2.0**-11) + 1e-30).all()


def _quantizers(device):
    one = torch.ones(1, device=device)
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        sides = {"rowwise": rowwise, "columnwise": columnwise}
        yield "delayed", quantizer.Float8Quantizer(4 * one, 0 * one, "e4m3", **sides)
        yield "current", quantizer.Float8CurrentScalingQuantizer("e5m2", **sides)
        yield "mxfp8", quantizer.MXFP8Quantizer("e4m3", **sides)
        for dim in (1, 2):
            made = quantizer.Float8BlockQuantizer("e4m3", block_scaling_dim=dim, **sides)
            yield f"block {dim}", made


def test_quantised_tensors():
    x = numbers(70, 160, dtype=torch.bfloat16)
    gated = numbers(70, 320, dtype=torch.bfloat16, seed=1)
    for (mode, q), (_, p) in zip(_quantizers(DEVICE), _quantizers("cpu"), strict=True):
        what = f"{mode} {q.get_usages()}"
        for name, call in (
            ("quantize", lambda q, x, _: q(x)),
            ("swiglu", lambda q, _, x: functional.swiglu(x, quantizer=q, precision="strict")),
        ):
            there, here = call(q, x.to(DEVICE), gated.to(DEVICE)), call(p, x, gated)
            assert there.device.type == DEVICE
            for part in (
                "rowwise_data",
                "rowwise_scale_inv",
                "columnwise_data",
                "columnwise_scale_inv",
            ):
                a, b = getattr(there, part), getattr(here, part)
                assert (a is None) == (b is None)
                if a is not None:
                    same(a, b, f"{name} {what} {part}")
            same(there.dequantize(), here.dequantize(), f"{name} {what} dequantize")
        if mode == "delayed":
            same(q.amax, p.amax, "amax")
            q.calibrate(3 * x.to(DEVICE))
            p.calibrate(3 * x)
            same(q.amax, p.amax, "calibrated amax")
    source = leaf(x, DEVICE)
    functional.quantize(source, quantizer.MXFP8Quantizer("e4m3")).dequantize().sum().backward()
    assert torch.equal(source.grad, torch.ones_like(source)), "straight through"


def test_delayed_update():
    history = numbers(6, 5).abs()
    history[0, 1], history[0, 2], history[2, 3] = 0, float("inf"), float("nan")
    scale = numbers(5, seed=1).abs() + 0.5
    for algorithm in ("max", "most_recent"):
        there = history.to(DEVICE), scale.to(DEVICE)
        here = history.clone(), scale.clone()
        for state in (there, here):
            quantizer.delayed_update(*state, "e4m3", margin=1, amax_compute_algo=algorithm)
        same(there[0], here[0], algorithm)
        same(there[1], here[1], algorithm)


def test_dropout():
    x, residual = numbers(50, 72, dtype=torch.bfloat16), numbers(50, 72, seed=1).bfloat16()
    bias = numbers(72, seed=2).bfloat16()
    start = torch.tensor([123, 7, 3, 8, 96], device="cpu")
    results = []
    for device in (DEVICE, "cpu"):
        state = start.clone().to(device)
        given = [leaf(t, device) for t in (x, bias, residual)]
        y = functional.bias_dropout_add(*given, 0.3, random=state, precision="strict")
        y.backward(numbers(50, 72, seed=3).bfloat16().to(device))
        assert state.tolist() == [123, 8, 3, 8, 96], "the offset moves on by one"
        results.append([y, *(t.grad for t in given)])
    for i, pair in enumerate(zip(*results, strict=True)):
        same(*pair, f"result {i}")
    torch.manual_seed(3)
    first = functional.dropout(x.to(DEVICE), 0.5)
    second = functional.dropout(x.to(DEVICE), 0.5)
    torch.manual_seed(3)
    again = functional.dropout(x.to(DEVICE), 0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    kept = (functional.dropout(torch.ones(1000, 1000, device=DEVICE), 0.25) != 0).double().mean()
    assert abs(kept.item() - 0.75) < 0.003


def test_norms():
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(21, 96, dtype=dtype)
        all_same(lambda x: functional.l2normalization(x, precision="strict"), x, what=f"l2 {dtype}")
    for make in (ops.LayerNorm, ops.RMSNorm):
        for rows in (5, 300):
            on_both(make(96), numbers(rows, 96), what=f"{make.__name__} {rows}")


def test_ops():
    x, extra = numbers(24, 64), numbers(24, 64, seed=1)
    scales = numbers(24, seed=2)
    biased = ops.Bias(64)
    torch.nn.init.normal_(biased.bias)
    # Without a product, float32 results are strict.
    on_both(ops.Sequential(biased, ops.GELU(), ops.ConstantScale(2.0)), x, what="bias gelu scale")
    on_both(ops.Sequential(biased, ops.AddExtraInput()), x, extra, what="bias add")
    on_both(ops.Sequential(ops.RMSNorm(64), ops.SwiGLU()), x, what="norm swiglu")
    on_both(ops.L2Normalization(), x, what="l2")
    on_both(ops.ScaledActivation("swiglu"), x, scales, what="scaled")
    on_both(ops.SwiGLU(cache_quantized_input=True), x, what="cached")
    on_both(ops.Sequential(ops.Reshape((12, 128)), ops.Identity(), ops.SiLU()), x, what="reshape")


def _mlp(width=64, hidden=96):
    torch.manual_seed(0)
    return ops.Sequential(
        *(ops.RMSNorm(width), ops.Linear(width, 2 * hidden), ops.SwiGLU()),
        *(ops.Linear(hidden, width), ops.Dropout(0.0), ops.AddExtraInput()),
    )


def test_sequential():
    torch.backends.cuda.matmul.allow_tf32 = False
    x, extra = numbers(40, 64), numbers(40, 64, seed=1)
    for dtype, relative in ((torch.float32, 2.0**-18), (torch.bfloat16, 2.0**-5)):
        on_both(_mlp(), x, extra, relative=relative, what=f"mlp {dtype}", dtype=dtype)
    told = tt.explain(_mlp().to(DEVICE), x.to(DEVICE).requires_grad_())
    assert "plan" in told and DEVICE in told, told


def test_quantised_linear():
    x = numbers(64, 128)
    results = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(1)
        linear = ops.BasicLinear(128, 256).to(device)
        for i in range(2):
            linear.set_quantizer("forward", i, quantizer.MXFP8Quantizer("e4m3"))
        linear.set_quantizer("backward", 0, quantizer.MXFP8Quantizer("e4m3"))
        with torch.no_grad():
            linear.weight.copy_(numbers(256, 128, seed=2))
        given = leaf(x, device)
        # No approximated function: near a boundary, its error may choose another code.
        y = ops.Sequential(ops.SReLU(), linear)(given)
        y.backward(numbers(64, 256, seed=3).to(device))
        results.append([y, given.grad, linear.weight.grad])
    for i, (there, here) in enumerate(zip(*results, strict=True)):
        close(there, here, 2.0**-16, f"result {i}")


def test_jit_functions():
    x, bias = numbers(17, 80), numbers(80, seed=1)
    all_same(jit.bias_gelu_fused, x, bias, what="bias_gelu")
    all_same(lambda x: jit.gelu_fused(x), x, what="gelu")
    all_same(lambda x: jit.l2normalization_fused(x, 1e-6), x, what="l2")
    grad = numbers(17, 80, seed=2)
    there = jit.bgrad_dgelu_fused(grad.to(DEVICE), x.to(DEVICE), bias.to(DEVICE))
    here = jit.bgrad_dgelu_fused(grad, x, bias)
    for i, pair in enumerate(zip(there, here, strict=True)):
        same(*pair, f"bgrad_dgelu {i}")

    @jit.lazy_compile
    def mine(x, bias):
        return torch.tanh(x + bias) * 2

    all_same(mine, x, bias, what="lazy_compile")
    assert mine.how.startswith("tenon:"), mine.how
    jit.warmup_jit_bias_dropout_add(64, torch.bfloat16, 4, 2, device=DEVICE)
    jit.warmup_jit_bias_gelu(64, torch.bfloat16, 4, 2, device=DEVICE)
    jit.warmup_jit_l2normalization(64, torch.bfloat16, 4, 2, device=DEVICE)


def test_side_stream():
    """A call runs in the current stream: it reads earlier writes of the stream."""
    needs_cuda()
    x = torch.zeros(1 << 20, device=DEVICE)
    value = numbers(1 << 20).to(DEVICE)
    expected = functional.gelu(value)
    grad = torch.ones_like(x)
    functional.activation("gelu", leaf(x, DEVICE)).backward(grad)  # compile before the race
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(value)
        y = functional.gelu(x)
        z = leaf(x, DEVICE)
        functional.gelu(z).backward(grad)
    stream.synchronize()
    assert torch.equal(y, expected)
    other = leaf(value, DEVICE)
    functional.gelu(other).backward(grad)
    assert torch.equal(z.grad, other.grad)


def test_nothing_waits():
    needs_cuda()
    x = leaf(numbers(64, 64), DEVICE)
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Dropout(0.1)).to(DEVICE)
    model(x).sum().backward()
    q = quantizer.Float8CurrentScalingQuantizer("e4m3")
    q(x.detach())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
        q(x.detach()).dequantize()
        functional.bias_dropout_add(x, None, None, 0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(run):
    """A captured graph of run(), after the warm-up that capture needs, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def test_a_graph_of_a_step_with_delayed_scaling():
    """Replays are eager steps bit for bit, updates of the scales included."""
    needs_cuda()
    recipe = tt.recipe.DelayedScaling(amax_history_len=16)

    def make():
        torch.manual_seed(0)
        model = ops.Sequential(
            ops.RMSNorm(128), ops.Linear(128, 256), ops.GELU(), ops.Linear(256, 128)
        )
        return model.to(DEVICE, torch.bfloat16), torch.zeros((), device=DEVICE)

    x = numbers(64, 128).to(DEVICE, torch.bfloat16)

    def stepper(model, count):
        def step():
            count.add_(1)
            with tt.autocast(recipe=recipe):
                y = model(x * (1 + count))
            loss = y.float().square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(1e-3 * p.grad)
                    p.grad = None
            return loss

        return step

    (eager, first), (graphed, second) = make(), make()
    step = stepper(eager, first)
    for _ in range(2):
        step()
    graph, loss = _captured(stepper(graphed, second))
    for i in range(50):
        graph.replay()
        want = step()
        same(loss, want.detach().cpu(), f"the loss of step {i}")
    for (name, mine), want in zip(
        graphed.state_dict().items(), eager.state_dict().values(), strict=True
    ):
        same(mine, want.cpu(), name)


def test_graphs():
    needs_cuda()
    x, grad = numbers(96, 64).to(DEVICE), torch.ones(96, 64, device=DEVICE)
    state = torch.tensor([5, 0, 0, 0, 64], device=DEVICE)
    bias = leaf(numbers(64, seed=1), DEVICE)
    source = x.clone().requires_grad_()

    def dropped():
        y = functional.bias_dropout_add(source, bias, x, 0.5, random=state)
        return (y, *torch.autograd.grad(y, (source, bias), grad))

    graph, (y, dx, dbias) = _captured(dropped)
    before = state[1].item()
    seen = []
    for i in range(3):
        graph.replay()
        assert state[1].item() == before + i + 1, "the offset advances"
        here = torch.tensor([5, before + i, 0, 0, 64], device="cpu")
        given = [leaf(t, "cpu") for t in (source, bias)]
        expected = functional.bias_dropout_add(*given, x.cpu(), 0.5, random=here)
        expected.backward(grad.cpu())
        same(y, expected, "replayed")
        same(dx, given[0].grad, "its gradient")
        same(dbias, given[1].grad, "its bias gradient")
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])

    # A plan with a dropout, and a step with products. Seeds are drawn by torch.
    plan = ops.Sequential(ops.Bias(64), ops.Dropout(0.5), ops.ConstantScale(2.0))
    mlp = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Dropout(0.5))
    for model, whole in ((plan.to(DEVICE), True), (mlp.to(DEVICE), False)):

        def step(model=model):
            y = model(source)
            return (y, *torch.autograd.grad(y, (source, *model.parameters()), grad))

        graph, (y, dx, *_) = _captured(step)
        masks = []
        for _ in range(3):
            graph.replay()
            masks.append((y != 0).clone())
            if whole:
                assert torch.equal(dx != 0, masks[-1]), "the gradient has its forward's mask"
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_graphs_of_quantised_steps():
    needs_cuda()
    x = numbers(128, 256, dtype=torch.bfloat16).to(DEVICE)
    for (mode, q), (_, p) in zip(_quantizers(DEVICE), _quantizers(DEVICE), strict=True):
        graph, encoded = _captured(lambda: functional.swiglu(x, quantizer=q))  # noqa: B023
        x.copy_(numbers(128, 256, dtype=torch.bfloat16, seed=5))
        graph.replay()
        expected = functional.swiglu(x, quantizer=p)
        for part in (
            "rowwise_data",
            "rowwise_scale_inv",
            "columnwise_data",
            "columnwise_scale_inv",
        ):
            a, b = getattr(encoded, part), getattr(expected, part)
            if a is not None:
                same(a, b.cpu(), f"{mode} {part}")


def test_autocast_and_compile():
    x = numbers(32, 64).to(DEVICE)
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU()).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = model(x.requires_grad_())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    compiled = torch.compile(lambda t: functional.gelu(t * 2) + 1, backend="aot_eager")
    z = leaf(numbers(16, 64), DEVICE)
    out = compiled(z)
    out.sum().backward()
    assert torch.equal(out, functional.gelu(z.detach() * 2) + 1) and z.grad.device == z.device


def test_many_threads():
    needs_cuda()
    expected = functional.gelu(numbers(64, 512).to(DEVICE))
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            x = numbers(64, 512).to(DEVICE)
            for _ in range(50):
                if not torch.equal(functional.gelu(x), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_another_device():
    needs_cuda()
    if torch.cuda.device_count() < 2:
        skip("there is one CUDA device")
    x = numbers(32, 64)
    y = functional.gelu(x.to("cuda:1"), precision="strict")
    assert y.device.index == 1 and torch.cuda.current_device() == 0
    same(y, functional.gelu(x, precision="strict"))
    raises(ValueError, "cuda:1", lambda: functional.gelu(x.to(DEVICE), bias=x[0].to("cuda:1")))


def test_more_than_2_31_elements():
    needs_cuda()
    rows, cols = (1 << 16) + 3, 1 << 15
    if torch.cuda.mem_get_info()[0] < 3 * 2 * rows * cols:
        skip("too little memory is free")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = numbers(3, cols, dtype=torch.bfloat16).to(DEVICE)
    y = functional.gelu(x, precision="strict")
    same(y[-3:], functional.gelu(x[-3:].cpu(), precision="strict"))


def test_mistakes():
    needs_cuda()
    with torch.device("cpu"):
        _mistakes()


def _mistakes():
    x = numbers(4, 8)
    there = x.to(DEVICE)
    raises(
        ValueError, "bias is on cpu, but x is on cuda:0", lambda: functional.gelu(there, bias=x[0])
    )
    raises(ValueError, "x is on cpu, but bias", lambda: functional.gelu(x, bias=there[0]))
    raises(ValueError, "residual", lambda: functional.bias_dropout_add(there, None, x, 0.1))
    state = torch.tensor([1, 0, 0, 0, 8], device="cpu")
    raises(ValueError, "random", lambda: functional.dropout(there, 0.1, random=state))
    raises(ValueError, "weight", lambda: ops.BasicLinear(8, 8)(there))
    raises(ValueError, "LayerNorm: weight", lambda: ops.LayerNorm(8)(there))
    delayed = quantizer.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    raises(ValueError, "scale is on cpu", lambda: delayed(there))
    raises(TypeError, "float64", lambda: functional.gelu(there.double()))
    raises(NotImplementedError, "meta", lambda: functional.gelu(torch.ones(2, 2, device="meta")))
    raises(ValueError, "bias is on the cpu", lambda: tenon.gelu(there, bias=x[0].numpy()))


def _arrays(name, to_device, to_host, low):
    """Tests functions of `tenon` on CUDA arrays of another library. `low` is a 16-bit dtype."""
    import numpy as np

    x = numbers(24, 64).numpy()
    bias, grad = numbers(64, seed=1).numpy(), numbers(24, 64, seed=2).numpy()
    there = to_device(x)
    strict = {"precision": "strict"}

    def check(a, b, what):
        assert type(a) is type(there), f"{name} {what}: {type(a)}"
        np.testing.assert_array_equal(to_host(a), np.asarray(b), f"{name} {what}")

    check(tenon.gelu(there, **strict), tenon.gelu(x, **strict), "gelu")
    check(tenon.gelu(there[:, ::2], **strict), tenon.gelu(x[:, ::2], **strict), "strided")
    check(
        tenon.gelu(there, bias=to_device(bias), **strict),
        tenon.gelu(x, bias=bias, **strict),
        "bias",
    )
    lower = tenon.swiglu(there, dtype=low, **strict)
    check(lower, tenon.swiglu(x, dtype=low, **strict), "lower")
    found = tenon.gelu.backward(to_device(grad), there, bias=to_device(bias), **strict)
    expected = tenon.gelu.backward(grad, x, bias=bias, **strict)
    check(found.dx, expected.dx, "dx")
    check(found.dbias, expected.dbias, "dbias")
    for mode in ("current", "mxfp8", "block1x128", "e5m2:block128x128"):
        q, p = (tenon.quantize(t, mode, columnwise=True, health=True) for t in (there, x))
        assert type(q.data) is type(there)
        check(q.dequantize(), p.dequantize(), mode)
        check(q.requantize("mxfp8").dequantize(), p.requantize("mxfp8").dequantize(), mode)
        assert q.health == p.health
    amax = to_device(np.zeros(1, np.float32))
    q = tenon.quantize(there, "delayed", scale=4.0, amax=amax)
    check(q.dequantize(), tenon.quantize(x, "delayed", scale=4.0).dequantize(), "delayed")
    assert to_host(amax)[0] == np.abs(x).max()
    states = tenon.Random(3), tenon.Random(3)
    before = states[0].copy()
    y = tenon.bias_dropout_add(there, None, there, 0.4, random=states[0])
    check(y, tenon.bias_dropout_add(x, None, x, 0.4, random=states[1]), "dropout")
    assert states[0] == states[1]
    dx = tenon.dropout_backward(to_device(grad), 0.4, random=before)
    check(dx, tenon.dropout_backward(grad, 0.4, random=before), "dropout backward")
    check(tenon.l2_normalization(there), tenon.l2_normalization(x), "l2")
    check(
        tenon.l2_normalization_backward(to_device(grad), there),
        *(tenon.l2_normalization_backward(grad, x), "l2 backward"),
    )

    @tenon.fuse(precision="strict")
    def mine(x, bias, c):
        return tenon.tanh(x + bias) * c

    check(mine(there, to_device(bias), 2.0), mine(x, bias, 2.0), "fuse")
    pairs = zip(
        mine.grad(to_device(grad), there, to_device(bias), 2.0),
        *(mine.grad(grad, x, bias, 2.0),),
        strict=True,
    )
    for i, (a, b) in enumerate(pairs):
        check(a, b, f"fuse gradient {i}")
    check(tenon.grad("gelu")(there), tenon.grad("gelu")(x), "grad")


def test_arrays_of_torch():
    _arrays("torch", lambda a: torch.from_numpy(a).to(DEVICE), lambda t: t.cpu().numpy(), "f16")


def test_arrays_of_cupy():
    try:
        import cupy
    except ImportError:
        skip("cupy is not installed")
    _arrays("cupy", cupy.asarray, cupy.asnumpy, "f16")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(numbers(64, 64).numpy())
        y = tenon.gelu(x, precision="strict")
    stream.synchronize()
    assert (cupy.asnumpy(y) == tenon.gelu(numbers(64, 64).numpy(), precision="strict")).all()


COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+FUSION"


def _jax(flags):
    environment = dict(os.environ, JAX_PLATFORMS="cuda,cpu", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    environment["XLA_FLAGS"] = flags
    program = str(Path(__file__).with_name("gpu_jax.py"))
    return subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )


def test_jax():
    """Uses a separate process in which JAX may choose the GPU. With and without command buffers."""
    for flags in ("", f"{COMMAND_BUFFERS} --xla_gpu_graph_min_graph_size=1"):
        done = _jax(flags)
        if "Unknown flag" in done.stderr:
            done = _jax(COMMAND_BUFFERS)
        if done.returncode == 77:
            skip(done.stdout.strip())
        told = f"XLA_FLAGS={flags}\n{done.stdout}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, told


if __name__ == "__main__":
    sys.exit(main(globals(), sys.argv[1:]))
