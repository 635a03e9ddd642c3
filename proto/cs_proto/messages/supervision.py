"""The supervisor's socket (SOCK_SEQPACKET): no record has frames, so each is one packet. Codes 110-139, and 141."""

from __future__ import annotations

from typing import Annotated, Literal

from cs_proto.descriptors import Location
from cs_proto.records import Count, Range, Record, Seconds, record, shown

from .shared import MOST_REPLICAS, Error, Incarnation, Number, Pid, Replica, Replicas, Role, is_node

#: The longest identity of a ZeroMQ socket.
_MOST_NAME_NBYTES = 255


@record(110)
class Introduce(Record):
    """First packet of every process that connects to the supervisor, and its answer, which has a ``name``. Supervisor
    to server and workers, too: a process that may send them messages.

    ``name`` is the identity of the process's ZeroMQ sockets: 16 random bytes. Whoever knows it can speak for that
    process, so it is not shown. A process sends the name that an earlier supervisor gave it, or none. A process that
    is introduced for several workers has a name for each. A client sends the same ``client`` in its Hello.
    ``protocol`` stays the first field in every version.
    """

    protocol: Count
    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    client: str = ""
    name: bytes = b""

    def check(self) -> None:
        if len(self.name) > _MOST_NAME_NBYTES or self.name[:1] == b"\0":
            self.refuse(f"a name of {len(self.name)} bytes, or one that begins with a zero")

    def __repr__(self) -> str:
        who = f"role={self.role!r}, rank={self.rank}, incarnation={self.incarnation}, pid={self.pid}"
        return (
            f"Introduce({who}, client={self.client!r}, protocol={self.protocol}, {'named' if self.name else 'no name'})"
        )


@record(111)
class MakeSegment(Record):
    """Server to supervisor: make a segment of ``reservation`` bytes, or hand out the existing one of that name.

    ``writer`` names the other process that may map it for writing: ``w0``, ``controller``, or ``""`` for none.
    """

    segment: str
    reservation: Number
    writer: str

    def check(self) -> None:
        Location(self.segment, 0)


@record(112)
class OpenSegment(Record):
    """Any process to supervisor: ask for the segment of that name, of which the first ``stop`` bytes are needed; 0 if
    that is not known."""

    segment: str
    stop: Count = 0


@record(113)
class Segment(Record):
    """Supervisor's answer to a request for a segment, with the descriptor as ancillary data.

    ``is_elsewhere``: there is no descriptor, because the bytes of this segment stay on another machine. Those of other
    segments are shared with this process.
    """

    segment: str
    reservation: Number
    writable: bool
    is_elsewhere: bool = False


@record(114)
class SegmentRefused(Record):
    """Supervisor's answer if there is no such segment, or if it cannot be made."""

    segment: str
    error: Error


@record(115)
class Ready(Record):
    """Server or worker to supervisor: the sender can work."""


@record(116)
class Serving(Record):
    """Supervisor to a client, once server and workers are ready. Supervisor to all, when a restarted server is ready:
    requests without an answer may be lost. Server and workers listen in ``run_directory``, under names that follow
    from their ranks and incarnations."""

    run_directory: str
    transport: str


@record(117)
class Died(Record):
    """Supervisor to all: a process has ended unexpectedly. ``cause`` reads ``exit code 3`` or ``SIGKILL``; ``log``
    holds the last lines it wrote. ``restarts``: the next incarnation takes its place. ``node``: as in Worker."""

    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    cause: str
    log: str
    restarts: bool = False
    node: str = ""


@record(118)
class Output(Record):
    """Supervisor to the script that started it: lines its children printed."""

    stream: Literal["stdout", "stderr"]
    text: str


@record(119)
class StartFailed(Record):
    """Supervisor to a client: the service will not come up."""

    error: Error


@record(120)
class Shutdown(Record):
    """Client that started the service to supervisor: stop everything and end."""

    reason: str


@record(121)
class Join(Record):
    """First packet of a launcher that offers to run one of the service's workers in its own container.

    If ``incarnation`` is not 0, the launcher runs (or last ran) this incarnation of worker ``rank`` for the previous
    supervisor, which gave that worker this ``name``. ``node`` is the address of the launcher's machine; "" if that is
    the machine of the service. ``workers`` says how many workers that machine offers from this launcher on, because it
    wants all of them or none. ``protocol`` stays the first field in every version.
    """

    protocol: Count
    pid: Pid
    rank: Replica = 0
    incarnation: Annotated[int, Range(0, (1 << 31) - 1)] = 0
    name: bytes = b""
    node: str = ""
    workers: Replicas = 1

    def check(self) -> None:
        if not is_node(self.node):
            self.refuse(f"{shown(self.node)} is no node")

    def __repr__(self) -> str:
        return f"Join(pid={self.pid}, rank={self.rank}, incarnation={self.incarnation}, protocol={self.protocol})"


@record(122)
class Joined(Record):
    """Supervisor's answer to :class:`Join`: the worker to run, or to keep running. ``transport`` names the service's
    transport. The worker must introduce itself by ``name``: in another container, its pid says nothing."""

    rank: Replica
    incarnation: Incarnation
    replicas: Replicas
    transport: str
    name: bytes = b""

    def check(self) -> None:
        if self.rank >= self.replicas:
            self.refuse(f"worker {self.rank}.{self.incarnation} of {self.replicas}")

    def __repr__(self) -> str:
        return f"Joined(rank={self.rank}, incarnation={self.incarnation}, replicas={self.replicas})"


