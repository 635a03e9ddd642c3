"""hogwild: two processes of one thread train one shared model without locks (Niu et al., 2011, "Hogwild!"), each on its
half of every batch. Each has its own optimizer, as in torch's example of it, so its state exists twice."""

from __future__ import annotations

import sys

import torch
import torch.multiprocessing as mp
from torch import nn

from model_peers.obeying import obey
from model_peers.training import TRAININGS, Alone, Training

PROCESSES = 2


def train(name: str, module: nn.Module, rank: int, commands, losses) -> None:
    torch.set_num_threads(1)
    training = TRAININGS[name]
    share = training.rows // PROCESSES
    halves = [tuple(part[rank * share :][:share] for part in batch) for batch in training.batches()]
    trainer = Alone(training, module, halves)
    while steps := commands.get():
        losses.put(trainer.run(steps))


class Hogwild:
    def __init__(self, name: str, training: Training) -> None:
        self.module = training.made()
        self.module.share_memory()
        context = mp.get_context("spawn")
        self.commands = [context.SimpleQueue() for _ in range(PROCESSES)]
        self.losses = context.SimpleQueue()
        self.processes = [
            context.Process(target=train, args=(name, self.module, rank, commands, self.losses))
            for rank, commands in enumerate(self.commands)
        ]
        for process in self.processes:
            process.start()

    def run(self, steps: int) -> float:
        for commands in self.commands:
            commands.put(steps)
        return sum(self.losses.get() for _ in self.commands) / PROCESSES

    def close(self) -> None:
        for commands in self.commands:
            commands.put(0)
        for process in self.processes:
            process.join()


if __name__ == "__main__":
    hogwild = Hogwild(sys.argv[1], TRAININGS[sys.argv[1]])
    obey(hogwild)
    hogwild.close()
