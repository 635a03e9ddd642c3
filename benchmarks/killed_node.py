"""How long a training stands still when a node of its Ray cluster is killed; lines of JSON, as a peer prints.

    python killed_node.py          # the nodes are pretend ones, on loopback; needs central-storage[ray]

A training with a worker on each of two nodes takes short steps. One node is killed while the other one has room for
its worker. ``killed-node/noticed`` is the time until Ray says that the node is dead; until then it has no other place
for the worker. ``killed-node/room`` is the time from then to the end of the next step. Then the other node, too, is
killed, and a new one joins: ``killed-node/joins`` is the time from when Ray has noticed both to the end of the next
step.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORKED = 11.0  # seconds that workers have worked before a kill, as those of real trainings have
_HALT = 0.5  # seconds: a step that lasts so long had a kill in it


def train() -> None:
    """The script: short steps for ever, and a line for the end of each."""
    import numpy as np

    import central_storage as cs

    strategy = cs.CentralStorageStrategy()
    with strategy.scope():
        w = cs.Variable(np.zeros(1000, np.float32))
        optimizer = cs.optimizers.Adam(0.001)

    @cs.function
    def step() -> None:
        optimizer.apply_gradients([(w.numpy() + 1, w)])

    while True:
        strategy.run(step)
        print(time.monotonic(), flush=True)


class Watch:
    """The steps of a training, as it prints them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def next(self) -> float:
        """When the next step ended, on the clock of ``time.monotonic``. Raises RuntimeError if the training ends."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the training has ended with status {self._process.wait()}")
        return float(line)

    def until(self, seconds: float) -> None:
        """Read steps until so many seconds have passed since the first of them."""
        first = self.next()
        while self.next() < first + seconds:
            pass

    def after_halt(self, since: float) -> float:
        """The end of the step in which the training stood still, the first that began after ``since`` or held it."""
        last = self.next()
        while True:
            ended = self.next()
            if ended > since and ended - last > _HALT:
                return ended
            last = ended


def measure() -> None:
    """Keep the nodes, kill them, and print what came of it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        os.environ |= {
            "RAY_TMPDIR": directory,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stay on loopback
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        from ray.cluster_utils import Cluster  # which reads the environment

        node = {"num_cpus": 2, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
        nodes = [cluster.add_node(**node) for _ in range(2)]
        launch = str(Path(sys.executable).parent / "cs-launch")
        command = [launch, "--ray", "auto", "--workers", "2", "--spread", "--max-restarts", "99", __file__, "train"]
        environment = os.environ | {"RAY_ADDRESS": cluster.address}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                watch = Watch(process)
                watch.until(WORKED)
                killed = time.monotonic()
                node_id = _kill(cluster, nodes.pop())
                dead = _until_dead(cluster, node_id)
                _say("noticed", dead - killed)
                _say("room", watch.after_halt(killed) - dead)
                watch.until(WORKED)
                killed = time.monotonic()
                node_id = _kill(cluster, nodes.pop())
                cluster.add_node(**node)
                dead = _until_dead(cluster, node_id)
                _say("joins", watch.after_halt(killed) - dead)
            finally:
                process.terminate()
        cluster.shutdown()


def _kill(cluster: Any, node: Any) -> str:
    """Kill the processes of a node; its number at Ray."""
    node_id: str = node.node_id
    cluster.remove_node(node, allow_graceful=False)
    return node_id


def _until_dead(cluster: Any, node_id: str) -> float:
    """Wait until Ray knows that a node is dead; the time then, on the clock of ``time.monotonic``."""
    while any(node["Alive"] for node in cluster.global_state.node_table() if node["NodeID"] == node_id):
        time.sleep(0.02)
    return time.monotonic()


def _say(what: str, seconds: float) -> None:
    print(json.dumps({"work": f"killed-node/{what}", "seconds": seconds}), flush=True)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else measure()
