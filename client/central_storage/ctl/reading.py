"""One look at a service: what its supervisor, its server and the kernel say of it, in one frozen value.

Any process may die while it is looked at. What could not be read is then None, or missing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from cs_proto.errors import CentralStorageError, LaunchError, NoAnswerError, PeerProtocolError, ShutdownError
from cs_proto.frozen import fields_of, frozen
from cs_proto.messages import Counters, ServiceProcess, ServiceReport

from . import processes
from .asking import Supervisor
from .services import Entry

if TYPE_CHECKING:
    from central_storage.observer.blocking import Observer

__all__ = ["Event", "Looker", "Process", "Reading", "State", "as_json", "awaited", "read"]

#: ``starting``, ``running``, ``waiting`` (for whom stands in ``waiting``), ``recovering``, ``stopping``, ``failed``,
#: ``silent`` (the supervisor does not answer), ``over``.
State = Literal["starting", "running", "waiting", "recovering", "stopping", "failed", "silent", "over"]

# A wait of fewer seconds is a part of every step.
_WAIT_SECONDS = 1.0
# A step of all replicas may take longer than that, and nobody waits for another one meanwhile.
_ALONE_SECONDS = 10.0
_WAIT = re.compile(r"run [\d.]+: waiting ([\d.]+) s for (.*)", re.DOTALL)
_AWAITED = re.compile(r"^(the |a )?(?P<process>server|supervisor|script|w\d+)\b|\breplica (?P<replica>\d+) \(")
_STOPPED = ", which is stopped"
_REPLICA = r"replica {} ((?:waits at|returned after|is lost)[^;]*)"


@frozen
class Event:
    """Something that the supervisor has said, with its Unix time."""

    time: float
    text: str


@frozen
class Process:
    """A process of a service."""

    role: Literal["supervisor", "server", "worker", "script"]
    #: ``supervisor``, ``server``, ``w0``, ``script``.
    label: str
    pid: int
    #: How often it was started; None for those that are started once.
    incarnation: int | None
    device: str | None
    #: ``starting``, ``running``, ``sleeping``, ``waiting for a disk``, ``stopped``, ``ended`` or ``a thread``; None if
    #: the kernel does not show it here, because it is in another container.
    state: str | None
    #: How often it was replaced.
    restarts: int
    #: Why the incarnation before it ended, or why it has ended; empty if nothing did.
    cause: str
    cpu_seconds: float | None
    resident_nbytes: int | None
    private_nbytes: int | None
    #: What it maps of the service's shared memory, by kind.
    shared_nbytes: dict[str, int] | None
    #: What it waits for, in words; empty if nobody knows of a wait.
    waits_for: str
    #: The address of the machine on which it runs; None if that is this one.
    node: str | None


@frozen
class Reading:
    """A service at one moment. Times are seconds, sizes bytes."""

    name: str
    address: str
    kind: str | None
    script: str | None
    directory: str | None
    #: The pid of the script, or of the launcher where there is no script.
    pid: int | None
    #: Unix time.
    since: float | None
    #: Unix time of this look.
    time: float
    state: State
    waiting: tuple[str, ...]
    replicas: int | None
    devices: tuple[str, ...]
    parameter_device: str | None
    transport: str | None
    mailbox_messages: int | None
    #: The number of the controller's last finished run.
    step: int | None
    runs: int | None
    commits: int | None
    #: Steps a second now.
    rate: float | None
    #: Steps a second since the service began.
    average_rate: float | None
    captured: int | None
    uncaptured: dict[str, int] | None
    #: Commits since the server began in which a sum of gradients was not finite, and those in which only the sum was
    #: not.
    not_finite: int | None
    overflowed: int | None
    variables: int | None
    parameter_nbytes: int | None
    slot_nbytes: int | None
    #: All shared memory of the service, by kind; each page counts once.
    shared_nbytes: dict[str, int] | None
    restarts: int | None
    max_restarts: int | None
    log_directory: str | None
    #: What Prometheus scrapes, and the file with the token that it must show.
    metrics: str | None
    metrics_token_file: str | None
    listen: str | None
    processes: tuple[Process, ...]
    events: tuple[Event, ...]

    @property
    def is_well(self) -> bool:
        """Whether the service does what it is there for, or is about to."""
        return self.state in ("starting", "running", "waiting")

    @property
    def in_words(self) -> str:
        """What the service does, and for what it waits first."""
        return self._said(self.waiting[:1])

    @property
    def in_short(self) -> str:
        """What the service does, and for which processes it waits."""
        return self._said(list(dict.fromkeys(short for wait in self.waiting for short in _shortened(wait))))

    def _said(self, waits: Sequence[str]) -> str:
        if not waits:
            return self.state
        return f"{self.state}{' for' if self.state == 'waiting' else ', waits for'} {', '.join(waits)}"


def as_json(reading: Reading) -> dict[str, Any]:
    """The reading as JSON values. ``docs/guide/cs-ctl.md`` lists the fields."""
    found = {name: getattr(reading, name) for name in fields_of(Reading)}
    found["devices"], found["waiting"] = list(reading.devices), list(reading.waiting)
    found["processes"] = [{name: getattr(each, name) for name in fields_of(Process)} for each in reading.processes]
    found["events"] = [{"time": event.time, "text": event.text} for event in reading.events]
    return found


def awaited(wait: str) -> list[str]:
    """The labels of the processes that one of the waits of a reading is for; an empty list if it is for something else.

    Examples:
        >>> awaited("replica 0 (pid 4) and replica 1 (pid 5); replica 2 returned"), awaited("the server to answer")
        (['w0', 'w1'], ['server'])
    """
    found = _AWAITED.finditer(wait.partition(";")[0])
    return [each["process"] or f"w{each['replica']}" for each in found]


def _shortened(wait: str) -> list[str]:
    labels = awaited(wait)
    if not labels:
        return [wait.partition(";")[0]]
    return [f"{labels[0]} (stopped)"] if wait.endswith(_STOPPED) else labels


def read(entry: Entry, timeout: float) -> Reading:
    """One look at a service. ``timeout`` (seconds) is for each answer."""
    with Looker(entry, timeout) as looker:
        return looker.look()


class Looker:
    """Looks at one service again and again; the connection to its server stays. Use it in a ``with`` block."""

    def __init__(self, entry: Entry, timeout: float) -> None:
        self.entry = entry
        self._timeout = timeout
        self._observer: Observer | None = None
        self._memory: dict[int, processes.Memory | None] = {}
        self._segments: dict[str, int] | None = None

    def look(self, *, memory: bool = True) -> Reading:
        """The service now. Without ``memory``, the memory of its segments and processes is as the last look found
        it."""
        report = counters = None
        unheard: State = "over"
        supervisor = self.entry.file.supervisor if self.entry.file else 0
        try:
            with Supervisor(self.entry.path, self._timeout) as asked:
                supervisor = supervisor or asked.pid
                report = asked.report()
        except (NoAnswerError, PeerProtocolError):  # late, or of a version that this one does not understand
            unheard = "starting" if self.entry.is_beginning else "silent"
        except LaunchError:  # over, or a run directory that is open to others
            unheard = "silent" if self.entry.is_held else "over"
        except ShutdownError:
            pass
        server_is_late = False
        if report is not None and report.state == "serving":
            try:
                counters = self._counters()
            except NoAnswerError:
                server_is_late = True
            except CentralStorageError:  # it has just died, and another takes its place; or no observer finds a place
                self._forget()
        return self._reading(report, counters, supervisor, unheard, server_is_late, memory)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _counters(self) -> Counters:
        from central_storage.observer import blocking  # it imports NumPy, of which nothing else here has need

        if self._observer is None:
            self._observer = blocking.connect(self.entry.path, self._timeout)
        try:
            return self._observer.statistics()
        except NoAnswerError:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._observer is not None:
            with suppress(CentralStorageError, OSError):
                self._observer.close()
        self._observer = None

    def _reading(
        self,
        report: ServiceReport | None,
        counters: Counters | None,
        supervisor: int,
        unheard: State,
        server_is_late: bool,
        memory: bool,
    ) -> Reading:
        file, now = self.entry.file, time.time()
        script = self.entry.script_pid
        if not script and report is not None and report.controllers:
            script = report.controllers[0][0]
        since = report.since if report is not None else file.since if file else None
        shown = self._processes(report, counters, supervisor, script, memory)
        state, waiting = _state(report, counters, unheard, server_is_late, shown)
        devices = tuple(each.device for each in shown if each.role == "worker" and each.device) or (
            file.devices if file else ()
        )
        return Reading(
            name=self.entry.name,
            address=self.entry.path,
            kind=file.kind if file else None,
            script=file.script if file else None,
            directory=file.directory if file else None,
            pid=script or supervisor or None,
            since=since,
            time=now,
            state=state,
            waiting=waiting,
            replicas=sum(each.role == "worker" for each in shown) or (len(devices) or None),
            devices=devices,
            parameter_device=(file.parameter_device or None) if file else None,
            transport=report.transport if report is not None else None,
            mailbox_messages=counters.posted if counters else None,
            step=counters.run if counters else None,
            runs=counters.runs if counters else None,
            commits=counters.commits if counters else None,
            rate=counters.rate if counters else None,
            average_rate=counters.runs / max(now - since, 1e-3) if counters and since else None,
            captured=counters.captured if counters else None,
            uncaptured=dict(counters.uncaptured) if counters else None,
            not_finite=counters.not_finite if counters else None,
            overflowed=counters.overflowed if counters else None,
            variables=counters.variables if counters else None,
            parameter_nbytes=counters.parameter_nbytes if counters else None,
            slot_nbytes=counters.slot_nbytes if counters else None,
            shared_nbytes=self._segment_nbytes(supervisor, report, memory),
            restarts=report.restarts if report is not None else None,
            max_restarts=report.max_restarts if report is not None else None,
            log_directory=(file.log_directory or None) if file else None,
            metrics=(file.metrics or None) if file else None,
            metrics_token_file=(file.metrics_token_file or None) if file else None,
            listen=(file.listen or None) if file else None,
            processes=shown,
            events=tuple(Event(*event) for event in report.events) if report is not None else (),
        )

    def _processes(
        self, report: ServiceReport | None, counters: Counters | None, supervisor: int, script: int, memory: bool
    ) -> tuple[Process, ...]:
        """The supervisor, the script, the server and the workers. If the supervisor does not answer, those that it has
        started, by what they were started with."""
        found: list[Process] = []
        threads = script and script == supervisor
        if supervisor and not threads and processes.status(supervisor) is not None:
            found.append(self._process("supervisor", "supervisor", supervisor, memory))
        if script:
            found.append(self._process("script", "script", script, memory))
        if report is None:
            for child in [] if threads else processes.descendants(supervisor):
                given = processes.variables_of(child.pid)
                role, rank = given.get("CS_ROLE"), given.get("RANK", "0")
                if role in ("server", "worker") and given.get("CS_RUN_DIRECTORY") == self.entry.path:
                    label = f"w{rank}" if role == "worker" else "server"
                    found.append(self._process("worker" if role == "worker" else "server", label, child.pid, memory))
        else:
            devices = {each.replica: each.device.lower() for each in counters.replicas} if counters else {}
            waiting = " ; ".join(counters.waiting) if counters else ""
            for each in report.processes:
                is_worker = each.role == "worker"
                device = devices.get(each.rank, each.device) if is_worker else each.device
                label = f"w{each.rank}" if is_worker else "server"
                wait = re.search(_REPLICA.format(each.rank), waiting) if is_worker else None
                found.append(
                    self._process(
                        each.role, label, each.pid, memory, each, device, wait[1].strip() if wait else "", bool(threads)
                    )
                )
        return tuple(found)

    def _segment_nbytes(self, supervisor: int, report: ServiceReport | None, memory: bool) -> dict[str, int] | None:
        """The memory of all segments by kind; None if the supervisor does not answer, or hides them."""
        if not supervisor or report is None:
            self._segments = None
        elif memory or self._segments is None:
            self._segments = processes.segment_nbytes(supervisor)
        return self._segments

    def _process(
        self,
        role: Literal["supervisor", "server", "worker", "script"],
        label: str,
        pid: int,
        memory: bool,
        told: ServiceProcess | None = None,
        device: str | None = None,
        waits_for: str = "",
        is_thread: bool = False,
    ) -> Process:
        """A process. A thread of the script has the memory and the processor time of the script, which counts there."""
        status = None if is_thread or not pid or self._is_elsewhere(told, pid) else processes.status(pid)
        is_over = told is not None and told.state == "ended"
        if status is None or is_over:
            self._memory.pop(pid, None)
        elif memory or pid not in self._memory:
            self._memory[pid] = processes.memory(pid)
        held = self._memory.get(pid) if status is not None else None
        if is_over:
            state: str | None = "ended"
        elif told is not None and told.state == "starting":
            state = "starting"
        else:
            state = status.state if status is not None else "a thread" if is_thread else None
        return Process(
            role=role,
            label=label,
            pid=pid,
            incarnation=told.incarnation if told is not None else None,
            device=device,
            state=state,
            restarts=told.restarts if told is not None else 0,
            cause=told.cause if told is not None else "",
            cpu_seconds=status.cpu_seconds if status is not None and not is_over else None,
            resident_nbytes=held.resident if held is not None else None,
            private_nbytes=held.private if held is not None else None,
            shared_nbytes=held.shared if held is not None else None,
            waits_for=waits_for,
            node=(told.node or None) if told is not None else None,
        )

    def _is_elsewhere(self, told: ServiceProcess | None, pid: int) -> bool:
        """Whether a worker may run in another container or on another machine, where its pid names another process than
        here."""
        file = self.entry.file
        if told is not None and told.node:
            return True
        if told is None or told.role != "worker" or (file is not None and file.kind != "serve"):
            return False
        return processes.variables_of(pid).get("CS_RUN_DIRECTORY") != self.entry.path


def _state(
    report: ServiceReport | None,
    counters: Counters | None,
    unheard: State,
    server_is_late: bool,
    shown: tuple[Process, ...],
) -> tuple[State, tuple[str, ...]]:
    """What the service does, and for what it waits. ``unheard``: what it does if its supervisor did not report."""
    stopped = tuple(_stopped(each) for each in shown if each.state == "stopped")
    if report is None:
        named = tuple(each for each in stopped if each.startswith("supervisor ")) or ("the supervisor to answer",)
        return unheard, named if unheard in ("starting", "silent") else ()
    if report.state == "starting":
        late = tuple(f"{each.label} to be ready" for each in shown if each.state == "starting")
        return "starting", late or (() if report.processes else ("the script to choose its devices",))
    again = tuple(f"{each.label} to be started again" for each in shown if each.state == "ended" or _is_back(each))
    if report.state in ("failed", "stopping"):
        return report.state, ()
    if again or report.state == "recovering":
        return "recovering", again
    if server_is_late:
        return "waiting", stopped or ("the server to answer",)
    waits = [found for found in map(_WAIT.fullmatch, counters.waiting if counters else ()) if found]
    long = tuple(found[2] for found in waits if float(found[1]) >= _patience(found[2]))
    if long or stopped:
        return "waiting", (*stopped, *long)
    if not report.controllers:
        return "waiting", ("a script",)
    return "running", ()


def _stopped(process: Process) -> str:
    return f"{process.label} (pid {process.pid}){_STOPPED}"


def _patience(wait: str) -> float:
    """The seconds after which a wait of a run is one of the service. If all replicas compute, only the script waits."""
    return _ALONE_SECONDS if wait.endswith("no replica has come to a merge point") else _WAIT_SECONDS


def _is_back(process: Process) -> bool:
    """Whether it takes the place of one that has died and is not ready yet."""
    return process.state == "starting" and process.restarts > 0
