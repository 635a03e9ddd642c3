"""The command line: what is imported, exit codes, and completion."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.ctl.conftest import reading
from tests.harness.processes import ROOT

from central_storage.ctl import cli, extras, printing, screen
from central_storage.ctl.commands import completion, doctor, logs, ls, status, top
from central_storage.ctl.reading import Event, Looker, Process, Reading, as_json
from central_storage.ctl.trials import Trial
from central_storage.launch.checks.finding import Finding
from central_storage.launch.packages import python_path
from central_storage.launch.run_directory import RunDirectory
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import fields_of
from cs_proto.messages import LogLine

GUIDE = (ROOT / "docs/guide/cs-ctl.md").read_text()


def test_the_package_imports_nothing_of_cs_ctl() -> None:
    program = (
        "import sys, central_storage as cs, central_storage.launch.cli\n"
        "cs.CentralStorageStrategy, cs.connect, cs.Variable\n"
        "others = ('central_storage.ctl', 'central_storage.exporter', 'prometheus_client', 'rich', 'shtab')\n"
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ) or ""}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_a_command_is_imported_only_when_it_is_called() -> None:
    program = (
        "import sys; from central_storage.ctl import cli; print(cli.main(['completion', 'fish', '--for', 'none']))\n"
        "print([name for name in sys.modules if name.startswith('central_storage.ctl.commands.')])"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ) or ""}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "2\n['central_storage.ctl.commands.completion']\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "cs-ctl: error: the following arguments are required: COMMAND; see cs-ctl --help"),
        (["fly"], 2, "invalid choice: 'fly'"),
        (["status", "--fly"], 2, "unrecognized arguments: --fly"),
        (["--json", "status"], 3, "cs-ctl: error: no service runs"),
        (["--steps", "5", "profile"], 2, "error: --steps stands before the command profile; options of a command "),
        (["--json", "--watch", "ls"], 2, "stand after it, as in cs-ctl ls --watch"),
        (["status"], 3, "cs-ctl: error: no service runs"),
        (["stop", ""], 3, "cs-ctl: error: no service has an empty name"),
        (["status", "/nowhere"], 3, "cs-ctl: error: no service runs in /nowhere"),
        (["stop", "--wait", "-1", "/nowhere"], 2, "--wait is a number of seconds below 1e6, not -1"),
        (["stop", "--kill-after", "nan", "/nowhere"], 2, "--kill-after is a number of seconds below 1e6, not nan"),
        (["logs", "--lines", "-1"], 2, "--lines must be a number from 0, not -1"),
        (["profile", "--steps", "0"], 2, "a profile needs at least one step"),
        (["profile", "--wait", "-1"], 2, "--wait is a number of seconds below 1e6, not -1"),
        (["profile"], 3, "cs-ctl: error: no service runs"),
        (["top", "--interval", "0"], 2, "--interval is a number of seconds from 0.05 to 1e6, not 0"),
    ],
)
@pytest.mark.usefixtures("place")
def test_mistakes_have_their_exit_codes(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


@pytest.mark.usefixtures("place")
def test_no_service_is_nothing_bad(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    assert cli.main(["ls", "--json"]) == cli.main(["--json", "ls"]) == 0
    assert capsys.readouterr().out == "no service runs\n[]\n[]\n"


def test_the_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--help"])
    said = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", said, re.MULTILINE)
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([name, "--version"])
        assert capsys.readouterr().out.startswith(f"cs-ctl {name} ")
    for code in (*range(7), 130):
        assert f"\n  {code:<4} " in said
        assert f"| {code} |" in GUIDE


def test_ctrl_c_and_a_closed_pipe_have_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "run", pressed)
    assert cli.main(["ls"]) == 130


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "has", lambda module: False)
    with pytest.raises(ConfigurationError, match=r"^this needs rich: pip install 'central-storage\[ctl\]'$"):
        extras.require("rich", "ctl")


def test_the_guide_lists_the_fields_of_the_json() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)
    records = (Reading, Process, doctor.Report, Finding, Trial)
    assert listed == [name for record in records for name in fields_of(record)]
    value = as_json(reading())
    assert list(value) == list(fields_of(Reading))
    assert list(value["processes"][0]) == list(fields_of(Process))


def test_status_shows_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    status._print(reading(state="waiting", waiting=("replica 1", "replica 2")))
    said = capsys.readouterr().out
    for line in (
        "service:   train-1f3a  (/run/cs-1f3a22bb)",
        "script:    train.py --rate 0.1  (plain Python, in /home/me)",
        "state:     waiting for replica 1\n           and for replica 2",
        "step:      42; 12.5 steps/s now, 10 on average",
        "captured:  40 of 42 steps (95 %)",
        "memory:    private 5.0 MB; shared 1.2 kB (parameters 400 B, slots 800 B)",
        "restarts:  0 of at most 3",
        "         2  a failure or Ctrl-C",
    ):
        assert f"{line}\n" in said


def test_nothing_that_could_not_be_read_stops_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"name", "address", "state", "waiting", "devices", "processes", "events", "time"}
    bare = reading(**{name: None for name in fields_of(Reading) if name not in given}, state="over", devices=())
    nothing = dict.fromkeys(("incarnation", "device", "state", "cpu_seconds", "resident_nbytes"))
    unread = Process(**{name: getattr(bare.processes[0], name) for name in fields_of(Process)} | nothing)
    status._print(reading(**{name: getattr(bare, name) for name in fields_of(Reading)} | {"processes": (unread,)}))
    ls._print([bare])
    assert "state:     over\n" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_takes_its_completions(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--follow" in script
    if shell == "bash":
        probe = tmp_path / "probe.sh"
        calls = "COMP_WORDS=(cs-ctl sta); COMP_CWORD=1; _shtab_cs_ctl cs-ctl sta cs-ctl; echo ${COMPREPLY[@]}"
        probe.write_text(f"{script}\n{calls}\n")
        said = subprocess.run(["bash", str(probe)], capture_output=True, text=True, check=True)
        assert set(said.stdout.split()) == {"status", "stack"}


@pytest.mark.parametrize("command", ["estimate", "checkpoint show"])
def test_files_are_completed_where_a_file_is_meant(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    words = ["cs-ctl", *command.split(), "trai"]
    (tmp_path / "train.py").touch()
    probe = tmp_path / "probe.sh"
    calls = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_cs_ctl cs-ctl trai {words[-2]}"
    probe.write_text(f"{capsys.readouterr().out}\n{calls}; echo ${{COMPREPLY[@]}}\n")
    said = subprocess.run(["bash", str(probe)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "train.py\n"
    assert cli.main(["completion", "fish"]) == 0
    assert f"'__fish_seen_subcommand_from {command.split()[0]}' -F" in capsys.readouterr().out


def test_fish_takes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "complete -c cs-ctl -n __fish_use_subcommand -a ls -d 'list all services of this user'" in lines
    follow = (
        "complete -c cs-ctl -n '__fish_seen_subcommand_from logs' -s f -l follow -d 'go on with the lines that come'"
    )
    assert follow in lines
    assert any(line.endswith("-a 'bash zsh fish' -d 'your shell'") for line in lines)
    assert completion.fish(cli.parser_of("cs-top")).startswith("complete -c cs-top -f\n")


@pytest.mark.parametrize("timeout", ["-1", "0", "nan", "1e300"])
def test_a_timeout_is_a_time(
    held: Callable[..., RunDirectory], timeout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = held()
    for command in (["status"], ["logs"], ["stack"]):
        assert cli.main([*command, directory.path, "--timeout", timeout]) == cli.INVALID
        assert "a timeout is a number of seconds" in capsys.readouterr().err


def cs_ctl(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run it as a process of its own; ``options`` of :func:`subprocess.run`."""
    options.setdefault("stdout", subprocess.PIPE)
    command = [str(Path(sys.executable).with_name("cs-ctl")), *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, **options)


