"""What a service says, and when: once, in time, and with the remedy."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.harness.processes import run, start

import central_storage as cs
from central_storage.errors import ConfigurationError

BAR = """
import sys, pathlib, central_storage as cs
flag = sys.argv[1]
def step():
    print("loading", end="", flush=True)
    pathlib.Path(flag).read_bytes()  # until the test has seen it, and has closed the file
    print("\\r50%", end="", flush=True)
    pathlib.Path(flag).read_bytes()
    print("\\n", end="", flush=True)
    print("over", flush=True)
cs.CentralStorageStrategy(["cpu:0"]).run(step)
"""
DEAF = """
import central_storage as cs
def step():
    import signal, time
    signal.signal(signal.SIGINT, lambda *_: None)
    print("deaf", flush=True)
    while True: signal.pause()
cs.CentralStorageStrategy(["cpu"] * 2).run(step)
"""
LONG = """
import sys, central_storage as cs
flag = sys.argv[1]
def step():
    import os
    os.close(os.open(flag, os.O_RDONLY))
cs.CentralStorageStrategy(["cpu:0"]).run(step)
"""


def test_output_without_a_line_end_is_shown_at_once(tmp_path: Path) -> None:
    import os

    fifo = tmp_path / "flag"
    os.mkfifo(fifo)
    (tmp_path / "script.py").write_text(BAR)
    with start(tmp_path / "script.py", fifo) as child:
        child.wait_for(r"^\[w0\] loading\r")
        os.close(os.open(fifo, os.O_WRONLY))
        child.wait_for(r"\r\[w0\] 50%\r")
        os.close(os.open(fifo, os.O_WRONLY))
        assert child.wait().out == "[w0] loading\r[w0] 50%\r[w0] 50%\n[w0] over\n"


def test_a_replica_that_ignores_ctrl_c_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DEAF)
    with start(tmp_path / "script.py") as child:
        child.wait_for("deaf")
        child.signal(signal.SIGINT)
        said = child.wait_for("run 1 to end after Ctrl-C.*press Ctrl-C again to end the service", stream="err")
        assert "replica" in said[0]
        child.signal(signal.SIGINT)
        assert child.wait().code != 0


def test_a_long_wait_is_named_by_the_script_alone(tmp_path: Path) -> None:
    import os

    fifo = tmp_path / "flag"
    os.mkfifo(fifo)
    (tmp_path / "script.py").write_text(LONG)
    with start(tmp_path / "script.py", fifo, environment={"CS_NAME_WAITS": "1.5"}) as child:
        child.wait_for("waiting . s for run 1", stream="err")
        os.close(os.open(fifo, os.O_WRONLY))
        assert "[server]" not in child.wait().err


def test_a_switch_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_NAME_WAITS", "soon")
    with pytest.raises(
        ConfigurationError, match="CS_NAME_WAITS must be off or a number of seconds, more than 0, not 'soon'"
    ):
        cs.CentralStorageStrategy(["cpu:0"], in_process=True)


def test_a_large_capture_is_warned_of_once_with_the_remedy() -> None:
    table = np.zeros(1 << 19, np.float32)

    def rows() -> int:
        return len(table)

    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        with pytest.warns(
            UserWarning, match=r"rows captures 2.1 MB, the largest array as 'table', .* @cs.function"
        ) as said:
            strategy.run(rows)
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strategy.run(rows)
            strategy.run(cs.function(rows))


def test_the_kernel_cache_moves_and_a_place_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    from cs_server.compute import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CS_CACHE_DIR", str(tmp_path / "there" / "kernels"))
        found = kernels.cache_directory()
        assert found is not None
        assert found.parent == tmp_path / "there" / "kernels"
    (tmp_path / "file").write_text("")
    ended = run(
        "-c",
        "from cs_server.compute import kernels; kernels.cache_directory()",
        environment={"CS_CACHE_DIR": str(tmp_path / "file")},
    )
    assert f"CS_CACHE_DIR={tmp_path / 'file'} cannot be used" in ended.err
