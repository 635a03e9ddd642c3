"""A worker dies, somewhere and somehow: it is started again, and training ends with the bits that it would have ended
with, losses included; or an error says what stands, and the next run works."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.harness.processes import start
from tests.harness.replicas import context, replica

import central_storage as cs
from central_storage import errors
from central_storage.core.context import current_replica
from cs_proto import messages
from cs_proto.arrays import array_of
from cs_proto.codec import decode, encode
from cs_runtime.failpoints import FAILPOINTS
from cs_runtime.transport.supervisor_link import SupervisorLink


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(0)


def use_up() -> None:
    """Run into a limit of memory, in code that cannot raise for it."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    ctypes.memset(libc.malloc(1 << 30), 1, 1 << 30)  # which is at NULL


def once(flag: Path, deed: Callable[[], None]) -> None:
    """Do it in the first worker that comes here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    deed()


class Training:
    """A small training with everything in it that a death could break."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = cs.Variable(np.linspace(-1, 1, 20_000), name="weights")
            self.table = cs.Variable(np.ones((50, 3), np.float32), name="table")
            self.count = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)
            self.optimizer = cs.optimizers.Adam(0.1)

    def step(self, batch: np.ndarray, die: Callable[[str], None]) -> float:
        die("begin")
        noise = np.random.rand(20_000)
        loss = float(((np.asarray(self.weights) - noise * batch.sum()) ** 2).mean())
        rows = cs.IndexedSlices(np.full((2, 3), np.random.rand(), np.float32), np.array([replica(), 7]))
        self.optimizer.apply_gradients([(noise * loss, self.weights), (rows, self.table)])
        die("noted")
        total = context().all_reduce("SUM", np.full(20_000, loss))
        die("between")
        self.count.assign_add(np.ones(3) * (1 + replica()))
        mean = context().all_reduce("MEAN", np.array(loss))
        die("end")
        return float(total[5] + mean)

    def bits(self) -> list[bytes]:
        moments = [self.optimizer.get_slot(self.weights, slot) for slot in self.optimizer.slot_names]
        return [np.asarray(value).tobytes() for value in (self.weights, self.table, self.count, *moments)]


def batches() -> list[np.ndarray]:
    return [np.arange(8, dtype=np.float64) + k for k in range(4)]


def by_runs(strategy: cs.CentralStorageStrategy, die: Callable[[str, int], None]) -> tuple[list[Any], list[bytes]]:
    training = Training(strategy)
    losses = []
    for number, batch in enumerate(batches()):

        def step(batch: np.ndarray = batch, number: int = number) -> float:
            return training.step(batch, lambda place: die(place, number))

        losses.append(strategy.experimental_local_results(strategy.run(step)))
    return losses, training.bits()


def by_steps(strategy: cs.CentralStorageStrategy, die: Callable[[str, int], None]) -> tuple[list[Any], list[bytes]]:
    training = Training(strategy)

    def step(element: tuple[np.ndarray, np.ndarray]) -> float:
        number = int(element[0][0])
        return training.step(batches()[number], lambda place: die(place, number))

    numbers = cs.data.Dataset.from_tensor_slices((np.repeat(np.arange(4), 2),)).batch(2)
    found = strategy.run_steps(step, strategy.experimental_distribute_dataset(numbers))
    return [strategy.experimental_local_results(each) for each in found], training.bits()


WAYS = {"runs": by_runs, "steps": by_steps}


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[str], tuple[list[Any], list[bytes]]]:
    """What each way of training ends with, in a service of its own: random numbers follow from a run's number."""
    made: dict[str, tuple[list[Any], list[bytes]]] = {}

    def find(way: str) -> tuple[list[Any], list[bytes]]:
        if way not in made:
            with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
                made[way] = WAYS[way](strategy, lambda place, number: None)
        return made[way]

    return find


