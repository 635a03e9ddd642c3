"""What a run writes down: nothing of arguments, nothing of tokens, and nothing that another user may read (P36)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.processes import Child, start
from tests.harness.timing import unit
from tests.processes.test_exporter import Scraper

from central_storage.ctl import services

ARGUMENT = "hunter2-is-an-argument"

TRAIN = """
import os, sys, time
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy() as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(4, np.float32), name="w", aggregation=cs.VariableAggregation.SUM)

    def step(text):
        w.assign_add(np.ones(4, np.float32))
        return text + text

    for _ in range(3):
        strategy.run(step, args=("hunter2-is-" + "an-argument",))
    print("trains in", strategy.address, flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    raise KeyError("the end")
"""


@dataclass
class Run:
    """A run under ``cs-launch`` that writes down all that it can."""

    child: Child
    scraper: Scraper
    address: Path
    written: Path


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """It began with an umask that lets everybody read and write."""
    written = tmp_path_factory.mktemp("written")
    (written / "train.py").write_text(TRAIN)
    names = {
        "CS_LOG": "debug",
        "CS_LOG_VALUES": None,
        "CS_MESSAGES_DIR": str(written / "messages"),
        "CS_LOG_DIR": str(written / "logs"),
    }
    options = ("--metrics-port", "0", "--devices", "cpu:0,cpu:1", "--error-file", written / "error.json")
    before = os.umask(0)
    try:
        started = start("cs-launch", *options, written / "train.py", written / "end", environment=names)
        with started as child:
            os.umask(before)
            scraper = Scraper(child)
            address = Path(child.wait_for(r"trains in (\S+)", timeout=unit(60))[1])
            yield Run(child, scraper, address, written)
    finally:
        os.umask(before)
    services.clean()


def files(*directories: Path) -> list[Path]:
    return [path for each in directories for path in each.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]


def test_only_the_owner_may_read_what_is_written(everything: Run) -> None:
    found = files(everything.address, everything.written / "messages", everything.written / "logs")
    assert len(found) > 6
    open_to_others = [f"{path} {path.stat().st_mode:o}" for path in found if path.stat().st_mode & 0o077]
    places = [everything.address, everything.written / "messages", *(everything.written / "logs").iterdir()]
    open_to_others += [f"{path} {path.stat().st_mode:o}" for path in places if path.stat().st_mode & 0o077]
    assert open_to_others == []


def test_the_messages_name_no_argument(everything: Run) -> None:
    texts = {path: path.read_bytes() for path in files(everything.written / "messages", everything.written / "logs")}
    assert sum(b"RunFinished(" in text for text in texts.values()) >= 2  # the messages are there
    assert [path for path, text in texts.items() if ARGUMENT.encode() in text] == []


def test_workers_go_first_where_memory_runs_out_and_nobody_else(everything: Run) -> None:
    scores = {}
    for process in everything.child.processes():
        words = " ".join(process.cmdline())
        role = next((role for role in ("cs_server", "cs_worker", "exporter", "train.py") if role in words), words)
        scores.setdefault(role, set()).add(int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()))
    own = {int(Path("/proc/self/oom_score_adj").read_text())}
    assert scores == {"cs_server": own, "cs_worker": {1000}, "exporter": own, "train.py": own}


def test_the_token_is_nowhere_but_in_its_file(everything: Run) -> None:
    token = everything.scraper.token_file.read_bytes().strip()
    assert len(token) == 64
    status, metrics = everything.scraper.get()
    seen = {"the metrics": metrics.encode()}
    for process in everything.child.processes():
        for name in ("cmdline", "environ"):
            seen[f"{name} of {process.pid}"] = Path(f"/proc/{process.pid}/{name}").read_bytes()
    others = [path for path in files(everything.address) if path != everything.scraper.token_file]
    (everything.written / "end").touch()
    ended = everything.child.wait(unit(60))
    assert (status, ended.code) == (200, 1)
    others += files(everything.written)
    seen |= {str(path): path.read_bytes() for path in others if path.exists()}
    seen["standard output"], seen["standard error"] = ended.out.encode(), ended.err.encode()
    assert b"KeyError" in seen[str(everything.written / "error.json")]
    assert (everything.written / "error.json").stat().st_mode & 0o777 == 0o600
    assert [name for name, text in seen.items() if token in text] == []
