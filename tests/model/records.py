"""What the processes say to each other, and the small values in memory."""

from __future__ import annotations

from typing import NamedTuple

#: Runs that the client sends ahead in a series.
LOOKAHEAD = 2
#: Slots of a board. Any number above LOOKAHEAD + 1 will do; the design has 64.
SLOTS = 8
#: The first run of session s is SESSION * s + 1. The design has 2**40.
SESSION = 1000
#: Pieces in which a commit changes the variables, each with its undo.
PIECES = 2


# --- by the client ----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A run for one worker. ``series``: the number of the first run of its series; 0 if it is on its own. ``kind``:
    plain, ask (the function asks the server), fail (replica 1 raises) or refused (the server refuses a new base)."""

    run: int
    series: int
    client: str
    function: str
    kind: str
    argument: int


class Hello(NamedTuple):
    client: str


class Cancel(NamedTuple):
    """Give up the first run that is not over among ``run`` to ``run + later``."""

    run: int
    later: int


class Resent(NamedTuple):
    run: int
    series: int
    replica: int


# --- by a worker ------------------------------------------------------------------------------------------------------


class Register(NamedTuple):
    replica: int
    incarnation: int


class Ask(NamedTuple):
    run: int
    series: int
    replica: int


class Return(NamedTuple):
    """``base``: 0, or the number by which the server shall keep it. ``function`` stands for all notes."""

    run: int
    series: int
    replica: int
    incarnation: int
    base: int
    function: str
    kind: str
    failed: bool
    value: int


class Dropped(NamedTuple):
    """The worker carries out nothing more of a client that has left."""

    client: str
    replica: int


# --- by the server ----------------------------------------------------------------------------------------------------


class Welcome(NamedTuple):
    """``runs``: the number before the first run of the session. ``workers``: incarnations by replica."""

    client: str
    runs: int
    workers: tuple[int, ...]


class Registered(NamedTuple):
    incarnation: int


class Answer(NamedTuple):
    run: int
    failed: bool


class SayInFull(NamedTuple):
    """The server does not hold the base that the slot of this run names."""

    run: int


class StepFinished(NamedTuple):
    run: int
    failed: bool


class RunFinished(NamedTuple):
    run: int
    failed: bool
    values: tuple[int, ...]


class Cancelled(NamedTuple):
    """The server has heard the Cancel, so the workers may hear it."""

    run: int


class WorkerRestarted(NamedTuple):
    replica: int
    incarnation: int
    run: int


class Free(NamedTuple):
    """The board of this incarnation is not read any more."""

    replica: int
    incarnation: int


# --- by the supervisor ------------------------------------------------------------------------------------------------


class Died(NamedTuple):
    replica: int
    incarnation: int


class Left(NamedTuple):
    client: str


class Serving(NamedTuple):
    pass


Record = (
    Run
    | Hello
    | Cancel
    | Resent
    | Register
    | Ask
    | Return
    | Dropped
    | Welcome
    | Registered
    | Answer
    | SayInFull
    | StepFinished
    | RunFinished
    | Cancelled
    | WorkerRestarted
    | Free
    | Died
    | Left
    | Serving
)


# --- values in memory -------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """What a replica brings. ``read``: how many updates each piece of the variables had when the replica read it."""

    run: int
    replica: int
    argument: int
    read: tuple[int, ...]


class Update(NamedTuple):
    """One update of one piece: which run the server means, with which plan and count, from which gradients."""

    run: int
    function: str
    t: int
    gradients: tuple[Gradient | None, ...]
