"""The connection of a run's placer to Ray: to a cluster that is there, or to one of pretend nodes that it starts.

What Ray refuses becomes one of our errors here, in a sentence that names the remedy.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from central_storage.launch.placement import Request
from cs_proto.errors import ConfigurationError, LaunchError

__all__ = ["connected"]

# Seconds in which a cluster's port must accept a connection.
_CONNECT_TIMEOUT = 5.0
# The least that Ray takes. Nothing of ours is put there.
_OBJECT_STORE_NBYTES = 80 << 20
# Ray kills the children of an actor that it ends. Ours end by themselves, and first remove what they have made.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
# Of the head of pretend nodes: nobody asks for more nodes, and nobody reads what its processes print.
_OF_HEAD = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
_LOOPBACK = "127.0.0.1"
_FAILURES = (ConnectionError, OSError, RuntimeError, ValueError, TypeError, ray.exceptions.RayError)


@contextmanager
def connected(request: Request) -> Iterator[str]:
    """A connection to Ray for the length of a block; the address of this node, as Ray knows it.

    Raises LaunchError where there is no cluster, or where it refuses, and ConfigurationError for a runtime environment
    that Ray does not take.
    """
    runtime_env = _runtime_env(request)
    if request.pretend_nodes:
        with _pretending(request) as address:
            yield from _used(request, address, runtime_env)
    else:
        if request.address != "auto":
            _knock(request.address)
        yield from _used(request, request.address, runtime_env)


def _used(request: Request, address: str, runtime_env: dict[str, Any]) -> Iterator[str]:
    try:
        ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.ERROR)
    except _FAILURES as error:
        raise LaunchError(_why_not(request, error)) from error
    try:
        yield ray.util.get_node_ip_address()
    finally:
        ray.shutdown()


@contextmanager
def _pretending(request: Request) -> Iterator[str]:
    """A cluster of pretend nodes for the length of a block, on loopback; its address. Its processes end with this
    one, whatever ends it."""
    from ray.cluster_utils import Cluster  # its module starts Ray's own services, which a real cluster has already

    directory = tempfile.mkdtemp(prefix="cs-ray-", dir="/tmp")  # a short path, for Ray's sockets
    os.environ["RAY_TMPDIR"] = directory  # also of the file that names the cluster for others on this machine
    # Ray would start a process for each processor, and use none: our actors have an environment of their own.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 - Ray's spelling
    has = request.pretend_resources()
    cpus, memory = has.pop("CPU", 0), has.pop("memory", None)
    node: dict[str, Any] = {
        "num_cpus": cpus,
        "resources": has,
        "object_store_memory": _OBJECT_STORE_NBYTES,
        "node_ip_address": _LOOPBACK,
        **({} if memory is None else {"memory": memory}),
    }
    cluster = None
    try:
        try:
            cluster = Cluster(initialize_head=True, head_node_args={**node, **_OF_HEAD})
            for _ in range(request.pretend_nodes - 1):
                cluster.add_node(**node)
        except _FAILURES as error:
            raise LaunchError(f"pretend nodes of Ray could not be started: {_first(error)}") from error
        yield cluster.address
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _runtime_env(request: Request) -> dict[str, Any]:
    """What the file says, and what our actors need."""
    said: Any = {}
    if request.runtime_env:
        import yaml  # Ray needs it, too

        try:
            said = yaml.safe_load(Path(request.runtime_env).read_text()) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigurationError(f"the file of --runtime-env cannot be read: {error}") from error
    variables = said.get("env_vars", {}) if isinstance(said, dict) else None
    if not isinstance(variables, dict):
        raise ConfigurationError(
            "the file of --runtime-env holds no runtime environment of Ray, which has names such as pip, "
            "working_dir and env_vars, with their values"
        )
    return {**said, "env_vars": {**variables, **_ENVIRONMENT}}


def _knock(address: str) -> None:
    """See that something listens there: Ray would try for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise LaunchError(
            f"there is no Ray cluster at {address} ({said}); ray status shows whether one runs, and cs-launch --ray "
            "local:3 starts pretend nodes on this machine"
        ) from error


def _why_not(request: Request, error: BaseException) -> str:
    """What Ray has said, and the remedy."""
    said = _first(error)
    if isinstance(error, ConnectionError) and request.address == "auto":
        return (
            f"this machine belongs to no Ray cluster: {said}; ray start joins one, RAY_ADDRESS names one, and "
            "cs-launch --ray local:3 starts pretend nodes on this machine"
        )
    why = f"Ray ({request.address}) does not take this process as a driver: {said}"
    if isinstance(error, ConnectionError | ray.exceptions.AuthenticationError):  # something listens there
        why += (
            "; if it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token to "
            "what ray get-auth-token prints on the head of the cluster"
        )
    return why


def _first(error: BaseException) -> str:
    """The first line of what an error says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
