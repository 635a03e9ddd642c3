"""Every byte that a record stands for is found, or the record is listed here with the reason why nothing is brought.

The lists below have every field of every record. A field that is added and not listed fails a test: its author decides
what it stands for, here and in ``cluster/ranges.py``. A byte that is forgotten is a wrong number that nobody sees.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union

import pytest

from central_storage.cluster import ranges
from central_storage.cluster.ranges import Catalogue, arrays_in, comes_down, for_node, joined, variables_in
from cs_proto import messages, segment_names
from cs_proto.descriptors import Array, Location
from cs_proto.errors import PeerProtocolError
from cs_proto.frozen import fields_of
from cs_proto.messages import (
    Accepted,
    ApplyPoint,
    Ask,
    CreatedInRun,
    Described,
    DevicePlace,
    Fetch,
    Forget,
    Located,
    OptimizerUpdate,
    Put,
    ReadPoint,
    Return,
    Run,
    SparseGradient,
    Value,
    Variable,
    VariableSpec,
)
from cs_proto.records import RECORDS, Count, Frame, Record, altered, record

# Fields that mean memory without an array of it: what brings it, or why nothing does.
STANDS = {
    "Location.segment Location.offset": "the place of an array or of a variable",
    "Array.dtype Array.shape Array.place": "an array, which is found by its type",
    "Variable.place": "the catalogue learns it, and the mirror brings the bytes",
    "ApplyPoint.buffers": "Catalogue.up brings the gradients in these buffers",
    "OptimizerUpdate.variable_set OptimizerUpdate.variables": "Catalogue.up brings the gradients of these variables",
    "Accepted.variable_sets": "the catalogue learns the numbers of sets",
    "Forget.variables": "the catalogue forgets the places",
    "Run.held": "pages of the worker's own arena, which the worker wrote; it only places around them",
    "Fetch.array": "the server reads it and sends the bytes in a frame",
    "Put.array": "the server writes the bytes of a frame there; Catalogue.up leaves the segment out from then on",
    "Got.arrays": "the variables beside them, which the mirror brings",
    "Located.arrays": "gradients, which the worker writes, or variables, which the mirror brings",
    "Located.uuid Located.places": "memory of a GPU, which no other machine can open: for_node leaves it out",
    "DevicePlace.handle DevicePlace.offset DevicePlace.size DevicePlace.mark": "memory of a GPU, as above",
    "StepFinished.run Committed.run RunFinished.commits": "variables that were committed, which the mirror brings",
    "MakeSegment.segment MakeSegment.reservation ExtendSegment.segment ExtendSegment.reservation": "of the server",
    "OpenSegment.segment Segment.segment Segment.reservation": "whole segments: each machine hands out its own memory",
    "MakeMailbox.peer OpenMailbox.mailbox Mailbox.mailbox Offer.mailbox MailboxAccepted.mailbox": (
        "memory of two processes of one machine: there are no mailboxes between machines"
    ),
}

# Every other field of every record. None of them means memory.
PLAIN = """
Value: body
Error: exception message origin replica merge_index traceback
VariableSpec: name dtype shape trainable aggregation synchronization ordinary sparse
Variable: number spec version
Optimizer: number kind rule hyperparameters schedule iterations exempt
Worker: replica incarnation pid device node
Register: protocol worker
Registered: replicas parameter_device workers
Hello: protocol role client pid
Welcome: replicas parameter_device server_pid workers last_run
Goodbye: client
MailboxAccepted: refused
SparseGradient: variable
OptimizerUpdate: optimizer
ApplyPoint: k site weight global_clipnorm clip_epsilon is_watched
AssignPoint: k site variable op checked
CreatePoint: k site variable
ReducePoint: k site op
GatherPoint: k site axis
MergeCallPoint: k site
ReadPoint: k site
WriteNote: k number site variable op
OptimizerChange: optimizer hyperparameters
Create: client sequence variable
Assign: client sequence variable op
Configure: client sequence optimizer kind hyperparameters schedule iterations exempt steps
Get: request variables names frames
Describe: request variables optimizers
Statistics: request
Free: client sequence variables optimizers
DescribeSlots: request optimizer variable others
AssignSlot: client sequence optimizer variable slot first
Fetch: request
Put: request
Locate: request variables buffers
AssignAll: client sequence variables slots
Done: sequence number version renamed
Created: sequence
Got: request commits
Described: request optimizers slotted steps
ReplicaStatistics: replica pid device runs points applies not_finite node
Counters: request pid uptime variables parameter_nbytes slot_nbytes commits runs messages replicas posted doorbells
Counters: captured uncaptured run waiting not_finite overflowed rate
Refused: number
Slots: request names
Fetched: request
Located: request keeps
Prepare: path directory
Run: run step replica seed digest frozen series lookahead name changes check_numerics
Forget: optimizers renamed functions
Ask: run replica incarnation series client preserved changes name offset
Return: run replica incarnation count series lookahead client changes name offset
MergeCallReturn: run k
Reduced: run k
Token: run k
Merged: run k
Accepted: run k
CreatedInRun: run k
Committed: k
PointFailed: run k ends_run
RunFinished: run
StepFinished: failed
WorkerRestarted: run worker
Cancel: run later
Resent: run replica series
WaitReport: run seconds series
WaitingFor: run whom
Preserve: run k
Introduce: protocol role rank incarnation pid client name
MakeSegment: writer
Segment: writable is_elsewhere
SegmentRefused: segment
Serving: run_directory transport
Died: role rank incarnation pid cause log restarts node
Output: stream text
Shutdown: reason
Join: protocol pid rank incarnation name node workers
Joined: rank incarnation replicas transport name
Interrupt: replica
MadeProgress: incarnation
Kill: replica incarnation reason
ClientGone: client
Mailbox: spins refused is_passed_on
ShowStacks: replica incarnation
DeviceChoice: devices parameter_device
ServiceReport: state since transport processes controllers events restarts max_restarts
OpenSegment: stop
ServiceProcess: role rank incarnation pid device state restarts cause node
ShowLog: follow
LogLines: lines is_last
LogLine: time label stream text
Appoint: client
OpenLink: protocol session is_new heard connection
LinkOpened: session heard return_timeout
Envelope: session number heard ends pieces
CloseLink: session
Schedule: kind numbers
"""


def of_protocol() -> list[type[Record]]:
    """The records that processes exchange. The server's own ones, in its log, have codes from 200 on."""
    return [kind for code, kind in sorted(RECORDS.items()) if code < 200]


