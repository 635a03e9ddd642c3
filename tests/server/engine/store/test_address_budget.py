"""Addresses: whatever may come fits into those that there are, on small machines and on the largest."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from tests.harness.playbook import DEFAULTS

from cs_proto.arithmetic.optimizers import OPTIMIZERS, SLOTS, WITHOUT_DECAY, is_flag, rule_of
from cs_proto.descriptors import DTYPES
from cs_proto.errors import MemoryPlanError
from cs_proto.messages import VariableSpec
from cs_runtime import machine
from cs_server.compute import undo
from cs_server.engine.catalogue import optimizers, slabs, variables
from cs_server.engine.store.address_budget import PAGE_NBYTES, Addresses, divided
from cs_server.engine.store.control_log import ControlMemory
from cs_server.engine.store.state import Config, opened
from cs_server.events import Allocate
from cs_server.rules import RULES

GIB, TIB = 1 << 30, 1 << 40
#: What x86-64 gives a process, and what the rest of it may take of that.
ALL_NBYTES, REST_NBYTES = 128 * TIB, 16 * TIB
MACHINES = [GIB, 64 * GIB, TIB, 3 * TIB // 2, 4 * TIB, 8 * TIB]
REPLICAS = [1, 2, 8, 16, 64, 1024]
OPTIMIZABLE = [dtype for dtype in DTYPES if dtype.startswith(("float", "complex"))]


class Book:
    """A catalogue of a machine of that size, and every segment that it has had made, with each of its lengths."""

    def __init__(self, machine_nbytes: int, replicas: int, budget: int = 64 * TIB) -> None:
        self.replicas = replicas
        self.lengths = divided(budget, machine_nbytes, replicas)
        self.state = opened(Config(replicas, "cpu:0", self.lengths, pid=1, started=0.0), ControlMemory())
        self.tables, self.out = self.state.tables, self.state.out

    def make(self, dtype: str, count: int = 8, *, trainable: bool = True) -> int:
        spec = VariableSpec("v", dtype, (count,), trainable, 0, 0)
        return variables.create(self.state, spec, None)[0].number

    def optimize(self, kind: str, hyperparameters: dict[str, float], variables: tuple[int, ...]) -> None:
        made = optimizers.configure(self.state, 0, kind, hyperparameters)
        optimizers.variable_set(self.state, made.number, variables)

    def taken(self) -> dict[str, set[int]]:
        """The lengths of all segments, those that a server makes at its start included."""
        fixed = self.lengths
        arenas = ["arena/server", "arena/controller", "inputs", *(f"arena/{r}" for r in range(self.replicas))]
        found = {name: {fixed.arena} for name in arenas}
        found |= {"control": {fixed.control}, "versions": {fixed.versions}, "undo": {undo.UNDO_NBYTES}}
        for command in self.out:
            if isinstance(command, Allocate):
                assert command.reservation % PAGE_NBYTES == 0
                assert command.stop <= command.reservation
                found.setdefault(command.segment, set()).add(command.reservation)
        return found

    def server_nbytes(self) -> int:
        """Addresses of the server; what was mapped before a segment was extended counts as if it stayed."""
        return sum(map(sum, self.taken().values()))

    def worker_nbytes(self, replica: int) -> int:
        """Addresses of a worker, of which every variable and gradient is used."""
        own = ("parameters/", "slots/", f"gradients/{replica}/", "versions", "control")
        mine = (f"arena/{replica}", "inputs", "arena/controller")
        return sum(sum(nbytes) for name, nbytes in self.taken().items() if name.startswith(own) or name in mine)

    def client_nbytes(self) -> int:
        """Addresses of a script that holds results of every replica."""
        seen = ("parameters/", "slots/", "arena/", "inputs", "control")
        return sum(sum(nbytes) for name, nbytes in self.taken().items() if name.startswith(seen))


#: The hyperparameters that a rule depends on; any value does for the others.
_CHOICES = {"learning_rate_power": (-0.5, -0.25), "momentum": (0.0, 0.5)}


def rules() -> Iterator[tuple[str, dict[str, float]]]:
    """An optimizer of every rule that there is. One without weight decay has the slots of that with it."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for kind, optimizer in OPTIMIZERS.items():
        names = optimizer.hyperparameters
        choices = [(0.0, 1.0) if is_flag(kind, name) else _CHOICES.get(name, (0.5,)) for name in names]
        for values in product(*choices):
            hyperparameters = dict(zip(names, values, strict=True))
            found.setdefault(rule_of(kind, hyperparameters), (kind, hyperparameters))
    assert found.keys() | set(WITHOUT_DECAY.values()) == SLOTS.keys()
    yield from found.values()


