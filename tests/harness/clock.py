"""A clock for a module that asks ``time.monotonic``."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """The time, which goes on only as a test says. It takes the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now
