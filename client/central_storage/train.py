"""Checkpoints and moving averages of a training."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cs_proto.errors import CheckpointDamagedError, CheckpointError, CheckpointSaveError, InvalidArgumentError
from cs_runtime.failpoints import failpoint

from .checkpoint import disk
from .checkpoint.failures import Failures, Policy
from .checkpoint.file_format import SUFFIX
from .checkpoint.graph import (
    Walked,
    find_file,
    find_unnumbered,
    has_parts,
    parts,
    require_trackable,
    restore,
    save,
    save_next,
)
from .checkpoint.interchange import export_checkpoint, import_checkpoint
from .checkpoint.status import Status
from .core.public_objects import Closed
from .core.tensors.tensor import as_tensor
from .diagnostics.tensorflow_names import attributes
from .variables.moving_averages import ExponentialMovingAverage

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "ExponentialMovingAverage",
    "export_checkpoint",
    "import_checkpoint",
    "latest_checkpoint",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.train")

_log = logging.getLogger("central_storage.train")

# Beside a checkpoint that a manager keeps for good lies an empty file of its name with this at the end.
_KEPT = ".kept"


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str], latest_filename: None = None) -> str | None:
    """The newest checkpoint in a directory, which :meth:`Checkpoint.save` or a :class:`CheckpointManager` has written.

    Of the files that begin alike the one with the highest number is the newest. Where files begin differently, the time
    of their last change decides.

    Args:
        checkpoint_dir: The directory. It need not exist.
        latest_filename: None. TensorFlow keeps a file of this name; here the directory is the only state.

    Returns:
        The path, for :meth:`Checkpoint.restore`; None where there is no checkpoint.

    Raises:
        InvalidArgumentError: ``latest_filename`` is not None (a ValueError).
        OSError: The file system refuses.

    Examples:
        >>> import tempfile
        >>> import central_storage as cs
        >>> checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = [checkpoint.save(f"{directory}/ckpt") for _ in range(2)]
        ...     cs.train.latest_checkpoint(directory) == paths[-1]
        True
    """
    if latest_filename is not None:
        raise InvalidArgumentError(
            f"latest_filename must be None, not {latest_filename!r}: no file lists the checkpoints of a directory"
        )
    directory = os.fspath(checkpoint_dir)
    newest: dict[str, tuple[int, str]] = {}
    for name in disk.names(directory):
        if match := re.fullmatch(rf"(.+)-(\d+){re.escape(SUFFIX)}", name):
            path = os.path.join(directory, name)
            newest[match[1]] = max(newest.get(match[1], (-1, "")), (int(match[2]), path))
    return max((path for _, path in newest.values()), key=_changed, default=None)


class Checkpoint(Walked):
    """Saves and restores objects by the names under which they are given; each is an attribute.

    An object is a variable, an optimizer (its slots, iterations and learning rate, not a schedule), a metric, a moving
    average, a distributed data set or an iterator of one (how far it has been used, and the seeds of its shuffles), or
    a list, tuple, dict or object of a class of yours that has such as items or attributes, at any depth.

    A variable that is reached in two ways is saved once. For each strategy that a variable or optimizer belongs to, the
    number of runs is saved, from which the random numbers of the next run follow. The saved value is the central one,
    so a checkpoint restores into a strategy with other devices or another number of replicas, or into variables outside
    every strategy.

    Args:
        root: An object whose parts are saved under their own names, beside ``objects``.
        **objects: The objects by name.

    Raises:
        InvalidArgumentError: An object can hold no variables, its name is that of a method, or ``root`` is a variable
            or has a part of that name (a ValueError).

    Examples:
        >>> import tempfile
        >>> import central_storage as cs
        >>> w = cs.Variable([1.0, 2.0])
        >>> checkpoint = cs.train.Checkpoint(w=w)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = checkpoint.save(f"{directory}/ckpt")
        ...     _ = w.assign([0.0, 0.0])
        ...     _ = checkpoint.restore(path).assert_consumed()
        >>> w.numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        self._root = root
        if root is not None:
            require_trackable("root", root)
            if not has_parts(root):
                raise InvalidArgumentError(f"root is a {type(root).__name__}, which has no parts; give it a name: w=…")
            if both := self._parts().keys() & objects:
                raise InvalidArgumentError(f"root has a part {min(both)!r} of its own; give the object another name")
        for name, value in objects.items():
            require_trackable(name, value)
        taken = [name for name in objects if hasattr(type(self), name)]
        if taken:
            raise InvalidArgumentError(f"{taken[0]!r} is a method of a Checkpoint; give the object another name")
        self._count = 0
        vars(self).update(objects)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give it one more object."""
        if not name.startswith("_"):
            if hasattr(type(self), name):
                raise AttributeError(f"{name!r} is a method of a Checkpoint; give the object another name")
            try:
                require_trackable(name, value)
            except InvalidArgumentError as error:
                raise AttributeError(f"Checkpoint has no attribute {name!r}, and {error}") from None
        object.__setattr__(self, name, value)

    @property
    def save_counter(self) -> Any:
        """How many checkpoints :meth:`save` has made by now, also before those that were restored; int64."""
        return as_tensor(np.int64(self._count))

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write ``<file_prefix>-<n>.safetensors``, with n counting from 1.

        The file is there as a whole or not at all, whenever the process is killed. It replaces a file of that name, or
        a symbolic link, whose target stays. Directories are made.

        Args:
            file_prefix: The beginning of the path.

        Returns:
            The path, for :meth:`restore`.

        Raises:
            CheckpointSaveError: The file system refuses (an OSError); names the path, and the bytes that were needed
                and are free. An existing file stays, and no draft is left.
            ContextError: Called in a replica (a RuntimeError).
        """
        return self._save(f"{os.fspath(file_prefix)}-{self._count + 1}{SUFFIX}", self._count + 1)

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write ``<file_prefix>.safetensors``, without a number and without counting it.

        Args:
            file_prefix: The path, which may lack the suffix. A file of that name is replaced.

        Returns:
            The path, for :meth:`read`.

        Raises:
            InvalidArgumentError: The path ends in ``-`` and a number, as those of :meth:`save` do (a ValueError).
            CheckpointSaveError: The file system refuses (an OSError); names the path, and the bytes that were needed
                and are free. An existing file stays, and no draft is left.
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     checkpoint.read(checkpoint.write(f"{directory}/best")).matched
            1
        """
        path = find_unnumbered(file_prefix)
        save(path, self._objects(), {})
        return path

    def read(self, save_path: str | os.PathLike[str], *, renamed: Mapping[str, str] | None = None) -> Status:
        """Set the objects to the content of a file, as :meth:`restore` does, and leave ``save_counter`` as it is.

        Args:
            save_path: A path that :meth:`write` or :meth:`save` returned.
            renamed: As for :meth:`restore`.

        Raises:
            CheckpointError: As for :meth:`restore` (a ValueError).
            CheckpointDamagedError: The file is damaged, incomplete or renamed.
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> w = cs.Variable(1.0)
            >>> checkpoint = cs.train.Checkpoint(w=w)
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     path = checkpoint.write(f"{directory}/best")
            ...     _ = w.assign(2.0)
            ...     _ = checkpoint.read(path).assert_consumed()
            >>> float(w.numpy())
            1.0
        """
        return restore(find_file(save_path), self._objects(), strict=False, renamed=renamed)[0]

    def restore(self, save_path: str | os.PathLike[str] | None, *, renamed: Mapping[str, str] | None = None) -> Status:
        """Set the objects to the content of the file ``save_path``.

        Call a method of the result to say whether differences are an error: ``assert_consumed()``,
        ``assert_existing_objects_matched()``, ``expect_partial()``.

        Slots of optimizers and moving averages are made where they are missing; variables are not. The next iteration
        of a data set, or the next element of an iterator, continues at the saved position; elements before it are read
        again and dropped. A warning is logged if the strategy has another seed than the saved one. Everything is
        checked before anything is set, and every byte of the file is checked against its checksum. If you rename a
        file, do not give it a name that ends in a number: that is the name of another checkpoint.

        Args:
            save_path: A path that :meth:`save` returned; None does nothing.
            renamed: Names that objects have here, each with its name in the file: ``{"model/body": "encoder"}``. What
                lies below a name is renamed, too, and so are the slots and averages of its variables. The file stays.

        Raises:
            CheckpointError: There is no checkpoint, an array has another shape or dtype, a shuffle has another seed,
                ``run_steps`` takes elements from an iterator, or a name of ``renamed`` is not in the file (a
                ValueError).
            CheckpointDamagedError: The file is damaged, incomplete or renamed.
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> body = cs.Variable(1.0)
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     saved = cs.train.Checkpoint(encoder=cs.Variable(5.0), head=cs.Variable(2.0))
            ...     path = saved.save(f"{directory}/ckpt")
            ...     status = cs.train.Checkpoint(body=body).restore(path, renamed={"body": "encoder"})
            >>> status.assert_existing_objects_matched().unused, float(body.numpy())
            (('head',), 5.0)
        """
        if save_path is None:
            return Status(None, (), ())
        status, index = restore(find_file(save_path), self._objects(), strict=False, renamed=renamed)
        self._count = index.get("save_counter", 0)
        return status

    def _save(self, path: str, count: int) -> str:
        save(path, self._objects(), {"save_counter": count})
        self._count = count
        return path

    def _save_next(self, path_of: Callable[[int], str], next_number: Callable[[], int]) -> str:
        path, self._count = save_next(path_of, next_number, self._objects(), {})
        return path

    def _objects(self) -> dict[str, Any]:
        # An attribute that was set later is one of the objects, too.
        return self._parts() | {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _parts(self) -> dict[str, Any]:
        return {} if self._root is None else dict(parts(self._root))

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects())}>"


class CheckpointManager(Closed):
    """Keeps the last checkpoints in a directory, as ``<checkpoint_name>-<n>.safetensors``.

    The directory is the only state: a script that is started again finds what the one before left. Several processes
    may save to one directory: each checkpoint belongs to one of them, and has a number of its own.

    Args:
        checkpoint: The checkpoint to save and restore.
        directory: The directory of the files.
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
        if_save_fails: What :meth:`save` does if the file system refuses, such as a full disk: ``"raise"`` a
            CheckpointSaveError, ``"continue"`` with a warning and return None, or ``"stop"`` the script with exit code
            6, which is ``SystemExit``. Older checkpoints stay in each case.

    Raises:
        InvalidArgumentError: A number is out of its range, ``checkpoint_name`` is not a name of a file,
            ``checkpoint_interval`` comes without ``step_counter``, or that is an int, which never advances, or
            ``if_save_fails`` is none of the three (a ValueError).

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
        if_save_fails: Policy = "raise",
    ) -> None:
        is_number = isinstance(max_to_keep, int) and not isinstance(max_to_keep, bool)
        if max_to_keep is not None and not (is_number and max_to_keep > 0):
            raise InvalidArgumentError(f"max_to_keep must be a number from 1, or None for all, not {max_to_keep!r}")
        if not checkpoint_name or os.path.basename(checkpoint_name) != checkpoint_name:
            raise InvalidArgumentError(
                f"checkpoint_name must be the beginning of a file name, not {checkpoint_name!r}; pass the directory "
                "as directory"
            )
        hours = keep_checkpoint_every_n_hours
        if hours is not None and not (isinstance(hours, int | float) and hours > 0):
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours must be a number of hours above 0, or None, not {hours!r}"
            )
        _check_interval(checkpoint_interval, step_counter)
        self._checkpoint = checkpoint
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._keep_every = None if hours is None else hours * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._last_step: int | None = None
        self._init_fn = init_fn
        self._skipped: dict[str, str] = {}
        self._failures = Failures(if_save_fails)
        # The clock of the files, as that of what is compared with it: the time of the first checkpoint that is left.
        self._begun = min(map(_changed, self._paths()), default=None)

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
        return [path for path in self._paths() if not os.path.lexists(path + _KEPT)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest, if any."""
        return next(reversed(self.checkpoints), None)

    @property
    def skipped_checkpoints(self) -> dict[str, str]:
        """The paths that the last :meth:`restore_or_initialize` left out because they were damaged, newest first, and
        what was found."""
        return dict(self._skipped)

    @property
    def failed_saves(self) -> int:
        """How many calls of :meth:`save` the file system has refused."""
        return self._failures.count

    @property
    def last_save_error(self) -> CheckpointSaveError | None:
        """The error of the newest save that failed; None if none did."""
        return self._failures.last

    def save(self, checkpoint_number: int | None = None, check_interval: bool = True) -> str | None:
        """Write a checkpoint, then delete the oldest beyond ``max_to_keep``.

        ``skipped_checkpoints`` do not count; each is deleted with the next newer one that is whole.

        Args:
            checkpoint_number: The number of the checkpoint, which replaces the one of that number. None: the next
                number that no process has taken.
            check_interval: False: save also within ``checkpoint_interval`` steps of the last checkpoint.

        Returns:
            The path of the file; None where ``checkpoint_interval`` steps have not passed, or the file system refuses
            and ``if_save_fails`` is ``"continue"``.

        Raises:
            InvalidArgumentError: ``checkpoint_number`` is no whole number from 0 (a ValueError).
            CheckpointSaveError: The file system refuses (an OSError); names the path, and the bytes that were needed
                and are free. No draft is left.
            SystemExit: The file system refuses, and ``if_save_fails`` is ``"stop"``.
            ContextError: Called in a replica (a RuntimeError).
        """
        step = self._step()
        if step is not None and check_interval and self._last_step is not None:
            assert self._interval is not None
            if step - self._last_step < self._interval:
                return None
        try:
            path = self._save(checkpoint_number)
        except CheckpointSaveError as error:
            self._failures.handle(error)
            return None
        self._last_step = step
        return path

    def _save(self, checkpoint_number: int | None) -> str:
        if checkpoint_number is None:
            path = self._checkpoint._save_next(self._path_of, self._next_number)  # noqa: SLF001  (they are one thing)
            self._delete_beyond(self._max_to_keep)
            return path
        number = _whole_number(checkpoint_number)
        path = self._checkpoint._save(self._path_of(number), number)  # noqa: SLF001
        self._skipped.pop(path, None)
        # It stays, however old its number.
        self._delete_beyond(None if self._max_to_keep is None else self._max_to_keep - 1, but=path)
        return path

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
                self._last_step = self._step()
                return newest
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
        return None

    def _delete_beyond(self, count: int | None, but: str = "") -> None:
        """Delete the oldest until ``count`` that are whole are left, ``but`` aside. A disk that refuses is no error:
        the new checkpoint is saved, and the next save tries again."""
        try:
            found = [path for path in self.checkpoints if path != but]
            whole = [path for path in found if path not in self._skipped]
            if count is None or len(whole) <= count:
                return
            last = whole[len(whole) - count - 1]
            for path in found[: found.index(last) + 1]:
                with contextlib.suppress(FileNotFoundError):  # another manager has deleted it
                    if path in self._skipped or not self._keeps(path):
                        failpoint("save.delete")
                        disk.remove(path)
        except OSError as error:
            _log.warning("older checkpoints in %s were not deleted: %s", self._directory, error)

    def _keeps(self, path: str) -> bool:
        """Whether a checkpoint that is to be deleted is kept for good; if so, it is marked."""
        if self._keep_every is None:
            return False
        changed = _changed(path)
        if self._begun is None:
            self._begun = changed
        kept = [_changed(each) for each in self._paths() if os.path.lexists(each + _KEPT)]
        if changed - max(kept, default=self._begun) < self._keep_every:
            return False
        with contextlib.suppress(FileExistsError):  # another manager was faster
            disk.create_empty(path + _KEPT)
        disk.sync_directory(self._directory)  # otherwise a power failure may lose the mark, but not the deletion
        return True

    def _step(self) -> int | None:
        return None if self._interval is None else int(self._step_counter)

    def _next_number(self) -> int:
        return max([int(self._checkpoint.save_counter), *(number for number, _ in self._found())]) + 1

    def _paths(self) -> list[str]:
        return [os.path.join(self._directory, name) for _, name in self._found()]

    def _path_of(self, number: int) -> str:
        return os.path.join(self._directory, f"{self._name}-{number}{SUFFIX}")

    def _found(self) -> list[tuple[int, str]]:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+){re.escape(SUFFIX)}")
        return sorted(
            (int(match[1]), name) for name in disk.names(self._directory) if (match := pattern.fullmatch(name))
        )

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._directory}>"


def _changed(path: str) -> float:
    """The time of the last change of a file, in seconds; of one that is gone 0."""
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _check_interval(interval: Any, step_counter: Any) -> None:
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
    if number < 0:
        raise InvalidArgumentError(f"checkpoint_number must be a whole number from 0, not {value!r}")
    return number
