"""The file of a checkpoint: what damage is found, what a broken disk leaves, and who may write where."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from central_storage.checkpoint import disk, file_format, stored, writing
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, CheckpointManager
from central_storage.variables.moving_averages import ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointDamagedError, CheckpointError, CheckpointSaveError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets
FORMAT_1 = Path(__file__).parents[2] / "data" / "format-1"

# --- damage -------------------------------------------------------------------------------------------------------


def several(n: int) -> Checkpoint:
    """Objects with another value in every array for another ``n``."""
    w = Variable(np.arange(6.0).reshape(2, 3) + 100 * n)
    return Checkpoint(
        w=w,
        v=Variable(np.arange(6.0).reshape(2, 3) - 100 * n - 1),
        more={"z": Variable(np.array([1j * n, n], np.complex64)), "again": w},
        step=Variable(n),
    )


def values(checkpoint: Checkpoint) -> list[bytes]:
    found = vars(checkpoint)
    return [variable.numpy().tobytes() for variable in (found["w"], found["v"], found["more"]["z"], found["step"])]


def undetected(directory: Path, damaged: Iterable[tuple[str, bytes]]) -> list[int]:
    """Of files, given as names and contents: the numbers of those that are restored, or set anything."""
    checkpoint = several(99)
    before, found = (values(checkpoint), checkpoint.save_counter), []
    for number, (name, content) in enumerate(damaged):
        path = directory / name
        with open(path, "r+b" if path.exists() else "wb") as file:  # to empty it first takes ten times as long
            file.write(content)
            file.truncate()
        try:
            checkpoint.restore(path).expect_partial()
        except CheckpointError:
            pass
        else:
            found.append(number)
        if (values(checkpoint), checkpoint.save_counter) != before:
            found.append(number)
            checkpoint = several(99)
    return sorted(set(found))


def saved(directory: Path, count: int) -> list[bytes]:
    """The contents of ckpt-0, ckpt-1, … of different values."""
    contents = []
    for n in range(count):
        checkpoint = several(n)
        checkpoint._count = n - 1
        contents.append(Path(checkpoint.save(directory / "saved" / "ckpt")).read_bytes())
    return contents


def flips(directory: Path) -> Iterator[tuple[str, bytes]]:
    """2,000 flipped bits: all of the length of the header, and of each other byte at least one."""
    (whole,) = saved(directory, 1)
    assert len(whole) < 1900
    rng = random.Random(1)
    bits = [*range(64), *(8 * byte + rng.randrange(8) for byte in range(8, len(whole)))]
    bits += rng.sample(range(64, 8 * len(whole)), 2000 - len(bits))
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        yield "ckpt-0.safetensors", bytes(flipped)


def parts(content: bytes) -> tuple[bytes, bytes]:
    """The header with its length, and the arrays."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[:end], content[end:]


def swaps(directory: Path) -> Iterator[tuple[str, bytes]]:
    """200 times: a file under the number of another, the arrays of another file, one array in the place of another."""
    contents = saved(directory, 10)
    for n in range(10):
        for k in range(10):
            if n != k:
                yield f"ckpt-{k}.safetensors", contents[n]
                yield f"ckpt-{k}.safetensors", parts(contents[k])[0] + parts(contents[n])[1]
        header, arrays = parts(contents[n])
        yield f"ckpt-{n}.safetensors", header + arrays[48:96] + arrays[:48] + arrays[96:]
        other = parts(contents[(n + 1) % 10])[1]
        yield f"ckpt-{n}.safetensors", header + arrays[:48] + other[48:96] + arrays[96:]


def test_2000_flipped_bits_are_found(tmp_path: Path) -> None:
    assert undetected(tmp_path, flips(tmp_path)) == []


def test_500_files_cut_short_are_found(tmp_path: Path) -> None:
    (whole,) = saved(tmp_path, 1)
    ends = random.Random(2).sample(range(len(whole)), 500)
    assert undetected(tmp_path, [("ckpt-0.safetensors", whole[:end]) for end in ends]) == []
    assert undetected(tmp_path, [("ckpt-0.safetensors", whole + b"\0" * more) for more in (1, 8, 4096)]) == []


