"""Reads the memory of a service on the same host: values as of one commit, without a question to the server.

The control segment has two counters. The server increments the first before and after it changes variables, so the
counter is odd meanwhile. It increments the second whenever the place of a variable may pass to another variable. A copy
is valid if both counters are the same before and after copying, and the first is even. This requires a processor whose
loads and stores are seen in order.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cs_proto import segment_names
from cs_proto.arrays import Array, Location
from cs_proto.errors import ShutdownError
from cs_proto.messages import Variable
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport.supervisor_link import SupervisorLink

__all__ = ["SeqlockReader", "open_sight"]

_ORDERED = ("x86_64", "AMD64")
# Usually one commit disturbs a read. If commits follow each other closely, the server has to be asked.
_TRIES = 2


class SeqlockReader:
    """Reads the requested variables in place."""

    def __init__(self, counters: np.ndarray, memory: Callable[[Array], Mapping]) -> None:
        """``counters``: uint64 [2], changed by the server. ``memory`` returns the segment that an array lies in."""
        self._counters = counters
        self._memory = memory
        self._arrays: dict[str, Array] = {}
        self._layout = -1

    @property
    def layout(self) -> int:
        """A counter that changes when the place of a variable may pass to another variable."""
        return int(self._counters[1])

    def knows(self, names: Iterable[str]) -> bool:
        """Whether the places of these variables are known."""
        return self._layout == self.layout and self._arrays.keys() >= set(names)

    def learn(self, layout: int, variables: Iterable[Variable]) -> None:
        """Remember the places of these variables. They hold as long as ``layout`` does, which was read before the
        question."""
        if layout != self._layout:
            self._arrays.clear()
            self._layout = layout
        self._arrays |= {variable.spec.name: variable.array for variable in variables}

    def read(self, names: Sequence[str]) -> list[np.ndarray] | None:
        """Copies of their values as of one commit; None if the server has to be asked."""
        for _ in range(_TRIES):
            before = self._counters.tolist()
            if before[0] % 2 or before[1] != self._layout:
                continue
            values = [np.array(self._view(self._arrays[name])) for name in names]
            if self._counters.tolist() == before:
                return values
        return None

    def _view(self, array: Array) -> np.ndarray:
        return self._memory(array).view(array)


def open_sight(connection: SupervisorLink) -> SeqlockReader | None:
    """A reader for the service at the other end of ``connection``. None if its memory cannot be mapped here, or cannot
    be read without asking."""
    if platform.machine() not in _ORDERED:
        return None

    def memory(array: Array) -> Mapping:
        mapping = connection.segment_of(array)
        if not isinstance(mapping, Mapping):
            raise ShutdownError(connection.carried_because)
        return mapping

    try:
        counters = Array("uint64", (2,), Location(segment_names.CONTROL, 0))
        return SeqlockReader(memory(counters).view(counters), memory)
    except ShutdownError:
        return None
