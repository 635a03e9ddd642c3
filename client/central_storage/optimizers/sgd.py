"""Gradient descent, with momentum."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class SGD(Optimizer):
    """``v -= lr g``; with momentum ``m = momentum m - lr g; v += m``, or Nesterov's ``v += momentum m - lr g``.

    Slot: momentum, where it is not 0. A sparse gradient moves the rows it names.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        momentum: The part of the last step that is kept, in [0, 1].
        nesterov: Whether Nesterov's rule is used.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.SGD(0.1, momentum=0.9)
        >>> optimizer.slot_names
        ['momentum']
    """

    kind = "SGD"

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str | None = "SGD",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, momentum=momentum, nesterov=nesterov)

    momentum = hyperparameter("momentum")
    nesterov = hyperparameter("nesterov")