@pytest.mark.parametrize("replicas", REPLICAS)
def test_the_first_reservations_fit_on_every_machine(replicas: int) -> None:
    """All dtypes, the slots of all rules and both sets of gradients at once."""
    for machine_nbytes in MACHINES:
        book = Book(machine_nbytes, replicas)
        numbers = {dtype: book.make(dtype) for dtype in DTYPES}
        for kind, hyperparameters in rules():
            takes = RULES[rule_of(kind, hyperparameters)].takes
            book.optimize(
                kind, hyperparameters, tuple(numbers[dtype] for dtype in OPTIMIZABLE if takes(np.dtype(dtype)))
            )
        slabs.use_second_gradients(book.state, DTYPES)
        assert {name for name in book.taken() if name.startswith("gradients/")} == {
            f"gradients/{r}/{b}/{dtype}" for r, b, dtype in product(range(replicas), (0, 1), OPTIMIZABLE)
        }
        assert all(len(lengths) == 1 for lengths in book.taken().values())
        assert book.server_nbytes() <= 64 * TIB
        assert book.worker_nbytes(replicas - 1) <= 64 * TIB
        assert book.client_nbytes() <= 64 * TIB


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_usually_comes_fits_into_one_process(replicas: int) -> None:
    """Server, workers and script map the same segments into it."""
    for machine_nbytes in MACHINES:
        book = Book(machine_nbytes, replicas, 64 * TIB // 3)
        numbers = tuple(book.make(dtype) for dtype in ("float32", "float64"))
        book.optimize("Adam", DEFAULTS["Adam"], numbers)
        book.make("int64")
        workers = sum(book.worker_nbytes(replica) for replica in range(min(replicas, 64))) * -(-replicas // 64)
        assert book.server_nbytes() + book.client_nbytes() + workers <= ALL_NBYTES - REST_NBYTES


@pytest.mark.parametrize("replicas", [1, 8, 64, 1024])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_model_as_large_as_the_machine_fits(kind: str, replicas: int) -> None:
    """Made piece by piece, so that its segments are extended again and again."""
    for machine_nbytes in MACHINES:
        book = Book(machine_nbytes, replicas)
        parts = 1 + replicas + len(SLOTS[rule_of(kind, DEFAULTS[kind])])
        count = machine_nbytes // parts // 64 // 4
        numbers = tuple(book.make("float32", count) for _ in range(64))
        book.optimize(kind, DEFAULTS[kind], numbers)
        longest = max(map(len, book.taken().values()))
        assert longest <= 8  # it doubles, so whatever is mapped is mapped anew a few times
        assert book.server_nbytes() <= ALL_NBYTES - REST_NBYTES


@pytest.mark.parametrize("replicas", [1, 8, 64])
def test_a_hundred_optimizers_fit(replicas: int) -> None:
    book = Book(8 * TIB, replicas)
    number = book.make("float32")
    for _ in range(100):
        book.optimize("Adam", DEFAULTS["Adam"], (number,))
    assert book.server_nbytes() <= ALL_NBYTES - REST_NBYTES


@pytest.mark.parametrize("limit", [1 << 31, 1 << 32, 1 << 34, 1 << 40])
def test_under_a_limit_a_small_model_takes_little(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit) if which == resource.RLIMIT_AS else None)
    budget = machine.address_nbytes()
    assert budget == limit // 2
    book = Book(8 * TIB, 2, budget)
    numbers = tuple(book.make(dtype) for dtype in ("float32", "float64"))
    book.optimize("Adam", DEFAULTS["Adam"], numbers)
    assert book.server_nbytes() <= budget // 2 + undo.UNDO_NBYTES


def test_without_a_limit_half_of_all_addresses_is_for_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.address_nbytes() == ALL_NBYTES // 2
    assert "no limit is set" in machine.addresses_left()


def test_a_small_machine_reserves_no_more_than_it_can_use() -> None:
    assert divided(64 * TIB, 1_000_001, 2) == Addresses(
        slab=2 * PAGE_NBYTES, longest_slab=2 * PAGE_NBYTES, arena=PAGE_NBYTES, control=8 * GIB, versions=8 * GIB
    )


def test_a_full_count_of_variables_is_refused_before_one_is_made() -> None:
    book = Book(GIB, 1, 1 << 30)
    book.tables.tally.variables = book.lengths.versions // 8 - 1
    with pytest.raises(
        MemoryPlanError, match=rf"variable 'v': {book.lengths.versions + 4096} bytes needed .* {book.lengths.versions} "
    ):
        book.make("int8")
    assert not book.tables.variables
