"""Tests of ops on the meta device: their parameters have no values until they are initialised."""

import pytest

torch = pytest.importorskip("torch")

import tenon.torch.ops as ops  # noqa: E402

DEVICE = torch.get_default_device()
OPS = {
    "BasicLinear": lambda **to: ops.BasicLinear(8, 8, **to),
    "Linear": lambda **to: ops.Linear(8, 8, **to),
    "Bias": lambda **to: ops.Bias(8, **to),
    "LayerNorm": lambda **to: ops.LayerNorm(8, **to),
    "RMSNorm": lambda **to: ops.RMSNorm(8, zero_centered_gamma=True, **to),
}
# The parameters after reset_parameters, if all elements are equal.
STARTS = {"Bias": (0.0,), "LayerNorm": (1.0, 0.0), "RMSNorm": (0.0,)}
AROUND = {
    "alone": lambda op: op,
    "planned": lambda op: ops.Sequential(ops.GELU(), op, ops.GELU()),
    "linear before": lambda op: ops.Sequential(ops.BasicLinear(8, 8), op),
    "activation after": lambda op: ops.Sequential(op, ops.GELU()),
    "dropout after": lambda op: ops.Sequential(op, ops.Dropout(0.5), ops.SiLU()),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", OPS)
def test_a_forward_is_refused(name, around):
    op = OPS[name](device="meta")
    model = AROUND[around](op)
    before = list(op.parameters())
    basic = "BasicLinear" if name == "Linear" else name
    for x in (torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bfloat16)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{basic}: (weight|bias) is on the meta dev.*"
                               r"to_empty\(device=.*reset_parameters\(\)"):  # fmt: skip
                model(x)
    assert all(a is b and a.is_meta for a, b in zip(before, op.parameters(), strict=True))


@pytest.mark.parametrize("name", OPS)
def test_a_model_that_goes_back_to_meta_is_refused(name):
    op = OPS[name]()
    op(torch.ones(2, 8))
    op.to("meta")
    with pytest.raises(RuntimeError, match="is on the meta device"):
        op(torch.ones(2, 8))


@pytest.mark.parametrize("name", OPS)
def test_memory_then_values(name):
    with torch.device("meta"):
        op = OPS[name]()
    assert all(p.is_meta for p in op.parameters())
    op.reset_parameters()  # does nothing on meta, like torch.nn
    assert all(p.is_meta for p in op.parameters())
    op.to_empty(device=DEVICE)
    parameters = list(op.parameters())
    with torch.no_grad():
        for p in parameters:
            p.fill_(float("nan"))
    optimizer = torch.optim.SGD(op.parameters(), lr=1.0)
    op.reset_parameters()
    for p, value in zip(parameters, STARTS.get(name, ()), strict=False):
        assert (p == value).all()
    x = torch.randn(4, 8)
    y = op(x)
    assert y.isfinite().all()
    y.backward(torch.randn_like(y))
    start = [p.detach().clone() for p in parameters]
    optimizer.step()  # the optimizer has the parameters that the op uses
    assert all(p is q for p, q in zip(parameters, op.parameters(), strict=True))
    assert all((p != q).any() for p, q in zip(parameters, start, strict=True))
    assert (op(x) != y).any()


@pytest.mark.parametrize("name", OPS)
def test_a_checkpoint_by_assignment(name):
    torch.manual_seed(0)
    source = OPS[name]()
    with torch.no_grad():
        for p in source.parameters():
            p.normal_()
    op = OPS[name](device="meta")
    op.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(4, 8)
    assert torch.equal(op(x), source(x))


def test_skipped_initialisation():
    op = torch.nn.utils.skip_init(ops.Linear, 8, 4, device=DEVICE)
    assert not any(p.is_meta for p in op.parameters())
    op.reset_parameters()
    assert op(torch.ones(2, 8)).shape == (2, 4)


def test_a_linear_starts_as_torchs_does():
    op, linear = ops.Linear(64, 64, device="meta"), torch.nn.Linear(64, 64, device="meta")
    for one in (op, linear):
        one.to_empty(device=DEVICE)
        torch.manual_seed(0)
        one.reset_parameters()
    assert torch.equal(op.weight, linear.weight)
