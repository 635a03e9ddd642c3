"""The service of a training of Ray Train: ``python -m central_storage.ray.service``, on the node of rank 0.

It is ``cs-launch --serve`` with directories of its own, which are gone when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress

from central_storage.launch import cli
from central_storage.launch.run_directory import place
from cs_runtime.transport.curve import make_service_keys

__all__ = ["main", "remove"]


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM; the exit code. The first line of the output names the directories, as JSON: ``run`` is the
    run directory, ``keys`` has the keys of all who may join, and ``drafts`` is for checkpoints until Ray has them."""
    parser = argparse.ArgumentParser("python -m central_storage.ray.service", description=__doc__)
    parser.add_argument("--workers", required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args(arguments)
    made: list[str] = []
    # The launcher heeds it while it serves. A second SIGTERM, by the death of the actor, would end the removal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        made.append(tempfile.mkdtemp(prefix="cs-train-", dir=place()))  # a short path, for sockets
        made.append(tempfile.mkdtemp(prefix="cs-checkpoints-"))  # with room for large files
        run, keys = os.path.join(made[0], "run"), os.path.join(made[0], "keys")
        os.mkdir(keys, 0o700)
        make_service_keys(keys)
        print(json.dumps({"run": run, "keys": keys, "drafts": made[1]}), flush=True)
        listen = f"tcp://{f'[{options.address}]' if ':' in options.address else options.address}:0"
        return cli.main(
            [
                *("--serve", options.workers, "--parameter-device", "cpu:0"),
                *("--run-dir", run, "--listen", listen, "--keys", keys),
            ]
        )
    finally:
        remove(made)


def remove(directories: Iterable[str]) -> None:
    """Remove these directories, although rank 0 may still write a checkpoint into one of them: it finds none there."""
    for directory in directories:
        ended = f"{directory}-ended"
        with suppress(FileNotFoundError):
            os.rename(directory, ended)
        shutil.rmtree(ended, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
