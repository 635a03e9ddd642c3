"""Checkpoints and other programs: arrays by name as plain safetensors, ``.npz`` or a state of torch, and back.

No pickle is ever loaded: a ``.npz`` with objects is refused, and so is every ``.pt``, which is a pickle. torch writes
one, and its own restricted reader (``weights_only=True``) loads it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cs_proto.errors import CentralStorageError, CheckpointDamagedError, CheckpointError, InvalidArgumentError
from cs_proto.printable import printable

from . import disk
from .file_format import holds, plain_header
from .graph import find_file, find_unnumbered
from .stored import Stored, reading, reading_plain, regular
from .writing import Block, explained, open_draft, replace

__all__ = ["export_checkpoint", "import_checkpoint"]

# The entries of a strategy, by which only a strategy continues.
_STRATEGY = re.compile(r"\(strategy\)\d*/(seed|steps)")


def export_checkpoint(save_path: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write the arrays of a checkpoint to a file that other programs read.

    The suffix of ``target`` says how: ``.safetensors`` (plain, as ``safetensors.numpy.load_file`` reads it), ``.npz``
    (as ``numpy.load`` reads it) or ``.pt`` (a dict of tensors, as ``torch.load(..., weights_only=True)`` reads it;
    needs torch).

    The names are those of the checkpoint, such as ``model/layers/0/kernel`` and ``optimizer/m/model/…``. The counts of
    runs and the seed are left out, because only a strategy has use for them. Complex numbers become two floats, on a
    last axis of length 2, in ``.safetensors``.

    Args:
        save_path: The checkpoint.
        target: The new file. An existing file is replaced, once the new one is complete.

    Returns:
        The names of the arrays.

    Raises:
        InvalidArgumentError: The suffix is none of the three, or a name cannot stand in an archive (a ValueError).
        CheckpointError: There is no checkpoint (a ValueError).
        CheckpointDamagedError: The checkpoint is damaged. Nothing was written.
        CheckpointSaveError: The file system refuses (an OSError).
        ModuleNotFoundError: ``target`` ends in ``.pt``, and torch is not installed.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = cs.train.Checkpoint(w=cs.Variable([1.0, 2.0])).save(f"{directory}/ckpt")
        ...     _ = cs.train.export_checkpoint(path, f"{directory}/w.npz")
        ...     print(np.load(f"{directory}/w.npz")["w"])
        [1. 2.]
    """
    path, wanted = find_file(save_path), disk.path_of("target", target)
    write = _WRITERS.get(os.path.splitext(wanted)[1])
    if write is None:
        raise InvalidArgumentError(f"{wanted} must end in {', '.join(_WRITERS)}, which says how it is written")
    with reading(path) as stored:
        names = sorted(name for name in stored.keys if not _STRATEGY.fullmatch(name))
        stored.verify()
        needed = sum(stored.facts()[name][2] for name in names)
        with _new_file(wanted, needed) as sink:
            write(stored, names, sink)
    return names


def import_checkpoint(source: str | os.PathLike[str], save_path: str | os.PathLike[str]) -> list[str]:
    """Make a checkpoint of a file of another program, for :meth:`Checkpoint.read`, whose ``renamed`` fits its names to
    your objects.

    Args:
        source: A plain ``.safetensors`` or an ``.npz``. Of a ``.pt`` make a safetensors file first:
            ``safetensors.torch.save_file(torch.load(path, weights_only=True), …)``.
        save_path: The new checkpoint, which may lack the suffix. An existing file is replaced.

    Returns:
        The names of the arrays.

    Raises:
        InvalidArgumentError: ``source`` has another suffix, or ``save_path`` ends in a number (a ValueError).
        CheckpointError: There is no such file, or an array has a dtype that NumPy or checkpoints
            lack (a ValueError).
        CheckpointDamagedError: The file is damaged, or holds objects that only pickle could load.
        CheckpointSaveError: The file system refuses (an OSError).

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import central_storage as cs
        >>> w = cs.Variable(np.zeros(2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     np.savez(f"{directory}/theirs.npz", **{"body.weight": np.ones(2)})
        ...     _ = cs.train.import_checkpoint(f"{directory}/theirs.npz", f"{directory}/ours")
        ...     _ = cs.train.Checkpoint(w=w).read(f"{directory}/ours", renamed={"w": "body.weight"})
        >>> w.numpy().tolist()
        [1.0, 1.0]
    """
    path, wanted = disk.path_of("source", source), find_unnumbered(save_path)
    suffix = os.path.splitext(path)[1]
    if suffix == disk.SUFFIX:
        with reading_plain(path) as stored:
            return _save(wanted, [_of_stored(path, stored, key, *fact) for key, fact in stored.facts().items()])
    if suffix != ".npz":
        raise InvalidArgumentError(
            f"{path} must end in {disk.SUFFIX} or .npz; of a file of torch make one: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
        )
    with _arrays_of_npz(path) as blocks:
        return _save(wanted, blocks)


def _save(path: str, blocks: Sequence[Block]) -> list[str]:
    replace(path, blocks, {"also": {}})
    return sorted(key for block in blocks for key in block.keys)


def _of_stored(path: str, stored: Stored, key: str, dtype: str, shape: tuple[int, ...], _: int) -> Block:
    try:
        rows = partial(stored.unchecked_rows, key) if shape else None
        return Block(np.dtype(dtype), [key], [shape], [lambda: stored.array(key)], rows)
    except TypeError as error:
        raise CheckpointError(
            f"{path}: {printable(key)} has the dtype {printable(dtype):.80}, which NumPy lacks; save it as "
            "float32 in the program that made it"
        ) from error