@functools.cache
def hints_of(kind: type[Record]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def mentions(hint: Any, wanted: type[Record]) -> bool:
    """Whether a value of this type may be, or contain, a ``wanted``."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint is wanted or any(mentions(hints_of(hint)[name], wanted) for name in fields_of(hint))
    return any(mentions(argument, wanted) for argument in typing.get_args(hint))


# --- every field is known -------------------------------------------------------------------------------------------


def unlisted(kinds: Sequence[type[Record]]) -> list[str]:
    """What is wrong with the lists above, field by field."""
    stands = [name for names in STANDS for name in names.split()]
    plain = [f"{kind}.{name}" for kind, names in re.findall(r"(\w+): (.*)", PLAIN) for name in names.split()]
    places = [f"{kind.__name__}.{name}" for kind, names in ranges.PLACES_ONLY.items() for name in names]
    faults, every = [f"{name} is named twice" for name in {*stands} & {*plain}], []
    for kind in kinds:
        hints = hints_of(kind)
        for field in fields_of(kind):
            name = f"{kind.__name__}.{field}"
            every.append(name)
            is_found = name not in places and (mentions(hints[field], Array) or mentions(hints[field], Variable))
            if is_found and name in plain:
                faults.append(f"{name} is searched for arrays and variables, and also named as plain")
            if not is_found and name not in stands and name not in plain:
                faults.append(f"{name}: does it mean memory? add it to STANDS, with what brings it, or to PLAIN")
    return faults + [f"{name} is no field" for name in [*stands, *plain] if name not in every]


def test_every_field_of_every_record_is_listed() -> None:
    assert unlisted(of_protocol()) == []


def test_a_record_or_a_field_that_is_added_must_be_listed() -> None:
    @record(199)
    class Lent(Record):
        """As a record that somebody adds and forgets."""

        pages: tuple[tuple[Count, Count], ...]

    try:
        assert unlisted(of_protocol()) == [
            "Lent.pages: does it mean memory? add it to STANDS, with what brings it, or to PLAIN"
        ]
    finally:
        del RECORDS[199]
    assert unlisted([kind for kind in of_protocol() if kind is not Run])[0].startswith("Run.held is no field")


# --- every array is found -------------------------------------------------------------------------------------------

_offsets = itertools.count(64, 64)


def located(nbytes: int = 8, segment: str = "arena/0", offset: int | None = None) -> Array:
    return Array("uint8", (nbytes,), Location(segment, next(_offsets) if offset is None else offset))


def filled(hint: Any) -> list[Any]:
    """Values of a type that differ in what they have; the first has the most. Arrays lie in a segment."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return [1]
    if origin is Literal:
        return [arguments[0]]
    if origin in (Union, types.UnionType):
        values = [value for each in arguments if each is not type(None) for value in filled(each)]
        return values + [None] * (type(None) in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return [tuple(filled(arguments[0])), ()]
    if origin is tuple:
        return [tuple(filled(each)[0] for each in arguments)]
    if hint is Array:
        return [located()]
    if isinstance(hint, type) and issubclass(hint, Record):
        return list(records_of(hint))
    return [{bool: True, int: 1, float: 1.0, str: "a", bytes: b"a", Frame: Frame(b"")}[hint]]


def records_of(kind: type[Record]) -> Iterator[Record]:
    """Records of this class, unchecked: the fullest one, and others that differ from it in one field."""
    hints = hints_of(kind)
    full = {name: filled(hints[name])[0] for name in fields_of(kind)}
    yield unchecked(kind, full)
    for name in fields_of(kind):
        for value in filled(hints[name])[1:]:
            yield unchecked(kind, full | {name: value})


def unchecked(kind: type[Record], values: dict[str, Any]) -> Record:
    made = object.__new__(kind)
    made.__dict__.update(values)
    return made


PLACES = {(Fetch, "array"), (Put, "array"), (messages.Got, "arrays"), (Located, "arrays")}


def by_force(value: Any) -> list[Array]:
    """Every array in a segment, wherever it is in a record, but for those that are only named."""
    if isinstance(value, Array):
        return [value] if isinstance(value.place, Location) else []
    if isinstance(value, tuple):
        return [found for each in value for found in by_force(each)]
    if isinstance(value, Record):
        named = [each for name, each in vars(value).items() if (type(value), name) not in PLACES]
        return [found for each in named for found in by_force(each)]
    return []


def missed(kind: type[Record]) -> int:
    """How many arrays in records of this class are not found."""
    count = 0
    for each in records_of(kind):
        found = arrays_in(each)
        count += sum(array not in found for array in by_force(each))
        assert len(found) <= len(by_force(each))
    return count


@pytest.mark.parametrize("kind", of_protocol(), ids=lambda kind: kind.__name__)
def test_every_array_in_a_segment_is_found(kind: type[Record]) -> None:
    assert missed(kind) == 0


WITH_ARRAYS = [
    (kind, name)
    for kind in of_protocol()
    for name in fields_of(kind)
    if kind is not Array and (kind, name) not in PLACES and mentions(hints_of(kind)[name], Array)
]


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Record], str], None]]:
    """Leave a field out of the search."""

    def leave_out(kind: type[Record], field: str) -> None:
        monkeypatch.setattr(
            ranges, "PLACES_ONLY", {**ranges.PLACES_ONLY, kind: (*ranges.PLACES_ONLY.get(kind, ()), field)}
        )
        ranges._fields.clear()

    yield leave_out
    ranges._fields.clear()


