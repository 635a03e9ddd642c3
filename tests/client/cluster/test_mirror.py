"""A worker on another machine reads what is here: whatever changes, whoever is freed, and whichever server counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from central_storage.cluster.mirror import Copy, Fresh, Mirror
from central_storage.cluster.ranges import Catalogue
from cs_proto import segment_names
from cs_proto.descriptors import Array, Location
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import (
    Cancel,
    Committed,
    Described,
    Fetched,
    Forget,
    Prepare,
    Preserve,
    Run,
    StepFinished,
    Variable,
    VariableSpec,
)
from cs_proto.records import Frame, Record

SLAB = "parameters/float32"
NOTHING = Fresh([], [])
FINISHED = StepFinished((1,), False)


def variable(number: int, offset: int, nbytes: int = 64, *, sparse: bool = False) -> Variable:
    spec = VariableSpec(f"v{number}", "float32", (nbytes // 4,), True, 0, 0, sparse=sparse)
    slab = segment_names.slab("float32", sparse=sparse)
    return Variable(number, spec, Location(segment_names.parameters(slab), offset), 0)


def run(number: int, series: int = 0) -> Run:
    return Run((number,), number, 0, 0, b"d" * 16, None, False, b"", (), series, 1 if series else 0)


class World:
    """The memory of a service and of a machine elsewhere with one worker or more, and a server that does not know of
    them."""

    def __init__(self) -> None:
        self.head, self.node = np.zeros(2048, np.uint8), np.zeros(2048, np.uint8)
        self.control, self.versions = np.zeros(4, np.uint64), np.zeros(64, np.uint64)
        self.versions[0] = 1
        self.told = np.zeros(64, np.uint64)  # the versions at the worker
        self.variables: dict[int, Variable] = {}
        #: What the worker of now was told.
        self.known: set[int] = set()
        self.copy = Copy()
        self.catalogue, self.mirror = Catalogue(0), Mirror(self.copy)
        self.made = 0
        self._others: list[tuple[set[int], Catalogue, Mirror]] = []

    @property
    def workers(self) -> int:
        """The number of workers."""
        return 1 + len(self._others)

    def another(self) -> None:
        """One more worker of the same machine is the one of now."""
        self._others.append((self.known, self.catalogue, self.mirror))
        self.replace()

    def replace(self) -> None:
        """The worker of now has died, and this is another one."""
        self.known, self.catalogue, self.mirror = set(), Catalogue(0), Mirror(self.copy)

    def turn(self) -> None:
        """The next one of the workers is the one of now."""
        self._others.append((self.known, self.catalogue, self.mirror))
        self.known, self.catalogue, self.mirror = self._others.pop(0)

    def make(self, offset: int, nbytes: int = 64, *, sparse: bool = False) -> int:
        """A variable of zeros; no commit counts it."""
        self.made += 1
        self.variables[self.made] = variable(self.made, offset, nbytes, sparse=sparse)
        self._bytes(self.made)[:] = 0
        return self.made

    def down(self, record: Record) -> Fresh:
        """Pass a record to the worker, after what is brought before it."""
        self.catalogue.learn(record)
        fresh = self.mirror.before(record, self.catalogue, self.control, self.versions)
        for name, start, stop in fresh.ranges:
            assert name == SLAB
            self.node[start:stop] = self.head[start:stop]
        for offset, data in fresh.words:
            words = np.frombuffer(data, np.uint64)
            self.told[offset // 8 : offset // 8 + len(words)] = words
        return fresh

    def teach(self, *numbers: int) -> Fresh:
        """The server answers where variables lie."""
        self.known |= {*numbers}
        return self.down(Described(1, tuple(self.variables[number] for number in numbers), (), ()))

    def begin(self, *numbers: int, value: int = 1) -> Callable[[], None]:
        """A commit up to its middle: the words are raised, and half of the bytes are written."""
        self.control[0] |= np.uint64(1)
        for number in numbers:
            self.versions[number] += np.uint64(1)
        for number in numbers:
            half = self._bytes(number)
            half[: len(half) // 2] = value

        def finish() -> None:
            for number in numbers:
                self._bytes(number)[:] = value
            self.control[0] += np.uint64(1)

        return finish

    def commit(self, *numbers: int, value: int = 1) -> None:
        self.begin(*numbers, value=value)()

    def free(self, number: int) -> None:
        self._bytes(number)[:] = 0
        del self.variables[number]
        for known in (self.known, *(known for known, _, _ in self._others)):
            known.discard(number)

    def check(self) -> None:
        """The worker has of every variable that it knows what the service has."""
        for number in self.known:
            assert number in self.catalogue.variables
            assert self.told[number] == self.versions[number]
            if not self.variables[number].spec.sparse:
                at = self.place(number)
                assert self.node[at].tobytes() == self.head[at].tobytes(), f"variable {number}"
        assert self.told[0] == self.versions[0]

    def _bytes(self, number: int) -> np.ndarray:
        return np.zeros(8, np.uint8) if self.variables[number].spec.sparse else self.head[self.place(number)]

    def place(self, number: int) -> slice:
        array = self.variables[number].array
        assert isinstance(array.place, Location)
        return slice(array.place.offset, array.place.offset + array.nbytes)


@pytest.fixture
def world() -> World:
    """Three variables that the worker has as they are."""
    made = World()
    made.teach(made.make(0), made.make(64), made.make(256))
    made.check()
    return made


def test_a_variable_is_brought_when_the_worker_is_told_of_it() -> None:
    world = World()
    assert world.teach(world.make(0)) == Fresh([(SLAB, 0, 64)], [(0, np.array([1, 0], np.uint64).tobytes())])
    assert world.teach(world.make(64), world.make(192)).ranges == [(SLAB, 64, 128), (SLAB, 192, 256)]
    assert world.down(FINISHED) == NOTHING


def test_what_a_commit_changes_is_brought_once(world: World) -> None:
    world.commit(1, 3)
    words = np.array([1], np.uint64).tobytes()
    assert world.down(FINISHED) == Fresh([(SLAB, 0, 64), (SLAB, 256, 320)], [(8, words), (24, words)])
    world.check()
    assert world.down(run(2)) == NOTHING
    world.commit(1, 2, value=2)
    assert world.down(run(3)) == Fresh([(SLAB, 0, 128)], [(8, np.array([2, 1], np.uint64).tobytes())])
    world.check()


@pytest.mark.parametrize(
    "record",
    [run(1), run(7, 7), run(8, 7), FINISHED, Committed((1,), 0), Fetched(1, Array("uint8", (1,), Frame(b"a")))],
)
def test_stale_variables_come_before_every_record(world: World, record: Record) -> None:
    """Also before a later step of a series: the script may have assigned to them between two steps."""
    world.commit(2)
    assert world.down(record).ranges == [(SLAB, 64, 128)]
    world.check()


def test_nothing_comes_before_the_worker_has_preserved_what_it_has_read(world: World) -> None:
    world.commit(2)
    assert world.down(Preserve((1,), 0)) == NOTHING
    assert world.down(Committed((1,), 0)).ranges == [(SLAB, 64, 128)]


def test_words_that_are_read_within_a_commit_do_not_count(world: World) -> None:
    """The server raises the word first: with it go the bytes that are still to be written."""
    finish = world.begin(2)
    assert world.down(FINISHED) == Fresh([(SLAB, 64, 128)], [])  # half of them are new
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]
    finish()
    assert world.down(FINISHED) == Fresh([(SLAB, 64, 128)], [(16, np.array([1], np.uint64).tobytes())])
    world.check()
    assert world.down(FINISHED) == NOTHING


@pytest.mark.parametrize("record", [run(8, 7), Prepare((), "/"), Forget((99,)), Cancel((1,))])
def test_within_a_commit_nothing_comes_before_a_record_after_which_the_worker_waits(
    world: World, record: Record
) -> None:
    finish = world.begin(2)
    assert world.down(record) == NOTHING
    finish()
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]


def test_a_commit_that_begins_while_the_words_are_read(world: World) -> None:
    """The words are those of the commit, and the bytes are not."""

    class Words(np.ndarray):
        """The words of a server that begins a commit just before somebody reads them."""

        def __getitem__(self, place: object) -> object:
            if isinstance(place, np.ndarray):
                finishes.append(world.begin(2))
            return world.versions[place]  # type: ignore[call-overload]

    finishes: list[Callable[[], None]] = []
    fresh = world.mirror.before(FINISHED, world.catalogue, world.control, world.versions.view(Words))
    assert fresh == Fresh([(SLAB, 64, 128)], [])
    finishes[0]()
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]
    world.check()


def test_another_server_makes_all_stale(world: World) -> None:
    world.commit(1)
    world.down(FINISHED)
    world.versions[0] += np.uint64(1)
    words = np.array([2, 1, 0, 0], np.uint64).tobytes()
    assert world.down(FINISHED) == Fresh([(SLAB, 0, 128), (SLAB, 256, 320)], [(0, words)])
    world.check()
    assert world.down(FINISHED) == NOTHING


def test_another_server_that_has_not_finished_the_commit_of_the_last_one(world: World) -> None:
    finish = world.begin(2)
    world.versions[0] += np.uint64(1)
    assert world.down(FINISHED) == Fresh([(SLAB, 0, 128), (SLAB, 256, 320)], [])
    world.versions[2] += np.uint64(1)  # it repeats the commit
    finish()
    assert world.down(FINISHED).ranges == [(SLAB, 0, 128), (SLAB, 256, 320)]
    world.check()


def test_another_worker_has_nothing(world: World) -> None:
    world.mirror = Mirror()
    assert world.down(FINISHED).ranges == [(SLAB, 0, 128), (SLAB, 256, 320)]
    world.catalogue = Catalogue(0)
    assert world.down(FINISHED) == NOTHING
    assert world.teach(2).ranges == [(SLAB, 64, 128)]


def test_workers_of_one_machine_get_a_variable_once(world: World) -> None:
    world.another()
    assert world.teach(1, 2, 3) == NOTHING  # the other one has brought them
    world.check()
    world.commit(1, 3)
    assert world.down(FINISHED).ranges == [(SLAB, 0, 64), (SLAB, 256, 320)]
    world.turn()
    assert world.down(FINISHED) == NOTHING
    world.check()
    world.commit(2)
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]
    world.turn()
    assert world.down(FINISHED) == NOTHING
    world.check()


def test_a_worker_gets_what_the_others_do_not_know(world: World) -> None:
    world.another()
    made = world.make(512)
    assert world.teach(1, made).ranges == [(SLAB, 512, 576)]
    world.commit(1, 2, made)
    assert world.down(FINISHED).ranges == [(SLAB, 0, 64), (SLAB, 512, 576)]
    world.check()
    world.turn()
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]
    world.check()


def test_the_next_worker_finds_what_the_last_one_had(world: World) -> None:
    world.replace()
    assert world.teach(1, 2, 3) == NOTHING
    world.commit(2)
    world.replace()
    assert world.teach(1, 2).ranges == [(SLAB, 64, 128)]
    world.check()


def test_what_one_worker_got_within_a_commit_the_next_gets_whole(world: World) -> None:
    world.another()
    world.teach(1, 2, 3)
    finish = world.begin(2)
    assert world.down(FINISHED) == Fresh([(SLAB, 64, 128)], [])
    finish()
    world.turn()
    assert world.down(FINISHED).ranges == [(SLAB, 64, 128)]
    world.check()
    world.turn()
    assert world.down(FINISHED) == NOTHING
    world.check()


def test_a_worker_that_hears_late_of_the_place_of_a_variable(world: World) -> None:
    """Numbers are not used again, but what one worker knows of a number is no reason to trust another place."""
    world.another()
    world.variables[2] = variable(2, 512)
    world.head[512:576] = 9
    assert world.teach(2).ranges == [(SLAB, 512, 576)]
    world.check()


def test_of_a_table_the_worker_gets_the_word_alone() -> None:
    """A copy on a GPU is compared by it; the rows are fetched."""
    world = World()
    assert world.teach(world.make(0, sparse=True)) == Fresh([], [(0, np.array([1, 0], np.uint64).tobytes())])
    world.commit(1)
    assert world.down(FINISHED) == Fresh([], [(8, np.array([1], np.uint64).tobytes())])
    world.check()


def test_the_bytes_between_two_variables_come_along_only_if_they_are_nobodys() -> None:
    world = World()
    world.teach(world.make(0, 4), world.make(64, 4), world.make(192, 4))
    world.commit(1, 2, 3)
    assert world.down(FINISHED).ranges == [(SLAB, 0, 68), (SLAB, 192, 196)]
    world.commit(1, 3)
    assert world.down(FINISHED).ranges == [(SLAB, 0, 4), (SLAB, 192, 196)]


def test_a_place_that_another_variable_has_now_is_stale(world: World) -> None:
    world.commit(2)
    world.down(FINISHED)
    world.free(2)
    made = world.make(64)  # zeros: no commit has counted it, as none had counted the other one at first
    assert world.teach(made).ranges == [(SLAB, 64, 128)]
    world.check()


def test_a_variable_that_is_forgotten_and_learned_again_is_stale(world: World) -> None:
    assert world.down(Forget((2,))) == NOTHING
    assert world.teach(2).ranges == [(SLAB, 64, 128)]
    world.catalogue.learn(Forget((2,)))
    assert world.teach(2).ranges == [(SLAB, 64, 128)]


def test_a_variable_without_a_word_is_refused() -> None:
    world = World()
    world.made = 63
    with pytest.raises(PeerProtocolError, match="variable 64 has no version, of which there are 63"):
        world.teach(world.make(0))


STEPS = ["make", "make", "teach", "commit", "commit", "middle", "free", "restart", "machine", "late", "pass", "pass"]
STEPS += ["another", "turn", "turn", "worker"]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1 << 16)), max_size=60))
def test_whatever_happens_a_worker_has_what_the_service_has(steps: list[tuple[str, int]]) -> None:
    world, late = World(), [FINISHED]
    for step, seed in steps:
        draw = random.Random(seed)
        numbers = sorted(world.variables)
        some = draw.sample(numbers, draw.randint(1, len(numbers))) if numbers else []
        taken = [world.place(number) for number in numbers if not world.variables[number].spec.sparse]
        if step == "make" and world.made < 60:
            free = [at for at in range(0, 1024, 64) if all(at + 128 <= p.start or at >= p.stop for p in taken)]
            if free:
                is_sparse = draw.random() < 0.1
                at = 128 * world.made if is_sparse else draw.choice(free)
                made = world.make(at, draw.choice([4, 64, 68, 128]), sparse=is_sparse)
                late.append(Described(1, (world.variables[made],), (), ()))
        elif step == "teach" and some:
            world.teach(*some)
            world.check()
        elif step == "commit" and some:
            world.commit(*some, value=draw.randint(1, 255))
        elif step == "middle" and some:
            finish = world.begin(*some, value=draw.randint(1, 255))
            for record in draw.choices([FINISHED, run(8, 7), Forget((99,)), Committed((1,), 0)], k=2):
                world.down(record)
            finish()
        elif step == "free" and numbers:
            gone = draw.choice(numbers)
            world.free(gone)
            if draw.random() < 0.5:
                world.down(Forget((gone,)))
            else:
                late.append(Forget((gone,)))
        elif step == "restart":
            world.versions[0] += np.uint64(1)
        elif step == "machine" and world.workers == 1:
            world.node[:], world.told[:], world.copy = 0, 0, Copy()
            world.replace()
        elif step == "worker":
            world.replace()
        elif step == "another" and world.workers < 3:
            world.another()
        elif step == "turn":
            world.turn()
        elif step == "late":  # an answer that was given before a variable was freed, or the news that it was freed
            old = draw.choice(late)
            if isinstance(old, Described) and old.variables[0].number in world.variables:
                world.known.add(old.variables[0].number)
            world.down(old)
        elif step == "pass":
            world.down(draw.choice([FINISHED, run(7), run(8, 7), Committed((1,), 0)]))
            world.check()
