"""Handlers of signals at safe points, and not while bytes are on their way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.harness.ctrl_c import pressed_everywhere

from central_storage.controller.interrupts import Interrupted, Interrupts
from cs_runtime.transport.readiness import is_readable


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    made = Interrupts()
    yield made
    made.close()


def wakes(interrupts: Interrupts) -> bool:
    return bool(is_readable(interrupts.fileno(), 0))


def test_it_is_raised_where_it_is_asked_for(interrupts: Interrupts) -> None:
    with interrupts:
        signal.raise_signal(signal.SIGINT)
        assert wakes(interrupts)
        with pytest.raises(KeyboardInterrupt):
            interrupts.hear()
        assert not wakes(interrupts)
        interrupts.hear()


def test_it_is_raised_at_the_end_where_nobody_asked(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts:
        signal.raise_signal(signal.SIGINT)
    assert not wakes(interrupts)
    # As a thread of the script does whose operation follows.
    interrupts.hear()
    with interrupts.deferred():
        pass
    assert not wakes(interrupts)


@pytest.mark.parametrize("before", [False, True], ids=["pressed meanwhile", "pressed before"])
def test_while_deferred_it_neither_raises_nor_wakes(interrupts: Interrupts, before: bool) -> None:
    with interrupts:
        if before:
            signal.raise_signal(signal.SIGINT)
        with interrupts.deferred():
            if not before:
                signal.raise_signal(signal.SIGINT)
            interrupts.hear()
            assert not wakes(interrupts)
        assert wakes(interrupts)
        with pytest.raises(KeyboardInterrupt):
            interrupts.hear()
        assert not wakes(interrupts)


def test_deferring_alone_wakes_nobody(interrupts: Interrupts) -> None:
    with interrupts:
        with interrupts.deferred():
            interrupts.hear()
        assert not wakes(interrupts)


def test_at_no_point_is_it_lost_or_is_anything_left_behind(interrupts: Interrupts) -> None:
    def operation() -> None:
        with interrupts:
            str(1)

    for where, is_raised in pressed_everywhere(operation):
        assert is_raised, where
        assert not interrupts.is_entered, where
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
        with interrupts:
            interrupts.hear()  # none is left of the last operation


def test_an_error_that_a_caller_suppresses_does_not_take_it_along(interrupts: Interrupts) -> None:
    def refused() -> None:
        with suppress(ValueError), interrupts:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("refused")

    with pytest.raises(KeyboardInterrupt) as raised:
        refused()
    assert isinstance(raised.value.__context__, ValueError)


def test_a_second_one_while_the_first_is_raised_is_the_same(interrupts: Interrupts) -> None:
    def pressed_twice() -> None:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            try:
                interrupts.hear()
            finally:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        pressed_twice()
    assert raised.value.__context__ is None


# --- other signals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals whose handlers were called: SIGUSR1 and SIGUSR2 have one."""
    called = list[int]()
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, lambda number, _: called.append(number))
    yield called
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_is_called_at_the_end(interrupts: Interrupts, handled: list[int]) -> None:
    with interrupts:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        interrupts.hear()
        assert wakes(interrupts)  # a wait that begins now ends at once, and calls them
        interrupts.woken()
        assert not wakes(interrupts)
        assert not handled
    assert handled == [signal.SIGUSR2, signal.SIGUSR1]


def test_a_handler_is_called_where_it_may_begin_operations(interrupts: Interrupts, handled: list[int]) -> None:
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
        interrupts.call_handlers()
        assert handled == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGUSR1)
        assert len(handled) == 1
    assert len(handled) == 2


def test_an_operation_of_a_handler_is_an_outermost_one(interrupts: Interrupts, handled: list[int]) -> None:
    def operation(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR2)
        assert handled.pop() == signal.SIGUSR2
        with interrupts:
            signal.raise_signal(signal.SIGUSR2)
            assert not handled
        assert handled.pop() == signal.SIGUSR2
        assert interrupts.is_entered

    signal.signal(signal.SIGUSR1, operation)
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
        interrupts.call_handlers()
        signal.raise_signal(signal.SIGUSR2)
        assert not handled
    assert handled == [signal.SIGUSR2]
    assert not interrupts.is_entered


@pytest.mark.parametrize("within", [False, True], ids=["at the end", "within"])
def test_all_handlers_are_called_though_one_raises(interrupts: Interrupts, handled: list[int], within: bool) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError("too long")

    signal.signal(signal.SIGUSR1, refuse)
    with pytest.raises(TimeoutError, match="too long"), interrupts:  # noqa: PT012
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        if within:
            interrupts.call_handlers()
    assert handled == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is refuse


@pytest.mark.parametrize("at_end", [False, True], ids=["at the beginning", "at the end"])
def test_all_handlers_are_called_though_one_raises_while_they_are_exchanged(
    interrupts: Interrupts, handled: list[int], monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    def exchange(number: int, handler: Any) -> Any:
        before = signal.signal(number, handler)
        if number == signal.SIGUSR2 and at_end is (before is interrupts._noting):
            if not at_end:
                signal.raise_signal(signal.SIGUSR1)
            raise TimeoutError("too long")
        return before

    monkeypatch.setattr("central_storage.controller.interrupts.signal", exchange)
    with pytest.raises(TimeoutError, match="too long"), interrupts:
        signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]
    assert not interrupts.pending
    assert not interrupts.is_entered


def test_a_handler_may_set_another_one(interrupts: Interrupts, handled: list[int]) -> None:
    signal.signal(signal.SIGUSR1, lambda number, _: signal.signal(number, signal.SIG_IGN))
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
        interrupts.call_handlers()
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert not interrupts.pending


def test_what_is_set_within_an_operation_stays(interrupts: Interrupts, handled: list[int]) -> None:
    with interrupts:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_ctrl_c_calls_the_handler_of_the_script(interrupts: Interrupts) -> None:
    called = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    try:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.hear()
            assert not called
        assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_handler_raised_in_a_wait_is_raised_at_the_end(interrupts: Interrupts) -> None:
    error = TimeoutError("too long")
    with pytest.raises(TimeoutError) as raised, interrupts:
        raise Interrupted(error)
    assert raised.value is error
    assert raised.value.__suppress_context__


def test_handlers_that_cannot_be_put_back_are_by_the_next_operation(
    interrupts: Interrupts, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("refused")

    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="refused"), interrupts:
        monkeypatch.setattr("central_storage.controller.interrupts.signal", refuse)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGUSR1) is not before
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before
