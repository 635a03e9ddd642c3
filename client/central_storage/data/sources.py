"""What may be distributed: data sets, and other things that can be iterated again and again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cs_proto.errors import InvalidArgumentError, NotADatasetError

from .dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from .libraries import Reading, is_hugging_face
from .splitting import holds_arrays

__all__ = ["cardinality_of", "checked", "elements_of", "first_of"]


def checked(dataset: Any) -> Any:
    """``dataset``, if it can be iterated repeatedly and yields nests of arrays. Otherwise raises NotADatasetError,
    which names the remedy."""
    if isinstance(dataset, Dataset):
        return dataset
    if is_hugging_face(dataset):
        return dataset
    name = type(dataset).__name__
    if isinstance(dataset, Mapping) and any(map(is_hugging_face, dataset.values())):
        raise NotADatasetError(f"a {name} holds several data sets; pass one of them, {list(dataset)}, by its name")
    if hasattr(dataset, "shape") or isinstance(dataset, Mapping | str | bytes):
        raise NotADatasetError(
            f"a {name} is not a data set; use Dataset.from_tensor_slices(…).batch(size), or a list of batches"
        )
    if not isinstance(dataset, Iterable):
        instead = (
            "torch.utils.data.DataLoader(dataset, batch_size=size)"
            if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
            else "Dataset.from_tensor_slices"
        )
        raise NotADatasetError(f"a {name} is not a data set and cannot be iterated; use {instead}")
    if isinstance(dataset, Iterator):
        raise NotADatasetError(
            f"a {name} can be iterated only once; pass the data set that made it (in place of dataset.iter(size), "
            "dataset.batch(size)), or use Dataset.from_generator with the function that makes it"
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


def elements_of(source: Any) -> Iterable[Any]:
    """The elements, not yet as tensors: those of a data set come straight from its pipeline."""
    return source.plan if isinstance(source, Dataset) else source


def first_of(source: Iterable[Any]) -> Any:
    """The first element. Raises InvalidArgumentError where there is none."""
    for element in Reading(source):
        return element
    raise InvalidArgumentError("the data set is empty, so it has no element to infer its element_spec from")


def cardinality_of(source: Any) -> int:
    """How many elements there are, or one of the negative constants of :mod:`~.dataset`."""
    if isinstance(source, Dataset):
        return source.plan.count
    try:
        count = len(source)
        return INFINITE_CARDINALITY if count == sys.maxsize else count  # grain's word for a repeated data set
    except TypeError:  # has no length, or, like a DataLoader over a stream, does not know it
        return UNKNOWN_CARDINALITY
