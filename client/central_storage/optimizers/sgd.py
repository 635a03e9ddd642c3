"""Gradient descent, with momentum."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class SGD(Optimizer):
    """``v -= lr g``; with momentum ``m = momentum m - lr g; v += m``, or Nesterov's ``v += momentum m - lr g``.

    ``momentum`` lies in [0, 1]. Slot: momentum, where it is not 0. A sparse gradient moves the rows it names.
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
