"""What the programs of torch train: the model, the batches and the optimizers of each work, as plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from model_peers.obeying import BATCHES, IS_SMALL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torch_models"))

from models import DLRM, GPT, ConvNet

#: The recommender: 333 MB of tables, as many as in the data set of Criteo, and twice as much of SparseAdam's state.
TABLES, HEIGHT, WIDTH, CLICKS = (3, 1000, 8, 64) if IS_SMALL else (26, 100_000, 32, 1024)
CHARACTERS, LENGTH, TEXTS = (32, 16, 4) if IS_SMALL else (128, 128, 16)
LAYERS, HIDDEN = (1, 32) if IS_SMALL else (4, 256)
IMAGES = 32 if IS_SMALL else 256


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
    categories = (torch.rand(CLICKS, TABLES, generator=random) ** 4 * HEIGHT).long()
    return torch.rand(CLICKS, 13, generator=random), categories, torch.rand(CLICKS, generator=random).round()


def _click_loss(model: nn.Module, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(numbers, categories), clicks)


def _text_batch(random: torch.Generator) -> tuple[Tensor, ...]:
    text = torch.randint(CHARACTERS, (TEXTS, LENGTH + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _text_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


def _image_batch(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.rand(IMAGES, 1, 8, 8, generator=random), torch.randint(10, (IMAGES,), generator=random)


def _image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


TRAININGS = {
    "dlrm": Training(
        CLICKS,
        lambda: DLRM(TABLES, HEIGHT, WIDTH),
        _click_batch,
        _click_loss,
        lambda model, of: [
            of.SparseAdam(model.tables.parameters(), lr=1e-2),
            of.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=1e-2),
        ],
    ),
    "gpt": Training(
        TEXTS,
        lambda: GPT(CHARACTERS, LENGTH, LAYERS, HIDDEN),
        _text_batch,
        _text_loss,
        lambda model, of: [of.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)],
    ),
    "convnet": Training(
        IMAGES,
        lambda: ConvNet(dropout=0.25),
        _image_batch,
        _image_loss,
        lambda model, of: [of.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)],
    ),
}


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
