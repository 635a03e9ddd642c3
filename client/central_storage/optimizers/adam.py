"""Adam (Kingma and Ba, 2015, "Adam: a method for stochastic optimization") and its kin."""

from __future__ import annotations

from typing import Unpack

from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class Adam(Optimizer):
    """``m = b1 m + (1 - b1) g; u = b2 u + (1 - b2) g²; v -= lr sqrt(1 - b2^t) / (1 - b1^t) · m / (sqrt(u) + epsilon)``.

    The paper's algorithm with its section 2 re-ordering ("epsilon hat"); ``amsgrad`` uses the largest u so far. Betas
    lie in [0, 1). Slots: m, v (u), vhat. A sparse gradient moves all rows, unless ``lazy``.
    """

    kind = "Adam"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = "Adam",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad)

    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    epsilon = hyperparameter("epsilon")
    amsgrad = hyperparameter("amsgrad")


class AdamW(Optimizer):
    """Adam after ``v -= lr weight_decay v`` (Loshchilov and Hutter, 2019). Slots and rows as for Adam."""

    kind = "AdamW"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = "AdamW",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name,
            learning_rate,
            shared,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
        )

    weight_decay = hyperparameter("weight_decay")
    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    epsilon = hyperparameter("epsilon")
    amsgrad = hyperparameter("amsgrad")


class Adamax(Optimizer):
    """Adam with the infinity norm: ``u = max(b2 u, |g|); v -= lr / (1 - b1^t) · m / (u + epsilon)``.

    Slots: m, v (u). A sparse gradient moves the rows it names.
    """

    kind = "Adamax"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = "Adamax",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)

    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    epsilon = hyperparameter("epsilon")


class Nadam(Optimizer):
    """Adam with Nesterov's momentum, which grows by a schedule: ``b1 (1 - .5 · .96^(.004 t))`` (Dozat, 2016).

    Slots: m, v. A sparse gradient moves the rows of the variable that it names and, unless ``lazy``, all rows of the
    slots.
    """

    kind = "Nadam"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = "Nadam",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(name, learning_rate, shared, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)

    beta_1 = hyperparameter("beta_1")
    beta_2 = hyperparameter("beta_2")
    epsilon = hyperparameter("epsilon")
