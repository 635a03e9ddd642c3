"""``cs-ctl doctor`` with real trainings: all is well, a trial fails, one does not end; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import Ended, describe, run, start
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.timing import unit

from central_storage.ctl import trials
from central_storage.ctl.commands.doctor import Report
from central_storage.launch.checks.finding import Finding
from cs_proto.frozen import fields_of

pytestmark = pytest.mark.timeout(300)

#: A name that nobody has, of a home directory and of its user.
TELLING = "aardvark"


def doctor(*arguments: str, **environment: str) -> Ended:
    ended = run("cs-ctl", "doctor", *arguments, environment=environment, timeout=unit(120))
    assert list(Path(os.environ["TMPDIR"]).glob("cs-doctor-*")) == []
    return ended


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a user with a telling name; compiled kernels stay where they are."""
    path = tmp_path / TELLING
    path.mkdir()
    if not os.environ.get("CS_CACHE_DIR") and not os.environ.get("XDG_CACHE_HOME"):
        monkeypatch.setenv("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    for name, value in (("HOME", str(path)), ("USER", TELLING), ("LOGNAME", TELLING)):
        monkeypatch.setenv(name, value)
    return path


def test_this_machine_trains_over_every_transport(home: Path) -> None:
    ended = doctor("--json", CS_SECRET="hippopotamus").ok()
    report = json.loads(ended.out)
    assert list(report) == list(fields_of(Report))
    assert report["is_good"] is True
    assert all(list(finding) == list(fields_of(Finding)) for finding in report["findings"])
    made: list[dict[str, Any]] = report["trials"]
    assert all(list(trial) == list(fields_of(trials.Trial)) for trial in made)
    assert [trial["transport"] for trial in made] == [transport.title for transport in trials.transports()]
    for transport, trial in zip(trials.transports(), made, strict=True):
        assert (trial["failure"], trial["is_right"], trial["steps"]) == ("", True, trials.STEPS)
        assert list(trial["sums"]) == ["script", "w0", "w1", "server"]
        assert len(set(trial["sums"].values())) == 1
        assert trial["maps"] == dict.fromkeys(("script", "w0", "w1"), transport.is_shared)
        assert bool(trial["mailbox_messages"]) == transport.has_mailboxes
    assert len({trial["digest"] for trial in made}) == 1
    for secret in (TELLING, "hippopotamus", str(home.parent)):
        assert secret not in ended.out + ended.err


def test_the_report_is_text_to_paste(home: Path) -> None:
    cache = home / "kernels"
    ended = doctor("--quick", CS_CACHE_DIR=str(cache), OMP_NUM_THREADS="1").ok()
    assert not cache.exists()
    assert any(line.startswith("good    kernel cache: ~/kernels is empty") for line in ended.lines)
    assert TELLING not in ended.out + ended.err
    assert "training" not in ended.out
    assert all(line.startswith(("good    ", "slower  ", "        remedy: ")) for line in ended.lines[:-1])
    assert ended.lines[-1].startswith("bad: 0, slower: ")
    launched = run("cs-launch", "--doctor", environment={"CS_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}).ok()
    told = [[line for line in lines if "available" not in line] for lines in (ended.lines, launched.lines)]
    assert told[0] == told[1]


def test_a_gpu_with_its_cupy_trains_the_same_numbers() -> None:
    with stand_in_gpus(1):
        trial = trials.attempt(trials.ON_GPU, unit(60))
        assert trials.transports()[-1] == trials.ON_GPU
    assert (trial.failure, trial.is_right) == ("", True)
    assert [finding.level for finding in trials.judged([trial])] == ["good"]


def test_a_trial_that_fails_is_bad() -> None:
    ended = doctor(CS_FAILPOINTS="worker.run[1]=kill@3")
    assert ended.code == 1
    for transport in trials.transports():
        at = ended.lines.index(f"bad     training over {transport.title}: worker 1 failed first: SIGKILL")
        assert ended.lines[at + 1].startswith("        remedy: see docs/troubleshooting.md")
    assert ended.lines[-1].startswith(f"bad: {len(trials.transports())}, ")


def test_a_setting_with_which_nothing_starts_is_bad() -> None:
    ended = doctor("--quick", CS_MAILBOXES="maybe")
    assert ended.code == 1
    assert "        remedy: unset CS_MAILBOXES" in ended.lines


def test_a_trial_that_does_not_end_is_ended() -> None:
    trial = trials.attempt(trials.transports()[-1], 0.5)
    assert trial.failure.startswith("it has not ended after 0.5 s")


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGKILL"])
def test_a_trial_ends_with_the_doctor(way: str) -> None:
    with start("cs-ctl", "doctor", environment={"CS_FAILPOINTS": "server.commit=stop@3"}) as child:
        while not any("cs_server" in describe(process) for process in child.processes()):
            pass  # the time of the test limits the wait
        if way == "Ctrl-C":
            child.press_ctrl_c()
            assert child.wait().code == 130
        else:
            child.signal(signal.SIGKILL)
            child.wait()
        assert child.left(unit(15)) == []
    left = list(Path(os.environ["TMPDIR"]).glob("cs-doctor-*"))
    assert len(left) == (way == "SIGKILL")  # nobody is there to remove the files
    for path in left:
        os.utime(path, times=(time.time() - 3600,) * 2)
    doctor("--quick")  # it does, and sees that nothing is left


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "1e300", "soon"])
def test_a_timeout_is_a_time(timeout: str) -> None:
    ended = run("cs-ctl", "doctor", "--timeout", timeout)
    assert (ended.code, ended.out) == (2, "")
    assert "timeout" in ended.err