@pytest.mark.parametrize("way", [pytest.param("runs", marks=pytest.mark.slow), "steps"])
def test_deaths_in_every_phase_change_no_bit(
    way: str, undisturbed: Callable[[str], tuple[list[Any], list[bytes]]], tmp_path: Path
) -> None:
    """One death in each step, another replica, another place, another kind each time."""
    plan = {("begin", 0): (0, kill), ("noted", 1): (1, crash), ("between", 2): (0, leave), ("end", 3): (1, use_up)}

    def die(place: str, number: int) -> None:
        victim, deed = plan.get((place, number), (-1, kill))
        if replica() == victim:
            once(tmp_path / f"{place}{number}", deed)

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=4) as strategy:
        assert WAYS[way](strategy, die) == undisturbed(way)
    assert len(list(tmp_path.iterdir())) == 4


# --- one place at a time --------------------------------------------------------------------------------------------


def meet(value: float = 1.0) -> float:
    return float(context().all_reduce("SUM", np.full(2, value))[0])


def local(strategy: cs.CentralStorageStrategy, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = strategy.experimental_local_results(strategy.run(function, args))
    return found


def counter(strategy: cs.CentralStorageStrategy) -> cs.Variable:
    with strategy.scope():
        return cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)


class Explosive:
    """Ends the worker that unpickles it, once."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return _explode, (str(self.flag),)


def _explode(flag: str) -> str:
    once(Path(flag), kill)
    return flag


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_dies_idle(mortal: cs.CentralStorageStrategy, victim: int) -> None:
    total = counter(mortal)
    mortal.run(lambda: total.assign_add(np.ones(2)))
    pids = [replica.pid for replica in mortal.statistics().replicas]
    os.kill(pids[victim], signal.SIGKILL)
    mortal.run(lambda: total.assign_add(np.ones(2)))
    assert total.numpy().tolist() == [4, 4]
    then = [replica.pid for replica in mortal.statistics().replicas]
    assert [pid == before for pid, before in zip(then, pids, strict=True)] == [victim != 0, victim != 1]


def test_a_worker_that_dies_while_it_unpickles(mortal: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    explosive = Explosive(tmp_path / "flag")
    assert local(mortal, lambda: (meet(), str(explosive))) == ((2.0, str(explosive.flag)),) * 2


def test_a_worker_that_dies_at_every_failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one of them in a run: each worker passes it twice, and none of them dies twice in a run."""
    places = [name for name in FAILPOINTS if name.startswith("worker.")]
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(f"{name}[1]=kill@2" for name in places))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=len(places)) as strategy:
        total = counter(strategy)

        def step() -> float:
            total.assign_add(np.ones(2))
            return meet() + meet()

        runs = len(places) + 2
        assert [local(strategy, step) for _ in range(runs)] == [(4.0, 4.0)] * runs
        assert total.numpy().tolist() == [2 * runs] * 2
    assert len(list(tmp_path.iterdir())) == len(places)


