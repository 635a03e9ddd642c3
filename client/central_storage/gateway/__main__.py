"""The gateway of one service: ``python -m central_storage.gateway``. The launcher starts it, and ends it by SIGKILL."""

from __future__ import annotations

import argparse
import os
import socket

from central_storage.cluster.passage import Passages
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from cs_runtime import heap, open_files
from cs_runtime.transport.curve import ServiceKeys

from .relay import Relay

__all__ = ["main"]

# What is added to the niceness: if all processors are busy, an observer waits and the training does not.
_NICENESS = 10


def main(arguments: list[str] | None = None) -> None:
    """Serve observers, and pass on what workers on other machines say, until this process is killed."""
    parser = argparse.ArgumentParser("python -m central_storage.gateway", description=__doc__)
    parser.add_argument("--run-directory", required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--return-timeout", type=float, default=60.0)
    parser.add_argument("--workers", action="store_true", help="the service has workers on other machines")
    options = parser.parse_args(arguments)
    configure_logging("gateway")
    dump_stacks_on_signal()
    keys = ServiceKeys.read(options.keys)
    open_files.raise_limit()
    if options.workers:
        heap.keep_freed_blocks()
    else:
        os.nice(_NICENESS)  # not with workers: a training would wait for its own steps
    listener = socket.socket(fileno=options.descriptor)
    with Relay(options.run_directory, keys, listener, options.return_timeout) as relay:
        passages = Passages(relay, options.run_directory, keys.places_of)
        while True:
            relay.turn()
            passages.turn()


if __name__ == "__main__":
    main()
