"""One run after the other, whatever becomes of it."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.stand_in import Sent, Service

import central_storage as cs
from cs_proto import messages, segment_names
from cs_proto.arrays import Location
from cs_proto.errors import (
    ContextError,
    InvalidArgumentError,
    PeerProtocolError,
    ReplicaError,
    ResultError,
    ShippingError,
)
from cs_proto.records import replace


def test_arguments_go_in_and_a_result_comes_back(alone: Service) -> None:
    alone.run(lambda a, *, b: {"sum": a + b, "who": cs.get_replica_context().replica_id_in_sync_group}, 3, b=4)
    assert alone.result() == {"sum": 7, "who": 0}


def test_the_return_says_whose_it_is(alone: Service) -> None:
    run = alone.run(lambda: None)
    returned = alone.returned()
    assert (returned.run, returned.replica, returned.incarnation) == (run, 0, 1)
    assert (returned.count, returned.notes, returned.error) == (0, (), None)


def test_where_the_function_is(pair: Service) -> None:
    def where() -> tuple[Any, ...]:
        context = cs.get_replica_context()
        assert cs.get_strategy() is context.strategy
        return (
            cs.has_strategy(),
            cs.in_cross_replica_context(),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
            context.devices,
            cs.get_array_module().__name__,
            repr(context.strategy),
        )

    pair.run(where)
    strategy = "<CentralStorageStrategy of 2 replicas (cpu:0, cpu:0), parameters on cpu:0>"
    for replica in range(2):
        name = "/job:localhost/replica:0/task:0/device:CPU:0"
        assert pair.result(replica) == (True, False, replica, 2, (name,), "numpy", strategy)


def test_what_it_prints_is_out_before_its_result(alone: Service) -> None:
    def speak() -> None:
        sys.stdout.write("said")
        sys.stderr.write("warned")

    alone.run(speak)
    alone.result()
    assert alone.log(0).endswith("saidwarned") or alone.log(0).endswith("warnedsaid")


def _raise_custom() -> None:
    class LockedError(KeyError):
        pass

    raise LockedError("door")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: 1 // 0, ZeroDivisionError),
        (_raise_custom, KeyError),
        (lambda: sys.exit(3), SystemExit),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt),
        (lambda: {1, 2}, ResultError),
        (lambda: lambda: 1, ResultError),
        (lambda: np.array([None]), ResultError),
        (lambda: cs.CentralStorageStrategy(), ContextError),
    ],
    ids=["error", "own class", "SystemExit", "KeyboardInterrupt", "set", "code", "objects", "strategy"],
)
def test_after_an_error_it_goes_on(alone: Service, function: Any, kind: type[BaseException]) -> None:
    alone.run(function)
    with pytest.raises(kind) as raised:
        alone.result()
    assert isinstance(raised.value, (ReplicaError, *(() if kind not in (ResultError, ContextError) else (kind,))))
    alone.run(lambda: "next")
    assert alone.result() == "next"


def test_the_traceback_is_the_users(alone: Service) -> None:
    alone.run(lambda: 1 // 0)
    error = alone.returned().error
    assert error is not None
    assert error.replica == 0
    assert "test_loop.py" in error.traceback
    assert "1 // 0" in error.traceback
    assert "cs_worker" not in error.traceback


def test_captured_values_are_those_of_every_run(alone: Service) -> None:
    kept: list[int] = []

    def grow() -> int:
        kept.append(1)
        return len(kept)

    for _ in range(2):
        alone.run(grow)
        assert alone.result() == 1
    kept.extend([1, 1])
    alone.run(grow)
    assert alone.result() == 3


def test_a_frozen_function_is_one_object(alone: Service) -> None:
    kept: list[int] = []

    def grow() -> int:
        kept.append(1)
        return len(kept)

    for expected in (1, 2, 3):
        alone.run(grow, frozen=True)
        assert alone.result() == expected


def test_a_function_that_is_left_out(alone: Service) -> None:
    full = alone.run_record((900,), 0, lambda: "held")
    short = messages.Run((901,), 901, 0, 7, full.digest, None, False, full.arguments, ())
    for run in (full, short):
        alone.tell(0, run)
        assert alone.result() == "held"


def test_a_function_that_is_not_held(alone: Service) -> None:
    full = alone.run_record((910,), 0, lambda: None)
    alone.tell(0, messages.Run((910,), 910, 0, 7, b"0123456789abcdef", None, False, full.arguments, ()))
    with pytest.raises(PeerProtocolError, match="without function 30313233343536373839616263646566"):
        alone.result()


def test_a_function_that_cannot_be_loaded(alone: Service) -> None:
    class Broken:
        def __reduce__(self) -> tuple[Any, ...]:
            return (int, ("not a number",))

    broken = Broken()
    alone.run(lambda: broken)
    with pytest.raises(ShippingError, match="not a number"):
        alone.result()


def mapped_at(array: np.ndarray) -> str:
    """The name of the file in whose memory an array lies."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return Path(line.split()[-1]).name
    return "nowhere"


