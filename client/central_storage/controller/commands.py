"""What the controller's core has its owner do: the commands that follow from an event."""

from __future__ import annotations

from cs_proto import messages
from cs_proto.frozen import frozen
from cs_proto.messages import RunFinished, Worker
from cs_proto.records import Record

__all__ = [
    "Command",
    "Connect",
    "Deliver",
    "End",
    "Fail",
    "Interrupt",
    "NameWait",
    "OfferMailbox",
    "Post",
    "Raise",
    "Refuse",
    "worker_name",
]


def worker_name(replica: int) -> bytes:
    """The worker of a replica as the peer of a :class:`Post`.

    >>> worker_name(1)
    b'w1'
    """
    return b"w%d" % replica


@frozen
class Post:
    """Send ``message`` to ``peer``. A Run that has to bring its function is without it: the bytes ``function`` are to
    be placed first."""

    peer: bytes
    message: Record
    function: bytes | None = None


@frozen
class Connect:
    """Connect to this worker, which is in the place of one that died."""

    worker: Worker


@frozen
class OfferMailbox:
    """Offer the server a mailbox: it is in the place of one that died."""


@frozen
class Interrupt:
    """Have the worker of this replica notice that its run is cancelled."""

    replica: int


@frozen
class NameWait:
    """Tell the user what has been waited for, for so many seconds. ``is_run``: it is the end of a run."""

    seconds: float
    what: str
    is_run: bool


@frozen
class Deliver:
    """Read what came of this run, and say it to :meth:`ControllerCore.delivered`."""

    finished: RunFinished


@frozen
class Fail:
    """Raise an error of this kind in the script. Not the error itself: what keeps one keeps its traceback."""

    kind: type[BaseException]
    message: str = ""


@frozen
class Raise:
    """Raise in the script what a handler of a signal has raised: the runs that it cancelled are over."""

    error: Exception


@frozen
class Refuse:
    """Raise in the script what the server refused a message with that has no number."""

    error: messages.Error


@frozen
class End:
    """The service is over for this reason: let go of it."""

    reason: str


Command = Post | Connect | OfferMailbox | Interrupt | NameWait | Deliver | Fail | Raise | Refuse | End
