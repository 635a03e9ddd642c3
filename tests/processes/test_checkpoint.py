"""Checkpoints over services: into other devices, another number of replicas or none, and after a kill in the middle."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.harness.processes import start

import central_storage as cs
from central_storage import errors
from central_storage.checkpoint import disk

FORMAT_1 = Path(__file__).parents[1] / "data" / "format-1"
SUM = cs.VariableAggregation.SUM


class Training:
    """What a script makes: the same whatever the strategy, and whether there is one."""

    def __init__(self, strategy: cs.CentralStorageStrategy | None, rule: str = "Adam") -> None:
        if strategy is None:
            self._make(rule)
        else:
            with strategy.scope():
                self._make(rule)

    def _make(self, rule: str) -> None:
        self.weights = [cs.Variable(np.zeros((2, 3)), name="w"), cs.Variable(np.zeros(3), name="b")]
        self.more = {"steps": cs.Variable(0, name="steps", aggregation=SUM)}
        self.optimizer = getattr(cs.optimizers, rule)()
        self.mean = cs.metrics.Mean()
        self.average = cs.train.ExponentialMovingAverage(0.5)

    def step(self) -> None:
        self.optimizer.apply_gradients([(np.full(w.shape, 0.5), w) for w in self.weights])
        self.average.apply(self.weights)
        self.mean.update_state(np.ones(3))
        self.more["steps"].assign_add(np.asarray(1, np.int32))

    def facts(self) -> dict[str, Any]:
        """Everything that is to be the same after a restore."""
        optimizer = self.optimizer
        slots = {
            f"{slot}/{k}": optimizer.get_slot(w, slot).numpy()
            for k, w in enumerate(self.weights)
            for slot in optimizer.slot_names
        }
        shadows = {f"average/{k}": self.average.average(w) for k, w in enumerate(self.weights)}
        return {
            **{f"weights/{k}": w.numpy() for k, w in enumerate(self.weights)},
            **slots,
            **{name: None if shadow is None else shadow.numpy() for name, shadow in shadows.items()},
            "steps": self.more["steps"].numpy(),
            "iterations": int(optimizer.iterations),
            "learning_rate": float(optimizer.learning_rate),
            "mean": [v.numpy() for v in self.mean.variables],
        }


def checkpoint(training: Training) -> cs.train.Checkpoint:
    return cs.train.Checkpoint(training=training)


@pytest.fixture(scope="module")
def trained(two: cs.CentralStorageStrategy) -> Training:
    training = Training(two)
    training.optimizer.learning_rate = 0.25
    for _ in range(3):
        two.run(training.step)
    return training


@pytest.mark.parametrize("where", ["two", "three", "none"])
def test_another_strategy_takes_everything(
    trained: Training, where: str, tmp_path: Path, two: cs.CentralStorageStrategy, three: cs.CentralStorageStrategy
) -> None:
    path = checkpoint(trained).save(tmp_path / "ckpt")
    facts = trained.facts()
    assert facts["iterations"] == 3
    assert np.any(facts["m/0"])
    fresh = Training({"two": two, "three": three}.get(where))
    if where == "none":  # slots are kept by a strategy, and this has none
        fresh.optimizer = None
        status = checkpoint(fresh).restore(path).assert_existing_objects_matched()
        assert {name.split("/")[1] for name in status.unused} == {"optimizer"}
        for before, after in zip(trained.weights, fresh.weights, strict=True):
            np.testing.assert_array_equal(before.numpy(), after.numpy())
        return
    checkpoint(fresh).restore(path).assert_consumed()
    np.testing.assert_equal(fresh.facts(), facts)
    # And it goes on as the other would: the replicas' shares add up to the same gradient.
    for strategy, training in ((two, trained), ({"two": two, "three": three}[where], fresh)):
        strategy.run(_one_more, args=(training.optimizer, training.weights))
    np.testing.assert_allclose(fresh.weights[0].numpy(), trained.weights[0].numpy(), rtol=1e-12)
    checkpoint(trained).restore(path)  # for the tests behind this one


def _one_more(optimizer: Any, weights: list[cs.Variable]) -> None:
    context = cs.get_replica_context()
    assert context is not None
    optimizer.apply_gradients([(np.full(w.shape, 1.0 / context.num_replicas_in_sync), w) for w in weights])


def test_it_restores_into_variables_that_are_taken_along_later(
    trained: Training, tmp_path: Path, three: cs.CentralStorageStrategy
) -> None:
    path = checkpoint(trained).save(tmp_path / "ckpt")
    fresh = Training(None)
    three.run(fresh.step)
    checkpoint(fresh).restore(path).assert_consumed()
    np.testing.assert_equal(fresh.facts(), trained.facts())


def test_it_restores_outside_every_strategy_and_goes_on_in_one(
    trained: Training, tmp_path: Path, three: cs.CentralStorageStrategy
) -> None:
    path = checkpoint(trained).save(tmp_path / "ckpt")
    fresh = Training(None)
    checkpoint(fresh).restore(path).assert_consumed()
    assert int(fresh.optimizer.iterations) == int(trained.optimizer.iterations)
    three.run(lambda made: None, args=(vars(fresh),))  # it takes all of them along
    np.testing.assert_equal(fresh.facts(), trained.facts())


def test_slots_are_those_of_the_variables_that_were_updated(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    training = Training(two)
    optimizer, (w, _) = training.optimizer, training.weights
    two.run(lambda: optimizer.apply_gradients([(np.ones((2, 3)), w)]))
    path = cs.train.Checkpoint(optimizer=optimizer).save(tmp_path / "ckpt")  # w is not given, so it goes by its name
    fresh = cs.train.Checkpoint(optimizer=optimizer)
    fresh.restore(path).assert_consumed()
    assert set(load_file(path)) == {
        "optimizer/iterations",
        "optimizer/learning_rate",
        f"optimizer/m/({w.name})",
        f"optimizer/v/({w.name})",
        "(strategy)/seed",
        "(strategy)/steps",
    }


def test_another_rule_does_not_fit(trained: Training, tmp_path: Path, three: cs.CentralStorageStrategy) -> None:
    path = checkpoint(trained).save(tmp_path / "ckpt")
    status = checkpoint(Training(three, "SGD")).restore(path)
    with pytest.raises(errors.CheckpointMismatchError, match=r"training/optimizer/m/training/weights/0"):
        status.assert_consumed()


def test_a_training_that_was_saved_in_format_1_goes_on(three: cs.CentralStorageStrategy) -> None:
    path = FORMAT_1 / "training-1.safetensors"
    stored, fresh = load_file(path), Training(three)
    three.run(fresh.step)
    steps = three.controller.steps()
    assert steps
    checkpoint(fresh).restore(path).assert_consumed()
    assert three.controller.steps() == steps  # the file has no counts
    facts = fresh.facts()
    assert (facts["iterations"], facts["learning_rate"], float(facts["steps"])) == (3, 0.25, 6)
    for name in ("weights/0", "weights/1"):
        np.testing.assert_array_equal(facts[name], stored[f"training/{name}"])
    for slot in ("m", "v"):
        np.testing.assert_array_equal(facts[f"{slot}/0"], stored[f"training/optimizer/{slot}/training/weights/0"])
    np.testing.assert_array_equal(facts["average/1"], stored["training/average/training/weights/1"])


# --- strategy.save ------------------------------------------------------------------------------------------------


def test_a_strategy_saves_all_it_has(tmp_path: Path) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as one:
        training = Training(one)
        for _ in range(2):
            one.run(training.step)
        assert {v.name for v in one.variables} >= {"w", "b", "steps", "mean/total", "w/ExponentialMovingAverage"}
        assert one.variables[0] is training.weights[0]
        path = one.save(tmp_path / "run")
        assert path == str(tmp_path / "run" / "strategy.safetensors")
        facts = training.facts()
    with cs.CentralStorageStrategy(["cpu:0"]) as other:
        fresh = Training(other)
        other.restore(tmp_path / "run")
        np.testing.assert_equal(fresh.facts(), facts)
        extra = None
        with other.scope():
            extra = cs.Variable(1.0, name="extra")
        fresh.weights[0].assign(np.zeros((2, 3)))
        with pytest.raises(
            errors.CheckpointMismatchError, match=r"does not hold variables/extra\. Nothing was restored"
        ):
            other.restore(tmp_path / "run")
        assert not fresh.weights[0].numpy().any()
        assert float(extra) == 1.0
        with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
            other.restore(tmp_path / "elsewhere")
        del extra
        gc.collect()
        content = bytearray(Path(path).read_bytes())
        content[-1] ^= 1
        Path(path).write_bytes(content)
        with pytest.raises(errors.CheckpointDamagedError, match=r"strategy\.safetensors is damaged"):
            other.restore(tmp_path / "run")
        assert not fresh.weights[0].numpy().any()
        other.restore(FORMAT_1)
        np.testing.assert_array_equal(
            fresh.weights[0].numpy(), load_file(FORMAT_1 / "strategy.safetensors")["variables/w"]
        )


def test_a_merge_function_may_save_and_a_replica_may_not(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    with two.scope():
        w = cs.Variable([1.0, 2.0], aggregation=SUM)
    directory = str(tmp_path)

    def merge(strategy: Any) -> str:
        saved: str = cs.train.Checkpoint(w=w).save(f"{directory}/merged")
        return saved

    def step() -> Any:
        w.assign_add(np.ones(2, np.float32))
        context = cs.get_replica_context()
        assert context is not None
        return context.merge_call(merge)

    path = two.run(step)
    w.assign([0.0, 0.0])
    cs.train.Checkpoint(w=w).restore(path).assert_consumed()
    assert w.numpy().tolist() == [3.0, 4.0]
    with pytest.raises(errors.ContextError, match="saved only in the script"):
        two.run(lambda: cs.train.Checkpoint(w=w).save(f"{directory}/x"))


# --- kills --------------------------------------------------------------------------------------------------------

SAVES = """
import sys
import numpy as np
import central_storage as cs

