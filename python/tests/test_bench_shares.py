"""Tests of the picture of shares: well-formed, and with every case that ran."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
SVG = "{http://www.w3.org/2000/svg}"


def case(name, mix, share, error=""):
    return {
        "case": name,
        "mix": mix,
        "rows": 8,
        "cols": 16,
        "us": 2.0,
        "tbps": 4.0,
        "share": share,
        "error": error,
    }


def test_has_a_bar_of_its_share_for_each_case(monkeypatch):
    if not (BENCH / "shares.py").exists():
        pytest.skip("the package has no benchmarks")
    monkeypatch.syspath_prepend(str(BENCH))
    import shares

    bench = {
        "device": "a <GPU> & more",
        "dtype": "bf16",
        "precision": "native",
        "cases": [
            case("gelu", "2:2", 0.5),
            case("swiglu", "4:2", 1.0),
            case("silu <x>", "2:2", 0.75),
            case("mish", "2:2", 0.1, error="no memory"),
            case("cached", "2:2", 3.0),
        ],
    }
    root = ElementTree.fromstring(shares.picture(bench))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    names = [r.find(f"{SVG}title").text.split(":")[0] for r in bars]
    assert names == ["cached", "silu <x>", "gelu", "swiglu"]
    lengths = [float(r.get("width")) for r in bars]
    full = lengths[3]
    assert lengths == pytest.approx([shares.MOST * full, 0.75 * full, 0.5 * full, full], abs=0.1)
    assert all(float(r.get("x")) + float(r.get("width")) < float(root.get("width")) for r in bars)
    sys.modules.pop("shares")


def extent(element):
    """The maximal extent of a text: digits of DejaVu Sans, the widest common font."""
    letter = {"g": 0.70 * 11, "v": 0.64 * 10}.get(element.get("class"), 0.64 * 11)
    x, width = float(element.get("x")), letter * len(element.text)
    return (x - width, x) if element.get("text-anchor") == "end" else (x, x + width)


def test_no_label_is_cut(monkeypatch):
    if not (BENCH / "shares.py").exists():
        pytest.skip("the package has no benchmarks")
    monkeypatch.syspath_prepend(str(BENCH))
    import shares

    long = "clamped_swiglu.bwd bf16 -> e4m3 block128x128 rowcol +dbias " + "x" * 60
    pictures = [
        shares.picture({"device": "d" * n, "dtype": "bf16", "precision": "native", "cases": cases})
        for n in (1, 120)
        for cases in ([], [case("gelu", "2:2", 3.0)], [case(long, "2:2, " * 40, 0.5)])
    ]
    pictures.append((BENCH.parents[1] / "docs" / "cuda-shares.svg").read_text())
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        for element in root.iter(f"{SVG}text"):
            low, high = extent(element)
            assert low >= 0 and high <= float(root.get("width")), element.text
    sys.modules.pop("shares")
