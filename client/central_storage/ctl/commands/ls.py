"""List all services of this user.

Each line is a service: its name, its script, the script's pid, how long it has run, its replicas, the number of its
last step, steps a second now, what it does, and its run directory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from central_storage.ctl import printing, services
from central_storage.ctl.reading import Looker, Reading, as_json
from cs_proto.printable import counted

__all__ = ["HELP", "add_arguments", "run"]

HELP = "list all services of this user"

# The most services that are asked at the same time.
_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="for each answer (default: 3)")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`."""
    entries = services.find()
    # A stale one says so in its state, once: it is removed here.
    with ExitStack() as stack:
        lookers = [stack.enter_context(Looker(entry, options.timeout)) for entry in entries]
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        readings = list(pool.map(lambda looker: looker.look(memory=False), lookers))
    # One that has ended meanwhile has removed its directory, and is not left over.
    pairs = zip(entries, readings, strict=True)
    readings = [found for entry, found in pairs if found.state != "over" or os.path.lexists(entry.path)]
    if any(entry.is_stale for entry in entries):
        services.clean()
    if options.json:
        printing.json_line([_listed(reading) for reading in readings])
    elif not readings:
        print("no service runs")
    else:
        _print(readings)
    return 0


def _listed(reading: Reading) -> dict[str, Any]:
    """What ``status --json`` says, without what it takes long to read, and the nodes."""
    kept = {name: value for name, value in as_json(reading).items() if name not in ("processes", "events")}
    return {**kept, "nodes": _nodes(reading)}


def _print(readings: list[Reading]) -> None:
    rows = [
        (
            reading.name,
            reading.in_short,
            printing.plain(reading.step),
            printing.number(reading.rate),
            _places(reading),
            printing.plain(reading.pid),
            printing.age(None if reading.since is None else reading.time - reading.since),
            printing.plain(reading.script),
            reading.address,
        )
        for reading in readings
    ]
    columns = ("NAME", "STATE", "STEP", "STEPS/S", "DEVICES", "PID", "AGE", "SCRIPT", "ADDRESS")
    printing.table(columns, rows, right=("STEP", "STEPS/S", "PID", "AGE"), below=("SCRIPT", "ADDRESS"))


def _places(reading: Reading) -> str:
    """The devices of the replicas, or else their number; and on how many other machines they are."""
    places = _joined(reading.devices) or printing.plain(reading.replicas)
    nodes = _nodes(reading)
    return f"{places} on {counted(len(nodes), 'node')}" if nodes else places


def _joined(devices: Sequence[str]) -> str:
    """``cpu:0,cpu:1``, and ``cpu:0-11`` where more than two follow one another."""
    groups: list[list[str]] = []
    for device in devices:
        kind, _, number = device.partition(":")
        if groups and number.isdecimal() and groups[-1][-1] == f"{kind}:{int(number) - 1}":
            groups[-1].append(device)
        else:
            groups.append([device])
    return ",".join(
        f"{group[0]}-{group[-1].partition(':')[2]}" if len(group) > 2 else ",".join(group) for group in groups
    )


def _nodes(reading: Reading) -> list[str]:
    """The addresses of the other machines on which workers are, in order."""
    return sorted({each.node for each in reading.processes if each.node})
