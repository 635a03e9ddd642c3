"""The options for the death of a process of a service, as one checked value.

``CentralStorageStrategy`` and ``cs-launch`` make it from the user's options; the supervisor and the server act on it.
"""

from __future__ import annotations

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen

__all__ = ["Recovery"]

_MOST_RESTARTS = 1_000_000
_LONGEST_STEP = 1e6


@frozen
class Recovery:
    """``max_restarts`` is the total number of restarts of a service's processes. ``server_recovery``: the server may be
    restarted, too. ``step_timeout``: a replica that others or the script wait for is killed and restarted if it has
    sent nothing for this many seconds, which must be more than it needs from one merge point to the next; None means
    never.

    Raises ConfigurationError for invalid values.
    """

    max_restarts: int = 3
    server_recovery: bool = True
    step_timeout: float | None = None

    def __post_init__(self) -> None:
        most, timeout = self.max_restarts, self.step_timeout
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= _MOST_RESTARTS:
            raise ConfigurationError(f"max_restarts must be an int from 0 to {_MOST_RESTARTS}, not {most!r}")
        if not isinstance(self.server_recovery, bool):
            raise ConfigurationError(f"server_recovery must be True or False, not {self.server_recovery!r}")
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < _LONGEST_STEP):
            raise ConfigurationError(
                f"step_timeout must be None or a number of seconds, more than 0 and less than {_LONGEST_STEP:g}, not "
                f"{timeout!r}"
            )
