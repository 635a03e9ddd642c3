"""docs/protocol.md says what the code does: its tables are the code's, and its examples are messages."""

from __future__ import annotations

import ast
import re

import msgpack
import pytest
from tests.harness.protocol_tables import DOCUMENT, TABLES, written

from cs_proto.codec import decode, encode
from cs_proto.messages import PROTOCOL
from cs_proto.records import RECORDS, Record

TEXT = DOCUMENT.read_text()
EXAMPLES = re.findall(r"^    (\[\d.*\])((?: \+ .*)?)$", TEXT, re.MULTILINE)


def test_the_tables_are_the_codes() -> None:
    assert written(TEXT) == TEXT, "run python -m tests.harness.protocol_tables"


def test_every_record_and_every_conversation_is_told() -> None:
    by_hand = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", TEXT, flags=re.DOTALL)
    for kind in RECORDS.values():
        if kind.__module__.startswith("cs_proto.messages."):
            assert re.search(rf"\b{kind.__name__}\b", by_hand), f"{kind.__name__} is in no conversation"
    assert f"protocol {PROTOCOL}" in by_hand


def test_tables_have_their_places_once() -> None:
    for name in TABLES:
        assert TEXT.count(f"<!-- {name} -->") == TEXT.count(f"<!-- /{name} -->") == 1
    with pytest.raises(ValueError, match="no place for the table of records"):
        written(TEXT.replace("<!-- records -->", ""))


@pytest.mark.parametrize(("header", "frames"), EXAMPLES)
def test_examples_are_messages(header: str, frames: str) -> None:
    parts = [msgpack.packb(ast.literal_eval(header)), *map(ast.literal_eval, frames.split(" + ")[1:])]
    record = decode(parts)
    assert isinstance(record, Record)
    assert [bytes(part) for part in encode(record)] == parts


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 10
