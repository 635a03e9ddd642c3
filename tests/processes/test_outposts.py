"""Workers on other machines: the same bits as on one machine, whatever dies or is cut off, and clear refusals.

The "other machines" are other run directories on this one: nothing but TCP leads from one to the other."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from tests.harness.processes import Child, Ended, run, start
from tests.harness.timing import unit
from tests.processes.test_gateway import proxied

from central_storage.cluster import items
from central_storage.cluster.link import Item, Link
from central_storage.cluster.session import Session
from central_storage.launch import cli
from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, decode, encode
from cs_proto.messages import Envelope
from cs_proto.records import Buffer, Frame, Record
from cs_runtime.transport.curve import WorkerKeys, make_keys
from cs_runtime.transport.readiness import is_readable

R = TypeVar("R", bound=Record)

TRAIN = '''
import hashlib
import os
import signal
import sys

import numpy as np

import central_storage as cs

F32 = np.float32
parts, steps = sys.argv[1].split(","), int(sys.argv[2])
door = sys.argv[4:] if sys.argv[3:4] == ["door"] else None
crash = sys.argv[4:] if sys.argv[3:4] == ["crash"] else None
strategy = cs.CentralStorageStrategy(start_timeout=120)
random = np.random.default_rng(7)
data = random.normal(size=(64 * 12, 700)).astype(F32)  # a replica's share of a batch is larger than a message takes
which = np.repeat(np.arange(12), 64)
wanted = (data @ random.normal(size=(700, 40)).astype(F32)).astype(F32)


def replica():
    return int(cs.get_replica_context().replica_id_in_sync_group)


def batches():
    rows = cs.data.Dataset.from_tensor_slices((data, wanted, which)).batch(64).repeat()
    return strategy.experimental_distribute_dataset(rows)


def at(number):
    """Say which step begins; at the step of the door, wait until the test has opened it."""
    if door and number == int(door[1]):
        print("at the door", flush=True)
        with open(door[0]) as opened:  # a named pipe
            opened.read()


def may_crash(number):
    """In a replica, at the beginning of its step: kill this worker, its launcher, or what the test has named, once."""
    if crash is None or [str(int(number)), str(replica())] != crash[1:3] or os.path.exists(crash[0]):
        return
    open(crash[0], "w").close()
    if crash[3] in ("worker", "outpost"):
        os.kill(os.getpid() if crash[3] == "worker" else os.getppid(), signal.SIGKILL)
        signal.pause()
    with open(crash[3]) as named:  # a named pipe
        os.kill(int(named.read()), signal.SIGKILL)


class Told:
    """A digest of all that a part has computed."""

    def __init__(self):
        self.hash = hashlib.blake2b(digest_size=12)

    def add(self, *values):
        for value in values:
            each = np.ascontiguousarray(value)
            self.hash.update(repr((each.dtype, each.shape)).encode() + each.tobytes())


def model(optimizer):
    with strategy.scope():
        w = cs.Variable(np.zeros((700, 40), F32))
        b = cs.Variable(np.zeros(40, F32))
        made = optimizer()

    @cs.function
    def step(batch):
        x, y, number = batch
        may_crash(number[0])
        error = x @ np.asarray(w) + np.asarray(b) - y
        dw, db = cs.gradient_buffers([w, b])
        np.matmul(x.T, error / F32(6400), out=dw)
        np.sum(error / F32(6400), axis=0, out=db)
        made.apply_gradients([(dw, w), (db, b)])
        return np.mean(error**2, dtype=np.float64)

    return w, b, step


def dense(told):
    w, b, step = model(lambda: cs.optimizers.SGD(0.1, momentum=0.5))
    feed = iter(batches())
    for number in range(steps):
        at(number)
        told.add(*strategy.experimental_local_results(strategy.run(step, args=(next(feed),))))
    told.add(w.numpy(), b.numpy())


def ahead(told):
    w, b, step = model(lambda: cs.optimizers.Adam(0.01))
    for number, loss in enumerate(strategy.run_steps(step, batches(), steps=steps, lookahead=4)):
        at(number)
        told.add(*strategy.experimental_local_results(loss))
        if number in (5, 11):  # between two steps of one series
            b.assign(np.full(40, number, F32))
            w.assign_sub(np.ones((700, 40), F32))
    told.add(w.numpy(), b.numpy())


def rows(told):
    with strategy.scope():
        table = cs.Variable(random.normal(size=(20_000, 16)).astype(F32), sparse=True)
        plain = cs.Variable(random.normal(size=(900, 8)).astype(F32))
        top = cs.Variable(np.ones(16, F32))
        adagrad, sgd = cs.optimizers.Adagrad(0.1), cs.optimizers.SGD(0.1)

    def step(number):
        may_crash(number)
        own = np.random.default_rng((int(number), replica()))
        ids, few = own.integers(0, 20_000, 3000), own.integers(0, 900, 30)
        found = np.asarray(cs.nn.embedding_lookup(table, ids))
        of_plain = np.asarray(cs.nn.embedding_lookup(plain, few))
        adagrad.apply_gradients([(cs.IndexedSlices(found * np.asarray(top), ids, table.shape), table)])
        of_few = cs.IndexedSlices(of_plain, few, plain.shape)
        sgd.apply_gradients([(found.sum(axis=0) / F32(3000), top), (of_few, plain)])
        return found[:100], np.asarray(table)[:3]

    for number in range(steps):
        at(number)
        for each in strategy.experimental_local_results(strategy.run(step, args=(number,))):
            told.add(*each)
    told.add(table.numpy(), plain.numpy(), top.numpy())


def points(told):
    with strategy.scope():
        w = cs.Variable(np.zeros(30_000, F32), aggregation=cs.VariableAggregation.SUM)
        sgd = cs.optimizers.SGD(0.5)

    def merged(strategy, given):
        before = w.numpy()
        w.assign_add(np.sum([np.asarray(each) for each in given.values], axis=0) * F32(0.001))
        inner = strategy.run(nested, args=(before,))
        return cs.PerReplica([np.asarray(each) + k for k, each in enumerate(inner.values)])

    def nested(before):
        return np.asarray(w) - before + F32(replica())

    def step(number):
        may_crash(number)
        context = cs.get_replica_context()
        held = np.asarray(w)
        kept = held.copy()
        small = context.all_reduce("SUM", np.full(3, replica() + int(number), F32))
        large = context.all_reduce("MEAN", [held + F32(replica()), np.arange(40_000.0) * (1 + replica())])
        gathered = context.all_gather(np.full((replica() + 1, 20_000), int(number), F32), axis=0)
        w.assign_add(np.full(30_000, replica() + 1, F32))
        own = np.asarray(w).copy()  # its own update
        assert np.array_equal(held, kept)  # what was read keeps its bits
        shared = context.merge_call(merged, args=(own,))
        sgd.apply_gradients([(np.asarray(w) * F32(0.01), w)])
        sgd.apply_gradients([(np.full(30_000, 0.25, F32), w)])
        result = np.full(200_000, replica() + int(number), F32)  # stays in the arena
        return small, *large, gathered, own, np.asarray(shared), result

    for number in range(steps):
        at(number)
        for each in strategy.experimental_local_results(strategy.run(step, args=(number,))):
            told.add(*each)
    told.add(w.numpy())


def metrics(told):
    with strategy.scope():
        mean, best = cs.metrics.Mean(), cs.metrics.Sum()

    def feed(batch):
        mean.update_state(batch[0])
        best.update_state(batch[1][:, 0])
        return mean.result()

    for number, seen in zip(range(steps), batches()):
        at(number)
        told.add(*strategy.experimental_local_results(strategy.run(feed, args=(seen,))))
        told.add(float(mean.result()), float(best.result()))
        if number % 4 == 3:
            mean.reset_state()


def lifetimes(told):
    """Variables are made in replicas, dropped, and made again in their places, in other shapes."""
    sgd = None
    for number in range(steps):
        at(number)
        with strategy.scope():
            sgd = sgd or cs.optimizers.SGD(0.5)
            several = [cs.Variable(np.full(1000 * (1 + (number + k) % 5), k, F32)) for k in range(6)]
        inside = []

        def step(several):
            if number % 3 == 0:
                inside.append(cs.Variable(np.full(500, number, F32)))
            sgd.apply_gradients([(np.asarray(each) + F32(1 + replica()), each) for each in several])
            return [np.asarray(each).sum() for each in inside]

        for found in strategy.experimental_local_results(strategy.run(step, args=(several,))):
            told.add(*found)
        told.add(*(each.numpy() for each in several))


for part in parts:
    told = Told()
    globals()[part](told)
    print(part, told.hash.hexdigest(), flush=True)
'''

PARTS = ("dense", "ahead", "rows", "points", "metrics", "lifetimes")
STEPS = 14


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outposts") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def alone(program: Path) -> dict[str, str]:
    """The digest of each part on one machine."""
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", program, ",".join(PARTS), str(STEPS), timeout=unit(120)).ok()
    found = dict(line.split() for line in ended.lines)
    assert list(found) == list(PARTS)
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service, and of two outposts in directories of their own."""
    parent = tmp_path_factory.mktemp("keys")
    for name in ("a", "b"):
        make_keys(str(parent / "service"), worker=name)
        there = parent / name
        there.mkdir(mode=0o700)
        (there / "service.key").write_bytes((parent / "service" / "service.key").read_bytes())
        (parent / "service" / f"worker-{name}.key_secret").rename(there / f"worker-{name}.key_secret")
    return parent


