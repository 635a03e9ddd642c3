"""``cs.summary``: numbers of a training for TensorBoard, written by a thread.

The script only remembers a number; the thread writes it, reads what lies on a GPU, and asks the service for its own
numbers as an observer does. So nothing here waits for steps that were sent ahead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import finalize

import numpy as np

from central_storage.core.handles import Handle
from central_storage.core.public_objects import Closed
from central_storage.core.tensors.live_number import LiveNumber
from central_storage.core.values import DistributedValues
from central_storage.diagnostics.extras import require
from central_storage.diagnostics.tensorflow_names import attributes
from central_storage.observer.blocking import Observer, connect
from central_storage.strategy.running import running
from central_storage.strategy.step_bar import mean_of
from cs_proto.errors import CentralStorageError, InvalidArgumentError, NoAnswerError, ShutdownError
from cs_proto.messages import Counters

if TYPE_CHECKING:
    from central_storage.strategy.service_strategy import CentralStorageStrategy

__all__ = ["TensorBoard"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.summary")

_log = logging.getLogger("central_storage.summary")

# Seconds between two times at which the thread writes what it was given.
_EVERY = 1.0
# Seconds that the service gets to answer; and at the end, as long as it runs.
_TIMEOUT, _LAST_TIMEOUT = 5.0, 60.0
#: What may be wrong with a service that is asked: it has ended, or does not answer.
_UNHEARD = (CentralStorageError, OSError)


class TensorBoard(Closed):
    """Writes numbers of a training, and of its service, to a file that TensorBoard reads.

    The numbers of the service are ``service/steps_per_second``, ``service/commits``, ``service/captured_share`` (of the
    runs since the last numbers, the share that the server decided in one pass), and in bytes
    ``service/parameter_bytes``, ``service/slot_bytes`` and ``service/private_bytes`` (memory of the server and the
    workers that they share with nobody). Their step is the number of runs of the service.

    Everything is written at the end of the ``with`` block, by :meth:`close`, and when the script ends, also by Ctrl-C
    or an exception. If the script is killed, the last second is lost. The end asks the service once more. If its answer
    takes longer than 5 seconds, a warning says so, and the end waits as long as the service runs, for at most 60.

    Args:
        directory: The directory of the file, which is made if need be. TensorBoard shows each directory as one run.
        strategy: The strategy whose service's numbers are written. None: the strategy of this process that runs, where
            there is one only.
        service_every: Seconds between two sets of the service's numbers. None: they are not written.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed: the extra ``tensorboard`` (an ImportError).
        InvalidArgumentError: ``service_every`` is not a number of seconds above 0 (a ValueError).
        OSError: The file cannot be made.

    Examples:
        >>> import tempfile
        >>> import central_storage as cs
        >>> with tempfile.TemporaryDirectory() as directory, cs.summary.TensorBoard(directory) as writer:
        ...     for step, loss in enumerate([0.5, 0.25]):
        ...         writer.scalar("loss", loss, step)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        strategy: CentralStorageStrategy | None = None,
        *,
        service_every: float | None = 10.0,
    ) -> None:
        require("tensorboardX", "tensorboard", "cs.summary.TensorBoard")
        if service_every is not None and (
            isinstance(service_every, bool) or not isinstance(service_every, int | float) or not service_every > 0
        ):
            raise InvalidArgumentError(
                f"service_every must be a number of seconds above 0, or None, not {service_every!r:.80}"
            )
        address = None if strategy is None else strategy.address
        self._writer = writer = _Writer(os.fspath(directory), address, service_every)
        self._close = finalize(self, writer.close)

    def scalar(self, name: str, value: Any, step: int) -> None:
        """Write a number, soon: the call costs some microseconds.

        A result of ``run_steps`` is there when the loop gets it. A number on a GPU is read by the thread, so do not
        change its array in place. A variable and a learning rate of an optimizer are read now, as everywhere.

        Args:
            name: The name of the curve, such as ``"loss/train"``.
            value: A number, an array with one element, or a PerReplica of them, of which the mean is written.
            step: The number of the step, from 0.

        Raises:
            TypeError: ``name`` is not a str, ``step`` is not an int, or ``value`` is not a number.
            InvalidArgumentError: ``value`` has several elements, ``name`` is empty or has no UTF-8, or ``step`` is
                negative or does not fit into an int64 (a ValueError).
            ShutdownError: Called after :meth:`close` (a RuntimeError).
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {name!r:.80}")
        if isinstance(step, bool) or not isinstance(step, int | np.integer | LiveNumber):
            raise TypeError(f"step must be an int, not {step!r:.80}")
        # The thread could only warn of them, when the number is lost.
        if not name or not _is_utf8(name) or not 0 <= int(step) < 1 << 63:
            raise InvalidArgumentError(
                f"a scalar needs a name in UTF-8 and a step from 0 below 2**63, not {name!r:.80} and {int(step)}"
            )
        self._writer.add(name, _kept(name, value), int(step))

    def flush(self) -> None:
        """Write everything that was given so far, and wait until it is in the file.

        Raises:
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> with tempfile.TemporaryDirectory() as directory, cs.summary.TensorBoard(directory) as writer:
            ...     writer.scalar("loss", 0.5, 0)
            ...     writer.flush()
        """
        self._writer.flush()

    def close(self) -> None:
        """Write everything, and close the file. Idempotent.

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     writer = cs.summary.TensorBoard(directory)
            ...     writer.close()
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TensorBoard of {self._writer.directory}>"


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kept(name: str, value: Any) -> float | Callable[[], float]:
    """The number, or a function that reads it in the thread."""
    if isinstance(value, Handle | LiveNumber | bool | np.bool_):
        return float(value)  # type: ignore[arg-type]
    mean = mean_of(value)
    if mean is not None:
        return mean
    parts = value.values if isinstance(value, DistributedValues) else (value,)
    for part in parts:
        shape = getattr(part, "shape", None)
        if shape is not None and np.prod(shape, dtype=np.int64) != 1:
            raise InvalidArgumentError(f"{name} must be one number, not an array of shape {tuple(shape)}")
        if shape is None or isinstance(part, np.ndarray | np.generic) or not hasattr(part, "__float__"):
            raise TypeError(f"{name} must be a number, an array with one element or a PerReplica, not {value!r:.80}")
    return lambda: float(np.mean([float(part) for part in parts]))


