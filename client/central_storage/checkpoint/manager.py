"""A directory of checkpoints: which are kept, which are restored, and when one is saved by itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import re
from collections.abc import Callable
from typing import Any

from central_storage.core.public_objects import Closed
from cs_proto.errors import CheckpointDamagedError, CheckpointError, CheckpointSaveError, InvalidArgumentError
from cs_runtime.failpoints import failpoint

from . import disk
from .automatic import Automatic
from .background import CheckpointOptions, is_async
from .checkpoint import Checkpoint
from .disk import SUFFIX, anchored, changed_at
from .failures import Failures, Policy
from .file_format import LARGEST_NUMBER
from .graph import check, strategies_of

__all__ = ["CheckpointManager"]

_log = logging.getLogger("central_storage.train")

# Beside a checkpoint that a manager keeps for good lies an empty file of its name with this at the end.
_KEPT = ".kept"


class CheckpointManager(Closed):
    """Keeps the last checkpoints in a directory, as ``<checkpoint_name>-<n>.safetensors``.

    The directory is the only state: a script that is started again finds what the one before left. Several processes
    may save to one directory: each checkpoint belongs to one of them, and has a number of its own.

    Args:
        checkpoint: The checkpoint to save and restore.
        directory: The directory of the files. If the script changes its working directory later, files of a relative
            one stay where they were; the paths that the manager returns begin with it as it was given.
        max_to_keep: The number of checkpoints to keep, from 1; None: all.
        keep_checkpoint_every_n_hours: A checkpoint that ``max_to_keep`` would delete is kept for good if it was saved
            at least this many hours after the last one that was kept, or after the first checkpoint. An empty file
            ``<checkpoint>.kept`` marks it; delete the mark, and the manager counts and deletes the checkpoint again.
            None: none is kept.
        checkpoint_name: The beginning of the names of the files.
        step_counter: A variable, or ``optimizer.iterations``: the number of steps so far.
        checkpoint_interval: :meth:`save` does nothing until ``step_counter`` has advanced by this many steps since the
            last checkpoint that was saved or restored. None: it always saves.
        init_fn: Called by :meth:`restore_or_initialize` where there is no checkpoint.
        every_steps: The manager saves by itself, in a thread, when so many steps have passed since the last save: calls
            of ``run``, or results of ``run_steps``, of a strategy whose values are saved.
        every_seconds: The same, when so many seconds have passed, after the next step.
        on_sigterm: SIGTERM saves once more and then ends the script as without this manager, with the code 143. It
            saves when the present step is over; if none ends within a second, at once. Nothing is saved before
            :meth:`restore_or_initialize`, the first save or the first step.
        if_save_fails: What follows if the file system refuses, such as a full disk: ``"raise"`` a CheckpointSaveError,
            ``"continue"`` with a warning (:meth:`save` returns None), or ``"stop"`` the script with exit code 6, which
            is ``SystemExit``. It follows in the script's thread: in :meth:`save` or :meth:`sync`, or after the next
            step if the manager saved by itself. Older checkpoints stay in each case.

    Raises:
        InvalidArgumentError: ``checkpoint`` is no Checkpoint, a number is out of its range, ``directory`` is no path,
            ``checkpoint_name`` is not a name of a file, ``step_counter`` is no scalar, ``checkpoint_interval`` comes
            without ``step_counter``, or that is an int, which never advances, ``init_fn`` is no function, or
            ``if_save_fails`` is none of the three (a ValueError).
        ContextError: ``on_sigterm`` outside the main thread (a RuntimeError).

    Examples:
        >>> import tempfile
        >>> import central_storage as cs
        >>> w = cs.Variable(1.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     manager = cs.train.CheckpointManager(cs.train.Checkpoint(w=w), directory, max_to_keep=2)
        ...     manager.restore_or_initialize()
        ...     for _ in range(3):
        ...         path = manager.save()
        ...     len(manager.checkpoints), manager.restore_or_initialize() == path
        (2, True)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        on_sigterm: bool = False,
        if_save_fails: Policy = "raise",
    ) -> None:
        is_number = isinstance(max_to_keep, int) and not isinstance(max_to_keep, bool)
        if max_to_keep is not None and not (is_number and max_to_keep > 0):
            raise InvalidArgumentError(f"max_to_keep must be a number from 1, or None for all, not {max_to_keep!r}")
        is_name = isinstance(checkpoint_name, str) and bool(checkpoint_name)
        if not is_name or os.path.basename(disk.path_of("checkpoint_name", checkpoint_name)) != checkpoint_name:
            raise InvalidArgumentError(
                f"checkpoint_name must be the beginning of a file name, not {checkpoint_name!r}; pass the directory "
                "as directory"
            )
        hours = keep_checkpoint_every_n_hours
        if hours is not None and not (isinstance(hours, int | float) and hours > 0):
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours must be a number of hours above 0, or None, not {hours!r}"
            )
        if init_fn is not None and not callable(init_fn):
            raise InvalidArgumentError(f"init_fn must be a function without arguments, or None, not {init_fn!r:.80}")
        _check_interval(checkpoint_interval, step_counter)
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(f"checkpoint must be a cs.train.Checkpoint, not {checkpoint!r:.80}")
        self._checkpoint = checkpoint
        self._directory = disk.path_of("directory", directory)
        self._anchored = anchored(self._directory)
        if os.path.exists(self._anchored) and not os.path.isdir(self._anchored):
            raise InvalidArgumentError(f"directory {self._directory} is a file; name a directory for the checkpoints")
        self._max_to_keep = max_to_keep
        self._keep_every = None if hours is None else hours * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        # At the last save, and at the last one that is known to be on the disk.
        self._last_step: int | None = None
        self._whole_step: int | None = None
        self._init_fn = init_fn
        self._skipped: dict[str, str] = {}
        self._failures = Failures(if_save_fails)
        checkpoint._let_fail(if_save_fails == "continue")  # noqa: SLF001  (they are one thing)
        # The clock of the files, as that of what is compared with it: the time of the first checkpoint that is left.
        self._begun = min(map(changed_at, self._paths()), default=None)
        is_asked = every_steps is not None or every_seconds is not None or on_sigterm
        self._automatic = Automatic(self, every_steps, every_seconds, on_sigterm=on_sigterm) if is_asked else None

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """The number of steps between checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are there, oldest first, but for those that are kept for good."""
        return list(map(self._as_given, self._deletable()))

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest, if any."""
        return next(reversed(self.checkpoints), None)

    @property
    def skipped_checkpoints(self) -> dict[str, str]:
        """The paths that the last :meth:`restore_or_initialize` left out because they were damaged, newest first, and
        what was found."""
        return {self._as_given(path): found for path, found in self._skipped.items()}

    @property
    def failed_saves(self) -> int:
        """How many saves the file system has refused."""
        return self._failures.count

    @property
    def last_save_error(self) -> CheckpointSaveError | None:
        """The error of the newest save that failed; None if none did."""
        return self._failures.last

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Write a checkpoint, read it back and check it, then delete the oldest beyond ``max_to_keep``.

        With ``enable_async`` a thread does all this after the values are copied, as for :meth:`Checkpoint.save`. If
        another process takes the number of the returned path meanwhile, the checkpoint gets the next one.

        ``skipped_checkpoints`` do not count; each is deleted with the next newer one that is whole.

        Args:
            checkpoint_number: The number of the checkpoint, which replaces the one of that number. None: the next
                number that no process has taken.
            check_interval: False: save also within ``checkpoint_interval`` steps of the last checkpoint.
            options: ``CheckpointOptions(enable_async=True)`` writes in a thread; None writes before it returns.

        Returns:
            The path of the file; None where ``checkpoint_interval`` steps have not passed, or the file system refuses
            and ``if_save_fails`` is ``"continue"``.

        Raises:
            InvalidArgumentError: ``checkpoint_number`` is no whole number from 0 to 2**63 - 1 (a ValueError).
            CheckpointSaveError: The file system refuses, now or in the thread of the save before, or does not return
                what was written (an OSError); names the path, and the bytes that were needed and are free. No older
                checkpoint was deleted, and no draft is left.
            SystemExit: The same, if ``if_save_fails`` is ``"stop"``.
            ContextError: Called in a replica (a RuntimeError).
        """
        in_thread = is_async(options)
        self._hear()
        step = self._step()
        if step is not None and check_interval and self._last_step is not None:
            assert self._interval is not None
            if step - self._last_step < self._interval:
                return None
        number = None if checkpoint_number is None else _whole_number(checkpoint_number)
        self.sync()
        try:
            path = self._save(number, in_thread)
        except CheckpointSaveError as error:
            self._failures.handle(error)
            return None
        self._whole_step, self._last_step = (self._last_step if in_thread else step), step
        return self._as_given(path)

    def _save(self, number: int | None, in_thread: bool) -> str:
        """Save now, whatever the policy. No other save may be under way."""
        if self._automatic is not None:
            self._automatic.saved()
        checkpoint, count = self._checkpoint, self._max_to_keep
        if number is None:
            return checkpoint._save_next(  # noqa: SLF001  (they are one thing)
                self._path_of, self._next_number, in_thread, lambda path: self._finish(path, count)
            )
        left = None if count is None else count - 1  # it stays, however old its number
        return checkpoint._save(  # noqa: SLF001
            self._path_of(number), number, in_thread, lambda path: self._finish(path, left, but=path)
        )

    def _hear(self) -> None:
        """Act on the error of a thread that could not save, if there is one. Does not wait."""
        if self._checkpoint._has_failed:  # noqa: SLF001
            self.sync()

    def sync(self) -> None:
        """Wait until the checkpoint that a thread writes is there, and older ones are deleted; without one it returns
        at once.

        Raises:
            CheckpointSaveError: The thread could not write it, or the disk does not return what was written (an
                OSError). No older checkpoint was deleted. With ``if_save_fails="continue"`` it is a warning.
            SystemExit: The same, if ``if_save_fails`` is ``"stop"``.

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> in_thread = cs.train.CheckpointOptions(enable_async=True)
            >>> checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     manager = cs.train.CheckpointManager(checkpoint, directory, max_to_keep=1)
            ...     path = manager.save(options=in_thread)
            ...     manager.sync()
            ...     manager.checkpoints == [path]
            True
        """
        try:
            self._checkpoint.sync()
        except CheckpointSaveError as error:
            self._last_step = self._whole_step
            self._failures.handle(error)

    def _save_in_thread(self) -> None:
        """Begin a save, as the manager does by itself."""
        self.save(check_interval=False, options=CheckpointOptions(enable_async=True))

    def _save_now(self) -> None:
        """Save, as the manager does at SIGTERM: also if the save before has failed."""
        with contextlib.suppress(CheckpointSaveError):  # its thread has logged it
            self._checkpoint.sync()
        self._save(None, in_thread=False)

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that is whole; where there is none at all, call ``init_fn``.

        Damaged checkpoints are left out; a warning names each, and so does ``skipped_checkpoints``.

        Returns:
            The path of the checkpoint that was restored; None where there was none.

        Raises:
            CheckpointDamagedError: All checkpoints are damaged.
            CheckpointError: Something else is wrong with the newest that is whole, as for :meth:`Checkpoint.restore`.
        """
        self._skipped = {}
        while left := [path for path in self._paths() if path not in self._skipped]:
            newest = left[-1]
            try:
                self._checkpoint.restore(newest)
                self._whole_step = self._last_step = self._step()
                self._begin()
                return self._as_given(newest)
            except CheckpointDamagedError as error:
                _log.warning("skipped a checkpoint: %s", error)
                self._skipped[newest] = str(error)
            except CheckpointError:
                if os.path.lexists(newest):
                    raise
                # Another manager has deleted it, since it has saved newer ones.
        if self._skipped:
            raise CheckpointDamagedError(
                f"every checkpoint in {self._directory} is damaged: {'; '.join(self._skipped.values())}. Nothing was "
                "restored. To start from the beginning, move them elsewhere"
            )
        if self._init_fn is not None:
            self._init_fn()
        self._begin()
        return None

    def _begin(self) -> None:
        if self._automatic is not None:
            self._automatic.ready()

    def _strategies(self) -> list[Any]:
        return strategies_of(self._checkpoint._objects())  # noqa: SLF001

    def _finish(self, path: str, count: int | None, but: str = "") -> None:
        """A checkpoint has been written: read it back before older ones are deleted."""
        try:
            check(path)
        except CheckpointDamagedError as error:
            self._skipped[path] = str(error)
            text = f"the disk does not return what was written ({error}); check the disk, and save to another one"
            raise CheckpointSaveError(errno.EIO, text, path) from error
        except CheckpointError:  # another manager has deleted it, since it has saved newer ones
            pass
        except OSError as error:
            text = f"the new checkpoint cannot be read back ({error.strerror}); check the disk"
            raise CheckpointSaveError(error.errno, text, path) from error
        failpoint("save.checked")
        self._skipped.pop(path, None)
        self._delete_beyond(count, but)

    def _delete_beyond(self, count: int | None, but: str = "") -> None:
        """Delete the oldest until ``count`` that are whole are left, ``but`` aside. A disk that refuses is no error:
        the new checkpoint is saved, and the next save tries again."""
        try:
            found = [path for path in self._deletable() if path != but]
            whole = [path for path in found if path not in self._skipped]
            if count is None or len(whole) <= count:
                return
            last = whole[len(whole) - count - 1]
            failures = []
            for path in found[: found.index(last) + 1]:
                if path in self._skipped or not self._keeps(path):
                    failpoint("save.delete")
                    try:
                        disk.remove(path)
                    except FileNotFoundError:  # another manager has deleted it
                        pass
                    except OSError as error:  # a directory of that name, perhaps: the others can go
                        failures.append(error)
            if failures:
                raise failures[0]
        except OSError as error:
            _log.warning("older checkpoints in %s were not deleted: %s", self._directory, error)

    def _keeps(self, path: str) -> bool:
        """Whether a checkpoint that is to be deleted is kept for good; if so, it is marked."""
        if self._keep_every is None:
            return False
        at = changed_at(path)
        if self._begun is None:
            self._begun = at
        kept = [changed_at(each) for each in self._paths() if os.path.lexists(each + _KEPT)]
        if at - max(kept, default=self._begun) < self._keep_every:
            return False
        with contextlib.suppress(FileExistsError):  # another manager was faster
            disk.create_empty(path + _KEPT)
        disk.sync_directory(self._anchored)  # otherwise a power failure may lose the mark, but not the deletion
        return True

    def _step(self) -> int | None:
        return None if self._interval is None else int(self._step_counter)

    def _next_number(self) -> int:
        numbers = (number for number, _ in self._found())
        last = max([self._checkpoint._count, *numbers])  # noqa: SLF001
        if last >= LARGEST_NUMBER:
            raise CheckpointError(
                f"no number comes after {last}, which the last checkpoint in {self._directory} has; move it "
                "elsewhere, or save to another directory"
            )
        return last + 1

    def _deletable(self) -> list[str]:
        """The paths of those that are not kept for good, oldest first."""
        return [path for path in self._paths() if not os.path.lexists(path + _KEPT)]

    def _paths(self) -> list[str]:
        return [os.path.join(self._anchored, name) for _, name in self._found()]

    def _as_given(self, path: str) -> str:
        """The path of a checkpoint below the directory as the user has named it, as TensorFlow returns it."""
        return os.path.join(self._directory, os.path.basename(path))

    def _path_of(self, number: int) -> str:
        return os.path.join(self._anchored, f"{self._name}-{number}{SUFFIX}")

    def _found(self) -> list[tuple[int, str]]:
        pattern = re.compile(rf"{re.escape(self._name)}-([0-9]+){re.escape(SUFFIX)}")
        return sorted(
            (int(match[1]), name) for name in disk.names(self._anchored) if (match := pattern.fullmatch(name))
        )

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._directory}>"


def _check_interval(interval: Any, step_counter: Any) -> None:
    shape = getattr(step_counter, "shape", ())
    is_number = hasattr(step_counter, "__int__") and shape == () and not isinstance(step_counter, complex)
    if step_counter is not None and not is_number:
        found = f"has the shape {tuple(shape)}" if shape else f"is {step_counter!r:.80}"
        raise InvalidArgumentError(
            "step_counter must be a variable that holds one number (shape ()), or optimizer.iterations; the one given "
            + found
        )
    if interval is None:
        return
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise InvalidArgumentError(f"checkpoint_interval must be a number of steps from 1, or None, not {interval!r}")
    if step_counter is None or type(step_counter) is int:
        raise InvalidArgumentError(
            "checkpoint_interval needs step_counter, a variable or optimizer.iterations, whose value says how many "
            f"steps have passed; it is {step_counter!r}"
        )


def _whole_number(value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= LARGEST_NUMBER:
        raise InvalidArgumentError(
            f"checkpoint_number must be a whole number from 0 to {LARGEST_NUMBER}, not {value!r:.80}"
        )
    return number
