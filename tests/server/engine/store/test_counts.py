"""Counts of updates by variable: the sums that are kept are those that the tables say."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.book import Book
from tests.harness.examples import examples

from cs_proto.arithmetic.optimizers import defaults_of
from cs_proto.messages import ApplyPoint, OptimizerUpdate
from cs_server.engine.catalogue import optimizers, slabs, updates
from cs_server.engine.catalogue import variables as catalogue_variables

ADAM = {name: float(value) for name, value in defaults_of("torch.Adam").items()}
SGD = {name: float(value) for name, value in defaults_of("torch.SGD").items()}
VARIABLES = 4

ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 2), st.sets(st.integers(0, VARIABLES - 1), min_size=1)),
    st.tuples(st.just("ahead"), st.integers(1, 2), st.sets(st.integers(0, VARIABLES - 1), min_size=1)),
    st.tuples(st.just("set"), st.integers(1, 2), st.integers(0, VARIABLES - 1), st.integers(0, 9)),
    st.tuples(st.just("free"), st.integers(0, VARIABLES - 1)),
    st.tuples(st.just("slot"), st.integers(1, 2), st.integers(0, VARIABLES - 1)),
)


def place(book: Book, member: int) -> int:
    return slabs.elements(catalogue_variables.row(book.state, member).array)[0]


@settings(max_examples=examples(60), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_every_update_has_the_count_of_its_variable(actions: list[tuple[Any, ...]]) -> None:
    book = Book(replicas=1)
    variables = [book.make(f"v{n}", (3,)) for n in range(VARIABLES)]
    for given_numbers, kind in ((SGD, "torch.SGD"), (ADAM, "torch.Adam")):
        optimizers.configure(book.state, 0, kind, {**given_numbers, "learning_rate": 0.1})
    expected: dict[tuple[int, int], int] = {}
    ahead: dict[int, int] = {}  # by set, steps that the tables do not count yet
    for action, *what in actions:
        if action in ("step", "ahead"):
            optimizer, which = what
            members = tuple(sorted(variables[each] for each in which))
            number, _ = optimizers.variable_set(book.state, optimizer, members)
            point = ApplyPoint(0, "x:1", (OptimizerUpdate(optimizer, number, ()),), 0)
            (update,) = updates.apply(book.state, [number], [point], ahead).updates
            counts = {member: expected.get((optimizer, member), 0) + 1 for member in members}
            assert update.t == min(counts.values())
            assert bool(update.counts) == (len(set(counts.values())) > 1)
            found = {
                member: t
                for part, t in update.parts()[0]
                for member in members
                if any(first <= place(book, member) < last for first, last in part.ranges)
            }
            assert found == counts
            expected |= {(optimizer, member): count for member, count in counts.items()}
            ahead[number] = ahead.get(number, 0) + 1
        if action != "ahead":  # whatever is not the step of the same kind brings the tables up to date
            for number, count in ahead.items():
                optimizers.applied(book.state, number, count)
            ahead = {}
        if action == "set":
            optimizer, which, count = what
            optimizers.set_counts(book.state, optimizer, {variables[which]: count})
            expected[optimizer, variables[which]] = count
        elif action == "slot":
            optimizer, which = what
            optimizers.make_slots(book.state, optimizer, (variables[which],))
            expected.setdefault((optimizer, variables[which]), 0)
        elif action == "free":
            (which,) = what
            optimizers.free(book.state, [variables[which]])
            expected = {key: count for key, count in expected.items() if key[1] != variables[which]}
            variables[which] = book.make("new", (3,))
        if not ahead:
            for optimizer in (1, 2):
                counts = {member: count for (made, member), count in expected.items() if made == optimizer}
                assert optimizers.counts(book.state, optimizer) == counts
        if len(actions) % 2 and not ahead:  # a server that takes the place of this one
            book.tables.flush()
            book.reopen()
