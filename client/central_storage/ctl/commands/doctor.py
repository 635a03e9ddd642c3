"""Check this machine, and train over every transport for a second.

Each line is a finding: good, slower (trainings work, with less than elsewhere) or bad (a training may fail), with its
remedy below. The first training on a machine compiles kernels, which takes a minute or more. The text has no names of
users and hosts and can be pasted into a report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from central_storage.ctl import interrupts, printing, trials
from central_storage.launch import checks
from central_storage.launch.checks.finding import Finding
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import fields_of, frozen
from cs_proto.version import __version__

__all__ = ["HELP", "Report", "add_arguments", "run"]

HELP = "check this machine, and train over every transport"

_EPILOG = """\
exit codes:
  0    nothing is bad
  1    something is bad and needs its remedy
  2    invalid options
  130  Ctrl-C
"""


@frozen
class Report:
    """What ``--json`` prints: the fields of every :class:`Finding` and :class:`~central_storage.ctl.trials.Trial`."""

    version: str
    is_good: bool
    findings: tuple[dict[str, object], ...]
    trials: tuple[dict[str, object], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="start no service")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for the training over each transport (default: 60)",
    )


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 1: something is bad."""
    if not 0 < options.timeout < 1e6:
        raise ConfigurationError(
            f"--timeout is a number of seconds, more than 0 and less than 1e6, not {options.timeout:g}"
        )
    trials.remove_abandoned()
    found: list[Finding] = []

    def note(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            if not options.json:
                for text in checks.lines(finding):
                    printing.line(text)
                sys.stdout.flush()

    note(checks.findings())
    made = [] if options.quick else [_tried(transport, options.timeout) for transport in trials.transports()]
    note(trials.judged(made))
    report = Report(
        __version__,
        all(finding.level != "bad" for finding in found),
        tuple(map(_as_dict, found)),
        tuple(map(_as_dict, made)),
    )
    if options.json:
        printing.json_line(_as_dict(report))
    else:
        print(checks.summary(found))
    return 0 if report.is_good else 1


def _tried(transport: trials.Transport, timeout: float) -> trials.Trial:
    if sys.stderr.isatty():
        print(f"training over {transport.title} ...", file=sys.stderr)
    with interrupts.raising():
        return trials.attempt(transport, timeout)


def _as_dict(value: Finding | trials.Trial | Report) -> dict[str, object]:
    return {name: getattr(value, name) for name in fields_of(type(value))}
