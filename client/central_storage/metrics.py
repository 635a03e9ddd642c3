"""Metrics: running sums and means whose state lies in variables, fed in replicas and read anywhere.

Each replica adds its own totals, so a mean is that of all examples however unevenly they were shared out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cs_proto.errors import ContextError, InvalidArgumentError

from .core.composites import Composite
from .core.values import VariableAggregation, convert_to_tensor
from .nn import fit_weights
from .variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .core.backends import Strategy

__all__ = ["Accuracy", "Mean", "Metric", "SparseCategoricalAccuracy", "Sum"]


class Metric(Composite):
    """Base of the metrics: make state with :meth:`add_weight`, and change it with ``assign_add`` alone.

    A metric that is made under ``strategy.scope()`` belongs to that strategy. One that is made outside every scope
    belongs to the first whose ``run`` takes it along; using it in a second one is a ContextError (a RuntimeError).

    Args:
        name: The name; None: that of the class.
        dtype: The dtype of the state; None: float32.

    Raises:
        InvalidArgumentError: ``dtype`` is no floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> class Count(cs.metrics.Metric):
        ...     def __init__(self):
        ...         super().__init__("count")
        ...         self.n = self.add_weight("n")
        ...
        ...     def update_state(self, rows):
        ...         self.n.assign_add(len(rows))
        ...
        ...     def result(self):
        ...         return self.n.numpy()
        >>> count = Count()
        >>> count.update_state([1, 2, 3])
        >>> float(count.result())
        3.0
        >>> count.reset_state()
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        self.name = name or _snake(type(self).__name__)
        self.dtype = np.dtype(dtype or np.float32)
        if self.dtype.kind != "f":
            raise InvalidArgumentError(
                f"metric {self.name}: the state must have a floating-point dtype, not {self.dtype}"
            )

    @property
    def variables(self) -> list[Variable]:
        """The state, in the order in which it was made."""
        return [part for part in vars(self).values() if isinstance(part, Variable)]

    def add_weight(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """State that is zero at first: a variable that sums the values that the replicas add. Keep it as an attribute.

        Args:
            name: Its name, behind that of the metric.
            shape: Its shape.

        Raises:
            MemoryPlanError: The memory does not suffice.
        """
        zeros = np.zeros(shape, self.dtype)
        return Variable(zeros, trainable=False, name=f"{self.name}/{name}", aggregation=VariableAggregation.SUM)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Take examples in.

        Args:
            *args: The derived class says which.
            **kwargs: The derived class says which.

        Raises:
            NotImplementedError: The derived class does not say how.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update_state")

    def result(self) -> np.ndarray:
        """The value so far, over all replicas."""
        raise NotImplementedError(f"{type(self).__name__} does not define result")

    def reset_state(self) -> None:
        """Begin anew. In a replica all replicas must do it."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def adopt(self, strategy: Strategy) -> None:
        """Let the variables become those of ``strategy``. Raises ContextError where they are another's."""
        for variable in self.variables:
            variable.adopt(strategy, shared=True)
            if variable.strategy is not strategy:
                raise ContextError(f"metric {self.name} belongs to another strategy; make one for each")

    def _cs_key(self) -> tuple[Hashable, ...]:
        return tuple(map(id, self.variables))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Sum(Metric):
    """The sum of values, weighted.

    Args:
        name: The name; None: that of the class.
        dtype: The dtype of the state; None: float32.

    Raises:
        InvalidArgumentError: ``dtype`` is no floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> total = cs.metrics.Sum()
        >>> total.update_state([1.0, 3.0])
        >>> float(total.result())
        4.0
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values times their weights.

        Args:
            values: Numbers of any shape.
            sample_weight: One number, or one for each value or each row.

        Raises:
            InvalidArgumentError: The weights have another shape (a ValueError).
        """
        values, _ = _weighted(self, values, sample_weight, np.sum)
        self.total.assign_add(_scalar(self, values.sum()))

    def result(self) -> np.ndarray:
        """The sum: a scalar of the metric's dtype."""
        return self.total.numpy()


class _MeanOf(Metric):
    """The mean of something for each example; 0 before the first."""

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")
        self.count = self.add_weight("count")

    def result(self) -> np.ndarray:
        """The mean: a scalar of the metric's dtype."""
        total, count = self.total.numpy(), self.count.numpy()
        mean: np.ndarray = np.divide(total, count, out=np.zeros_like(total), where=count != 0)
        return mean

    def _take(self, values: Any, sample_weight: Any) -> None:
        values, weights = _weighted(self, values, sample_weight, np.mean)
        self.total.assign_add(_scalar(self, values.sum()))
        self.count.assign_add(_scalar(self, values.size if weights is None else weights.sum()))


class Mean(_MeanOf):
    """The mean of values, weighted; 0 before the first.

    Args:
        name: The name; None: that of the class.
        dtype: The dtype of the state; None: float32.

    Raises:
        InvalidArgumentError: ``dtype`` is no floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> mean = cs.metrics.Mean()
        >>> mean.update_state([1.0, 3.0])
        >>> mean.update_state(8.0, sample_weight=2)
        >>> float(mean.result())
        5.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take values in. Of a row with one weight the mean counts.

        Args:
            values: Numbers of any shape.
            sample_weight: One number, or one for each value or each row.

        Raises:
            InvalidArgumentError: The weights have another shape (a ValueError).
        """
        self._take(values, sample_weight)


class Accuracy(_MeanOf):
    """How often predictions equal labels.

    Args:
        name: The name; None: that of the class.
        dtype: The dtype of the state; None: float32.

    Raises:
        InvalidArgumentError: ``dtype`` is no floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> float(accuracy.result())
        0.75
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels of any shape.
            y_pred: Predictions of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each label.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = convert_to_tensor(y_true), convert_to_tensor(y_pred)
        if y_true.ndim != y_pred.ndim:
            y_true = fit_weights(y_pred, y_true)
        if y_true.shape != y_pred.shape:
            raise InvalidArgumentError(
                f"labels {list(y_true.shape)} and predictions {list(y_pred.shape)} must have the same shape"
            )
        self._take((y_true == y_pred).astype(self.dtype), sample_weight)


class SparseCategoricalAccuracy(_MeanOf):
    """How often the largest of the predicted numbers is that of the label.

    Args:
        name: The name; None: that of the class.
        dtype: The dtype of the state; None: float32.

    Raises:
        InvalidArgumentError: ``dtype`` is no floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.SparseCategoricalAccuracy()
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]])
        >>> float(accuracy.result())
        0.5
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with the largest of the predicted numbers.

        Args:
            y_true: Labels of shape ``[…]`` or ``[…, 1]``.
            y_pred: Numbers of shape ``[…, classes]``.
            sample_weight: One number, or one for each label.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = convert_to_tensor(y_true), convert_to_tensor(y_pred)
        if y_true.ndim == y_pred.ndim and y_true.shape[-1:] == (1,):
            y_true = y_true[..., 0]
        if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
            raise InvalidArgumentError(
                f"labels {list(y_true.shape)} need predictions of that shape with one more axis, the classes, not "
                f"{list(y_pred.shape)}"
            )
        if not y_pred.shape[-1]:
            raise InvalidArgumentError("predictions need at least one class")
        self._take((y_pred.argmax(-1) == y_true).astype(self.dtype), sample_weight)


