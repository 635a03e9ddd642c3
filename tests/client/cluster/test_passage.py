"""The gateway's end of several outposts: what goes wrong in one session ends that one, and no other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

import pytest
from tests.client.cluster.test_stand_in import Gateway, waiting_service
from tests.harness.shortages import no_descriptors

from central_storage.cluster import items
from central_storage.cluster.link import WorkerLink
from central_storage.cluster.passage import Passages
from central_storage.cluster.session import Session
from cs_proto import messages
from cs_proto.codec import encode
from cs_proto.errors import DescriptorLimitError, LaunchError, NoAnswerError
from cs_runtime.transport.supervisor_link import SupervisorLink


class Loop(Gateway):
    """The loop of a gateway, and the outposts that are linked to it."""

    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.outposts = {role: WorkerLink(role, Session(os.urandom(messages.SESSION_NBYTES), 0.0)) for role in roles}

    @property
    def links(self) -> Iterable[WorkerLink]:
        return [link for link in self.outposts.values() if not link.is_over]


class Head:
    """The passages of a service for two workers, ``worker-a`` and ``worker-b``."""

    def __init__(self, run_directory: str) -> None:
        self.loop = Loop("worker-a", "worker-b")
        self.passages = Passages(self.loop, run_directory, lambda role: 1)
        self.a, self.b = self.loop.outposts.values()

    def join(self, link: WorkerLink) -> None:
        """An outpost asks for a place."""
        link.keep([(items.JOIN, encode(messages.Join(messages.PROTOCOL, os.getpid())))])

    def runs(self, link: WorkerLink) -> None:
        """The outpost of ``link`` has a worker."""
        before = link.waiting
        self.join(link)
        self.passages.turn()
        self.loop.turn_until(lambda: link.waiting > before)
        assert not link.is_over

    def close(self) -> None:
        for link in self.loop.outposts.values():
            link.close(LaunchError("the test is over"))
        self.passages.turn()
        self.loop.context.destroy(linger=0)


@pytest.fixture
def head() -> Iterator[Head]:
    with waiting_service(2) as path:
        made = Head(path)
        yield made
        made.close()


def ended_for_want_of_descriptors(link: WorkerLink) -> bool:
    said = rf"the gateway \(pid {os.getpid()}\) has \d+ of \d+ descriptors open.*larger limit \(ulimit -Hn\)"
    return isinstance(link.reason, DescriptorLimitError) and re.search(said, str(link.reason)) is not None


def still_works(head: Head, link: WorkerLink) -> bool:
    """Whether a worker gets an answer of the supervisor."""
    before = link.waiting
    link.keep([(items.SUPERVISOR, encode(messages.OpenSegment("control")))])
    head.passages.turn()
    return not link.is_over and link.waiting > before


def test_no_descriptor_to_ask_for_a_place_with(head: Head) -> None:
    head.runs(head.a)
    head.join(head.b)
    with no_descriptors():
        head.passages.turn()
    assert ended_for_want_of_descriptors(head.b)
    assert still_works(head, head.a)


def test_no_descriptor_for_the_worker_that_was_assigned(head: Head) -> None:
    head.runs(head.a)
    head.join(head.b)
    head.passages.turn()
    with no_descriptors():
        head.loop.turn_until(lambda: head.b.is_over)
    assert ended_for_want_of_descriptors(head.b)
    head.passages.turn()
    assert still_works(head, head.a)


def test_a_supervisor_that_does_not_answer_is_named(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """NoAnswerError is an OSError, too, and does not mean that the service is gone."""
    monkeypatch.setattr(SupervisorLink, "await_name", no_answer)
    head.join(head.a)
    head.passages.turn()
    head.loop.turn_until(lambda: head.a.is_over)
    assert isinstance(head.a.reason, NoAnswerError)


def no_answer(link: object, timeout: float) -> bytes:
    raise NoAnswerError(f"the supervisor did not answer within {timeout:g} s; is it stopped?")
