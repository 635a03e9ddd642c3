"""Ray Train: every rank is a replica of one strategy, and the user's function runs once, where rank 0 is.

Each rank keeps the launcher of one worker, which joins the service beside rank 0 by TCP. Ray Train places and watches
the ranks, starts all of them again if one dies, and keeps the checkpoints. This module has all of Ray that is for
developers of trainers: ``DataParallelTrainer``.
"""

from __future__ import annotations

import copy
import inspect
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from central_storage.checkpoint.checkpoint import Checkpoint
from central_storage.data.dataset import Dataset
from cs_proto.errors import ConfigurationError, ContextError, InvalidArgumentError
from cs_proto.frozen import frozen
from cs_proto.messages import MOST_REPLICAS, PROTOCOL
from cs_proto.version import __version__

from .data import begin, check_size, in_order
from .head import Head
from .row_client import BLOCK_TIMEOUT, VARIABLE, check_timeout, rows
from .row_server import RowServer
from .seat import Seat
from .tickets import Tickets

__all__ = ["CentralStorageTrainer", "dataset_shard", "report", "restore", "row_numbers"]

_NAMESPACE = "central_storage"
# The name of the file of our checkpoint in the directory of Ray's, without its suffix.
_FILE = "central_storage"
# Ray kills the children of an actor that it ends. Ours end by themselves, and first remove what they have made.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}


class CentralStorageTrainer:
    """Trains with a strategy whose workers Ray Train places: one for each of its ranks. ::

        def train(config):
            strategy = cs.CentralStorageStrategy()
            ...
            report({"loss": loss}, checkpoint)

        trainer = CentralStorageTrainer(
            train,
            train_loop_config={"rate": 0.1},
            datasets={"train": ray.data.read_parquet("s3://bucket/train")},
            scaling_config=ray.train.ScalingConfig(num_workers=8, use_gpu=True),
            run_config=ray.train.RunConfig(storage_path="s3://bucket/runs"),
        )
        result = trainer.fit()

    Args:
        train_loop: The function that trains. It runs once, in the process of rank 0, and gets ``train_loop_config`` if
            it has a parameter.
        train_loop_config: What it gets; None is an empty dict.
        datasets: Data sets of Ray by name, for :func:`dataset_shard`.
        scaling_config: How many ranks there are, and what Ray reserves for each; a ``ray.train.ScalingConfig``. None:
            one.
        run_config: Where results and checkpoints go, and how often Ray starts the training again after a failure; a
            ``ray.train.RunConfig``.

    Raises:
        TypeError: ``train_loop`` is no function.
        ConfigurationError: The number of ranks is not one that a strategy has (a ValueError).
        ModuleNotFoundError: Ray Train is not installed (an ImportError).
    """

    def __init__(
        self,
        train_loop: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        datasets: Mapping[str, Any] | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
    ) -> None:
        if not callable(train_loop):
            raise TypeError(f"train_loop must be a function, not {train_loop!r:.200}")
        scaling = ray.train.ScalingConfig() if scaling_config is None else scaling_config
        ranks: object = scaling.num_workers
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_REPLICAS:
            raise ConfigurationError(
                f"num_workers of the ScalingConfig must be one number from 1 to {MOST_REPLICAS}, not {ranks!r:.100}: "
                "another number of replicas gives other results"
            )
        self._trainer = DataParallelTrainer(
            partial(_run, train_loop, frozenset(datasets or ())),
            train_loop_config=dict(train_loop_config or {}),
            scaling_config=scaling,
            run_config=_with_environment(run_config),
            datasets=dict(datasets or {}),
            dataset_config=ray.train.DataConfig(
                datasets_to_split=[], execution_options=in_order(ray.data.DataContext.get_current())
            ),
        )

    def fit(self) -> Any:
        """Train, and return Ray's ``Result``.

        Its ``metrics`` and ``checkpoint`` are those of the last :func:`report` with a checkpoint.

        Raises:
            ray.train.TrainingFailedError: The function has raised an error, or a rank has died, more often than the
                ``FailureConfig`` of the ``run_config`` allows. Its message has the traceback of the function's error,
                which is also in its ``worker_failures[0]``.
        """
        return self._trainer.fit()


@frozen
class _Table:
    """A data set that was executed. Ray drops its blocks and row servers when nothing refers to them here."""

    #: The number of its rows.
    count: int
    blocks: list[Any]
    servers: list[Any]


@frozen
class _Training:
    """The training in which the user's function runs."""

    head: Any
    #: A directory that ends with the service, whatever ends this process.
    drafts: str
    ranks: int
    datasets: frozenset[str]
    #: The name of the training for its row servers.
    name: str
    #: By the name of the data set.
    tables: dict[str, _Table]


