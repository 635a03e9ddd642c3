"""ray-ps: a parameter server in Ray, an actor that holds the variables, and an actor for each replica.

Arrays travel through Ray's object store, so workers map what the server put there; steps are chained by references, and
the script waits for what it needs alone. Rules are applied in one of two ways, ``numpy`` and ``torch``, whose
optimizers are fused.

It starts Ray on this machine, unless RAY_PS_NODES has the addresses of two nodes of a cluster: the first, whose port
follows a colon, is this one and has the server, and the other one has the workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from program import Trial, main
from works import REPLICAS, Apply, Digits, Embedding, Read, Work, loss_and_gradients

from peers import numpy_one_process

#: The addresses of the server's node and of the workers', where Ray has several.
NODES = ("", "")


class Server:
    """Owns the variables; what it returns is put into the object store."""

    def __init__(self, work: Work, way: str) -> None:
        self.work, self.is_torch = work, way == "torch"
        if isinstance(work, Embedding):
            self._own_table(work)
            return
        values = [work.initial()] if isinstance(work, Apply) else work.initial()
        if isinstance(work, Read):
            self.values = values
        elif self.is_torch:
            import torch

            from peers.torch_one_process import optimizer_of

            torch.set_num_threads(2)
            self.parameters = [torch.nn.Parameter(torch.from_numpy(value)) for value in values]
            rule = work.rule if isinstance(work, Apply) else "sgd"
            self.optimizer = optimizer_of(rule, self.parameters)
            self.values = [parameter.detach().numpy() for parameter in self.parameters]
        else:
            self.rules = [numpy_one_process.Rule(work.rule if isinstance(work, Apply) else "sgd", v) for v in values]
            self.values = values
        if not isinstance(work, Read):
            self.sums = [np.empty_like(value) for value in self.values]

    def _own_table(self, work: Embedding) -> None:
        if self.is_torch:
            import torch

            from peers.torch_one_process import adagrad, table_of

            torch.set_num_threads(2)
            self.module = table_of(work)
            self.optimizer = adagrad(self.module)
            self.table = self.module.weight.detach().numpy()
        else:
            self.sparse = numpy_one_process.SparseAdagrad(work.initial().copy())
            self.table = self.sparse.table

    def weights(self) -> list[np.ndarray]:
        """All variables, as they are now."""
        return self.values

    def apply(self, *gradients: list[np.ndarray]) -> list[np.ndarray]:
        """Sum the replicas' gradients, apply the rule, return all variables."""
        for total, parts in zip(self.sums, zip(*gradients, strict=True), strict=True):
            np.add(*parts, out=total)
        if self.is_torch:
            import torch

            for parameter, gradient in zip(self.parameters, self.sums, strict=True):
                parameter.grad = torch.from_numpy(gradient)
            self.optimizer.step()
        else:
            for rule, gradient in zip(self.rules, self.sums, strict=True):
                rule.apply(gradient)
        return self.values

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """These rows of the table."""
        return self.table[ids]

    def apply_rows(self, following: np.ndarray | None, *gradients: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
        """Apply (ids, gradient) of each replica; return the rows that each replica draws next."""
        ids = np.concatenate([ids for ids, _ in gradients])
        values = np.concatenate([value for _, value in gradients])
        if self.is_torch:
            import torch

            shape = self.table.shape
            weight = self.module.weight
            weight.grad = torch.sparse_coo_tensor(torch.from_numpy(ids)[None], torch.from_numpy(values), shape)
            self.optimizer.step()
        else:
            self.sparse.apply(ids, values)
        return [self.table[ids] for ids in following] if following is not None else []

    def add_one(self) -> None:
        """To every variable."""
        for value in self.values:
            value += 1

    def check(self, *result: Any) -> None:
        """Compare where the variables are, so that the table is not sent."""
        if isinstance(self.work, Embedding):
            self.work.check(self.table, *result)
        else:
            values = self.values[0] if isinstance(self.work, Apply) else self.values
            self.work.check(values, *result)


class Worker:
    """A replica."""

    def __init__(self, work: Work, replica: int) -> None:
        self.work, self.replica = work, replica
        if isinstance(work, Apply):
            self.gradient = work.gradient(replica)
        if isinstance(work, Digits):
            self.rows = len(work.batches()[0][1])
            mine = slice(replica * self.rows // REPLICAS, (replica + 1) * self.rows // REPLICAS)
            self.batches = [(x[mine], y[mine]) for x, y in work.batches()]
            self.gradients = [np.empty_like(value) for value in work.initial()]

    def bring(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        """The gradient, which is there already."""
        return [self.gradient]

    def read(self, weights: list[np.ndarray], is_checked: bool = False) -> None:
        """Have all variables."""
        if is_checked:
            self.work.check(weights)

    def train(self, number: int, weights: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
        """Loss and gradients of a batch."""
        x, y = self.batches[number % len(self.batches)]
        return loss_and_gradients(x, y, self.rows, weights, self.gradients), self.gradients

    def bring_rows(self, ids: np.ndarray, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of the rows is the rows."""
        return ids, rows[self.replica]


class RayTrial:
    """What all works have in common."""

    def __init__(self, work: Any, steps: int, way: str) -> None:
        self.work, self.done = work, 0
        of_server, of_workers = ({f"node:{node}": 1e-3} if node else {} for node in NODES)
        self.server = ray.remote(num_cpus=0, resources=of_server)(Server).remote(work, way)
        worker = ray.remote(num_cpus=0, resources=of_workers)(Worker)
        self.workers = [worker.remote(work, replica) for replica in range(REPLICAS)]
        if not isinstance(work, Embedding):
            self.weights = self.server.weights.remote()
            ray.wait([self.weights], fetch_local=False)

    def check(self) -> None:
        ray.get(self.server.check.remote(self.done))

    def close(self) -> None:
        """Leave the machine to the next."""
        for actor in (self.server, *self.workers):
            ray.kill(actor)


class ApplyTrial(RayTrial):
    """The loop of Ray's own example."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            gradients = [worker.bring.remote(self.weights) for worker in self.workers]
            self.weights = self.server.apply.remote(*gradients)
            ray.wait([self.weights], fetch_local=False)  # a chain of any length would fill the object store
        self.done += steps


class ReadTrial(RayTrial):
    """The server puts its variables, both workers map them."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            weights = self.server.weights.remote()
            ray.get([worker.read.remote(weights) for worker in self.workers])

    def check(self) -> None:
        ray.get(self.server.add_one.remote())
        weights = self.server.weights.remote()
        ray.get([worker.read.remote(weights, True) for worker in self.workers])


class DigitsTrial(RayTrial):
    """The losses come back beside the gradients."""

    def run(self, steps: int) -> None:
        losses = []
        for number in range(self.done, self.done + steps):
            pairs = [worker.train.options(num_returns=2).remote(number, self.weights) for worker in self.workers]
            self.weights = self.server.apply.remote(*(gradients for _, gradients in pairs))
            losses += [loss for loss, _ in pairs]
            if not self.work.is_ahead:
                ray.get([loss for loss, _ in pairs])
        ray.get([*losses, self.weights])
        self.done += steps


class EmbeddingTrial(RayTrial):
    """Only rows travel: the answer to gradients are the rows that come next."""

    def __init__(self, work: Embedding, steps: int, way: str) -> None:
        super().__init__(work, steps, way)
        self.ids = work.ids(steps)
        self.rows = [self.server.rows.remote(ids) for ids in self.ids[0]]
        self.rows = ray.put(ray.get(self.rows))

    def run(self, steps: int) -> None:
        for number in range(self.done, self.done + steps):
            following = self.ids[number + 1] if number + 1 < len(self.ids) else None
            drawn = zip(self.workers, self.ids[number], strict=True)
            gradients = [worker.bring_rows.remote(ids, self.rows) for worker, ids in drawn]
            self.rows = self.server.apply_rows.remote(following, *gradients)
        ray.get(self.rows)
        self.done += steps

    def check(self) -> None:
        ray.get(self.server.check.remote(self.ids[: self.done]))


TRIALS: dict[type[Work], Callable[..., Any]] = {
    Apply: ApplyTrial,
    Read: ReadTrial,
    Digits: DigitsTrial,
    Embedding: EmbeddingTrial,
}


@contextmanager
def opened(work: Work, steps: int, way: str = "numpy") -> Iterator[Trial]:
    trial = TRIALS[type(work)](work, steps, way)
    yield trial
    trial.close()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if "RAY_PS_NODES" in os.environ:
        address, node = os.environ["RAY_PS_NODES"].split()
        NODES = address.partition(":")[0], node
        ray.init(address, _node_ip_address=NODES[0], **quiet)
        while sum(each["Alive"] for each in ray.nodes()) < len(NODES):
            time.sleep(0.1)
    else:
        ray.init(include_dashboard=False, object_store_memory=6 << 30, **quiet)
    main(opened)
