"""``cs.progress``, ``run_steps(..., progress=True)``, and the lengths of series."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import run

import central_storage as cs
from central_storage.strategy.step_bar import mean_of, numbers_of


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        strategy.run(lambda: None)  # its sockets are connected then
        yield strategy


@pytest.fixture
def batches(strategy: cs.CentralStorageStrategy) -> cs.DistributedDataset:
    """Five batches of the numbers 0 to 9."""
    numbers = cs.data.Dataset.from_tensor_slices(np.arange(10, dtype=np.float32)).batch(2)
    return strategy.experimental_distribute_dataset(numbers)


def total(rows: np.ndarray) -> Any:
    return rows.sum()


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_distributed_data_set_has_the_length_of_its_source(strategy: cs.CentralStorageStrategy) -> None:
    distribute = strategy.experimental_distribute_dataset
    assert len(distribute(cs.data.Dataset.range(7).batch(2))) == 4
    assert len(distribute([np.zeros(2)] * 3)) == 3
    assert len(strategy.distribute_datasets_from_function(lambda _: cs.data.Dataset.range(7).batch(1))) == 3
    assert bool(distribute(cs.data.Dataset.range(0).batch(2)))
    endless = distribute(cs.data.Dataset.range(2).repeat())
    unknown = distribute(cs.data.Dataset.range(9).filter(lambda number: number > 4).batch(1))
    for data, why in ((endless, "infinite"), (unknown, "unknown")):
        assert bool(data)
        with pytest.raises(TypeError, match=why):
            len(data)
    assert len(list(unknown)) == 4


def test_a_series_has_the_length_of_the_rest_of_its_data(strategy: cs.CentralStorageStrategy, batches: Any) -> None:
    def series(data: Any, steps: int | None = None) -> Any:
        return strategy.run_steps(total, data, steps)

    assert [len(series(batches)), len(series(batches, 3)), len(series(batches, 9))] == [5, 3, 5]
    iterator = iter(batches)
    next(iterator)
    assert len(series(iterator)) == 4
    begun = series(iterator, 2)
    next(begun)
    assert len(begun) == 2  # of the whole series
    begun.close()
    endless = strategy.experimental_distribute_dataset(cs.data.Dataset.range(2).repeat())
    assert len(series(endless, 7)) == 7
    unknown = strategy.experimental_distribute_dataset(cs.data.Dataset.range(9).filter(lambda number: number > 4))
    for data in (endless, unknown):
        assert bool(series(data))
        with pytest.raises(TypeError):
            len(series(data))


def test_the_length_after_a_restore_is_what_is_left(
    strategy: cs.CentralStorageStrategy, batches: Any, tmp_path: Any
) -> None:
    iterator = iter(batches)
    next(iterator), next(iterator)
    strategy.save(tmp_path, data=batches)
    strategy.restore(tmp_path, data=batches)
    iterator.close()
    strategy.restore(tmp_path, data=batches)
    series = strategy.run_steps(total, batches)
    assert len(series) == 3 == len(list(series))


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_of_numbers_that_are_there() -> None:
    assert mean_of(cs.PerReplica([np.float32(1), np.array([2.0])])) == 1.5
    assert mean_of(np.int64(3)) == 3.0
    for other in (None, True, "1", [1.0], np.zeros(2), cs.PerReplica([1.0, "2"]), 1j, object()):
        assert mean_of(other) is None
    assert numbers_of(({"error": 1.0}, 2.0)) is None
    assert numbers_of({"error": cs.PerReplica([1.0, 2.0]), "text": "x"}) == {"error": 1.5}
    assert numbers_of((0.5, "x")) == {"loss": 0.5}
    assert numbers_of(()) is None


class _OfAGpu:
    """An array of JAX that may not be there yet."""

    shape = ()
    has_come = False

    def is_ready(self) -> bool:
        return self.has_come

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        assert self.has_come, "nothing may wait for it"
        return np.array(2.5)


def test_a_number_that_is_not_there_yet_is_not_waited_for() -> None:
    loss = _OfAGpu()
    assert numbers_of(loss) is None
    loss.has_come = True
    assert numbers_of(loss) == {"loss": 2.5}


def test_run_steps_shows_the_steps_and_the_last_loss(
    strategy: cs.CentralStorageStrategy, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results = list(strategy.run_steps(total, batches, progress="training"))
    assert len(results) == 5
    assert re.fullmatch(r"training: 5 of 5 steps in 00:0\d, [\d.]+ steps/s, loss 8.5\n", capsys.readouterr().err)
    for losses in strategy.run_steps(total, batches, progress=True):
        del losses
        break
    assert capsys.readouterr().err.startswith("1 of 5 steps in ")
    list(strategy.run_steps(total, batches))
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress must be True, False or a text"):
        strategy.run_steps(total, batches, progress=3)  # type: ignore[arg-type]


def test_a_step_that_fails_ends_the_bar(
    strategy: cs.CentralStorageStrategy, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(rows: np.ndarray) -> float:
        return 1 / float(rows[0] < 4)

    with pytest.raises(ZeroDivisionError):
        list(strategy.run_steps(fails, batches, progress="training"))
    assert re.fullmatch(r"training: 2 of 5 steps in .*, loss 1\n", capsys.readouterr().err)


def test_progress_counts_anything(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = cs.progress(range(3), "training", units="epochs")
    assert len(epochs) == 3
    for epoch in epochs:
        epochs.show(loss=cs.PerReplica([epoch, epoch + 1.0]), rate=0.1)
    epochs.close()
    assert re.fullmatch(r"training: 3 of 3 epochs in .*, loss 2.5, rate 0.1\n", capsys.readouterr().err)
    assert list(cs.progress(iter("ab"))) == ["a", "b"]
    assert capsys.readouterr().err.startswith("2 steps in ")
    with cs.progress(iter("ab"), total=2) as items:
        next(items)
    assert capsys.readouterr().err.startswith("1 of 2 steps in ")
    assert next(items) == "b"
    assert bool(cs.progress(()))


def test_progress_of_a_series_shows_the_loss_and_that_of_data_none(
    strategy: cs.CentralStorageStrategy, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    list(cs.progress(strategy.run_steps(total, batches)))
    assert capsys.readouterr().err.endswith(", loss 8.5\n")
    list(cs.progress(batches, units="batches"))
    shown = capsys.readouterr().err
    assert shown.startswith("5 of 5 batches in ")
    assert "loss" not in shown


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="total must be"):
        cs.progress([], total=-1)
    for arguments in ((5,), ([], 5)):
        with pytest.raises(TypeError):
            cs.progress(*arguments)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is not known"):
        len(cs.progress(iter(())))
    with pytest.raises(cs.errors.InvalidArgumentError, match="loss"):
        cs.progress([]).show(loss="low")


@pytest.mark.long
def test_importing_the_package_imports_no_library_of_an_extra() -> None:
    lines = (
        "import sys, central_storage as cs",
        "for name in cs.__all__: getattr(cs, name)",
        "with cs.CentralStorageStrategy(in_process=True) as strategy: strategy.run(lambda: None); repr(strategy)",
        "print(sorted({'tqdm', 'tensorboardX', 'ipywidgets', 'IPython'} & set(sys.modules)))",
    )
    assert run(sys.executable, "-c", "\n".join(lines)).ok().out == "[]\n"