@record(123)
class Interrupt(Record):
    """Controller to supervisor, which passes it on to the worker's launcher: interrupt the worker of this replica
    (SIGINT), because its run is cancelled."""

    replica: Replica


@record(124)
class MadeProgress(Record):
    """Server or worker to supervisor, once: this incarnation has finished a piece of work. If it dies, it is restarted
    without a pause."""

    incarnation: Incarnation


@record(125)
class Kill(Record):
    """Server to supervisor, which passes it on to the worker's launcher: end this incarnation of the worker, after it
    has printed the stacks of its threads. ``reason`` becomes part of the cause of its death."""

    replica: Replica
    incarnation: Incarnation
    reason: str


@record(126)
class ClientGone(Record):
    """Supervisor to server: the connection of this controller or observer has ended, with or without Goodbye. Server to
    supervisor: the controller's runs are given up. Supervisor to workers, with a SIGINT: stop and drop the controller's
    runs. Worker to server: no other Return from the controller's runs comes."""

    client: str


@record(127)
class MakeMailbox(Record):
    """Worker or controller to supervisor: ask for a mailbox to the server (``server``) or to a worker (``w0``)."""

    peer: str


@record(128)
class OpenMailbox(Record):
    """Server or worker to supervisor: ask for a mailbox that a peer has offered."""

    mailbox: Count


@record(129)
class Mailbox(Record):
    """Supervisor's answer to :class:`MakeMailbox` and :class:`OpenMailbox`, with the memory and both doorbells (the
    maker's first) as ancillary data; or ``refused`` says why there is none. ``spins``: the machine has processors
    enough for a reader to poll for a while before it sleeps.

    ``is_passed_on``: the other end passes messages on to another machine, and takes no marks.
    """

    mailbox: Count
    spins: bool
    refused: str
    is_passed_on: bool = False


@record(130)
class ShowStacks(Record):
    """Server to supervisor, which passes it on to the worker's launcher: make this incarnation of the worker print the
    stacks of its threads (SIGUSR1). Other processes have waited for it so long that it may hang."""

    replica: Replica
    incarnation: Incarnation


@record(131)
class ExtendSegment(Record):
    """Server to supervisor: make the segment of that name ``reservation`` bytes long, if it is shorter, and hand it
    out. Existing mappings of it stay valid and keep their length."""

    segment: str
    reservation: Number

    def check(self) -> None:
        Location(self.segment, 0)


@record(132)
class DeviceChoice(Record):
    """First packet of the script of a ``cs-launch``, before its Introduce: one worker on each of ``devices``, and
    variables on ``parameter_device``. Only the choice of the first controller counts, and only if the command line
    names no devices."""

    devices: tuple[str, ...]
    parameter_device: str

    def check(self) -> None:
        if not 1 <= len(self.devices) <= MOST_REPLICAS:
            self.refuse(f"{len(self.devices)} devices")


#: What becomes of a service: ``starting`` until all processes are ready, ``recovering`` while a dead server is
#: replaced, ``failed`` when it will not serve any more, ``stopping`` once it was told to end.
ServiceState = Literal["starting", "serving", "recovering", "failed", "stopping"]


@record(133)
class ShowService(Record):
    """Any process to supervisor, after its Introduce: ask how the service is."""


@record(134)
class ServiceReport(Record):
    """Supervisor's answer to :class:`ShowService`, at any time of the service's life.

    ``since`` is when it began, in seconds of Unix time. ``processes`` are the last incarnations of the server and of
    each worker; there are none while a ``cs-launch`` waits for the script's devices. ``controllers`` are the pid and
    the client of each connected script. ``events`` are the last things that the supervisor said, with their time:
    deaths, restarts, refusals. ``restarts`` of at most ``max_restarts`` are used up.
    """

    state: ServiceState
    since: Seconds
    transport: str
    processes: tuple[ServiceProcess, ...]
    controllers: tuple[tuple[Pid, str], ...]
    events: tuple[tuple[Seconds, str], ...]
    restarts: Count
    max_restarts: Count


@record(135)
class ServiceProcess(Record):
    """A process of the service.

    ``state`` is ``starting`` until it is ready, and ``ended`` if nothing runs in its place
    yet. ``cause`` says why the incarnation before it ended, or why it ended itself; it is empty if nothing did.
    ``node`` is the address of the machine on which it has that pid; "" if that is the machine of the service."""

    role: Literal["server", "worker"]
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    device: str
    state: Literal["starting", "ready", "ended"]
    restarts: Count
    cause: str
    node: str = ""


@record(136)
class ShowLog(Record):
    """Any process to supervisor, after its Introduce: send the last lines that the service's processes printed; if
    ``follow``, send also those that come."""

    follow: bool


@record(137)
class LogLines(Record):
    """Supervisor's answer to :class:`ShowLog`, in several packets, oldest line first. ``is_last`` is set in the packet
    after which all earlier lines are sent; lines that come later follow it."""

    lines: tuple[LogLine, ...]
    is_last: bool


@record(138)
class LogLine(Record):
    """A line that the process called ``label`` printed (``server``, ``w0``, or ``supervisor``), with its Unix time."""

    time: Seconds
    label: str
    stream: Literal["stdout", "stderr"]
    text: str


@record(141)
class Appoint(Record):
    """Server to supervisor, before it welcomes a controller: this client is the controller from now on. Supervisor's
    answer, the same: the workers have been told."""

    client: str


@record(139)
class WatchTimes(Record):
    """Any process to supervisor, after its Introduce: have all processes note step times as long as this connection
    lasts. There is no answer; a request for a ring that follows is answered when they do."""
