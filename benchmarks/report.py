"""What the rounds come to: rows, goals, the tables on the terminal, results.json, results.svg and highlights.svg."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import numba
import numpy as np
import psutil
import zmq

OURS = "central-storage"
#: The works in highlights.svg, the chart of the project's README.md.
HIGHLIGHTS = ("adam-400MB", "read-400MBx1000", "digits-many-steps", "dlrm")


@dataclass(frozen=True)
class Row:
    """A peer at a work: median, smallest and largest of its rounds; seconds are one step, one read or one start."""

    work: str
    peer: str
    seconds: float
    lo: float
    hi: float
    rounds: int


@dataclass(frozen=True)
class Goal:
    """A ratio that is wanted at a work. ``>=`` is the figure of ``other`` divided by that of ``ours``, and ``<=`` is
    that of ``ours`` divided by that of ``other``, which is a program or another work of the service."""

    work: str
    sign: Literal[">=", "<="]
    bound: float
    other: str
    what: str = "seconds"
    ours: str = OURS

    def ratio(self, ours: float, others: float) -> float:
        """What is compared with the bound."""
        return others / ours if self.sign == ">=" else ours / others

    def verdict(self, ratio: float | None) -> dict[str, Any]:
        """The goal beside what was reached; without a ratio, it was not measured."""
        is_met = None if ratio is None else ratio >= self.bound if self.sign == ">=" else ratio <= self.bound
        return {**vars(self), "reached": ratio, "is_met": is_met}


def goals_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """For people: a line for each goal."""
    lines = [f"{'goals':<60}{'wanted':>10}{'reached':>10}"]
    for goal in verdicts:
        sides = (goal["other"], goal["ours"]) if goal["sign"] == ">=" else (goal["ours"], goal["other"])
        figure = "" if goal["what"] == "seconds" else f", {goal['what']}"
        wanted = f"{goal['sign']} {goal['bound']:.2f}"
        reached = "" if goal["reached"] is None else f"{goal['reached']:.2f}"
        word = {None: "not measured", True: "met", False: "missed"}[goal["is_met"]]
        lines.append(f"  {goal['work'] + figure + ': ' + ' / '.join(sides):<58}{wanted:>10}{reached:>10}  {word}")
    return "\n".join(lines)


def rows_of(figures: dict[tuple[str, str], list[float]]) -> list[Row]:
    """``figures`` are the seconds of every round by (work, peer); rows keep that order."""
    return [
        Row(work, peer, statistics.median(seconds), min(seconds), max(seconds), len(seconds))
        for (work, peer), seconds in figures.items()
    ]


def by_work(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each work, the fastest first."""
    works: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        works.setdefault(row.work, []).append(row)
    return {work: works[work] for work in dict.fromkeys(row.work for row in rows)}


def table(rows: list[Row]) -> str:
    """For people. The last column is how many times our median each peer took."""
    lines = []
    for work, peers in by_work(rows).items():
        ours = next((row.seconds for row in peers if row.peer == OURS), math.nan)
        lines += ["", f"{work:<32}{'median':>10}{'spread':>23}{'/ ours':>9}"]
        for row in peers:
            spread = f"{shown(row.lo)} … {shown(row.hi)}"
            lines.append(f"  {row.peer:<30}{shown(row.seconds):>10}{spread:>23}{row.seconds / ours:>9.2f}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    return {
        "cpus": os.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "libzmq": zmq.zmq_version(),
        },
    }


def save(rows: list[Row], goals: Sequence[dict[str, Any]], machine: dict[str, Any], directory: Path) -> None:
    """Write results.json, results.svg and, if any of HIGHLIGHTS was measured, highlights.svg."""
    content = {"machine": machine, "rows": [vars(row) for row in rows], "goals": goals}
    (directory / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / "results.svg").write_text(drawing(rows))
    if highlights := [row for row in rows if row.work in HIGHLIGHTS]:
        (directory / "highlights.svg").write_text(drawing(highlights))


def drawing(rows: list[Row]) -> str:
    """A bar for each peer of each work, on one logarithmic scale; a line shows the spread."""
    left, width, height = 230, 560, 16
    low = math.floor(math.log10(min(row.lo for row in rows)))
    high = math.ceil(math.log10(max(row.hi for row in rows)))

    def x(seconds: float) -> float:
        return left + width * (math.log10(seconds) - low) / (high - low)

    parts, y = [], 30
    for work, peers in by_work(rows).items():
        y += height
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{escape(work)}</text>')
        for row in peers:
            y += height
            colour = "#c0504d" if row.peer == OURS else "#8fa9c8"
            parts += [
                f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(row.peer)}</text>',
                f'<rect x="{left}" y="{y + 2}" width="{x(row.seconds) - left:.1f}" height="12" fill="{colour}"/>',
                f'<path d="M{x(row.lo):.1f} {y + 8}H{x(row.hi):.1f}" stroke="#333"/>',
                f'<text x="{x(row.hi) + 5:.1f}" y="{y + 12}">{shown(row.seconds)}</text>',
            ]
    bottom = y + 2 * height
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.insert(0, f'<path d="M{at:.1f} 24V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="18" text-anchor="middle">{shown(10.0**power)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{bottom + 10}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def shown(seconds: float) -> str:
    """Three digits and a unit: ``1.23 ms``."""
    unit, factor = next((u, f) for u, f in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 0.9995 or u == "µs")
    digits = max(0, 2 - math.floor(math.log10(max(seconds * factor, 1e-3)) + 1e-9))
    return f"{seconds * factor:.{digits}f} {unit}"
