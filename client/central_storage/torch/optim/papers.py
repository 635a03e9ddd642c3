"""Optimizers that torch does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .base import CentralOptimizer

__all__ = ["LAMB", "Lion", "RowwiseAdagrad"]


class Lion(CentralOptimizer):
    """``p -= lr (sign(b1 exp_avg + (1 - b1) g) + weight_decay p); exp_avg = b2 exp_avg + (1 - b2) g``.

    The rate is a third to a tenth of AdamW's, and the weight decay three to ten times as large. State: step, exp_avg.
    Source: Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The part of ``exp_avg`` in the step, and its decay, in [0, 1).
        weight_decay: The part of the parameter that is taken away, times the learning rate.
        **central: ``max_norm``, ``max_value``, ``find_unused_parameters`` and ``lazy``, as for
            :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or a number is out of its range (a ValueError).
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.Lion(model.parameters(), weight_decay=0.1)
        >>> optimizer.defaults["betas"]
        (0.9, 0.99)
    """

    kind = "optax.lion"
    torch_slots = {"mu": "exp_avg"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **central: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **central)


class LAMB(CentralOptimizer):
    """Adam's step with decay, ``u``, as long as the parameter: ``p -= lr · |p| / |u| · u`` for each parameter.

    ``u = exp_avg / (1 - b1^t) / (sqrt(exp_avg_sq / (1 - b2^t)) + eps) + weight_decay p``; the quotient is 1 where a
    norm is 0. State: step, exp_avg, exp_avg_sq.
    Source: You et al., 2020, "Large batch optimization for deep learning", algorithm 2, without bounds of ``|p|``.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_avg_sq``, in [0, 1).
        eps: A small number that keeps the divisor from 0.
        weight_decay: The part of the parameter in ``u``.
        **central: ``max_norm``, ``max_value``, ``find_unused_parameters`` and ``lazy``, as for
            :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or a number is out of its range (a ValueError).
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.LAMB(model.parameters(), lr=0.01)
        >>> optimizer.defaults["eps"]
        1e-06
    """

    kind = "optax.lamb"
    torch_slots = {"mu": "exp_avg", "nu": "exp_avg_sq"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **central: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **central)


class RowwiseAdagrad(CentralOptimizer):
    """Adagrad with one number for each row of a table: ``sum += mean(g²); p -= lr · g / (sqrt(sum) + eps)``.

    Its state of a table with rows of 128 numbers takes a 128th of Adagrad's. State: step, sum, of shape [height].
    Source: Mudigere et al., 2022, "Software-hardware co-design for fast and scalable training of deep learning
    recommendation models", section 4.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, such as those of ``sparse=True`` embeddings, or groups
            of them.
        lr: The learning rate.
        initial_accumulator_value: The first ``sum``.
        eps: A small number that keeps the divisor from 0.
        **central: ``max_norm``, ``max_value``, ``find_unused_parameters`` and ``lazy``, as for
            :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized or has no rows, or a number is out of its range (a
            ValueError).
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Embedding(3, 2, sparse=True))
        ...     optimizer = cst.optim.RowwiseAdagrad(model.parameters(), lr=0.1)
        >>> optimizer.defaults["eps"]
        1e-10
    """

    kind = "rowwise_adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **central: Any,
    ) -> None:
        numbers = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        super().__init__(params, numbers, **central)
