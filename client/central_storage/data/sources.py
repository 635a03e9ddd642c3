"""What may be distributed: data sets, and other things that can be iterated again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cs_proto.errors import InvalidArgumentError, NotADatasetError

from .dataset import UNKNOWN_CARDINALITY, Dataset
from .splitting import holds_arrays

__all__ = ["cardinality_of", "checked", "first_of"]


def checked(dataset: Any) -> Any:
    """``dataset``, if it is one: something to iterate again and again that yields nests of arrays. Raises
    NotADatasetError, which says what to do instead."""
    if isinstance(dataset, Dataset):
        return dataset
    name = type(dataset).__name__
    if hasattr(dataset, "shape") or isinstance(dataset, Mapping | str | bytes):
        raise NotADatasetError(
            f"a {name} is not a data set; use Dataset.from_tensor_slices(…).batch(size), or a list of batches"
        )
    if not isinstance(dataset, Iterable):
        raise NotADatasetError(f"a {name} is not a data set and cannot be iterated; use Dataset.from_tensor_slices")
    if isinstance(dataset, Iterator):
        raise NotADatasetError(
            f"a {name} can be iterated only once; use Dataset.from_generator with the function that makes it"
        )
    if isinstance(dataset, tuple) and dataset and all(hasattr(part, "shape") for part in dataset):
        raise NotADatasetError(
            "a tuple of arrays is not a data set; use Dataset.from_tensor_slices(…).batch(size) for one "
            "element per row, or a list for one element per batch"
        )
    if isinstance(dataset, list | tuple) and dataset and not holds_arrays(dataset[0]):
        raise NotADatasetError(
            f"a {name} whose elements are no arrays is not a data set: {dataset!r:.200}; use "
            "Dataset.from_tensor_slices(…).batch(size) for one element per row, or a list of NumPy arrays for one "
            "per batch"
        )
    return dataset


def first_of(source: Iterable[Any]) -> Any:
    """The first element. Raises InvalidArgumentError where there is none."""
    for element in source:
        return element
    raise InvalidArgumentError("the data set is empty, so it has no element to infer its element_spec from")


def cardinality_of(source: Any) -> int:
    """How many elements there are, or one of the negative constants of :mod:`~.dataset`."""
    if isinstance(source, Dataset):
        return source.cardinality()
    try:
        return len(source)
    except TypeError:  # has no length, or, like a DataLoader over a stream, does not know it
        return UNKNOWN_CARDINALITY