def test_200_swapped_files_are_found(tmp_path: Path) -> None:
    swapped = list(swaps(tmp_path))
    assert len(swapped) == 200
    assert undetected(tmp_path, swapped) == []


@pytest.mark.parametrize("damage", [flips, swaps])
def test_without_checksums_these_tests_would_notice(
    tmp_path: Path, damage: Callable[[Path], Iterator[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_format, stored):
        monkeypatch.setattr(module, "require_checksum", lambda *_: None)
    assert len(undetected(tmp_path, damage(tmp_path))) >= 100


def test_damage_is_named(tmp_path: Path) -> None:
    checkpoint = several(1)
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    header, arrays = parts(path.read_bytes())
    path.write_bytes(header + arrays[:50] + bytes([arrays[50] ^ 1]) + arrays[51:])
    says = rf"{path} is damaged: the checksum of v is [0-9a-f]{{8}}, but was [0-9a-f]{{8}}.*restore another"
    with pytest.raises(CheckpointDamagedError, match=says):
        checkpoint.restore(path)
    path.write_bytes(header.replace(b'"v"', b'"u"') + arrays)
    with pytest.raises(CheckpointDamagedError, match="the checksum of its header is"):
        checkpoint.restore(path)
    path.write_bytes(header + arrays[:-1])
    with pytest.raises(CheckpointDamagedError, match=r"arrays take \d+ bytes, but the file has \d+"):
        checkpoint.restore(path)


def test_a_file_under_the_number_of_another_is_named(tmp_path: Path) -> None:
    path = several(1).save(tmp_path / "ckpt")
    fresh = several(5)
    os.rename(path, tmp_path / "ckpt-7.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"ckpt-7.* was saved as ckpt-1\.safetensors, so it is another"):
        fresh.restore(tmp_path / "ckpt-7")
    assert values(fresh) == values(several(5))
    os.rename(tmp_path / "ckpt-7.safetensors", tmp_path / "best.safetensors")
    fresh.restore(tmp_path / "best").assert_consumed()
    assert values(fresh) == values(several(1))


def test_what_is_set_has_been_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(several(1).save(tmp_path / "ckpt"))
    verify = stored.Stored.verify

    def damage(opened: stored.Stored) -> None:
        verify(opened)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")

    monkeypatch.setattr(stored.Stored, "verify", damage)
    fresh = several(2)
    with pytest.raises(CheckpointDamagedError, match=r"changed while it was being read, after \d of 4 arrays were set"):
        fresh.restore(path)
    assert int(fresh.step) in (1, 2)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(several(1).save(tmp_path / "ckpt"))
    verify = stored.Stored.verify

    def swap(opened: stored.Stored) -> None:
        verify(opened)
        other = several(3)
        os.replace(other.save(tmp_path / "other" / "ckpt"), path)

    monkeypatch.setattr(stored.Stored, "verify", swap)
    fresh = several(2)
    fresh.restore(path).assert_consumed()
    assert values(fresh) == values(several(1))


# --- the index ----------------------------------------------------------------------------------------------------


def resealed(content: bytes, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """A file whose index and header somebody has changed who knows how checksums are made."""
    length, arrays = int.from_bytes(content[:8], "little"), parts(content)[1]
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    index = json.loads(metadata["central_storage"])
    change(index, header)
    metadata["central_storage"] = json.dumps(index)
    checksum = metadata.get("central_storage_crc32", "")
    text = json.dumps(header).encode()
    if checksum:
        rest = text.replace(checksum.encode(), b"", 1)
        text = text.replace(checksum.encode(), f"{zlib.crc32(rest):08x}".encode(), 1)
    return len(text).to_bytes(8, "little") + text + arrays


INDEX_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "also a list": ({"also": ["a"]}, r"'also' of its index is \['a'\], but must be an object of strings"),
    "also of numbers": ({"also": {"a": 1}}, "'also' of its index"),
    "also elsewhere": ({"also": {"a": "nowhere"}}, "its index names nowhere, but it does not hold that array"),
    "complex a list": ({"complex": []}, "'complex' of its index"),
    "complex of what is none": ({"complex": {"w": "complex64"}}, r"w is float64\[2, 3\] in its header, but complex64"),
    "complex unknown": ({"complex": {"w": "float8"}}, "w is .* float8 in its index"),
    "counter a text": ({"save_counter": "x"}, "'save_counter' of its index is 'x', but must be a whole number"),
    "counter true": ({"save_counter": True}, "'save_counter'"),
    "counter a float": ({"save_counter": 1.0}, "'save_counter'"),
    "counter negative": ({"save_counter": -1}, "'save_counter'"),
    "format a text": ({"format": "2"}, "is '2', which is not a whole number"),
    "format true": ({"format": True}, "is True, which is not a whole number"),
    "further field": ({"positions": {}}, "a field 'positions', which this version does not know"),
}


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_field_of_another_type(tmp_path: Path, form: int, fault: str) -> None:
    path = Path(several(1).save(tmp_path / "ckpt"))
    content = path.read_bytes()
    if form == 1:
        content = as_format_1(content)
    changed, says = INDEX_FAULTS[fault]
    path.write_bytes(resealed(content, lambda index, header: index.update(changed)))
    fresh = several(2)
    with pytest.raises(CheckpointError, match=says):
        fresh.restore(path)
    assert (values(fresh), fresh.save_counter) == (values(several(2)), 0)
    path.write_bytes(resealed(content, lambda index, header: None))
    fresh.restore(path).assert_consumed()


def as_format_1(content: bytes) -> bytes:
    def change(index: dict[str, Any], header: dict[str, Any]) -> None:
        index["format"] = 1
        for name in ("name", "checksums"):
            index.pop(name, None)
        header["__metadata__"].pop("central_storage_crc32", None)

    return resealed(content, change)


def before_all(header: dict[str, Any], name: str, what: object) -> None:
    """Put an empty array before all others, with this dtype and shape."""
    others = dict(header)
    header.clear()
    header["__metadata__"] = others.pop("__metadata__")
    header[name] = {"dtype": what, "shape": what, "data_offsets": [0, 0]}
    header.update(others)


FILE_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "no name": (lambda index, header: index.pop("name"), "its index has no field 'name'"),
    "no checksums": (lambda index, header: index.pop("checksums"), "its index has no field 'checksums'"),
    "no checksum": (lambda index, header: index["checksums"].pop("w"), "its index has no checksum for w"),
    "checksum of nothing": (lambda index, header: index["checksums"].update(q="0" * 8), "its index names q"),
    "format 1": (
        lambda index, header: index.update(format=1),
        "has format 1, but its header belongs to another format",
    ),
    "format 3": (lambda index, header: index.update(format=3), "has format 3, but this version reads formats 1 to 2"),
    "entry a list": (lambda index, header: header.update(w=[]), "does not give the dtype, shape and place of w"),
    "shape true": (lambda index, header: header["w"].update(shape=[True, 6]), "place of w"),
    "shape true beside one of 1": (
        lambda index, header: (header["w"].update(shape=[1, 6]), header["v"].update(shape=[True, 6])),
        "place of v",
    ),
    "shape 1.0 beside one of 1": (
        lambda index, header: (header["w"].update(shape=[1, 6]), header["v"].update(shape=[1.0, 6])),
        "place of v",
    ),
    "dtype a list": (lambda index, header: header["w"].update(dtype=["F64"]), "place of w"),
    "dtype a name of NumPy's": (lambda index, header: header["w"].update(dtype="float64"), "place of w"),
    "dtype a name of NumPy's pairs": (lambda index, header: header["w"].update(dtype="complex64"), "place of w"),
    "first entry of nulls": (lambda index, header: before_all(header, "n", None), "place of n"),
    "offsets a text": (lambda index, header: header["w"].update(data_offsets="01"), "place of w"),
    "offset true": (lambda index, header: header["w"].update(data_offsets=[False, 48]), "place of w"),
    "shape negative": (lambda index, header: header["w"].update(shape=[-2, -3]), "place of w"),
    "shape too large": (
        lambda index, header: header["w"].update(shape=[10**30]),
        "w has 48 bytes, which does not match",
    ),
    "offsets turned": (lambda index, header: header["w"].update(data_offsets=[48, 0]), "place of w"),
    "three offsets": (lambda index, header: header["w"].update(data_offsets=[0, 24, 48]), "place of w"),
    "overlap": (
        lambda index, header: header["v"].update(data_offsets=[0, 48]),
        "begins at byte 0 .* but must begin at 48",
    ),
    "gap": (lambda index, header: header.pop("w"), "v begins at byte 48 of the arrays, but must begin at 0"),
    "no checkpoint": (lambda index, header: header["__metadata__"].pop("central_storage_crc32"), "format 2, but"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_header_that_makes_no_sense(tmp_path: Path, fault: str) -> None:
    path = Path(several(1).save(tmp_path / "ckpt"))
    change, says = FILE_FAULTS[fault]
    path.write_bytes(resealed(path.read_bytes(), change))
    fresh = several(2)
    with pytest.raises(CheckpointError, match=says):
        fresh.restore(path)
    assert values(fresh) == values(several(2))


def test_what_is_no_file_and_no_json(tmp_path: Path) -> None:
    checkpoint, path = several(1), tmp_path / "x.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointDamagedError, match="it is not a regular file"):
        checkpoint.restore(path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointDamagedError, match="a link to a file that does not exist"):
        checkpoint.restore(path)
    path.unlink()
    for text in (b"[" * 100_000, b"\xff\xfe", b"[]", b'{"__metadata__": {"central_storage": "[]"}}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointDamagedError, match=r"not (a )?JSON"):
            checkpoint.restore(path)


def test_a_disk_that_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = several(1)
    path = checkpoint.save(tmp_path / "ckpt")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointDamagedError, match=r"it cannot be read from the disk \(Input/output error\)"):
            checkpoint.restore(path)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError, match="make it readable, or restore another") as caught:
            checkpoint.restore(path)
    assert caught.value.filename == path


# --- files of format 1 --------------------------------------------------------------------------------------------


def test_a_file_of_format_1_still_loads() -> None:
    path = FORMAT_1 / "ckpt-7.safetensors"
    saved = load_file(path)
    dtypes = {key.removeprefix("dtypes/") for key in saved if key.startswith("dtypes/")}
    assert len(dtypes) == 14
    objects = {name: Variable(np.zeros((2, 3), name)) for name in sorted(dtypes)}
    a, b, average = Variable(0.0), Variable(0.0), ExponentialMovingAverage(0.5)
    empty = Variable(np.zeros((0, 4)))
    checkpoint = Checkpoint(dtypes=objects, a=a, deep={"b": b}, average=average, empty=empty)
    checkpoint.restore(path).assert_consumed()
    for name, variable in objects.items():
        assert variable.numpy().tobytes() == saved[f"dtypes/{name}"].tobytes(), name
    shadow = average.average(a)
    assert shadow is not None
    assert (float(a), float(b), float(shadow), checkpoint.save_counter) == (3.5, 3.5, 3.5, 7)


# --- a file of every format ---------------------------------------------------------------------------------------


def test_there_is_a_file_of_every_format() -> None:
    """Made by the version that wrote the format first, and kept for ever."""
    kept = {path.name: sorted(path.glob("*.safetensors")) for path in FORMAT_1.parent.glob("format-*")}
    assert kept.keys() == {f"format-{number}" for number in range(1, file_format.FORMAT + 1)}
    for name, paths in kept.items():
        assert paths
        for path in paths:
            with stored.reading(str(path)) as file:
                assert name == f"format-{file.index['format']}"
                file.verify()


def test_a_file_of_format_2_still_loads() -> None:
    path = FORMAT_1.parent / "format-2" / "ckpt-7.safetensors"
    expected = (np.arange(6).reshape(2, 3) * 3 + 1).astype
    names = ["bool", "complex64", "complex128"]
    names += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    names += [f"float{bits}" for bits in (16, 32, 64)]
    objects = {name: Variable(np.zeros((2, 3), name)) for name in names}
    a, b, average = Variable(0.0), Variable(1.0), ExponentialMovingAverage(0.5)
    deep = {"b": b, "again": a}
    checkpoint = Checkpoint(dtypes=objects, a=a, deep=deep, average=average, empty=Variable(np.zeros((0, 4))))
    checkpoint.restore(path).assert_consumed()
    for name, variable in objects.items():
        assert variable.numpy().tobytes() == expected(name).tobytes(), name
    assert b.numpy().tobytes() == np.float32(-0.0).tobytes()
    shadow = average.average(a)
    assert shadow is not None
    assert (float(a), float(shadow), checkpoint.save_counter) == (3.5, 3.5, 7)


# --- writing ------------------------------------------------------------------------------------------------------


@given(keys=st.lists(st.text(st.characters(codec="utf-8"), max_size=8), unique=True))
@example(keys=[])
@example(keys=["", "\n", "\\n", '"', '\\"', ': \\"00000000\\"', "\x00\x7f", "\u2028", "\U0001f600"])
def test_a_header_is_json_within_json(keys: list[str]) -> None:
    checksums = file_format.checksums_of(range(len(keys)))
    own, behind = {"name": "x", "complex": {}}, {"also": {"a": "b"}, "save_counter": 3}
    index = {"format": file_format.FORMAT, **own, "checksums": dict(zip(keys, checksums, strict=True)), **behind}
    metadata = {"central_storage_crc32": file_format.NO_CHECKSUM, "central_storage": json.dumps(index)}
    made = file_format.header_of_format_2(own, file_format.Names(keys).with_checksums(checksums), behind, "")
    assert made == json.dumps({file_format.METADATA: metadata}).encode()


class Watching(Variable):
    """A variable that does something when it is read, as a save does in the middle of writing."""

    def __init__(self, value: Any, watch: Callable[[], object]) -> None:
        super().__init__(value)
        self.watch = watch

    def current(self) -> np.ndarray:
        self.watch()
        return super().current()


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    directory.mkdir()
    path = directory / "ckpt-1.safetensors"
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "ab" * nbytes)  # an attacker who guesses all
    for planted in (f"{path}.tmp", f"{path}.{'ab' * 8}.draft", str(path)):
        os.symlink(victim, planted)
        checkpoint = several(1)
        with pytest.raises(CheckpointSaveError) if planted.endswith(".draft") else contextlib.nullcontext():
            checkpoint.save(directory / "ckpt")
        assert victim.read_text() == "mine", planted
        os.unlink(planted)
        path.unlink(missing_ok=True)
    checkpoint.restore(several(1).save(directory / "ckpt")).assert_consumed()
    assert os.listdir(directory) == [path.name]


def test_a_link_in_the_place_of_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("mine")
    path = tmp_path / "ckpt-1.safetensors"
    path.symlink_to(target)
    checkpoint = several(1)
    checkpoint.save(tmp_path / "ckpt")
    assert target.read_text() == "mine"
    assert not path.is_symlink()
    checkpoint.restore(path).assert_consumed()


def test_a_draft_is_for_nobody_else_and_the_file_is_as_the_umask_says(tmp_path: Path) -> None:
    modes = []

    def look() -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir())

    for umask, mode in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            path = Checkpoint(w=Watching(1.0, look)).save(tmp_path / "ckpt")
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
        os.unlink(path)
    assert modes == [0o600] * 3


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    abandoned = tmp_path / "other-3.safetensors.00112233445566ff.draft"
    mine = [tmp_path / "notes.draft", tmp_path / "x.safetensors.tmp", tmp_path / "x.safetensors.draft"]
    for path in (abandoned, *mine):
        path.write_text("half")
    seen: list[str] = []

    def save_another() -> None:
        Checkpoint(w=Variable(2.0)).save(tmp_path / "second")
        seen.extend(name for name in os.listdir(tmp_path) if re.search(r"[0-9a-f]{16}\.draft$", name))

    Checkpoint(w=Watching(1.0, save_another)).save(tmp_path / "first")
    assert len(seen) == 1
    assert seen[0].startswith("first-1.safetensors.")
    assert {path.name for path in tmp_path.iterdir()} == {
        "first-1.safetensors",
        "second-1.safetensors",
        *(path.name for path in mine),
    }


def test_a_draft_that_was_taken_for_abandoned_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = writing._lock
    found = []

    def remove_first(file: int) -> bool:
        if not found:
            writing._remove_abandoned(str(tmp_path))
        found.append(lock(file))
        return found[-1]

    monkeypatch.setattr(writing, "_lock", remove_first)
    checkpoint = several(1)
    checkpoint.restore(checkpoint.save(tmp_path / "ckpt")).assert_consumed()
    assert found == [False, True]
    assert os.listdir(tmp_path) == ["ckpt-1.safetensors"]


def test_new_directories_are_synced_in_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = disk.sync_directory
    monkeypatch.setattr(disk, "sync_directory", lambda path: (synced.append(path), sync(path)))
    several(1).save(tmp_path / "a" / "b" / "ckpt")
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    synced.clear()
    monkeypatch.chdir(tmp_path)
    several(1).save("new/ckpt")
    several(1).save("ckpt")
    assert synced == [".", "new", "."]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    checkpoint = several(1)
    path = checkpoint.save(tmp_path / "ckpt")
    again = several(2)

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), "a draft")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointSaveError) as caught:
            again.save(tmp_path / "ckpt")
    remedy = {
        errno.ENOSPC: "make room there",
        errno.EACCES: "save to a directory that this user may write to",
        errno.EIO: "check the disk",
    }
    says = rf"{os.strerror(number)}; the checkpoint needs \d+ bytes, \d+( \(.*\))? are free; {remedy[number]}"
    assert (caught.value.errno, caught.value.filename) == (number, path)
    assert caught.value.needed_nbytes == os.stat(path).st_size
    assert caught.value.free_nbytes is not None
    assert re.search(says, str(caught.value))
    assert again.save_counter == 0
    assert os.listdir(tmp_path) == ["ckpt-1.safetensors"]
    again.restore(path).assert_consumed()
    assert values(again) == values(several(1))


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointSaveError, match="File exists; the checkpoint needs") as caught:
        several(1).save(tmp_path / "file" / "ckpt")
    assert caught.value.filename == str(tmp_path / "file" / "ckpt-1.safetensors")


