"""Nothing that is printed steers a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_proto.printable import printable

#: Characters that steer or turn: controls (C0, DEL, C1), marks of direction, separators of lines, halves of pairs.
STEERING = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0xD800)]
STEERING += [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF, 0x1BCA0, 0xE0001)]


@given(st.text(st.characters() | st.sampled_from(STEERING)))
def test_no_character_of_the_result_steers(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.encode().decode() == shown
    assert printable(shown) == shown
    assert printable(text, lines=True).split("\n") == [printable(line) for line in text.split("\n")]


@given(st.text(st.characters(categories=["L", "N", "P", "S"]) | st.just(" ")))
def test_what_steers_nothing_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("character", STEERING)
def test_a_character_that_steers_is_named(character: str) -> None:
    escaped = " " if character == "\t" else character.encode("unicode_escape").decode()
    assert printable(f"a{character}b") == f"a{escaped}b"
