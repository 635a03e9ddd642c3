"""The file ``run`` of a service whose memory outlives its supervisor: ``cs-launch --serve --memory files``.

The supervisor writes the file, and removes it when the service ends. After a supervisor was killed, the next one takes
up the run from it, and the processes that were connected learn from it whether to wait for that supervisor.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from cs_proto.frozen import frozen

from .private_files import open_private, read_file

__all__ = ["RunFile"]

_NAME = "run"
_DRAFT = "run.draft"


@frozen
class RunFile:
    """``run`` distinguishes successive runs in one directory. ``return_timeout`` (seconds) is how long connected
    processes wait for the next supervisor. ``server`` and ``workers`` are the latest incarnations. ``clients`` are the
    names of the controllers whose end the server has not been told. ``serves`` means that all processes were ready
    once, so there is a run to take up."""

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
        """The file in ``directory``; None if there is none or it cannot be read."""
        try:
            found = json.loads(read_file(os.path.join(directory, _NAME)))
            return cls(**{**found, "workers": tuple(found["workers"]), "clients": tuple(found["clients"])})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, directory: str) -> None:
        """Write the file atomically. Raises OSError."""
        draft = os.path.join(directory, _DRAFT)
        with suppress(FileNotFoundError):  # of a supervisor that was killed
            os.unlink(draft)
        with open_private(draft, "x") as file:
            json.dump(vars(self), file)
        os.replace(draft, os.path.join(directory, _NAME))

    @staticmethod
    def remove(directory: str) -> None:
        """Remove the file: there is no run to take up any more. Idempotent."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, _NAME))
