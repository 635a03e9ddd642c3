"""The rules of Chrome's trace-event format that a timeline keeps."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

__all__ = ["checked"]

_FIELDS = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": (int, float), "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": (int, float), "pid": int, "tid": int, "bp": str},
}


def checked(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace after a way through JSON. Raises AssertionError if an event lacks a field of its phase, if times do not
    ascend, if slices of a row overlap without one lying in the other, if viewers would mix rows up, or if a flow has no
    beginning or no end."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    events = trace["traceEvents"]
    for event in events:
        fields = _FIELDS[event["ph"]]
        assert all(isinstance(event.get(name), kind) for name, kind in fields.items()), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    timed = [event for event in events if event["ph"] != "M"]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
    _check_rows(events)
    _check_numbers(events)
    for phase in "sf":
        numbers = [event["id"] for event in events if event["ph"] == phase]
        assert len(numbers) == len(set(numbers))
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[number] <= ends[number] for number in starts)
    return trace


def _check_rows(events: list[dict[str, Any]]) -> None:
    """Slices of one row lie apart or within each other; in whole nanoseconds, because floats are not exact."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            rows.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length))
    for row, slices in rows.items():
        outer: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while outer and outer[-1] <= begin:
                outer.pop()
            assert not outer or end <= outer[-1], (row, begin, end)
            outer.append(end)


def _check_numbers(events: list[dict[str, Any]]) -> None:
    """Perfetto takes the thread 0 of a process for the thread that has the number of the process."""
    rows = {(event["pid"], event["tid"]) for event in events}
    assert all(tid > 0 for _, tid in rows), rows
    assert len({tid for _, tid in rows}) == len(rows), rows
