"""Segments: names that fit, views that stay inside, and pages that readers cannot write."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from cs_proto import segment_names
from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import LocalProtocolError, MemoryPlanError
from cs_runtime.shared_memory import mapping as mappings
from cs_runtime.shared_memory.mapping import Mapping

PAGE = mmap.PAGESIZE
NBYTES = 8 * PAGE


@pytest.fixture
def file() -> Iterator[int]:
    """A segment's file as the supervisor makes it; eight pages."""
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, NBYTES)
    yield descriptor
    os.close(descriptor)


def mapping(file: int, *, writable: bool = True) -> Mapping:
    flags = os.O_RDWR if writable else os.O_RDONLY
    return Mapping("arena/0", os.open(f"/proc/self/fd/{file}", flags), NBYTES, writable=writable)


def present(file: int) -> int:
    """Bytes of the file that take memory."""
    return os.fstat(file).st_blocks * 512


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (segment_names.CONTROL, "control"),
        (segment_names.parameters("float32"), "parameters/float32"),
        (segment_names.parameters("U12"), "parameters/u12"),
        (segment_names.slots(3, "Momentum", "float64"), "slots/3/momentum/float64"),
        (segment_names.gradients(1, 0, "complex64"), "gradients/1/0/complex64"),
        (segment_names.arena(2), "arena/2"),
        (segment_names.controller_arena(), "arena/controller"),
        (segment_names.inputs(), "inputs"),
        (segment_names.versions(), "versions"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert name == expected
    Location(name, 0)


def test_what_one_process_writes_another_reads(file: int) -> None:
    writer, reader = mapping(file), mapping(file, writable=False)
    array = Array("float32", (2, 3), Location("arena/0", 64))
    writer.view(array)[...] = np.arange(6).reshape(2, 3)
    assert reader.view(array).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert reader.elements("float32")[16:22].tolist() == [0, 1, 2, 3, 4, 5]
    assert reader.elements("float32").nbytes == NBYTES


def test_a_reader_cannot_write(file: int) -> None:
    reader = mapping(file, writable=False)
    view = reader.view(Array("int64", (4,), Location("arena/0", 0)))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.elements("int64")[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    with pytest.raises(TypeError, match="read-only memory"):
        reader.memory[0] = 1


def test_what_may_only_be_read_is_found_by_its_address_as_long_as_something_views_it(file: int) -> None:
    reader, writer = mapping(file, writable=False), mapping(file)
    view, address = reader.elements("uint8"), reader.elements("uint8").__array_interface__["data"][0]
    assert mappings.read_only_at(address) == ("arena/0", 0)
    assert mappings.read_only_at(address + NBYTES - 1) == ("arena/0", NBYTES - 1)
    assert mappings.read_only_at(address + NBYTES) is None
    assert mappings.read_only_at(address - 1) is None
    assert mappings.read_only_at(writer.elements("uint8").__array_interface__["data"][0]) is None
    del reader
    assert mappings.read_only_at(address) == ("arena/0", 0)
    del view
    assert mappings.read_only_at(address) is None


def test_the_kernel_keeps_a_reader_from_mapping_for_writing(file: int) -> None:
    descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        Mapping("arena/0", descriptor, NBYTES, writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("writable", [True, False])
def test_the_descriptor_is_closed_and_the_memory_stays(file: int, writable: bool) -> None:
    descriptor = os.dup(file)
    held = Mapping("arena/0", descriptor, NBYTES, writable=writable)
    view = held.elements("uint8")
    if writable:
        view[5] = 7
        os.fstat(descriptor)
        del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    os.pwrite(file, b"\x08", 6)
    assert view[5:7].tolist() == [7 * writable, 8]
    assert os.pread(file, 1, 5)[0] == 7 * writable


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array("uint8", (1,), Location("arena/1", 0)), "does not lie in segment arena/0"),
        (array_of(np.zeros(1)), "does not lie in segment arena/0"),
        (Array("uint8", (1,), Location("arena/0", NBYTES)), f"ends at byte {NBYTES + 1}"),
        (Array("uint8", (NBYTES + 1,), Location("arena/0", 0)), f"ends at byte {NBYTES + 1}"),
        (Array("float64", (1 << 40,), Location("arena/0", 0)), "ends at byte"),
        (Array("uint8", (0,), Location("arena/0", NBYTES + 1)), "ends at byte"),
    ],
)
def test_no_view_leaves_its_segment(file: int, array: Array, said: str) -> None:
    with pytest.raises(LocalProtocolError, match=said):
        mapping(file).view(array)