def test_large_arguments_are_views_of_the_controllers_arena(alone: Service) -> None:
    batch = np.arange(100_000, dtype=np.float32)

    def look(x: np.ndarray) -> tuple[float, bool, str]:
        return float(x.sum()), x.flags.writeable, mapped_at(x)

    alone.run(look, batch)
    assert alone.result() == (float(batch.sum()), False, "arena-controller")


def test_large_results_lie_in_the_replicas_arena(alone: Service) -> None:
    alone.run(lambda: (np.arange(50_000), np.arange(60_000)))
    value = alone.returned().value
    assert value is not None
    places = [array.place for array in value.arrays]
    assert all(isinstance(place, Location) and place.segment == segment_names.arena(0) for place in places)
    first, second = alone.decode(value)
    assert np.array_equal(first, np.arange(50_000))
    assert np.array_equal(second, np.arange(60_000))
    alone.run(lambda: np.zeros(50_000))
    again = alone.returned().value
    assert again is not None
    assert again.arrays[0].place == places[0]  # the arena is used again


def test_a_result_in_the_parameters_is_copied(alone: Service) -> None:
    number = alone.add_variable(np.arange(40_000, dtype=np.float64))
    v: Any = Sent("variable", number)
    alone.run(lambda: np.asarray(v))
    value = alone.returned().value
    assert value is not None
    alone.value(number)[...] = 0
    assert np.array_equal(alone.decode(value), np.arange(40_000))


def test_a_result_that_is_too_much_is_an_error(alone: Service) -> None:
    alone.run(lambda: [np.zeros(2000, np.uint8)] * 30_001)
    with pytest.raises(InvalidArgumentError, match="stack them"):
        alone.result()


def test_a_result_with_a_large_arena_that_is_full(alone: Service) -> None:
    alone.run(lambda: np.zeros(20 << 20, np.uint8))
    with pytest.raises(MemoryError, match="do not fit into arena/0"):
        alone.result()
    alone.run(lambda: 1)
    assert alone.result() == 1


def test_handles_are_one_object(alone: Service) -> None:
    v: Any = Sent("variable", alone.add_variable(1.0))
    strategy: Any = Sent("strategy", 0)

    def compare(w: Any) -> tuple[bool, bool]:
        return v is w, strategy is cs.get_strategy()

    alone.run(compare, v)
    assert alone.result() == (True, True)


def test_a_handle_that_the_server_does_not_know(alone: Service) -> None:
    v: Any = Sent("variable", 9999)
    alone.run(lambda: v)
    with pytest.raises(InvalidArgumentError, match="there is no number 9999"):
        alone.result()


def test_many_new_handles_are_asked_for_together_and_once(alone: Service) -> None:
    several: list[Any] = [Sent("variable", alone.add_variable(np.float32(n))) for n in range(20)]
    before = alone.asked_about
    alone.run(lambda: sum(float(v) for v in several))
    assert alone.result() == sum(range(20))
    assert alone.asked_about == before + 2
    alone.run(lambda: [v.name for v in several])
    assert len(set(alone.result())) == 20
    assert alone.asked_about == before + 2


def test_random_state_is_that_of_the_run(pair: Service) -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    pair.run(draw, run=(50,))
    first = [pair.result(replica) for replica in range(2)]
    pair.run(draw, run=(51,))
    second = [pair.result(replica) for replica in range(2)]
    pair.run(draw, run=(50,))
    assert [pair.result(replica) for replica in range(2)] == first
    assert len({*first, *second}) == 4
    for replica in range(2):  # a later run that draws what the first one drew
        pair.tell(replica, replace(pair.run_record((52,), replica, draw), step=50))
    assert [pair.result(replica) for replica in range(2)] == first


