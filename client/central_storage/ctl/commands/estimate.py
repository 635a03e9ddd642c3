"""Estimate the memory of a training before it trains: run its script up to the first step, and add up what it planned.

No service is started and no variable is allocated. But the script runs: it reads its data, and writes what it writes
before its first step. A checkpoint that it would save is not written; the script ends there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from central_storage.ctl import interrupts, printing
from central_storage.ctl.cli import FOUND, GOOD, SCRIPT_FAILED
from central_storage.ctl.extras import complete_files
from cs_proto.errors import ConfigurationError, DeviceError
from cs_proto.printable import counted
from cs_runtime import machine

__all__ = ["HELP", "add_arguments", "run"]

HELP = "estimate the memory of a training before it trains"

_KINDS = ("parameters", "slots", "gradients", "arenas", "other")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    parser.add_argument(
        "--devices", metavar="LIST", help="as of cs-launch: another number of replicas, or other devices"
    )
    parser.add_argument("--parameter-device", metavar="DEVICE", help="as of cs-launch: the device of the variables")
    parser.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="as if every optimizer were of this class, such as Adam, Lion or torch.AdamW, with its default arguments",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    script = parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [arguments]", help="the script")
    complete_files(script)


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 0: it fits; 1: it does not; 5: the script failed before its first
    step."""
    from central_storage.planning import estimate  # it imports NumPy, of which nothing else here has need

    arguments = _arguments(options)
    rule = None if options.optimizer is None else estimate.rule_of_class(options.optimizer)
    _check_devices(options.devices, options.parameter_device)
    print(
        f"[cs-ctl] {' '.join(arguments)} runs up to its first step, with all that it does before; its output follows",
        file=sys.stderr,
    )
    with interrupts.raising():  # it ends the script
        outcome = estimate.tried(arguments, options.devices, options.parameter_device)
    failed = outcome.reason in (None, "end") and outcome.code != 0
    if outcome.reason is None and not failed:
        raise ConfigurationError(
            f"{arguments[0]} has ended and has made no CentralStorageStrategy, so there is nothing to estimate"
        )
    notes = _notes(outcome)
    reports = [_report(each) for each in estimate.estimates(outcome, rule)]
    total = machine.total_nbytes()
    group = min((limit for limit, _, _ in machine.group_limits()), default=None)
    needed = sum(each["nbytes"] for each in reports)
    most = max(needed, sum(each["start_nbytes"] for each in reports))
    available = min((each["available_nbytes"] for each in reports), default=machine.available_nbytes())
    verdicts = _verdicts(reports, most, available)
    found: dict[str, Any] = {
        "script": " ".join(arguments),
        "reason": outcome.reason,
        "exit_code": outcome.code,
        "fits": not verdicts and not failed,
        "machine_nbytes": total,
        "group_nbytes": group,
        "available_nbytes": available,
        "nbytes": needed,
        "strategies": reports,
        "misfits": verdicts,
        "notes": notes,
    }
    if options.json:
        printing.json_line(found)
    else:
        _print(found)
    if failed:
        print(f"[cs-ctl] the script failed before its first step (exit code {outcome.code})", file=sys.stderr)
        return SCRIPT_FAILED
    return FOUND if verdicts else GOOD