def test_a_view_may_end_where_the_segment_ends(file: int) -> None:
    held = mapping(file)
    assert held.view(Array("uint8", (8,), Location("arena/0", NBYTES - 8))).shape == (8,)
    assert held.view(Array("float32", (0, 3), Location("arena/0", NBYTES))).shape == (0, 3)


@pytest.mark.parametrize(
    ("start", "stop", "pages"),
    [
        (0, 0, 0),
        (PAGE, PAGE, 0),
        (NBYTES, NBYTES, 0),
        (0, 1, 1),
        (10, PAGE, 1),
        (PAGE - 1, PAGE + 1, 2),
        (0, NBYTES, 8),
    ],
)
@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_populate_makes_exactly_the_touched_pages_present(
    file: int, start: int, stop: int, pages: int, is_old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old_kernel:
        monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    held = mapping(file)
    held.elements("uint8")[start:stop] = 7
    held.discard(0, NBYTES)
    assert present(file) == 0
    held.populate(start, stop)
    assert present(file) == pages * PAGE
    assert not held.elements("uint8").any()


def test_populate_changes_nothing(file: int) -> None:
    held = mapping(file)
    held.elements("uint8")[:] = np.arange(NBYTES) % 251
    held.populate(1, NBYTES - 1)
    assert (held.elements("uint8") == np.arange(NBYTES) % 251).all()


HUGE = 2 << 20


@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_populate_of_blocks_of_huge_pages_changes_nothing_in_them_or_around(
    is_old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old_kernel:
        monkeypatch.setattr(mappings, "_MADV_COLLAPSE", 9999)  # EINVAL, as before Linux 6.1
    nbytes = 3 * HUGE
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, nbytes)
    written = Mapping("arena/0", os.dup(descriptor), nbytes, writable=True)
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    read = Mapping("arena/0", reader, nbytes, writable=False)
    elements = written.elements("uint64")
    elements[: HUGE // 2 // 8] = np.arange(HUGE // 2 // 8)
    elements[-2:] = 7
    written.populate(HUGE // 2, 2 * HUGE + 1)
    assert 2 * HUGE + PAGE <= present(descriptor) < nbytes
    assert (read.elements("uint64") == elements).all()
    assert (elements[: HUGE // 2 // 8] == np.arange(HUGE // 2 // 8)).all()
    assert not elements[HUGE // 2 // 8 : -2].any()
    assert (elements[-2:] == 7).all()
    written.discard(0, 2 * HUGE)
    assert not read.elements("uint64")[:-2].any()
    os.close(descriptor)


def test_huge_pages_are_asked_for_once_and_again_where_memory_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    advise = Mapping._advise

    def noted(self: Mapping, advice: int, first: int, last: int) -> None:
        if advice == mappings._MADV_COLLAPSE:
            asked.append((first // HUGE, last // HUGE))
        advise(self, advice, first, last)

    monkeypatch.setattr(Mapping, "_advise", noted)
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, 5 * HUGE)
    held = Mapping("arena/0", descriptor, 5 * HUGE, writable=True)
    held.elements("uint8")[-1] = 7
    held.use_huge_pages(HUGE - 1, 4 * HUGE - 1)
    held.use_huge_pages(HUGE, 3 * HUGE)
    held.use_huge_pages(5, HUGE - 5)  # no whole block
    assert asked == [(1, 3)]
    held.populate(0, 5 * HUGE)
    assert asked == [(1, 3), (0, 1), (3, 5)]
    held.discard(2 * HUGE, 3 * HUGE)
    held.use_huge_pages(0, 5 * HUGE)
    assert asked == [(1, 3), (0, 1), (3, 5), (2, 3)]
    assert not held.elements("uint8")[:-1].any()
    assert held.elements("uint8")[-1] == 7


def test_a_mapping_begins_where_huge_pages_can_be_mapped(file: int) -> None:
    for writable in (True, False):
        assert np.frombuffer(mapping(file, writable=writable).memory, np.uint8).ctypes.data % HUGE == 0


def test_where_there_is_no_room_for_that_the_mapping_is_the_same(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "_HUGE_NBYTES", 1 << 60)
    held = mapping(file)
    held.elements("uint8")[:] = 5
    held.populate(1, NBYTES)
    held.discard(PAGE, 2 * PAGE)
    assert os.pread(file, NBYTES, 0) == b"\5" * PAGE + bytes(PAGE) + b"\5" * (6 * PAGE)
    with pytest.raises(ValueError, match="read-only"):
        mapping(file, writable=False).elements("uint8")[0] = 1


def test_discard_gives_only_whole_pages_back(file: int) -> None:
    held = mapping(file)
    held.elements("uint8")[:] = 1
    held.discard(PAGE - 1, 3 * PAGE + 1)
    assert present(file) == 6 * PAGE
    held.discard(3 * PAGE + 1, 4 * PAGE - 1)
    assert present(file) == 6 * PAGE
    # Read through the file: reading a hole through a mapping makes its page present.
    assert os.pread(file, NBYTES, 0) == b"\1" * PAGE + bytes(2 * PAGE) + b"\1" * (5 * PAGE)


# --- a file system of limited size ------------------------------------------------------------------------------------


@pytest.fixture
def tmpfs_file() -> Iterator[int]:
    """A file of a tmpfs, longer than the tmpfs is large."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        status = os.fstatvfs(file.fileno())
        assert status.f_blocks, "/dev/shm has no limit here"
        os.ftruncate(file.fileno(), 2 * status.f_blocks * status.f_frsize)
        yield file.fileno()


@pytest.mark.parametrize("method", ["reserve", "populate"])
def test_more_than_the_file_system_holds_is_refused_with_both_numbers(tmpfs_file: int, method: str) -> None:
    nbytes = os.fstat(tmpfs_file).st_size
    mapped = Mapping("arena/0", os.dup(tmpfs_file), nbytes, writable=True)
    available = mapped.free_nbytes
    with pytest.raises(MemoryPlanError, match=rf"segment arena/0: {nbytes} bytes planned.* has \d+ bytes available"):
        getattr(mapped, method)(0, nbytes)
    assert available is not None
    assert present(tmpfs_file) == 0


def test_what_is_reserved_is_taken_from_the_file_system_once(tmpfs_file: int) -> None:
    mapped = Mapping("arena/0", os.dup(tmpfs_file), NBYTES, writable=True)
    mapped.reserve(PAGE, 3 * PAGE)
    mapped.reserve(PAGE, 2 * PAGE)
    assert present(tmpfs_file) == 2 * PAGE
    mapped.discard(PAGE, 3 * PAGE)
    assert present(tmpfs_file) == 0


def test_the_kernels_own_memory_is_limited_by_nothing_else(file: int) -> None:
    mapped = mapping(file)
    mapped.reserve(0, NBYTES)
    assert (mapped.free_nbytes, present(file)) == (None, 0)


def test_what_is_detached_is_ones_own_until_it_is_attached(file: int) -> None:
    mine, others = mapping(file), mapping(file)
    view, there = mine.elements("uint8"), others.elements("uint8")
    there[:] = 1
    view[PAGE] = 2
    mine.detach(PAGE, 3 * PAGE)
    there[:] = 3
    assert (view[:PAGE] == 3).all()
    assert view[PAGE] == 2
    assert (view[PAGE + 1 : 3 * PAGE] == 1).all()
    assert (view[3 * PAGE :] == 3).all()
    view[:] = 4
    assert (there[PAGE : 3 * PAGE] == 3).all()
    mine.attach(PAGE, 3 * PAGE)
    assert (view == there).all()
    assert (there == 4).sum() == NBYTES - 2 * PAGE
    view[2 * PAGE] = 5
    assert there[2 * PAGE] == 5


def test_what_the_kernel_does_not_map_again_is_refused(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = mapping(file)
    monkeypatch.setattr(mapped, "_descriptor", -1)
    with pytest.raises(MemoryPlanError, match=r"bytes 0 to 4096 of segment arena/0 .* be mapped again: Bad file"):
        mapped.detach(0, PAGE)
    assert not mapped.elements("uint8").any()


# --- what was read stays what it was ----------------------------------------------------------------------------------


def reader(file: int) -> Mapping:
    """A mapping that may preserve what was read."""
    descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    return Mapping("parameters/float32", descriptor, NBYTES, writable=False, may_preserve=True)


@pytest.fixture(params=[False, True], ids=["this kernel", "an old kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14


def test_a_reader_sees_what_is_written_until_it_preserves_it(file: int, kernel: None) -> None:
    there, mine = mapping(file).elements("uint8"), reader(file)
    view = mine.elements("uint8")
    there[:] = 1
    assert (view == 1).all()
    there[:] = 2
    mine.preserve([(PAGE + 5, 2 * PAGE), (2 * PAGE, 2 * PAGE + 1), (5 * PAGE, 5 * PAGE), (7 * PAGE + 9, NBYTES)])
    there[:] = 3
    seen = view.reshape(-1, PAGE)
    assert (seen == seen[:, :1]).all()
    assert seen[:, 0].tolist() == [3, 2, 2, 3, 3, 3, 3, 2]
    assert (reader(file).elements("uint8") == 3).all()


def test_what_is_preserved_cannot_be_written(file: int, kernel: None) -> None:
    mine = reader(file)
    mine.preserve([(0, PAGE)])
    address = np.frombuffer(mine.memory, np.uint8).__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if int(line.partition("-")[0], 16) == address]
    assert rights == ["r--p"]


def test_preserving_takes_the_pages_of_the_ranges_once(file: int) -> None:
    mine = reader(file)
    assert mine.preserved_nbytes([(5, 6), (PAGE - 1, PAGE + 1), (5 * PAGE, 6 * PAGE)]) == 3 * PAGE
    assert mine.preserved_nbytes([]) == 0


def test_where_the_kernel_refuses_nothing_is_preserved(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there, mine = mapping(file).elements("uint8"), reader(file)
    view = mine.elements("uint8")
    there[:] = 1
    protect, asked = mappings._mprotect, []

    def refuse(address: int, nbytes: int, protection: int) -> int:
        asked.append(protection)
        return -1 if len(asked) == 3 else protect(address, nbytes, protection)

    monkeypatch.setattr(mappings, "_mprotect", refuse)
    with pytest.raises(MemoryPlanError, match=rf"bytes {4 * PAGE} to {5 * PAGE} of segment .* could not be preserved"):
        mine.preserve([(0, PAGE), (4 * PAGE, 5 * PAGE)])
    there[:] = 2
    assert (view == 2).all()


def test_what_is_preserved_goes_with_its_last_view(file: int) -> None:
    mine = reader(file)
    view = mine.elements("uint8")[:10]
    mine.preserve([(0, NBYTES)])
    address = view.__array_interface__["data"][0]
    del mine
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        bounds = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    return any(start <= address < stop for start, stop in bounds)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (segment_names.parameters(segment_names.slab("float32", sparse=True)), True),
        (segment_names.slots(3, "m", segment_names.slab("float32", sparse=True)), True),
        (segment_names.parameters("float32"), False),
        (segment_names.slots(3, "sparse", "float32"), False),
        (segment_names.gradients(0, 1, "float32"), False),
        (segment_names.inputs(), False),
    ],
)
def test_which_segments_hold_tables(name: str, expected: bool) -> None:
    assert segment_names.is_sparse(name) is expected
