"""Optimizers whose rate for each element follows its earlier gradients: Adagrad and Adadelta."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class Adagrad(Optimizer):
    """``a += g²; v -= lr g / (sqrt(a) + epsilon)`` (Duchi et al., 2011).

    Slot: accumulator. A sparse gradient moves the rows it names.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        initial_accumulator_value: The first value of the accumulator.
        epsilon: A small number that keeps the divisor from 0.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` stands beside ``global_clipnorm`` (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Adagrad()
        >>> optimizer.slot_names
        ['accumulator']
    """

    kind = "Adagrad"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str | None = "Adagrad",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name, learning_rate, shared, initial_accumulator_value=initial_accumulator_value, epsilon=epsilon
        )

    epsilon = hyperparameter("epsilon")


class Adadelta(Optimizer):
    """``a = rho a + (1 - rho) g²; d = sqrt(x + epsilon) / sqrt(a + epsilon) g; x = rho x + (1 - rho) d²; v -= lr d``.

    The rule is Zeiler's (2012). Slots: accum_grad (a), accum_var (x). A sparse gradient moves the rows it names.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        rho: The decay of both means.
        epsilon: A small number that keeps the divisor from 0.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` stands beside ``global_clipnorm`` (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Adadelta()
        >>> optimizer.rho
        0.95
    """

    kind = "Adadelta"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        name: str | None = "Adadelta",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, rho=rho, epsilon=epsilon)

    rho = hyperparameter("rho")
    epsilon = hyperparameter("epsilon")
