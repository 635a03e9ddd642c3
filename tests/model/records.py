"""What the processes say to each other, and the small values in memory."""

from __future__ import annotations

from typing import NamedTuple

#: Runs that the client sends ahead in a series.
LOOKAHEAD = 2
#: The steps whose bodies the account keeps: more than a client may ask for. The code has 32.
STEPS = 4
#: The bases of a worker. The code has 8.
BASES = 2
#: Kinds of steps: f, g and a step that comes as messages.
KINDS = 3
#: Pieces in which a commit changes the variables, each with its undo.
PIECES = 2


# --- by the client ----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A run for one worker. ``series``: the number of the first run of its series; 0 if it is on its own. ``kind``:
    plain, ask (the function asks the server), note (it brings what no mark says) or fail (replica 1 raises)."""

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


class Offer(NamedTuple):
    """Of the mailbox with this number."""

    mailbox: int


class Ask(NamedTuple):
    run: int
    series: int
    client: str
    replica: int
    incarnation: int


class Return(NamedTuple):
    """``function`` and ``kind`` stand for all notes."""

    run: int
    series: int
    client: str
    replica: int
    incarnation: int
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
    """``workers``: incarnations by replica. ``last_run``: of an earlier client."""

    client: str
    workers: tuple[int, ...]
    last_run: int


class Appoint(NamedTuple):
    """Server to supervisor: introduce this client to the workers. Back: they know it."""

    client: str


class Registered(NamedTuple):
    incarnation: int


class Accepted(NamedTuple):
    mailbox: int


class Answer(NamedTuple):
    run: int
    failed: bool


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


# --- by the supervisor ------------------------------------------------------------------------------------------------


class Introduce(NamedTuple):
    """To a worker: this client may send it runs from now on."""

    client: str


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
    | Offer
    | Ask
    | Return
    | Dropped
    | Welcome
    | Appoint
    | Registered
    | Accepted
    | Answer
    | StepFinished
    | RunFinished
    | Cancelled
    | WorkerRestarted
    | Introduce
    | Died
    | Left
    | Serving
)


# --- values in memory -------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """What a replica brings. ``read``: how many updates each piece of the variables had when the replica read it."""

    client: str
    run: int
    replica: int
    argument: int
    read: tuple[int, ...]


class Update(NamedTuple):
    """One update of one piece: which run the server means, with which function and count, from which gradients."""

    client: str
    run: int
    function: str
    t: int
    gradients: tuple[Gradient | None, ...]
