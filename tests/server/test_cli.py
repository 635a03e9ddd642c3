"""The command line, as the supervisor and a curious person call it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.harness.processes import run

OPTIONS = ("--parameter-device", "cpu:0", "--replicas", "1")


@pytest.mark.parametrize("program", [("cs-server",), (sys.executable, "-P", "-m", "cs_server")])
def test_help(program: tuple[str, ...]) -> None:
    assert "--run-directory" in run(*program, "--help").ok().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "--run-directory"),
        (("--run-directory", "/tmp", *OPTIONS, "--replicas", "two"), 2, "invalid int value: 'two'"),
        (("--run-directory", "tmp", *OPTIONS), 2, "ConfigurationError: run directory 'tmp' must be an absolute path"),
        (("--run-directory", "/nowhere", *OPTIONS), 1, "LaunchError: no service answers in /nowhere"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_no_traceback(arguments: tuple[str, ...], code: int, said: str) -> None:
    ended = run("cs-server", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_a_supervisor_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "supervisor").write_text("")
    ended = run("cs-server", "--run-directory", tmp_path, *OPTIONS)
    assert ended.code == 1 or len(str(tmp_path)) > 87
    assert "cs-server: " in ended.err
    assert "Traceback" not in ended.err


def test_what_is_to_be_left_at_the_end_is_left(tmp_path: Path) -> None:
    """Python imports the module of this name when it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import atexit, pathlib\natexit.register(pathlib.Path({str(tmp_path)!r}, 'left').touch)\n"
    )
    service = (sys.executable, "-P", "-m", "cs_server", "--run-directory", "/nowhere", *OPTIONS)
    assert run(*service, environment={"PYTHONPATH": str(tmp_path)}).code == 1
    assert (tmp_path / "left").exists()
