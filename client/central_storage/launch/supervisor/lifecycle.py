"""The supervisor: starts and stops a service's processes, keeps its memory, and reports deaths.

One :class:`~.loop.Loop` drives a :class:`Service`, which makes all decisions. It never blocks, and never forks without
exec. ``foreground`` (for ``cs-launch``) and ``background`` (for a script that started its own service) add signals, the
script and the owner.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from central_storage.core.recovery_options import Recovery
from central_storage.launch.memory import Medium, Memfd, Memory
from central_storage.launch.plan import Command, next_incarnation
from cs_proto.errors import CentralStorageError, LaunchError
from cs_proto.failures import pid_of
from cs_proto.frozen import with_changes
from cs_proto.messages import (
    Appoint,
    ClientGone,
    DeviceChoice,
    Died,
    ExtendSegment,
    Interrupt,
    Introduce,
    Join,
    Kill,
    MadeProgress,
    MakeMailbox,
    MakeSegment,
    OpenMailbox,
    OpenSegment,
    Ready,
    Role,
    SegmentRefused,
    ServiceState,
    Serving,
    ShowLog,
    ShowService,
    ShowStacks,
    Shutdown,
    StartFailed,
    WatchTimes,
)
from cs_proto.printable import printable
from cs_proto.records import Record
from cs_runtime.logs import Complaints
from cs_runtime.run_file import RunFile

from .children import Child, Processes, Running, Standbys, end_leftovers
from .connections import Peer
from .introductions import Introductions
from .loop import Call, Loop, Timer
from .mailboxes import Mailroom, transport_of, why_no_mailboxes
from .output import LogFiles, Screen, Sink, Stream
from .reception import Reception, as_record
from .reporting import Reporter
from .restarts import WORKED_SECONDS, Restarts
from .seating import Seating
from .seats import Elsewhere

__all__ = ["STOP_GRACE", "Service"]

_log = logging.getLogger("central_storage.launch")
_complaints = Complaints(_log)

#: Seconds that a process may take to end by itself before it is killed.
STOP_GRACE = 3.0
_PROCESSES = ("server", "worker")

#: Turns a controller's choice of devices into commands; None stands for a controller that leaves the choice to others.
#: Raises a CentralStorageError for a choice that cannot be started.
Choose = Callable[[DeviceChoice | None], Sequence[Command]]


class Service:
    """A server, its workers, their memory and the connected peers."""

    def __init__(
        self,
        loop: Loop,
        run_directory: str,
        commands: Sequence[Command],
        sink: Sink,
        *,
        start_timeout: float = 60.0,
        logs: LogFiles | None = None,
        start_child: Callable[..., Running] = Child,
        medium: Medium | None = None,
        recovery: Recovery | None = None,
        run_file: RunFile | None = None,
        mailboxes: bool = True,
        choose: Choose | None = None,
    ) -> None:
        """Does not start anything yet. ``start_timeout`` (seconds) limits the time until every process is ready;
        workers that come from elsewhere have no limit. ``start_child`` starts a process for a command, with the
        arguments of :class:`~.children.Child`. Segments lie in ``medium`` (default: Memfd). ``recovery`` says what
        happens when a process dies (default: Recovery()). Without ``mailboxes`` all messages go over ZeroMQ. With
        ``choose``, the ``commands`` stand by until the first controller has chosen its devices."""
        self.run_directory = run_directory
        #: The first process that ended unexpectedly, unless its successor has worked since; or None.
        self.first_failure: Died | None = None
        #: Whether a process has ended for good.
        self.has_lost = False
        #: Why the service did not come up, or None.
        self.start_failure: str | None = None
        self._loop = loop
        self._commands = commands
        self._screen = Screen(sink)
        self._start_timeout = start_timeout
        self._logs = logs
        self._run_file = run_file
        self._takes_up = run_file is not None and run_file.serves
        #: Controllers that were connected to the previous supervisor and have not come back yet.
        self._awaited = set(run_file.clients) if run_file is not None and run_file.serves else set()
        self._state: ServiceState = "recovering" if self._takes_up else "starting"
        self._start_child = start_child
        self._children = Processes()
        self._recovery = recovery or Recovery()
        self._restarts = Restarts(self._recovery.max_restarts)
        #: For each process, the last incarnation that ended unexpectedly, until its successor is ready.
        self._deaths: dict[tuple[str, int], Died] = {}
        #: Controllers that have gone, until a server confirms that it knows.
        self._left: list[str] = []
        self._timers: list[Timer] = []
        run = os.path.basename(run_directory).removeprefix("cs-")
        self._memory = Memory(medium := medium or Memfd(run))
        self._mailroom = Mailroom(run, why_no_mailboxes(medium, wanted=mailboxes))
        self._transport = transport_of(medium, mailboxes=mailboxes)
        self._choose = choose
        self._standbys = Standbys()
        self._seating = Seating(self._children, self._deaths, self._transport, self.say)
        self._reporter = Reporter(self._transport, self._memory)
        self.last_deaths = self._reporter.last_deaths  # also of those whose successors are ready
        self._reception = Reception(loop, self._record, self._peer_ended, self._seating.is_waiting, self._reporter.note)
        self._introductions = Introductions(self._reception)
        sink.on_room = self._children.listen

    def start(self) -> None:
        """Listen, and start every process. If one cannot be started, the start of the service has failed."""
        self._write_down()  # before anybody can connect
        if self._takes_up:  # two servers must never write the same memory
            end_leftovers(self.run_directory, "server")
        try:
            self._reception.open(os.path.join(self.run_directory, "supervisor"))
        except OSError as error:
            self._fail_start(f"no socket can be made in {self.run_directory}: {error.strerror}")
            return
        if self._choose is None:
            self._start_processes()
        else:
            start = partial(Child, self._loop, on_lines=self._lines, on_end=self._child_ended)
            self._standbys.start(self._commands, start)

    def _start_processes(self, choice: DeviceChoice | None = None) -> None:
        """Start the processes, on the devices of the first controller's ``choice`` if it may choose."""
        choose, self._choose = self._choose, None
        try:
            self._commands = choose(choice) if choose is not None else self._commands
        except CentralStorageError as error:
            self._fail_start(str(error))
            return
        self._call_later(self._start_timeout, self._start_deadline)
        for command in self._commands:
            try:
                child = self._standbys.take(command) or self._start_child(
                    self._loop, command, on_lines=self._lines, on_end=self._child_ended
                )
            except OSError as error:
                self._fail_start(f"{command.label} could not be started ({command.argv[0]}: {error.strerror})")
                return
            self._children.append(child)
            if self._takes_up:
                self._take_up(child)
        self._standbys.end_at_once()

    def _take_up(self, child: Running) -> None:
        """Continue with a process of the previous supervisor. The server is a new one; launchers elsewhere get some
        time to come back with their workers."""
        assert self._run_file is not None
        if isinstance(child, Elsewhere):
            child.is_awaited = True
            timeout = self._run_file.return_timeout
            self._call_later(timeout, partial(child.stop_awaiting, timeout))
        else:
            self._call_later(self._start_timeout, partial(_end_if_late, child, self._start_timeout))
            self._call_later(self._run_file.return_timeout, self._stop_awaiting_clients)

    def _stop_awaiting_clients(self) -> None:
        for client in self._awaited:
            self._has_left(client)
        self._awaited.clear()

    def _call_later(self, delay: float, call: Call) -> None:
        """Call ``call`` after ``delay`` seconds, unless this service is closed first."""
        self._timers = [timer for timer in self._timers if timer.call is not None]
        self._timers.append(self._loop.call_later(delay, call))

    def _has_left(self, client: str) -> None:
        """Tell the server that a controller has gone; the server confirms it."""
        self._left.append(client)
        self._reception.tell("server", ClientGone(client))

    def _write_down(self, *, serves: bool = False) -> None:
        """Keep the run file up to date."""
        if self._run_file is not None:
            serves = serves or self._run_file.serves
            commands = [child.command for child in self._children] or self._commands
            started = [command.incarnation for command in commands]
            here = self._introductions.controllers()
            self._run_file = with_changes(
                self._run_file,
                server=started[0],
                workers=tuple(started[1:]),
                clients=tuple(sorted(here | self._awaited | set(self._left))),
                serves=serves,
            )
            try:
                self._run_file.write(self.run_directory)
            except OSError as error:  # the volume is full
                self.say(f"the run file cannot be written ({error.strerror}): no other supervisor can take up this run")
                self._forget_run_file()

    def _forget_run_file(self) -> None:
        if self._run_file is not None:
            RunFile.remove(self.run_directory)
            self._run_file = None

    def own(self, link: socket.socket) -> Peer:
        """Take the owner's connection. When it ends, or sends :class:`Shutdown`, the service stops."""
        self._introductions.owner = owner = self._reception.connect(link)
        return owner

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called and every process has ended."""
        processes = [*self._children, *self._standbys]
        return self._state == "stopping" and all(child.returncode is not None for child in processes)

    @property
    def has_failed(self) -> bool:
        """Whether the service will not serve any more."""
        return self._state == "failed"

    @property
    def is_reachable(self) -> bool:
        """Whether processes and scripts can still connect."""
        return self._reception.is_reachable

    @property
    def has_controller(self) -> bool:
        """Whether a script is connected."""
        return self._reception.has("controller")

    @property
    def living_pids(self) -> set[int]:
        """The processes started here that have not ended."""
        return Processes([*self._children, *self._standbys]).living_pids

    def last_lines(self, role: str, rank: int | None) -> str:
        """The last lines that the server or a worker printed; "" for other roles."""
        found = [child for child in self._children if (child.command.role, child.command.rank) == (role, rank or 0)]
        return found[0].tail.text() if found else ""

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Ask every process to end, and kill it after ``grace`` seconds. A second call may shorten the grace."""
        self._state = "stopping"
        self._end_children(grace)

    def say(self, text: str, label: str = "supervisor") -> None:
        """Print lines of the supervisor itself, whatever peers have called themselves and their deaths; or of a process
        beside the service, behind its label. The latter are dropped while the terminal is full."""
        lines = printable(text, lines=True).split("\n")
        if is_own := label == "supervisor":
            self._reporter.note(printable(text))
        self._reporter.add(label, "stderr", lines)
        self._screen.write("stderr", label, lines if is_own or not self._screen.full else ())

    def close(self) -> None:
        """Clean up after the last process: end leftovers, send the last records, close everything. Idempotent."""
        if self._reception.is_closed:
            return
        end_leftovers(self.run_directory)
        self._reception.close()
        for timer in self._timers:
            timer.cancel()
        self._memory.close()
        self._mailroom.close()

    # --- processes ------------------------------------------------------------------------------------------------

    def _lines(self, child: Running, stream: Stream, lines: list[str]) -> None:
        if child in self._standbys:  # if its imports fail, another process takes its place, and says so
            return
        if self._logs is not None:
            self._logs.write(child.command.label, lines)
        self._reporter.add(child.command.label, stream, lines)
        self._screen.write(stream, child.command.label, lines)
        if self._screen.full and not child.asked:
            self._children.listen(False)

    def _child_ended(self, child: Running) -> None:
        _log.debug("%s ended by %s", child.name, child.cause)
        if child.asked or child in self._standbys:
            return
        command = child.command
        end_leftovers(self.run_directory, command.role, command.rank)
        pause = self._pause_after(child)
        cause = child.cause
        if not self._reception.is_reachable:
            cause += f" after the run directory {self.run_directory} was removed"
        died = Died(*_identity(command), child.pid, cause, child.tail.text(), pause is not None, child.node)
        self.first_failure = self.first_failure or died
        if self._state == "starting":
            self._fail_start(f"{child.name} ended by {child.cause} before the service was up", child)
            return
        self._tell_death(died, child.name, pause)
        if pause is not None:
            self._call_later(pause, partial(self._start_again, child))
        elif isinstance(child, Elsewhere) and child.launcher is not None:
            child.launcher.send(Shutdown("its worker is not started again"))
        self._seating.fill()

    def _pause_after(self, child: Running) -> float | None:
        """Seconds until the successor of a dead process is started; None if there will be none."""
        is_lost = child.command.role == "server" and not self._recovery.server_recovery
        if is_lost or self._state not in ("serving", "recovering") or not self._reception.is_reachable:
            return None
        is_long_ready = child.ready_since is not None and time.monotonic() - child.ready_since >= WORKED_SECONDS
        return self._restarts.next(child.command.label, has_worked=child.has_worked or is_long_ready)

    def _tell_death(self, died: Died, name: str, pause: float | None) -> None:
        self.has_lost = self.has_lost or pause is None
        then = self._restarts.outlook(pause, can_connect=self._reception.is_reachable)
        self.say(f"{name} ended by {died.cause}{then}")
        self._deaths[died.role, died.rank] = died
        self._reporter.note_death(died)
        if died.role == "server":
            self._state = "failed" if pause is None else "recovering"
        self._reception.tell_all(died)
        if self._state == "failed":
            self._end_children(STOP_GRACE)

    def _start_again(self, ended: Running) -> None:
        if self._state not in ("serving", "recovering"):
            return
        command = next_incarnation(ended.command)
        try:
            child = self._start_child(self._loop, command, on_lines=self._lines, on_end=self._child_ended)
        except OSError as error:
            cause = f"a failed start ({command.argv[0]}: {error.strerror})"
            self._tell_death(Died(*_identity(command), ended.pid, cause, ""), command.label, None)
            return
        self._children[self._children.index(ended)] = child
        self._write_down()
        if isinstance(ended, Elsewhere) and isinstance(child, Elsewhere):
            self._seating.hand_on(ended, child)
        if child.is_here:
            self._call_later(self._start_timeout, partial(_end_if_late, child, self._start_timeout))

    def _start_deadline(self) -> None:
        late = [child for child in self._children if child.ready_since is None and child.is_here]
        if self._state == "starting" and late:
            names = ", ".join(child.name for child in late)
            self._fail_start(f"not ready within {self._start_timeout:g} s: {names}", late[0])

    def _fail_start(self, reason: str, child: Running | None = None) -> None:
        self._state = "failed"
        self.say(f"the service did not start: {reason}")
        last = "" if child is None else f"\nlast lines of {child.name}:\n{child.tail.text() or '(it wrote nothing)'}"
        self.start_failure = f"the service did not start: {reason}{last}"
        for peer in list(self._reception.peers):
            self._greet(peer)
        self._end_children(STOP_GRACE)

    def _end_children(self, grace: float) -> None:
        self._choose = None  # a choice that comes now starts nothing
        self._forget_run_file()
        self._children.listen()  # a process blocks on a full pipe, and could not end
        for child in (*self._children, *self._standbys):
            if not child.asked:
                child.asked = True
                child.signal(signal.SIGTERM)
        self._call_later(grace, Processes([*self._children, *self._standbys]).end_at_once)

    # --- records of peers -------------------------------------------------------------------------------------------

    def _peer_ended(self, peer: Peer) -> None:
        self._mailroom.forget(peer)
        self._reporter.forget(peer)
        self._seating.forget(peer)
        self._introductions.forget(peer)
        if peer is self._introductions.owner:
            if self._state != "stopping":
                _log.debug("the owner's connection has ended")
                self.stop()
        elif peer.introduction is not None and peer.label == "controller" and peer.introduction.client:
            self._has_left(peer.introduction.client)
            self._write_down()

    def _record(self, peer: Peer, record: Record) -> None:
        if isinstance(record, Introduce):
            self._introduce(peer, record)
        elif isinstance(record, DeviceChoice) and peer.introduction is None:
            if self._choose is not None:
                self._start_processes(record)
        elif isinstance(record, Join) and peer.introduction is None:
            self._join(peer, record)
        elif peer.introduction is None:
            self._reception.refuse(peer, f"an unknown process sent {type(record).__name__} before Introduce")
        else:
            role, handle = self._HANDLERS.get(type(record), (None, None))
            if handle is None or role not in (None, peer.introduction.role):
                _drop(peer, record)
            else:
                handle(self, peer, record)

    def _pass_on(self, peer: Peer, request: Interrupt | Kill | ShowStacks) -> None:
        """Interrupt, kill or inspect a worker, unless the request names a replaced incarnation."""
        if isinstance(request, Interrupt) and not self._introductions.is_controller(peer):
            _drop(peer, request)
            return
        incarnation = None if isinstance(request, Interrupt) else request.incarnation
        for child in self._children.workers(request.replica, incarnation):
            if isinstance(request, Interrupt):
                child.interrupt()
            elif isinstance(request, Kill):
                child.kill(request.reason)
            else:
                child.show_stacks()

    def _shut_down(self, peer: Peer, request: Shutdown) -> None:
        if peer is not self._introductions.owner:
            _drop(peer, request)
            return
        _log.debug("shut down: %s", request.reason)
        self.stop()

    def _introduce(self, peer: Peer, who: Introduce) -> None:
        if peer.introduction is not None:
            self._reception.refuse(peer, f"{peer.label} introduced itself twice")
        elif who.role in _PROCESSES and self._children.of(peer, who) is None:
            self._reception.refuse(
                peer, f"process {peer.pid} says it is {who.role} {who.rank}, but it was not started as that"
            )
        elif (error := self._introductions.why_not(peer, who)) is not None:
            self._reception.turn_away(peer, error)
        else:
            if who.role == "controller" and self._choose is not None:
                self._start_processes()
            self._introductions.introduce(peer, who, is_back=who.client in self._awaited)
            if who.role == "controller":
                self._awaited.discard(who.client)
                self._write_down()
            if who.role == "server":  # a restarted server does not know these, and its predecessor may have missed some
                for died in self._deaths.values():
                    if died.role == "worker":
                        peer.send(died)
                for client in self._left:
                    peer.send(ClientGone(client))
            self._greet(peer)
            if who.role == "worker" and self._takes_up and self._state == "serving":
                peer.send(self._serving())  # a worker that came back may have registered with the previous server

    def _join(self, peer: Peer, request: Join) -> None:
        """Give a launcher elsewhere one of the workers that no launcher runs yet."""
        if self._state in ("starting", "serving", "recovering") and self._seating.places:
            self._seating.join(peer, request)
            return
        itself = "this service runs its own workers; only a service started by cs-launch --serve takes others"
        why = self.start_failure or ("the service ends" if self._seating.places else itself)
        peer.send(StartFailed(as_record(LaunchError(why))))

    def _greet(self, peer: Peer) -> None:
        """Tell a client that the service is ready or has failed. Until one of both is known, tell it nothing."""
        if peer.introduction is None or peer.introduction.role in _PROCESSES:
            return
        if self.start_failure is not None:
            peer.send(StartFailed(as_record(LaunchError(self.start_failure))))
        elif self._state == "serving":
            peer.send(self._serving())
            for died in self._deaths.values():
                peer.send(died)
        elif self._state not in ("starting", "recovering"):
            why = ", ".join(f"its {d.role} ({pid_of(d)}) ended by {d.cause}" for d in self._deaths.values())
            peer.send(StartFailed(as_record(LaunchError(f"the service has ended: {why or 'it was shut down'}"))))

    def _ready(self, peer: Peer, ready: Ready) -> None:
        child = self._children.of(peer)
        if child is None:
            _complaints.warn(peer.pid, "dropped a Ready of %s: it is not a process of this service", peer.label)
            return
        if child.returncode is not None:  # the process ended before its last record was read
            return
        child.ready_since = time.monotonic()
        role, rank = child.command.role, child.command.rank
        self._deaths.pop((role, rank), None)
        if self._state == "starting" and all(other.ready_since is not None for other in self._children):
            self._state = "serving"
            self._write_down(serves=True)
            for other_peer in list(self._reception.peers):
                self._greet(other_peer)
        elif self._state == "recovering" and role == "server":
            self._state = "serving"
            self.say(f"{child.name} serves in its place")
            self._reception.tell_all(self._serving())
        elif child.command.incarnation > 1:
            self.say(f"{child.name} works in its place")

    def _serving(self) -> Serving:
        return Serving(self.run_directory, self._transport)

    def _has_worked(self, peer: Peer, progress: MadeProgress) -> None:
        child = self._children.of(peer)
        if child is None:
            _drop(peer, progress)
            return
        child.has_worked = True
        first, command = self.first_failure, child.command
        if first is not None and first.restarts and (first.role, first.rank) == (command.role, command.rank):
            self.first_failure = None  # the successor works

    def _hand_out(self, peer: Peer, request: MakeSegment | ExtendSegment | OpenSegment) -> None:
        label = self._introductions.label(peer)
        try:
            if isinstance(request, MakeSegment):
                segment, descriptor = self._memory.make(label, request)
            elif isinstance(request, ExtendSegment):
                segment, descriptor = self._memory.extend(label, request)
            else:
                segment, descriptor = self._memory.open(label, request.segment)
        except CentralStorageError as error:
            peer.send(SegmentRefused(request.segment, as_record(error)))
        else:
            peer.send(segment, *(() if descriptor is None else (descriptor,)))

    def _hand_out_mailbox(self, peer: Peer, request: MakeMailbox | OpenMailbox) -> None:
        mailbox, descriptors = self._mailroom.answer(peer, peer.label, request)
        peer.send(mailbox, *descriptors)

    def _give_up(self, peer: Peer, left: ClientGone) -> None:
        """Tell the workers to give up the runs of a controller that has gone, as the server has done."""
        if left.client not in self._left:
            return
        self._left.remove(left.client)
        self._write_down()
        self._reception.tell("worker", left)
        for child in self._children:
            if child.command.role == "worker" and child.ready_since is not None and not child.asked:
                child.interrupt()

    # Each record that a peer may send after its introduction: the role that may send it (None: any), and its handler.
    _HANDLERS: ClassVar[dict[type[Record], tuple[Role | None, Callable[[Service, Peer, Any], None]]]] = {
        MakeSegment: (None, _hand_out),
        ExtendSegment: (None, _hand_out),
        OpenSegment: (None, _hand_out),
        MakeMailbox: (None, _hand_out_mailbox),
        OpenMailbox: (None, _hand_out_mailbox),
        Ready: (None, _ready),
        Interrupt: ("controller", _pass_on),
        Kill: ("server", _pass_on),
        ShowStacks: ("server", _pass_on),
        ClientGone: ("server", _give_up),
        Appoint: ("server", lambda self, peer, request: self._introductions.appoint(request.client, peer)),
        MadeProgress: (None, _has_worked),
        Died: (None, lambda self, peer, died: None if self._seating.has_died(peer, died) else _drop(peer, died)),
        Shutdown: (None, _shut_down),
        ShowService: (
            None,
            lambda self, peer, _: self._reporter.show_service(
                peer, self._state, self._children, self._reception.peers, self._restarts
            ),
        ),
        ShowLog: (None, lambda self, peer, request: self._reporter.show_log(peer, request)),
        WatchTimes: (None, lambda self, peer, _: self._reporter.watch_times(peer)),
    }


def _drop(peer: Peer, record: Record) -> None:
    _complaints.warn(peer.pid, "dropped a %s of %s: that peer may not send it", type(record).__name__, peer.label)


def _end_if_late(child: Running, timeout: float) -> None:
    if child.ready_since is None and child.returncode is None and not child.asked:
        child.kill(f"it was not ready within {timeout:g} s")


def _identity(command: Command) -> tuple[Role, int, int]:
    return command.role, command.rank, command.incarnation
