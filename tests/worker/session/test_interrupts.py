"""KeyboardInterrupt appears in the user's code of the cancelled run and nowhere else."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from tests.harness.timing import unit

from cs_runtime.transport.readiness import is_readable
from cs_worker.execution.replica import Replica, _whole
from cs_worker.session.interrupts import Interrupts, ThreadInterrupts, ring_doorbell


class Mail:
    """Cancels that have been sent but not been read."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts
        self.unread: list[int] = []
        self.cancelled: int | None = None
        self.run = 1
        self.waits: list[float] = []
        interrupts.attend_to(self.is_cancelled, self.fetch)

    def is_cancelled(self) -> bool:
        return self.cancelled == self.run

    def fetch(self, timeout: float) -> None:
        self.waits.append(timeout)
        for run in self.unread:
            self.read(run)
        self.unread.clear()

    def read(self, run: int) -> None:
        self.cancelled = run
        self.interrupts.note_cancel()


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    interrupts.install()
    yield interrupts
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.fixture
def mail(interrupts: Interrupts) -> Mail:
    return Mail(interrupts)


def _in_a_block(interrupts: Interrupts, done: list[str]) -> None:
    with interrupts.own_code():
        done.append("begin")
        done.append("end")


def _in_a_method(interrupts: Interrupts, done: list[str]) -> None:
    """As the user's code calls a replica."""
    shop = SimpleNamespace(interrupts=interrupts, thread=threading.get_ident())
    replica: Any = SimpleNamespace(_shop=shop)
    _whole(_in_two_parts)(replica, done)


def _in_two_parts(replica: Replica, done: list[str]) -> None:
    done.append("begin")
    done.append("end")


def ring() -> None:
    """SIGINT to this very thread; its handler has run when this returns."""
    signal.raise_signal(signal.SIGINT)


def test_in_user_code_the_mail_decides(interrupts: Interrupts, mail: Mail) -> None:
    mail.unread = [1]
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():
        ring()
    assert mail.waits == [1.0]


def test_a_signal_that_nothing_explains_is_ignored(
    interrupts: Interrupts, mail: Mail, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "central_storage"), interrupts.user_code():
        ring()
    assert "ignored" in caplog.text
    with interrupts.user_code():
        pass  # and not looked at again
    assert mail.waits == [1.0]


def test_in_own_code_nothing_is_raised(interrupts: Interrupts, mail: Mail) -> None:
    mail.unread = [1]
    ring()
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():
        pytest.fail("a signal that came before is looked at first")


def test_a_signal_during_own_code_is_looked_at_after_it(interrupts: Interrupts, mail: Mail) -> None:
    steps = []
    mail.unread = [1]
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():  # noqa: PT012
        with interrupts.own_code():
            ring()
            steps.append("whole")
        steps.append("never")
    assert steps == ["whole"]


def test_a_cancel_that_was_seen_first_raises_without_mail(interrupts: Interrupts, mail: Mail) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():  # noqa: PT012
        with interrupts.own_code():
            mail.read(1)
        pytest.fail("the run is cancelled")
    ring()  # comes late
    mail.run = 2
    interrupts.begin_run()
    with interrupts.user_code():
        pass
    assert mail.waits == []


def test_a_stale_signal_does_not_hit_the_next_run(interrupts: Interrupts, mail: Mail) -> None:
    mail.read(1)  # the run has returned by itself; its Cancel is read only now, its signal comes now
    ring()
    mail.run = 2
    interrupts.begin_run()
    with interrupts.user_code():
        pass
    assert mail.waits == []


def test_a_cancel_whose_signal_never_comes_does_not_deafen(interrupts: Interrupts, mail: Mail) -> None:
    mail.read(1)
    mail.run = 2
    interrupts.begin_run()
    mail.unread = [2]
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():
        ring()


def test_once_a_run(interrupts: Interrupts, mail: Mail) -> None:
    mail.unread = [1]
    cleaned_up = False
    with pytest.raises(KeyboardInterrupt), interrupts.user_code():  # noqa: PT012
        try:
            ring()
        finally:
            ring()  # in the user's own cleaning up
            cleaned_up = True
    assert cleaned_up


def test_nested_parts_restore_what_was_before(interrupts: Interrupts, mail: Mail) -> None:
    with interrupts.user_code():
        with interrupts.own_code(), interrupts.user_code():
            pass
        mail.unread = [1]
        with pytest.raises(KeyboardInterrupt):
            ring()


def test_sigterm_ends_and_is_remembered(interrupts: Interrupts, mail: Mail) -> None:
    assert not interrupts.terminating
    with pytest.raises(SystemExit) as ended, interrupts.user_code():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 0
    assert interrupts.terminating


@pytest.mark.parametrize("own", [_in_a_block, _in_a_method])
def test_at_every_instant(own: Callable[[Interrupts, list[str]], None]) -> None:
    """The signal arrives before each bytecode in turn: own code is never torn, nothing is lost, nothing stays armed."""
    step, reached, raised_inside = 0, True, 0
    while reached:
        interrupts = Interrupts()
        mail = Mail(interrupts)
        mail.unread = [1]
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        interrupts.install()
        try:
            done, raised, reached = _run_and_ring_at(step, interrupts, own)
            assert done == ["begin", "end"] * (len(done) // 2)
            raised_inside += raised
            if not raised and reached:  # it came after the user's code: seen by the next of the same run
                with pytest.raises(KeyboardInterrupt), interrupts.user_code():
                    pass
            ring()  # outside of all user code
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])
        step += 1
    assert raised_inside > 50


