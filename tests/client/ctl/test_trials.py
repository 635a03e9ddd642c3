"""What is said of trials that ended well, badly or late; no service trains here."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from central_storage.ctl import trials
from central_storage.ctl.trial_script import STEPS, expected
from central_storage.ctl.trials import ON_GPU, TRANSPORTS, Trial
from central_storage.diagnostics.error_report import Failure, write
from central_storage.diagnostics.gpu_inventory import Gpu
from central_storage.launch.checks.finding import Finding

MAILBOXES, ZEROMQ, FRAMES = TRANSPORTS
PYTHON = sys.executable


def ended(title: str = MAILBOXES.title, **changes: Any) -> Trial:
    """A trial that ended well."""
    shared = title != FRAMES.title
    values: dict[str, Any] = {
        "transport": title,
        "failure": "",
        "steps": STEPS,
        "seconds": 0.25,
        "digest": "ab" * 32,
        "is_right": True,
        "mailbox_messages": STEPS if title == MAILBOXES.title else 0,
        "sums": dict.fromkeys(("script", "w0", "w1", "server"), 0x1F3A),
        "maps": dict.fromkeys(("script", "w0", "w1"), shared),
    }
    return Trial(**(values | changes))


def bad_ones(*made: Trial) -> list[Finding]:
    return [finding for finding in trials.judged(made) if finding.level != "good"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def make_old(path: Path) -> Path:
    """Let a directory be an hour old."""
    os.utime(path, times=(time.time() - 3600,) * 2)
    return path


def test_directories_of_killed_doctors_are_removed_and_no_others(temporary: Path) -> None:
    abandoned = temporary / "cs-doctor-0abc_def"
    abandoned.mkdir(0o700)
    (abandoned / "output").write_text("[w0] hello")
    make_old(abandoned)
    kept = [temporary / name for name in ("cs-doctor-young_00", "cs-doctor-", "cs-doctor-0abc_def0", "xcs-doctor-0a0")]
    for path in kept:
        path.mkdir(0o700)
        if "young" not in path.name:
            make_old(path)
    opened = temporary / "cs-doctor-opened00"
    opened.mkdir(0o755)  # a trial's directory is private
    link = temporary / "cs-doctor-link0000"
    link.symlink_to(kept[1])
    with trials._directory() as held:
        trials.remove_abandoned()
        assert sorted(temporary.iterdir()) == sorted([*kept, make_old(opened), link, make_old(Path(held))])
        trials.remove_abandoned()
        assert sorted(temporary.iterdir()) == sorted([*kept, opened, link, Path(held)])
    assert not os.path.exists(held)


def test_good_trials_are_good() -> None:
    found = list(trials.judged([ended(transport.title) for transport in TRANSPORTS]))
    assert [finding.level for finding in found] == ["good"] * 4
    said = "100 steps in 0.25 s; equal to NumPy, bit for bit; script, w0, w1 and server see the same bytes, in "
    assert found[0].text == f"{said}memory that they map"
    assert found[2].text == f"{said}messages"
    assert found[3].subject == "transports"
    assert list(trials.judged([])) == []


def test_a_failed_trial_is_bad_and_the_others_are_compared() -> None:
    failed = Trial(ZEROMQ.title, "server failed first: SIGKILL")
    [finding] = bad_ones(ended(), failed, ended(FRAMES.title))
    assert (finding.level, finding.subject) == ("bad", f"training over {ZEROMQ.title}")
    assert (finding.text, finding.remedy[:31]) == (failed.failure, "see docs/troubleshooting.md, an")


def test_a_late_trial_has_more_time_as_its_remedy() -> None:
    [finding] = bad_ones(Trial(MAILBOXES.title, "it has not ended after 60 s"))
    assert "--timeout 300: a first start compiles kernels" in finding.remedy


def test_a_wrong_result_is_bad() -> None:
    [wrong, differs] = bad_ones(ended(is_right=False, digest="cd" * 32), ended(ZEROMQ.title))
    assert (wrong.level, wrong.text) == ("bad", "the result differs from NumPy's")
    assert "kernel cache" in wrong.remedy
    assert (differs.level, differs.text) == ("bad", "two transports give different results")
    assert differs.remedy


def test_different_bytes_are_bad() -> None:
    sums = {"script": 1, "w0": 1, "w1": 0xABCDEF01, "server": 1}
    [finding] = bad_ones(ended(sums=sums))
    assert finding.level == "bad"
    assert "script 00000001, w0 00000001, w1 abcdef01, server 00000001" in finding.text
    assert finding.remedy


def test_memory_that_is_not_mapped_is_slow_only_where_it_is_shared() -> None:
    maps = {"script": True, "w0": False, "w1": False}
    [finding] = bad_ones(ended(ZEROMQ.title, maps=maps))
    assert (finding.level, finding.text) == (
        "slower",
        "w0, w1 cannot map the variables, and gets every byte in a message",
    )
    assert "ulimit -v" in finding.remedy
    assert bad_ones(ended(FRAMES.title, maps=dict.fromkeys(maps, False))) == []


def test_mailboxes_that_are_not_used_are_slow() -> None:
    [finding] = bad_ones(ended(mailbox_messages=0))
    assert (finding.level, "mailbox" in finding.text) == ("slower", True)
    assert bad_ones(ended(ZEROMQ.title, mailbox_messages=0)) == []


def test_a_machine_without_ordered_stores_has_no_mailboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "visible_gpus", list)
    monkeypatch.setattr(trials, "IS_ORDERED", False)
    assert trials.transports() == (ZEROMQ, FRAMES)
    monkeypatch.setattr(trials, "IS_ORDERED", True)
    assert trials.transports() == TRANSPORTS


@pytest.mark.parametrize("has_cupy", [True, False])
def test_variables_are_tried_on_a_gpu_if_there_is_cupy(has_cupy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "visible_gpus", lambda: [Gpu("0")])
    monkeypatch.setattr(trials, "has", lambda module: has_cupy)
    assert (ON_GPU in trials.transports()) == has_cupy


def test_the_expected_result_depends_on_nothing() -> None:
    assert expected() == expected()
    assert len(expected()) == 64


def test_the_first_cause_is_told(tmp_path: Path) -> None:
    error = tmp_path / "error"
    write(str(error), Failure("death", "worker", 1, 17, "SIGKILL"), 4)
    assert trials._why(str(error), [], 4) == "worker 1 failed first: SIGKILL"
    write(str(error), Failure("death", "server", None, 17, "exit code 1"), 5)
    assert trials._why(str(error), [], 5) == "server failed first: exit code 1"
    write(str(error), Failure("start", "launcher", None, None, "a failed start", "no room for a run directory"), 1)
    assert trials._why(str(error), [], 1) == "no room for a run directory"
    error.write_text("{")
    assert trials._why(str(error), ["one", "two"], 3) == "exit code 3: two"
    assert trials._why(str(tmp_path / "nothing"), [], 3) == "exit code 3, and nothing was printed"


def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Put a program in the place of ``cs-launch``; its arguments follow."""
    path = tmp_path / "launcher"
    path.write_text(f"#!{PYTHON}\nimport os, sys\nargv = sys.argv\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_launcher_that_fails_leaves_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/data/people/telling")
    launcher(monkeypatch, tmp_path, "print('a'); sys.exit('no module in /data/people/telling/x')")
    assert trials.attempt(MAILBOXES, 30.0) == Trial(MAILBOXES.title, "exit code 1: no module in ~/x")
    launcher(monkeypatch, tmp_path, "sys.stdout.buffer.write(b'done \\xff')")
    assert trials.attempt(MAILBOXES, 30.0).failure == "exit code 0: done \ufffd"


