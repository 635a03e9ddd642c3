"""How long an observer waits, and what it says of that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.harness.stand_in_supervisor import StandInSupervisor
from tests.harness.timing import unit

from central_storage.observer import blocking
from central_storage.observer.blocking import Patience, Session
from cs_proto import messages
from cs_proto.codec import decode, encode
from cs_proto.errors import DescriptorLimitError, NoAnswerError, PeerProtocolError, code_of
from cs_proto.pace import Pace
from cs_runtime import open_files
from cs_runtime.transport.curve import make_keys


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The run directory of a supervisor whose server never answers."""
    (tmp_path / "server").touch()
    with StandInSupervisor(tmp_path):
        yield tmp_path


@pytest.fixture
def session(directory: Path) -> Iterator[Session]:
    """A session with that server."""
    made = Session(str(directory), 45.0)
    yield made
    made.close()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The time, which goes on by a second whenever somebody looks."""
    numbers = count()
    monkeypatch.setattr(blocking.time, "monotonic", lambda: float(next(numbers)))
    return numbers


def test_a_wait_is_named_at_growing_intervals_until_it_is_too_long(
    directory: Path, seconds: Iterator[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pace = Pace(10.0)
    monkeypatch.setattr(blocking, "pace_of", lambda _: pace)
    session = Session(str(directory), 45.0)
    question, patience = session.get("weights"), Patience(session.timeout)

    def look_for_ever() -> None:
        while True:
            session.check_waiting(question, patience)

    with pytest.raises(NoAnswerError, match="did not answer within 45 s"):
        look_for_ever()
    session.close()
    waited = [record.getMessage() for record in caplog.records]
    assert waited[0] == f"waiting 10 s for the server in {directory} to answer a Get"
    assert [line.split()[1] for line in waited[1:]] == ["20", "41"]  # a check looks at the clock three times


def test_an_observer_that_the_server_has_forgotten_says_hello_once_more(session: Session) -> None:
    question = session.get("weights")
    assert session.repeats(question) == []
    error = messages.Error(code_of(PeerProtocolError), "a Get: o1 has not sent a Hello", None, "", -1, 0, "")
    refused = [zmq.Frame(part) for part in encode(messages.Refused(question.number, error))]
    assert session.answer(question, refused) is None
    hello, again = (decode(parts) for parts in session.repeats(question))
    assert isinstance(hello, messages.Hello)
    assert again == question.request
    welcome = [zmq.Frame(part) for part in encode(messages.Welcome(1, "cpu:0", 7, ()))]
    assert session.answer(question, welcome) is None
    assert session.repeats(question) == []
    with pytest.raises(PeerProtocolError, match="has not sent a Hello"):
        session.answer(question, refused)


def test_an_observer_that_is_refused_when_it_says_hello_once_more_is_told(session: Session) -> None:
    question = session.get("weights")
    error = messages.Error(code_of(DescriptorLimitError), "no descriptor is left", None, "", -1, 0, "")
    refused = [zmq.Frame(part) for part in encode(messages.Refused(0, error))]
    with pytest.raises(DescriptorLimitError, match="no descriptor is left"):
        session.answer(question, refused)


def test_an_observer_keeps_its_name_with_the_next_supervisor(tmp_path: Path) -> None:
    (tmp_path / "server").touch()
    with StandInSupervisor(tmp_path) as supervisor:
        session = Session(str(tmp_path), unit(20))
        first = supervisor.next()
    assert isinstance(first, messages.Introduce)
    question, patience = session.get("weights"), Patience(session.timeout)
    session.check_waiting(question, patience)  # there is none: the server may answer all the same
    (tmp_path / "supervisor").unlink()
    with StandInSupervisor(tmp_path) as supervisor:
        session.check_waiting(question, patience)
        again = supervisor.next()
        assert isinstance(again, messages.Introduce)
        assert (again.client, again.name, first.name) == (first.client, b"s", b"")
        session.close()


def test_a_process_without_descriptors_gets_no_observer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "free", lambda: 15)
    with pytest.raises(DescriptorLimitError, match="an observer needs up to 16 descriptors"):
        Session(str(directory), 45.0)


@pytest.mark.parametrize("place", ["here", "elsewhere"])
@pytest.mark.parametrize("kind", [zmq.Context, zmq.asyncio.Context])
def test_an_observer_that_is_garbage_unclosed_does_not_wait_for_ever(
    kind: type[zmq.Context[Any]], place: str, directory: Path, tmp_path: Path
) -> None:
    if place == "here":
        session = Session(str(directory), 45.0)
    else:
        make_keys(str(tmp_path / "keys"))
        session = Session("tcp://127.0.0.1:1", 45.0, keys=str(tmp_path / "keys"))
    session.cycle = session  # type: ignore[attr-defined]
    session.context = context = kind()  # type: ignore[attr-defined]
    session.socket = session.open(context)  # type: ignore[attr-defined]
    assert not session.check_waiting(session.hello(), Patience(45.0))
    ended = weakref.ref(context)
    del session, context
    gc.collect()
    assert ended() is None
