"""``strategy.cluster_resolver``: where the processes of a training run, under TensorFlow's names.

TensorFlow's jobs are ``chief`` (the script), ``worker`` (one task for each replica) and ``ps`` (the parameter server:
the process with the variables). There is no resolver for a training on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from central_storage.core import context
from central_storage.core.backends import ControllerBackend
from central_storage.core.public_objects import Closed, presented
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Worker

__all__ = ["ClusterResolver", "ClusterSpec", "resolver_of"]

Job = Literal["chief", "worker", "ps"]


def resolver_of(backend: ControllerBackend) -> ClusterResolver | None:
    """The resolver of a service; None if all of its workers run on its machine. Raises ContextError in a worker of
    another machine, which does not know where the others are."""
    if not any(worker.node for worker in backend.workers):
        return None
    if context.is_worker():
        raise ContextError(
            "strategy.cluster_resolver answers in the script, and not in a worker; pass what the function needs of it "
            "as an argument"
        )
    return ClusterResolver(lambda: (backend.workers, backend.listens_at()))


@presented
class ClusterSpec(Closed):
    """The addresses of a training's processes at one moment, by job, as those of a ``tf.train.ClusterSpec``.

    >>> spec = ClusterSpec({"chief": ["10.0.0.4"], "worker": ["10.0.0.4", "10.0.0.7"], "ps": ["10.0.0.4:5600"]})
    >>> spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)
    (['chief', 'ps', 'worker'], 2, '10.0.0.7')
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]]) -> None:
        self._cluster = {job: list(cluster[job]) for job in sorted(cluster)}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._cluster)

    def as_dict(self) -> dict[str, list[str]]:
        """The addresses of each job, in the order of its tasks."""
        return {job: list(addresses) for job, addresses in self._cluster.items()}

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job. Raises InvalidArgumentError (a ValueError) if there is none of this name."""
        return len(self._of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The numbers of the tasks of a job, from 0. Raises as :meth:`num_tasks`."""
        return list(range(self.num_tasks(job_name)))

    def job_tasks(self, job_name: str) -> list[str]:
        """The addresses of a job. Raises as :meth:`num_tasks`."""
        return list(self._of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task. Raises InvalidArgumentError (a ValueError) if there is no such task."""
        addresses = self._of(job_name)
        if not 0 <= task_index < len(addresses):
            raise InvalidArgumentError(f"job {job_name!r} has no task {task_index!r}; it has {len(addresses)}")
        return addresses[task_index]

    def _of(self, job: str) -> list[str]:
        if job not in self._cluster:
            raise InvalidArgumentError(f"there is no job {job!r}; there are {', '.join(map(repr, self._cluster))}")
        return self._cluster[job]

    def __bool__(self) -> bool:
        return bool(self._cluster)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._cluster == other._cluster

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self._cluster!r})"


@presented
class ClusterResolver(Closed):
    """Where the processes of a training on several machines run, as TensorFlow's class of this name says it.

    Every call answers for the present moment: a worker that was replaced on another machine is there in the next one.
    Nothing listens at the address of a worker or of the script; workers connect to the address of ``ps``.
    """

    #: TensorFlow's name of the kind of cluster. It has none for this one.
    environment = ""
    #: How processes of different machines talk, as :meth:`master` says it.
    rpc_layer = "tcp"
    #: The script is the chief.
    task_type = "chief"
    #: The number of the script among the chiefs: it is the only one.
    task_id = 0

    def __init__(self, look: Callable[[], tuple[Sequence[Worker], str]]) -> None:
        """``look`` returns the workers in replica order, and where the service listens (``tcp://ADDRESS:PORT``)."""
        self._look = look

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the script (``chief``), the replicas (``worker``) and the variables (``ps``)."""
        workers, endpoint = self._look()
        listening = urlsplit(endpoint)
        host = listening.hostname or ""
        nodes = [worker.node or host for worker in workers]
        return ClusterSpec({"chief": [host], "worker": nodes, "ps": [listening.netloc]})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, behind ``tcp://`` or another ``rpc_layer``; without a task, where the service listens:
        observers on other machines connect there. Raises InvalidArgumentError (a ValueError) if there is no such
        task."""
        task = ("ps", 0) if task_type is None or task_id is None else (task_type, task_id)
        return f"{rpc_layer or self.rpc_layer}://{self.cluster_spec().task_address(*task)}"

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs of a worker, as ``{"GPU": 1}``; without a task, the most that a worker has. ``{}`` for
        CPUs, for the script and for the variables. ``config_proto`` is not used. Raises InvalidArgumentError (a
        ValueError) if there is no such task."""
        workers, _ = self._look()
        if task_type is not None and task_id is not None:
            self.cluster_spec().task_address(task_type, task_id)
            workers = [workers[task_id]] if task_type == "worker" else []
        gpus = max((worker.device.lower().count("gpu:") for worker in workers), default=0)
        return {"GPU": gpus} if gpus else {}

    def __repr__(self) -> str:
        return f"<ClusterResolver: {self.cluster_spec()!r}>"
