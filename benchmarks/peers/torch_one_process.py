"""torch-one-process: torch with its fused optimizers and all cores, one process; batches are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from program import Trial, main
from works import ACCUMULATOR, BETA_1, BETA_2, EPSILON, RATES, Apply, Digits, Embedding, Read, Work


def optimizer_of(rule: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The fused form of the rule."""
    if rule == "sgd":
        return torch.optim.SGD(parameters, RATES["sgd"], fused=True)
    return torch.optim.Adam(parameters, RATES["adam"], betas=(BETA_1, BETA_2), eps=EPSILON, fused=True)


def network(work: Digits) -> torch.nn.Sequential:
    """The digits' two layers with the work's weights."""
    w1, b1, w2, b2 = map(torch.from_numpy, work.initial())
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    with torch.no_grad():
        for parameter, value in zip(layers.parameters(), (w1.T, b1, w2.T, b2), strict=True):
            parameter.copy_(value)
    return layers


def weights_of(layers: torch.nn.Module) -> list:
    """The weights as the work has them."""
    return [
        parameter.detach().T.numpy() if parameter.ndim > 1 else parameter.detach().numpy()
        for parameter in layers.parameters()
    ]


def table_of(work: Embedding) -> torch.nn.Embedding:
    """The table as a module with sparse gradients."""
    return torch.nn.Embedding(work.rows, work.width, sparse=True, _weight=torch.from_numpy(work.initial().copy()))


def adagrad(table: torch.nn.Module) -> torch.optim.Optimizer:
    """torch has no fused Adagrad for sparse gradients."""
    return torch.optim.Adagrad(
        table.parameters(), RATES["adagrad"], initial_accumulator_value=ACCUMULATOR, eps=EPSILON, foreach=False
    )


class ApplyTrial:
    """The sum of both gradients lies in ``grad``."""

    def __init__(self, work: Apply, steps: int) -> None:
        self.work, self.done = work, 0
        self.weight = torch.nn.Parameter(torch.from_numpy(work.initial()))
        self.weight.grad = torch.from_numpy(work.gradients_sum())
        self.optimizer = optimizer_of(work.rule, [self.weight])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step()
        self.done += steps

    def check(self) -> None:
        self.work.check(self.weight.detach().numpy(), self.done)


class DigitsTrial:
    """The whole batch at once."""

    def __init__(self, work: Digits, steps: int) -> None:
        self.work, self.done = work, 0
        self.batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in work.batches()]
        self.layers = network(work)
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

    def check(self) -> None:
        self.work.check(weights_of(self.layers), self.done)


class EmbeddingTrial:
    """Sparse gradients."""

    def __init__(self, work: Embedding, steps: int) -> None:
        self.work, self.done, self.ids = work, 0, work.ids(steps)
        self.table = table_of(work)
        self.optimizer = adagrad(self.table)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            rows = self.table(torch.from_numpy(self.ids[self.done].ravel()))
            rows.backward(rows.detach())
            self.optimizer.step()
            self.done += 1

    def check(self) -> None:
        self.work.check(self.table.weight.detach().numpy(), self.ids[: self.done])


TRIALS: dict[type[Work], Callable[..., Trial]] = {Apply: ApplyTrial, Digits: DigitsTrial, Embedding: EmbeddingTrial}


@contextmanager
def opened(work: Work, steps: int) -> Iterator[Trial]:
    assert not isinstance(work, Read), "in one process there is nothing to read"
    yield TRIALS[type(work)](work, steps)


if __name__ == "__main__":
    main(opened)
