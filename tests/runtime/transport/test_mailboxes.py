"""The ring against a queue, between threads of a thought and between real processes; order over two carriers; sleep."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_proto import messages
from cs_proto.codec import MARK_NBYTES
from cs_proto.errors import PeerProtocolError
from cs_runtime.transport.mailboxes import Mailboxes, Patience
from cs_runtime.transport.rings import NBYTES, Incoming, Mark, Outgoing

PAGE = 4096
SMALL = PAGE + 1024


def ring(nbytes: int = SMALL) -> tuple[Outgoing, Incoming, memoryview]:
    memory = memoryview(bytearray(nbytes))
    return Outgoing(memory), Incoming(memory), memory


def pattern(seed: int) -> list[bytes]:
    """The message of that number: one to five parts, small ones mostly."""
    made = random.Random(seed)
    return [made.randbytes(made.choice((0, 8, 100, 700, 2500))) for _ in range(made.randint(1, 5))]


@given(st.lists(st.none() | st.lists(st.integers(0, 560), min_size=1, max_size=12)))
def test_it_is_a_queue(moves: list[list[int] | None]) -> None:
    out, into, _ = ring()
    queue: deque[list[bytes]] = deque()
    for number, sizes in enumerate(moves):
        if sizes is None:
            assert into.has_mail == bool(queue)
            assert into.take(0) == (queue.popleft() if queue else None)
            continue
        parts = [bytes([number % 256]) * size for size in sizes]
        nbytes = 16 + 4 * len(parts) + sum(sizes)
        posted = out.post(parts, 0)
        if posted:
            queue.append(parts)
        assert posted or nbytes > 512 or queue  # an empty ring has room for whatever is not too large
        assert not posted or nbytes <= 512
    while queue:
        assert into.take(0) == queue.popleft()
    assert into.take(0) is None


def test_buffers_of_any_kind_go_in() -> None:
    out, into, _ = ring()
    assert out.post([b"a", bytearray(b"bc"), memoryview(b"defg").cast("H")], 0)
    assert into.take(0) == [b"a", b"bc", b"defg"]


@given(st.integers(0, 127), st.binary(min_size=8, max_size=8), st.booleans())
def test_damage_is_an_error(word: int, value: bytes, in_words: bool) -> None:
    """Whatever is written over a word, what is taken is an error, nothing, or made of bytes that are there."""
    out, into, memory = ring()
    for _ in range(3):
        assert out.post([b"x" * 40, b"y" * 80], 0)
    start = (word % 24) * 8 if in_words else PAGE + word * 8
    memory[start : start + 8] = value
    with suppress(PeerProtocolError):
        for _ in range(20):
            parts = into.take(1 << 64)
            assert parts is None or sum(map(len, parts)) <= 1024


PROGRAM = """
import hashlib, mmap, os, sys
from cs_runtime.transport.rings import Incoming, Outgoing
from tests.runtime.transport.test_mailboxes import pattern
memory = memoryview(mmap.mmap(int(sys.argv[1]), 0))
if sys.argv[2] == "take":
    ring, made = Incoming(memory), hashlib.sha256()
    for _ in range(int(sys.argv[3])):
        while (parts := ring.take(0)) is None:
            os.sched_yield()
        made.update(repr(parts).encode())
    print(made.hexdigest())
else:
    ring, number = Outgoing(memory), 0
    while True:
        while not ring.post([number.to_bytes(8, "little"), *pattern(number)], 0):
            os.sched_yield()
        number += 1
