"""The options of ``cs-launch`` that admit observers from other machines, and ``cs-launch keys``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from cs_proto.errors import ConfigurationError

from .packages import python_path
from .plan import sidecar_command
from .sidecar import Sidecar, listen

__all__ = ["add_arguments", "check", "gateway_of", "keys"]

_OPTION = "--listen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--listen`` and ``--keys``."""
    parser.add_argument(
        _OPTION,
        metavar="tcp://ADDRESS:PORT",
        help="admit observers from other machines, which may only read: central_storage.connect('tcp://ADDRESS:PORT', "
        "keys=DIR); encrypted by CURVE; port 0: a free one, which is printed (default: nothing listens on a network)",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help=f"with {_OPTION}: the directory with the keys of the service and of those who may read, which cs-launch "
        "keys DIR makes",
    )


def check(options: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raise ConfigurationError for options that do not fit, and for keys that are missing or open to others. ``modes``
    are the options by which no script is started."""
    if options.listen is None:
        if options.keys is not None and not options.join:
            raise ConfigurationError(f"--keys needs {_OPTION} tcp://ADDRESS:PORT")
        return
    if modes and modes[0] != "serve":
        raise ConfigurationError(f"{_OPTION} is for the launcher of a service, and --{modes[0]} starts none")
    from cs_runtime.transport import curve  # late: a supervisor that does not listen needs no keys

    curve.check_endpoint(options.listen, _OPTION)
    if modes and options.memory == "frames":
        raise ConfigurationError(
            f"--{modes[0]} with {_OPTION} needs memory that the gateway can map; start it without --memory frames"
        )
    if options.keys is None:
        raise ConfigurationError(
            f"{_OPTION} needs --keys DIR: nothing listens on a network without keys; cs-launch keys DIR makes them"
        )
    curve.ServiceKeys.read(options.keys)


def gateway_of(
    options: argparse.Namespace, run_directory: str, undo: ExitStack
) -> tuple[list[Sidecar], str, dict[str, Any]]:
    """The gateway, if one is asked for; the line that says where it listens; and what ``cs-ctl`` shows of it. ``undo``
    closes its socket.

    Raises ConfigurationError for an address that this machine does not have, and LaunchError for a port that is in use.
    """
    if options.listen is None:
        return [], "", {}
    from cs_runtime.transport.curve import check_endpoint, is_every_network

    host, port = check_endpoint(options.listen, _OPTION)
    listener = undo.enter_context(
        listen(host, port, address_option=f"{_OPTION} {options.listen}", port_option=f"{_OPTION} {options.listen}")
    )
    found, chosen = listener.getsockname()[:2]
    if is_every_network(found):
        raise ConfigurationError(f"{_OPTION} {options.listen}: {host} means every network of this machine")
    address = f"tcp://{f'[{found}]' if ':' in found else found}:{chosen}"
    keys_directory = os.path.abspath(options.keys)
    command = sidecar_command(
        "central_storage.gateway",
        run_directory,
        (
            *("--keys", keys_directory, "--descriptor", str(listener.fileno())),
            *("--return-timeout", str(options.return_timeout)),
            *(("--workers",) if options.serve is not None else ()),
        ),
        os.environ,
        python=sys.executable,
        python_path=python_path(os.environ),
    )
    peers, missing = "observers", "observers of other machines get no answers"
    if options.serve is not None:
        peers, missing = "workers and observers", "workers and observers of other machines are cut off"
    sidecar = Sidecar("gateway", missing, command, listener)
    return [sidecar], f"\n{peers} on {address}, keys in {keys_directory}", {"listen": address}


def keys(arguments: Sequence[str]) -> int:
    """``cs-launch keys DIR [--observer NAME | --worker NAME [--places K]]``: make keys, and say which file is for whom.
    Returns the exit code."""
    parser = argparse.ArgumentParser(
        "cs-launch keys",
        description="Make the keys of a service that listens on a network, and of an observer that may read it or of a "
        "worker on another machine.",
        epilog=f"On the machine of the service: cs-launch {_OPTION} tcp://ADDRESS:PORT --keys DIR train.py. Copy "
        "service.key and the observer's .key_secret to a directory on the other machine, over a channel that you "
        "trust, and use central_storage.connect('tcp://ADDRESS:PORT', keys=THAT_DIRECTORY) there. Remove the "
        "observer's .key from DIR to admit it no more. Do the same with the files of a worker, and use cs-launch "
        "--join tcp://ADDRESS:PORT --keys THAT_DIRECTORY there.",
    )
    parser.add_argument("directory", metavar="DIR", help="a directory of yours; it is made if it does not exist")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument(
        "--observer", metavar="NAME", default="", help="make a key for one more observer, with this name in its files"
    )
    peer.add_argument(
        "--worker", metavar="NAME", help="make a key for another machine with workers, with this name in its files"
    )
    parser.add_argument(
        "--places",
        type=int,
        metavar="K",
        help="with --worker: that machine may run K workers, such as one for each of its GPUs (default: 1)",
    )
    options = parser.parse_args(arguments)
    if options.places is not None and options.worker is None:
        parser.error("--places needs --worker NAME")
    from cs_runtime.transport.curve import make_keys

    places = 1 if options.places is None else options.places
    for path in make_keys(options.directory, options.observer, worker=options.worker, places=places):
        print(path)
    return 0
