"""``cs-launch --plan``: says what a training would take on these machines, and trains nothing.

Here it is found out where the workers would run: Ray is asked for their places as for a training, and gets them back.
Then this process becomes another program, which runs the script up to its first step and prints the plan
(:mod:`central_storage.planning.network`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn
from urllib.parse import urlsplit

from central_storage.core.devices import device_names
from cs_proto.errors import ConfigurationError

from . import ray_options
from .affinity import core_count
from .packages import python_path

__all__ = ["add_arguments", "bits_of", "check", "plan"]

_OPTION = "--plan"
#: What is assumed if nobody says it, in bits a second.
ASSUMED = 10e9
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT])bit(?:/s)?")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--plan`` and ``--bandwidth``."""
    parser.add_argument(
        _OPTION,
        action="store_true",
        help="train nothing: run the script up to its first step, and say what would lie where, how many bytes a step "
        "sends, how long that takes, and whether an all-reduce would be faster; with --ray, --serve N or --devices",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="10Gbit",
        help=f"with {_OPTION}: the rate of the network card of this machine (default: 10Gbit is assumed)",
    )


def check(options: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raise ConfigurationError for options that do not fit. ``modes`` are the options by which no script is started."""
    if not options.plan:
        if options.bandwidth is not None:
            raise ConfigurationError(f"--bandwidth needs {_OPTION}")
        return
    if modes and modes[0] != "serve":
        raise ConfigurationError(f"{_OPTION} runs a script up to its first step, and --{modes[0]} runs none")
    if options.bandwidth is not None:
        bits_of(options.bandwidth)


def bits_of(text: str) -> float:
    """The bits a second that ``--bandwidth`` names. Raises ConfigurationError for what names none.

    >>> bits_of("10Gbit"), bits_of("2.5 Gbit/s"), bits_of("100Mbit")
    (10000000000.0, 2500000000.0, 100000000.0)
    """
    found = _RATE.fullmatch(text.strip())
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1e3 <= bits <= 1e15:
        raise ConfigurationError(
            f"--bandwidth takes bits a second, with kbit, Mbit, Gbit or Tbit, such as 10Gbit, not {text!r:.100}"
        )
    return bits


def plan(options: argparse.Namespace, script: Sequence[str]) -> NoReturn:
    """Find the places of the workers, and become the program that prints the plan for this script.

    Raises what Ray lacks or refuses, and DeviceError for devices that do not exist.
    """
    request: dict[str, Any] = {
        "script": list(script),
        "devices": options.devices,
        "parameter_device": options.parameter_device,
        "bits": ASSUMED if options.bandwidth is None else bits_of(options.bandwidth),
        "is_assumed": options.bandwidth is None,
        **_places(options),
    }
    if request["nodes"]:  # the workers name their devices when they join
        request["devices"] = ",".join(f"cpu:{worker}" for worker in range(len(request["nodes"])))
    chosen = device_names.compute_devices(request["devices"], core_count()) if request["devices"] else ["cpu:0"]
    device_names.parameter_device(options.parameter_device, chosen)
    path = python_path(os.environ)
    argv = [sys.executable, "-P", "-m", "central_storage.planning.network", json.dumps(request)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, argv, {**os.environ, **({"PYTHONPATH": path} if path else {})})


def _places(options: argparse.Namespace) -> dict[str, Any]:
    """The node of each worker by a name that only it has, its address, and that of this machine; no nodes if all would
    run here."""
    if options.ray is not None:
        with ExitStack() as undo:
            keys = undo.enter_context(tempfile.TemporaryDirectory(prefix="cs-plan-"))
            (placer,), _ = ray_options.placer_of(options, keys, undo)
            placed = placer.placed
        found = {"nodes": placed.ids, "addresses": placed.nodes, "head": placed.address, "cluster": str(placed)}
        launchers = ray_options.request_of(options).launchers()
        return found | {"is_shared": any(workers > 1 for _, workers in launchers)}
    if options.serve is not None:
        head = (urlsplit(options.listen).hostname or "") if options.listen else ""
        per_node = options.workers_per_node or 1
        machines = [f"machine {1 + worker // per_node}" for worker in range(options.serve)]
        found = {"nodes": machines, "addresses": ["elsewhere"] * options.serve, "head": head, "cluster": ""}
        return found | {"is_shared": per_node > 1}
    return {"nodes": [], "addresses": [], "head": "", "cluster": ""}
