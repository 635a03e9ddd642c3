"""Spans: names that users give to stretches of their code, for a timeline."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from cs_proto.errors import InvalidArgumentError
from cs_proto.step_times import BEGINS, ENDS
from cs_runtime.trace import note_span

from .public_objects import Closed

__all__ = ["Span", "span"]


def span(name: str) -> Span:
    """Give a name to a block of code, which a timeline then shows as a slice: in a replica function or in the script.

    Spans may lie within each other, and several threads may have some at a time. One costs about 2 µs while a
    timeline is recorded, and next to nothing at other times. A service keeps 126 names for each process; further
    names become "other spans".

    Args:
        name: A short text without values that change, of which 63 bytes are kept.

    Returns:
        A context manager, which can be used any number of times.

    Raises:
        InvalidArgumentError: The name is no text, or is empty (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> with cs.span("forward"):
        ...     with cs.span("first layer"):
        ...         total = sum(range(3))
        >>> total
        3
    """
    return Span(name)


class Span(Closed):
    """A named block of code. Made by :func:`span`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"the name of a span is a text that is not empty, not {name!r:.60}")
        self._name = name

    def __enter__(self) -> Self:
        note_span(self._name, BEGINS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        note_span(self._name, ENDS)
