"""Distributed data sets: the share of each replica in every step.

:class:`DistributedDataset` (``experimental_distribute_dataset``) splits global batches,
:class:`DistributedFromFunction` (``distribute_datasets_from_function``) hands out ready batches in turn; both give a
:class:`DistributedIterator` whenever they are iterated. Elements are PerReplica at the leaves, plain under one
replica. From the second on they are read ahead by a thread. This module knows neither strategy nor processes;
``run_steps`` and the user take elements from it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial, reduce
from types import TracebackType
from typing import Any

import numpy as np
import optree

from central_storage.core.backends import Carriage
from central_storage.core.context import is_in_replica
from central_storage.core.options import InputOptions, InputReplicationMode
from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import as_tensor, tensors_in
from central_storage.core.values import regroup
from cs_proto.errors import (
    CheckpointError,
    DatasetContextError,
    EndOfIterationError,
    InvalidArgumentError,
    NotADatasetError,
    OutOfRangeError,
)
from cs_proto.messages import MOST_AHEAD

from .dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from .element_spec import PerReplicaSpec, TensorSpec, observed
from .input_context import InputContext
from .libraries import Reading, has_state
from .places import Place, length_of, refuse_in_replica, shown
from .plan import END, OptionalElement
from .prefetch import ReadAhead
from .sources import cardinality_of, checked, elements_of, first_of
from .splitting import Carry, arrays_in, empty_like, is_small, split
from .transforms import Order, orders_of, set_orders

__all__ = [
    "DistributedDataset",
    "DistributedFromFunction",
    "DistributedIterator",
    "split",
]

#: Asked when the first element is read ahead.
FindCarriage = Callable[[], Carriage]
#: An element of every replica, whether every replica has a share in it, and the states of the sources after it.
Round = tuple[Any, ...]


class _Distributed(Closed):
    """The common part of both kinds of distributed data set."""

    _sources: list[Any]  # all of one structure and dtype

    def __init__(self, n: int, options: InputOptions | None, carrier: FindCarriage) -> None:
        self._n = n
        self._begun = 0  # iterations
        self._latest: Callable[[], DistributedIterator | None] = _nobody  # the iterator of the last of them
        self._restored: Place | None = None  # where the next iteration starts
        self._carrier = carrier
        self._options = InputOptions() if options is None else options
        if not isinstance(self._options, InputOptions):
            raise TypeError(f"options must be an InputOptions, not {options!r:.100}")
        if self._options.experimental_place_dataset_on_device and not self._is_per_replica:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device needs experimental_replication_mode=InputReplicationMode."
                "PER_REPLICA: one device has no place for the data of all"
            )

    def __iter__(self) -> DistributedIterator:
        """A new iterator: from the beginning or, after a restore, from the saved position."""
        refuse_in_replica("iterated")
        options = self._options
        ahead = options.experimental_per_replica_buffer_size if options.experimental_fetch_to_device else 0
        is_there = {*map(type, self._sources)} <= {list, tuple}
        carry, spec = Carry(), lambda: self.element_spec
        rounds = partial(self._rounds, carry)
        iterator = DistributedIterator(rounds, spec, ahead, self._carrier, self._n, is_there, carry, self)
        place, self._restored = self._restored, None
        if place is None:
            self.is_iterated_by(iterator, self._begun)
        else:
            iterator.go_to(place)
        return iterator

    def __len__(self) -> int:
        """The number of elements. TypeError if it is infinite or unknown; ``cardinality`` tells which."""
        return length_of(int(self.cardinality))

    def __bool__(self) -> bool:
        """True: a data set is something, however many elements it has."""
        return True

    @property
    def cardinality(self) -> Any:
        """The number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """What a notebook shows. No element is read for it, and no step waited for."""
        iterator = self._latest()
        under_way = None if iterator is None or iterator.is_over else (iterator.epoch, iterator.position)
        return shown(type(self).__name__, int(self.cardinality), self._n, self._sources, under_way)

    @property
    def next_position(self) -> int:
        """The position at which the next iteration starts: not 0 after a restore."""
        return 0 if self._restored is None else self._restored.position

    @property
    def epoch(self) -> int:
        """The number, from 0, of the iteration under way or, between two iterations, of the next one. A resumed script
        begins to count here. An iteration that is left half-way counts as one."""
        iterator = self._latest()
        return self._begun - 1 if iterator is not None and not iterator.is_over else self._begun

    def place(self) -> Place:
        """The place of the iteration under way, or the beginning of the next one. Waits for steps that were sent ahead;
        the elements of steps that did not begin are not used. Raises DatasetContextError in a process that the data set
        was sent to."""
        iterator = self._latest()
        if iterator is not None and not iterator.is_over:
            return iterator.place()
        return self._restored or Place(self._begun, 0, self.orders())

    def go_to(self, place: Place) -> None:
        """Let the next iteration continue at ``place``: it reads the elements before ``place`` and drops them."""
        iterator = self._latest()
        if iterator is not None and iterator.is_at(place):
            return  # the iterator was restored itself, or is there already
        self._begun, self._latest, self._restored = place.epoch, _nobody, place if place.position else None
        if self._restored is None:
            self.set_orders(place.orders)

    def is_iterated_by(self, iterator: DistributedIterator, epoch: int) -> None:
        """Note that ``iterator`` is the latest one, and makes iteration number ``epoch``."""
        iterator.epoch, self._begun, self._latest = epoch, epoch + 1, weakref.ref(iterator)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is the substitute in a process that did not make the data set."""
        return isinstance(self._sources[0], _Elsewhere)

    def orders(self) -> tuple[Order, ...]:
        """The orders in which the shuffles begin their next iteration. Raises DatasetContextError in a process that
        the data set was sent to."""
        if self.is_elsewhere:
            raise DatasetContextError(
                "the position of a distributed data set is known only in the script that made it, not where it was "
                "sent with a function; save and restore the checkpoint in the script"
            )
        return tuple(orders_of(self._pipelines()).values())

    def set_orders(self, orders: Sequence[Order]) -> None:
        """Let the next iteration use ``orders``."""
        set_orders(self._pipelines(), orders)

    def fault(self, place: Place) -> str | None:
        """Why no iteration of this data set can be at ``place``, or None. ``place`` has one order for each shuffle."""
        if place.epoch < 0 or place.position < 0 or any(min(order) < 0 for order in place.orders):
            return f"{place} is not a position in a data set"
        for number, (shuffled, order) in enumerate(zip(orders_of(self._pipelines()), place.orders, strict=True)):
            if shuffled.is_seeded and shuffled.state[0] != order[0]:
                return f"its shuffle {number} has the seed {order[0]} there, {shuffled.state[0]} here"
        return None

    @cached_property
    def has_states(self) -> bool:
        """Whether the sources have states that can be saved."""
        return all(map(has_state, self._sources))

    def _readings(self, states: Any) -> list[Reading]:
        """The sources, begun at ``states``."""
        elements = map(elements_of, self._sources)
        return [Reading(*each) for each in zip(elements, states or [None] * len(self._sources), strict=True)]

    def _states(self, readings: Sequence[Reading]) -> Any:
        return [reading.state() for reading in readings]

    def _pipelines(self) -> list[Dataset]:
        return [source for source in self._sources if isinstance(source, Dataset)]

    def _rounds(self, carry: Carry, states: Any = None) -> Iterator[Round]:
        """The rounds, from the beginning or from ``states``."""
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """Over how many replicas the elements are split."""
        return self._n

    @property
    def _is_per_replica(self) -> bool:
        return self._options.experimental_replication_mode is InputReplicationMode.PER_REPLICA

    @property
    def element_spec(self) -> Any:
        """A nest of PerReplicaSpec like an element, of TensorSpec under one replica; an axis 0 of None varies."""
        source = self._sources[0]
        if isinstance(source, Dataset):
            spec = source.element_spec
        else:
            spec = observed(arrays_in(first_of(source)), any_length=True)
        return spec if self._n == 1 else optree.tree_map(self._replica_spec, spec, none_is_leaf=True)

    def _replica_spec(self, spec: TensorSpec | None) -> PerReplicaSpec | None:
        raise NotImplementedError

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """``reduce_func(state, element)`` over all elements.

        Args:
            initial_state: The first state.
            reduce_func: A function of the state and an element that returns the next state.

        Raises:
            Exception: Whatever ``reduce_func`` or the data set raises.
        """
        return reduce(reduce_func, self, initial_state)


class DistributedDataset(_Distributed):
    """Global batches, each split over the replicas. ``strategy.experimental_distribute_dataset`` makes one.

    A batch of B rows gives each of N replicas ``ceil(B / N)`` of them in order; the last replicas may get fewer or
    none. No row is dropped or given twice. It may be iterated again and again.

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(4))
        ...     total = data.reduce(0, lambda state, rows: state + int(strategy.reduce("SUM", rows, axis=0)))
        ...     print(data.cardinality, total)
        2 15
    """

    def __init__(
        self, dataset: Any, n: int, options: InputOptions | None = None, carrier: FindCarriage = Carriage
    ) -> None:
        super().__init__(n, options, carrier)
        self._sources = [_source(dataset)]

    @property
    def cardinality(self) -> Any:
        """The number of global batches as int64, INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2)."""
        return as_tensor(np.int64(cardinality_of(self._sources[0])))

    def _rounds(self, carry: Carry, states: Any = None) -> Iterator[Round]:
        (reading,) = readings = self._readings(states)
        try:
            for element in reading:
                yield split(element, self._n, carry.leaf), True, self._states(readings) if self.has_states else None
        finally:
            reading.close()

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
    takes, batched per replica or not at all. With ``InputReplicationMode.PER_REPLICA`` it is called once for each
    replica, which then takes the elements of that data set. ``for`` and ``next`` leave out a last round in which not
    every replica gets an element; ``get_next_as_optional`` returns it, with empty arrays for the others.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        n: int,
        options: InputOptions | None = None,
        carrier: FindCarriage = Carriage,
    ) -> None:
        super().__init__(n, options, carrier)
        if not callable(dataset_fn):
            raise TypeError(
                f"dataset_fn must be a function of an InputContext that returns a data set, not {dataset_fn!r:.200}"
            )
        pipelines = n if self._is_per_replica else 1
        self._sources = [_source(dataset_fn(InputContext(pipelines, number, n))) for number in range(pipelines)]

    @property
    def cardinality(self) -> Any:
        """The number of complete rounds as int64, INFINITE_CARDINALITY (-1) or UNKNOWN_CARDINALITY (-2)."""
        share = self._n // len(self._sources)
        counts = [cardinality_of(source) for source in self._sources]
        rounds = min((count // share for count in counts if count >= 0), default=INFINITE_CARDINALITY)
        return as_tensor(np.int64(UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else rounds))

    def _rounds(self, carry: Carry, states: Any = None) -> Iterator[Round]:
        iterators = self._readings(states)
        turns = iterators * (self._n // len(iterators))  # the iterator from which each replica takes its element
        while True:
            together = [next(turn, END) for turn in turns]
            elements = [tensors_in(carry.element(arrays_in(each))) for each in together if each is not END]
            if not elements:
                return
            empty = optree.tree_map(empty_like, elements[0], none_is_leaf=True)
            given = iter(elements)
            whole = regroup([empty if element is END else next(given) for element in together])
            yield whole, len(elements) == self._n, self._states(iterators) if self.has_states else None

    def _replica_spec(self, spec: TensorSpec | None) -> PerReplicaSpec | None:
        return None if spec is None else PerReplicaSpec((spec,) * self._n)


class DistributedIterator(Closed):
    """The elements of a distributed data set, once. ``iter`` of a distributed data set makes one.

    The first element is read when it is asked for. When the second is, a thread begins to read, and stays as many
    elements ahead of the caller as ``InputOptions`` says. It copies the elements to memory that the replicas read, so a
    source may fill one array again and again. Elements of a list or tuple of small arrays, which are there already, are
    read when they are asked for. An exception of the data set is raised where its element would have come, and ends the
    iteration. The end, ``close()``, leaving the ``with`` block and dropping the iterator end the thread and free the
    source.

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(3).batch(2))
        ...     with iter(data) as elements:
        ...         print(next(elements), elements.get_next())
        ...         print(elements.get_next_as_optional().has_value())
        ...     elements.close()
        [0 1] [2]
        False
    """

    def __init__(
        self,
        rounds: Callable[..., Iterator[Round]],
        element_spec: Callable[[], Any],
        ahead: int = 0,
        carrier: FindCarriage = Carriage,
        replicas: int = 1,
        is_there: bool = False,
        carry: Carry | None = None,
        data: _Distributed | None = None,
    ) -> None:
        """``rounds`` starts the iteration at the first element or at given states. ``is_there``: the source holds its
        elements and computes none. ``carry`` is applied by ``rounds`` to arrays. ``data`` is the data set."""
        self.has_states = data is not None and data.has_states
        #: Over how many replicas the elements are split.
        self.replicas = replicas
        #: The number, from 0, of the iteration of its data set.
        self.epoch = 0
        self._data = data
        self._begin = rounds
        self._rounds: Iterator[Round] | None = None
        self._spec = element_spec
        self._size = self._ahead = ahead
        self._carrier = carrier
        self._is_there = is_there
        self._carry = carry
        self._has_begun = self._has_ended = False
        self._given_back: deque[Any] = deque()
        #: The number of elements handed out and not given back.
        self.position = 0
        self._skip = 0  # elements that were used before this iteration was restored
        self._orders: tuple[Order, ...] | None = None  # of the shuffles, at the beginning, once they are known
        self._states: dict[int, Any] = {}  # of the sources, at the last positions
        self._borrowers: list[weakref.WeakMethod[Callable[[], int]]] = []

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        element = self.take()
        if element is END:
            raise EndOfIterationError(self._ended)
        return element

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: There is none.
        """
        element = self.take()
        if element is END:
            raise OutOfRangeError(self._ended)
        return element

    @property
    def _ended(self) -> str:
        return f"the data set has ended after {self.position} elements; iterate it again for more"

    def get_next_as_optional(self) -> OptionalElement:
        """The next element, or word that there is none, without an exception; includes an incomplete last round."""
        return OptionalElement(self.take(incomplete=True))

    def give_back(self, elements: Sequence[Any]) -> None:
        """Undo the handing out of ``elements``, the latest ones in their order: they come next again."""
        self._given_back.extendleft(reversed(elements))
        self.position -= len(elements)

    def lend(self, unbegun: Callable[[], int]) -> None:
        """Let the owner of the method ``unbegun`` take elements for steps, as long as that object lives. ``unbegun``
        returns how many of the last elements belong to steps that have not begun."""
        self._borrowers = [weakref.WeakMethod(unbegun), *filter(_is_alive, self._borrowers)]

    def end_lending(self, unbegun: Callable[[], int]) -> None:
        """The owner of ``unbegun`` takes no more elements."""
        self._borrowers = [borrower for borrower in self._borrowers if borrower() != unbegun]

    @property
    def is_over(self) -> bool:
        """Whether the iteration has ended or was closed, and none of its elements is in use."""
        return self._has_ended and not self._given_back and not any(map(_is_alive, self._borrowers))

    def place(self) -> Place:
        """The place of the iteration. Waits for steps that were sent ahead; the elements of steps that did not begin
        are not used. Raises DatasetContextError in a process that the iterator was sent to."""
        assert self._data is not None
        orders = self._data.orders() if self._orders is None else self._orders
        unbegun = sum(count() for borrower in self._borrowers if (count := borrower()) is not None)
        position = self.position - unbegun
        return Place(self.epoch, position, orders, self._states.get(position))

    @property
    def data(self) -> _Distributed | None:
        """The data set; None in a process that the iterator was sent to."""
        return self._data

    def is_at(self, place: Place) -> bool:
        """Whether this iteration is under way and at ``place``."""
        return not self.is_over and self.place()[:3] == place[:3]

    def go_to(self, place: Place) -> None:
        """Continue at ``place``. The next request reads the elements before it again and drops them."""
        assert self._data is not None
        self.close()
        if self._carry is not None:
            self._carry.copy = None
        self._ahead, self._has_begun, self._has_ended = self._size, False, False
        self.position = self._skip = place.position
        self._orders = place.orders
        self._states = {} if place.states is None else {place.position: place.states}
        self._data.is_iterated_by(self, place.epoch)

    def fault(self, place: Place) -> str | None:
        """Why the iteration cannot continue at ``place``, or None. ``place`` has one order for each shuffle."""
        assert self._data is not None
        if any(map(_is_alive, self._borrowers)):
            return "run_steps takes elements from it; leave that loop before the restore"
        return self._data.fault(place)

    def orders(self) -> tuple[Order, ...]:
        """As the data set's."""
        assert self._data is not None
        return self._data.orders()

    @property
    def element_spec(self) -> Any:
        """As the data set's."""
        return self._spec()

    def close(self) -> None:
        """End the iteration: generators are closed, and threads of ``prefetch`` end."""
        rounds, self._rounds, self._has_ended = self._rounds, None, True
        self._given_back.clear()
        if rounds is not None and hasattr(rounds, "close"):
            rounds.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def take(self, incomplete: bool = False) -> Any:
        """The next element, or END. An ``incomplete`` last round is the end, if it is not asked for."""
        if is_in_replica():
            refuse_in_replica("read")
        if self._given_back:
            element = self._given_back.popleft()
        else:
            element, complete, *states = self._read()
            if element is END or not (complete or incomplete):
                self.close()
                return END
            if states and states[0] is not None:
                self._states[self.position + 1] = states[0]
                self._states.pop(self.position - MOST_AHEAD, None)
        self.__dict__["position"] += 1  # at every step, and Closed looks at what is set
        return element

    def _read(self) -> Round:
        if self._has_ended:
            return _LAST
        if self._has_begun and self._ahead and self._rounds is not None:
            carrier = self._carrier()
            if self._carry is not None:
                self._carry.copy = carrier.copy
            if carrier.in_thread:
                self._rounds = ReadAhead(self._rounds, self._ahead)
            self._ahead = 0
        try:
            if self._rounds is None or self._skip:
                self._resume()
            assert self._rounds is not None
            found = next(self._rounds, _LAST)
        except Exception:  # any exception of the source ends it, but not Ctrl-C
            self.close()
            raise
        if not self._has_begun:
            self._has_begun = True
            if self._ahead and self._is_there and is_small(found[0]):
                self._ahead = 0  # a copy takes less time than to wake a thread
                if self._carry is not None:
                    self._carry.copy = partial(np.array, order="K")  # np.copy, without its Python code
            elif self._ahead:
                self._carrier().expect(self._ahead)
        return found

    def _resume(self) -> None:
        """Begin with the first element or, after a restore, with the first unused one. Raises CheckpointError where the
        data ends before that."""
        if self._rounds is None:
            if self._data is not None:
                if self._orders is not None:
                    self._data.set_orders(self._orders)
                elif not self._data.is_elsewhere:
                    self._orders = self._data.orders()
            states = self._states.get(self._skip) if self._skip else None
            if states is not None:
                self._rounds, self._skip = self._begin(states), 0
                return
            self._rounds = self._begin()
        try:
            for used in range(self._skip):
                if next(self._rounds, None) is None:
                    raise CheckpointError(
                        f"the data set has ended after {used} elements, but {self._skip} were used when the checkpoint "
                        "was saved; make it of the data that it had then"
                    )
        except KeyboardInterrupt:  # the next request starts again: an interrupted generator yields nothing more
            rounds, self._rounds = self._rounds, None
            if hasattr(rounds, "close"):
                rounds.close()
            raise
        self._skip = 0


def _nobody() -> None:
    return None


def _is_alive(reference: Callable[[], object]) -> bool:
    return reference() is not None


_LAST = (END, True)


class _Elsewhere:
    """The source of a distributed data set in another process than the one that iterates it."""

    def __iter__(self) -> Iterator[Any]:
        raise DatasetContextError(
            "a distributed data set can be iterated only in the script that made it, not where it was sent with a "
            "function; pass the element: strategy.run(fn, args=(next(iterator),))"
        )


def elsewhere(kind: type) -> DistributedDataset | DistributedIterator:
    """A substitute for a distributed data set or its iterator (``kind``) in another process. Only reading it raises."""
    distributed = DistributedDataset(_Elsewhere(), 1)
    if kind is not DistributedIterator:
        return distributed
    return DistributedIterator(_Elsewhere().__iter__, lambda: distributed.element_spec, data=distributed)


def _source(dataset: Any) -> Any:
    """``dataset``, if it can be distributed and is not yet."""
    if isinstance(dataset, _Distributed | DistributedIterator):
        raise NotADatasetError(f"a {type(dataset).__name__} is distributed already; iterate it")
    return checked(dataset)
