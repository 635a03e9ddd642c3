"""A service around real workers, played by the test: supervisor, server and controller in one poll loop.

The test says what each of them sends and looks at what the workers send; segments are handed out as soon as they are
asked for. Nothing is decided here.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import zmq
from tests.harness.introduced import introduction
from tests.harness.processes import ROOT
from tests.harness.timing import unit

from central_storage.core.handles import Handle, handle_id
from central_storage.pickling import pickler
from central_storage.wire_values import value_codec
from cs_proto import messages, segment_names
from cs_proto.arrays import Array, Location, array_of, bytes_array, frame_view
from cs_proto.codec import decode, encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.records import Record, replace
from cs_runtime.shared_memory.mapping import Mapping as Segment

R = TypeVar("R", bound=Record)

RESERVATION = 1 << 24
CONTROLLER = b"c0000"


class Service:
    """Workers ``w0.1`` … and the three parties they talk to. A context manager."""

    def __init__(self, replicas: int = 1, environment: Mapping[str, str] | None = None, device: str = "cpu:0") -> None:
        self.directory = tempfile.mkdtemp(prefix="w-")
        self.replicas = replicas
        #: The replicas that have asked for the second set of their gradient buffers.
        self.second_gradients: list[int] = []
        self.variables: dict[int, messages.Variable] = {}
        self.optimizers: dict[int, messages.Optimizer] = {}
        self.seed = 7
        #: How many times workers have asked what stands behind numbers.
        self.asked_about = 0
        #: The replicas whose workers have told the supervisor that they have worked.
        self.worked: list[int] = []
        self._environment = dict(environment or {})
        self._device = device
        self._mappings: dict[str, Segment] = {}
        #: How much of a segment workers are given, where that is not all of it.
        self.reserved: dict[str, int] = {}
        #: The segments whose bytes workers fetch, because they lie on another machine.
        self.elsewhere: set[str] = set()
        self._tails: dict[str, int] = {}
        self._from_server: deque[tuple[int, Record]] = deque()
        self._runs = 0
        self._latest: messages.RunId = (0,)

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{self.directory}/supervisor")
        self._listener.listen()
        self._context = zmq.Context()
        self._server = self._context.socket(zmq.ROUTER)
        self._identities: dict[int, bytes] = {}
        self._server.setsockopt(zmq.LINGER, 0)
        self._server.bind(f"ipc://{self.directory}/server")
        self.processes = [self._start(replica) for replica in range(self.replicas)]
        self.lifelines: list[socket.socket] = []
        self._controllers: list[zmq.Socket[bytes]] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for link in (self._listener, *self.lifelines):
            link.close()
        self._context.destroy(linger=0)
        self._mappings.clear()
        if error is not None:
            for replica, process in enumerate(self.processes):
                print(f"--- worker {replica}, exit code {process.returncode}")
                print(self.log(replica))
        shutil.rmtree(self.directory)

    def open(self) -> Self:
        """Play the start up to the workers' Ready."""
        self.accept()
        workers: dict[int, messages.Worker] = {}
        while len(workers) < self.replicas:
            replica, record = self.from_server_socket(messages.Register)
            workers[replica] = record.worker
        everybody = tuple(workers[replica] for replica in range(self.replicas))
        for replica in range(self.replicas):
            self.answer(replica, messages.Registered(self.replicas, "cpu:0", everybody))
        for link in self.lifelines:
            assert isinstance(decode([link.recv(1 << 16)]), messages.Ready)
        self.workers = everybody
        self._controllers = [self.connect(CONTROLLER, replica) for replica in range(self.replicas)]
        return self

    def accept(self) -> None:
        """Let every worker introduce itself to the supervisor."""
        self._listener.settimeout(unit(30))
        links: dict[int, socket.socket] = {}
        names: dict[int, bytes] = {}
        while len(links) < self.replicas:
            link, _ = self._listener.accept()
            link.settimeout(unit(30))
            introduce = decode([link.recv(1 << 16)])
            assert isinstance(introduce, messages.Introduce)
            assert introduce.role == "worker"
            assert introduce.pid == self.processes[introduce.rank].pid
            name = f"w{introduce.rank}.{introduce.incarnation}".encode()
            link.sendall(b"".join(encode(replace(introduce, name=name))))
            self._hand_out(link)
            names[introduce.rank] = name
            links[introduce.rank] = link
        for rank, link in links.items():
            for other in names.keys() - {rank}:
                link.sendall(b"".join(encode(introduction(names[other]))))
        self.lifelines = [links[rank] for rank in sorted(links)]

    # --- what the test says ---------------------------------------------------------------------------------------

    def connect(self, identity: bytes, replica: int) -> zmq.Socket[bytes]:
        """A peer at a worker's ROUTER, introduced by its name."""
        self.lifelines[replica].sendall(b"".join(encode(introduction(identity))))
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.IDENTITY, identity)
        link.connect(f"ipc://{self.directory}/w{replica}.1")
        return link

    def tell(self, replica: int, record: Record) -> None:
        """The controller sends to a worker."""
        self._controllers[replica].send_multipart(encode(record))

    def answer(self, replica: int, record: Record) -> None:
        """The server sends to a worker."""
        self._server.send_multipart([self._identities[replica], *encode(record)])

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        frozen: bool = False,
        run: messages.RunId | None = None,
        **kwargs: Any,
    ) -> messages.RunId:
        """The controller sends a run of ``function`` with the same arguments to every worker."""
        if run is None:
            self._runs += 1
            run = (self._runs,)
        self._latest = run
        for replica in range(self.replicas):
            self.tell(replica, self.run_record(run, replica, function, args, kwargs, frozen=frozen))
        return run

    def run_steps(self, function: Callable[..., Any], *arguments: Any, lookahead: int = 2) -> list[messages.RunId]:
        """The controller sends a series: one step of ``function`` for each of ``arguments``, all at once."""
        runs = [(self._runs + 1 + number,) for number in range(len(arguments))]
        for run, argument in zip(runs, arguments, strict=True):
            for replica in range(self.replicas):
                plain = self.run_record(run, replica, function, (argument,))
                self.tell(replica, replace(plain, series=runs[0][0], lookahead=lookahead))
        self._runs, self._latest = runs[-1][0], runs[-1]
        return runs

    def run_record(
        self,
        run: messages.RunId,
        replica: int,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        frozen: bool = False,
    ) -> messages.Run:
        """The record of a run, with its function in it."""
        data = pickler.dump_function(function, handle_id)
        arguments, buffers = pickler.dump_arguments(args, dict(kwargs or {}), handle_id, self._place)
        return messages.Run(
            run,
            run[0],
            replica,
            self.seed,
            pickler.digest(data),
            bytes_array(data),
            frozen,
            bytes_array(arguments),
            buffers,
        )

    def settle(self) -> None:
        """Bring every worker back to idle, whatever a failed test has left, and forget what it sent."""
        for replica in range(self.replicas):
            self.tell(replica, messages.Cancel(self._latest))
        run = self.run(_nothing)
        for replica in range(self.replicas):
            while not any(
                sender == replica and isinstance(record, messages.Return) and record.run == run
                for sender, record in self._from_server
            ):
                self._poll()
        self._from_server.clear()

    def interrupt(self, replica: int, run: messages.RunId) -> None:
        """What the client does at Ctrl-C: Cancel, then SIGINT."""
        self.tell(replica, messages.Cancel(run))
        self.processes[replica].send_signal(signal.SIGINT)

    # --- what the test sees ---------------------------------------------------------------------------------------

    def from_server_socket(self, kind: type[R], replica: int | None = None) -> tuple[int, R]:
        """The next record that the server gets (of ``replica``), which must be of that kind. Describe, Get and
        Locate are answered."""
        while True:
            for position, (sender, record) in enumerate(self._from_server):
                if replica is None or sender == replica:
                    del self._from_server[position]
                    assert isinstance(record, kind), f"replica {sender} sent {record}, not a {kind.__name__}"
                    return sender, record
            self._poll()

    def next_from_worker(self) -> tuple[int, Record]:
        """The next record that the server gets, of whatever kind."""
        while not self._from_server:
            self._poll()
        return self._from_server.popleft()

    def has_more(self) -> bool:
        """Whether something has come that nobody has looked at."""
        self._take_in(0)
        return bool(self._from_server)

    def asked(self, replica: int = 0) -> messages.Ask:
        """The next Ask of a replica."""
        return self.from_server_socket(messages.Ask, replica)[1]

    def returned(self, replica: int = 0) -> messages.Return:
        """The next Return of a replica."""
        return self.from_server_socket(messages.Return, replica)[1]

    def result(self, replica: int = 0) -> Any:
        """What the next Return of a replica carries, decoded; an error is raised."""
        returned = self.returned(replica)
        if returned.error is not None:
            raise value_codec.to_exception(returned.error, self.copy, refuse_handle)
        assert returned.value is not None
        return self.decode(returned.value)

    def parts(self, record: Record) -> list[Any]:
        """A record as a peer sends it."""
        return encode(record)

    def refused(self, link: zmq.Socket[bytes]) -> messages.Refused:
        """What a peer of the ROUTER is told."""
        assert link.poll(int(unit(20) * 1000)), "no answer in time"
        record = decode(link.recv_multipart())
        assert isinstance(record, messages.Refused)
        return record

    def decode(self, value: messages.Value) -> Any:
        """A Value as an object."""
        return value_codec.from_value(value, self.copy, refuse_handle)

    def encode(self, value: Any) -> messages.Value:
        """An object as a Value."""
        return value_codec.to_value(value, array_of)

    def copy(self, array: Array) -> np.ndarray:
        """The bytes of an array, wherever it lies."""
        if isinstance(array.place, Location):
            return np.array(self.mapping(array.place.segment).view(array))
        return np.array(frame_view(array))

    def log(self, replica: int) -> str:
        """What a worker has printed so far, both streams."""
        return Path(f"{self.directory}/log{replica}").read_text()

    def wait_for_line(self, replica: int, text: str) -> None:
        """Return when a worker has printed a line with ``text``: the door at which a test acts."""
        deadline = time.monotonic() + unit(20)
        while text not in self.log(replica).rpartition("\n")[0]:
            assert time.monotonic() < deadline, f"{text!r} was not printed:\n{self.log(replica)}"
            assert self.processes[replica].poll() is None, f"the worker has ended:\n{self.log(replica)}"
            self._take_in(2)

    # --- what stands behind -------------------------------------------------------------------------------------------

    def add_variable(self, value: Any, aggregation: int = 1, *, sparse: bool = False) -> int:
        """Make a variable with its gradient buffers; its number."""
        value = np.asarray(value)
        dtype = value.dtype.name
        name = segment_names.parameters(segment_names.slab(dtype, sparse=sparse))
        offset = self._tails.get(name, 64)
        self._tails[name] = offset + -(-max(value.nbytes, 1) // 64) * 64
        number = len(self.variables) + 1
        spec = messages.VariableSpec(f"v{number}", dtype, value.shape, True, aggregation, 0, sparse=sparse)
        self.variables[number] = record = messages.Variable(number, spec, Location(name, offset), 0)
        self.mapping(name).view(record.array)[...] = value
        return number

    def add_optimizer(self, kind: str = "SGD") -> int:
        """Make an optimizer; its number."""
        number = len(self.optimizers) + 1
        self.optimizers[number] = messages.Optimizer(number, kind, "sgd", (("learning_rate", 0.5),), None, 0)
        return number

    def value(self, number: int) -> np.ndarray:
        """A variable's memory, writable."""
        record = self.variables[number]
        return self.mapping(record.place.segment).view(record.array)

    def gradient(self, replica: int, buffers: int, number: int) -> np.ndarray:
        """A variable's gradient as the server finds it."""
        record = self.variables[number]
        name = segment_names.gradients(replica, buffers, record.spec.dtype)
        return self.mapping(name).view(Array(record.spec.dtype, record.spec.shape, Location(name, record.place.offset)))

    def mapping(self, name: str) -> Segment:
        """A segment as the server maps it; made at first sight."""
        if name not in self._mappings:
            self._mappings[name] = Segment(name, self._open_segment(name, os.O_RDWR), RESERVATION, writable=True)
        return self._mappings[name]

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(str(ROOT / folder) for folder in ("proto", "client", "worker"))
        with open(f"{self.directory}/log{replica}", "wb") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "cs_worker", "--run-directory", self.directory),
                    *("--replica", str(replica), "--incarnation", "1", "--device", self._device),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path} | self._environment,
                start_new_session=True,
            )

    def _poll(self) -> None:
        came = self._take_in(int(unit(20) * 1000))
        for replica, process in enumerate(self.processes):
            assert process.poll() is None, f"worker {replica} has ended with {process.returncode}:\n{self.log(replica)}"
        assert came, f"nothing came in time; still waiting: {self._from_server}"

    def _take_in(self, milliseconds: int) -> bool:
        """Hear what has come or comes in time; whether something did."""
        poller = zmq.Poller()
        poller.register(self._server, zmq.POLLIN)
        for link in self.lifelines:
            poller.register(link, zmq.POLLIN)
        ready = dict(poller.poll(milliseconds))
        for link in self.lifelines:
            if link.fileno() in ready:
                self._hand_out(link)
        if self._server in ready:
            identity, *parts = self._server.recv_multipart()
            replica, record = int(identity[1:].split(b".")[0]), decode(parts)
            self._identities[replica] = identity
            if isinstance(record, messages.Describe):
                self._describe(replica, record)
            elif isinstance(record, messages.Get):
                everything = tuple(self.variables.values())
                arrays = tuple(variable.array for variable in everything)
                self.answer(replica, messages.Got(record.request, 0, everything, arrays))
            elif isinstance(record, messages.Locate):
                self.second_gradients.append(replica)
                arrays = tuple(self.variables[number].array for number in record.variables)
                self.answer(replica, messages.Located(record.request, b"", arrays, (), False))
            else:
                self._from_server.append((replica, record))
            self.asked_about += isinstance(record, messages.Describe | messages.Get)
        return bool(ready)

    def _describe(self, replica: int, asked: messages.Describe) -> None:
        try:
            variables = tuple(self.variables[number] for number in asked.variables)
            optimizers = tuple(self.optimizers[number] for number in asked.optimizers)
        except KeyError as error:
            refusal = error_of(InvalidArgumentError(f"there is no number {error}"))
            self.answer(replica, messages.Refused(asked.request, refusal))
        else:
            self.answer(
                replica, messages.Described(asked.request, variables, optimizers, *[((),) * len(optimizers)] * 2)
            )

    def _hand_out(self, link: socket.socket) -> None:
        asked = decode([link.recv(1 << 16)])
        if isinstance(asked, messages.MadeProgress):
            self.worked.append(self.lifelines.index(link))
            return
        if isinstance(asked, messages.MakeMailbox):
            link.sendall(b"".join(encode(messages.Mailbox(0, False, "this one makes none"))))
            return
        assert isinstance(asked, messages.OpenSegment), asked
        if asked.segment in self.elsewhere:
            link.sendall(b"".join(encode(messages.Segment(asked.segment, RESERVATION, False, True))))
            return
        replica = self.lifelines.index(link)
        writable = asked.segment.startswith((f"gradients/{replica}/", f"arena/{replica}"))
        descriptor = self._open_segment(asked.segment, os.O_RDWR if writable else os.O_RDONLY)
        try:
            nbytes = self.reserved.get(asked.segment, RESERVATION)
            packet = b"".join(encode(messages.Segment(asked.segment, nbytes, writable)))
            socket.send_fds(link, [packet], [descriptor])
        finally:
            os.close(descriptor)

    def _open_segment(self, name: str, flags: int) -> int:
        path = Path(self.directory, "segments", name.replace("/", "-"))
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.touch()
            os.truncate(path, RESERVATION)
        return os.open(path, flags)

    def _place(self, data: memoryview) -> Array:
        """A large buffer of an argument in the controller's arena."""
        name = segment_names.controller_arena()
        offset = self._tails.get(name, 0)
        self._tails[name] = offset + -(-data.nbytes // 64) * 64
        array = Array("uint8", (data.nbytes,), Location(name, offset))
        self.mapping(name).view(array)[...] = np.frombuffer(data, np.uint8)
        return array


class Sent(Handle):
    """A handle as the client has one: in the worker, the variable, optimizer or strategy of that number."""

    def __init__(self, kind: str, number: int) -> None:
        self._id = (kind, number)

    def _cs_handle(self) -> tuple[str, int]:
        return self._id


def _nothing() -> None:
    """A run that leaves nothing."""


def refuse_handle(kind: str, number: int) -> object:
    """No test sends a handle back unless it says how to read it."""
    raise AssertionError(f"handle {kind} {number}")


def points(ask: messages.Ask | messages.Return) -> Sequence[str]:
    """The kinds of the notes of a message, and of its point, e.g. ``["ApplyPoint", "ReducePoint"]``."""
    notes = [type(note).__name__ for note in ask.notes]
    return [*notes, type(ask.point).__name__] if isinstance(ask, messages.Ask) else notes