@contextlib.contextmanager
def _arrays_of_npz(path: str) -> Iterator[list[Block]]:
    """The arrays of an archive, which are read one by one."""

    def read(name: str) -> np.ndarray:
        with _damage_named(path):
            return np.asarray(archive[name])

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(disk.stream_of(stack.enter_context(regular(path))[0]))
        with _damage_named(path):
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no zip archive")
            file.seek(0)
            archive = stack.enter_context(np.load(file, allow_pickle=False))
            names = dict.fromkeys(archive.files)  # an archive may have a name twice
            found = [_of_member(path, archive, name, read) for name in names]
        yield found


def _of_member(path: str, archive: Any, name: str, read: Callable[[str], np.ndarray]) -> Block:
    with archive.zip.open(f"{name}.npy") as member:
        dtype, shape, is_fortran = _header_of_npy(member)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which only pickle could load")
        if not holds(dtype.newbyteorder("=")):
            raise CheckpointError(
                f"{path}: {printable(name)} has the dtype {dtype}, which a checkpoint does not hold; leave it out, or "
                "save it as numbers in the program that made it"
            )
        if math.prod(shape) * dtype.itemsize > archive.zip.getinfo(f"{name}.npy").file_size:
            raise ValueError(f"{name} is shorter than its header says")
    rows = None if is_fortran or not shape else _Rows(path, archive.zip, name, dtype, shape)
    return Block(dtype.newbyteorder("="), [name], [shape], [lambda: read(name)], rows)


def _header_of_npy(member: Any) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(member)
    except MemoryError as error:  # of Python's parser
        raise ValueError("its header is nested too deeply") from error
    return dtype, shape, is_fortran


class _Rows:
    """Reads the rows of an array of an archive, which may be compressed, one after the other."""

    def __init__(
        self, path: str, archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._path = path
        self._archive = archive
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._next = 0

    def __call__(self, first: int, stop: int) -> np.ndarray:
        """The rows from one number, 0 or the last ``stop``, to below another. With the last of them, the archive checks
        its checksum. Raises CheckpointDamagedError."""
        with _damage_named(self._path):
            if first == 0:
                self._member = self._archive.open(f"{self._name}.npy")
                _header_of_npy(self._member)
            assert first in (0, self._next)
            self._next = stop
            data = self._member.read((stop - first) * math.prod(self._shape[1:]) * self._dtype.itemsize)
            return np.frombuffer(data, self._dtype).reshape(stop - first, *self._shape[1:])


@contextlib.contextmanager
def _damage_named(path: str) -> Iterator[None]:
    try:
        yield
    except (CentralStorageError, MemoryError):
        raise
    except Exception as error:  # the libraries let out whatever their parsers meet
        raise CheckpointDamagedError(
            f"{path} is no .npz of arrays, or it is damaged: {printable(str(error))[:200]}; save it again with "
            "numpy.savez, or pass an intact copy"
        ) from error


# --- writing ------------------------------------------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """What libraries write to: a file of the file layer, from its beginning to its end."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._end = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._end = disk.write_at(self._file, view, self._end)
        return view.nbytes


@contextlib.contextmanager
def _new_file(path: str, needed: int) -> Iterator[_Sink]:
    """A file that gets its name when it is complete, and is removed otherwise."""
    directory = os.path.dirname(path) or "."
    with explained(path, directory, needed):
        name, file, mode = open_draft(path)
        try:
            yield _Sink(file)
            if disk.mode_of(file) != mode:
                disk.set_mode(file, mode)
            disk.sync(file)
            disk.replace(name, path)
            disk.sync_directory(directory)
        finally:
            with contextlib.suppress(OSError):
                disk.remove(name)
            disk.close(file)


def _write_safetensors(stored: Stored, names: Sequence[str], sink: _Sink) -> None:
    facts = stored.facts()
    blocks = [Block(np.dtype(facts[name][0]), [name], [facts[name][1]], []) for name in names]
    blocks.sort(key=lambda block: -block.dtype.itemsize)  # so that each array is aligned
    sink.write(plain_header(blocks))
    for block in blocks:
        for data in stored.pieces(block.keys[0]):
            sink.write(data)


def _write_npz(stored: Stored, names: Sequence[str], sink: _Sink) -> None:
    facts = stored.facts()
    for name in names:
        if os.path.isabs(name) or ".." in name.split("/") or not name.isprintable() or "\\" in name:
            raise InvalidArgumentError(
                f"{name!r:.200} cannot be a name in an archive, because programs that unpack it would write elsewhere; "
                "export to .safetensors"
            )
    with zipfile.ZipFile(sink, "w", allowZip64=True) as archive:
        for name in names:
            dtype, shape, _ = facts[name]
            descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder("<"))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                for data in stored.pieces(name):
                    member.write(data)


def _write_torch(stored: Stored, names: Sequence[str], sink: _Sink) -> None:
    import torch  # only here, and only to write

    torch.save({name: torch.from_numpy(stored.array(name)) for name in names}, sink)


_WRITERS: Mapping[str, Callable[[Stored, Sequence[str], _Sink], None]] = {
    disk.SUFFIX: _write_safetensors,
    ".npz": _write_npz,
    ".pt": _write_torch,
}
