"""One node and one cluster of Ray for all tests of a process: their start takes longer than most of them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.processes import MARK, Child, start
from tests.harness.timing import unit

HERE = Path(__file__).parent
#: Two trials with two workers each.
CPUS = 4
#: Of each pretend node: a worker, and one that takes the place of another node's.
CPUS_OF_NODE = 2
#: A head that has gone is believed to be so after 5 s, not after a minute, and a node after about 1 s, not after 12.
FAST_DEATHS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "2",
}

#: Seconds between two looks of Ray Train at its ranks, for which each report waits. Its default is 2.
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}


@dataclass(frozen=True)
class Running:
    """A program that keeps nodes of Ray, and the environment of programs that use them."""

    child: Child
    environment: Mapping[str, str]


@contextmanager
def kept(program: str, cpus: int, **more: str) -> Iterator[Running]:
    """Nodes on loopback, which ``program`` keeps, with ``more`` in the environment. All that Ray has started is gone
    afterwards."""
    # A short path, for Ray's sockets. Its name lets it be removed if this session is killed.
    directory = tempfile.mkdtemp(prefix=f"ray-{os.environ[MARK]}-", dir="/tmp")
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stay on loopback
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # no processes that few programs use
        "RAY_worker_niceness": "0",  # or a busy machine would run everything else first
        "PYTHONWARNINGS": "default",  # Ray's own are not ours
        **more,
    }
    with start(HERE / program, directory, str(cpus), environment=environment) as child:
        address = child.wait_for(r"^address (.+)$", unit(120))[1]
        yield Running(child, {**environment, "RAY_ADDRESS": address})
        child.signal(signal.SIGTERM)
        child.wait(unit(60)).ok()
        assert not child.left(unit(10))
    shutil.rmtree(directory)
    assert not os.path.exists(directory)


@pytest.fixture(scope="session")
def node() -> Iterator[Mapping[str, str]]:
    """A node; the environment of programs that use it."""
    with kept("node.py", CPUS) as running:
        yield running.environment


@pytest.fixture(scope="session")
def cluster() -> Iterator[Running]:
    """Three pretend nodes."""
    with kept("cluster.py", CPUS_OF_NODE) as running:
        yield running


@pytest.fixture
def mortal() -> Iterator[Running]:
    """Three pretend nodes for one test, which may kill some."""
    with kept("cluster.py", CPUS_OF_NODE, **FAST_DEATHS) as running:
        yield running