#: In the process of rank 0, while the user's function runs.
_training: _Training | None = None
#: The actor that the process of rank 0 has made. It must live until all ranks have heard of the end, and so as long as
#: this process: Ray ends an actor as soon as its owner has no reference to it.
_head: Any = None


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | ray.train.Checkpoint | None = None) -> None:
    """Report metrics and a checkpoint to Ray Train, in the function of a :class:`CentralStorageTrainer`.

    All ranks report, and the call waits for them. Use it in place of ``ray.train.report``, for which the other ranks
    would never be ready. The checkpoint is written once, and is in the ``storage_path`` when the call returns.

    Args:
        metrics: Their values by name. Convert arrays to numbers.
        checkpoint: A ``cs.train.Checkpoint``, which :func:`restore` reads; or one of Ray, with files of your own.

    Raises:
        TypeError: An argument has another type.
        ContextError: Called anywhere else (a RuntimeError).
        CheckpointSaveError: The checkpoint could not be written (an OSError).
    """
    training = _inside("report")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict, not {metrics!r:.200}")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint | ray.train.Checkpoint):
        raise TypeError(
            f"checkpoint must be a central_storage.train.Checkpoint or a ray.train.Checkpoint, not {checkpoint!r:.200}"
        )
    if not isinstance(checkpoint, Checkpoint):
        _report(training, metrics, checkpoint)
        return
    with tempfile.TemporaryDirectory(dir=training.drafts) as directory:
        checkpoint.write(os.path.join(directory, _FILE))
        _report(training, metrics, ray.train.Checkpoint.from_directory(directory))


def _report(training: _Training, metrics: Mapping[str, Any], checkpoint: Any) -> None:
    ray.get(training.head.report.remote())
    ray.train.report(dict(metrics), checkpoint=checkpoint)


def restore(checkpoint: Checkpoint) -> bool:
    """Continue where Ray Train says: read ``checkpoint`` from the last one that was reported, if there is one.

    Call it in the function of a :class:`CentralStorageTrainer` when all variables are made, before the first step.

    Returns:
        Whether there was one: after a failure, or if the run was started before under the same name.

    Raises:
        TypeError: ``checkpoint`` has another type.
        ContextError: Called anywhere else (a RuntimeError).
        CheckpointError: As ``checkpoint.restore`` (a ValueError).
    """
    _inside("restore")
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"restore takes a central_storage.train.Checkpoint, not {checkpoint!r:.200}")
    found = ray.train.get_checkpoint()
    if found is None:
        return False
    with found.as_directory() as directory:
        checkpoint.read(os.path.join(directory, _FILE))
    return True


def dataset_shard(
    name: str = "train", *, batch_size: int, drop_remainder: bool = False, block_timeout: float = BLOCK_TIMEOUT
) -> Tickets:
    """The global batches of a data set of the trainer, in the order of its rows. ::

        batches = strategy.experimental_distribute_dataset(dataset_shard("train", batch_size=1024))

    All replicas share the data set: a strategy divides each batch among them. A replica gets a dict with an array for
    each column. In the script, a *ticket* stands for such an array, with its ``shape`` and ``dtype``; ``np.asarray``
    of it brings the rows to the script. Only tickets travel with a step: each replica brings its rows from Ray's object
    store on its own node, and the same ones if the step is repeated.

    The first call for a data set executes it, and its blocks stay in Ray's object store as long as the training.

    Args:
        name: Its name in the ``datasets`` of the :class:`CentralStorageTrainer`. It must give the same rows whenever
            it is read: give a seed to what is random in it.
        batch_size: The number of rows of a global batch.
        drop_remainder: Leave out the last batch if it is smaller.
        block_timeout: Seconds that Ray may take to bring the blocks of a step to a node; then the step fails.

    Returns:
        An iterable, for :meth:`experimental_distribute_dataset` of a strategy.

    Raises:
        TypeError: ``batch_size`` is no int, or ``block_timeout`` no number.
        InvalidArgumentError: There is no such data set, it has no rows, a column is no array, a batch has fewer rows
            than there are replicas, or ``block_timeout`` is not more than 0 (a ValueError).
        ContextError: Called anywhere else than in the function of a trainer (a RuntimeError).
    """
    training = _inside("dataset_shard")
    _check_name(training, name)
    check_size(batch_size, training.ranks)
    check_timeout(block_timeout)
    table = _table(training, name)
    first = rows(np.zeros(1, np.int64), name, block_timeout=block_timeout)
    return Tickets(name, table.count, first, batch_size, drop_remainder, block_timeout)


