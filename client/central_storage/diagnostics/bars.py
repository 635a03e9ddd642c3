"""Progress bars: tqdm's on a terminal and in a notebook, and a plain line now and then in a pipe.

:class:`Bar` counts, and says when what it shows is due. Most steps cost a comparison, so a loop may call it at each.
tqdm is imported with the first bar. Text that the service prints meanwhile appears above the bars.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

from .extras import require

__all__ = ["Bar", "Ticking", "above_bars", "automatic", "is_drawn"]

#: Seconds between two changes of a bar.
_EVERY = 0.1
# In a pipe: seconds to the first line and between two lines, and at least this part of the time so far.
_LINE_EVERY = 10.0
_LINE_PART = 0.1
# A bar that nobody asked for appears after so many seconds.
_DELAY = 1.0

_LOCK = threading.RLock()
# tqdm's own values start a thread that watches over bars, and make a lock that processes share.
_OWN = {"monitor_interval": 0, "_lock": _LOCK}


class _Display(Protocol):
    """Where a bar is shown."""

    @property
    def pause(self) -> float:
        """Seconds until it is to be shown again."""

    def show(self, count: int, shown: str) -> None:
        """Show the count, and ``shown`` beside it."""

    def close(self, count: int, shown: str) -> None:
        """Show the end."""


class Bar:
    """Counts what is done, and shows it on ``stream`` (by default stderr).

    ``total`` is None if it is not known. ``units`` is what is counted, in the plural, or ``B`` for bytes. ``spent`` is
    the number of seconds that a bar which nobody asked for has waited before it appears.

    Raises ModuleNotFoundError without tqdm, which the extra ``progress`` installs.
    """

    def __init__(
        self,
        text: str,
        total: int | None,
        units: str,
        *,
        spent: float = 0.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require("tqdm", "progress", "a progress bar")
        self._clock = clock
        self._display: _Display = _display(text, total, units, spent, stream or sys.stderr or io.StringIO(), clock)
        self._count = 0
        self._shown = ""
        self._is_open = True
        self._due = clock() + (0 if spent else self._display.pause)

    def advance(self, count: int = 1) -> bool:
        """Count what was done; whether :meth:`show` is due."""
        self._count += count
        return self._clock() >= self._due

    def show(self, numbers: Mapping[str, float] | None = None) -> None:
        """Show the count, and ``numbers`` from now on."""
        if numbers is not None:
            self._shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        if self._is_open and self._clock() >= self._due:
            self._display.show(self._count, self._shown)
            self._due = self._clock() + self._display.pause

    def close(self, numbers: Mapping[str, float] | None = None) -> None:
        """Show the end, with the last ``numbers``. Idempotent."""
        if numbers is not None:
            self.show(numbers)
        if self._is_open:
            self._is_open = False
            self._display.close(self._count, self._shown)


@contextmanager
def automatic(text: str, total: int, units: str) -> Iterator[Callable[[int], None]]:
    """A bar that nobody asked for: it appears after a second, and not at all without tqdm or beside the main thread,
    which may show one of its own. Yields a function that counts what was done."""
    may_show = threading.current_thread() is threading.main_thread() and find_spec("tqdm") is not None
    began, done = time.monotonic(), 0
    bar: Bar | None = None

    def advance(count: int) -> None:
        nonlocal bar, done
        count = min(count, total - done)  # tqdm shows no part of the total once it is exceeded
        done += count
        if bar is None and time.monotonic() - began >= _DELAY and may_show:
            bar = Bar(text, total, units, spent=time.monotonic() - began)
            count = done
        if bar is not None and bar.advance(count):
            bar.show()

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


class Ticking:
    """A bar of one thing that takes unknown time: the seconds go on by themselves until :meth:`close`. On a terminal
    and in a notebook only, and not without tqdm."""

    def __init__(self, text: str, units: str) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if find_spec("tqdm") is not None and sys.stderr is not None and is_drawn(sys.stderr):
            drawn = _Drawn(_notebook() or _terminal(), text, 1, units, 0.0, sys.stderr)
            self._thread = threading.Thread(target=self._run, args=(drawn,), name="central storage bar", daemon=True)
            self._thread.start()

    def _run(self, drawn: _Drawn) -> None:
        while not self._ended.wait(_EVERY):
            drawn.refresh()
        drawn.close(1, "")

    def close(self) -> None:
        """End the bar. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


