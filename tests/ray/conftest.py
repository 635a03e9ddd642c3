"""One node of Ray for all tests of this folder: its start takes longer than most of them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.harness.processes import start
from tests.harness.timing import unit

#: Two trials with two workers each.
CPUS = 4


@pytest.fixture(scope="session")
def node() -> Iterator[Mapping[str, str]]:
    """A node on loopback; the environment of programs that use it. All that Ray has started is gone afterwards."""
    directory = tempfile.mkdtemp(prefix="ray-")  # a short path, for Ray's sockets
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stay on loopback
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "default",  # Ray's own are not ours
    }
    with start(Path(__file__).parent / "node.py", directory, str(CPUS), environment=environment) as child:
        address = child.wait_for(r"^address (.+)$", unit(120))[1]
        yield {**environment, "RAY_ADDRESS": address}
        child.signal(signal.SIGTERM)
        child.wait(unit(60)).ok()
        assert not child.left(unit(10))
    shutil.rmtree(directory)
    assert not os.path.exists(directory)
