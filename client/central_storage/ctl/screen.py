"""The picture that ``cs-ctl top`` draws: lines of text for a terminal of so many columns and rows."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from cs_proto.frozen import frozen
from cs_proto.printable import printable

from . import printing
from .reading import Process, Reading

__all__ = ["SORTS", "Bars", "bar", "drawn", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"

#: The orders of the processes, by the key that chooses one.
SORTS = {"n": "name", "c": "processor", "m": "memory", "r": "restarts"}

_KEYS = "q quit  p pause  b bars  s sort: {sort}  logs: 0-9 worker  v server  l all"


@frozen
class Bars:
    """What the bars show: names, and shares. A bar is full at a share of 1."""

    title: str
    shares: tuple[tuple[str, float], ...]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last values as blocks between 0 and the largest; a space where there is none.

    Examples:
        >>> sparkline([0, 4, 8, None, 8], 5), sparkline([1, 1, 2], 2), sparkline([], 3)
        ('▁▄█ █', '▄█', '')
    """
    shown = list(values)[-width:] if width > 0 else []
    most = max((value for value in shown if value is not None), default=0.0)
    return "".join(
        " " if value is None else _BLOCKS[min(7, int(value / most * 7.999)) if most else 0] for value in shown
    )


def bar(share: float, width: int) -> str:
    """A bar for a share from 0 to 1.

    Examples:
        >>> bar(0.5, 4), bar(1, 2), bar(0.06, 4)
        ('██  ', '██', '▎   ')
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def drawn(
    reading: Reading,
    rates: Sequence[float | None],
    cpu: Mapping[str, float],
    bars: Bars,
    *,
    sort: str,
    is_paused: bool,
    log: Sequence[str] | None,
    columns: int,
    rows: int,
) -> list[str]:
    """At most ``rows`` lines of at most ``columns`` columns: the service, its rate, its processes, the bars, and its
    last events or the lines of ``log``. ``cpu``: how much of one processor each process takes. What has no
    room is left out from below; the keys stay."""
    lines = [*_head(reading, is_paused), _rate_line(reading, rates, columns), ""]
    lines += _processes(sorted(reading.processes, key=lambda each: _order(each, sort, cpu)), cpu, columns)
    room = rows - len(lines) - 1
    lines += _bars(bars, columns, room if log is None else room // 2)
    room = rows - len(lines) - 3
    if log is not None:
        lines += ["", "log (Esc: back)", *(list(log)[-room:] if room > 0 else [])]
    elif reading.events and room > 0:
        lines += ["", "events", *(f"  {printing.clock(e.time)}  {e.text}" for e in reading.events[-room:])]
    lines = lines[: rows - 1]
    lines += [""] * (rows - 1 - len(lines))
    return [printing.cut(printable(line), columns) for line in (*lines, _KEYS.format(sort=sort))]


def _head(reading: Reading, is_paused: bool) -> list[str]:
    age = printing.age(None if reading.since is None else reading.time - reading.since)
    paused = "[paused] " if is_paused else ""
    shared = None if reading.shared_nbytes is None else sum(reading.shared_nbytes.values())
    return [
        f"{reading.name}  {paused}{reading.in_words}",
        f"{printing.plain(reading.script)}  {age}  shared {printing.size(shared)}  "
        f"restarts {printing.plain(reading.restarts)}  {printing.plain(reading.transport)}",
    ]


def _rate_line(reading: Reading, rates: Sequence[float | None], columns: int) -> str:
    text = f"step {printing.plain(reading.step)}  {printing.number(reading.rate)} steps/s  "
    text += f"(average {printing.number(reading.average_rate)})  "
    return text + sparkline(rates, columns - len(text) - 1)


def _bars(bars: Bars, columns: int, room: int) -> list[str]:
    """At most ``room`` lines: an empty one, the title, and those bars that have room."""
    lines = ["", *textwrap.wrap(printable(bars.title), columns)]
    if not bars.shares:
        return lines[: max(0, room)]
    room -= len(lines)
    if room < 1:
        return []
    names = max(10, *(len(name) for name, _ in bars.shares))
    width = max(10, min(50, columns - names - 10))
    shown = [f"  {name:<{names}} {bar(share, width)} {100 * share:3.0f} %" for name, share in bars.shares]
    if len(shown) > room:
        shown[room - 1 :] = [f"  {len(shown) - room + 1} more in a higher terminal"]
    return lines + shown


def _processes(shown: Sequence[Process], cpu: Mapping[str, float], columns: int) -> list[str]:
    width = max((len(each.node) for each in shown if each.node), default=0)  # no column if all run on this machine
    titles = f"{'PROCESS':<10} {'PID':>7} {_node('NODE', width)}{'STATE':<9} {'DEVICE':<6} {'CPU':>5} {'PRIVATE':>7}"
    lines = [f"{titles} {'RESTARTS':>8}  WAITS FOR"]
    for each in shown:
        name = f"{each.label}.{each.incarnation}" if each.incarnation else each.label
        share = f"{100 * cpu[each.label]:.0f} %" if each.label in cpu else "-"
        why = each.waits_for or (f"ended by {each.cause}" if each.cause else "")
        lines.append(
            f"{name[:10]:<10} {each.pid or '-':>7} {_node(each.node, width)}{printing.plain(each.state)[:9]:<9} "
            f"{printing.plain(each.device):<6} {share:>5} {printing.size(each.private_nbytes):>7} "
            f"{each.restarts if each.incarnation else '-':>8}  {why}"
        )
    return lines


def _node(name: str | None, width: int) -> str:
    return f"{printing.plain(name):<{width}} " if width else ""


def _order(process: Process, sort: str, cpu: Mapping[str, float]) -> tuple[float, int]:
    ranks = {"supervisor": 0, "script": 1, "server": 2, "worker": 3}
    keys = {
        "processor": -cpu.get(process.label, 0.0),
        "memory": -float(process.private_nbytes or 0),
        "restarts": -float(process.restarts),
    }
    return keys.get(sort, 0.0), ranks[process.role]
