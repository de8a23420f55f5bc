"""Tests of the quantised tensor as a tensor of torch: operations, views, copies, gradients, files,
optimisers, and as a weight. Codes are compared with a quantizer's on plain numbers, whose codes
test_torch_quantizer.py compares with the rules of the formats.
"""

import copy
import io
import pickle
import subprocess
import sys

import numpy
import pytest

torch = pytest.importorskip("torch")

import tenon.torch as tt  # noqa: E402
import tenon.torch.functional as F  # noqa: E402
import tenon.torch.ops as ops  # noqa: E402
from tenon.torch._quantized_ops import NumbersView  # noqa: E402
from tenon.torch.quantizer import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
)

MODES = {
    "delayed": lambda f="e4m3", **u: Float8Quantizer(
        torch.full((1,), 16.0), torch.zeros(1), f, **u
    ),
    "current": lambda f="e4m3", **u: Float8CurrentScalingQuantizer(f, **u),
    "mxfp8": lambda f="e4m3", **u: MXFP8Quantizer(f, **u),
    "block1x128": lambda f="e4m3", **u: Float8BlockQuantizer(f, block_scaling_dim=1, **u),
    "block128x128": lambda f="e4m3", **u: Float8BlockQuantizer(f, **u),
}
USAGES = {
    "both": {"rowwise": True, "columnwise": True},
    "rowwise": {"rowwise": True, "columnwise": False},
    "columnwise": {"rowwise": False, "columnwise": True},
}
PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def bits(t):
    return t.view(torch.uint8) if t.element_size() == 1 else t.view(torch.int32)


def same(a, b):
    """The same codes and scales."""
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
    assert a.shape == b.shape and a.dtype == b.dtype and a.scaling == b.scaling
    assert list(a.parts()) == list(b.parts())
    for name, t in a.parts().items():
        assert torch.equal(bits(t), bits(b.parts()[name])), name


def equal(a, b):
    return torch.equal(torch.nan_to_num(a, nan=7e7), torch.nan_to_num(b, nan=7e7))


@pytest.fixture(params=MODES)
def mode(request):
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("shape", [(40,), (3, 130), (2, 3, 32), (0, 8), (3, 0), (1, 1)], ids=str)
def test_it_is_a_tensor(mode, usage, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    q = MODES[mode](**USAGES[usage])(x)
    assert isinstance(q, torch.Tensor) and q.shape == x.shape and q.dtype == x.dtype
    assert q.is_contiguous() and q.device == x.device and q.numel() == x.numel()
    assert (q.is_cpu, q.is_cuda) == (x.is_cpu, x.is_cuda)
    assert q.layout == torch.strided and q.stride() == x.stride() and not q.requires_grad
    numbers = q.dequantize()
    assert type(numbers) is torch.Tensor and numbers.dtype == torch.bfloat16
    assert torch.equal(numbers, q.dequantize(torch.float32).bfloat16())
    assert torch.equal(q.dequantize(torch.float64), q.dequantize(torch.float32).double())
    assert f"scaling={mode!r}" in repr(q) and str(tuple(shape)) in str(q) and f"{q}"
    data = q.get_data_tensors()
    assert [t is not None for t in data] == list(USAGES[usage].values())
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    same(QuantizedTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride()), q)
    by_hand = QuantizedTensor(shape, x.dtype, "e4m3", mode, **inner)
    same(by_hand, q)


X = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.0e38, 1.0, -2.5])

