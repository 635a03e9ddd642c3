"""The places in a ring of step times do not overlap, and names are read as they were written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cs_proto import step_times as layout


def test_words_names_and_moments_lie_one_behind_the_other() -> None:
    words = (
        layout.MAGIC,
        layout.VERSION,
        layout.PLACES,
        layout.WRITTEN,
        layout.EPOCH,
        layout.NAMES,
        layout.PID,
    )
    assert len(set(words)) == len(words)
    assert 8 * (max(words) + 1) <= layout.name_place(0).start
    assert layout.name_place(layout.MOST_NAMES - 1).stop <= 8 * layout.FIRST
    assert 8 * layout.FIRST + 16 * layout.CAPACITY == layout.NBYTES


def test_kinds_of_moments_and_of_spans_are_apart() -> None:
    assert 0 not in layout.KINDS.values()
    assert max(layout.KINDS.values()) < layout.BEGINS
    assert layout.BEGINS + layout.MOST_NAMES < layout.ENDS
    assert layout.ENDS + layout.MOST_NAMES < 1 << 16


@given(st.text())
def test_a_name_comes_back_or_its_first_63_bytes(name: str) -> None:
    packed = layout.packed_name(name)
    assert len(packed) == layout.NAME_NBYTES
    whole = name.encode(errors="replace").decode()
    found = layout.name_of(packed)
    assert found == whole if len(whole.encode()) < layout.NAME_NBYTES else whole.startswith(found[:-3])
