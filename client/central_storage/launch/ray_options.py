"""The options of ``cs-launch`` that let Ray place the workers."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack

from central_storage.diagnostics.extras import require
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import with_changes
from cs_proto.messages import MOST_REPLICAS

from .placement import Request, resources_of
from .placer import Placer

__all__ = ["add_arguments", "check", "placer_of", "request_of"]

_OPTION = "--ray"
# The directory of the keys, in the run directory.
_KEYS = "ray-keys"
_CLUSTER = re.compile(r"auto|(?!local:)(\[[\w:.%]+\]|[\w.-]+):[0-9]{1,5}")
_PRETENDED = re.compile(r"local:[1-9][0-9]?")
_GROUP = re.compile(r"[0-9a-f]{36}")
_DEPENDENT = (
    "workers",
    "worker_resources",
    "workers_per_node",
    "spread",
    "ray_group",
    "runtime_env",
    "ray_without_token",
)
_ON_A_NODE = "the script must run on a node of the cluster: ray job submit --working-dir . -- cs-launch --ray auto ..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--ray`` and what belongs to it."""
    parser.add_argument(
        _OPTION,
        metavar="auto|ADDRESS|local:N",
        help="let Ray place the workers. auto: on the cluster that RAY_ADDRESS names or to which this machine belongs; "
        "HOST:PORT: on that cluster; local:N: on N pretend nodes on this machine, to try it (extra: ray)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help=f"with {_OPTION}: the number of workers")
    parser.add_argument(
        "--worker-resources",
        metavar="CPU=4,GPU=1",
        help=f"with {_OPTION}: what Ray reserves for each worker, under its own names (default: CPU=1)",
    )
    parser.add_argument(
        "--workers-per-node",
        type=int,
        metavar="K",
        help=f"with {_OPTION}: exactly K workers on each node (default: packed on as few nodes as possible); with "
        "--serve N --plan: K workers on each machine (default: one)",
    )
    parser.add_argument(
        "--spread", action="store_true", help=f"with {_OPTION}: spread the workers over as many nodes as possible"
    )
    parser.add_argument(
        "--ray-group",
        metavar="ID",
        help=f"with {_OPTION}: reserve nothing, and use what is free in the bundles of this placement group",
    )
    parser.add_argument(
        "--runtime-env",
        metavar="FILE",
        help=f"with {_OPTION}: a YAML file with Ray's runtime environment for the nodes: packages, variables",
    )
    parser.add_argument(
        "--ray-without-token",
        action="store_true",
        help=f"with {_OPTION}: use a cluster on a network also if everybody who reaches it may run code there",
    )


def check(options: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raise ConfigurationError for options that do not fit, also where Ray is missing. ``modes`` are the options by
    which no script is started."""
    if options.workers_per_node is not None and options.workers_per_node < 1:
        raise ConfigurationError(f"--workers-per-node must be at least 1, not {options.workers_per_node}")
    if options.ray is None:
        given = [name for name in _DEPENDENT if getattr(options, name) not in (None, False)]
        if given == ["workers_per_node"] and modes == ["serve"] and options.plan:
            return
        if given:
            raise ConfigurationError(f"--{given[0].replace('_', '-')} needs {_OPTION}")
        return
    if modes:
        raise ConfigurationError(f"{_OPTION} places the workers of a script, and --{modes[0]} runs none")
    if options.memory == "frames":
        raise ConfigurationError(f"{_OPTION} needs memory that the gateway can map; start it without --memory frames")
    for name in ("devices", "listen", "keys"):
        if getattr(options, name) is not None:
            why = (
                "Ray gives each worker its devices, by --worker-resources (CS_DEVICES counts as --devices)"
                if name == "devices"
                else "the run listens for its workers by itself, with keys of its own"
            )
            raise ConfigurationError(f"{_OPTION} does not go together with --{name}: {why}")
    if options.workers is None:
        raise ConfigurationError(f"{_OPTION} needs --workers N")
    if not 1 <= options.workers <= MOST_REPLICAS:
        raise ConfigurationError(f"--workers takes a number from 1 to {MOST_REPLICAS}, not {options.workers}")
    if options.workers_per_node is not None and options.spread:
        raise ConfigurationError("--spread and --workers-per-node exclude each other")
    if options.ray_group is not None:
        _check_group(options)
    try:
        require("ray", "ray", _OPTION)
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(error)) from error
    request_of(options)


def _check_group(options: argparse.Namespace) -> None:
    if not _GROUP.fullmatch(options.ray_group):
        raise ConfigurationError(
            f"--ray-group takes the ID of a placement group, 36 hexadecimal digits, not {options.ray_group!r:.100}"
        )
    if options.workers_per_node is not None or options.spread:
        given = "--spread" if options.spread else "--workers-per-node"
        raise ConfigurationError(f"--ray-group and {given} exclude each other: a placement group has its nodes already")


def placer_of(
    options: argparse.Namespace, run_directory: str, undo: ExitStack, owner: int | None = None
) -> tuple[list[Placer], str]:
    """The placer, if Ray is asked for workers, and the line that says where they have their places. From then on, the
    options say that the service listens for them at this node's address, with new keys below ``run_directory``.
    ``undo`` ends the placer. ``owner`` is a descriptor that is readable when nobody wants the workers any more.

    Raises ConfigurationError or LaunchError with what Ray lacks or refuses.
    """
    if options.ray is None:
        return [], ""
    import shutil  # late: as what follows, a supervisor that does not listen does not need it

    from cs_runtime.transport.curve import make_service_keys

    keys = os.path.join(run_directory, _KEYS)
    undo.callback(shutil.rmtree, keys, ignore_errors=True)
    shutil.rmtree(keys, ignore_errors=True)  # of a run that was killed
    os.mkdir(keys, 0o700)
    make_service_keys(keys)
    request = request_of(options)
    if request.runtime_env:  # for a placer that is started later, when that file may be another one
        copied = shutil.copy(request.runtime_env, os.path.join(keys, "runtime-env.yaml"))
        request = with_changes(request, runtime_env=copied)
    placer = Placer(request, keys)
    undo.callback(placer.close)
    placed = placer.place(owner)
    options.listen = f"tcp://{f'[{placed.address}]' if ':' in placed.address else placed.address}:0"
    options.keys = keys
    return [placer], f"\n{placed}"


def request_of(options: argparse.Namespace) -> Request:
    """What Ray is asked for. Raises ConfigurationError for an address, resources or a file that cannot be."""
    runtime_env = "" if options.runtime_env is None else os.path.abspath(options.runtime_env)
    if runtime_env and not os.path.isfile(runtime_env):
        raise ConfigurationError(f"--runtime-env: there is no file {runtime_env}")
    request = Request(
        _address(options.ray),
        options.workers,
        resources_of(options.worker_resources or "CPU=1", "--worker-resources"),
        options.workers_per_node,
        options.spread,
        runtime_env,
        options.start_timeout,
        options.ray_without_token,
        options.ray_group or "",
    )
    if request.pretend_nodes and request.group:
        raise ConfigurationError(f"{_OPTION} {request.address}: pretend nodes have no placement group {request.group}")
    if request.pretend_nodes and request.resources.get("GPU"):
        raise ConfigurationError(f"{_OPTION} {request.address}: pretend nodes have no GPUs; a cluster may have some")
    if request.pretend_nodes and len(request.bundles()) > request.pretend_nodes and request.per_node is not None:
        raise ConfigurationError(
            f"{request.workers} workers, {request.per_node} on each node, need {_OPTION} local:{len(request.bundles())}"
        )
    return request


def _address(said: str) -> str:
    address, source = said, f"{_OPTION} {said}"
    if said == "auto" and (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        address, source = named, f"RAY_ADDRESS={named}"
    if address.startswith("ray://"):
        raise ConfigurationError(f"{source:.200}: Ray Client would run the script outside of it, and {_ON_A_NODE}")
    is_pretended = said == address and _PRETENDED.fullmatch(address)
    if not is_pretended and not _CLUSTER.fullmatch(address):
        raise ConfigurationError(
            f"{source:.200} names no cluster: {_OPTION} takes auto, HOST:PORT of a cluster, or local:N for N pretend "
            "nodes (at most 99) on this machine"
        )
    return address
