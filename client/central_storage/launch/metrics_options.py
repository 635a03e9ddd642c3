"""The options of ``cs-launch`` that serve metrics to Prometheus."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from central_storage.diagnostics.extras import require
from cs_proto.errors import ConfigurationError

from .exporter import Endpoint
from .sidecar import Sidecar

__all__ = ["add_arguments", "check", "exporter_of"]

_LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--metrics-port`` and what belongs to it."""
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve metrics of the service to Prometheus, at http://ADDRESS:PORT/metrics; 0: a free port, which is "
        "printed (default: no metrics)",
    )
    parser.add_argument("--metrics-address", metavar="ADDRESS", help=f"where it listens (default: {_LOOPBACK})")
    parser.add_argument(
        "--metrics-token-file",
        metavar="FILE",
        help="the bearer token that a scraper must show, in a file of yours that is closed to other users (default: a "
        "new token in the file metrics-token of the run directory)",
    )


def check(options: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raise ConfigurationError for options that do not fit, also where prometheus-client is missing. ``modes`` are the
    options by which no script is started."""
    port = options.metrics_port
    if port is None:
        if given := [name for name in ("address", "token_file") if getattr(options, f"metrics_{name}") is not None]:
            raise ConfigurationError(f"--metrics-{given[0].replace('_', '-')} needs --metrics-port")
        return
    if modes and modes[0] != "serve":
        raise ConfigurationError(f"--metrics-port is for the launcher of a service, and --{modes[0]} starts none")
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"--metrics-port must be a number from 0 to 65535, not {port}")
    if options.metrics_address == "":
        raise ConfigurationError("--metrics-address needs the name or number of an address")
    try:
        require("prometheus_client", "metrics", "--metrics-port")
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(error)) from error


def exporter_of(
    options: argparse.Namespace, run_directory: str, undo: ExitStack
) -> tuple[list[Sidecar], str, dict[str, Any]]:
    """The exporter, if metrics are asked for; the line that says where they are; and what ``cs-ctl`` shows of them.
    ``undo`` closes its socket."""
    if options.metrics_port is None:
        return [], "", {}
    address = _LOOPBACK if options.metrics_address is None else options.metrics_address
    endpoint = undo.enter_context(
        Endpoint.open(address, options.metrics_port, options.metrics_token_file, run_directory)
    )
    shown = {"metrics": endpoint.url, "metrics_token_file": endpoint.token_file}
    return [endpoint.sidecar(run_directory)], f"\n{endpoint}", shown
