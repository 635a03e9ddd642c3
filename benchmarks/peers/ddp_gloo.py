"""ddp-gloo: torch's DistributedDataParallel, two processes of one thread, all-reduce by gloo, fused optimizers.

Every process holds all variables and applies the rule to the mean of the gradients, so gradients are brought twice as
large where a sum is meant.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from program import Trial, main
from torch.nn.parallel import DistributedDataParallel
from works import REPLICAS, Apply, Digits, Embedding, Read, Work

from peers.torch_one_process import adagrad, network, optimizer_of, table_of, weights_of


class Given(torch.autograd.Function):
    """A loss whose gradient is there already: what is measured is what comes after the backward pass."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient.detach(), None


class Holder(torch.nn.Module):
    """A module of one parameter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return Given.apply(self.weight, gradient)


def parallel(module: torch.nn.Module) -> DistributedDataParallel:
    """With gradients born in the buckets that are reduced."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


class ApplyTrial:
    """Backward, all-reduce, fused step."""

    def __init__(self, work: Apply, steps: int) -> None:
        self.work, self.done = work, 0
        self.holder = parallel(Holder(torch.from_numpy(work.initial())))
        self.gradient = torch.from_numpy(work.gradient(dist.get_rank())) * REPLICAS
        self.optimizer = optimizer_of(work.rule, list(self.holder.parameters()))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.holder(self.gradient).backward()
            self.optimizer.step()
        self.done += steps
        dist.barrier()

    def check(self) -> None:
        self.work.check(self.holder.module.weight.detach().numpy(), self.done)


class ReadTrial:
    """Rank 0 broadcasts what it has."""

    def __init__(self, work: Read, steps: int) -> None:
        self.work = work
        self.variables = [torch.from_numpy(value) for value in work.initial()]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            works = [dist.broadcast(variable, 0, async_op=True) for variable in self.variables]
            for work in works:
                work.wait()
        dist.barrier()

    def check(self) -> None:
        for variable in self.variables:
            variable.add_(1 if dist.get_rank() == 0 else 5)
        self.run(1)
        self.work.check([variable.numpy() for variable in self.variables])


class DigitsTrial:
    """Each process has its half of every batch."""

    def __init__(self, work: Digits, steps: int) -> None:
        self.work, self.done, rank = work, 0, dist.get_rank()
        halves = [(x[rank * 128 :][:128], y[rank * 128 :][:128]) for x, y in work.batches()]
        self.batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in halves]
        self.layers = parallel(network(work))
        self.optimizer = optimizer_of("sgd", list(self.layers.parameters()))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = self.batches[self.done % len(self.batches)]
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.layers(x), y)
            loss.backward()
            self.optimizer.step()
            loss.item()
            self.done += 1
        dist.barrier()

    def check(self) -> None:
        self.work.check(weights_of(self.layers.module), self.done)


class EmbeddingTrial:
    """Sparse gradients, gathered by gloo."""

    def __init__(self, work: Embedding, steps: int) -> None:
        self.work, self.done, self.ids = work, 0, work.ids(steps)
        self.table = DistributedDataParallel(table_of(work))
        self.optimizer = adagrad(self.table)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            rows = self.table(torch.from_numpy(self.ids[self.done, dist.get_rank()]))
            rows.backward(REPLICAS * rows.detach())
            self.optimizer.step()
            self.done += 1
        dist.barrier()

    def check(self) -> None:
        self.work.check(self.table.module.weight.detach().numpy(), self.ids[: self.done])


TRIALS: dict[type[Work], Callable[..., Trial]] = {
    Apply: ApplyTrial,
    Read: ReadTrial,
    Digits: DigitsTrial,
    Embedding: EmbeddingTrial,
}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    yield TRIALS[type(work)](work, steps)


def start() -> int:
    """Be rank 0, and start the other: what torchrun does, without its time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(REPLICAS)}
    os.environ.update(shared | {"RANK": "0"})
    command = [sys.executable, "-m", "peers.ddp_gloo", *sys.argv[1:]]
    with subprocess.Popen(command, env=os.environ | {"RANK": "1"}) as other:
        be_rank()
    return other.returncode


def be_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(opened, is_speaker=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank()
    else:
        sys.exit(start())
