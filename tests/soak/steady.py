"""P23 and P24: what a service takes does not grow with its age: memory, descriptors, threads, segments, and the tables
by which the server knows what it has done.

What every process takes is noted after a tenth of the session and compared with what it takes at the end. In between
workers are killed, checkpoints are saved, and observers come and go.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tests.harness.timing import unit
from tests.soak.sessions import Late

import central_storage as cs
from cs_proto.segment_names import CONTROL, CONTROL_HEADER_NBYTES
from cs_server.engine.store.control_log import ControlLog

__all__ = ["UPDATES", "connects", "updates"]

REPLICAS = 2
_ASSIGNS = 9
#: Updates of one step: what each replica brings to each of its merge points.
UPDATES = REPLICAS * (_ASSIGNS + 1)
# A part of a session has so many updates, or fewer where a session has few. In each part one worker of every replica
# is killed, and a checkpoint is saved after it. So 3,500,000 updates have 200 deaths and 100 checkpoints.
_UPDATES_OF_A_PART, _FEWEST_PARTS = 35_000, 10
# So many steps follow the last death of a part: more than may have been done ahead, so the worker in its place works.
_AHEAD, _STEPS_AFTER = 4, 10
# So much more may be there at the end than after a tenth: bytes of memory of a process, and bytes of the server's
# tables for each client that is there.
_MEMORY, _TABLES = 8 << 20, 256
# The segment of the tables is as large as they may ever be; Python names this flag from 3.13 on.
_MAP_NORESERVE = 0x4000
# A process that has just been started, or has just lost a peer, is as it was after so many seconds.
_QUIET_WITHIN = 20.0
# The slowest step of a hundred may take so many times as long at the end as at the beginning.
_SLOWER = 1.5


@dataclass(frozen=True)
class Footprint:
    """What the processes of a service take, by what they are: bytes of memory that is theirs alone, descriptors and
    threads; how many segments there are, and the bytes of the server's tables."""

    memory: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    segments: int
    tables: int

    def more_than(self, before: Footprint) -> list[str]:
        """What has grown since ``before``, in words."""
        found = []
        for role, nbytes in self.memory.items():
            grown = nbytes - before.memory[role]
            if grown > _MEMORY:
                found.append(f"{role} has {grown} bytes of memory more than after a tenth; at most {_MEMORY} are right")
        for what, now, then in (
            ("descriptors", self.descriptors, before.descriptors),
            ("threads", self.threads, before.threads),
        ):
            found += [f"{role} has {now[role] - then[role]} {what} more" for role in now if now[role] > then[role]]
        if self.segments > before.segments:
            found.append(f"there are {self.segments - before.segments} segments more")
        if self.tables - before.tables > _TABLES:
            found.append(
                f"the server's tables have {self.tables - before.tables} bytes more; at most {_TABLES} are right"
            )
        return found


