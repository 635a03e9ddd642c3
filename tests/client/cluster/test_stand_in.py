"""What a worker on another machine may say to the server, of all that can be said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.record_strategies import records

from central_storage.cluster.stand_in import StandIn, checked
from cs_proto import messages
from cs_proto.errors import PeerProtocolError
from cs_proto.records import RECORDS, Record, altered

WORKERS = {
    *("Register", "Ask", "Return", "ClientGone", "Get", "Describe", "DescribeSlots", "Fetch", "Put", "Locate"),
    "Statistics",
}
HOLDERS = WORKERS | {"MergeCallReturn", "Create", "Assign", "AssignSlot", "Configure"}


def of(record: Record, rank: int, incarnation: int) -> Record:
    """The record as that worker would send it."""
    if isinstance(record, messages.Register):
        return altered(record, worker=altered(record.worker, replica=rank, incarnation=incarnation))
    if isinstance(record, messages.Ask | messages.Return):
        return altered(record, replica=rank, incarnation=incarnation)
    return record


@given(record=st.sampled_from(list(RECORDS.values())).flatmap(records))
def test_only_what_a_worker_says_is_passed_on(record: Record) -> None:
    for rank, allowed in ((0, HOLDERS), (3, WORKERS)):
        said = of(record, rank, 2)
        if type(record).__name__ in allowed:
            assert checked(said, rank, 2) is said
        else:
            with pytest.raises(PeerProtocolError, match=f"worker w{rank}.2 .* sent a {type(record).__name__} "):
                checked(said, rank, 2)


@pytest.mark.parametrize("kind", [messages.Register, messages.Ask, messages.Return])
@pytest.mark.parametrize("other", [(1, 2), (0, 1), (0, 3)])
def test_nobody_speaks_for_another_worker(kind: type[Record], other: tuple[int, int]) -> None:
    @settings(max_examples=examples(5))
    @given(record=records(kind))
    def say(record: Record) -> None:
        with pytest.raises(PeerProtocolError, match=f"as w{other[0]}.{other[1]}, which it may not send"):
            checked(of(record, *other), 0, 2)

    say()


@pytest.mark.parametrize("kind", [b"C", b"J", b"L", b"M", b"S", b"W", b"Z", b"?"])
def test_an_item_without_parts_ends_its_worker_and_nothing_else(kind: bytes) -> None:
    stand_in = StandIn.__new__(StandIn)  # without a service: nothing of it may be needed
    with pytest.raises(PeerProtocolError, match="without parts"):
        stand_in.pass_on(kind, [])
