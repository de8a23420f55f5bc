"""Tests of classes generated from schemas, against hand-written classes of the same ops and
float64.
"""

import copy
import inspect
import pickle

import pytest
import tenon
import tenon.torch.ops as ops
import torch
from tenon.torch.ops import from_schema

SCHEMAS = {op.name: op for op in tenon.ops()}
# At module level, so that they can be pickled.
MadeBias = from_schema.class_of(SCHEMAS["bias"], "MadeBias")
MadeScale = from_schema.class_of(SCHEMAS["scale"], "MadeScale")
MadeAdd = from_schema.class_of(SCHEMAS["add"], "MadeAdd")
MadeNorm = from_schema.class_of(SCHEMAS["layernorm"], "MadeNorm")
MadeDropout = from_schema.class_of(SCHEMAS["dropout"], "MadeDropout")
MadeReshape = from_schema.class_of(SCHEMAS["reshape"], "MadeReshape")
MadeExtra = from_schema.class_of(SCHEMAS["make_extra_output"], "MadeExtra")

# bfloat16 has 8 bits. Two roundings may differ by one unit.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def gradients(module, x, *extras):
    """y and the gradients of the inputs and the parameters, for a fixed dy."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, *extras)]
    y = module(*inputs)
    torch.manual_seed(9)
    found = torch.autograd.grad(y, [*inputs, *module.parameters()], torch.randn_like(y))
    return [y.detach(), *found]


def filled(module):
    torch.manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


def expect_same(ours, theirs, dtype):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("made", "own", "extras"),
    [
        (lambda d: MadeBias(16, dtype=d), lambda d: ops.Bias(16, dtype=d), 0),
        (lambda d: MadeScale(0.3), lambda d: ops.ConstantScale(0.3), 0),
        (lambda d: MadeAdd(), lambda d: ops.AddExtraInput(), 1),
        (
            lambda d: MadeNorm(16, eps=1e-3, dtype=d),
            lambda d: ops.LayerNorm(16, eps=1e-3, dtype=d),
            0,
        ),
    ],
    ids=["bias", "scale", "add", "layernorm"],
)
def test_made_class_is_own_class(made, own, extras, dtype):
    x, *given = torch.randn(1 + extras, 2, 3, 16).to(dtype)
    made, own = filled(made(dtype)), filled(own(dtype))
    expect_same(gradients(made, x, *given), gradients(own, x, *given), dtype)
    # Between products the op is part of their plan.
    around = [ops.Linear(16, 16, dtype=dtype), ops.Linear(16, 8, bias=False, dtype=dtype)]
    chains = [ops.Sequential(around[0], op, around[1]) for op in (made, own)]
    expect_same(*[gradients(chain, x, *given) for chain in chains], dtype)


def test_it_is_inside_the_plan_of_its_neighbours():
    chain = ops.Sequential(ops.Linear(8, 16, bias=False), MadeBias(16), ops.Linear(16, 4))
    chain(torch.randn(5, 8))
    assert "forward: Segment(BasicLinear, MadeBias, BasicLinear, Bias)" in repr(chain)


def test_signature_and_documents():
    assert str(inspect.signature(MadeNorm)) == (
        "(n, eps=1e-05, zero_centered_gamma=False, *, device=None, dtype=None)"
    )
    assert str(inspect.signature(MadeScale)) == "(c)"
    assert MadeNorm.__doc__.startswith(SCHEMAS["layernorm"].summary)
    assert repr(MadeNorm(4, eps=0.5)) == "MadeNorm(n=4, eps=0.5)"


def test_parameters_start_as_a_plan_says():
    norm = MadeNorm(6)
    assert norm.gamma.tolist() == [1] * 6 and norm.beta.tolist() == [0] * 6
    norm.load_state_dict({"gamma": torch.full((6,), 2.0), "beta": torch.ones(6)})
    assert norm(torch.zeros(2, 6)).tolist() == [[1] * 6] * 2
    norm.reset_parameters()
    assert norm.gamma.tolist() == [1] * 6


def test_no_grad_copies_and_pickles():
    norm, x = filled(MadeNorm(6)), torch.randn(3, 6)
    with torch.no_grad():
        y = norm(x)
    assert not y.requires_grad
    assert torch.equal(copy.deepcopy(norm)(x), y)
    from_schema.MadeNorm = MadeNorm  # pickle looks it up here
    try:
        assert torch.equal(pickle.loads(pickle.dumps(norm))(x), y)
    finally:
        del from_schema.MadeNorm


def test_frozen_parameters_and_frozen_inputs():
    bias, x = filled(MadeBias(4)), torch.randn(3, 4)
    bias(x).sum().backward()
    assert bias.bias.grad.tolist() == [3] * 4
    bias.requires_grad_(False)
    x.requires_grad_()
    bias(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_empty_and_strided_inputs():
    bias = filled(MadeBias(4))
    x = torch.randn(0, 4, requires_grad=True)
    y = bias(x)
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad.shape == (0, 4) and bias.bias.grad.tolist() == [0] * 4
    x = torch.randn(4, 3).t()
    torch.testing.assert_close(bias(x), x + bias.bias)


def test_autocast_is_the_dtype_of_the_result():
    bias, x = filled(MadeBias(4)), torch.randn(3, 4)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = bias(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x + bias.bias, rtol=2**-7, atol=2**-7)


def test_rows_and_modes():
    x = torch.randn(4, 6)
    assert torch.equal(MadeReshape(12)(x), x.reshape(2, 12))
    y, extra = MadeExtra()(x)
    assert torch.equal(y, x) and torch.equal(extra, x)
    drop = MadeDropout(0.5)
    y = drop(x.abs() + 1)
    assert 0 < (y == 0).sum() < y.numel()
    assert torch.equal(drop.eval()(x), x)
    chain = ops.Sequential(MadeBias(6), drop, MadeScale(2.0)).eval()
    assert torch.equal(chain(x), 2 * x)


def test_mistakes():
    with pytest.raises(TypeError, match=r"MadeBias: missing .*'n'; it takes \(n, "):
        MadeBias()
    with pytest.raises(TypeError, match="MadeBias: n=2.5; it must be a whole number"):
        MadeBias(2.5)
    with pytest.raises(TypeError, match="MadeScale: c='x'; it must be a number"):
        MadeScale("x")
    with pytest.raises(TypeError, match="zero_centered_gamma=1; it must be True or False"):
        MadeNorm(4, zero_centered_gamma=1)
    with pytest.raises(TypeError, match="dtype=torch.int32"):
        MadeBias(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="input has 5 columns, .*bias wants 4"):
        MadeBias(4)(torch.randn(2, 5))
    with pytest.raises(ValueError, match="MadeAdd: the input is .* of the same shape"):
        MadeAdd()(torch.randn(2, 5), torch.randn(2, 4))
    with pytest.raises(TypeError, match="MadeBias: the input is torch.float64"):
        MadeBias(4)(torch.randn(2, 4, dtype=torch.float64))


def test_every_op_has_a_class_or_a_reason():
    """A new op of the registry appears in tenon.torch.ops."""
    own = {getattr(getattr(ops, name), "op_name", None) for name in ops.__all__}
    assert {op.name for op in tenon.ops()} - own == set(from_schema._OF_GROUPS)
