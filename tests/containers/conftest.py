"""Projects of docker-compose on the image that ``run`` has built."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

#: The ways to call docker-compose that there are here: version 1, version 2.
COMPOSES: list[tuple[str, ...]] = [("docker-compose",)] if shutil.which("docker-compose") else []
if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
    COMPOSES.append(("docker", "compose"))
_numbers = itertools.count(1)


def docker(*arguments: str) -> str:
    """What a command of the engine prints."""
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=unit(90))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


class Project:
    """One docker-compose project; its variables are those of docker-compose.yml, like ``CS_WORKERS``."""

    def __init__(self, *overlays: str, **variables: str) -> None:
        """``overlays`` are further files, added to docker-compose.yml."""
        self.name = f"cst{os.getpid()}n{next(_numbers)}"
        self._files = [part for file in ("docker-compose.yml", *overlays) for part in ("-f", file)]
        self._environment = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": self.name}

    def compose(
        self, *arguments: str, command: Sequence[str] = COMPOSES[0], timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A command of docker-compose in this project."""
        return subprocess.run(
            [*command, *self._files, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=unit(timeout),
            stdin=subprocess.DEVNULL,
        )

    def up(self) -> Project:
        """Server and workers. Scripts wait until they serve."""
        started = self.compose("up", "-d", "--no-build", "server", "worker")
        assert started.returncode == 0, started.stdout + started.stderr
        return self

    def wait_until_healthy(self, timeout: float) -> None:
        """Until the engine says so of all containers."""
        deadline = time.monotonic() + unit(timeout)
        containers = self.containers()
        while any(
            state != "healthy"
            for state in docker("inspect", "-f", "{{.State.Health.Status}}", *containers).splitlines()
        ):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def containers(self, *services: str) -> list[str]:
        """The ids of the containers of these services (default: server and workers)."""
        return self.compose("ps", "-q", *(services or ("server", "worker"))).stdout.split()

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Python code as the script that trains, in a container of its own."""
        return self.compose("run", "--rm", "--no-deps", "-T", "train", "python", "-c", code)

    def logs(self) -> str:
        """What all containers have printed."""
        return self.compose("logs", "--no-color").stdout

    def close(self) -> None:
        """Remove everything of the project."""
        self.compose("kill")
        self.compose("down", "-v", "-t", "1", "--remove-orphans")


@pytest.fixture(scope="module")
def service() -> Iterator[Project]:
    """A server and two workers."""
    made = Project()
    try:
        yield made.up()
    finally:
        made.close()


@pytest.fixture
def project() -> Iterator[Callable[..., Project]]:
    """Makes projects, and removes them after the test."""
    with ExitStack() as stack:

        def make(*overlays: str, **variables: str) -> Project:
            made = Project(*overlays, **variables)
            stack.callback(made.close)
            return made

        yield make
