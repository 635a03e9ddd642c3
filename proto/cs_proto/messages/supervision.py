"""The supervisor's socket (SOCK_SEQPACKET): no record has frames, so each is one packet. Codes 110-139."""

from __future__ import annotations

from typing import Annotated, Literal

from cs_proto.descriptors import Location
from cs_proto.records import Count, Range, Record, record

from .shared import MOST_REPLICAS, Error, Incarnation, Number, Pid, Replica, Replicas, Role


@record(110)
class Introduce(Record):
    """First packet of every process that connects to the supervisor. ``client``: what a controller calls itself in its
    Hello."""

    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    client: str = ""


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
    """Any process to supervisor: hand me the segment of that name."""

    segment: str


@record(113)
class Segment(Record):
    """Supervisor's answer to either, with the descriptor as ancillary data."""

    segment: str
    reservation: Number
    writable: bool


@record(114)
class SegmentRefused(Record):
    """Supervisor's answer where there is no such segment or it cannot be made."""

    segment: str
    error: Error


@record(115)
class Ready(Record):
    """Server or worker to supervisor: I can work."""

    endpoint: str


@record(116)
class Serving(Record):
    """Supervisor to a client, once server and workers are ready: where the server listens. To all, when a server that
    was started again is ready: what it has not answered may not have reached it."""

    endpoint: str
    run_directory: str
    transport: str


@record(117)
class Died(Record):
    """Supervisor to all: a process ended that should not have. ``cause`` reads ``exit code 3`` or ``SIGKILL``;
    ``log`` holds the last lines it wrote. ``restarts``: another takes its place, as the next incarnation."""

    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    cause: str
    log: str
    restarts: bool = False


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
    """First packet of a launcher that would run one of the service's workers elsewhere, in a container of its own.
    ``incarnation`` from 1: it runs, or ran last, this one of worker ``rank`` for the supervisor before this one."""

    pid: Pid
    rank: Replica = 0
    incarnation: Annotated[int, Range(0, (1 << 31) - 1)] = 0


@record(122)
class Joined(Record):
    """Supervisor's answer to :class:`Join`: the worker to run, or to go on running. ``transport`` says how the service
    talks."""

    rank: Replica
    incarnation: Incarnation
    replicas: Replicas
    transport: str

    def check(self) -> None:
        if self.rank >= self.replicas:
            self.refuse(f"worker {self.rank}.{self.incarnation} of {self.replicas}")


@record(123)
class Interrupt(Record):
    """Controller to supervisor, and from there to who runs it: the run that this replica carries out is cancelled;
    have its process look (SIGINT)."""

    replica: Replica


@record(124)
class MadeProgress(Record):
    """Server or worker to supervisor, once: this incarnation has done a piece of work to the end, so its death is no
    proof that starting it again is in vain."""

    incarnation: Incarnation


@record(125)
class Kill(Record):
    """Server to supervisor, and from there to who runs it: end this worker's incarnation, with the stacks of its
    threads in its output; ``reason`` says why, and becomes part of the cause of its death."""

    replica: Replica
    incarnation: Incarnation
    reason: str


@record(126)
class ClientGone(Record):
    """Supervisor to server: this controller's connection has ended, with or without Goodbye. The same back to the
    supervisor: its runs are given up. Supervisor to workers, which get a SIGINT as well: carry out none of them."""

    client: str


@record(127)
class MakeMailbox(Record):
    """Worker or controller to supervisor: a mailbox to the server (``server``) or to a worker (``w0``)."""

    peer: str


@record(128)
class OpenMailbox(Record):
    """Server or worker to supervisor: hand me the mailbox that I was offered."""

    mailbox: Count


@record(129)
class Mailbox(Record):
    """Supervisor's answer to either, with its memory and both doorbells (the maker's first) as ancillary data; or why
    not (``refused``). ``spins``: there are processors enough to look for mail a while before going to sleep."""

    mailbox: Count
    spins: bool
    refused: str


@record(130)
class ShowStacks(Record):
    """Server to supervisor, and from there to who runs it: have this worker's incarnation print the stacks of its
    threads (SIGUSR1). Others have waited for it for long, and it may hang."""

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
    variables on ``parameter_device``. Only the choice of the first controller counts; a service that runs on other
    devices is started again on these."""

    devices: tuple[str, ...]
    parameter_device: str

    def check(self) -> None:
        if not 1 <= len(self.devices) <= MOST_REPLICAS:
            self.refuse(f"{len(self.devices)} devices")