# Each takes a quantised or a plain tensor. Both must give the same bits.
OPERATIONS = {
    "add": lambda t: t + 1,
    "radd": lambda t: 2.0 - t,
    "add itself": lambda t: t + t,
    "mul": lambda t: t * torch.arange(32.0),
    "matmul": lambda t: torch.ones(4, 6) @ t,
    "linear": lambda t: torch.nn.functional.linear(torch.ones(2, 32), t),
    "t": lambda t: t.t(),
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(1, 0),
    "sum": lambda t: t.sum(0),
    "norm": lambda t: t.norm(),
    "abs max": lambda t: t.abs().max(),
    "index": lambda t: t[1],
    "columns": lambda t: t[:, 3:9],
    "step": lambda t: t[::2],
    "mask": lambda t: t[t > 0],
    "gather": lambda t: t.gather(1, torch.zeros(6, 1, dtype=torch.long)),
    "index_select": lambda t: t.index_select(0, torch.tensor([5, 0])),
    "select nothing": lambda t: t.index_select(0, torch.tensor([], dtype=torch.long)),
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, torch.zeros(6, 32)]),
    "where": lambda t: torch.where(t > 0, t, torch.zeros(())),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "softmax": lambda t: t.softmax(-1),
    "int": lambda t: t.clamp(-5, 5).nan_to_num(0).int(),
    "double": lambda t: t.double(),
    "expand": lambda t: t.expand(2, 6, 32),
    "chunk": lambda t: torch.cat([c.clone() + 0 for c in t.chunk(4)]),
    "unbind": lambda t: t.unbind()[2],
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "isfinite": lambda t: t.isfinite(),
    "bf16": lambda t: t.to(torch.bfloat16) * 1,
    "zeros_like": lambda t: torch.zeros_like(t),
    "ones_like": lambda t: torch.ones_like(t, dtype=torch.int32),
    "full_like": lambda t: torch.full_like(t, 3.0),
    "new_ones": lambda t: t.new_ones(3),
    "new_full": lambda t: t.new_full((2, 2), 5),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "tril": lambda t: t.tril(),
    "kthvalue": lambda t: t.nan_to_num(0).kthvalue(2)[0],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_read_the_numbers(mode, name):
    x = torch.randn(6, 32)
    if mode in ("mxfp8", "delayed"):  # other modes share a scale between all of these
        x[2, :8] = X
    q = MODES[mode]()(x)
    before = q.clone()
    found, wanted = OPERATIONS[name](q), OPERATIONS[name](q.dequantize())
    assert type(found) in (torch.Tensor, NumbersView) and found.dtype == wanted.dtype
    assert found.shape == wanted.shape and equal(found.double(), wanted.double())
    same(q, before)


def test_comparisons_and_numbers(mode):
    q = MODES[mode]()(torch.randn(3, 32))
    assert torch.equal(q, q) and torch.equal(q, q.dequantize()) and torch.equal(q.dequantize(), q)
    assert not torch.equal(q, q + 1) and torch.allclose(q, q.dequantize())
    assert q.tolist() == q.dequantize().tolist()
    assert q.sum().item() == q.dequantize().sum().item()
    assert float(MODES[mode]()(torch.ones(1))) == 1.0
    assert len(q) == 3 and [row.shape for row in q] == [(32,)] * 3


VIEWS = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "view": lambda t: t.view(2, 3, 32),
    "flat": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(3, 64),
    "unflatten": lambda t: t.unflatten(0, (3, 2)),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "all rows": lambda t: t[:],
    "narrow": lambda t: t.narrow(0, 0, 6),
    "as_strided": lambda t: t.as_strided((6, 32), (32, 1)),
    "expand_as": lambda t: t.expand_as(t),
    "contiguous": lambda t: t.contiguous(),
    "no copy": lambda t: t.to(torch.float32),
}


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", VIEWS)
def test_views_share_the_codes(mode, usage, name):
    x, y = torch.randn(6, 32), torch.randn(6, 32)
    q = MODES[mode](**USAGES[usage])(x)
    view = VIEWS[name](q)
    plain = VIEWS[name](q.dequantize())
    assert isinstance(view, QuantizedTensor) and view.shape == plain.shape
    assert torch.equal(view.dequantize(), plain) and torch.equal(view + 1, plain + 1)
    assert view.stride() == plain.stride()
    for a, b in zip(view.parts().values(), q.parts().values(), strict=True):
        assert a.data_ptr() == b.data_ptr()
    view.copy_(y.view(view.shape))  # written through the view
    same(q, MODES[mode](**USAGES[usage])(y))
    again = view.view(6, 32)
    assert torch.equal(again, q)
    same(again, q)


@pytest.mark.parametrize("usage", USAGES)
def test_rows_keep_their_codes(mode, usage):
    x = torch.randn(400, 40)
    q = MODES[mode](**USAGES[usage])(x)
    for rows in (slice(0, 128), slice(128, 256), slice(256, 400), slice(0, 130), slice(128, 128)):
        part = q[rows]
        assert isinstance(part, QuantizedTensor)
        part.check_parts()
        assert torch.equal(part.dequantize(), q.dequantize()[rows])
        for a in ("rowwise_data", "columnwise_data"):
            if (t := getattr(part, a)) is not None:
                assert t.numel() == part.numel()
    for part, plain in zip(q.split([128, 256, 16]), x.split([128, 256, 16]), strict=True):
        assert isinstance(part, QuantizedTensor) and part.shape == plain.shape
    tail = q[3:77]  # inside of blocks: codes or numbers, whatever can be exact
    assert torch.equal(tail + 0, q.dequantize()[3:77])
    deep = MODES[mode](**USAGES[usage])(torch.randn(4, 128, 40))
    assert isinstance(deep[1:3], QuantizedTensor)
    assert torch.equal(deep[1:3], deep.dequantize()[1:3])


