"""Processes that a test plays, introduced as a supervisor does it. Their names say which processes they are."""

from __future__ import annotations

from cs_proto.messages import PROTOCOL, Introduce

__all__ = ["introduction"]


def introduction(name: bytes) -> Introduce:
    """The introduction of the process with this name: ``w0.1``, ``c01`` for a controller or ``o7f`` for an observer,
    whose client follows the first letter."""
    kind, rest = name[:1], name[1:].decode()
    if kind == b"w":
        rank, incarnation = rest.split(".")
        return Introduce(PROTOCOL, "worker", int(rank), int(incarnation), 1, "", name)
    return Introduce(PROTOCOL, "controller" if kind == b"c" else "observer", 0, 1, 1, rest, name)
