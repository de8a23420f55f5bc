"""Tests of tenon.torch.functional against torch in float64, forward and backward."""

import gc
import math
import weakref

import pytest

torch = pytest.importorskip("torch")
import tenon  # noqa: E402
import tenon.torch.functional as F  # noqa: E402
import torch.nn.functional as nn  # noqa: E402
from tenon.torch import _call, jit  # noqa: E402
from tenon.torch.quantizer import Float8Quantizer, MXFP8Quantizer, delayed_update  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One rounding, plus the error of functions in native precision (2^-12.5 for bf16, 2^-15.5 for f16).
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def gelu(x):
    return nn.gelu(x, approximate="tanh")


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return nn.relu(x) ** 2


def clamped_swiglu(a, b, limit=7.0, alpha=1.702, offset=1.0):
    w = a.clamp(max=limit)
    return w * torch.sigmoid(alpha * w) * (b.clamp(-limit, limit) + offset)


def situglu(a, b, beta1=4.0, beta2=25.0):
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


UNARY = {
    "gelu": gelu,
    "gelu_erf": nn.gelu,
    "silu": nn.silu,
    "qgelu": qgelu,
    "relu": nn.relu,
    "srelu": srelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": nn.softplus,
    "mish": nn.mish,
    "hardswish": nn.hardswish,
    "leaky_relu": nn.leaky_relu,
    "elu": nn.elu,
}
GATED = {
    "glu": lambda a, b: torch.sigmoid(a) * b,
    "geglu": lambda a, b: gelu(a) * b,
    "geglu_erf": lambda a, b: nn.gelu(a) * b,
    "swiglu": lambda a, b: nn.silu(a) * b,
    "reglu": lambda a, b: nn.relu(a) * b,
    "qgeglu": lambda a, b: qgelu(a) * b,
    "sreglu": lambda a, b: srelu(a) * b,
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
}


def leaf(*shape, dtype=torch.float32, spread=2.0):
    x = (spread * torch.randn(*shape)).to(dtype)
    if not x.is_cpu:  # another generator may give values at the kinks of hardswish,
        x[x.abs() == 3] = 2.5  # where torch uses the other one-sided derivative
    return x.requires_grad_()


def close(got, expected, dtype, rows=1):
    assert got.shape == expected.shape
    tolerance = TOLERANCE[dtype] * math.sqrt(max(rows, 1))
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
    )


