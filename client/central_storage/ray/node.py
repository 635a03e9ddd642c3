"""The launcher of workers on a node of Ray: ``python -m central_storage.ray.node``. Its actor starts it.

It makes the keys of its node's workers, prints the public one, and waits until it is told, in a line of JSON, where the
service listens and which public key that has. Then it is what ``cs-launch --join tcp://ADDRESS:PORT`` is.
"""

from __future__ import annotations

import argparse
import json
import sys

from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from central_storage.launch.foreground import START_FAILED
from central_storage.launch.join_options import hold
from central_storage.launch.supervisor.mailboxes import mailboxes_by_default
from cs_proto.errors import CentralStorageError
from cs_proto.printable import printable
from cs_runtime.transport.curve import WorkerKeys, key_pair

__all__ = ["main"]

# Seconds in which the service must answer; it listens already.
_TIMEOUT = 20.0


def main(arguments: list[str] | None = None) -> int:
    """Run the workers until the service releases them; the exit code."""
    parser = argparse.ArgumentParser("python -m central_storage.ray.node", description=__doc__)
    parser.add_argument("--devices", required=True)
    options = parser.parse_args(arguments)
    configure_logging("supervisor")
    dump_stacks_on_signal()
    public, secret = key_pair()
    print(f"key {public.decode()}", flush=True)
    line = sys.stdin.readline()
    if not line:  # its actor has ended
        return START_FAILED
    told = json.loads(line)
    keys = WorkerKeys(f"{told['name']}.key_secret", public, secret, told["service_key"].encode())
    try:
        is_on = mailboxes_by_default() == "on"
        return hold(told["endpoint"], keys, options.devices, None, _TIMEOUT, mailboxes=is_on)
    except CentralStorageError as error:
        print(printable(f"cs-launch: error: {error}", lines=True), flush=True)
        return START_FAILED


if __name__ == "__main__":
    sys.exit(main())
