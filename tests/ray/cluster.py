"""Three pretend nodes of Ray on loopback, which live until SIGTERM: prints their address.

After SIGUSR1, one of those that are not the head is killed, and another one takes its place: prints ``killed``, and
``replaced`` when the head has noticed both. After SIGUSR2, all are killed, the head first, and others start at the
same address: prints ``headless``, and ``again``. The directory of Ray's session is the first argument, and the number
of CPUs of each node the second.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ray.cluster_utils import Cluster

#: Of the head: nobody asks for more nodes, and nobody reads what its processes print.
HEAD = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}


def main(directory: str, cpus: str) -> None:
    """Start the nodes, kill some, and end all when told to."""
    os.environ["RAY_TMPDIR"] = directory
    node = {"num_cpus": int(cpus), "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
    told = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **HEAD})
    nodes = [cluster.add_node(**node) for _ in range(2)]
    # Only now, because Ray's processes would inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    print(f"address {cluster.address}", flush=True)
    while (number := signal.sigwait(told)) != signal.SIGTERM:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, told)
        if number == signal.SIGUSR1:
            killed = nodes.pop(0)
            node_id = killed.node_id
            cluster.remove_node(killed, allow_graceful=False)
            print("killed", flush=True)
            nodes.append(cluster.add_node(**node))
            while any(each["Alive"] for each in cluster.global_state.node_table() if each["NodeID"] == node_id):
                time.sleep(0.05)
            print("replaced", flush=True)
        else:
            port = int(cluster.address.rpartition(":")[2])
            for each in (cluster.head_node, *nodes):
                cluster.remove_node(each, allow_graceful=False)
            print("headless", flush=True)
            cluster.add_node(**node, **HEAD, gcs_server_port=port)
            nodes = [cluster.add_node(**node) for _ in range(2)]
            print("again", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, told)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # nothing is left to be done
