"""The service of a training of Ray Train removes its directories, whatever happens at its end."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from tests.harness.processes import start
from tests.harness.timing import unit

from central_storage.ray.service import remove


def directories() -> list[str]:
    """What services have made here."""
    places = {tempfile.gettempdir(), os.environ["XDG_RUNTIME_DIR"]}
    return [name for place in places for name in os.listdir(place) if name.startswith("cs-")]


@pytest.mark.parametrize(("line", "stream"), [(r"^\{", "out"), ("workers and observers on tcp://", "err")])
def test_sigterm_again_and_again(line: str, stream: str) -> None:
    command = (sys.executable, "-P", "-m", "central_storage.ray.service", "--workers", "2", "--address", "127.0.0.1")
    with start(*command) as child:
        child.wait_for(line, unit(60), stream)
        ended = threading.Event()

        def terminate() -> None:
            while not ended.wait(0.0002):
                child.signal(signal.SIGTERM)

        terminating = threading.Thread(target=terminate)
        terminating.start()
        try:
            child.wait(unit(60)).ok()
        finally:
            ended.set()
            terminating.join()
        assert not child.left(unit(10))
    assert directories() == []


def test_a_checkpoint_is_written_while_the_service_ends(tmp_path: Path) -> None:
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    ended = threading.Event()

    def write() -> None:
        """As rank 0, for which Ray has not found the death of the actor yet."""
        while not ended.is_set():
            try:
                with tempfile.TemporaryDirectory(dir=drafts) as directory:
                    Path(directory, "checkpoint").write_bytes(b"values")
            except FileNotFoundError:
                return

    writing = threading.Thread(target=write)
    writing.start()
    try:
        remove([str(drafts)])
    finally:
        ended.set()
        writing.join()
    assert os.listdir(tmp_path) == []
