"""RMSprop (Tieleman and Hinton, 2012)."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class RMSprop(Optimizer):
    """``s = rho s + (1 - rho) g²; v -= lr g / (sqrt(s) + epsilon)``.

    ``centered`` also keeps the mean gradient, ``c = rho c + (1 - rho) g``, and takes ``s - c²`` for s; with momentum
    ``b = momentum b + lr g / sqrt(s + epsilon); v -= b``. Slots: rms (s), momentum (b), mg (c). A sparse gradient moves
    the rows of the variable that it names and, without momentum and unless ``lazy``, all rows of the slots.
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
