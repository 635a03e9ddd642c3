"""Captured steps as the control store has them: as the messages of their replicas."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cs_proto import codec, marks
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Return
from cs_proto.records import replace

from .store.account import Account
from .store.control_log import ControlDamaged
from .store.tables import CapturedStep, joined, parted

__all__ = ["returned", "with_account"]


def with_account(
    place: tuple[int, int], step: CapturedStep, returns: Sequence[Return], account: Account, now: float
) -> dict[tuple[int, int], CapturedStep]:
    """The captured steps, by place, that take the place of ``step`` and the steps of the account. ``returns`` are those
    of one of them."""
    first, series = returned(step.heard[0]).run[0], returns[0].series
    span = 1 + returns[0].lookahead if series else 1
    made = {place: replace(step, account=0)}
    for number in range(max(1, account.begun + 1 - span), account.begun + 1):
        run = first + number
        bodies = account.bodies(run)
        brought = [marks.returned(record, run, bodies[record.replica]) for record in returns]
        heard = tuple([joined(codec.encode(record)) for record in brought])
        made[place[0], run % span if series else 0] = CapturedStep(step.count + number, (now,) * len(heard), heard)
    return made


def returned(message: bytes) -> Return:
    """The Return in a message of a captured step. Raises ControlDamaged if it does not read back."""
    try:
        record = parted(message)
    except (PeerProtocolError, ValueError, struct.error) as error:
        raise ControlDamaged(f"a message in the control store does not read back: {error}") from error
    if not isinstance(record, Return):
        raise ControlDamaged(f"the control store has a {type(record).__name__} for a Return")
    return record
