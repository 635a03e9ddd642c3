"""ddp-gloo: torch's DistributedDataParallel, two processes of one thread, each with its half of every batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model_peers.obeying import obey
from model_peers.training import TRAININGS, Alone, Training

PROCESSES = 2


class Parallel(Alone):
    """A rank. The loss is the mean of all ranks, as users print it."""

    def __init__(self, training: Training) -> None:
        rank, share = dist.get_rank(), training.rows // PROCESSES
        halves = [tuple(part[rank * share :][:share] for part in batch) for batch in training.batches()]
        module = DistributedDataParallel(training.made(), gradient_as_bucket_view=not _has_tables(training))
        super().__init__(training, module, halves)

    def run(self, steps: int) -> float:
        loss = torch.tensor(super().run(steps))
        dist.all_reduce(loss)
        return float(loss) / PROCESSES


def _has_tables(training: Training) -> bool:
    return training is TRAININGS["dlrm"]  # their gradients are sparse and have no bucket


def start() -> int:
    """Be rank 0, and start the other, which gets the same commands."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES), "RANK": "0"})
    command = [sys.executable, "-m", "model_peers.ddp_gloo", *sys.argv[1:]]
    other = subprocess.Popen(command, env=os.environ | {"RANK": "1"}, stdin=subprocess.PIPE, text=True)
    with other:
        be_rank(other)
    return other.returncode


def be_rank(other: subprocess.Popen[str] | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel = Parallel(TRAININGS[sys.argv[1]])
    if other is None:
        obey(parallel, is_speaker=False)
    else:
        obey(_Told(parallel, other))
        other.stdin.close()
    dist.destroy_process_group()


class _Told:
    """Rank 0, which tells the other rank what to do."""

    def __init__(self, parallel: Parallel, other: subprocess.Popen[str]) -> None:
        self.parallel, self.other = parallel, other

    def run(self, steps: int) -> float:
        self.other.stdin.write(f"{steps}\n")
        self.other.stdin.flush()
        return self.parallel.run(steps)


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(None)
    else:
        sys.exit(start())
