"""A service whose workers and script come from elsewhere, as from other containers: ``cs-launch --serve``, ``--join``
and ``--health``, with all memory in files of the run directory."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.digits import quick_digits
from tests.harness.processes import MAILBOXES, Child, run, start
from tests.harness.stand_in_gpus import stand_in_gpus

SERVE = ("--memory", "files")
SCRIPT = """
import os, time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    v = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)

def step():
    v.assign_add(np.ones(3))
    context = cs.get_replica_context()
    context.all_reduce("SUM", np.ones(1))
    if BLOCKS:
        print("at work", flush=True)
        time.sleep(600)

try:
    strategy.run(step)
    strategy.run(step)
except BaseException as error:
    print(type(error).__name__, error, flush=True)
print("read", v.numpy().tolist(), strategy.num_replicas_in_sync)
"""
ON_GPUS = """
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    v = cs.Variable(np.zeros(3, np.float32))
    sgd = cs.optimizers.SGD(1.0)

def step():
    (gradient,) = cs.gradient_buffers([v])
    assert type(gradient).__module__.startswith("cupy")
    gradient[...] = -1
    sgd.apply_gradients([(gradient, v)])

strategy.run(step)
print([replica.device for replica in strategy.statistics().replicas], v.numpy().tolist())
"""
HOLDS = """
import subprocess, sys
import numpy as np
import central_storage as cs
from cs_proto.codec import decode

strategy = cs.CentralStorageStrategy()
value = int(sys.argv[1])

def step():
    return np.full(1 << 20, value + cs.get_replica_context().replica_id_in_sync_group, np.int32)

held = list(strategy.experimental_local_results(strategy.run(step)))
held[1] += 10
session = strategy._backend._session
mapping = session.results[0]._mapping
assert np.shares_memory(held[0], mapping.elements("uint8"))
del mapping
post = session._post

def post_and_be_followed(peer, parts):
    post(peer, parts)
    if value and type(decode(parts)).__name__ == "Goodbye":  # the next script may be served from here on
        subprocess.run([sys.executable, *sys.argv[:1], "0"], check=True)

session._post = post_and_be_followed
strategy.shutdown()
for array in held:
    print(array.min(), array.max())
"""
REMOVES = """
import shutil
import central_storage as cs

strategy = cs.CentralStorageStrategy()
strategy.run(lambda: 6)  # it is connected to all workers
shutil.rmtree(strategy.address)
print(strategy.run(lambda: 7))
"""
COUNTS = """
import central_storage as cs

strategy = cs.CentralStorageStrategy()
results = [strategy.run(cs.identity, (n,)) for n in range(100)]
print(len(results), int(strategy.experimental_local_results(results[-1])[0]))
"""
DROPS = """
import gc, subprocess, sys
import central_storage as cs

def train():
    strategy = cs.CentralStorageStrategy()
    if len(sys.argv) > 1:
        subprocess.run([sys.executable, *sys.argv[:1]], check=True)
    return strategy.num_replicas_in_sync

try:
    print(train())
except cs.errors.ContextError:
    print("refused")
gc.collect()
"""


class Elsewhere:
    """A server and its two workers, started apart."""

    def __init__(self, stack: ExitStack, directory: str, *options: str) -> None:
        self.directory = directory
        self.environment = {"CS_ADDRESS": directory}
        self._stack, self._options = stack, options
        self.server = self.serve()
        self.workers = [self.joined(stack, number) for number in range(2)]

    def serve(self) -> Child:
        """The server, and the one after it that was killed."""
        command = ("cs-launch", "--serve", "2", *SERVE, *self._options)
        return self._stack.enter_context(start(*command, environment=self.environment))

    def joined(self, stack: ExitStack, number: int) -> Child:
        worker = stack.enter_context(start("cs-launch", "--join", environment=self.environment))
        transport = re.escape(f"transport ipc + {MAILBOXES}shared memory (files")
        worker.wait_for(rf"worker w{number} of 2 on cpu:{number}, {transport}", stream="err")
        return worker

    def health(self) -> tuple[int | None, str]:
        ended = run("cs-launch", "--health", environment=self.environment)
        return ended.code, ended.out


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent, ExitStack() as stack:
        yield Elsewhere(stack, os.path.join(parent, "run"), "--max-restarts", "0")


@pytest.fixture(scope="module")
def lasting() -> Iterator[Elsewhere]:
    """One that every test leaves as it was, but for what its processes have printed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent, ExitStack() as stack:
        yield Elsewhere(stack, os.path.join(parent, "run"), "--max-restarts", "0")


