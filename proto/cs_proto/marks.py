"""What the mark of a worker says: a Return that equals an earlier one but for its run and its value.

The number of the mark is that of the run. Its bytes are the number of the *base* and the body of the value. The base is
the last run whose Return the worker has sent to this server as a message.
"""

from __future__ import annotations

import struct

from .errors import PeerProtocolError
from .messages import Return, Value
from .records import altered

__all__ = ["BASE_NBYTES", "following", "marked", "returned"]

_BASE = struct.Struct("<Q")
#: Bytes of the number of the base.
BASE_NBYTES = _BASE.size


def marked(base: int, value: bytes) -> bytes:
    """The bytes of a mark.

    >>> marked(5, b"value")
    b'\\x05\\x00\\x00\\x00\\x00\\x00\\x00\\x00value'
    """
    return _BASE.pack(base) + value


def returned(base: Return | None, run: int, body: bytes) -> Return:
    """The Return that a mark stands for. Raises PeerProtocolError if ``base`` is not its base."""
    if base is None or len(body) < BASE_NBYTES or _BASE.unpack_from(body)[0] != base.run[0]:
        raise PeerProtocolError(f"the mark of run {run} names a base that is not the last Return of this worker")
    return following(base, run, body)


def following(base: Return, run: int, body: bytes) -> Return:
    """As :func:`returned`, for a mark whose base is known to be that of ``base``."""
    return altered(base, run=(run,), value=Value(body[BASE_NBYTES:], ()))
