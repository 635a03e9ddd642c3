"""The file ``run`` of a service whose memory outlives its supervisor: ``cs-launch --serve --memory files``.

The supervisor writes it down and takes it away when the service ends. The supervisor after one that was killed takes
the run up from it, and whoever was connected sees by it whether to wait for that one.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from cs_proto.frozen import frozen

__all__ = ["RunFile"]

_NAME = "run"
_DRAFT = "run.draft"


@frozen
class RunFile:
    """``run`` tells apart the runs that lie in one directory one after the other. ``return_timeout`` (seconds): how
    long those who were connected wait for the next supervisor. ``server`` and ``workers`` are the incarnations that
    were started last, ``clients`` the controllers of whose end the server has not heard, as they call themselves.
    ``serves``: all processes have been ready, so there is something to take up."""

    run: str
    replicas: int
    parameter_device: str
    return_timeout: float
    server: int
    workers: tuple[int, ...]
    clients: tuple[str, ...] = ()
    serves: bool = False

    @classmethod
    def read(cls, directory: str) -> RunFile | None:
        """What lies in ``directory``; None where there is none, or it cannot be read."""
        try:
            with open(os.path.join(directory, _NAME), encoding="utf-8") as file:
                found = json.load(file)
            return cls(**{**found, "workers": tuple(found["workers"]), "clients": tuple(found["clients"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, directory: str) -> None:
        """Put it there, whole or not at all. Raises OSError."""
        draft = os.path.join(directory, _DRAFT)
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(vars(self), file)
        os.replace(draft, os.path.join(directory, _NAME))

    @staticmethod
    def remove(directory: str) -> None:
        """There is nothing to take up any more. Idempotent."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, _NAME))
