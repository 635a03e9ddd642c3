"""The run directory: private, short, held by one, gone afterwards; and what the next start cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from central_storage.launch.packages import python_path
from central_storage.launch.run_directory import RunDirectory, _places, known
from cs_proto.errors import ConfigurationError, LaunchError
from cs_runtime import saving_mark


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place for run directories."""
    place = Path(os.environ["TMPDIR"]) / "r"
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    yield place
    shutil.rmtree(place)


def dead(place: Path, name: str = "cs-0123abcd") -> Path:
    """The run directory of a supervisor that was killed."""
    path = place / name
    path.mkdir(mode=0o700)
    (path / "lock").write_text("1\n")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path / "supervisor"))
    return path


def test_it_is_private_and_goes_with_its_content(runtime: Path) -> None:
    directory = RunDirectory()
    path = Path(directory.path)
    assert path.parent == runtime
    assert path.name == f"cs-{directory.name}"
    assert len(directory.name) == 8
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / "lock").read_text() == f"{os.getpid()}\n"
    (path / "logs").mkdir()
    (path / "logs" / "w0.log").touch()
    directory.remove()
    directory.remove()
    assert list(runtime.iterdir()) == []


def test_what_is_kept_is_what_the_run_did_not_need(runtime: Path) -> None:
    directory = RunDirectory(keep=True)
    path = Path(directory.path)
    (path / "logs").mkdir()
    (path / "w0.1").touch()
    directory.remove()
    assert [entry.name for entry in path.iterdir()] == ["logs"]
    RunDirectory().remove()  # the next start leaves it alone
    assert path.exists()


def test_the_next_start_removes_what_a_killed_run_left_and_only_that(runtime: Path) -> None:
    gone = dead(runtime)
    others = [dead(runtime, name) for name in ("cs-0123", "cs-0123abcdef", "xcs-0123abcd", "cs-0123ABCD")]
    living = RunDirectory()
    link, held = runtime / "cs-ffffffff", runtime / "cs-eeeeeeee"
    link.symlink_to(others[0])
    held.symlink_to(living.path)
    RunDirectory().remove()
    assert not gone.exists()
    assert all(other.exists() for other in others)
    assert Path(living.path, "lock").exists()
    assert not link.is_symlink()  # nobody holds what it registers, which stays
    assert held.is_symlink()
    living.remove()
    held.unlink()