def test_copies_are_independent(mode):
    q = MODES[mode]()(torch.randn(5, 40))
    loaded = io.BytesIO()
    torch.save(q, loaded)
    loaded.seek(0)
    copies = {
        "clone": q.clone(),
        "deepcopy": copy.deepcopy(q),
        "pickle": pickle.loads(pickle.dumps(q)),
        "load": torch.load(loaded, weights_only=True),
        "to": q.to(torch.float32, copy=True),
    }
    for made in copies.values():
        same(made, q)
        assert made.quantizer is not None and made.quantizer.scaling == mode
        made.zero_()
        assert (made == 0).all() and not (q == 0).all()


def test_conversions(mode):
    q = MODES[mode]()(torch.randn(5, 40))
    half = q.to(torch.bfloat16)
    assert isinstance(half, QuantizedTensor) and half.dtype == torch.bfloat16
    assert torch.equal(half.dequantize(), q.dequantize().bfloat16())
    assert torch.equal(half.float().dequantize(), q.dequantize())
    assert type(q.double()) is torch.Tensor
    there = q.to("meta")
    assert isinstance(there, QuantizedTensor) and there.is_meta and there.shape == q.shape
    assert (there + 1).is_meta and "meta" in repr(there)
    assert there.cpu is not None and torch.empty_like(there, device="cpu").shape == q.shape
    for name in ("zeros_like", "empty_like", "rand_like"):
        assert type(getattr(torch, name)(q)) is torch.Tensor
    padded = q.new_zeros((7, 40))
    assert isinstance(padded, QuantizedTensor) and (padded == 0).all() and padded.shape == (7, 40)
    padded.check_parts()
    assert isinstance(q.new_empty((0, 40)), QuantizedTensor)
    assert type(q.new_zeros((7, 41))) is torch.Tensor and type(q.new_zeros(3)) is torch.Tensor


# In-place operations: what they write is encoded again.
WRITES = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3.0),
    "add_": lambda t: t.add_(1.0, alpha=2),
    "iadd": lambda t: t.__iadd__(0.25),
    "mul_": lambda t: t.mul_(torch.linspace(0.5, 2, 32)),
    "lerp_": lambda t: t.lerp_(torch.ones(6, 32), 0.25),
    "addcdiv_": lambda t: t.addcdiv_(torch.ones(6, 32), torch.full((6, 32), 4.0), value=-1),
    "addcmul_": lambda t: t.addcmul_(torch.ones(6, 32), torch.ones(6, 32)),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "copy_": lambda t: t.copy_(torch.linspace(-1, 1, 32)),
    "copy_ bf16": lambda t: t.copy_(torch.ones(6, 32, dtype=torch.bfloat16)),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1]), 2.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.5),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "normal_": lambda t: torch.nn.init.normal_(t),
    "out": lambda t: torch.add(torch.ones(6, 32), 2.0, out=t),
    "foreach_add_": lambda t: torch._foreach_add_([t], [torch.ones(6, 32)], alpha=0.5),
    "foreach_mul_": lambda t: torch._foreach_mul_([torch.ones(2), t], 0.5),
    "foreach_addcdiv_": lambda t: torch._foreach_addcdiv_(
        [t], [torch.ones(6, 32)], [torch.ones(6, 32)], [-0.5]
    ),
    "foreach_lerp_": lambda t: torch._foreach_lerp_([t], [torch.ones(6, 32)], 0.5),
    "foreach_copy_": lambda t: torch._foreach_copy_([t], [torch.ones(6, 32)]),
    "a row": lambda t: t.__setitem__(1, 7.0),
    "elements": lambda t: t.__setitem__((slice(None), 3), torch.arange(6.0)),
    "a mask": lambda t: t.__setitem__(t > 0, 0.0),
    "data": lambda t: setattr(t, "data", torch.ones(6, 32)),
    "itself": lambda t: t.add_(t),
    "fill_diagonal_": lambda t: t.fill_diagonal_(2.0),
    # Views have copies of the numbers or of the codes.
    "view: a row": lambda t: t[1].add_(1.0),
    "view: columns": lambda t: t[:, 3:9].fill_(0.5),
    "view: of a view": lambda t: t.t()[4][2:].mul_(-1.5),
    "view: itself in it": lambda t: t[1].copy_(t[0]),
    "view: out": lambda t: torch.add(torch.ones(32), 2.0, out=t[2]),
    "view: rows": lambda t: t[:3].mul_(0.75),
    "view: rows of rows": lambda t: t[:4].view(2, 64).detach()[:1].zero_(),
    "view: chunks": lambda t: torch._foreach_add_(list(t.chunk(3)), 1.0),
    "view: together": lambda t: torch._foreach_mul_([t[0], t.t()[1], t[5]], 2.0),
    "view: detached": lambda t: t.t().detach().data[3].fill_(1.0),
    "view: flat": lambda t: t.view(-1)[35].fill_(1.0),
}


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_encoded(mode, usage, name):
    q = MODES[mode](**USAGES[usage])(torch.randn(6, 32))
    memory = [t.data_ptr() for t in q.parts().values()]
    plain = q.dequantize()
    torch.manual_seed(1)
    result = WRITES[name](q)
    torch.manual_seed(1)
    WRITES[name](plain)
    same(q, MODES[mode](**USAGES[usage])(plain))
    assert [t.data_ptr() for t in q.parts().values()] == memory
    if isinstance(result, torch.Tensor) and not name.startswith("view"):
        assert result is q


