"""What all programs train: the model, the batches and the optimizers of each work, as plain torch.

A program makes a `Trainer`, and `obey` lets `models.py` command it over standard input and output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torch_models"))

from models import DLRM, GPT, ConvNet  # noqa: E402

BATCHES = 8  # different ones, which are used in turn

#: The shape of the recommender: 205 MB of tables, and twice as much of SparseAdam's state.
TABLES, HEIGHT, WIDTH = 8, 200_000, 32
CHARACTERS, LENGTH = 128, 128


@dataclass(frozen=True)
class Training:
    """A model to train. ``optimizers(module, of)`` makes its optimizers of the classes that ``of`` has, which is
    `torch.optim` or a module with the same names."""

    rows: int
    module: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    optimizers: Callable[..., list[torch.optim.Optimizer]]

    def made(self) -> nn.Module:
        """The module with the weights that every program begins with."""
        torch.manual_seed(0)
        return self.module()

    def batches(self) -> list[tuple[Tensor, ...]]:
        return [self.batch(torch.Generator().manual_seed(number)) for number in range(BATCHES)]


def _click_batch(random: torch.Generator) -> tuple[Tensor, ...]:
    categories = (torch.rand(1024, TABLES, generator=random) ** 4 * HEIGHT).long()
    return torch.rand(1024, 13, generator=random), categories, torch.rand(1024, generator=random).round()


def _click_loss(model: nn.Module, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(numbers, categories), clicks)


def _text_batch(random: torch.Generator) -> tuple[Tensor, ...]:
    text = torch.randint(CHARACTERS, (16, LENGTH + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _text_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _image_batch(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.rand(256, 1, 8, 8, generator=random), torch.randint(10, (256,), generator=random)


def _image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


TRAININGS = {
    "dlrm": Training(
        1024,
        lambda: DLRM(TABLES, HEIGHT, WIDTH),
        _click_batch,
        _click_loss,
        lambda model, of: [
            of.SparseAdam(model.tables.parameters(), lr=1e-2),
            of.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=1e-2),
        ],
    ),
    "gpt": Training(
        16,
        lambda: GPT(CHARACTERS, LENGTH),
        _text_batch,
        _text_loss,
        lambda model, of: [of.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)],
    ),
    "convnet": Training(
        256,
        lambda: ConvNet(dropout=0.25),
        _image_batch,
        _image_loss,
        lambda model, of: [of.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)],
    ),
}


class Trainer(Protocol):
    """A program that trains."""

    def run(self, steps: int) -> float:
        """Do so many steps. Return the loss of the last one, a mean over the rows of its batch."""


def obey(trainer: Trainer, speaks: bool = True) -> None:
    """Do what standard input says: for each line, a number of steps, print ``{"seconds": of a step, "loss": ...}``. The
    end of the input ends it."""
    print(json.dumps({"ready": True}), flush=True) if speaks else None
    for line in sys.stdin:
        begun = time.perf_counter()
        loss = trainer.run(int(line))
        seconds = (time.perf_counter() - begun) / int(line)
        if speaks:
            print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


class Alone:
    """The training in one process with torch alone; `of` says where its optimizers come from."""

    def __init__(self, training: Training, module: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> None:
        self.training, self.module, self.batches, self.done = training, module, batches, 0
        self.optimizers = training.optimizers(getattr(module, "module", module), torch.optim)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.training.loss(self.module, *self.batches[self.done % BATCHES])
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            shown = loss.item()
            self.done += 1
        return shown