@pytest.mark.parametrize(("kind", "field"), WITH_ARRAYS, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_that_is_left_out_is_noticed(
    kind: type[Record], field: str, sabotage: Callable[[type[Record], str], None]
) -> None:
    sabotage(kind, field)
    assert missed(kind) > 0
    assert f"{kind.__name__}.{field}: does it mean memory" in unlisted(of_protocol())[0]


def test_there_are_records_with_arrays_on_every_way() -> None:
    """So the tests above have something to find."""
    kinds = {kind.__name__ for kind, _ in WITH_ARRAYS}
    assert kinds >= {"Run", "Ask", "Return", "SparseGradient", "Reduced", "Token", "Slots", "AssignAll", "Error"}
    assert len(WITH_ARRAYS) > 40


def test_the_variables_of_a_record_are_found() -> None:
    with_variables = {
        kind.__name__
        for kind in of_protocol()
        if kind is not Variable and any(mentions(hints_of(kind)[name], Variable) for name in fields_of(kind))
    }
    assert with_variables == {"Created", "CreatedInRun", "Described", "Got"}
    for kind in (messages.Created, CreatedInRun, Described, messages.Got):
        assert variables_in(next(records_of(kind)))


def test_arrays_in_frames_are_not_brought() -> None:
    framed, lying = Array("uint8", (2,), Frame(b"ab")), located()
    assert arrays_in(messages.Reduced((1,), 0, (framed, lying))) == [lying]


# --- the worker to the service --------------------------------------------------------------------------------------


def variable(number: int, offset: int, count: int = 16, dtype: str = "float32", *, sparse: bool = False) -> Variable:
    spec = VariableSpec(f"v{number}", dtype, (count,), True, 0, 0, sparse=sparse)
    slab = segment_names.slab(dtype, sparse=sparse)
    return Variable(number, spec, Location(segment_names.parameters(slab), offset), 0)


def told(*variables: Variable) -> Described:
    return Described(1, variables, (), ())


def apply(*updates: OptimizerUpdate, buffers: int = 0, k: int = 0) -> ApplyPoint:
    return ApplyPoint(k, "a.py:1", updates, buffers)


def returned(*notes: messages.Note) -> Return:
    return Return((1,), 1, 1, notes, len(notes), Value(b"", ()), None)


def ask(point: messages.Point | ReadPoint, *notes: messages.Note) -> Ask:
    return Ask((1,), 1, 1, notes, point)


def rows(number: int, segment: str = "arena/1", offset: int = 0) -> SparseGradient:
    values = Array("float32", (2, 8), Location(segment, offset))
    return SparseGradient(number, values, Array("int64", (2,), Location(segment, offset + 64)))


def catalogue(*variables: Variable, sets: dict[int, tuple[int, ...]] | None = None) -> Catalogue:
    """The catalogue of replica 1, which knows these variables and sets."""
    made = Catalogue(1)
    made.learn(told(*variables))
    for number, members in (sets or {}).items():
        made.learn(ask(apply(OptimizerUpdate(1, 0, members))))
        made.learn(Accepted((1,), 0, (number,)))
    return made


PAIR = (variable(1, 0), variable(2, 128), variable(3, 192, 3), variable(4, 64, 8, "float64"))


def test_an_apply_stands_for_the_gradients_of_its_set() -> None:
    known = catalogue(*PAIR, sets={9: (1, 2, 3, 4)})
    point = apply(OptimizerUpdate(1, 9, ()), buffers=1)
    assert known.up(returned(point)) == [
        ("gradients/1/1/float32", 0, 64),
        ("gradients/1/1/float32", 128, 204),
        ("gradients/1/1/float64", 64, 128),
    ]
    assert known.up(ask(ReadPoint(1, "a.py:1"), point)) == known.up(returned(point))


def test_variables_that_follow_each_other_are_one_range_with_the_bytes_between_them() -> None:
    known = catalogue(variable(1, 0, 3), variable(2, 64, 3), variable(3, 192, 3))
    assert known.up(ask(apply(OptimizerUpdate(1, 0, (1, 2, 3))))) == [
        ("gradients/1/0/float32", 0, 76),
        ("gradients/1/0/float32", 192, 204),
    ]


def test_what_lies_between_two_variables_of_an_apply_may_belong_to_another_one() -> None:
    known = catalogue(variable(1, 0, 16), variable(2, 64, 1), variable(3, 128, 16))
    assert known.up(ask(apply(OptimizerUpdate(1, 0, (1, 3))))) == [
        ("gradients/1/0/float32", 0, 64),
        ("gradients/1/0/float32", 128, 192),
    ]


def test_gradients_of_rows_are_brought_and_the_dense_one_of_their_variable_is_not() -> None:
    known = catalogue(*PAIR, variable(5, 0, sparse=True), sets={9: (1, 2, 5)})
    point = apply(OptimizerUpdate(1, 9, (), (rows(2), rows(5, offset=256))))
    assert known.up(returned(point)) == [
        ("arena/1", 0, 80),
        ("arena/1", 256, 336),
        ("gradients/1/0/float32", 0, 64),
    ]


def test_the_sets_of_a_point_have_the_numbers_of_the_answer_in_order() -> None:
    known = catalogue(*PAIR, sets={9: (1,)})
    known.learn(ask(apply(OptimizerUpdate(2, 0, (2,)), OptimizerUpdate(1, 9, ()), OptimizerUpdate(3, 0, (3,)))))
    known.learn(Accepted((1,), 0, (21, 9, 23)))
    assert known.up(returned(apply(OptimizerUpdate(2, 21, ())))) == [("gradients/1/0/float32", 128, 192)]
    assert known.up(returned(apply(OptimizerUpdate(3, 23, ())))) == [("gradients/1/0/float32", 192, 204)]
    assert known.up(returned(apply(OptimizerUpdate(1, 9, ())))) == [("gradients/1/0/float32", 0, 64)]


def test_an_answer_to_another_point_numbers_no_set() -> None:
    known = catalogue(*PAIR)
    known.learn(ask(apply(OptimizerUpdate(1, 0, (1,)), k=3)))
    known.learn(Accepted((1,), 2, (9,)))
    known.learn(ask(messages.AssignPoint(3, "a.py:1", 1, "assign", located(), True)))
    known.learn(Accepted((1,), 3))
    with pytest.raises(PeerProtocolError, match="names set 9 of variables, which the server has not numbered"):
        known.up(returned(apply(OptimizerUpdate(1, 9, ()))))


def test_an_answer_with_another_number_of_sets_is_refused() -> None:
    known = catalogue(*PAIR)
    known.learn(ask(apply(OptimizerUpdate(1, 0, (1,)))))
    with pytest.raises(PeerProtocolError, match="2 numbers of sets answer 1 updates"):
        known.learn(Accepted((1,), 0, (9, 10)))


@pytest.mark.parametrize(
    ("point", "error"),
    [
        (apply(OptimizerUpdate(1, 0, (1, 77))), "names variable 77, of which its worker was not told where it lies"),
        (apply(OptimizerUpdate(1, 8, ())), "names set 8 of variables"),
        (apply(OptimizerUpdate(1, 0, (1,)), buffers=2), "buffers 2 of a GPU, but its worker is on another machine"),
        (apply(OptimizerUpdate(1, 0, (5,))), "names all of the sparse variable 5, which has no gradient buffers"),
    ],
)
def test_an_apply_whose_gradients_cannot_be_found_is_refused(point: ApplyPoint, error: str) -> None:
    known = catalogue(*PAIR, variable(5, 0, sparse=True))
    for said in (returned(point), ask(point)):
        with pytest.raises(PeerProtocolError, match=error):
            known.up(said)


def test_only_the_workers_own_arena_is_brought_to_the_service() -> None:
    known = catalogue()
    places = ["arena/1", "arena/0", "arena/11", "arena/controller", "inputs", "parameters/float32", "control"]
    value = Value(b"", tuple(located(8, name, 64) for name in places))
    assert known.up(messages.MergeCallReturn((1,), 0, (value,), None)) == [("arena/1", 64, 72)]


def test_what_the_worker_has_put_is_not_brought_from_its_machine() -> None:
    """It cannot map the segment: other bytes lie there."""
    known = catalogue(*PAIR, sets={9: (1, 4)})
    point = apply(OptimizerUpdate(1, 9, (), ()))
    assert len(known.up(returned(point))) == 2
    known.learn(Put(3, Array("uint8", (64,), Location("gradients/1/0/float32", 0)), None))
    assert known.up(returned(point)) == [("gradients/1/0/float64", 64, 128)]
    known.learn(Put(4, Array("uint8", (64,), Location("arena/1", 0)), None))
    assert known.up(messages.MergeCallReturn((1,), 0, (Value(b"", (located(8, "arena/1"),)),), None)) == []


def test_a_return_that_is_repeated_is_known_by_its_run() -> None:
    known = catalogue()

    def is_repeated(client: str, *run: int) -> bool:
        return known.is_repeated(altered(returned(), client=client, run=run))

    assert [is_repeated("a", 5), is_repeated("a", 5)] == [False, True]
    assert [is_repeated("a", 6, 2, 0), is_repeated("a", 6, 2, 1), is_repeated("a", 6)] == [False] * 3
    assert [is_repeated("a", 6, 2, 1), is_repeated("a", 6)] == [True] * 2
    assert [is_repeated("b", 6), is_repeated("b", 6), is_repeated("b", 7)] == [False, True, False]
    ask = Ask((7,), 1, 1, (), ReadPoint(0, "a"), 0, "b")
    assert [known.is_repeated(ask), known.is_repeated(ask)] == [False] * 2


# --- the service to the worker --------------------------------------------------------------------------------------


def test_arrays_of_others_are_brought_to_the_worker() -> None:
    arenas = ["arena/controller", "arena/server", "arena/0", "arena/1"]
    places = ["inputs", *arenas, "slots/3/m/float32", "parameters/bool"]
    brought = messages.Reduced((1,), 0, tuple(located(8, name, 64) for name in places))
    assert catalogue().down(brought) == sorted((name, 64, 72) for name in places)
    run = Run((1,), 1, 1, 0, b"d" * 16, located(8, "arena/controller", 0), False, b"", (located(4, "inputs", 8),))
    assert catalogue().down(run) == [("arena/controller", 0, 8), ("inputs", 8, 12)]


@pytest.mark.parametrize(
    "name", ["control", "journal", "undo", "account", "versions", "times/w0", "gradients/1/0/float32", "arena/0/1", "x"]
)
def test_what_no_worker_reads_is_refused(name: str) -> None:
    assert not comes_down(name)
    with pytest.raises(PeerProtocolError, match=f"a Reduced names an array in {name}, which no worker reads"):
        catalogue().down(messages.Reduced((1,), 0, (located(8, name),)))


@pytest.mark.parametrize("name", ["parameters/sparse/float32", "slots/3/m/sparse/float32"])
def test_tables_are_never_brought_whole(name: str) -> None:
    assert segment_names.is_sparse(name)
    assert not comes_down(name)
    assert catalogue().down(messages.Slots(1, ("m",), (located(8, name),))) == []


def test_places_that_are_only_named_are_not_brought() -> None:
    array = Array("float32", (16,), Location("gradients/1/1/float32", 0))
    known = catalogue(*PAIR)
    assert known.down(Located(1, b"", (array,), (), False)) == []
    assert known.down(messages.Got(1, 0, PAIR[:1], (PAIR[0].array,))) == []
    assert known.up(Fetch(1, located(64, "arena/1"), None)) == []


def test_no_handle_of_gpu_memory_leaves_the_machine() -> None:
    place = DevicePlace(b"h" * 64, 16, 128, b"m" * 16)
    found = Located(7, b"u" * 16, (located(),), (place,), True)
    assert for_node(found) == Located(7, b"", found.arrays, (), True)
    plain = Located(7, b"", (), (), False)
    assert for_node(plain) is plain
    assert for_node(told()) == told()


# --- variables come and go ------------------------------------------------------------------------------------------


def placed(known: Catalogue) -> dict[int, ranges.Range]:
    return {number: each.range for number, each in known.variables.items()}


def test_a_variable_that_is_forgotten_is_brought_no_more_and_does_not_end_its_worker() -> None:
    """A replica whose run was given up may still name it: the server refuses that."""
    known = catalogue(*PAIR, sets={9: (1, 2)})
    known.learn(Forget((1,)))
    assert placed(known).keys() == {2, 3, 4}
    assert known.up(returned(apply(OptimizerUpdate(1, 9, ())))) == [("gradients/1/0/float32", 128, 192)]
    known.learn(Forget((2, 88)))
    assert known.up(returned(apply(OptimizerUpdate(1, 9, ())))) == []
    assert known.up(ask(apply(OptimizerUpdate(1, 0, (1, 2))))) == []
    with pytest.raises(PeerProtocolError, match="names variable 88"):  # which this worker cannot know
        known.up(ask(apply(OptimizerUpdate(1, 0, (1, 88)))))


def test_a_place_that_was_given_to_another_variable_is_its_own() -> None:
    """The worker may hear of the new one before it hears that the old ones are gone."""
    known = catalogue(*PAIR)
    before = known.revision
    known.learn(CreatedInRun((1,), 0, variable(7, 64, 32)))  # from the end of 1 to the end of 2
    assert placed(known) == {
        1: ("parameters/float32", 0, 64),
        3: ("parameters/float32", 192, 204),
        4: ("parameters/float64", 64, 128),
        7: ("parameters/float32", 64, 192),
    }
    assert known.revision > before
    known.learn(Forget((2,)))
    assert 7 in known.variables


def test_a_late_answer_about_a_freed_variable_takes_no_place_away() -> None:
    known = catalogue(variable(1, 0), variable(7, 64, 32))
    known.learn(told(variable(2, 128)))
    assert placed(known).keys() == {1, 7}


def test_what_is_learned_again_changes_nothing_but_its_place() -> None:
    known = catalogue(*PAIR, sets={9: (1, 2)})
    before, revision = known.variables[1], known.revision
    known.learn(told(*PAIR))
    assert (known.variables[1], known.revision) == (before, revision)
    known.learn(told(variable(1, 1024)))
    assert known.variables[1] is not before
    assert known.up(returned(apply(OptimizerUpdate(1, 9, ())))) == [
        ("gradients/1/0/float32", 128, 192),
        ("gradients/1/0/float32", 1024, 1088),
    ]


def test_empty_variables_have_no_place() -> None:
    known = catalogue(variable(1, 0, 0), variable(2, 0), variable(3, 0, 0), sets={9: (1, 2, 3)})
    assert known.variables.keys() == {1, 2, 3}
    assert known.up(returned(apply(OptimizerUpdate(1, 9, ())))) == [("gradients/1/0/float32", 0, 64)]
    known.learn(Forget((1, 3)))
    assert known.variables.keys() == {2}


def test_a_variable_in_a_strange_segment_is_refused() -> None:
    wrong = Variable(1, PAIR[0].spec, Location("parameters/float64", 0), 0)
    with pytest.raises(PeerProtocolError, match="variable 1 of dtype float32 lies in parameters/float64"):
        catalogue(wrong)


def test_ranges_are_joined_within_their_segment_only() -> None:
    assert joined([("b", 0, 4), ("a", 4, 8), ("a", 0, 5), ("a", 9, 9), ("a", 8, 9)]) == [("a", 0, 9), ("b", 0, 4)]
    assert joined([("a", 0, 60), ("a", 64, 128), ("a", 192, 200)], 63) == [("a", 0, 128), ("a", 192, 200)]