class Machines:
    """A service with a script, and two outposts; each of the three has a place of its own for run directories.
    ``launchers`` are the beginnings of their commands, and the service listens at the address ``host``."""

    def __init__(
        self,
        stack: ExitStack,
        keys: Path,
        *words: str | Path,
        options: tuple[str, ...] = (),
        launchers: Sequence[tuple[str, ...]] = (("cs-launch",),) * 3,
        host: str = "127.0.0.1",
        workers: int = 2,
    ) -> None:
        self._stack, self._keys, self._launchers = stack, keys, launchers
        self.places = [stack.enter_context(tempfile.TemporaryDirectory(prefix=f"m{n}-", dir="/tmp")) for n in range(3)]
        serve = ("--serve", str(workers), "--listen", f"tcp://{host}:0", "--keys", keys / "service")
        command = (*launchers[0], *options, *serve)
        self.head = stack.enter_context(start(*command, *words, environment=self._environment(0)))
        self.address = self.head.wait_for(r"observers on (tcp://[\d.]+:\d+)", stream="err")[1]

    def outpost(self, number: int, address: str | None = None, *options: str, **environment: str) -> Child:
        """An outpost that is starting, with the key of that number."""
        where = ("--join", address or self.address, "--keys", self._keys / "ab"[number])
        command = (*self._launchers[1 + number], *where, *options)
        return self._stack.enter_context(start(*command, environment=self._environment(1 + number) | environment))

    def both(self, address: str | None = None) -> list[Child]:
        """Two outposts; the first of them runs worker 0."""
        return [joined(self.outpost(number, address if number else None), number) for number in range(2)]

    def left(self) -> list[str]:
        """What lies in the places for run directories."""
        return [entry for place in self.places for entry in os.listdir(place)]

    def _environment(self, number: int) -> dict[str, str | None]:
        return {"XDG_RUNTIME_DIR": self.places[number], "TMPDIR": self.places[number], "CS_LOG_DIR": None}


