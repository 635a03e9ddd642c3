"""A picture of where each microsecond of a captured step goes: a line for each process, over the time of one step.

    .venv/bin/python benchmarks/timeline.py     # writes steps.svg

The step shown is a real one that the server's program has carried out: the one whose parts are nearest to the medians
of all such steps. `make bench` draws the picture, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import parts

from central_storage.timeline.rings import PARTS, SCRIPT

if TYPE_CHECKING:
    from bench import Bench, Peer

#: The works that are shown, with what their titles say.
SHOWN = {"sgd-1MB": "SGD on 1 MB, run_steps", "digits": "digits, one run a step"}
LANES = {"client": "script", "worker": "worker", "server": "server"}
#: By the first word of a part: the class of its blocks.
KINDS = {"function": "function", "commit": "commit"}
LEFT, WIDTH, HEIGHT, ROW, GAP = 80, 900, 18, 12, 14
LETTER = 5.6  # the width of a letter
STYLE = """<style>
text { fill: #222 } .back { fill: #fff } .grid { stroke: #ddd } .line { stroke: #999 } .lead { stroke: #999 }
.function { fill: #7fb77e } .commit { fill: #d9756c } .message { fill: #8fa9c8 }
.block { stroke: #fff; stroke-width: .5 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #1b1d22 } .grid { stroke: #33363d } .line { stroke: #777 } .lead { stroke: #777 }
.function { fill: #3f7d46 } .commit { fill: #a8453c } .message { fill: #4a6a94 } .block { stroke: #1b1d22 }
}
</style>"""


@dataclass(frozen=True)
class Block:
    """A part of a step in one process, in nanoseconds from the begin of the step."""

    lane: str
    part: str
    begin: int
    end: int

    @property
    def label(self) -> str:
        """Its name and its microseconds."""
        return f"{self.part} {(self.end - self.begin) / 1000:.0f}"


@dataclass(frozen=True)
class Step:
    """One step of a work."""

    work: str
    nanoseconds: int
    blocks: tuple[Block, ...]

    def sums(self) -> Counter[tuple[str, str]]:
        """Nanoseconds by lane and part."""
        found: Counter[tuple[str, str]] = Counter()
        for block in self.blocks:
            found[block.lane, block.part] += block.end - block.begin
        return found


def typical(work: str, left: Sequence[tuple[str, parts.Moments]], is_ahead: bool, steps: int) -> Step:
    """Of the last ``steps`` of a work, the captured one whose parts are nearest to the medians. Raises ValueError if a
    program has carried out less than half of them."""
    bounds = parts.bounds(left, is_ahead, steps)
    lanes = [*_lanes(left)]
    [server] = [moments for role, moments in left if role == "server"]
    ends = [when for (before, _), (name, when) in pairwise(server) if (before, name) == ("found", "committed")]
    found = []
    for first, last in bounds:
        by_program = bisect_right(ends, last) - bisect_right(ends, first)
        if by_program == 1:
            found.append(Step(work, last - first, tuple(_blocks(lanes, first, last))))
    if 2 * len(found) < len(bounds):
        raise ValueError(f"{work}: a program has carried out {len(found)} of {len(bounds)} steps")
    sums = [step.sums() for step in found]
    keys = {key for each in sums for key in each}
    medians = {key: statistics.median(each[key] for each in sums) for key in keys}
    length = statistics.median(step.nanoseconds for step in found)

    def distance(step: Step) -> float:
        own = step.sums()
        return abs(step.nanoseconds - length) + sum(abs(own[key] - medians[key]) for key in keys)

    return min(found, key=distance)


def _lanes(left: Sequence[tuple[str, parts.Moments]]) -> Iterator[tuple[str, str, parts.Moments]]:
    """Name, role and moments of each process, in the order in which a step comes to them."""
    for role, name in LANES.items():
        numbers = count()
        for each, moments in left:
            if each == role:
                yield f"{name} {next(numbers)}" if role == "worker" else name, role, moments


def _blocks(lanes: Sequence[tuple[str, str, parts.Moments]], first: int, last: int) -> Iterator[Block]:
    for lane, role, moments in lanes:
        whens = [when for _, when in moments]
        begin, end = bisect_right(whens, first) - 1, bisect_left(whens, last) + 1
        merged: list[Block] = []
        for (_, before), (name, when) in pairwise(moments[max(0, begin) : end]):
            part = PARTS.get((role, name)) or SCRIPT.get((role, name))
            if part is None or part == SCRIPT["client", "begun"]:
                continue
            block = Block(lane, part.partition(" (")[0], max(before, first) - first, min(when, last) - first)
            if merged and merged[-1].part == block.part and merged[-1].end == block.begin:
                block = Block(lane, block.part, merged.pop().begin, block.end)
            merged.append(block)
        yield from (block for block in merged if block.end > block.begin)


def drawing(steps: Sequence[Step]) -> str:
    """The steps below each other, each on a scale of its own."""
    shapes: list[str] = []
    y = 0
    for step in steps:
        lines, y = _panel(step, y)
        shapes += lines
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{y}" '
        f'font-family="sans-serif" font-size="10">{STYLE}<rect class="back" width="100%" height="100%"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _panel(step: Step, y: int) -> tuple[list[str], int]:
    """The shapes of a step, and where the next one begins."""
    title = f"{SHOWN.get(step.work, step.work)}: a step of {step.nanoseconds / 1000:.0f} µs"
    shapes = [f'<text x="8" y="{y + 18}" font-size="12" font-weight="bold">{escape(title)}</text>']
    top, y = y + 26, y + 34
    for lane in dict.fromkeys(block.lane for block in step.blocks):
        blocks = [block for block in step.blocks if block.lane == lane]
        shapes.append(f'<text x="8" y="{y + 13}" font-size="11">{escape(lane)}</text>')
        shapes.append(f'<path class="line" d="M{LEFT} {y + HEIGHT / 2}h{WIDTH}"/>')
        rows: list[float] = []  # where the labels of each row begin
        for block in reversed(blocks):  # so no line to a label crosses another label
            shapes += _block(block, y, WIDTH / step.nanoseconds, rows)
        y += HEIGHT + ROW * len(rows) + GAP
    grid = []
    every = next(each for each in (50, 100, 200, 500, 1000, 10**9) if step.nanoseconds / 1000 / each <= 12)
    for at in range(0, step.nanoseconds // 1000 + 1, every):
        x = LEFT + WIDTH * at * 1000 / step.nanoseconds
        grid.append(f'<path class="grid" d="M{x:.1f} {top}V{y}"/>')
        grid.append(f'<text x="{x:.1f}" y="{y + 11}" text-anchor="middle">{at} µs</text>')
    return [*grid, *shapes], y + 26


def _block(block: Block, y: int, scale: float, rows: list[float]) -> list[str]:
    """A block with its label in it, or in the first row below where there is room to the right, with a line to it."""
    x, width = LEFT + block.begin * scale, (block.end - block.begin) * scale
    kind = KINDS.get(block.part.partition(":")[0], "message")
    shapes = [f'<rect class="block {kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>']
    room = LETTER * len(block.label)
    if room + 4 <= width:
        shapes.append(f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle">{escape(block.label)}</text>')
        return shapes
    row = len(rows)
    while row and rows[row - 1] > x + room + 10:
        row -= 1
    rows[row : row + 1] = [x]
    bottom = y + HEIGHT + ROW * (row + 1)
    shapes.append(f'<path class="lead" d="M{x + 0.5:.1f} {y + HEIGHT}V{bottom}"/>')
    shapes.append(f'<text x="{x + 4:.1f}" y="{bottom}">{escape(block.label)}</text>')
    return shapes


def write(peer: Peer, bench: Bench, directory: Path) -> None:
    """Write steps.svg, unless something fails, which ``bench`` notes."""
    steps = []
    for work in SHOWN:
        left = parts.recorded(peer, bench, work)
        if left is None:
            return
        try:
            steps.append(typical(work, left, parts.is_ahead(work), parts.STEPS))
        except ValueError as error:
            bench.failures.append(f"steps.svg was not drawn: {error}")
            return
    (directory / "steps.svg").write_text(drawing(steps))


def main() -> None:
    import bench

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=bench.HERE, help="the directory of steps.svg")
    options = parser.parse_args()
    bench.prepare()
    measured = bench.Bench()
    write(bench.OWN[0], measured, options.results)
    if measured.failures:
        sys.exit("\n".join(measured.failures))


if __name__ == "__main__":
    main()
