"""What the log lines of every process have in common: their form, the files of ``CS_MESSAGES_DIR``, and a limit for
complaints about peers."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from cs_proto import records
from cs_proto.errors import ConfigurationError
from cs_proto.printable import counted, printable

from .private_files import open_private

__all__ = ["VALUES", "Complaints", "Formatter", "MessagesFile", "asked_level"]

#: ``on``: log lines of messages show bytes, which hold arguments and results.
VALUES = "CS_LOG_VALUES"

# Lines in one second about one peer, and about all peers.
_OF_A_PEER, _OF_ALL = 1, 4


class Formatter(logging.Formatter):
    """Time, logger and message. Nothing in a line can steer a terminal, and further lines are indented, so that none
    of them looks like another process's."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """One record as text."""
        return printable(super().format(record), lines=True).replace("\n", "\n    ")


class MessagesFile(logging.FileHandler):
    """Writes every line to ``<role>.<pid>.messages`` in a directory, which is made if need be; only their owner may
    read them. Raises OSError."""

    def __init__(self, directory: str, role: str) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        super().__init__(os.path.join(directory, f"{role}.{os.getpid()}.messages"))
        self.setFormatter(Formatter())

    def _open(self) -> TextIO:  # type: ignore[override]
        return open_private(self.baseFilename, "a")


def asked_level(default: int) -> int:
    """The level that ``CS_LOG`` names; ``default`` if it names none. ``CS_LOG_VALUES=on`` is noted, too.

    Raises :class:`ConfigurationError` if ``CS_LOG_VALUES`` is neither ``on`` nor ``off``.
    """
    values = os.environ.get(VALUES, "off")
    if values not in ("on", "off"):
        raise ConfigurationError(f"{VALUES} must be on or off, not {values!r:.60}")
    records.show_bytes(values == "on")
    return logging.getLevelNamesMapping().get(os.environ.get("CS_LOG", "").upper(), default)


class Complaints:
    """Warnings about what peers do: in one second at most one about each peer and four about all of them. The next
    line says how many were left out. For one thread."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._left_out = 0
        self._second = 0.0
        self._said: Counter[object] = Counter()  # by peer, in this second

    def warn(self, peer: object, message: str, *values: object) -> None:
        """Log ``message`` about ``peer``, with ``values`` as in ``logging``, or only count it."""
        now = self._clock()
        if now - self._second >= 1:
            self._second = now
            self._said.clear()
        if self._said[peer] >= _OF_A_PEER or self._said.total() >= _OF_ALL:
            self._left_out += 1
            return
        self._said[peer] += 1
        more = f" (left out {counted(self._left_out, 'line')} like this)" if self._left_out else ""
        self._left_out = 0
        self._log.warning(message + more, *values)