def test_views_are_tensors(mode):
    """They go where plain tensors go, and what leaves the process or is computed is plain."""
    q = MODES[mode]()(torch.randn(6, 32))
    numbers = q.dequantize()
    for name in ("index", "columns", "t"):
        view, wanted = OPERATIONS[name](q), OPERATIONS[name](numbers)
        assert type(view) is NumbersView and type(view + 0) is torch.Tensor
        assert view.tolist() == wanted.tolist() and repr(view) == repr(wanted)
        if view.is_cpu:
            assert (view.numpy() == wanted.numpy()).all()
            assert (numpy.from_dlpack(view) == wanted.numpy()).all()
        for made in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), view.clone()):
            assert type(made) is torch.Tensor and torch.equal(made, wanted)
            made.zero_()
        file = io.BytesIO()
        torch.save(view, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), wanted)
        assert torch.equal(F.gelu(view), F.gelu(wanted))
    linear = ops.Linear(6, 4)
    assert torch.equal(linear(q.t()), linear(numbers.t()))
    assert torch.equal(q.dequantize(), numbers)
    grown = torch.nn.Parameter(q)
    (grown[0].sum() + (2 * grown.t()[5]).sum()).backward()
    wanted = torch.zeros(6, 32)
    wanted[0] += 1
    wanted[:, 5] += 2
    assert torch.equal(grown.grad, wanted)
    with pytest.raises(RuntimeError, match="requires grad"):
        grown[0].numpy()
    with pytest.raises(RuntimeError, match="leaf"):
        grown[0].zero_()
    with pytest.raises(NotImplementedError, match="in place"):
        q[:, 1:].t_()
    with pytest.raises(NotImplementedError, match="int32"):
        q.view(torch.int32)[0].zero_()
    assert torch.equal(q.dequantize(), numbers)


def test_writes_to_views_have_gradients():
    x, v = torch.randn(6, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    q = Float8CurrentScalingQuantizer("e4m3")(x)
    q[0].mul_(2)
    q[1:2] = v
    q.t()[5].zero_()
    (q * 1).sum().backward()
    wanted = torch.ones(6, 32)
    wanted[0], wanted[1] = 2, 0
    wanted[:, 5] = 0
    assert torch.equal(x.grad, wanted)
    assert torch.equal(v.grad, (torch.arange(32) != 5).float())


def test_copies_of_codes_are_exact(mode):
    """No rounding twice: equal formats copy codes. Other formats encode the numbers."""
    q, p = MODES[mode]()(torch.randn(6, 32)), MODES[mode]()(torch.randn(6, 32))
    codes = q.clone()
    p.copy_(q)
    same(p, codes)
    plain = torch.zeros(6, 32, dtype=torch.bfloat16)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize().bfloat16())
    for other in MODES.values():
        t = other("e5m2")(torch.zeros(6, 32))
        t.copy_(q)
        same(t, other("e5m2")(q.dequantize()))
    with pytest.raises(RuntimeError):
        q.copy_(torch.ones(7, 32))
    with pytest.raises((RuntimeError, NotImplementedError)):
        q.t_()


