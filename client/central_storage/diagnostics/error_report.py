"""The first cause of a failed training, as data and as a file: the process, how it ended, and its last lines.

``cs-launch --error-file`` and a script that runs with ``CS_ERROR_FILE`` write it to a JSON file for the program that
started them. The script knows exceptions, the supervisor knows deaths; both make a :class:`Failure`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Protocol

from cs_proto.errors import LaunchError, ReplicaError, ReplicaLostError, ShutdownError
from cs_proto.frozen import fields_of, frozen, with_changes
from cs_proto.messages import Died, Worker
from cs_proto.printable import printable
from cs_runtime.private_files import open_private, read_file

__all__ = ["ENVIRONMENT", "Failure", "Kind", "Known", "died_failure", "note_uncaught", "read", "write"]

_log = logging.getLogger("central_storage")

#: The variable that names the file.
ENVIRONMENT = "CS_ERROR_FILE"
_FORMAT = 1
# The number of characters that are kept from the end of a process's output and of a traceback.
_TEXT_LENGTH = 16_384

Kind = Literal["death", "exception", "start", "usage"]


@frozen
class Failure:
    """The first failure."""

    #: ``death``: a process ended unasked. ``exception``: the user's code, or a call in the script, raised. ``start``:
    #: the service did not come up. ``usage``: an invalid command line.
    kind: Kind
    #: ``server``, ``worker``, ``script`` or ``launcher``.
    role: str
    #: The replica of a worker; None for the others.
    rank: int | None
    #: None if no process is to blame, or if it is unknown.
    pid: int | None
    #: How it ended: ``SIGKILL``, ``exit code 3``, ``KeyError: 'x'``.
    cause: str
    message: str = ""
    traceback: str = ""
    #: The last lines the process printed.
    log: str = ""
    #: The address of the machine on which a worker has that pid; "" if that is the machine of the service.
    node: str = ""

    def __str__(self) -> str:
        """One sentence, as the terminal shows it; the message of a failed start has further lines."""
        return printable(self._sentence(), lines=True)

    def _sentence(self) -> str:
        pid = "" if self.pid is None else f" (pid {self.pid}{f' on {self.node}' if self.node else ''})"
        if self.kind == "exception":
            who = "the script" if self.rank is None else f"replica {self.rank}, worker w{self.rank}"
            return f"{who}{pid} raised {self.cause}"
        if self.kind == "death":
            who = "the script" if self.role == "script" else self.role if self.rank is None else f"worker w{self.rank}"
            return f"{who}{pid} ended by {self.cause}{_HINTS.get(self.cause, '')}"
        return self.message or self.cause


_HINTS = {
    "SIGKILL": " (if no person or program sent it, the kernel did, for lack of memory: see dmesg)",
    "exit code 0": " (it was not asked to end: something in it called exit)",
}


class Known(Protocol):
    """The part of a script's link to its service that is needed here."""

    @property
    def workers(self) -> Iterable[Worker]:
        """The workers."""

    @property
    def last_death(self) -> Died | None:
        """The last death without a restart; if there is none, the last death."""


def died_failure(died: Died) -> Failure:
    """The failure for a death that the supervisor reports."""
    rank = died.rank if died.role == "worker" else None
    return Failure("death", died.role, rank, died.pid, died.cause, log=died.log, node=died.node)


def write(path: str, failure: Failure, exit_code: int) -> None:
    """Write ``failure`` to the file ``path`` atomically. If the file cannot be written, that is logged."""
    texts = {name: getattr(failure, name)[-_TEXT_LENGTH:] for name in ("message", "traceback", "log")}
    record = {
        "format": _FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(failure),
        **texts,
        "exit_code": exit_code,
    }
    fresh = f"{path}.{os.urandom(8).hex()}"
    try:
        with open_private(fresh, "x") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.replace(fresh, path)
    except OSError as error:
        _log.error("the error file %s could not be written: %s", path, error.strerror)
        with suppress(OSError):
            os.unlink(fresh)


def read(path: str) -> Failure | None:
    """The failure in the file ``path``; None if there is no such file, or no failure in it."""
    try:
        record = json.loads(read_file(path))
        return Failure(**{name: record[name] for name in fields_of(Failure)})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def note_uncaught(links: Iterable[Known]) -> None:
    """Let the exception that ends this script write a failure, if the environment names a file for it.

    ``links`` are the script's links to services at that time. Call this once.
    """
    path = os.environ.get(ENVIRONMENT)
    if path:
        sys.excepthook = _Hook(os.path.abspath(path), links, sys.excepthook)


class _Hook:
    def __init__(
        self,
        path: str,
        links: Iterable[Known],
        before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    ) -> None:
        self._path = path
        self._links = links
        self._before = before
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if isinstance(error, Exception) and os.getpid() == self._process:  # Ctrl-C is not a failure
            write(self._path, _failure_of(error, list(self._links)), 1)


def _failure_of(error: Exception, links: list[Known]) -> Failure:
    texts = {"message": str(error), "traceback": "".join(traceback.format_exception(error))}
    deaths = [link.last_death for link in links if link.last_death is not None]
    if isinstance(error, ShutdownError):  # a shutdown by the user raises it, too
        deaths = [died for died in deaths if not died.restarts]
    if isinstance(error, (ReplicaLostError, ShutdownError)) and deaths:
        found = died_failure(deaths[-1])
        return with_changes(found, **texts)
    name = type(error).__qualname__
    if isinstance(error, LaunchError):
        return Failure("start", "launcher", None, None, _sentence(name, error), **texts)
    replica = vars(error).get("replica", -1)
    if isinstance(replica, int) and replica >= 0:
        workers = [worker for link in links for worker in link.workers if worker.replica == replica]
        pid, node = (workers[-1].pid, workers[-1].node) if workers else (None, "")
        cause = _sentence(name.removeprefix("Replica") if isinstance(error, ReplicaError) else name, error)
        return Failure("exception", "worker", replica, pid, cause, node=node, **texts)
    return Failure("exception", "script", None, os.getpid(), _sentence(name, error), **texts)


def _sentence(name: str, error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"{name}: {first}" if first else name
