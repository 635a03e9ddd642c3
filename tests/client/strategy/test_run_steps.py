"""What becomes of elements and outcomes, against the plain loop; steps are carried out by a played service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.core.pipeline import Arguments, Changes, Sent, Series
from central_storage.data.distributed import DistributedDataset, DistributedIterator
from central_storage.strategy.run_steps import LocalSeries, Steps


class Played:
    """Carries steps out when somebody waits for them; knows what was sent and what began."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.begun: list[int] = []
        self.cancelled = False
        self._functions: dict[int, Callable[[], list[Any]]] = {}

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments, changes: Changes) -> None:
        if series.has_failed:
            return
        ((args, kwargs),) = arguments
        number = len(self.sent) + 1
        self.sent.append(int(args[0][0]))
        self._functions[number] = lambda: [function(*args, **kwargs)]
        series.unanswered.append(Sent((number,), "step", [], b"", [], []))

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        self.cancelled |= cancel
        while len(series.unanswered) > left:
            number = series.unanswered[0].run[0]
            self.begun.append(self.sent[number - 1])
            try:
                results = [KeyboardInterrupt()] if cancel else self._functions[number]()
            except KeyError as error:
                series.failed(error)
            else:
                if cancel:
                    series.failed(results[0])
                else:
                    series.answered(results)


def elements(count: int, fails_at: int | None = None) -> DistributedIterator:
    """[0], [1], ...; where element ``fails_at`` would be comes an OSError."""

    def rounds() -> Iterator[tuple[Any, bool]]:
        for number in range(count):
            if number == fails_at:
                raise OSError(number)
            yield np.array([number]), True

    return DistributedIterator(rounds, lambda: None)


def stepped(
    series: Any, iterator: DistributedIterator, limit: int | None, function: Callable[..., Any], is_own: bool = False
) -> Steps:
    return Steps(series, iterator, is_own, limit, lambda element: series.send(function, [((element,), {})]))


@given(
    count=st.integers(0, 8),
    lookahead=st.integers(0, 4),
    limit=st.none() | st.integers(0, 9),
    fails=st.none() | st.integers(0, 8),
    breaks=st.none() | st.integers(0, 8),
    source_fails=st.none() | st.integers(0, 8),
    settles=st.sets(st.integers(0, 8)),
    is_local=st.booleans(),
)
def test_results_errors_and_elements_are_those_of_the_loop(
    count: int,
    lookahead: int,
    limit: int | None,
    fails: int | None,
    breaks: int | None,
    source_fails: int | None,
    settles: set[int],
    is_local: bool,
) -> None:
    def step(batch: np.ndarray) -> int:
        if batch[0] == fails:
            raise KeyError(fails)
        return int(batch[0])

    # What the loop does.
    available = min(x for x in (count, limit, source_fails) if x is not None)
    ends = available if fails is None else min(available, fails)
    wanted: list[Any] = list(range(ends))
    error: type[Exception] | None = None
    if limit is None or ends < limit:
        if ends == source_fails and ends < count:
            error = OSError
        elif ends == fails and ends < count:
            error = KeyError
    if breaks is not None and breaks < ends:
        wanted, error = wanted[: breaks + 1], None

    played = Played()
    series: Any = LocalSeries(lambda f, a: [f(*a[0][0])]) if is_local else Series(played, lookahead)
    iterator = elements(count, source_fails)
    steps = stepped(series, iterator, limit, step)
    results: list[Any] = []
    raised: type[Exception] | None = None
    try:
        for result in steps:
            results.append(result)
            if not series.has_failed:
                assert iterator.position == min(len(results) + (0 if is_local else lookahead), available)
            if len(results) in settles:
                series.settle()
            if breaks == result:
                break
    except (KeyError, OSError) as caught:
        raised = type(caught)
    assert (results, raised) == (wanted, error)
    has_left = breaks is not None and raised is None and breaks in results
    succeeded = min(len(results) + (0 if is_local else lookahead), ends) if has_left else ends
    steps.close()
    assert steps.steps == succeeded
    assert list(steps) == []
    assert iterator.position == series.begun
    if source_fails is None:
        left = [int(element[0]) for element in iterator]
        assert left == list(range(series.begun, count))
    if not is_local:
        assert played.begun == list(range(series.begun))


def test_an_iterator_of_its_own_is_closed() -> None:
    played = Played()
    iterator = elements(5)
    steps = stepped(Series(played, 1), iterator, None, lambda batch: 0, is_own=True)
    assert next(steps) == 0
    steps.close()
    assert list(iterator) == []
    assert played.begun == [0, 1]


def test_a_ctrl_c_in_the_data_set_cancels_what_was_sent() -> None:
    def rounds() -> Iterator[tuple[Any, bool]]:
        yield np.array([0]), True
        yield np.array([1]), True
        raise KeyboardInterrupt

    played = Played()
    iterator = DistributedIterator(rounds, lambda: None)
    steps = stepped(Series(played, 4), iterator, None, lambda batch: 0)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert played.cancelled
    assert played.begun == [0]
    assert iterator.position == 1


def test_a_step_that_is_dropped_without_a_word_is_waited_for() -> None:
    played = Played()
    steps = stepped(Series(played, 2), elements(5), None, lambda batch: 0)
    next(steps)
    del steps
    assert played.begun == [0, 1, 2]


def test_a_failed_step_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_TRACEBACK", "full")
    played = Played()
    series = Series(played, 1)
    dataset = DistributedDataset([np.zeros(1), np.ones(1)], 1)

    def step(batch: np.ndarray) -> None:
        raise KeyError

    steps = stepped(series, iter(dataset), None, step, is_own=True)
    with pytest.raises(KeyError) as caught:
        next(steps)
    frames = []
    traceback = caught.value.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    taking = next(frame for frame in frames if frame.f_code.co_name == "take")
    assert "outcome" not in taking.f_locals
