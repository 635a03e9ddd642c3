"""A trial of Ray Tune whose service has its workers in the bundles of the trial, as a test asks for.

python tests/ray/grouped.py STORAGE    # prints the digest, the nodes of the workers, what is said of too many workers,
                                       # and the number of placement groups meanwhile

The trial takes all processors of the cluster. STORAGE is a directory for Tune's results.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import tune
from training import Training

import central_storage as cs
from central_storage.ray import RayCluster


def trial(config: dict[str, Any]) -> None:
    """Train on three workers, and ask for more than there is room for."""
    try:
        cs.CentralStorageStrategy(cluster=RayCluster(5), start_timeout=60.0)
    except cs.errors.LaunchError as error:
        refused = str(error)
    with cs.CentralStorageStrategy(cluster=RayCluster(3), start_timeout=60.0) as strategy:
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        digest = Training(strategy, 0.1).run()
    tune.report({"digest": digest, "refused": refused, "groups": len(groups)})


def main(storage: str) -> None:
    """Run the trial, and print what comes of it."""
    ray.init(log_to_driver=False)
    bundles = [{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0}]
    results = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory(bundles)),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    ).fit()
    metrics = results[0].metrics
    print("digest 3", metrics["digest"], flush=True)
    print("refused", metrics["refused"], flush=True)
    print("groups", metrics["groups"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
