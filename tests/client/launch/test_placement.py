"""What Ray is asked for, and what is said of what it lacks."""

from __future__ import annotations

import re

import pytest

from central_storage.launch.placement import Request, resources_of
from cs_proto.errors import ConfigurationError


def request(address: str = "auto", workers: int = 5, **more: object) -> Request:
    return Request(address, workers, {"CPU": 2.0, "disk": 0.5}, **more)  # type: ignore[arg-type]


def test_a_bundle_for_each_worker() -> None:
    asked = request()
    assert asked.bundles() == [{"CPU": 2.0, "disk": 0.5}] * 5
    assert asked.launchers() == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert asked.strategy == "PACK"
    assert request(is_spread=True).strategy == "SPREAD"


def test_a_bundle_for_the_workers_of_a_node() -> None:
    asked = request(per_node=2)
    assert asked.bundles() == [{"CPU": 4.0, "disk": 1.0}, {"CPU": 4.0, "disk": 1.0}, {"CPU": 2.0, "disk": 0.5}]
    assert asked.launchers() == [(0, 2), (1, 2), (2, 1)]  # one for the workers of a node
    assert asked.strategy == "STRICT_SPREAD"


@pytest.mark.parametrize(("gpus", "launchers"), [(2.0, [(0, 2), (1, 1)]), (0.5, [(0, 1), (0, 1), (1, 1)])])
def test_workers_that_share_a_gpu_have_launchers_of_their_own(gpus: float, launchers: list[tuple[int, int]]) -> None:
    """A launcher gives its workers different GPUs."""
    assert Request("auto", 3, {"GPU": gpus}, 2).launchers() == launchers


def test_pretend_nodes_have_room_for_the_workers() -> None:
    asked = request("local:3")
    assert asked.pretend_nodes == 3
    assert asked.pretend_resources() == {"CPU": 4, "disk": 1}
    assert asked.strategy == "SPREAD"
    assert request("local:3", per_node=3).pretend_resources() == {"CPU": 6, "disk": 2}
    assert request("auto").pretend_nodes == request("127.0.0.1:6379").pretend_nodes == 0


def test_the_placer_gets_all_of_it() -> None:
    said = {"runtime_env": "/a file.yaml", "start_timeout": 3.5, "without_token": True, "group": "0a" * 18}
    asked = request("local:3", per_node=2, **said)
    assert Request.of_json(asked.to_json()) == asked


@pytest.mark.parametrize(
    ("asked", "nodes", "free", "said"),
    [
        (
            request(),
            [{"CPU": 4.0, "disk": 9.0}, {"CPU": 4.0}],
            {"CPU": 8.0, "disk": 9.0},
            "5 workers need CPU 10, but the cluster has CPU 8 (8 free) on 2 nodes",
        ),
        (
            request(workers=1),
            [{"CPU": 4.0}],
            {"CPU": 1.0},
            "1 worker needs CPU 2, disk 0.5, but the cluster has CPU 4 (1 free), disk 0 (0 free) on 1 node",
        ),
        (
            request(workers=2),
            [{"CPU": 1.0, "disk": 1.0}] * 9,
            {"CPU": 9.0, "disk": 9.0},
            "a worker needs CPU 2, disk 0.5 on one node, and no 2 such places are free on 9 nodes",
        ),
        (
            request(workers=4, per_node=2),
            [{"CPU": 64.0, "disk": 9.0}],
            {"CPU": 64.0, "disk": 9.0},
            "4 workers need 2 nodes for 2 each, but the cluster has 1 node",
        ),
        (
            request(workers=4, per_node=2),
            [{"CPU": 64.0, "disk": 9.0}, {"CPU": 1.0}],
            {"CPU": 65.0, "disk": 9.0},
            "2 workers need CPU 4, disk 1 on one node, and no 2 such places are free on 2 nodes",
        ),
    ],
)
def test_what_is_missing_is_named(
    asked: Request, nodes: list[dict[str, float]], free: dict[str, float], said: str
) -> None:
    assert asked.lacking(nodes, free) == said


@pytest.mark.parametrize(
    ("workers", "free", "said"),
    [
        (3, [{}, {"CPU": 4.0, "disk": 1.0}, {"CPU": 3.0, "disk": 9.0}], ""),
        (2, [{"CPU": 1.0, "disk": 1.0}, {"CPU": 3.0}, {"CPU": 2.0, "disk": 0.5}], "the 3 bundles .* have room for 1"),
        (1, [{}], "1 worker needs a bundle with CPU 2, disk 0.5 free, and the one bundle .* has room for 0"),
    ],
)
def test_the_room_in_a_placement_group_is_that_of_its_bundles(
    workers: int, free: list[dict[str, float]], said: str
) -> None:
    assert re.search(said or "^$", request(workers=workers, group="0a" * 18).lacking_in_group(free))


def test_a_bundle_is_divided_as_ray_divides_it() -> None:
    """0.3 / 0.1 is less than 3."""
    assert Request("auto", 3, {"GPU": 0.1}).lacking_in_group([{"GPU": 0.3}]) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "takes NAME=NUMBER"),
        ("CPU=x", "takes NAME=NUMBER"),
        ("CPU=-1", "takes NAME=NUMBER"),
        ("CPU=nan", "takes NAME=NUMBER"),
        ("CPU=inf", "takes NAME=NUMBER"),
        ("a name=1", "takes NAME=NUMBER"),
        ("CPU=1,cpu=2", "names CPU twice"),
        ("GPU=1.5", "GPU=1.5 is no whole number"),
        ("CPU=0", "must name something"),
        ("", "must name something"),
    ],
)
def test_resources_that_ray_would_not_take(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--worker-resources.*{said}"):
        resources_of(text, "--worker-resources")


def test_what_a_worker_needs_none_of_is_not_asked_for() -> None:
    assert resources_of(" CPU=0, GPU=2 ", "--worker-resources") == {"GPU": 2.0}
