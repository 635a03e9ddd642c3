"""The metrics of a service: what one look at it says, in Prometheus' terms.

Gauges show the last look; what it did not find has no sample. Counters never decrease while this process lives, also
when a process of the service is replaced or cannot be asked for a while.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from central_storage.ctl.reading import Process, Reading, State, awaited
from cs_proto.printable import printable
from cs_proto.version import __version__

__all__ = ["Families", "Metrics"]

# Seconds for which one look serves all who ask: however many scrape, the service is looked at five times a second.
_FRESH_SECONDS = 0.2
# Seconds between two looks at the memory of the service, which take as long as dozens of other looks.
_MEMORY_SECONDS = 15.0

# Of a name that is a label, Prometheus gets so many characters. Of the reasons that a service counts, it gets so many,
# and their sum beyond: each label is a series that it keeps for ever.
_LABEL_CHARACTERS = 200
_MOST_REASONS = 50
_OTHER_REASONS = "other reasons"

Labels = tuple[str, ...]
#: Looks at the service; the argument says whether also at the memory of its processes.
Look = Callable[[bool], Reading]


class Metrics:
    """The metrics of one service as text, for one thread."""

    def __init__(self, look: Look, clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._families = Families()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._families)
        ProcessCollector(registry=self._registry)
        self._text = b""
        self._looked: float | None = None
        self._looked_at_memory: float | None = None

    def text(self) -> bytes:
        """What the service is like now, in Prometheus' text format."""
        now = self._clock()
        if self._looked is None or now - self._looked >= _FRESH_SECONDS:
            memory = self._looked_at_memory is None or now - self._looked_at_memory >= _MEMORY_SECONDS
            if memory:
                self._looked_at_memory = now
            self._families.reading = self._look(memory)
            self._text = generate_latest(self._registry)
            self._looked = self._clock()
        return self._text


class Families:
    """Makes metrics of the last reading. A collector of prometheus_client."""

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self._counts = _Counts()

    def collect(self) -> Iterator[Metric]:
        """Every metric that is known."""
        if self.reading is not None:
            yield from _of_service(self.reading)
            yield from self._steps(self.reading)
            yield from _of_memory(self.reading)
            yield from self._processes(self.reading)

    def _steps(self, reading: Reading) -> Iterator[Metric]:
        counts = self._counts
        for name, text, value in (
            ("steps", "Steps that are finished, over the life of the service.", reading.runs),
            ("commits", "Updates of variables.", reading.commits),
            ("captured_steps", "Steps that took the short way through the server.", reading.captured),
        ):
            counts.show(name, (), value)
            yield from counts.family(name, text)
        for reason, value in _bounded(reading.uncaptured or {}).items():
            counts.show("uncaptured_steps", (reason,), value)
        yield from counts.family("uncaptured_steps", "Steps that did not take the short way, by reason.", ("reason",))
        server = next((each.pid for each in reading.processes if each.role == "server"), 0)
        counts.add("mailbox_messages", (), server, reading.mailbox_messages)
        yield from counts.family("mailbox_messages", "Answers that the server has sent through shared memory.")
        counts.add("not_finite_commits", (), server, reading.not_finite)
        yield from counts.family("not_finite_commits", "Commits in which a sum of gradients was not finite.")
        counts.add("overflowed_commits", (), server, reading.overflowed)
        yield from counts.family("overflowed_commits", "Those of them in which each gradient was finite.")
        yield from _number("step", "The number of the script's last finished step.", reading.step)

    def _processes(self, reading: Reading) -> Iterator[Metric]:
        counts, processes = self._counts, reading.processes
        own = [each for each in processes if each.role in ("server", "worker")]
        yield from _by_process("process_up", "1 for a process that is ready.", processes, _is_up)
        yield from _by_process(
            "process_incarnation", "How often a process was started.", own, lambda each: each.incarnation
        )
        yield from _by_process(
            "process_resident_memory_bytes", "Memory of a process.", processes, lambda each: each.resident_nbytes
        )
        yield from _by_process(
            "process_private_memory_bytes",
            "Memory that no other process has.",
            processes,
            lambda each: each.private_nbytes,
        )
        mapped = {
            (each.label, kind): nbytes for each in processes for kind, nbytes in (each.shared_nbytes or {}).items()
        }
        yield from _gauge(
            "process_shared_memory_bytes",
            "Memory of the service's segments that a process maps; the same bytes count in several processes.",
            mapped.items(),
            ("process", "kind"),
        )
        for each in processes:
            counts.add("process_cpu_seconds", (each.label,), each.pid, each.cpu_seconds)
        yield from counts.family("process_cpu_seconds", "Processor time of a process.", ("process",))
        for each in own:
            counts.show("restarts", (each.role, each.label), each.restarts)
        yield from counts.family("restarts", "How often a process was replaced.", ("role", "process"))
        yield from _number("max_restarts", "How often processes may be replaced in all.", reading.max_restarts)
        waits = dict.fromkeys([(each.label,) for each in processes] + [("script",), ("other",)], 0)
        for text in reading.waiting:
            for label in awaited(text) or ["other"]:
                waits[(label,) if (label,) in waits else ("other",)] += 1
        yield from _gauge("waits", "Waits of more than a second, by the awaited process.", waits.items(), ("process",))