def script(elsewhere: Elsewhere, *, blocks: bool) -> tuple[str, ...]:
    path = Path(elsewhere.directory).parent / "script.py"
    path.write_text(SCRIPT.replace("BLOCKS", str(blocks)))
    return (str(path),)


def test_what_a_script_holds_stays_what_it_is_when_the_next_one_is_served(lasting: Elsewhere) -> None:
    path = Path(lasting.directory).parent / "holds.py"
    path.write_text(HOLDS)
    ended = run(str(path), "5", environment=lasting.environment).ok()
    assert ended.lines == ["0 0", "11 11", "5 5", "16 16"]


def test_a_script_is_served_however_many_runs_those_before_it_had(lasting: Elsewhere) -> None:
    path = Path(lasting.directory).parent / "counts.py"
    path.write_text(COUNTS)
    for _ in range(2):
        assert run(str(path), environment=lasting.environment).ok().lines == ["100 99"]


def test_a_strategy_that_is_dropped_or_refused_is_no_garbage_that_waits(lasting: Elsewhere) -> None:
    path = Path(lasting.directory).parent / "drops.py"
    path.write_text(DROPS)
    assert run(str(path), "again", environment=lasting.environment).ok().lines == ["refused", "2"]


@pytest.mark.slow
def test_scripts_one_after_the_other_are_served_until_it_is_told_to_end(elsewhere: Elsewhere, tmp_path: Path) -> None:
    digits = (quick_digits(tmp_path), "--epochs", "2")
    refused = run("cs-launch", "--join", environment=elsewhere.environment)
    assert refused.code == 3
    assert "all 2 workers of this service run already" in refused.err
    trained = run(*digits, environment=elsewhere.environment).ok()
    assert re.search(r"worker w1 \(pid \d+, cpu:1\) ran 24 steps", trained.out)
    alone = run(*digits, "--devices", "cpu:0,cpu:1").ok()
    losses, alone_losses = (
        re.findall(r"2 of 2 epochs in .*, (loss \S+)$", said.err, re.M) for said in (trained, alone)
    )
    assert [*losses, trained.lines[-1]] == [*alone_losses, alone.lines[-1]]
    assert losses
    code, said = elsewhere.health()
    assert (code, said.startswith("serving 2 replicas")) == (0, True), said
    assert f"ipc + {MAILBOXES}shared memory (files in the run directory); asked over ipc + bytes in frames" in said
    again = run(*script(elsewhere, blocks=False), environment=elsewhere.environment).ok()
    assert again.out == "read [4.0, 4.0, 4.0] 2\n"

    elsewhere.server.signal(signal.SIGTERM)
    assert [child.wait().code for child in (elsewhere.server, *elsewhere.workers)] == [0, 0, 0]
    assert not os.path.exists(elsewhere.directory)
    assert elsewhere.health()[0] == 1


