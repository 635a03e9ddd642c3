"""Checkpoints of variables outside every strategy: the file, its names, what differs, and what a broken disk leaves."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.harness.examples import examples
from tests.harness.processes import start

from central_storage.checkpoint import graph
from central_storage.checkpoint.disk import SUFFIX
from central_storage.core.context import enter_replica
from central_storage.metrics import Mean
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, CheckpointManager, ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    ContextError,
    InvalidArgumentError,
)

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]

Pair = namedtuple("Pair", "left right")


class Layer:
    def __init__(self, n: int) -> None:
        self.kernel = Variable(np.full(n, 1.0 * n))
        self.units = n


class Model:
    def __init__(self) -> None:
        self.layers = [Layer(2), Layer(3)]
        self.tables = {"a/b": Variable(1), "c%": (Variable(2.0),)}
        self.pair = Pair(Variable(3.0), None)
        self.again = self.layers[0].kernel
        self.myself = self


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: Variable
    note: str


def zero(variable: Variable) -> None:
    variable.assign(np.zeros(variable.shape, variable.dtype))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(data=st.data())
def test_every_dtype_and_shape_comes_back(tmp_path: Path, data: st.DataObject) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    values = {
        f"v{k}": data.draw(arrays.arrays(dtype, shapes))
        for k, dtype in enumerate(data.draw(st.lists(st.sampled_from(DTYPES), max_size=5)))
    }
    variables = {name: Variable(value) for name, value in values.items()}
    path = Checkpoint(**variables).save(tmp_path / "any")
    for variable in variables.values():
        zero(variable)
    Checkpoint(**variables).restore(path).assert_consumed()
    for name, value in values.items():
        found = variables[name].numpy()
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    os.unlink(path)


def test_names_are_the_ways_to_the_variables(tmp_path: Path) -> None:
    model, mean = Model(), Mean()
    mean.update_state([3.0])
    path = Checkpoint(model=model, mean=mean, slotted=Slotted(Variable(7.0), "x")).save(tmp_path / "deep/er/ckpt")
    assert path == str(tmp_path / "deep" / "er" / "ckpt-1.safetensors")
    found = load_file(path)  # another reader of safetensors can read it
    assert set(found) == {
        "model/again",
        "model/layers/1/kernel",
        "model/tables/a%2Fb",
        "model/tables/c%25/0",
        "model/pair/left",
        "mean/total",
        "mean/count",
        "slotted/scale",
    }
    assert found["model/layers/1/kernel"].tolist() == [3.0, 3.0, 3.0]
    assert found["model/tables/a%2Fb"].dtype == np.int32
    assert os.listdir(tmp_path / "deep" / "er") == ["ckpt-1.safetensors"]


def test_a_variable_is_found_by_every_way_that_led_to_it(tmp_path: Path) -> None:
    w = Variable([1.0, 2.0])
    path = Checkpoint(a=w, deep={"b": w}).save(tmp_path / "x")
    other = Variable([0.0, 0.0])
    Checkpoint(deep={"b": other}).restore(path).assert_consumed()
    assert other.numpy().tolist() == [1.0, 2.0]


def test_one_variable_restores_into_several(tmp_path: Path) -> None:
    w = Variable([1.0, 2.0])
    path = Checkpoint(a=w, deep={"b": w}).save(tmp_path / "x")
    one, other = Variable([0.0, 0.0]), Variable([0.0, 0.0])
    Checkpoint(a=one, deep={"b": other}).restore(path).assert_consumed()
    assert one.numpy().tolist() == other.numpy().tolist() == [1.0, 2.0]


def test_what_differs_is_named_and_the_rest_restored(tmp_path: Path) -> None:
    path = Checkpoint(a=Variable(1.0), b=Variable(2.0)).save(tmp_path / "x")
    a, c = Variable(0.0), Variable(9.0)
    status = Checkpoint(a=a, c=c).restore(path)
    assert (float(a), float(c), status.missing, status.unused) == (1.0, 9.0, ("c",), ("b",))
    assert "it does not hold c; no object uses b" in repr(status)
    with pytest.raises(CheckpointMismatchError, match="does not hold c"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="does not hold c"):
        status.assert_existing_objects_matched()
    assert status.expect_partial() is status
    status = Checkpoint(a=a).restore(path).assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="no object uses: b"):
        status.assert_consumed()


def test_a_difference_that_nobody_expected_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Checkpoint(a=Variable(1.0)).save(tmp_path / "x")
    checkpoint = Checkpoint(c=Variable(1.0))
    with caplog.at_level(logging.WARNING, "central_storage"):
        checkpoint.restore(path).expect_partial()
        gc.collect()
        assert not caplog.records
        checkpoint.restore(path)
        gc.collect()
    assert "it does not hold c; no object uses a" in caplog.text


def test_nothing_is_restored_where_one_entry_does_not_fit(tmp_path: Path) -> None:
    path = Checkpoint(a=Variable(1.0), b=Variable([1.0, 2.0]), c=Variable(3)).save(tmp_path / "x")
    a, b, c = Variable(0.0), Variable([0.0]), Variable(0.0)
    says = r"b is float32\[2\] in the checkpoint, but float32\[1\] here; c is int32\[\] in the checkpoint, but float32"
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint(a=a, b=b, c=c).restore(path)
    assert isinstance(caught.value, ValueError)
    assert (float(a), float(c)) == (0.0, 0.0)


def test_complex_is_not_a_pair_of_floats(tmp_path: Path) -> None:
    path = Checkpoint(a=Variable(np.ones(3, np.complex64))).save(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"a is complex64\[3\] in the checkpoint, but float32\[3, 2\] here"):
        Checkpoint(a=Variable(np.zeros((3, 2), np.float32))).restore(path)
    path = Checkpoint(a=Variable(np.zeros((3, 2), np.float32))).save(tmp_path / "y")
    with pytest.raises(CheckpointError, match=r"float32\[3, 2\] in the checkpoint, but complex64\[3\] here"):
        Checkpoint(a=Variable(np.ones(3, np.complex64))).restore(path)


def test_averages_are_made_where_they_are_missing(tmp_path: Path) -> None:
    w, average = Variable(1.0), ExponentialMovingAverage(0.5)
    average.apply([w])
    average.apply([w.assign(3.0)])
    untracked = Variable(5.0, name="other")
    average.apply([untracked])
    path = Checkpoint(net={"w": w}, average=average).save(tmp_path / "x")
    assert set(load_file(path)) == {"net/w", "average/net/w", "average/(other)"}
    v, fresh = Variable(0.0), ExponentialMovingAverage(0.5)
    status = Checkpoint(net={"w": v}, average=fresh).restore(path)
    assert status.unused == ("average/(other)",)
    shadow = fresh.average(v)
    assert shadow is not None
    assert (float(v), float(shadow)) == (3.0, 2.0)
    status.expect_partial()


def test_a_checkpoint_is_numbered_and_its_objects_are_attributes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=Variable(0), net=[Variable(1.0)])
    for k in (1, 2):
        checkpoint.step.assign_add(1)
        assert checkpoint.save(tmp_path / "ckpt") == str(tmp_path / f"ckpt-{k}.safetensors")
    again = Checkpoint(step=Variable(0), net=[Variable(0.0)])
    again.restore(tmp_path / "ckpt-2").assert_consumed()  # the suffix may be left out
    assert (int(again.step), again.save_counter) == (2, 2)
    assert again.save(tmp_path / "ckpt").endswith("ckpt-3.safetensors")


def test_a_checkpoint_in_a_checkpoint(tmp_path: Path) -> None:
    w = Variable(1.0)
    path = Checkpoint(inner=Checkpoint(w=w)).save(tmp_path / "x")
    zero(w)
    Checkpoint(inner=Checkpoint(w=w)).restore(path).assert_consumed()
    assert float(w) == 1.0


def test_no_checkpoint_is_nothing_to_restore() -> None:
    w = Variable(1.0)
    status = Checkpoint(w=w).restore(None)
    assert float(w) == 1.0
    with pytest.raises(AssertionError, match="no checkpoint"):
        status.assert_consumed()


@pytest.mark.parametrize("value", [3, "text", None, np.ones(2), print, np, DefaultStrategy()])
def test_what_holds_no_variables_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"x is a .*, which holds no variables"):
        Checkpoint(x=value)


def test_a_name_of_a_method_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'save' is a method"):
        Checkpoint(save=Variable(1.0))


def test_a_replica_neither_saves_nor_restores(tmp_path: Path) -> None:
    checkpoint = Checkpoint(w=Variable(1.0))
    replica: Any = object()
    with enter_replica(replica, replica):
        with pytest.raises(ContextError, match="saved only in the script"):
            checkpoint.save(tmp_path / "x")
        with pytest.raises(ContextError, match="restored only in the script"):
            checkpoint.restore(tmp_path / "x")


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_none(tmp_path: Path) -> None:
    checkpoint = Checkpoint(w=Variable(1.0))
    path = Path(checkpoint.save(tmp_path / "x"))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*y"):
        checkpoint.restore(tmp_path / "y")
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is a directory, .* the newest one in it is {path}$"):
        checkpoint.restore(tmp_path)
    whole = path.read_bytes()
    for cut in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.restore(path)
    save_file({"w": np.ones(1)}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of central-storage"):
        checkpoint.restore(path)
    save_file({"w": np.ones(1)}, path, {"central_storage": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.restore(path)
    assert float(checkpoint.w) == 1.0


def test_a_dtype_that_no_variable_has(tmp_path: Path) -> None:
    index = json.dumps({"format": 1, "complex": {}, "also": {}})
    header = json.dumps(
        {"__metadata__": {"central_storage": index}, "w": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match=r"w is BF16\[\] in the checkpoint"):
        Checkpoint(w=Variable(1.0)).restore(path)


class _Failing(Variable):
    """A variable that cannot be read."""

    def current(self) -> np.ndarray:
        raise ConnectionError("gone")


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    graph.save(str(directory / "s.safetensors"), {"w": Variable(1.0)}, {})
    with pytest.raises(ConnectionError):
        graph.save(str(directory / "s.safetensors"), {"v": Variable(1.0), "w": _Failing(2.0)}, {})
    assert os.listdir(directory) == ["s.safetensors"]
    with safe_open(directory / "s.safetensors", framework="numpy") as file:
        assert list(file.keys()) == ["w"]


def test_large_arrays_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    graph.save(str(path), {"a": Variable(np.ones(3, np.int8)), "b": Variable(np.ones(3))}, {})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    assert length % 8 == 0
    assert header["b"]["data_offsets"] == [0, 24]
    assert header["a"]["data_offsets"] == [24, 27]


# --- the manager --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(step=Variable(0))


def names(manager: CheckpointManager) -> list[str]:
    return [os.path.basename(path) for path in manager.checkpoints]


def test_the_manager_keeps_the_newest(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path / "c", max_to_keep=2)
    assert (manager.checkpoints, manager.latest_checkpoint) == ([], None)
    for k in range(1, 12):
        checkpoint.step.assign(k)
        assert manager.save() == str(tmp_path / "c" / f"ckpt-{k}.safetensors")
    assert names(manager) == ["ckpt-10.safetensors", "ckpt-11.safetensors"]  # numbers, not words
    assert sorted(os.listdir(tmp_path / "c")) == names(manager)
    left = tmp_path / "c" / "ckpt-12.safetensors.0123456789abcdef.draft"
    left.write_bytes(b"half")  # what a kill leaves
    (tmp_path / "c" / "notes.txt").write_bytes(b"mine")
    again = CheckpointManager(Checkpoint(step=Variable(0)), tmp_path / "c", max_to_keep=2)
    assert again.restore_or_initialize() == manager.latest_checkpoint
    assert int(again.checkpoint.step) == 11
    again.save()
    assert names(again) == ["ckpt-11.safetensors", "ckpt-12.safetensors"]
    assert sorted(os.listdir(tmp_path / "c")) == [*names(again), "notes.txt"]


def test_the_manager_goes_on_counting_without_a_restore(tmp_path: Path, checkpoint: Checkpoint) -> None:
    CheckpointManager(checkpoint, tmp_path, None).save(7)
    manager = CheckpointManager(Checkpoint(step=Variable(0)), tmp_path, max_to_keep=1)
    assert manager.save().endswith("ckpt-8.safetensors")
    assert names(manager) == ["ckpt-8.safetensors"]
    manager.save(3)
    assert names(manager) == ["ckpt-3.safetensors"]  # never the one just written


def test_without_a_limit_all_are_kept(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, None, checkpoint_name="a.b")
    for _ in range(3):
        manager.save()
    assert names(manager) == [f"a.b-{k}.safetensors" for k in (1, 2, 3)]


def test_the_manager_initializes_where_there_is_nothing(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, 1, init_fn=lambda: checkpoint.step.assign(5))
    assert manager.restore_or_initialize() is None
    assert int(checkpoint.step) == 5


@pytest.mark.parametrize("kept", [0, -1, 1.5, True])
def test_a_limit_that_is_none(tmp_path: Path, checkpoint: Checkpoint, kept: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_to_keep"):
        CheckpointManager(checkpoint, tmp_path, kept)


def damage(path: str) -> None:
    """Flip a bit of the last array."""
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)


def saved(directory: Path, last: int) -> list[str]:
    """Checkpoints from 1 to ``last``, of as many steps."""
    checkpoint = Checkpoint(step=Variable(0))
    manager = CheckpointManager(checkpoint, directory, None)
    for k in range(1, last + 1):
        checkpoint.step.assign(k)
        manager.save()
    return manager.checkpoints


def test_the_newest_whole_one_is_taken_and_the_others_are_named(
    tmp_path: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    paths = saved(tmp_path, 4)
    damage(paths[3])
    os.truncate(paths[2], 100)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2, init_fn=pytest.fail)
    assert manager.skipped_checkpoints == {}
    with caplog.at_level(logging.WARNING, "central_storage"):
        assert manager.restore_or_initialize() == paths[1]
    assert (int(checkpoint.step), checkpoint.save_counter) == (2, 2)
    assert list(manager.skipped_checkpoints) == [paths[3], paths[2]]
    assert "checksum of step" in manager.skipped_checkpoints[paths[3]]
    assert paths[3] in caplog.text
    assert paths[2] in caplog.text
    assert manager.save() == str(tmp_path / "ckpt-5.safetensors")
    # Two that are whole, 2 and 5, are kept, though there are newer ones than 2.
    assert names(manager) == [f"ckpt-{k}.safetensors" for k in (2, 3, 4, 5)]
    manager.save()
    assert names(manager) == [f"ckpt-{k}.safetensors" for k in (3, 4, 5, 6)]
    manager.save()  # takes the place of 5, and 3 and 4 go with that
    assert names(manager) == ["ckpt-6.safetensors", "ckpt-7.safetensors"]
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-7.safetensors")
    assert manager.skipped_checkpoints == {}


def test_a_damaged_one_that_is_written_again_counts(tmp_path: Path, checkpoint: Checkpoint) -> None:
    paths = saved(tmp_path, 3)
    damage(paths[2])
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    manager.restore_or_initialize()
    assert manager.save(3) == paths[2]
    assert manager.skipped_checkpoints == {}
    assert names(manager) == ["ckpt-2.safetensors", "ckpt-3.safetensors"]


def test_files_that_changed_places_are_left_out(tmp_path: Path, checkpoint: Checkpoint) -> None:
    paths = saved(tmp_path, 3)
    os.rename(paths[2], tmp_path / "x")
    os.rename(paths[1], paths[2])
    os.rename(tmp_path / "x", paths[1])
    manager = CheckpointManager(checkpoint, tmp_path, None)
    assert manager.restore_or_initialize() == paths[0]
    assert "was saved as ckpt-2.safetensors" in manager.skipped_checkpoints[paths[2]]
    assert int(checkpoint.step) == 1


def test_nothing_is_initialized_where_all_are_damaged(tmp_path: Path, checkpoint: Checkpoint) -> None:
    paths = saved(tmp_path, 2)
    for path in paths:
        damage(path)
    manager = CheckpointManager(checkpoint, tmp_path, None, init_fn=pytest.fail)
    with pytest.raises(
        CheckpointDamagedError, match=r"every checkpoint in .* is damaged: .*ckpt-2.*ckpt-1.*Nothing was"
    ):
        manager.restore_or_initialize()
    assert int(checkpoint.step) == 0
    assert manager.checkpoints == paths


def test_a_whole_one_that_does_not_fit_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    paths = saved(tmp_path, 2)
    manager = CheckpointManager(Checkpoint(step=Variable([0, 0])), tmp_path, None)
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        manager.restore_or_initialize()
    assert paths[1] in str(caught.value)
    save_file({"w": np.ones(1)}, paths[1], {"central_storage": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match="format 99"):
        manager.restore_or_initialize()


def test_one_that_another_manager_deletes_meanwhile(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(tmp_path, 2)
    found = CheckpointManager._found

    def and_delete(manager: CheckpointManager) -> list[tuple[int, str]]:
        listed = found(manager)
        if os.path.exists(paths[1]):
            os.unlink(paths[1])
        return listed

    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=1, init_fn=pytest.fail)
    monkeypatch.setattr(CheckpointManager, "_found", and_delete)
    assert manager.restore_or_initialize() == paths[0]
    assert manager.skipped_checkpoints == {}


def test_what_another_manager_has_deleted_is_gone_already(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 3)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    unlink, deleted = os.unlink, []

    def twice(path: str) -> None:
        unlink(path)
        if path.endswith(SUFFIX):
            deleted.append(path)
            unlink(path)

    monkeypatch.setattr(os, "unlink", twice)
    manager.save()
    assert names(manager) == ["ckpt-4.safetensors"]
    assert len(deleted) == 3


@pytest.mark.parametrize("number", [-1, True, 1.5, "3"])
def test_a_number_that_is_none(tmp_path: Path, checkpoint: Checkpoint, number: Any) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, None)
    with pytest.raises(InvalidArgumentError, match="checkpoint_number must be a whole number from 0"):
        manager.save(number)
    assert manager.save(Variable(12)) == str(tmp_path / "ckpt-12.safetensors")
    assert manager.save(12) == str(tmp_path / "ckpt-12.safetensors")  # one that is given is replaced


@pytest.mark.parametrize("name", ["", "a/b", "/a", "a\0b", "a\ud800", 3, b"a"])
def test_a_name_that_is_no_name_of_a_file(tmp_path: Path, checkpoint: Checkpoint, name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_name"):
        CheckpointManager(checkpoint, tmp_path, None, checkpoint_name=name)


@pytest.mark.parametrize("directory", ["a\0b", "a\ud800", 3, None, b"bytes"])
def test_a_directory_that_is_no_path(checkpoint: Checkpoint, directory: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"directory must be a path, .* without NUL"):
        CheckpointManager(checkpoint, directory, None)


@pytest.mark.parametrize("function", [3, "begin", False])
def test_an_init_fn_that_is_no_function(tmp_path: Path, checkpoint: Checkpoint, function: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"init_fn must be a function .*, or None, not {function!r}"):
        CheckpointManager(checkpoint, tmp_path, None, init_fn=function)


@pytest.mark.parametrize("interval", [None, 10])
@pytest.mark.parametrize(
    ("counter", "said"),
    [
        (lambda: Variable([0, 0]), r"has the shape \(2,\)"),
        (lambda: Variable([0]), r"has the shape \(1,\)"),
        (lambda: np.zeros((2, 3)), r"has the shape \(2, 3\)"),
        (lambda: "10", "is '10'"),
        (lambda: 1j, "is 1j"),
    ],
)
def test_a_step_counter_that_is_no_scalar(
    tmp_path: Path, checkpoint: Checkpoint, counter: Callable[[], Any], said: str, interval: int | None
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"step_counter must be a variable .* the one given {said}"):
        CheckpointManager(checkpoint, tmp_path, 1, step_counter=counter(), checkpoint_interval=interval)


SAVES = """
import sys
import numpy as np
import central_storage as cs

