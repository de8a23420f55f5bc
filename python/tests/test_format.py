"""Tests of the library's data on scaling modes and buffers of a plan."""

import pytest
import tenon
from tenon import _format, _lib


def test_scaling_modes_are_in_the_librarys_order():
    assert next(iter(_format.SCALINGS)) == "none"
    assert [s.number for s in _format.SCALINGS.values()] == list(range(len(_format.SCALINGS)))


@pytest.mark.parametrize(
    "name, dtype, single, given, transposes, block",
    [
        ("delayed", "f32", True, True, True, (0, 0)),
        ("current", "f32", True, False, True, (0, 0)),
        ("mxfp8", "e8m0", False, False, False, (1, 32)),
        ("block1x128", "f32", False, False, True, (1, 128)),
        ("block128x128", "f32", False, False, True, (128, 128)),
    ],
)
def test_scaling_modes(name, dtype, single, given, transposes, block):
    s = _format.scaling_of(name)
    assert s[2:] == (dtype, single, given, transposes, block)
    data, scales = _format.encoding_shapes(name, 200, 300, True)
    assert data == ((300, 200) if transposes else (200, 300))
    assert (scales == (1, 1)) == single


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="the scaling 'mxfp4' is not known; use one of none, del"):
        _format.scaling_of("mxfp4")
    with pytest.raises(ValueError, match="the scaling 'mxfp4' is not known"):
        _format.encoding_shapes("mxfp4", 1, 1, False)


CHAIN = "layernorm(64) linear(64,256) bias swiglu dropout(0.1) linear(128,64) add"


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8", "block"])
def test_buffers_are_those_of_the_json(recipe):
    plan = tenon.plan(CHAIN, dtype="bf16", recipe=recipe)
    told = plan.json(32)
    assert [
        (b.name, b.role, b.dtype, list(b.rows), b.cols, "rows" if b.rows_inside else "cols")
        for b in plan.buffers
    ] == [
        (b["name"], b["role"], b["dtype"], b["rows"], b["cols"], b["inner"])
        for b in told["buffers"]
    ]
    reads = {r.rpartition(":")[0] for step in told["backward"] for r in step["reads"]}
    for b in plan.buffers:
        if b.role in ("input", "output", "param", "extra_in", "grad"):
            assert b.reads_backward == (b.name in reads), b


def test_saved_buffers_are_read_backward():
    for training in (True, False):
        saved = [b for b in tenon.plan(CHAIN, training=training).buffers if b.role == "saved"]
        assert saved and all(b.reads_backward for b in saved)


def test_lists_have_the_length_that_the_library_tells():
    found = _lib.list_of(_lib.lib.tenon_scalings, _lib.Scaling)
    assert [s.name.decode() for s in found] == list(_format.SCALINGS)
    with pytest.raises(ValueError, match="tenon_plan_buffers: plan is NULL"):
        _lib.list_of(_lib.lib.tenon_plan_buffers, _lib.Buffer, None)


def test_activation_info():
    found = tenon.activation_info("scaled(clamped_swiglu(alpha=1.7))")
    assert found["inputs"] == 2 and found["scaled"] is True
    parameters = {p["name"]: p for p in found["parameters"]}
    assert list(parameters) == ["limit", "alpha", "offset"]
    assert parameters["alpha"]["value"] == 1.7  # not the value rounded to float32
    assert parameters["limit"]["least"] > 0 and parameters["limit"]["most"] is None
    assert list(found) == ["name", "inputs", "scaled", "parameters", "formula"]
    assert tenon.activation_info("x*k; k = 1e-3")["parameters"] == [
        {"name": "k", "value": 1e-3, "least": None, "most": None}
    ]
