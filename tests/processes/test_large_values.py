"""Values too large for a frame: they cross in shared memory, and what a replica was given does not change later."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from cs_proto.messages import Run
from cs_proto.records import Frame

ROWS = 1 << 18  # float32: 1 MiB


def test_all_reduce_and_all_gather(two: cs.CentralStorageStrategy) -> None:
    def step(factor: float) -> tuple[bool, bool, tuple[int, ...]]:
        context = cs.get_replica_context()
        assert context is not None
        mine = np.full(ROWS, factor * (context.replica_id_in_sync_group + 1), np.float32)
        first = context.all_reduce("SUM", mine)
        second = context.all_reduce("MEAN", {"a": mine, "b": [mine * 2]})
        gathered = context.all_gather(mine, 0)
        return (
            bool((first == 3 * factor).all()),
            bool((second["a"] == 1.5 * factor).all() and (second["b"][0] == 3 * factor).all()),
            gathered.shape,
        )

    for factor in (1.0, 10.0, 100.0):
        for replica in range(2):
            results = [two.experimental_local_results(r)[min(replica, 0)] for r in two.run(step, args=(factor,))[:2]]
            assert results == [True, True]


def arenas(strategy: cs.CentralStorageStrategy) -> list[int]:
    """Bytes that the workers' arenas take, as this process maps them."""
    link: Any = strategy._backend
    return [os.fstat(results._mapping._descriptor).st_blocks * 512 for results in link._session.results]


def filled(value: int, rows: int) -> tuple[np.ndarray, int]:
    context = cs.get_replica_context()
    assert context is not None
    return np.full(rows, value * 10 + context.replica_id_in_sync_group, np.int32), value


def look(held: list[tuple[np.ndarray, int]]) -> None:
    for array, expected in held:
        assert array.min() == array.max() == expected
        array -= expected
        array += expected


