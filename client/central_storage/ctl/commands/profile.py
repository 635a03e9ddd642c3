"""Sample the steps of a running training, and say where their time goes."""

from __future__ import annotations

import argparse

from central_storage.ctl import printing
from central_storage.ctl.profile import as_json, lines, profile
from central_storage.ctl.services import choose

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say where the time of a training's steps goes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument("service", nargs="?", metavar="NAME", help="a name, a pid or a run directory")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="sample so many steps (default: 200)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="SECONDS", help="sample no longer than this (default: 5)"
    )


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 1: no step ended meanwhile."""
    found = profile(choose(options.service).path, options.steps, options.seconds)
    if options.json:
        printing.json_line(as_json(found))
    else:
        for text in lines(found):
            printing.line(text)
    return 0 if found.steps else 1
