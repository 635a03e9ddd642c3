"""What clients ask for outside of runs: acted on once, refused for good, read without disturbing anybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    DEFAULTS,
    OBSERVER,
    Playbook,
    allocates,
    applies,
    array,
    asks,
    commits,
    first_apply,
    hears,
    lies,
    reduces,
    returns,
    scalar,
    spec,
    to,
    w,
    writes,
)

from cs_proto.arrays import Array, Location
from cs_proto.errors import LocalProtocolError, MemoryPlanError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Accepted,
    Assign,
    AssignAll,
    AssignSlot,
    Configure,
    Counters,
    Create,
    Created,
    Describe,
    Described,
    DescribeSlots,
    Done,
    Error,
    Free,
    Get,
    Goodbye,
    Got,
    Locate,
    Located,
    Optimizer,
    PointFailed,
    Refused,
    ReplicaStatistics,
    Slots,
    Statistics,
    Variable,
)
from cs_proto.records import Record
from cs_server.engine.catalogue import variables
from cs_server.events import Allocate, Discard, Fill, LoadKernel, MemoryAvailable, Send

W = lies("parameters/float32", 0, (2,))
B = lies("parameters/float32", 64, (2,))


def variable(number: int, name: str, place: Array, version: int = 0) -> Variable:
    return Variable(number, spec(name, place.shape, place.dtype), place.place, version)  # type: ignore[arg-type]


# --- writes -------------------------------------------------------------------------------------------------------


def test_variables_are_freed_once_and_their_place_is_zeroed_before_it_is_used_again() -> None:
    book = Playbook(1).begin().has(spec("a", (2,)), spec("b", (2,)))
    free = hears(CONTROLLER, Free("c", book.sequence(), (1, 7)))
    names = ["parameters/float32", "gradients/0/0/float32"]
    book.on(free, *(Discard(name, 0, 8) for name in names), Send(CONTROLLER, Done(3, 1, 0)))
    book.on(hears(OBSERVER, Get(1, (), (), False)), to(OBSERVER, Got, variables=(variable(2, "b", B),)))
    book.on(
        hears(CONTROLLER, Create("c", book.sequence(), spec("c", (1,)), None)),
        allocates("parameters/float32", 0, 4),
        commits(Fill("parameters/float32", "float32", 0, 1, 0.0)),
    )
    made = variable(3, "c", lies("parameters/float32", 0, (1,)))
    book.on(book.finished(), Send(CONTROLLER, Created(4, made)))
    book.repeat_all()


def test_a_worker_has_the_second_set_of_gradients_made() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)), spec("n", (2,), "int64"))
    second = [allocates(f"gradients/{r}/1/float32", 64, 64, writer=f"w{r}") for r in (0, 1)]
    asks_for_it = hears(w(0), Locate(5, (1,), 1))
    book.on(asks_for_it, *second, to(w(0), Located))
    book.on(asks_for_it, to(w(0), Located))
    assert {each.segment for each in book.resume() if isinstance(each, Allocate)} >= {s.segment for s in second}
    book.on(hears(w(0), Locate(6, (2,), 1)), to(w(0), Located))  # whole numbers have no gradients


def test_no_worker_gets_a_place_for_the_dense_gradient_of_a_sparse_variable() -> None:
    book = Playbook(1).begin().has(replace(spec("table", (2, 2)), sparse=True))
    why = "'table' was made with sparse=True"
    for buffers in (0, 1):
        book.on(hears(w(0), Locate(5, (1,), buffers)), to(w(0), Refused, "cs.InvalidArgumentError", why))
    book.on(hears(w(0), Locate(6, (1,), -1)), to(w(0), Located))


def test_a_second_set_that_cannot_be_had_is_refused_to_who_asks() -> None:
    book = Playbook(1).begin().has(spec("w", (2,)))
    second = allocates("gradients/0/1/float32", 64, 64, writer="w0")
    book.refuses = {second: error_of(MemoryPlanError("no addresses"))}
    refusal = to(w(0), Refused, "cs.MemoryPlanError", "second set of float32 gradient buffers: no addresses")
    assert refusal.fits(book.does(hears(w(0), Locate(5, (1,), 1)))[-1])


def test_nothing_is_freed_while_a_run_is_open() -> None:
    book = Playbook(2).begin().has(spec("a"))
    book.does(asks(0, reduces(0, scalar(1))))
    free = hears(CONTROLLER, Free("c", book.sequence(), (1,)))
    book.on(free, to(CONTROLLER, Refused, "cs.ContextError", "run 1 has not ended"))


@pytest.mark.parametrize("kind", ["assign", "create"])
def test_a_client_may_leave_while_its_write_is_under_way(kind: str) -> None:
    book = Playbook(1).begin().has(spec("a"))
    book.repeats = False  # who has left is not heard any more
    number = book.sequence()
    value = scalar(1)
    book.does(
        hears(
            CONTROLLER,
            Assign("c", number, 1, "assign", value) if kind == "assign" else Create("c", number, spec("b"), value),
        )
    )
    assert book.ticket()
    book.on(hears(CONTROLLER, Goodbye("c")))
    book.does(book.finished())
    assert not any(key.startswith(b"q") for key, _ in book.memory.items())


def test_a_variable_is_made_at_once_where_its_value_follows() -> None:
    book = Playbook(1).begin()
    book.on(
        hears(CONTROLLER, Create("c", 1, spec("w", (2,)), None)),
        allocates("parameters/float32", 64, 64),
        allocates("gradients/0/0/float32", 64, 64, writer="w0"),
        allocates("parameters/float32", 0, 8),
        Send(CONTROLLER, Created(1, variable(1, "w", W))),
    )
    book.on(hears(CONTROLLER, Assign("c", 2, 1, "assign", array(1, 2))), commits(writes(W, "assign", array(1, 2))))
    book.on(book.finished(), Send(CONTROLLER, Done(2, 1, 1)))
    book.repeat_all()


def test_a_variable_that_brings_its_value_is_answered_when_it_is_written() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)))
    create = hears(CONTROLLER, Create("c", book.sequence(), spec("w", (2,)), array(3, 4)))
    place = lies("parameters/float32", 64, (2,))
    book.on(create, allocates("parameters/float32", 64, 72), commits(writes(place, "assign", array(3, 4))))
    book.on(create)  # repeated while it is under way
    book.on(book.finished(), Send(CONTROLLER, Created(2, variable(2, "w_1", place))))
    book.on(create, Send(CONTROLLER, Created(2, variable(2, "w_1", place))))


def test_writes_are_committed_one_after_the_other() -> None:
    book = Playbook(2).begin().has(spec("w"))
    book.on(
        hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign_add", scalar(1))),
        commits(writes(lies("parameters/float32", 0), "assign_add", scalar(1))),
    )
    too_soon = Assign("c", book.sequence(), 1, "assign_add", scalar(2))
    book.on(
        hears(CONTROLLER, too_soon),
        to(CONTROLLER, Refused, "cs.PeerProtocolError", "send one request at a time", number=3),
    )
    book.on(book.finished(), Send(CONTROLLER, Done(2, 1, 1)))
    book.on(
        hears(CONTROLLER, too_soon),
        commits(writes(lies("parameters/float32", 0), "assign_add", scalar(2))),
    )
    book.on(book.finished(), Send(CONTROLLER, Done(3, 1, 2)))
    book.repeat_all()


def test_only_the_last_reply_is_kept() -> None:
    book = Playbook(2).begin().has(spec("w"), spec("b"))
    old = hears(CONTROLLER, Create("c", 1, spec("w"), None))
    book.on(old, to(CONTROLLER, Refused, "cs.PeerProtocolError", "request 1 of 'c' was followed by 2", number=1))


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (
            Create("c", 9, spec("w", (2,)), scalar(1)),
            "cs.InvalidArgumentError",
            r"float32\[\]; it must be float32\[2\]",
        ),
        (
            Assign("c", 9, 3, "assign", scalar(1)),
            "cs.InvalidArgumentError",
            r"no variable 3; .*; there are 1 \(w\)",
        ),
        (Assign("c", 9, 1, "assign", array(1)), "cs.InvalidArgumentError", "assign to variable 'w'"),
        (Assign("c", 9, 1, "assign", scalar(1, "float64")), "cs.InvalidArgumentError", "float64"),
        (Configure("c", 9, 0, "Muon", (), None, -1), "cs.InvalidArgumentError", "unknown optimizer 'Muon'"),
        (Configure("c", 9, 0, "SGD", (("learning_rate", 1.0),), None, -1), "cs.InvalidArgumentError", "momentum"),
        (Configure("c", 9, 4, "SGD", (), None, -1), "cs.InvalidArgumentError", "no optimizer 4"),
    ],
)
def test_what_cannot_be_done_is_refused_and_stays_refused(request_: Record, code: str, reason: str) -> None:
    book = Playbook(2).begin().has(spec("w"))
    refused = to(CONTROLLER, Refused, code, reason, number=9)
    book.on(hears(CONTROLLER, request_), refused)
    book.on(hears(CONTROLLER, request_), refused)
    book.on(
        hears(CONTROLLER, Create("c", 10, spec("b"), None)),
        allocates("parameters/float32", 64, 68),
        to(CONTROLLER, Created),
    )


def test_what_does_not_fit_the_memory_is_refused_before_anything_is_touched() -> None:
    book = Playbook(2).begin(available_nbytes=1199)
    create = hears(CONTROLLER, Create("c", 1, spec("table", (100,)), None))
    refused = to(
        CONTROLLER,
        Refused,
        "cs.MemoryPlanError",
        "variable 'table': 1200 bytes planned .* 1199 bytes available",
        number=1,
    )
    book.on(create, refused)
    book.on(MemoryAvailable(1 << 20))
    book.on(create, refused)  # the same request has the same answer
    book.on(hears(OBSERVER, Get(1, (), (), False)), to(OBSERVER, Got, variables=()))


def test_optimizers_are_made_and_changed() -> None:
    book = Playbook(2).begin()
    pairs = tuple(DEFAULTS["Adam"].items())
    book.on(hears(CONTROLLER, Configure("c", 1, 0, "Adam", pairs, None, -1)), Send(CONTROLLER, Done(1, 1, 0)))
    book.on(
        hears(CONTROLLER, Configure("c", 2, 1, "Adam", (("epsilon", 0.5),), None, -1)), Send(CONTROLLER, Done(2, 1, 0))
    )
    changed = Optimizer(1, "Adam", "adam", tuple({**DEFAULTS["Adam"], "epsilon": 0.5}.items()), None, 0)
    book.on(hears(CONTROLLER, Describe(3, (), (1,))), Send(CONTROLLER, Described(3, (), (changed,), ((),), ((),))))


def test_slots_that_are_asked_for_are_made_and_described_when_they_are_filled() -> None:
    book = Playbook(2).begin().has(spec("w", (2,))).has_optimizer("Adam")
    places = tuple(Array("float32", (2,), Location(f"slots/1/{name}/float32", 0)) for name in ("m", "v"))
    book.on(
        hears(CONTROLLER, DescribeSlots(7, 1, 1)),
        *(allocates(place.place.segment, 0, 8) for place in places if isinstance(place.place, Location)),
        commits(*(Fill(f"slots/1/{name}/float32", "float32", 0, 2, 0.0) for name in ("m", "v"))),
    )
    book.on(hears(w(1), DescribeSlots(8, 1, 1)))
    book.on(
        book.finished(),
        Send(CONTROLLER, Slots(7, ("m", "v"), places)),
        Send(w(1), Slots(8, ("m", "v"), places)),
    )
    book.on(hears(w(0), DescribeSlots(9, 1, 1)), Send(w(0), Slots(9, ("m", "v"), places)))
    refused = to(OBSERVER, Refused, "cs.ContextError", "observers may only read", number=1)
    book.on(hears(OBSERVER, DescribeSlots(1, 1, 1)), refused)


def test_a_slot_is_written_once_and_made_first() -> None:
    book = Playbook(2).begin().has(spec("w", (2,))).has_optimizer("Adam")
    value = array(1, 2)
    target = Array("float32", (2,), Location("slots/1/v/float32", 0))
    number = book.sequence()
    request = hears(CONTROLLER, AssignSlot("c", number, 1, 1, "v", value))
    book.on(
        request,
        allocates("slots/1/m/float32", 0, 8),
        allocates("slots/1/v/float32", 0, 8),
        commits(*(Fill(f"slots/1/{name}/float32", "float32", 0, 2, 0.0) for name in ("m", "v"))),
    )
    book.on(book.finished(), commits(writes(target, "assign", value)))
    book.on(request)
    book.on(book.finished(), Send(CONTROLLER, Done(number, 1, 0)))
    book.on(request, Send(CONTROLLER, Done(number, 1, 0)))
    wrong = AssignSlot("c", book.sequence(), 1, 1, "u", value)
    book.on(
        hears(CONTROLLER, wrong),
        to(CONTROLLER, Refused, "cs.InvalidArgumentError", "no slot 'u'", number=wrong.sequence),
    )


def test_rows_of_a_slot_are_written_where_they_lie_and_nowhere_else() -> None:
    book = Playbook(2).begin().has(spec("u", (3,))).has(spec("w", (5, 2))).has_optimizer("Adam")

    def rows(first: int, value: Array, slot: str = "v") -> AssignSlot:
        return AssignSlot("c", book.sequence(), 1, 2, slot, value, first)

    ones = Array("float32", (2, 2), Location("arena/controller", 0))
    book.does(hears(CONTROLLER, DescribeSlots(7, 1, 2)))
    book.does(book.finished())
    for first, count in ((0, 2), (3, 2), (0, 5), (5, 0)):
        request = rows(first, Array("float32", (count, 2), Location("arena/controller", 0)))
        target = Array("float32", (count, 2), Location("slots/1/v/float32", 64 + first * 8))
        book.on(hears(CONTROLLER, request), commits(writes(target, "assign", request.value)))
        book.on(book.finished(), Send(CONTROLLER, Done(request.sequence, 2, 0)))
        book.on(hears(CONTROLLER, request), Send(CONTROLLER, Done(request.sequence, 2, 0)))
    for first, value, says in (
        (4, ones, r"rows from 4 on; the slot is float32\[5, 2\]"),
        (5, ones, "rows from 5 on"),
        (6, Array("float32", (0, 2), Location("arena/controller", 0)), "rows from 6 on"),
        (0, Array("float32", (6, 2), Location("arena/controller", 0)), "rows from 0 on"),
        (1 << 61, ones, "rows from"),
        (0, Array("float32", (2, 3), Location("arena/controller", 0)), r"it must be float32\[2, 2\]"),
        (0, Array("float64", (2, 2), Location("arena/controller", 0)), r"it must be float32\[2, 2\]"),
        (1, Array("float32", (), Location("arena/controller", 0)), "rows from 1 on"),
    ):
        wrong = rows(first, value)
        refusal = to(CONTROLLER, Refused, "cs.InvalidArgumentError", says, number=wrong.sequence)
        book.on(hears(CONTROLLER, wrong), refusal)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_slot_without_dimensions_has_no_rows(shape: tuple[int, ...]) -> None:
    book = Playbook(2).begin().has(spec("s", ())).has_optimizer("Adam")
    book.does(hears(CONTROLLER, DescribeSlots(7, 1, 1)))
    book.does(book.finished())
    value = Array("float32", shape, Location("arena/controller", 0))
    request = AssignSlot("c", book.sequence(), 1, 1, "v", value, 0)
    refusal = to(CONTROLLER, Refused, "cs.InvalidArgumentError", "rows from 0 on", number=request.sequence)
    book.on(hears(CONTROLLER, request), refusal)


WHOLE = Array("uint8", (5 * 64,), Location("arena/controller", 0))


def test_many_values_are_set_in_one_commit_and_once() -> None:
    """Two variables that lie side by side and their slots are one write each, in the order of the bytes."""
    book = Playbook(2).begin().has(spec("w", (2,))).has(spec("u", (16,))).has(spec("n", (3,), "int64"))
    book.has_optimizer("Adam")
    number = book.sequence()
    # The variables 1 and 2 take 64 bytes each, and so does each slot; n lies elsewhere.
    record = AssignAll("c", number, (1, 2, 3), ((1, "v", (1, 2)),), WHOLE)
    request = hears(CONTROLLER, record)
    book.on(
        request,
        *(allocates(f"slots/1/{name}/float32", *at) for at in ((0, 8), (64, 128)) for name in ("m", "v")),
        commits(
            *(Fill(f"slots/1/{name}/float32", "float32", *at, 0.0) for at in ((0, 2), (16, 32)) for name in ("m", "v"))
        ),
    )

    def bytes_of(dtype: str, count: int, start: int) -> Array:
        return Array(dtype, (count,), Location("arena/controller", start))

    book.on(
        book.finished(),
        commits(
            writes(lies("parameters/float32", 0, (32,)), "assign", bytes_of("float32", 32, 0)),
            writes(lies("parameters/int64", 0, (3,), "int64"), "assign", bytes_of("int64", 3, 128)),
            writes(lies("slots/1/v/float32", 0, (32,)), "assign", bytes_of("float32", 32, 192)),
        ),
    )
    book.on(request)  # replayed while the commit is under way
    book.on(book.finished(), Send(CONTROLLER, Done(number, 5, 0)))
    book.on(request, Send(CONTROLLER, Done(number, 5, 0)))  # and after it
    assert [book.version(each) for each in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("few", [2, 16])
def test_every_setting_of_many_values_counts_in_their_versions(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_FEW", few)  # fewer are counted one by one
    book = Playbook(2).begin().has(spec("w", (2,))).has(spec("u", (16,))).has(spec("n", (3,)))
    for numbers in [(1, 2), (2, 3), (2, 1), (3,)]:
        value = Array("uint8", (64 * len(numbers),), Location("arena/controller", 0))
        number = book.sequence()
        book.does(hears(CONTROLLER, AssignAll("c", number, numbers, (), value)))
        book.on(book.finished(), Send(CONTROLLER, Done(number, len(numbers), 0)))
    assert [book.version(each) for each in (1, 2, 3)] == [2, 3, 2]
    number = book.sequence()
    book.does(hears(CONTROLLER, Assign("c", number, 2, "assign", array(*range(16)))))
    book.on(book.finished(), Send(CONTROLLER, Done(number, 2, 4)))
    book.does(hears(CONTROLLER, Free("c", book.sequence(), (1,), ())))
    assert [book.version(each) for each in (2, 3)] == [4, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"variables": (1, 9)}, "there is no variable 9"),
        ({"variables": (1, 1)}, "names a variable or a slot twice"),
        ({"slots": ((1, "v", (1, 1)),)}, "twice"),
        ({"slots": ((1, "v", (1,)), (1, "v", (1,)))}, "names a variable or a slot twice"),
        ({"slots": ((1, "u", (1,)),)}, "no slot 'u'; its slots: m, v"),
        ({"slots": ((7, "v", (1,)),)}, "there is no optimizer 7"),
        ({"slots": ((1, "v", (9,)),)}, "there is no variable 9"),
        ({"slots": ((1, "v", (1,)), (1, "m", (3,)))}, "'n' is int64; only floating-point variables can be optimized"),
        ({"value": Array("uint8", (64,), Location("arena/controller", 0))}, "has 64 bytes, but .* need 128"),
        ({"value": Array("uint8", (129,), Location("arena/controller", 0))}, "has 129 bytes, but .* need 128"),
        ({"variables": (), "slots": ()}, "has 128 bytes, but .* need 0"),
    ],
)
def test_many_values_that_do_not_fit_are_refused_and_nothing_changes(changes: dict[str, Any], text: str) -> None:
    book = Playbook(2).begin().has(spec("w", (2,))).has(spec("u", (16,))).has(spec("n", (3,), "int64"))
    book.has_optimizer("Adam")
    number = book.sequence()
    value = Array("uint8", (128,), Location("arena/controller", 0))
    fits: dict[str, Any] = {"variables": (1,), "slots": ((1, "v", (1,)),), "value": value}
    request = hears(CONTROLLER, AssignAll("c", number, **(fits | changes)))
    refused = to(CONTROLLER, Refused, "cs.InvalidArgumentError", text, number=number)
    book.on(request, refused)  # no allocation and no commit
    book.on(request, refused)


@pytest.mark.parametrize(
    "value", [array(1, 2), Array("float32", (32,), Location("arena/controller", 0)), replace(WHOLE, shape=(2, 160))]
)
def test_many_values_come_as_bytes_in_a_segment(value: Array) -> None:
    with pytest.raises(LocalProtocolError, match="must be uint8"):
        AssignAll("c", 1, (1,), (), value)


def test_what_the_controller_wants_waits_for_the_end_of_the_run() -> None:
    book = Playbook(2).begin().has(spec("w"))
    book.on(asks(0, reduces(0, scalar(1))))
    for request in [
        Create("c", 5, spec("b"), None),
        Assign("c", 6, 1, "assign", scalar(1)),
        Configure("c", 7, 0, "SGD", (), None, -1),
    ]:
        refused = to(CONTROLLER, Refused, "cs.ContextError", "run 1 has not ended", number=request.sequence)
        book.on(hears(CONTROLLER, request), refused)


def test_another_clients_name_is_refused() -> None:
    book = Playbook(2).begin()
    request = hears(CONTROLLER, Create("d", 1, spec("w"), None))
    book.on(request, to(CONTROLLER, Refused, "cs.PeerProtocolError", "b'c1' is client 'c', not 'd'", number=1))


@pytest.mark.parametrize("replica", [0, 1])
def test_workers_write_only_under_a_token(replica: int) -> None:
    book = Playbook(2).begin().has(spec("w"))
    request = hears(w(replica), Assign("1.0", 1, 1, "assign", scalar(1)))
    code = "cs.PeerProtocolError" if replica else "cs.ContextError"
    book.on(request, to(w(replica), Refused, code, "merge_call token", number=1))


# --- reads --------------------------------------------------------------------------------------------------------


def test_variables_are_read_by_number_by_name_or_all() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)), spec("b"))
    first, second = variable(1, "w", W), variable(2, "b", lies("parameters/float32", 64))
    both = (first, second)
    for peer in (CONTROLLER, OBSERVER, w(1)):
        got = Got(1, 0, both, (first.array, second.array))
        book.on(hears(peer, Get(1, (), (), False)), Send(peer, got))
        book.on(hears(peer, Get(2, (2,), ("w", "b"), False)), to(peer, Got, variables=(second, first, second)))
    book.on(
        hears(OBSERVER, Get(3, (), ("bb",), True)),
        to(OBSERVER, Refused, "cs.InvalidArgumentError", "no variable 'bb'; did you mean 'b'", number=3),
    )


def test_bytes_are_copied_when_nothing_is_being_written() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)))
    book.on(
        hears(OBSERVER, Get(1, (1,), (), True)),
        Send(OBSERVER, Got(1, 0, (variable(1, "w", W),), (W,)), Get(1, (1,), (), True)),
    )
    book.does(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", array(1, 2))))
    book.on(hears(OBSERVER, Get(2, (1,), (), True)))
    book.on(hears(OBSERVER, Get(3, (7,), (), True)), to(OBSERVER, Refused, "cs.InvalidArgumentError", number=3))
    # Where the bytes lie can be said at any time.
    book.on(hears(OBSERVER, Get(4, (1,), (), False)), Send(OBSERVER, Got(4, 0, (variable(1, "w", W),), (W,))))
    book.on(
        book.finished(),
        Send(CONTROLLER, Done(2, 1, 1)),
        Send(OBSERVER, Got(2, 1, (variable(1, "w", W, 1),), (W,)), Get(2, (1,), (), True)),
    )


def test_no_answer_holds_more_bytes_than_a_peer_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_server.engine.requests.ANSWER_NBYTES", W.nbytes)
    book = Playbook(2).begin().has(spec("w", (2,)), spec("b", (2,)))
    book.on(hears(OBSERVER, Get(1, (1,), (), True)), to(OBSERVER, Got))
    said = f"{2 * W.nbytes} bytes of variables were asked for at once"
    book.on(hears(OBSERVER, Get(2, (), (), True)), to(OBSERVER, Refused, "cs.InvalidArgumentError", said, number=2))
    book.on(hears(OBSERVER, Get(3, (), (), False)), to(OBSERVER, Got))  # where they lie, which is little


def test_of_the_questions_that_a_peer_has_open_the_last_is_answered() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)))
    book.does(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", array(1, 2))))
    for number in (2, 2, 3, 4):
        book.on(hears(OBSERVER, Get(number, (1,), (), True)))
    book.on(hears(CONTROLLER, Get(9, (1,), (), True)))
    done, *answers = book.does(book.finished())
    assert to(CONTROLLER, Done).fits(done)
    assert [(a.peer, a.record.request) for a in answers] == [(OBSERVER, 4), (CONTROLLER, 9)]  # type: ignore[union-attr]


def test_unknown_handles_are_refused() -> None:
    book = Playbook(2).begin().has(spec("w"))
    book.on(
        hears(CONTROLLER, Describe(8, (1,), (1,))),
        to(CONTROLLER, Refused, "cs.InvalidArgumentError", "no optimizer 1; there are none", number=8),
    )


def test_versions_and_iterations_count_what_was_committed() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)), spec("b")).has_second_buffers(1).has_optimizer().has_set(1)
    for replica in (0, 1):
        book.does(returns(replica, 2, (applies(0), applies(1, buffers=1)), run=(2,)))
    book.settle()
    described = book.does(hears(CONTROLLER, Describe(9, (1, 2), (1,))))
    assert isinstance(described[0], Send)
    record = described[0].record
    assert isinstance(record, Described)
    assert [v.version for v in record.variables] == [3, 0]
    assert record.optimizers[0].iterations == 3


def test_the_counters_count() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)), spec("n", (), "int64")).has_optimizer("Adam").has_set(1)
    book.does(asks(0, reduces(0, scalar(1)), run=(2,)))
    book.now = 130.0
    counters = Counters(
        request=4,
        pid=1,
        uptime=130.0,
        variables=2,
        parameter_nbytes=16,
        slot_nbytes=16,
        commits=1,
        runs=1,
        messages=4 + 3 + 4 + 1 + 1,
        replicas=(
            ReplicaStatistics(0, 100, "CPU:0", runs=1, points=2, applies=1),
            ReplicaStatistics(1, 101, "CPU:1", runs=1, points=1, applies=1),
        ),
        uncaptured=(("the first gradients for a set of variables", 1),),
        run=1,
        waiting=(
            "run 2: waiting 30.0 s for replica 1 (pid 101, w1.1), last seen 30 s ago; "
            "replica 0 waits at all_reduce SUM (train.py:31)",
        ),
        rate=1 / 130,
    )
    book.on(hears(OBSERVER, Statistics(4)), Send(OBSERVER, counters))


# --- memory that others have taken since it was planned -----------------------------------------------------------


def full(segment: str) -> Error:
    return Error("cs.DeviceMemoryError", f"no room in {segment} of gpu:0", None, "", -1, 0, "")


@pytest.mark.parametrize("value", [None, array(3, 4)])
def test_a_variable_that_finds_no_memory_is_refused_and_nothing_has_changed(value: Array | None) -> None:
    book = Playbook(1).begin()
    before = dict(book.memory.items())
    segment = allocates("parameters/float32", 0, 8)
    gradients = allocates("gradients/0/0/float32", 64, 64, writer="w0")
    others = [allocates("parameters/float32", 64, 64), gradients]
    book.refuses = {segment: full("parameters/float32")}
    create = hears(CONTROLLER, Create("c", book.sequence(), spec("w", (2,)), value))
    no_room = to(CONTROLLER, Refused, "cs.DeviceMemoryError", "variable 'w': no room in parameters/float32 of gpu:0")
    book.on(create, *others, no_room)
    book.on(create, no_room)
    ours = (b"tally", b"q")  # what was heard, and the reply
    assert {k for k, v in book.memory.items() if before.get(k) != v and not k.startswith(ours)} == set()
    assert book.resume() == []
    book.refuses = {}
    again = hears(CONTROLLER, Create("c", book.sequence(), spec("w", (2,)), None))
    book.on(again, *others, segment, to(CONTROLLER, Created, variable=variable(1, "w", W)))
    book.repeat_all()


def test_what_was_allocated_for_slots_that_are_refused_is_given_back() -> None:
    book = Playbook(1).begin().has(spec("w", (2,))).has_optimizer("Adam")
    first, second = (allocates(f"slots/1/{slot}/float32", 0, 8) for slot in "mv")
    book.refuses = {second: full("slots")}
    describe = hears(CONTROLLER, DescribeSlots(9, 1, 1))
    pattern = r"the slots of optimizer 1 \(Adam\): no room in slots of gpu:0"
    book.on(
        describe,
        first,
        to(CONTROLLER, Refused, "cs.DeviceMemoryError", pattern, number=9),
        Discard("slots/1/m/float32", 0, 8),
    )
    book.refuses = {}
    assert first in book.does(describe)
    book.settle()


def test_a_first_apply_fails_where_the_gpu_has_no_room_for_its_kernel() -> None:
    """And the next one, of any optimizer, does not; a server that is restarted has all of them loaded first."""
    book = Playbook(1, device="gpu:0").begin().has(spec("w", (2,))).has_optimizer("Adam").has_optimizer("SGD")
    kernel = LoadKernel("adam", "float32")
    slots = [allocates(f"slots/1/{slot}/float32", 0, 8) for slot in "mv"]
    book.refuses = {kernel: full("a kernel")}
    book.on(
        asks(0, first_apply(0, 1)),
        to(w(0), PointFailed, "cs.DeviceMemoryError", r"optimizer 1 \(Adam\): no room in a kernel of gpu:0"),
    )
    book.on(asks(0, first_apply(1, 1, optimizer=2)), LoadKernel("sgd", "float32"), to(w(0), Accepted))
    book.refuses = {}
    assert book.does(asks(0, first_apply(2, 1)))[:3] == [kernel, *slots]
    assert [each for each in book.resume() if isinstance(each, LoadKernel)] == [LoadKernel("sgd", "float32"), kernel]
