"""``cs.data.experimental``: TensorFlow's older names for methods and options of data sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from central_storage.diagnostics.tensorflow_names import attributes

from .dataset import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from .options import AutoShardPolicy, AutotuneOptions, DistributeOptions, OptimizationOptions, ThreadingOptions

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneOptions",
    "DistributeOptions",
    "OptimizationOptions",
    "ThreadingOptions",
    "cardinality",
    "enumerate_dataset",
    "get_single_element",
    "take_while",
    "unbatch",
]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.data.experimental")


def cardinality(dataset: Dataset) -> Any:
    """``dataset.cardinality()``.

    Args:
        dataset: A data set.

    Raises:
        TypeError: It is none.

    Examples:
        >>> import central_storage as cs
        >>> int(cs.data.experimental.cardinality(cs.data.Dataset.range(3)))
        3
    """
    return _checked(dataset, "cardinality").cardinality()


def get_single_element(dataset: Dataset) -> Any:
    """``dataset.get_single_element()``.

    Args:
        dataset: A data set.

    Raises:
        InvalidArgumentError: There is no element, or more than one (a ValueError).
        TypeError: ``dataset`` is no data set.

    Examples:
        >>> import central_storage as cs
        >>> int(cs.data.experimental.get_single_element(cs.data.Dataset.range(1)))
        0
    """
    return _checked(dataset, "get_single_element").get_single_element()


def enumerate_dataset(start: int = 0) -> Callable[[Dataset], Dataset]:
    """A function for :meth:`Dataset.apply` that calls :meth:`Dataset.enumerate`.

    Args:
        start: The first number.

    Raises:
        TypeError: When it is applied: ``start`` is no int.

    Examples:
        >>> import central_storage as cs
        >>> pairs = cs.data.Dataset.range(1).apply(cs.data.experimental.enumerate_dataset(5))
        >>> [(int(n), int(x)) for n, x in pairs]
        [(5, 0)]
    """
    return lambda dataset: dataset.enumerate(start)


def take_while(predicate: Callable[..., Any]) -> Callable[[Dataset], Dataset]:
    """A function for :meth:`Dataset.apply` that calls :meth:`Dataset.take_while`.

    Args:
        predicate: As for :meth:`Dataset.take_while`.

    Raises:
        TypeError: When it is applied: ``predicate`` cannot be called.

    Examples:
        >>> import central_storage as cs
        >>> small = cs.data.Dataset.range(5).apply(cs.data.experimental.take_while(lambda x: x < 2))
        >>> [int(x) for x in small]
        [0, 1]
    """
    return lambda dataset: dataset.take_while(predicate)


def unbatch() -> Callable[[Dataset], Dataset]:
    """A function for :meth:`Dataset.apply` that calls :meth:`Dataset.unbatch`.

    Examples:
        >>> import central_storage as cs
        >>> [int(x) for x in cs.data.Dataset.range(3).batch(2).apply(cs.data.experimental.unbatch())]
        [0, 1, 2]
    """
    return lambda dataset: dataset.unbatch()


def _checked(dataset: Any, where: str) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{where} needs a cs.data.Dataset, not {dataset!r:.100}")
    return dataset
