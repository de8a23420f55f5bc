"""Tests of the pictures and tables of benchmarks: well-formed, and with every case that ran."""

import importlib
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


@pytest.fixture
def bench_module(monkeypatch):
    """Imports a module of the benchmarks."""
    if not (BENCH / "shares.py").exists():
        pytest.skip("the package has no benchmarks")
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("shares", "speedups"):
        sys.modules.pop(name, None)


def test_has_a_bar_of_its_share_for_each_case(bench_module):
    shares = bench_module("shares")
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


def extent(element):
    """The maximal extent of a text: digits of DejaVu Sans, the widest common font."""
    letter = {"g": 0.70 * 11, "v": 0.64 * 10}.get(element.get("class"), 0.64 * 11)
    x, width = float(element.get("x")), letter * len(element.text)
    return (x - width, x) if element.get("text-anchor") == "end" else (x, x + width)


def timed(name, memory="kept", kind="activations", **speedups):
    peers = {peer.replace("_", "."): {"speedup": s} for peer, s in speedups.items()}
    return {"case": name, "memory": memory, "kind": kind, "peers": peers}


def test_speedups_are_medians_of_runs_and_means_of_cases(bench_module):
    speedups = bench_module("speedups")
    runs = [timed("gelu bf16", torch_eager=s, xla=10.0) for s in (7.0, 2.0, 3.0)]
    onednn = {"case": "gelu bf16", "peers": {"onednn": {"speedup": 1.5}}}  # of tenon bench
    results = speedups.merged(
        [
            *runs,
            onednn,
            timed("silu.bwd bf16", torch_eager=12.0, xla=0.9),
            timed("silu.bwd bf16", memory="fresh", torch_eager=5.0),
            {"case": "situglu bf16", "peers": {}},
        ]
    )
    assert [r.case for r in results] == ["gelu bf16", "silu.bwd bf16", "silu.bwd bf16"]
    assert results[0].speedups == {"torch.eager": 3.0, "xla": 10.0, "onednn": 1.5}
    rows = [line.split(" | ") for line in speedups.table(results).splitlines()]
    assert rows[0] == ["| speedup over", "bf16", "bf16, fresh memory |"]
    assert rows[2] == ["| PyTorch eager", "6.00 (2 cases)", "5.00 (1 cases) |"]
    assert rows[3] == ["| XLA", "3.00 (2 cases)", " |"]
    assert rows[5][1] == f"{(1.5 * 0.9) ** 0.5:.2f} (2 cases)"
    assert speedups.losses(results).splitlines()[0] == "1 times a peer is faster"
    assert "silu.bwd bf16" in speedups.losses(results)
    sentence = "Slower than the fastest peer: silu.bwd bf16 0.90 (XLA)."
    assert speedups.slower(results) == sentence
    assert speedups.slower(results[:1]) == "Slower than the fastest peer: none."


def test_speedups_have_a_bar_from_one(bench_module):
    speedups = bench_module("speedups")
    results = speedups.merged(
        [
            timed("gelu bf16", torch_eager=4.0, xla=8.0),
            timed("gelu f32", torch_eager=0.5),
            timed("swiglu.bwd bf16", kind="gated", xla=100.0),
            timed("quantize bf16 -> e4m3 delayed row", kind="casts", xla=1.0),
            timed("gelu f32", memory="fresh", xla=3.0),
        ]
    )
    root = ElementTree.fromstring(speedups.picture(results))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    names = [r.find(f"{SVG}title").text.split(":")[0] for r in bars]
    assert names == [
        "gelu bf16",
        "gelu f32",
        "swiglu.bwd bf16",
        "quantize bf16 -> e4m3 delayed row",
    ]
    left = [float(r.get("x")) for r in bars]
    lengths = [float(r.get("width")) for r in bars]
    unit = speedups.DOUBLING
    assert lengths == pytest.approx([2 * unit, unit, 4 * unit, 0], abs=0.1)
    assert left[0] == left[2] == left[3] < left[1]
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "4.00 eager" in texts and "quantize -> e4m3 delayed row" in texts


def test_no_label_is_cut(bench_module):
    shares, speedups = bench_module("shares"), bench_module("speedups")
    long = "clamped_swiglu.bwd bf16 -> e4m3 block128x128 rowcol +dbias " + "x" * 60
    pictures = [
        shares.picture({"device": "d" * n, "dtype": "bf16", "precision": "native", "cases": cases})
        for n in (1, 120)
        for cases in ([], [case("gelu", "2:2", 3.0)], [case(long, "2:2, " * 40, 0.5)])
    ]
    for name in ("gelu bf16", f"{long} bf16"):
        lines = [timed(name, kind="casts", torch_compile=1234.5), timed("gelu f32", xla=0.1)]
        pictures.append(speedups.picture(speedups.merged(lines)))
    pictures.append((BENCH.parents[1] / "docs" / "cuda-shares.svg").read_text())
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        for element in root.iter(f"{SVG}text"):
            low, high = extent(element)
            assert low >= 0 and high <= float(root.get("width")), element.text
