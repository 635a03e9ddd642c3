"""Watch one service, redrawn in place.

Keys: q quits; p pauses the picture; b shows the parts of a step, or processor time again; s or n, c, m, r sort the
processes; 0 to 9 show the log of that worker, v that of the server, l all lines, Esc none.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType

from central_storage.ctl import interrupts, printing, screen
from central_storage.ctl.asking import Supervisor
from central_storage.ctl.completing import add_service
from central_storage.ctl.reading import Looker, Reading, as_json
from central_storage.ctl.services import Entry, choose
from central_storage.ctl.shares import Parts, processor, processor_bars
from cs_proto.errors import CentralStorageError, ConfigurationError
from cs_proto.messages import LogLine

__all__ = ["HELP", "add_arguments", "run"]

HELP = "watch one service, redrawn in place"

# The memory of a process takes milliseconds to read, so not every look reads it.
_MEMORY_EVERY = 5.0
_RATES = 500
_LINES = 1000
_ESCAPE = "\x1b"
# What terminals understand: to another screen without a cursor, back, to the first line, and to clear the rest of one.
_OTHER_SCREEN, _FIRST_SCREEN, _HOME, _REST = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    add_service(parser)
    parser.add_argument(
        "-d", "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="begin with the parts of a step; the training notes its step times meanwhile, which costs it a little",
    )
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="for each answer (default: 2)")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. In a pipe, or with ``--json``, it prints a line for each look."""
    if not 0.05 <= options.interval < 1e6:
        raise ConfigurationError(f"--interval is a number of seconds from 0.05 to 1e6, not {options.interval:g}")
    draws = not options.json and sys.stdin.isatty() and printing.is_terminal()
    if options.parts and not draws:
        raise ConfigurationError(
            "--parts needs a terminal; cs-ctl profile prints the parts of a step, also with --json"
        )
    entry = choose(options.service)
    with Looker(entry, options.timeout) as looker:
        if not draws:
            return _lines(looker, options)
        with _Log(entry, options.timeout) as log, closing(Parts(entry.path)) as parts:
            return _Top(looker, log, parts, options).run()


def _lines(looker: Looker, options: argparse.Namespace) -> int:
    """One line for each look, until the service is over."""
    while True:
        reading = looker.look()
        if options.json:
            printing.json_line(as_json(reading))
        else:
            step, rate = printing.plain(reading.step), printing.number(reading.rate)
            printing.line(f"{reading.name}  {reading.in_words}  step {step}  {rate} steps/s")
            sys.stdout.flush()
        if reading.state == "over":
            return 0
        time.sleep(options.interval)


class _Log:
    """The last lines of the service's processes, as they come."""

    def __init__(self, entry: Entry, timeout: float) -> None:
        self._lines: deque[LogLine] = deque(maxlen=_LINES)
        self._supervisor: Supervisor | None = None
        with suppress(CentralStorageError):
            self._supervisor = Supervisor(entry.path, timeout)
            self._supervisor.follow()

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.close()

    def read(self) -> None:
        """Take in what has come. To be called often: of what waits too long, the newest lines are dropped."""
        if self._supervisor is not None:
            try:
                self._lines.extend(self._supervisor.waiting_lines())
            except CentralStorageError:  # the service has ended, and what it printed stays
                self._supervisor.close()
                self._supervisor = None

    def of(self, label: str) -> list[str]:
        """The lines of one process, or of all if ``label`` is empty."""
        return [f"[{line.label}] {line.text}" for line in self._lines if label in ("", line.label)]


