"""Ctrl-C, or another signal, at every point at which it may come."""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from types import CodeType, FrameType
from typing import Any

__all__ = ["pressed_everywhere"]


def pressed_everywhere(
    call: Callable[[], object], every: int = 1, signum: int = signal.SIGINT
) -> Iterator[tuple[str, bool]]:
    """Call ``call`` again and again. Each time the signal comes at another of the points at which Python looks for
    signals, at every one or at each ``every``-th: where that was, and whether ``call`` raised KeyboardInterrupt. Ends
    when a call has fewer points."""
    for number in count(1, every):
        pressed = _Presser(number, signum)
        is_raised = False
        gc.disable()  # Python drops what is raised in a callback of the garbage collector
        try:
            sys.settrace(pressed.begin)
            try:
                call()
            finally:
                sys.settrace(None)
                gc.enable()
        except KeyboardInterrupt:
            is_raised = True
        if not pressed.where:
            return
        yield pressed.where, is_raised


class _Presser:
    """A trace function that raises a signal at the point of this number."""

    def __init__(self, number: int, signum: int) -> None:
        self._left = number
        self._signum = signum
        self.where = ""

    def begin(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """Trace a function that is being called."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return None if self.where else self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "opcode" and not self.where and frame.f_lasti in _points(frame.f_code):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(self._signum)
        return self._step


@cache
def _points(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions before which Python looks for signals: after a call, at the begin of a function
    and of another round of a loop."""
    points, is_point = set[int](), False
    for instruction in dis.get_instructions(code):
        if is_point:
            points.add(instruction.offset)
        name = instruction.opname
        is_point = name == "RESUME" or (name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"))
        if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name:
            points.add(instruction.argval)
    return frozenset(points)