def test_more_arrays_than_a_header_can_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LONGEST_HEADER", 500)
    says = r"would need a header of \d+ bytes for its 4 arrays, .* at most 500 bytes; save the objects in several"
    with pytest.raises(CheckpointError, match=says):
        several(1).save(tmp_path / "ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_a_number_that_is_taken_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """With hard links, and on a file system without."""
    if number is not None:

        def refuse(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
    taken = 0

    def others_save() -> None:
        nonlocal taken
        if not taken:  # two numbers go while this one writes, so that its number gets a digit more
            taken = 1
            for n in (9, 10):
                (tmp_path / f"ckpt-{n}.safetensors").write_text("theirs")

    w = Watching(1.0, others_save)
    checkpoint = Checkpoint(w=w)
    checkpoint._count = 8
    path = CheckpointManager(checkpoint, tmp_path, None).save()
    assert (path, checkpoint.save_counter) == (str(tmp_path / "ckpt-11.safetensors"), 11)
    assert (tmp_path / "ckpt-9.safetensors").read_text() == (tmp_path / "ckpt-10.safetensors").read_text() == "theirs"
    fresh = Checkpoint(w=Variable(0.0))
    fresh.restore(path).assert_consumed()
    assert (float(fresh.w), fresh.save_counter) == (1.0, 11)
    assert len(os.listdir(tmp_path)) == 3
