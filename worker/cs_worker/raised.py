"""What the user's code raised, as an Error, whatever it is: a replica always has an answer."""

from __future__ import annotations

from central_storage.vocabulary import to_error
from cs_proto.arena import Arena
from cs_proto.failures import error_of
from cs_proto.messages import Error

from .placing import Placing

__all__ = ["raised_error"]


def raised_error(raised: BaseException, replica: int, merge_index: int, arena: Arena) -> Error:
    """``raised`` with its arguments and the user's traceback; without what cannot be told of it."""
    try:
        return to_error(raised, replica, merge_index, Placing(arena))
    except Exception as untold:  # noqa: BLE001  (the user's class may raise whatever it likes when asked for its text)
        substitute = RuntimeError(
            f"the replica function raised a {type(raised).__name__} of which nothing can be told, since that raises a "
            f"{type(untold).__name__}"
        )
        return error_of(substitute, replica, merge_index)
