"""``cs-ctl profile``: where the time of the steps of a running training goes."""

from __future__ import annotations

import argparse
import json
import os
import sys

from central_storage.ctl.profile import as_json, lines, profile
from cs_proto.errors import ConfigurationError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "sample the steps of a running training, and say where their time goes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "address", nargs="?", default=os.environ.get("CS_ADDRESS"), help="the run directory (default: CS_ADDRESS)"
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="sample so many steps (default: 200)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="sample no longer than this (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the profile. Exit codes: 0, or 1 if no step ended meanwhile.

    Raises ConfigurationError without an address, and otherwise as :func:`central_storage.ctl.profile.profile` does.
    """
    if not options.address:
        raise ConfigurationError("profile needs the run directory of a service: strategy.address, or CS_ADDRESS")
    found = profile(options.address, options.steps, options.seconds)
    text = json.dumps(as_json(found), indent=2) if options.json else "\n".join(lines(found))
    sys.stdout.write(text + "\n")
    return 0 if found.steps else 1
