"""Who gets a mailbox of the supervisor, and that nothing of it stays."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.client.launch.standins import Client, World

from central_storage.launch.memory import Memfd, Unshared
from central_storage.launch.supervisor import mailboxes
from central_storage.launch.supervisor.mailboxes import Mailroom, why_no_mailboxes
from cs_proto.codec import decode
from cs_proto.errors import ConfigurationError
from cs_proto.messages import Mailbox, MakeMailbox, OpenMailbox


@pytest.fixture
def room() -> Iterator[Mailroom]:
    made = Mailroom("test", "")
    yield made
    made.close()


def close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def test_both_ends_get_the_same_once(room: Mailroom) -> None:
    answer, here = room.make("a worker", "w0", "server")
    assert (answer.mailbox, answer.refused) == (1, "")
    opened, there = room.open("server", 1)
    assert opened == answer
    try:
        assert [os.fstat(each).st_ino for each in here] == [os.fstat(each).st_ino for each in there]
        os.eventfd_write(here[1], 1)
        assert os.eventfd_read(there[1]) == 1
        assert "w1 was not offered" in room.open("w1", 1)[0].refused
        assert "or has it" in room.open("server", 1)[0].refused
    finally:
        close(here + there)


def test_mail_that_is_passed_on_has_no_marks_and_nobody_polls_for_it() -> None:
    room = Mailroom("test", "", is_passed_on=True)
    answer, here = room.make("a worker", "w0", "server")
    opened, there = room.open("server", 1)
    assert opened == answer == Mailbox(1, False, "", True)
    close(here + there)
    room.close()


@pytest.mark.parametrize(
    ("who", "to"), [("observer", "server"), ("server", "w0"), ("w0", "controller"), ("w0", "w0"), ("w0", "x" * 99)]
)
def test_who_gets_none(room: Mailroom, who: str, to: str) -> None:
    answer, descriptors = room.make("a peer", who, to)
    assert f"no mailbox from {who} to" in answer.refused
    assert not descriptors


def test_what_nobody_opens_goes_with_its_maker(room: Mailroom) -> None:
    close(room.make("one", "w0", "server")[1])
    close(room.make("two", "w1", "server")[1])
    room.forget("one")
    assert room.open("server", 1)[0].refused
    answer, descriptors = room.open("server", 2)
    assert not answer.refused
    close(descriptors)


def test_another_is_made_in_the_place_of_one_that_nobody_opened(room: Mailroom) -> None:
    for _ in range(2):
        close(room.make("a worker", "w0", "server")[1])
    assert room.open("server", 1)[0].refused
    answer, descriptors = room.open("server", 2)
    assert not answer.refused
    close(descriptors)


def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_mailboxes(Memfd(), wanted=True) == ""
    assert "switched off" in why_no_mailboxes(Memfd(), wanted=False)
    assert "no memory" in why_no_mailboxes(Unshared(), wanted=True)
    monkeypatch.setattr(mailboxes, "IS_ORDERED", False)
    assert "stores in order" in why_no_mailboxes(Memfd(), wanted=True)
    assert Mailroom("test", "because").make("a worker", "w0", "server")[0].refused == "because"


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, means in (("", "on"), ("on", "on"), ("off", "off")):
        monkeypatch.setenv("CS_MAILBOXES", said)
        assert mailboxes.mailboxes_by_default() == means
    monkeypatch.setenv("CS_MAILBOXES", "maybe")
    with pytest.raises(ConfigurationError, match="on or off, not 'maybe'"):
        mailboxes.mailboxes_by_default()


def test_over_the_socket(world: World) -> None:
    world.start()
    client = world.client()
    client.receive()

    def ask(who: Client, request: MakeMailbox | OpenMailbox) -> tuple[Mailbox, tuple[int, ...]]:
        who.send(request)
        found: list[tuple[bytes, list[int], int, object]] = []

        def answered() -> bool:
            with suppress(BlockingIOError):
                found.append(socket.recv_fds(who.link, 1 << 17, 3))
            return bool(found)

        world.until(answered)
        answer = decode([found[0][0]])
        assert isinstance(answer, Mailbox)
        return answer, tuple(found[0][1])

    answer, descriptors = ask(client, MakeMailbox("server"))
    assert (answer.mailbox, len(descriptors)) == (1, 3)
    close(descriptors)
    assert "controller was not offered" in ask(client, OpenMailbox(1))[0].refused
    observer = world.client("observer")
    observer.receive()
    assert "no mailbox from observer" in ask(observer, MakeMailbox("server"))[0].refused
