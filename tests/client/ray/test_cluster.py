"""What ``RayCluster`` asks for, and what a strategy refuses beside it; without Ray."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import central_storage as cs
from central_storage.diagnostics import extras
from central_storage.ray import RayCluster


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda library: library)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_the_options_of_cs_launch_that_say_the_same() -> None:
    assert RayCluster(2).options() == ["--ray", "auto", "--workers", "2", "--worker-resources=CPU=1.0"]
    cluster = RayCluster(
        8,
        resources_per_worker={"CPU": 4, "GPU": 1, "tapes": 0.5},
        workers_per_node=4,
        address="127.0.0.1:6379",
        without_token=True,
    )
    assert cluster.options() == [
        *("--ray", "127.0.0.1:6379", "--workers", "8", "--worker-resources=CPU=4,GPU=1,tapes=0.5"),
        *("--workers-per-node", "4", "--ray-without-token"),
    ]
    assert "--spread" in RayCluster(2, placement_strategy="SPREAD").options()


def test_the_cluster_to_which_the_script_has_connected_and_its_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: SimpleNamespace(gcs_address="192.0.2.7:6379"),
        util=SimpleNamespace(get_current_placement_group=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "ray", connected)
    assert RayCluster(2).options()[:2] == ["--ray", "192.0.2.7:6379"]
    assert "--ray-group" not in RayCluster(2).options()
    assert RayCluster(2, address="local:3").options()[:2] == ["--ray", "local:3"]
    group = SimpleNamespace(id=bytes.fromhex("0a" * 18))
    monkeypatch.setattr(connected.util, "get_current_placement_group", lambda: group)
    assert RayCluster(2).options()[-2:] == ["--ray-group", "0a" * 18]
    assert "--ray-group" not in RayCluster(2, address="192.0.2.7:6379").options()
    monkeypatch.setattr(connected, "is_initialized", lambda: False)
    assert RayCluster(2).options()[:2] == ["--ray", "auto"]


def test_a_runtime_environment_is_in_a_private_file() -> None:
    cluster = RayCluster(2, runtime_env={"env_vars": {"KEY": "secret"}})
    path = cluster.options()[-1]
    with open(path) as file:
        assert json.load(file) == {"env_vars": {"KEY": "secret"}}
    assert os.stat(path).st_mode & 0o777 == 0o600
    os.unlink(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workers": 0}, "workers must be an int from 1"),
        ({"workers": True}, "workers must be an int from 1"),
        ({"workers": "2"}, "workers must be an int from 1"),
        ({"workers": 2, "placement_strategy": "STRICT_PACK"}, "placement_strategy must be 'PACK' or 'SPREAD'"),
    ],
)
def test_what_makes_no_sense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(cs.errors.ConfigurationError, match=said):
        RayCluster(**arguments)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda library: None)
    with pytest.raises(ModuleNotFoundError, match=r"RayCluster needs ray: pip install 'central-storage\[ray\]'"):
        RayCluster(2)
    with pytest.raises(ModuleNotFoundError, match=r"report needs ray: pip install 'central-storage\[ray-train\]'"):
        from central_storage.ray import report  # noqa: F401


def test_what_a_strategy_refuses_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RayCluster(2)
    with pytest.raises(cs.errors.ConfigurationError, match="cluster and compute_devices exclude each other"):
        cs.CentralStorageStrategy(["cpu:0"], cluster=cluster)
    with pytest.raises(cs.errors.ConfigurationError, match="cluster and in_process exclude each other"):
        cs.CentralStorageStrategy(in_process=True, cluster=cluster)
    monkeypatch.setenv("CS_ADDRESS", "/run/cs-01234567")
    with pytest.raises(cs.errors.ConfigurationError, match="this script has a service already"):
        cs.CentralStorageStrategy(cluster=cluster)
