"""What a process has noted, decoded."""

from __future__ import annotations

from central_storage.timeline.rings import Moment, Ring

__all__ = ["read"]


def read(ring: Ring) -> tuple[list[Moment], int]:
    """The moments since the last call, and how many were overwritten before they could be read."""
    copied, lost = ring.copied()
    return ring.decoded(copied), lost