@pytest.mark.usefixtures("place")
def test_a_full_disk_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = cs_ctl("doctor", "--quick", stdout=full)
    assert ended.returncode == cli.REFUSED
    assert ended.stderr == b"cs-ctl: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["completion", "fish"]])
def test_closed_output_stops_no_command(place: Path, command: list[str]) -> None:
    ended = cs_ctl(*command, stdout=None, preexec_fn=lambda: os.close(1))
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_closed_input_is_no_terminal(held: Callable[..., RunDirectory]) -> None:
    ended = cs_ctl("top", "--parts", held().path, preexec_fn=lambda: os.close(0))
    assert (ended.returncode, b"--parts needs a terminal" in ended.stderr) == (cli.INVALID, True), ended.stderr


def test_what_an_encoding_lacks_is_escaped(held: Callable[..., RunDirectory], place: Path) -> None:
    held("café.py")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "TMPDIR": str(place)}
    ended = cs_ctl("ls", env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert rb"caf\xe9.py" in ended.stdout


def test_services_in_an_error_are_on_one_line(
    held: Callable[..., RunDirectory], short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held("one.py", short / "a\nb")
    assert cli.main(["status", "other"]) == cli.NO_SERVICE
    assert capsys.readouterr().err == (
        rf"cs-ctl: error: no service is called 'other'; these run: a\nb in {short}/a\nb" + "\n"
    )


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_table_is_cut_nowhere(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printing, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    cells = ["train-1f3a", "waiting for replica 1", "1234567", "a-long/path/to/train.py --rate 0.1"]
    printing.table(["NAME", "STATE", "PID", "SCRIPT"], [cells], below=["SCRIPT"])
    said = capsys.readouterr().out
    assert all(cell in said for cell in cells)
    assert ("SCRIPT" in said) == (columns == 200)
    assert max(map(len, said.splitlines())) <= columns or columns == 20


def test_services_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printing, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    wait = "replica 1 (pid 4711, w1.1), last seen 2 s ago; replica 0 returned after 1 merge point"
    devices = tuple(f"cpu:{number}" for number in range(12))
    ls._print([reading(), reading(state="waiting", waiting=(wait,), devices=devices, rate=1234.5)])
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80
    assert said[2:] == [
        "  train.py --rate 0.1",
        "  /run/cs-1f3a22bb",
        "train-1f3a  waiting for w1    42     1234  cpu:0-11     4711  1m05s",
        "  train.py --rate 0.1",
        "  /run/cs-1f3a22bb",
    ]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("cpu:0", "cpu:1"), "cpu:0,cpu:1"),
        (("cpu:0", "cpu:1", "cpu:2", "gpu:0"), "cpu:0-2,gpu:0"),
        (("gpu:0+gpu:1", "gpu:2", "gpu:3", "gpu:4", "gpu:6"), "gpu:0+gpu:1,gpu:2-4,gpu:6"),
    ],
)
def test_devices_in_a_row_are_joined(devices: tuple[str, ...], said: str) -> None:
    assert ls._places(reading(devices=devices)) == said