class _Item(NamedTuple):
    name: str
    value: float | Callable[[], float]
    step: int
    time: float


_writers = count()


class _Writer:
    """The file and its thread, which does not keep the :class:`TensorBoard` alive."""

    def __init__(self, directory: str, address: str | None, service_every: float | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        # Its name has only whole seconds.
        self._file = EventsWriter(os.path.join(directory, "events"), f".{os.getpid()}.{next(_writers)}")
        self._service = None if service_every is None else _Service(address, service_every)
        self._process = os.getpid()
        self._given: deque[_Item] = deque()
        self._lock = threading.Lock()  # of the file
        self._error: OSError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="central storage summary", daemon=True)
        self._thread.start()

    def add(self, name: str, value: float | Callable[[], float], step: int) -> None:
        self._require_process()
        if self._ended.is_set():
            raise ShutdownError(f"the writer of {self.directory} is closed")
        self._given.append(_Item(name, value, step, time.time()))

    def flush(self) -> None:
        self._require_process()
        with self._lock:
            self._write()
            error, self._error = self._error, None
        if error is not None:
            raise OSError(
                error.errno, f"{error.strerror}; scalars since the last flush are lost", self.directory
            ) from error

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            raise ShutdownError(f"the writer of {self.directory} belongs to the process that made it")

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the file is its parent's
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._write()
            try:
                self._file.close()
            except OSError as error:
                self._lost(error)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.is_set()
            with self._lock:
                self._write()  # the service may be slow to answer
            if self._service is not None:
                self._given.extend(self._service.numbers(is_last=is_last))
            self._ended.wait(_EVERY)

    def _write(self) -> None:
        """Write what was given. The caller holds the lock."""
        while self._given:
            item = self._given.popleft()
            try:
                self._write_item(item)
            except OSError as error:
                self._lost(error)
            except Exception as error:  # noqa: BLE001  (of the library whose array it is)
                _log.warning("cannot read %s of step %d: %s; it is not written", item.name, item.step, error)
            time.sleep(0)  # the script may want to go on
        try:
            self._file.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        """Numbers could not be written. Said once until :meth:`flush` has raised it."""
        if self._error is None:
            self._error = error
            _log.warning("cannot write scalars to %s: %s; they are lost", self.directory, error)

    def _write_item(self, item: _Item) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        value = item.value() if callable(item.value) else item.value
        summary = Summary(value=[Summary.Value(tag=item.name, simple_value=value)])
        self._file.write_event(Event(wall_time=item.time, step=item.step, summary=summary))


