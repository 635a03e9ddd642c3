"""Ctrl-C at safe points, and not while bytes are on their way."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

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
