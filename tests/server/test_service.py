"""A real server process between a stand-in supervisor and raw sockets that play workers and clients."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgpack
import numpy as np
import pytest
import zmq
from tests.harness.cupy_stand_in.c_kernels import COMPILER
from tests.harness.processes import Child, start
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.stand_in_supervisor import StandInSupervisor
from tests.harness.timing import unit

from cs_proto import messages as m
from cs_proto.arrays import Array, Location, array_of, bytes_array, frame_view
from cs_proto.codec import BULK_LIMITS, LIMITS, decode, encode
from cs_proto.records import RECORDS, Record, replace
from cs_server.rules import RULES, reference

pytestmark = pytest.mark.long  # each test starts a server
R = TypeVar("R", bound=Record)

# Says on stderr what is imported and unpickled once SIGUSR2 has come.
AUDITED = """
import os, signal, sys
armed = []
def hook(event, arguments):
    if armed and event in ("import", "pickle.find_class"):
        os.write(2, f"AUDIT {event} {arguments[:2]}\\n".encode())
sys.addaudithook(hook)
from cs_server.cli import run
def arm(*_):
    armed.append(True)
    os.write(2, b"ARMED\\n")
signal.signal(signal.SIGUSR2, arm)
run()
"""


class Peer:
    """A DEALER that says and hears single messages."""

    def __init__(self, service: Service, identity: str, unread: int = 1000) -> None:
        """``unread``: so many messages wait in this process until they are read."""
        self.identity = identity
        service.supervisor.introduce(identity.encode())
        self._socket = service.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, unread)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.RCVTIMEO, int(unit(20) * 1000))
        self._socket.connect(f"ipc://{service.directory}/server")
        service.peers.append(self)

    def say(self, record: Record) -> None:
        self.say_parts([bytes(part) for part in encode(record)])

    def say_parts(self, parts: Sequence[bytes]) -> None:
        self._socket.send_multipart(parts)

    def next(self) -> Record:
        """The next message."""
        return decode(self._socket.recv_multipart(), BULK_LIMITS)

    def hear(self, kind: type[R]) -> R:
        """The next message, which must be of that kind."""
        record = self.next()
        assert type(record) is kind, record
        return record

    def has_answer(self) -> bool:
        """Whether a message has come that nobody has read."""
        return bool(self._socket.poll(0))

    def ask(self, record: Record, kind: type[R]) -> R:
        self.say(record)
        return self.hear(kind)

    def close(self) -> None:
        self._socket.close(linger=0)


@dataclass
class Service:
    """A run directory with a supervisor, a server and peers."""

    directory: Path
    supervisor: StandInSupervisor
    context: zmq.Context[zmq.Socket[bytes]]
    replicas: int = 2
    device: str = "cpu:0"
    peers: list[Peer] = field(default_factory=list)
    workers: list[Peer] = field(default_factory=list)
    _controller: Peer | None = None

    @property
    def controller(self) -> Peer:
        assert self._controller is not None
        return self._controller

    @contextmanager
    def server(self, *program: str, environment: dict[str, str | None] | None = None) -> Iterator[Child]:
        """A server process that has said that it is ready."""
        arguments = [
            *("--run-directory", str(self.directory), "--parameter-device", self.device),
            *("--replicas", str(self.replicas), "--threads", "2"),
        ]
        with start(*(program or ("cs-server",)), *arguments, environment=environment) as child:
            assert self._said() == m.Introduce(m.PROTOCOL, "server", 0, 1, child.pid)
            assert self._said() == m.Ready()
            yield child

    def _said(self) -> Record:
        """What a server says next, but for that it has done something, which one that takes up says, too."""
        while isinstance(said := self.supervisor.next(), m.MadeProgress):
            pass
        return said

    def register(self, replica: int, incarnation: int = 1) -> Peer:
        peer = Peer(self, f"w{replica}.{incarnation}")
        worker = m.Worker(replica, incarnation, os.getpid(), "cpu:0")
        peer.say(m.Register(m.PROTOCOL, worker))
        return peer

    def connect(self) -> None:
        """All workers and a controller."""
        self.workers = [self.register(replica) for replica in range(self.replicas)]
        for worker in self.workers:
            registered = worker.hear(m.Registered)
            assert (registered.replicas, registered.parameter_device) == (self.replicas, self.device)
        self._controller = Peer(self, "c01")
        welcome = self.controller.ask(m.Hello(m.PROTOCOL, "controller", "01", os.getpid()), m.Welcome)
        assert [worker.replica for worker in welcome.workers] == list(range(self.replicas))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.context.term()


@contextmanager
def new_service() -> Iterator[Service]:
    directory = Path(tempfile.mkdtemp(dir=os.environ["XDG_RUNTIME_DIR"]))
    try:
        with StandInSupervisor(directory) as supervisor:
            service = Service(directory, supervisor, zmq.Context())
            try:
                yield service
            finally:
                service.close()
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def service() -> Iterator[Service]:
    """A run directory of the test's own, without a server."""
    with new_service() as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    """A service that the tests of this file share: two workers, a controller."""
    with new_service() as made, made.server() as child:
        made.connect()
        for dtype in ("float32", "float64", "int64"):  # their segments are kept for as long as the service
            create(made, "first", np.zeros(1, dtype))
        yield made
        child.signal(signal.SIGTERM)
        ended = child.wait()
        assert (ended.code, ended.err) == (0, ended.err)


