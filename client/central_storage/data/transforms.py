"""The stages of a data set: small immutable objects that return a new iterator for each iteration.

The items of a stage may be elements, or row numbers that are looked up only at the end of the chain (:func:`rows`,
:class:`Indexed`). Only ``dataset`` uses the stages: it combines them and checks their arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optree

from central_storage.core.values import convert_to_tensor
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen

from .element_spec import TensorSpec
from .prefetch import ReadAhead

__all__ = [
    "Cached",
    "Chained",
    "Filtered",
    "Generated",
    "Indexed",
    "Mapped",
    "Numbered",
    "Numbers",
    "Prefetched",
    "Repeated",
    "Shuffled",
    "Sliced",
    "Stacked",
    "TakenWhile",
    "Unbatched",
    "Zipped",
    "as_element",
    "as_result",
    "first_row",
    "next_state",
    "orders_of",
    "rows",
    "set_orders",
    "stack",
]

Stream = Iterable[Any]

#: The order of a shuffle's next iteration: its seed, the number of iterations begun, and whether a cache remembers this
#: order for all later iterations.
Order = tuple[int, int, bool]


@frozen(eq=False)
class Sliced:
    """``source[start:stop:step]``."""

    source: Stream
    start: int = 0
    stop: int | None = None
    step: int = 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.source, self.start, self.stop, self.step)


@frozen(eq=False)
class Repeated:
    """``source`` repeated ``times`` times; without end if ``times`` is None."""

    source: Stream
    times: int | None

    def __iter__(self) -> Iterator[Any]:
        for _ in itertools.count() if self.times is None else range(self.times):
            empty = True
            for item in self.source:
                empty = False
                yield item
            if empty:
                return


@dataclass(frozen=True, eq=False)
class Shuffled:
    """``source`` in random order, each item drawn from a buffer of the next ``size``."""

    source: Stream
    size: int
    reshuffle: bool
    #: Whether the user gave the seed.
    is_seeded: bool
    #: The seed and the number of iterations begun. The order of the next iteration follows from both.
    state: list[int]

    def __iter__(self) -> Iterator[Any]:
        seed, begun = self.state
        self.state[1] += 1
        return self._draw(np.random.default_rng([seed, begun if self.reshuffle else 0]))

    def _draw(self, random: np.random.Generator) -> Iterator[Any]:
        items = iter(self.source)
        buffer = list(itertools.islice(items, self.size))
        while block := list(itertools.islice(items, 1024)):  # one call of the generator for many items
            for item, place in zip(block, random.integers(len(buffer), size=len(block)).tolist(), strict=True):
                yield buffer[place]
                buffer[place] = item
        for place in random.permutation(len(buffer)).tolist():
            yield buffer[place]


@dataclass(frozen=True, eq=False)
class Cached:
    """``source``, remembered by the first iteration that reaches its end."""

    source: Stream
    #: Empty until then; afterwards it holds the one tuple of all items.
    kept: list[tuple[Any, ...]] = field(default_factory=list)
    #: The orders of the shuffles before this stage, as remembered; before the first whole iteration, the orders for it.
    orders: dict[Shuffled, Order] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        if self.kept:
            yield from self.kept[0]
            return
        for shuffled, order in self.orders.items():
            shuffled.state[:] = order[:2]
        orders = {shuffled: (*order[:2], True) for shuffled, order in orders_of([self.source]).items()}
        seen = []
        for item in self.source:
            seen.append(item)
            yield item
        self.orders.update(orders)
        self.kept[:] = [tuple(seen)]


@frozen(eq=False)
class Prefetched:
    """``source``, its next ``size`` items computed ahead by one thread, which ends with the iteration."""

    source: Stream
    size: int

    def __iter__(self) -> Iterator[Any]:
        return ReadAhead(iter(self.source), self.size)


@frozen(eq=False)
class Mapped:
    """The results of ``function`` for every item, as elements."""

    source: Stream
    function: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return (as_result(self.function(item)) for item in self.source)


@frozen(eq=False)
class Filtered:
    """The items for which ``predicate`` gives one true bool."""

    source: Stream
    predicate: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return (item for item in self.source if _is_true(self.predicate(item), "filter"))


@frozen(eq=False)
class TakenWhile:
    """The items before the first one for which ``predicate`` gives one false bool."""

    source: Stream
    predicate: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return itertools.takewhile(lambda item: _is_true(self.predicate(item), "take_while"), self.source)


@frozen(eq=False)
class Generated:
    """The items of ``generator(*arguments)``, checked against ``signature`` (a nest of TensorSpec) if there is one.

    Arrays are copied, because a generator may fill the same array again while later stages still hold it.
    """

    generator: Callable[..., Any]
    arguments: tuple[Any, ...]
    signature: Any

    def __iter__(self) -> Iterator[Any]:
        items = self.generator(*self.arguments)
        if not isinstance(items, Iterable):
            raise TypeError(f"from_generator: the function must return an iterable, not {items!r:.200}")
        return (optree.tree_map(np.array, self._conform(item), none_is_leaf=True) for item in items)

    def _conform(self, item: Any) -> Any:
        if self.signature is None:
            if isinstance(item, list) and any(np.ndim(part) for part in item if hasattr(part, "shape")):
                raise InvalidArgumentError(
                    "from_generator: an element is a list of arrays, which may mean one array or several; yield a "
                    "tuple for several, np.stack(…) for one, or pass output_signature"
                )
            return as_element(item)
        specs, treespec = optree.tree_flatten(self.signature, none_is_leaf=True)
        try:
            leaves = treespec.flatten_up_to(item)
        except ValueError as error:
            raise InvalidArgumentError(f"from_generator: an element does not fit its signature: {error}") from error
        return treespec.unflatten(map(_fitted, leaves, specs))


@frozen(eq=False)
class Zipped:
    """Nests of one item of each of ``sources``, put together by ``treespec``, as long as all have one."""

    sources: tuple[Stream, ...]
    treespec: optree.PyTreeSpec

    def __iter__(self) -> Iterator[Any]:
        return (self.treespec.unflatten(items) for items in zip(*self.sources, strict=False))


@frozen(eq=False)
class Chained:
    """The items of each of ``sources``, one after the other."""

    sources: tuple[Stream, ...]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.sources)


@frozen(eq=False)
class Numbered:
    """Pairs of an int64 number, counted from ``start``, and an item."""

    source: Stream
    start: int

    def __iter__(self) -> Iterator[Any]:
        return ((np.int64(number), item) for number, item in enumerate(self.source, self.start))


@frozen(eq=False)
class Stacked:
    """``size`` elements at a time, stacked one by one: the batch of any elements."""

    source: Stream
    size: int
    drop_remainder: bool

    def __iter__(self) -> Iterator[Any]:
        return map(stack, _groups(self.source, self.size, self.drop_remainder))


@frozen(eq=False)
class Indexed:
    """The rows of ``table`` that ``source`` names, ``size`` at a time, each batch by one look-up an array."""

    table: Any
    source: Iterable[int]
    size: int
    drop_remainder: bool

    def __iter__(self) -> Iterator[Any]:
        leaves, treespec = optree.tree_flatten(self.table, none_is_leaf=True)
        for numbers in _groups(self.source, self.size, self.drop_remainder):
            index = _index(numbers)
            yield treespec.unflatten([_frozen(leaf[index]) for leaf in leaves])


@frozen(eq=False)
class Unbatched:
    """The rows of every element, one by one."""

    source: Stream

    def __iter__(self) -> Iterator[Any]:
        for element in self.source:
            lengths = {np.shape(leaf)[:1] for leaf in optree.tree_leaves(element, none_is_leaf=True)}
            if len(lengths) != 1 or () in lengths:
                raise InvalidArgumentError("unbatch: the arrays of an element must have the same length along axis 0")
            yield from rows(element, range(lengths.pop()[0]))


def orders_of(streams: Iterable[Stream]) -> dict[Shuffled, Order]:
    """The orders of all shuffles in pipelines, always in the same sequence. :func:`set_orders` takes them."""
    found: dict[Shuffled, Order] = {}
    for stream in streams:
        if isinstance(stream, Cached) and stream.orders:
            found |= {shuffled: order for shuffled, order in stream.orders.items() if shuffled not in found}
            continue
        if isinstance(stream, Shuffled):
            seed, begun = stream.state
            found.setdefault(stream, (seed, begun, False))
        found |= {shuffled: order for shuffled, order in orders_of(_behind(stream)).items() if shuffled not in found}
    return found


def set_orders(streams: Sequence[Stream], orders: Iterable[Order]) -> None:
    """Let the next iteration of pipelines use ``orders``, which :func:`orders_of` returned for equal pipelines. Raises
    ValueError for another number of orders than there are shuffles."""
    _set_orders(streams, dict(zip(orders_of(streams), orders, strict=True)))


def _set_orders(streams: Iterable[Stream], orders: dict[Shuffled, Order]) -> None:
    for stream in streams:
        if isinstance(stream, Shuffled):
            stream.state[:] = orders[stream][:2]
        if isinstance(stream, Cached) and (behind := _all_behind(stream)):
            stream.kept.clear()
            stream.orders.clear()
            if all(orders[shuffled][2] for shuffled in behind):
                stream.orders.update({shuffled: orders[shuffled] for shuffled in behind})
        _set_orders(_behind(stream), orders)


def _all_behind(stream: Stream) -> list[Shuffled]:
    found = [stream] if isinstance(stream, Shuffled) else []
    for source in _behind(stream):
        found += [shuffled for shuffled in _all_behind(source) if shuffled not in found]
    return found


def _behind(stream: Any) -> Sequence[Stream]:
    """The stages that a stage, a plan or a data set takes its items from."""
    for name in ("plan", "stream", "source"):
        if hasattr(stream, name):
            return (getattr(stream, name),)
    return getattr(stream, "sources", ())


class Numbers:
    """The table whose row n is n itself, so that a range of numbers costs no memory."""

    # One row of an array is enough for the stages to find the shape and dtype of rows.
    shape, ndim = (1,), 1

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        if isinstance(index, slice):
            return np.arange(index.start, index.stop, dtype=self.dtype)
        return index.astype(self.dtype) if isinstance(index, np.ndarray) else self.dtype.type(index)


def rows(table: Any, numbers: Iterable[int]) -> Iterator[Any]:
    """The rows of the arrays in ``table`` that ``numbers`` name, read-only."""
    leaves, treespec = optree.tree_flatten(table, none_is_leaf=True)
    return (treespec.unflatten([_frozen(leaf[number]) for leaf in leaves]) for number in numbers)


def first_row(table: Any) -> Any:
    """Row 0 of the arrays in ``table``; zeros if there is none."""
    return optree.tree_map(lambda a: a[0] if a.shape[0] else np.zeros(a.shape[1:], a.dtype), table, none_is_leaf=True)


def as_element(nest: Any) -> Any:
    """``nest`` with arrays at its leaves; lists are leaves, and mappings of any kind are dicts."""
    return optree.tree_map(_as_part, nest, is_leaf=lambda value: isinstance(value, list), none_is_leaf=True)


def _as_part(leaf: Any) -> Any:
    return as_element(dict(leaf)) if isinstance(leaf, Mapping) else convert_to_tensor(leaf)


def as_result(nest: Any) -> Any:
    """What a function of :meth:`Dataset.map` returned, as an element. A list is a tuple of components, as in
    TensorFlow: to stack them in silence would be a guess. A list further inside becomes an array."""
    return as_element(tuple(nest) if isinstance(nest, list) else nest)


def next_state(state: Any, result: Any) -> Any:
    """``result`` of a function of ``Dataset.reduce`` as the next state. Raises TypeError if it has another structure or
    dtype than ``state``."""
    following = as_result(result)
    expected, found = (optree.tree_structure(each, none_is_leaf=True) for each in (state, following))
    if expected != found:
        raise TypeError(
            f"reduce: the state must keep its structure, {state!r:.100}, but the function returned {result!r:.100}; "
            "a list that it returns is a tuple, and a list as initial_state is one array"
        )
    for old, new in zip(*(optree.tree_leaves(each, none_is_leaf=True) for each in (state, following)), strict=True):
        if old.dtype != new.dtype and not old.dtype.kind == new.dtype.kind in ("U", "S"):
            raise TypeError(
                f"reduce: the state must keep its dtype, {old.dtype}, but the function returned {new.dtype}; begin "
                f"with an array of the dtype that you mean, such as np.{new.dtype}(0), or cast the result"
            )
    return following


def _is_true(answer: Any, where: str) -> bool:
    array = np.asarray(answer)
    if array.dtype != np.bool_ or array.ndim:
        raise InvalidArgumentError(f"{where}: the predicate must return one bool, not {answer!r:.200}")
    return bool(array)


def stack(elements: Sequence[Any]) -> Any:
    """Elements of one structure, shape and dtype as one, along a new axis 0."""
    leaves, treespec = optree.tree_flatten(elements[0], none_is_leaf=True)
    try:
        columns = [leaves, *map(treespec.flatten_up_to, elements[1:])]
    except ValueError as error:
        raise InvalidArgumentError(f"batch: the elements differ in structure: {error}") from error
    return treespec.unflatten(map(_stack_leaves, zip(*columns, strict=True)))


def _stack_leaves(leaves: Sequence[Any]) -> np.ndarray:
    first, texts = leaves[0], leaves[0].dtype.kind in "US"
    for leaf in leaves[1:]:
        if not isinstance(leaf, np.ndarray | np.generic):
            raise InvalidArgumentError(f"batch: the elements differ in structure: {leaf!r:.200} and {first!r:.200}")
        if leaf.shape != first.shape or (leaf.dtype.kind if texts else leaf.dtype) != (
            first.dtype.kind if texts else first.dtype
        ):
            raise InvalidArgumentError(
                f"batch: {leaf.dtype}{list(leaf.shape)} and {first.dtype}{list(first.shape)}; all elements of a "
                "batch must have the same shape and dtype"
            )
    return np.stack(leaves)


def _fitted(value: Any, spec: TensorSpec) -> np.ndarray:
    array = convert_to_tensor(value, spec.dtype)
    if not spec.admits(array.shape):
        raise InvalidArgumentError(f"from_generator: an array has shape {array.shape}, but the signature says {spec}")
    return array


def _groups(source: Stream, size: int, drop_remainder: bool) -> Iterator[list[Any]]:
    items = iter(source)
    while group := list(itertools.islice(items, size)):
        if drop_remainder and len(group) < size:
            return
        yield group


def _index(numbers: list[int]) -> slice | np.ndarray:
    """``numbers`` as an index: a slice if they are consecutive, so that no row is copied."""
    index = np.array(numbers, dtype=np.intp)
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 and bool((np.diff(index) == 1).all()):
        return slice(first, last + 1)
    return index


def _frozen(rows_of_table: Any) -> Any:
    """Read-only, since it may be a view of an array that outlives it and belongs to the user."""
    if isinstance(rows_of_table, np.ndarray):
        rows_of_table.flags.writeable = False
    return rows_of_table