@pytest.mark.parametrize(
    ("state", "waiting", "words", "short"),
    [
        ("running", (), "running", "running"),
        ("waiting", ("w1 (pid 7), which is stopped",), "waiting for w1 (pid 7), which is stopped", "waiting for w1 (s"),
        ("silent", ("the supervisor to answer",), "silent, waits for the supervisor to answer", "silent, waits for su"),
        ("recovering", ("w0 to be started again",), "recovering, waits for w0 to be", "recovering, waits for w0"),
        ("waiting", ("commit 7; replica 0 waits",), "waiting for commit 7; replica 0 waits", "waiting for commit 7"),
    ],
)
def test_a_state_is_said_in_words(state: str, waiting: tuple[str, ...], words: str, short: str) -> None:
    found = reading(state=state, waiting=waiting)
    assert found.in_words.startswith(words)
    assert found.in_short.startswith(short)


def test_wide_characters_move_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    printing.table(["NAME", "PID"], [["数据", "7"], ["e\u0301", "8"]], right=["PID"])
    assert capsys.readouterr().out.splitlines() == ["NAME  PID", "数据    7", "e\u0301       8"]


def test_a_terminal_without_a_size_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((0, 0)))
    assert top._size() == (80, 24)


def test_bars_of_parts_need_a_terminal(held: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", held().path, "--parts", "--json"]) == cli.INVALID
    assert "cs-ctl profile prints the parts" in capsys.readouterr().err


def test_a_profile_has_steps(held: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", held().path, "--steps", "0"]) == cli.INVALID
    assert "at least one step" in capsys.readouterr().err


def test_a_service_whose_supervisor_does_not_listen_yet_is_starting(
    held: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    held("train.py")
    assert cli.main(["ls", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["state"], listed["waiting"]) == ("starting", ["the supervisor to answer"])
    assert cli.main(["logs"]) == cli.NO_ANSWER
    assert "has just begun to start; try again" in capsys.readouterr().err
    assert cli.main(["profile", "--wait", "0"]) == cli.NO_ANSWER
    said = capsys.readouterr().err
    assert "is still starting after 0 s, and waits for the supervisor to answer" in said
    assert "--wait SECONDS waits longer" in said


def test_a_service_whose_socket_was_removed_is_silent(
    held: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(held().path, "server").touch()  # it has listened, because it has started a server
    assert cli.main(["ls", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["state"] == "silent"
    for command in ("logs", "profile"):
        assert cli.main([command]) == cli.NO_ANSWER
    assert "the socket of its supervisor was removed" in capsys.readouterr().err


def test_a_service_whose_directory_was_opened_to_others_is_not_over(
    held: Callable[..., RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    os.chmod(held().path, 0o755)
    assert cli.main(["ls", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["state"] == "silent"
    assert cli.main(["status", listed["name"]]) == cli.NO_SERVICE
    assert "is open to other users; chmod 700 closes it" in capsys.readouterr().err


def test_status_waits_only_once_for_a_service_that_does_not_answer(
    held: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def look(looker: Looker, *, memory: bool = True) -> Reading:
        asked.append(memory)
        return reading()

    monkeypatch.setattr(Looker, "look", look)
    assert cli.main(["status", held().path]) == cli.GOOD
    assert asked == [True]


@pytest.mark.parametrize("changes", [{"state": "silent"}, {"state": "waiting", "runs": None}])
def test_a_profile_says_at_once_who_does_not_answer(
    changes: dict[str, Any],
    held: Callable[..., RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    who = "server (pid 7), which is stopped"
    monkeypatch.setattr(Looker, "look", lambda looker, memory: reading(waiting=(who,), **changes))
    assert cli.main(["profile", held().path]) == cli.NO_ANSWER
    assert f"cannot be seen: it waits for {who}" in capsys.readouterr().err


def test_what_a_service_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names, lines of logs and paths are text of others."""
    evil = "a\x1b[2J\x07b\u202e\udcff\nc"
    shown = "a\\x1b[2J\\x07b\\u202e\\udcff\\nc"
    printing.table(["NAME"], [[evil]])
    printing.line(evil)
    status._print(reading(name=evil, script=evil, waiting=(evil, evil), events=(Event(1.0, evil),)))
    logs._show([LogLine(1.0, "w0", "stdout", evil)], as_json=False)
    said = capsys.readouterr().out
    assert said.count(shown) >= 6
    assert not {*said} & {"\x1b", "\x07", "\u202e", "\udcff"}
    assert all(
        line.isprintable()
        for line in screen.drawn(
            reading(name=evil),
            [1.0],
            {evil: 0.5},
            screen.Bars(evil, ((evil, 0.5),)),
            sort="name",
            is_paused=False,
            log=[evil],
            columns=200,
            rows=50,
        )
    )