def row_numbers(name: str = "train") -> Dataset:
    """The numbers of the rows of a data set of the trainer, for replicas that get these rows by :func:`rows`. ::

        numbers = row_numbers("train").shuffle(1_000_000, seed=1).batch(1024)
        batches = strategy.experimental_distribute_dataset(numbers)

    It is :func:`dataset_shard` for rows in another order, in which the replica function asks for its rows itself.

    Args:
        name: Its name in the ``datasets`` of the :class:`CentralStorageTrainer`.

    Returns:
        The numbers from 0 on, as a ``cs.data.Dataset`` of scalars.

    Raises:
        InvalidArgumentError: There is no such data set, or it has no rows (a ValueError).
        ContextError: Called anywhere else than in the function of a trainer (a RuntimeError).
    """
    training = _inside("row_numbers")
    _check_name(training, name)
    return Dataset.range(_table(training, name).count)


def _table(training: _Training, name: str) -> _Table:
    """The data set, executed when it is first asked for, with a row server on each node of a rank."""
    if name not in training.tables:
        source = ray.train.get_dataset_shard(name)
        begin(source)
        bundles = [*source.materialize().iter_internal_ref_bundles()]
        blocks = [block for bundle in bundles for block in bundle.block_refs]
        counts = [block.num_rows for bundle in bundles for block in bundle.metadata]
        if not sum(counts):
            raise InvalidArgumentError(f"the data set {name!r:.100} has no rows")
        servers = [
            _new_actor(RowServer, node, max_restarts=-1).remote(f"{training.name}/{node}", name, blocks, counts)
            for node in ray.get(training.head.nodes.remote())
        ]
        ray.get([server.is_up.remote() for server in servers])
        training.tables[name] = _Table(sum(counts), blocks, servers)
    return training.tables[name]


def _check_name(training: _Training, name: str) -> None:
    if name not in training.datasets:
        names = ", ".join(sorted(training.datasets)) or "none"
        raise InvalidArgumentError(f"the trainer has no data set {name!r:.100}; its datasets: {names}")


def _inside(what: str) -> _Training:
    if _training is None:
        raise ContextError(
            f"{what} works only in the function of a CentralStorageTrainer, and not in what it gives to its replicas"
        )
    return _training


def _with_environment(run_config: ray.train.RunConfig | None) -> Any:
    """The user's run config, with what our processes need in the environment of the ranks."""
    changed = ray.train.RunConfig() if run_config is None else copy.copy(run_config)
    said = changed.worker_runtime_env or {}
    changed.worker_runtime_env = {**said, "env_vars": {**said.get("env_vars", {}), **_ENVIRONMENT}}
    return changed


# --- what the ranks do ------------------------------------------------------------------------------------------------


def _run(train_loop: Callable[..., Any], datasets: frozenset[str], config: dict[str, Any]) -> Any:
    """What Ray Train runs on every rank."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    if rank == 0:
        return _lead(train_loop, config, ranks, datasets)
    name, version, protocol = broadcast_from_rank_zero(None)
    _follow(rank, name, version, protocol)
    return None


def _lead(train_loop: Callable[..., Any], config: dict[str, Any], ranks: int, datasets: frozenset[str]) -> Any:
    """Rank 0: start the service, and run the user's function."""
    global _head, _training
    name = f"head-{secrets.token_hex(8)}"
    _head = head = _new_head(name)
    starting = head.serve.remote(ranks, ray.util.get_node_ip_address())
    broadcast_from_rank_zero((name, __version__, PROTOCOL))
    seat = Seat("worker-0", name, head, __version__, PROTOCOL)
    try:
        seat.take()
        os.environ["CS_ADDRESS"], drafts = ray.get(starting)
        os.environ[VARIABLE] = f"{name}/{ray.get_runtime_context().get_node_id()}"
        _training = _Training(head, drafts, ranks, datasets, name, {})
        return train_loop(config) if inspect.signature(train_loop).parameters else train_loop()
    finally:
        _training = None
        for variable in ("CS_ADDRESS", VARIABLE):
            os.environ.pop(variable, None)
        with suppress(ray.exceptions.RayError):  # it has died, which has ended the service, too
            ray.get(head.end.remote())
        seat.leave()


def _follow(rank: int, name: str, version: str, protocol: int) -> None:
    """Another rank: keep a worker, and report whenever rank 0 does."""
    head = ray.get_actor(name, namespace=_NAMESPACE)
    seat = Seat(f"worker-{rank}", name, head, version, protocol)
    try:
        seat.take()
        reports = 0
        while ray.get(head.after.remote(reports)):
            reports += 1
            ray.train.report({})
    finally:
        seat.leave()


def _new_head(name: str) -> Any:
    """The actor that keeps the service, on this node."""
    options = {"name": name, "namespace": _NAMESPACE, "max_concurrency": 2 * MOST_REPLICAS}
    environment = {"env_vars": _ENVIRONMENT}
    return _new_actor(Head, ray.get_runtime_context().get_node_id(), runtime_env=environment, **options).remote()


def _new_actor(kind: type, node: str, **options: Any) -> Any:
    """What makes an actor of this class, on this node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=there, **options)
