"""The actor that runs one worker, or several, on the node on which Ray has placed it.

Ray gets this module by value, because the node may lack the package or have another version of it, which is to be said
in a sentence. So it imports only what every Python has until the package was found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from typing import IO, Any

__all__ = ["Host"]

# Lines of a worker's launcher that are kept for the message about its end.
_KEPT_LINES = 20


class Host:
    """A node's side of a launcher of workers. Ray calls one method after the other, in the main thread of the actor's
    process, and the launcher ends with that thread."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._child: subprocess.Popen[str] | None = None

    def open(self, version: str, protocol: int, workers: int = 1, training: str = "") -> dict[str, Any]:
        """Start the launcher of so many workers, which makes its keys and waits. ``training`` is the name under which
        their replicas find rows of Ray Data.

        Returns its public key and this node's address, or under ``refused`` why this node cannot run a worker of a
        service with this version and protocol.
        """
        import ray

        where = {
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "auth_mode": os.environ.get("RAY_AUTH_MODE", ""),
        }
        try:
            from central_storage.launch.packages import python_path
            from central_storage.launch.parent_death import end_with_parent
            from cs_proto.messages import PROTOCOL
            from cs_proto.version import __version__
        except ImportError as error:
            return where | {
                "refused": f"has no central-storage for {sys.executable} ({error}); install it there, or name it in "
                "--runtime-env"
            }
        if (__version__, PROTOCOL) != (version, protocol):
            return where | {
                "refused": f"has central-storage {__version__} (protocol {PROTOCOL}), and this machine has {version} "
                f"(protocol {protocol}); install the same version on all nodes"
            }
        from central_storage.ray.row_client import VARIABLE

        path = python_path(os.environ)
        parent = os.getpid()
        gpus = len(ray.get_gpu_ids())
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "central_storage.ray.node", "--devices", _devices(gpus, workers)],
            env={
                **os.environ,
                **_threads(ray.get_runtime_context().get_assigned_resources().get("CPU", 0), workers),
                **({"PYTHONPATH": path} if path else {}),
                **({VARIABLE: f"{training}/{where['node']}"} if training else {}),
                **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),  # a CPU, whatever else the node has
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
        )
        output = self._output()
        lines: list[str] = []
        for line in output:
            if line.startswith("key "):
                return where | {"key": line.split()[1]}
            lines.append(line)
        why = f"exit code {self._child.wait()}: {''.join(lines)[-2000:]}"
        return where | {"refused": f"could not start a worker ({why})"}

    def run(self, name: str, endpoint: str, service_key: str) -> tuple[int, str]:
        """Let the worker join the service at ``endpoint``, which has this public key and knows that of the worker.

        Returns when the launcher of the worker has ended, with its exit code and its last lines.
        """
        assert self._child is not None
        assert self._child.stdin is not None
        told = {"name": name, "endpoint": endpoint, "service_key": service_key}
        last: deque[str] = deque(maxlen=_KEPT_LINES)
        try:
            self._child.stdin.write(f"{json.dumps(told)}\n")
            self._child.stdin.flush()
        except OSError:  # it has ended, and its last lines say why
            pass
        for line in self._output():
            print(line, end="", flush=True)  # into Ray's log of this actor
            last.append(line)
        return self._child.wait(), "".join(last).strip()

    def end(self) -> None:
        """End the launcher of the worker, if it runs; :meth:`run` then returns. For another thread than that of
        :meth:`run`."""
        if self._child is not None:
            self._child.terminate()

    def _output(self) -> IO[str]:
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout


def _threads(cpus: float, workers: int) -> dict[str, str]:
    """How many threads libraries use in each of several workers. Ray has said that of all processors of this actor,
    unless the user has said it."""
    if workers == 1 or os.environ.get("OMP_NUM_THREADS") != str(max(1, int(cpus))):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(cpus) // workers))}


def _devices(gpus: int, workers: int) -> str:
    """The devices of the workers: equal parts of so many GPUs, which Ray has given this actor, and which CUDA shows it
    as the first ones; else a processor each.

    >>> _devices(4, 2), _devices(0, 3)
    ('gpu:0+gpu:1,gpu:2+gpu:3', '3')
    """
    share = gpus // workers
    if not share:
        return str(workers)
    firsts = range(0, workers * share, share)
    return ",".join("+".join(f"gpu:{number}" for number in range(first, first + share)) for first in firsts)
