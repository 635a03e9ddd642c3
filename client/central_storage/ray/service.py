"""The service of a training of Ray Train: ``python -m central_storage.ray.service``, on the node of rank 0.

It is ``cs-launch --serve`` with keys of its own, which are gone when it ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile

from central_storage.launch import cli
from central_storage.launch.run_directory import place
from cs_runtime.transport.curve import make_service_keys

__all__ = ["KEYS", "RUN", "main"]

#: The names of the directory with the keys, and of the run directory, in the directory that the output names.
KEYS, RUN = "keys", "run"


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM; the exit code. The first line of the output names the directory of the keys."""
    parser = argparse.ArgumentParser("python -m central_storage.ray.service", description=__doc__)
    parser.add_argument("--workers", required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the launcher has its own
    directory = tempfile.mkdtemp(prefix="cs-train-", dir=place())
    try:
        keys = os.path.join(directory, KEYS)
        os.mkdir(keys, 0o700)
        make_service_keys(keys)
        print(f"directory {directory}", flush=True)
        return cli.main(
            [
                *("--serve", options.workers, "--parameter-device", "cpu:0"),
                *("--run-dir", os.path.join(directory, RUN)),
                *("--listen", f"tcp://{options.address}:0", "--keys", os.path.join(directory, KEYS)),
            ]
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
