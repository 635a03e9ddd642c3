"""A user's file over central_storage.torch, which must pass mypy --strict and pyright. It is not run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import central_storage as cs
import central_storage.torch as cst


class Net(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.line = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.line(x)
        return rows


def train(strategy: cs.CentralStorageStrategy, data: torch.utils.data.Dataset[Any], path: str) -> float:
    with strategy.scope():
        model: Net = cst.centralize(Net(), buffers="mean", sync_batchnorm=True)
    made: Net = cst.centralize(lambda: Net(9), strategy=strategy, protect="readonly")
    optimizer = cst.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    @cst.step(model, optimizer, accumulate=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    @cst.function(model, optimizer)
    def body(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(cst.all_reduce(x) + cst.all_gather(x, 0)), y)
        loss.backward()
        cst.clip_grad_norm_(optimizer, 1.0)
        cst.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    @cst.evaluate(model)
    def predict(x: torch.Tensor) -> torch.Tensor:
        return made(model(x))

    loader = torch.utils.data.DataLoader(data, batch_size=8)
    batches: cs.DistributedDataset = cst.batches(strategy, loader, weight=lambda batch: batch[1])
    loss = 0.0
    for batch in batches:
        loss = step(batch)
        body(batch)
        schedule.step()
    for loss in step.ahead(batches, scheduler=schedule, steps=3):
        print(loss, predict(torch.ones(2, 8)))
    copied: Net = cst.pull(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "copied": copied.state_dict()}, path)
    parameters = [p for p in model.parameters() if isinstance(p, cst.CentralParameter)]
    return loss + float(parameters[0].variable.numpy().sum())
