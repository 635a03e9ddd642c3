"""The soak's own command: goes on where it was interrupted, counts, bounds, and names each failure by its command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.soak import run
from tests.soak.promises import Attempt, Promise
from tests.soak.sessions import Late


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Two promises of which each session's seed is noted; the second is violated by the seed 1."""
    noted: list[int] = []

    def attack(attempt: Attempt) -> None:
        noted.append(attempt.seed)
        for _ in range(attempt.trials):
            attempt.tried_once(0.25)

    def breaks(attempt: Attempt) -> None:
        attack(attempt)
        if attempt.seed == 1:
            attempt.violations.append("the update of step 7 was applied twice")

    promises = {
        "P1": Promise("P1", "holds", "deaths", 25, 10, attack),
        "P2": Promise("P2", "does not", "deaths", 30, 10, breaks),
    }
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "CS_MAILBOXES", run.MARK):
        monkeypatch.setenv(name, str(tmp_path))  # the command sets them for good: put back at the end
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(run, "PROMISES", promises)
    monkeypatch.setattr(run, "_compile", lambda: None)
    monkeypatch.setattr(run, "_apart", lambda promise, seed, trials, on_done, soak: promise.session(seed, trials))
    monkeypatch.setattr(run, "STATE", tmp_path / "build" / "soak.json")
    return noted


def _main(arguments: list[str]) -> int:
    """The soak, with one session after the other, so that the order of the seeds is known."""
    return run.main([*arguments, "--jobs", "1"])


def test_it_tries_counts_and_bounds(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["--promise", "P1"]) == 0
    assert seeds == [0, 1, 2]
    line = capsys.readouterr().out.splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")][1:6] == ["P1 holds", "25 deaths", "0", "0", "11.29%"]


def test_a_violation_is_told_with_its_command(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["--promise", "P2"]) == 1
    out = capsys.readouterr().out
    command = "python -m tests.soak.run --promise P2 --seed 1 --trials 10"
    assert f"VIOLATED: {command}\nthe update of step 7 was applied twice\n" in out
    assert out.splitlines()[-1] == f"violated: {command}"
    assert _main(["--promise", "P2", "--seed", "1", "--trials", "1"]) == 1
    assert _main(["--promise", "P2", "--seed", "2"]) == 0
    assert seeds == [0, 1, 2, 1, 2]


def test_it_goes_on_where_it_was_interrupted(seeds: list[int]) -> None:
    _main(["--promise", "P1", "--trials", "10"])
    _main([])  # the other first, of which less is done
    assert seeds == [0, 0, 1, 1, 2, 2]
    assert json.loads(run.STATE.read_text())["tallies"]["P1"]["tried"] == 25
    _main(["--promise", "P1"])  # nothing is left to do
    assert len(seeds) == 6
    _main(["--promise", "P1", "--trials", "10", "--fresh"])
    assert seeds[6:] == [0]


def test_each_way_of_the_steps_has_results_of_its_own(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    _main(["--promise", "P1"])
    assert _main(["--promise", "P2", "--way", "zeromq"]) == 1
    assert os.environ["CS_MAILBOXES"] == "off"
    assert capsys.readouterr().out.endswith(
        "violated: python -m tests.soak.run --promise P2 --seed 1 --trials 10 --way zeromq\n"
    )
    assert json.loads(run.STATE.read_text())["tallies"]["P1"]["tried"] == 25
    _main(["--promise", "P1", "--way", "zeromq"])
    assert seeds == [0, 1, 2] * 3
    _main(["--promise", "P1", "--seed", "0", "--way", "program"])
    assert os.environ["CS_MAILBOXES"] == "on"


@pytest.mark.parametrize(("late_again", "code", "says"), [(False, 0, "late, and in time when"), (True, 1, "violated:")])
def test_what_was_late_is_tried_again_alone(
    seeds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    late_again: bool,
    code: int,
    says: str,
) -> None:
    def attack(attempt: Attempt) -> None:
        if attempt.seed == 1 and (late_again or 1 not in seeds):
            attempt.note([Late("it ended 7 s later")])
        seeds.append(attempt.seed)
        for _ in range(attempt.trials):
            attempt.tried_once()

    monkeypatch.setitem(run.PROMISES, "P1", Promise("P1", "is late", "deaths", 25, 10, attack))
    assert _main(["--promise", "P1"]) == code
    assert seeds == [0, 1, 2, 1]
    out = capsys.readouterr().out
    command = "python -m tests.soak.run --promise P1 --seed 1 --trials 10"
    assert f"LATE, to be tried again: {command}\nit ended 7 s later\n" in out
    assert out.splitlines()[-1].startswith(says)
    assert out.splitlines()[-1].endswith(command)
    assert [cell.strip() for cell in out.splitlines()[-2].split("|")][2:5] == ["25 deaths", str(code), str(1 - code)]
    _main(["--promise", "P1"])  # that is known now
    assert len(seeds) == 4


def test_a_session_that_breaks_counts_for_nothing(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(promise: Promise, seed: int, trials: int, *_: object) -> Attempt:
        if seed == 1:
            raise run._Broken("the session ended by 1\nNoSuchProcess")
        return promise.session(seed, trials)

    monkeypatch.setattr(run, "_apart", apart)
    assert _main(["--promise", "P1"]) == 1
    assert seeds == [0, 2, 3]
    out = capsys.readouterr().out
    command = "python -m tests.soak.run --promise P1 --seed 1 --trials 10"
    assert f"NOT JUDGED: {command}\nthe session ended by 1\nNoSuchProcess\n" in out
    assert out.splitlines()[-1] == f"did not come to its end, and counts for nothing: {command}"
    assert "25 deaths" in out


def test_what_is_measured_comes_first(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PROMISES, "P2", replace(run.PROMISES["P2"], long=2, beside="nothing"))
    _main([])
    assert seeds == [0, 0, 1, 2]
    assert list(json.loads(run.STATE.read_text())["tallies"]) == ["P1", "P2"]


def test_histories_have_a_line_of_their_own(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attack(attempt: Attempt) -> None:
        attempt.histories = 1
        attempt.wrong_histories = int(attempt.seed == 1)
        attempt.violations += ["lost"] * attempt.wrong_histories

    monkeypatch.setitem(run.PROMISES, "P1", Promise("P1", "is wrong", "deaths", 3, 1, attack))
    assert _main(["--promise", "P1"]) == 1
    cells = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines() if "P8" in line
    ]
    assert [row[2:4] for row in cells] == [["3 histories", "1"]]


def test_other_code_begins_anew(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    _main(["--promise", "P1"])
    state = json.loads(run.STATE.read_text())
    run.STATE.write_text(json.dumps({**state, "code": "another"}))
    _main(["--promise", "P1", "--trials", "10"])
    assert seeds == [0, 1, 2, 0]
    assert "beginning anew" in capsys.readouterr().err
