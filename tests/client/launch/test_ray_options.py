"""The options of ``cs-launch`` for Ray: what is refused before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from central_storage.diagnostics import extras
from central_storage.launch import ray_options
from cs_proto.errors import ConfigurationError

GROUP = "0123456789abcdef" * 2 + "0100"


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda library: library)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ray_options.add_arguments(parser)
    for name in ("--devices", "--listen", "--keys"):
        parser.add_argument(name)
    parser.add_argument("--memory", default="memfd")
    parser.add_argument("--start-timeout", type=float, default=60.0)
    return parser.parse_args(words)


def test_what_is_asked_for() -> None:
    asked = options("--ray", "auto", "--workers", "8", "--worker-resources", "CPU=4,GPU=1", "--workers-per-node", "4")
    ray_options.check(asked, [])
    request = ray_options.request_of(asked)
    assert (request.address, request.workers, request.per_node) == ("auto", 8, 4)
    assert request.resources == {"CPU": 4.0, "GPU": 1.0}
    assert request.group == ""


def test_the_bundles_of_a_placement_group_are_asked_for() -> None:
    asked = options("--ray", "auto", "--workers", "8", "--ray-group", GROUP)
    ray_options.check(asked, [])
    assert ray_options.request_of(asked).group == GROUP


def test_a_worker_needs_a_processor_unless_something_else_is_said() -> None:
    assert ray_options.request_of(options("--ray", "local:2", "--workers", "1")).resources == {"CPU": 1.0}


def test_auto_is_the_cluster_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    assert ray_options.request_of(options("--ray", "auto", "--workers", "1")).address == "192.0.2.7:6379"


def test_without_the_option_nothing_is_checked_and_nothing_else_is_taken() -> None:
    ray_options.check(options(), ["serve"])
    with pytest.raises(ConfigurationError, match="--worker-resources needs --ray"):
        ray_options.check(options("--worker-resources", "CPU=1"), [])
    with pytest.raises(ConfigurationError, match="--workers-per-node needs --ray"):
        ray_options.check(options("--workers-per-node", "2"), [])
    asked = options("--workers-per-node", "2")
    asked.plan = False
    with pytest.raises(ConfigurationError, match="--workers-per-node needs --ray"):
        ray_options.check(asked, ["serve"])
    asked.plan = True  # of machines without Ray
    ray_options.check(asked, ["serve"])
    with pytest.raises(ConfigurationError, match="at least 1, not 0"):
        ray_options.check(options("--workers-per-node", "0"), ["serve"])
    with pytest.raises(ConfigurationError, match="--spread needs --ray"):
        ray_options.check(options("--spread"), [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("auto", "needs --workers N"),
        ("auto --workers 0", "takes a number from 1"),
        ("auto --workers 2 --workers-per-node 0", "at least 1, not 0"),
        ("auto --workers 2 --workers-per-node 1 --spread", "exclude each other"),
        ("auto --workers 2 --devices cpu:0", "does not go together with --devices: Ray gives each worker its devices"),
        ("auto --workers 2 --listen tcp://127.0.0.1:0", "does not go together with --listen"),
        ("auto --workers 2 --memory frames", "needs memory that the gateway can map"),
        ("auto --workers 2 --keys keys", "does not go together with --keys"),
        ("auto --workers 2 --runtime-env missing.yaml", "there is no file .*missing.yaml"),
        ("auto --workers 2 --worker-resources CPU", "--worker-resources takes NAME=NUMBER"),
        ("ray://192.0.2.7:10001 --workers 2", "ray job submit --working-dir . -- cs-launch --ray auto"),
        ("local --workers 2", "names no cluster"),
        ("local:0 --workers 2", "names no cluster"),
        ("192.0.2.7 --workers 2", "names no cluster"),
        ("auto --workers 2 --ray-group 0a", "--ray-group takes the ID of a placement group, 36 hexadecimal digits"),
        (f"auto --workers 2 --ray-group {GROUP} --spread", "--ray-group and --spread exclude each other"),
        (f"auto --workers 2 --ray-group {GROUP} --workers-per-node 2", "--workers-per-node exclude each other"),
        (f"local:2 --workers 2 --ray-group {GROUP}", f"pretend nodes have no placement group {GROUP}"),
        ("local:2 --workers 2 --worker-resources GPU=1", "pretend nodes have no GPUs"),
        ("local:2 --workers 5 --workers-per-node 2", "need --ray local:3"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ray_options.check(options("--ray", *words.split()), [])


@pytest.mark.parametrize("address", ["ray://192.0.2.7:10001", "local", "local:3", "nonsense"])
def test_what_the_environment_names_is_refused_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigurationError, match=f"^RAY_ADDRESS={address}"):
        ray_options.check(options("--ray", "auto", "--workers", "2"), [])


def test_it_needs_a_script() -> None:
    with pytest.raises(ConfigurationError, match="--serve runs none"):
        ray_options.check(options("--ray", "auto", "--workers", "2"), ["serve"])


def test_it_needs_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda library: None)
    with pytest.raises(ConfigurationError, match=r"--ray needs ray: pip install 'central-storage\[ray\]'"):
        ray_options.check(options("--ray", "auto", "--workers", "2"), [])
