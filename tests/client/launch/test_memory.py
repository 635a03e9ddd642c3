"""Segments: who may write, what the kernel enforces, what is refused."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from central_storage.launch.memory import Files, Medium, Memfd, Memory, Unshared
from cs_proto import step_times
from cs_proto.errors import ContextError, InvalidArgumentError, MemoryPlanError
from cs_proto.messages import ExtendSegment, MakeSegment, Segment

NBYTES = 1 << 20


@pytest.fixture(params=["memfd", "files"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    return Memfd() if request.param == "memfd" else Files(str(tmp_path))


@pytest.fixture
def memory(medium: Medium) -> Iterator[Memory]:
    made = Memory(medium)
    yield made
    made.close()


def hand_out(memory: Memory, asker: str, name: str = "arena/0") -> tuple[bool, int]:
    segment, descriptor = memory.open(asker, name)
    assert segment.reservation == NBYTES
    return segment.writable, descriptor


@pytest.fixture
def made(memory: Memory) -> Iterator[int]:
    """The server's descriptor of a segment that worker 0 may write."""
    segment, descriptor = memory.make("server", MakeSegment("arena/0", NBYTES, "w0"))
    assert segment.writable
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("asker", ["server", "w0", "controller"])
def test_the_server_the_named_writer_and_the_controller_may_write_an_arena(
    memory: Memory, made: int, asker: str
) -> None:
    writable, descriptor = hand_out(memory, asker)
    assert writable
    with mmap.mmap(descriptor, NBYTES) as mapping:
        mapping[5:10] = b"hello"
    os.close(descriptor)
    assert os.pread(made, 5, 5) == b"hello"


@pytest.mark.parametrize("asker", ["w1", "w00", "observer", "script", ""])
def test_nobody_else_gets_a_descriptor_that_can_write(memory: Memory, made: int, asker: str) -> None:
    os.pwrite(made, b"whole", 0)
    writable, descriptor = hand_out(memory, asker)
    assert not writable
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"torn")
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(descriptor, NBYTES, prot=mmap.PROT_READ) as mapping:
        assert mapping[:5] == b"whole"
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("asker", ["w0", "w1"])
def test_another_user_can_open_it_neither_for_reading_nor_for_writing(memory: Memory, made: int, asker: str) -> None:
    os.pwrite(made, b"whole", 0)
    _, descriptor = hand_out(memory, asker)
    for opened in (made, descriptor):
        path = f"/proc/{os.getpid()}/fd/{opened}"
        for command in ("cat {}", "dd if=/dev/zero bs=4 count=1 conv=notrunc of={}"):
            tried = subprocess.run(
                command.format(path).split(),
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                text=True,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                check=False,
            )
            assert (tried.returncode, tried.stdout) == (1, "")
            assert "Permission denied" in tried.stderr
    os.close(descriptor)
    assert os.pread(made, 5, 0) == b"whole"


@pytest.mark.parametrize("name", ["gradients/0/0/float32", "arena/server", "arena/0/1"])
def test_the_controller_writes_nothing_but_arenas(memory: Memory, name: str) -> None:
    _, made = memory.make("server", MakeSegment(name, NBYTES, "w0"))
    os.close(made)
    writable, descriptor = hand_out(memory, "controller", name)
    assert not writable
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"torn")
    os.close(descriptor)


@pytest.mark.parametrize("medium", ["memfd"], indirect=True)  # a file cannot be sealed; its directory is private
def test_nobody_can_make_it_shorter_under_a_mapping(made: int) -> None:
    for length in (0, NBYTES - 1):
        with pytest.raises(PermissionError):
            os.ftruncate(made, length)


def test_pages_can_be_given_back(made: int) -> None:
    with mmap.mmap(made, NBYTES) as mapping:
        mapping[:] = b"x" * NBYTES
        assert os.fstat(made).st_blocks > 0
        mapping.madvise(mmap.MADV_REMOVE)
        assert os.fstat(made).st_blocks == 0
        assert mapping[:2] == b"\0\0"


def test_a_reservation_larger_than_the_machine_takes_no_memory(memory: Memory) -> None:
    _, descriptor = memory.make("server", MakeSegment("parameters/float32", 1 << 42, ""))
    assert (os.fstat(descriptor).st_size, os.fstat(descriptor).st_blocks) == (1 << 42, 0)
    os.close(descriptor)


def test_a_server_that_asks_again_gets_the_same_memory(memory: Memory, made: int) -> None:
    os.pwrite(made, b"kept", 0)
    _, again = memory.make("server", MakeSegment("arena/0", NBYTES, "w0"))
    assert os.pread(again, 4, 0) == b"kept"
    os.close(again)
    for reservation in (4096, 2 * NBYTES):  # under another limit it asks for another length
        segment, again = memory.make("server", MakeSegment("arena/0", reservation, "w0"))
        os.close(again)
        assert segment.reservation == os.fstat(made).st_size == NBYTES
    with pytest.raises(InvalidArgumentError, match="exists with writer 'w0', not writer ''"):
        memory.make("server", MakeSegment("arena/0", NBYTES, ""))


def test_the_server_may_extend_a_segment(memory: Memory, made: int) -> None:
    with mmap.mmap(made, NBYTES) as mapping:
        mapping[:5] = b"whole"
        for reservation, length in ((2 * NBYTES, 2 * NBYTES), (NBYTES, 2 * NBYTES)):
            segment, descriptor = memory.extend("server", ExtendSegment("arena/0", reservation))
            assert segment == Segment("arena/0", length, True)
            assert os.fstat(descriptor).st_size == length
            os.close(descriptor)
        with mmap.mmap(made, 2 * NBYTES) as longer:
            longer[5:10] = b" both"
        assert mapping[:10] == b"whole both"
    segment, descriptor = memory.open("w1", "arena/0")
    assert segment == Segment("arena/0", 2 * NBYTES, False)
    os.close(descriptor)


