"""Print the last lines of all processes of a service, each behind the name of its process.

The supervisor keeps the last 1,000 lines that server, workers and the supervisor itself have printed. The script prints
where it was started, so its lines are not among them. With --log-dir all lines are in files; status names the
directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from central_storage.ctl import printing
from central_storage.ctl.asking import Supervisor
from central_storage.ctl.completing import add_service
from central_storage.ctl.services import choose
from cs_proto.errors import ConfigurationError
from cs_proto.messages import LogLine

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print and follow what the processes of a service print"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    add_service(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with the lines that come")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N of the kept lines")
    parser.add_argument("-p", "--process", metavar="LABEL", help="only of this process: server, w0, w1, supervisor")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for the answer (default: 5)")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`."""
    if options.lines is not None and options.lines < 0:
        raise ConfigurationError(f"--lines must be a number from 0, not {options.lines}")
    entry = choose(options.service)
    label = options.process
    with Supervisor(entry.path, options.timeout) as supervisor:
        if label is not None:
            _check(supervisor, label)
        is_first = True
        for lines in supervisor.log(follow=options.follow):
            shown = [line for line in lines if label in (None, line.label)]
            if is_first and options.lines is not None:
                shown = shown[max(0, len(shown) - options.lines) :]
            _show(shown, as_json=options.json)
            is_first = False
    return 0


def _check(supervisor: Supervisor, label: str) -> None:
    processes = [f"w{each.rank}" if each.role == "worker" else "server" for each in supervisor.report().processes]
    if label not in (*processes, "supervisor"):
        raise ConfigurationError(f"there is no process {label!r}: {', '.join([*processes, 'supervisor'])}")


def _show(lines: Sequence[LogLine], *, as_json: bool) -> None:
    for line in lines:
        if as_json:
            print(json.dumps({"time": line.time, "process": line.label, "stream": line.stream, "text": line.text}))
        else:
            printing.line(f"[{line.label}] {line.text}")
    sys.stdout.flush()
