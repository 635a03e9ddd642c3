"""A training that goes on from a checkpoint is the one that was never interrupted, bit for bit: with random numbers,
shuffled data, a schedule and steps that are sent ahead, wherever it is cut and however often it starts again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from central_storage.checkpoint import entries
from central_storage.core.random_streams import function_name

DEVICES = ["cpu:0", "cpu:1"]
EPOCHS, BATCHES = 3, 5


@pytest.fixture(scope="module")
def services() -> Iterator[list[cs.CentralStorageStrategy]]:
    """One of processes and one of threads, of one seed and with other runs behind them."""
    with (
        cs.CentralStorageStrategy(DEVICES, seed=11) as processes,
        cs.CentralStorageStrategy(DEVICES, seed=11, in_process=True) as threads,
    ):
        connected(processes)
        connected(connected(threads))
        yield [processes, threads]


class Training:
    """What a script makes, and its loop."""

    def __init__(self, strategy: cs.CentralStorageStrategy, rule: str) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = cs.Variable(np.linspace(0, 1, 6), name="weights")
            schedule = cs.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8)
            self.optimizer = getattr(cs.optimizers, rule)(learning_rate=schedule)
            self.loss = cs.metrics.Mean()
            self.average = cs.train.ExponentialMovingAverage(0.9)
        rows = np.arange(4 * BATCHES * 6, dtype=np.float64).reshape(-1, 6)
        data = cs.data.Dataset.from_tensor_slices(rows / rows.size).shuffle(7).batch(4)  # not seeded by the script
        self.data = strategy.experimental_distribute_dataset(data)
        self.checkpoint = cs.train.Checkpoint(
            weights=self.weights, optimizer=self.optimizer, loss=self.loss, average=self.average, data=self.data
        )

    def train(self, cut: int | None, lookahead: int | None, path: Path) -> tuple[list[Any], str]:
        """What the steps bring from here on, each with its epoch, and a checkpoint: of the end or, where ``cut`` says
        so, of when the loop has had so many results, which then ends as if the machine had."""
        seen: list[Any] = []
        for epoch in range(self.data.epoch, EPOCHS):
            for result in self.steps(lookahead):
                seen.append((epoch, [share.tobytes() for share in self.strategy.experimental_local_results(result)]))
                if len(seen) == cut:
                    return seen, self.checkpoint.save(path)
        return seen, self.checkpoint.save(path)

    def steps(self, lookahead: int | None) -> Iterator[Any]:
        weights, optimizer, loss, average = self.weights, self.optimizer, self.loss, self.average

        def step(batch: Any) -> Any:
            noise = np.random.normal(size=weights.shape) + random.random()
            kept = np.random.random(batch.shape) < 0.5
            gradient = (batch * kept).sum(axis=0) * np.asarray(weights) + noise
            optimizer.apply_gradients([(gradient, weights)])
            average.apply([weights])
            loss.update_state(gradient)
            return np.concatenate([batch.ravel(), gradient, np.asarray(weights)])

        if lookahead is None:
            return (self.strategy.run(step, args=(batch,)) for batch in self.data)
        return self.strategy.run_steps(step, self.data, lookahead=lookahead)

    def state(self) -> list[Any]:
        slots = [self.optimizer.get_slot(self.weights, slot).numpy() for slot in self.optimizer.slot_names]
        shadow = self.average.average(self.weights)
        assert shadow is not None
        variables = [self.weights, shadow, *self.loss.variables]
        arrays = [*slots, *(variable.numpy() for variable in variables)]
        return [int(self.optimizer.iterations), self.data.epoch, *(array.tobytes() for array in arrays)]


@pytest.mark.parametrize(
    ("rule", "lookahead", "cuts"),
    [
        pytest.param("Adam", None, [], marks=pytest.mark.slow),
        pytest.param("Adam", None, [7], marks=pytest.mark.slow),
        ("Adam", 2, [4]),  # the loop has had the last but one result of an epoch, and the data has told its end
        ("Nadam", 2, [1, 2, 7]),
        ("RMSprop", 0, [5, 1, 6]),  # at the end of an epoch
    ],
)
def test_the_same_bits(
    services: list[cs.CentralStorageStrategy], tmp_path: Path, rule: str, lookahead: int | None, cuts: list[int]
) -> None:
    whole = Training(services[0], rule)
    begin = whole.checkpoint.save(tmp_path / "begin")
    expected, _ = whole.train(None, None, tmp_path / "whole")
    assert len(expected) == EPOCHS * BATCHES
    done, path = 0, begin
    for part, cut in enumerate([*cuts, None]):
        training = Training(services[(part + 1) % 2], rule)
        training.checkpoint.restore(path).assert_consumed()
        seen, path = training.train(cut, lookahead, tmp_path / f"part-{part}")
        assert seen == expected[done : done + len(seen)]
        done += len(seen) if lookahead is None or cut is None else ahead_of(training, done, len(seen), lookahead)
    assert done == len(expected)
    assert training.state() == whole.state()


def ahead_of(training: Training, done: int, seen: int, lookahead: int) -> int:
    """How many steps a part has made when its loop has had so many results: of an epoch no more than there are."""
    left = BATCHES - (done + seen) % BATCHES if (done + seen) % BATCHES else 0
    return seen + min(lookahead, left)


def test_a_strategy_saves_the_count_of_runs_and_positions(
    services: list[cs.CentralStorageStrategy], tmp_path: Path
) -> None:
    with cs.CentralStorageStrategy(["cpu:0"], seed=11, in_process=True) as strategy:
        data = strategy.experimental_distribute_dataset([np.full(1, n) for n in range(6)])
        with strategy.scope():
            total = cs.Variable(0.0)

        def step(batch: Any) -> tuple[float, float]:
            total.assign_add(np.float32(1))
            return float(batch[0]), np.random.random()

        elements = iter(data)
        first = [strategy.run(step, args=(next(elements),)) for _ in range(3)]
        strategy.save(tmp_path, data=data)
        goes_on = [strategy.run(step, args=(element,)) for element in elements]
        strategy.restore(tmp_path, data=data)
        assert [strategy.run(step, args=(element,)) for element in data] == goes_on
        assert len({number for _, number in first + goes_on}) == 6
        assert float(total) == 6
        with pytest.raises(cs.errors.CheckpointMismatchError, match="no object uses data/epoch"):
            strategy.restore(tmp_path)
        with pytest.raises(cs.errors.InvalidArgumentError, match="data is a int, which holds no variables"):
            strategy.save(tmp_path, data=3)


def test_steps_that_never_began_draw_nothing(services: list[cs.CentralStorageStrategy]) -> None:
    """After a step that fails the next one draws the same, however many were sent ahead."""
    strategy, _ = services

    def step(batch: Any) -> float:
        if batch[0] == 1:
            raise KeyError(1)
        return np.random.random()

    found = []
    for lookahead in (0, 2):
        begun = strategy.controller.steps()
        data = iter(strategy.experimental_distribute_dataset([np.full(2, n) for n in range(6)]))
        with pytest.raises(KeyError):
            list(strategy.run_steps(step, data, lookahead=lookahead))
        name = function_name(step)
        assert strategy.controller.steps() == begun | {name: begun.get(name, 0) + 2}
        assert data.position == 2
        found.append([strategy.run(step, args=(element,)).values for element in data])
        strategy.controller.set_steps(begun)
    assert found[0] == found[1]


def test_another_seed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed, said in ((1, 0), (2, 1)):
        with cs.CentralStorageStrategy(["cpu:0"], seed=seed, in_process=True) as strategy:
            with strategy.scope():
                checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
            if seed == 1:
                path = checkpoint.save(tmp_path / "c")
            checkpoint.restore(path).assert_consumed()
            lines = [record.message for record in caplog.records if "was saved with the seed" in record.message]
            assert len(lines) == said
    assert "saved with the seed 1, but this strategy has 2" in lines[0]


def test_a_file_without_the_count_leaves_it(services: list[cs.CentralStorageStrategy], tmp_path: Path) -> None:
    """Variables outside every strategy have none, and need none."""
    strategy, _ = services
    path = cs.train.Checkpoint(w=cs.Variable(3.0)).save(tmp_path / "local")
    with strategy.scope():
        checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
    before = strategy.controller.steps()
    checkpoint.restore(path).assert_consumed()
    assert strategy.controller.steps() == before
    with_count = checkpoint.save(tmp_path / "central")
    cs.train.Checkpoint(w=cs.Variable(0.0)).restore(with_count).assert_consumed()


@pytest.mark.parametrize("text", ['{"m.step": -1}', '{"m.step": 0.5}', "[1]", "{", "[" * 100_000, ""])
def test_a_text_that_is_no_table_of_counts_is_a_fault(text: str) -> None:
    assert entries._fault_of_steps(np.frombuffer(text.encode(), np.uint8)) is not None
    assert entries._fault_of_steps(np.frombuffer(b'{"m.step": 3}', np.uint8)) is None


def test_counts_that_are_none_are_refused(services: list[cs.CentralStorageStrategy], tmp_path: Path) -> None:
    strategy, _ = services
    with strategy.scope():
        w = cs.Variable(1.0)
    checkpoint = cs.train.Checkpoint(w=w)
    counts = strategy.controller.steps()
    strategy.controller.set_steps({"m.step": -1})
    path = checkpoint.save(tmp_path / "c")
    strategy.controller.set_steps(counts)
    w.assign(2.0)
    with pytest.raises(cs.errors.CheckpointError, match=r"\(strategy\)/steps: it is not the text of .*Nothing was"):
        checkpoint.restore(path)
    assert float(w) == 2
    assert strategy.controller.steps() == counts


@pytest.mark.slow
def test_a_merge_function_saves_the_count_and_leaves_it_at_a_restore(
    services: list[cs.CentralStorageStrategy], tmp_path: Path
) -> None:
    strategy, _ = services
    with strategy.scope():
        w = cs.Variable(1.0)
    prefix = str(tmp_path / "merged")

    def merge(_: Any) -> str:
        saved: str = cs.train.Checkpoint(w=w).save(prefix)
        return saved

    def step() -> Any:
        context = cs.get_replica_context()
        assert context is not None
        return context.merge_call(merge), np.random.random()

    path, _ = strategy.run(step)
    after = strategy.run(np.random.random)
    cs.train.Checkpoint(w=w).restore(path).assert_consumed()
    assert strategy.run(np.random.random).values == after.values

    def restore(_: Any) -> None:
        cs.train.Checkpoint(w=w).restore(path).assert_consumed()

    def restoring() -> None:
        context = cs.get_replica_context()
        assert context is not None
        context.merge_call(restore)

    counts = strategy.controller.steps()
    strategy.run(restoring)
    assert strategy.controller.steps() == counts | {function_name(restoring): 1}
