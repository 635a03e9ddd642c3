"""Progress bars on a terminal and in a pipe, by a clock of the test."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from central_storage.diagnostics import bars
from central_storage.diagnostics.bars import Bar, Ticking, above_bars, automatic


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()
    assert bars._Lines._open == 0


def test_a_pipe_gets_a_line_after_ten_seconds_then_less_often_and_one_at_the_end(clock: Clock) -> None:
    pipe = io.StringIO()
    bar = Bar("training", 1000, "steps", stream=pipe, clock=clock)
    for step in range(1000):
        clock.now += 1.0
        if bar.advance():
            bar.show({"loss": 1 / (step + 1)})
    bar.close({"loss": 0.001})
    bar.close()
    lines = pipe.getvalue().splitlines()
    assert lines[0] == "training: 10 of 1000 steps (1%), 16:30 left, 1 steps/s, loss 0.1"
    assert lines[-1] == "training: 1000 of 1000 steps in 16:40, 1 steps/s, loss 0.001"
    counts = [int(line.split()[1]) for line in lines[:-1]]
    assert counts[:5] == [10, 20, 30, 40, 50]
    assert all(10 <= later - earlier <= max(10, 1 + earlier / 10) for earlier, later in pairwise(counts))
    assert len(lines) < 40
    assert all(line.isprintable() for line in lines)


def test_a_length_that_is_not_known_and_no_text(clock: Clock) -> None:
    pipe = io.StringIO()
    bar = Bar("", None, "batches", stream=pipe, clock=clock)
    bar.advance(7)
    clock.now += 2
    bar.close()
    assert pipe.getvalue() == "7 batches in 00:02, 3.5 batches/s\n"


def test_a_bar_within_another_says_its_end_only_if_it_has_said_something(clock: Clock) -> None:
    pipe = io.StringIO()
    outer = Bar("epochs", 2, "epochs", stream=pipe, clock=clock)
    short = Bar("short", 1, "steps", stream=pipe, clock=clock)
    short.advance()
    clock.now += 1
    short.close()
    assert pipe.getvalue() == ""
    long = Bar("long", 2, "steps", stream=pipe, clock=clock)
    clock.now += 10
    assert long.advance()
    long.show()
    clock.now += 10
    long.advance()
    long.close()
    outer.close()
    assert [line.partition(":")[0] for line in pipe.getvalue().splitlines()] == ["long", "long", "epochs"]


def test_a_reader_that_is_gone_changes_nothing(clock: Clock) -> None:
    pipe = io.StringIO()
    bar = Bar("", None, "steps", stream=pipe, clock=clock)
    pipe.close()
    bar.close()


def test_a_terminal_shows_a_bar_with_count_rate_and_numbers(clock: Clock) -> None:
    terminal = Terminal()
    threads = threading.active_count()
    bar = Bar("training", 8, "steps", stream=terminal, clock=clock)
    for _ in range(8):
        clock.now += 0.06
        if bar.advance():
            bar.show({"loss": 0.125, "accuracy": 0.5})
    assert threading.active_count() == threads
    bar.close()
    drawn = terminal.getvalue().split("\r")
    assert "training:   0%" in drawn[1]
    assert re.search(r"2/8 \[.* steps/s.*, loss 0.125, accuracy 0.5\]", terminal.getvalue())
    assert "100%" in drawn[-1] or "100%" in drawn[-2]
    assert "8/8" in terminal.getvalue()


def test_slow_steps_have_their_units_without_a_space(clock: Clock) -> None:
    stream = Terminal()
    bar = Bar("", 3, "steps", spent=10.0, stream=stream, clock=clock)
    bar.advance(2)
    bar.show()
    bar.close()
    assert re.search(r"5\.\d\ds/steps", stream.getvalue())


def test_text_that_comes_meanwhile_is_above_the_bar() -> None:
    terminal = Terminal()
    bar = Bar("training", 8, "steps", stream=terminal)
    with above_bars(terminal):
        terminal.write("a line\n")
    bar.close()
    before, _, after = terminal.getvalue().partition("a line\n")
    assert before.endswith("\r")  # the bar was wiped out
    assert "training" in after


def test_without_a_bar_text_is_written_as_it_is() -> None:
    stream = Terminal()
    with above_bars(stream):
        stream.write("a line\n")
    assert stream.getvalue() == "a line\n"


def test_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("central_storage.diagnostics.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'central-storage\[progress\]'"):
        Bar("", None, "steps")


def test_a_bar_that_nobody_asked_for_appears_late(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with automatic("saving", 10, "B") as advance:
        advance(5)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(bars, "_DELAY", 0.0)
    with automatic("saving", 10_000_000, "B") as advance:
        advance(5_000_000)
        advance(5_000_008)  # small arrays may be read twice
    assert re.search(r"saving: +50%.*5.00M/10.0M", terminal.getvalue())
    assert "100%" in terminal.getvalue().splitlines()[-1]


@pytest.mark.parametrize(("columns", "rows", "width"), [(0, 0, "ncols"), (80, 0, "ncols"), (80, 24, "dynamic_ncols")])
def test_a_terminal_that_says_no_size_has_the_usual_one(
    columns: int, rows: int, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Terminal, "fileno", lambda self: 2)
    monkeypatch.setattr("os.get_terminal_size", lambda descriptor: os.terminal_size((columns, rows)))
    assert width in bars._width(Terminal())


def test_bytes_have_their_units(clock: Clock) -> None:
    pipe = io.StringIO()
    bar = Bar("saving", 3_000_000_000, "B", stream=pipe, clock=clock)
    clock.now += 20
    assert bar.advance(1_500_000_000)
    bar.show()
    assert pipe.getvalue() == "saving: 1.50GB of 3.00GB (50%), 00:20 left, 75.0MB/s\n"
    bar.close()


def test_the_first_rate_of_a_late_bar_counts_from_the_beginning() -> None:
    terminal = Terminal()
    bar = Bar("saving", 10_000_000, "B", spent=10_000.0, stream=terminal)
    assert bar.advance(5_000_000)
    bar.show()
    bar.close()
    rates = re.findall(r"[\d.]+\w*(?=B/s)", terminal.getvalue())
    assert rates
    assert set(rates) == {"500"}


def test_one_that_nobody_asked_for_needs_no_tqdm_and_says_no_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "_DELAY", 0.0)
    pipe, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stderr", pipe)
    with automatic("saving", 10, "B") as advance:
        advance(10)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(bars, "find_spec", lambda name: None)
    with automatic("saving", 10, "B") as advance:
        advance(10)
    assert (pipe.getvalue(), terminal.getvalue()) == ("", "")


def test_a_thing_of_unknown_time_has_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    ticking = Ticking("compiling adam for float64", "kernels")
    ticking.close()
    ticking.close()
    assert "compiling adam for float64:   0%" in terminal.getvalue()
    assert "1/1" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", pipe)
    Ticking("compiling adam for float64", "kernels").close()
    assert pipe.getvalue() == ""
