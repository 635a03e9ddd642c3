"""Who is welcome, who is refused, and what becomes of the dead."""

from __future__ import annotations

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    OBSERVER,
    Playbook,
    Says,
    asks,
    assigns,
    computes,
    dies,
    first_apply,
    hears,
    reads,
    reduces,
    register,
    returns,
    scalar,
    spec,
    to,
    w,
    worker,
)

from cs_proto.errors import ContextError, PeerProtocolError
from cs_proto.messages import (
    PROTOCOL,
    Ask,
    Assign,
    Cancel,
    Committed,
    Configure,
    Counters,
    Create,
    Died,
    Get,
    Goodbye,
    Got,
    Hello,
    PointFailed,
    Ready,
    Refused,
    Register,
    Registered,
    RunFinished,
    Statistics,
    Welcome,
    WorkerRestarted,
)
from cs_proto.records import Record
from cs_server.events import ClientLeft, Dismiss, ProcessDied, Send

HELLO = Hello(PROTOCOL, "controller", "c", 7)


def registered(replicas: int) -> Registered:
    return Registered(replicas, "CPU:0", tuple(worker(replica) for replica in range(replicas)))


def welcome(*workers: int) -> Welcome:
    return Welcome(2, "CPU:0", 1, tuple(worker(replica) for replica in workers))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_workers_may_take_runs_once_all_have_registered(replicas: int) -> None:
    book = Playbook(replicas)
    for replica in range(replicas - 1):
        book.on(hears(w(replica), register(replica)))
    last = replicas - 1
    everybody = [Send(w(replica), registered(replicas)) for replica in range(replicas)]
    book.on(hears(w(last), register(last)), *everybody)


def test_a_controller_is_welcome_once_all_workers_have_registered() -> None:
    book = Playbook(2)
    book.on(hears(w(0), register(0)))
    book.on(hears(CONTROLLER, HELLO))
    book.on(hears(CONTROLLER, HELLO))  # impatient
    book.on(
        hears(w(1), register(1)),
        Send(w(0), registered(2)),
        Send(w(1), registered(2)),
        Send(CONTROLLER, welcome(0, 1)),
    )
    book.on(hears(CONTROLLER, HELLO), Send(CONTROLLER, welcome(0, 1)))


def test_observers_that_never_said_goodbye_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_server.engine.sessions._OBSERVERS", 2)
    book = Playbook(1).begin()
    for number in (3, 1, 2):
        book.now += 1
        book.does(hears(b"o%d" % number, Hello(PROTOCOL, "observer", f"o{number}", number)))
    book.does(hears(b"o1", Hello(PROTOCOL, "observer", "o1", 1)))  # said again
    forgotten = to(b"o3", Refused, "cs.PeerProtocolError", "has not sent a Hello", number=1)
    book.on(hears(b"o3", Get(1, (), (), False)), forgotten)
    for peer in (b"o1", b"o2"):
        book.on(hears(peer, Get(1, (), (), False)), to(peer, Got))
    assert book.does(hears(CONTROLLER, Statistics(5)))


def test_observers_are_welcome_at_any_time() -> None:
    book = Playbook(2)
    observer = Hello(PROTOCOL, "observer", "o", 8)
    book.on(hears(OBSERVER, observer), Send(OBSERVER, welcome()))
    book.on(hears(w(1), register(1)))
    book.on(hears(b"o2", Hello(PROTOCOL, "observer", "p", 9)), Send(b"o2", welcome(1)))
    book.on(hears(OBSERVER, Statistics(3)), to(OBSERVER, Counters, request=3))


def test_other_protocols_are_refused_with_both_versions() -> None:
    book = Playbook(2)
    both = f"protocol {PROTOCOL + 1}, this server protocol {PROTOCOL}; install the same version"
    book.on(
        hears(w(0), Register(PROTOCOL + 1, worker(0))), to(w(0), Refused, "cs.PeerProtocolError", f"worker.*{both}")
    )
    hello = Hello(PROTOCOL + 1, "observer", "o", 8)
    book.on(hears(OBSERVER, hello), to(OBSERVER, Refused, "cs.PeerProtocolError", f"client.*{both}", number=0))


def test_a_worker_of_no_replica_is_refused() -> None:
    book = Playbook(2)
    book.on(hears(w(2), register(2)), to(w(2), Refused, "cs.InvalidArgumentError", "no replica 2; this service has 2"))


