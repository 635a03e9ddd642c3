"""Names around checkpoints that TensorFlow has: numbered and plain files, intervals, and what is kept for good."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from central_storage import Variable, errors
from central_storage.optimizers import Adam
from central_storage.train import Checkpoint, CheckpointManager, latest_checkpoint

HOUR = 3600


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(step=Variable(0))


def names(manager: CheckpointManager) -> list[str]:
    return [os.path.basename(path) for path in manager.checkpoints]


def test_what_is_written_is_read_and_not_counted(tmp_path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.save(tmp_path / "numbered")
    checkpoint.step.assign(7)
    path = checkpoint.write(tmp_path / "plain")
    assert path == str(tmp_path / "plain.safetensors")
    checkpoint.step.assign(8)
    checkpoint.save(tmp_path / "numbered")
    checkpoint.read(path).assert_consumed()
    assert (int(checkpoint.step), checkpoint.save_counter) == (7, 2)
    checkpoint.write(path)  # replaces it
    with pytest.raises(errors.InvalidArgumentError, match="numbered checkpoint"):
        checkpoint.write(tmp_path / "plain-3")
    with pytest.raises(errors.CheckpointError, match="nothing"):
        checkpoint.read(tmp_path / "nothing")


class Model:
    def __init__(self, value: float) -> None:
        self.w = Variable([value, value])
        self.layers = [Variable(value), {"a/b": Variable(value + 1)}]


def test_a_root_gives_its_parts(tmp_path: Path) -> None:
    saved, optimizer = Model(1.0), Adam(0.5)
    path = Checkpoint(saved, optimizer=optimizer).save(tmp_path / "ckpt")
    restored = Model(0.0)
    Checkpoint(restored, optimizer=Adam()).restore(path).assert_consumed()
    assert restored.w.numpy().tolist() == [1, 1]
    assert [float(each) for each in (restored.layers[0], restored.layers[1]["a/b"])] == [1, 2]  # type: ignore[index]
    apart = Model(0.0)
    Checkpoint(w=apart.w, layers=apart.layers, optimizer=Adam()).restore(path).assert_consumed()
    assert apart.w.numpy().tolist() == [1, 1]
    for checkpoint in (Checkpoint(saved, other=optimizer), Checkpoint(root=saved, other=optimizer)):
        assert repr(checkpoint) == "<Checkpoint of w, layers, other>"


def test_what_cannot_be_a_root(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"root is a Variable, which has no parts; give it a name"):
        Checkpoint(Variable(1.0))
    with pytest.raises(errors.InvalidArgumentError, match=r"root is a Variable, which has no parts; give it a name"):
        Checkpoint(root=Variable(1.0))
    with pytest.raises(errors.InvalidArgumentError, match="root is a int, which holds no variables"):
        Checkpoint(3)
    with pytest.raises(errors.InvalidArgumentError, match="root has a part 'w' of its own"):
        Checkpoint(Model(1.0), w=Variable(1.0))


def test_the_latest_is_found_without_a_manager(tmp_path: Path, checkpoint: Checkpoint) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    assert latest_checkpoint(tmp_path) is None
    checkpoint.write(tmp_path / "plain")
    paths = [checkpoint.save(tmp_path / "a-b") for _ in range(11)]
    (tmp_path / "a-b-99.safetensors.0123456789abcdef.draft").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == paths[-1]  # the number decides, not the word
    os.utime(paths[0], ns=(2**62, 2**62))
    assert latest_checkpoint(tmp_path) == paths[-1]
    other = CheckpointManager(checkpoint, tmp_path, None, checkpoint_name="other").save()
    os.utime(paths[-1], (0, 0))
    assert latest_checkpoint(tmp_path) == other
    with pytest.raises(errors.InvalidArgumentError, match="latest_filename"):
        latest_checkpoint(tmp_path, "checkpoint")  # type: ignore[arg-type]


def test_one_checkpoint_of_every_so_many_hours_is_kept(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=2)
    for k in range(12):
        path = manager.save()
        assert path is not None
        os.utime(path, (k * HOUR, k * HOUR))
        if k == 6:  # a script that is started again goes on
            manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=2)
    assert names(manager) == ["ckpt-11.safetensors", "ckpt-12.safetensors"]
    kept = [f"ckpt-{k}.safetensors{end}" for k in (3, 5, 7, 9) for end in ("", ".kept")]
    assert sorted(os.listdir(tmp_path)) == sorted([*names(manager), *kept])


def test_what_was_kept_stays_and_is_the_last_resort(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=1)
    for k in range(3):
        checkpoint.step.assign(k)
        path = manager.save()
        assert path is not None
        os.utime(path, (k * HOUR, k * HOUR))
    plain = CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    assert plain.save() == str(tmp_path / "ckpt-4.safetensors")
    assert (tmp_path / "ckpt-2.safetensors").exists()
    for path in plain.checkpoints:
        os.unlink(path)
    assert plain.restore_or_initialize() == str(tmp_path / "ckpt-2.safetensors")
    assert int(checkpoint.step) == 1


def test_a_checkpoint_every_so_many_steps(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manager = CheckpointManager(checkpoint, tmp_path, None, step_counter=checkpoint.step, checkpoint_interval=3)
    assert manager.checkpoint_interval == 3
    saved = []
    for k in range(8):
        checkpoint.step.assign(k)
        saved.append(manager.save() is not None)
    assert saved == [True, False, False, True, False, False, True, False]
    assert manager.save(check_interval=False) is not None
    again = CheckpointManager(checkpoint, tmp_path, None, step_counter=checkpoint.step, checkpoint_interval=3)
    again.restore_or_initialize()
    assert again.save() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_checkpoint_every_n_hours": 0}, "keep_checkpoint_every_n_hours"),
        ({"keep_checkpoint_every_n_hours": "2"}, "keep_checkpoint_every_n_hours"),
        ({"checkpoint_interval": 5}, "needs step_counter"),
        ({"checkpoint_interval": 5, "step_counter": 3}, "needs step_counter"),
        ({"checkpoint_interval": 0, "step_counter": Variable(0)}, "number of steps from 1"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    tmp_path: Path, checkpoint: Checkpoint, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=says):
        CheckpointManager(checkpoint, tmp_path, 1, **options)


def test_a_restore_that_matches_nothing(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = checkpoint.write(tmp_path / "plain")
    checkpoint.read(path).assert_nontrivial_match()
    with pytest.raises(errors.CheckpointMismatchError, match="holds no value of the objects"):
        Checkpoint(other=Variable(0)).read(path).assert_nontrivial_match()
    with pytest.raises(errors.CheckpointMismatchError, match="no checkpoint"):
        checkpoint.restore(None).assert_nontrivial_match()


def test_an_optimizer_outside_every_strategy_is_saved_as_it_was_restored(tmp_path: Path) -> None:
    w = Variable([1.0, 2.0], name="w")
    adam = Adam(0.5)
    adam.set_slot(w, "m", w.numpy() * 3)
    adam.iterations = 4
    path = Checkpoint(w=w, adam=adam).save(tmp_path / "ckpt")
    other, fresh = Variable([0.0, 0.0]), Adam()
    Checkpoint(w=other, adam=fresh).restore(path).assert_consumed()
    assert (int(fresh.iterations), fresh.learning_rate) == (4, 0.5)
    assert fresh.slot_value(other, "m").tolist() == [3.0, 6.0]
    again = Checkpoint(w=other, adam=fresh).save(tmp_path / "again")
    Checkpoint(w=w, adam=adam).restore(again).assert_consumed()
    assert adam.slot_value(w, "m").tolist() == [3.0, 6.0]
