"""A torch model trained by two replicas and, beside it, by torch alone: the same loop, and the same weights.

python examples/torch_step.py        # needs torch: pip install 'central-storage[torch]'
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import central_storage as cs
import central_storage.torch as cst


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


def make_loader() -> DataLoader:
    """Batches of 64 rows, the last of 8."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 20, generator=generator)
    y = (x @ torch.randn(20, 3, generator=generator)).argmax(dim=1)
    return DataLoader(TensorDataset(x, y), batch_size=64)


def train_centrally(epochs: int) -> torch.nn.Module:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            module = cst.centralize(make_module())
        optimizer = cst.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

        @cst.step(module, optimizer)
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(module(x), y)

        batches = cst.batches(strategy, make_loader())
        for epoch in range(epochs):
            losses = [train(batch) for batch in batches]
            print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}")
        return cst.pull(module)


def train_alone(epochs: int) -> torch.nn.Module:
    """The same training with torch alone, on whole batches."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in make_loader():
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
    return module


def main() -> None:
    epochs = 10
    central, alone = train_centrally(epochs).state_dict(), train_alone(epochs).state_dict()
    difference = max(float((central[name] - alone[name]).abs().max()) for name in alone)
    print(f"largest difference from torch alone: {difference:.1e}")


if __name__ == "__main__":
    main()
