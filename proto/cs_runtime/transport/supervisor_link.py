"""A process's connection to its supervisor: segments, notices of deaths, end-of-file.

Server, workers and clients use it. All methods except :meth:`SupervisorLink.mend` are for one thread at a time. A
channel polls :meth:`~SupervisorLink.fileno` and calls :meth:`~SupervisorLink.receive_nowait`. End-of-file means that
the supervisor and the service are gone. If the service's memory outlives its supervisor (:mod:`cs_runtime.run_file`),
the connection waits for the next supervisor instead.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from cs_proto import segment_names, step_times
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.descriptors import Array, Location
from cs_proto.errors import (
    InvalidArgumentError,
    LaunchError,
    MemoryPlanError,
    NoAnswerError,
    ShutdownError,
    replica_exception_class,
)
from cs_proto.failures import text_of
from cs_proto.messages import (
    PROTOCOL,
    ClientGone,
    DeviceChoice,
    Died,
    ExtendSegment,
    Introduce,
    Mailbox,
    MakeMailbox,
    MakeSegment,
    OpenMailbox,
    OpenSegment,
    Role,
    Segment,
    SegmentRefused,
    StartFailed,
)
from cs_proto.records import Record
from cs_runtime.ancestors import why_replaceable
from cs_runtime.run_file import RunFile
from cs_runtime.trace import Trace, is_on
from cs_runtime.waits import pace_of

from .readiness import is_readable

if TYPE_CHECKING:  # they import NumPy, which takes longer than all that is asked of a supervisor without segments
    from cs_runtime.shared_memory.mapping import Mapping
    from cs_runtime.shared_memory.remote_segment import Carry, RemoteSegment

__all__ = ["CARRIED", "NAME_VARIABLE", "SupervisorLink", "checked", "connect", "peer_of"]

_log = logging.getLogger("central_storage.lifeline")

R = TypeVar("R", bound=Record)

#: The name of the transport of a process that maps no memory.
CARRIED = "ipc + bytes in frames"
#: The environment variable with the name of a worker in another container, in hexadecimal digits.
NAME_VARIABLE = "CS_NAME"
# In seconds. The supervisor's loop never blocks, so an answer later than this means that it is stopped or gone.
_ANSWER_TIMEOUT = 30.0
# Seconds between two checks for the next supervisor.
_LOOK_EVERY = 0.1
# A process connects at once when it is introduced, unless it is stopped.
_CONNECTS_WITHIN = 5.0
_GONE = "the supervisor is gone, and the service with it"
# The most descriptors of one packet: a mailbox has a memory and two doorbells.
_DESCRIPTORS = 3
# So many clients that have gone are remembered: a late first message comes right after the end.
_GONE_CLIENTS = 8


def checked(run_directory: str) -> str:
    """The path of a run directory without symbolic links, once it is known to be this user's, closed to others, and
    below no directory in which others could replace it: what its sockets say is believed. Raises :class:`LaunchError`
    otherwise."""
    path = os.path.realpath(run_directory)
    try:
        status = os.stat(path)
    except OSError as error:
        raise LaunchError(
            f"no service answers in {run_directory} ({error.strerror}); it has ended, or CS_ADDRESS names the wrong run"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{run_directory} is not the directory of a run; set CS_ADDRESS to strategy.address")
    if status.st_uid != os.geteuid():
        raise LaunchError(
            f"the run directory {run_directory} belongs to user {status.st_uid}, and this process runs as user "
            f"{os.geteuid()}; only the user of a service may connect to it"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(f"the run directory {run_directory} is open to other users; chmod 700 closes it")
    if objection := why_replaceable(path):
        raise LaunchError(f"other users could replace the run directory {run_directory}: {objection}")
    return path


def connect(run_directory: str, timeout: float | None = None) -> socket.socket:
    """A socket to the supervisor of that run directory. Raises :class:`LaunchError` if none listens, if the directory
    is not this user's alone, or if another user's process listens there; NoAnswerError if the supervisor accepts no
    connection within ``timeout`` seconds (None: no limit)."""
    path = checked(run_directory)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A socket that does not block would be refused at once while others wait to be accepted.
    limit = 0.0 if timeout is None else max(timeout, 1e-6)
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))
        link.connect(os.path.join(path, "supervisor"))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except BlockingIOError as error:
        link.close()
        raise NoAnswerError(f"the supervisor in {run_directory} did not answer within {timeout:g} s") from error
    except OSError as error:
        link.close()
        raise LaunchError(
            f"no service answers in {run_directory} ({error.strerror}); it has ended, or CS_ADDRESS names the wrong run"
        ) from error
    if user != os.geteuid():
        link.close()
        raise LaunchError(
            f"a process of user {user} listens in {run_directory}; only the user of a service may connect to it"
        )
    return link


class SupervisorLink:
    """The connection, and the segments that were opened over it."""

    def __init__(
        self,
        link: socket.socket,
        role: Role,
        rank: int = 0,
        incarnation: int = 1,
        run_directory: str | None = None,
        choice: DeviceChoice | None = None,
        name: bytes = b"",
        client: str = "",
    ) -> None:
        """Introduce this process over ``link``, and take ownership of ``link``. A ``choice`` of devices is sent first.
        With a ``run_directory`` whose run may get another supervisor, this connection waits for it when the present one
        is killed. ``name`` and ``client`` are those that this process has already, if it has some."""
        self._link = link
        #: What a client calls itself in its Hello.
        self.client = client or (os.urandom(4).hex() if role in ("controller", "observer") else "")
        self._introduction = Introduce(PROTOCOL, role, rank, incarnation, os.getpid(), self.client, name)
        #: The name of this process: the identity of its sockets. Empty until the supervisor has answered.
        self.name = b""
        #: The processes that may send messages to this one, by what they are (:func:`peer_of`).
        self.peers: dict[bytes, Introduce] = {}
        self._peers_by_name: dict[bytes, bytes] = {}
        #: Until when (``time.monotonic``) a worker or script that was introduced last is expected to connect.
        self.expects_until = 0.0
        self._gone: list[bytes] = []
        self._run_directory = checked(run_directory) if run_directory else ""
        self._run = RunFile.read(run_directory) if run_directory else None
        self._mending = threading.Lock()
        self._lost_since: float | None = None
        self._mended = 0
        #: Called repeatedly while this process waits for another supervisor. An exception of it ends the wait.
        self.while_waiting: Callable[[], None] = _nothing
        #: Records that arrived while this process waited for a segment, which :meth:`receive_nowait` returns first.
        #: Polling the descriptor does not show them.
        self.waiting: deque[Record] = deque()
        self._mappings: dict[str, Mapping | RemoteSegment] = {}
        # Shorter mappings of segments that were extended. They stay mapped, because a GPU's driver may have page-locked
        # arrays there.
        self._outgrown: list[Mapping | RemoteSegment] = []
        #: Asks the server for the bytes of a segment. The owner sets it before it opens a segment that may be carried.
        self.carry: Carry = _no_way
        #: Why the bytes of all segments travel in frames; empty while they are mapped.
        self.carried_because = ""
        #: Whether read-only segments are mapped in a way that lets :meth:`Mapping.preserve` keep their bytes, and gives
        #: native code a copy of each page that it writes.
        self.may_preserve = False
        try:
            if choice is not None:
                self._link.sendall(b"".join(encode(choice)))
            self._link.sendall(b"".join(encode(self._introduction)))
        except OSError as error:
            link.close()
            raise ShutdownError(_GONE) from error

    @property
    def run_directory(self) -> str:
        """The run directory that was given; empty if none was."""
        return self._run_directory

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._link.fileno()

    def send(self, record: Record) -> None:
        """Send one packet. Raises :class:`ShutdownError` if the supervisor is gone for good."""
        packet = b"".join(encode(record))
        while True:
            mended = self._mended
            try:
                self._link.sendall(packet)
            except OSError as error:
                self._mend_since(mended, error)
            else:
                return

    @property
    def may_return(self) -> bool:
        """Whether another supervisor may replace this one."""
        return self._run is not None

    def receive_nowait(self) -> Record | None:
        """The next record, or None if none waits. Raises :class:`ShutdownError` at end-of-file."""
        if self.waiting:
            return self.waiting.popleft()
        for peer in self._gone[:-_GONE_CLIENTS]:  # not earlier: the owner asks who they were when it hears of their end
            self._forget(peer)
        del self._gone[:-_GONE_CLIENTS]
        while is_readable(self.fileno(), 0):
            read = self._read()
            if read is not None:
                record, descriptors = read
                for descriptor in descriptors:  # a late answer to a request that was given up
                    os.close(descriptor)
                return record
        return None

    def await_name(self, timeout: float = _ANSWER_TIMEOUT) -> bytes:
        """:attr:`name`, once the supervisor has accepted this process. Raises the error with which the supervisor
        refuses it, NoAnswerError after ``timeout`` seconds, and :class:`ShutdownError` if the supervisor hangs up."""
        deadline = time.monotonic() + timeout
        while not self.name:
            if not is_readable(self.fileno(), max(0.0, deadline - time.monotonic())):
                raise NoAnswerError(f"the supervisor did not answer within {timeout:g} s; is it stopped?")
            if (read := self._read()) is not None:
                self.waiting.append(read[0])
                if isinstance(read[0], StartFailed):
                    raise replica_exception_class(read[0].error.exception)(read[0].error.message)
        return self.name

    def peer_named(self, name: bytes) -> bytes | None:
        """The process that has this name; None if the supervisor has introduced none, as far as it has said."""
        while (peer := self._peers_by_name.get(name)) is None and is_readable(self.fileno(), 0):
            if (read := self._read()) is not None:
                self.waiting.append(read[0])
                for descriptor in read[1]:
                    os.close(descriptor)
        return peer

    def is_observer(self, client: str) -> bool:
        """Whether ``client`` is an observer."""
        return any(who.client == client and who.role == "observer" for who in self.peers.values())

    def mend(self) -> None:
        """Wait for the next supervisor and introduce this process to it, because the present one is gone. Does nothing
        if another thread has done so meanwhile. :meth:`fileno` stays the same.

        Raises :class:`ShutdownError` if none can come, or none has come in time.
        """
        with self._mending:
            poller = select.poll()
            poller.register(self._link, 0)
            if not poller.poll(0):
                return
            if self._run is None:
                raise ShutdownError(_GONE)
            if self._lost_since is None:
                self._lost_since = time.monotonic()
                limit = f"it has {self._run.return_timeout:g} s to come back"
                _log.warning("the supervisor of the service in %s is gone; %s", self._run_directory, limit)
            link = self._next_supervisor(self._run, self._lost_since)
            with link:
                os.dup2(link.fileno(), self._link.fileno(), inheritable=False)
            self._lost_since = None
            self._mended += 1
            _log.warning("the service in %s is back", self._run_directory)

    def until_end(self, timeout: float) -> Iterator[Record]:
        """Every record until the supervisor hangs up (:class:`ShutdownError`) or ``timeout`` seconds have passed."""
        deadline = time.monotonic() + timeout
        while self.waiting or is_readable(self.fileno(), max(0.0, deadline - time.monotonic())):
            record = self.receive_nowait()
            if record is not None:
                yield record

    def segment(self, name: str, stop: int = 0) -> Mapping | RemoteSegment:
        """The segment called ``name``, mapped with the access that the supervisor grants this process. It is mapped
        once, and again if fewer than ``stop`` bytes of it are mapped because it was extended. Earlier views stay valid.
        If mapping fails, this segment and every later one is carried: its bytes travel in frames. One that is elsewhere
        is carried alone."""
        mapping = self._mappings.get(name)
        if mapping is None or mapping.nbytes < stop:
            if mapping is not None and not self.may_preserve:
                self._outgrown.append(mapping)
            mapping = self._mappings[name] = self._open(name, stop)
        return mapping

    def segment_of(self, array: Array) -> Mapping | RemoteSegment:
        """The segment that the array lies in, mapped up to the end of the array."""
        assert isinstance(array.place, Location)
        return self.segment(array.place.segment, array.place.offset + array.nbytes)

    def keep_times(self, trace: Trace, process: str) -> None:
        """Have ``trace`` write to the ring of this process, called ``process``, spans too. Nothing happens
        if ``CS_TIMES=off``, if the server has made no ring, or if it cannot be mapped."""
        if not is_on() or self.carried_because:
            return
        try:
            ring = self.segment(segment_names.times(process))
            from cs_runtime.shared_memory.mapping import Mapping

            if isinstance(ring, Mapping) and ring.writable:
                ring.reserve(0, step_times.NBYTES)
                trace.attach(ring.memory)
        except InvalidArgumentError:  # the server keeps none
            pass
        except MemoryPlanError as error:
            _log.warning("no step times are kept: %s", error)

    def map_anew(self, name: str) -> None:
        """Map the segment called ``name`` again when it is next requested. The present mapping stays as long as
        something views it."""
        self._mappings.pop(name, None)

    def mailbox(self, request: MakeMailbox | OpenMailbox) -> tuple[Mailbox, list[int]]:
        """The supervisor's answer, and its descriptors, which the caller owns. If the supervisor does not answer, the
        result is a refusal."""
        if self.carried_because:
            return Mailbox(0, False, self.carried_because), []
        for record, descriptors in self._answers(request):
            if isinstance(record, Mailbox):
                return record, descriptors
            self.waiting.append(record)
        number = request.mailbox if isinstance(request, OpenMailbox) else 0
        return Mailbox(number, False, f"the supervisor did not hand it out within {_ANSWER_TIMEOUT:.0f} s"), []

    def close(self) -> None:
        """Close the connection. Mapped segments stay valid while something views them."""
        self._link.close()
        self._mappings.clear()
        self._outgrown.clear()

    def ask_for_segment(self, request: MakeSegment | ExtendSegment | OpenSegment) -> tuple[Segment, list[int]]:
        """A segment and its descriptor, which the caller owns; no descriptor if the supervisor runs on another machine.
        Raises the error with which the supervisor refuses, and TimeoutError if it does not answer."""
        for record, descriptors in self._answers(request):
            if isinstance(record, Segment) and record.segment == request.segment:
                return record, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(record, SegmentRefused) and record.segment == request.segment:
                raise replica_exception_class(record.error.exception)(text_of(record.error))
            self.waiting.append(record)
        raise TimeoutError(
            f"the supervisor did not hand out segment {request.segment} within {_ANSWER_TIMEOUT:.0f} s; is it stopped?"
        )

    def _open(self, name: str, stop: int) -> Mapping | RemoteSegment:
        try:
            return self._mapped(*self.ask_for_segment(OpenSegment(name, stop)))
        except TimeoutError as error:
            raise ShutdownError(str(error)) from error

    def _answers(self, request: Record) -> Iterator[tuple[Record, list[int]]]:
        """The records that follow ``request``, for as long as an answer may take."""
        mended = self._mended
        self.send(request)
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        while time.monotonic() < deadline:
            if is_readable(self.fileno(), _LOOK_EVERY) and (read := self._read()) is not None:
                yield read
            if mended != self._mended:  # the supervisor that got the request may be gone
                mended = self._mended
                self.send(request)

    def _mapped(self, segment: Segment, descriptors: list[int]) -> Mapping | RemoteSegment:
        from cs_runtime.shared_memory.mapping import Mapping
        from cs_runtime.shared_memory.remote_segment import RemoteSegment

        if not descriptors:
            if not segment.is_elsewhere:
                self.carried_because = self.carried_because or "the service shares no memory with this process"
        elif self.carried_because:
            os.close(descriptors[0])
        else:
            is_private = self.may_preserve and not segment.writable
            try:
                return Mapping(
                    segment.segment,
                    descriptors[0],
                    segment.reservation,
                    writable=segment.writable,
                    may_preserve=is_private,
                    copies_on_write=is_private and segment.segment != segment_names.versions(),
                )
            except OSError as error:
                self.carried_because = f"the service's memory cannot be mapped here ({error.strerror})"
        return RemoteSegment(segment.segment, segment.reservation, lambda *asked: self.carry(*asked))

    def _read(self) -> tuple[Record, list[int]] | None:
        """The next record; None if it was an introduction, or if the connection was mended instead."""
        mended, cause = self._mended, None
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, PACKET_NBYTES, _DESCRIPTORS)
        except OSError as error:
            packet, descriptors, cause = b"", [], error
        if not packet:
            self._mend_since(mended, cause)
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        record = decode([packet])
        return None if self._is_introduction(record) else (record, descriptors)

    def _is_introduction(self, record: Record) -> bool:
        """Whether the record introduces a process, which is then noted. Note the clients and forget the workers that a
        record says have gone; the server remembers those of workers, to tell them that they were replaced."""
        own = self._introduction
        if isinstance(record, Introduce):
            if not self.name:
                self.name, self._introduction = record.name, record
            elif record.name != self.name:
                peer = peer_of(record)
                self._gone = [each for each in self._gone if each != peer]  # it has come back
                self._forget(peer)
                self.peers[peer], self._peers_by_name[record.name] = record, peer
                if record.role != "observer":
                    self.expects_until = time.monotonic() + _CONNECTS_WITHIN
            return True
        if isinstance(record, ClientGone):
            self._gone += [peer for peer, who in self.peers.items() if who.client == record.client]
        elif isinstance(record, Died) and record.role == own.role == "worker":
            self._forget(_worker(record.rank, record.incarnation))
        return False

    def _forget(self, peer: bytes) -> None:
        if peer in self.peers:
            del self._peers_by_name[self.peers.pop(peer).name]

    def _mend_since(self, mended: int, cause: OSError | None) -> None:
        """Mend the connection after a failure. ``mended`` counts the earlier mends, as the caller knew it before the
        failure: another thread may have mended it since."""
        if self.fileno() >= 0:
            self.mend()
        if mended == self._mended:
            raise ShutdownError(_GONE) from cause

    def _next_supervisor(self, run: RunFile, since: float) -> socket.socket:
        """A connection to the next supervisor; the last one has been gone ``since`` then. The next one has sent a
        record, so it knows this process and its server is ready."""
        where = f"the service in {self._run_directory}"
        link: socket.socket | None = None
        try:
            while True:
                found = RunFile.read(self._run_directory)
                if found is None:
                    raise ShutdownError(_GONE)
                if found.run != run.run:
                    raise ShutdownError(
                        f"{where} has been replaced by another one, and this process belongs to the earlier one; start "
                        "the process again"
                    )
                link = link or self._introduced()
                if link is None:
                    time.sleep(_LOOK_EVERY)
                elif (spoken := self._has_spoken(link, _LOOK_EVERY)) is not None:
                    if spoken:
                        return link
                    link.close()
                    link = None
                    time.sleep(_LOOK_EVERY)
                self.while_waiting()
                now = time.monotonic()
                if now - since >= run.return_timeout:
                    raise ShutdownError(
                        f"{where} has not come back within {run.return_timeout:g} s after its supervisor was killed; "
                        "start its container again sooner, or the server with a larger --return-timeout"
                    )
                if pace_of("supervisor").is_due(now - since):
                    _log.warning("waiting %.0f s for %s to come back", now - since, where)
        except BaseException:  # Ctrl-C in while_waiting, too: nothing else closes this connection
            if link is not None:
                link.close()
            raise

    def _introduced(self) -> socket.socket | None:
        try:
            link = connect(self._run_directory)
        except LaunchError:
            return None
        try:
            link.sendall(b"".join(encode(self._introduction)))
        except OSError:
            link.close()
            return None
        return link

    def _has_spoken(self, link: socket.socket, timeout: float) -> bool | None:
        """True if the other end has sent something other than introductions, False if it has hung up, None if neither
        happened within ``timeout`` seconds."""
        if not is_readable(link.fileno(), timeout):
            return None
        try:
            packet = link.recv(PACKET_NBYTES, socket.MSG_PEEK)
            if packet and self._is_introduction(decode([packet])):
                link.recv(PACKET_NBYTES)
                return None
        except OSError:
            return False
        return bool(packet)


def peer_of(who: Introduce) -> bytes:
    """What a process is called in this process, as the supervisor says: ``w0.1``, ``c9f`` for the controller whose
    client is 9f, ``o9f`` for an observer. Other than its name, this is no secret.

    >>> peer_of(Introduce(1, "worker", 0, 2, 40, "", b"secret")), peer_of(Introduce(1, "observer", 0, 1, 41, "9f"))
    (b'w0.2', b'o9f')
    """
    return _worker(who.rank, who.incarnation) if who.role == "worker" else f"{who.role[0]}{who.client}".encode()


def _worker(rank: int, incarnation: int) -> bytes:
    return b"w%d.%d" % (rank, incarnation)


def _nothing() -> None:
    pass


def _no_way(request: Callable[[int], Record], answer: type[R]) -> R:
    raise ShutdownError("a process that cannot map the service's memory has not reached its server yet")