a, b = cs.Variable(np.zeros(200_000)), cs.Variable(np.zeros(200_000))
manager = cs.train.CheckpointManager(cs.train.Checkpoint(a=a, b=b), sys.argv[1], max_to_keep=2)
k = 0
while True:
    k += 1
    a.assign(np.full(200_000, float(k)))
    b.assign(np.full(200_000, float(k)))
    manager.save()
    print("saved", k, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    for saved in (1, 2, 5):
        directory = tmp_path / str(saved)
        with start(script, directory) as child:
            child.wait_for(rf"^saved {saved}$")
            child.signal(signal.SIGKILL)
            child.wait()
            said = int(child.out.split()[-1])
        a, b = cs.Variable(np.zeros(200_000)), cs.Variable(np.zeros(200_000))
        manager = cs.train.CheckpointManager(cs.train.Checkpoint(a=a, b=b), directory, max_to_keep=2)
        assert manager.restore_or_initialize() is not None
        assert set(a.numpy()) == set(b.numpy())  # of one save, and no older than what was said
        assert a.numpy()[0] >= said
        assert len(manager.checkpoints) <= 3
        path = manager.save()  # removes what the killed process was writing
        assert path in manager.checkpoints
        assert sorted(map(str, directory.iterdir())) == sorted(manager.checkpoints)


# --- deaths of the server -----------------------------------------------------------------------------------------


def test_the_server_dies_while_slots_are_restored_in_pieces(
    mortal: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever piece is sent then: it is set once, whole, and where it belongs."""
    monkeypatch.setattr(disk, "PART", 1 << 16)
    with mortal.scope():
        table, adam = cs.Variable(np.zeros((2000, 25), np.float32), sparse=True), cs.optimizers.Adam()

    def fill(seed: int) -> None:
        rng = np.random.default_rng(seed)
        table.assign(rng.normal(size=table.shape).astype(np.float32))
        for slot in ("m", "v"):
            adam.get_slot(table, slot).assign(rng.normal(size=table.shape).astype(np.float32))

    def bits() -> list[bytes]:
        return [table.numpy().tobytes(), *(adam.get_slot(table, slot).numpy().tobytes() for slot in ("m", "v"))]

    checkpoint = cs.train.Checkpoint(table=table, adam=adam)
    fill(0)
    path, expected = checkpoint.write(tmp_path / "x"), bits()
    assign_slot = mortal.controller.assign_slot
    sent: list[int | None] = []
    dying = 0

    def send(optimizer: int, variable: int, slot: str, value: np.ndarray, first: int | None = None) -> None:
        if len(sent) == dying:
            os.kill(mortal.statistics().pid, signal.SIGKILL)
        sent.append(first)
        assign_slot(optimizer, variable, slot, value, first)

    monkeypatch.setattr(mortal.controller, "assign_slot", send)
    for dying in (0, 2, 5):
        with monkeypatch.context() as patched:
            patched.setattr(mortal.controller, "assign_slot", assign_slot)
            fill(dying + 1)
        sent.clear()
        before = mortal.statistics().pid
        checkpoint.read(path).assert_consumed()
        assert bits() == expected
        assert mortal.statistics().pid != before
        assert sent == [0, 655, 1310, 1965] * 2
