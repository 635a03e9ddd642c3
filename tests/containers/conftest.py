"""Projects of docker-compose on the image that ``run`` has built.

docker-compose is used where it is what is tested; the rest is asked of the engine, which answers ten times as fast.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

#: The ways to call docker-compose that there are here: version 1, version 2.
COMPOSES: list[tuple[str, ...]] = [("docker-compose",)] if shutil.which("docker-compose") else []
if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
    COMPOSES.append(("docker", "compose"))
IMAGE = os.environ.get("CS_IMAGE", "central-storage")
_PREFIX = os.environ.get("CS_PROJECTS", f"cst{os.getpid()}")
_numbers = itertools.count(1)
#: Between two looks at what a container has printed, seconds.
LOOK_EVERY = 0.2
# What docker-compose.yml says of every service.
_LIKE_A_SERVICE = (
    *("--init", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--no-healthcheck"),
)


def docker(*arguments: str, timeout: float = 90) -> str:
    """What a command of the engine prints on standard output."""
    ended = _asked(*arguments, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def wait_for(container: str, pattern: str, timeout: float = 90) -> re.Match[str]:
    """The first match of ``pattern`` in all that a container has printed: the door at which a test acts."""
    deadline = time.monotonic() + unit(timeout)
    while True:
        logs = _asked("logs", container)
        text = logs.stdout + logs.stderr
        if found := re.search(pattern, text, re.DOTALL):
            return found
        assert time.monotonic() < deadline, f"{pattern!r} is not in\n{text}"
        time.sleep(LOOK_EVERY)


@dataclass(frozen=True)
class Ended:
    """What a script's container has left."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line that it printed. Fails where the script has failed."""
        assert self.code == 0, self.out + self.err
        return self.out.splitlines()[-1]


class Script:
    """Python code that runs in a container of its own, with the volume of a project."""

    def __init__(self, project: Project, *arguments: str, options: Sequence[str] = _LIKE_A_SERVICE) -> None:
        """``arguments`` are the interpreter's."""
        volume = f"{project.name}_run:/run/central-storage"
        label = f"com.docker.compose.project={project.name}"
        self.container = docker(*("run", "-d", "--label", label, "-v", volume, *options, IMAGE, "python", *arguments))

    def wait_for(self, pattern: str) -> re.Match[str]:
        """As :func:`wait_for`."""
        return wait_for(self.container, pattern)

    def end(self, timeout: float = 120) -> Ended:
        """Wait for its end, and remove it."""
        code = int(docker("wait", self.container, timeout=timeout))
        logs = _asked("logs", self.container)
        docker("rm", self.container)
        return Ended(code, logs.stdout, logs.stderr)


class Project:
    """One docker-compose project; its variables are those of docker-compose.yml, like ``CS_WORKERS``."""

    def __init__(self, *overlays: str, **variables: str) -> None:
        """``overlays`` are further files, added to docker-compose.yml."""
        self.name = f"{_PREFIX}n{next(_numbers)}"
        self._files = [part for file in ("docker-compose.yml", *overlays) for part in ("-f", file)]
        self._environment = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": self.name}

    def compose(
        self, *arguments: str, command: Sequence[str] = COMPOSES[0], timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A command of docker-compose in this project, from its beginning to its end."""
        pipe = subprocess.PIPE
        with self.start(*arguments, command=command, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(timeout=unit(timeout))
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, *arguments: str, command: Sequence[str] = COMPOSES[0], **options: Any) -> subprocess.Popen[Any]:
        """A command of docker-compose in this project that goes on; ``options`` are those of ``Popen``."""
        return subprocess.Popen(
            [*command, *self._files, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def up(self) -> Project:
        """Server and workers. Scripts wait until they serve, once the server listens."""
        started = self.compose("up", "-d", "--no-build", "server", "worker")
        assert started.returncode == 0, started.stdout + started.stderr
        wait_for(self.server, "from elsewhere")
        return self

    def wait_until_healthy(self, timeout: float) -> None:
        """Until the engine says so of all containers."""
        deadline = time.monotonic() + unit(timeout)
        while set(docker("inspect", "-f", "{{.State.Health.Status}}", *self.containers()).split()) != {"healthy"}:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(LOOK_EVERY)

    @property
    def server(self) -> str:
        """The id of the server's container."""
        (server,) = self.containers("server")
        return server

    def worker(self, rank: int) -> str:
        """The id of the container that runs worker ``rank``, once every worker has said which it is."""
        which = r"\[cs-launch\] worker w(\d+) of "
        return {int(wait_for(each, which)[1]): each for each in self.containers("worker")}[rank]

    def containers(self, *services: str) -> list[str]:
        """The ids of the containers of these services (default: server and workers), also of those that have ended."""
        mine = ("--filter", f"label=com.docker.compose.project={self.name}")
        wanted = [("--filter", f"label=com.docker.compose.service={each}") for each in services or ("server", "worker")]
        return [found for each in wanted for found in docker("ps", "-aq", *mine, *each).split()]

    def run(self, *arguments: str) -> Ended:
        """A script that trains, from its beginning to its end; ``arguments`` are the interpreter's."""
        return Script(self, *arguments).end()

    def logs(self) -> str:
        """What server and workers have printed."""
        logs = [_asked("logs", container) for container in self.containers()]
        return "\n".join(each.stdout + each.stderr for each in logs)

    def close(self) -> None:
        """Remove everything of the project. Idempotent."""
        mine = f"label=com.docker.compose.project={self.name}"
        if left := docker("ps", "-aq", "--filter", mine).split():
            docker("rm", "-fv", *left)
        for kind in ("network", "volume"):
            if left := docker(kind, "ls", "-q", "--filter", mine).split():
                docker(kind, "rm", *left)


def _asked(*arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=unit(timeout), check=False)


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