def compare(ours, reference, inputs, dtype, rows=1):
    """Compares value and all gradients of ours(*inputs) with reference(*inputs in float64)."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    y, expected = ours(*inputs), reference(*wide)
    close(y, expected, y.dtype)
    g = torch.randn(y.shape).to(y.dtype)
    y.backward(g)
    expected.backward(g.double())
    for t, w in zip(inputs, wide, strict=True):
        if t is not None and t.requires_grad:
            assert t.grad.dtype == t.dtype
            close(t.grad, w.grad, dtype, rows)


def test_every_reference_is_of_a_registered_name():
    assert {*UNARY, *GATED} <= set(_call.names())
    assert {"gelu", "swiglu", "dropout"} <= set(dir(F))


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 130), (2, 1, 3, 9), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype, shape):
    torch.manual_seed(0)
    compare(getattr(F, name), UNARY[name], [leaf(*shape, dtype=dtype)], dtype)


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(6,), (3, 10), (2, 3, 66), (2, 1, 3, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATED)
def test_gated(name, dtype, shape):
    torch.manual_seed(1)
    compare(
        getattr(F, name),
        lambda x: GATED[name](*x.chunk(2, -1)),
        [leaf(*shape, dtype=dtype)],
        dtype,
    )


def halves(x, layout):
    if layout == "stacked":
        return x.chunk(2, -1)
    if layout == "swapped":
        return x.chunk(2, -1)[::-1]
    k = int(layout[len("interleaved(") : -1])
    parts = x.unflatten(-1, (-1, 2, k))
    return parts[..., 0, :].flatten(-2), parts[..., 1, :].flatten(-2)


@pytest.mark.compiles
@pytest.mark.parametrize("layout", ["stacked", "swapped", "interleaved(1)", "interleaved(4)"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
def test_layouts_with_bias_and_scale(name, dtype, layout):
    torch.manual_seed(2)
    x, bias, scale = leaf(3, 5, 24, dtype=dtype), leaf(24, dtype=dtype), leaf(3, 5, dtype=dtype)
    compare(
        lambda x, bias, scale: getattr(F, name)(x, bias=bias, scale=scale, layout=layout),
        lambda x, bias, scale: GATED[name](*halves(x + bias, layout)) * scale.unsqueeze(-1),
        [x, bias, scale],
        dtype,
        rows=15,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_tensors(dtype):
    torch.manual_seed(3)
    x = leaf(4, 6, 20, dtype=dtype)
    bias = leaf(20, dtype=dtype)

    def reference(x, bias):
        a, b = (x + bias).chunk(2, -1)
        return nn.silu(a) * b

    def ours(x, bias):
        a, b = x.chunk(2, -1)
        assert _call.foldable(a) is a and not a.is_contiguous()  # read without a copy
        return F.swiglu(a, b=b, bias=bias)

    compare(ours, reference, [x, bias], dtype, rows=24)


@pytest.mark.parametrize("shape", [(9,), (5, 9), (2, 3, 9), (2, 2, 2, 9), (0, 9)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias(dtype, shape):
    torch.manual_seed(4)
    x, bias = leaf(*shape, dtype=dtype), leaf(9, dtype=dtype)
    compare(
        lambda x, bias: F.gelu(x, bias=bias),
        lambda x, bias: gelu(x + bias),
        [x, bias],
        dtype,
        rows=math.prod(shape[:-1]),
    )


def test_scale_of_a_unary_activation_may_be_a_column_and_strided():
    x, scales = leaf(6, 4), leaf(6, 3)
    compare(
        lambda x, s: F.silu(x, scale=s[:, 1:2]),
        lambda x, s: nn.silu(x) * s[:, 1:2],
        [x, scales],
        torch.float32,
    )


def test_parameters_formulas_and_functions():
    import tenon

    x = torch.randn(3, 8)
    close(F.elu(x, alpha=0.5), nn.elu(x.double(), 0.5), torch.float32)
    close(F.activation("leaky_relu(slope=0.3)", x), nn.leaky_relu(x.double(), 0.3), torch.float32)
    text = "x*sigmoid(beta*x); beta = 1"
    compare(lambda x: F.activation(text, x, beta=1.702), qgelu, [leaf(3, 8)], torch.float32)
    compare(
        lambda x: F.activation(lambda x: x * tenon.sigmoid(x), x),
        nn.silu,
        [leaf(3, 8)],
        torch.float32,
    )
    compare(
        lambda x: F.activation("gated(elu)", x, alpha=0.25),
        lambda x: nn.elu(x[..., :4], 0.25) * x[..., 4:],
        [leaf(3, 8)],
        torch.float32,
    )
    close(F.activation(tenon.activation("gelu"), x), gelu(x.double()), torch.float32)


def test_names_of_ones_own_may_change_their_meaning():
    import tenon

    tenon.define("torch_test_own", "2*x")
    x = torch.randn(2, 6)
    assert torch.equal(F.torch_test_own(x), 2 * x)
    tenon.define("torch_test_own", "a*b")
    assert torch.equal(F.torch_test_own(x), x[:, :3] * x[:, 3:])
    assert F.quick_gelu(x).shape == x.shape
    with pytest.raises(AttributeError, match="gelu"):
        F.gellu  # noqa: B018
    with pytest.raises(AttributeError):
        F.x  # noqa: B018


def test_out_dtype_precision_and_rounding():
    x = leaf(5, 33, dtype=torch.bfloat16)
    y = F.gelu(x, out_dtype=torch.float32, precision="strict")
    assert y.dtype == torch.float32
    close(y, gelu(x.detach().double()), torch.float32)
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    bias = torch.randn(33).bfloat16()
    eager = F.relu(x.detach(), bias=bias, rounding="eager")
    assert torch.equal(eager, nn.relu(x.detach() + bias))


def strided(kind):
    base = torch.randn(6, 4, 10)
    return {
        "transposed": lambda: base[0].t(),
        "permuted": lambda: base.permute(2, 0, 1),
        "sliced columns": lambda: base[..., 2:9],
        "sliced rows": lambda: base[::2],
        "every other column": lambda: base[..., ::2],
        "expanded": lambda: base[0, 0].expand(3, 10),
        "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }[kind]()


KINDS = (
    "transposed",
    "permuted",
    "sliced columns",
    "sliced rows",
    "every other column",
    "expanded",
    "channels last",
)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_tensors(kind):
    x = strided(kind).requires_grad_()
    compare(F.gelu, gelu, [x], torch.float32)
    bias = leaf(x.shape[-1])
    x = strided(kind).requires_grad_()
    compare(
        lambda x, bias: F.silu(x, bias=bias),
        lambda x, bias: nn.silu(x + bias),
        [x, bias],
        torch.float32,
        rows=x.numel(),
    )
    grad = torch.randn(x.shape[::-1]).permute(*reversed(range(x.dim())))
    x = strided(kind).requires_grad_()
    F.gelu(x).backward(grad)
    wide = x.detach().double().requires_grad_()
    gelu(wide).backward(grad.double())
    close(x.grad, wide.grad, torch.float32)


def test_dense_tensors_are_not_copied():
    x = torch.randn(5, 7).t()
    y = F.gelu(x)
    assert y.stride() == x.stride()  # same as in torch
    assert _call.foldable(torch.randn(4, 5, 8)[..., :3]).stride() == (40, 8, 1)
    assert _call.foldable(torch.randn(4, 1, 8)[:, :, 2:]).stride()[0] == 8


def test_zero_dimensions():
    x = torch.tensor(0.5, requires_grad=True)
    compare(F.gelu, gelu, [x], torch.float32)
    with pytest.raises(ValueError, match="0-d"):
        F.swiglu(torch.tensor(1.0))
    with pytest.raises(ValueError, match="0-d"):
        F.l2normalization(torch.tensor(1.0))
    assert F.gelu(torch.empty(3, 0)).shape == (3, 0)
    assert F.swiglu(torch.empty(0, 0)).shape == (0, 0)


def test_zero_rows_have_zero_bias_gradients():
    x, bias = leaf(0, 5), leaf(5)
    F.gelu(x, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros(5)) and x.grad.shape == (0, 5)


@pytest.mark.parametrize(
    ("needed", "outputs"),
    [
        (("x",), {"dx"}),
        (("bias",), {"dbias"}),
        (("scale",), {"dscale"}),
        (("x", "bias", "scale"), {"dx", "dbias", "dscale"}),
    ],
)
def test_only_what_is_needed_is_computed(monkeypatch, needed, outputs):
    seen = {}
    real = _call.backward

    def spy(act, options, layout=None, **views):
        seen.update(views)
        real(act, options, layout, **views)

    monkeypatch.setattr(_call, "backward", spy)
    given = {"x": torch.randn(3, 4), "bias": torch.randn(4), "scale": torch.randn(3)}
    for name in needed:
        given[name].requires_grad_()
    F.gelu(given.pop("x"), **given).sum().backward()
    assert {name for name in seen if name.startswith("d")} == outputs


def test_without_a_gradient_nothing_is_kept():
    x = torch.randn(3, 4)
    assert F.gelu(x).grad_fn is None
    with torch.no_grad():
        assert F.gelu(x.requires_grad_(), bias=torch.randn(4)).grad_fn is None
    y = F.gelu(x)
    kept = weakref.ref(y)
    del y
    gc.collect()
    assert kept() is None


def test_saved_tensors_may_be_moved():
    x, bias = leaf(3, 4), leaf(4)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t, lambda t: t
    ):
        y = F.gelu(x, bias=bias)
    assert packed == [x.shape, bias.shape]
    y.sum().backward()
    expected, x.grad, bias.grad = (x.grad, bias.grad), None, None
    with torch.autograd.graph.save_on_cpu():
        y = F.gelu(x, bias=bias)
        z = F.bias_dropout_add(y, bias, y, 0.5)
        F.l2normalization(z)
    y.sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(bias.grad, expected[1])


@pytest.mark.parametrize(
    "f",
    [
        F.gelu,
        lambda x: F.gelu(x, bias=torch.ones(4)),
        F.l2normalization,
    ],
)
def test_a_second_derivative_is_refused(f):
    x = leaf(3, 4)
    (dx,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


def test_autocast_leaves_inputs_as_they_are():
    x = leaf(3, 4)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = F.gelu(x)
        mixed = F.gelu(x.bfloat16(), bias=torch.ones(4))
    assert y.dtype == torch.float32 and mixed.dtype == torch.bfloat16
    assert torch.equal(y, F.gelu(x))


def test_gradients_accumulate():
    x = leaf(3, 4)
    F.gelu(x).sum().backward()
    once = x.grad.clone()
    F.gelu(x).sum().backward()
    assert torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: F.gelu(torch.ones(3, dtype=torch.int64)), TypeError, "int64.*float32"),
        (lambda: F.gelu(torch.ones(3, dtype=torch.float64)), TypeError, "float64.*bfloat16"),
        (lambda: F.gelu([1.0]), TypeError, "list.*Tensor"),
        (lambda: F.gelu(torch.ones(3, device="meta")), NotImplementedError, "meta.*cpu"),
        (lambda: F.swiglu(torch.ones(2, 3)), ValueError, "3 columns.*even"),
        (lambda: F.gelu(torch.ones(2, 3), bias=torch.ones(4)), ValueError, "bias is 1x4"),
        (lambda: F.gelu(torch.ones(2, 3), bias=torch.ones(3).long()), TypeError, "bias.*int64"),
        (lambda: F.gelu(torch.ones(2, 3), scale=torch.ones(3)), ValueError, "scale is 3x1"),
        (lambda: F.gelu(torch.ones(2, 3), b=torch.ones(2, 3)), ValueError, "one input"),
        (lambda: F.gelu(torch.ones(2, 3), layout="swapped"), ValueError, "not gated"),
        (lambda: F.swiglu(torch.ones(2, 4), layout="mixed"), ValueError, "layout 'mixed'"),
        (lambda: F.gelu(torch.ones(3), precision="low"), ValueError, "precision='low'"),
        (lambda: F.gelu(torch.ones(3), rounding="never"), ValueError, "rounding='never'"),
        (lambda: F.gelu(torch.ones(3), alpha=1.0), TypeError, "no parameter 'alpha'"),
        (lambda: F.elu(torch.ones(3), alpha=torch.ones(())), TypeError, "alpha is a tensor"),
        (lambda: F.activation("gellu", torch.ones(3)), ValueError, "did you mean 'gelu'"),
        (lambda: F.activation("x*(", torch.ones(3)), ValueError, "expected"),
        (lambda: F.activation(7, torch.ones(3)), TypeError, "int"),
        (lambda: F.gelu(torch.ones(3), out_dtype=torch.float64), TypeError, "float64"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("shape", [(40,), (7, 40), (3, 5, 40), (2, 3, 2, 40), (0, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dropout_add(dtype, shape):
    torch.manual_seed(5)
    x, bias, residual = leaf(*shape, dtype=dtype), leaf(40, dtype=dtype), leaf(*shape, dtype=dtype)
    torch.manual_seed(7)
    kept = F.dropout(torch.ones(shape), 0.25)  # the same mask
    assert set(kept.unique().tolist()) <= {0.0, kept.max().item() if kept.numel() else 0.0}
    torch.manual_seed(7)
    compare(
        lambda x, bias, residual: F.bias_dropout_add(x, bias, residual, 0.25),
        lambda x, bias, residual: residual + (x + bias) * kept.double(),
        [x, bias, residual],
        dtype,
        rows=math.prod(shape[:-1]),
    )


def test_dropout_rate_and_reproducibility():
    x = torch.ones(500, 200)
    torch.manual_seed(1)
    first = F.dropout(x, 0.3)
    second = F.dropout(x, 0.3)
    torch.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.3), first) and not torch.equal(first, second)
    assert abs((first == 0).float().mean().item() - 0.3) < 0.01
    assert abs(first.mean().item() - 1) < 0.01
    assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x))
    assert torch.equal(F.dropout(x, 0.0), x)
    assert F.dropout(x, 0.3, training=False) is x


def test_dropout_with_a_state_of_ones_own():
    x = torch.randn(4, 16).requires_grad_()
    state = torch.tensor([1234, 0, 0, 0, 16])
    y = F.dropout(x, 0.5, random=state)
    assert state.tolist() == [1234, 1, 0, 0, 16]
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    again = F.dropout(x, 0.5, random=torch.tensor([1234, 0, 0, 0, 16]))
    assert torch.equal(y, again)
    # A shard draws the same bits as the whole tensor.
    shard = F.dropout(x[2:, 8:], 0.5, random=torch.tensor([1234, 0, 2, 8, 16]))
    assert torch.equal(shard, y[2:, 8:])


def test_evaluation_drops_nothing_and_passes_gradients_on():
    x, bias, residual = leaf(3, 4), leaf(4), leaf(3, 4)
    compare(
        lambda x, b, r: F.bias_dropout_add(x, b, r, 0.9, False),
        lambda x, b, r: r + x + b,
        [x, bias, residual],
        torch.float32,
    )
    y = F.bias_dropout_add(x.detach(), None, None, 0.5, False)
    assert torch.equal(y, x.detach())
    wide = F.bias_dropout_add(x.detach().bfloat16(), None, residual.detach(), 0.5, False)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.dropout(x, 1.5), "p=1.5"),
        (lambda x: F.dropout(x, -1, training=False), "p=-1"),
        (lambda x: F.bias_dropout_add(x, None, x[:1], 0.1), "residual has shape"),
        (lambda x: F.bias_dropout_add(x, torch.ones(3), x, 0.1), "bias is 1x3"),
        (lambda x: F.dropout(x, 0.5, random=torch.zeros(4)), "five int64"),
        (lambda x: F.dropout(x, 0.5, random=torch.zeros(5).long()), "columns"),
    ],
)
def test_dropout_errors(call, match):
    if match == "columns" and torch.get_default_device().type != "cpu":
        pytest.skip("the host does not read a state on the device")
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 4))


@pytest.mark.parametrize("shape", [(7,), (3, 65), (2, 3, 8), (2, 1, 3, 8), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2normalization(dtype, shape):
    torch.manual_seed(6)

    def reference(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-3)

    compare(
        lambda x: F.l2normalization(x, 1e-3),
        reference,
        [leaf(*shape, dtype=dtype)],
        dtype,
        rows=shape[-1],
    )


def test_threads_share_no_frame():
    import threading

    inputs = [torch.randn(64, 128) for _ in range(4)]
    results: list = [None] * 4

    def work(i):
        for _ in range(50):
            results[i] = F.gelu(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, y in zip(inputs, results, strict=True):
        assert torch.equal(y, F.gelu(x))


def test_docstrings_hold_the_formula():
    assert "max(0, x)" in F.relu.__doc__
    for name in ("gelu", "silu", "mish", "swiglu", "clamped_swiglu"):
        assert tenon.activation(name).formula in getattr(F, name).__doc__


def test_definition_of_the_forward_pass():
    x = torch.randn(4, 8, requires_grad=True)
    bias = torch.zeros(8, requires_grad=True)
    tenon.define("fwd_defined", "x*c; c = 2")
    calls = (
        (F.fwd_defined(x), 2),
        (F.fwd_defined(x, c=3.0), 3),
        (F.fwd_defined(x, bias=bias), 2),
        (F.activation("x + fwd_defined(x)", x), 3),
    )
    tenon.define("fwd_defined", "x*c*c; c = 5")
    for y, slope in calls:
        assert (torch.autograd.grad(y.sum(), x)[0] == slope).all()
    assert (torch.autograd.grad(F.fwd_defined(x).sum(), x)[0] == 25).all()


FORWARD_MODE = {
    "plain": lambda x: F.gelu(x),
    "bias": lambda x: F.gelu(torch.ones(4, 8), bias=x[0]),
    "norm": lambda x: F.l2normalization(x),
    "dropout": lambda x: F.bias_dropout_add(torch.ones(4, 8), None, x, 0.0),
    "quantize": lambda x: F.quantize(x, MXFP8Quantizer("e4m3")).dequantize(),
    "jit": lambda x: jit.dgelu_fused(torch.ones(4, 8), x),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused(name):
    from torch.autograd import forward_ad

    f, x = FORWARD_MODE[name], torch.randn(4, 8)
    for needed in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(needed), torch.ones_like(x))
            with pytest.raises(NotImplementedError, match="tangent would be lost; use backward"):
                f(dual)
            f(x)  # other warnings are not affected
    with pytest.raises(NotImplementedError, match="tangent would be lost"):
        torch.func.jvp(f, (x,), (x,))


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_tracers_are_refused(name):
    from torch.fx.experimental.proxy_tensor import make_fx

    f, x = FORWARD_MODE[name], torch.randn(4, 8)
    told = "see nothing of Tenon's kernels; leave this part out"
    for needed in (False, True):
        with pytest.raises(NotImplementedError, match=told):
            torch.jit.trace(f, (x.clone().requires_grad_(needed),))
    for pre_dispatch in (False, True):
        with pytest.raises(NotImplementedError, match=told):
            make_fx(f, pre_dispatch=pre_dispatch)(x)
    f(x)


def test_fused_functions_are_traced_as_torch_functions():
    from torch.autograd import forward_ad

    f = jit.jit_fuser(lambda x: torch.tanh(x) * 2)
    x = torch.randn(4, 8)
    y = f(x)
    torch.testing.assert_close(torch.jit.trace(f, (x,))(x), y)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(tangent, 2 * (1 - torch.tanh(x) ** 2))


def test_a_bias_lies_in_the_last_dimension():
    x, bias = torch.ones(8, 8), torch.arange(8.0)
    for call in (
        lambda b: F.gelu(x, bias=b),
        lambda b: F.bias_dropout_add(x, b, None, 0.0),
        lambda b: jit.bgrad_dgelu_fused(x, x, b),
    ):
        with pytest.raises(ValueError, match=r"bias has shape \(8, 1\).*bias.reshape\(-1\)"):
            call(bias[:, None])
        call(bias[None])


def test_functions_without_signature():
    with pytest.raises(TypeError, match="tanh is built in.*use tenon.tanh"):
        F.activation(torch.tanh, torch.ones(3))


def test_expanded_and_negated_views():
    for x in (
        torch.randn(3, 1, 80).expand(3, 5, 80),
        torch.randn(3, 1, 1, 80).expand(3, 5, 2, 80),
        torch._neg_view(torch.randn(4, 64)),
        torch._neg_view(torch.randn(4, 64)).T,
    ):
        y = x.clone()
        torch.testing.assert_close(F.gelu(x), F.gelu(y), rtol=0, atol=0)
        if x.shape[-1] % 2 == 0:
            torch.testing.assert_close(F.swiglu(x), F.swiglu(y), rtol=0, atol=0)


def test_every_argument_may_have_the_negative_bit():
    """With the negative bit, memory holds the negated values. gelu and similar are not odd."""

    def negative(t):
        return torch._neg_view(-t.detach()).requires_grad_(t.requires_grad)

    def gradients(call, *tensors):
        leaves = [t.requires_grad_() for t in tensors]
        y = call(*leaves)
        g = torch.linspace(-1, 2, y.numel()).reshape(y.shape)
        plain = torch.autograd.grad(y, leaves, g, retain_graph=True)
        opposite = torch.autograd.grad(y, leaves, negative(g))
        assert all(map(torch.equal, plain, opposite))
        return y, *plain

    torch.manual_seed(0)
    x, b, bias, scale = (torch.randn(n) for n in ((6, 64), (6, 64), (64,), (6,)))
    _, r = jit.l2normalization_fwd_fused(x, 1e-6)
    fused = jit.jit_fuser(lambda x, bias: torch.nn.functional.silu(x + bias) * x)
    calls = (
        (lambda *t: gradients(lambda x, bias: F.gelu(x, bias=bias), *t), (x, bias)),
        (lambda *t: gradients(lambda a, b: F.swiglu(a, b=b), *t), (x, b)),
        (lambda *t: gradients(lambda x, s: F.swiglu(x, scale=s), *t), (x, scale)),
        (lambda *t: gradients(F.l2normalization, *t), (x,)),
        (lambda *t: gradients(fused, *t), (x, bias)),
        (lambda *t: gradients(jit.bias_gelu_fused, *t), (x, bias)),
        (jit.bgrad_dgelu_fused, (x, b, bias)),
        (lambda *t: jit.l2normalization_backward_fused(*t, 1e-6), (x, b, r)),
        (lambda *t: jit.get_bias_dropout_add(False)(*t, 0.0), (x, bias, b)),
        (lambda x: MXFP8Quantizer("e4m3").quantize(x).dequantize(), (x,)),
        (lambda x: F.gelu(x, quantizer=MXFP8Quantizer("e4m3")).dequantize(), (x,)),
    )
    for i, (call, tensors) in enumerate(calls):
        plain, seen = (call(*(f(t.detach()) for t in tensors)) for f in (torch.clone, negative))
        for p, s in zip(*((r,) if torch.is_tensor(r) else r for r in (plain, seen)), strict=True):
            assert torch.equal(p, s), i
    history, amax = torch._neg_view(torch.zeros(4, 2)), torch._neg_view(torch.zeros(1))
    with pytest.raises(ValueError, match="history .*negative bit.*resolve_neg"):
        delayed_update(history, torch.ones(2))
    with pytest.raises(ValueError, match="amax .*negative bit.*resolve_neg"):
        Float8Quantizer(torch.ones(1), amax, "e4m3")


def test_layouts_of_memory_are_refused():
    x = torch.eye(4).to_sparse()
    for call in (lambda: F.gelu(x), lambda: F.swiglu(x), lambda: F.l2normalization(x)):
        with pytest.raises(NotImplementedError, match="sparse.*must be dense"):
            call()


def test_wrong_types_are_told():
    x = torch.ones(4, 8)
    for call, told in (
        (lambda: F.swiglu(x, layout=None), "layout is a NoneType"),
        (lambda: F.gelu(x, bias=1.0), "bias is a float"),
        (lambda: F.gelu(x, quantizer="mxfp8"), "quantizer is a str"),
        (lambda: F.quantize(x, None), "quantizer is a NoneType"),
        (lambda: F.dequantize(x), "x is a Tensor"),
        (lambda: jit.dgelu_fused(x, None), "x is a NoneType"),
        (lambda: jit.bias_gelu_fused(x, 1.0), "bias is a float"),
        (lambda: jit.l2normalization_backward_fused(None, x, x, 1e-6), "grad_output is a NoneType"),
    ):
        with pytest.raises(TypeError, match=told):
            call()
    with pytest.raises(ValueError, match="they must be equal"):
        jit.dgelu_fused(torch.ones(2, 8), x)