def test_a_second_controller_is_refused_and_told_what_to_do() -> None:
    book = Playbook(2).begin()
    second = Hello(PROTOCOL, "controller", "d", 9)
    book.on(
        hears(b"c2", second),
        to(b"c2", Refused, "cs.ContextError", r"process 7 controls.*needs a service of its own"),
    )
    book.on(hears(CONTROLLER, Goodbye("c")))
    book.on(hears(b"c2", second), Send(b"c2", welcome(0, 1)))
    book.on(hears(CONTROLLER, Goodbye("c")), to(CONTROLLER, Refused, "cs.PeerProtocolError", "has not sent a Hello"))


def test_a_controller_may_come_back_over_another_socket() -> None:
    book = Playbook(2).begin()
    book.on(hears(b"c9", HELLO), Send(b"c9", welcome(0, 1)))
    create = Create("c", 1, spec("w"), None)
    book.on(
        hears(CONTROLLER, create),
        to(CONTROLLER, Refused, "cs.PeerProtocolError", "only the controller may send Create"),
    )


@pytest.mark.parametrize(
    "record",
    [
        Create("o", 4, spec("w"), None),
        Assign("o", 4, 1, "assign", scalar(1)),
        Configure("o", 4, 0, "SGD", (), None, -1),
        Cancel((1,)),
    ],
    ids=lambda record: type(record).__name__,
)
def test_observers_may_only_read(record: Record) -> None:
    book = Playbook(2).begin()
    number = getattr(record, "sequence", 0)
    why = "only the controller may send"
    book.on(hears(OBSERVER, record), to(OBSERVER, Refused, "cs.PeerProtocolError", why, number=number))
    book.on(hears(OBSERVER, Get(5, (), (), False)), to(OBSERVER, Got, request=5, variables=()))
    book.on(hears(OBSERVER, Goodbye("o")))
    book.on(
        hears(OBSERVER, Get(6, (), (), False)),
        to(OBSERVER, Refused, "cs.PeerProtocolError", "not sent a Hello", number=6),
    )


@pytest.mark.parametrize("peer", [OBSERVER, b"x1"])
def test_only_registered_workers_bring_merge_points(peer: bytes) -> None:
    book = Playbook(2).begin()
    ask = Ask((1,), 0, 1, (), reduces(0, scalar(1)))
    book.on(hears(peer, ask), to(peer, Refused, "cs.PeerProtocolError", "has not registered"))


def test_what_is_not_for_the_server_is_refused() -> None:
    book = Playbook(2).begin()
    book.on(
        hears(OBSERVER, Ready()),
        to(OBSERVER, Refused, "cs.PeerProtocolError", "a Ready is not a message for the server"),
    )


# --- scripts that are killed --------------------------------------------------------------------------------------


def test_the_runs_of_a_controller_that_has_gone_are_given_up_and_the_next_one_is_welcome() -> None:
    book = Playbook(2).begin().has(spec("w"))
    book.repeats = False
    book.on(asks(0, reduces(1, scalar(1)), (assigns(0, scalar(1)),)))
    interrupted = to(w(0), PointFailed, "KeyboardInterrupt", "was cancelled", ends_run=True)
    book.on(ClientLeft("c"), Dismiss("c"), Says("client c .pid 7. has gone"), interrupted)
    second = Hello(PROTOCOL, "controller", "d", 9)
    book.on(hears(b"c2", second))
    book.does(returns(0, 2, raises="KeyboardInterrupt"))
    book.on(returns(1, 0, raises="KeyboardInterrupt"), to(b"c2", Welcome, last_run=1))
    assert book.version(1) == 0
    book.on(ClientLeft("c"), Dismiss("c"))  # a server before this one had heard it


def test_what_a_controller_that_has_gone_said_before_may_come_late() -> None:
    book = Playbook(2).begin()
    book.on(hears(CONTROLLER, Goodbye("c")))
    book.on(ClientLeft("c"), Dismiss("c"))
    book.on(hears(CONTROLLER, HELLO), to(CONTROLLER, Refused, "cs.ContextError", "client c has gone"))
    for number in range(20):
        book.on(ClientLeft(f"d{number}"), Dismiss(f"d{number}"))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d19", 9)), to(b"c2", Refused, "cs.ContextError", "has gone"))
    known = len(list(book.memory.items()))
    for number in range(20, 40):
        book.on(ClientLeft(f"d{number}"), Dismiss(f"d{number}"))
    assert len(list(book.memory.items())) == known  # of those that have gone, only the last are remembered
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "e", 9)), Send(b"c2", welcome(0, 1)))