def joined(outpost: Child, number: int) -> Child:
    outpost.wait_for(rf"worker w{number} of 2 on cpu:{number}, for the service behind tcp:", stream="err")
    return outpost


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def digests(ended: Ended) -> dict[str, str]:
    return dict(line.split() for line in ended.ok().lines if line.split()[0] in PARTS)


def ends_well(machines: Machines, outposts: list[Child], expected: dict[str, str]) -> None:
    """The digests are those of one machine, all end by themselves, and nothing is left."""
    assert digests(machines.head.wait(unit(120))) == expected
    for outpost in outposts:
        outpost.wait().ok()
    for child in (machines.head, *outposts):
        assert child.left(unit(5)) == []
    assert machines.left() == []


def test_every_part_of_a_training_has_the_bits_of_one_machine(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str]
) -> None:
    machines = Machines(stack, keys, program, ",".join(PARTS), str(STEPS))
    ends_well(machines, machines.both(), alone)


class Door:
    """Where a training waits in a step, until the test has done something."""

    def __init__(self, path: Path, step: int) -> None:
        os.mkfifo(path)
        self.words = ("door", str(path), str(step))
        self._path = path

    def open(self) -> None:
        self._path.write_text("")


@pytest.mark.parametrize("part", ["dense", "ahead", "rows", "points"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("victim", ["worker", "outpost"])
def test_a_death_in_a_step_changes_no_bit(
    stack: ExitStack,
    keys: Path,
    program: Path,
    alone: dict[str, str],
    tmp_path: Path,
    part: str,
    number: int,
    victim: str,
) -> None:
    flag = tmp_path / "flag"
    machines = Machines(stack, keys, program, part, str(STEPS), "crash", flag, "6", str(number), victim)
    outposts = machines.both()
    if victim == "outpost":
        assert outposts[number].wait(unit(60)).code == -signal.SIGKILL
        assert outposts[number].left(unit(5)) == []
        outposts[number] = joined(machines.outpost(number), number)
    ends_well(machines, outposts, {part: alone[part]})
    assert flag.exists()


def worker_of(outpost: Child) -> psutil.Process:
    (found,) = (each for each in outpost.processes()[1:] if "cs_worker" in each.cmdline())
    return found


def process_of(machines: Machines, module: str) -> psutil.Process:
    (found,) = (each for each in machines.head.processes() if module in each.cmdline())
    return found


@pytest.mark.parametrize("part", ["dense", "ahead", "rows", "points"])
@pytest.mark.parametrize("module", ["cs_server", "central_storage.gateway"])
def test_a_death_of_the_service_in_a_step_changes_no_bit(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str, module: str
) -> None:
    named = tmp_path / "named"
    os.mkfifo(named)
    machines = Machines(stack, keys, program, part, str(STEPS), "crash", tmp_path / "flag", "6", "1", named)
    outposts = machines.both()
    victim = process_of(machines, module)
    named.write_text(str(victim.pid))  # when a replica has come to that step
    ends_well(machines, outposts, {part: alone[part]})
    assert not victim.is_running()


def test_a_gateway_may_die_twice(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """Each time both workers are started again, so there are more restarts than on one machine."""
    machines = Machines(stack, keys, program, "dense", str(STEPS), *Door(tmp_path / "door", 6).words)
    outposts = machines.both()
    machines.head.wait_for("at the door")
    for times in (2, 3):
        process_of(machines, "central_storage.gateway").kill()
        for outpost in outposts:
            outpost.wait_for(rf"(?s)(worker w\d of 2 on .*){{{times}}}", stream="err")
    (tmp_path / "door").write_text("")
    machines.head.wait_for("restart 4 of 6", stream="err")
    ends_well(machines, outposts, {"dense": alone["dense"]})


@pytest.mark.parametrize("part", ["dense", "points"])
@pytest.mark.parametrize("module", ["cs_server", "central_storage.gateway"])
def test_a_death_of_the_service_between_steps_changes_no_bit(
    stack: ExitStack,
    keys: Path,
    program: Path,
    alone: dict[str, str],
    tmp_path: Path,
    part: str,
    module: str,
) -> None:
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, part, str(STEPS), *door.words)
    outposts = machines.both()
    machines.head.wait_for("at the door")
    process_of(machines, module).kill()
    door.open()
    ends_well(machines, outposts, {part: alone[part]})


WRITES = """
import sys

import numpy as np

import central_storage as cs

strategy = cs.CentralStorageStrategy(start_timeout=120)
with strategy.scope():
    w = cs.Variable(np.zeros(10, np.float32))
results = strategy.experimental_local_results(strategy.run(lambda: np.full(1_000_000, 7, np.float32)))
for each in results:
    each += 35  # where the worker has put it
print("at the door", flush=True)
with open(sys.argv[1]) as opened:
    opened.read()
w.assign(np.ones(10, np.float32))
strategy.run(lambda: np.asarray(w).sum())  # what the workers said before has come
print("results", *({float(value) for value in each} for each in results), flush=True)
"""


def test_what_a_script_writes_to_results_stays_when_a_return_is_repeated(
    stack: ExitStack, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server is told of the Return once more. Its bytes have come before."""
    monkeypatch.setenv("CS_LOG", "debug")
    program, door = tmp_path / "writes.py", Door(tmp_path / "door", 0)
    program.write_text(WRITES)
    machines = Machines(stack, keys, program, tmp_path / "door")
    outposts = machines.both()
    machines.head.wait_for("at the door")
    process_of(machines, "cs_server").kill()
    for outpost in outposts:
        outpost.wait_for(r"(?s)send Return\(run=\(1,.* send Return\(run=\(1,", stream="err")
    door.open()
    assert machines.head.wait(unit(60)).ok().lines[-1] == "results {42.0} {42.0}"
    for outpost in outposts:
        outpost.wait().ok()


@contextmanager
def explained(outposts: list[Child]) -> Iterator[None]:
    """If the block fails, what the outposts have printed stands beside the failure."""
    try:
        yield
    except AssertionError as error:
        error.add_note("\n".join(map(str, (outpost.explain() for outpost in outposts))))
        raise


def cut_and_mended(machines: Machines, door: Door, part: str, alone: str, join: Callable[[str], list[Child]]) -> None:
    """Cut the links of the outposts that ``join`` starts in the midst of a training, and mend them in time. The digest
    must be that of one machine, ``alone``."""
    with proxied(machines.address) as (address, cut, hold):
        outposts = join(address)
        machines.head.wait_for("at the door")
        cut()
        hold(True)  # what connects again gets no answer
        door.open()
        with pytest.raises(AssertionError, match="did not print"):
            machines.head.wait_for(rf"^{part} ", timeout=unit(2))
        cut()
        hold(False)
        with explained(outposts):
            machines.head.wait_for(rf"^{part} ", timeout=unit(60))
        assert not any(re.search("asked for", outpost.err) for outpost in outposts)
        assert not re.search(r"ended by", machines.head.err), machines.head.err
        ends_well(machines, outposts, {part: alone})


@pytest.mark.parametrize("part", ["dense", "ahead", "points"])
def test_a_link_that_is_cut_and_mended_changes_no_bit(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str
) -> None:
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, part, str(STEPS), *door.words)
    cut_and_mended(machines, door, part, alone[part], machines.both)


def test_many_cuts_at_any_time_change_no_bit(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str]
) -> None:
    parts = ("ahead", "rows", "points")
    machines = Machines(stack, keys, program, ",".join(parts), str(STEPS))
    with proxied(machines.address) as (address, cut, _):
        outposts = [joined(machines.outpost(number, address), number) for number in range(2)]
        over, cuts = threading.Event(), 0

        def cut_often() -> None:
            nonlocal cuts
            while not over.wait(0.25):
                cut()
                cuts += 1

        cutting = threading.Thread(target=cut_often)
        cutting.start()
        try:
            with explained(outposts):
                machines.head.wait_for(r"^points ", timeout=unit(150))
        finally:
            over.set()
            cutting.join()
        assert cuts >= 5
        assert not re.search(r"ended by", machines.head.err), machines.head.err
        ends_well(machines, outposts, {part: alone[part] for part in parts})


def test_an_outpost_that_is_cut_off_for_too_long_is_replaced(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, "dense", str(STEPS), *door.words, options=("--return-timeout", "2"))
    with proxied(machines.address) as (address, cut, hold):
        outposts = machines.both(address)
        machines.head.wait_for("at the door")
        hold(True)
        cut()
        door.open()
        machines.head.wait_for(r"worker w1 \(pid \d+ on 127.0.0.1\) ended by the end of its connection", stream="err")
        gone = outposts[1].wait(unit(20))
        assert gone.code == 4, str(gone)
        assert "nothing" in gone.err
        hold(False)
        outposts[1] = joined(machines.outpost(1), 1)
        ends_well(machines, outposts, {"dense": alone["dense"]})


FULL = """
import errno, os, sys
from central_storage.cluster.memory import NodeMemory
from central_storage.launch import cli

def descriptor(self, name, *, writable):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

NodeMemory.descriptor = descriptor
sys.exit(cli.main(sys.argv[1:]))
"""


def test_an_outpost_without_descriptors_says_so_and_another_one_takes_its_place(
    stack: ExitStack, keys: Path, program: Path
) -> None:
    machines = Machines(stack, keys, program, "dense", str(STEPS), workers=1)
    ended = run("-c", FULL, "--join", machines.address, "--keys", keys / "b")
    assert (ended.code, "this launcher cannot go on: [Errno 24] Too many open files" in ended.err) == (4, True), ended
    assert "Traceback" not in ended.err
    machines.head.wait_for("worker w0 .* ended by the end of its connection .*; restart 1 of 3", stream="err")
    other = machines.outpost(0)
    machines.head.wait(unit(120)).ok()
    other.wait().ok()


def test_ctrl_c_at_an_outpost_ends_its_worker(stack: ExitStack, keys: Path, program: Path, tmp_path: Path) -> None:
    """The training waits for another one, which may have the same key."""
    door = Door(tmp_path / "door", 3)
    machines = Machines(stack, keys, program, "dense", "6", *door.words)
    outposts = machines.both()
    machines.head.wait_for("at the door")
    outposts[1].press_ctrl_c()
    assert outposts[1].wait().code == 0
    assert outposts[1].left(unit(5)) == []
    outposts[1] = joined(machines.outpost(1), 1)
    door.open()
    machines.head.wait(unit(60)).ok()


INTERRUPTED = """
import time
import central_storage as cs

strategy = cs.CentralStorageStrategy(start_timeout=120)

def step(is_long):
    if is_long:
        print("at work", flush=True)
        while True:
            time.sleep(0.01)
    return 5 + int(cs.get_replica_context().replica_id_in_sync_group)

try:
    strategy.run(step, args=(True,))
except KeyboardInterrupt:
    after = strategy.experimental_local_results(strategy.run(step, args=(False,)))
    print("interrupted", *map(int, after), flush=True)
"""


def test_ctrl_c_in_the_script_interrupts_the_workers(stack: ExitStack, keys: Path, tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    machines = Machines(stack, keys, script)
    outposts = machines.both()
    for outpost in outposts:
        outpost.wait_for("at work")
    (process,) = (
        each for each in machines.head.processes() if each.cmdline()[-1] == str(script) and "-u" in each.cmdline()
    )
    process.send_signal(signal.SIGINT)
    assert machines.head.wait().ok().lines[-1] == "interrupted 5 6"
    assert [outpost.wait().code for outpost in outposts] == [0, 0]
    assert machines.left() == []


def test_an_outpost_that_nobody_has_a_place_for(stack: ExitStack, keys: Path, program: Path, tmp_path: Path) -> None:
    door = Door(tmp_path / "door", 0)
    machines = Machines(stack, keys, program, "dense", "1", *door.words)
    machines.both()
    machines.head.wait_for("at the door")
    second = machines.outpost(0).wait()  # the same key
    said = "another outpost is connected with the key of worker-a"
    assert (second.code, said in second.err) == (3, True), str(second)
    make_keys(str(keys / "service"), worker="c")
    there = tmp_path / "c"
    there.mkdir(mode=0o700)
    (there / "service.key").write_bytes((keys / "service" / "service.key").read_bytes())
    (keys / "service" / "worker-c.key_secret").rename(there / "worker-c.key_secret")
    third = run("cs-launch", "--join", machines.address, "--keys", there)
    assert (third.code, "all 2 workers of this service run already" in third.err) == (3, True), str(third)
    (keys / "service" / "worker-c.key").unlink()
    unknown = run("cs-launch", "--join", machines.address, "--keys", there, "--start-timeout", "10")
    assert (unknown.code, "does not admit" in unknown.err) == (2, True), str(unknown)
    door.open()
    machines.head.wait().ok()


SKEWED = """
import sys
from central_storage.cluster import link
from central_storage.launch import cli

link.PROTOCOL += 1
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_service_that_runs_its_own_workers_takes_none_and_no_other_version(
    stack: ExitStack, keys: Path, program: Path
) -> None:
    command = ("cs-launch", "--devices", "cpu:0", "--listen", "tcp://127.0.0.1:0", "--keys", keys / "service")
    with tempfile.TemporaryDirectory() as parent:
        os.mkfifo(Path(parent, "door"))
        head = stack.enter_context(start(*command, program, "dense", "1", "door", str(Path(parent, "door")), "0"))
        address = head.wait_for(r"observers on (tcp://127\.0\.0\.1:\d+)", stream="err")[1]
        head.wait_for("at the door")
        refused = run("cs-launch", "--join", address, "--keys", keys / "a")
        assert (refused.code, "this service runs its own workers" in refused.err) == (3, True), str(refused)
        skewed = run("-c", SKEWED, "--join", address, "--keys", keys / "a")
        assert (skewed.code, "install the same version of central-storage on both sides" in skewed.err) == (3, True)
        Path(parent, "door").write_text("")
        head.wait().ok()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "tcp://127.0.0.1:5600"], "needs --keys DIR"),
        (["--join", "tcp://127.0.0.1:5600", "--keys", "SERVICE"], "worker"),
        (["--join", "tcp://127.0.0.1:5600", "--keys", "/nowhere"], "/nowhere, the directory of keys, cannot be read"),
        (["--join", "tcp://127.0.0.1:0", "--keys", "A"], "names no port"),
        (["--join", "tcp://127.0.0.1", "--keys", "A"], "must be tcp://ADDRESS:PORT"),
        (["--join", "tcp://-:5600", "--keys", "A"], "must be tcp://ADDRESS:PORT"),
        (["--join", "train.py"], "--join takes no script"),
        (["--join", "--run-dir", "/nowhere", "--devices", "cpu:0,cpu:1"], "--join runs one worker here"),
        (["--serve", "2", "train.py"], "--serve takes no script"),
        (
            ["--serve", "2", "--run-dir", "/nowhere", "--devices", "cpu:0"],
            "--serve does not go together with --devices",
        ),
        (
            ["--serve", "2", "--listen", "tcp://127.0.0.1:0", "--keys", "SERVICE", "--memory", "frames", "train.py"],
            "start it without --memory frames",
        ),
    ],
)
def test_options_that_are_refused(words: list[str], said: str, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"SERVICE": str(keys / "service"), "A": str(keys / "a")}
    assert cli.main([places.get(each, each) for each in words]) == 2
    assert said in capsys.readouterr().err


