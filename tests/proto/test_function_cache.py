"""Both ends of a conversation agree on which functions the receiver holds."""

from __future__ import annotations

from copy import copy

from hypothesis import given
from hypothesis import strategies as st

from cs_proto.function_cache import FunctionCache


def test_touch_says_whether_it_was_held() -> None:
    recent = FunctionCache(2)
    assert not recent.touch(b"a")
    assert recent.touch(b"a")
    assert b"a" in recent
    assert b"b" not in recent


def test_the_least_recently_used_goes_first() -> None:
    recent = FunctionCache(2)
    for digest in (b"a", b"b", b"a", b"c"):
        recent.touch(digest)
    assert b"b" not in recent
    assert recent.touch(b"a")
    assert recent.touch(b"c")


@given(st.lists(st.sampled_from([bytes([n]) for n in range(6)])), st.integers(1, 4))
def test_what_a_sender_leaves_out_the_receiver_has(used: list[bytes], capacity: int) -> None:
    sender, receiver = FunctionCache(capacity), FunctionCache(capacity)
    held: set[bytes] = set()
    for digest in used:
        left_out = sender.touch(digest)
        receiver.touch(digest)
        assert not left_out or digest in held
        held = {kept for kept in held | {digest} if kept in receiver}
        assert len(held) <= capacity


def test_a_copy_goes_its_own_way() -> None:
    recent = FunctionCache(2)
    recent.touch(b"a")
    before = copy(recent)
    recent.touch(b"b")
    recent.touch(b"c")
    assert b"a" in before
    assert not before.touch(b"b")
    assert before.touch(b"a")
