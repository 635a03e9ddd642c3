"""What the script drops is freed, and the names that change by it are learnt, whatever comes between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from tests.harness.ctrl_c import pressed_everywhere

import central_storage as cs
import central_storage.controller.session
import central_storage.strategy.open_service
import central_storage.strategy.running
from central_storage.controller.core import ControllerCore
from central_storage.core import context
from cs_proto.messages import Free, Get
from cs_proto.records import Record


@pytest.fixture
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(in_process=True) as made, made.scope():
        yield made


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Sets the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_handler(made: Callable[..., object]) -> None:
        signal.signal(signal.SIGUSR1, made)

    yield set_handler
    signal.signal(signal.SIGUSR1, before)


def _ctrl_c_at(kind: type[Record], strategy: cs.CentralStorageStrategy, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the script waits for the answer to the next request of this kind."""
    session = strategy.controller._session
    receive: Callable[[float], object] = session.receive

    def interrupted(timeout: float) -> object:
        if not isinstance(getattr(session.core._waits[-1], "request", None), kind):
            return receive(timeout)
        patch.undo()
        raise KeyboardInterrupt

    patch.setattr(session, "receive", interrupted)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (zmq.Context, "_add_socket"),
        (central_storage.controller.session, "OutputListener"),
        (central_storage.strategy.open_service, "announce"),
        (central_storage.strategy.running, "note"),
    ],
    ids=["a socket is not noted yet", "a thread has started", "nobody closes it yet", "the strategy is not made yet"],
)
def test_ctrl_c_at_a_start_is_raised_and_leaves_nothing(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, pressed = getattr(owner, name), list[bool]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cs.CentralStorageStrategy(in_process=True)
    assert pressed


def test_ctrl_c_at_the_end_is_raised_when_all_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = cs.CentralStorageStrategy(in_process=True)
    destroy = zmq.Context.destroy

    def interrupted(context: Any, linger: int | None = None) -> None:
        destroy(context, linger)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(zmq.Context, "destroy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strategy.shutdown()
    strategy.shutdown()


def _zero() -> int:
    return 0


OPERATIONS: dict[str, Callable[[cs.CentralStorageStrategy, cs.Variable], object]] = {
    "run": lambda strategy, w: strategy.run(_zero),
    "read": lambda strategy, w: w.numpy(),
    "write": lambda strategy, w: w.assign(1.0),
    "create": lambda strategy, w: cs.Variable(1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_ctrl_c_at_any_point_is_raised_and_the_next_operation_works(
    strategy: cs.CentralStorageStrategy, name: str
) -> None:
    w, pressed = cs.Variable(0.0, name="w"), 0
    made = list[object]()  # what is dropped calls weak references, in which Python itself drops a Ctrl-C
    for where, is_raised in pressed_everywhere(lambda: made.append(OPERATIONS[name](strategy, w)), every=41):
        assert is_raised, where
        assert not strategy.controller._session.interrupts.is_entered, where
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
        made.append(OPERATIONS[name](strategy, w))
        pressed += 1
    assert pressed > 3


@pytest.mark.parametrize("name", OPERATIONS)
def test_at_any_point_a_handler_may_begin_an_operation(
    strategy: cs.CentralStorageStrategy, name: str, handler: Callable[[Callable[..., object]], None]
) -> None:
    w, read, made = cs.Variable(0.0, name="w"), list[object](), list[object]()
    handler(lambda *_: read.append((strategy.run(_zero), w.numpy())))
    for times, (where, _) in enumerate(
        pressed_everywhere(lambda: made.append(OPERATIONS[name](strategy, w)), 41, signal.SIGUSR1), 1
    ):
        assert len(read) == times, where
        assert len(made) == times, where
        assert not strategy.controller._session.interrupts.is_entered, where
    assert len(read) > 3


def test_ctrl_c_leaves_the_context_of_a_run(strategy: cs.CentralStorageStrategy) -> None:
    """At every point of ``in_cross_replica``, which Ctrl-C may leave by one entry too many."""
    made = list[object]()

    def one() -> object:
        made.append(1)
        return made

    before = list(context._stack.entries)
    for where, is_raised in pressed_everywhere(lambda: context.in_cross_replica(strategy, one)):
        assert is_raised, where
        assert context._stack.entries == before, where
    assert len(made) > 1


def test_names_come_back_though_ctrl_c_left_what_freed_them(
    strategy: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cs.Variable(1.0, name="w"), cs.Variable(2.0, name="w")
    _ctrl_c_at(Free, strategy, monkeypatch)
    del first
    with pytest.raises(KeyboardInterrupt):
        second.assign(3.0)
    assert second.numpy() == 2.0
    assert second.name == "w"


class _MadeInReplicas:
    is_empty = False

    def unneeded(self, *_: object) -> list[int]:
        return []


def test_what_ctrl_c_kept_from_being_freed_is_freed_later(
    strategy: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cs.Variable(1.0, name="w"), cs.Variable(2.0, name="w")
    strategy.controller._made_in_replicas = _MadeInReplicas()
    _ctrl_c_at(Get, strategy, monkeypatch)
    del first
    with pytest.raises(KeyboardInterrupt):
        second.assign(3.0)
    assert [variable.number for variable in strategy.controller.variables()] == [second.number]


def test_nothing_is_freed_while_runs_are_unanswered(
    strategy: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cs.Variable(1.0, name="w"), cs.Variable(2.0, name="w")
    with monkeypatch.context() as patch:
        patch.setattr(ControllerCore, "has_unanswered", True)
        del first
        assert len(strategy.controller.variables()) == 2
    assert [variable.number for variable in strategy.controller.variables()] == [second.number]
