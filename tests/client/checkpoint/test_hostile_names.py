"""P37: no name of a variable leads out of the directory of the checkpoint: 10,000 names, 0 files outside."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.checkpoint import disk
from central_storage.checkpoint.listing import contents
from central_storage.checkpoint.stored import reading
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, export_checkpoint
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointError, InvalidArgumentError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets

PIECES = [
    "..",
    ".",
    "/",
    "//",
    "\\",
    "\0",
    "\n",
    "\r",
    "\x1b[2J",
    "\x9b",
    "\u202e",
    "\ufeff",
    "~",
    "$HOME",
    "*",
    "?",
    "%2F",
]
PIECES += ["%", "%25", "C:", "CON", "NUL", "aux.txt", "/etc/passwd", "/dev/null", "../../x", "..\\..\\x", ".draft"]
PIECES += [".safetensors", "ckpt-1", "x" * 4096, "\U0001f600", "é", "e\u0301", " ", "", "__metadata__", "(strategy)"]
PIECES += ["central_storage", "'", '"', "{", "};", "`id`", "|", "&", "<", ">", "-rf", "--json", "\t", "\x7f"]


def hostile(count: int) -> list[str]:
    rng = random.Random(37)
    found: dict[str, None] = dict.fromkeys(PIECES)
    while len(found) < count:
        found["".join(rng.choices(PIECES, k=rng.randint(1, 5)))] = None
    return list(found)[:count]


def everything(root: Path) -> set[str]:
    return {os.path.join(directory, name) for directory, _, names in os.walk(root) for name in names}


def test_10000_hostile_names_make_no_file_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "a" / "b" / "checkpoints"
    monkeypatch.chdir(tmp_path)
    names = hostile(10_000)
    outside = 0
    for start in range(0, len(names), 500):
        some = names[start : start + 500]
        values = {name: Variable(np.float64(number)) for number, name in enumerate(some)}
        path = Checkpoint(root={"d": values}).write(inside / "ckpt")
        outside += len(everything(tmp_path) - {path})
        fresh = {name: Variable(-1.0, dtype=np.float64) for name in some}
        Checkpoint(root={"d": fresh}).read(path).assert_consumed()
        assert [float(fresh[name]) for name in some] == list(range(len(some)))
        assert len(contents(path).arrays) == len(some)
    print(f"\n{len(names)} names, {outside} files outside")
    assert outside == 0
    assert not list(Path("/").glob("*.safetensors"))


def test_a_checkpoint_with_a_name_per_file_would_be_noticed(tmp_path: Path) -> None:
    """The walk sees a file that such a name makes if it is joined to the directory."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    (inside / "../../x").write_text("")
    assert everything(tmp_path) - {str(inside / "ckpt.safetensors")} == {str(tmp_path / "x")}


def test_exports_keep_every_name_or_refuse_it(tmp_path: Path) -> None:
    names = hostile(300)
    refused = 0
    for name in names:
        if name == "__metadata__":
            with pytest.raises(CheckpointError, match="cannot hold an object of the name __metadata__"):
                Checkpoint(root={name: Variable(1.0)}).write(tmp_path / "ckpt")
            continue
        path = Checkpoint(root={name: Variable(1.0)}).write(tmp_path / "ckpt")
        with reading(path) as stored:
            (key,) = stored.keys
        try:
            assert export_checkpoint(path, tmp_path / "out.npz") == [key]
        except InvalidArgumentError:
            refused += 1
        assert everything(tmp_path) <= {path, str(tmp_path / "out.npz")}
    assert 50 < refused < 300


# --- two objects of one name --------------------------------------------------------------------------------------


def clashes(strategy: cs.CentralStorageStrategy) -> dict[str, dict[str, Any]]:
    """Objects of which a file would lose one, by the name that two of them have."""
    with strategy.scope():
        a, b, large = cs.Variable(1.0), cs.Variable(2.0), cs.Variable(np.zeros(10))
        sgd, average = cs.optimizers.SGD(), cs.train.ExponentialMovingAverage(0.5)
        average.apply([a])
    alone, other = Variable(3.0), Variable(4.0)
    return {
        "m/1": {"m": {"1": a, 1: b}},
        "m/2": {"m": {"2": a, 2: large}},
        "m/3": {"m": {"3": alone, 3: other}},
        "m/4/x": {"m": {"4": {"x": a}, 4: {"x": b}}},
        "m/5/iterations": {"m": {"5": sgd, 5: {"iterations": a}}},
        "m/6/a": {"a": a, "m": {"6": average, 6: {"a": b}}},
        "m/7": {"m": {"7": a, 7: b}, "first": a},  # further names of a variable count, too
        "(strategy)/seed": {"(strategy)": {"seed": a}},
    }


@pytest.mark.parametrize("small", [disk.SMALL, 0])
@pytest.mark.parametrize("in_thread", [False, True])
def test_two_objects_of_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, in_thread: bool
) -> None:
    monkeypatch.setattr(disk, "SMALL", small)
    kept = Checkpoint(w=Variable(1.0)).write(tmp_path / "kept")
    before = Path(kept).read_bytes()
    options = cs.train.CheckpointOptions(enable_async=in_thread)
    with cs.CentralStorageStrategy(in_process=True) as strategy:
        for name, objects in clashes(strategy).items():
            checkpoint = Checkpoint(root=objects)
            says = re.escape(f"two objects have the name {name!r} in a checkpoint")
            with pytest.raises(CheckpointError, match=says):
                checkpoint.write(tmp_path / "kept", options)
            with pytest.raises(CheckpointError, match=says):
                checkpoint.read(tmp_path / "kept")
    assert Path(kept).read_bytes() == before
    assert everything(tmp_path) == {kept}


def test_objects_without_values_may_have_one_name(tmp_path: Path) -> None:
    w = Variable(1.0)
    checkpoint = Checkpoint(root={"m": {"1": "text", 1: 2, "2": [], 2: {"x": w}}, "again": [w]})
    path = checkpoint.write(tmp_path / "x")
    w.assign(2.0)
    assert checkpoint.read(path).assert_consumed().matched == 1
    assert float(w) == 1


def test_one_object_may_have_a_name_twice(tmp_path: Path) -> None:
    """Both items are the same variable, so nothing is lost."""
    w, shared = Variable(3.0), Variable(5.0)
    objects = {"m": {"1": w, 1: w}, "first": shared, "n": {"2": shared, 2: shared}}
    path = Checkpoint(root=objects).write(tmp_path / "ckpt")
    w.assign(0.0), shared.assign(0.0)
    Checkpoint(root=objects).read(path).assert_consumed()
    assert (w.numpy(), shared.numpy()) == (3.0, 5.0)
