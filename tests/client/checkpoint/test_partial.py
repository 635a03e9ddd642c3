"""Restoring a part of a model: a new head, renamed variables, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from central_storage.checkpoint.stored import reading
from central_storage.optimizers import Adam
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint
from central_storage.variables.moving_averages import ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointError, CheckpointMismatchError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets


def saved(directory: Path) -> str:
    body, head = {"w": Variable([1.0, 2.0]), "b": Variable(3.0)}, Variable(np.ones((2, 10)))
    average = ExponentialMovingAverage(0.5)
    average.apply([body["w"]])
    return Checkpoint(encoder=body, head=head, average=average, other={"encoder": {"w": Variable(9.0)}}).save(
        directory / "ckpt"
    )


def test_a_new_head(tmp_path: Path) -> None:
    body, head = {"w": Variable([0.0, 0.0]), "b": Variable(0.0)}, Variable(np.zeros((2, 3)))
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"head is float64\[2, 10\] in the checkpoint, but float64\[2, 3\] here"):
        Checkpoint(encoder=body, head=head).restore(path)
    assert body["w"].numpy().tolist() == [0.0, 0.0]
    status = Checkpoint(encoder=body).restore(path).assert_existing_objects_matched()
    assert status.unused == ("average/encoder/w", "head", "other/encoder/w")
    assert body["w"].numpy().tolist() == [1.0, 2.0]
    status = Checkpoint(encoder=body, classifier=head).restore(path).expect_partial()
    assert status.missing == ("classifier",)
    with pytest.raises(CheckpointMismatchError, match="does not hold classifier"):
        status.assert_existing_objects_matched()


def test_renamed_objects(tmp_path: Path) -> None:
    body: dict[str, Any] = {"w": Variable([0.0, 0.0]), "bias": Variable(0.0)}
    average = ExponentialMovingAverage(0.5)
    checkpoint = Checkpoint(model={"body": body}, average=average)
    path = saved(tmp_path)
    status = checkpoint.restore(path, renamed={"model/body": "encoder", "model/body/bias": "encoder/b"})
    status.assert_existing_objects_matched()
    assert status.unused == ("head", "other/encoder/w")  # that name only ends alike
    assert (body["w"].numpy().tolist(), float(body["bias"])) == ([1.0, 2.0], 3.0)
    shadow = average.average(body["w"])
    assert shadow is not None
    assert shadow.numpy().tolist() == [1.0, 2.0]
    assert checkpoint.save_counter == 1


def test_slots_follow_their_variable(tmp_path: Path) -> None:
    old, new = Variable([1.0, 2.0]), Variable([0.0, 0.0])
    optimizer, fresh = Adam(0.1), Adam(0.5)
    for slot, value in (("m", [3.0, 4.0]), ("v", [5.0, 6.0])):
        optimizer.set_slot(old, slot, np.array(value, np.float32))
    path = Checkpoint(old=old, optimizer=optimizer).write(tmp_path / "one")
    Checkpoint(new=new, optimizer=fresh).read(path, renamed={"new": "old"}).assert_consumed()
    assert new.numpy().tolist() == old.numpy().tolist()
    again = Checkpoint(new=new, optimizer=fresh).write(tmp_path / "two")
    with reading(again) as stored:
        assert stored.array("optimizer/m/new").tolist() == [3.0, 4.0]
        assert stored.array("optimizer/v/new").tolist() == [5.0, 6.0]


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    path = saved(tmp_path)
    w = Variable([0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"holds nothing of the name encode; .*`cs-ctl checkpoint show"):
        Checkpoint(w=w).restore(path, renamed={"w": "encode"})
    with pytest.raises(CheckpointError, match="renamed maps encoder/w and head to head; give each a name of its own"):
        Checkpoint(head=w).restore(path, renamed={"head": "encoder/w"})
    assert w.numpy().tolist() == [0.0, 0.0]
    Checkpoint(head=w).restore(path, renamed={"head": "encoder/w", "old head": "head"}).assert_nontrivial_match()
    assert w.numpy().tolist() == [1.0, 2.0]
