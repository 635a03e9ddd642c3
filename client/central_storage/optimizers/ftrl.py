"""FTRL-proximal (McMahan et al., 2013, "Ad click prediction: a view from the trenches")."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class Ftrl(Optimizer):
    """``n = a + g²; z += g + 2 shrinkage v - (n^-p - a^-p) / lr · v; q = n^-p / lr + 2 l2 + beta / lr; v = (sign(z) l1
    - z) / q where |z| > l1, else 0; a = n``.

    Slots: accumulator (a) and linear (z). A sparse gradient moves the rows it names. The first update makes v from z
    alone, so a start value that is not 0 is largely forgotten.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        learning_rate_power: p, at most 0.
        initial_accumulator_value: The first value of the accumulator.
        l1_regularization_strength: l1.
        l2_regularization_strength: l2.
        name: The optimizer's name.
        l2_shrinkage_regularization_strength: The shrinkage.
        beta: beta.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Ftrl()
        >>> optimizer.slot_names
        ['accumulator', 'linear']
    """

    kind = "Ftrl"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        name: str | None = "Ftrl",
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name,
            learning_rate,
            shared,
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=beta,
        )

    l1_regularization_strength = hyperparameter("l1_regularization_strength")
    l2_regularization_strength = hyperparameter("l2_regularization_strength")
    l2_shrinkage_regularization_strength = hyperparameter("l2_shrinkage_regularization_strength")
    beta = hyperparameter("beta")