def _weighted(
    metric: Metric, values: Any, sample_weight: Any, combine: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """``values`` times their weights, and the weights, of one shape. A weight for a whole row is one for what
    ``combine`` makes of the row."""
    values = convert_to_tensor(values).astype(metric.dtype, copy=False)
    if sample_weight is None:
        return values, None
    weights = convert_to_tensor(sample_weight).astype(metric.dtype, copy=False)
    weights = fit_weights(values, weights)
    if not _fits(weights, values):
        values = combine(values, axis=tuple(range(weights.ndim, values.ndim)))
    if not _fits(weights, values):
        raise InvalidArgumentError(
            f"metric {metric.name}: sample_weight {list(weights.shape)} does not fit values {list(values.shape)}"
        )
    weights = np.broadcast_to(weights, values.shape)
    return values * weights, weights


def _fits(weights: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> bool:
    if weights.ndim == 0:
        return True
    pairs = zip(weights.shape, values.shape, strict=False)
    return weights.ndim == values.ndim and all(one in (1, other) for one, other in pairs)


def _scalar(metric: Metric, number: Any) -> np.ndarray[Any, Any]:
    # An array, not a Python number: those of several replicas that happen to be equal would be refused.
    return np.asarray(number, metric.dtype)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and k else c.lower() for k, c in enumerate(name))
