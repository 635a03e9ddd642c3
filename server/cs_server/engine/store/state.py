"""The state that all parts of the engine work on, and the configuration of a server.

Most modules of the engine are functions over a :class:`State`: its tables hold all that the server knows, and commands
are appended to ``out``. A function without a leading underscore is for other modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cs_proto.frozen import frozen
from cs_proto.messages import AssignAll, Error, RunId
from cs_proto.pace import NAME_AFTER
from cs_server.events import Command, Needed, Write

from .address_budget import Addresses
from .control_log import Control
from .index import Index
from .step_rate import StepRate
from .tables import Tables

__all__ = ["Config", "State", "opened"]


@frozen
class Config:
    """The configuration, which does not change while a server runs. ``addresses`` are the lengths of segments. The
    server began at ``started``, on the clock of ``now``. A worker that keeps others waiting and was silent for
    ``step_timeout`` seconds is ended; None: never. A wait is named after ``name_after`` seconds."""

    replicas: int
    parameter_device: str
    addresses: Addresses
    pid: int
    started: float
    step_timeout: float | None = None
    name_after: float = NAME_AFTER


@dataclass
class State:
    """What the server knows, and the commands of the current event."""

    config: Config
    tables: Tables
    index: Index
    #: The numbers of all replicas.
    replicas: range
    rate: StepRate
    out: list[Command] = field(default_factory=list)
    #: Needs of the current event that were refused: an operation that has one fails with that error.
    refused: dict[Needed, Error] = field(default_factory=dict)
    #: Of the last runs: why they are not captured, or that they are (:mod:`.reasons`). It is only counted, so a server
    #: that takes over need not know it.
    reasons: dict[RunId, int] = field(default_factory=dict)
    #: The last AssignAll and its operations, which are asked for when it is checked and when it is committed. They
    #: follow from the tables, because variables and slots do not move.
    decided: tuple[AssignAll, tuple[Write, ...]] | None = None

    def rollback(self) -> None:
        """Drop the changes and the commands of the current event."""
        with self.index.rolled_back():
            self.tables.rollback()
        self.out.clear()
        self.decided = None


def opened(config: Config, control: Control) -> State:
    """The state that ``control`` holds, or an empty one. Raises :class:`~.control_log.ControlDamaged`."""
    tables = Tables(control, config.replicas)
    rate = StepRate(config.started, tables.tally.runs)
    return State(config, tables, Index(tables), range(config.replicas), rate)
