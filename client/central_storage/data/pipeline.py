"""The common part of data sets: their elements, and the methods that select or reorder them.

:class:`Pipeline` is the base of ``Dataset``, which adds sources and the methods that change elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np

from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import as_tensor, tensors_in
from central_storage.diagnostics.html import section, table
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import with_changes

from . import transforms
from .arguments import at_least, check_flag, check_unused, spread
from .element_spec import joined
from .options import Options, merged
from .plan import DatasetIterator, Plan

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Pipeline", "Plan", "say_cardinality"]

AUTOTUNE = -1
"""For :meth:`Dataset.prefetch`: two elements. For ``num_parallel_calls``: without effect, as any number."""
INFINITE_CARDINALITY = -1
"""The cardinality of a data set without end."""
UNKNOWN_CARDINALITY = -2
"""The cardinality of a data set whose length is known only at its end."""


def say_cardinality(count: int) -> str:
    """A number of elements, or one of the constants, in words."""
    return {INFINITE_CARDINALITY: "infinitely many", UNKNOWN_CARDINALITY: "an unknown number of"}.get(count, str(count))


class Pipeline(Closed):
    """A sequence of elements that may be iterated again and again."""

    __slots__ = ("__weakref__", "plan")

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError("make a data set with Dataset.from_tensor_slices, from_tensors, from_generator or range")
        self.plan = plan

    # The same elements: fewer, more, or in another order

    def take(self, count: int, name: str | None = None) -> Self:
        """The first elements.

        Args:
            count: Their number; -1 takes all.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> len(Dataset.range(5).take(2))
            2
        """
        check_unused("take", name=name)
        wanted, have = at_least(-1, count, "take: count"), self.plan.count
        if wanted < 0:
            return self
        left = UNKNOWN_CARDINALITY if have == UNKNOWN_CARDINALITY and wanted else wanted
        return self._pick(transforms.Sliced(self.plan.stream, stop=wanted), left if have < 0 else min(have, wanted))

    def skip(self, count: int, name: str | None = None) -> Self:
        """All but the first elements.

        Args:
            count: The number of elements to skip; -1 skips all.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).skip(3)]
            [3, 4]
        """
        check_unused("skip", name=name)
        unwanted = at_least(-1, count, "skip: count")
        if unwanted < 0:
            return self.take(0)
        return self._pick(transforms.Sliced(self.plan.stream, unwanted), self._count(lambda n: max(0, n - unwanted)))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Self:
        """Every ``num_shards``-th element.

        Args:
            num_shards: The number of shards.
            index: The number of the first element, in [0, num_shards).
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``index`` is outside [0, num_shards) (a ValueError).
            TypeError: An argument is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).shard(2, 1)]
            [1, 3]
        """
        check_unused("shard", name=name)
        shards, start = at_least(1, num_shards, "shard: num_shards"), at_least(0, index, "shard: index")
        if start >= shards:
            raise InvalidArgumentError(f"shard: there is no shard {start} of {shards}; the last one is {shards - 1}")
        count = self._count(lambda n: len(range(start, n, shards)))
        return self._pick(transforms.Sliced(self.plan.stream, start, None, shards), count)

    def repeat(self, count: int | None = None, name: str | None = None) -> Self:
        """The elements several times over.

        Args:
            count: How many times; None and -1 repeat without end.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``count`` is less than -1 (a ValueError).
            TypeError: ``count`` is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(2).repeat(2)]
            [0, 1, 0, 1]
        """
        check_unused("repeat", name=name)
        times = -1 if count is None else at_least(-1, count, "repeat: count")
        if times < 0:
            have = self.plan.count
            return self._pick(transforms.Repeated(self.plan.stream, None), INFINITE_CARDINALITY if have > 0 else have)
        total = self._count(lambda n: n * times) if times else 0
        return self._pick(transforms.Repeated(self.plan.stream, times), total)

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """The elements in random order.

        Each element is drawn from the next ``buffer_size`` of them. With a buffer as large as the data set every order
        is equally likely.

        Args:
            buffer_size: The number of elements from which one is drawn, at least 1.
            seed: The number from which the orders follow, from 0 to 2**63 - 1. None: it is drawn from NumPy's global
                generator, so ``np.random.seed`` makes a script repeatable.
            reshuffle_each_iteration: Whether each iteration has an order of its own. None: yes.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``buffer_size`` or ``seed`` is out of range (a ValueError).
            TypeError: ``buffer_size`` or ``seed`` is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> shuffled = [int(each) for each in Dataset.range(4).shuffle(4, seed=1)]
            >>> sorted(shuffled)
            [0, 1, 2, 3]
        """
        check_unused("shuffle", name=name)
        size = at_least(1, buffer_size, "shuffle: buffer_size")
        origin = int(np.random.randint(1 << 31)) if seed is None else at_least(0, seed, "shuffle: seed")
        if origin >= 1 << 63:
            raise InvalidArgumentError(f"shuffle: seed must be at most 2**63 - 1, not {origin}")
        reshuffles = reshuffle_each_iteration is None or check_flag(
            reshuffle_each_iteration, "shuffle: reshuffle_each_iteration"
        )
        stream = transforms.Shuffled(self.plan.stream, size, reshuffles, seed is not None, [origin, 0])
        return self._pick(stream, self.plan.count)

    def cache(self, filename: str = "", name: str | None = None) -> Self:
        """The same elements, remembered in memory by the first iteration that reaches the end.

        Args:
            filename: Empty: there are no caches in files.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: A file is named (a ValueError).
            TypeError: ``filename`` is not a str.

        Examples:
            >>> from central_storage.data import Dataset
            >>> len(Dataset.range(3).cache())
            3
        """
        check_unused("cache", name=name)
        if not isinstance(filename, str):
            raise TypeError(f"cache: filename must be a str, not {filename!r:.100}")
        if filename:
            raise InvalidArgumentError(
                f"cache: there are no caches in files such as {filename!r}; cache() remembers the elements in memory, "
                "and np.save writes them to a file"
            )
        return self._pick(transforms.Cached(self.plan.stream), self.plan.count)

    def prefetch(self, buffer_size: int, name: str | None = None) -> Self:
        """The same elements, some of them computed ahead by a thread.

        Args:
            buffer_size: How many are computed ahead; AUTOTUNE (-1) means 2.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``buffer_size`` is less than -1 (a ValueError).
            TypeError: ``buffer_size`` is not an int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).prefetch(2)]
            [0, 1, 2]
        """
        check_unused("prefetch", name=name)
        size = at_least(-1, buffer_size, "prefetch: buffer_size")
        return (
            self._derive(transforms.Prefetched(self.plan, 2 if size < 0 else size), self.plan.count) if size else self
        )

    def concatenate(self, dataset: Self, name: str | None = None) -> Self:
        """The elements of this data set, then those of another.

        Args:
            dataset: A data set whose elements have the same structure and dtypes.
            name: Accepted, without effect.

        Raises:
            TypeError: ``dataset`` is not a data set, or has another structure or dtypes.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(2).concatenate(Dataset.range(1))]
            [0, 1, 0]
        """
        check_unused("concatenate", name=name)
        if not isinstance(dataset, Pipeline):
            raise TypeError(f"concatenate needs a data set, not {dataset!r:.200}")
        spec = joined(self.plan.spec(), dataset.plan.spec())
        counts = (self.plan.count, dataset.plan.count)
        # Infinite wins over unknown: the end, which would be unknown, is never reached.
        count = sum(counts) if min(counts) >= 0 else max(c for c in counts if c < 0)
        return self._derive(transforms.Chained((self.plan, dataset.plan)), count, lambda: spec)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Self:
        """The elements for which a function gives a true bool.

        Args:
            predicate: The function, called as by :meth:`map`.
            name: Accepted, without effect.

        Raises:
            TypeError: ``predicate`` cannot be called.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).filter(lambda x: x % 2 == 0)]
            [0, 2, 4]
        """
        check_unused("filter", name=name)
        return self._derive(transforms.Filtered(self.plan, spread(predicate, "filter")), UNKNOWN_CARDINALITY)

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Self:
        """The elements before the first one for which a function gives a false bool.

        Args:
            predicate: The function, called as by :meth:`map`.
            name: Accepted, without effect.

        Raises:
            TypeError: ``predicate`` cannot be called.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).take_while(lambda x: x < 2)]
            [0, 1]
        """
        check_unused("take_while", name=name)
        return self._derive(transforms.TakenWhile(self.plan, spread(predicate, "take_while")), UNKNOWN_CARDINALITY)

    def with_options(self, options: Options, name: str | None = None) -> Self:
        """The same elements, with options that change nothing: see :class:`Options`.

        Args:
            options: The options. Those that are not set stay as they were.
            name: Accepted, without effect.

        Raises:
            TypeError: ``options`` is not a ``cs.data.Options``.

        Examples:
            >>> from central_storage.data import Dataset, Options
            >>> options = Options()
            >>> options.deterministic = True
            >>> [int(each) for each in Dataset.range(2).with_options(options)]
            [0, 1]
        """
        check_unused("with_options", name=name)
        if not isinstance(options, Options):
            raise TypeError(f"with_options needs a cs.data.Options, not {options!r:.100}")
        return type(self)(with_changes(self.plan, options=merged(self.options(), options)))

    def options(self) -> Options:
        """A copy of the options of this data set.

        Examples:
            >>> from central_storage.data import Dataset
            >>> Dataset.range(2).options().deterministic is None
            True
        """
        return Options() if self.plan.options is None else copy.deepcopy(self.plan.options)

    # What comes out

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self.plan)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """An iterator over the elements as plain NumPy arrays and numbers.

        Examples:
            >>> from central_storage.data import Dataset
            >>> int(next(Dataset.range(3).as_numpy_iterator()))
            0
        """
        return iter(self.plan)

    def __len__(self) -> int:
        """The number of elements. TypeError if it is infinite or unknown; :meth:`cardinality` tells which."""
        if self.plan.count == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite. Use take(n) for its first n elements")
        if self.plan.count == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset length is unknown. Iterate it to count its elements")
        return self.plan.count

    def __bool__(self) -> bool:
        """True: a data set is something, however many elements it has."""
        return True

    def cardinality(self, name: str | None = None) -> Any:
        """The number of elements as int64; INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2) if there is none.

        Args:
            name: Accepted, without effect.

        Raises:
            TypeError: ``name`` is not a str.

        Examples:
            >>> from central_storage.data import Dataset
            >>> Dataset.range(3).cardinality().numpy(), int(Dataset.range(3).repeat().cardinality())
            (np.int64(3), -1)
        """
        check_unused("cardinality", name=name)
        return as_tensor(np.int64(self.plan.count))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None) -> Any:
        """``reduce_func(state, element)`` of all elements, one after the other.

        The state keeps its structure and dtypes. A Python int begins as int32 and a float as float32, so count int64
        elements from ``np.int64(0)``.

        Args:
            initial_state: The first state, a nest of arrays. Lists become arrays.
            reduce_func: A function of the state and an element that returns the next state. A tuple is one argument. A
                list that it returns is a tuple, as in :meth:`map`.
            name: Accepted, without effect.

        Returns:
            The last state.

        Raises:
            TypeError: ``reduce_func`` cannot be called, or the next state has another structure or dtype.

        Examples:
            >>> import numpy as np
            >>> from central_storage.data import Dataset
            >>> int(Dataset.range(5).reduce(np.int64(0), lambda total, number: total + number))
            10
        """
        check_unused("reduce", name=name)
        if not callable(reduce_func):
            raise TypeError(f"reduce needs a function of the state and an element, not {reduce_func!r:.200}")
        state = tensors_in(transforms.as_element(initial_state))
        for element in self:
            state = transforms.next_state(state, reduce_func(state, element))
        return tensors_in(state)

    def get_single_element(self, name: str | None = None) -> Any:
        """The element of a data set that has only one.

        Args:
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: There is no element, or more than one (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> Dataset.range(3).batch(3).get_single_element().tolist()
            [0, 1, 2]
        """
        check_unused("get_single_element", name=name)
        found = list(self.take(2))
        if len(found) != 1:
            number = "none" if not found else "more"
            raise InvalidArgumentError(f"get_single_element: the data set must have one element, but it has {number}")
        return found[0]

    @property
    def element_spec(self) -> Any:
        """The structure of an element, as a nest of ``TensorSpec``. After :meth:`map`, one element is computed to find
        it."""
        return self.plan.spec()

    def _repr_html_(self) -> str:
        """What a notebook shows. No element is computed for it, so the spec is there only where rows are picked."""
        rows: list[tuple[object, object]] = [("elements", say_cardinality(self.plan.count))]
        if self.plan.table is not None:
            rows.append(("element", self.plan.spec()))
        return section("Dataset", table(rows))

    def __repr__(self) -> str:
        return f"<Dataset of {say_cardinality(self.plan.count)} element{'s' * (self.plan.count != 1)}>"

    def _pick(self, stream: Iterable[Any], count: int) -> Self:
        """The same kind of elements in ``stream``'s order, as row numbers while they are that."""
        return type(self)(with_changes(self.plan, stream=stream, count=count))

    def _derive(
        self,
        stream: Iterable[Any],
        count: int,
        spec: Callable[[], Any] | None = None,
        example: Callable[[], Any] | None = None,
    ) -> Self:
        """A data set of the elements of ``stream``, with the spec of this one unless ``spec`` is given."""
        plan = self.plan
        return type(self)(Plan(stream, count, spec or plan.spec, example or plan.example, None, plan.options))

    def _count(self, function: Callable[[int], int]) -> int:
        return self.plan.count if self.plan.count < 0 else function(self.plan.count)
