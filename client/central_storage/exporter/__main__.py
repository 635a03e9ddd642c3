"""The exporter of one service: ``python -m central_storage.exporter``. The launcher starts it, and ends it by
SIGKILL."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket

from central_storage.ctl.reading import Looker, Reading
from central_storage.ctl.services import Entry
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from central_storage.launch.exporter import read_token
from central_storage.launch.service_file import ServiceFile

from .endpoint import serve
from .families import Metrics

__all__ = ["main"]

# Seconds for each answer. A look takes at most three answers, and Prometheus waits ten seconds.
_TIMEOUT = 2.0
# What is added to the niceness: if all processors are busy, a scrape waits and the training does not.
_NICENESS = 10


def main(arguments: list[str] | None = None) -> None:
    """Serve metrics until this process is killed."""
    parser = argparse.ArgumentParser("python -m central_storage.exporter", description=__doc__)
    parser.add_argument("--run-directory", required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    options = parser.parse_args(arguments)
    configure_logging("exporter")
    dump_stacks_on_signal()
    listener = socket.socket(fileno=options.descriptor)
    token = read_token(options.token_file)
    os.nice(_NICENESS)
    with Looker(_entry(options.run_directory), _TIMEOUT) as looker:

        def look(memory: bool) -> Reading:
            looker.entry = _entry(options.run_directory)  # the script may have chosen its devices since
            return looker.look(memory=memory)

        asyncio.run(serve(listener, token, Metrics(look).text))


def _entry(run_directory: str) -> Entry:
    return Entry(run_directory, ServiceFile.read(run_directory))


if __name__ == "__main__":
    main()