def test_a_delayed_tensor_is_written_with_the_current_scale():
    scale, amax = torch.full((1,), 2.0), torch.zeros(1)
    q = Float8Quantizer(scale, amax, "e4m3")(torch.ones(2, 4))
    scale.fill_(8.0)
    assert (q == 1).all() and q.rowwise_scale_inv.item() == 0.5
    q.mul_(3.0)
    assert (q == 3).all() and q.rowwise_scale_inv.item() == 0.125 and amax.item() == 3
    bare = QuantizedTensor(q.shape, q.dtype, "e4m3", "delayed", **q.parts())
    bare.add_(1.0)  # without a quantizer it keeps its scale
    assert (bare == 4).all() and bare.rowwise_scale_inv.item() == 0.125


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_noop_flag(mode, flag):
    quantizer = MODES[mode]()
    x, y = torch.randn(4, 32), torch.randn(4, 32)
    q = quantizer(x)
    before = q.clone()
    amax = getattr(quantizer, "amax", None)
    seen = None if amax is None else amax.clone()
    assert q.quantize_(y * 10, noop_flag=torch.tensor([flag])) is q
    same(q, before if flag == 1 else MODES[mode]()(y * 10))
    if seen is not None and flag == 1:
        assert torch.equal(amax, seen)


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_noop_flag_without_a_host_read(mode, flag, monkeypatch):
    """The form for other devices: the flag selects on the device."""
    quantizer, y = MODES[mode](), torch.randn(4, 32) * 10
    q = quantizer(torch.randn(4, 32))
    before, noop = q.clone(), torch.tensor([flag])

    class There(torch.Tensor):
        is_cpu = False

        def item(self):
            raise AssertionError("read by the host")

    quantizer.update_quantized(y, q, noop_flag=noop.as_subclass(There))
    same(q, before if flag == 1 else MODES[mode]()(y))
    if mode == "delayed":
        assert (quantizer.amax >= 5).item() == (flag == 0)


def test_usages(mode):
    x = torch.randn(130, 40)
    both, row = MODES[mode]()(x), MODES[mode](columnwise=False)(x)
    column = MODES[mode](rowwise=False)(x)
    made = row.clone()
    made.update_usage(columnwise_usage=True)
    made.check_parts()
    if mode in ("mxfp8", "block1x128"):  # blocks of columns of the numbers of the rows
        made.update_usage(rowwise_usage=False)
        same(made, MODES[mode](rowwise=False)(row.dequantize()))
        made = row.clone()
    else:
        same(made, both)
        column.update_usage(rowwise_usage=True)
        same(column, both)
    made.update_usage(columnwise_usage=False)
    same(made, row)
    with pytest.raises(ValueError, match="needs one encoding"):
        made.update_usage(rowwise_usage=False)


def test_gradients(mode):
    quantizer = MODES[mode]()
    x = torch.randn(4, 32, requires_grad=True)
    seen = []
    q = quantizer(x)
    assert q.requires_grad and not q.is_leaf
    q.register_hook(lambda g: seen.append(g) or 2 * g)
    w = torch.randn(4, 32)
    (q * w).sum().backward(retain_graph=True)
    assert torch.equal(seen[0], w) and torch.equal(x.grad, 2 * w)  # straight-through
    (q.dequantize(torch.bfloat16).view(2, 64) * w.bfloat16().view(2, 64)).sum().backward()
    assert torch.equal(x.grad, 2 * w + 2 * w.bfloat16().float())
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    quantizer.internal = True
    assert not quantizer(x).requires_grad and not F.gelu(x, quantizer=quantizer).requires_grad
    assert not q.detach().requires_grad
    v = torch.randn(4, 32, requires_grad=True)
    again = MODES[mode]("e5m2")(MODES[mode]()(v))  # encoded twice
    again.sum().backward()
    assert torch.equal(v.grad, torch.ones(4, 32))


def test_a_leaf(mode):
    q = MODES[mode]()(torch.randn(4, 32)).requires_grad_()
    (q * 3).sum().backward()
    assert type(q.grad) is torch.Tensor and (q.grad == 3).all()
    q.view(-1)[5:9].sum().backward()
    assert q.grad.sum() == 3 * 128 + 4
    q.grad = torch.ones(4, 32)
    with pytest.raises(RuntimeError, match="leaf"):
        q.add_(1)
    parameter = torch.nn.Parameter(q.detach())
    assert isinstance(parameter, torch.nn.Parameter) and isinstance(parameter, QuantizedTensor)
    module = torch.nn.Linear(32, 4, bias=False)
    module.weight = parameter
    x = torch.randn(3, 32)
    module(x).sum().backward()
    assert torch.equal(parameter.grad, x.sum(0).expand(4, 32))
    assert torch.equal(module(x), x @ parameter.dequantize().t())
    made = MODES[mode]().make_empty((2, 32), requires_grad=True)
    assert made.requires_grad and made.is_leaf


def test_an_encoded_gradient(mode):
    """y.backward(codes): every node reads their numbers."""
    g = MODES[mode]("e5m2")(torch.randn(4, 32))
    plain = g.dequantize()
    w = torch.nn.Parameter(torch.randn(32, 32))
    calls = {
        "torch": lambda x: (x @ w).tanh(),
        "functional": lambda x: F.gelu(x),
        "bias": lambda x: F.gelu(x, bias=w[0]),
        "op": ops.GELU(),
        "segment": ops.Sequential(ops.Linear(32, 32), ops.GELU()),
        "quantize": lambda x: MODES[mode]()(x),
        "chain": ops.Sequential(ops.GELU(), ops.Quantize(quantizer=MODES[mode]()), ops.SiLU()),
    }
    for name, f in calls.items():
        found = []
        for given in (g, plain):
            x = torch.linspace(-2, 2, 128).view(4, 32).requires_grad_()
            f(x).backward(given)
            found.append(x.grad + 0)
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6, msg=name)


