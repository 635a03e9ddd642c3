"""The picture of cs-top at every size of a terminal, and what its bars show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.ctl.conftest import process, reading

from central_storage.ctl.printing import width
from central_storage.ctl.profile import summary
from central_storage.ctl.reading import Event
from central_storage.ctl.screen import SORTS, Bars, bar, drawn, sparkline
from central_storage.ctl.shares import parts, processor, processor_bars
from central_storage.timeline.rings import Step

EVENTS = tuple(Event(1000.0 + number, f"event {number}") for number in range(20))
CPU = {"server": 0.5, "w0": 1.0, "w1": 0.25}


def picture(
    columns: int = 80,
    rows: int = 24,
    log: list[str] | None = None,
    sort: str = "name",
    bars: Bars | None = None,
) -> list[str]:
    now = reading(
        events=EVENTS,
        processes=(
            process("server", private_nbytes=5),
            process("w0", restarts=2, cause="SIGKILL"),
            process("w1", private_nbytes=9_000_000, waits_for="returned after 1 merge point"),
        ),
    )
    return drawn(
        now,
        [1.0, 2.0, 12.5],
        CPU,
        bars or processor_bars(CPU),
        sort=sort,
        is_paused=False,
        log=log,
        columns=columns,
        rows=rows,
    )


@given(st.integers(1, 250), st.integers(1, 80), st.none() | st.lists(st.text(max_size=300), max_size=50))
def test_it_fits_every_terminal(columns: int, rows: int, log: list[str] | None) -> None:
    lines = picture(columns, rows, log)
    assert len(lines) == rows
    assert all(width(line) <= columns for line in lines)
    assert "q quit".startswith(lines[-1][:6])


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_it_shows_rate_processes_bars_and_events(columns: int, rows: int) -> None:
    text = "\n".join(picture(columns, rows))
    for part in ("train-1f3a  running", "step 42  12.5 steps/s", "▁▂█", "w0.1", "ended by SIGKILL", "processor time"):
        assert part in text
    assert "event 19" in text
    assert f"w0         {bar(1.0, min(50, columns - 20))} 100 %" in text


def test_bars_have_names_and_shares_of_their_own() -> None:
    step = Step(7, 20_000_000, (10_000_000, 14_000_000), (4_000_000, 0), 3_000_000, 2_000_000, 16_000_000, 1_000_000)
    bars = Bars("parts of a step", parts(summary([step, step])))
    assert dict(bars.shares) == pytest.approx(
        {
            "commit": 0.15,
            "messages": 0.05,
            "script data": 0.1,
            "script waiting": 0.8,
            "w0 function": 0.5,
            "w0 waiting": 0.2,
            "w1 function": 0.7,
            "w1 waiting": 0.0,
        }
    )
    lines = picture(bars=bars)
    first = lines.index("parts of a step") + 1
    assert lines[first + 3] == f"  script waiting {bar(0.8, 50)}  80 %"
    assert lines[first + 6] == f"  w1 function    {bar(0.7, 50)}  70 %"
    assert any(line.startswith("w0.1") and "100 %" in line for line in lines)  # the column is processor time still


def test_bars_without_room_are_counted() -> None:
    bars = Bars("parts", tuple((f"w{number}", 0.5) for number in range(30)))
    lines = picture(bars=bars)
    shown = sum(" 50 %" in line for line in lines[lines.index("parts") :])
    assert lines[-2].strip() == f"{30 - shown} more in a higher terminal"


def test_a_paused_picture_says_so_beside_the_longest_wait() -> None:
    now = reading(state="waiting", waiting=("replica 1 " * 20,))
    lines = drawn(now, [], {}, Bars("", ()), sort="name", is_paused=True, log=None, columns=80, rows=24)
    assert "[paused] waiting for replica 1" in lines[0]


def test_wide_characters_leave_the_first_line_on_the_screen() -> None:
    now = reading(script="数据" * 60)
    lines = drawn(now, [], {}, Bars("", ()), sort="name", is_paused=False, log=["数据" * 60], columns=80, rows=24)
    assert max(map(width, lines)) == 80


def test_a_title_without_bars_is_shown_whole() -> None:
    because = "the service in /run/user/1000/cs-9c5b846b keeps no step times: it was started with CS_TIMES=off"
    text = " ".join(line.strip() for line in picture(bars=processor_bars({}, because)))
    assert f"processor time since the last look; no parts of a step: {because}" in text
    assert parts(summary([])) == ()


def test_it_shows_a_log_in_place_of_events() -> None:
    text = "\n".join(picture(log=["[w0] one", "[w0] two"]))
    assert "[w0] two" in text
    assert "event 19" not in text


@pytest.mark.parametrize(
    ("sort", "first"), [("name", "server.1"), ("memory", "w1.1"), ("restarts", "w0.1"), ("processor", "w0.1")]
)
def test_processes_are_sorted(sort: str, first: str) -> None:
    assert sort in SORTS.values()
    lines = picture(sort=sort)
    titles = next(number for number, line in enumerate(lines) if line.startswith("PROCESS"))
    assert lines[titles + 1].startswith(first)


@given(st.lists(st.none() | st.floats(0, 1e9)), st.integers(0, 300))
def test_a_sparkline_has_a_sign_for_each_of_the_last_values(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_shares_are_what_each_process_has_computed_between_two_looks() -> None:
    before = reading(time=100.0, processes=(process("w0", cpu_seconds=1.0), process("w1", cpu_seconds=5.0)))
    now = reading(
        time=102.0,
        processes=(
            process("w0", cpu_seconds=2.0),
            process("w1", cpu_seconds=None),
            process("server", cpu_seconds=9.0),
        ),
    )
    assert processor(before, now) == {"w0": 0.5}
    assert processor(before, reading(time=101.0, processes=(process("w0", cpu_seconds=4.0),))) == {"w0": 3.0}
    assert processor(None, now) == {}


def test_nodes_have_a_column_if_there_are_some() -> None:
    shown = (process("server"), process("w0", node="10.0.0.7"), process("w1", node="192.168.100.200"))
    lines = drawn(
        reading(processes=shown),
        [1.0],
        {},
        processor_bars({}),
        sort="name",
        is_paused=False,
        log=None,
        columns=120,
        rows=24,
    )
    text = "\n".join(lines)
    assert text.index("NODE") - text.index("PROCESS") == text.index("192.168.100.200") - text.index("w1.1")
    assert "NODE" not in "\n".join(picture(120))