def test_nobody_answers(keys: Path) -> None:
    ended = run("cs-launch", "--join", "tcp://127.0.0.1:1", "--keys", keys / "a", "--start-timeout", "1")
    said = "no gateway answered at tcp://127.0.0.1:1 within 1 s (--start-timeout): nothing listens there (Connection"
    assert (ended.code, said in ended.err) == (3, True), str(ended)


def test_something_else_listens_there(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        ended = run("cs-launch", "--join", address, "--keys", keys / "a", "--start-timeout", "6")
    assert (ended.code, ended.err.count(f"{address} ")) == (3, 2), str(ended)
    for said in (
        f"no gateway answers at {address} yet; waiting another 2 s: what listens there is no gateway",
        "6 s",
    ):
        assert said in ended.err


def test_two_services_at_one_address(stack: ExitStack, keys: Path, program: Path) -> None:
    machines = Machines(stack, keys, program, "dense", "1")
    run_directory = Path(machines.places[0], "second")
    options = ("--serve", "2", "--keys", keys / "service", "--run-dir", run_directory)
    second = run("cs-launch", "--listen", machines.address, *options, program, "dense", "1")
    said = f"cs-launch: error: --listen {machines.address}: "
    assert (second.code, said in second.err, "in use" in second.err) == (3, True, True), str(second)
    assert not run_directory.exists()
    outposts = machines.both()
    machines.head.wait(unit(60)).ok()
    assert [outpost.wait().code for outpost in outposts] == [0, 0]


SHIFTED = """
import os
import time

with open(os.path.join(os.path.dirname(__file__), "shifted"), "a") as file:
    file.write(f"{os.getpid()}\\n")

def shifted(clock, by):
    return lambda: clock() + by

time.time, time.monotonic = shifted(time.time, 4e7), shifted(time.monotonic, 1e6)
time.time_ns, time.monotonic_ns = shifted(time.time_ns, 4 * 10**16), shifted(time.monotonic_ns, 10**15)
"""


def test_clocks_that_differ_change_nothing(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """The clocks of one machine are more than a year ahead: of its outpost and of its worker."""
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    machines = Machines(stack, keys, program, ",".join(PARTS), str(STEPS))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    outposts = [joined(machines.outpost(0), 0), joined(machines.outpost(1, PYTHONPATH=path), 1)]
    shifted = {str(outposts[1].pid), str(worker_of(outposts[1]).pid)}
    ends_well(machines, outposts, alone)
    assert shifted <= set((tmp_path / "shifted").read_text().split())


LARGE = """
import sys

import numpy as np

import central_storage as cs

strategy = cs.CentralStorageStrategy(start_timeout=120)
with strategy.scope():
    large = cs.Variable(np.zeros(2 << 20, np.float32))
print("made", flush=True)
with open(sys.argv[1]) as door:
    door.read()
"""
ANSWER_NBYTES, MOST_NBYTES = 8 << 20, 192 << 20


class Rogue:
    """An outpost without a worker, which speaks for itself."""

    def __init__(self, address: str, keys: Path) -> None:
        self.link = Link.connect(address, WorkerKeys.read(str(keys)), unit(60))
        self._items: deque[Item] = deque()

    def say(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Return when the gateway has heard it."""
        self.link.put(kind, parts)
        while self.link.waiting:
            self._turn()

    def hear(self, kind: type[R]) -> R:
        """The next record of this kind that the gateway passes on."""
        deadline = time.monotonic() + unit(60)
        while time.monotonic() < deadline:
            while self._items:
                item, parts = self._items.popleft()
                if item in (items.JOIN, items.SERVER) and isinstance(record := decode(parts, BULK_LIMITS), kind):
                    return record
            self._turn()
        raise AssertionError(f"no {kind.__name__} came")

    def _turn(self) -> None:
        self.link.turn()
        assert not self.link.is_over, self.link.reason
        self._items += self.link.received()
        if not self._items:
            is_readable(self.link.fileno(), self.link.timeout() or 0.0)


def test_a_worker_that_takes_no_answers_costs_a_bounded_amount(
    stack: ExitStack, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again and again, and does not say that it has heard anything."""
    (tmp_path / "large.py").write_text(LARGE)
    door = Door(tmp_path / "door", 0)
    machines = Machines(stack, keys, tmp_path / "large.py", door.words[1])
    joined(machines.outpost(0), 0)
    rogue = Rogue(machines.address, keys / "b")
    link = rogue.link
    stack.callback(link.close)
    link.put(items.JOIN, encode(messages.Join(messages.PROTOCOL, os.getpid())))
    assigned = rogue.hear(messages.Joined)
    worker = messages.Worker(assigned.rank, assigned.incarnation, os.getpid(), "cpu:1")
    link.put(items.SUPERVISOR, encode(messages.Ready()))
    link.put(items.SERVER, encode(messages.Register(messages.PROTOCOL, worker)))
    rogue.hear(messages.Registered)
    machines.head.wait_for("made")
    (gateway,) = (each for each in machines.head.processes() if "central_storage.gateway" in each.cmdline())
    before, heard, asked = most_nbytes(gateway), link.session.heard, 0

    def deaf(session: Session, number: int, ends: bytes, pieces: tuple[bytes | Frame, ...]) -> list[Buffer]:
        return encode(Envelope(session.name, number, heard, ends, pieces))

    with monkeypatch.context() as patched:
        patched.setattr(Session, "_message", deaf)
        grown, wanted = 0, 0
        while wanted <= grown < MOST_NBYTES:
            asked += 1
            rogue.say(items.SERVER, encode(messages.Get(asked, (), (), True)))
            wanted = grown + ANSWER_NBYTES // 2
            deadline = time.monotonic() + unit(2)  # so long the server may take to answer
            while (grown := most_nbytes(gateway) - before) < wanted and time.monotonic() < deadline:
                with pytest.raises(psutil.TimeoutExpired):
                    gateway.wait(0.01)
    while rogue.hear(messages.Got).request < asked:
        pass
    assert most_nbytes(gateway) - before < MOST_NBYTES
    assert asked > (64 << 20) // ANSWER_NBYTES
    link.close()
    door.open()


def most_nbytes(process: psutil.Process) -> int:
    """The most memory that it has ever had."""
    (line,) = (each for each in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in each)
    return int(line.split()[1]) << 10
