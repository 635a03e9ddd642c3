"""Three pretend nodes of Ray on loopback, which live until SIGTERM: prints their address.

After SIGUSR1, one of those that are not the head is killed, and another one takes its place: prints ``killed``, and
``replaced``. The directory of Ray's session is the first argument, and the number of CPUs of each node the second.
"""

from __future__ import annotations

import os
import signal
import sys

from ray.cluster_utils import Cluster


def main(directory: str, cpus: str) -> None:
    """Start the nodes, kill some, and end all when told to."""
    os.environ["RAY_TMPDIR"] = directory
    node = {"num_cpus": int(cpus), "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
    told = {signal.SIGUSR1, signal.SIGTERM}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes = [cluster.add_node(**node) for _ in range(2)]
    # Only now, because Ray's processes would inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    print(f"address {cluster.address}", flush=True)
    while signal.sigwait(told) == signal.SIGUSR1:
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
        print("killed", flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, told)
        nodes.append(cluster.add_node(**node))
        signal.pthread_sigmask(signal.SIG_BLOCK, told)
        print("replaced", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # nothing is left to be done
