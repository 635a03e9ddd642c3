"""Adam (Kingma and Ba, 2015, "Adam: a method for stochastic optimization")."""

from __future__ import annotations

from .optimizer import Optimizer


class Adam(Optimizer):
    """``m = b1 m + (1 - b1) g; u = b2 u + (1 - b2) g²; v -= lr sqrt(1 - b2^t) / (1 - b1^t) · m / (sqrt(u) + epsilon)``.

    The paper's algorithm with its section 2 re-ordering ("epsilon hat"); ``amsgrad`` uses the largest u so far.
    Raises InvalidArgumentError (a ValueError) for betas outside [0, 1).
    """

    kind = "Adam"

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name, learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad
        )
