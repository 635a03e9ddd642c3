"""The functions a worker holds for those who send runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from central_storage.core.handles import handle_id
from central_storage.pickling.pickler import digest, dump_function
from cs_proto.arrays import bytes_array, frame_view
from cs_proto.errors import PeerProtocolError, ShippingError
from cs_proto.function_cache import HELD_FUNCTIONS, FunctionCache
from cs_proto.messages import Run
from cs_worker.execution.functions import Functions

CONTROLLER = b"cafe"
HOLDER = b"w0.1"


def no_handle(kind: str, number: int) -> object:
    raise AssertionError(f"{kind} {number}")


class Sender:
    """One who sends runs and leaves out what the worker holds."""

    def __init__(self, programs: Functions, identity: bytes = CONTROLLER) -> None:
        self.programs = programs
        self.identity = identity
        self.recent = FunctionCache(HELD_FUNCTIONS)

    def load(self, function: Callable[..., Any], frozen: bool = False, with_function: bool | None = None) -> Any:
        data = dump_function(function, handle_id)
        held = not frozen and self.recent.touch(digest(data))
        sent = not held if with_function is None else with_function
        number = (1, 0, 0) if self.identity == HOLDER else (1,)
        run = Run(number, 1, 0, 7, digest(data), bytes_array(data) if sent else None, frozen, bytes_array(b""), ())
        return self.programs.load(self.identity, run, no_handle)


@pytest.fixture
def programs() -> Functions:
    return Functions(frame_view)


def numbered(number: int) -> Callable[[], int]:
    return lambda: number


def test_an_ordinary_function_is_made_anew_every_time(programs: Functions) -> None:
    sender, function = Sender(programs), numbered(3)
    first, second = sender.load(function), sender.load(function)
    assert first is not second
    assert (first(), second()) == (3, 3)


def test_a_frozen_function_is_one_object(programs: Functions) -> None:
    sender, function = Sender(programs), numbered(3)
    first = sender.load(function, frozen=True)
    assert sender.load(function, frozen=True, with_function=False) is first


def test_the_sender_knows_what_is_held(programs: Functions) -> None:
    sender = Sender(programs)
    functions = [numbered(n) for n in range(HELD_FUNCTIONS + 3)]
    for n in [*range(HELD_FUNCTIONS + 3), 5, 2, 0, 5, 18, 1, 1, 7]:
        assert sender.load(functions[n])() == n


def test_what_is_not_held_any_more_is_refused(programs: Functions) -> None:
    sender = Sender(programs)
    first = numbered(0)
    sender.load(first)
    for n in range(1, HELD_FUNCTIONS + 1):
        sender.load(numbered(n))
    with pytest.raises(PeerProtocolError, match="which this worker does not hold"):
        sender.load(first, with_function=False)


def test_senders_do_not_share(programs: Functions) -> None:
    controller, holder = Sender(programs), Sender(programs, HOLDER)
    function = numbered(1)
    controller.load(function)
    with pytest.raises(PeerProtocolError):
        holder.load(function, with_function=False)
    assert controller.load(function, with_function=False)() == 1  # the holder has not pushed the controller's out


def test_the_next_controller_starts_afresh(programs: Functions) -> None:
    function = numbered(1)
    Sender(programs).load(function)
    Sender(programs).load(function, frozen=True)
    other = Sender(programs, b"cbee")
    for frozen in (False, True):
        with pytest.raises(PeerProtocolError):
            other.load(function, frozen=frozen, with_function=False)


def test_a_frozen_function_that_is_forgotten_is_not_held(programs: Functions) -> None:
    """Else a script that freezes functions without end would fill the worker's memory."""
    sender, function, other = Sender(programs), numbered(3), numbered(4)
    sender.load(function, frozen=True)
    kept = sender.load(other, frozen=True)
    programs.forget(CONTROLLER, [digest(dump_function(function, handle_id))])
    with pytest.raises(PeerProtocolError, match="which this worker does not hold"):
        sender.load(function, frozen=True, with_function=False)
    assert sender.load(other, frozen=True, with_function=False) is kept


def test_a_frozen_function_that_failed_to_load_may_load_later(programs: Functions) -> None:
    outcomes = iter([ImportError("not yet")])

    def resolve(kind: str, number: int) -> object:
        for error in outcomes:
            raise error
        return "the handle"

    from tests.worker.stand_in import Sent

    captured = Sent("variable", 1)
    data = dump_function(lambda: captured, handle_id)
    with pytest.raises(ShippingError, match="not yet"):
        programs.load(
            CONTROLLER, Run((1,), 1, 0, 7, digest(data), bytes_array(data), True, bytes_array(b""), ()), resolve
        )
    function = programs.load(CONTROLLER, Run((2,), 2, 0, 7, digest(data), None, True, bytes_array(b""), ()), resolve)
    assert function() == "the handle"
