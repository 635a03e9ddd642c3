"""Where a training is in its data goes through a checkpoint: the elements that come next are those that would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.client.strategy.test_run_steps import Played

from central_storage.core.options import InputOptions, InputReplicationMode
from central_storage.core.pipeline import Series
from central_storage.data.dataset import Dataset
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, elsewhere
from central_storage.data.input_context import InputContext
from central_storage.strategy.run_steps import Steps
from central_storage.train import Checkpoint
from cs_proto.errors import CheckpointError, DatasetContextError, InvalidArgumentError

ROWS = 14


def rows() -> Dataset:
    return Dataset.from_tensor_slices(np.arange(ROWS))


def split(dataset: Any) -> DistributedDataset:
    return DistributedDataset(dataset, 1)


def in_turn(dataset: Callable[[], Dataset], per_replica: bool) -> DistributedFromFunction:
    mode = InputReplicationMode.PER_REPLICA if per_replica else InputReplicationMode.PER_WORKER

    def make(context: InputContext) -> Dataset:
        return dataset().shard(context.num_input_pipelines, context.input_pipeline_id)

    return DistributedFromFunction(make, 2, InputOptions(experimental_replication_mode=mode))


def batches() -> list[np.ndarray]:
    return [np.full(2, number) for number in range(7)]


def draw() -> Iterable[np.ndarray]:
    yield from batches()


PIPELINES: dict[str, Callable[[], Any]] = {
    "plain": lambda: split(rows().batch(3)),
    "shuffled": lambda: split(rows().shuffle(5, seed=3).batch(3)),
    "unseeded": lambda: split(rows().shuffle(ROWS).batch(3)),
    "always the same": lambda: split(rows().shuffle(5, seed=3, reshuffle_each_iteration=False).batch(3)),
    "twice": lambda: split(rows().shuffle(5).batch(2).shuffle(4, seed=9).prefetch(2)),
    "repeated": lambda: split(rows().shuffle(ROWS).repeat(3).batch(4)),
    "zipped": lambda: split(Dataset.zip(rows().shuffle(4), rows().map(lambda x: -x).shuffle(3)).batch(3)),
    "joined": lambda: split(rows().shuffle(4).concatenate(rows().shuffle(3)).batch(3)),
    "remembered": lambda: split(rows().shuffle(ROWS).cache().batch(3)),
    "remembered in the middle": lambda: split(rows().shuffle(5).cache().batch(2).shuffle(4).cache().shuffle(3)),
    "generated": lambda: split(Dataset.from_generator(draw).shuffle(4)),
    "a list": lambda: split(batches()),
    "in turn": lambda: in_turn(lambda: rows().shuffle(5).batch(1), per_replica=False),
    "per replica": lambda: in_turn(lambda: rows().shuffle(5).batch(1), per_replica=True),
}


def shown(element: Any) -> Any:
    return [np.asarray(part).tolist() for part in getattr(element, "values", (element,))]


def go_through(data: Any, epochs: int, stop: int | None = None) -> list[Any]:
    """Every element of the epochs that are left, up to ``stop`` of them, with the epoch."""
    seen: list[Any] = []
    for epoch in range(data.epoch, epochs):
        for element in data:
            seen.append((epoch, shown(element)))
            if len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("name", PIPELINES)
def test_what_comes_next_is_what_would_have_come(name: str, tmp_path: Path) -> None:
    make = PIPELINES[name]
    whole, paths = make(), []
    checkpoint, seen = Checkpoint(data=whole), []
    paths.append(checkpoint.save(tmp_path / "c"))
    for epoch in range(3):
        for element in whole:
            seen.append((epoch, shown(element)))
            paths.append(checkpoint.save(tmp_path / "c"))
    paths.append(checkpoint.save(tmp_path / "c"))
    assert whole.epoch == 3
    for used, path in enumerate(paths[:-1]):
        data = make()
        list(data)  # whatever happened to it before
        Checkpoint(data=data).restore(path).assert_consumed()
        assert go_through(data, 3) == seen[used:]
    # Restored, used for a while, saved again, three times over.
    again, left = make(), seen
    Checkpoint(data=again).restore(paths[0]).assert_consumed()
    for _ in range(3):
        assert go_through(again_at(make, again, tmp_path), 3, 4) == left[:4]
        again, left = moved(make, again, tmp_path, 4), left[4:]
    assert go_through(again, 3) == left


def again_at(make: Callable[[], Any], data: Any, tmp_path: Path) -> Any:
    """Another one at the same place."""
    other = make()
    path = Checkpoint(data=data).save(tmp_path / "again")
    Checkpoint(data=other).restore(path).assert_consumed()
    return other


def moved(make: Callable[[], Any], data: Any, tmp_path: Path, count: int) -> Any:
    """Another one, at the place where ``data`` is so many elements later."""
    taken, epochs = 0, 3
    for _ in range(data.epoch, epochs):
        for _ in data:
            taken += 1
            if taken == count:
                return again_at(make, data, tmp_path)
    raise AssertionError


def test_an_iterator_goes_on_too(tmp_path: Path) -> None:
    data = PIPELINES["unseeded"]()
    list(data)
    iterator = iter(data)
    next(iterator), next(iterator)
    path = Checkpoint(iterator=iterator).save(tmp_path / "c")
    wanted = [shown(element) for element in iterator]
    after = [shown(element) for element in data]
    fresh = PIPELINES["unseeded"]()
    other = iter(fresh)
    next(other)
    Checkpoint(iterator=other).restore(path).assert_consumed()
    assert (other.position, other.epoch) == (2, 1)
    assert [shown(element) for element in other] == wanted
    assert [shown(element) for element in fresh] == after


def test_a_data_set_and_its_iterator_are_at_one_place(tmp_path: Path) -> None:
    data = PIPELINES["shuffled"]()
    iterator = iter(data)
    next(iterator)
    path = Checkpoint(data=data, iterator=iterator).save(tmp_path / "c")
    wanted = [shown(element) for element in iterator] + [shown(element) for element in data]
    fresh = PIPELINES["shuffled"]()
    other = iter(fresh)
    Checkpoint(data=fresh, iterator=other).restore(path).assert_consumed()
    assert [shown(element) for element in other] + [shown(element) for element in fresh] == wanted


def test_an_iteration_that_was_left_is_over(tmp_path: Path) -> None:
    data = PIPELINES["shuffled"]()
    go_through(data, 1, stop=2)
    path = Checkpoint(data=data).save(tmp_path / "c")
    fresh = PIPELINES["shuffled"]()
    Checkpoint(data=fresh).restore(path)
    assert fresh.epoch == data.epoch == 1
    assert go_through(fresh, 3) == go_through(data, 3)


def test_what_is_saved(tmp_path: Path) -> None:
    data = split(rows().shuffle(5, seed=3).batch(3))
    list(data)
    iterator = iter(data)
    next(iterator), next(iterator)
    saved = load_file(Checkpoint(data=data).save(tmp_path / "c"))
    assert {name: value.tolist() for name, value in saved.items()} == {
        "data/epoch": 1,
        "data/position": 2,
        "data/shuffles": [[3, 1, 0]],
    }


def test_an_element_whose_step_does_not_begin_is_not_used(tmp_path: Path) -> None:
    """Steps up to the third were sent ahead when the second failed; whoever asks then hears that two were used."""
    played = Played()
    series = Series(played, 2)
    data = split(batches())
    iterator = iter(data)

    def step(batch: np.ndarray) -> int:
        if batch[0] == 1:
            raise KeyError(1)
        return int(batch[0])

    steps = Steps(series, iterator, False, None, partial(_send, series, step))
    assert next(steps) == 0
    assert iterator.position == 3
    saved = load_file(Checkpoint(data=data, iterator=iterator).save(tmp_path / "c"))
    assert played.begun == [0, 1]
    assert int(saved["data/position"]) == int(saved["iterator/position"]) == 2
    with pytest.raises(CheckpointError, match="run_steps takes elements from it"):
        Checkpoint(data=data, iterator=iterator).restore(tmp_path / "c-1")
    with pytest.raises(KeyError):
        next(steps)
    assert iterator.position == 2
    Checkpoint(data=data, iterator=iterator).restore(tmp_path / "c-1").assert_consumed()
    assert shown(next(iterator)) == [[2, 2]]


def test_at_the_end_of_an_epoch_the_loop_is_still_in_it(tmp_path: Path) -> None:
    """The data set has told its end to a loop that reads ahead; what follows the loop is still to come."""
    series = Series(Played(), 2)
    data = split(batches())
    send = partial(_send, series, lambda batch: int(batch[0]))
    steps = Steps(series, iter(data), True, None, send)
    assert [next(steps) for _ in range(5)] == [0, 1, 2, 3, 4]
    saved = load_file(Checkpoint(data=data).save(tmp_path / "c"))
    assert (int(saved["data/epoch"]), int(saved["data/position"])) == (0, 7)
    assert list(steps) == [5, 6]
    saved = load_file(Checkpoint(data=data).save(tmp_path / "c"))
    assert (int(saved["data/epoch"]), int(saved["data/position"])) == (1, 0)


def _send(series: Series, step: Callable[[Any], Any], element: Any) -> None:
    series.send(step, [((element,), {})])


# --- what is refused ----------------------------------------------------------------------------------------------


def saved_of(data: Any, tmp_path: Path) -> str:
    iterator = iter(data)
    next(iterator), next(iterator), next(iterator)
    return Checkpoint(data=data).save(tmp_path / "c")


def test_another_seed_does_not_fit(tmp_path: Path) -> None:
    path = saved_of(split(rows().shuffle(5).shuffle(5, seed=3).batch(3)), tmp_path)
    other = split(rows().shuffle(5).shuffle(5, seed=4).batch(3))
    with pytest.raises(CheckpointError, match=r"data/shuffles: its shuffle 0 has the seed 3 there, 4 here\. Nothing"):
        Checkpoint(data=other).restore(path)
    assert other.epoch == 0


def test_another_number_of_shuffles_does_not_fit(tmp_path: Path) -> None:
    path = saved_of(split(rows().shuffle(5).batch(3)), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"data/shuffles is int64\[1, 3\] in the checkpoint, but int64\[0, 3\] here"
    ):
        Checkpoint(data=split(rows().batch(3))).restore(path)


def test_data_that_has_become_shorter_is_said(tmp_path: Path) -> None:
    path = saved_of(split(batches()), tmp_path)
    other = split(batches()[:2])
    Checkpoint(data=other).restore(path)
    with pytest.raises(CheckpointError, match="has ended after 2 elements, but 3 were used"):
        next(iter(other))


def test_ctrl_c_while_elements_are_dropped_loses_none(tmp_path: Path) -> None:
    presses = [KeyboardInterrupt]

    def interrupted(row: Any) -> Any:
        if row == 4 and presses:
            raise presses.pop()
        return row

    def make() -> DistributedDataset:
        return split(rows().shuffle(5, seed=1).map(interrupted).batch(3))

    iterator = iter(make())
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    wanted = [shown(element) for element in make()][3:]
    path = saved_of(make(), tmp_path)
    other = make()
    Checkpoint(data=other).restore(path)
    presses.append(KeyboardInterrupt)
    iterator = iter(other)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [shown(element) for element in iterator] == wanted


def test_a_plain_data_set_has_no_position() -> None:
    with pytest.raises(InvalidArgumentError, match="experimental_distribute_dataset"):
        Checkpoint(data=rows().batch(2))


def test_where_it_was_sent_to_there_is_no_position(tmp_path: Path) -> None:
    for kind in (DistributedDataset, type(iter(split(batches())))):
        with pytest.raises(DatasetContextError, match="save and restore the checkpoint in the script"):
            Checkpoint(data=elsewhere(kind)).save(tmp_path / "c")


def test_a_seed_that_no_file_holds_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at most 2\*\*63 - 1"):
        rows().shuffle(3, seed=1 << 63)


@pytest.mark.parametrize("name", ["epoch", "position"])
def test_a_place_that_is_none_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = split(batches())
    nowhere = data.place()._replace(**{name: -1})
    monkeypatch.setattr(data, "place", lambda: nowhere)
    path = saved_of(data, tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a position in a data set\. Nothing was restored"):
        Checkpoint(data=split(batches())).restore(path)
