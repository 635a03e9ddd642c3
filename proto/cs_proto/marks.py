"""What the mark of a worker says: a Return that equals an earlier one but for its run and its value.

The number of the mark is that of the run. Its bytes are the number of the *base* and the body of the value. The base is
the last run whose Return the worker has sent to this server as a message.
"""

from __future__ import annotations

import struct

from .messages import ApplyPoint, Return, Value
from .records import altered

__all__ = ["BASE_NBYTES", "is_base", "is_of", "marked", "returned"]

_BASE = struct.Struct("<Q")
#: Bytes of the number of the base.
BASE_NBYTES = _BASE.size


def is_base(record: Return) -> bool:
    """Whether a Return that is sent as a message is the base of the marks that follow: small, and of a step that may
    repeat. Another Return leaves the base as it is."""
    if len(record.run) > 1 or record.error is not None or record.changes or record.value is None:
        return False
    if record.value.arrays or not all(type(note) is ApplyPoint for note in record.notes):
        return False
    return not any(update.sparse for note in record.notes if isinstance(note, ApplyPoint) for update in note.updates)


def marked(base: int, value: bytes) -> bytes:
    """The bytes of a mark.

    >>> marked(5, b"value")
    b'\\x05\\x00\\x00\\x00\\x00\\x00\\x00\\x00value'
    """
    return _BASE.pack(base) + value


def is_of(base: Return, body: bytes) -> bool:
    """Whether a mark with these bytes names ``base`` as its base."""
    return len(body) >= BASE_NBYTES and _BASE.unpack_from(body)[0] == base.run[0]


def returned(base: Return, run: int, body: bytes) -> Return:
    """The Return that the mark of ``run`` stands for. Its bytes name ``base``."""
    return altered(base, run=(run,), value=Value(body[BASE_NBYTES:], ()))
