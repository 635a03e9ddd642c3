"""Exceptions as :class:`~cs_proto.messages.Error` records: what any process may say about a failure of its own.

A code of the closed table and text: no argument of the exception travels, so nothing here needs to know the
vocabulary of values, and the receiver can raise every such code with the message alone.
"""

from __future__ import annotations

from .errors import code_of
from .messages import Error

__all__ = ["TEXT_LENGTH", "error_of"]

#: Longest message and longest traceback, in characters. Of a traceback the end is kept, which names the failure.
TEXT_LENGTH = 64 * 1024

# Exceptions of these classes cannot be built from a message alone, so their base stands for them.
_BUILT_FROM_PARTS = ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError")


def error_of(exception: BaseException, replica: int = -1, merge_index: int = 0, traceback: str = "") -> Error:
    """``exception`` as data; ``replica`` -1 where it belongs to none. Text that is not Unicode is escaped."""
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


def _message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:  # noqa: BLE001  (a class of the user; its failure must not hide the one to report)
        return f"<no message: str() of this {type(exception).__name__} raised {type(error).__name__}>"


def _unicode(text: str) -> str:
    # File names that are not UTF-8 reach messages as lone surrogates, which no encoder takes.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
