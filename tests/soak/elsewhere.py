"""A service under attack whose workers are on other machines: launchers that join over TCP by way of proxies, whose
connections the nemesis cuts. There is one for each worker, or one with both workers.

The machines are other run directories on this one. A launcher that has ended is started again, as a supervisor of
services like systemd would do.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tests.harness.processes import MARK, ROOT
from tests.harness.proxies import proxied
from tests.harness.timing import unit
from tests.soak.history import REPLICAS
from tests.soak.sessions import LAUNCHER, PATIENCE, Session, Stuck

from cs_runtime.transport.curve import make_keys

__all__ = ["Elsewhere", "elsewhere"]

_LISTENS = re.compile(r"observers on (tcp://[\d.]+:\d+)")
#: So long nothing passes a link at most that was cut, seconds: less than a worker may be silent.
_LONGEST_CUT = 1.0


class Elsewhere(Session):
    """A running workload with its workers elsewhere. Made by :func:`elsewhere`."""

    def __init__(self, directory: Path, arguments: Sequence[str], options: Mapping[str, str], outposts: int) -> None:
        #: The connections that :meth:`cut` cuts.
        self.links = tuple(f"link{number}" for number in range(outposts))
        self._workers = REPLICAS // outposts
        self._outposts: list[subprocess.Popen[bytes]] = []
        self._addresses: list[str] = []
        self._cuts: list[tuple[Callable[[], None], Callable[[bool], None]]] = []
        self._is_over = False
        keys = directory / "keys"
        for number in range(outposts):
            name, own = f"n{number}", directory / f"{number}"
            make_keys(str(keys), worker=name, places=self._workers)
            own.mkdir(mode=0o700)
            (own / "service.key").write_bytes((keys / "service.key").read_bytes())
            (keys / f"worker-{name}.key_secret").rename(own / f"worker-{name}.key_secret")
            (directory / f"machine{number}").mkdir(mode=0o700)
        serve = ("--serve", str(REPLICAS), "--listen", "tcp://127.0.0.1:0", "--keys", str(keys))
        super().__init__(directory, arguments, True, {}, options, (sys.executable, "-m", LAUNCHER, *serve))

    def join(self, stack: ExitStack) -> None:
        """Start the launchers. ``stack`` closes the proxies, after the processes have ended."""
        deadline = time.monotonic() + unit(PATIENCE)
        while (found := _LISTENS.search(self.said)) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise Stuck(f"the service does not listen\n{self.tail()}")
            time.sleep(0.05)
        for number in range(len(self.links)):
            address, cut, hold = stack.enter_context(proxied(found[1]))
            self._addresses.append(address)
            self._cuts.append((cut, hold))
            self._outposts.append(self._outpost(number))

    def cut(self, link: str, rng: random.Random) -> bool:
        """Cut one of the :attr:`links`, after which nothing passes for a while; that it was there."""
        cut, hold = self._cuts[self.links.index(link)]
        hold(True)
        cut()
        self.watch(rng.choice([0.0, rng.uniform(0.0, _LONGEST_CUT)]))
        hold(False)
        cut()  # what has connected since
        return True

    def finish(self, patience: float = PATIENCE) -> dict[str, np.ndarray] | None:
        """As for any session; the launchers end with the service."""
        self._is_over = True
        return super().finish(patience)

    def tail(self, lines: int = 40) -> str:
        """The end of what the processes printed, those elsewhere included."""
        parts = [super().tail(lines)]
        for path in sorted(self.directory.glob("outpost*")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def close(self) -> None:
        """End everything that came of the workload."""
        self._is_over = True
        for outpost in self._outposts:
            outpost.kill()
            outpost.wait()
        super().close()

    def _read(self, timeout: float) -> bool:
        for number, outpost in enumerate(self._outposts):
            if outpost.poll() is not None and not self._is_over:
                self._outposts[number] = self._outpost(number)
        return super()._read(timeout)

    def _outpost(self, number: int) -> subprocess.Popen[bytes]:
        devices = ",".join(f"cpu:{worker}" for worker in range(self._workers))
        command = [sys.executable, "-m", LAUNCHER, "--join", self._addresses[number], "--devices", devices]
        machine = str(self.directory / f"machine{number}")
        own = {"PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": machine, "TMPDIR": machine, MARK: self.mark}
        with (self.directory / f"outpost{number}").open("ab") as said:
            return subprocess.Popen(
                [*command, "--keys", str(self.directory / f"{number}")],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=ROOT,
                env=os.environ | own,
                start_new_session=True,
            )


@contextmanager
def elsewhere(
    *arguments: str, options: Mapping[str, str] | None = None, outposts: int = REPLICAS
) -> Iterator[Elsewhere]:
    """A workload for the length of a block, launched with the service's ``options``. The ``outposts`` have as many of
    its workers each."""
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, ExitStack() as proxies:
        made = Elsewhere(Path(directory), arguments, options or {}, outposts)
        try:
            made.join(proxies)
            yield made
        finally:
            made.close()