def test_writes_between_the_passes_are_found(mode):
    """Codes that a graph saved must not change before it runs backward."""
    q = MODES[mode]()(torch.randn(4, 32)).requires_grad_()
    y = (q * q).sum()
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    model[0].weight = torch.nn.Parameter(MODES[mode]()(model[0].weight.detach()))
    y = model(torch.randn(4, 32, requires_grad=True)).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()
    out = MODES[mode]().make_empty((4, 32))
    x = torch.randn(4, 32, requires_grad=True)
    assert MODES[mode]().quantize(x, out=out) is out and out.requires_grad
    out.sum().backward()
    assert (x.grad == 1).all()


def test_saved_codes_are_seen_by_hooks(mode):
    """A graph saves the parts, so that hooks can move plain tensors."""
    packed, device = [], torch.get_default_device()
    op = ops.BasicLinear(32, 16)
    op.weight = torch.nn.Parameter(MODES[mode]()(op.weight.detach()))
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.cpu(), lambda t: t.to(device)
    ):
        y = op(x)
    assert packed and all(type(t) is torch.Tensor for t in packed)
    y.sum().backward()
    torch.testing.assert_close(x.grad, op.weight.dequantize().sum(0).expand(4, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("usage", USAGES)
def test_a_quantised_weight_feeds_the_plan(mode, usage, dtype, monkeypatch):
    """Its codes are multiplied as they are, and its gradient is the plain dW."""
    model = ops.Sequential(ops.Linear(64, 96), ops.SwiGLU(), ops.Linear(48, 32)).to(dtype)
    exact = copy.deepcopy(model)
    with torch.no_grad():
        for linear, twin in zip((model[0], model[2]), (exact[0], exact[2]), strict=True):
            w = MODES[mode](**USAGES[usage])(linear.weight.detach())
            linear.weight = torch.nn.Parameter(w)
            twin.weight.copy_(w)
    x = torch.randn(3, 5, 64, dtype=dtype)
    monkeypatch.setattr(QuantizedTensor, "decode", None)  # nothing is decoded by torch
    told = str(tt.explain(model, x.requires_grad_()))
    assert "linear0.weight" in told or ".weight" in told
    assert ("weight:col" in told) == (usage == "columnwise") or usage == "both"
    results = []
    for m in (model, exact):
        v = x.detach().requires_grad_()
        y = m(v)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))
        results.append([y, v.grad, *(p.grad for p in m.parameters())])
    step = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    if x.is_cuda and dtype == torch.float16:
        step = 2e-2  # for their range, codes are decoded to bf16, and x is cast to it
    for mine, other in zip(*results, strict=True):
        assert type(mine) is torch.Tensor and mine.dtype == dtype
        error = (mine.double() - other.double()).norm() / other.double().norm()
        assert error < step


@pytest.mark.parametrize("alone", [True, False])
def test_a_quantised_weight_with_quantised_operands(mode, alone):
    """The weight keeps its codes under a recipe or quantizers of the op."""
    op = ops.BasicLinear(64, 32)
    twin = ops.BasicLinear(64, 32)
    weight = MODES[mode]()(op.weight.detach())
    op.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        twin.weight.copy_(weight)
    for o in (op, twin):
        o.set_quantizer("forward", 0, MXFP8Quantizer("e4m3"))
        o.set_quantizer("backward", 0, MXFP8Quantizer("e5m2"))
    op.set_quantizer("forward", 1, Float8CurrentScalingQuantizer("e5m2"))  # not used: it has codes
    x = torch.randn(6, 64)
    run = (lambda m: m) if alone else (lambda m: ops.Sequential(m, ops.GELU()))
    found = []
    for o in (op, twin):
        v = x.clone().requires_grad_()
        run(o)(v).sum().backward()
        found.append((run(o)(x), v.grad, o.weight.grad))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)


