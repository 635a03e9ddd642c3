"""The names of the two peers that every process has, and where server and workers listen.

The name of another peer is the identity of its socket. The supervisor hands out these names (``Introduce``). A name is
not empty and does not begin with a zero, so it is none of those here.

Nobody is told where to connect: the sockets of a run lie in its run directory, which only its user may enter.
"""

from __future__ import annotations

__all__ = ["HOLDER", "SERVER", "SUPERVISOR", "server_endpoint", "worker_endpoint"]

SERVER = b""
SUPERVISOR = b"\0s"
#: The replica whose worker holds the token of every merge_call, and connects to the other workers.
HOLDER = 0


def server_endpoint(run_directory: str) -> str:
    """Where the server listens.

    >>> server_endpoint("/run/cs")
    'ipc:///run/cs/server'
    """
    return f"ipc://{run_directory}/server"


def worker_endpoint(run_directory: str, replica: int, incarnation: int) -> str:
    """Where a worker listens.

    >>> worker_endpoint("/run/cs", 0, 2)
    'ipc:///run/cs/w0.2'
    """
    return f"ipc://{run_directory}/w{replica}.{incarnation}"
