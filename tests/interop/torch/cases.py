"""Optimizers with the arguments that choose and change their rules, for tests against torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["CASES", "Case", "Net", "clip", "gradients", "groups_of", "linear", "train_torch"]


class Case(NamedTuple):
    """An optimizer of torch and its arguments."""

    name: str
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.kwargs.items())])


CASES = [
    Case("SGD", {"lr": 0.05}),
    Case("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    Case("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True}),
    Case("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    Case("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    Case("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    Case("AdamW", {"lr": 0.01}),
    Case("AdamW", {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-4}),
    Case("RMSprop", {"lr": 0.01, "weight_decay": 0.01}),
    Case("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    Case("RMSprop", {"lr": 0.01, "centered": True, "alpha": 0.9}),
    Case("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5, "maximize": True}),
    Case("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    Case("NAdam", {"lr": 0.01, "weight_decay": 0.01}),
    Case("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    Case("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    Case("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.8, 0.9)}),
    Case("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}),
    Case("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.5, "maximize": True}),
    Case("Adadelta", {"lr": 1.0, "weight_decay": 0.01}),
]


class Net(torch.nn.Module):
    """Parameters of several kinds: in two groups, frozen, never used, and not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        for name, shape in {"first": (5, 3), "second": (7,), "sometimes": (4,), "unused": (2,), "frozen": (3,)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=random)))
        self.frozen.requires_grad_(False)


def groups_of(net: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups with different numbers."""
    return [
        {"params": [net.first, net.unused, net.frozen]},
        {"params": [net.second, net.sometimes], "lr": 0.02, "weight_decay": 0.03},
    ]


def gradients(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The gradients of ``first``, ``second`` and ``sometimes`` in a step, from 1e-8 to 10; None in some steps."""
    random = np.random.default_rng(step)
    found = [random.normal(size=shape) * 10.0 ** random.integers(-8, 2, shape) for shape in ((5, 3), (7,), (4,))]
    first, second, sometimes = (each.astype(np.float32) for each in found)
    return first, second, sometimes if step % 3 == 1 else None


def linear(net: torch.nn.Module, first: Any, second: Any, sometimes: Any) -> torch.Tensor:
    """A loss with these gradients."""
    loss = (net.first * torch.tensor(first)).sum() + (net.second * torch.tensor(second)).sum()
    return loss if sometimes is None else loss + (net.sometimes * torch.tensor(sometimes)).sum()


def train_torch(net: torch.nn.Module, optimizer: Any, scheduler: Any, steps: range, max_norm: float | None) -> None:
    """Train by torch alone."""
    for step in steps:
        optimizer.zero_grad()
        linear(net, *gradients(step)).backward()
        clip(net, max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def clip(net: torch.nn.Module, max_norm: float | None) -> None:
    """Bound the norm of all gradients, as torch does."""
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