class _Counts:
    """What counters have shown."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[Labels, float]] = {}
        # Of what begins at 0 again in a new process: the process, and its last number.
        self._lives: dict[tuple[str, Labels], tuple[int, float]] = {}

    def show(self, name: str, labels: Labels, value: float | None) -> None:
        """A number that goes on when its process is replaced."""
        if value is not None:
            totals = self._totals.setdefault(name, {})
            totals[labels] = max(value, totals.get(labels, 0))

    def add(self, name: str, labels: Labels, pid: int, value: float | None) -> None:
        """A number that begins at 0 in every process."""
        if value is not None:
            before, last = self._lives.get((name, labels), (pid, 0.0))
            self._lives[name, labels] = pid, value
            more = value - last if pid == before else value
            totals = self._totals.setdefault(name, {})
            totals[labels] = totals.get(labels, 0) + max(0, more)

    def family(self, name: str, text: str, labels: Labels = ()) -> Iterator[Metric]:
        """The counter, if anything is known of it."""
        if name in self._totals:
            family = CounterMetricFamily(f"central_storage_{name}", text, labels=labels)
            for values, total in self._totals[name].items():
                family.add_metric(values, total)
            yield family


def _bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by label, in their order; those beyond the last place are added up."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        label = _label(name)
        if label not in found and len(found) >= _MOST_REASONS:
            label = _OTHER_REASONS
        found[label] = found.get(label, 0) + count
    return found


def _label(name: str) -> str:
    """A name that others have chosen, as a label: UTF-8, and not too long. A file may be called otherwise."""
    return printable(name)[:_LABEL_CHARACTERS]


def _of_service(reading: Reading) -> Iterator[Metric]:
    yield from _gauge(
        "build_info",
        "The versions of the package and of Python.",
        [((__version__, platform.python_version()), 1)],
        ("version", "python"),
    )
    described = (
        _label(reading.name),
        _label(reading.kind or ""),
        _label(reading.transport or ""),
        _label(reading.parameter_device or ""),
    )
    yield from _gauge(
        "service_info",
        "The name of the service and how it was started.",
        [(described, 1)],
        ("name", "kind", "transport", "parameter_device"),
    )
    yield from _number("start_time_seconds", "When the service began, in seconds of Unix time.", reading.since)
    states = {(state,): int(state == reading.state) for state in get_args(State)}
    yield from _gauge("state", "1 for the state in which the service is, 0 for the others.", states.items(), ("state",))
    yield from _number("replicas", "Replicas of the service.", reading.replicas)


def _of_memory(reading: Reading) -> Iterator[Metric]:
    yield from _number("variables", "Variables of the service.", reading.variables)
    yield from _number("parameter_bytes", "Bytes of all variables.", reading.parameter_nbytes)
    yield from _number("slot_bytes", "Bytes of the optimizers' slots.", reading.slot_nbytes)
    kinds = {(kind,): nbytes for kind, nbytes in (reading.shared_nbytes or {}).items()}
    yield from _gauge("shared_memory_bytes", "Shared memory by kind; each byte counts once.", kinds.items(), ("kind",))


def _number(name: str, text: str, value: float | None) -> Iterator[Metric]:
    return _gauge(name, text, [((), value)], ())


def _by_process(
    name: str, text: str, processes: Iterable[Process], value: Callable[[Process], float | None]
) -> Iterator[Metric]:
    return _gauge(name, text, (((each.label,), value(each)) for each in processes), ("process",))


def _is_up(process: Process) -> int:
    return int(process.state not in ("starting", "ended"))


def _gauge(name: str, text: str, samples: Iterable[tuple[Labels, float | None]], labels: Labels) -> Iterator[Metric]:
    """A gauge with the samples that are known; nothing if none is."""
    known = {values: value for values, value in samples if value is not None}
    if known:
        family = GaugeMetricFamily(f"central_storage_{name}", text, labels=labels)
        for values, value in known.items():
            family.add_metric(values, value)
        yield family
