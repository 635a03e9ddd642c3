"""A worker's waits over a played link, one record after the other."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.harness.timing import unit
from tests.worker.playbook import CONTROLLER, HOLDER, PEERS, REGISTER, REGISTERED, returned, run, step

from cs_proto import messages
from cs_proto.errors import ConfigurationError, Fenced, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Cancel,
    Committed,
    Describe,
    Died,
    Done,
    Forget,
    Prepare,
    Refused,
    Run,
    RunId,
    Serving,
    StepFinished,
)
from cs_proto.pace import Pace
from cs_proto.peers import SERVER, SUPERVISOR
from cs_proto.records import Record
from cs_worker.session import conversation
from cs_worker.session.conversation import Conversation
from cs_worker.session.core import COLLEAGUE, SessionCore
from cs_worker.session.interrupts import Interrupts
from cs_worker.session.session import Link

PREPARE = Prepare(("/here",), "/here")
FORGET = Forget((3, 5))


class PlayedLink:
    """It gives the records in ``coming``, then raises KeyError: no test waits for real. It keeps what is sent."""

    def __init__(self) -> None:
        self.coming: deque[tuple[bytes, Record] | None] = deque()
        self.to_peers: list[tuple[bytes, Record]] = []
        self.to_server: list[Record] = []
        self.to_supervisor: list[Record] = []
        self.timeouts: list[float | None] = []
        self.quiet: list[bytes | None] = []

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> tuple[bytes, Record] | None:
        self.timeouts.append(timeout)
        self.quiet.append(quiet)
        if not self.coming:
            raise KeyError("nothing comes any more")
        return self.coming.popleft()

    def send_supervisor(self, record: Record) -> None:
        self.to_supervisor.append(record)

    def offer_mailbox(self) -> None:
        assert not self.to_server, "what is sent after the offer goes by mailbox"

    @property
    def sent(self) -> int:
        return len(self.to_server)

    def send_server(self, record: Record) -> None:
        self.to_server.append(record)

    def send_peer(self, identity: bytes, record: Record) -> None:
        self.to_peers.append((identity, record))

    def give_up(self, reason: str) -> None:
        raise SystemExit(reason)


class Played:
    """A conversation over a played link."""

    def __init__(self) -> None:
        self.link = PlayedLink()
        self.executed: list[tuple[bytes, RunId]] = []
        self.during: dict[RunId, Any] = {}
        self.interrupts = Interrupts()
        self.conversation = Conversation(SessionCore(REGISTER, PEERS), cast("Link", self.link), self.interrupts)
        self.conversation.execute = self.execute
        self.prepared: list[RunId] = []
        self.conversation.prepare = lambda step: self.prepared.append(step.run)

    def execute(self, sender: bytes, run: Run) -> None:
        self.executed.append((sender, run.run))
        self.during.get(run.run, lambda: None)()

    def comes(self, *received: tuple[bytes, Record] | None) -> None:
        self.link.coming.extend(received)

    def wait(self, run: RunId, k: int, at_merge_call: bool = False) -> Record:
        def wanted(record: Record) -> Record | None:
            return record if record == Committed(run, k) else None

        return self.conversation.wait("a test", wanted, (*run, k) if at_merge_call else None)


@pytest.fixture
def unregistered() -> Iterator[Played]:
    played = Played()
    yield played
    assert not played.link.coming, "not everything was read"


@pytest.fixture
def played(unregistered: Played) -> Played:
    unregistered.comes((SERVER, REGISTERED))
    unregistered.conversation.register()
    for kept in (unregistered.link.to_server, unregistered.link.timeouts, unregistered.link.quiet):
        kept.clear()
    return unregistered


def refusals(played: Played) -> list[bytes]:
    for _, record in played.link.to_peers:
        assert isinstance(record, Refused)
        assert record.error.exception == "cs.PeerProtocolError"
    return [identity for identity, _ in played.link.to_peers]


def test_a_worker_registers_and_is_ready(unregistered: Played) -> None:
    link = unregistered.link
    unregistered.comes((CONTROLLER, run(1)), None, (SERVER, REGISTERED))
    assert unregistered.conversation.register() == REGISTERED
    assert link.to_server == [REGISTER]
    assert link.to_supervisor == [messages.Ready()]
    assert unregistered.conversation.next_work() == (CONTROLLER, run(1))


def test_a_refused_registration_is_an_error(unregistered: Played) -> None:
    unregistered.comes((SERVER, Refused(0, error_of(ConfigurationError("it is another version")))))
    with pytest.raises(ConfigurationError, match=r"the server refuses worker w1\.1: it is another version"):
        unregistered.conversation.register()
    assert not unregistered.link.to_supervisor


def test_a_refusal_is_logged_and_sent_but_to_colleagues(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    refused = Refused(0, error_of(PeerProtocolError("it does not wait")))
    played.comes((b"oabc", run(1)), (COLLEAGUE, refused), (CONTROLLER, PREPARE))
    with caplog.at_level(logging.WARNING, "central_storage"):
        played.conversation.next_work()
    assert refusals(played) == [b"oabc"]
    assert "refused run 1 of peer b'oabc'" in caplog.text
    assert "refused a Refused of peer" in caplog.text


def test_work_of_the_controller_comes_in_order(played: Played) -> None:
    played.comes((CONTROLLER, PREPARE), (CONTROLLER, FORGET), (CONTROLLER, run(1)))
    assert played.conversation.next_work() == (CONTROLLER, PREPARE)
    assert played.conversation.next_work() == (CONTROLLER, FORGET)
    assert played.conversation.next_work() == (CONTROLLER, run(1))


def test_a_nested_run_is_carried_out_at_its_merge_call(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((HOLDER, run(1, 2, 0)), (HOLDER, run(1, 2, 1)), (SERVER, Committed((1,), 2)))
    played.wait((1,), 2, at_merge_call=True)
    assert played.executed == [(HOLDER, (1, 2, 0)), (HOLDER, (1, 2, 1))]
    assert refusals(played) == []


def test_a_nested_run_may_wait_itself(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    inside = []
    played.during[1, 2, 0] = lambda: inside.append(played.wait((1, 2, 0), 0, at_merge_call=True))
    played.comes(
        (HOLDER, run(1, 2, 0)),
        (HOLDER, run(1, 2, 1)),  # the outer one's: it waits at another point now
        (HOLDER, run(1, 2, 0, 0, 0)),
        (SERVER, Committed((1,), 2)),  # the answer of the outer wait overtakes
        (SERVER, Committed((1, 2, 0), 0)),
    )
    assert played.wait((1,), 2, at_merge_call=True) == Committed((1,), 2)
    assert inside == [Committed((1, 2, 0), 0)]
    assert [path for _, path in played.executed] == [(1, 2, 0), (1, 2, 0, 0, 0)]
    assert refusals(played) == [HOLDER]


def test_cancel_ends_the_wait_of_its_run(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, Cancel((1,))))
    with pytest.raises(KeyboardInterrupt):
        played.wait((1,), 0)
    with pytest.raises(KeyboardInterrupt):
        played.wait((1,), 1)  # and every further one
    played.conversation.begin_run(CONTROLLER, run(2))
    played.comes((SERVER, Committed((2,), 0)))
    played.wait((2,), 0)


def test_bytes_are_waited_for_whatever_becomes_of_the_run(played: Played) -> None:
    def wanted(record: Record) -> Record | None:
        return record if record == Done(9, 0, 0) else None

    played.conversation.begin_run(CONTROLLER, run(1))
    waits = played.conversation.session.waits
    played.comes((CONTROLLER, Cancel((1,))), (SERVER, Committed((1,), 0)), (SERVER, Done(9, 0, 0)))
    assert played.conversation.wait_for_bytes("a test", wanted, Describe(9, (), ())) == Done(9, 0, 0)
    assert played.conversation.session.waits == waits, "nothing can have been committed"
    with pytest.raises(KeyboardInterrupt):
        played.wait((1,), 1)
    assert played.conversation.session.waits == waits + 2


def test_the_sigint_of_a_step_that_was_cancelled_before_it_began_may_come_late(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    played.comes((CONTROLLER, Cancel((1,), 1)), (SERVER, StepFinished((1,), False)), (CONTROLLER, step(2, 1)))
    played.conversation.begin_run(*next_run(played))
    with pytest.raises(KeyboardInterrupt), played.interrupts.user_code():
        pass
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        played.interrupts.install()
        signal.raise_signal(signal.SIGINT)
        played.conversation.begin_run(CONTROLLER, run(3))
        with played.interrupts.user_code():
            pass  # it is explained: nobody waits for the Cancel of another
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def test_only_while_a_step_of_its_is_not_over_the_controller_need_not_ring(played: Played) -> None:
    played.comes((CONTROLLER, step(1, 1)))
    played.conversation.begin_run(*next_run(played))
    played.comes((CONTROLLER, step(2, 1)), (SERVER, StepFinished((1,), False)))
    next_run(played)
    with pytest.raises(KeyError):
        played.conversation.next_work()
    played.conversation.begin_run(CONTROLLER, run(3))
    with pytest.raises(KeyError):
        played.conversation.next_work()
    assert played.link.quiet == [None, CONTROLLER, CONTROLLER, None, None]


def test_a_step_that_waits_is_prepared_and_no_other_work(played: Played) -> None:
    played.comes((CONTROLLER, step(1, 1)))
    played.conversation.begin_run(*next_run(played))
    assert not played.prepared
    played.comes((CONTROLLER, step(2, 1)), (CONTROLLER, step(3, 1)), (SERVER, StepFinished((1,), False)))
    played.conversation.begin_run(*next_run(played))
    assert set(played.prepared) == {(2,)}
    played.prepared.clear()
    played.comes((SERVER, StepFinished((2,), True)), (CONTROLLER, FORGET), (CONTROLLER, run(4)))
    assert played.conversation.next_work() == (CONTROLLER, FORGET)
    assert next_run(played) == (CONTROLLER, run(4))
    assert set(played.prepared) == {(3,)}


def next_run(played: Played) -> tuple[bytes, Run]:
    controller, work = played.conversation.next_work()
    assert isinstance(work, Run)
    return controller, work


def test_what_wanted_raises_comes_out_once(played: Played) -> None:
    def wanted(record: Record) -> Record | None:
        if isinstance(record, messages.PointFailed):
            raise ValueError("refused")
        return record

    failed = messages.PointFailed((1,), 0, error_of(ValueError("refused")), False)
    played.comes((SERVER, failed), (SERVER, Committed((1,), 1)))
    with pytest.raises(ValueError, match="refused"):
        played.conversation.wait("a test", wanted)
    assert played.conversation.wait("a test", wanted) == Committed((1,), 1)


def test_a_wait_is_named(played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(conversation, "pace_of", lambda _: Pace(1e-9))
    played.comes(None, (SERVER, Committed((1,), 0)))
    with caplog.at_level(logging.INFO, "central_storage"):
        played.wait((1,), 0)
    assert "for a test" in caplog.text
    assert max(played.link.timeouts) < unit(10)


def test_a_dead_server_ends_waits(played: Played) -> None:
    died = Died("server", 0, 1, 4711, "SIGKILL", "")
    played.comes((SUPERVISOR, Died("worker", 1, 1, 4712, "SIGKILL", "")), (SUPERVISOR, died))
    with pytest.raises(ReplicaLostError, match=r"the server \(pid 4711\) ended by SIGKILL during a test"):
        played.wait((1,), 0)


def test_a_server_in_the_place_of_a_dead_one_is_told_again_what_it_may_not_have_heard(played: Played) -> None:
    serving = Serving("/run", "")
    died = Died("server", 0, 1, 4711, "SIGKILL", "", restarts=True)
    question = Describe(1, (1,), ())
    said = [returned(number) for number in (1, 2)]
    for number in (1, 2):
        played.conversation.begin_run(CONTROLLER, run(number))
        played.conversation.say((number,), said[number - 1])
    assert played.link.to_server == said
    played.link.to_server.clear()
    played.comes((SUPERVISOR, died), (SUPERVISOR, serving), (SERVER, Committed((2,), 0)), (SUPERVISOR, serving))
    played.conversation.wait("a test", lambda r: r if isinstance(r, Committed) else None, question=question)
    assert played.link.to_server == [said[1], question]
    with pytest.raises(KeyError):
        played.conversation.next_work()
    assert played.link.to_server == [said[1], question, said[1]]


def test_a_colleague_that_refuses_ends_the_wait(played: Played) -> None:
    played.comes((COLLEAGUE, Refused(0, error_of(PeerProtocolError("it does not wait")))))
    with pytest.raises(PeerProtocolError, match="refuses a nested run: it does not wait"):
        played.wait((1,), 0)


def test_what_the_server_says_of_workers_is_nobodys_answer(played: Played) -> None:
    heard: list[Record] = []
    played.conversation.note_workers = heard.append
    worker = messages.Worker(1, 2, 8, "cpu:1")
    told = [messages.Registered(2, "cpu:0", (worker, worker)), messages.WorkerRestarted((1, 0, 0), worker)]
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((SERVER, told[0]), (SERVER, told[1]), (SERVER, Committed((1,), 0)))
    played.wait((1,), 0)
    played.comes((SERVER, told[0]), (CONTROLLER, PREPARE))
    played.conversation.next_work()
    assert heard == [*told, told[0]]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_worker_that_has_been_replaced_ends(played: Played, is_idle: bool) -> None:
    played.comes((SERVER, Refused(0, error_of(Fenced("w0.1 has been replaced")))))
    with pytest.raises(SystemExit, match=r"w0\.1 has been replaced"):
        played.conversation.next_work() if is_idle else played.wait((1,), 0)