def test_what_cannot_be_extended_is_refused(memory: Memory, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextError, match="only the server may make segments; w0 asked for arena/0"):
        memory.extend("w0", ExtendSegment("arena/0", 2 * NBYTES))
    with pytest.raises(InvalidArgumentError, match="there is no segment 'arena/1'; there are arena/0"):
        memory.extend("server", ExtendSegment("arena/1", NBYTES))

    def refuse(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(MemoryPlanError, match=rf"segment arena/0 of {2 * NBYTES} bytes: File too large"):
        memory.extend("server", ExtendSegment("arena/0", 2 * NBYTES))
    segment, descriptor = memory.open("server", "arena/0")
    os.close(descriptor)
    assert segment.reservation == os.fstat(made).st_size == NBYTES


def test_what_makes_no_sense_is_refused(memory: Memory, made: int) -> None:
    with pytest.raises(ContextError, match="only the server may make segments; w0 asked for x"):
        memory.make("w0", MakeSegment("x", 1, "w0"))
    with pytest.raises(InvalidArgumentError, match="'w01' is not a writer"):
        memory.make("server", MakeSegment("x", 1, "w01"))
    with pytest.raises(InvalidArgumentError, match="there is no segment 'arena/1'; there are arena/0"):
        memory.open("server", "arena/1")


class Refusing(Memfd):
    """A medium of which the kernel has no more."""

    def __init__(self, error: int) -> None:
        self.error = error

    def make(self, name: str, nbytes: int, writer: str) -> int:
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOMEM, "memory"), (errno.EMFILE, r"raise the limit \(ulimit -n\)")]
)
def test_what_the_kernel_refuses_says_how_much_and_why(number: int, words: str) -> None:
    memory = Memory(Refusing(number))
    with pytest.raises(MemoryPlanError, match=f"segment control of {NBYTES} bytes: .*{words}"):
        memory.make("server", MakeSegment("control", NBYTES, ""))
    with pytest.raises(InvalidArgumentError):
        memory.open("server", "control")


def test_memory_that_is_not_shared_is_the_servers_alone() -> None:
    memory = Memory(Unshared())
    segment, descriptor = memory.make("server", MakeSegment("arena/0", NBYTES, "w0"))
    assert segment.writable
    assert descriptor is not None
    os.close(descriptor)
    for asker, writable in (("w0", True), ("w1", False), ("controller", True)):
        assert memory.open(asker, "arena/0") == (Segment("arena/0", NBYTES, writable), None)
    memory.close()


def test_files_are_taken_up_by_the_memory_after_the_one_that_was_killed(tmp_path: Path) -> None:
    killed = Memory(Files(str(tmp_path)))
    for name, writer in (("gradients/0/1/float32", "w0"), ("slots/1/m.v/float32", ""), ("inputs", "controller")):
        _, descriptor = killed.make("server", MakeSegment(name, NBYTES, writer))
        os.pwrite(descriptor, name.encode(), 0)
        os.close(descriptor)
    (tmp_path / "segment.server.half-made").touch()
    memory = Memory(Files(str(tmp_path)))
    for name, writer in (("gradients/0/1/float32", "w0"), ("slots/1/m.v/float32", ""), ("inputs", "controller")):
        for asker in ("w0", "controller"):  # who may ask before the server does
            writable, descriptor = hand_out(memory, asker, name)
            assert writable == (asker == writer)
            assert os.pread(descriptor, len(name), 0) == name.encode()
            os.close(descriptor)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o400}
    with pytest.raises(InvalidArgumentError, match="half-made"):
        memory.open("server", "half-made")
    assert not (tmp_path / "segment.server.half-made").exists()
    memory.close()
    killed.close()


def test_a_segment_is_a_new_file_and_never_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "segment.w0.arena,0").symlink_to("mine")
    with pytest.raises(FileExistsError):
        Files(str(tmp_path)).make("arena/0", NBYTES, "w0")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_rings_of_step_times_say_whether_they_are_read(memory: Memory, made: int) -> None:
    def ring(process: str) -> int:
        _, descriptor = memory.make("server", MakeSegment(f"times/{process}", NBYTES, process))
        assert descriptor is not None
        return descriptor

    def is_watched(descriptor: int) -> bool:
        return os.pread(descriptor, 8, 8 * step_times.WATCHED) != bytes(8)

    first = ring("w0")
    memory.note_watched(True)
    second = ring("w1")
    assert is_watched(first)
    assert is_watched(second)
    assert os.pread(made, 4096, 0) == bytes(4096)
    memory.note_watched(False)
    assert not is_watched(first)
    assert not is_watched(second)
    os.close(first)
    os.close(second)


def test_memory_that_is_sealed_against_writing_could_not_be_given_to_the_next_server() -> None:
    """Why no segment has the seal F_SEAL_FUTURE_WRITE: not even the supervisor's own descriptor maps it any more."""
    future_write = 0x10
    descriptor = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        with mmap.mmap(descriptor, 4096) as mapped:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, future_write)
            mapped[0] = 1  # of the first server
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 4096)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"2", 0)
    finally:
        os.close(descriptor)
