"""Checkpoints beside what is none: pipes, devices, loops of links, numbers without end, and hostile files of others."""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.client.checkpoint.test_file_format import resealed

import central_storage as cs
from central_storage.checkpoint.file_format import LARGEST_NUMBER
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, CheckpointManager, import_checkpoint, latest_checkpoint
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointDamagedError, CheckpointError, CheckpointSaveError, InvalidArgumentError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(w=Variable([1.0, 2.0]))


def test_a_number_is_ascii_and_one_of_an_int64(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    last = manager.save(LARGEST_NUMBER)
    assert last is not None
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no number comes after 9223372036854775807, .*; move it"):
            manager.save()
    with pytest.raises(InvalidArgumentError, match="from 0 to 9223372036854775807"):
        manager.save(LARGEST_NUMBER + 1)
    os.rename(last, tmp_path / "ckpt-\u0663.safetensors")  # a digit, but not one of a number that is written
    assert (manager.checkpoints, latest_checkpoint(tmp_path)) == ([], None)


def test_what_cannot_be_deleted_keeps_no_other_one_from_going(
    tmp_path: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    for number in range(1, 7):
        if number == 2:
            (tmp_path / "ckpt-2.safetensors").mkdir()
        else:
            manager.save(number)
    left = ["ckpt-2.safetensors", "ckpt-5.safetensors", "ckpt-6.safetensors"]
    assert sorted(os.listdir(tmp_path)) == left
    assert f"not deleted: [Errno 21] Is a directory: '{tmp_path}/ckpt-2.safetensors'" in caplog.text
    (tmp_path / "ckpt-3.safetensors").mkdir()
    caplog.clear()
    manager.save(7)
    assert len(caplog.messages) == 1


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [_loop, _socket, os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_left_out(
    tmp_path: Path, checkpoint: Checkpoint, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = CheckpointManager(checkpoint, tmp_path, None).save()
    make(tmp_path / "ckpt-2.safetensors")
    manager = CheckpointManager(checkpoint, tmp_path, None)
    assert manager.restore_or_initialize() == whole
    assert list(manager.skipped_checkpoints) == [str(tmp_path / "ckpt-2.safetensors")]
    with pytest.raises(CheckpointError, match="is a directory, but restore takes a file; the newest one in it is"):
        checkpoint.restore(tmp_path)


@pytest.mark.parametrize("path", [b"bytes", 3, None, "a\0b", "a\ud800"])
def test_what_is_no_path_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[Any], object]] = [checkpoint.save, checkpoint.write, checkpoint.read, latest_checkpoint]
    for call in calls if path is None else [*calls, checkpoint.restore]:
        with pytest.raises(InvalidArgumentError, match="must be a path, a str or Path without NUL"):
            call(path)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="file is a file; name a directory"):
        CheckpointManager(checkpoint, tmp_path / "file", None)


# --- limits of the process, and a working directory that is gone ---------------------------------------------------


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """No file can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open("/dev/null", os.O_RDONLY)  # the lowest that is free
    os.close(held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_descriptors_are_no_damage(
    tmp_path: Path, checkpoint: Checkpoint, request: pytest.FixtureRequest
) -> None:
    np.savez(tmp_path / "theirs.npz", w=np.float32([1]))
    path = checkpoint.write(tmp_path / "x")
    request.getfixturevalue("no_descriptors")
    with pytest.raises(OSError, match=r"theirs\.npz") as raised:
        import_checkpoint(tmp_path / "theirs.npz", tmp_path / "ours")
    assert raised.value.errno == errno.EMFILE
    with pytest.raises(OSError, match=r"x\.safetensors") as raised:
        checkpoint.read(path)
    assert raised.value.errno == errno.EMFILE
    with pytest.raises(CheckpointSaveError, match=r"are free; close files, or raise the limit \(ulimit -n\)"):
        checkpoint.write(tmp_path / "y")


def test_a_limit_of_file_sizes_is_named(tmp_path: Path, checkpoint: Checkpoint) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CheckpointSaveError, match=r"File too large; .* raise the limit \(ulimit -f\)"):
            checkpoint.write(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    in_thread = cs.train.CheckpointOptions(enable_async=True)
    for call in (lambda: CheckpointManager(checkpoint, "d", 1), lambda: checkpoint.write("d", in_thread)):
        with pytest.raises(InvalidArgumentError, match=r"d.* is relative, and the working directory is gone; name"):
            call()


# --- names in a file ----------------------------------------------------------------------------------------------


def test_names_in_a_file_steer_no_terminal(tmp_path: Path) -> None:
    escape = "\x1b[2J"
    path = Path(Checkpoint(root={escape: Variable(1.0)}).write(tmp_path / "x"))
    status = Checkpoint(w=Variable(1.0)).read(path).expect_partial()
    assert "no object uses \\x1b[2J" in repr(status)
    path.write_bytes(resealed(path.read_bytes(), lambda index, header: header[escape].update(shape=[-1])))
    with pytest.raises(CheckpointDamagedError, match=r"place of \\x1b\[2J; restore"):
        Checkpoint(w=Variable(1.0)).read(path)
    numbered = tmp_path / "x-1.safetensors"
    numbered.write_bytes(resealed(path.read_bytes(), lambda index, header: index.update(name=escape)))
    with pytest.raises(CheckpointDamagedError, match=r"was saved as \\x1b\[2J, so"):
        Checkpoint(w=Variable(1.0)).read(numbered)


# --- values that an optimizer does not take -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", np.int64(-1)),
        ("iterations", np.int64(1 << 62)),
        ("learning_rate", np.float64("nan")),
        ("learning_rate", np.float64("inf")),
    ],
)
def test_a_value_that_an_optimizer_does_not_take_sets_nothing(tmp_path: Path, name: str, value: Any) -> None:
    w, adam = Variable([1.0]), cs.optimizers.Adam(0.5)
    adam.iterations = 3
    theirs = {"w": np.float32([9]), "adam/iterations": np.int64(7), "adam/learning_rate": np.float64(0.25)}
    np.savez(tmp_path / "theirs.npz", **{**theirs, f"adam/{name}": value})  # type: ignore[arg-type]
    import_checkpoint(tmp_path / "theirs.npz", tmp_path / "ours")
    with pytest.raises(CheckpointError, match=f"ours.safetensors does not fit: adam/{name}: .* Nothing was restored"):
        Checkpoint(w=w, adam=adam).read(tmp_path / "ours")
    assert (float(w.numpy()[0]), int(adam.iterations), float(adam.learning_rate)) == (1.0, 3, 0.5)


# --- archives of others -------------------------------------------------------------------------------------------


def _npy(descr: str = "<f4", shape: str = "(1,)", data: bytes = b"", header: str | None = None) -> bytes:
    text = (header or f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}").encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


MEMBERS = {
    "negative": _npy(shape="(-1,)"),
    "two negative": _npy(shape="(-1, -4)", data=b"x" * 16),
    "true": _npy(shape="(True,)", data=b"x" * 4),
    "more axes than NumPy has": _npy("|u1", str((1,) * 70), b"x"),
    "longer than a number": _npy("|u1", f"(0, {10**40})"),
    "more than the memory": _npy("<f8", f"({10**14}, 2)"),
    "signs": _npy(header="-" * 9000 + "1"),
    "parentheses": _npy(header="(" * 9000),
    "brackets": _npy(header="[" * 150 + "]" * 150),
    "steering": _npy(header="{'\x1b[2J': 1}"),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_a_header_that_lies_is_damage(tmp_path: Path, member: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", MEMBERS[member])
    with pytest.raises(CheckpointDamagedError, match=r"no \.npz of arrays, .*; save it again") as raised:
        import_checkpoint(tmp_path / "x.npz", tmp_path / "ours")
    assert str(raised.value).isprintable()
    assert os.listdir(tmp_path) == ["x.npz"]


def test_an_encrypted_archive_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", _npy(data=b"x" * 4))
    data = bytearray(path.read_bytes())
    for at in (data.index(b"PK\1\2") + 8, 6):
        data[at] |= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="is encrypted"):
        import_checkpoint(path, tmp_path / "ours")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir, _loop])
def test_an_archive_that_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.npz")
    with pytest.raises(CheckpointDamagedError, match=r"x\.npz is damaged: it is"):
        import_checkpoint(tmp_path / "x.npz", tmp_path / "ours")


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_a_typed_error(tmp_path: Path, how: int) -> None:
    path, chance = tmp_path / "x.npz", random.Random(how)
    with zipfile.ZipFile(path, "w", how) as archive:
        for name in "ab":
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, np.arange(40.0).reshape(4, 10))
    whole, found = path.read_bytes(), 0
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 4])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        del data[chance.choice([len(data), chance.randrange(len(data))]) :]
        path.write_bytes(data)
        try:
            with warnings.catch_warnings(action="ignore"):  # of the library: a name that is there twice
                import_checkpoint(path, tmp_path / "ours")
        except CheckpointError:
            found += 1
    assert found > 100
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {*os.listdir(tmp_path)} <= {"x.npz", "ours.safetensors"}
