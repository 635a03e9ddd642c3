"""Run directories and readings without services."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from central_storage.ctl.reading import Process, Reading
from central_storage.launch.run_directory import RunDirectory
from central_storage.launch.service_file import ServiceFile


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place for run directories, empty."""
    path = Path(os.environ["TMPDIR"]) / "ctl"
    path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setattr("central_storage.launch.run_directory._places", lambda: [str(path)])
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets, but no place for run directories."""
    path = Path(os.environ["TMPDIR"]) / "n"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def held(place: Path) -> Iterator[Callable[..., RunDirectory]]:
    """Makes run directories that this process holds, with their ``service.json``."""
    made: list[RunDirectory] = []

    def make(script: str = "train.py", path: Path | None = None, **known: Any) -> RunDirectory:
        directory = RunDirectory(None if path is None else str(path))
        made.append(directory)
        ServiceFile.of(directory.path, script, "script", **known).write(directory.path)
        return directory

    yield make
    for directory in made:
        directory.remove()


def process(label: str = "w0", **changes: Any) -> Process:
    """A process at work."""
    role = "worker" if label.startswith("w") else label
    values: dict[str, Any] = {
        "role": role,
        "label": label,
        "pid": 100 + sum(map(ord, label)),
        "incarnation": 1 if role in ("worker", "server") else None,
        "device": "cpu:0",
        "state": "sleeping",
        "restarts": 0,
        "cause": "",
        "cpu_seconds": 1.0,
        "resident_nbytes": 3_000_000,
        "private_nbytes": 1_000_000,
        "shared_nbytes": {"parameters": 1, "slots": 0, "gradients": 0, "arenas": 0, "other": 0},
        "waits_for": "",
        "node": None,
    }
    return Process(**(values | changes))


def reading(**changes: Any) -> Reading:
    """A service that runs."""
    shown = tuple(process(label) for label in ("supervisor", "script", "server", "w0", "w1"))
    values: dict[str, Any] = {
        "name": "train-1f3a",
        "address": "/run/cs-1f3a22bb",
        "kind": "script",
        "script": "train.py --rate 0.1",
        "directory": "/home/me",
        "pid": 4711,
        "since": 1000.0,
        "time": 1065.0,
        "state": "running",
        "waiting": (),
        "replicas": 2,
        "devices": ("cpu:0", "cpu:1"),
        "parameter_device": "cpu:0",
        "transport": "ipc",
        "mailbox_messages": 7,
        "step": 42,
        "runs": 42,
        "commits": 42,
        "rate": 12.5,
        "average_rate": 10.0,
        "captured": 40,
        "uncaptured": {"a failure or Ctrl-C": 2},
        "not_finite": 3,
        "overflowed": 1,
        "variables": 3,
        "parameter_nbytes": 400,
        "slot_nbytes": 800,
        "shared_nbytes": {"parameters": 400, "slots": 800, "gradients": 0, "arenas": 0, "other": 0},
        "restarts": 0,
        "max_restarts": 3,
        "log_directory": None,
        "metrics": None,
        "metrics_token_file": None,
        "listen": None,
        "processes": shown,
        "events": (),
    }
    return Reading(**(values | changes))
