"""Tests of quantizers and quantised tensors against the rules of the formats, written in torch."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.functional as F  # noqa: E402
from tenon.torch.quantizer import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    delayed_update,
)

FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
MODES = {
    "delayed": lambda f, **u: Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), f, **u),
    "current": Float8CurrentScalingQuantizer,
    "mxfp8": MXFP8Quantizer,
    "block1x128": lambda f, **u: Float8BlockQuantizer(f, block_scaling_dim=1, **u),
    "block128x128": Float8BlockQuantizer,
}
USAGES = [(True, False), (False, True), (True, True)]
# Half a step of the format, at the worst place of the range of a block.
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


def cast(v, name):
    dtype, most = FP8[name]
    return v.float().clamp(-most, most).to(dtype)


def bits(t):
    return t.view(torch.uint8)


def power_of_two(scale):
    return torch.exp2(torch.floor(torch.log2(scale)))


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(40,), (3, 130), (2, 3, 32), (0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("rowwise,columnwise", USAGES)
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("mode", MODES)
def test_round_trip(mode, fp8, rowwise, columnwise, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    q = MODES[mode](fp8, rowwise=rowwise, columnwise=columnwise)
    t = q(x)
    assert isinstance(q, Quantizer) and isinstance(t, QuantizedTensor)
    assert (t.rowwise_data is not None) == rowwise and (t.columnwise_data is not None) == columnwise
    assert t.shape == x.shape and t.dtype == x.dtype and t.scaling == mode
    assert t.fp8_dtype == FP8[fp8][0]
    back = t.dequantize()
    # A step is relative to the value or, for subnormal codes, to the largest value of the block.
    torch.testing.assert_close(back, x, rtol=STEP[fp8], atol=1e-2)


@pytest.mark.parametrize("fp8", FP8)
def test_delayed_codes_scales_and_amax(fp8):
    x = torch.randn(5, 7)
    scale, amax = torch.tensor([2.0]), torch.tensor([0.5])
    t = Float8Quantizer(scale, amax, fp8)(x)
    assert torch.equal(bits(t.rowwise_data), bits(cast(x * 2, fp8)))
    assert torch.equal(bits(t.columnwise_data), bits(cast(x * 2, fp8)).t())
    assert t.rowwise_scale_inv.item() == 0.5 and t.columnwise_scale_inv is t.rowwise_scale_inv
    assert amax.item() == x.abs().max().item()
    Float8Quantizer(scale, amax, fp8)(x / 100)
    assert amax.item() == x.abs().max().item()  # maximum with the previous value


@pytest.mark.parametrize("fp8", FP8)
def test_current_codes_and_scales(fp8):
    x = torch.randn(5, 7)
    most = FP8[fp8][1]
    t = Float8CurrentScalingQuantizer(fp8)(x)
    scale = torch.tensor(most) / x.abs().max()
    assert torch.equal(bits(t.rowwise_data), bits(cast(x * scale, fp8)))
    torch.testing.assert_close(t.rowwise_scale_inv, (1 / scale).reshape(1), rtol=2e-7, atol=0)
    t = Float8CurrentScalingQuantizer(fp8, force_pow_2_scales=True)(x)
    assert t.rowwise_scale_inv.item() == 1 / power_of_two(scale).item()
    t = Float8CurrentScalingQuantizer(fp8, amax_epsilon=100.0)(x)
    assert t.rowwise_scale_inv.item() == pytest.approx(100 / most)
    found = torch.zeros(1)
    Float8CurrentScalingQuantizer(fp8, amax=found)(x)
    assert found.item() == x.abs().max().item()
    given = Float8CurrentScalingQuantizer(fp8, use_existing_amax=True, amax=torch.tensor([50.0]))
    assert given(x).rowwise_scale_inv.item() == pytest.approx(50 / most)


@pytest.mark.parametrize("fp8", FP8)
def test_block_codes_and_scales(fp8):
    x = torch.randn(130, 256) * torch.logspace(-3, 3, 256)
    most = FP8[fp8][1]
    t = Float8BlockQuantizer(fp8, block_scaling_dim=1)(x)
    amax = x.unflatten(1, (2, 128)).abs().amax(-1)
    scale = power_of_two(most / amax)
    assert t.rowwise_scale_inv.shape == (2, 132)
    assert torch.equal(t.rowwise_scale_inv[:, :130], 1 / scale.t())
    assert torch.equal(bits(t.rowwise_data), bits(cast(x * scale.repeat_interleave(128, 1), fp8)))
    t = Float8BlockQuantizer(fp8)(x)
    square = torch.stack([x[:128], torch.nn.functional.pad(x[128:], (0, 0, 0, 126))])
    amax = square.unflatten(2, (2, 128)).abs().amax((1, 3))
    assert torch.equal(t.rowwise_scale_inv[:, :2], 1 / power_of_two(most / amax))
    exact = Float8BlockQuantizer(fp8, force_pow_2_scales=False)(x)
    torch.testing.assert_close(exact.rowwise_scale_inv[:, :2], amax / most, rtol=1e-6, atol=0)


def test_mxfp8_codes_and_scales():
    x = torch.randn(5, 64)
    t = MXFP8Quantizer("e4m3")(x)
    assert t.rowwise_scale_inv.dtype == torch.uint8 and t.rowwise_scale_inv.shape == (128, 4)
    amax = x.unflatten(1, (2, 32)).abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax / 448))
    assert torch.equal(t.rowwise_scale_inv[:5, :2].double() - 127, exponent.double())
    scale = torch.exp2(-exponent).repeat_interleave(32, 1)
    assert torch.equal(bits(t.rowwise_data), bits(cast(x * scale, "e4m3")))
    assert t.columnwise_data.shape == x.shape  # not transposed
    swizzled = MXFP8Quantizer("e4m3", optimize_for_gemm=True)(x)
    assert not torch.equal(swizzled.rowwise_scale_inv, t.rowwise_scale_inv)
    assert torch.equal(swizzled.dequantize(), t.dequantize())


@pytest.mark.parametrize("mode", MODES)
def test_an_activation_writes_the_same_codes(mode):
    torch.manual_seed(1)
    x = torch.randn(6, 256)
    fused = F.swiglu(x, quantizer=MODES[mode]("e4m3"), precision="strict")
    apart = MODES[mode]("e4m3").quantize(F.swiglu(x, precision="strict"))
    assert torch.equal(bits(fused.rowwise_data), bits(apart.rowwise_data))
    assert torch.equal(bits(fused.columnwise_data), bits(apart.columnwise_data))
    assert torch.equal(fused.rowwise_scale_inv, apart.rowwise_scale_inv)
    assert fused.shape == (6, 128)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_go_straight_through(mode):
    x = torch.randn(4, 64, requires_grad=True)
    g = torch.randn(4, 64)
    t = F.quantize(x, MODES[mode]("e4m3"))
    assert t.requires_grad
    F.dequantize(t).backward(g)
    assert torch.equal(x.grad, g)
    x.grad = None
    bias = torch.randn(64, requires_grad=True)
    F.gelu(x, bias=bias, quantizer=MODES[mode]("e4m3")).dequantize(torch.bfloat16).backward(
        g.bfloat16()
    )
    expected = torch.autograd.grad(F.gelu(x, bias=bias), (x, bias), g.bfloat16().float())
    assert torch.equal(x.grad, expected[0]) and torch.equal(bias.grad, expected[1])
    with torch.no_grad():
        assert not F.quantize(x, MODES[mode]("e4m3")).requires_grad


def test_quantised_inputs():
    x = torch.randn(4, 64)
    t = MXFP8Quantizer("e4m3")(x)
    assert torch.equal(F.swiglu(t), F.swiglu(t.dequantize()))
    assert torch.equal(F.gelu(t, out_dtype=torch.bfloat16), F.gelu(t.decode()).bfloat16())
    x.requires_grad_()
    y = F.gelu(F.quantize(x, MXFP8Quantizer("e4m3")))
    y.sum().backward()
    wide = t.decode().requires_grad_()
    F.gelu(wide).sum().backward()
    assert torch.equal(x.grad, wide.grad)
    again = Float8CurrentScalingQuantizer("e5m2").quantize(t)
    assert again.scaling == "current" and again.fp8_dtype == torch.float8_e5m2


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_pickles(mode):
    x = torch.randn(3, 40, requires_grad=True)
    t = MODES[mode]("e4m3")(x)
    u = t.detach()
    for other in (copy.deepcopy(u), copy.copy(u), pickle.loads(pickle.dumps(u)), u):
        assert not other.requires_grad and other.shape == t.shape
        assert torch.equal(other.dequantize(), t.decode())
    text = repr(t)
    assert "scaling=" in text and "rowwise+columnwise" in text and "requires_grad" in text
    assert t.numel() == 120 and t.dim() == 2 and t.size(1) == 40
    quantizer = copy.deepcopy(MODES[mode]("e4m3"))
    assert torch.equal(quantizer(x.detach()).decode(), t.decode())


def test_a_finished_tensor_lets_go_of_the_quantizers_state():
    scale, amax = torch.ones(1), torch.zeros(1)
    q = Float8Quantizer(scale, amax, "e4m3")
    t = q(torch.randn(3, 4))
    before = t.dequantize()
    scale.fill_(8.0)
    assert torch.equal(t.dequantize(), before)
    q.calibrate(torch.full((2,), 99.0))
    assert amax.item() == 99


def test_quantizer_methods():
    q = MXFP8Quantizer("e4m3")
    q.set_usage(columnwise=False)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    x = torch.randn(4, 32)
    t = q.make_empty((4, 32), dtype=torch.bfloat16, device=x.device)
    assert t.dtype == torch.bfloat16 and t.columnwise_data is None
    assert q.quantize(x, out=t) is t
    assert torch.equal(t.decode(torch.float32), q(x).decode())
    unchanged = t.decode()
    assert q.update_quantized(2 * x, t, noop_flag=torch.ones(1)) is t
    assert torch.equal(t.decode(), unchanged)
    q.update_quantized(2 * x, t)
    assert not torch.equal(t.decode(), unchanged)
    assert q.make_empty((2, 3), dtype=torch.float16).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="tenon: scale is on meta"):
        Float8Quantizer(torch.ones(1, device="meta"), torch.zeros(1), "e4m3")(x)
    assert q.make_empty((2, 3)).device == torch.empty(()).device
    with torch.device("meta"):
        assert q.make_empty((2, 3)).is_meta and not q.make_empty((2, 3), device="cpu").is_meta
    assert q.is_quantizable(x) and "MXFP8Quantizer(e4m3" in repr(q)
    other = q.copy()
    other.set_usage(rowwise=False, columnwise=True)
    assert q.rowwise_usage and other(x).rowwise_data is None
    strided = torch.randn(4, 64)[:, ::2]
    assert torch.equal(q(strided).decode(), q(strided.contiguous()).decode())


def test_delayed_update():
    history, scale = torch.zeros(4, 2), torch.ones(2)
    first = Float8Quantizer(scale[:1], history[0, :1], "e4m3")
    second = Float8Quantizer(scale[1:], history[0, 1:], "e4m3")
    first(torch.tensor([1.0, -4.0]))
    delayed_update(history, scale)
    assert history.tolist() == [[0, 0], [0, 0], [0, 0], [4, 0]] and scale.tolist() == [112, 1]
    first(torch.tensor([2.0]))
    second(torch.tensor([7.0]))
    delayed_update(history, scale, margin=1)
    assert scale.tolist() == [56, 32]
    history[0] = 2.0
    delayed_update(history, scale, "e5m2", amax_compute_algo="most_recent")
    assert scale.tolist() == [57344 / 2] * 2
    column, one = torch.zeros(3), torch.ones(1)
    column[0] = 448
    delayed_update(column, one, torch.float8_e4m3fn)
    assert one.item() == 1 and column.tolist() == [0, 0, 448]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: MXFP8Quantizer("e3m4"), ValueError, "fp8_dtype='e3m4'"),
        (lambda: MXFP8Quantizer(torch.float32), ValueError, "float8_e4m3fn"),
        (lambda: Float8BlockQuantizer("e4m3", block_scaling_dim=3), ValueError, "dim=3"),
        (lambda: Float8Quantizer(torch.ones(2), torch.ones(1), "e4m3"), ValueError, "scale"),
        (lambda: Float8Quantizer(torch.ones(1), None, "e4m3"), ValueError, "amax"),
        (
            lambda: Float8CurrentScalingQuantizer("e4m3", use_existing_amax=True),
            ValueError,
            "without amax",
        ),
        (
            lambda: MXFP8Quantizer("e4m3", with_2d_quantization=True),
            NotImplementedError,
            "block_scaling_dim=2",
        ),
        (lambda: MXFP8Quantizer("e4m3")(torch.tensor(1.0)), ValueError, "0-d"),
        (lambda: MXFP8Quantizer("e4m3")(torch.ones(2).long()), TypeError, "int64"),
        (lambda: MXFP8Quantizer("e4m3")(3), TypeError, "int"),
        (
            lambda: MXFP8Quantizer("e4m3", rowwise=False, columnwise=False)(torch.ones(2)),
            ValueError,
            "set_usage",
        ),
        (
            lambda: MXFP8Quantizer("e4m3").quantize(
                torch.ones(2), out=MXFP8Quantizer("e4m3").make_empty((3,))
            ),
            ValueError,
            "out is",
        ),
        (
            lambda: MXFP8Quantizer("e4m3").quantize(torch.ones(2, device="meta")),
            NotImplementedError,
            "meta",
        ),
        (
            lambda: delayed_update(torch.ones(2), torch.ones(1), amax_compute_algo="mean"),
            ValueError,
            "most_recent",
        ),
        (lambda: delayed_update(torch.ones(2, 2), torch.ones(3)), ValueError, "scale"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_enum_members_name_formats():
    import enum

    class DType(enum.Enum):
        kFloat8E4M3 = 7
        kFloat8E5M2 = 8

    assert MXFP8Quantizer(DType.kFloat8E4M3).fp8_dtype == torch.float8_e4m3fn
    assert MXFP8Quantizer(DType.kFloat8E5M2).fp8_dtype == torch.float8_e5m2


def test_delayed_update_arguments():
    history, scale = torch.ones(4, 1), torch.ones(1)
    with pytest.raises(TypeError, match="margin=0.5; it must be a whole number"):
        delayed_update(history, scale, margin=0.5)
    with pytest.raises(TypeError, match="history is a NoneType"):
        delayed_update(None, None)


def test_out_has_the_encodings_of_the_quantizer():
    both = MXFP8Quantizer("e4m3")
    x = torch.ones(32, 32)
    out = MXFP8Quantizer("e4m3", columnwise=False).make_empty(x.shape)
    with pytest.raises(ValueError, match="make it with this quantizer's make_empty"):
        both.quantize(x, out=out)
    with pytest.raises(TypeError, match="out is a Tensor"):
        both.quantize(x, out=x)


def test_calibrate_whatever_the_default_dtype():
    q = Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    torch.set_default_dtype(torch.float64)
    try:
        q.calibrate(torch.tensor([[3.0, -5.0]], dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert q.amax.item() == 5
