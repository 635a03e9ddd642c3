"""Whether a descriptor has input."""

from __future__ import annotations

import select

__all__ = ["is_readable"]


def is_readable(descriptor: int, timeout: float | None) -> bool:
    """Whether ``descriptor`` has input, or its other end has hung up, within ``timeout`` seconds (None: no limit).
    Unlike ``select.select`` it takes descriptors above 1023, too."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))
