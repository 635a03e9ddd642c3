"""The gateway of one service: ``python -m central_storage.gateway``. The launcher starts it, and ends it by SIGKILL."""

from __future__ import annotations

import argparse
import os
import socket

from central_storage.diagnostics.logging_setup import dump_stacks_on_signal
from cs_runtime import open_files
from cs_runtime.transport.curve import ServiceKeys

from .relay import Relay

__all__ = ["main"]

# What is added to the niceness: if all processors are busy, an observer waits and the training does not.
_NICENESS = 10


def main(arguments: list[str] | None = None) -> None:
    """Serve observers until this process is killed."""
    parser = argparse.ArgumentParser("python -m central_storage.gateway", description=__doc__)
    parser.add_argument("--run-directory", required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    options = parser.parse_args(arguments)
    dump_stacks_on_signal()
    keys = ServiceKeys.read(options.keys)
    open_files.raise_limit()
    os.nice(_NICENESS)
    with Relay(options.run_directory, keys, socket.socket(fileno=options.descriptor)) as relay:
        while True:
            relay.turn()


if __name__ == "__main__":
    main()