@contextmanager
def above_bars(stream: TextIO) -> Iterator[None]:
    """What is written to ``stream`` in the block appears above the bars of this process, the user's too."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not hasattr(tqdm, "external_write_mode"):
        yield
        return
    with _LOCK, tqdm.external_write_mode(file=stream, nolock=True):
        yield


# --- where they are shown -----------------------------------------------------------------------------------------


def _display(
    text: str, total: int | None, units: str, spent: float, stream: TextIO, clock: Callable[[], float]
) -> _Display:
    if is_drawn(stream):
        return _Drawn(_notebook() or _terminal(), text, total, units, spent, stream)
    return _Lines(text, total, units, spent, stream, clock)


def is_drawn(stream: TextIO) -> bool:
    """Whether a bar on ``stream`` may be drawn over and over: on a terminal and in a notebook."""
    return _is_notebook() or stream.isatty()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def _notebook() -> Any:
    """The class of bars in a notebook; None elsewhere."""
    if not _is_notebook():
        return None
    from tqdm import notebook

    if notebook.IProgress is None:  # without ipywidgets, text that a notebook draws over and over
        return _terminal()
    return type("Bar", (notebook.tqdm_notebook,), _OWN | {"format_meter": staticmethod(_line_of_tqdm)})


def _terminal() -> Any:
    from tqdm import std

    return type("Bar", (std.tqdm,), _OWN | {"format_meter": staticmethod(_line_of_tqdm)})


def _line_of_tqdm(*given: Any, **named: Any) -> str:
    """What tqdm writes, without the space that it puts before the units of slow steps, as in ``2.89s/ steps``."""
    from tqdm import std

    return re.sub(r"(\d)s/ ", r"\1s/", std.tqdm.format_meter(*given, **named))


class _Drawn:
    """A bar of tqdm."""

    pause = _EVERY

    def __init__(self, bar: Any, text: str, total: int | None, units: str, spent: float, stream: TextIO) -> None:
        self._bar = bar(
            desc=text,
            total=total,
            unit=f" {units}" if units != "B" else units,
            unit_scale=units == "B",
            leave=None,  # only that of an outermost loop stays
            file=stream,
            **_width(stream),
            mininterval=0,
            miniters=0,
        )
        self._bar.start_t -= spent
        self._bar.last_print_t = self._bar.start_t  # tqdm counts the first rate from then on

    def show(self, count: int, shown: str) -> None:
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(count - self._bar.n)  # which draws it

    def refresh(self) -> None:
        """Show how long it has taken."""
        self._bar.refresh()

    def close(self, count: int, shown: str) -> None:
        self.show(count, shown)
        self._bar.close()


def _width(stream: TextIO) -> dict[str, Any]:
    """How wide a bar is: as the terminal, also after a change; 80 columns if the terminal says no size."""
    try:
        has_size = all(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError):  # no terminal, or a stream without a descriptor
        has_size = False
    return {"dynamic_ncols": True} if has_size else {"ncols": 80, "nrows": 24}


class _Lines:
    """Lines without control characters. A bar within another one, or one that nobody asked for, says its end only if it
    has said something before."""

    _open = 0

    def __init__(
        self,
        text: str,
        total: int | None,
        units: str,
        spent: float,
        stream: TextIO,
        clock: Callable[[], float],
    ) -> None:
        from tqdm import tqdm

        self._of, self._units, self._stream, self._clock = total, units, stream, clock
        self._text = f"{text}: " if text else ""
        self._time, self._size = tqdm.format_interval, tqdm.format_sizeof
        self._began = clock() - spent
        self._says_end = not _Lines._open and not spent
        _Lines._open += 1

    @property
    def pause(self) -> float:
        return max(_LINE_EVERY, _LINE_PART * (self._clock() - self._began))

    def show(self, count: int, shown: str) -> None:
        if self._clock() - self._began >= _LINE_EVERY:
            self._says_end = True
            self._write(count, shown, is_over=False)

    def close(self, count: int, shown: str) -> None:
        _Lines._open -= 1
        if self._says_end:
            self._write(count, shown, is_over=True)

    def _write(self, count: int, shown: str, *, is_over: bool) -> None:
        spent = self._clock() - self._began
        units = "" if self._units == "B" else f" {self._units}"
        amount = self._amount(count) if self._of is None else f"{self._amount(count)} of {self._amount(self._of)}"
        said = [f"{self._text}{amount}{units}"]
        rate = count / spent if spent > 0 else 0.0
        if is_over:
            said[0] += f" in {self._time(spent)}"
        elif self._of and rate:
            said[0] += f" ({count / self._of:.0%}), {self._time(max(0, self._of - count) / rate)} left"
        if rate:
            said.append(f"{self._amount(rate)}{units}/s")
        if shown:
            said.append(shown)
        try:
            self._stream.write(", ".join(said) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            self._says_end = False

    def _amount(self, count: float) -> str:
        if self._units == "B":
            return f"{self._size(count)}B"
        return str(count) if isinstance(count, int) else f"{count:.3g}" if count < 100 else f"{count:.0f}"
