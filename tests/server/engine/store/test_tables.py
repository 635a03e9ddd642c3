"""The tables: what is written comes back, and what was not flushed does not count."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from tests.harness.playbook import array, assigns, merge_calls, reduces, returns, scalar

from cs_proto.arrays import array_of
from cs_proto.messages import Value
from cs_server.engine.store.control_log import ControlDamaged, ControlFull, ControlLog, ControlMemory
from cs_server.engine.store.tables import ReplicaProgress, RunState, Slab, SlotNames, Tables

POINTS = [
    reduces(0, array(1, 2), scalar(3), array(dtype="int64")),
    assigns(1, scalar(True, "bool")),
    merge_calls(2, b"body"),
]


def test_records_with_and_without_frames_come_back() -> None:
    control = ControlMemory()
    tables = Tables(control, 2)
    returned = returns(1, 3).record
    stand = ReplicaProgress(3, 1.5, -1, None, returned, False)  # type: ignore[arg-type]
    value = Value(b"\x00" * 9, (array_of(np.zeros(0, "float32")), array_of(np.array("text"))))
    tables.stands[(1, 2, 0), 1] = stand
    for k, point in enumerate(POINTS):
        tables.points[(1,), 0, k] = point
    tables.points[(1,), 1, 0] = merge_calls(2).__class__(2, "x:1", value)
    tables.slots[1, 2] = SlotNames(("m", "v"))
    tables.tally.seen[1] = 0.25
    tables.flush()
    again = Tables(control, 2)
    assert again.stands.items() == [(((1, 2, 0), 1), stand)]
    assert dict(again.points.items()) == dict(tables.points.items())
    assert again.slots[1, 2] == SlotNames(("m", "v"))
    assert again.tally == tables.tally


def test_nothing_reaches_the_store_before_the_flush_and_then_all_of_it() -> None:
    control = ControlMemory()
    tables = Tables(control, 1)
    tables.slabs["float32"] = Slab(1, 2, 3, 4)
    tables.tally.commits = 7
    assert list(control.items()) == []
    tables.flush()
    assert len(list(control.items())) == 2
    tables.slabs["float32"] = Slab(5, 6, 7, 8)
    tables.slabs["int32"] = Slab(5, 6, 7, 8)
    tables.tally.commits = 8
    tables.rollback()
    assert tables.slabs.items() == [("float32", Slab(1, 2, 3, 4))]
    assert tables.tally.commits == 7
    tables.flush()
    assert Tables(control, 1).slabs.items() == [("float32", Slab(1, 2, 3, 4))]


def test_what_is_kept_outlives_a_rollback_and_is_written_with_what_comes_next() -> None:
    control = ControlMemory()
    tables = Tables(control, 1)
    tables.slabs["a"] = tables.slabs["gone"] = Slab(1, 1, 1, 1)
    tables.flush()
    stored = dict(control.items())
    tables.slabs["a"] = Slab(2, 2, 2, 2)
    tables.slabs["b"] = tables.slabs["c"] = Slab(3, 3, 3, 3)
    del tables.slabs["gone"]
    tables.tally.runs = 1
    tables.keep()
    assert tables.is_ahead
    tables.slabs["a"] = tables.slabs["gone"] = Slab(4, 4, 4, 4)
    tables.slots[1, 2] = SlotNames(())
    del tables.slabs["b"]
    tables.tally.runs = 2
    tables.rollback()
    kept = {"a": Slab(2, 2, 2, 2), "b": Slab(3, 3, 3, 3), "c": Slab(3, 3, 3, 3)}
    assert (dict(tables.slabs.items()), len(tables.slots), tables.tally.runs) == (kept, 0, 1)
    assert dict(control.items()) == stored
    del tables.slabs["c"]
    tables.flush()
    assert not tables.is_ahead
    again = Tables(control, 1)
    assert dict(again.slabs.items()) == {"a": kept["a"], "b": kept["b"]}
    assert again.tally.runs == 1
    tables.rollback()
    assert dict(tables.slabs.items()) == dict(again.slabs.items())


def test_what_comes_and_goes_within_an_event_is_never_written() -> None:
    control = ControlMemory()
    tables = Tables(control, 1)
    tables.slabs["a"] = Slab(1, 1, 1, 1)
    del tables.slabs["a"]
    tables.flush()
    assert [key for key, _ in control.items()] == [b"tally"]
    tables.slabs["a"] = Slab(1, 1, 1, 1)
    tables.flush()
    del tables.slabs["a"]
    tables.slabs.discard("a")
    tables.rollback()
    assert "a" in tables.slabs
    tables.slabs.discard("a")
    tables.flush()
    assert len(Tables(control, 1).slabs) == 0


def test_a_full_store_leaves_the_tables_to_be_rolled_back() -> None:
    tables = Tables(ControlLog(np.zeros(1024, np.uint8)), 1)
    tables.flush()
    tables.points[(1,), 0, 0] = merge_calls(0, bytes(2000))
    with pytest.raises(ControlFull):
        tables.flush()
    tables.rollback()
    assert len(tables.points) == 0
    tables.runs[(1,)] = RunState(0, 0, 0, -1, None, False, 0.0)
    tables.flush()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"?" + msgpack.packb(1), b""),
        (b"v" + msgpack.packb(1), b"\x00" * 8 + b"nonsense"),
        (b"v" + msgpack.packb(1), b"\xff" * 8),
        (b"v" + msgpack.packb(1), b"\x00"),
        (b"v\xc1", b"\x00" * 8),
    ],
    ids=["no table", "no record", "no frames", "short", "no key"],
)
def test_damage_is_named(key: bytes, value: bytes) -> None:
    control = ControlMemory()
    control.write({key: value})
    with pytest.raises(ControlDamaged, match="entry"):
        Tables(control, 1)


def test_a_store_belongs_to_a_number_of_replicas() -> None:
    control = ControlMemory()
    Tables(control, 2).flush()
    with pytest.raises(ControlDamaged, match="that of 2 replicas, not of 3"):
        Tables(control, 3)
