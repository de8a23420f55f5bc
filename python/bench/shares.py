"""Draws the results of `tenon bench --device cuda`: the share of the ceiling per case, by mix.

`python python/bench/shares.py bench.json docs/cuda-shares.svg` writes one SVG without external
references. A mix is the number of bytes read and written per element.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROW = 14
LETTER = 7  # average letter width at 11 px; common sans-serif fonts are narrower
WIDTH = 360  # width of a bar at the ceiling
MOST = 1.1  # larger shares are clipped
TICKS = (0.25, 0.5, 0.75, 0.9, 1.0)
# Colours of bars: near the ceiling, near the goals, below.
COLOURS = ((0.95, "#2a7f62"), (0.85, "#7fb069"), (0.7, "#e6aa38"), (0.0, "#c8553d"))
STYLE = (
    "text{font:11px sans-serif;fill:#333}.g{font-weight:bold}.v{fill:#666;font-size:10px}"
    ".t{stroke:#ccc;stroke-width:1}.c{stroke:#333;stroke-width:1}"
)

Case = dict[str, Any]


class Bar(NamedTuple):
    left: float  # pixels from the start of the panel
    right: float
    colour: str
    value: str  # written right of the bars
    tip: str


class Row(NamedTuple):
    label: str
    bars: Sequence[Bar | None]  # one per panel


class Axis(NamedTuple):
    width: float
    ticks: Sequence[tuple[float, str]]  # pixels and text
    origin: float  # the tick that is drawn dark
    values: float  # width of the values


def text(x: float, y: float, words: str, kind: str = "", end: bool = False) -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += ' text-anchor="end"' if end else ""
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def drawn(
    title: str, panels: Sequence[str], axis: Axis, groups: Sequence[tuple[str, Sequence[Row]]]
) -> str:
    """Groups of rows with one label each, and a bar per panel. A panel may have a name."""
    lines: list[str] = []
    top = y = 60.0 if any(panels) else 44.0
    longest = max((len(row.label) for _, rows in groups for row in rows), default=0)
    first = 12 + LETTER * longest  # left end of the bars
    starts = [first + i * (axis.width + axis.values) for i in range(len(panels))]
    for name, rows in groups:
        y += ROW
        lines.append(text(8, y + ROW - 4, name, "g"))
        y += ROW + 2
        for row in rows:
            lines.append(text(first - 6, y + ROW - 4, row.label, end=True))
            for start, bar in zip(starts, row.bars, strict=True):
                if bar is None:
                    continue
                lines += [
                    f'<rect x="{start + bar.left:g}" y="{y + 2:g}" '
                    f'width="{bar.right - bar.left:.1f}" height="{ROW - 4}" fill="{bar.colour}">'
                    f"<title>{escape(bar.tip)}</title>",
                    "</rect>",
                    text(start + axis.width + 4, y + ROW - 4, bar.value, "v"),
                ]
            y += ROW
    grid = []
    for start, panel in zip(starts, panels, strict=True):
        if panel:
            grid.append(text(start, top - 22, panel, "g"))
        for tick, words in axis.ticks:
            x = start + tick
            kind = "c" if tick == axis.origin else "t"
            grid.append(f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{y:g}" class="{kind}"/>')
            grid.append(text(x - 8, top - 4, words))
    heading = max(len(title), *(len(name) for name, _ in groups), 0)
    width = max(starts[-1] + axis.width + axis.values, 16 + (LETTER + 1) * heading)  # bold
    height = y + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
            text(8, 18, title, "g"),
            *grid,
            *lines,
            "</svg>\n",
        ]
    )


def shape(case: Case) -> str:
    return f"{case['rows']} x {case['cols']}"


def groups_of(cases: Iterable[Case]) -> list[tuple[str, list[Case]]]:
    """Cases that ran, by shape and mix, with the largest share first."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        if not case.get("error"):
            found.setdefault(f"{shape(case)}, {case['mix']}", []).append(case)
    for of in found.values():
        of.sort(key=lambda c: -c["share"])
    return sorted(found.items())


def row(case: Case) -> Row:
    share = case["share"]
    colour = next(c for least, c in COLOURS if share >= least)
    tip = f"{case['case']}: {case['us']:.1f} us, {case['tbps']:.2f} TB/s"
    return Row(case["case"], [Bar(0, WIDTH * min(share, MOST), colour, f"{100 * share:.1f}", tip)])


def picture(bench: dict[str, Any]) -> str:
    title = (
        f"Share of the mix-matched ceiling in %: {bench['device']}, "
        f"{bench['dtype']} in, {bench['precision']}"
    )
    axis = Axis(WIDTH * MOST, [(WIDTH * t, f"{100 * t:g}") for t in TICKS], WIDTH, 50)
    rows = [(name, [row(c) for c in cases]) for name, cases in groups_of(bench["cases"])]
    return drawn(title, [""], axis, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", help="what `tenon bench --device cuda --save` wrote")
    parser.add_argument("svg", help="the file to write")
    given = parser.parse_args()
    with open(given.bench) as file:
        bench = json.load(file)
    with open(given.svg, "w") as file:
        file.write(picture(bench))


if __name__ == "__main__":
    main()
