"""Plans: command lines and environments, who sees which GPU, where packages come from."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.gpu_inventory import Gpu
from central_storage.launch.affinity import Machine
from central_storage.launch.packages import python_path
from central_storage.launch.plan import (
    Command,
    Options,
    next_incarnation,
    script_command,
    service_commands,
    standby_commands,
)
from cs_proto.errors import ConfigurationError, DeviceError

TWO = Options(("cpu:0", "cpu:1"), "cpu:0", "/run/cs-1")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")


def plan(environment: dict[str, str] | None = None, cores: int = 8, options: Options = TWO) -> list[Command]:
    return service_commands(options, environment or {}, python="/py", machine=Machine(cores))


def threads(server: Command) -> str:
    return server.argv[server.argv.index("--threads") + 1]


def test_a_server_and_a_worker_for_each_device() -> None:
    server, w0, w1 = plan()
    assert [command.label for command in (server, w0, w1)] == ["server", "w0", "w1"]
    assert " ".join(server.argv) == (
        "/py -P -m cs_server --run-directory /run/cs-1 --parameter-device cpu:0 --replicas 2 --threads 8 "
        "--incarnation 1 --recovery on"
    )
    assert " ".join(w1.argv) == (
        "/py -P -m cs_worker --run-directory /run/cs-1 --replica 1 --incarnation 1 --device cpu:1"
    )


def test_processes_that_stand_by_have_all_but_what_the_devices_decide() -> None:
    standbys = standby_commands(2, "/run/cs-1", {"OMP_NUM_THREADS": "3"}, python="/py")
    assert [" ".join(command.argv) for command in standbys] == [
        "/py -P -m cs_runtime.standby cs_server cs_server.serving",
        *["/py -P -m cs_runtime.standby cs_worker cs_worker.cli"] * 2,
    ]
    for standby, command in zip(standbys, plan({"OMP_NUM_THREADS": "3"}), strict=True):
        assert (standby.is_standby, standby.processors) == (True, frozenset())
        assert (standby.role, standby.rank) == (command.role, command.rank)
        assert standby.environment == command.environment


def test_workers_know_their_rank_and_the_others_have_none() -> None:
    server, w0, w1 = plan()
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [w0.environment[name] for name in ranks] == ["0", "0", "2", "2"]
    assert [w1.environment[name] for name in ranks] == ["1", "1", "2", "2"]
    assert w1.environment["CS_ROLE"] == "worker"
    assert w1.environment["CS_RUN_DIRECTORY"] == "/run/cs-1"
    script = script_command(
        "/run/cs-1", ("cpu:0,cpu:1", "cpu:0"), {"HOME": "/home"}, ["train.py", "--rate", "1"], python="/py"
    )
    assert not set(ranks) & (set(server.environment) | set(script.environment))
    assert script.argv == ("/py", "-u", "train.py", "--rate", "1")
    assert dict(script.environment) == {
        "HOME": "/home",
        "CS_ROLE": "script",
        "CS_RUN_DIRECTORY": "/run/cs-1",
        "CS_ADDRESS": "/run/cs-1",
        "CS_DEVICES": "cpu:0,cpu:1",
        "CS_PARAMETER_DEVICE": "cpu:0",
        "CS_ERROR_FILE": "/run/cs-1/error",
    }


def test_a_service_inside_a_launched_script_is_not_told_of_the_outer_one() -> None:
    outer = dict(script_command("/run/cs-1", ("cpu:0,cpu:1", "cpu:0"), {}, ["x.py"], python="/py").environment)
    for command in plan(outer, options=Options(("cpu:0",), "cpu:0", "/run/cs-2")):
        assert command.environment["CS_RUN_DIRECTORY"] == "/run/cs-2"
        assert not {"CS_ADDRESS", "CS_DEVICES", "CS_PARAMETER_DEVICE"} & set(command.environment)


@pytest.mark.parametrize(("cores", "each"), [(8, "4"), (5, "2"), (1, "1")])
def test_workers_share_the_processors_and_the_server_updates_on_all(cores: int, each: str) -> None:
    server, w0, w1 = plan(cores=cores)
    assert threads(server) == str(cores)
    for name in THREADS:
        assert server.environment[name] == "1"
        assert w0.environment[name] == w1.environment[name] == each


def test_what_the_user_said_about_threads_is_obeyed() -> None:
    server, w0, _ = plan({"MKL_NUM_THREADS": "3"})
    assert (w0.environment["MKL_NUM_THREADS"], w0.environment["OMP_NUM_THREADS"]) == ("3", "4")
    server, w0, _ = plan({"OMP_NUM_THREADS": "6,2"})  # most libraries fall back to it, so it speaks for all
    assert w0.environment["OMP_NUM_THREADS"] == "6,2"
    assert w0.environment["OPENBLAS_NUM_THREADS"] == server.environment["NUMBA_NUM_THREADS"] == "6"
    assert threads(server) == "6"
    assert threads(plan({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "5"})[0]) == "5"
    assert threads(plan({"OMP_NUM_THREADS": "many"})[0]) == "8"


def test_the_rest_of_the_environment_passes() -> None:
    for command in plan({"HOME": "/home", "PYTHONUNBUFFERED": ""}):
        assert command.environment["HOME"] == "/home"
        assert command.environment["PYTHONUNBUFFERED"] == ""
        assert "PYTHONPATH" not in command.environment


#: Two nodes of four processors; GPUs 0 and 1 hang at the second, GPU 2 at the first, and nobody knows where GPU 3 does.
BIG = Machine(
    8,
    {0: frozenset(range(4)), 1: frozenset(range(4, 8))},
    [Gpu("5"), Gpu("GPU-ab"), Gpu("0"), Gpu("MIG-1"), Gpu("MIG-2")],
    [1, 1, 0, -1, -1],
)


def on(*devices: str, parameters: str = "cpu:0", environment: dict[str, str] | None = None) -> list[Command]:
    options = Options(devices, parameters, "/run/cs-1")
    return service_commands(options, environment or {}, python="/py", machine=BIG)


def test_a_worker_sees_its_own_gpus_and_knows_their_numbers() -> None:
    user = {"CUDA_VISIBLE_DEVICES": "5,GPU-ab,0,MIG-1,MIG-2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    server, w0, w1 = on("gpu:2+gpu:1", "gpu:0+gpu:0", parameters="gpu:1", environment=user)
    names = ("CUDA_VISIBLE_DEVICES", "CS_GPUS", "CS_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    everything = user["CUDA_VISIBLE_DEVICES"]
    assert [w0.environment[name] for name in names] == ["0,GPU-ab", "2,1", everything, "PCI_BUS_ID"]
    assert [w1.environment[name] for name in names] == ["5", "0", everything, "PCI_BUS_ID"]
    assert [server.environment[name] for name in names] == ["GPU-ab", "1", everything, "PCI_BUS_ID"]


def test_a_server_of_variables_on_a_cpu_sees_no_gpu_and_a_worker_there_what_the_script_sees() -> None:
    server, w0, w1 = on("gpu:0", "cpu:0")
    assert (server.environment["CUDA_VISIBLE_DEVICES"], server.environment["CS_GPUS"]) == ("", "")
    assert (w0.environment["CUDA_VISIBLE_DEVICES"], w0.environment["CS_GPUS"]) == ("5", "0")
    assert not {"CUDA_VISIBLE_DEVICES", "CS_GPUS", "CS_VISIBLE_DEVICES"} & set(w1.environment)
    assert on("cpu:0", environment={"CUDA_VISIBLE_DEVICES": "1"})[1].environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_each_worker_gets_its_own_instance_of_a_divided_gpu_and_no_worker_two() -> None:
    assert [c.environment["CUDA_VISIBLE_DEVICES"] for c in on("gpu:3", "gpu:4")[1:]] == ["MIG-1", "MIG-2"]
    with pytest.raises(DeviceError, match=r"gpu:3\+gpu:4: .* one instance"):
        on("gpu:3+gpu:4")


def test_a_worker_stays_near_its_gpu_unless_the_user_places_threads() -> None:
    server, w0, w1, w2 = on("gpu:0", "gpu:1", "gpu:2")
    assert [command.processors for command in (server, w0, w1, w2)] == [set(), BIG.nodes[1], BIG.nodes[1], BIG.nodes[0]]
    assert [command.environment["OMP_NUM_THREADS"] for command in (server, w0, w1, w2)] == ["1", "2", "2", "2"]
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        assert {command.processors for command in on("gpu:0", environment={name: "x"})} == {frozenset()}


def test_children_find_the_packages_where_this_process_found_them() -> None:
    directories = python_path({}).split(os.pathsep)
    for package in ("central_storage", "cs_proto"):
        home = Path(sys.modules[package].__file__).parents[1]
        assert str(home) in directories or "site-packages" in str(home)
    known = os.pathsep.join(filter(None, ["/mine", *directories]))
    assert python_path({"PYTHONPATH": known}) == known


def test_the_next_incarnation_differs_in_its_number_alone() -> None:
    for command in plan(options=replace(TWO, recovery=Recovery(server_recovery=False, step_timeout=2.5))):
        then = next_incarnation(next_incarnation(command))
        assert then.incarnation == 3
        assert " ".join(then.argv) == " ".join(command.argv).replace("--incarnation 1", "--incarnation 3")
        assert then.environment == command.environment
    assert command.role == "worker"


def test_the_server_is_told_what_recovery_needs_of_it() -> None:
    server, *_ = plan(options=replace(TWO, recovery=Recovery(server_recovery=False, step_timeout=2.5)))
    assert server.argv[-4:] == ("--recovery", "off", "--step-timeout", "2.5")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"max_restarts": True},
        {"max_restarts": 1.5},
        {"server_recovery": "on"},
        {"step_timeout": 0},
        {"step_timeout": math.inf},
        {"step_timeout": "5"},
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Recovery(**wrong)
