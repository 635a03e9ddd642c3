"""The timeline of a training: the rings of all processes as a Chrome trace, which Perfetto and Chrome show.

The clock of all processes is CLOCK_MONOTONIC of one machine. Every process is a row with the parts of its steps, and
has another row for each thread with spans of the user's. A flow leads from the return of a replica to the commit of its
gradient.

Perfetto takes the thread 0 of a process for its main thread, whose number is that of the process. So the row of parts
has this number, and a row of spans has one that nobody else has.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from cs_proto.version import __version__

from .rings import CONTROLLER, SERVER, Moment, RecordedMoments, Rings, Slice, Span, role_of, slices, spans

__all__ = ["LIMIT", "Recorder", "chrome_trace", "timeline"]

_log = logging.getLogger("central_storage")

#: The most moments of a timeline, of all processes together; each becomes about 150 bytes of JSON. The last ones are
#: kept.
LIMIT = 200_000
# Seconds between two looks at the rings. A ring has 65,024 places, and a process notes about 12 moments a step.
_LOOK_EVERY = 0.2
_recordings = count()


class Recorder:
    """Copies the rings of a service from now on, in a thread, until :meth:`finish`."""

    def __init__(self, address: str, limit: int = LIMIT) -> None:
        """Begin with the service in the run directory ``address``. Keeps the last ``limit`` moments.

        Raises as :class:`.rings.Rings` does.
        """
        self._rings = Rings(address)
        self._recorded = RecordedMoments(self._rings, limit // len(self._rings.rings))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="central-storage timeline", daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, object]:
        """Stop, and return the trace, as :func:`chrome_trace` makes it."""
        self._is_over.set()
        self._thread.join()
        self._look()
        rings, moments = self._rings.rings, self._recorded.moments()
        pids, epoch = {process: ring.pid for process, ring in rings.items()}, rings[SERVER].epoch
        self._rings.close()
        return chrome_trace(moments, pids, epoch, self._recorded.missing)

    def _copy(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY):
            self._look()

    def _look(self) -> None:
        self._rings.is_over()  # takes notices off the socket
        self._recorded.look()


def chrome_trace(
    recorded: Mapping[str, Sequence[Moment]],
    pids: Mapping[str, int] | None = None,
    epoch: int = 0,
    missing: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """A trace in the JSON object format of Chrome, with times in microseconds since its first moment.

    ``pids`` has the number of each process, ``epoch`` the time since 1970 less that of the moments (nanoseconds), and
    ``missing`` how many moments of a process are not in ``recorded``. Both are said in ``otherData``.
    """
    start = min((each.when for moments in recorded.values() for each in moments), default=0)
    rows = _numbers(recorded, pids or {})
    threads = count(max(rows.values(), default=0) + 1)
    parts = {process: slices(process, moments) for process, moments in recorded.items()}
    events: list[dict[str, object]] = []
    for process, moments in recorded.items():
        row = rows[process]
        events += (_slice(each, row, start) for each in parts[process])
        events += _spans(spans(moments), row, start, threads)
    events += _flows(parts, rows, start)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # type: ignore[operator]
    return {
        "traceEvents": [*_rows(recorded, rows, pids or {}), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "program": f"central_storage {__version__}",
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((start + epoch) / 1e9)),
            "missing moments": dict(missing or {}),
        },
    }


@contextmanager
def timeline(address: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a timeline of what the service in ``address`` does during the block to the file ``path``.

    Raises as :class:`Recorder` does, and OSError if the file cannot be written.
    """
    recording = Recording(address, path)
    try:
        yield
    finally:
        recording.write()


