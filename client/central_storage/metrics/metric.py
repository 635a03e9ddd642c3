"""The base of the metrics, and sums and means of values."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from central_storage.core.composites import Composite
from central_storage.core.tensors.tensor import tensors_in
from central_storage.core.values import VariableAggregation, VariableSynchronization, convert_to_tensor
from central_storage.nn import fit_weights
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from central_storage.core.backends import Strategy

__all__ = ["Mean", "MeanOf", "Metric", "Sum", "aligned", "numbers", "scalar", "weighted"]


def _giving_tensors(result: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(result)
    def tensor_result(*args: Any, **kwargs: Any) -> Any:
        return tensors_in(result(*args, **kwargs))

    return tensor_result


class Metric(Composite):
    """Base of the metrics: make state with :meth:`add_weight`, and change it only with ``assign_add``.

    A metric may be made of others, which are attributes, too; :meth:`reset_state` resets their state.

    A metric that is made under ``strategy.scope()`` belongs to that strategy. One that is made outside every scope
    belongs to the first strategy whose ``run`` uses it; using it in another one is a ContextError (a RuntimeError).

    Arrays and NumPy numbers that ``result`` returns are given as tensors, those of a class of yours, too.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "result" in vars(cls):
            cls.result = _giving_tensors(cls.result)  # type: ignore[method-assign]

    @property
    def variables(self) -> list[Variable]:
        """The state in the order of the attributes, also that of metrics, lists, tuples and dicts among them."""
        found: dict[int, Variable | Metric] = {}
        _find_parts(self, found)
        return [part for part in found.values() if isinstance(part, Variable)]

    def add_weight(
        self,
        name: str,
        shape: int | Iterable[int] = (),
        aggregation: VariableAggregation = VariableAggregation.SUM,
        synchronization: VariableSynchronization = VariableSynchronization.ON_READ,
        initializer: str | Callable[..., Any] | None = None,
        dtype: Any = None,
    ) -> Variable:
        """A variable for the state, which sums the arrays that replicas add. Keep it as an attribute, or in a list or
        dict that is one.

        Args:
            name: Its name, which follows the metric's name and a slash.
            shape: Its shape.
            aggregation: How the values that replicas assign in a step become one.
            synchronization: Accepted; it changes nothing.
            initializer: The value before the first update: "zeros", as None, "ones", or a function of the shape and
                ``dtype``. :meth:`reset_state` always sets zeros.
            dtype: The dtype; None for the metric's.

        Raises:
            InvalidArgumentError: ``initializer`` is none of these (a ValueError).
            MemoryPlanError: The memory does not suffice.
        """
        known: dict[Any, Callable[..., Any]] = {None: np.zeros, "zeros": np.zeros, "ones": np.ones}
        make = initializer if callable(initializer) else known.get(initializer)
        if make is None:
            raise InvalidArgumentError(
                f'metric {self.name}: initializer must be "zeros", "ones" or a function of the shape and dtype, such '
                f"as np.ones, not {initializer!r:.80}"
            )
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype or self.dtype)
        value = np.asarray(make(shape, dtype=dtype))
        return Variable(value, False, f"{self.name}/{name}", dtype, shape, aggregation=aggregation)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add examples to the state.

        Args:
            *args: Defined by the derived class.
            **kwargs: Defined by the derived class.

        Raises:
            NotImplementedError: The derived class does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update_state")

    def result(self) -> np.ndarray:
        """The value so far, over all replicas."""
        raise NotImplementedError(f"{type(self).__name__} does not define result")

    def __call__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Take examples in, then return the value so far, over all replicas.

        Args:
            *args: As for :meth:`update_state`.
            **kwargs: As for :meth:`update_state`.

        Raises:
            InvalidArgumentError: As for :meth:`update_state` (a ValueError).
        """
        self.update_state(*args, **kwargs)
        return self.result()

    def reset_state(self) -> None:
        """Set the state to zero. If one replica calls this, all must."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """:meth:`reset_state`, under its name before TensorFlow 2.5.

        Examples:
            >>> import central_storage as cs
            >>> total = cs.metrics.Sum()
            >>> float(total(3.0)), total.reset_states(), float(total.result())
            (3.0, None, 0.0)
        """
        self.reset_state()

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Add the state of other metrics of this class.

        Args:
            metrics: Metrics that were made with the same arguments.

        Raises:
            InvalidArgumentError: One is of another class, or its state has other shapes (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> one, other = cs.metrics.Mean(), cs.metrics.Mean()
            >>> float(one([1.0, 2.0])), float(other(6.0))
            (1.5, 6.0)
            >>> one.merge_state([other])
            >>> float(one.result())
            3.0
        """
        for metric in metrics:
            shapes = [variable.shape for variable in self.variables]
            if type(metric) is not type(self) or [variable.shape for variable in metric.variables] != shapes:
                raise InvalidArgumentError(f"{metric!r} has another state than {self!r}, so they cannot be merged")
            for mine, other in zip(self.variables, metric.variables, strict=True):
                mine.assign_add(other.numpy())

    def adopt(self, strategy: Strategy) -> None:
        """Give the variables to ``strategy``. Raises ContextError if they belong to another one."""
        for variable in self.variables:
            variable.adopt(strategy, shared=True)
            if variable.strategy is not strategy:
                raise ContextError(f"metric {self.name} belongs to another strategy; make one for each")

    def _cs_key(self) -> tuple[Hashable, ...]:
        return tuple(map(id, _parts(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Sum(Metric):
    """The weighted sum of values.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

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
        values, _ = weighted(self, values, sample_weight, np.sum)
        self.total.assign_add(scalar(self, values.sum()))

    def result(self) -> np.ndarray:
        """The sum: a scalar of the metric's dtype."""
        return self.total.numpy()


class MeanOf(Metric):
    """The mean over examples; 0 before the first."""

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
        values, weights = weighted(self, values, sample_weight, np.mean)
        self.total.assign_add(scalar(self, values.sum()))
        self.count.assign_add(scalar(self, values.size if weights is None else weights.sum()))


class Mean(MeanOf):
    """The weighted mean of values; 0 before the first.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> mean = cs.metrics.Mean()
        >>> mean.update_state([1.0, 3.0])
        >>> mean.update_state(8.0, sample_weight=2)
        >>> float(mean.result())
        5.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values. If a row has a single weight, the mean of the row counts as one value.

        Args:
            values: Numbers of any shape.
            sample_weight: One number, or one for each value or each row.

        Raises:
            InvalidArgumentError: The weights have another shape (a ValueError).
        """
        self._take(values, sample_weight)


def _parts(metric: Metric) -> list[Variable | Metric]:
    """The variables and metrics among the attributes of a metric, also in lists, tuples and dicts."""
    attributes: Any = list(vars(metric).values())
    leaves = optree.tree_leaves(attributes, none_is_leaf=True)
    return [leaf for leaf in leaves if isinstance(leaf, Variable | Metric)]


def _find_parts(metric: Metric, found: dict[int, Variable | Metric]) -> None:
    """Add the parts of a metric, and theirs, to ``found``, by their ``id()``."""
    for part in _parts(metric):
        if id(part) not in found:
            found[id(part)] = part
            if isinstance(part, Metric):
                _find_parts(part, found)


def numbers(metric: Metric, what: str, value: Any) -> np.ndarray[Any, Any]:
    """``value`` as an array of numbers. Raises InvalidArgumentError, which says ``what`` it is, if it is none."""
    try:
        array = convert_to_tensor(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"metric {metric.name}: {what} must be numbers: {error}") from error
    if array.dtype.kind in "US":
        raise InvalidArgumentError(
            f"metric {metric.name}: {what} must be numbers, not texts such as {array.reshape(-1)[:1].tolist()!r:.80}; "
            "convert texts to numbers first"
        )
    return array


def aligned(metric: Metric, y_true: Any, y_pred: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Labels and predictions of one shape, in the metric's dtype. If one has an axis more, of length 1, it goes."""
    labels = numbers(metric, "labels", y_true).astype(metric.dtype, copy=False)
    predictions = numbers(metric, "predictions", y_pred).astype(metric.dtype, copy=False)
    if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    if labels.shape != predictions.shape:
        raise InvalidArgumentError(
            f"metric {metric.name}: labels {list(labels.shape)} and predictions {list(predictions.shape)} must have "
            "the same shape"
        )
    return labels, predictions


def weighted(
    metric: Metric, values: Any, sample_weight: Any, combine: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """``values`` times their weights, and the weights, in one shape. A weight for a whole row applies to the result of
    ``combine`` for the row."""
    values = numbers(metric, "values", values).astype(metric.dtype, copy=False)
    if sample_weight is None:
        return values, None
    weights = numbers(metric, "sample_weight", sample_weight).astype(metric.dtype, copy=False)
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


def scalar(metric: Metric, number: Any) -> np.ndarray[Any, Any]:
    # An array, because equal Python numbers of several replicas would be refused.
    return np.asarray(number, metric.dtype)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
