"""One node of Ray on loopback, which lives until SIGTERM: prints its address.

The directory of Ray's session is the first argument, and the number of its CPUs the second.
"""

from __future__ import annotations

import signal
import sys

import ray


def main(directory: str, cpus: str) -> None:
    """Start the node, and end it when told to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    context = ray.init(
        num_cpus=int(cpus),
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _temp_dir=directory,
    )
    print(f"address {context.address_info['address']}", flush=True)
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
