"""Bars on a real terminal, and what notebooks show, over real services."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

import central_storage as cs

TRAINING = """
import numpy as np
import central_storage as cs

with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(8, np.float32))
        optimizer = cs.optimizers.{optimizer}(0.1)

    def step(rows):
        if rows[0] == 300:
            print("half-way", flush=True)
        optimizer.apply_gradients([(np.ones(8, np.float32), w)])
        return float(rows.sum())

    data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(600).batch(2))
    for losses in strategy.run_steps(step, data, progress="training"):
        pass
"""


def on_a_terminal(script: str, **environment: str) -> str:
    """Run a script whose output goes to a terminal; all that it wrote."""
    ours, theirs = pty.openpty()
    path = os.pathsep.join(str(ROOT / role) for role in ("proto", "server", "worker", "client"))
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the last writer has ended
        pass
    finally:
        os.close(ours)
    assert child.wait(unit(30)) == 0, written.decode()
    return written.decode()


def test_a_terminal_shows_a_bar_and_what_replicas_print_above_it() -> None:
    written = on_a_terminal(TRAINING.format(optimizer="SGD"))
    assert "training:   0%" in written
    assert re.search(r"300/300 \[.* steps/s.*loss 598.5\]", written)
    [line] = [part for part in re.split(r"[\r\n]+", written) if "half-way" in part]
    assert re.fullmatch(r"\s*\[w0\] half-way", line)


def test_a_pipe_gets_one_plain_line() -> None:
    ended = run("-c", TRAINING.format(optimizer="SGD")).ok()
    [line] = [line for line in ended.err.splitlines() if line.startswith("training")]
    assert re.fullmatch(r"training: 300 of 300 steps in 00:\d\d, [\d.]+ steps/s, loss 598.5", line)
    assert "\r" not in ended.err
    assert "\x1b" not in ended.err


@pytest.mark.slow
@pytest.mark.timeout(unit(120))
def test_a_terminal_shows_that_a_kernel_is_compiled(tmp_path: Path) -> None:
    written = on_a_terminal(TRAINING.format(optimizer="Adagrad"), CS_CACHE_DIR=str(tmp_path))
    assert "which takes seconds, once for each user" in written
    assert re.search(r"\rcompiling adagrad for float32: +0%", written)


def test_a_strategy_shows_the_processes_that_it_has_now(own: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def die() -> None:
        context = cs.get_replica_context()
        if context is not None and context.replica_id_in_sync_group == 0 and not mark.exists():
            mark.touch()
            os._exit(3)

    before = own._repr_html_()
    pids = [worker.pid for worker in own.controller.workers]  # type: ignore[attr-defined]
    assert all(f"<td>{pid}</td>" in before for pid in pids)
    assert before.count("waits") + before.count("computes") >= 3
    own.run(die)
    assert own._repr_html_() != before
    assert [worker.pid for worker in own.controller.workers] != pids  # type: ignore[attr-defined]


def test_a_variable_does_not_wait_for_steps_that_were_sent_ahead(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.arange(3, dtype=np.float32), name="<w>")
    data = two.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(2))
    with two.run_steps(lambda rows: rows.sum(), data) as steps:
        next(steps)
        shown: Any = w._repr_html_()
        assert steps._series.ahead  # it has not been waited for
        assert "a run is under way" in shown
    assert "0 to 2, mean 1" in w._repr_html_()
    assert "&lt;w&gt;" in w._repr_html_()
    with two.scope():
        large = cs.Variable(np.arange(1 << 18, dtype=np.float32))
    assert "range of 87382 of 262144 values" in large._repr_html_()
