"""What a manager does when a checkpoint cannot be saved."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from cs_proto.errors import CheckpointSaveError, InvalidArgumentError

__all__ = ["SAVE_FAILED", "Failures", "Policy"]

_log = logging.getLogger("central_storage.train")

Policy = Literal["raise", "continue", "stop"]

#: The exit code of a script that ends because a checkpoint could not be saved.
SAVE_FAILED = 6


class Failures:
    """Counts the saves that failed, and does as the policy says.

    Args:
        policy: ``"raise"``: the error is raised. ``"continue"``: a warning names it, and the training goes on.
            ``"stop"``: the script ends by ``SystemExit`` with exit code 6.

    Raises:
        InvalidArgumentError: There is no such policy.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in get_args(Policy):
            raise InvalidArgumentError(f"if_save_fails must be one of {', '.join(get_args(Policy))}, not {policy!r}")
        self.policy = policy
        #: The number of saves that failed.
        self.count = 0
        #: The newest error.
        self.last: CheckpointSaveError | None = None

    def handle(self, error: CheckpointSaveError) -> None:
        """Count ``error``; return if the training is to go on."""
        self.count += 1
        self.last = error
        if self.policy == "continue":
            _log.warning("a checkpoint was not saved (%d by now), and the training goes on: %s", self.count, error)
            return
        if self.policy == "raise":
            raise error
        _log.error("a checkpoint was not saved, and the training stops: %s", error)
        raise SystemExit(SAVE_FAILED) from error
