"""Adam (Kingma and Ba, 2015, "Adam: a method for stochastic optimization") and its kin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from .decaying import DecayingOptimizer, patterns
from .optimizer import LearningRate, Optimizer, Shared, hyperparameter


class Adam(Optimizer):
    """``m = b1 m + (1 - b1) g; u = b2 u + (1 - b2) g²; v -= lr sqrt(1 - b2^t) / (1 - b1^t) · m / (sqrt(u) + epsilon)``.

    This is the paper's algorithm with its section 2 re-ordering ("epsilon hat"). Slots: m, v (u), vhat. A sparse
    gradient moves all rows, unless ``lazy``.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        beta_1: The decay of the mean gradient, in [0, 1).
        beta_2: The decay of the mean squared gradient, in [0, 1).
        epsilon: A small number that keeps the divisor from 0.
        amsgrad: Whether the largest u so far is used.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Adam(learning_rate=0.01)
        >>> optimizer.beta_2
        0.999
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


class AdamW(DecayingOptimizer):
    """Adam after ``v -= lr weight_decay v`` (Loshchilov and Hutter, 2019). Slots and rows as for Adam.

    Variables whose name holds one of the patterns of ``exclude_from_weight_decay`` are updated as by Adam.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        weight_decay: The part of the variable that is taken away, times the learning rate.
        beta_1: The decay of the mean gradient, in [0, 1).
        beta_2: The decay of the mean squared gradient, in [0, 1).
        epsilon: A small number that keeps the divisor from 0.
        amsgrad: Whether the largest u so far is used.
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
        >>> optimizer = cs.optimizers.AdamW(weight_decay=0.01, exclude_from_weight_decay=["bias", "LayerNorm"])
        >>> optimizer.weight_decay
        0.01
    """

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
        exclude_from_weight_decay: Iterable[str] = (),
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name,
            learning_rate,
            shared,
            patterns(exclude_from_weight_decay),
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

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        beta_1: The decay of the mean gradient, in [0, 1).
        beta_2: The decay of the largest gradient, in [0, 1).
        epsilon: A small number that keeps the divisor from 0.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Adamax()
        >>> optimizer.learning_rate
        0.001
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

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        beta_1: The decay of the mean gradient, in [0, 1).
        beta_2: The decay of the mean squared gradient, in [0, 1).
        epsilon: A small number that keeps the divisor from 0.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.Nadam()
        >>> optimizer.beta_1
        0.9
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