def test_prepare_is_where_the_script_is(alone: Service, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("ANSWER = 42\n")
    own = alone.run(lambda: (os.getcwd(), list(sys.path)))
    assert own
    directory, path = alone.result()
    alone.tell(0, messages.Prepare((str(tmp_path),), str(tmp_path)))

    def look() -> tuple[int, str, str, bool]:
        import only_here  # type: ignore[import-not-found]

        return only_here.ANSWER, os.getcwd(), sys.path[0], set(path) <= set(sys.path)

    alone.run(look)
    assert alone.result() == (42, str(tmp_path), str(tmp_path), True)
    alone.tell(0, messages.Prepare(tuple(path), directory))
    alone.run(lambda: (os.getcwd(), list(sys.path)))
    assert alone.result() == (directory, path)


def test_a_directory_that_has_gone_is_said(alone: Service, tmp_path: Path) -> None:
    alone.tell(0, messages.Prepare((), str(tmp_path / "gone")))
    alone.run(lambda: 1)
    assert alone.result() == 1
    assert "w0.1 cannot enter the script's directory" in alone.log(0)


@pytest.mark.parametrize("identity", [b"w0.2", b"oabc", b"w1.1"])
def test_runs_of_others_are_never_carried_out(alone: Service, identity: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    link = alone.connect(identity, 0)
    try:
        link.send_multipart(alone.parts(alone.run_record((1,), 0, lambda: mark.touch())))
        assert "is refused" in alone.refused(link).error.message
        link.send_multipart(alone.parts(alone.run_record((1, 0, 0), 0, lambda: mark.touch())))
        assert "is refused" in alone.refused(link).error.message
    finally:
        link.close()
    assert not mark.exists()


def test_bytes_that_are_no_record_change_nothing(alone: Service) -> None:
    link = alone.connect(b"cdead", 0)
    try:
        link.send_multipart([b"\xff\xff", b"?"])
        link.send(b"")
        link.send_multipart(alone.parts(messages.Register(1, messages.Worker(0, 1, 1, "cpu:0"))))
        said = [alone.refused(link).error.message for _ in range(3)]
        assert all("not one msgpack value" in each for each in said[:2])
        assert "a Register is refused" in said[2]
    finally:
        link.close()
    assert "dropped a malformed message from b'cdead'" in alone.log(0)


def test_a_run_that_comes_during_another_waits_its_turn(alone: Service) -> None:
    def ask() -> str:
        cs.get_replica_context().merge_call(lambda strategy: None)
        return "first"

    run = alone.run(ask)
    alone.asked()
    alone.run(lambda: "second")
    alone.answer(0, messages.Token(run, 0, (alone.encode(((), {})),)))
    assert isinstance(alone.from_server_socket(messages.MergeCallReturn)[1], messages.MergeCallReturn)
    assert alone.result() == "first"
    assert alone.result() == "second"


def test_a_forked_child_does_not_keep_the_lifeline(alone: Service) -> None:
    def sockets() -> set[str]:
        links = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own
                links.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        return {link for link in links if link.startswith("socket:")}

    def fork() -> list[int]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, " ".join(sockets()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            in_child = set(pipe.read().split())
        return [len(sockets() - in_child), len(in_child - sockets())]

    alone.run(fork)
    # Those of zmq stay; the life-line, whose other end must see this worker's death at once, is closed.
    assert alone.result() == [1, 0]


@pytest.mark.parametrize(("end", "code"), [(None, 0), (SystemExit(3), 3), (SystemExit("bye"), 1), (KeyError("k"), 1)])
def test_a_forked_child_that_comes_to_the_end_of_the_function_ends(
    alone: Service, end: BaseException | None, code: int
) -> None:
    def fork() -> Any:
        child = os.fork()
        if child == 0:
            if end is not None:
                raise end
            return "the child's"
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    alone.run(fork)
    assert alone.result() == code


def test_a_forked_child_is_no_replica(alone: Service) -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            try:
                cs.Variable(1.0)
            except ContextError:
                os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    alone.run(fork)
    assert alone.result() == 7


def test_the_context_is_dead_after_its_run(alone: Service) -> None:
    kept: list[Any] = []

    def keep() -> Any:
        kept.append(cs.get_replica_context())
        return kept[0].num_replicas_in_sync

    alone.run(keep, frozen=True)
    assert alone.result() == 1
    alone.run(keep, frozen=True)
    with pytest.raises(ContextError, match="has ended"):
        alone.result()


def test_other_threads_are_told(alone: Service) -> None:
    v: Any = Sent("variable", alone.add_variable(np.ones(2, np.float32)))

    def from_thread() -> list[str]:
        import threading

        context, found = cs.get_replica_context(), []

        def use(what: Any) -> None:
            try:
                what()
            except RuntimeError as error:
                found.append(str(error))

        for what in (lambda: v.numpy(), lambda: context.all_reduce("SUM", v), lambda: context.backend.view(1)):
            thread = threading.Thread(target=use, args=(what,))
            thread.start()
            thread.join()
        return found

    alone.run(from_thread)
    messages_ = alone.result()
    assert messages_
    assert all("in the thread of" in message for message in messages_)


# --- steps of a series ------------------------------------------------------------------------------------------------


def test_steps_begin_one_after_the_other(pair: Service) -> None:
    runs = pair.run_steps(lambda n: n * 2, 1, 2, 3)
    for run, wanted in zip(runs, (2, 4, 6), strict=True):
        for replica in range(2):
            returned = pair.returned(replica)
            assert (returned.run, returned.series) == (run, runs[0][0])
            assert returned.value is not None
            assert pair.decode(returned.value) == wanted
        assert not pair.has_more()  # the next step waits for this one's end
        for replica in range(2):
            pair.answer(replica, messages.StepFinished(run, False))


class LoadedInside:
    """It becomes, where it is loaded, whether that is inside a strategy."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return cs.has_strategy, ()


def test_arguments_that_run_code_are_loaded_in_their_step(alone: Service) -> None:
    arguments = [0, LoadedInside(), np.ones(2), [LoadedInside()]]
    for run, wanted in zip(alone.run_steps(lambda x: x, *arguments), [0, True, [1.0, 1.0], [True]], strict=True):
        result = alone.result()
        assert (result.tolist() if isinstance(result, np.ndarray) else result) == wanted
        alone.answer(0, messages.StepFinished(run, False))


def test_arguments_that_cannot_be_loaded_fail_their_step(alone: Service) -> None:
    (first,) = alone.run_steps(lambda x: x, 1)
    second = (first[0] + 1,)
    alone.tell(0, replace(alone.run_record(second, 0, len), arguments=b"no pickle!", series=first[0], lookahead=2))
    assert alone.result() == 1
    alone.answer(0, messages.StepFinished(first, False))
    with pytest.raises(ShippingError, match="cannot be unpickled"):
        alone.result()
    alone.answer(0, messages.StepFinished(second, True))


def test_steps_after_a_failure_are_dropped(alone: Service) -> None:
    def step(n: int) -> None:
        print(f"step {n}")
        raise KeyError(n)

    first, *_ = alone.run_steps(step, 1, 2, 3)
    with pytest.raises(KeyError):
        alone.result()
    alone.answer(0, messages.StepFinished(first, True))
    alone.run(lambda: "goes on")
    assert alone.result() == "goes on"
    assert "step 1" in alone.log(0)
    assert "step 2" not in alone.log(0)


def test_asks_of_a_step_say_the_series(alone: Service) -> None:
    v: Any = Sent("variable", alone.add_variable(np.float32(1)))
    (run,) = alone.run_steps(lambda n: v.assign_add(n, read_value=False) or float(v), np.float32(1))
    assert alone.asked().series == run[0]
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == 1.0


def test_large_results_of_steps_lie_in_parts_that_take_turns(alone: Service) -> None:
    runs = alone.run_steps(lambda n: np.full(10_000, n), *range(9), lookahead=2)
    offsets: list[int] = []
    results: list[messages.Value] = []
    for number, run in enumerate(runs):
        returned = alone.returned()
        assert returned.value is not None
        results.append(returned.value)
        (array,) = returned.value.arrays
        assert isinstance(array.place, Location)
        offsets.append(array.place.offset)
        for back, value in enumerate(reversed(results[-3:])):  # those that the client may not have had
            assert (alone.decode(value) == number - back).all()
        alone.answer(0, messages.StepFinished(run, False))
    assert len(set(offsets[:3])) == 3
    assert offsets == offsets[:3] * 3


def test_a_step_is_cancelled_with_those_after_it(alone: Service) -> None:
    def step(n: int) -> None:
        print(f"inside {n}")
        while n == 2:
            pass

    first, second, _ = alone.run_steps(step, 1, 2, 3)
    assert alone.result() is None
    alone.answer(0, messages.StepFinished(first, False))
    alone.wait_for_line(0, "inside 2")
    alone.tell(0, messages.Cancel(first, 2))  # sent when the client did not know yet that the first was over
    alone.processes[0].send_signal(signal.SIGINT)
    returned = alone.returned()
    assert returned.error is not None
    assert returned.error.exception == "KeyboardInterrupt"
    alone.answer(0, messages.StepFinished(second, True))
    alone.run(lambda: "goes on")
    assert alone.result() == "goes on"
    assert "inside 3" not in alone.log(0)
