"""The supervisor: starts a service's processes, keeps its memory, tells everybody who died, stops everything.

:class:`Service` is driven by one :class:`~.loop.Loop` and decides all of it; it never waits and never forks without
exec. The two ways in, ``foreground`` (``cs-launch``) and ``background`` (a script that started its own service),
add what differs: signals, the script, the owner. What the processes compute is no business of this module.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from central_storage.core.recovery_options import Recovery
from central_storage.launch.memory import Medium, Memfd, Memory
from central_storage.launch.plan import Command, next_incarnation
from cs_proto.errors import CentralStorageError, LaunchError, code_of
from cs_proto.frozen import with_changes
from cs_proto.messages import (
    ClientGone,
    Died,
    Error,
    ExtendSegment,
    Interrupt,
    Introduce,
    Join,
    Joined,
    Kill,
    MadeProgress,
    MakeMailbox,
    MakeSegment,
    OpenMailbox,
    OpenSegment,
    Ready,
    Role,
    SegmentRefused,
    Serving,
    ShowStacks,
    Shutdown,
    StartFailed,
)
from cs_proto.records import Record
from cs_runtime import open_files
from cs_runtime.run_file import RunFile

from .children import Child, Running, end_leftovers
from .connections import Peer
from .loop import Call, Loop, Timer
from .mailboxes import Mailroom, why_no_mailboxes
from .output import LogFiles, Sink, Stream, prefixed
from .restarts import WORKED_SECONDS, Restarts
from .seats import Elsewhere

__all__ = ["STOP_GRACE", "Service", "transport_of"]

_log = logging.getLogger("central_storage.launch")

#: How long a process may take to end by itself before it is killed, seconds.
STOP_GRACE = 3.0
# At the end, records that a peer has not taken after this many seconds are given up.
_FAREWELL = 0.5
# After a connection could not be accepted, the next try, seconds.
_ACCEPT_AGAIN = 1.0
# A process that connects must introduce itself within so many seconds, or its connection is closed.
_INTRODUCTION = 5.0
# The limit of descriptors divided by this stays free for segments, mailboxes and processes that are started again: no
# connection is accepted while fewer are free.
_FREE_SHARE = 8
_PROCESSES = ("server", "worker")

State = Literal["starting", "serving", "recovering", "failed", "stopping"]


def transport_of(medium: Medium, *, mailboxes: bool) -> str:
    """How the processes of a service talk, in words; by ``mailboxes``, too, where they are wanted and can be had."""
    has_mailboxes = not why_no_mailboxes(medium, wanted=mailboxes)
    return f"ipc + {'mailboxes + ' * has_mailboxes}{medium.title}"


class Service:
    """A server, its workers, their memory and whoever is connected."""

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
    ) -> None:
        """Nothing is started yet. ``start_timeout`` (seconds) limits the time until every process is ready; workers
        that come from elsewhere have no limit. ``start_child`` starts what a command stands for, with the arguments of
        :class:`~.children.Child`. Segments lie in ``medium`` (default: :class:`~central_storage.launch.memory.Memfd`).
        ``recovery`` says what is done when a process dies (default: Recovery()). Without ``mailboxes`` messages go over
        ZeroMQ alone."""
        self.run_directory = run_directory
        #: The first process that ended unasked, unless another in its place has worked since; or None.
        self.first_failure: Died | None = None
        #: Whether a process has ended that will not be started again.
        self.has_lost = False
        #: Why the service did not come up, or None.
        self.start_failure: str | None = None
        self._loop = loop
        self._commands = commands
        self._sink = sink
        self._start_timeout = start_timeout
        self._logs = logs
        self._run_file = run_file
        self._takes_up = run_file is not None and run_file.serves
        #: Controllers that were connected to the supervisor before this one and have not come back yet.
        self._awaited = set(run_file.clients) if run_file is not None and run_file.serves else set()
        self._state: State = "recovering" if self._takes_up else "starting"
        self._start_child = start_child
        self._children: list[Running] = []
        self._peers: list[Peer] = []
        self._owner: Peer | None = None
        self._endpoint = ""
        self._recovery = recovery or Recovery()
        self._restarts = Restarts(self._recovery.max_restarts)
        #: Of each process the last incarnation that ended unasked, as long as nothing in its place is ready.
        self._deaths: dict[tuple[str, int], Died] = {}
        #: Controllers that have gone, until a server says that it has heard it.
        self._left: list[str] = []
        self._timers: list[Timer] = []
        self._elsewhere: dict[Peer, Elsewhere] = {}
        self._queue: list[tuple[Peer, int]] = []  # launchers for which there may be a place, with their pids
        run = os.path.basename(run_directory).removeprefix("cs-")
        medium = medium or Memfd(run)
        self._memory = Memory(medium)
        self._mailroom = Mailroom(run, why_no_mailboxes(medium, wanted=mailboxes))
        self._transport = transport_of(medium, mailboxes=mailboxes)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sink.on_room = self._listen_to_children

    def start(self) -> None:
        """Listen, and start every process. A process that cannot be started is a failed start like any other."""
        self._write_down()  # before anybody can connect
        if self._takes_up:  # two servers must never write the same memory
            end_leftovers(self.run_directory, "server")
        try:
            self._listener.bind(os.path.join(self.run_directory, "supervisor"))
        except OSError as error:
            self._fail_start(f"no socket can be made in {self.run_directory}: {error.strerror}")
            return
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop.on_readable(self._listener.fileno(), self._accept)
        self._call_later(self._start_timeout, self._start_deadline)
        for command in self._commands:
            try:
                child = self._start_child(self._loop, command, on_lines=self._lines, on_end=self._child_ended)
            except OSError as error:
                self._fail_start(f"{command.label} could not be started ({command.argv[0]}: {error.strerror})")
                return
            self._children.append(child)
            if self._takes_up:
                self._take_up(child)

    def _take_up(self, child: Running) -> None:
        """A process of the service that the supervisor before this one kept: the server is a new one, and launchers
        elsewhere get some time to come back with their workers."""
        assert self._run_file is not None
        if isinstance(child, Elsewhere):
            child.is_awaited = True
            timeout = self._run_file.return_timeout
            self._call_later(timeout, partial(self._stop_awaiting, child, timeout))
        else:
            self._call_later(self._start_timeout, partial(self._restart_deadline, child))
            self._call_later(self._run_file.return_timeout, self._stop_awaiting_clients)

    def _stop_awaiting_clients(self) -> None:
        for client in self._awaited:
            self._has_left(client)
        self._awaited.clear()

    def _call_later(self, delay: float, call: Call) -> None:
        """Call ``call`` after ``delay`` seconds, unless this service is closed by then."""
        self._timers = [timer for timer in self._timers if timer.call is not None]
        self._timers.append(self._loop.call_later(delay, call))

    def _has_left(self, client: str) -> None:
        """A controller has gone, which the server says that it has heard."""
        self._left.append(client)
        self._tell("server", ClientGone(client))

    def _stop_awaiting(self, place: Elsewhere, timeout: float) -> None:
        if place.is_awaited:
            place.end(f"not coming back within {timeout:g} s after the supervisor was killed")

    def _write_down(self, *, serves: bool = False) -> None:
        """Keep the run file up to date."""
        if self._run_file is not None:
            serves = serves or self._run_file.serves
            commands = [child.command for child in self._children] or self._commands
            started = [command.incarnation for command in commands]
            here = {peer.introduction.client for peer in self._peers if peer.introduction is not None} - {""}
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
                self.say(f"the run file cannot be written ({error.strerror}): nobody will take this run up")
                self._forget_run_file()

    def _forget_run_file(self) -> None:
        if self._run_file is not None:
            RunFile.remove(self.run_directory)
            self._run_file = None

    def own(self, link: socket.socket) -> Peer:
        """Take the owner's connection. When it ends, or says :class:`Shutdown`, the service stops."""
        self._owner = self._connect(link)
        return self._owner

    @property
    def stopped(self) -> bool:
        """Whether the end was asked for and every process has ended."""
        return self._state == "stopping" and all(child.returncode is not None for child in self._children)

    @property
    def has_failed(self) -> bool:
        """Whether it will never serve, or never again."""
        return self._state == "failed"

    @property
    def has_controller(self) -> bool:
        """Whether a script is connected."""
        return any(peer.introduction is not None and peer.introduction.role == "controller" for peer in self._peers)

    @property
    def living_pids(self) -> set[int]:
        """The processes started here that have not ended."""
        return {child.pid for child in self._children if child.returncode is None and child.is_here}

    def last_lines(self, role: str, rank: int | None) -> str:
        """What the server or a worker printed last; "" for others."""
        found = [child for child in self._children if (child.command.role, child.command.rank) == (role, rank or 0)]
        return found[0].tail.text() if found else ""

    def stop(self, grace: float = STOP_GRACE) -> None:
        """End every process: asked first, killed after ``grace`` seconds. May be said again with a smaller grace."""
        self._state = "stopping"
        self._end_children(grace)

    def say(self, text: str) -> None:
        """Write a line of the supervisor's own."""
        self._sink.write("stderr", prefixed("supervisor", [text]))

    def close(self) -> None:
        """After the last process: end what they left behind, say the last words, let go of everything. Idempotent."""
        if self._listener.fileno() < 0:
            return
        end_leftovers(self.run_directory)
        deadline = time.monotonic() + _FAREWELL
        while any(peer.waiting for peer in self._peers) and (left := deadline - time.monotonic()) > 0:
            self._loop.turn(left)
        for peer in self._peers:
            peer.close()
        for timer in self._timers:
            timer.cancel()
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        self._memory.close()
        self._mailroom.close()

    # --- processes ------------------------------------------------------------------------------------------------

    def _lines(self, child: Running, stream: Stream, lines: list[str]) -> None:
        if self._logs is not None:
            self._logs.write(child.command.label, lines)
        self._sink.write(stream, prefixed(child.command.label, lines))
        if self._sink.full and not child.asked:
            for other in self._children:
                other.listen(False)

    def _listen_to_children(self) -> None:
        for child in self._children:
            child.listen()

    def _child_ended(self, child: Running) -> None:
        _log.debug("%s ended by %s", child.name, child.cause)
        if child.asked:
            return
        command = child.command
        end_leftovers(self.run_directory, command.role, command.rank)
        pause = self._pause_after(child)
        died = Died(*_identity(command), child.pid, child.cause, child.tail.text(), pause is not None)
        self.first_failure = self.first_failure or died
        if self._state == "starting":
            self._fail_start(f"{child.name} ended by {child.cause} before the service was up", child)
            return
        self._tell_death(died, child.name, pause)
        if pause is not None:
            self._call_later(pause, partial(self._start_again, child))
        elif isinstance(child, Elsewhere) and child.launcher is not None:
            child.launcher.send(Shutdown("its worker is not started again"))
        self._seat()

    def _pause_after(self, child: Running) -> float | None:
        """Seconds until another is started in the place of one that has died; None where none is."""
        is_lost = child.command.role == "server" and not self._recovery.server_recovery
        if is_lost or self._state not in ("serving", "recovering"):
            return None
        is_long_ready = child.ready_since is not None and time.monotonic() - child.ready_since >= WORKED_SECONDS
        return self._restarts.next(child.command.label, has_worked=child.has_worked or is_long_ready)

    def _tell_death(self, died: Died, name: str, pause: float | None) -> None:
        if pause is None:
            self.has_lost = True
            used = self._restarts.count >= self._restarts.limit > 0
            then = f"; it is not started again: {self._restarts.limit} restarts are used up" if used else ""
        else:
            then = f"; restart {self._restarts.count} of {self._restarts.limit}" + f" in {pause:g} s" * (pause > 0)
        self.say(f"{name} ended by {died.cause}{then}")
        self._deaths[died.role, died.rank] = died
        if died.role == "server":
            self._state = "failed" if pause is None else "recovering"
        self._tell_all(died)
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
            self._hand_on(ended, child)
            self._seat()
        if child.is_here:
            self._call_later(self._start_timeout, partial(self._restart_deadline, child))

    def _restart_deadline(self, child: Running) -> None:
        if child.ready_since is None and child.returncode is None and not child.asked:
            child.kill(f"it was not ready within {self._start_timeout:g} s")

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
        for peer in list(self._peers):
            self._greet(peer)
        self._end_children(STOP_GRACE)

    def _end_children(self, grace: float) -> None:
        self._forget_run_file()
        self._listen_to_children()  # a process whose output nobody reads could not end
        for child in self._children:
            if not child.asked:
                child.asked = True
                child.signal(signal.SIGTERM)
        self._call_later(grace, self._kill_children)

    def _kill_children(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        free, limit = open_files.free(), open_files.limit()
        if free < limit // _FREE_SHARE:
            self._accept_later(f"{free} of {limit} descriptors are free, and {limit // _FREE_SHARE} must be")
            return
        try:
            link, _ = self._listener.accept()
        except OSError as error:  # too many open files in the whole system, or no memory
            self._accept_later(str(error.strerror))
            return
        peer = self._connect(link)
        if peer.uid != os.geteuid():
            self._refuse(peer, f"process {peer.pid} of user {peer.uid} connected")
        else:
            self._loop.call_later(_INTRODUCTION, partial(self._expect_introduction, peer))

    def _accept_later(self, why: str) -> None:
        """Leave new connections in the queue for a while."""
        _log.warning("no connection is accepted for the moment: %s", why)
        listener = self._listener.fileno()
        self._loop.on_readable(listener, None)
        self._call_later(_ACCEPT_AGAIN, partial(self._loop.on_readable, listener, self._accept))

    def _expect_introduction(self, peer: Peer) -> None:
        has_spoken = peer.introduction is not None or any(launcher is peer for launcher, _ in self._queue)
        if not has_spoken and not peer.closed:
            self._refuse(peer, f"process {peer.pid} did not say who it is within {_INTRODUCTION:g} s")

    def _connect(self, link: socket.socket) -> Peer:
        peer = Peer(self._loop, link, self._record, self._peer_ended)
        self._peers.append(peer)
        return peer

    def _peer_ended(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self._queue = [(launcher, pid) for launcher, pid in self._queue if launcher is not peer]
        self._mailroom.forget(peer)
        if peer in self._elsewhere:
            self._elsewhere.pop(peer).leave()
        if peer is self._owner:
            if self._state != "stopping":
                _log.debug("the owner's connection has ended")
                self.stop()
        elif peer.introduction is not None and peer.introduction.client:
            self._has_left(peer.introduction.client)
            self._write_down()

    def _record(self, peer: Peer, record: Record) -> None:
        if isinstance(record, Introduce):
            self._introduce(peer, record)
        elif isinstance(record, Join) and peer.introduction is None:
            self._join(peer, record)
        elif peer.introduction is None:
            self._refuse(peer, f"a stranger sent {type(record).__name__} before Introduce")
        else:
            role, handle = self._HANDLERS.get(type(record), (None, Service._drop))
            if role not in (None, peer.introduction.role):
                handle = Service._drop
            handle(self, peer, record)

    def _drop(self, peer: Peer, record: Record) -> None:
        _log.error("dropped a %s of %s: it is not for that peer to send", type(record).__name__, peer.label)

    def _make_mailbox(self, peer: Peer, request: MakeMailbox) -> None:
        mailbox, descriptors = self._mailroom.make(peer, peer.label, request.peer)
        peer.send(mailbox, *descriptors)

    def _open_mailbox(self, peer: Peer, request: OpenMailbox) -> None:
        mailbox, descriptors = self._mailroom.open(peer.label, request.mailbox)
        peer.send(mailbox, *descriptors)

    def _interrupt(self, peer: Peer, request: Interrupt) -> None:
        for child in self._children:
            if child.command.role == "worker" and child.command.rank == request.replica:
                child.interrupt()

    def _kill(self, peer: Peer, request: Kill) -> None:
        for child in self._workers(request):
            child.kill(request.reason)

    def _show_stacks(self, peer: Peer, request: ShowStacks) -> None:
        for child in self._workers(request):
            child.show_stacks()

    def _workers(self, request: Kill | ShowStacks) -> list[Running]:
        """The worker that the server means, unless it has been replaced."""
        wanted = ("worker", request.replica, request.incarnation)
        return [child for child in self._children if _identity(child.command) == wanted]

    def _died_elsewhere(self, peer: Peer, died: Died) -> None:
        worker = self._elsewhere.get(peer)
        if worker is None:
            self._drop(peer, died)
        elif died.incarnation == worker.command.incarnation:
            worker.end(died.cause, died.log)

    def _shut_down(self, peer: Peer, request: Shutdown) -> None:
        if peer is not self._owner:
            self._drop(peer, request)
            return
        _log.debug("shut down: %s", request.reason)
        self.stop()

    def _introduce(self, peer: Peer, who: Introduce) -> None:
        if peer.introduction is not None:
            self._refuse(peer, f"{peer.label} introduced itself twice")
        elif who.role in _PROCESSES and self._child_of(peer, who) is None:
            self._refuse(peer, f"process {peer.pid} says it is {who.role} {who.rank}, but it was not started as that")
        elif who.role == "observer" and not open_files.may_have_guests():
            self._turn_away(peer)
        else:
            peer.introduction = who
            if who.client:
                self._awaited.discard(who.client)
                self._write_down()
            if who.role == "server":  # it may be another: of these it has not heard, or the one before it had not
                for died in self._deaths.values():
                    if died.role == "worker":
                        peer.send(died)
                for client in self._left:
                    peer.send(ClientGone(client))
            self._greet(peer)
            if who.role == "worker" and self._takes_up and self._state == "serving":
                peer.send(self._serving())  # it may have come back, and have told the server before this one

    def _join(self, peer: Peer, request: Join) -> None:
        """Give a launcher elsewhere one of the workers that nobody runs yet."""
        places = [child for child in self._children if isinstance(child, Elsewhere)]
        if self._state not in ("starting", "serving", "recovering") or not places:
            itself = "this service runs its workers itself; only one that was started by cs-launch --serve takes others"
            why = self.start_failure or ("the service ends" if places else itself)
            peer.send(StartFailed(_error(LaunchError(why))))
        elif request.incarnation and request.rank < len(places) and places[request.rank].is_awaited:
            self._come_back(places[request.rank], peer, request)
        else:
            self._queue.append((peer, request.pid))
        self._seat()

    def _come_back(self, place: Elsewhere, peer: Peer, request: Join) -> None:
        """A launcher has come back that the supervisor before this one knew. Its worker may have died meanwhile, which
        it says next, or the one after it was to be started, which it is told."""
        if request.incarnation == place.command.incarnation:
            place.ready_since = time.monotonic()
        self._give(place, peer, request.pid)
        self.say(f"worker w{place.command.rank} is back")

    def _seat(self) -> None:
        """Give the places that are free to the launchers that wait, and turn away those for which there is none."""
        places = [child for child in self._children if isinstance(child, Elsewhere)]
        for peer, pid in list(self._queue):
            place = next((child for child in places if child.is_free), None)
            if place is not None:
                self._give(place, peer, pid)
                waiting = sum(child.is_free for child in places)
                joined = f"worker w{place.command.rank} of {len(places)} has joined"
                self.say(joined + (f", {waiting} to come" if waiting else ""))
            elif not any(child.is_awaited or self._is_started_again(child) for child in places):
                why = f"all {len(places)} workers of this service run already"
                peer.send(StartFailed(_error(LaunchError(f"{why}; tell its server of more (cs-launch --serve N)"))))
            else:
                continue
            self._queue.remove((peer, pid))

    def _is_started_again(self, child: Running) -> bool:
        died = self._deaths.get((child.command.role, child.command.rank))
        return child.returncode is not None and died is not None and died.restarts

    def _give(self, place: Elsewhere, launcher: Peer, pid: int) -> None:
        command = place.command
        launcher.introduction = Introduce("worker", command.rank, command.incarnation, pid)
        place.take(launcher, pid)
        self._elsewhere[launcher] = place
        replicas = sum(isinstance(child, Elsewhere) for child in self._children)
        launcher.send(Joined(command.rank, command.incarnation, replicas, self._transport))

    def _hand_on(self, ended: Elsewhere, place: Elsewhere) -> None:
        """Have the launcher that ran a worker run the next, where it is still there; else somebody has to join."""
        launcher = ended.launcher
        if launcher is not None and not launcher.closed:
            self._give(place, launcher, ended.pid)

    def _child_of(self, peer: Peer, who: Introduce) -> Running | None:
        identity = (who.role, who.rank, who.incarnation)
        for child in self._children:
            command = child.command
            if (command.role, command.rank, command.incarnation) == identity and child.is_run_by(peer):
                return child
        return None

    def _process_of(self, peer: Peer) -> Running | None:
        """The process of this service that speaks there; None where none does."""
        return None if peer.introduction is None else self._child_of(peer, peer.introduction)

    def _turn_away(self, peer: Peer) -> None:
        """Refuse an observer for which there is no descriptor, with the reason."""
        error = open_files.shortage(f"the supervisor (pid {os.getpid()})")
        peer.send(StartFailed(_error(error)))
        self._refuse(peer, f"process {peer.pid} is refused as an observer: {error}")

    def _refuse(self, peer: Peer, reason: str) -> None:
        _log.error("%s; its connection is closed", reason)
        peer.close()
        self._peer_ended(peer)

    def _greet(self, peer: Peer) -> None:
        """Tell a client how things stand, if there is something to tell."""
        if peer.introduction is None or peer.introduction.role in _PROCESSES:
            return
        if self.start_failure is not None:
            peer.send(StartFailed(_error(LaunchError(self.start_failure))))
        elif self._state == "serving":
            peer.send(self._serving())
            for died in self._deaths.values():
                peer.send(died)
        elif self._state not in ("starting", "recovering"):
            deaths = self._deaths.values()
            why = ", ".join(f"its {died.role} (pid {died.pid}) ended by {died.cause}" for died in deaths)
            peer.send(StartFailed(_error(LaunchError(f"the service has ended: {why or 'it was shut down'}"))))

    def _ready(self, peer: Peer, ready: Ready) -> None:
        child = self._process_of(peer)
        if child is None:
            _log.error("dropped a Ready of %s: it is no process of this service", peer.label)
            return
        if child.returncode is not None:  # its end was known before its last words were read
            return
        child.ready_since = time.monotonic()
        role, rank = child.command.role, child.command.rank
        self._deaths.pop((role, rank), None)
        if role == "server":
            self._endpoint = ready.endpoint
        if self._state == "starting" and all(other.ready_since is not None for other in self._children):
            self._state = "serving"
            self._write_down(serves=True)
            for other_peer in list(self._peers):
                self._greet(other_peer)
        elif self._state == "recovering" and role == "server":
            self._state = "serving"
            self.say(f"{child.name} serves in its place")
            self._tell_all(self._serving())
        elif child.command.incarnation > 1:
            self.say(f"{child.name} works in its place")

    def _serving(self) -> Serving:
        return Serving(self._endpoint, self.run_directory, self._transport)

    def _has_worked(self, peer: Peer, progress: MadeProgress) -> None:
        child = self._process_of(peer)
        if child is None:
            self._drop(peer, progress)
            return
        child.has_worked = True
        first, command = self.first_failure, child.command
        if first is not None and first.restarts and (first.role, first.rank) == (command.role, command.rank):
            self.first_failure = None  # it is made good

    def _hand_out(self, peer: Peer, request: MakeSegment | ExtendSegment | OpenSegment) -> None:
        try:
            if isinstance(request, MakeSegment):
                segment, descriptor = self._memory.make(peer.label, request)
            elif isinstance(request, ExtendSegment):
                segment, descriptor = self._memory.extend(peer.label, request)
            else:
                segment, descriptor = self._memory.open(peer.label, request.segment)
        except CentralStorageError as error:
            peer.send(SegmentRefused(request.segment, _error(error)))
        else:
            peer.send(segment, *(() if descriptor is None else (descriptor,)))

    def _give_up(self, peer: Peer, left: ClientGone) -> None:
        """The server has given up the runs of a controller that has gone: have the workers do so, too."""
        if left.client not in self._left:
            return
        self._left.remove(left.client)
        self._write_down()
        self._tell("worker", left)
        for child in self._children:
            if child.command.role == "worker" and child.ready_since is not None and not child.asked:
                child.interrupt()

    def _tell(self, role: Role, record: Record) -> None:
        for peer in list(self._peers):
            if peer.introduction is not None and peer.introduction.role == role:
                peer.send(record)

    def _tell_all(self, record: Record) -> None:
        for peer in list(self._peers):
            if peer.introduction is not None:
                peer.send(record)

    # Each record that a peer may send after it has introduced itself: the role that may (None: any), and what follows.
    _HANDLERS: ClassVar[dict[type[Record], tuple[Role | None, Callable[[Service, Peer, Any], None]]]] = {
        MakeSegment: (None, _hand_out),
        ExtendSegment: (None, _hand_out),
        OpenSegment: (None, _hand_out),
        MakeMailbox: (None, _make_mailbox),
        OpenMailbox: (None, _open_mailbox),
        Ready: (None, _ready),
        Interrupt: ("controller", _interrupt),
        Kill: ("server", _kill),
        ShowStacks: ("server", _show_stacks),
        ClientGone: ("server", _give_up),
        MadeProgress: (None, _has_worked),
        Died: (None, _died_elsewhere),
        Shutdown: (None, _shut_down),
    }


def _identity(command: Command) -> tuple[Role, int, int]:
    return command.role, command.rank, command.incarnation


def _error(error: CentralStorageError) -> Error:
    origin = f"{type(error).__module__}:{type(error).__qualname__}"
    return Error(code_of(type(error)), str(error), None, origin, -1, 0, "")