@pytest.mark.slow
def test_the_gpu_of_every_container_has_the_same_name(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text(ON_GPUS)
    with stand_in_gpus(1), tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent:
        alone = run("cs-launch", "--devices", "gpu:0", program).ok()
        with ExitStack() as stack:
            environment = {"CS_ADDRESS": os.path.join(parent, "run")}
            serve = ("cs-launch", "--serve", "2", "--memory", "files")
            server = stack.enter_context(start(*serve, environment=environment))
            for number in range(2):
                join = ("cs-launch", "--join", "--devices", "gpu:0")
                worker = stack.enter_context(start(*join, environment=environment))
                worker.wait_for(f"worker w{number} of 2 on gpu:0", stream="err")
            ended = run(program, environment=environment).ok()
            server.signal(signal.SIGTERM)
            assert server.wait().code == 0
    assert alone.out == "['gpu:0'] [1.0, 1.0, 1.0]\n"
    assert ended.out == "['gpu:0', 'gpu:0'] [2.0, 2.0, 2.0]\n"


def test_a_service_whose_run_directory_is_removed_ends_after_its_script(elsewhere: Elsewhere, tmp_path: Path) -> None:
    (tmp_path / "removes.py").write_text(REMOVES)
    ended = run(str(tmp_path / "removes.py"), environment=elsewhere.environment).ok()
    assert ended.out == "7\n"  # whoever is connected stays so
    ended = elsewhere.server.wait()
    assert ended.code == 5
    assert (
        "[supervisor] the service ends: nothing can connect to it any more, because its run directory "
        f"{elsewhere.directory} was removed; start it again, and keep what removes old files away from there\n"
    ) in ended.err
    assert [worker.wait().code for worker in elsewhere.workers] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the launcher", "the worker"])
def test_a_worker_that_is_killed_ends_the_run_with_the_reason(elsewhere: Elsewhere, victim: str) -> None:
    with start(*script(elsewhere, blocks=True), environment=elsewhere.environment) as child:
        worker = elsewhere.workers[1]
        worker.wait_for("at work")
        launcher, process = worker.processes()
        (launcher if victim == "the launcher" else process).kill()
        ended = child.wait().ok()
    cause = "the end of its connection" if victim == "the launcher" else "SIGKILL"
    assert re.search(rf"ReplicaLostError replica 1 \(worker w1, pid \d+\) ended by {cause}", ended.out), str(ended)
    assert "read [0.0, 0.0, 0.0]" in ended.out
    assert elsewhere.server.wait().code == 4
    assert [worker.wait().code for worker in elsewhere.workers] == [0, -9 if victim == "the launcher" else 4]


SURVIVED = """
import os, signal, sys
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    v = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)

def step(flag):
    v.assign_add(np.ones(3))
    context = cs.get_replica_context()
    if context.replica_id_in_sync_group == 1 and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getppid() if LAUNCHER else os.getpid(), signal.SIGKILL)
        signal.pause()
    context.all_reduce("SUM", np.ones(1))

for _ in range(3):
    strategy.run(step, (sys.argv[1],))
print("read", v.numpy().tolist())
"""


@pytest.mark.slow
def test_another_takes_the_place_of_a_worker_that_is_killed() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent, ExitStack() as stack:
        elsewhere = Elsewhere(stack, os.path.join(parent, "run"))
        for number, victim in enumerate(("the worker", "the launcher"), start=1):
            program = Path(parent, f"script{number}.py")
            program.write_text(SURVIVED.replace("LAUNCHER", str(victim == "the launcher")))
            with start(str(program), os.path.join(parent, victim), environment=elsewhere.environment) as child:
                elsewhere.server.wait_for(rf"(ended by .*; restart [\s\S]*){{{number}}}", stream="err")
                if victim == "the launcher":
                    elsewhere.workers[1] = elsewhere.joined(stack, 1)
                ended = child.wait().ok()
            assert ended.out == "read [6.0, 6.0, 6.0]\n"
        assert re.search(r"ended by .*; restart 1 of 3", elsewhere.server.err)
        elsewhere.server.signal(signal.SIGTERM)
        assert [process.wait().code for process in (elsewhere.server, *elsewhere.workers)] == [0, 0, 0]


def test_ctrl_c_reaches_workers_whose_pids_mean_nothing_here_and_the_next_script_starts_after_one_that_is_killed(
    lasting: Elsewhere,
) -> None:
    with start(*script(lasting, blocks=True), environment=lasting.environment) as child:
        for worker in lasting.workers:
            worker.wait_for("at work")
        child.press_ctrl_c()
        ended = child.wait().ok()
    assert ended.out == "KeyboardInterrupt \nread [0.0, 0.0, 0.0] 2\n"
    assert lasting.health()[0] == 0
    with start(*script(lasting, blocks=True), environment=lasting.environment) as child:
        for worker in lasting.workers:
            worker.wait_for(r"at work[\s\S]*at work")
        child.signal(signal.SIGKILL)
        assert child.wait().code == -9
    again = run(*script(lasting, blocks=False), environment=lasting.environment).ok()
    assert again.out == "read [4.0, 4.0, 4.0] 2\n"  # of what the killed one did nothing was committed
    assert lasting.health()[0] == 0


TAKEN_UP = """
import os, sys, time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    v = cs.Variable(np.linspace(0, 1, 5), aggregation=cs.VariableAggregation.SUM)
    w = cs.Variable(np.linspace(-1, 1, 7))
    adam = cs.optimizers.Adam(0.1)

def step(k, door):
    context = cs.get_replica_context()
    replica = context.replica_id_in_sync_group
    adam.apply_gradients([(np.sin(np.asarray(w) + k + replica), w)])
    v.assign_add(np.full(5, np.asarray(w)[0]))
    read = np.asarray(v)[0] if k % 2 else 0.0  # its own update: this run could not be repeated
    if k == 3 and replica == 1:
        print("at the door", flush=True)
        while not os.path.exists(door):
            time.sleep(0.01)
    return float(context.all_reduce("SUM", np.full(1, read + k))[0])

losses = []
for k in range(8):
    losses.append(strategy.experimental_local_results(strategy.run(step, (k, sys.argv[1]))))
print("read", w.numpy().tobytes().hex(), v.numpy().tobytes().hex(), losses)
"""


def test_the_run_of_a_supervisor_that_was_killed_is_taken_up_by_the_next() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent, ExitStack() as stack:
        elsewhere = Elsewhere(stack, os.path.join(parent, "run"))
        program, door = Path(parent, "script.py"), Path(parent, "door")
        program.write_text(TAKEN_UP)
        with start(str(program), str(door), environment=elsewhere.environment) as child:
            elsewhere.workers[1].wait_for("at the door")
            elsewhere.server.signal(signal.SIGKILL)
            elsewhere.server.wait()
            for worker in elsewhere.workers:
                worker.wait_for("it has 60 s to come back", stream="err")
            server = elsewhere.serve()
            server.wait_for("it takes up the run of the supervisor that was killed", stream="err")
            for worker in elsewhere.workers:
                worker.wait_for(r"the service is back, worker w\d continues", stream="err")
            door.touch()
            ended = child.wait().ok()
        assert elsewhere.health()[0] == 0
        undisturbed = run(str(program), str(door), environment=elsewhere.environment).ok()
        assert ended.out == undisturbed.out
        assert "the service in" in ended.err
        server.signal(signal.SIGTERM)
        assert [process.wait().code for process in (server, *elsewhere.workers)] == [0, 0, 0]
        assert os.listdir(elsewhere.directory) == []


def test_a_supervisor_that_does_not_come_back_ends_everything_with_its_name() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as parent, ExitStack() as stack:
        elsewhere = Elsewhere(stack, os.path.join(parent, "run"), "--return-timeout", "0.5")
        program = Path(parent, "script.py")
        program.write_text(SCRIPT.replace("BLOCKS", "True"))
        with start(str(program), environment=elsewhere.environment) as child:
            elsewhere.workers[1].wait_for("at work")
            elsewhere.server.signal(signal.SIGKILL)
            ended = child.wait()
        assert re.search(r"ShutdownError .*the service in \S+/run has not come back within 0.5 s", ended.out), str(
            ended
        )
        for worker in elsewhere.workers:
            said = worker.wait()
            assert said.code == 4
            assert f"the service in {elsewhere.directory} has not come back within 0.5 s" in said.err
