"""P21: no wait of more than ten seconds is silent. Several services stand still at once, so that it takes no longer."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import psutil
from tests.harness.processes import ROOT
from tests.harness.timing import unit
from tests.soak.sessions import Session, session

__all__ = ["WAITS", "named"]


@dataclass(frozen=True)
class _Wait:
    """Who is stopped or killed, and what must be said of it: a pattern with the words ``{pid}`` and ``{rank}``."""

    stopped: tuple[str, ...]
    says: tuple[str, ...]
    killed: str = ""
    observed: bool = False


# In the midst of a step, or of the script's look at a variable between two.
_SERVER = r"link: waiting 1\d s for (run \d+: {0} does not say|the answer of {0} to Get)"
#: Whom a training waits for.
WAITS = {
    "worker": _Wait(
        ("w{rank}",),
        (r"link: waiting 1\d s for run \d+: replica {rank} \(pid {pid}",),
    ),
    "both workers": _Wait(  # one of which may have come to its merge point before
        ("w0", "w1"), (r"link: waiting 1\d s for run \d+: replica (0 \(pid {pid}.* and replica 1|[01]) \(pid ",)
    ),
    "server": _Wait(("server",), (_SERVER.format(r"the server \(pid {pid}\)"),)),
    "worker that nobody starts": _Wait(
        ("supervisor",), (r"link: waiting 1\d s for run \d+: replica {rank} \(pid \d+",), killed="w{rank}"
    ),
    "server that nobody starts": _Wait(("supervisor",), (_SERVER.format(r"the server \(pid \d+\)"),), killed="server"),
    "observer": _Wait(("server",), (r"observer: waiting 1\d s for ",), observed=True),
}
_OBSERVER = """
import sys
import central_storage as cs
with cs.connect(sys.argv[1], timeout=120.0) as observer:
    print("connected", flush=True)
    sys.stdin.readline()
    observer.get("plain")
"""
# Something is named after ten seconds, once in a while somewhat later.
_NAMED_WITHIN = 20.0


class _Standing:
    """A training that stands still."""

    def __init__(self, kind: str, rank: int, stack: ExitStack, arguments: list[str], launched: bool) -> None:
        self.kind, self.rank, self.wait = kind, rank, WAITS[kind]
        options = {"--max-restarts": "100"}
        self.session: Session = stack.enter_context(session(*arguments, launched=launched, options=options))
        self.session.wait_for_steps(3)
        self.observer: subprocess.Popen[str] | None = None
        if self.wait.observed:
            address = next(line["address"] for line in self.session.history if line["op"] == "address")
            self.observer = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _OBSERVER, address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(self.session.directory / "observer").open("w"),
                    text=True,
                    cwd=ROOT,
                )
            )
            stack.callback(self.observer.kill)
            assert self.observer.stdout is not None
            self.observer.stdout.readline()

    def stop(self) -> None:
        """From here on nothing goes on."""
        processes = self.session.processes()
        self.stopped = [processes[role.format(rank=self.rank)] for role in self.wait.stopped]
        for process in self.stopped:
            process.send_signal(signal.SIGSTOP)
        if self.wait.killed:
            processes[self.wait.killed.format(rank=self.rank)].kill()
        if self.observer is not None and self.observer.stdin is not None:
            self.observer.stdin.write("\n")
            self.observer.stdin.flush()

    def missing(self) -> list[str]:
        """What has not been said yet."""
        self.session.watch(0)
        said = self.session.said
        with suppress(FileNotFoundError):
            said += re.sub("^", "observer: ", (self.session.directory / "observer").read_text(), flags=re.M)
        words = {"{pid}": str(self.stopped[0].pid), "{rank}": str(self.rank)}
        patterns = [re.sub("|".join(words), lambda found: words[found[0]], pattern) for pattern in self.wait.says]
        return [pattern for pattern in patterns if not re.search(pattern, said)]

    def go_on(self) -> list[str]:
        """Continue what was stopped, see the training go on, and end it; what went wrong, in words."""
        missing = self.missing()
        found = [f"{self.kind}: nobody said {pattern!r}\n{self.session.tail()}" for pattern in missing]
        for process in self.stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self.session.wait_for_steps(3)
        self.session.finish()
        return found


def named(rng: random.Random, count: int) -> list[str]:
    """``count`` trainings stand still at once, each for another process; which waits were silent, in words."""
    with ExitStack() as stack:
        standing = []
        for _ in range(count):
            arguments = ["--elements", "1024", "--ahead", rng.choice(["0", "2"])]
            kind, rank, launched = rng.choice(list(WAITS)), rng.randrange(2), rng.random() < 0.5
            standing.append(_Standing(kind, rank, stack, arguments, launched))
        for one in standing:
            one.stop()
        deadline = time.monotonic() + unit(_NAMED_WITHIN)
        while any(one.missing() for one in standing) and time.monotonic() < deadline:
            for one in standing:
                one.session.watch(0.2)
        return [line for one in standing for line in one.go_on()]
