"""What becomes of a service when one of its processes dies: the options of that, as one checked value.

``CentralStorageStrategy`` and ``cs-launch`` make it from what the user says; the supervisor and, by its command line,
the server act on it.
"""

from __future__ import annotations

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen

__all__ = ["Recovery"]

_MOST_RESTARTS = 1_000_000
_LONGEST_STEP = 1e6


@frozen
class Recovery:
    """``max_restarts``: how often, in all, processes of the service are started again. ``server_recovery``: the server
    is one of them. ``step_timeout``: a replica that others, or the script, wait for is killed and started again when
    nothing was heard of it for so many seconds, which must be more than it needs from one merge point to the next; None
    never.

    Raises ConfigurationError for values that make no sense.
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
