"""The speedups over other libraries on the CPU: a table and a sentence in Markdown, and a picture.

    python python/bench/speedups.py FILE… [--svg docs/cpu-speedups.svg]

Reads what `cpu_peers.py --json` and `tenon bench --device cpu --json` wrote. Of a case that was
timed several times, the median counts. A picture has a bar per case, the speedup over the fastest
peer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shares import COLOURS, Axis, Bar, Row, drawn

NAMES = {
    "torch.eager": "PyTorch eager",
    "torch.compile": "torch.compile",
    "xla": "XLA",
    "onednn": "oneDNN",
}
KINDS = ("activations", "gated", "dropout and norms", "casts")
# The axis is logarithmic: pixels per doubling, from half the speed.
DOUBLING, LEAST, MOST = 50, 0.5, 16.0


def position(speedup: float) -> float:
    return DOUBLING * math.log2(min(max(speedup, LEAST), MOST) / LEAST)


class Result(NamedTuple):
    case: str
    dtype: str
    kind: str
    memory: str  # "kept" or "fresh"
    speedups: dict[str, float]  # by peer

    @property
    def label(self) -> str:
        """Without the dtype, which rows of the picture have in common."""
        return self.case.replace(f" {self.dtype}", "", 1)

    @property
    def fastest(self) -> str:
        return min(self.speedups, key=lambda peer: self.speedups[peer])

    @property
    def least(self) -> float:
        return self.speedups[self.fastest]


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(math.log(v) for v in values))


def merged(lines: Iterable[dict[str, Any]]) -> list[Result]:
    """Lines of the same case may have other peers, or be another run."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    kinds: dict[str, str] = {}
    for line in lines:
        peers = found.setdefault((line["case"], line.get("memory", "kept")), {})
        kinds[line["case"]] = line.get("kind", kinds.get(line["case"], KINDS[0]))
        for peer, p in line["peers"].items():
            peers.setdefault(peer, []).append(p["speedup"])
    return [
        Result(
            case,
            case.split()[1],
            kinds[case],
            memory,
            {peer: statistics.median(all_runs) for peer, all_runs in peers.items()},
        )
        for (case, memory), peers in found.items()
        if peers
    ]


def table(results: Sequence[Result]) -> str:
    """Geometric means over the cases that both have, as Markdown."""
    columns = sorted({(r.memory, r.dtype) for r in results}, key=lambda c: (c[0] != "kept", c[1]))
    heads = [dtype + (", fresh memory" if memory == "fresh" else "") for memory, dtype in columns]
    lines = [f"| speedup over | {' | '.join(heads)} |", f"|---|{'--:|' * len(columns)}"]
    for peer, name in [*NAMES.items(), ("", "the fastest of them, per case")]:
        cells = []
        for column in columns:
            own = [r for r in results if (r.memory, r.dtype) == column]
            values = [
                r.speedups[peer or r.fastest] for r in own if (peer or r.fastest) in r.speedups
            ]
            cells.append(f"{geometric_mean(values):.2f} ({len(values)} cases)" if values else "")
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def slower(results: Sequence[Result]) -> str:
    """One sentence with the cases that lose against the fastest peer, for kept memory."""
    lost = sorted((r.least, r) for r in results if r.memory == "kept" and r.least < 1)
    cases = ", ".join(f"{r.case} {least:.2f} ({NAMES[r.fastest]})" for least, r in lost)
    return f"Slower than the fastest peer: {cases or 'none'}."


def losses(results: Sequence[Result]) -> str:
    """One line per case and peer that is faster, the worst first."""
    found = sorted(
        (speedup, f"  {r.case:40}{NAMES[peer]:15}{speedup:.2f}  {r.memory}")
        for r in results
        for peer, speedup in r.speedups.items()
        if speedup < 1
    )
    return "\n".join([f"{len(found)} times a peer is faster", *(line for _, line in found)])


def bar(r: Result) -> Bar:
    peer, speedup = r.fastest, r.least
    left, right = sorted((position(1), position(speedup)))
    colour = COLOURS[-1][1] if speedup < 1 else COLOURS[1 if speedup < 1.25 else 0][1]
    tip = ", ".join(f"{NAMES[p]} {s:.2f}" for p, s in r.speedups.items())
    return Bar(left, right, colour, f"{speedup:.2f} {peer.split('.')[-1]}", f"{r.case}: {tip}")


def picture(results: Sequence[Result]) -> str:
    """Of the runs with kept memory: a panel per dtype."""
    kept = [r for r in results if r.memory == "kept"]
    dtypes = sorted({r.dtype for r in kept}) or [""]
    groups = []
    for kind in KINDS:
        rows: dict[str, dict[str, Result]] = {}
        for r in kept:
            if r.kind == kind:
                rows.setdefault(r.label, {})[r.dtype] = r
        order = sorted(
            rows, key=lambda label: -geometric_mean(r.least for r in rows[label].values())
        )
        if order:
            bars = {
                label: [bar(rows[label][d]) if d in rows[label] else None for d in dtypes]
                for label in order
            }
            groups.append((kind, [Row(*each) for each in bars.items()]))
    ticks = [(position(2.0**i), f"{2.0**i:g}") for i in range(-1, 5)]
    axis = Axis(position(MOST), ticks, position(1), 80)
    return drawn("Speedup over the fastest peer, per case", dtypes, axis, groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="files with one JSON object per line")
    parser.add_argument("--svg", help="draw the picture into this file")
    given = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in given.files:
        with open(name, encoding="utf-8") as file:
            lines += map(json.loads, file)
    results = merged(lines)
    print(f"{table(results)}\n\n{slower(results)}\n\n{losses(results)}")
    if given.svg:
        with open(given.svg, "w", encoding="utf-8") as file:
            file.write(picture(results))


if __name__ == "__main__":
    main()
