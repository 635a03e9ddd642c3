"""``cs-ctl checkpoint show``: files and directories of checkpoints, whole and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from central_storage.ctl import cli
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint
from central_storage.variables.variable import Variable

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets
DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with ckpt-1, -2 and -10; the last byte of the second, which belongs to ``b``, is changed."""
    a = Variable(np.arange(6.0).reshape(2, 3))
    checkpoint = Checkpoint(a=a, b=Variable(np.zeros(5, np.int8)), c={"a again": a})
    for count in (0, 1, 9):
        checkpoint._count = count
        checkpoint.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return tmp_path


def test_a_file(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "ckpt-1.safetensors"
    assert cli.main(["checkpoint", "show", str(path)]) == cli.GOOD
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{path}: whole, ")
    assert shown[1] == "format 2, saved as ckpt-1.safetensors, save counter 1; 2 arrays"
    assert [line.split() for line in shown[3:]] == [
        ["NAME", "DTYPE", "SHAPE", "BYTES", "STATE"],
        ["a", "=", "c/a", "again", "float64", "[2,", "3]", "48", "B", "whole"],
        ["b", "int8", "[5]", "5", "B", "whole"],
    ]


def test_the_damaged_array_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "show", "--json", str(saved / "ckpt-2")]) == cli.FOUND
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {each["name"]: each["is_whole"] for each in found["variables"]} == {"a": True, "b": False}
    assert found["variables"][0] == {
        "name": "a",
        "dtype": "float64",
        "shape": [2, 3],
        "nbytes": 48,
        "also": ["c/a again"],
        "is_whole": True,
    }
    assert (found["is_whole"], found["format"], found["save_counter"]) == (False, 2, 2)
    assert found["nbytes"] == os.stat(saved / "ckpt-2.safetensors").st_size
    assert "the checksum of b is" in found["damage"]


def test_a_directory(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "ckpt-3.safetensors").write_bytes(b"")
    (saved / "notes.txt").write_text("none of ours")
    assert cli.main(["checkpoint", "show", str(saved)]) == cli.FOUND
    shown = capsys.readouterr().out.splitlines()
    names = [line.split()[0].rpartition("/")[2] for line in shown[:5]]
    assert names == ["FILE", *(f"ckpt-{n}.safetensors" for n in (1, 2, 3, 10))]
    assert [line.split()[-1] for line in shown[1:5]] == ["whole", "damaged", "damaged", "whole"]
    assert "ckpt-3.safetensors is damaged: it ends at byte 0" in shown[-1]
    assert len(shown) == 7


def test_format_1_has_nothing_to_check_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "show", str(DATA / "format-1" / "ckpt-7.safetensors")]) == cli.GOOD
    shown = capsys.readouterr().out
    assert "not checked" in shown
    assert "format 1, save counter 7, no checksums" in shown


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "w\x1b[2J\x9b31m\u202e\n\r\x07"
    path = Checkpoint(objects={hostile: Variable(1.0)}).save(tmp_path / "ckpt")
    for options in ([], ["--json"]):
        assert cli.main(["checkpoint", "show", *options, path]) == cli.GOOD
        shown = capsys.readouterr().out
        assert all(character.isprintable() for character in shown.replace("\n", ""))
    assert json.loads(shown)["checkpoints"][0]["variables"][0]["name"] == f"objects/{hostile}"
    os.rename(path, tmp_path / "x\x1b[2J.safetensors")
    assert cli.main(["checkpoint", "show", str(tmp_path / "x\x1b[2J.safetensors")]) == cli.GOOD
    assert cli.main(["checkpoint", "show", str(tmp_path / "y\x1b[2J.safetensors")]) == cli.NO_SERVICE
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("path", ["nowhere", "", "newer"])
def test_what_is_not_there_or_newer(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if path == "newer":
        text = json.dumps({"__metadata__": {"central_storage": json.dumps({"format": 3})}}).encode()
        (tmp_path / "newer.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert cli.main(["checkpoint", "show", str(tmp_path / path)]) == cli.NO_SERVICE
    said = capsys.readouterr()
    assert said.out == ""
    assert ("format 3" if path == "newer" else "there is no checkpoint") in said.err
