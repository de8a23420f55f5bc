"""Draws the results of `tenon bench --device cuda`: the share of the ceiling per case, by mix.

`python python/bench/shares.py bench.json docs/cuda-shares.svg` writes one SVG without external
references. A mix is the number of bytes read and written per element.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any
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


def shape(case: Case) -> str:
    return f"{case['rows']} x {case['cols']}"


def groups(cases: Iterable[Case]) -> list[tuple[str, list[Case]]]:
    """Cases that ran, by shape and mix, with the largest share first."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        if not case.get("error"):
            found.setdefault(f"{shape(case)}, {case['mix']}", []).append(case)
    for of in found.values():
        of.sort(key=lambda c: -c["share"])
    return sorted(found.items())


def text(x: float, y: float, words: str, kind: str = "", end: bool = False) -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += ' text-anchor="end"' if end else ""
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def bar(start: int, y: float, case: Case) -> list[str]:
    share = case["share"]
    colour = next(c for least, c in COLOURS if share >= least)
    length = WIDTH * min(share, MOST)
    return [
        text(start - 6, y + ROW - 4, case["case"], end=True),
        f'<rect x="{start}" y="{y + 2:g}" width="{length:.1f}" height="{ROW - 4}" fill="{colour}">'
        f"<title>{escape(case['case'])}: {case['us']:.1f} us, {case['tbps']:.2f} TB/s</title>",
        "</rect>",
        text(start + WIDTH * MOST + 4, y + ROW - 4, f"{100 * share:.1f}", "v"),
    ]


def picture(bench: dict[str, Any]) -> str:
    lines: list[str] = []
    y = 44.0
    top = y
    shown = groups(bench["cases"])
    longest = max((len(case["case"]) for _, cases in shown for case in cases), default=0)
    start = 12 + LETTER * longest  # left end of the bars
    for name, cases in shown:
        y += ROW
        lines.append(text(8, y + ROW - 4, name, "g"))
        y += ROW + 2
        for case in cases:
            lines += bar(start, y, case)
            y += ROW
    grid = []
    for tick in TICKS:
        x = start + WIDTH * tick
        kind = "c" if tick == 1 else "t"
        grid.append(f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{y:g}" class="{kind}"/>')
        grid.append(text(x - 8, top - 4, f"{100 * tick:g}"))
    title = (
        f"Share of the mix-matched ceiling in %: {bench['device']}, "
        f"{bench['dtype']} in, {bench['precision']}"
    )
    heading = max(len(title), *(len(name) for name, _ in shown), 0)
    width = max(start + WIDTH * MOST + 50, 16 + (LETTER + 1) * heading)  # headings are bold
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
