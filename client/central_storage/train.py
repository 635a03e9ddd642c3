"""Checkpoints and moving averages of a training."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from cs_proto.errors import InvalidArgumentError

from .checkpoint import disk
from .checkpoint.background import CheckpointOptions
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.disk import SUFFIX
from .checkpoint.interchange import export_checkpoint, import_checkpoint
from .checkpoint.manager import CheckpointManager
from .diagnostics.tensorflow_names import attributes
from .variables.moving_averages import ExponentialMovingAverage

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "ExponentialMovingAverage",
    "export_checkpoint",
    "import_checkpoint",
    "latest_checkpoint",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.train")


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
    directory = disk.path_of("checkpoint_dir", checkpoint_dir)
    newest: dict[str, tuple[int, str]] = {}
    for name in disk.names(directory):
        if match := re.fullmatch(rf"(.+)-([0-9]+){re.escape(SUFFIX)}", name):
            path = os.path.join(directory, name)
            newest[match[1]] = max(newest.get(match[1], (-1, "")), (int(match[2]), path))
    return max((path for _, path in newest.values()), key=disk.changed_at, default=None)
