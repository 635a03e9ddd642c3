"""One node of Ray on loopback, which lives until SIGTERM: prints its address.

The directory of Ray's session is the first argument, and the number of its CPUs the second.
"""

from __future__ import annotations

import os
import signal
import sys

import ray


def main(directory: str, cpus: str) -> None:
    """Start the node, and end it when told to."""
    context = ray.init(
        num_cpus=int(cpus),
        num_gpus=2,  # Ray counts them; stand-ins take their place
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _temp_dir=directory,
    )
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reader, True)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: None)
    print(f"address {context.address_info['address']}", flush=True)
    os.read(reader, 1)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
