"""An inet socket of a service fails the test that runs: a session of tests over a server that also binds TCP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .processes import run
from .timing import unit

ALSO_TCP = """
import os, sys
if os.environ.get("CS_ALSO_TCP") and "cs_server" in sys.orig_argv:
    from cs_runtime.transport.channel import Channel

    listen = Channel.listen

    def listen_on_tcp_too(self, *arguments, **options):
        listen(self, *arguments, **options)
        self._router.bind("tcp://127.0.0.1:*")

    Channel.listen = listen_on_tcp_too
"""

TRAINS = """
import central_storage as cs
import tests.conftest
from tests.harness.timing import unit

def test_a_server_that_also_binds_tcp(monkeypatch, pytestconfig):
    monkeypatch.setenv("CS_ALSO_TCP", "1")
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        assert strategy.run(lambda: 2.0) == 2.0
        assert pytestconfig.stash[tests.conftest._watch].wait(unit(60))
"""


@pytest.mark.timeout(unit(150))
def test_a_server_that_also_binds_tcp_is_found(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ALSO_TCP)
    (tmp_path / "test_trains.py").write_text(TRAINS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", str(tmp_path)]
    path = f"proto:server:worker:client:{tmp_path}"
    ended = run(
        sys.executable, "-m", "pytest", *options, str(tmp_path), environment={"PYTHONPATH": path}, timeout=unit(120)
    )
    section = ended.out.partition("ERROR at teardown of test_a_server_that_also_binds_tcp ")[2]
    assert "processes of a service have inet sockets:\ntcp 0100007F:" in section, ended
    assert "-m cs_server " in section
    assert "1 passed, 1 error" in ended.lines[-1], ended