def test_a_run_killed_with_its_directory_is_cleaned_up_by_the_next(runtime: Path) -> None:
    code = (
        "import os, signal; from central_storage.launch.run_directory import RunDirectory; "
        "print(RunDirectory().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    left = Path(ended.stdout.strip())
    assert left.parent == runtime
    assert (left / "lock").exists()
    RunDirectory().remove()
    assert not left.exists()


def test_a_second_holder_is_told_who_holds_it(runtime: Path) -> None:
    first = RunDirectory(str(runtime / "mine"))
    with pytest.raises(LaunchError, match=rf"{runtime}/mine is held by another run \(supervisor pid {os.getpid()}\)"):
        RunDirectory(str(runtime / "mine"))
    first.remove()
    RunDirectory(str(runtime / "mine")).remove()
    assert list(runtime.iterdir()) == []


def test_a_given_directory_keeps_what_is_not_ours(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dead(runtime, "mine")
    (path / "precious").touch()
    directory = RunDirectory(str(path))
    assert sorted(entry.name for entry in path.iterdir()) == ["lock", "precious"]
    monkeypatch.setenv("CS_ROLE", "script")
    monkeypatch.setenv("CS_RUN_DIRECTORY", str(path))
    with saving_mark.setting():
        assert saving_mark.is_set(str(path))
    directory.remove()
    assert [entry.name for entry in path.iterdir()] == ["precious"]


def test_a_given_directory_must_be_private_and_short(runtime: Path) -> None:
    (runtime / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="closed to other users"):
        RunDirectory(str(runtime / "open"))
    (runtime / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be made: File exists"):
        RunDirectory(str(runtime / "file"))
    with pytest.raises(ConfigurationError, match="at most 107 bytes"):
        RunDirectory("/tmp/" + "x" * 100)
    with pytest.raises(ConfigurationError, match=r"mine\\udcff' is not UTF-8 text; choose another name"):
        RunDirectory(os.fsdecode(os.fsencode(runtime) + b"/mine\xff"))
    assert not os.path.exists(os.fsencode(runtime) + b"/mine\xff")


@pytest.mark.parametrize("name", ["lock", "server", "service.json"])
def test_a_given_directory_in_which_something_else_has_a_name_of_ours_is_refused(name: str, runtime: Path) -> None:
    given = runtime / "given"
    (given / name).mkdir(parents=True)
    given.chmod(0o700)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError, match=f"{given}/{name}: Is a directory; put that right"):
        RunDirectory(str(given))
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_a_lock_that_is_no_file_is_refused(make: Callable[[Path], None], runtime: Path) -> None:
    given = runtime / "given"
    given.mkdir(mode=0o700)
    make(given / "lock")
    with pytest.raises(ConfigurationError, match=r"given/lock: .*; put that right, or choose"):
        RunDirectory(str(given))


def test_a_file_system_without_locks_is_named(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    _only_places(monkeypatch, runtime)
    left, descriptors = dead(runtime), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError, match="given/lock: No locks available; put that right"):
        RunDirectory(str(runtime / "given"))
    with pytest.raises(LaunchError, match=r"nothing can be made \(No locks available\)"):
        RunDirectory()
    assert left.exists()  # nobody knows whether a process holds it
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _only_places(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """Tests in other processes would take what is made for a moment in /dev/shm for something that they left."""
    monkeypatch.setattr(f"{RunDirectory.__module__}._places", lambda: [os.path.realpath(place) for place in places])


def _full(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Nothing can be written to the locks in ``place``."""
    write = os.write

    def refuse(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(place)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", refuse)


def test_a_place_that_is_full_is_passed_over_and_nothing_stays_there(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _full(monkeypatch, runtime)
    _only_places(monkeypatch, runtime, Path(os.environ["TMPDIR"]))
    descriptors = len(os.listdir("/proc/self/fd"))
    directory = RunDirectory()
    assert os.path.dirname(directory.path) == os.environ["TMPDIR"]
    directory.remove()
    assert list(runtime.iterdir()) == []
    _full(monkeypatch, Path("/"))
    with pytest.raises(LaunchError, match=r"nothing can be made \(No space left on device\); .*; set XDG_RUNTIME_DIR"):
        RunDirectory()
    with pytest.raises(ConfigurationError, match=r"given/lock: No space left on device; put that right"):
        RunDirectory(str(runtime / "given"))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_directory_that_took_the_name_of_a_file_meanwhile_stays(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = runtime / "given"
    given.mkdir(mode=0o700)
    directory = RunDirectory(str(given))
    (given / "server").mkdir()
    directory.remove()
    assert "given/server: Is a directory" in caplog.text
    RunDirectory().remove()


def test_a_given_directory_is_refused_where_others_could_replace_it(runtime: Path) -> None:
    (runtime / "open").mkdir()
    (runtime / "open").chmod(0o777)
    for given in (runtime / "open" / "mine", runtime / "open" / "more" / "mine"):
        with pytest.raises(
            ConfigurationError,
            match=f"^other users could replace the run directory {given}: others may write to {runtime}/open, above it",
        ):
            RunDirectory(str(given))
    assert list((runtime / "open").iterdir()) == []
    (runtime / "open").chmod(0o1777)
    RunDirectory(str(given)).remove()


def test_what_is_made_above_a_given_directory_is_closed_to_others(runtime: Path) -> None:
    before = os.umask(0)
    try:
        directory = RunDirectory(str(runtime / "a" / "b" / "mine"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in runtime.rglob("*") if path.is_dir()} == {0o700}
    directory.remove()


def test_links_to_a_given_directory_are_followed_once(runtime: Path) -> None:
    """Whoever may change a link later changes nothing for the service."""
    (runtime / "there").mkdir()
    (runtime / "link").symlink_to(runtime / "there")
    directory = RunDirectory(str(runtime / "link" / "mine"))
    assert directory.path == str(runtime / "there" / "mine")
    directory.remove()


def test_a_place_in_which_others_could_replace_them_is_passed_over(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, named = dead(runtime), dead(runtime, "cs-fedcba98")
    link = Path(os.environ["TMPDIR"]) / "cs-ffffffff"
    link.symlink_to(named)
    assert {str(left), str(named)} <= set(known())
    runtime.chmod(0o777)
    assert not {str(left), str(named)} & set(known())
    directory = RunDirectory()
    assert Path(directory.path).parent == Path(os.environ["TMPDIR"])
    assert left.exists()  # it may be anything by the time that it is removed
    directory.remove()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(runtime))
    monkeypatch.setattr("central_storage.launch.run_directory._places", lambda: [str(runtime), "/nowhere"])
    with pytest.raises(LaunchError) as told:
        RunDirectory()
    assert str(told.value).startswith(f"there is no place for a run directory: in {runtime}, others may write to")
    assert str(told.value).endswith(
        "in /nowhere, this user may not write; set XDG_RUNTIME_DIR or TMPDIR to a private directory with a short path"
    )


def test_places_that_will_not_do_are_passed_over(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("x" * 90)
    deep.mkdir()
    strange = os.fsdecode(os.fsencode(runtime) + b"/\xff")
    os.mkdir(strange)
    for unusable in (str(deep), strange, str(runtime / "none"), "relative", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        directory = RunDirectory()
        assert Path(directory.path).parent == Path(os.environ["TMPDIR"])
        directory.remove()


def test_a_lock_whose_file_was_made_anew_meanwhile_is_no_lock(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, another start has removed the file and made one of its own."""
    flock, lock = fcntl.flock, runtime / "given" / "lock"

    def is_another_by_then(descriptor: int, operation: int) -> None:
        if lock.exists():
            lock.unlink()
            lock.touch()
        flock(descriptor, operation)

    (runtime / "given").mkdir(mode=0o700)
    monkeypatch.setattr(fcntl, "flock", is_another_by_then)
    with pytest.raises(LaunchError, match="is held by another run"):
        RunDirectory(str(runtime / "given"))


def test_a_lock_taken_between_making_and_locking_is_not_shared(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start's clean-up may take a directory for dead before its owner has locked it."""
    flock = fcntl.flock
    taken: list[int] = []

    def first_goes_to_somebody_else(descriptor: int, operation: int) -> None:
        if not taken and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(runtime)):
            taken.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
            flock(taken[0], operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", first_goes_to_somebody_else)
    directory = RunDirectory()
    assert len(list(runtime.iterdir())) == 2
    directory.remove()
    os.close(taken[0])


#: Twenty starts are twenty processes; forked, they need not import the same things twenty times.
TWENTY = """
import os, sys
from central_storage.launch.run_directory import RunDirectory

door, opened = os.pipe()
made, told = os.pipe()
over, ended = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        os.close(opened), os.close(ended)
        os.read(door, 1)  # until nobody holds its other end
        directory = RunDirectory()
        os.write(told, f"{os.getpid()} {directory.path}\\n".encode())
        os.read(over, 1)
        directory.remove()
        os._exit(0)
os.close(told)
sys.stdin.readline()
os.close(opened)
with os.fdopen(made) as lines:
    for _ in range(20):
        print(lines.readline(), end="", flush=True)
sys.stdin.readline()
os.close(ended)
print([os.wait()[1] for _ in range(20)] == [0] * 20, flush=True)
"""


def test_twenty_starts_at_once_neither_meet_nor_clean_each_other_up(runtime: Path) -> None:
    for number in range(5):
        dead(runtime, f"cs-0000000{number}")
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    with subprocess.Popen(
        [sys.executable, "-c", TWENTY], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starts:
        assert starts.stdin is not None
        assert starts.stdout is not None
        print(file=starts.stdin, flush=True)
        made = dict(starts.stdout.readline().split() for _ in range(20))
        assert sorted(map(str, runtime.iterdir())) == sorted(made.values())
        assert len(set(made.values())) == 20
        assert {pid: Path(path, "lock").read_text() for pid, path in made.items()} == {pid: f"{pid}\n" for pid in made}
        print(file=starts.stdin, flush=True)
        assert starts.stdout.readline() == "True\n"
    assert list(runtime.iterdir()) == []


def test_shared_memory_is_the_last_place(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a read-only file system, others may write to the volume at /tmp."""
    (last := runtime / "last").mkdir()
    assert _places()[-1] == "/dev/shm"
    _only_places(monkeypatch, *map(Path, _places()[:-1]), last)
    monkeypatch.setattr(
        "central_storage.launch.run_directory.why_replaceable",
        lambda path: None if path.startswith(f"{last}/") else "others may write",
    )
    directory = RunDirectory()
    assert os.path.dirname(directory.path) == str(last)
    directory.remove()


def test_a_relative_place_in_a_directory_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("TMPDIR", "relative")
    assert "/tmp" in _places()
