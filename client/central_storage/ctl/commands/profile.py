"""Sample the steps of a running training, and say where their time goes."""

from __future__ import annotations

import argparse
import sys
import time

from central_storage.ctl import printing
from central_storage.ctl.completing import add_service
from central_storage.ctl.profile import as_json, check, lines, profile
from central_storage.ctl.reading import Looker
from central_storage.ctl.services import Entry, choose
from cs_proto.errors import ConfigurationError, NoAnswerError, ShutdownError
from cs_proto.printable import printable

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say where the time of a training's steps goes"

# Seconds between two looks at a service that is starting, and those that an answer may take.
_LOOK_EVERY, _TIMEOUT = 0.1, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    add_service(parser)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="sample so many steps (default: 200)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="SECONDS", help="sample no longer than this (default: 5)"
    )
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="for a service that is starting (default: 30)"
    )


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 1: no step ended meanwhile."""
    check(options.steps, options.seconds)
    if not 0 <= options.wait < 1e6:
        raise ConfigurationError(f"--wait is a number of seconds below 1e6, not {options.wait:g}")
    entry = choose(options.service)
    _await_start(entry, options.wait)
    found = profile(entry.path, options.steps, options.seconds)
    if options.json:
        printing.json_line(as_json(found))
    else:
        for text in lines(found):
            printing.line(text)
    return 0 if found.steps else 1


def _await_start(entry: Entry, seconds: float) -> None:
    """Wait until a service that is starting has started. Raises NoAnswerError after ``seconds`` and for a supervisor or
    a server that does not answer, and ShutdownError if it serves no more."""
    deadline = time.monotonic() + seconds
    is_said = False
    with Looker(entry, _TIMEOUT) as looker:
        while (reading := looker.look(memory=False)).state == "starting":
            awaited = f", and waits for {reading.waiting[0]}" if reading.waiting else ""
            if time.monotonic() >= deadline:
                raise NoAnswerError(
                    f"{entry.name} is still starting after {seconds:g} s{awaited}: cs-ctl logs {entry.name} may say "
                    "why; --wait SECONDS waits longer"
                )
            if not is_said:
                print(printable(f"{entry.name} is starting{awaited}"), file=sys.stderr)
                is_said = True
            time.sleep(_LOOK_EVERY)
    if reading.state == "silent" or (reading.state == "waiting" and reading.runs is None):
        raise NoAnswerError(f"the steps of {entry.name} cannot be seen: it waits for {'; '.join(reading.waiting)}")
    if reading.state in ("stopping", "failed", "over"):
        raise ShutdownError(f"{entry.name} makes no more steps; its state is: {reading.state}")
