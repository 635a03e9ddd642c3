"""The end of a script that is only estimated, and what it leaves for ``cs-ctl estimate``.

``CS_ESTIMATE`` names a file. Every process of the script that makes a strategy appends a line of JSON to it: at its
first step, which ends the process, or at its own end.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NoReturn

from central_storage.core import opening
from central_storage.diagnostics.logging_setup import announce
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen

__all__ = ["ENVIRONMENT", "PLACES", "Elsewhere", "Ending", "Reason", "StepReached", "ending_in"]

#: The file to which the record is appended. If it is set, no strategy starts a service.
ENVIRONMENT = "CS_ESTIMATE"
#: Beside it, where the workers would run, if that is elsewhere: an :class:`Elsewhere` as JSON.
PLACES = "CS_ESTIMATE_PLACES"

#: What ended the script: the first step, a checkpoint that was to be saved, or nothing before its own end.
Reason = Literal["step", "save", "end"]


@frozen
class Elsewhere:
    """Where the service would listen (``tcp://ADDRESS:PORT``), and the address of each worker's machine."""

    listen: str = ""
    nodes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """This, for the environment."""
        return json.dumps([self.listen, self.nodes])

    @classmethod
    def of_environment(cls) -> Elsewhere:
        """What the environment says; nothing if the workers would run here."""
        listen, nodes = json.loads(os.environ.get(PLACES, '["", []]'))
        return cls(listen, tuple(nodes))


@functools.cache
def ending_in(path: str) -> Ending:
    """The one of this process."""
    return Ending(path)


class StepReached(SystemExit):
    """Ends the script before its first step: no error, and ``except Exception`` does not catch it. Exit functions and
    ``finally`` blocks run."""


class Ending:
    """What the strategies of this process have planned, and the file that gets it at the end."""

    def __init__(self, path: str) -> None:
        try:
            os.close(os.open(path, os.O_WRONLY))
        except OSError as error:
            raise ConfigurationError(
                f"{ENVIRONMENT} is set, so this script would end before its first step, for cs-ctl estimate; but "
                f"{path} cannot be opened ({error.strerror}): unset {ENVIRONMENT} to train"
            ) from error
        announce(f"[central-storage] {ENVIRONMENT} is set: this script ends before its first step")
        #: Where the workers would run.
        self.elsewhere = Elsewhere.of_environment()
        self._path = path
        self._process = os.getpid()
        self._plans: list[Callable[[], Mapping[str, Any] | None]] = []
        self._is_written = False
        atexit.register(self._at_exit)
        opening.before_save = lambda: self.reached("save")

    def add(self, plan: Callable[[], Mapping[str, Any] | None]) -> None:
        """Ask ``plan`` at the end what a strategy has planned; None if it was closed before a step came."""
        self._plans.append(plan)

    def reached(self, reason: Reason) -> NoReturn:
        """End the script, here and wherever it tries to go on."""
        self._write(reason)
        raise StepReached(0)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a forked child plans nothing of its own
            self._write("end")

    def _write(self, reason: Reason) -> None:
        if self._is_written:
            return
        self._is_written = True
        plans = [found for plan in self._plans if (found := plan()) is not None]
        line = json.dumps({"pid": os.getpid(), "reason": reason, "plans": plans}) + "\n"
        with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:  # nobody waits for it any more
            file.write(line)
