"""A step of training in replicas without ``cst.step``, for tests of optimizers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import central_storage as cs
from central_storage.torch.parameters import CentralParameter, empty_like

__all__ = ["central", "stepper", "values"]


def central(strategy: cs.CentralStorageStrategy, module: torch.nn.Module) -> torch.nn.Module:
    """The module, whose parameters become variables."""
    tables = {each.weight for each in module.modules() if isinstance(each, torch.nn.Embedding) and each.sparse}
    with strategy.scope():
        for name, p in module.named_parameters():
            is_dense = p.requires_grad and p not in tables
            variable = cs.Variable(p.detach().numpy(), name=name, trainable=is_dense)
            p.__class__ = CentralParameter
            p.variable, p.data = variable, empty_like(p.shape, p.dtype)
    return module


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The present parameters."""
    return {name: torch.from_numpy(p.variable.numpy()) for name, p in module.named_parameters()}


def stepper(
    module: torch.nn.Module, optimizers: Iterable[Any], loss_of: Callable[..., torch.Tensor]
) -> Callable[..., None]:
    """A function that takes one step on the arguments of ``loss_of``, which calls the module."""
    optimizers = list(optimizers)

    @cs.function
    def replica(*arguments: Any) -> None:
        for p in module.parameters():
            p.data, p.grad = torch.from_dlpack(p.variable).clone(), None
        loss_of(module, *arguments).backward()
        for optimizer in optimizers:
            found = [
                (updater, [(_gradient(p), p.variable) for p in params if p.grad is not None])
                for updater, params in optimizer.groups_for_update()
            ]
            cs.optimizers.apply_gradients(found, global_clipnorm=optimizer.max_norm, clip_epsilon=1e-6)

    def step(*arguments: Any) -> None:
        for optimizer in optimizers:
            optimizer.push()
        optimizers[0].central[0].strategy.run(replica, args=arguments)
        for optimizer in optimizers:
            optimizer.step()

    step.replica = replica  # type: ignore[attr-defined]  # for run_steps
    return step


def _gradient(p: Any) -> Any:
    if p.grad.is_sparse:
        return cs.IndexedSlices(p.grad._values().numpy(), p.grad._indices()[0].numpy(), p.variable.shape)
    return p.grad.numpy()
