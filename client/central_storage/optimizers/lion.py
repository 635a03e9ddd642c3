"""Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from .decaying import DecayingOptimizer, patterns
from .optimizer import LearningRate, Shared, hyperparameter


class Lion(DecayingOptimizer):
    """``v -= lr (weight_decay v + sign(b1 m + (1 - b1) g)); m = b2 m + (1 - b2) g``. Every element moves by the rate.

    This is algorithm 2 of the paper. Slot: m. A sparse gradient moves all rows, unless ``lazy``. A rate is usually a
    third to a tenth of AdamW's, and the weight decay three to ten times as large.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        beta_1: The part of the mean gradient in the direction of the step, in [0, 1).
        beta_2: The decay of the mean gradient, in [0, 1).
        weight_decay: The part of the variable that is taken away, times the learning rate.
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
        >>> optimizer = cs.optimizers.Lion(learning_rate=1e-4, weight_decay=0.1)
        >>> optimizer.beta_2
        0.99
    """

    kind = "Lion"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float = 0.0,
        name: str | None = "Lion",
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
            weight_decay=weight_decay,
        )

    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    weight_decay = hyperparameter("weight_decay")
