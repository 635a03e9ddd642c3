"""LAMB (You et al., 2020, "Large batch optimization for deep learning: training BERT in 76 minutes")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from .decaying import DecayingOptimizer, patterns
from .optimizer import LearningRate, Shared, hyperparameter


class LAMB(DecayingOptimizer):
    """``v -= lr |v| / |d| · d`` with Adam's direction ``d = m̂ / (sqrt(û) + epsilon) + weight_decay v``.

    This is algorithm 2 of the paper: ``m = b1 m + (1 - b1) g``, ``u = b2 u + (1 - b2) g²``, and m̂ and û are these
    divided by ``1 - b1^t`` and ``1 - b2^t``. The norms are those of a whole variable; where one of them is 0, their
    ratio counts as 1. Slots: m, v (u). A sparse gradient moves all rows; with ``lazy`` the norms are those of the rows
    that it names.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        beta_1: The decay of the mean gradient, in [0, 1).
        beta_2: The decay of the mean squared gradient, in [0, 1).
        epsilon: A small number that keeps the divisor from 0.
        weight_decay: The part of the variable that is added to the direction.
        name: The optimizer's name.
        exclude_from_weight_decay: Regular expressions, which are searched in the names of variables.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, a pattern is not a regular expression, or
            ``clipnorm`` and ``global_clipnorm`` are both given (a ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.LAMB(learning_rate=0.01, weight_decay=0.01)
        >>> optimizer.epsilon
        1e-07
    """

    kind = "LAMB"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        name: str | None = "LAMB",
        exclude_from_weight_decay: Iterable[str] = (),
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name,
            learning_rate,
            shared,
            patterns(exclude_from_weight_decay),
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    epsilon = hyperparameter("epsilon")
    weight_decay = hyperparameter("weight_decay")
