"""Checkpoints for other programs, and files of theirs: safetensors and ``.npz``. torch is in ``interop/torch``."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from central_storage.checkpoint import disk, interchange
from central_storage.checkpoint.stored import reading
from central_storage.checkpoint.writing import Block
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, export_checkpoint, import_checkpoint
from central_storage.variables.variable import Variable
from cs_proto.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointSaveError,
    InvalidArgumentError,
)

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets
FORMATS = Path(__file__).parents[2] / "data"
DTYPES = ["bool", "complex64", "complex128", "float16", "float32", "float64"]
DTYPES += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


def arrays(n: int) -> dict[str, np.ndarray]:
    """Of each dtype one, of no axis, of none of the values, and with names of several parts."""
    found = {f"dtypes/{name}": (np.arange(6).reshape(2, 3) + n).astype(name) for name in DTYPES}
    return {**found, "scalar": np.array(1.5 + n), "empty": np.zeros((0, 4)), "deep/er/w": np.arange(3, dtype=np.int64)}


def saved(directory: Path, values: dict[str, np.ndarray]) -> str:
    return Checkpoint(root={name: Variable(value) for name, value in values.items()}).write(directory / "ours")


def stored(path: str) -> dict[str, np.ndarray]:
    with reading(path) as opened:
        return {key.replace("%2F", "/"): opened.array(key) for key in opened.keys}


def same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (expected[name].dtype, expected[name].shape, expected[name].tobytes())
        for name in expected
    )


@pytest.mark.parametrize("part", [16, 1 << 20])
def test_npz_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(disk, "PART", part)
    values = arrays(1)
    path = saved(tmp_path, values)
    names = export_checkpoint(path, tmp_path / "new" / "theirs.npz")
    with np.load(tmp_path / "new" / "theirs.npz", allow_pickle=False) as archive:
        assert same({name.replace("%2F", "/"): archive[name] for name in archive.files}, values)
        assert sorted(archive.files) == names
    assert import_checkpoint(tmp_path / "new" / "theirs.npz", tmp_path / "again") == names
    assert same(stored(str(tmp_path / "again.safetensors")), values)
    assert sorted(os.listdir(tmp_path / "new")) == ["theirs.npz"]


@pytest.mark.parametrize("part", [16, 1 << 20])
def test_archives_of_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Compressed or not, in the other order of bytes, and by columns."""
    monkeypatch.setattr(disk, "PART", part)
    table = np.arange(60.0).reshape(10, 3, 2)
    values = {"c": table, "swapped": table.astype(">f8"), "fortran": np.asfortranarray(table), "view": table[::2, 1:]}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "theirs.npz", **values)
        assert import_checkpoint(tmp_path / "theirs.npz", tmp_path / "ours") == sorted(values)
        found = stored(str(tmp_path / "ours.safetensors"))
        assert all(np.array_equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_found_although_it_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    monkeypatch.setattr(disk, "PART", 16)
    path = tmp_path / "theirs.npz"
    save(path, w=np.random.default_rng(0).random(100))
    whole = path.read_bytes()
    for at in range(200, 900, 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointDamagedError):
            import_checkpoint(path, tmp_path / "x")
    assert os.listdir(tmp_path) == ["theirs.npz"]


@pytest.mark.parametrize("part", [16, 1 << 20])
def test_plain_safetensors_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(disk, "PART", part)
    values = {name: value for name, value in arrays(2).items() if value.dtype.kind != "c"}
    path = saved(tmp_path, values)
    export_checkpoint(path, tmp_path / "theirs.safetensors")
    assert same(
        {key.replace("%2F", "/"): value for key, value in load_file(tmp_path / "theirs.safetensors").items()}, values
    )
    with pytest.raises(CheckpointDamagedError, match="not a checkpoint of central-storage"):
        Checkpoint().read(tmp_path / "theirs.safetensors")
    save_file(values, tmp_path / "made by safetensors.safetensors")
    assert import_checkpoint(tmp_path / "made by safetensors.safetensors", tmp_path / "again") == sorted(values)
    assert same(stored(str(tmp_path / "again.safetensors")), values)


def test_complex_numbers_are_pairs_in_safetensors(tmp_path: Path) -> None:
    path = saved(tmp_path, {"z": np.array([1 + 2j, 3], np.complex64)})
    export_checkpoint(path, tmp_path / "z.safetensors")
    assert load_file(tmp_path / "z.safetensors")["z"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("form", ["format-1/strategy", "format-1/training-1", "format-2/ckpt-7"])
def test_what_only_a_strategy_uses_is_left_out(tmp_path: Path, form: str) -> None:
    names = export_checkpoint(FORMATS / form, tmp_path / "theirs.npz")
    with reading(str(FORMATS / f"{form}.safetensors")) as opened:
        assert set(names) == {key for key in opened.keys if not key.startswith("(strategy")}
        with np.load(tmp_path / "theirs.npz") as archive:
            assert same({name: archive[name] for name in archive.files}, {name: opened.array(name) for name in names})


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "evil"),))

    np.savez(tmp_path / "evil.npz", w=np.array([Evil()], object))
    with pytest.raises(CheckpointDamagedError, match="w holds Python objects, which only pickle could load"):
        import_checkpoint(tmp_path / "evil.npz", tmp_path / "x")
    (tmp_path / "bare.npz").write_bytes(b"\x80\x04N.")  # a pickle under the name of an archive
    with pytest.raises(CheckpointDamagedError, match=r"is no \.npz of arrays"):
        import_checkpoint(tmp_path / "bare.npz", tmp_path / "x")
    for suffix in ("pt", "pth", "pkl", "ckpt"):
        with pytest.raises(InvalidArgumentError, match=r"must end in \.safetensors or \.npz; of a file of torch make"):
            import_checkpoint(tmp_path / f"evil.{suffix}", tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == ["bare.npz", "evil.npz"]


def test_damaged_files_of_others(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", w=np.arange(100.0))
    whole = (tmp_path / "whole.npz").read_bytes()
    path = tmp_path / "cut.npz"
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointDamagedError):
            import_checkpoint(path, tmp_path / "x")
    flipped = bytearray(whole)
    flipped[300] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CheckpointDamagedError, match="Bad CRC-32"):
        import_checkpoint(path, tmp_path / "x")
    np.save(tmp_path / "one.npy", np.arange(3))
    os.rename(tmp_path / "one.npy", path)
    with pytest.raises(CheckpointDamagedError, match="it is no zip archive"):
        import_checkpoint(path, tmp_path / "x")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match="w has the dtype BF16, which NumPy lacks; save it as float32"):
        import_checkpoint(tmp_path / "b.safetensors", tmp_path / "x")
    for name in ("nowhere.npz", "nowhere.safetensors"):
        with pytest.raises(CheckpointError, match="there is no"):
            import_checkpoint(tmp_path / name, tmp_path / "x")
    with pytest.raises(InvalidArgumentError, match="numbered checkpoint"):
        import_checkpoint(tmp_path / "whole.npz", tmp_path / "x-1")
    assert not (tmp_path / "x.safetensors").exists()


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, arrays(3))
    target = tmp_path / "theirs.npz"
    target.write_text("an older one")

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointSaveError, match=r"No space left on device; .* needs \d+ bytes"):
            export_checkpoint(path, target)
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(CheckpointDamagedError):
        export_checkpoint(path, target)
    assert target.read_text() == "an older one"
    assert len(os.listdir(tmp_path)) == 2
    with pytest.raises(InvalidArgumentError, match=r"must end in \.safetensors, \.npz, \.pt"):
        export_checkpoint(path, tmp_path / "theirs.h5")


