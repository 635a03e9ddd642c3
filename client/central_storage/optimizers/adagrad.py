"""Optimizers whose rate for each element, or each row, follows its earlier gradients: Adagrad and Adadelta."""

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
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
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


class RowwiseAdagrad(Optimizer):
    """``a += mean(g²)`` over each row, then ``v -= lr / (sqrt(a) + epsilon) g``: Adagrad with one number for each row.

    The rule is FBGEMM's ``EXACT_ROWWISE_ADAGRAD``, which torchrec uses for tables. Its state takes ``1 / width`` of the
    memory of Adagrad's. Slot: sum, of shape ``[rows]``. A row is an index of the variable's first axis: each element of
    a vector is a row, and a scalar is one. A gradient moves the rows that it names, a dense one all. Complex variables,
    and variables on a GPU, have no part in the rule.

    Args:
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        initial_accumulator_value: The first value of the accumulator. At 0 it takes memory only where rows are updated.
        epsilon: A small number that keeps the divisor from 0.
        weight_decay: L2, in the rows that the gradient names: ``g += weight_decay v``, before all else.
        name: The optimizer's name.
        **shared: ``clipvalue``, ``clipnorm``, ``global_clipnorm`` and ``lazy``, as for :class:`Optimizer`.

    Raises:
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
            ValueError).
        TypeError: The optimizer has no argument of that name.
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         table = cs.Variable(np.zeros((4, 2), np.float32), sparse=True)
        ...         adagrad = cs.optimizers.RowwiseAdagrad(1.0)
        ...     rows = cs.IndexedSlices(np.float32([[3, 4]]), [1])
        ...     strategy.run(lambda: adagrad.apply_gradients([(rows, table)]))
        ...     print(adagrad.get_slot(table, "sum").numpy(), table.numpy()[1].round(3))
        [ 0.  12.5  0.   0. ] [-0.849 -1.131]
    """

    kind = "rowwise_adagrad"

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
        weight_decay: float = 0.0,
        name: str | None = "RowwiseAdagrad",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            name,
            learning_rate,
            shared,
            initial_accumulator_value=initial_accumulator_value,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    epsilon = hyperparameter("epsilon")
    weight_decay = hyperparameter("weight_decay")


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
        InvalidArgumentError: A hyperparameter is out of its range, or ``clipnorm`` and ``global_clipnorm`` are given (a
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
