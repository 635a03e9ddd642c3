"""The server never unpickles what a peer sends: Python's own audit events say so over a whole training.

A ``sitecustomize`` on PYTHONPATH installs an audit hook in every process of the service. Nothing may be recorded of the
server once it is ready, not even where an update needs a kernel that has to be compiled. The workers, which unpickle
the user's function, show that the hook works.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import central_storage as cs

HOOK = """
import os, sys, time

role = next((name for name in ("cs_server", "cs_worker") if name in sys.orig_argv), None)
if role is not None:
    log = os.open(os.path.join(os.environ["CS_TEST_AUDIT"], f"{role}-{os.getpid()}"), os.O_WRONLY | os.O_CREAT, 0o600)

    def note(event, arguments):
        if event == "pickle.find_class":
            os.write(log, f"{time.monotonic()} {arguments}\\n".encode())

    sys.addaudithook(note)
"""


def events(directory: Path, role: str, since: float) -> list[str]:
    """What processes of ``role`` recorded after ``since``; there must be such a process."""
    logs = sorted(directory.glob(f"{role}-*"))
    assert logs, f"no {role} installed the hook"
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return [line for line in lines if float(line.split()[0]) > since]


def test_no_unpickling_after_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CS_TEST_AUDIT", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        ready = time.monotonic()
        with strategy.scope():
            v = cs.Variable(np.zeros((4, 3), np.float32), aggregation=cs.VariableAggregation.MEAN)
            optimizer = cs.optimizers.Adam(0.1)
            table = cs.Variable(np.zeros((5, 2)))
            rare = cs.optimizers.Adadelta(0.1)  # no service compiles it in advance

        def step(x: np.ndarray) -> dict[str, np.ndarray]:
            context = cs.get_replica_context()
            optimizer.apply_gradients([(np.ones((4, 3), np.float32), v)])
            rare.apply_gradients([(cs.IndexedSlices(np.ones((2, 2)), [1, 3]), table)])
            total = context.all_reduce("SUM", x)
            context.merge_call(lambda strategy, value: v.assign(np.zeros((4, 3), np.float32)), args=(x,))
            v.assign_add(np.ones((4, 3), np.float32))
            return {"total": total, "rows": context.all_gather(x, axis=0)}

        def fails() -> None:
            raise KeyError("of a replica")

        for _ in range(3):
            strategy.run(step, args=(np.ones((2, 2)),))
            with pytest.raises(KeyError):
                strategy.run(fails)
        assert strategy.statistics().commits > 6
    assert events(tmp_path, "cs_server", since=ready) == []
    assert events(tmp_path, "cs_worker", since=ready) != []
