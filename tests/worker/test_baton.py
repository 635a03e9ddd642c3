"""Replicas that are threads: one has the turn, in replica order, and its random state comes and goes with it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.harness.timing import unit

from cs_worker.baton import ProcessBaton, ThreadBaton


class Players:
    """Threads that take turns; what they do is noted in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, play: Callable[[], None]) -> None:
        def run() -> None:
            try:
                play()
            except BaseException as error:  # noqa: BLE001  (told by finish)
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def finish(self) -> list[BaseException]:
        for thread in self._threads:
            thread.join(unit(10))
            assert not thread.is_alive()
        return self._errors


@pytest.fixture
def players() -> Iterator[Players]:
    players = Players()
    yield players
    players.finish()


@pytest.fixture
def turns() -> Iterator[list[ThreadBaton]]:
    turns = [ThreadBaton("service", replica) for replica in range(3)]
    yield turns
    for each in turns:
        each.leave()


def test_the_lowest_begins_and_goes_on_first_whoever_comes_first(players: Players, turns: list[ThreadBaton]) -> None:
    waiting = threading.Barrier(3)

    def play(replica: int) -> Callable[[], None]:
        def run() -> None:
            with turns[replica].taken((7,)):
                players.said.append(f"{replica} begins")
                with turns[replica].paused():
                    waiting.wait(unit(10))
                turns[replica].pass_point((7,), 0)
                players.said.append(f"{replica} goes on")

        return run

    for replica in (2, 1, 0):
        players.start(play(replica))
    assert players.finish() == []
    assert players.said == [f"{replica} {what}" for what in ("begins", "goes on") for replica in range(3)]


def test_one_that_does_not_come_holds_up_nobody(players: Players, turns: list[ThreadBaton]) -> None:
    def play() -> None:
        with turns[1].taken((7,)):
            players.said.append("alone")

    players.start(play)
    assert players.finish() == []
    assert players.said == ["alone"]


def test_each_has_its_own_random_state_and_the_script_its_own(players: Players, turns: list[ThreadBaton]) -> None:
    waiting = threading.Barrier(2)
    drawn: dict[int, list[float]] = {0: [], 1: []}

    def play(replica: int) -> Callable[[], None]:
        def run() -> None:
            with turns[replica].taken((1,)):
                random.seed(replica)
                np.random.seed(replica)
                drawn[replica] += [random.random(), np.random.random()]
                with turns[replica].paused():
                    waiting.wait(unit(10))
                drawn[replica] += [random.random(), np.random.random()]

        return run

    random.seed(99)
    np.random.seed(99)
    for replica in range(2):
        players.start(play(replica))
    assert players.finish() == []
    mine = random.random(), np.random.random()
    for replica in range(2):
        random.seed(replica)
        np.random.seed(replica)
        assert drawn[replica] == [random.random(), np.random.random(), random.random(), np.random.random()]
    random.seed(99)
    np.random.seed(99)
    assert mine == (random.random(), np.random.random())


def test_whoever_waits_for_a_turn_can_be_told_to_end(players: Players, turns: list[ThreadBaton]) -> None:
    def wait() -> None:
        with turns[0].taken((1,)):
            players.said.append("had a turn")

    with turns[1].taken((0,)):
        players.start(wait)
        turns[0].end()
        [error] = players.finish()
    assert isinstance(error, SystemExit)
    assert players.said == []


def test_a_turn_is_taken_from_one_that_hangs(players: Players, turns: list[ThreadBaton]) -> None:
    has_turn, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        with turns[0].taken((1,)):
            random.seed(1)
            has_turn.set()
            may_end.wait(unit(10))
            random.seed(2)  # it hung: from here on this is the script's state, and nobody puts it back

    random.seed(99)
    expected = random.Random(99)
    players.start(hang)
    assert has_turn.wait(unit(10))
    turns[0].leave()
    assert random.random() == expected.random()
    with turns[1].taken((0,)):
        pass
    may_end.set()
    assert players.finish() == []


def test_a_wait_ends_where_the_worker_is_to_end(turns: list[ThreadBaton]) -> None:
    with pytest.raises(SystemExit), turns[0].paused():
        turns[0].end()


def test_a_process_needs_no_turns() -> None:
    turns = ProcessBaton()
    with turns.taken((1,)), turns.paused():
        turns.pass_point((1,), 0)
