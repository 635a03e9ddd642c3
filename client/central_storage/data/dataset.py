"""Data sets: pipelines of NumPy arrays, called as ``cs.data.Dataset`` with the names of ``tf.data``.

A data set is an immutable description; each ``iter`` runs it from the beginning. As long as a chain only picks rows
of arrays (slices, shuffle, take, skip, shard, repeat, cache), what runs through it are row numbers, and ``batch``
indexes the arrays once a batch; from the first ``map``, ``filter`` or ``batch`` on it is the elements themselves.
Elements are nests (tuples, dicts) of arrays. Rows and batches of the arrays a data set was made from are read-only:
they may be views. Nothing here knows of strategies; ``distributed`` splits what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import optree

from cs_proto.errors import InvalidArgumentError, NotADatasetError
from cs_proto.frozen import frozen, with_changes

from . import transforms
from .arguments import at_least, index_of, signature_of, spread
from .element_spec import TensorSpec, joined, observed, zeros

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Dataset", "numpy_dataset"]

AUTOTUNE = -1
"""For :meth:`Dataset.prefetch`: two elements."""
INFINITE_CARDINALITY = -1
"""The cardinality of a data set without end."""
UNKNOWN_CARDINALITY = -2
"""The cardinality of a data set whose length is known only at its end."""


@frozen
class Plan:
    """How the elements of a data set come about."""

    #: The elements; where ``table`` is set, the numbers of its rows that are the elements.
    stream: Iterable[Any]
    #: Their number, or one of the negative constants above.
    count: int
    spec: Callable[[], Any]
    #: One element to show what elements look like, without a step of any shuffle.
    example: Callable[[], Any]
    table: Any = None


class Dataset:
    """A sequence of elements, each a nest of arrays, that may be iterated again and again.

    :meth:`from_tensor_slices`, :meth:`from_tensors`, :meth:`from_generator`, :meth:`range` and :meth:`zip` make data
    sets. Every other method returns a new data set. Wrong arguments are an ``InvalidArgumentError`` (a ValueError) or,
    where the type is wrong, a TypeError.

    Examples:
        >>> from central_storage.data import Dataset
        >>> for rows in Dataset.range(5).map(lambda x: x * x).batch(2):
        ...     print(rows)
        [0 1]
        [4 9]
        [16]
    """

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError("make a data set with Dataset.from_tensor_slices, from_tensors, from_generator or range")
        self.plan = plan

    # Where data sets begin

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """One element per row: the rows along axis 0 of every array in a nest. Arrays are not copied.

        Args:
            tensors: A nest of arrays of one length. Lists become arrays.

        Raises:
            InvalidArgumentError: There is no array, an array is a scalar, or the lengths differ (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> for x, y in Dataset.from_tensor_slices(([1, 2], [10, 20])):
            ...     print(x, y)
            1 10
            2 20
        """
        table = transforms.as_element(tensors)
        shapes = [leaf.shape for leaf in optree.tree_leaves(table, none_is_leaf=True)]
        if not shapes:
            raise InvalidArgumentError("from_tensor_slices needs at least one array")
        if () in shapes:
            raise InvalidArgumentError("from_tensor_slices needs rows, and a scalar has none; use from_tensors")
        if len({shape[0] for shape in shapes}) > 1:
            raise InvalidArgumentError(f"from_tensor_slices needs arrays of one length along axis 0, not {shapes}")
        return _picking(table, range(shapes[0][0]))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: a nest as a whole. Arrays are not copied.

        Args:
            tensors: A nest of arrays. Lists become arrays.

        Raises:
            InvalidArgumentError: A leaf cannot become an array (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> list(Dataset.from_tensors([1, 2]))
            [array([1, 2], dtype=int32)]
        """
        element = transforms.as_element(tensors)
        return _picking(optree.tree_map(lambda leaf: leaf[None], element, none_is_leaf=True), range(1))

    @staticmethod
    def range(*args: int) -> Dataset:
        """The numbers of Python's ``range(*args)`` as int64 scalars.

        Args:
            *args: Stop; start and stop; or start, stop and step.

        Raises:
            InvalidArgumentError: The step is 0, or there are more numbers than int64 counts (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(number) for number in Dataset.range(2, 8, 3)]
            [2, 5]
        """
        try:
            numbers = range(*args)
            len(numbers)
        except (ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"Dataset.range{args}: {error}") from error
        return _picking(transforms.Numbers(), numbers)

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """The elements of ``generator(*args)``, which is called anew for every iteration.

        Where neither ``output_signature`` nor ``output_types`` is given, ``element_spec`` looks at the first element.

        Args:
            generator: A function that returns an iterable of elements.
            output_types: A nest of dtypes like an element.
            output_shapes: A nest of shapes like an element; it needs ``output_types``.
            args: The arguments of ``generator``.
            output_signature: A nest of ``TensorSpec`` like an element, in place of the two above.

        Raises:
            InvalidArgumentError: While it is iterated: an element does not fit what was said (a ValueError).
            TypeError: ``generator`` cannot be called, or the elements are described in two ways.

        Examples:
            >>> from central_storage.data import Dataset
            >>> def squares(n):
            ...     for number in range(n):
            ...         yield number * number
            >>> [int(each) for each in Dataset.from_generator(squares, args=(3,))]
            [0, 1, 4]
        """
        if not callable(generator):
            raise TypeError(f"from_generator needs a function that returns an iterable, not {generator!r:.200}")
        signature = signature_of(output_types, output_shapes, output_signature)
        stream = transforms.Generated(generator, tuple(args or ()), signature)

        def example() -> Any:
            for element in stream:
                return element
            if signature is None:
                raise InvalidArgumentError(
                    "from_generator: there is no element to infer the signature from; pass output_signature"
                )
            return zeros(signature)

        def spec() -> Any:
            return observed(example(), any_length=True) if signature is None else signature

        return Dataset(Plan(stream, UNKNOWN_CARDINALITY, spec, example))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Elements together; the data set ends with the shortest.

        Args:
            *datasets: ``zip(a, b)`` or ``zip((a, b))`` gives pairs, ``zip({"x": a, "y": b})`` dicts.

        Raises:
            TypeError: An argument is no data set.

        Examples:
            >>> from central_storage.data import Dataset
            >>> for left, right in Dataset.zip(Dataset.range(2), Dataset.range(5, 9)):
            ...     print(left, right)
            0 5
            1 6
        """
        nest: Any = datasets[0] if len(datasets) == 1 else datasets
        parts, treespec = optree.tree_flatten(nest, none_is_leaf=True)
        if isinstance(nest, list) or not parts or not all(isinstance(part, Dataset) for part in parts):
            raise TypeError(f"zip needs data sets, or a tuple or dict of them, not {nest!r:.200}")
        plans = [part.plan for part in parts]
        if UNKNOWN_CARDINALITY in (plan.count for plan in plans):
            count = UNKNOWN_CARDINALITY
        else:
            count = min((plan.count for plan in plans if plan.count >= 0), default=INFINITE_CARDINALITY)
        if all(plan.table is not None and plan.stream == range(plan.count) for plan in plans):
            return _picking(treespec.unflatten(plan.table for plan in plans), range(count))
        return Dataset(
            Plan(
                transforms.Zipped(tuple(parts), treespec),
                count,
                lambda: treespec.unflatten(plan.spec() for plan in plans),
                lambda: treespec.unflatten(plan.example() for plan in plans),
            )
        )

    # The same elements: fewer, more, or in another order

    def take(self, count: int) -> Dataset:
        """The first elements.

        Args:
            count: Their number; -1 takes all.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> len(Dataset.range(5).take(2))
            2
        """
        wanted, have = at_least(-1, count, "take: count"), self.plan.count
        if wanted < 0:
            return self
        left = UNKNOWN_CARDINALITY if have == UNKNOWN_CARDINALITY and wanted else wanted
        return self._pick(transforms.Sliced(self.plan.stream, stop=wanted), left if have < 0 else min(have, wanted))

    def skip(self, count: int) -> Dataset:
        """All but the first elements.

        Args:
            count: The number of elements to skip; -1 skips all.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).skip(3)]
            [3, 4]
        """
        unwanted = at_least(-1, count, "skip: count")
        if unwanted < 0:
            return self.take(0)
        return self._pick(transforms.Sliced(self.plan.stream, unwanted), self._count(lambda n: max(0, n - unwanted)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every ``num_shards``-th element.

        Args:
            num_shards: The number of shards.
            index: The number of the first element, in [0, num_shards).

        Raises:
            InvalidArgumentError: ``index`` is outside [0, num_shards) (a ValueError).
            TypeError: An argument is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).shard(2, 1)]
            [1, 3]
        """
        shards, start = at_least(1, num_shards, "shard: num_shards"), at_least(0, index, "shard: index")
        if start >= shards:
            raise InvalidArgumentError(f"shard: there is no shard {start} of {shards}; the last one is {shards - 1}")
        count = self._count(lambda n: len(range(start, n, shards)))
        return self._pick(transforms.Sliced(self.plan.stream, start, None, shards), count)

    def repeat(self, count: int | None = None) -> Dataset:
        """The elements several times over.

        Args:
            count: How many times; None and -1 repeat without end.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(2).repeat(2)]
            [0, 1, 0, 1]
        """
        times = -1 if count is None else at_least(-1, count, "repeat: count")
        if times < 0:
            have = self.plan.count
            return self._pick(transforms.Repeated(self.plan.stream, None), INFINITE_CARDINALITY if have > 0 else have)
        total = self._count(lambda n: n * times) if times else 0
        return self._pick(transforms.Repeated(self.plan.stream, times), total)

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = None
    ) -> Dataset:
        """The elements in random order.

        Each element is drawn from the next ``buffer_size`` of them. With a buffer as large as the data set every order
        is equally likely.

        Args:
            buffer_size: The number of elements from which one is drawn, at least 1.
            seed: The number from which the orders follow, from 0 to 2**63 - 1. None: it is drawn from NumPy's global
                generator, so ``np.random.seed`` makes a script repeatable.
            reshuffle_each_iteration: Whether each iteration has an order of its own. None: yes.

        Raises:
            InvalidArgumentError: ``buffer_size`` or ``seed`` is out of range (a ValueError).
            TypeError: ``buffer_size`` or ``seed`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> shuffled = [int(each) for each in Dataset.range(4).shuffle(4, seed=1)]
            >>> sorted(shuffled)
            [0, 1, 2, 3]
        """
        size = at_least(1, buffer_size, "shuffle: buffer_size")
        origin = int(np.random.randint(1 << 31)) if seed is None else at_least(0, seed, "shuffle: seed")
        if origin >= 1 << 63:
            raise InvalidArgumentError(f"shuffle: seed must be at most 2**63 - 1, not {origin}")
        reshuffles = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        stream = transforms.Shuffled(self.plan.stream, size, reshuffles, seed is not None, [origin, 0])
        return self._pick(stream, self.plan.count)

    def cache(self) -> Dataset:
        """The same elements, remembered in memory by the first iteration that reaches the end.

        Examples:
            >>> from central_storage.data import Dataset
            >>> len(Dataset.range(3).cache())
            3
        """
        return self._pick(transforms.Cached(self.plan.stream), self.plan.count)

    def prefetch(self, buffer_size: int) -> Dataset:
        """The same elements, some of them computed ahead by a thread.

        Args:
            buffer_size: How many are computed ahead; AUTOTUNE (-1) means 2.

        Raises:
            InvalidArgumentError: ``buffer_size`` is less than -1 (a ValueError).
            TypeError: ``buffer_size`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).prefetch(2)]
            [0, 1, 2]
        """
        size = at_least(-1, buffer_size, "prefetch: buffer_size")
        return self._derive(transforms.Prefetched(self, 2 if size < 0 else size), self.plan.count) if size else self

    def concatenate(self, dataset: Dataset) -> Dataset:
        """The elements of this data set, then those of another.

        Args:
            dataset: A data set whose elements have the same structure and dtypes.

        Raises:
            TypeError: ``dataset`` is no data set, or has another structure or dtypes.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(2).concatenate(Dataset.range(1))]
            [0, 1, 0]
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate needs a data set, not {dataset!r:.200}")
        spec = joined(self.plan.spec(), dataset.plan.spec())
        counts = (self.plan.count, dataset.plan.count)
        # Infinite wins over unknown: the end, which would be unknown, is never reached.
        count = sum(counts) if min(counts) >= 0 else max(c for c in counts if c < 0)
        return self._derive(transforms.Chained((self, dataset)), count, lambda: spec)

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which a function gives a true bool.

        Args:
            predicate: The function, called as by :meth:`map`.

        Raises:
            TypeError: ``predicate`` cannot be called.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).filter(lambda x: x % 2 == 0)]
            [0, 2, 4]
        """
        return self._derive(transforms.Filtered(self, spread(predicate, "filter")), UNKNOWN_CARDINALITY)

    # Other elements

    def map(self, map_func: Callable[..., Any]) -> Dataset:
        """The results of a function of every element.

        Args:
            map_func: The function. A tuple is spread over its arguments. Lists in its result become arrays.

        Raises:
            TypeError: ``map_func`` cannot be called.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).map(lambda x: 10 * x)]
            [0, 10, 20]
        """
        function, plan = spread(map_func, "map"), self.plan

        def example() -> Any:
            return transforms.as_element(function(plan.example()))

        def spec() -> Any:
            sources = optree.tree_leaves(plan.spec(), none_is_leaf=True)
            return observed(example(), any_length=any(s.shape is None or s.shape[:1] == (None,) for s in sources))

        return self._derive(transforms.Mapped(self, function), plan.count, spec, example)

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs ``(number, element)`` with int64 numbers.

        Args:
            start: The first number.

        Raises:
            TypeError: ``start`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [(int(n), int(x)) for n, x in Dataset.range(5, 7).enumerate(1)]
            [(1, 5), (2, 6)]
        """
        origin, plan = index_of(start, "enumerate: start"), self.plan
        return self._derive(
            transforms.Numbered(self, origin),
            plan.count,
            lambda: (TensorSpec((), np.int64), plan.spec()),
            lambda: (np.int64(origin), plan.example()),
        )

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Elements stacked along a new axis 0.

        Args:
            batch_size: The number of elements of a batch, at least 1.
            drop_remainder: Whether a shorter last batch is dropped.

        Raises:
            InvalidArgumentError: ``batch_size`` is less than 1; while it is iterated: elements differ in shape, dtype
                or structure (a ValueError).
            TypeError: ``batch_size`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [rows.tolist() for rows in Dataset.range(3).batch(2)]
            [[0, 1], [2]]
        """
        size, plan = at_least(1, batch_size, "batch: batch_size"), self.plan
        stream: Iterable[Any] = (
            transforms.Stacked(self, size, drop_remainder)
            if plan.table is None
            else transforms.Indexed(plan.table, plan.stream, size, drop_remainder)
        )

        def longer(spec: TensorSpec) -> TensorSpec:
            length = size if drop_remainder else None
            return TensorSpec(None if spec.shape is None else (length, *spec.shape), spec.dtype)

        return self._derive(
            stream,
            self._count(lambda n: n // size if drop_remainder else -(-n // size)),
            lambda: optree.tree_map(longer, plan.spec()),
            lambda: transforms.stack([plan.example()] * (size if drop_remainder else 1)),
        )

    def unbatch(self) -> Dataset:
        """The rows of the elements: the inverse of :meth:`batch`.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).batch(2).unbatch()]
            [0, 1, 2]
        """
        plan = self.plan

        def shorter(spec: TensorSpec) -> TensorSpec:
            return TensorSpec(spec.shape and spec.shape[1:], spec.dtype)

        return self._derive(
            transforms.Unbatched(self),
            UNKNOWN_CARDINALITY,
            lambda: optree.tree_map(shorter, plan.spec()),
            lambda: transforms.first_row(plan.example()),
        )

    # What comes out

    def __iter__(self) -> Iterator[Any]:
        if self.plan.table is None:
            return iter(self.plan.stream)
        return transforms.rows(self.plan.table, self.plan.stream)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """An iterator over the elements, which are NumPy arrays anyway.

        Examples:
            >>> from central_storage.data import Dataset
            >>> int(next(Dataset.range(3).as_numpy_iterator()))
            0
        """
        return iter(self)

    def __len__(self) -> int:
        """The number of elements. TypeError where there is no end or no telling; :meth:`cardinality` says which."""
        if self.plan.count < 0:
            raise TypeError(f"{self!r} has no length")
        return self.plan.count

    def __bool__(self) -> bool:
        """True: a data set is something, however many elements it has."""
        return True

    def cardinality(self) -> int:
        """The number of elements; INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2) where there is none.

        Examples:
            >>> from central_storage.data import Dataset
            >>> Dataset.range(3).cardinality(), Dataset.range(3).repeat().cardinality()
            (3, -1)
        """
        return self.plan.count

    @property
    def element_spec(self) -> Any:
        """A nest of ``TensorSpec`` like an element. After :meth:`map` it is what the function makes of one element,
        which is computed for it."""
        return self.plan.spec()

    def __repr__(self) -> str:
        words = {INFINITE_CARDINALITY: "infinitely many", UNKNOWN_CARDINALITY: "an unknown number of"}
        return f"<Dataset of {words.get(self.plan.count, self.plan.count)} elements>"

    def _pick(self, stream: Iterable[Any], count: int) -> Dataset:
        """The same kind of elements in ``stream``'s order, as row numbers while they are that."""
        return Dataset(with_changes(self.plan, stream=stream, count=count))

    def _derive(
        self,
        stream: Iterable[Any],
        count: int,
        spec: Callable[[], Any] | None = None,
        example: Callable[[], Any] | None = None,
    ) -> Dataset:
        """A data set of the elements of ``stream``, which look like ours where nothing else is said."""
        return Dataset(Plan(stream, count, spec or self.plan.spec, example or self.plan.example))

    def _count(self, function: Callable[[int], int]) -> int:
        return self.plan.count if self.plan.count < 0 else function(self.plan.count)


def numpy_dataset(numpy_input: Any) -> Dataset:
    """The rows of the NumPy arrays in a nest, as :meth:`Dataset.from_tensor_slices` gives them; a list is stacked.

    What is no array is a ``NotADatasetError`` (an AttributeError), numbers of Python included.
    """
    for leaf in optree.tree_leaves(numpy_input, none_is_leaf=True):
        if not hasattr(leaf, "shape"):
            raise NotADatasetError(
                f"a data set of NumPy arrays must be made of arrays, not of {leaf!r:.100}, a {type(leaf).__name__}; "
                "np.asarray makes one"
            )
    return Dataset.from_tensor_slices(numpy_input)


def _picking(table: Any, numbers: range) -> Dataset:
    def spec() -> Any:
        return optree.tree_map(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), table, none_is_leaf=True)

    return Dataset(Plan(numbers, len(numbers), spec, lambda: transforms.first_row(table), table))
