"""Spans are noted where a service runs, and do nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.harness.rings import read

import central_storage as cs
from central_storage.timeline.rings import Ring, spans
from cs_proto import step_times as layout
from cs_runtime import trace


@pytest.fixture
def ring() -> Iterator[Ring]:
    memory = memoryview(bytearray(layout.NBYTES))
    memory.cast("Q")[layout.WATCHED] = 1
    made = trace.Trace()
    made.attach(memory)
    yield Ring(memory)
    made.detach()


def test_spans_are_noted_also_where_the_block_raises(ring: Ring) -> None:
    again = cs.span("again")
    with cs.span("outer"):
        with again, again:
            pass
        with pytest.raises(ZeroDivisionError), cs.span("raises"):
            _ = 1 / 0
    moments, _ = read(ring)
    assert [(each.name, each.edge) for each in moments[1:]] == [
        ("outer", 1),
        ("again", 1),
        ("again", 1),
        ("again", -1),
        ("again", -1),
        ("raises", 1),
        ("raises", -1),
        ("outer", -1),
    ]
    assert [each.name for each in spans(moments)] == ["outer", "again", "again", "raises"]


def test_nothing_is_noted_without_a_service() -> None:
    with cs.span("nobody sees it"):
        pass


def test_a_span_that_begins_before_the_service_is_left_out() -> None:
    memory, made = memoryview(bytearray(layout.NBYTES)), trace.Trace()
    memory.cast("Q")[layout.WATCHED] = 1
    with cs.span("early"):
        made.attach(memory)
    made.detach()
    assert not spans(read(Ring(memory))[0])


@pytest.mark.parametrize("name", ["", b"forward", None, 3])
def test_a_name_is_a_text(name: Any) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="the name of a span is a text"):
        cs.span(name)
