from __future__ import annotations

import argparse

import pytest

from central_storage.launch import cli, plan_options
from cs_proto.errors import ConfigurationError


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    plan_options.add_arguments(parser)
    parser.add_argument("--ray")
    parser.add_argument("--serve", type=int)
    parser.add_argument("--listen")
    parser.add_argument("--workers-per-node", type=int)
    return parser.parse_args(words)


@pytest.mark.parametrize("text", ["10", "10GB", "Gbit", "0Gbit", "-1Gbit", "1e3Gbit", "10 Gbit/h", "9999999Tbit", ""])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--bandwidth takes bits a second, with kbit, Mbit, Gbit or Tbit"):
        plan_options.check(options("--plan", f"--bandwidth={text}"), [])


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="--bandwidth needs --plan"):
        plan_options.check(options("--bandwidth", "1Gbit"), [])
    with pytest.raises(ConfigurationError, match="--plan runs a script up to its first step, and --join runs none"):
        plan_options.check(options("--plan"), ["join"])
    plan_options.check(options("--plan", "--bandwidth", "1Gbit"), ["serve"])
    plan_options.check(options(), ["join"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan"], "no script was given"),
        (["--plan", "--serve", "2"], "no script was given"),
        (["--plan", "absent.py"], "there is no script 'absent.py' in "),
        (["--plan", "--devices", "gpu:99", __file__], "device 'gpu:99' does not exist"),
        (["--plan", "--doctor", __file__], "--doctor takes no script"),
        (["--plan", "--serve", "0", __file__], "--serve takes a number of workers from 1"),
        (["--serve", "2", __file__], "--serve takes no script"),
    ],
)
def test_what_the_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_where_workers_of_other_machines_would_be() -> None:
    found = plan_options._places(options("--serve", "3", "--listen", "tcp://192.0.2.7:5600"))
    assert found["nodes"] == ["machine 1", "machine 2", "machine 3"]
    assert found["head"] == "192.0.2.7"
    assert not found["is_shared"]
    assert plan_options._places(options("--serve", "1"))["head"] == ""
    several = plan_options._places(options("--serve", "3", "--workers-per-node", "2"))
    assert (several["nodes"], several["is_shared"]) == (["machine 1", "machine 1", "machine 2"], True)
    assert plan_options._places(options())["nodes"] == []
