"""Which trainings the server decides in one pass, as ``strategy.statistics()`` tells."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.captured import nearly_all_captured

import central_storage as cs

STEPS = 400


def test_the_quick_start(two: cs.CentralStorageStrategy) -> None:
    """That of the README."""
    x = np.random.default_rng(0).normal(size=(1024, 8)).astype(np.float32)
    y = x @ np.arange(1, 9, dtype=np.float32)
    with two.scope():
        w = cs.Variable(np.zeros(8, np.float32), name="w")
        optimizer = cs.optimizers.SGD(learning_rate=0.1)

    @cs.function
    def step(batch: Any) -> Any:
        x, y = batch
        error = x @ w - y
        optimizer.apply_gradients([(x.T @ error / 128, w)])
        return (error**2).sum() / 128

    batches = two.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices((x, y)).batch(128))
    with nearly_all_captured(two, STEPS):
        for _ in range(STEPS // 8):
            losses = [two.reduce("SUM", two.run(step, args=(batch,)), axis=None) for batch in batches]
    assert np.mean(losses) < 1e-6


@pytest.mark.parametrize("reads", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_and_evaluation_in_turns(two: cs.CentralStorageStrategy, reads: bool) -> None:
    """Each with the update of a metric; the script may read after each step, and count the steps."""
    with two.scope():
        w = cs.Variable(np.zeros(8, np.float32))
        optimizer = cs.optimizers.Adam(0.1)
        losses, errors = cs.metrics.Mean(), cs.metrics.Mean()

    @cs.function
    def train(x: Any) -> None:
        error = np.asarray(w) - x
        losses.update_state(np.sum(error**2))
        optimizer.apply_gradients([(error, w)])

    def evaluate(x: Any) -> Any:
        error = np.abs(np.asarray(w) - x)
        errors.update_state(error)
        return error

    x = np.arange(8, dtype=np.float32)
    with nearly_all_captured(two, STEPS):
        for done in range(1, STEPS // 2 + 1):
            two.run(train, args=(x,))
            two.run(evaluate, args=(x,))
            if reads:
                assert int(optimizer.iterations) == done
                assert float(w.numpy()[7]) > 0
                assert float(losses.result()) > 0
    assert float(errors.result()) < 3


@pytest.mark.parametrize("is_called", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rate_for_each_step(two: cs.CentralStorageStrategy, is_called: bool) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(4, np.float32))
        optimizer = cs.optimizers.SGD((lambda step: 1 / (step + 1)) if is_called else 1.0)

    @cs.function
    def train() -> None:
        optimizer.apply_gradients([(np.full(4, 0.5, np.float32), w)])

    with nearly_all_captured(two, STEPS):
        for k in range(STEPS):
            if not is_called:
                optimizer.learning_rate = 1 / (k + 1)
            two.run(train)
    assert float(w.numpy()[0]) == pytest.approx(-sum(1 / (k + 1) for k in range(STEPS)), rel=1e-4)


def test_run_and_run_steps_in_turns(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(4, np.float32))
        count = cs.Variable(np.zeros((), np.float32), trainable=False, aggregation=cs.VariableAggregation.SUM)
        optimizer = cs.optimizers.SGD(0.01)

    @cs.function
    def train(x: Any) -> Any:
        optimizer.apply_gradients([(np.full(4, x.sum(), np.float32), w)])
        count.assign_add(np.float32(1))
        return x.sum()

    batches = two.experimental_distribute_dataset(cs.data.Dataset.range(20).batch(2))
    with nearly_all_captured(two, STEPS):
        for _ in range(STEPS // 20):
            list(two.run_steps(train, batches))
            for batch in islice(cycle(batches), 10):
                two.run(train, args=(batch,))
    assert float(count.numpy()) == 2 * STEPS


def asked(strategy: cs.CentralStorageStrategy, epochs: int, lookahead: int | None) -> tuple[list[Any], list[bytes]]:
    """Every result of a training whose replicas combine values before, between and after their updates, and what all
    variables hold in the end. ``lookahead``: None stands for single runs."""
    with strategy.scope():
        w = cs.Variable(np.linspace(-1, 1, 8, dtype=np.float32), name="w")
        optimizer = cs.optimizers.Adam(0.01)
        count = cs.Variable(np.zeros(2, np.float32), trainable=False, aggregation=cs.VariableAggregation.SUM)

    @cs.function
    def step(k: Any) -> Any:
        context = cs.get_replica_context()
        assert context is not None
        number, replica = int(np.ravel(k)[0]), int(context.replica_id_in_sync_group)
        mean = context.all_reduce("MEAN", np.asarray(w) * (replica + 1) + number)
        count.assign_add(mean[:2])
        optimizer.apply_gradients([(mean + replica, w)])
        rows = cs.IndexedSlices(np.full((2, 2), mean[0], np.float32), np.array([replica, 1]), (3, 2))
        total = context.all_reduce("SUM", rows)
        several = context.all_gather(np.full(replica + 1, number, np.float32), axis=0)
        count.assign_add(several[:2])
        return float(np.sum(np.asarray(total.values))) + float(several.sum()) + float(mean.sum())

    said: list[Any] = []
    elements = [np.full(2, k) for k in range(20)]
    for _ in range(epochs):
        if lookahead is None:
            results = [strategy.run(step, (element,)) for element in elements]
        else:
            data = strategy.experimental_distribute_dataset(elements)
            results = list(strategy.run_steps(step, data, lookahead=lookahead))
        said += [[float(each) for each in strategy.experimental_local_results(result)] for result in results]
    return said, [np.asarray(each.numpy()).tobytes() for each in (w, count, optimizer.get_slot(w, "m"))]


@pytest.mark.parametrize("lookahead", [None, 2])
@pytest.mark.parametrize("mailboxes", ["on", "off"])
def test_replicas_combine_values(mailboxes: str, lookahead: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        expected = asked(strategy, 8, lookahead)
    monkeypatch.setenv("CS_MAILBOXES", mailboxes)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert asked(strategy, 8, lookahead) == expected
        counters = strategy.statistics()
    assert counters.captured >= 0.98 * counters.runs, counters.uncaptured


ENDS = {
    # In a step the server decides twelve events and sends seven messages or more; each worker asks three times.
    "the server": [*(f"server.decided=kill@{n}" for n in (41, 45, 52)), "server.send=kill@40", "server.heard=kill@43"],
    "a worker": [*(f"worker.ask[0]=kill@{n}" for n in (8, 9, 10)), "worker.return[1]=kill@6"],
    "both": ["server.decided=kill@49", "worker.ask[1]=kill@12", "server.send=kill@52", "worker.ask[0]=kill@14"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lookahead", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("who", ENDS)
def test_processes_are_killed_while_replicas_combine_values(
    who: str, lookahead: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(ENDS[who], tmp_path, monkeypatch, lookahead)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lookahead", [None, 2])
def test_a_server_is_killed_after_every_event_of_such_a_step(
    lookahead: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [f"server.{place}=kill@{number}" for place in ("decided", "heard", "send") for number in range(60, 76)]
    killed(items, tmp_path, monkeypatch, lookahead, epochs=30)


def killed(
    items: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch, lookahead: int | None, epochs: int = 3
) -> None:
    """The training is that of one process, although ``items`` happen in it, each once."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        expected = asked(strategy, epochs, lookahead)
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(items))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(directory))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        assert asked(strategy, epochs, lookahead) == expected
    assert {path.name for path in directory.iterdir()} == set(items)


def test_what_is_not_captured_is_counted_by_its_reason(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(4, np.float32))

    def reduces() -> Any:
        context = cs.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", np.ones(1 << 14))[:2]

    def raises() -> None:
        raise ValueError("for the test")

    def changed(before: cs.Counters) -> dict[str, int]:
        known = dict(before.uncaptured)
        return {why: n - known.get(why, 0) for why, n in two.statistics().uncaptured if n > known.get(why, 0)}

    before = two.statistics()
    two.run(reduces)
    assert changed(before) == {"all_reduce or all_gather of more than 64 KiB in a replica": 1}
    before = two.statistics()
    with pytest.raises(ValueError, match="for the test"):
        two.run(raises)
    assert changed(before) == {"a failure or Ctrl-C": 1}
    two.run(lambda: None)  # after which all is quiet
    before = two.statistics()
    for _ in range(5):
        w.assign(np.ones(4, np.float32))
        two.run(lambda: None)
    (why,) = changed(before)
    assert why.startswith("another request during the step or just before it")
