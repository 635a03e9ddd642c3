"""Ray Train: every rank is a replica of one strategy, and the user's function runs where rank 0 is.

Each rank keeps the launcher of one worker, which joins the service beside rank 0 by TCP. Ray Train places and watches
the ranks, restarts all of them if one dies, and keeps the checkpoints.
"""

from __future__ import annotations

import inspect
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from central_storage.checkpoint.checkpoint import Checkpoint
from central_storage.launch.supervisor.restarts import WORKED_SECONDS, Restarts
from cs_proto.errors import ContextError, LaunchError
from cs_proto.frozen import frozen
from cs_proto.messages import PROTOCOL
from cs_proto.version import __version__

from .head import Head
from .host import Host

__all__ = ["CentralStorageTrainer", "report", "restore"]

_NAMESPACE = "central_storage"
_FILE = "state"
# Ray kills the children of an actor that it ends. Ours end by themselves, and first remove what they have made.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
# Seconds in which the launcher of a worker ends when the service has ended.
_END_TIMEOUT = 10.0


class CentralStorageTrainer:
    def __init__(
        self,
        train_loop: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
    ) -> None:
        run_config = run_config or ray.train.RunConfig()
        env = dict(run_config.worker_runtime_env or {})
        env["env_vars"] = {**env.get("env_vars", {}), **_ENVIRONMENT}
        run_config.worker_runtime_env = env
        self._trainer = DataParallelTrainer(
            partial(_run, train_loop),
            train_loop_config=None if train_loop_config is None else dict(train_loop_config),
            scaling_config=scaling_config,
            run_config=run_config,
        )

    def fit(self) -> Any:
        return self._trainer.fit()


@frozen
class _Training:
    """What the user's function is in, while it runs."""

    head: Any
    workers: int


_training: _Training | None = None


def report(metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    training = _inside("report")
    with tempfile.TemporaryDirectory(prefix="cs-checkpoint-") as directory:
        kept = None
        if isinstance(checkpoint, Checkpoint):
            checkpoint.write(os.path.join(directory, _FILE))
            kept = ray.train.Checkpoint.from_directory(directory)
        ray.get(training.head.report.remote())
        ray.train.report(dict(metrics), checkpoint=kept)


def restore(checkpoint: Checkpoint) -> bool:
    _inside("restore")
    found = ray.train.get_checkpoint()
    if found is None:
        return False
    with found.as_directory() as directory:
        checkpoint.read(os.path.join(directory, _FILE))
    return True


def _inside(what: str) -> _Training:
    if _training is None:
        raise ContextError(f"{what} outside")
    return _training


def _run(train_loop: Callable[..., Any], config: dict[str, Any]) -> None:
    """What every rank does."""
    global _training
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    address = ray.util.get_node_ip_address()
    head = None
    said = None
    if rank == 0:
        name = f"head-{secrets.token_hex(8)}"
        head = _new_head(name)
        directory = ray.get(head.serve.remote(workers, address))
        said = [name, __version__, PROTOCOL]
    name, version, protocol = broadcast_from_rank_zero(said)
    head = head or ray.get_actor(name, namespace=_NAMESPACE)
    seat = _Seat(f"worker-{rank}", head, version, protocol)
    try:
        seat.sit()
        if rank == 0:
            _training = _Training(head, workers)
            os.environ["CS_ADDRESS"] = directory
            try:
                if inspect.signature(train_loop).parameters:
                    train_loop(config)
                else:
                    train_loop()
            finally:
                _training = None
                os.environ.pop("CS_ADDRESS")
                ray.get(head.end.remote())
        else:
            count = 0
            while ray.get(head.after.remote(count)):
                count += 1
                ray.train.report({})
    finally:
        seat.leave()


def _new_head(name: str) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(Head)
        .options(
            name=name,
            namespace=_NAMESPACE,
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=here,
            runtime_env={"env_vars": _ENVIRONMENT},
        )
        .remote()
    )


class _Seat:
    """The place of a rank's worker, which a thread keeps: the worker's launcher ends with that thread."""

    def __init__(self, name: str, head: Any, version: str, protocol: int) -> None:
        self._name, self._head, self._version, self._protocol = name, head, version, protocol
        self._host = Host()
        self._is_over = threading.Event()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._keep, name="central-storage-seat", daemon=True)

    def sit(self) -> None:
        self._thread.start()
        self._opened.result()

    def leave(self) -> None:
        self._is_over.set()
        self._thread.join(_END_TIMEOUT)
        self._host.end()
        self._thread.join()

    def _keep(self) -> None:
        restarts = Restarts(1 << 30)
        while not self._is_over.is_set():
            try:
                said = self._host.open(self._version, self._protocol)
                if "refused" in said:
                    raise LaunchError(f"the node {said['address']} {said['refused']}")
                endpoint, key = ray.get(self._head.admit.remote(self._name, said["key"]))
            except BaseException as error:
                if not self._opened.done():
                    self._opened.set_exception(error)
                    return
                raise
            if not self._opened.done():
                self._opened.set_result(None)
            self._host.run(self._name, endpoint, key)
            self._is_over.wait(restarts.next(self._name, has_worked=False) or 0.0)