def _run_and_ring_at(
    step: int, interrupts: Interrupts, own: Callable[[Interrupts, list[str]], None]
) -> tuple[list[str], bool, bool]:
    """What ``own`` code did, whether KeyboardInterrupt came out, whether there were as many bytecodes."""
    done: list[str] = []
    left = step

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                ring()
        return count

    def run() -> None:
        with interrupts.user_code():
            for _ in range(2):
                own(interrupts, done)

    before = sys.gettrace()
    gc.disable()  # whoever is told of a collection is called here, and what is raised there goes nowhere
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts them only where a frame wants them when it is told
    sys.settrace(count)
    try:
        run()
    except KeyboardInterrupt:
        return done, True, True
    finally:
        sys.settrace(before)
        gc.enable()
    return done, False, left < 0


def test_a_signal_rings_the_doorbell() -> None:
    before = signal.set_wakeup_fd(-1)
    doorbell = ring_doorbell()
    writer = signal.set_wakeup_fd(before)
    try:
        assert not is_readable(doorbell, 0)
        signal.set_wakeup_fd(writer)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert os.read(doorbell, 64) == bytes([signal.SIGINT])
    finally:
        signal.set_wakeup_fd(before)
        os.close(doorbell)
        os.close(writer)


# --- a worker that is a thread ---------------------------------------------------------------------------------------


class Thread:
    """A worker's thread: runs ``function`` as the user's code and keeps what it raises."""

    def __init__(self, function: Callable[[Thread], None]) -> None:
        self.interrupts = ThreadInterrupts()
        self.mail = Mail(self.interrupts)
        self.raised: BaseException | None = None
        self.at_work, self.go_on = threading.Event(), threading.Event()
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.at_work.wait(unit(10))

    def _run(self) -> None:
        self.interrupts.install()
        self.interrupts.begin_run()
        try:
            with self.interrupts.user_code():
                self._function(self)
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            self.raised = error

    def cancel(self) -> None:
        """What the client does at Ctrl-C."""
        self.mail.unread.append(1)
        self.interrupts.ring()

    def end(self) -> BaseException | None:
        self.go_on.set()
        self._thread.join(unit(10))
        assert not self._thread.is_alive()
        return self.raised


def forever(thread: Thread) -> None:
    thread.at_work.set()
    while True:
        pass


def test_a_ring_interrupts_the_users_code_in_a_thread() -> None:
    thread = Thread(forever)
    thread.cancel()
    assert isinstance(thread.end(), KeyboardInterrupt)
    assert not thread.interrupts.is_unheard


def test_a_ring_in_own_code_is_heard_behind_it() -> None:
    def work(thread: Thread) -> None:
        with thread.interrupts.own_code():
            thread.at_work.set()
            assert thread.go_on.wait(unit(10))
            said.append("not torn apart")
        said.append("too far")

    said: list[str] = []
    thread = Thread(work)
    thread.cancel()
    assert isinstance(thread.end(), KeyboardInterrupt)
    assert said == ["not torn apart"]


def test_a_ring_that_no_cancelled_run_explains_is_ignored_in_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    def work(thread: Thread) -> None:
        with thread.interrupts.own_code():
            thread.at_work.set()
            assert thread.go_on.wait(unit(10))

    thread = Thread(work)
    thread.interrupts.ring()
    assert thread.end() is None
    assert "because no run was cancelled" in caplog.text


def test_code_that_does_not_come_back_is_known_and_raises_when_it_does() -> None:
    reader, writer = os.pipe()

    def hang(thread: Thread) -> None:
        thread.at_work.set()
        os.read(reader, 1)
        with thread.interrupts.own_code():
            said.append("too far")

    said: list[str] = []
    thread = Thread(hang)
    thread.cancel()
    assert thread.interrupts.is_unheard
    os.write(writer, b"!")
    assert isinstance(thread.end(), KeyboardInterrupt)
    assert said == []
    os.close(reader)
    os.close(writer)


def test_one_interrupt_is_raised_once() -> None:
    def work(thread: Thread) -> None:
        try:
            forever(thread)
        except KeyboardInterrupt:
            for _ in range(100):
                with thread.interrupts.own_code():
                    said.append("tidied up")

    said: list[str] = []
    thread = Thread(work)
    thread.cancel()
    assert thread.end() is None
    assert said == ["tidied up"] * 100


def test_a_thread_that_is_told_to_end_does() -> None:
    thread = Thread(forever)
    thread.interrupts.terminate()
    assert isinstance(thread.end(), SystemExit)


def test_a_thread_that_is_told_to_end_in_own_code_ends_behind_it() -> None:
    def work(thread: Thread) -> None:
        with thread.interrupts.own_code():
            thread.at_work.set()
            assert thread.go_on.wait(unit(10))

    thread = Thread(work)
    thread.interrupts.terminate()
    assert isinstance(thread.end(), SystemExit)
