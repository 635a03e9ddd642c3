"""Distributed data sets: what each replica gets of every step.

:class:`DistributedDataset` (``experimental_distribute_dataset``) splits global batches,
:class:`DistributedFromFunction` (``distribute_datasets_from_function``) hands out ready batches in turn; both give a
:class:`DistributedIterator` whenever they are iterated. Elements are PerReplica at the leaves, plain under one
replica. This module knows neither strategy nor processes; ``run_steps`` and the user take elements from it.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import optree

from cs_proto.errors import InvalidArgumentError, OutOfRangeError

from .dataset import UNKNOWN_CARDINALITY, Dataset, NotADatasetError
from .specs import PerReplicaSpec, TensorSpec, observed
from .values import PerReplica, convert_to_tensor, regroup

__all__ = [
    "DistributedDataset",
    "DistributedFromFunction",
    "DistributedIterator",
    "InputContext",
    "OptionalElement",
    "UnbatchedDatasetError",
    "split",
]


class UnbatchedDatasetError(InvalidArgumentError, IndexError):
    """A scalar where a batch was expected: there is nothing to split over the replicas."""


@dataclass(frozen=True)
class InputContext:
    """What a data set function is told about its place: the only pipeline, which feeds all replicas."""

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """``global_batch_size / num_replicas_in_sync``, which has to be whole (else ``InvalidArgumentError``)."""
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"the global batch size {global_batch_size} is no multiple of the {self.num_replicas_in_sync} replicas"
            )
        return size


class _Distributed:
    """What both kinds of distributed data set have in common."""

    def __init__(self, source: Any, n: int) -> None:
        self._source = source
        self._n = n

    def __iter__(self) -> DistributedIterator:
        """A new iterator from the beginning."""
        return DistributedIterator(self._rounds(), lambda: self.element_spec)

    def _rounds(self) -> Iterator[tuple[Any, bool]]:
        """The elements, and of each whether every replica has a share in it."""
        raise NotImplementedError

    @property
    def element_spec(self) -> Any:
        """A nest of PerReplicaSpec like an element, of TensorSpec under one replica; an axis 0 of None varies."""
        source = self._source
        if isinstance(source, Dataset):
            spec = source.element_spec
        else:
            spec = observed(_arrays(_first_of(source)), any_length=True)
        return spec if self._n == 1 else optree.tree_map(self._replica_spec, spec, none_is_leaf=True)

    def _replica_spec(self, spec: TensorSpec | None) -> PerReplicaSpec | None:
        raise NotImplementedError

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """``reduce_func(state, element)`` over all elements, beginning with ``initial_state``."""
        return functools.reduce(reduce_func, self, initial_state)


class DistributedDataset(_Distributed):
    """Global batches, each split over ``n`` replicas.

    ``dataset``: a :class:`Dataset` or anything else that can be iterated again and again and yields nests of arrays.
    A batch of B rows gives every replica ``ceil(B / n)`` of them in order; the last replicas may get fewer or none.
    Shares are views. No row is dropped or given twice.
    """

    def __init__(self, dataset: Any, n: int) -> None:
        super().__init__(_checked(dataset), n)

    @property
    def cardinality(self) -> int:
        """The number of global batches, or INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2)."""
        return _cardinality(self._source)

    def _rounds(self) -> Iterator[tuple[Any, bool]]:
        return ((split(element, self._n), True) for element in self._source)

    def _replica_spec(self, spec: TensorSpec | None) -> PerReplicaSpec | None:
        if spec is None:
            return None
        if spec.shape is None:
            return PerReplicaSpec((spec,) * self._n)
        rows = spec.shape[0] if spec.shape else None
        share = None if rows is None or rows % self._n else rows // self._n
        return PerReplicaSpec((TensorSpec((share, *spec.shape[1:]), spec.dtype),) * self._n)


class DistributedFromFunction(_Distributed):
    """Batches handed out in turn: in every step each of ``n`` replicas takes the next element, in replica order.

    ``dataset_fn`` is called once, here, with an :class:`InputContext`, and returns what :class:`DistributedDataset`
    takes, batched per replica or not at all. ``for`` and ``next`` leave out a last round in which not every replica
    gets an element; ``get_next_as_optional`` gives it, with empty arrays for the replicas that go without.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], n: int) -> None:
        if not callable(dataset_fn):
            raise TypeError(f"a function of an InputContext that returns a data set is needed, not {dataset_fn!r:.200}")
        super().__init__(_checked(dataset_fn(InputContext(num_replicas_in_sync=n))), n)

    @property
    def cardinality(self) -> int:
        """The number of complete rounds, or INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2)."""
        count = _cardinality(self._source)
        return count if count < 0 else count // self._n

    def _rounds(self) -> Iterator[tuple[Any, bool]]:
        elements = map(_arrays, self._source)
        while together := list(itertools.islice(elements, self._n)):
            missing = self._n - len(together)
            if missing:
                together += [optree.tree_map(_empty_like, together[0], none_is_leaf=True)] * missing
            yield regroup(together), not missing

    def _replica_spec(self, spec: TensorSpec | None) -> PerReplicaSpec | None:
        return None if spec is None else PerReplicaSpec((spec,) * self._n)


