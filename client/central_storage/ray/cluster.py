"""The workers of a strategy on the nodes of a Ray cluster. Ray itself is imported by the placer only."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Literal

from central_storage.diagnostics.extras import require
from cs_proto.errors import ConfigurationError
from cs_proto.messages import MOST_REPLICAS

__all__ = ["RayCluster"]

_STRATEGIES = ("PACK", "SPREAD")


class RayCluster:
    """Lets Ray place the workers of a strategy, on the nodes of its cluster. ::

        cluster = RayCluster(workers=8, resources_per_worker={"CPU": 4, "GPU": 1})
        strategy = cs.CentralStorageStrategy(cluster=cluster, start_timeout=300)

    Variables and script are on this machine, which must be a node of the cluster. It starts nothing itself.

    In a placement group, as in a trial of Ray Tune, the workers get what is free in its bundles, and nothing else is
    reserved. ``placement_strategy`` and ``workers_per_node`` are for places outside of one.

    Args:
        workers: The number of workers.
        resources_per_worker: What Ray reserves for each of them, under its own names. None: one CPU.
        placement_strategy: ``"PACK"`` on as few nodes as possible, ``"SPREAD"`` over as many.
        workers_per_node: Exactly so many on each node. None: as they fit.
        address: ``"HOST:PORT"`` of a cluster, or ``"local:3"`` for three pretend nodes on this machine. None: the
            cluster to which this script has connected by ``ray.init()``, or that ``RAY_ADDRESS`` names, or that runs on
            this machine. With an address, places are reserved beside the placement group of this process, too.
        runtime_env: Ray's runtime environment for the nodes.
        without_token: Use a cluster on a network also if everybody who reaches it may run code there.

    Raises:
        ConfigurationError: An argument makes no sense (a ValueError).
        ModuleNotFoundError: Ray is not installed (an ImportError).
    """

    def __init__(
        self,
        workers: int,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: Literal["PACK", "SPREAD"] = "PACK",
        workers_per_node: int | None = None,
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        without_token: bool = False,
    ) -> None:
        require("ray", "ray", "RayCluster")
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_REPLICAS:
            raise ConfigurationError(f"workers must be an int from 1 to {MOST_REPLICAS}, not {workers!r:.100}")
        if placement_strategy not in _STRATEGIES:
            raise ConfigurationError(
                f"placement_strategy must be {' or '.join(map(repr, _STRATEGIES))}, not {placement_strategy!r:.100}; "
                "workers_per_node says how many workers a node has"
            )
        self.workers = workers
        self._resources = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
        self._is_spread = placement_strategy == "SPREAD" and workers_per_node is None
        self._per_node = workers_per_node
        self._address = address
        self._without_token = without_token
        self._runtime_env = None if runtime_env is None else json.dumps(runtime_env)

    def options(self) -> list[str]:
        """The options of ``cs-launch`` that say the same. The caller removes the file of ``--runtime-env``."""
        resources = ",".join(f"{name}={amount!r}" for name, amount in self._resources.items())
        group = None if self._address else _group_of_script()
        return [
            *("--ray", self._address or _address_of_script() or "auto"),
            *("--workers", str(self.workers)),
            f"--worker-resources={resources}",
            *(("--workers-per-node", str(self._per_node)) if self._per_node is not None else ()),
            *(("--spread",) if self._is_spread else ()),
            *(("--ray-group", group) if group else ()),
            *(("--runtime-env", _written(self._runtime_env)) if self._runtime_env is not None else ()),
            *(("--ray-without-token",) if self._without_token else ()),
        ]


def _written(runtime_env: str) -> str:
    """The path of a private file with the runtime environment: it may hold secrets, which do not belong on a command
    line. JSON is YAML."""
    descriptor, path = tempfile.mkstemp(prefix="cs-runtime-env-", suffix=".yaml")
    with open(descriptor, "w") as file:
        file.write(runtime_env)
    return path


def _address_of_script() -> str | None:
    """The cluster to which this process has connected, if it has."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def _group_of_script() -> str | None:
    """The ID of the placement group in which this process runs, if it does."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    group = ray.util.get_current_placement_group()
    return None if group is None else group.id.hex()