def _arguments(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        if not options.module:
            raise ConfigurationError("-m needs the name of a module")
        return ["-m", *options.module]
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not script:
        raise ConfigurationError("no script was given: cs-ctl estimate [options] script.py [arguments]")
    if not Path(script[0]).exists():
        raise ConfigurationError(f"there is no script {script[0]!r} in {Path.cwd()}")
    return list(script)


def _check_devices(devices: str | None, parameter_device: str | None) -> None:
    from central_storage.core.devices import device_names
    from central_storage.launch.affinity import core_count

    try:
        chosen = device_names.compute_devices(devices, core_count())
        device_names.parameter_device(parameter_device, chosen)
    except DeviceError as error:
        raise ConfigurationError(str(error)) from error


def _report(estimate: Any) -> dict[str, Any]:
    plan = estimate.plan
    return {
        "devices": list(plan.devices),
        "parameter_device": plan.parameter_device,
        "variables": plan.variables,
        "optimizers": estimate.optimizers,
        "nbytes": plan.nbytes,
        "start_nbytes": estimate.start,
        "by_kind": plan.by_kind,
        "by_process": plan.by_process,
        "sparse_nbytes": plan.sparse,
        "gpu_nbytes": plan.on_gpu,
        "gpu_free_nbytes": _gpu_free(plan.parameter_device) if plan.on_gpu else None,
        "is_upper_bound": plan.is_upper_bound,
        "available_nbytes": estimate.available,
    }


def _gpu_free(device: str) -> int | None:
    """The memory of a GPU; None if nvidia-smi does not say it."""
    from central_storage.diagnostics.gpu_inventory import visible_gpus
    from central_storage.launch.gpu_usage import free_nbytes

    gpus, number = visible_gpus(), int(device[4:])
    return free_nbytes().get(gpus[number].uuid) if number < len(gpus) else None


def _verdicts(reports: Sequence[dict[str, Any]], needed: int, available: int) -> list[str]:
    """What does not fit, in words."""
    found = []
    if needed > available:
        largest = max(_KINDS, key=lambda kind: sum(each["by_kind"][kind] for each in reports))
        found.append(
            f"{printing.size(needed)} are needed, {printing.size(available)} of the machine's memory are available; "
            f"the largest part is {largest}. Use fewer replicas, an optimizer with fewer slots, sparse=True for "
            "tables that get sparse gradients, or a machine with more memory"
        )
    for each in reports:
        free = each["gpu_free_nbytes"]
        if free is not None and each["gpu_nbytes"] > free:
            found.append(
                f"{printing.size(each['gpu_nbytes'])} are planned on {each['parameter_device']}, which has "
                f"{printing.size(free)} free; keep the variables in the machine's memory (--parameter-device cpu:0)"
            )
    return found


def _notes(outcome: Any) -> list[str]:
    """What the numbers leave out."""
    notes = ["results over 64 KiB, sparse gradients, and what libraries and the replica function allocate themselves"]
    if outcome.reason == "end":
        notes.append("no step came: the script ended by itself, and this is what it had planned until then")
    elif outcome.reason == "save":
        notes.append("no step came before a checkpoint was to be saved, which was not written")
    if outcome.was_killed:
        notes.append("the script went on after its first step and was ended")
    return notes


def _print(found: dict[str, Any]) -> None:
    for each in found["strategies"]:
        where = f"{', '.join(each['devices'])}; variables on {each['parameter_device']}"
        printing.line(f"{counted(each['variables'], 'variable')}, {counted(each['optimizers'], 'optimizer')}; {where}")
        columns = ("PROCESS", *map(str.upper, _KINDS), "ALL")
        rows = [
            (process, *(printing.size(kinds[kind]) if kinds[kind] else "-" for kind in _KINDS), _sum(kinds))
            for process, kinds in [*each["by_process"].items(), ("all", each["by_kind"])]
        ]
        printing.table(columns, rows, right=columns[1:])
        if each["start_nbytes"] > each["nbytes"]:
            printing.line(
                f"at the start {printing.size(each['start_nbytes'])}: the largest initial value is there twice"
            )
        if each["sparse_nbytes"]:
            printing.line(f"up to {printing.size(each['sparse_nbytes'])} of it only where rows of tables are used")
        if each["is_upper_bound"]:
            printing.line("the slots are an upper bound: only a step says which optimizer updates which variable")
        if each["gpu_nbytes"]:
            free = each["gpu_free_nbytes"]
            has = "what it has is not known" if free is None else f"{printing.size(free)} are free there"
            printing.line(f"{printing.size(each['gpu_nbytes'])} of it also on {each['parameter_device']}; {has}")
        print()
    for note in found["notes"][1:]:
        printing.line(note)
    if not found["strategies"]:
        return
    printing.line(f"not counted: {found['notes'][0]}")
    printing.line(_memory(found))
    for verdict in found["misfits"]:
        printing.line(f"does not fit: {verdict}")
    if found["fits"]:
        printing.line(f"fits: {printing.size(found['nbytes'])} planned")


def _memory(found: dict[str, Any]) -> str:
    group = found["group_nbytes"]
    limit = "no limit by a control group" if group is None else f"the control group allows {printing.size(group)}"
    return (
        f"memory: the machine has {printing.size(found['machine_nbytes'])}, {limit}; "
        f"{printing.size(found['available_nbytes'])} available beside the script"
    )


def _sum(kinds: dict[str, int]) -> str:
    return printing.size(sum(kinds.values()))
