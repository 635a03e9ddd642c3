"""Exceptions as :class:`~cs_proto.messages.Error` records, with which a process reports a failure of its own.

A record has a code of the closed table and text. The arguments of the exception are not sent, so this module needs no
vocabulary of values, and the receiver can raise every such code from the message alone.
"""

from __future__ import annotations

from .errors import code_of
from .messages import Died, Error, Worker
from .printable import printable

__all__ = ["TEXT_LENGTH", "error_of", "last_lines", "pid_of", "text_of"]

#: Longest message and longest traceback, in characters. A long traceback keeps its end, which names the failure.
TEXT_LENGTH = 64 * 1024

# Exceptions of these classes cannot be built from a message alone, so they are sent as their base class.
_BUILT_FROM_PARTS = ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError")


def error_of(exception: BaseException, replica: int = -1, merge_index: int = 0, traceback: str = "") -> Error:
    """``exception`` as data; ``replica`` is -1 if it belongs to none. Text that is not Unicode is escaped."""
    kind = type(exception)
    code = code_of(kind)
    return Error(
        exception="UnicodeError" if code in _BUILT_FROM_PARTS else code,
        message=_unicode(_message(exception)[:TEXT_LENGTH]),
        arguments=None,
        origin=_unicode(f"{kind.__module__}:{kind.__qualname__}"),
        replica=replica,
        merge_index=merge_index,
        traceback=_unicode(traceback[-TEXT_LENGTH:]),
    )


def text_of(error: Error) -> str:
    """The message of a peer's error, as a terminal may show it."""
    return printable(error.message, lines=True)


def pid_of(who: Died | Worker) -> str:
    """The pid of a process, with its machine if that is not the machine of the service.

    >>> pid_of(Worker(3, 1, 91, "cpu:3", "10.0.0.7")), pid_of(Worker(0, 1, 12, "cpu:0"))
    ('pid 91 on 10.0.0.7', 'pid 12')
    """
    return f"pid {who.pid}{f' on {who.node}' if who.node else ''}"


def last_lines(died: Died) -> str:
    """The last output of a process that died, as the end of an error message."""
    return f". Its last lines:\n{printable(died.log, lines=True)}" if died.log else ""


def _message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:  # noqa: BLE001  (a class of the user; its failure must not hide the one to report)
        return f"<no message: str() of this {type(exception).__name__} raised {type(error).__name__}>"


def _unicode(text: str) -> str:
    # File names that are not UTF-8 appear in messages as lone surrogates, which UTF-8 cannot encode.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
