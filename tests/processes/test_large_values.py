"""Values too large for a frame: they cross in shared memory, and what a replica was given does not change later."""

from __future__ import annotations

from typing import Any

import numpy as np

import central_storage as cs

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
