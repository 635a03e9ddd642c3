"""Gradient descent, with momentum."""

from __future__ import annotations

from .optimizer import Optimizer


class SGD(Optimizer):
    """``v -= lr g``; with momentum ``m = momentum m - lr g; v += m``, or Nesterov's ``v += momentum m - lr g``.

    Raises InvalidArgumentError (a ValueError) for a momentum outside [0, 1].
    """

    kind = "SGD"

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, nesterov: bool = False, name: str | None = None
    ) -> None:
        super().__init__(name, learning_rate=learning_rate, momentum=momentum, nesterov=nesterov)
