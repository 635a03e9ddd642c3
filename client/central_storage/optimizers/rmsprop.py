"""RMSprop (Tieleman and Hinton, 2012)."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class RMSprop(Optimizer):
    """``s = rho s + (1 - rho) g²; v -= lr g / (sqrt(s) + epsilon)``.

    With momentum ``b = momentum b + lr g / sqrt(s + epsilon); v -= b``. Slots: rms (s), momentum (b), mg (c). A sparse
    gradient moves the rows of the variable that it names and, without momentum and unless ``lazy``, all rows of the
    slots.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        rho: The decay of the mean squared gradient.
        momentum: The part of the last step that is kept.
        epsilon: A small number that keeps the divisor from 0.
        centered: Whether the mean gradient is kept, too, ``c = rho c + (1 - rho) g``, and ``s - c²`` taken for s.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.RMSprop(centered=True)
        >>> optimizer.centered
        True
    """

    kind = "RMSprop"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str | None = "RMSprop",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, rho=rho, momentum=momentum, epsilon=epsilon, centered=centered)

    rho = hyperparameter("rho")
    momentum = hyperparameter("momentum")
    epsilon = hyperparameter("epsilon")
    centered = hyperparameter("centered")
