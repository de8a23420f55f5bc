"""HTML for notebooks: preformatted text, tables, and the curve of an activation."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Text(str):
    """A string whose repr is its text, without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return pre(self)


def pre(text: str) -> str:
    """Text in a <pre> element."""
    return f'<pre style="line-height:1.3">{html.escape(text)}</pre>'


def table(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A table with one name and value per row."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(k)}</th>'
        f'<td style="text-align:left">{html.escape(v)}</td></tr>'
        for k, v in facts
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def curves(x: Sequence[float], lines: dict[str, Sequence[float]], colours: Sequence[str]) -> str:
    """Small curves over a common axis, as SVG."""
    width, height = 260, 150
    values = [v for line in lines.values() for v in line if abs(v) < 1e6]
    low, high = min(*values, 0.0, -0.5), max(*values, 0.5)

    def point(u: float, v: float) -> str:
        px = (u - x[0]) / (x[-1] - x[0]) * width
        return f"{px:.1f},{(high - min(max(v, low), high)) / (high - low) * height:.1f}"

    axes = "".join(
        f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="#bbb"/>'
        for a, b in (
            (point(x[0], 0).split(","), point(x[-1], 0).split(",")),
            (point(0, low).split(","), point(0, high).split(",")),
        )
    )
    drawn = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" '
        f'points="{" ".join(point(u, v) for u, v in zip(x, line, strict=True) if v == v)}"/>'
        f'<text x="4" y="{14 + 14 * i}" font-size="12" fill="{colour}">{html.escape(name)}</text>'
        for i, ((name, line), colour) in enumerate(zip(lines.items(), colours, strict=False))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">{axes}{drawn}</svg>'
    )
