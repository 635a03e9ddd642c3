"""The training of ``training.py`` by a script that has Ray place the workers of its strategy, as a test asks for.

python tests/ray/own_workers.py ADDRESS    # prints where the workers are, and the digest; then waits for its end
"""

from __future__ import annotations

import signal
import sys

from training import Training

import central_storage as cs
from central_storage.ray import RayCluster


def main(address: str) -> None:
    """Train, print the digest, and wait for the end."""
    cluster = RayCluster(3, workers_per_node=1, address=address, runtime_env={"env_vars": {"OF_NODES": "it is"}})
    with cs.CentralStorageStrategy(cluster=cluster, start_timeout=120.0) as strategy:
        print("resolver", strategy.cluster_resolver.cluster_spec().as_dict(), flush=True)
        said = strategy.run(_variable, options=cs.RunOptions(keep_per_replica=True))
        print("variable", *map(bool, strategy.experimental_local_results(said)), flush=True)
        print("digest", strategy.num_replicas_in_sync, Training(strategy, 0.1).run(), flush=True)
        signal.pause()


def _variable() -> bool:
    import os

    return os.environ.get("OF_NODES") == "it is"


if __name__ == "__main__":
    main(*sys.argv[1:])