def test_nobody_says_goodbye_for_another() -> None:
    book = Playbook(2).begin()
    book.on(hears(OBSERVER, Goodbye("c")), to(OBSERVER, Refused, "cs.PeerProtocolError", "has not sent a Hello"))
    book.on(hears(CONTROLLER, Statistics(1)), to(CONTROLLER, Counters, request=1))


# --- incarnations -------------------------------------------------------------------------------------------------


def test_a_replaced_worker_is_fenced() -> None:
    book = Playbook(2).begin()
    book.on(dies(0), Says("w0.1.* died: SIGKILL"))
    again = Registered(2, "CPU:0", (worker(0, 2), worker(1)))
    restarted = WorkerRestarted((1,), worker(0, 2))
    book.on(hears(w(0, 2), register(0, 2)), Send(w(0, 2), again), Send(w(1), again), Send(CONTROLLER, restarted))
    book.on(asks(0, reduces(0, scalar(1))), to(w(0), Refused, "cs.Fenced", "w0.1 has been replaced"))
    book.on(returns(0, 0), to(w(0), Refused, "cs.Fenced", "w0.1 has been replaced"))
    book.on(hears(w(0), register(0, 1)), to(w(0), Refused, "cs.Fenced", "w0.1 has been replaced; 2 is expected"))
    book.on(dies(0, 1))  # known


def test_bytes_are_written_under_the_name_of_who_lives() -> None:
    book = Playbook(2).begin()
    writer = book.writer
    assert (writer(w(0)), writer(w(1)), writer(CONTROLLER)) == ("w0", "w1", "controller")
    book.does(hears(OBSERVER, Hello(PROTOCOL, "observer", "o", 8)))
    with pytest.raises(ContextError, match="observers may only get"):
        writer(OBSERVER)
    with pytest.raises(PeerProtocolError, match="b'x' has not sent a Hello"):
        writer(b"x")
    book.does(dies(0))
    with pytest.raises(PeerProtocolError, match="has been replaced"):
        writer(w(0))
    book.does(hears(w(0, 2), register(0, 2)))
    assert writer(w(0, 2)) == "w0"
    with pytest.raises(PeerProtocolError, match="has been replaced"):
        writer(w(0))


def test_a_dead_worker_is_not_heard_before_its_replacement_comes() -> None:
    book = Playbook(2).begin()
    book.does(dies(0))
    book.on(asks(0, reduces(0, scalar(1))), to(w(0), Refused, "cs.Fenced", "is dead"))
    book.on(hears(w(0), register(0, 1)), to(w(0), Refused, "cs.Fenced", "2 is expected"))


def test_a_worker_that_has_not_registered_is_not_heard() -> None:
    book = Playbook(2).begin()
    early = Ask((1,), 0, 2, (), reduces(0, scalar(1)))
    book.on(hears(w(0, 2), early), to(w(0, 2), Refused, "cs.PeerProtocolError", "w0.2.*has not registered"))
    stranger = Ask((1,), 1, 1, (), reduces(0, scalar(1)))
    book.on(hears(w(0), stranger), to(w(0), Refused, "cs.PeerProtocolError", "w1.1 at b'w0.1' has not registered"))


CODE = "cs.PeerProtocolError"


@pytest.mark.parametrize("incarnation", [2, 3, (1 << 31) - 2])
def test_an_incarnation_counts_once_the_death_of_the_one_before_it_is_told(incarnation: int) -> None:
    book = Playbook(2)
    peer, early = w(0, incarnation), rf"worker w0.{incarnation} cannot register: .* not reported the death of w0.1"
    book.on(hears(peer, register(0, incarnation)), to(peer, Refused, CODE, early))
    book.begin()
    book.on(hears(peer, register(0, incarnation)), to(peer, Refused, CODE, early))
    book.on(asks(0, reduces(0, scalar(1))))  # its living worker is not fenced
    book.on(asks(1, reduces(0, scalar(1))), computes((scalar(1),), (scalar(1),), reduce="SUM"))
    book.does(dies(0))
    peer = w(0, incarnation + 1)
    late = rf"worker w0.{incarnation + 1} cannot register: .* not reported the death of w0.2"
    book.on(hears(peer, register(0, incarnation + 1)), to(peer, Refused, CODE, late))
    assert to(w(0, 2), Registered).fits(book.does(hears(w(0, 2), register(0, 2)))[0])


# --- deaths -------------------------------------------------------------------------------------------------------