def test_a_launcher_that_is_late_leaves_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher(monkeypatch, tmp_path, "import signal; signal.pause()")
    assert trials.attempt(MAILBOXES, 0.1).failure == "it has not ended after 0.1 s"
    monkeypatch.setattr(trials, "_code", lambda process, timeout: process.wait() and None)
    launcher(monkeypatch, tmp_path, "print('a'); sys.exit('no descriptor is left')")
    said = "it has not ended after 2 s; the last line that was printed: no descriptor is left"
    assert trials.attempt(MAILBOXES, 2.0).failure == said


def test_a_trial_gets_its_options_and_not_the_settings_of_trainings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    for name in trials._NOT_FOR_TRIALS:
        monkeypatch.setenv(name, "nothing")
    monkeypatch.setenv("CS_CACHE_DIR", "/kept")
    launcher(monkeypatch, tmp_path, f"import json; json.dump([argv, dict(os.environ)], open({str(said)!r}, 'w'))")
    trials.attempt(FRAMES, 7.0)
    arguments, environment = json.loads(said.read_text())
    assert not set(environment) & set(trials._NOT_FOR_TRIALS)
    assert environment["CS_CACHE_DIR"] == "/kept"
    options = dict(pairwise(arguments))
    assert (options["--memory"], options["--mailboxes"], options["--start-timeout"]) == ("frames", "off", "7")


def test_a_launcher_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert trials.attempt(MAILBOXES, 1.0).failure == "it cannot be started (No such file or directory)"


def test_a_launcher_that_hears_no_signal_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w').close()"
    launcher(monkeypatch, tmp_path, f"{program}\nsignal.pause()")
    monkeypatch.setattr(trials, "_GRACE", 0.1)
    with (
        open(tmp_path / "output", "w") as output,
        trials._running([sys.executable], str(tmp_path), output) as process,
    ):
        ready.read_text()  # it ignores SIGTERM by now
    assert process.returncode == -signal.SIGKILL
