"""Ctrl-C at safe points, and not while bytes are on their way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.harness.ctrl_c import pressed_everywhere

from central_storage.controller.interrupts import Interrupts
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
            interrupts.raise_pending()
        assert not wakes(interrupts)
        interrupts.raise_pending()


def test_it_is_raised_at_the_end_where_nobody_asked(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts:
        signal.raise_signal(signal.SIGINT)
    assert not wakes(interrupts)
    # As a thread of the script does whose operation follows.
    interrupts.raise_pending()
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
            interrupts.raise_pending()
            assert not wakes(interrupts)
        assert wakes(interrupts)
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_pending()
        assert not wakes(interrupts)


def test_deferring_alone_wakes_nobody(interrupts: Interrupts) -> None:
    with interrupts:
        with interrupts.deferred():
            interrupts.raise_pending()
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
            interrupts.raise_pending()  # none is left of the last operation


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
                interrupts.raise_pending()
            finally:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        pressed_twice()
    assert raised.value.__context__ is None
