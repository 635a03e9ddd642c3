"""What commands do to the memory of a server, over a stand-in supervisor that hands out memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.harness.stand_in_supervisor import StandInSupervisor, server_link

from cs_proto import segment_names as names
from cs_proto.arrays import Array, Location, array_of, frame_view
from cs_proto.errors import MemoryPlanError
from cs_proto.messages import Located, Variable
from cs_runtime import machine
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.command_runner import CommandRunner, open_runner
from cs_server.config import ServerConfig
from cs_server.engine.store.address_budget import Addresses
from cs_server.events import (
    Allocate,
    Commit,
    Compute,
    Computed,
    Discard,
    Fill,
    Fingerprint,
    Fingerprinted,
    Finished,
    FreeResults,
    Load,
    LoadKernel,
    MemoryAvailable,
    Reserve,
    Reserved,
    Write,
)
from cs_server.memory.segments import Segments
from cs_server.numerics import Numerics
from cs_server.variable_store import HostStore

NBYTES = 1 << 20
ADDRESSES = Addresses(NBYTES, NBYTES, NBYTES, NBYTES, NBYTES)
NO_VARIABLES: dict[int, Variable] = {}
SLAB = names.parameters("float32")
#: An event that needs memory.
ASKED = Reserved(MemoryAvailable(1))


@pytest.fixture
def segments() -> Iterator[Segments]:
    with (
        tempfile.TemporaryDirectory() as directory,
        StandInSupervisor(Path(directory)) as supervisor,
        closing(server_link(supervisor.run_directory, 1)) as link,
        closing(Segments(link)) as made,
    ):
        made.make(names.CONTROL, NBYTES, "")
        made.make(names.versions(), NBYTES, "")
        yield made


@pytest.fixture
def runner(segments: Segments) -> Iterator[CommandRunner]:
    config = ServerConfig("/run", "cpu:0", 1, 1, machine.total_nbytes(), NBYTES)
    with closing(open_runner(config, segments, ADDRESSES, 0, Numerics(segments, NO_VARIABLES.__getitem__))) as made:
        assert made.carry_out(Allocate(SLAB, NBYTES, "", 0, 64)) is None
        yield made


def counts(segments: Segments) -> list[int]:
    """Twice the number of commits, and how often something moved."""
    return segments.elements(names.CONTROL, "uint64")[:2].tolist()


def at(offset: int, *shape: int) -> Array:
    return Array("float32", shape, Location(SLAB, offset))


def test_the_count_of_commits_is_odd_within_one(
    segments: Segments, runner: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    commit = HostStore.commit

    def watched(store: HostStore, command: Commit) -> None:
        seen.append(counts(segments)[0])
        commit(store, command)

    monkeypatch.setattr(HostStore, "commit", watched)
    value = array_of(np.array([1, 2], np.float32))
    fill = Fill(SLAB, "float32", 2, 4, 7.0)
    write = Write(at(0, 2), "assign", None, (value,), None, (3,))
    assert runner.carry_out(Commit(5, (fill, write))) == Finished(5)
    assert (seen, counts(segments)) == ([1], [2, 0])
    np.testing.assert_array_equal(segments.elements(SLAB, "float32")[:5], [1, 2, 7, 7, 0])
    assert segments.elements(names.versions(), "uint64")[3] == 1


def test_what_is_written_as_a_whole_lies_in_huge_pages(
    segments: Segments, runner: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Mapping, "use_huge_pages", lambda _, start, stop: asked.append((start, stop)))
    value, rows = array_of(np.ones((2, 4), np.float32)), array_of(np.array([0, 1]))
    whole = Write(at(64, 2, 4), "assign", None, (value,), None, (3,))
    others = [
        Write(at(64, 2, 4), "assign_add", None, (value,), None, (3,)),
        Write(at(64, 2, 4), "scatter_update", None, (value,), rows, (3,)),
    ]
    assert runner.carry_out(Commit(5, (whole, *others))) == Finished(5)
    assert asked == [(64, 96)]
    assert segments.elements(SLAB, "float32")[16:24].tolist() == [1] * 8


def test_a_computation_answers_with_its_result_or_its_error(runner: CommandRunner) -> None:
    one, two = (array_of(np.array(value, np.float32)) for value in ([1, 2], [3, 4]))
    computed = runner.carry_out(Compute(1, "SUM", 0, ((one,), (two,))))
    assert isinstance(computed, Computed)
    assert computed.error is None
    np.testing.assert_array_equal(frame_view(computed.arrays[0]), [4, 6])
    assert runner.carry_out(FreeResults()) is None
    failed = runner.carry_out(Compute(2, "SUM", 0, ((one,), ())))
    assert isinstance(failed, Computed)
    assert failed.error is not None
    assert "the same number of arrays" in failed.error.message


def test_a_digest_is_of_the_bytes(segments: Segments, runner: CommandRunner) -> None:
    memory = segments.elements(SLAB, "float32")
    memory[:4] = [1, 2, 1, 2]
    first, second = (runner.carry_out(Fingerprint(1, (at(offset, 2),))) for offset in (0, 8))
    assert isinstance(first, Fingerprinted)
    assert first == second
    memory[2] = 3
    assert runner.carry_out(Fingerprint(1, (at(8, 2),))) != first


def test_memory_that_is_given_back_counts_as_moved_and_reads_as_zeros(
    segments: Segments, runner: CommandRunner
) -> None:
    nbytes = os.sysconf("SC_PAGE_SIZE")
    segments.elements(SLAB, "uint8")[:nbytes] = 1
    assert runner.carry_out(Discard(SLAB, 0, nbytes)) is None
    assert counts(segments) == [0, 1]
    assert not segments.elements(SLAB, "uint8")[:nbytes].any()


def test_what_an_event_needs_is_granted_up_to_what_is_refused(segments: Segments, runner: CommandRunner) -> None:
    granted, kernel = Allocate(SLAB, NBYTES, "", 64, 128), LoadKernel("sgd", "float32")
    beyond = Allocate("slots/1/m/float32", 1 << 60, "", 0, 64)
    assert runner.carry_out(Reserve((granted, kernel), ASKED)) == Reserved(ASKED.event, (granted, kernel))
    reserved = runner.carry_out(Reserve((granted, beyond, kernel), ASKED))
    assert isinstance(reserved, Reserved)
    assert reserved.granted == (granted,)
    [(refused, error)] = reserved.refused
    assert (refused, error.exception) == (beyond, "cs.MemoryPlanError")
    assert beyond.segment not in segments
    with pytest.raises(MemoryPlanError):
        runner.carry_out(beyond)


def test_the_machine_alone_limits_variables_in_its_memory(runner: CommandRunner) -> None:
    available = runner.available()
    assert (available.nbytes > 0, available.device_nbytes) == (True, -1)
    assert runner.carry_out(Load(SLAB, 0, 64)) is None
    answer = Located(1, b"", (at(0, 2),), (), False)
    assert runner.store.prepared(answer) is answer
