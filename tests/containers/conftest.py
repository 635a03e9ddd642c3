"""Projects of docker-compose on the image that ``run`` has built."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

COMPOSE = ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")
_numbers = itertools.count(1)


def docker(*arguments: str, check: bool = True) -> str:
    """What a command of the engine prints."""
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=unit(90))
    assert ended.returncode == 0 or not check, ended.stdout + ended.stderr
    return ended.stdout.strip()


class Project:
    """One docker-compose project; its variables are those of docker-compose.yml, like ``CS_WORKERS``."""

    def __init__(self, **variables: str) -> None:
        self.name = f"cst{os.getpid()}n{next(_numbers)}"
        self._environment = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": self.name}
        self._workers = variables.get("CS_WORKERS", "2")

    def compose(self, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        """A command of docker-compose in this project."""
        return subprocess.run(
            [*COMPOSE, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=unit(timeout),
            stdin=subprocess.DEVNULL,
        )

    def up(self) -> None:
        """Server and workers, healthy within 20 seconds."""
        started = self.compose("up", "-d", "--no-build", "server", "worker")
        assert started.returncode == 0, started.stdout + started.stderr
        deadline = time.monotonic() + unit(20)
        while not self.is_healthy():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        """Whether the engine says so of all containers."""
        containers = self.containers()
        return len(containers) == 1 + int(self._workers) and all(
            docker("inspect", "-f", "{{.State.Health.Status}}", each) == "healthy" for each in containers
        )

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
        self.compose("down", "-v", "-t", "5", "--remove-orphans")


@pytest.fixture
def project() -> Iterator[Callable[..., Project]]:
    """Makes projects, and removes them after the test."""
    with ExitStack() as stack:

        def make(**variables: str) -> Project:
            made = Project(**variables)
            stack.callback(made.close)
            return made

        yield make
