"""The arrays of an open checkpoint: which bytes are read, checked, kept and given, in which pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from central_storage.checkpoint import disk, writing
from central_storage.checkpoint.stored import Stored, reading, reading_plain
from cs_proto.errors import CheckpointDamagedError

DTYPES = ("bool", "int16", "float32", "float64", "complex64", "complex128")
SHAPES = [(), (1,), (3,), (0, 2), (5, 2), (1, 7), (40,)]


class Array(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    value: np.ndarray


def arrays_of(kinds: list[tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """Arrays of these dtypes and shapes, each with other values."""
    made = {}
    for number, (dtype, shape) in enumerate(kinds):
        value = (np.arange(math.prod(shape)) + 3 * number + 1).astype(dtype).reshape(shape)
        made[f"a{number}"] = Array(value.dtype, shape, value)
    return made


def write(path: str, arrays: Mapping[str, Array]) -> None:
    """Write these arrays to a file."""
    blocks = [writing.Block(each.dtype, [key], [each.shape], [each.value.copy]) for key, each in arrays.items()]
    writing.replace(path, blocks, {"also": {}})


def taken(stored: Stored, keys: list[str], arrays: Mapping[str, Array]) -> dict[str, bytes]:
    """What :meth:`Stored.small` gives, by name."""
    found = {}
    for places, data in stored.small(keys):
        assert places
        at = 0
        for place in places:
            nbytes = arrays[keys[place]].value.nbytes
            found[keys[place]] = bytes(data[at : at + nbytes])
            at += nbytes
        assert at == len(data)
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=12),
    small=st.sampled_from([1 << 20, 320, 64]),
    kept=st.sampled_from([0, 100, 1 << 20]),
    is_little=st.booleans(),
    data=st.data(),
)
def test_small_arrays_come_in_any_order_and_number(
    kinds: list[tuple[str, tuple[int, ...]]],
    small: int,
    kept: int,
    is_little: bool,
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    arrays = arrays_of(kinds)
    path = str(tmp_path / "x.safetensors")
    write(path, arrays)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "SMALL", small)
        patched.setattr(
            f"{Stored.__module__}._IS_LITTLE", is_little
        )  # the way of other machines, which turns nothing here
        with reading(path, kept_nbytes=kept) as stored:
            stored.verify()
            keys = [key for key, array in arrays.items() if array.value.nbytes <= small]
            for _ in range(2):
                asked = data.draw(st.permutations(keys))[: data.draw(st.integers(0, len(keys)))]
                assert taken(stored, asked, arrays) == {key: arrays[key].value.tobytes() for key in asked}


def test_what_is_kept_is_read_once_and_forgotten_when_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = arrays_of([("float32", (40,))] * 8 + [("float32", (0,))])
    path = str(tmp_path / "x.safetensors")
    write(path, arrays)
    monkeypatch.setattr(disk, "SMALL", 320)
    reads: list[int] = []
    read_at = disk.read_at
    with reading(path, kept_nbytes=1000) as stored:
        monkeypatch.setattr(disk, "read_at", lambda *given: (reads.append(len(given[1])), read_at(*given))[1])
        stored.verify()
        assert reads == [320] * 4
        taken(stored, ["a0", "a1", "a2"], arrays)
        assert reads == [320] * 4
        taken(stored, ["a0", "a8", "a2", "a3", "a7"], arrays)  # a0 has been given, and a7 was not kept
        assert reads == [320] * 4 + [160] * 2
        taken(stored, ["a4", "a5"], arrays)
        assert not stored._kept


def test_a_changed_array_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of([("float32", (40,))] * 8)
    path = tmp_path / "x.safetensors"
    write(str(path), arrays)
    content = bytearray(path.read_bytes())
    content[-200] ^= 1  # in the last but one
    path.write_bytes(content)
    with reading(str(path)) as stored:
        for _ in range(2):
            with pytest.raises(CheckpointDamagedError, match=r"the checksum of a6 is .*, but was"):
                stored.verify()
            with pytest.raises(CheckpointDamagedError, match="the checksum of a6 is"):
                taken(stored, ["a7", "a6", "a0"], arrays)
        assert taken(stored, ["a7", "a0"], arrays) == {key: arrays[key].value.tobytes() for key in ("a7", "a0")}


def test_a_header_may_name_arrays_in_another_order(tmp_path: Path) -> None:
    entries = {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        "none": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    text = json.dumps(entries).encode()
    values = np.arange(4, dtype=np.float32)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    with reading_plain(str(path)) as stored:
        assert stored.array("a").tolist() == [0, 1]
        assert stored.array("b").tolist() == [2, 3]
        found = {tuple(places): bytes(data) for places, data in stored.small(["b", "none", "a"])}
        assert found == {(2, 1, 0): values.tobytes()}
