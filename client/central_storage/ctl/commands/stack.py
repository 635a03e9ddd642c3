"""Print the stacks of all threads of all processes of a service, those that are equal once.

Each process prints its stacks where cs-ctl reads them, and works on; also one that is deep in native code. Nothing is
attached to it.
"""

from __future__ import annotations

import argparse

from central_storage.ctl import printing
from central_storage.ctl.completing import add_service
from central_storage.ctl.reading import read
from central_storage.ctl.services import choose
from central_storage.ctl.stacks import Stack, collect, merged

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print the stacks of all processes at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    add_service(parser)
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each answer (default: 5)")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 4: no process has printed its stacks."""
    reading = read(choose(options.service), options.timeout)
    shown = [each for each in reading.processes if each.pid and each.state not in (None, "ended", "a thread")]
    found = collect([each.pid for each in shown], options.timeout)
    titles = {each.pid: f"{each.label} (pid {each.pid})" for each in shown}
    stacks = {pid: each for pid, each in found.items() if not isinstance(each, str)}
    missing = {titles[pid]: why for pid, why in found.items() if isinstance(why, str)}
    for each in reading.processes:
        if each.node:
            missing[f"{each.label} (pid {each.pid})"] = (
                f"runs on {each.node}; kill -USR1 of its processes makes them print their stacks there"
            )
    if options.json:
        threads = [_as_json(each.label, each.pid, stack) for each in shown for stack in stacks.get(each.pid, ())]
        printing.json_line({"threads": threads, "missing": missing})
    else:
        _print([(titles[pid], each) for pid, each in stacks.items()], missing)
    return 0 if stacks else 4


def _as_json(label: str, pid: int, stack: Stack) -> dict[str, object]:
    frames = [{"file": file, "line": line, "function": function} for file, line, function in stack.frames]
    return {"process": label, "pid": pid, "thread": stack.thread, "frames": frames}


def _print(stacks: list[tuple[str, list[Stack]]], missing: dict[str, str]) -> None:
    for labels, frames in merged(stacks):
        counts = {label: labels.count(label) for label in labels}
        names = [label + (f", {count} threads" if count > 1 else "") for label, count in counts.items()]
        printing.line(f"{'; '.join(names)}:")
        for file, line, function in frames:
            printing.line(f"  {file}:{line} in {function}" if line else f"  {file}")
        print()
    for title, why in missing.items():
        printing.line(f"{title}: {why}")
