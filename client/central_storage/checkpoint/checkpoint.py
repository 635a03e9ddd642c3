"""The objects of a checkpoint under their names, and how they are saved and restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from central_storage.core.tensors.tensor import as_tensor
from cs_proto.errors import InvalidArgumentError

from .background import CheckpointOptions, Writer, is_async
from .disk import SUFFIX, anchored, path_of
from .graph import (
    Walked,
    copies,
    find_file,
    find_unnumbered,
    has_parts,
    parts,
    require_trackable,
    restore,
    save,
    save_next,
)
from .status import Status
from .writing import add, next_of, replace

__all__ = ["Checkpoint"]


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
        # The number of the checkpoint that a thread writes; 0: none is being written.
        self._begun = 0
        self._writer = Writer()
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
        return as_tensor(np.int64(max(self._count, self._begun)))

    def save(self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None) -> str:
        """Write ``<file_prefix>-<n>.safetensors``, with n counting from 1.

        The file is there as a whole or not at all, whenever the process is killed. It replaces a file of that name, or
        a symbolic link, whose target stays. Directories are made.

        With ``enable_async`` the values are copied, and a thread writes the file while the training goes on. The next
        save, :meth:`sync`, a restore and the end of the script wait for it. An error of the thread is logged, and the
        next of these calls raises it.

        Args:
            file_prefix: The beginning of the path.
            options: ``CheckpointOptions(enable_async=True)`` writes in a thread; None writes before it returns.

        Returns:
            The path, for :meth:`restore`.

        Raises:
            InvalidArgumentError: ``file_prefix`` is no path (a ValueError).
            CheckpointError: Two objects have one name, such as the items 1 and "1" of a dict (a ValueError).
            CheckpointSaveError: The file system refuses, now or in the thread of the save before (an OSError); names
                the path, and the bytes that were needed and are free. An existing file stays, and no draft is left.
            ContextError: Called in a replica (a RuntimeError).
        """
        in_thread, prefix = is_async(options), path_of("file_prefix", file_prefix)
        self.sync()
        return self._save(f"{prefix}-{self._count + 1}{SUFFIX}", self._count + 1, in_thread)

    def sync(self) -> None:
        """Wait until the file is there that a thread writes; without one it returns at once.

        Raises:
            CheckpointSaveError: The thread could not write it (an OSError).

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> in_thread = cs.train.CheckpointOptions(enable_async=True)
            >>> checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     path = checkpoint.save(f"{directory}/ckpt", options=in_thread)
            ...     checkpoint.sync()
            ...     cs.train.latest_checkpoint(directory) == path
            True
        """
        self._begun = 0
        self._writer.wait()

    @property
    def _has_failed(self) -> bool:
        """Whether a thread could not write a file, and nobody has heard of it yet."""
        return self._writer.has_failed

    def write(self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None) -> str:
        """Write ``<file_prefix>.safetensors``, without a number and without counting it.

        Args:
            file_prefix: The path, which may lack the suffix. A file of that name is replaced.
            options: As for :meth:`save`.

        Returns:
            The path, for :meth:`read`.

        Raises:
            InvalidArgumentError: The path ends in ``-`` and a number, as those of :meth:`save` do (a ValueError).
            CheckpointSaveError: As for :meth:`save` (an OSError).
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
        in_thread = is_async(options)
        self.sync()
        if in_thread:
            self._writer.start(path, partial(replace, anchored(path), *copies(self._objects(), {})))
        else:
            save(path, self._objects(), {})
        return path

    def read(
        self,
        save_path: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        renamed: Mapping[str, str] | None = None,
    ) -> Status:
        """Set the objects to the content of a file, as :meth:`restore` does, and leave ``save_counter`` as it is.

        Args:
            save_path: A path that :meth:`write` or :meth:`save` returned.
            options: Accepted; a read is never in a thread.
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
        self.sync()
        return restore(find_file(save_path), self._objects(), strict=False, renamed=renamed)[0]

    def restore(
        self,
        save_path: str | os.PathLike[str] | None,
        options: CheckpointOptions | None = None,
        *,
        renamed: Mapping[str, str] | None = None,
    ) -> Status:
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
            options: Accepted; a restore is never in a thread.
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
        self.sync()
        status, index = restore(find_file(save_path), self._objects(), strict=False, renamed=renamed)
        self._count = index.get("save_counter", 0)
        return status

    def _save(self, path: str, count: int, in_thread: bool, then: Callable[[str], object] = str) -> str:
        """Save under this number. ``then`` is called with the path when the file is there, in the thread if one writes
        it."""
        more = {"save_counter": count}
        if in_thread:
            write = partial(replace, anchored(path), *copies(self._objects(), more))
            self._start(path, count, lambda: (write(), (path, count))[1], then)
        else:
            save(path, self._objects(), more)
            self._saved(path, count, then)
        return path

    def _save_next(
        self,
        path_of: Callable[[int], str],
        next_number: Callable[[], int],
        in_thread: bool,
        then: Callable[[str], object],
    ) -> str:
        """As :meth:`_save`, under the next number that no process has taken. While a thread writes, another process may
        still take the number of the path that is returned."""
        if in_thread:
            blocks, index = copies(self._objects(), {})
            number = next_of(path_of, next_number, blocks)
            self._start(path_of(number), number, partial(add, path_of, next_number, blocks, index), then)
            return path_of(number)
        path, count = save_next(path_of, next_number, self._objects(), {})
        self._saved(path, count, then)
        return path

    def _start(
        self, path: str, count: int, write: Callable[[], tuple[str, int]], then: Callable[[str], object]
    ) -> None:
        self._writer.start(path, lambda: self._saved(*write(), then))
        self._begun = count

    def _saved(self, path: str, count: int, then: Callable[[str], object]) -> None:
        self._count = count
        then(path)

    def _let_fail(self, may_fail: bool) -> None:
        """Say whether the script may end well although the last save in a thread failed."""
        self._writer.may_fail = may_fail

    def _objects(self) -> dict[str, Any]:
        # An attribute that was set later is one of the objects, too.
        return self._parts() | {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _parts(self) -> dict[str, Any]:
        return {} if self._root is None else dict(parts(self._root))

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects())}>"
