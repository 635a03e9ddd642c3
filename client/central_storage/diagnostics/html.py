"""What notebooks show of public objects: small tables, and histograms as inline SVG. Every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Markup", "histogram", "section", "table"]

_WIDTH, _HEIGHT = 240, 48


class Markup(str):
    """A text that is HTML already."""

    __slots__ = ()


def section(title: str, *parts: str) -> str:
    """A title above parts, which are HTML unless they are plain texts.

    >>> section("<w>", "5 > 4")
    '<div><b>&lt;w&gt;</b><br/>5 &gt; 4</div>'
    """
    return f"<div>{'<br/>'.join([f'<b>{escape(title)}</b>', *map(_cell, parts)])}</div>"


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Markup:
    """A table; the cells are escaped.

    >>> table([("a", 1)])
    '<table><tr><td>a</td><td>1</td></tr></table>'
    """
    named = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"] if head else []
    lines = [f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows]
    return Markup(f"<table>{''.join([*named, *lines])}</table>")


def histogram(counts: Sequence[int], low: str, high: str) -> Markup:
    """A histogram with a bar for each count, and texts under its ends."""
    highest = max(*counts, 1)
    width = _WIDTH / len(counts)
    bars = "".join(
        f'<rect x="{number * width:.1f}" y="{_HEIGHT * (1 - count / highest):.1f}" width="{width * 0.9:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}"><title>{count}</title></rect>'
        for number, count in enumerate(counts)
    )
    texts = "".join(
        f'<text x="{x}" y="{_HEIGHT + 14}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'
        for x, anchor, text in ((0, "start", low), (_WIDTH, "end", high))
    )
    return Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 18}" role="img" aria-label="histogram" fill="currentColor">'
        f"{bars}{texts}</svg>"
    )


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))