class DistributedIterator:
    """The elements of a distributed data set, once. ``close()``, or leaving its ``with`` block, frees the source.

    An exception of the data set comes out where its element would have.
    """

    def __init__(self, rounds: Iterator[tuple[Any, bool]], element_spec: Callable[[], Any]) -> None:
        self._rounds: Iterator[tuple[Any, bool]] | None = rounds
        self._spec = element_spec
        self._given_back: deque[Any] = deque()
        #: The number of elements handed out and not given back.
        self.position = 0

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        element = self._next(incomplete=False)
        if element is _END:
            raise StopIteration
        return element

    def get_next(self) -> Any:
        """The next element; :class:`OutOfRangeError` at the end."""
        element = self._next(incomplete=False)
        if element is _END:
            raise OutOfRangeError(f"the data set has ended after {self.position} elements; iterate it again for more")
        return element

    def get_next_as_optional(self) -> OptionalElement:
        """The next element, or word that there is none, without an exception; includes an incomplete last round."""
        return OptionalElement(self._next(incomplete=True))

    def give_back(self, elements: Sequence[Any]) -> None:
        """Undo the handing out of ``elements``, the latest ones in their order: they come next again."""
        self._given_back.extendleft(reversed(elements))
        self.position -= len(elements)

    @property
    def element_spec(self) -> Any:
        """As the data set's."""
        return self._spec()

    def close(self) -> None:
        """End the iteration and free what it holds: generators are closed, threads of ``prefetch`` end."""
        rounds, self._rounds = self._rounds, None
        self._given_back.clear()
        if rounds is not None and hasattr(rounds, "close"):
            rounds.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, incomplete: bool) -> Any:
        if self._given_back:
            element = self._given_back.popleft()
        else:
            element, complete = (_END, True) if self._rounds is None else next(self._rounds, (_END, True))
            if element is _END or not (complete or incomplete):
                self.close()
                return _END
        self.position += 1
        return element


class OptionalElement:
    """The answer of ``get_next_as_optional``: an element or none."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._element is not _END

    def get_value(self) -> Any:
        """The element; ``InvalidArgumentError`` where there is none."""
        if self._element is _END:
            raise InvalidArgumentError("the data set has ended; ask has_value() first")
        return self._element


def split(element: Any, n: int) -> Any:
    """``element``, a nest of global batches, with a PerReplica of ``n`` views in place of every array.

    Each array is split by its own axis 0. Plain under one replica. A scalar is an :class:`UnbatchedDatasetError`.
    """
    element = _arrays(element)
    if n == 1:
        return element

    def shares(leaf: Any) -> PerReplica | None:
        if leaf is None:
            return None
        if not leaf.shape:
            raise UnbatchedDatasetError(
                f"a scalar cannot be split over {n} replicas: {element!r:.200}; batch the data set by the global batch "
                "size, .batch(size)"
            )
        size = -(-leaf.shape[0] // n)
        return PerReplica([leaf[replica * size : (replica + 1) * size] for replica in range(n)])

    return optree.tree_map(shares, element, none_is_leaf=True)


_END = object()


def _checked(dataset: Any) -> Any:
    """``dataset``, if it is one: something to iterate again and again that yields nests of arrays."""
    if isinstance(dataset, Dataset):
        return dataset
    name = type(dataset).__name__
    if isinstance(dataset, _Distributed | DistributedIterator):
        raise NotADatasetError(f"a {name} is distributed already; iterate it")
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
    if isinstance(dataset, list | tuple) and dataset and not _holds_arrays(dataset[0]):
        raise NotADatasetError(
            f"a {name} whose elements are no arrays is not a data set: {dataset!r:.200}; for one element a row use "
            f"Dataset.from_tensor_slices(…).batch(size), for one a batch a list of NumPy arrays"
        )
    return dataset


def _holds_arrays(element: Any) -> bool:
    leaves = optree.tree_leaves(_nest(element), none_is_leaf=True)
    return any(hasattr(leaf, "shape") and not isinstance(leaf, np.generic) for leaf in leaves)


def _first_of(source: Iterable[Any]) -> Any:
    for element in source:
        return element
    raise InvalidArgumentError("the data set is empty; there is no element to tell its element_spec from")


def _cardinality(source: Any) -> int:
    if isinstance(source, Dataset):
        return source.cardinality()
    try:
        return len(source)
    except TypeError:  # has no length, or, like a DataLoader over a stream, does not know it
        return UNKNOWN_CARDINALITY


def _arrays(element: Any) -> Any:
    """``element`` with arrays at its leaves: those of a device as they are, others as NumPy arrays over the same
    memory. None stays."""
    return optree.tree_map(_array, _nest(element), none_is_leaf=True)


def _nest(element: Any) -> Any:
    # Tokenizers and the like collate into mappings of their own.
    return dict(element) if isinstance(element, Mapping) and not isinstance(element, dict) else element


def _array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, np.ndarray) or hasattr(leaf, "__cuda_array_interface__"):
        return leaf
    if isinstance(leaf, str | bytes) and not isinstance(leaf, np.generic):
        raise InvalidArgumentError(f"an element holds the bare string {leaf!r:.80}; put texts into a NumPy array")
    try:
        return convert_to_tensor(leaf)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"an element of the data set holds a {type(leaf).__name__}, which is not an array: {error}"
        ) from error


def _empty_like(leaf: Any) -> Any:
    if leaf is None:
        return None
    return leaf[:0] if leaf.shape else np.zeros(0, leaf.dtype)
