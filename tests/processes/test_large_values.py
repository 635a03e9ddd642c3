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


def test_results_stay_what_they_were(two: cs.CentralStorageStrategy) -> None:
    def step(value: float) -> np.ndarray:
        return np.full(ROWS, value, np.float32)

    first = two.experimental_local_results(two.run(step, args=(1.0,)))
    second = two.experimental_local_results(two.run(step, args=(2.0,)))
    assert all((array == 1).all() for array in first)
    assert all((array == 2).all() for array in second)


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
    link: Any = two.controller
    send = link._send

    def spy(socket: Any, record: Any) -> None:
        if isinstance(record, Run):
            sent.append(record)
        send(socket, record)

    monkeypatch.setattr(link, "_send", spy)
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
        while not link._asked:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait()
        while not link._asked:
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
        while not link._asked:
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