def test_a_variable_made_in_the_run_is_there_once(mortal: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    def step() -> tuple[int, list[float]]:
        made = cs.Variable(np.arange(3.0) + replica(), aggregation=cs.VariableAggregation.SUM)
        seen = np.array(made).tolist()
        if replica() == 0:
            once(tmp_path / "flag", kill)
        made.assign_add(np.ones(3))
        return len(cs.get_strategy().variables), seen

    gc.collect()  # what other tests have made and dropped is not counted
    before = len(mortal.variables)
    assert local(mortal, step) == ((before + 1, [0, 1, 2]),) * 2
    assert mortal.variables[-1].numpy().tolist() == [2, 3, 4]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", ["before", "nested", "after"])
def test_a_death_around_a_merge_call(
    mortal: cs.CentralStorageStrategy, victim: int, place: str, tmp_path: Path
) -> None:
    def die(here: str) -> None:
        if (place, victim) == (here, replica()):
            once(tmp_path / "flag", kill)

    def inside(value: float) -> float:
        die("nested")
        return meet(value) + replica()

    def merge(strategy: cs.CentralStorageStrategy, values: Any) -> Any:
        return strategy.run(inside, (values,))

    def step() -> float:
        seen = meet(3.0)
        die("before")
        shared = context().merge_call(merge, (seen + replica(),))
        die("after")
        return float(shared + meet())

    assert local(mortal, step) == (15.0, 16.0)
    assert (tmp_path / "flag").exists()


def test_a_holder_that_dies_in_its_merge_function(mortal: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    def merge(strategy: cs.CentralStorageStrategy, values: Any) -> float:
        once(tmp_path / "flag", kill)
        return sum(strategy.experimental_local_results(values))

    assert float(local(mortal, lambda: context().merge_call(merge, (1.5 + replica(),)))[0]) == 4.0
    assert (tmp_path / "flag").exists()


@pytest.mark.slow
def test_deaths_at_instants_that_nobody_chose(mortal: cs.CentralStorageStrategy) -> None:
    """Another thread kills workers while steps are sent ahead; every step counts once."""
    total = counter(mortal)
    over = threading.Event()
    killed: list[int] = []

    def step(element: tuple[np.ndarray]) -> float:
        total.assign_add(np.ones(2))
        return meet(float(element[0][0]))

    def nemesis() -> None:
        random = np.random.default_rng(5)
        while len(killed) < 5:
            over.wait(random.uniform(0.2, 1.2))
            found = _workers(mortal, int(random.integers(2)))
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            killed.extend(found)
        over.set()

    thread = threading.Thread(target=nemesis)
    thread.start()
    steps, failed = 0, []
    numbers = np.arange(64.0)
    while not over.is_set():
        data = cs.data.Dataset.from_tensor_slices((numbers,)).batch(2)
        generator = mortal.run_steps(step, mortal.experimental_distribute_dataset(data))
        try:
            for number, each in enumerate(generator):
                assert mortal.experimental_local_results(each) == (numbers[2 * number :][:2].sum(),) * 2
        except errors.ReplicaLostError as error:  # one came twice to the same step
            failed.append(str(error))
        steps += generator.steps
    thread.join()
    mortal.run(meet)  # the last to be killed is replaced in this run, not in one whose function kills it, too
    assert total.numpy().tolist() == [2 * steps, 2 * steps]
    assert all("second worker" in message for message in failed)


def _workers(strategy: cs.CentralStorageStrategy, rank: int) -> list[int]:
    """The processes of one replica of this strategy's service."""
    wanted = {f"CS_RUN_DIRECTORY={strategy.controller.address}".encode(), f"RANK={rank}".encode()}
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdecimal() and wanted <= set(Path("/proc", entry, "environ").read_bytes().split(b"\0")):
                found.append(int(entry))
    return found


@pytest.mark.parametrize(
    "victims", [pytest.param((1,), id="one worker", marks=pytest.mark.slow), pytest.param((0, 1), id="both workers")]
)
def test_the_server_dies_with_workers(
    mortal: cs.CentralStorageStrategy, victims: tuple[int, ...], tmp_path: Path
) -> None:
    total = counter(mortal)
    server = mortal.statistics().pid

    def end_both() -> None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        kill()

    def step() -> float:
        total.assign_add(np.ones(2))
        seen = meet()
        if replica() in victims:
            once(tmp_path / f"flag{replica()}", end_both)
        return seen + meet()

    assert [local(mortal, step) for _ in range(3)] == [(4.0, 4.0)] * 3
    assert total.numpy().tolist() == [6, 6]


def own_name() -> str:
    """The name that the supervisor gave this worker."""
    (link,) = [each for each in gc.get_objects() if isinstance(each, SupervisorLink)]
    return link.name.hex()


def test_a_late_message_of_a_worker_that_was_replaced_is_refused(mortal: cs.CentralStorageStrategy) -> None:
    total = counter(mortal)
    _, name = local(mortal, own_name)
    (pid,) = _workers(mortal, 1)
    os.kill(pid, signal.SIGKILL)
    assert local(mortal, meet) == (2.0, 2.0)
    with zmq.Context() as sockets, sockets.socket(zmq.DEALER) as late:
        late.setsockopt(zmq.IDENTITY, bytes.fromhex(name))
        late.connect(f"ipc://{mortal.controller.address}/server")
        point = messages.AssignPoint(0, "late.py:1", 1, "assign_add", array_of(np.ones(2)), False)
        late.send_multipart(encode(messages.Return((10**6,), 1, 1, (point,), 1, messages.Value(b"\xc0", ()), None)))
        refused = decode(late.recv_multipart())
    assert isinstance(refused, messages.Refused)
    assert refused.error.exception == "cs.Fenced"
    assert total.numpy().tolist() == [0, 0]


# --- what cannot be made good, and what is too long -----------------------------------------------------------------


def test_a_run_that_has_read_its_own_update_says_what_stands(mortal: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    total = counter(mortal)

    def step() -> float:
        total.assign_add(np.ones(2))
        seen = float(np.asarray(total)[0])
        if replica() == 1:
            once(tmp_path / "flag", kill)
        total.assign_add(np.ones(2))
        return seen

    with pytest.raises(errors.ReplicaLostError, match=r"1 commit of this run is kept, the rest.*the next run"):
        mortal.run(step)
    assert total.numpy().tolist() == [2, 2]
    assert local(mortal, step) == (4.0, 4.0)


def test_a_function_that_kills_each_worker_it_gets(mortal: cs.CentralStorageStrategy) -> None:
    def step() -> None:
        print("these are its last words")
        if replica() == 0:
            leave()

    with pytest.raises(errors.ReplicaLostError, match=r"(?s)exit code 0.*second worker of this replica.*last words"):
        mortal.run(step)
    assert local(mortal, meet) == (2.0, 2.0)


def test_a_function_that_kills_its_only_worker_before_anything_is_heard_of_it() -> None:
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        with pytest.raises(errors.ReplicaLostError, match=r"SIGSEGV.*second worker"):
            strategy.run(crash)
        assert strategy.run(lambda: 5) == 5


def write_at(array: np.ndarray) -> None:
    """As native code does that knows of no read-only memory."""
    ctypes.memset(array.__array_interface__["data"][0] + array.nbytes - 8, 1, 8)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no handler can name the write from Python 3.14 on")
def test_a_write_to_a_protected_variable_is_named_as_the_cause(mortal: cs.CentralStorageStrategy) -> None:
    with mortal.scope():
        w = cs.Variable(np.zeros((30_000, 3)), name="written")
        neighbour = cs.Variable(np.zeros(1000))
    number = w._cs_handle()[1]

    def step() -> None:
        float(np.sum(neighbour))
        backend = current_replica(mortal)
        assert backend is not None
        backend.protect([number])
        if replica() == 0:
            write_at(np.asarray(w))

    told = r"wrote in place to variable 'written' \(float64\[30000, 3\]\).*write to a copy"
    with pytest.raises(errors.ReplicaLostError, match=rf"(?s): SIGSEGV: something {told}.*second worker") as lost:
        mortal.run(step)
    assert "in write_at" in str(lost.value), "the stack is there, too"
    assert not w.numpy().any()
    assert not neighbour.numpy().any()
    assert local(mortal, meet) == (2.0, 2.0)


def test_a_segmentation_fault_elsewhere_is_no_write_in_place(mortal: cs.CentralStorageStrategy) -> None:
    def step(x: np.ndarray) -> None:
        float(np.sum(x))
        if replica() == 0:
            ctypes.memset(0, 1, 8)

    with pytest.raises(errors.ReplicaLostError, match=r": SIGSEGV\. ") as lost:
        mortal.run(step, args=(np.ones(20_000),))
    assert "in place" not in str(lost.value)
    assert local(mortal, meet) == (2.0, 2.0)


def test_a_replay_that_is_another(mortal: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    total = counter(mortal)

    def step() -> None:
        total.assign_add(np.ones(2))
        meet(os.getpid())
        once(tmp_path / "flag", kill)

    with pytest.raises(errors.ReplicaLostError, match=r"replay diverged at all_reduce SUM \(.*\.py:\d+\)"):
        mortal.run(step)
    assert total.numpy().tolist() == [0, 0]
    assert local(mortal, meet) == (2.0, 2.0)


def test_no_restart_is_left() -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=0) as strategy:
        total = counter(strategy)
        strategy.run(lambda: total.assign_add(np.ones(2)))
        with pytest.raises(errors.ReplicaLostError, match=r"replica 1 .*make a new CentralStorageStrategy"):
            strategy.run(lambda: kill() if replica() == 1 else meet())
        with pytest.raises(errors.ReplicaLostError, match="make a new CentralStorageStrategy"):
            strategy.run(meet)
        assert total.numpy().tolist() == [2, 2]  # what was committed can still be read


def test_a_silent_worker_is_killed_and_its_stack_shown(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SILENT)
    with start(str(program), tmp_path / "again") as child:
        child.wait_for(r"^stop: \(2\.0, 2\.0\)$")
        first = child.err
        ended = child.wait().ok()
    assert ended.lines == ["stop: (2.0, 2.0)", "loop_for_ever: (2.0, 2.0)"]
    words = "ended by SIGKILL by the supervisor: it did not come to its next merge point within 1 s in run "
    assert f"{words}1" in first
    assert "in loop_for_ever" not in first
    assert f"{words}2" in ended.err
    assert "in loop_for_ever" in ended.err


SILENT = """
import os, signal, sys
import numpy as np
import central_storage as cs

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def loop_for_ever():
    while True:
        pass

def step(flag, deed):
    context = cs.get_replica_context()
    replica = context.replica_id_in_sync_group
    flag = f"{flag}{replica}{deed.__name__}"
    if (replica == 1 or deed is loop_for_ever) and not os.path.exists(flag):  # the latter both
        open(flag, "w").close()
        deed()
    return float(context.all_reduce("SUM", np.ones(1))[0])

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], step_timeout=1)
for deed in (stop, loop_for_ever):
    result = strategy.experimental_local_results(strategy.run(step, (sys.argv[1], deed)))
    print(f"{deed.__name__}: {result}", flush=True)
"""


def test_ctrl_c_while_a_worker_is_started_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    with start(str(program), tmp_path / "flag") as child:
        child.wait_for("ended by SIGKILL; restart 1", stream="err")
        child.press_ctrl_c()
        child.wait_for("interrupted")
        ended = child.wait().ok()
    assert ended.lines[-1] == "(2.0, 2.0) [0.0, 0.0]"


INTERRUPTED = """
import os, signal, sys
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

def meet():
    return float(cs.get_replica_context().all_reduce("SUM", np.ones(1))[0])

def step(flag):
    total.assign_add(np.ones(2))
    if cs.get_replica_context().replica_id_in_sync_group == 1:
        while os.path.exists(flag):
            pass  # until it is interrupted
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    meet()

try:
    strategy.run(step, (sys.argv[1],))
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(strategy.experimental_local_results(strategy.run(meet)), total.numpy().tolist())
"""


def test_under_cs_launch_with_its_own_options(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    options = ("--devices", "cpu:0,cpu:1", "--max-restarts", "1")
    with start("cs-launch", *options, program, tmp_path / "flag") as child:
        ended = child.wait().ok()
    assert ended.lines.count("[w1] I run") == 2  # what a replica prints may appear twice
    assert "[supervisor] worker w1 (pid" in ended.err
    assert "ended by SIGKILL; restart 1 of 1" in ended.err
    assert "first failure" not in ended.err


@pytest.mark.parametrize("heard", [0, 1])
def test_cs_launch_names_the_death_that_ended_the_run_whatever_the_script_heard(heard: int, tmp_path: Path) -> None:
    """The server's answer may reach the script before the supervisor's notice of the death does."""
    program = tmp_path / "program.py"
    program.write_text(DIES_TWICE)
    with start("cs-launch", "--devices", "cpu:0,cpu:1", program, heard) as child:
        ended = child.wait()
    pids = re.findall(r"worker w1 \(pid (\d+)\) ended by SIGKILL; restart \d of 3", ended.err)
    assert len(pids) == 2, ended
    assert f"[cs-launch] first failure: worker w1 (pid {pids[1]}) ended by SIGKILL" in ended.err, ended
    assert ended.code == 4


DIES_TWICE = """
import os, signal, sys
import central_storage as cs
from central_storage.controller.liveness import Liveness

def step():
    if cs.get_replica_context().replica_id_in_sync_group == 1:
        os.kill(os.getpid(), signal.SIGKILL)

hear = Liveness.hear
Liveness.hear = lambda self, died, *rest: died.incarnation <= int(sys.argv[1]) and hear(self, died, *rest)
cs.CentralStorageStrategy().run(step)
"""


LAUNCHED = """
import os, signal, sys
import central_storage as cs

def step(flag):
    if cs.get_replica_context().replica_id_in_sync_group == 1:
        print("I run", flush=True)
        if not os.path.exists(flag):
            open(flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

cs.CentralStorageStrategy().run(step, (sys.argv[1],))
"""


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_results_that_are_held_outlive_the_worker_that_placed_them(
    mortal: cs.CentralStorageStrategy, tmp_path: Path, ahead: bool
) -> None:
    def step(at: Any) -> np.ndarray:
        value = int(at[0])
        result = np.random.randint(0, 1 << 30, 300_000) + (value << 32)
        if value in (2, 5):
            once(tmp_path / f"{replica()} {value}", kill if replica() == value % 2 else lambda: None)
        return result

    places = [np.full(2, value) for value in range(8)]
    plain = [mortal.run(step, args=(place,)) for place in places] if not ahead else []
    steps = list(mortal.run_steps(step, mortal.experimental_distribute_dataset(places))) if ahead else plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 2", "0 5", "1 2", "1 5"]
    held = [array for result in steps for array in mortal.experimental_local_results(result)]
    assert len(held) == 16
    again = [array.copy() for array in held]
    for value in range(3):
        mortal.run(step, args=(np.full(2, value),))
    for number, (array, copy) in enumerate(zip(held, again, strict=True)):
        assert ((array >> 32) == number // 2).all()
        assert (array == copy).all()


def test_one_that_dies_when_it_has_preserved_what_it_was_shown(
    mortal: cs.CentralStorageStrategy, tmp_path: Path
) -> None:
    with mortal.scope():
        w = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)

    def preserve_and_die() -> None:
        from cs_worker.execution.catalogue import Catalogue

        preserve = Catalogue.preserve

        def die(self: Any) -> None:
            preserve(self)
            kill()

        Catalogue.preserve = die  # type: ignore[method-assign]

    def step() -> tuple[list[float], list[float]]:
        old = np.asarray(w)
        w.assign_add(np.ones(3))
        if replica() == 0:
            assert w[0] == old[0] + 2  # so replica 1 has to preserve what it holds before the update
        else:
            once(tmp_path / "died", preserve_and_die)
        context().all_reduce("SUM", np.ones(1))
        return old.tolist(), np.asarray(w).tolist()

    pid = mortal.statistics().replicas[1].pid
    for old in (0, 2):
        assert mortal.experimental_local_results(mortal.run(step)) == (([old] * 3, [old + 2] * 3),) * 2
    assert mortal.statistics().replicas[1].pid != pid