@pytest.mark.parametrize("ahead", [False, True])
def test_results_stay_what_they_were_as_long_as_they_are_held(two: cs.CentralStorageStrategy, ahead: bool) -> None:
    random = np.random.default_rng(5)
    rows = [int(size) for size in random.integers(ROWS // 4, 3 * ROWS, 40)]
    held: list[tuple[np.ndarray, int]] = []

    def step(at: Any) -> tuple[np.ndarray, int]:
        return filled(int(at[0]), rows[int(at[0])])

    places = [np.full(2, value) for value in range(len(rows))]
    loop = two.run_steps(step, two.experimental_distribute_dataset(places)) if ahead else None
    for value, place in enumerate(places):
        if loop is not None:
            arrays, numbers = next(loop)
        else:
            arrays, numbers = two.run(step, args=(place,))
        assert two.experimental_local_results(numbers)[0] == value
        for replica, array in enumerate(two.experimental_local_results(arrays)):
            assert array.shape == (rows[value],)
            held.append((array, value * 10 + replica))
        del array, arrays
        look(held)
        held = [each for each in held if random.random() < 0.8]
    held.clear()
    two.run(filled, args=(1, ROWS))
    two.run(filled, args=(2, ROWS))  # now nothing of the steps is held
    two.run(filled, args=(3, ROWS))
    assert max(arenas(two)) <= (64 << 20) + 4 * ROWS


def test_a_result_is_no_copy_and_its_place_is_used_again(two: cs.CentralStorageStrategy) -> None:
    link: Any = two._backend

    def first() -> tuple[np.ndarray, ...]:
        return tuple(two.experimental_local_results(two.run(filled, args=(7, ROWS))[0]))

    kept = first()
    for array, results in zip(kept, link._session.results, strict=True):
        assert np.shares_memory(array, results._mapping.elements("uint8"))
    places = [array.ctypes.data for array in kept]
    assert [array.ctypes.data for array in first()] != places
    del array, kept
    assert [array.ctypes.data for array in first()] == places


def test_what_a_replica_returns_twice_are_two_arrays(two: cs.CentralStorageStrategy) -> None:
    def step() -> dict[str, Any]:
        array = np.ones(ROWS)
        return {"one": array, "nest": [array, (array[1:],)]}

    result = two.run(step)
    for replica in range(2):
        one, again, part = (
            two.experimental_local_results(each)[replica]
            for each in (result["one"], result["nest"][0], result["nest"][1][0])
        )
        one += 1
        again += 2
        assert (one.max(), again.max(), part.max()) == (2, 3, 1)


def test_more_than_may_be_held_is_copied(two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("central_storage.controller.result_leases.MOST", 3)
    held = []
    for value in range(8):
        for replica, array in enumerate(two.experimental_local_results(two.run(filled, args=(value, ROWS))[0])):
            held.append((array, value * 10 + replica))
    look(held)
    link: Any = two._backend
    assert [len(results.ranges) for results in link._session.results] == [3, 3]


def test_large_results_of_all_replicas_are_reduced_and_survive_the_service() -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        result = strategy.run(filled, args=(4, ROWS))[0]
        total = strategy.reduce("SUM", result, axis=None)
        assert total.min() == total.max() == 81
        held = [(array, 40 + n) for n, array in enumerate(strategy.experimental_local_results(result))]
        del result
    look(held)
    strategy.shutdown()
    look(held)


def test_batches_are_split_and_arrive_whole(two: cs.CentralStorageStrategy) -> None:
    rows = np.arange(6 * ROWS, dtype=np.float32).reshape(6, ROWS)

    def step(batch: Any) -> tuple[float, bool]:
        return float(batch[0, 0]), bool(batch.flags.writeable)

    batches = two.experimental_distribute_dataset([rows, rows + 1])
    heard = [two.experimental_local_results(two.run(step, args=(batch,))) for batch in batches]
    expected = [(float(r[0, 0]), float(r[3, 0])) for r in (rows, rows + 1)]
    assert [tuple(first for first, _ in results) for results in heard] == expected
    assert not any(writeable for results in heard for _, writeable in results)


def test_nothing_large_is_in_a_frame_and_what_replicas_share_is_placed_once(
    two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, given, text = np.ones(ROWS, np.float32), np.full(ROWS, 2, np.float32), b"x" * ROWS

    def step(array: np.ndarray, again: np.ndarray, data: bytes) -> tuple[bool, bool, bool]:
        return bool((captured == 1).all()), bool((array == 2).all() and (again == 2).all()), data == b"x" * len(data)

    sent: list[Run] = []
    core: Any = two.controller._core  # type: ignore[attr-defined]
    begin_run = core.begin_run

    def spy(series: Any, beginning: Any, said: list[tuple[Any, ...]], *kept: Any) -> Any:
        sent.extend(Run(*values) for values in said)
        return begin_run(series, beginning, said, *kept)

    monkeypatch.setattr(core, "begin_run", spy)
    with pytest.warns(UserWarning, match="captures 1.0 MB"):
        assert two.run(step, args=(given, given, text)) == (True, True, True)
    first, second = sent
    assert first.function is not None
    assert [a for run in sent for a in (run.function, run.arguments, *run.buffers) if isinstance(a.place, Frame)] == []
    assert first.function.place == second.function.place
    assert [buffer.place for buffer in first.buffers] == [buffer.place for buffer in second.buffers]
    assert len({buffer.place for buffer in first.buffers}) == 1


def test_what_a_write_names_stays_until_it_is_answered_also_where_ctrl_c_leaves_it(
    two: cs.CentralStorageStrategy,
) -> None:
    with two.scope():
        first, second = (cs.Variable(np.zeros(ROWS, np.float32)) for _ in range(2))
    server, link, goes_on = two.statistics().pid, two._backend, threading.Event()

    def interrupt() -> None:
        while not link._core.asked:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait()
        while not link._core.asked:
            pass
        os.kill(server, signal.SIGCONT)

    os.kill(server, signal.SIGSTOP)
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            first.assign(np.full(ROWS, 1, np.float32))
        goes_on.set()
        second.assign(np.full(ROWS, 2, np.float32))
    finally:
        goes_on.set()
        helper.join()
    assert (first.numpy() == 1).all()
    assert (second.numpy() == 2).all()


def test_a_variable_that_ctrl_c_kept_from_being_known_is_freed(two: cs.CentralStorageStrategy) -> None:
    server, link, known = two.statistics().pid, two._backend, len(two._backend.variables())

    def interrupt() -> None:
        while not link._core.asked:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    os.kill(server, signal.SIGSTOP)
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt), two.scope():
        cs.Variable(np.zeros(3))
    helper.join()
    os.kill(server, signal.SIGCONT)
    two.statistics()  # the answer comes first, and then it is freed
    assert len(link.variables()) == known