class Recording:
    """A timeline on its way to a file, which is made as a whole at the end."""

    def __init__(self, address: str, path: str | os.PathLike[str]) -> None:
        """Begin. Raises as :class:`Recorder` does, and OSError if the file cannot be written."""
        self.path = Path(path).absolute()
        # Several timelines of a script may have the same path.
        self._part = self.path.with_name(f"{self.path.name}.{os.getpid()}.{next(_recordings)}.part")
        with suppress(FileNotFoundError):
            self._part.unlink()
        # Now, so that a wrong path is said before the training and not after it.
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a timeline is a file, and this is a directory", str(self.path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(self._part, flags, 0o666), "w", encoding="utf-8")
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from None
        try:
            self._recorder = Recorder(address)
        except BaseException:  # also Ctrl-C: nothing may be left behind
            self._file.close()
            self._part.unlink()
            raise

    def write(self) -> None:
        """Stop, and write the file. Raises OSError if that fails."""
        try:
            with self._file as file:
                trace = self._recorder.finish()
                file.write(json.dumps(trace, separators=(",", ":")))
            self._part.replace(self.path)
        finally:
            with suppress(FileNotFoundError):
                self._part.unlink()
        missing = trace["otherData"]["missing moments"]  # type: ignore[index]
        if any(missing.values()):
            named = ", ".join(f"{count} of {process}" for process, count in missing.items() if count)
            _log.warning("the timeline %s has only the last moments; earlier ones are missing: %s", self.path, named)


def _numbers(recorded: Iterable[str], pids: Mapping[str, int]) -> dict[str, int]:
    """The number of each process in the trace: its pid, unless one is not known, or two have the same one in two
    containers."""
    known = [pids.get(process, 0) for process in recorded]
    is_usable = all(known) and len(set(known)) == len(known)
    return dict(zip(recorded, known if is_usable else count(1), strict=False))


def _rows(
    recorded: Mapping[str, Sequence[Moment]], rows: Mapping[str, int], pids: Mapping[str, int]
) -> Iterator[dict[str, object]]:
    """The names of the rows."""
    names = {CONTROLLER: "script", SERVER: "server"}
    for order, process in enumerate(recorded, 1):
        name, row, pid = names.get(process, f"worker {process[1:]}"), rows[process], pids.get(process, 0)
        is_said = pid in (0, row)  # viewers show the number of a process, too
        yield _named("process_name", row, row, {"name": name if is_said else f"{name} (pid {pid})"})
        yield _named("process_sort_index", row, row, {"sort_index": order})
        yield _named("thread_name", row, row, {"name": "steps"})


def _named(what: str, pid: int, tid: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(each: Slice, row: int, start: int) -> dict[str, object]:
    args: dict[str, object] = {"run": each.run, "moment": each.moment}
    return _complete(each.part, "step", row, row, each.begin - start, each.end - start) | {"args": args}


def _spans(found: Iterable[Span], row: int, start: int, threads: Iterator[int]) -> Iterator[dict[str, object]]:
    tids: dict[int, int] = {}
    for each in found:
        if each.thread not in tids:
            tids[each.thread] = next(threads)
        yield _complete(each.name, "span", row, tids[each.thread], each.begin - start, each.end - start)
    for number, tid in enumerate(tids.values(), 1):
        yield _named("thread_name", row, tid, {"name": "spans" if number == 1 else f"spans of thread {number}"})


def _complete(name: str, category: str, pid: int, tid: int, begin: int, end: int) -> dict[str, object]:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def _flows(parts: Mapping[str, Sequence[Slice]], rows: Mapping[str, int], start: int) -> Iterator[dict[str, object]]:
    """From the return of each replica to the commit of the same run."""
    commits = {each.run: each for each in parts.get(SERVER, ()) if each.part == "commit"}
    number = 0
    for process, found in parts.items():
        returns = {each.run: each for each in found if each.moment == "sent"} if role_of(process) == "worker" else {}
        for run, each in returns.items():
            commit = commits.get(run)
            if commit is None or commit.end <= each.begin:
                continue
            number += 1
            flow = {"name": "gradient", "cat": "gradient", "id": number}
            begin, end = dict.fromkeys(("pid", "tid"), rows[process]), dict.fromkeys(("pid", "tid"), rows[SERVER])
            yield {"ph": "s", **begin, "ts": (each.begin - start) / 1000, **flow}
            # Within the slice: at its very end the next slice begins.
            yield {"ph": "f", "bp": "e", **end, "ts": (commit.end - 1 - start) / 1000, **flow}