class _Service:
    """The numbers of a service, read by an observer."""

    def __init__(self, address: str | None, every: float) -> None:
        self._address = address
        self._every = every
        self._due = 0.0
        self._observer: Observer | None = None
        self._before: tuple[float, Counters] | None = None

    def numbers(self, *, is_last: bool) -> list[_Item]:
        """The numbers of the service, if they are due; of one that has ended there are none."""
        now = time.monotonic()
        if now < self._due and not is_last:
            return []
        try:
            counters = self._last() if is_last else self._read()
        except NoAnswerError as error:  # what is compared with stays: the next numbers are of a longer time
            _log.debug("no numbers of the service: %s", error)
            return []
        except _UNHEARD as error:
            _log.debug("no numbers of the service: %s", error)
            self._let_go()
            return []
        if counters is None:
            return []  # it may come yet
        now = time.monotonic()
        self._due = now + self._every
        found = _numbers(self._before, (now, counters)) if self._before else {}
        if found:
            private = _private(counters)
            found |= {} if private is None else {"private_bytes": private}
        self._before = (now, counters)
        if is_last:
            self._let_go()
        return [_Item(f"service/{name}", value, counters.runs, time.time()) for name, value in found.items()]

    def _read(self) -> Counters | None:
        if self._observer is None:
            addresses = [self._address] if self._address else [strategy.address for strategy in running()]
            if len(addresses) != 1:
                return None
            self._observer = connect(addresses[0], _TIMEOUT)
        return self._observer.statistics()

    def _last(self) -> Counters | None:
        """As :meth:`_read`, also if the service answers late."""
        deadline = time.monotonic() + _LAST_TIMEOUT
        is_named = False
        while True:
            try:
                return self._read()
            except NoAnswerError as error:
                if not self._is_running():
                    raise
                if time.monotonic() >= deadline:
                    _log.warning("%s: its last numbers are not written", error)
                    raise
                if not is_named:
                    _log.warning("%s: the end waits for its last numbers, for at most %g s", error, _LAST_TIMEOUT)
                    is_named = True

    def _is_running(self) -> bool:
        """Whether a service that is asked runs, as far as this process has heard."""
        return any(self._address in (None, strategy.address) for strategy in running())

    def _let_go(self) -> None:
        observer, self._observer, self._before = self._observer, None, None
        if observer is not None:
            with suppress(*_UNHEARD):
                observer.close()


def _numbers(before: tuple[float, Counters], now: tuple[float, Counters]) -> dict[str, float]:
    """The numbers by name; none if the counters began anew since ``before``."""
    (then, old), (moment, new) = before, now
    runs, captured = new.runs - old.runs, new.captured - old.captured
    decided = captured + sum(count for _, count in new.uncaptured) - sum(count for _, count in old.uncaptured)
    if runs < 0 or captured < 0 or decided < 0 or moment <= then:
        return {}
    found = {
        "steps_per_second": runs / (moment - then),
        "commits": float(new.commits),
        "parameter_bytes": float(new.parameter_nbytes),
        "slot_bytes": float(new.slot_nbytes),
    }
    return found | ({"captured_share": captured / decided} if decided else {})


def _private(counters: Counters) -> float | None:
    """The bytes of server and workers that no other process shares; None if one is not to be seen."""
    found = 0
    try:
        for pid in {counters.pid, *(replica.pid for replica in counters.replicas)}:
            with open(f"/proc/{pid}/cmdline", "rb") as file:  # in another container the number may be another's
                if pid != os.getpid() and b"cs_" not in file.read():
                    return None
            with open(f"/proc/{pid}/statm") as file:
                resident, shared = map(int, file.read().split()[1:3])
            found += resident - shared
    except OSError:
        return None
    return float(found * os.sysconf("SC_PAGE_SIZE"))