def test_the_place_of_a_worker_that_lives_is_taken() -> None:
    book = Playbook(2).begin()
    said = "w0.1 has registered from another process; its place is taken"
    book.on(hears(b"another", register(0)), to(b"another", Refused, "cs.PeerProtocolError", said))
    book.on(hears(w(0), register(0)), *(Send(w(replica), registered(2)) for replica in (0, 1)))  # as often as it likes


def test_whoever_waits_to_be_welcome_learns_of_a_death() -> None:
    book = Playbook(2)
    book.does(hears(w(0), register(0)))
    book.on(hears(CONTROLLER, HELLO))
    lost = to(CONTROLLER, Refused, "cs.ReplicaLostError", "replica 1 .pid 101, w1.1.: SIGKILL", number=0)
    book.on(dies(1), Says("replica 1 .* died: SIGKILL"), lost)
    book.on(hears(CONTROLLER, HELLO), lost)
    book.on(hears(OBSERVER, Hello(PROTOCOL, "observer", "o", 8)), Send(OBSERVER, welcome(0)))
    book.does(hears(w(1, 2), register(1, 2)))
    book.on(hears(CONTROLLER, HELLO), to(CONTROLLER, Welcome))


def test_only_deaths_of_workers_matter_here() -> None:
    book = Playbook(2).begin()
    book.on(ProcessDied(Died("server", 0, 1, 5, "SIGKILL", "")))
    book.on(dies(7))


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_run_that_loses_a_replica_ends_when_the_others_have_returned(replicas: int) -> None:
    book = Playbook(replicas).begin()
    others = range(1, replicas)
    for replica in others:
        book.on(asks(replica, reduces(0, scalar(1))))
    why = (
        r"replica 0 \(pid 100, w0.1\) was lost in run 1: SIGKILL. 0 commits of this run are kept, "
        ".*make a new CentralStorageStrategy"
    )
    failed = [to(w(replica), PointFailed, "cs.ReplicaLostError", why, ends_run=True) for replica in others]
    finished = to(CONTROLLER, RunFinished, "cs.ReplicaLostError", why, commits=0, values=())
    book.on(dies(0), Says("died"), *failed)
    for replica in others:
        echo = returns(replica, 1, raises="cs.ReplicaLostError")
        book.on(echo, *([finished] if replica == replicas - 1 else []))
    book.repeat_all()


def test_a_run_that_loses_its_only_replica_ends_at_once() -> None:
    book = Playbook(1).begin()
    book.on(asks(0, reduces(0, scalar(1))), computes((scalar(1),), reduce="SUM"))
    book.on(dies(0), Says("died"), to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "replica 0 .*SIGKILL", commits=0))
    book.on(book.computed(scalar(1)))


def test_a_replica_that_has_returned_may_die() -> None:
    book = Playbook(2).begin()
    book.on(returns(0, 0))
    book.on(dies(0), Says("died"))
    book.on(returns(1, 0), to(CONTROLLER, RunFinished, commits=0))


def test_runs_fail_at_once_while_a_replica_is_dead() -> None:
    book = Playbook(2).begin()
    book.does(dies(1))
    why = r"replica 1 \(pid 101, w1.1\) is dead: SIGKILL. Run 1 was not started"
    book.on(
        asks(0, reduces(0, scalar(1))),
        to(CONTROLLER, RunFinished, "cs.ReplicaLostError", why),
        to(w(0), PointFailed, "cs.ReplicaLostError", why, ends_run=True),
    )
    book.on(asks(0, reduces(1, scalar(1))), to(w(0), PointFailed, "cs.ReplicaLostError", why, k=1, ends_run=True))
    book.on(returns(0, 2, raises="cs.ReplicaLostError"))
    book.does(hears(w(1, 2), register(1, 2)))
    book.on(returns(0, 0, run=(2,)))
    again = hears(w(1, 2), returns(1, 0, run=(2,)).record)
    book.on(again, to(w(1, 2), Refused, "cs.Fenced"))


def test_the_dead_say_how_many_commits_stand() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer()
    for replica in (0, 1):
        book.does(asks(replica, first_apply(0, 1)))
    for replica in (0, 1):
        book.does(asks(replica, reads(1)))
    assert book.ticket()
    book.on(dies(1), Says("died"))  # nobody is let go on during a commit
    why = "1 commit of this run is kept, the rest was dropped"
    book.on(book.finished(), to(w(0), Committed, k=1))
    book.on(
        returns(0, 1),
        to(CONTROLLER, RunFinished, "cs.ReplicaLostError", why, commits=1),
    )
