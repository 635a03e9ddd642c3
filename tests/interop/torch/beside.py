"""The same training twice: centralized, and with torch alone on whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

import central_storage as cs
import central_storage.torch as cst

__all__ = ["batch_of", "centralized", "difference", "train_alone"]


def batch_of(seed: int, rows: int, features: int = 8, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a classification."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    return x, torch.randint(0, classes, (rows,), generator=generator)


def centralized(strategy: cs.CentralStorageStrategy, module: Any, **options: Any) -> tuple[Any, Any]:
    """The module, centralized, and a copy of it for torch alone."""
    alone = copy.deepcopy(module)
    with strategy.scope():
        return cst.centralize(module, **options), alone


def train_alone(
    module: torch.nn.Module,
    optimizers: Any,
    batches: Iterable[Any],
    loss_of: Callable[..., torch.Tensor],
) -> list[float]:
    """The losses of torch alone."""
    losses = []
    for batch in batches:
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
        loss = loss_of(module, *batch)
        loss.backward()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
        losses.append(loss.item())
    return losses


def difference(module: torch.nn.Module, alone: torch.nn.Module) -> float:
    """The largest absolute difference of any value in the two state dicts, which have the same keys."""
    ours, theirs = module.state_dict(), alone.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel())
