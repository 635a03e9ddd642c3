"""Which services there are, which are left over, and which one a word means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from central_storage.ctl import cli, services
from central_storage.ctl.reading import Looker, Reading
from central_storage.launch import service_file
from central_storage.launch.run_directory import RunDirectory, known
from central_storage.launch.service_file import FILE, ServiceFile, _stem, origin
from cs_proto.errors import LaunchError

Held = Callable[..., RunDirectory]


def test_services_are_found_where_run_directories_are_and_by_the_links_to_others(held: Held, short: Path) -> None:
    fresh, named = held("a.py"), held("b.py", short / "here")
    found = services.find()
    assert [entry.path for entry in found] == [fresh.path, named.path]
    assert [entry.name for entry in found] == [f"a-{fresh.name[:4]}", "here"]
    assert not any(entry.is_stale for entry in found)
    named.remove()
    assert [entry.path for entry in services.find()] == [fresh.path]
    assert known() == [fresh.path]


def test_a_service_is_chosen_by_name_prefix_pid_path_and_environment(
    held: Held, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"^no service runs$"):
        services.choose()
    one = held("one.py")
    assert services.choose().path == one.path
    other = held("other.py", short / "other")
    for text in (f"one-{one.name[:4]}", "on", f"cs-{one.name}", one.path):
        assert services.choose(text).path == one.path
    monkeypatch.setenv("CS_ADDRESS", other.path)
    assert services.choose().path == other.path
    monkeypatch.delenv("CS_ADDRESS")
    with pytest.raises(LaunchError, match=rf"^several services run, name one of them: one-.* in {one.path}; other in"):
        services.choose()
    with pytest.raises(LaunchError, match=r"^'o' means several services, name one of them: one-"):
        services.choose("o")
    with pytest.raises(LaunchError, match=r"^no service is called 'x'; these run: one-"):
        services.choose("x")
    with pytest.raises(LaunchError, match=r"^no service runs in /nowhere$"):
        services.choose("/nowhere")
    with pytest.raises(LaunchError, match=r"^no service is called '111"):
        services.choose("1" * 5000)  # Python makes no number of so many digits
    with pytest.raises(LaunchError, match=r"^tcp://192\.0\.2\.7:5 is an address on a network, and cs-ctl looks at"):
        services.choose("tcp://192.0.2.7:5")
    one.remove()
    assert services.choose(str(os.getpid())).path == other.path


def test_the_user_of_a_directory_that_is_closed_to_this_one_is_named(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = held()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LaunchError, match=rf"belongs to user {os.getuid()}, and this process runs as user"):
        services.choose(directory.path)


def left_by_a_killed_supervisor(place: Path, held: Held, **known: str) -> str:
    """A run directory with a free lock."""
    directory = held(**known)
    directory.forget()
    return directory.path


def test_a_stale_entry_is_seen_as_such_and_cleaned(place: Path, held: Held) -> None:
    path = left_by_a_killed_supervisor(place, held)
    (entry,) = services.find()
    assert entry.is_stale
    with pytest.raises(LaunchError, match=r"^no service runs$"):
        services.choose()
    with pytest.raises(LaunchError, match=r"^no service runs in "):
        services.choose(path)
    services.clean()
    assert services.find() == []
    assert not os.path.exists(path)


def test_a_service_that_ends_during_the_look_is_not_listed_as_left_over(
    held: Held, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = held("train.py")
    look = Looker.look

    def looked(looker: Looker, *, memory: bool = True) -> Reading:
        directory.remove()
        return look(looker, memory=memory)

    monkeypatch.setattr(Looker, "look", looked)
    assert cli.main(["ls"]) == 0
    assert capsys.readouterr().out == "no service runs\n"


def test_of_a_directory_that_the_user_has_named_only_the_link_is_cleaned(place: Path, held: Held, short: Path) -> None:
    named = short / "mine"
    directory = held("a.py", named)
    (named / "notes").touch()
    directory.forget()
    assert [entry.is_stale for entry in services.find()] == [True]
    services.clean()
    assert services.find() == []
    assert list(place.iterdir()) == []
    assert sorted(path.name for path in named.iterdir()) == ["lock", "notes", FILE]


def test_a_directory_without_a_file_of_this_version_is_a_service_of_few_words(place: Path, held: Held) -> None:
    directory = held()
    Path(directory.path, FILE).write_text('{"name": "from another version"}')
    (entry,) = services.find()
    assert (entry.file, entry.name, entry.pids, entry.is_stale) == (None, f"cs-{directory.name}", [], False)


def test_what_others_could_forge_is_not_read(place: Path, held: Held, tmp_path: Path) -> None:
    (place / "cs-0123abcd").symlink_to("/etc")
    (place / "cs-89abcdef").symlink_to(tmp_path / "gone")
    (place / "cs-not-a-run").mkdir()
    assert services.find() == []
    for content in ("[]", "{", '{"kind": 3}', '{"devices": 5}', "[" * 100_000):
        directory = held()
        Path(directory.path, FILE).write_text(content)
        assert ServiceFile.read(directory.path) is None
        directory.remove()


def test_a_pipe_or_a_device_in_the_place_of_the_file_is_none(held: Held) -> None:
    directory = held()
    file = Path(directory.path, FILE)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    assert services.choose(directory.path).file is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert services.choose(directory.path).file is None


def test_the_file_is_private_and_changes_as_a_whole(held: Held) -> None:
    directory = held("a.py --token x", devices=("cpu:0",), parameter_device="cpu:0", log_directory="/logs")
    path = Path(directory.path, FILE)
    assert path.stat().st_mode & 0o777 == 0o600
    file = ServiceFile.read(directory.path)
    assert file is not None
    assert (file.script, file.devices, file.supervisor) == ("a.py --token x", ("cpu:0",), os.getpid())
    changed = file.write(directory.path, script_pid=7)
    assert ServiceFile.read(directory.path) == changed
    assert changed.script_pid == 7
    assert sorted(entry.name for entry in Path(directory.path).iterdir()) == ["lock", FILE]


@pytest.mark.parametrize(
    ("typed", "stem"),
    [
        ("train.py --rate 0.1", "train"),
        ("-u /home/me/my model.py", "my"),
        ("-W ignore -X dev train.py", "train"),
        ("'/home/me/my model.py'", "my-model"),
        ("-m project.train --x", "train"),
        ("-c 'import this'", "python"),
        ("ray::Trial.train", "Trial"),
        ("ray::train", "train"),
        ("interactive", "interactive"),
        ("-m", "python"),
        ("", "python"),
        ("'not closed", "not"),
    ],
)
def test_a_service_is_named_after_its_script(typed: str, stem: str) -> None:
    assert _stem(typed) == stem


def test_it_is_known_who_has_started_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel.kernelapp", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    for typed, first, script in (
        (["python", "-u", "my train.py", "--x", "a\nb"], "my train.py", "-u 'my train.py' --x 'a b'"),
        (["python"], "", "stdin"),
        (["python", "-u", "-"], "-", "stdin"),
        (["python", "-c", "x" * 1000], "-c", f"-c {'x' * 497}"),
    ):
        monkeypatch.setattr(sys, "orig_argv", typed)
        monkeypatch.setattr(sys, "argv", [first])
        assert origin() == (script, "script")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "/usr/bin/ipython"])
    for first, script in (("", "interactive"), ("/usr/bin/ipython", "/usr/bin/ipython")):
        monkeypatch.setattr(sys, "argv", [first])
        assert origin() == (script, "notebook")
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", sys)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert origin() == ("notebook", "notebook")
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/a.ipynb")
    assert origin() == ("/home/me/a.ipynb", "notebook")


def test_an_actor_of_ray_has_typed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_file, "_title", lambda: "ray::Trial.train")
    assert origin() == ("ray::Trial.train", "script")
    monkeypatch.undo()
    assert not origin()[0].startswith("ray::")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("devices", value) for value in (5, "cpu:0", [5], None)),
        *(("since", value) for value in (float("nan"), float("inf"), -1e300, 1e300)),
        *((field, value) for field in ("supervisor", "script_pid") for value in (-1, 1 << 31, True, 1.0)),
    ],
)
def test_a_file_of_another_kind_is_none(held: Held, field: str, value: object) -> None:
    directory = held()
    path = Path(directory.path, FILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert ServiceFile.read(directory.path) is None
    assert [entry.path for entry in services.find()] == [directory.path]
