"""Show everything about one service: its processes, memory, rate, restarts and last events."""

from __future__ import annotations

import argparse

from central_storage.ctl import printing
from central_storage.ctl.processes import KINDS
from central_storage.ctl.reading import Looker, Process, Reading, as_json
from central_storage.ctl.services import choose
from cs_proto.printable import counted

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show everything about one service"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument("service", nargs="?", metavar="NAME", help="a name, a pid or a run directory")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each answer (default: 5)")


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 1: the service is not well; 4: its supervisor does not answer."""
    with Looker(choose(options.service), options.timeout) as looker:
        reading = looker.look()
    if options.json:
        printing.json_line(as_json(reading))
    else:
        _print(reading)
    if reading.state == "silent":
        return 4
    return 0 if reading.is_well else 1


def _print(reading: Reading) -> None:
    lines = {
        "service": f"{reading.name}  ({reading.address})",
        "script": _script(reading),
        "state": reading.in_words,
        "since": None
        if reading.since is None
        else f"{printing.clock(reading.since)}, {printing.age(reading.time - reading.since)} ago",
        "step": _steps(reading),
        "captured": _captured(reading),
        "not finite": reading.not_finite
        and f"the sum of gradients in {counted(reading.not_finite, 'commit')}, by overflow in {reading.overflowed}",
        "devices": ", ".join(reading.devices)
        + (f"; variables on {reading.parameter_device}" if reading.parameter_device else ""),
        "transport": _transport(reading),
        "variables": None
        if reading.variables is None
        else f"{reading.variables}: {printing.size(reading.parameter_nbytes)}, "
        f"slots {printing.size(reading.slot_nbytes)}, {counted(reading.commits or 0, 'commit')}",
        "memory": _memory(reading),
        "restarts": None if reading.restarts is None else f"{reading.restarts} of at most {reading.max_restarts}",
        "log files": reading.log_directory,
        "metrics": reading.metrics and f"{reading.metrics}, token in {reading.metrics_token_file}",
        "observers": reading.listen,
    }
    for name, text in lines.items():
        if text:
            printing.line(f"{name + ':':<11}{text}")
        for wait in reading.waiting[1:] if name == "state" else ():
            printing.line(f"{'':<11}and for {wait}")
    if reading.uncaptured:
        print("steps that were not captured:")
        for why, count in sorted(reading.uncaptured.items(), key=lambda pair: -pair[1]):
            printing.line(f"  {count:>8}  {why}")
    print()
    _print_processes(reading)
    if reading.events:
        print("\nlast events:")
        for event in reading.events:
            printing.line(f"  {printing.clock(event.time)}  {event.text}")


def _script(reading: Reading) -> str | None:
    if reading.script is None:
        return None
    who = {
        "launcher": "under cs-launch",
        "serve": "cs-launch",
        "notebook": "a notebook or prompt",
        "script": "plain Python",
    }
    where = f", in {reading.directory}" if reading.directory else ""
    return f"{reading.script}  ({who.get(reading.kind or '', 'all in one process')}{where})"


def _steps(reading: Reading) -> str | None:
    if reading.step is None:
        return None
    now, average = printing.number(reading.rate), printing.number(reading.average_rate)
    return f"{reading.step}; {now} steps/s now, {average} on average"


def _captured(reading: Reading) -> str | None:
    if reading.captured is None or not reading.runs:
        return None
    return f"{reading.captured} of {reading.runs} steps ({100 * reading.captured / reading.runs:.0f} %)"


def _transport(reading: Reading) -> str | None:
    if reading.transport is None:
        return None
    posted = reading.mailbox_messages
    return reading.transport + (f"; {posted} answers by mailbox" if posted else "")


def _memory(reading: Reading) -> str | None:
    private = sum(each.private_nbytes or 0 for each in reading.processes)
    shared = reading.shared_nbytes
    if shared is None:
        return None
    kinds = ", ".join(f"{name} {printing.size(shared[name])}" for name in KINDS if shared[name])
    return f"private {printing.size(private)}; shared {printing.size(sum(shared.values()))}" + (
        f" ({kinds})" if kinds else ""
    )


def _print_processes(reading: Reading) -> None:
    is_spread = any(each.node for each in reading.processes)
    columns = (
        "PROCESS",
        "PID",
        *(("NODE",) if is_spread else ()),
        "STATE",
        "DEVICE",
        "CPU",
        "PRIVATE",
        "SHARED",
        "RESTARTS",
        "WAITS FOR, OR WHY",
    )
    rows = [
        (
            f"{each.label}.{each.incarnation}" if each.incarnation else each.label,
            str(each.pid) if each.pid else "-",
            *((printing.plain(each.node),) if is_spread else ()),
            printing.plain(each.state),
            printing.plain(each.device),
            printing.age(each.cpu_seconds),
            printing.size(each.private_nbytes),
            _shared(each),
            str(each.restarts) if each.incarnation else "-",
            each.waits_for or (f"the one before: {each.cause}" if each.cause and each.state != "ended" else each.cause),
        )
        for each in reading.processes
    ]
    printing.table(columns, rows, right=("PID", "CPU", "PRIVATE", "SHARED", "RESTARTS"), below=columns[-1:])


def _shared(process: Process) -> str:
    return printing.size(None if process.shared_nbytes is None else sum(process.shared_nbytes.values()))
