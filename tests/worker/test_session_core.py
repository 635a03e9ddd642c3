"""Who may say what to a worker, and when: a played link, one record after the other."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest

from cs_proto import messages
from cs_proto.arrays import bytes_array
from cs_proto.codec import decode
from cs_proto.errors import Fenced, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Cancel,
    ClientGone,
    Committed,
    Describe,
    Died,
    Done,
    Forget,
    MergeCallReturn,
    Prepare,
    Refused,
    Return,
    Run,
    RunId,
    Serving,
    StepFinished,
    Value,
)
from cs_proto.records import Buffer, Record
from cs_worker.interrupts import Interrupts
from cs_worker.session import COLLEAGUE, SERVER, SUPERVISOR, Link
from cs_worker.session_core import Conversation, path_text

CONTROLLER = b"cafe"
HOLDER = b"t0.1"
PREPARE = Prepare(("/here",), "/here")
FORGET = Forget((3, 5))


class PlayedLink:
    """What comes is a list; what is sent is kept. Out of records it is a KeyError: no test waits for real."""

    def __init__(self) -> None:
        self.coming: deque[tuple[bytes, Record] | None] = deque()
        self.to_peers: list[tuple[bytes, Record]] = []
        self.to_server: list[Record] = []
        self.timeouts: list[float | None] = []
        self.quiet: list[bytes | None] = []

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> tuple[bytes, Record] | None:
        self.timeouts.append(timeout)
        self.quiet.append(quiet)
        if not self.coming:
            raise KeyError("nothing comes any more")
        return self.coming.popleft()

    def send_server_parts(self, parts: Sequence[Buffer]) -> None:
        self.to_server.append(decode(parts))

    def send_server(self, record: Record) -> None:
        self.to_server.append(record)

    def send_peer(self, identity: bytes, record: Record) -> None:
        self.to_peers.append((identity, record))

    def give_up(self, reason: str) -> None:
        raise SystemExit(reason)


def say(conversation: Conversation, said: Return | MergeCallReturn) -> None:
    path = said.run if isinstance(said, Return) else (*said.run, said.k)
    conversation.say(path, type(said), *vars(said).values())


class Played:
    """A conversation over a played link."""

    def __init__(self) -> None:
        self.link = PlayedLink()
        self.executed: list[tuple[bytes, RunId]] = []
        self.during: dict[RunId, Any] = {}
        self.interrupts = Interrupts()
        self.conversation = Conversation(cast("Link", self.link), self.interrupts, self.execute)

    def execute(self, sender: bytes, run: Run) -> None:
        self.executed.append((sender, run.run))
        self.during.get(run.run, lambda: None)()

    def comes(self, *received: tuple[bytes, Record] | None) -> None:
        self.link.coming.extend(received)

    def wait(self, run: RunId, k: int, at_merge_call: bool = False) -> Record:
        def wanted(record: Record) -> Record | None:
            return record if record == Committed(run, k) else None

        return self.conversation.wait("a test", wanted, (run, k) if at_merge_call else None)


@pytest.fixture
def played() -> Iterator[Played]:
    played = Played()
    yield played
    assert not played.link.coming, "not everything was read"


def run(*path: int) -> Run:
    return Run(path, path[0], 0, 7, bytes(16), None, False, bytes_array(b""), ())


def step(number: int, series: int) -> Run:
    return Run((number,), number, 0, 7, bytes(16), None, False, bytes_array(b""), (), series, 2)


def refusals(played: Played) -> list[bytes]:
    for _, record in played.link.to_peers:
        assert isinstance(record, Refused)
        assert record.error.exception == "cs.PeerProtocolError"
    return [identity for identity, _ in played.link.to_peers]


def test_work_of_the_controller_comes_in_order(played: Played) -> None:
    played.comes((CONTROLLER, PREPARE), (CONTROLLER, FORGET), (CONTROLLER, run(1)))
    assert played.conversation.next_work() == (CONTROLLER, PREPARE)
    assert played.conversation.next_work() == (CONTROLLER, FORGET)
    assert played.conversation.next_work() == (CONTROLLER, run(1))


def test_work_that_comes_during_a_run_waits_for_its_end(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, run(2)), (CONTROLLER, PREPARE), (SERVER, Committed((1,), 0)))
    played.wait((1,), 0)
    assert played.executed == []
    assert [played.conversation.next_work()[1] for _ in range(2)] == [run(2), PREPARE]


@pytest.mark.parametrize("sender", [HOLDER, b"oabc", b"w1.1", b"\0\1\2\3\4", b"x"])
@pytest.mark.parametrize("record", [run(1), PREPARE, FORGET, Cancel((1,))], ids=["run", "prepare", "forget", "cancel"])
def test_work_of_others_is_refused(
    played: Played, sender: bytes, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    played.comes((sender, record), (CONTROLLER, PREPARE))
    with caplog.at_level(logging.WARNING, "central_storage"):
        assert played.conversation.next_work() == (CONTROLLER, PREPARE)
    assert refusals(played) == [sender]
    assert repr(sender) in caplog.text


def test_a_nested_run_is_never_taken_while_idle(played: Played) -> None:
    played.comes((HOLDER, run(1, 0, 0)), (CONTROLLER, run(1, 0, 0)), (CONTROLLER, PREPARE))
    played.conversation.next_work()
    assert played.executed == []
    assert refusals(played) == [HOLDER, CONTROLLER]


def test_a_nested_run_is_carried_out_at_its_merge_call(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((HOLDER, run(1, 2, 0)), (HOLDER, run(1, 2, 1)), (SERVER, Committed((1,), 2)))
    played.wait((1,), 2, at_merge_call=True)
    assert played.executed == [(HOLDER, (1, 2, 0)), (HOLDER, (1, 2, 1))]
    assert refusals(played) == []


@pytest.mark.parametrize(
    ("sender", "path", "at_merge_call"),
    [
        (HOLDER, (1, 2, 0), False),  # it waits at something else
        (HOLDER, (1, 1, 0), True),  # another merge point
        (HOLDER, (2, 2, 0), True),  # another run
        (HOLDER, (1, 2, 0, 2, 0), True),  # deeper
        (CONTROLLER, (1, 2, 0), True),  # not the holder
        (b"w1.1", (1, 2, 0), True),
        (HOLDER, (3,), True),  # a run without parent
    ],
)
def test_any_other_nested_run_is_refused(
    played: Played, sender: bytes, path: tuple[int, ...], at_merge_call: bool
) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((sender, run(*path)), (SERVER, Committed((1,), 2)))
    played.wait((1,), 2, at_merge_call)
    assert played.executed == []
    assert refusals(played) == [sender]


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


def test_the_runs_of_a_controller_that_has_gone_are_not_carried_out(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, run(2)), (SUPERVISOR, ClientGone("afe")))
    with pytest.raises(KeyboardInterrupt):
        played.wait((1,), 0)
    played.comes((CONTROLLER, run(3)), (b"cbeef", run(1)))  # the first was on its way
    assert played.conversation.next_work() == (b"cbeef", run(1))
    played.conversation.begin_run(b"cbeef", run(1))
    assert not played.conversation.is_cancelled()


def test_bytes_are_waited_for_whatever_becomes_of_the_run(played: Played) -> None:
    def wanted(record: Record) -> Record | None:
        return record if record == Done(9, 0, 0) else None

    played.conversation.begin_run(CONTROLLER, run(1))
    waits = played.conversation.waits
    played.comes((CONTROLLER, Cancel((1,))), (SERVER, Committed((1,), 0)), (SERVER, Done(9, 0, 0)))
    assert played.conversation.wait_for_bytes("a test", wanted, Describe(9, (), ())) == Done(9, 0, 0)
    assert played.conversation.waits == waits, "nothing can have been committed"
    with pytest.raises(KeyboardInterrupt):
        played.wait((1,), 1)
    assert played.conversation.waits == waits + 1
    played.conversation.begin_run(CONTROLLER, run(2))
    assert played.conversation.waits == waits + 2


def test_cancel_of_a_queued_run_meets_it_when_it_begins(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, run(2)), (CONTROLLER, Cancel((2,))), (SERVER, Committed((1,), 0)))
    played.wait((1,), 0)
    assert not played.conversation.is_cancelled()
    controller, work = played.conversation.next_work()
    assert isinstance(work, Run)
    played.conversation.begin_run(controller, work)
    assert played.conversation.is_cancelled()


def test_cancel_of_a_run_that_has_ended_changes_nothing(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, Cancel((1,))), (CONTROLLER, run(2)))
    played.conversation.next_work()
    played.conversation.begin_run(CONTROLLER, run(2))
    assert not played.conversation.is_cancelled()


def test_the_next_controller_counts_from_one_again(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((CONTROLLER, Cancel((1,))), (b"cbee", run(1)))
    controller, work = played.conversation.next_work()
    assert isinstance(work, Run)
    played.conversation.begin_run(controller, work)
    assert not played.conversation.is_cancelled()


@pytest.mark.parametrize(("later", "meets"), [(0, False), (1, True), (5, True)])
def test_cancel_of_steps_meets_whichever_is_under_way(played: Played, later: int, meets: bool) -> None:
    played.conversation.begin_run(CONTROLLER, step(2, 1))
    played.comes((CONTROLLER, Cancel((1,), later)), (SERVER, Committed((2,), 0)))
    if meets:
        with pytest.raises(KeyboardInterrupt):
            played.wait((2,), 0)
        played.link.coming.clear()
    else:
        played.wait((2,), 0)
    assert played.conversation.is_cancelled() == meets


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


def test_a_step_begins_when_the_server_says_that_the_one_before_it_is_over(played: Played) -> None:
    played.comes((CONTROLLER, step(1, 1)), (CONTROLLER, step(2, 1)))
    played.conversation.begin_run(*next_run(played))
    with pytest.raises(KeyError):
        played.conversation.next_work()
    played.comes((SERVER, StepFinished((2,), False)))  # not of the one that it waits for
    with pytest.raises(KeyError):
        played.conversation.next_work()
    played.comes((SERVER, StepFinished((1,), False)))
    assert next_run(played) == (CONTROLLER, step(2, 1))


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


def test_a_step_that_comes_late_begins_at_once(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    played.comes((SERVER, StepFinished((1,), False)), (CONTROLLER, step(2, 1)))
    assert next_run(played) == (CONTROLLER, step(2, 1))


@pytest.mark.parametrize("after", [run(3), step(3, 3)])
def test_what_is_no_step_of_that_series_waits_for_nothing(played: Played, after: Run) -> None:
    # The controller sends it when it knows that the steps before are over.
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    played.comes((CONTROLLER, after))
    assert next_run(played) == (CONTROLLER, after)
    played.conversation.begin_run(CONTROLLER, after)
    played.comes((CONTROLLER, step(4, 1)))
    assert next_run(played) == (CONTROLLER, step(4, 1))


def test_steps_after_one_that_failed_are_dropped(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    played.comes((CONTROLLER, step(2, 1)), (SERVER, StepFinished((1,), True)), (CONTROLLER, step(3, 1)))
    played.comes((CONTROLLER, PREPARE), (CONTROLLER, step(4, 4)))
    assert played.conversation.next_work() == (CONTROLLER, PREPARE)
    assert next_run(played) == (CONTROLLER, step(4, 4))


def test_the_next_controller_has_series_of_its_own(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    played.comes((SERVER, StepFinished((1,), True)), (b"cbee", step(1, 1)))
    assert next_run(played) == (b"cbee", step(1, 1))


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


def test_answers_nobody_claimed_go_with_their_run(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    played.comes((SERVER, Committed((1,), 5)), (SERVER, Committed((1,), 0)))
    played.wait((1,), 0)
    played.conversation.begin_run(CONTROLLER, run(2))
    with pytest.raises(KeyError):
        played.wait((1,), 5)


def test_a_wait_is_named(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    played.comes(None, (SERVER, Committed((1,), 0)))
    with caplog.at_level(logging.INFO, "central_storage"):
        played.wait((1,), 0)
    assert "for a test" in caplog.text
    assert played.link.timeouts == [10.0, 10.0]


def test_a_dead_server_ends_waits(played: Played) -> None:
    died = Died("server", 0, 1, 4711, "SIGKILL", "")
    played.comes((SUPERVISOR, Died("worker", 1, 1, 4712, "SIGKILL", "")), (SUPERVISOR, died))
    with pytest.raises(ReplicaLostError, match=r"the server \(pid 4711\) ended by SIGKILL during a test"):
        played.wait((1,), 0)


def test_a_server_in_the_place_of_a_dead_one_is_told_again_what_it_may_not_have_heard(played: Played) -> None:
    serving = Serving("ipc:///run/server", "/run", "")
    died = Died("server", 0, 1, 4711, "SIGKILL", "", restarts=True)
    question = Describe(1, (1,), ())
    said = [Return((number,), 0, 1, (), 0, Value(b"", ()), None) for number in (1, 2)]
    for number in (1, 2):
        played.conversation.begin_run(CONTROLLER, run(number))
        say(played.conversation, said[number - 1])
    played.link.to_server.clear()
    played.comes((SUPERVISOR, died), (SUPERVISOR, serving), (SERVER, Committed((2,), 0)), (SUPERVISOR, serving))
    played.conversation.wait("a test", lambda r: r if isinstance(r, Committed) else None, asked=question)
    assert played.link.to_server == [said[1], question]
    with pytest.raises(KeyError):
        played.conversation.next_work()
    assert played.link.to_server == [said[1], question, said[1]]


def test_what_was_said_of_a_step_that_is_over_is_not_said_again(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, step(1, 1))
    say(played.conversation, Return((1,), 0, 1, (), 0, Value(b"", ()), None, 1, 2))
    played.comes((SERVER, StepFinished((1,), False)), (SUPERVISOR, Serving("ipc:///run/server", "/run", "")))
    with pytest.raises(KeyError):
        played.conversation.next_work()
    assert len(played.link.to_server) == 1


def test_what_was_said_of_nested_runs_and_merge_calls_that_are_over_is_not_said_again(played: Played) -> None:
    said = [Return((1, 0, j), 0, 1, (), 0, Value(b"", ()), None) for j in range(3)]
    serving = (SUPERVISOR, Serving("ipc:///run/server", "/run", "ipc"))
    played.conversation.begin_run(CONTROLLER, run(1))
    for record in said:
        played.during[record.run] = partial(say, played.conversation, record)
    nested = [(HOLDER, run(*record.run)) for record in said]
    played.comes(*nested, serving, nested[1], (SERVER, Committed((1,), 0)))
    played.wait((1,), 0, at_merge_call=True)
    assert played.link.to_server == [*said, said[-1]]
    say(played.conversation, MergeCallReturn((1,), 1, (), error_of(ValueError("no"))))
    played.comes(serving, (SERVER, Committed((1,), 2)), serving, (SERVER, Committed((1,), 3)))
    played.wait((1,), 2, at_merge_call=True)
    played.wait((1,), 3)
    assert len(played.link.to_server) == 6  # the MergeCallReturn twice


def test_a_colleague_that_refuses_ends_the_wait(played: Played) -> None:
    played.comes((COLLEAGUE, Refused(0, error_of(PeerProtocolError("it does not wait")))))
    with pytest.raises(PeerProtocolError, match="refuses a nested run: it does not wait"):
        played.wait((1,), 0)


def test_path_text() -> None:
    assert path_text((5, 2, 0)) == "5.2.0"


def test_a_nested_run_that_comes_again_from_another_holder_is_taken_once(played: Played) -> None:
    played.conversation.begin_run(CONTROLLER, run(1))
    twice = [(HOLDER, run(1, 0, 0)), (b"t0.2", run(1, 0, 0))]
    played.comes(*twice, (SERVER, Committed((1,), 0)), (b"t0.2", run(1, 0, 0)), (SERVER, Committed((1,), 1)))
    played.wait((1,), 0, at_merge_call=True)
    played.wait((1,), 1)
    played.comes((b"t0.2", run(1, 0, 0)), (CONTROLLER, PREPARE))
    assert played.conversation.next_work() == (CONTROLLER, PREPARE)
    assert played.executed == [(HOLDER, (1, 0, 0))]
    assert refusals(played) == []


def test_what_the_server_says_of_workers_is_nobodys_answer(played: Played) -> None:
    heard: list[Record] = []
    played.conversation.hear_of_workers = heard.append
    worker = messages.Worker(1, 2, 8, "cpu:1", "ipc:///w1.2")
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