@pytest.mark.parametrize("name", ["/etc/x", "../../x", "a/../../x", "a\\..\\x", "a\0b", "a\nb"])
def test_no_archive_unpacks_elsewhere(tmp_path: Path, name: str) -> None:
    from central_storage.checkpoint.interchange import _save

    value = np.zeros(1)
    _save(str(tmp_path / "x.safetensors"), [Block(value.dtype, [name], [value.shape], [lambda: value])])
    with pytest.raises(InvalidArgumentError, match="cannot be a name in an archive"):
        export_checkpoint(tmp_path / "x", tmp_path / "x.npz")
    export_checkpoint(tmp_path / "x", tmp_path / "y.safetensors")
    assert list(load_file(tmp_path / "y.safetensors")) == [name]
    assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "y.safetensors"]
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00")
    with pytest.raises(CheckpointDamagedError):
        import_checkpoint(tmp_path / "z.npz", tmp_path / "z")


def test_an_npz_with_a_name_twice_has_the_last_array(tmp_path: Path) -> None:
    path = tmp_path / "twice.npz"
    np.savez(path, a=np.arange(3.0), b=np.arange(2))
    np.save(tmp_path / "a.npy", np.arange(4.0))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.write(tmp_path / "a.npy", "a.npy")
    assert import_checkpoint(path, tmp_path / "ours") == ["a", "b"]
    assert same(stored(f"{tmp_path / 'ours'}.safetensors"), {"a": np.arange(4.0), "b": np.arange(2)})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.array(["x", "y"]), "<U1"),
        (np.array([b"x"]), r"\|S1"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"datetime64\[D\]"),
        (np.zeros(2, [("a", "f4"), ("b", "i8")]), r"\[\('a', '<f4'\)"),
        (np.zeros(2, np.longdouble), "float128"),
    ],
)
def test_an_npz_with_a_dtype_that_no_checkpoint_holds(tmp_path: Path, value: np.ndarray, says: str) -> None:
    np.savez(tmp_path / "theirs.npz", whole=np.zeros(3), w=value)
    with pytest.raises(
        CheckpointError, match=rf"theirs\.npz: w has the dtype {says}.* which a checkpoint does not hold"
    ):
        import_checkpoint(tmp_path / "theirs.npz", tmp_path / "x")
    assert os.listdir(tmp_path) == ["theirs.npz"]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_save_in_the_same_directory_leaves_an_export_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = saved(tmp_path, {"w": np.arange(3)})
    write = interchange._WRITERS[suffix]

    def write_beside_a_save(*args: Any) -> None:
        write(*args)
        Checkpoint(w=Variable(1.0)).write(tmp_path / "other")

    monkeypatch.setattr(interchange, "_WRITERS", {suffix: write_beside_a_save})
    export_checkpoint(path, tmp_path / f"theirs{suffix}")
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *("other.safetensors", "ours.safetensors", f"theirs{suffix}")
    ]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_the_draft_of_a_killed_export_goes_with_the_next_one(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, {"w": np.arange(3)})
    left = tmp_path / f"theirs{suffix}.0123456789abcdef.draft"
    left.write_bytes(b"half")
    export_checkpoint(path, tmp_path / "theirs.npz")
    assert not left.exists()
