"""Steps of training whose gradients a test chooses, for tests of optimizers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import central_storage as cs
import central_storage.torch as cst

__all__ = ["central", "stepper", "values"]


def central(strategy: cs.CentralStorageStrategy, module: torch.nn.Module) -> torch.nn.Module:
    """The module, whose parameters are variables."""
    with strategy.scope():
        centralized: torch.nn.Module = cst.centralize(module)
    return centralized


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The present parameters."""
    return {name: torch.from_numpy(p.variable.numpy()) for name, p in module.named_parameters()}


def stepper(
    module: torch.nn.Module, optimizers: Iterable[Any], loss_of: Callable[..., torch.Tensor]
) -> Callable[..., None]:
    """A function that takes one step on the arguments of ``loss_of``, which every replica gets whole."""
    optimizers = list(optimizers)

    @cst.function(module, *optimizers)
    def train(row: torch.Tensor, arguments: tuple[Any, ...]) -> None:
        loss_of(module, *arguments).backward()
        for optimizer in optimizers:
            optimizer.step()

    def step(*arguments: Any) -> None:
        train(torch.zeros(1, 1), arguments=arguments)

    return step
