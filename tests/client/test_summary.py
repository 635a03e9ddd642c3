"""``cs.summary.TensorBoard``: what is written, and what is refused. ``tests/interop`` reads the files as TensorBoard
does."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import central_storage as cs
from central_storage import summary
from central_storage.observer.blocking import Observer


def written(directory: Path) -> list[tuple[str, int, float]]:
    """Name, step and value of every scalar in the files of the directory."""
    found = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            content = content[16 + length :]
    return found


class Late:
    """A number on a GPU: it comes when the test says so."""

    shape = ()

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def __float__(self) -> float:
        self.has_come.wait()
        return 0.25


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[cs.summary.TensorBoard]:
    with cs.summary.TensorBoard(tmp_path, service_every=None) as writer:
        yield writer


def test_numbers_of_every_kind_are_written_in_order(writer: cs.summary.TensorBoard, tmp_path: Path) -> None:
    rate = cs.optimizers.SGD(0.5).learning_rate
    values = (1, 0.5, np.float32(2), np.array([3.0]), cs.PerReplica([1.0, 2.0]), rate, cs.Variable(4.0), True)
    for step, value in enumerate(values):
        writer.scalar("a/b", value, step)
    writer.flush()
    assert written(tmp_path) == [("a/b", step, value) for step, value in enumerate((1, 0.5, 2, 3, 1.5, 0.5, 4, 1))]


def test_numbers_and_steps_beyond_what_the_file_holds(writer: cs.summary.TensorBoard, tmp_path: Path) -> None:
    last = (1 << 63) - 1
    for value in (10**400, -(10**400), 1e300, float("-inf")):
        writer.scalar("x", value, last)
    writer.flush()
    assert written(tmp_path) == [("x", last, value) for value in (np.inf, -np.inf, np.inf, -np.inf)]


def test_a_number_that_is_not_there_yet_holds_up_no_one_but_the_thread(tmp_path: Path) -> None:
    with cs.summary.TensorBoard(tmp_path, service_every=None) as writer:
        late = Late()
        writer.scalar("late", late, 0)
        writer.scalar("both", cs.PerReplica([late, late]), 1)
        writer.scalar("next", 1.0, 2)
        late.has_come.set()
    assert written(tmp_path) == [("late", 0, 0.25), ("both", 1, 0.25), ("next", 2, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", 1.0, 0), cs.errors.InvalidArgumentError),
        (("\ud800", 1.0, 0), cs.errors.InvalidArgumentError),
        (("x", 1.0, -1), cs.errors.InvalidArgumentError),
        (("x", 1.0, 1 << 63), cs.errors.InvalidArgumentError),
        (("x", np.zeros(2), 0), cs.errors.InvalidArgumentError),
        (("x", cs.PerReplica([np.zeros(2), 1.0]), 0), cs.errors.InvalidArgumentError),
        ((3, 1.0, 0), TypeError),
        (("x", 1.0, 0.5), TypeError),
        (("x", "1", 0), TypeError),
        (("x", None, 0), TypeError),
        (("x", 1j, 0), TypeError),
        (("x", np.array("text"), 0), TypeError),
    ],
)
def test_what_is_no_number_is_refused(
    writer: cs.summary.TensorBoard, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        writer.scalar(*arguments)


def test_a_closed_writer_says_so_and_closes_once(tmp_path: Path) -> None:
    writer = cs.summary.TensorBoard(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(cs.errors.ShutdownError, match="is closed"):
        writer.scalar("x", 1.0, 0)


@pytest.mark.parametrize("every", [0, -1.0, True, "1"])
def test_a_pause_that_is_none_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="service_every"):
        cs.summary.TensorBoard(tmp_path, service_every=every)


def test_an_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("central_storage.diagnostics.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'central-storage\[tensorboard\]'"):
        cs.summary.TensorBoard(tmp_path)


@pytest.mark.parametrize("where", ["write_event", "flush"])
def test_a_full_disk_is_said_once_and_by_flush(
    writer: cs.summary.TensorBoard, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*event: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer._writer._file, where, full)
    with caplog.at_level("WARNING", logger="central_storage.summary"):
        for step in range(3):
            writer.scalar("x", 1.0, step)
        with pytest.raises(OSError, match="No space left on device; scalars since the last flush are lost"):
            writer.flush()
    monkeypatch.undo()
    writer.flush()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"cannot write scalars to {writer._writer.directory}"
    ]


def test_an_array_that_cannot_be_read_is_named(
    writer: cs.summary.TensorBoard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        shape = ()

        def __float__(self) -> float:
            raise RuntimeError("the GPU is gone")

    with caplog.at_level("WARNING", logger="central_storage.summary"):
        writer.scalar("x", Broken(), 7)
        writer.scalar("y", 1.0, 8)
        writer.flush()
    assert "cannot read x of step 7: the GPU is gone" in caplog.text
    assert written(tmp_path) == [("y", 8, 1.0)]


def test_the_services_own_numbers_are_those_between_two_looks(tmp_path: Path) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        with strategy.scope():
            w = cs.Variable(np.zeros(8, np.float32), aggregation=cs.VariableAggregation.SUM)
        service = summary._Service(strategy.address, 1e6)
        assert service.numbers(is_last=False) == []  # the first look has nothing to compare with
        for _ in range(3):
            strategy.run(lambda: w.assign_add(np.ones(8, np.float32), read_value=False))
        assert service.numbers(is_last=False) == []  # not due
        found = {item.name.removeprefix("service/"): item for item in service.numbers(is_last=True)}
        runs = strategy.statistics().runs
    assert found.keys() - {"captured_share"} == {
        "steps_per_second", "commits", "parameter_bytes", "slot_bytes", "private_bytes"
    }  # fmt: skip
    assert {item.step for item in found.values()} == {runs}
    assert found["steps_per_second"].value > 0  # type: ignore[operator]
    assert found["parameter_bytes"].value == 32.0
    assert found["private_bytes"].value > 1e6  # type: ignore[operator]
    assert service.numbers(is_last=True) == []  # it has ended


@pytest.fixture
def service() -> Iterator[tuple[cs.CentralStorageStrategy, summary._Service]]:
    """A service, and its numbers, of which the first look is over."""
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        service = summary._Service(strategy.address, 1e6)
        assert service.numbers(is_last=False) == []
        yield strategy, service
        service._let_go()


def answers_late(monkeypatch: pytest.MonkeyPatch, times: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Let the server be late for its next answers."""
    statistics, left = Observer.statistics, [times]

    def late(observer: Observer) -> cs.Counters:
        left[0] -= 1
        if left[0] < 0:
            return statistics(observer)
        meanwhile()
        raise cs.errors.NoAnswerError("the server is late")

    monkeypatch.setattr(Observer, "statistics", late)