class _Top:
    """The loop: look, draw, hear keys."""

    def __init__(self, looker: Looker, log: _Log, parts: Parts, options: argparse.Namespace) -> None:
        self._looker = looker
        self._log = log
        self._parts = parts
        self._interval: float = options.interval
        self._shows_parts: bool = options.parts
        self._no_parts = ""  # why they cannot be shown
        self._rates: deque[float | None] = deque(maxlen=_RATES)
        self._before: Reading | None = None
        self._reading: Reading | None = None
        self._memory_at = 0.0
        self._sort = "name"
        self._label: str | None = None  # whose log is shown; "" for all, None for none
        self._is_paused = False

    def run(self) -> int:
        with interrupts.raising(), _terminal() as descriptor:
            due = 0.0
            while True:
                now = time.monotonic()
                if now >= due:
                    due = now + self._interval
                    self._look()
                self._log.read()
                print(_HOME + f"{_REST}\r\n".join(self._drawn(*_size())) + _REST, end="", flush=True)
                if not self._hear(descriptor, due - time.monotonic()):
                    return 0

    def _look(self) -> None:
        if self._is_paused or self._is_over:
            return
        wants_memory = time.monotonic() >= self._memory_at
        if wants_memory:
            self._memory_at = time.monotonic() + _MEMORY_EVERY
        self._before, self._reading = self._reading, self._looker.look(memory=wants_memory)
        self._rates.append(self._reading.rate)
        self._sample()

    @property
    def _is_over(self) -> bool:
        return self._reading is not None and self._reading.state == "over"

    def _sample(self) -> None:
        """Take in the parts of the last steps, or have nothing noted if nobody wants to see them."""
        if self._is_paused or self._is_over or not self._shows_parts:
            self._parts.close()
        elif self._reading is not None and self._reading.state not in ("starting", "silent"):
            try:
                self._parts.look()
            except CentralStorageError as error:
                self._parts.close()
                self._shows_parts, self._no_parts = False, str(error)

    def _drawn(self, columns: int, rows: int) -> list[str]:
        assert self._reading is not None
        cpu = processor(self._before, self._reading)
        return screen.drawn(
            self._reading,
            self._rates,
            cpu,
            self._parts.bars if self._shows_parts else processor_bars(cpu, self._no_parts),
            sort=self._sort,
            is_paused=self._is_paused,
            log=None if self._label is None else self._log.of(self._label),
            columns=columns,
            rows=rows,
        )

    def _hear(self, descriptor: int, timeout: float) -> bool:
        """Wait for a key until the next look, and act on it. False if the user quits."""
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(max(0.0, timeout) * 1000):
            return True
        keys = os.read(descriptor, 64).decode("utf-8", "replace")
        if not keys:
            return False
        for key in [keys] if keys.startswith(_ESCAPE) else keys:  # an arrow is Esc and more
            if key in "qQ\x03":
                return False
            self._press(key)
        return True

    def _press(self, key: str) -> None:
        orders = list(screen.SORTS.values())
        if key == "p":
            self._is_paused = not self._is_paused
            self._sample()
        elif key == "b":
            self._shows_parts, self._no_parts = not self._shows_parts, ""
            self._sample()
        elif key == "s":
            self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        elif key in screen.SORTS:
            self._sort = screen.SORTS[key]
        elif key.isdecimal():
            self._label = None if self._label == f"w{key}" else f"w{key}"
        elif key in ("l", "v"):
            wanted = {"l": "", "v": "server"}[key]
            self._label = None if self._label == wanted else wanted
        elif key.startswith(_ESCAPE):
            self._label = None


def _size() -> tuple[int, int]:
    """Columns and rows of the terminal, of which some, as in a container, say that they have none."""
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, rows or 24


@contextmanager
def _terminal() -> Iterator[int]:
    """The terminal shows another screen, gives each key at once, and does not show it. What was there comes back, also
    while this process is stopped by Ctrl-Z, and if it is ended."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def enter() -> None:
        tty.setcbreak(descriptor)
        os.write(sys.stdout.fileno(), _OTHER_SCREEN)

    def leave() -> None:
        with suppress(OSError, termios.error):  # the terminal is gone
            os.write(sys.stdout.fileno(), _FIRST_SCREEN)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def stopped(number: int, frame: FrameType | None) -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()

    def ended(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGTSTP: stopped,
        signal.SIGTERM: ended,
        signal.SIGHUP: ended,
    }
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        enter()
        yield descriptor
    finally:
        leave()
        for number, handler in earlier.items():
            signal.signal(number, handler)
