"""What functions of many tests ask in a replica. They travel to the workers by value, with what they call."""

from __future__ import annotations

import central_storage as cs

__all__ = ["context", "replica"]


def context() -> cs.ReplicaContext:
    """The context of the replica that calls it."""
    found = cs.get_replica_context()
    assert found is not None
    return found


def replica() -> int:
    """The number of the replica that calls it."""
    return int(context().replica_id_in_sync_group)