def test_quantised_tensors_everywhere_in_a_chain(mode):
    """Biases, norms, extra inputs and inputs of another shape are decoded."""
    model = ops.Sequential(
        ops.LayerNorm(32), ops.Linear(32, 64), ops.Bias(64), ops.GELU(), ops.AddExtraInput()
    )
    twin = copy.deepcopy(model)
    for m, t in ((model[0], twin[0]), (model[2], twin[2])):
        for name, p in list(m.named_parameters(recurse=False)):
            q = MODES[mode]()(p.detach())
            setattr(m, name, torch.nn.Parameter(q))
            with torch.no_grad():
                getattr(t, name).copy_(q)
    x, extra = torch.randn(6, 32), MODES[mode]()(torch.randn(6, 64))
    torch.testing.assert_close(model(x, extra), twin(x, extra.dequantize()))
    model(x, extra).sum().backward()
    twin(x, extra.dequantize()).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    flat = MODES[mode]()(torch.randn(6 * 16, 2)).view(6, 32)  # codes of another matrix
    torch.testing.assert_close(model(flat, extra), twin(flat.dequantize(), extra.dequantize()))
    torch.testing.assert_close(F.gelu(flat), F.gelu(flat.dequantize()))
    torch.testing.assert_close(ops.GELU()(flat), ops.GELU()(flat.dequantize()))
    torch.testing.assert_close(F.gelu(x, bias=MODES[mode]()(torch.ones(32))), F.gelu(x + 1))


@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("usage", USAGES)
def test_a_quantize_at_the_end_gives_codes(mode, usage, shape):
    torch.manual_seed(0)
    quantizer = MODES[mode](**USAGES[usage])
    chain = ops.Linear(64, 96), ops.GELU()
    model = ops.Sequential(*chain, ops.Quantize(quantizer=quantizer))
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    plain = ops.Sequential(*chain)(x)
    assert isinstance(y, QuantizedTensor) and y.requires_grad and y.quantizer is quantizer
    wanted = MODES[mode](**USAGES[usage])(plain.detach())
    same(y.detach(), wanted)
    g = torch.randn_like(plain)
    made, exact = torch.autograd.grad(y, x, g), torch.autograd.grad(plain, x, g)
    torch.testing.assert_close(made, exact)
    with torch.no_grad():
        assert isinstance(model(x), QuantizedTensor)
    alone = ops.Quantize(quantizer=quantizer)(x)
    same(alone.detach(), MODES[mode](**USAGES[usage])(x.detach()))
    followed = torch.nn.Sequential(model, torch.nn.Linear(96, 8))
    assert followed(x).shape == (*shape[:-1], 8)


def test_swizzled_scales():
    quantizer = MXFP8Quantizer("e4m3", optimize_for_gemm=True)
    x = torch.randn(40, 64)
    y = ops.Sequential(ops.Bias(64), ops.GELU(), ops.Quantize(quantizer=quantizer))(x)
    assert y.swizzled and torch.equal(y, quantizer(F.gelu(x)).dequantize())
    assert torch.equal(y[:8] + 0, y.dequantize()[:8])
    y.mul_(2.0)
    assert y.swizzled and torch.equal(y, quantizer(F.gelu(x)).dequantize() * 2)


def _model(mode):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    if mode is not None:
        for linear in (model[0], model[2]):
            linear.weight = torch.nn.Parameter(MODES[mode]()(linear.weight.detach()))
    return model


OPTIMIZERS = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, **how),
    "AdamW decay": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
}
HOW = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_plain_weights_that_are_quantised_after_each_step(mode, name, how):
    """50 steps. The weights are the same bits where each step writes once."""
    model, plain = _model(mode), _model(None)
    quantizers = [MODES[mode]() for _ in range(2)]
    weights = [plain[0].weight, plain[2].weight]
    with torch.no_grad():
        for w, q in zip(weights, quantizers, strict=True):
            w.copy_(q(w))
    optimizers = [OPTIMIZERS[name](m.parameters(), **HOW[how]) for m in (model, plain)]
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    once = how == "fused" or name != "AdamW decay"  # other steps write after the decay too
    for _ in range(50):
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = ((m(x) - target) ** 2).mean()
            loss.backward()
            losses.append(loss.item())
        # Products add in an order that the codes may change, so both get the same gradients.
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=2e-5)
            p.grad.copy_(q.grad)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for w, q in zip(weights, quantizers, strict=True):
                w.copy_(q(w))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        for mine, other in ((model[0].weight, weights[0]), (model[2].weight, weights[1])):
            assert isinstance(mine, QuantizedTensor)
            if once:
                assert torch.equal(mine, other)
            else:  # within one step of the format
                torch.testing.assert_close(mine.dequantize(), other, rtol=0.13, atol=2e-3)
                with torch.no_grad():
                    other.copy_(mine)
    assert all(type(t) is torch.Tensor for s in optimizers[0].state.values() for t in s.values()
               if isinstance(t, torch.Tensor))  # fmt: skip
    assert losses[0] < 1.2


