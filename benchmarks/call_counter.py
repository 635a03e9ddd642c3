"""Counts the functions that a process calls. ``hooks/sitecustomize.py`` puts it into each process of a service."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

#: The directory of what the processes count.
DIRECTORY = "CS_CALLS"


class CallCounter:
    """Counts calls in the thread that starts it, by the name of the function."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to count."""
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if event == "call":
            self.calls[f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name})"] += 1
        elif event == "c_call":
            self.calls[f"C: {getattr(called, '__qualname__', called)}"] += 1


def answer_signals() -> None:
    """Begin to count at the first SIGUSR2, and write the counts to a file at the second. A file PID.begun or PID.json
    in the directory says that it has happened."""
    counter = CallCounter()
    directory = Path(os.environ[DIRECTORY])

    def answer(*of: object) -> None:
        if sys.getprofile() is None:
            (directory / f"{os.getpid()}.begun").touch()
            counter.start()
        else:
            counter.stop()
            written = directory / f"{os.getpid()}.writing"
            written.write_text(json.dumps(counter.calls))
            written.rename(written.with_suffix(".json"))

    signal.signal(signal.SIGUSR2, answer)