class _Probe:
    """Measures one service, whose client is this process."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self._strategy = strategy
        self._supervisor = int(Path(strategy.address, "lock").read_text())

    def measure(self) -> Footprint:
        """What it takes now."""
        gc.collect()
        statistics = self._strategy.statistics()
        pids = {"the supervisor": self._supervisor, "the script": os.getpid(), "the server": statistics.pid}
        pids |= {f"w{replica.replica}": replica.pid for replica in statistics.replicas}
        return Footprint(
            {role: _status(pid, "RssAnon") << 10 for role, pid in pids.items()},
            {role: len(os.listdir(f"/proc/{pid}/fd")) for role, pid in pids.items()},
            {role: _status(pid, "Threads") for role, pid in pids.items()},
            len(self._memory()),
            self._tables(),
        )

    def more_than(self, before: Footprint) -> list[str]:
        """What has grown since ``before`` and stays so, in words."""
        deadline = time.monotonic() + unit(_QUIET_WITHIN)
        while (found := self.measure().more_than(before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _memory(self) -> list[tuple[str, Path]]:
        """The shared memory that the supervisor holds: names in the kernel, and paths by which it can be opened."""
        links = [(os.readlink(path), path) for path in Path(f"/proc/{self._supervisor}/fd").iterdir()]
        return [(link, path) for link, path in links if link.startswith("/memfd:")]

    def _tables(self) -> int:
        """The bytes of all entries that the server keeps, read from a private copy of their segment."""
        (path,) = [path for link, path in self._memory() if link.endswith(f"-{CONTROL} (deleted)")]
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(
                file.fileno(), nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        log = ControlLog(np.frombuffer(memory, np.uint8)[CONTROL_HEADER_NBYTES:])
        return sum(len(key) + len(value) for key, value in log.items())


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def _service() -> Iterator[cs.CentralStorageStrategy]:
    devices = [f"cpu:{replica}" for replica in range(REPLICAS)]
    with cs.CentralStorageStrategy(devices, max_restarts=100_000) as strategy:
        yield strategy


class _Training:
    """Small variables, and steps that bring ``UPDATES`` updates each."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self._strategy = strategy
        self.steps = 0
        #: How long each step took, seconds.
        self.times: list[float] = []
        with strategy.scope():
            self.total = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)
            self.moved = cs.Variable(np.zeros(64, np.float32))
            self.adam: Any = cs.optimizers.Adam(learning_rate=0.01)
        self.checkpoint = cs.train.Checkpoint(total=self.total, moved=self.moved, adam=self.adam)

        @cs.function
        def step(element: Any) -> float:
            for _ in range(_ASSIGNS):
                self_total.assign_add(np.ones(3))
            adam.apply_gradients([(np.ones(64, np.float32), moved)])
            return float(np.ravel(element)[0])

        self_total, adam, moved = self.total, self.adam, self.moved
        self._step = step

    def train(self, count: int, ahead: int, victims: Mapping[int, int] = MappingProxyType({})) -> None:
        """So many steps; ``victims`` are the processes that are killed, by the number of the step before."""
        elements = self._strategy.experimental_distribute_dataset([np.full(REPLICAS, k) for k in range(count)])
        begun = time.monotonic()
        for number, _ in enumerate(self._strategy.run_steps(self._step, elements, lookahead=ahead)):
            now = time.monotonic()
            self.times.append(now - begun)
            begun = now
            self.steps += 1
            if number in victims:
                os.kill(victims[number], signal.SIGKILL)

    def wrong(self) -> list[str]:
        """What the variables should not hold, in words."""
        right = float(self.steps * _ASSIGNS * REPLICAS)
        values = self.total.numpy()
        return [] if (values == right).all() else [f"total is {values}, not {right:g}, after {self.steps} steps"]


def _workers(strategy: cs.CentralStorageStrategy) -> list[int]:
    return [replica.pid for replica in strategy.statistics().replicas]


def updates(rng: random.Random, count: int, on_updates: Callable[[int], None], say: Callable[[str], None]) -> list[str]:
    """Make about ``count`` updates in one service, and kill workers and save checkpoints in between; what has grown, in
    words. ``say`` is told what was measured."""
    parts = max(_FEWEST_PARTS, count // _UPDATES_OF_A_PART)
    steps = max(REPLICAS + _STEPS_AFTER, count // UPDATES // parts)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, _service() as strategy:
        training, probe = _Training(strategy), _Probe(strategy)
        manager = cs.train.CheckpointManager(training.checkpoint, directory, max_to_keep=2)
        killed = 0
        for part in range(parts):
            victims = dict(zip(rng.sample(range(steps - _STEPS_AFTER), REPLICAS), _workers(strategy), strict=True))
            is_measured = part + 1 in (parts // 10, parts)  # the server keeps the results of runs that were ahead
            training.train(steps, _AHEAD if is_measured else rng.choice([0, _AHEAD]), victims)
            killed += len(victims)
            manager.save()
            on_updates(steps * UPDATES)
            if part + 1 == parts // 10:
                before = probe.measure()
        found = [*probe.more_than(before), *training.wrong()]
    tenth = max(1, len(training.times) // 10)
    first = float(np.quantile(training.times[tenth : 2 * tenth], 0.99))
    last = float(np.quantile(training.times[-tenth:], 0.99))
    say(
        f"P23: {training.steps} steps, {killed} workers killed, {parts} checkpoints saved; the slowest of a hundred "
        f"steps took {1e3 * first:.1f} ms in the second tenth, and {1e3 * last:.1f} ms in the last"
    )
    if last > _SLOWER * first:
        found.append(Late(f"steps took {last / first:.1f} times as long in the last tenth as in the second"))
    return found


def connects(count: int, on_connect: Callable[[], None]) -> list[str]:
    """Let ``count`` observers come, read and go, while the script writes; what has grown, in words."""
    with _service() as strategy:
        training, probe = _Training(strategy), _Probe(strategy)
        training.train(5, 0)
        for number in range(count):
            if number == max(1, count // 10):
                before = probe.measure()
            with cs.connect(strategy.address) as observer:
                assert observer.get(training.total.name).shape == (3,)
            training.moved.assign(np.full(64, float(number), np.float32))
            on_connect()
        return [*probe.more_than(before), *training.wrong()]
