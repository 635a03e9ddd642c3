"""Named places in the code where a test makes something happen, such as killing a process between two lines.

``failpoint("server.heard")`` is a call of an empty function unless ``CS_FAILPOINTS`` is set when this module is
imported. Its items are separated by semicolons::

    CS_FAILPOINTS="server.commit=kill@3;worker.return[1]=sleep(0.5)"

``name=action@n`` acts when a process reaches the place for the n-th time (default: the first). ``name[r]`` means only
the process of replica r, and the name ``*`` means every place. The actions ``kill``, ``stop`` and ``segv`` send
SIGKILL, SIGSTOP and SIGSEGV to the process itself; ``exit0`` ends it at once with code 0; ``raise`` raises
:class:`FailpointError`; ``sleep(seconds)`` sleeps; ``note`` does nothing. If ``CS_FAILPOINTS_DIR`` names a directory,
an item acts only once, in the first process that reaches it, and leaves a file with its text there; ``note`` leaves a
file with the name of the place. Without that directory, an item that kills a process also kills its replacements.

Only tests set these variables.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable

from cs_proto.frozen import frozen

__all__ = ["FAILPOINTS", "STOPS_IN_PROGRAMS", "FailpointError", "failpoint", "failpoints_of"]

#: Every place, by the role whose process reaches it.
FAILPOINTS = (
    # server
    "server.heard",  # a message has been decoded, and not acted on
    "server.decided",  # the engine has recorded an event; none of its commands has been carried out
    "server.commit",  # the commit counter is odd; no byte of a variable has changed
    "server.kept",  # the old values of a piece of a commit are kept; nothing of it is overwritten
    "server.phase",  # a phase of a commit is done, and not recorded
    "server.pass",  # an instruction of a program is done
    "server.looked",  # the gradients of a commit with an alarm have been looked at, and the alarm is still set
    "server.committed",  # all bytes have changed; the engine has not been told
    "server.send",  # before a message is sent
    # worker
    "worker.run",  # a run has arrived; the function has not been called
    "worker.ask",  # before a question is sent
    "worker.return",  # the function has returned; nothing has been sent
    "worker.returned",  # the return has been sent
    # a script that saves a checkpoint
    "save.copied",  # its values have been copied; the thread has written nothing
    "save.draft",  # the draft is open, and empty
    "save.write",  # before a part of an array, or the header, is written
    "save.sync",  # the content is complete; nothing is synced
    "save.replace",  # before a draft takes the name of a file, which it replaces
    "save.take",  # before a draft takes a new name
    "save.taken",  # the file has its name; the directory is not synced
    "save.saved",  # the checkpoint is on the disk; the draft's name is still there
    "save.checked",  # a manager has read the checkpoint back; older ones are not deleted
    "save.delete",  # before a manager deletes an older checkpoint
)

_ITEM = re.compile(
    r"(?P<name>[^=\[]+)(?:\[(?P<rank>\d+)\])?=(?P<action>[^@(]+)(?:\((?P<seconds>[0-9.]+)\))?(?:@(?P<nth>\d+))?"
)
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
_ACTIONS = {*_SIGNALS, "exit0", "raise", "sleep", "note"}


class FailpointError(Exception):
    """Raised by the action ``raise``."""


@frozen
class _Item:
    text: str
    name: str
    action: str
    seconds: float
    nth: int


def failpoints_of(spec: str, directory: str = "", rank: str = "") -> Callable[[str], None]:
    """The function that :func:`failpoint` is if ``CS_FAILPOINTS`` is ``spec``.

    ``directory`` is the value of ``CS_FAILPOINTS_DIR``, ``rank`` that of ``RANK`` ("" if this process is not a worker).
    Raises ValueError if ``spec`` is malformed or names a place or an action that does not exist.
    """
    items: dict[str, list[_Item]] = {}
    for text in filter(None, (piece.strip() for piece in spec.split(";"))):
        item, wanted = _item(text)
        if item.action == "note" and not directory:
            raise ValueError(f"failpoint {text!r}: note needs a directory to leave its file in")
        if wanted is None or wanted == rank:
            for name in FAILPOINTS if item.name == "*" else (item.name,):
                items.setdefault(name, []).append(item)
    hits = dict.fromkeys(items, 0)

    def reached(name: str) -> None:
        if name not in hits:
            if name not in FAILPOINTS:
                raise ValueError(f"the failpoint {name!r} is not in cs_runtime.failpoints.FAILPOINTS")
            return
        hits[name] += 1
        for item in items[name]:
            if hits[name] == item.nth:
                if item.action == "note":
                    _claimed(directory, name)
                elif not directory or _claimed(directory, item.text):
                    _act(item, name)

    return reached


def _item(text: str) -> tuple[_Item, str | None]:
    """The item, and the rank that it is for; None means all."""
    found = _ITEM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"failpoint {text!r}: expected name=action or name[rank]=action, each optionally followed by @n"
        )
    name, action = found["name"], found["action"]
    if name != "*" and name not in FAILPOINTS:
        raise ValueError(f"failpoint {text!r}: there is no {name!r}, only {_listed(FAILPOINTS)}")
    if action not in _ACTIONS or (action == "sleep") != (found["seconds"] is not None):
        raise ValueError(f"failpoint {text!r}: the actions are {_listed(sorted(_ACTIONS))}, sleep with (seconds)")
    return _Item(text, name, action, float(found["seconds"] or 0), int(found["nth"] or 1)), found["rank"]


def _claimed(directory: str, text: str) -> bool:
    """Claim the item for this process. Returns whether no other process had claimed it."""
    try:
        os.close(os.open(os.path.join(directory, text), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _act(item: _Item, name: str) -> None:
    if item.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[item.action])
    elif item.action == "exit0":
        os._exit(0)
    elif item.action == "raise":
        raise FailpointError(f"the failpoint {name} was told to raise")
    else:
        time.sleep(item.seconds)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


#: Whether the environment sets "server.pass": then Python does, one by one, what compiled code would do in one call.
STOPS_IN_PROGRAMS = any(name in os.environ.get("CS_FAILPOINTS", "") for name in ("server.pass", "*="))

if spec := os.environ.get("CS_FAILPOINTS"):
    failpoint = failpoints_of(spec, os.environ.get("CS_FAILPOINTS_DIR", ""), os.environ.get("RANK", ""))
else:

    def failpoint(name: str) -> None:
        """Called when the process reaches the place ``name``, one of :data:`FAILPOINTS`."""
