"""A restore sets many values in one commit: also if the server is killed at any place of it, exactly once."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import numpy as np
import pytest

import central_storage as cs

pytestmark = pytest.mark.timeout(300)  # each death costs the start of a server

#: Where a server is killed, in a commit outside of steps, and at which hit, which comes after the variables are made. A
#: new server counts anew. An assignment keeps no old values: it is repeated from those that are still in the arena.
KILLS = {"commit": 6, "phase": 9, "committed": 7, "heard": 90, "decided": 100, "send": 110}
COUNT = 3
ROUNDS = 80


class Work:
    """Variables, and an optimizer that has slots for them once it has updated or restored them."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        with strategy.scope():
            self.variables = [cs.Variable(np.zeros(100 + n), name=f"v{n}") for n in range(COUNT)]
            self.counts = cs.Variable(np.zeros(3, np.int64), name="counts")
            self.adam = cs.optimizers.Adam(0.1)
        self.all = [*self.variables, self.counts]
        self.checkpoint = cs.train.Checkpoint(variables=self.variables, counts=self.counts, adam=self.adam)

    def step(self, number: int) -> None:
        """Another state."""
        self.variables[0].strategy.run(self._step, args=(number,))
        self.counts.assign(np.full(3, number))

    def _step(self, number: int) -> None:
        self.adam.apply_gradients([(np.full(v.shape, number + n / 8), v) for n, v in enumerate(self.variables)])

    def bits(self) -> dict[str, bytes]:
        """Of everything that a restore sets."""
        found = {v.name: v.numpy().tobytes() for v in self.all}
        for v in self.variables:
            found |= {f"{v.name}/{slot}": np.asarray(self.adam.get_slot(v, slot)).tobytes() for slot in ("m", "v")}
        return found | {"iterations": str(int(self.adam.iterations)).encode()}

    def versions(self) -> list[int]:
        """How often each variable has been written."""
        return [v.strategy.controller.variable(v.number).version for v in self.all]


class Reader:
    """Reads all variables as of one commit, again and again, and keeps what it has seen."""

    def __init__(self, address: str, names: list[str]) -> None:
        self.seen: set[tuple[bytes, ...]] = set()
        self._over, self._reads = threading.Event(), queue.SimpleQueue[None]()
        self._address, self._names = address, names
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        self.read()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def read(self) -> None:
        """Returns when a read that began after this call has ended."""
        while not self._reads.empty():
            self._reads.get()
        for _ in range(2):  # the first may have begun before
            self._reads.get(timeout=60)

    def _read(self) -> None:
        with cs.connect(self._address, timeout=60) as observer:
            while not self._over.is_set():
                self.seen.add(tuple(value.tobytes() for value in observer.get_all(self._names)))
                self._reads.put(None)


def test_a_restore_is_carried_out_once_and_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees the values of one checkpoint or of the other, whatever the moment."""
    saved = []
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        work = Work(strategy)
        for number in (1, 2):
            work.step(number)
            saved.append((work.checkpoint.save(tmp_path / "ckpt"), work.bits()))
    names = [v.name for v in work.all]
    places = tmp_path / "places"
    places.mkdir()
    items = {f"server.{place}=kill@{nth}" for place, nth in KILLS.items()}
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(items))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(places))
    with cs.CentralStorageStrategy(["cpu:0"], max_restarts=1000) as strategy:
        work = Work(strategy)
        fresh = tuple(v.numpy().tobytes() for v in work.all)
        assert not list(places.iterdir())
        with Reader(strategy.address, names) as reader:
            number = 0
            while number < ROUNDS and {path.name for path in places.iterdir()} != items:
                path, bits = saved[number % 2]
                versions = work.versions()
                work.checkpoint.restore(path).assert_consumed()
                assert work.versions() == [version + 1 for version in versions]
                assert work.bits() == bits
                number += 1
            reader.read()
    assert {path.name for path in places.iterdir()} == items
    assert reader.seen <= {fresh, *(tuple(bits[name] for name in names) for _, bits in saved)}
    assert len(reader.seen) >= 2