_sequence = iter(range(1, 1_000_000))


def spec(name: str, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> m.VariableSpec:
    return m.VariableSpec(name, dtype, shape, True, 1, 0)


def create(service: Service, name: str, value: np.ndarray) -> m.Variable:
    """A variable with a value, made by the controller."""
    wanted = spec(name, value.dtype.name, value.shape)
    return service.controller.ask(m.Create("01", next(_sequence), wanted, array_of(value)), m.Created).variable


def value_of(peer: Peer, number: int) -> np.ndarray:
    got = peer.ask(m.Get(7, (number,), (), True), m.Got)
    assert got.request == 7
    return frame_view(got.arrays[0])


def still_answers(peer: Peer) -> m.Counters:
    return peer.ask(m.Statistics(99), m.Counters)


# --- requests -------------------------------------------------------------------------------------------------------


def test_segments_of_every_service(running: Service) -> None:
    writers = running.supervisor.names()
    expected = {
        "control": "",
        "arena/controller": "controller",
        "inputs": "controller",
        "arena/0": "w0",
        "arena/1": "w1",
    }
    assert expected.items() <= writers.items()


def test_create_assign_and_get(running: Service) -> None:
    controller = running.controller
    variable = create(running, "weights", np.arange(4, dtype=np.float32))
    assert variable.spec.name == "weights"
    assert value_of(controller, variable.number).tolist() == [0, 1, 2, 3]
    add = m.Assign("01", next(_sequence), variable.number, "assign_add", array_of(np.full(4, 0.5, np.float32)))
    done = controller.ask(add, m.Done)
    assert (done.sequence, done.number) == (add.sequence, variable.number)
    assert controller.ask(add, m.Done) == done  # said again, done once
    got = controller.ask(m.Get(3, (), ("weights",), False), m.Got)
    (array,) = got.arrays
    assert array.place == variable.place
    assert running.supervisor.mapping(variable.place.segment).view(array).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_a_variable_whose_memory_cannot_be_had_is_refused_and_all_else_goes_on(running: Service) -> None:
    wanted = m.Create("01", next(_sequence), spec("nowhere", "int16"), None)
    running.supervisor.refused.add("parameters/int16")
    refused = running.controller.ask(wanted, m.Refused)
    assert refused.error.message == "variable 'nowhere': there is no segment 'parameters/int16'"
    assert create(running, "nowhere", np.ones(2, np.float32)).spec.name == "nowhere"


def test_a_value_larger_than_a_frame_comes_by_the_arena(running: Service) -> None:
    value = np.arange(100_000, dtype=np.int64)
    variable = running.controller.ask(
        m.Create("01", next(_sequence), spec("large", "int64", value.shape), None), m.Created
    ).variable
    array = Array("int64", value.shape, Location("arena/controller", 4096))
    running.supervisor.mapping("arena/controller").view(array)[:] = value
    running.controller.ask(m.Assign("01", next(_sequence), variable.number, "assign", array), m.Done)
    np.testing.assert_array_equal(value_of(running.controller, variable.number), value)


def test_rows_are_written_by_index(running: Service) -> None:
    variable = create(running, "rows", np.zeros((3, 2), np.float32))
    value, rows = np.array([[1, 1], [2, 2]], np.float32), np.array([2, 2])
    for op, expected in [("scatter_add", [3, 3]), ("scatter_sub", [0, 0]), ("scatter_update", [2, 2])]:
        write = m.Assign("01", next(_sequence), variable.number, op, array_of(value), array_of(rows))  # type: ignore[arg-type]
        running.controller.ask(write, m.Done)
        assert value_of(running.controller, variable.number).tolist() == [[0, 0], [0, 0], expected]


def test_freed_memory_is_given_back_and_read_as_zeros(running: Service) -> None:
    nbytes = 1 << 22
    first = create(running, "freed", np.ones(4, np.float32))
    variable = running.controller.ask(
        m.Create("01", next(_sequence), spec("much", "float32", (nbytes // 4,)), None), m.Created
    ).variable
    there = running.supervisor.mapping("parameters/float32").view(variable.array)
    there[:] = 7
    done = running.controller.ask(m.Free("01", next(_sequence), (variable.number, first.number)), m.Done)
    assert done.number == 2
    assert there[len(there) // 2] == 0  # whole pages were given back
    small = spec("again", "float32", (8,))
    again = running.controller.ask(m.Create("01", next(_sequence), small, None), m.Created).variable
    assert value_of(running.controller, again.number).tolist() == [0] * 8
    refused = running.controller.ask(m.Get(9, (variable.number,), (), False), m.Refused)
    assert "there is no variable" in refused.error.message


def test_a_plan_larger_than_the_memory_is_refused(running: Service) -> None:
    create_huge = m.Create("01", next(_sequence), spec("huge", "uint8", (1 << 50,)), None)
    refused = running.controller.ask(create_huge, m.Refused)
    assert refused.number == create_huge.sequence
    assert refused.error.exception == "cs.MemoryPlanError"
    assert str(1 << 50) in refused.error.message


def test_who_is_not_what_it_says_is_refused(running: Service) -> None:
    observer = Peer(running, "o7e")
    for incarnation in (1, 2):
        refused = observer.ask(m.Register(m.PROTOCOL, m.Worker(0, incarnation, 1, "cpu:0")), m.Refused)
        assert f"says it is worker w0.{incarnation}, and the supervisor has introduced it as the observer" in (
            refused.error.message
        )
    for role, client in (("controller", "7e"), ("observer", "7f"), ("controller", "01")):
        refused = observer.ask(m.Hello(m.PROTOCOL, role, client, 1), m.Refused)  # type: ignore[arg-type]
        assert "the supervisor has introduced it as observer '7e'" in refused.error.message
    assert still_answers(running.controller)
    observer.close()


def test_an_observer_reads_and_counts(running: Service) -> None:
    variable = create(running, "seen", np.ones(3, np.float64))
    observer = Peer(running, "o7f")
    welcome = observer.ask(m.Hello(m.PROTOCOL, "observer", "7f", os.getpid()), m.Welcome)
    assert welcome.replicas == 2
    assert value_of(observer, variable.number).tolist() == [1, 1, 1]
    counters = still_answers(observer)
    assert counters.variables >= 1
    assert counters.commits >= 1
    assert [replica.pid for replica in counters.replicas] == [os.getpid()] * 2
    refused = observer.ask(m.Create("7f", 1, spec("forbidden"), None), m.Refused)
    assert (refused.number, refused.error.exception) == (1, "cs.PeerProtocolError")
    assert still_answers(observer).variables == counters.variables
    observer.say(m.Goodbye("7f"))
    observer.close()


# --- a whole run ----------------------------------------------------------------------------------------------------


def bring_gradient(service: Service, replica: int, variable: m.Variable, value: float) -> None:
    name = f"gradients/{replica}/0/{variable.spec.dtype}"
    array = Array(variable.spec.dtype, variable.spec.shape, Location(name, variable.place.offset))
    service.supervisor.mapping(name).view(array)[...] = value


def test_a_run_with_apply_and_all_reduce(running: Service) -> None:
    variable = create(running, "trained", np.full(4, 10, np.float32))
    sgd = (("learning_rate", 0.5), ("momentum", 0.0), ("nesterov", 0.0))
    optimizer = running.controller.ask(m.Configure("01", next(_sequence), 0, "SGD", sgd, None, -1), m.Done).number
    before = still_answers(running.controller)

    # The first apply of a set is answered with its number; all_reduce is answered with the sum.
    for replica, worker in enumerate(running.workers):
        bring_gradient(running, replica, variable, replica + 1)
        first = m.ApplyPoint(0, "train.py:8", (m.OptimizerUpdate(optimizer, 0, (variable.number,)),), 0)
        worker.say(m.Ask((1,), replica, 1, (), first))
    numbers = {worker.hear(m.Accepted).variable_sets[0] for worker in running.workers}
    assert len(numbers) == 1
    for replica, worker in enumerate(running.workers):
        loss = array_of(np.array([replica + 0.25, 1.0]))
        worker.say(m.Ask((1,), replica, 1, (), m.ReducePoint(1, "train.py:9", "SUM", (loss,))))
    for worker in running.workers:
        assert frame_view(worker.hear(m.Reduced).arrays[0]).tolist() == [1.5, 2.0]
    for replica, worker in enumerate(running.workers):
        worker.say(m.Return((1,), replica, 1, (), 2, m.Value(f"result {replica}".encode(), ()), None))
    finished = running.controller.hear(m.RunFinished)
    assert finished.error is None
    assert [value.body for value in finished.values] == [b"result 0", b"result 1"]
    assert value_of(running.controller, variable.number).tolist() == [8.5] * 4  # 10 - 0.5 * (1 + 2)

    # From then on an apply is a note that travels with the return: one message for each worker.
    for replica, worker in enumerate(running.workers):
        note = m.ApplyPoint(0, "train.py:8", (m.OptimizerUpdate(optimizer, numbers.copy().pop(), ()),), 0)
        worker.say(m.Return((2,), replica, 1, (note,), 1, m.Value(b"", ()), None))
    assert running.controller.hear(m.RunFinished).error is None
    assert value_of(running.controller, variable.number).tolist() == [7.0] * 4
    after = still_answers(running.controller)
    assert after.runs - before.runs == 2
    assert [r.applies - b.applies for r, b in zip(after.replicas, before.replicas, strict=True)] == [2, 2]

    # The word that tells readers of a write: even, since none is under way, and not the first.
    word = running.supervisor.mapping("control").elements("uint64")[0]
    assert word > 0
    assert word % 2 == 0


def test_an_all_gather_that_does_not_fit_is_told_to_all(running: Service) -> None:
    for replica, worker in enumerate(running.workers):
        rows = array_of(np.zeros((1, 2 + replica)))
        worker.say(m.Ask((3,), replica, 1, (), m.GatherPoint(0, "train.py:5", 0, (rows,))))
    for replica, worker in enumerate(running.workers):
        failed = worker.hear(m.PointFailed)
        assert failed.error.exception == "cs.InvalidArgumentError"
        assert "only that axis may differ" in failed.error.message
        worker.say(m.Return((3,), replica, 1, (), 1, None, failed.error))
    finished = running.controller.hear(m.RunFinished)
    assert finished.error is not None
    assert finished.error.exception == "cs.InvalidArgumentError"


# --- what is no message ---------------------------------------------------------------------------------------------

OUTSIDE = Array("float32", (4,), Location("arena/1", (1 << 62) - 64))
HEADER = encode(m.Get(1, (), (), False))[0]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "a header that is not one msgpack value"),
        ([b""], "a header that is not one msgpack value"),
        ([b"\x80\x04\x95K\x01."], "a header that is not one msgpack value"),  # a pickle
        ([msgpack.packb([35])], "Statistics has 1 fields, not 0"),
        ([bytes(HEADER), b"frame"], "1 frames, but its header names 0"),
        ([b"x" * (LIMITS.header_nbytes + 1)], "a header of 4194305 bytes"),
        ([bytes(HEADER), *[b""] * (LIMITS.frames + 1)], "4097 frames; at most 4096"),
        ([b"\x91" * 100_000], "a header that is not one msgpack value"),
        (encode(m.Value(b"", (bytes_array(bytes(1 << 20)),) * 129), BULK_LIMITS), "a message of 13"),
        (encode(m.Assign("01", 1, 1, "assign", OUTSIDE)), "only the controller may send Assign"),
        (encode(m.Ask((9,), 0, 1, (), m.ReducePoint(0, "", "SUM", (OUTSIDE,)))), "has not registered"),
        (encode(m.Registered(1, "cpu:0", ())), "a Registered is not a message for the server"),
        (encode(m.Value(b"", ())), "a Value is not a message for the server"),
    ],
)
def test_what_is_no_message_is_answered_and_survived(running: Service, parts: Sequence[bytes], said: str) -> None:
    stranger = Peer(running, "x1")
    stranger.say_parts([bytes(part) for part in parts] or [b""])
    refused = stranger.hear(m.Refused)
    assert refused.error.exception == "cs.PeerProtocolError"
    assert said in refused.error.message
    stranger.close()
    still_answers(running.controller)


def test_records_that_only_the_server_writes_down_are_for_nobody(running: Service) -> None:
    stranger = Peer(running, "x2")
    for code in set(range(1, 256)) - set(RECORDS):
        stranger.say_parts([msgpack.packb([code])])
        assert stranger.hear(m.Refused).error.exception == "cs.PeerProtocolError"
    stranger.close()
    still_answers(running.controller)


def test_a_peer_that_is_gone_is_not_waited_for(running: Service) -> None:
    for number in range(5):
        leaver = Peer(running, f"x3{number}")
        for _ in range(20):
            leaver.say(m.Statistics(1))
        leaver.close()
    still_answers(running.controller)


def test_a_peer_may_come_back_under_its_name(running: Service) -> None:
    for _ in range(3):
        peer = Peer(running, "o5")
        assert peer.ask(m.Hello(m.PROTOCOL, "observer", "5", os.getpid()), m.Welcome).replicas == 2
        peer.close()


# --- life and death -------------------------------------------------------------------------------------------------


def test_no_import_and_no_unpickling_once_it_is_ready(service: Service) -> None:
    with service.server("-c", AUDITED, environment={"CS_LOG": "debug"}) as child:
        child.signal(signal.SIGUSR2)
        child.wait_for("ARMED", stream="err")
        service.connect()
        test_create_assign_and_get(service)
        test_a_plan_larger_than_the_memory_is_refused(service)
        test_an_observer_reads_and_counts(service)
        test_a_run_with_apply_and_all_reduce(service)
        test_an_all_gather_that_does_not_fit_is_told_to_all(service)
        child.press_ctrl_c()  # is the script's
        child.signal(signal.SIGUSR1)
        child.wait_for("most recent call first", stream="err")
        still_answers(service.controller)
        service.supervisor.hang_up()
        ended = child.wait()
    assert ended.code == 0, ended
    assert "AUDIT" not in ended.err, ended.err
    assert "cs_server.service: from b'c01': Hello(protocol=" in ended.err
    assert "cs_server.service: to b'w0.1': Reduced(run=(1,)" in ended.err
    assert max(map(len, ended.err.splitlines())) < 500


def test_a_server_started_again_goes_on_where_the_killed_one_was(service: Service) -> None:
    with service.server() as child:
        service.connect()
        variable = create(service, "kept", np.arange(4, dtype=np.float32))
        point = m.ReducePoint(0, "train.py:9", "SUM", (array_of(np.ones(2)),))
        service.workers[0].say(m.Ask((1,), 0, 1, (), point))
        still_answers(service.workers[0])  # so it has been heard
        child.signal(signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
    with service.server() as child:
        assert value_of(service.controller, variable.number).tolist() == [0, 1, 2, 3]
        reduced = service.workers[1].ask(m.Ask((1,), 1, 1, (), point), m.Reduced)
        assert frame_view(reduced.arrays[0]).tolist() == [2, 2]
        child.signal(signal.SIGTERM)
        assert child.wait().code == 0


@pytest.mark.skipif(COMPILER is None, reason="no gcc here to run kernels without a GPU")
@pytest.mark.parametrize("where", ["server.commit", "server.committed"])
def test_with_variables_on_a_gpu_too(service: Service, where: str) -> None:
    """The server is killed before the third commit, the first of an update, or when it is done and nobody knows."""
    service.device, service.replicas = "gpu:0", 1
    adam = {"learning_rate": 0.5, "beta_1": 0.5, "beta_2": 0.5, "epsilon": 0.5, "amsgrad": 0.0}
    expected, slots = np.arange(4, dtype=np.float32), (np.zeros(4, np.float32), np.zeros(4, np.float32))
    for t in (1, 2):
        reference(RULES["adam"], expected, [np.full(4, 2, np.float32)], slots, adam, t)

    with stand_in_gpus(1):
        with service.server(environment={"CS_FAILPOINTS": f"{where}=kill@3"}) as child:
            service.connect()
            variable = create(service, "kept", np.arange(4, dtype=np.float32))
            bring_gradient(service, 0, variable, 2)
            configure = m.Configure("01", next(_sequence), 0, "Adam", tuple(adam.items()), None, -1)
            assert service.controller.ask(configure, m.Done).number == 1
            first = m.ApplyPoint(0, "train.py:8", (m.OptimizerUpdate(1, 0, (variable.number,)),), 0)
            accepted = service.workers[0].ask(m.Ask((1,), 0, 1, (), first), m.Accepted)
            service.workers[0].say(m.Return((1,), 0, 1, (), 1, m.Value(b"", ()), None))
            assert child.wait().code == -signal.SIGKILL
        with service.server() as child:
            service.controller.say(m.Statistics(next(_sequence)))
            while not isinstance(said := service.controller.next(), m.Counters):  # it has connected again
                assert isinstance(said, m.RunFinished)
                assert said.run == (1,)
            note = m.ApplyPoint(0, "train.py:8", (m.OptimizerUpdate(1, accepted.variable_sets[0], ()),), 0)
            service.workers[0].say(m.Return((2,), 0, 1, (note,), 1, m.Value(b"", ()), None))
            finished = service.controller.hear(m.RunFinished)
            assert (finished.run, finished.error) == ((2,), None)
            assert value_of(service.controller, variable.number).tolist() == expected.tolist()
            child.signal(signal.SIGTERM)
            assert child.wait().code == 0


def test_deaths_that_come_between_question_and_answer_are_heard(service: Service) -> None:
    died = m.Died("worker", 1, 1, 4711, "SIGKILL", "")
    with service.server(environment={"CS_LOG": "debug"}) as child:
        service.connect()
        service.supervisor.before_next_answer.append(died)
        create(service, "makes segments", np.ones(2, np.float64))
        point = m.ReducePoint(0, "train.py:9", "SUM", (array_of(np.ones(2)),))
        refused = service.workers[1].ask(m.Ask((1,), 1, 1, (), point), m.Refused)
        assert refused.error.exception == "cs.Fenced"
        replacement = service.register(1, incarnation=2)
        for worker in (replacement, service.workers[0]):
            assert [each.incarnation for each in worker.hear(m.Registered).workers] == [1, 2]
        service.supervisor.tell(m.Died("worker", 0, 1, 4712, "exit code 3", ""))
        child.wait_for("from the supervisor: Died.*exit code 3", stream="err")
        refused = service.workers[0].ask(m.Ask((1,), 0, 1, (), point), m.Refused)
        assert refused.error.exception == "cs.Fenced"


def test_a_worker_that_is_replaced_before_a_welcome_leaves_is_named_after_it(service: Service) -> None:
    """A controller without a Welcome ignores WorkerRestarted, and then waits for the dead worker that Welcome names."""
    with service.server(environment={"CS_LOG": "debug"}) as child:
        for worker in [service.register(replica) for replica in range(2)]:
            worker.hear(m.Registered)
        service.supervisor.appoints = False
        controller = Peer(service, "c01")
        controller.say(m.Hello(m.PROTOCOL, "controller", "01", os.getpid()))
        assert service.supervisor.next() == m.Appoint("01")
        service.supervisor.tell(m.Died("worker", 1, 1, 4711, "SIGKILL", ""))
        child.wait_for("from the supervisor: Died", stream="err")
        service.register(1, incarnation=2).hear(m.Registered)
        service.supervisor.tell(m.Appoint("01"))
        assert [worker.incarnation for worker in controller.hear(m.Welcome).workers] == [1, 1]
        assert controller.hear(m.WorkerRestarted).worker.incarnation == 2


def test_a_segment_that_cannot_be_made_ends_the_server_with_the_reason(service: Service) -> None:
    service.supervisor.refused.add("control")
    options = ("--run-directory", service.directory, "--parameter-device", "cpu:0", "--replicas", "1")
    with start("cs-server", *options) as child:
        ended = child.wait()
    assert ended.code == 1
    assert "there is no segment 'control'" in ended.err


@pytest.mark.parametrize("end", ["SIGTERM", "end of the supervisor"])
def test_it_can_be_ended_while_it_still_compiles(service: Service, tmp_path: Path, end: str) -> None:
    options = ("--run-directory", service.directory, "--parameter-device", "cpu:0", "--replicas", "1")
    with start("cs-server", *options, environment={"XDG_CACHE_HOME": str(tmp_path)}) as child:
        assert service.supervisor.next() == m.Introduce(m.PROTOCOL, "server", 0, 1, child.pid)
        if end == "SIGTERM":
            child.signal(signal.SIGTERM)
        else:
            service.supervisor.hang_up()
        assert child.wait().code == 0
    assert service.supervisor.said.empty()


# --- what a peer may not say --------------------------------------------------------------------------------------


def test_arrays_lie_where_their_sender_may_write(running: Service) -> None:
    variable = create(running, "believed", np.arange(8, dtype=np.float32).reshape(4, 2))
    controller, worker = running.controller, running.workers[1]
    assert isinstance(variable.place, Location)
    values, indices = variable.array, Array("int64", (4,), Location("arena/1", 0))
    ours = Array("float32", (4, 2), Location("arena/1", 4096))

    def refusal(array: Array) -> str:
        assert isinstance(array.place, Location)
        return f"w1 may not write segment {array.place.segment}"

    def sparse(*arrays: Array) -> tuple[m.ApplyPoint]:
        update = m.OptimizerUpdate(1, 0, (variable.number,), (m.SparseGradient(variable.number, *arrays),))
        return (m.ApplyPoint(0, "", (update,), 0),)

    for array in [values, *(replace(values, place=Location(name, 0)) for name in ("arena/0", "control", "arena/99"))]:
        points = [
            *sparse(array, indices),
            m.ReducePoint(0, "", "SUM", (ours, array)),
            m.AssignPoint(0, "", variable.number, "assign", array, True),
            m.CreatePoint(0, "", variable.spec, array),
            m.MergeCallPoint(0, "", m.Value(b"", (array,))),
        ]
        notes: list[tuple[m.Note, ...]] = [
            sparse(array, indices),
            (m.WriteNote(0, 0, "", variable.number, "assign", array, None),),
        ]
        records: list[Record] = [m.Ask((50,), 1, 1, (), point) for point in points]
        records += [m.Return((50,), 1, 1, note, 0, m.Value(b"", ()), None) for note in notes]
        records.append(m.Return((50,), 1, 1, (), 0, m.Value(b"", (array,)), None))
        for record in records:
            refused = worker.ask(record, m.Refused)
            assert (refused.error.exception, refusal(array) in refused.error.message) == ("cs.PeerProtocolError", True)
    refused = worker.ask(m.Ask((50,), 1, 1, (), m.ReducePoint(0, "", "SUM", (OUTSIDE,))), m.Refused)
    assert "ends at byte" in refused.error.message
    write = m.Assign("01", next(_sequence), variable.number, "assign", values)
    refused = controller.ask(write, m.Refused)
    assert "controller may not write segment parameters/float32" in refused.error.message
    stranger = Peer(running, "x1")
    refused = stranger.ask(m.Assign("01", 1, variable.number, "assign", values), m.Refused)
    assert "only the controller may send" in refused.error.message
    assert value_of(controller, variable.number).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    stranger.close()


def private_nbytes(pid: int) -> int:
    """What a process has of memory of its own."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def test_questions_whose_answers_nobody_takes_cost_one_or_two_answers(running: Service) -> None:
    nbytes = 32 << 20
    wanted = spec("large", "float32", (nbytes // 4,))
    variable = running.controller.ask(m.Create("01", next(_sequence), wanted, None), m.Created).variable
    lazy = Peer(running, "o9", unread=1)
    pid = lazy.ask(m.Hello(m.PROTOCOL, "observer", "9", os.getpid()), m.Welcome).server_pid
    before = private_nbytes(pid)
    for number in range(1, 17):
        lazy.say(m.Get(number, (variable.number,), (), True))
        lazy.say(m.Statistics(100 + number))  # what is small is not kept for ever either
    for _ in range(64):  # peers are heard in turn
        still_answers(running.controller)
    assert private_nbytes(pid) - before < 3 * nbytes
    heard = []
    while not heard or heard[-1].request != 116:
        answer = lazy.next()
        assert isinstance(answer, m.Got | m.Counters)
        heard.append(answer)
    assert len(heard) < 8  # the question that came last, and not those before it that nobody waited for
    assert all(answer.arrays[0].nbytes == nbytes for answer in heard if isinstance(answer, m.Got))
    lazy.close()
    still_answers(running.controller)


def test_a_question_asked_again_while_its_answer_is_made_is_answered_once(running: Service) -> None:
    variable = create(running, "asked again", np.ones(100_000, np.float32))
    observer = Peer(running, "o8")
    observer.ask(m.Hello(m.PROTOCOL, "observer", "8", os.getpid()), m.Welcome)
    for _ in range(4):
        observer.say(m.Get(1, (variable.number,), (), True))
    observer.say(m.Get(2, (variable.number,), (), True))
    assert [observer.hear(m.Got).request for _ in range(2)] == [1, 2]
    still_answers(observer)
    observer.close()


def test_many_commits_lie_between_two_large_answers_to_observers(running: Service) -> None:
    controller, nbytes = running.controller, 128 << 20
    wanted = replace(spec("large for observers", "float32", (nbytes // 4,)), trainable=False)
    large = controller.ask(m.Create("01", next(_sequence), wanted, None), m.Created).variable
    small = create(running, "small beside it", np.ones(1, np.float32))
    observer = Peer(running, "o7")
    observer.ask(m.Hello(m.PROTOCOL, "observer", "7", os.getpid()), m.Welcome)

    def commit() -> None:
        write = m.Assign("01", next(_sequence), small.number, "assign", array_of(np.ones(1, np.float32)))
        controller.ask(write, m.Done)

    def answered(number: int) -> tuple[int, float]:
        """After how many commits, and when."""
        observer.say(m.Get(number, (large.number,), (), True))
        while not observer.has_answer():
            commit()
        return observer.hear(m.Got).commits, time.monotonic()

    before, asked_at = answered(1)[0], time.monotonic()
    for _ in range(100):
        commit()
    after, answered_at = answered(2)
    assert after - before >= 200 or answered_at - asked_at >= 1.9
    controller.ask(m.Free("01", next(_sequence), (large.number, small.number)), m.Done)
    observer.close()


def test_more_than_an_answer_holds_is_refused_with_what_to_do(running: Service) -> None:
    wanted = spec("too large", "float32", ((1 << 28) + 1,))
    variable = running.controller.ask(
        m.Create("01", next(_sequence), replace(wanted, trainable=False), None), m.Created
    ).variable
    refused = running.controller.ask(m.Get(5, (variable.number,), (), True), m.Refused)
    assert (refused.number, refused.error.exception) == (5, "cs.InvalidArgumentError")
    assert (
        "1073741828 bytes of variables were asked for at once; one answer holds at most 1073741824"
        in refused.error.message
    )
    assert "fewer variables" in refused.error.message
    assert running.controller.ask(m.Get(6, (variable.number,), (), False), m.Got).request == 6
    running.controller.ask(m.Free("01", next(_sequence), (variable.number,)), m.Done)


def test_a_message_of_too_many_parts_is_dropped_part_by_part(running: Service) -> None:
    stranger = Peer(running, "x7")
    stranger.say_parts([b"\x90", *[b""] * 100_000])
    assert "4097 frames; at most 4096" in stranger.hear(m.Refused).error.message
    stranger.say_parts([b"\x90", *[bytes(60 << 20)] * 4])
    assert "a message of 188743681 bytes; at most 134217728" in stranger.hear(m.Refused).error.message
    still_answers(running.controller)
    stranger.close()


def test_one_huge_part_ends_the_connection_and_nothing_else(running: Service) -> None:
    stranger = Peer(running, "x8")
    pid = running.controller.ask(m.Statistics(3), m.Counters).pid
    before = private_nbytes(pid)
    stranger.say_parts([bytes(LIMITS.part_nbytes + 1)])
    still_answers(running.controller)
    assert private_nbytes(pid) - before < LIMITS.part_nbytes // 2
    stranger.close()
