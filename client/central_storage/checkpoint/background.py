"""Writing a checkpoint in a thread, while the training goes on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

from central_storage.core.public_objects import Closed
from cs_proto.errors import InvalidArgumentError
from cs_runtime import saving_mark
from cs_runtime.failpoints import failpoint

__all__ = ["CheckpointOptions", "Writer", "finish_all", "is_async"]

_log = logging.getLogger("central_storage.train")


class CheckpointOptions(Closed):
    """How a checkpoint is saved.

    Args:
        experimental_io_device: Accepted, without effect: the script writes the file.
        experimental_enable_async_checkpoint: The older name of ``enable_async``.
        experimental_write_callbacks: None. Call ``sync()`` to know that the file is there.
        enable_async: Whether the save only copies the values, and a thread writes the file while the training goes on.

    Raises:
        InvalidArgumentError: ``experimental_write_callbacks`` is not None (a ValueError).

    Examples:
        >>> import tempfile
        >>> import central_storage as cs
        >>> checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
        >>> in_thread = cs.train.CheckpointOptions(enable_async=True)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = checkpoint.save(f"{directory}/ckpt", options=in_thread)
        ...     checkpoint.sync()
        ...     _ = checkpoint.restore(path).assert_consumed()
    """

    def __init__(
        self,
        experimental_io_device: str | None = None,
        experimental_enable_async_checkpoint: bool = False,
        experimental_write_callbacks: None = None,
        enable_async: bool = False,
    ) -> None:
        if experimental_write_callbacks is not None:
            raise InvalidArgumentError(
                "experimental_write_callbacks must be None; call sync(), which returns when the file is there"
            )
        self.experimental_io_device = experimental_io_device
        self.enable_async = bool(enable_async or experimental_enable_async_checkpoint)

    @property
    def experimental_enable_async_checkpoint(self) -> bool:
        """Another name of ``enable_async``."""
        return self.enable_async


def is_async(options: Any) -> bool:
    """Whether ``options`` ask for a thread. Raises InvalidArgumentError if they are no CheckpointOptions."""
    if options is None:
        return False
    if not isinstance(options, CheckpointOptions):
        raise InvalidArgumentError(f"options must be a cs.train.CheckpointOptions or None, not {options!r:.80}")
    return options.enable_async


class Writer:
    """Writes the files of one Checkpoint in a thread, one after the other. The interpreter ends after the thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None
        #: Whether the script may end well although nobody has heard of an error.
        self.may_fail = False
        _writers.add(self)

    def start(self, what: str, write: Callable[[], object]) -> None:
        """Have a thread call ``write``, which writes ``what``. No other one may be under way: call :meth:`wait`
        first."""
        assert self._thread is None
        self._what = what
        self._thread = threading.Thread(target=self._write, args=(write, os.getpid()), name="central storage save")
        self._thread.start()

    def _write(self, write: Callable[[], object], process: int) -> None:
        try:
            with saving_mark.setting():
                failpoint("save.copied")
                write()
        except BaseException as error:  # noqa: BLE001  (raised where the script waits for the save)
            self._error = error
            _log.error("%s could not be saved: %s", self._what, error)

    def wait(self) -> None:
        """Wait until the file is there. Raises what prevented it, once."""
        if (thread := self._thread) is not None:
            thread.join()  # in a forked child it has ended: it is the parent's
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`wait` would raise at once."""
        return self._error is not None

    def finish(self) -> None:
        """Wait until the file is there, or cannot be; :meth:`wait` raises what prevented it."""
        if (thread := self._thread) is not None:
            thread.join()

    def say_error(self) -> BaseException | None:
        """At the end of the script: log what nobody has heard, and return it if the script must not end well."""
        if self._error is None:
            return None
        _log.error("the script ends without the checkpoint %s: %s", self._what, self._error)
        return None if self.may_fail else self._error


class _FailingOutput:
    """Takes the place of stdout at the end of a script that must not end well. The interpreter flushes stdout last, and
    only an error there still changes the exit code, to 120."""

    def __init__(self, output: Any, error: BaseException) -> None:
        self._output = output
        self._error = error

    def flush(self) -> None:
        """Flush stdout, and raise the error."""
        if self._output is not None:
            self._output.flush()
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def finish_all() -> None:
    """Wait for all files that are being written. What prevents one has been logged."""
    for writer in list(_writers):
        writer.finish()


@atexit.register
def _say_errors() -> None:
    """The interpreter has waited for all threads by now."""
    for error in [writer.say_error() for writer in list(_writers)]:
        if error is not None:
            sys.stdout = cast(Any, _FailingOutput(sys.stdout, error))