def test_checkpoints_of_modules(mode):
    """State dicts, files, and conversions of modules."""
    model, other = _model(mode), _model(mode)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    same(other[0].weight.detach(), model[0].weight.detach())
    plain = _model(None)
    plain.load_state_dict(model.state_dict())  # numbers
    assert torch.equal(plain[0].weight, model[0].weight.dequantize())
    other.load_state_dict(_model(None).state_dict())  # encoded
    same(other[0].weight.detach(), _model(mode)[0].weight.detach())
    file.seek(0)
    _model(mode).load_state_dict(torch.load(file, weights_only=True), assign=True)
    twin = copy.deepcopy(model)
    twin.to(torch.bfloat16)
    assert isinstance(twin[0].weight, QuantizedTensor) and twin[0].weight.dtype == torch.bfloat16
    assert isinstance(twin[0].weight, torch.nn.Parameter)
    x = torch.randn(4, 32)
    assert twin(x.bfloat16()).dtype == torch.bfloat16
    whole = pickle.loads(pickle.dumps(model))
    assert torch.equal(whole(x), model(x)) and isinstance(whole[0].weight, torch.nn.Parameter)


def test_functions_of_memory_reach_the_parts(mode):
    from tenon.torch import _quantized_ops

    q, seen = MODES[mode]()(torch.randn(4, 32)), []
    assert not q.is_pinned()
    handler = _quantized_ops._HANDLERS[torch.ops.aten.record_stream.default]
    handler(lambda t, stream: seen.append((t.data_ptr(), stream)), (q, 7), {})
    assert seen == [(t.data_ptr(), 7) for t in q.parts().values()]
    with pytest.raises(RuntimeError):
        q.expand(32)


def test_a_fresh_process_loads_files(tmp_path):
    """`import tenon.torch` is enough for weights_only=True."""
    q = {name: make()(torch.ones(2, 32)) for name, make in MODES.items()}
    torch.save(q, tmp_path / "q.pt")
    code = "import sys, torch, tenon.torch; q = torch.load(sys.argv[1], weights_only=True)\n"
    code += "print([bool((t == 1).all()) and t.quantizer.scaling == n for n, t in q.items()])"
    command = [sys.executable, "-c", code, str(tmp_path / "q.pt")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([True] * len(MODES))


def test_hostile_files_are_refused():
    from tenon.torch import _quantized

    q = MODES["mxfp8"]()(torch.randn(4, 32))
    _, given = q.__reduce_ex__(4)
    names = (
        "shape matrix dtype fp8_dtype scaling parts swizzled quantizer requires_grad is_parameter"
    )
    good = dict(zip(names.split(), given, strict=True))
    same(_quantized.unpickled(**good), q)
    short = {**good["parts"], "rowwise_scale_inv": torch.zeros(1, 1, dtype=torch.uint8)}
    wrong = (
        {"shape": (4, 64)}, {"matrix": (-4, -32)}, {"scaling": "mxfp9"}, {"parts": {}},
        {"parts": short}, {"quantizer": "x"}, {"dtype": torch.float64}, {"fp8_dtype": torch.int8},
    )  # fmt: skip
    for change in wrong:
        with pytest.raises((ValueError, TypeError)):
            _quantized.unpickled(**{**good, **change})
    broken = MODES["delayed"]()
    state = {**broken.__getstate__(), "scale": torch.zeros(0)}
    with pytest.raises(ValueError, match="one number"):
        broken.__setstate__(state)


def test_arguments_are_checked():
    q = MODES["mxfp8"]()(torch.randn(4, 32))
    with pytest.raises(ValueError, match="give one of them"):
        QuantizedTensor((4, 32), torch.float32, "e4m3", "mxfp8")
    with pytest.raises(TypeError, match="that of the numbers"):
        QuantizedTensor((4, 32), torch.float64, "e4m3", "mxfp8", **q.parts())
    with pytest.raises(ValueError, match="rowwise_data is"):
        QuantizedTensor((4, 64), torch.float32, "e4m3", "mxfp8", **q.parts())
    with pytest.raises(ValueError, match="data is assigned"):
        q.data = torch.ones(3)
    with pytest.raises(ValueError, match="out is"):
        q.quantize_(torch.ones(4, 33))
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)):
        q.numpy()
    with pytest.raises(BufferError, match="share q.dequantize"):
        q.__dlpack__()
    assert q.quantizer.is_quantizable(q) and not q.quantizer.is_quantizable(torch.ones(()))
    mine = q.quantizer.copy()
    mine.optimize_for_gemm = True
    assert mine(torch.ones(4, 32)).swizzled and not q.quantizer.swizzled
    assert copy.deepcopy(mine).optimize_for_gemm