def test_a_service_that_answers_late_has_its_last_numbers(
    service: tuple[cs.CentralStorageStrategy, summary._Service],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if a look before the last one had no answer at all."""
    service[1]._due = 0.0
    answers_late(monkeypatch, 1)
    assert service[1].numbers(is_last=False) == []
    monkeypatch.undo()
    answers_late(monkeypatch, 3)
    assert "service/commits" in [item.name for item in service[1].numbers(is_last=True)]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the server is late: the end waits for its last numbers, for at most 60 s"
    ]


def test_the_end_waits_for_no_service_that_is_over(
    service: tuple[cs.CentralStorageStrategy, summary._Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_late(monkeypatch, 1, service[0].shutdown)
    assert service[1].numbers(is_last=True) == []


def test_the_end_does_not_wait_for_ever(
    service: tuple[cs.CentralStorageStrategy, summary._Service],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers_late(monkeypatch, np.inf)
    monkeypatch.setattr(summary, "_LAST_TIMEOUT", 0.01)
    assert service[1].numbers(is_last=True) == []
    assert "the server is late: its last numbers are not written" in caplog.messages


def test_an_end_between_two_looks_has_the_last_numbers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    def numbers(service: summary._Service, *, is_last: bool) -> list[summary._Item]:
        looked.append(is_last)
        made._writer._ended.set()  # while the thread looks
        return []

    monkeypatch.setattr(summary, "_EVERY", 1e6)
    ready = threading.Event()
    monkeypatch.setattr(summary._Service, "numbers", lambda *given, **known: ready.wait() and numbers(*given, **known))
    made = cs.summary.TensorBoard(tmp_path)
    ready.set()
    made._writer._thread.join()
    made.close()
    assert looked == [False, True]


def test_counters_that_began_anew_give_no_numbers() -> None:
    old = cs.Counters(1, 4711, 2.5, 3, 1024, 0, 7, 7, 30, ())
    assert summary._numbers((0.0, old), (1.0, cs.Counters(2, 4712, 0.1, 3, 1024, 0, 1, 1, 3, ()))) == {}
    captured = cs.Counters(2, 4711, 3.5, 3, 1024, 0, 9, 11, 40, (), captured=3, uncaptured=(("a", 1),))
    assert summary._numbers((0.0, old), (2.0, captured)) == {
        "steps_per_second": 2.0,
        "commits": 9.0,
        "captured_share": 0.75,
        "parameter_bytes": 1024.0,
        "slot_bytes": 0.0,
    }


def test_two_writers_of_one_directory_have_files_of_their_own(tmp_path: Path) -> None:
    """Also within a second, of which the library names its files."""
    with cs.summary.TensorBoard(tmp_path) as one, cs.summary.TensorBoard(tmp_path) as other:
        one.scalar("x", 1.0, 0)
        other.scalar("x", 2.0, 0)
    assert len(list(tmp_path.iterdir())) == 2