"""


@contextmanager
def other_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], memoryview]]:
    descriptor = os.memfd_create("ring")
    try:
        os.ftruncate(descriptor, PAGE + 32 * 1024)
        memory = memoryview(mmap.mmap(descriptor, 0))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-c", PROGRAM, str(descriptor), *arguments]
        with subprocess.Popen(
            command, env=environment, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process, memory
            finally:
                process.kill()
    finally:
        os.close(descriptor)


def test_nothing_is_lost_between_processes() -> None:
    count, made = 400, hashlib.sha256()
    with other_process("take", str(count)) as (process, memory):
        out = Outgoing(memory)
        for number in range(count):
            parts = pattern(number)
            while not out.post(parts, 0):
                os.sched_yield()
                assert process.poll() is None
            made.update(repr(parts).encode())
        assert process.stdout is not None
        assert process.stdout.read().strip() == made.hexdigest()


def test_what_a_killed_process_had_posted_is_whole() -> None:
    with other_process("post") as (process, memory):
        into, number = Incoming(memory), 0
        while not process.returncode or into.has_mail:
            parts = into.take(0)
            if parts is None:
                process.poll()
                os.sched_yield()
                continue
            assert parts == [number.to_bytes(8, "little"), *pattern(number)]
            number += 1
            if number == 300:
                process.send_signal(signal.SIGKILL)
        assert number >= 300


# --- mailboxes ----------------------------------------------------------------------------------------------------


class Fence:
    """Counts, and has something happen."""

    def __init__(self) -> None:
        self.passed = 0
        self.then: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        self.passed += 1
        self.then()

    def __exit__(self, *_: object) -> None:
        pass


class Ends:
    """Both ends of a mailbox with a socket beside it, in one process."""

    def __init__(self, *, rings_late: bool = False) -> None:
        """``rings_late`` is of the end here."""
        self.poller = select.poll()
        self.fence, self.other_fence = Fence(), Fence()
        self.here: Mailboxes[str] = Mailboxes(self.poller, 0.0, rings_late=rings_late)
        self.there: Mailboxes[str] = Mailboxes(self.poller, 0.0)
        self.here._fence, self.there._fence = self.fence, self.other_fence

    def offer(self, number: int = 7) -> tuple[messages.Offer | None, list[int]]:
        """``here`` offers; also what ``there`` gets of the supervisor."""
        memory = os.memfd_create("mailbox")
        os.ftruncate(memory, NBYTES)
        made = [memory, *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))]
        copies = [os.dup(each) for each in made]
        offer = self.here.offer("there", messages.Mailbox(number, True, ""), made)
        self.here.sent("there")
        return offer, copies

    def open(self, copies: list[int], number: int = 7) -> messages.MailboxAccepted:
        answer = self.there.open("here", messages.Mailbox(number, True, ""), copies)
        assert not self.there.post("here", [b"Taken"])  # which is to come by the socket
        self.there.sent("here")
        return answer

    def shake_hands(self) -> None:
        offer, copies = self.offer()
        assert offer == messages.Offer(7)
        answer = self.open(copies)
        assert answer == messages.MailboxAccepted(7, "")
        self.here.taken("there", answer)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@given(st.lists(st.sampled_from(["post", "elsewhere", "come", "take"]), max_size=60))
def test_two_carriers_keep_one_order(moves: list[str]) -> None:
    """Whatever goes which way, and however late the socket is, what is taken is in the order of sending."""
    ends = Ends()
    try:
        ends.shake_hands()
        sent, taken, socket = 0, [], deque[bytes]()

        def take() -> None:
            while (found := ends.here.take()) is not None:
                taken.append(int.from_bytes(found[1][0], "little"))

        for move in [*moves, *["come", "take"] * len(moves)]:
            message = sent.to_bytes(8, "little")
            if move == "post":
                assert ends.there.post("here", [message])
                sent += 1
            elif move == "elsewhere":
                socket.append(message)
                ends.there.sent("here")
                sent += 1
            elif move == "come" and socket:
                ends.here.came("there", [socket.popleft()])
            elif move == "take":
                take()
        assert taken == list(range(sent))
    finally:
        ends.close()


def test_until_it_is_taken_nothing_is_posted_and_all_is_counted(ends: Ends) -> None:
    _, copies = ends.offer()
    assert not ends.here.post("there", [b"1"])
    ends.here.sent("there")
    answer = ends.open(copies)
    ends.here.taken("there", replace(answer, mailbox=6))
    assert not ends.here
    ends.here.taken("there", answer)
    assert ends.here.post("there", [b"2"])
    assert ends.there.take() is None  # the socket is slower
    assert not ends.there.is_there()
    ends.there.came("here", [b"1"])
    assert [ends.there.take(), ends.there.take()] == [("here", [b"1"]), ("here", [b"2"])]


def test_refused_it_is_as_before(ends: Ends) -> None:
    _, copies = ends.offer()
    for copy in copies[1:]:
        os.close(copy)
    answer = ends.there.open("here", messages.Mailbox(7, True, ""), copies[:1])
    os.close(copies[0])
    assert "descriptors did not arrive" in answer.refused
    ends.here.taken("there", answer)
    assert not ends.here
    assert not ends.here.post("there", [b"1"])
    ends.here.sent("there")
    assert ends.here.offer("there", messages.Mailbox(0, False, "none here"), ()) is None


def test_another_in_its_place(ends: Ends) -> None:
    """Of the old one each end reads what is left, and nobody ever what was meant for another."""
    ends.shake_hands()
    assert ends.there.post("here", [b"old"])
    assert ends.here.post("there", [b"old, too"])
    _, copies = ends.offer(8)
    assert not ends.here.post("there", [b"new"])
    assert ends.here.take() == ("there", [b"old"])
    answer = ends.open(copies, 8)
    assert ends.there.take() == ("here", [b"old, too"])
    assert ends.there.post("here", [b"answer"])
    assert ends.here.take() is None
    ends.here.taken("there", answer)
    assert ends.here.take() == ("there", [b"answer"])
    assert ends.here.number("there") == ends.there.number("here") == 8


def test_who_passes_mail_on_is_left_no_mark(ends: Ends) -> None:
    made = os.memfd_create("mailbox"), *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    os.ftruncate(made[0], NBYTES)
    ends.there.open("here", messages.Mailbox(7, True, "", is_passed_on=True), made)
    ends.there.sent("here")
    assert not ends.there.mark("here", 5)
    assert ends.there.post("here", [b"message"])


def test_too_large_goes_elsewhere(ends: Ends) -> None:
    ends.shake_hands()
    assert not ends.here.post("there", [b"x" * (NBYTES // 4)])
    while ends.here.post("there", [b"x" * 100_000]):
        pass
    assert ends.there.take() is not None
    assert ends.here.post("there", [b"x" * 100_000])


def test_what_a_peer_posted_before_it_went_counts(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.here.post("there", [b"last words"])
    ends.there.forget("here")
    assert not ends.there
    assert ends.there.take() == ("here", [b"last words"])
    assert ends.there.take() is None


def test_a_damaged_one_is_given_up_with_a_message_that_is_none(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.here.post("there", [b"x"])
    ends.here._boxes["there"].outgoing.words[0] = 1 << 40
    assert ends.there.take() == ("here", ())
    assert not ends.there
    assert not ends.here.post("there", [b"y"])


def test_of_three_mailboxes_one_that_is_damaged_is_given_up_with_its_mark() -> None:
    every = [Ends() for _ in range(3)]
    one: Mailboxes[str] = Mailboxes(select.poll(), 0.0)
    try:
        for number, ends in enumerate(every):
            name, (_, copies) = str(number), ends.offer(number)
            ends.here.taken("there", one.open(name, messages.Mailbox(number, True, ""), copies))
            assert ends.here.post("there", [b"x"])
            one.came(name, [b"the first goes over ZeroMQ"])
            ends.here.sent("there")
        heard = [one.take() for _ in range(6)]
        assert None not in heard
        assert every[0].here.post("there", [b"y"])
        every[0].here._boxes["there"].outgoing.words[0] = 1 << 40
        assert every[0].here.mark("there", 5)
        assert one.take() == ("0", Mark(5, b""))
        assert one.take() == ("0", ())
        assert one.peers() == ("1", "2")
        assert every[1].here.mark("there", 6)
        every[1].here._boxes["there"].outgoing.words[0] = 1 << 40
        one.came("1", [b"over ZeroMQ"])
        assert [one.take() for _ in range(3)] == [("1", Mark(6, b"")), ("1", ()), ("1", [b"over ZeroMQ"])]
        assert one.take() is None
    finally:
        one.close()
        for ends in every:
            ends.close()


@pytest.mark.parametrize("who", ["supervisor", "peer"])
def test_where_another_one_is_refused_the_old_one_is_given_up(ends: Ends, who: str) -> None:
    """It is of a process that has gone: what is posted there nobody reads."""
    ends.shake_hands()
    assert ends.here.post("there", [b"1"])
    if who == "supervisor":
        assert ends.here.offer("there", messages.Mailbox(0, False, "none here"), ()) is None
    else:
        _, copies = ends.offer(8)
        for copy in copies:
            os.close(copy)
        ends.here.taken("there", messages.MailboxAccepted(8, "none here"))
    assert not ends.here
    assert not ends.here.post("there", [b"2"])


def test_an_offer_that_is_not_answered_yet_stands_where_the_next_one_is_refused(ends: Ends) -> None:
    _, copies = ends.offer(7)
    answer = ends.open(copies, 7)
    assert ends.there.post("here", [b"behind the answer"])
    assert ends.here.offer("there", messages.Mailbox(0, False, "none here"), ()) is None
    ends.here.taken("there", answer)
    assert ends.here.take() == ("there", [b"behind the answer"])


def test_who_lives_on_is_heard_elsewhere(ends: Ends) -> None:
    ends.shake_hands()
    ends.there.forget("here")
    assert not ends.here.post("there", [b"late"])
    ends.here.sent("there")
    ends.there.came("here", [b"late"])
    assert ends.there.take() == ("here", [b"late"])


def test_the_doorbell_is_rung_for_who_sleeps_and_for_nobody_else(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.here.post("there", [b"1"])
    assert ends.here.rung == 0
    assert ends.there.is_there()  # so it must not sleep
    assert ends.there.take() is not None
    assert not ends.there.is_there()
    assert ends.here.post("there", [b"2"])
    assert ends.here.post("there", [b"3"])
    ready = dict(ends.poller.poll(0))
    assert list(ready) == [ends.there._boxes["here"].doorbell]
    ends.there.awake(ready)
    assert ends.there.woken == 1
    assert ends.here.rung == 2
    assert not ends.poller.poll(0)
    assert ends.here.post("there", [b"4"])
    assert not ends.poller.poll(0)


def test_who_rings_late_wakes_nobody_before_it_says_so_and_then_whoever_still_sleeps() -> None:
    ends = Ends(rings_late=True)
    try:
        ends.shake_hands()
        assert not ends.there.is_there()
        assert ends.here.post("there", [b"1"])
        assert ends.there._look()
        assert not ends.poller.poll(0)
        ends.here.ring()
        assert ends.poller.poll(0)
        ends.there.awake(dict(ends.poller.poll(0)))
        assert ends.there.take() == ("here", [b"1"])
        ends.here.ring()  # nothing was posted since
        assert not ends.there.is_there()
        ends.here.ring()
        assert ends.here.post("there", [b"2"])
        ends.there.awake({})
        ends.here.ring()  # it has looked meanwhile
        assert not ends.poller.poll(0)
        assert ends.there.take() == ("here", [b"2"])
        assert not ends.there.is_there()
        assert ends.here.post("there", [b"3"])
        ends.here.forget("there")
        ends.here.ring()  # its mailbox is gone
        assert not ends.poller.poll(0)
    finally:
        ends.close()


def test_a_ring_that_ctrl_c_interrupts_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(rings_late=True)
    try:
        ends.shake_hands()
        assert not ends.there.is_there()
        assert ends.here.post("there", [b"1"])

        def interrupted(*given: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "eventfd_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ends.here.ring()
        assert not ends.poller.poll(0)
        ends.here.ring()
        assert ends.poller.poll(0)
    finally:
        ends.close()


def test_who_is_to_be_quiet_wakes_nobody_and_is_heard_with_what_comes_next(ends: Ends) -> None:
    ends.shake_hands()
    assert not ends.there.is_there(quiet="here")
    assert ends.here.post("there", [b"1"])
    assert not ends.poller.poll(0)
    ends.there.awake({})
    assert ends.there.is_there(quiet="here")
    assert ends.there.take() == ("here", [b"1"])
    assert not ends.there.is_there(quiet="nobody")
    assert ends.here.post("there", [b"2"])
    assert ends.poller.poll(0)


# --- marks --------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["mark", "post", "elsewhere", "come", "take"]), max_size=60))
def test_the_last_mark_is_taken_once_and_messages_keep_their_order(moves: list[str]) -> None:
    ends = Ends()
    try:
        ends.shake_hands()
        sent, taken, socket = 0, [], deque[bytes]()
        marks, seen = [0], [0]
        early = deque[tuple[int, bytes]]()  # those that came before a message of the socket
        for move in [*moves, *["come", "take"] * len(moves)]:
            message = sent.to_bytes(8, "little")
            if move == "mark":
                marks.append(len(marks))
                assert ends.there.mark("here", marks[-1], bytes([marks[-1]] * (marks[-1] % 3)))
                seen.append(-1)
            elif move == "post":
                assert ends.there.post("here", [message])
                sent += 1
            elif move == "elsewhere":
                socket.append(message)
                ends.there.sent("here")
                sent += 1
            elif move == "come" and socket:
                if seen[-1] == -1:
                    early.append((marks[-1], bytes([marks[-1]] * (marks[-1] % 3))))
                    seen[-1] = marks[-1]
                ends.here.came("there", [socket.popleft()])
            elif move == "take":
                while (found := ends.here.take()) is not None:
                    if isinstance(found[1], Mark) and early:
                        assert found[1] == early.popleft()
                    elif isinstance(found[1], Mark):
                        assert seen[-1] == -1, "it was taken before"
                        seen[-1] = found[1].number
                        assert found[1] == (marks[-1], bytes([marks[-1]] * (marks[-1] % 3)))
                    else:
                        taken.append(int.from_bytes(found[1][0], "little"))
                assert seen[-1] == marks[-1]
                assert not early
        assert taken == list(range(sent))
    finally:
        ends.close()


def test_a_mark_has_a_limited_number_of_bytes(ends: Ends) -> None:
    ends.shake_hands()
    body = bytes(range(256)) * (MARK_NBYTES // 256)
    assert ends.here.mark("there", 1, body)
    assert ends.there.take() == ("here", Mark(1, body))
    assert not ends.here.mark("there", 2, body + b"x")
    assert ends.there.take() is None
    assert ends.here.mark("there", 3, memoryview(b"short"))
    assert ends.there.take() == ("here", Mark(3, b"short"))
    assert ends.here.mark("there", 4)
    assert ends.there.take() == ("here", Mark(4, b""))
    assert ends.here.mark("there", 5, b"x")
    ends.here._boxes["there"].outgoing.words[256] = 1 << 60  # no writer says that
    assert ends.there.take() == ("here", Mark(5, b"xhort" + body[5:]))


def test_a_mark_needs_a_mailbox_that_both_use(ends: Ends) -> None:
    assert not ends.here.mark("there", 1)
    _, copies = ends.offer()
    assert not ends.here.mark("there", 1)  # it is offered
    answer = ends.open(copies)
    ends.here.taken("there", answer)
    assert ends.here.mark("there", 2)
    assert ends.there.take() == ("here", Mark(2, b""))
    ends.there.forget("here")
    assert not ends.here.mark("there", 3)  # the reader has left


def test_the_last_mark_of_a_mailbox_counts_when_another_takes_its_place(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.here.mark("there", 4)
    assert ends.here.mark("there", 5)
    _, copies = ends.offer(8)
    assert not ends.here.mark("there", 6)
    ends.here.taken("there", ends.open(copies, 8))
    assert ends.there.take() == ("here", Mark(5, b""))
    assert ends.there.take() is None
    assert ends.here.mark("there", 6)
    assert ends.there.take() == ("here", Mark(6, b""))


def test_a_mark_wakes_who_sleeps_and_does_not_wait_for_the_socket(ends: Ends) -> None:
    ends.shake_hands()
    ends.here.sent("there")
    assert ends.here.post("there", [b"behind one that went elsewhere"])
    assert ends.there.take() is None
    assert not ends.there.is_there()
    assert not ends.poller.poll(0)
    assert ends.here.mark("there", (1 << 63) - 1)
    assert (ends.here.posted, ends.here.rung) == (2, 1)
    ends.there.awake(dict(ends.poller.poll(0)))
    assert ends.there.is_there()
    assert ends.there.take() == ("here", Mark((1 << 63) - 1, b""))
    assert not ends.there.is_there()


def test_a_mark_is_taken_before_what_was_sent_after_it(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.here.mark("there", 1, b"first")
    assert ends.here.post("there", [b"second"])
    ends.here.sent("there")
    ends.there.came("here", [b"third"])
    taken = [ends.there.take() for _ in range(4)]
    assert taken == [("here", Mark(1, b"first")), ("here", [b"second"]), ("here", [b"third"]), None]


def test_what_is_posted_while_it_falls_asleep_is_seen_behind_the_fence(ends: Ends) -> None:
    ends.shake_hands()
    assert not ends.there.is_there()
    ends.there.awake({})
    ends.other_fence.then = lambda: ends.here.post("there", [b"in between"])
    assert ends.there.is_there()


def test_every_post_has_a_fence_between_the_message_and_the_look(ends: Ends) -> None:
    ends.shake_hands()
    seen = []
    ends.fence.then = lambda: seen.append(ends.there._boxes["here"].incoming.has_mail)
    assert ends.here.post("there", [b"1"])
    assert seen == [True]


# --- patience -----------------------------------------------------------------------------------------------------


class Clock:
    """Time passes where it is told to, and 10 µs with each yield."""

    def __init__(self) -> None:
        self.now = 100.0
        self.yields: Iterator[float] = iter(())
        self.count = 0

    def give_way(self) -> None:
        self.now += next(self.yields, 10e-6)
        self.count += 1


def never() -> bool:
    return False


def after(times: int) -> Callable[[], bool]:
    looks = iter([False] * times)
    return lambda: next(looks, True)


def test_patience_ends() -> None:
    clock = Clock()
    patience = Patience(50e-6, lambda: clock.now, clock.give_way)
    assert not patience.wait(never, clock.now)
    assert 4 <= clock.count <= 6
    assert patience.wait(after(2), clock.now)
    assert not Patience(0, lambda: clock.now, clock.give_way).wait(lambda: True, clock.now)


def test_who_is_kept_from_the_processor_does_not_try_again_soon() -> None:
    clock = Clock()
    patience = Patience(50e-6, lambda: clock.now, clock.give_way)

    def tries(wanted: bool) -> bool:
        clock.count, clock.yields = 0, iter([0.001] if wanted else [])
        patience.wait(never, clock.now)
        return clock.count > 0

    pauses = []
    for _ in range(8):
        assert tries(wanted=True)
        began = clock.now
        while not tries(wanted=False):
            clock.now += 0.001
        pauses.append(round(clock.now - began, 2))
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    clock.now += 5
    assert tries(wanted=True)
    clock.now += 0.021
    assert tries(wanted=False)
