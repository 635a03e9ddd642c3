"""Loads the kernels in a thread while the service is set up."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from .compute import kernels

__all__ = ["Loading"]

_log = logging.getLogger("cs_server.service")

_LOADED = b"\0"  # on the wake-up pipe, where a signal writes its number


class Loading:
    """Loads the kernels in a thread of its own while the service is set up."""

    def __init__(self, run_directory: Path, wake_writer: int) -> None:
        self.is_done = False
        self._error: BaseException | None = None
        self._run_directory = run_directory
        self._wake_writer = wake_writer
        threading.Thread(target=self._run, name="load kernels", daemon=True).start()

    def check(self) -> None:
        """Raise the error of the loading, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            loaded = kernels.load(self._run_directory, is_awaited=True)
            _log.debug("kernels: %s", loaded)
        except BaseException as error:  # noqa: BLE001  (raised again by check)
            self._error = error
        self.is_done = True
        with suppress(OSError):  # the process is ending: the pipe is closed
            os.write(self._wake_writer, _LOADED)