me = float(sys.argv[2])
a, b = cs.Variable(np.full(5_000, me)), cs.Variable(np.full(5_000, me))
manager = cs.train.CheckpointManager(cs.train.Checkpoint(a=a, b=b), sys.argv[1], max_to_keep=3)
for k in range(100):
    a.assign_add(np.ones(5_000))
    b.assign_add(np.ones(5_000))
    print("saved", k, manager.save(), flush=True)
"""


def test_two_processes_save_to_one_directory(tmp_path: Path) -> None:
    script, directory = tmp_path / "saves.py", tmp_path / "shared"
    script.write_text(SAVES)
    a, b = Variable(np.zeros(5_000)), Variable(np.zeros(5_000))
    manager = CheckpointManager(Checkpoint(a=a, b=b), directory, None, init_fn=lambda: None)
    with start(script, directory, "1000") as one, start(script, directory, "2000") as other:
        for k in range(0, 100, 3):
            for child in (one, other):
                child.wait_for(rf"^saved {k} ")
                assert manager.restore_or_initialize() is not None
                assert len({*a.numpy(), *b.numpy()}) == 1  # of one process and one save
                assert manager.skipped_checkpoints == {}
        ended = [child.wait().ok() for child in (one, other)]
    paths = [line.split()[2] for child in ended for line in child.lines]
    assert len(set(paths)) == 200  # no number was given twice
    assert sorted(os.listdir(directory)) == sorted(names(manager))  # and no draft is left
    numbers = sorted(int(re.findall(r"\d+", os.path.basename(path))[0]) for path in paths)
    assert names(manager)[-1] == f"ckpt-{numbers[-1]}.safetensors"
    assert len(manager.checkpoints) <= 3
    assert set(manager.checkpoints) <= set(paths)


def test_a_number_that_was_given_and_deleted_is_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (CheckpointManager(Checkpoint(step=Variable(0)), tmp_path, max_to_keep=2) for _ in range(2))
    link, saved = os.link, []

    def after_the_others(draft: str, path: str) -> None:
        if not saved:
            saved.append(path)
            saved.extend(theirs.save() for _ in range(4))
        link(draft, path)

    monkeypatch.setattr(os, "link", after_the_others)
    path = mine.save()
    assert saved[0] == saved[1] == str(tmp_path / "ckpt-1.safetensors")
    assert path == str(tmp_path / "ckpt-5.safetensors")
    assert names(mine) == ["ckpt-4.safetensors", "ckpt-5.safetensors"]
    assert (mine.checkpoint.save_counter, theirs.checkpoint.save_counter) == (5, 4)
