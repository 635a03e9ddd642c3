"""Checkpoints: the arrays in a nest of objects, their names in the file, and how they are restored.

One file is one checkpoint; ``writing`` writes it, and ``stored`` reads it. The name of an array is the path that leads
to it from the names given: ``model/layers/0/kernel``, ``optimizer/iterations``, ``optimizer/m/model/layers/0/kernel``.
The central value is saved, so a file depends on neither replicas nor devices. ``train`` and ``strategy`` use this
module.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from central_storage.core import between_steps, opening
from central_storage.core.backends import Strategy
from central_storage.core.composites import Composite
from central_storage.core.context import get_replica_context, has_strategy, require_cross_replica
from central_storage.core.handles import Handle, handle_id
from central_storage.core.public_objects import Closed
from central_storage.data.dataset import Dataset
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator
from central_storage.optimizers import GradientAccumulator, Optimizer
from central_storage.pickling.code_analysis import is_users
from central_storage.variables.moving_averages import ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto.arrays import dtype_name
from cs_proto.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    ContextError,
    InvalidArgumentError,
)

from . import disk
from .disk import SUFFIX
from .entries import (
    TOGETHER_NBYTES,
    Entries,
    Entry,
    Named,
    Setting,
    of_average,
    of_data,
    of_optimizer,
    of_slot,
    of_steps,
    of_strategy,
    of_sum,
    read_together,
)
from .renaming import with_names
from .status import Status, difference
from .stored import Stored, reading
from .writing import Block, add, replace

__all__ = [
    "SUFFIX",
    "Walked",
    "check",
    "copies",
    "find_file",
    "find_unnumbered",
    "has_parts",
    "parts",
    "require_trackable",
    "restore",
    "save",
    "save_next",
    "strategies_of",
]

_log = logging.getLogger("central_storage.saving")

_DATA = DistributedDataset | DistributedFromFunction
# The name of a strategy's own entries. A file without them can be restored, such as an older one or one of variables
# outside every strategy, and entries that no object uses are not an error.
_STRATEGY = "(strategy)"
# Stands where the entries of slots have the name of the slot. No rule has a slot of this name.
_STEPS = "steps"


class Walked(Closed):
    """Base of this project's objects whose attributes are saved: a Checkpoint in a Checkpoint."""


@dataclass
class _Found:
    """The content of a nest of objects. A variable has the name of the first path that leads to it."""

    variables: dict[Variable, list[str]] = field(default_factory=dict)
    optimizers: dict[Optimizer, str] = field(default_factory=dict)
    averages: dict[ExponentialMovingAverage, str] = field(default_factory=dict)
    accumulators: dict[GradientAccumulator, str] = field(default_factory=dict)
    iterators: dict[DistributedIterator, str] = field(default_factory=dict)
    data: dict[DistributedDataset | DistributedFromFunction, str] = field(default_factory=dict)

    def label(self, variable: Variable) -> str:
        """The label of a variable in an optimizer or average. A variable that was not given is labelled by its name."""
        ways = self.variables.get(variable)
        return ways[0] if ways else f"({variable.name})"

    def labels(self) -> dict[str, Variable]:
        """Every variable for which an optimizer or average may hold a value, by its label there."""
        others = {
            f"({variable.name})": variable
            for strategy in self.strategies()
            for variable in strategy.variables
            if variable not in self.variables
        }
        return others | {ways[0]: variable for variable, ways in self.variables.items()}

    def _slotted(self, optimizer: Optimizer, strategy: Strategy) -> list[tuple[str, Variable]]:
        """The variables beside which an optimizer of ``strategy`` has slots, with their labels. Unlike
        ``Optimizer.slots`` it does not ask the server for all variables."""
        known = {each.number: each for each in self.variables if each.strategy is strategy}
        numbers = strategy.controller.slotted(handle_id(optimizer)[1])
        if known.keys() >= set(numbers):
            return [(self.variables[known[number]][0], known[number]) for number in numbers]
        found = dict.fromkeys(variable for variable, _ in optimizer.slots())
        return [(self.label(variable), variable) for variable in found]

    def strategies(self) -> list[Strategy]:
        owners: list[Any] = [*self.variables, *self.optimizers, *self.averages, *self.accumulators]
        found = dict.fromkeys([owner.strategy for owner in owners])
        return [strategy for strategy in found if strategy is not None]

    def entries(self) -> Entries:
        """All arrays. Raises CheckpointError if two of them have one name."""
        found = Entries()
        found.add((ways[0], variable) for variable, ways in self.variables.items())
        for optimizer, way in self.optimizers.items():
            found.put(of_optimizer(optimizer, way))
            if optimizer.strategy is None:  # it has only the slots that were set
                for variable, slot in optimizer.slots():
                    found.put({f"{way}/{slot}/{self.label(variable)}": of_slot(optimizer, variable, slot)})
            else:
                found.add_slots(optimizer, _ways_of(optimizer, way), self._slotted(optimizer, optimizer.strategy))
            if counted := optimizer.counted():
                for variable, count in zip(counted, optimizer.steps_of(counted), strict=True):
                    found.put({f"{way}/{_STEPS}/{self.label(variable)}": of_steps(optimizer, variable, count)})
        for average, way in self.averages.items():
            found.add((f"{way}/{self.label(variable)}", shadow) for variable, shadow in average.averages())
        for accumulator, way in self.accumulators.items():
            found.add((f"{way}/{name}", variable) for name, variable in accumulator.sums())
        # Iterators come first: if the iterator of a data set is given, too, the data set has the position of the
        # iterator.
        for data, way in (*self.iterators.items(), *self.data.items()):
            found.put(of_data(data, way))
        for number, strategy in enumerate(self.strategies()):
            found.put(of_strategy(strategy, f"{_STRATEGY}{number or ''}"))
        found.check_names(way for ways in self.variables.values() for way in {*ways[1:]} - {ways[0]})
        return found

    def prefixes(self) -> list[str]:
        """What may stand before the name of a variable in a file: nothing, or the place of its slots and averages."""
        slots = [f"{way}/{slot}/" for each, way in self.optimizers.items() for slot in (*each.slot_names, _STEPS)]
        return ["", *slots, *(f"{way}/" for way in self.averages.values())]

    def to_be_made(self, keys: Iterable[str]) -> Entries:
        """The arrays among ``keys`` that do not exist yet and are made by setting them: slots, averages and sums of
        gradients."""
        found = Entries()
        if not (keys := list(keys)):
            return found
        labels = self.labels()
        for optimizer, way in self.optimizers.items():
            for slot, before in _ways_of(optimizer, way).items():
                found.add_slots(optimizer, {slot: before}, _behind(before, keys, labels))
            if optimizer.counts_by_variable:
                for label, variable in _behind(f"{way}/{_STEPS}/", keys, labels):
                    found.single[f"{way}/{_STEPS}/{label}"] = of_steps(optimizer, variable, 0)
        for average, way in self.averages.items():
            for label, variable in _behind(f"{way}/", keys, labels):
                found.single[f"{way}/{label}"] = of_average(average, variable)
        for accumulator, way in self.accumulators.items():
            for key in keys:
                name = key.removeprefix(f"{way}/")
                if name != key and accumulator.is_name(name):
                    found.single[key] = of_sum(accumulator, name)
        return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would look at the objects for thousands of arrays again and again. As a
    decorator it ends when they are gone."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@_uncollected()
def save(path: str, objects: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Write all values of ``objects``, and the fields ``more`` of the index, to ``path``, atomically. An existing file
    is replaced.

    Raises ContextError in a replica, CheckpointSaveError and CheckpointError as :func:`writing.replace`.
    """
    with _all_of(objects, more) as (blocks, index):
        replace(path, blocks, index)


@_uncollected()
def save_next(
    path_of: Callable[[int], str],
    next_number: Callable[[], int],
    objects: Mapping[str, Any],
    more: Mapping[str, Any],
) -> tuple[str, int]:
    """As :func:`save`, but to the path of the next free number: see :func:`writing.add`. Returns the path and its
    number, which is the ``save_counter`` of the index."""
    with _all_of(objects, more) as (blocks, index):
        return add(path_of, next_number, blocks, index)


@contextlib.contextmanager
def _all_of(
    objects: Mapping[str, Any], more: Mapping[str, Any], *, copied: bool = False
) -> Iterator[tuple[list[Block], dict[str, Any]]]:
    """All arrays to save, as of one moment, and the index. If not ``copied``, the values must be read in the block."""
    _refuse_in_replica("saved")
    opening.before_save()
    found = _find(objects)
    with _held(found.strategies()):
        other_ways = {way: ways[0] for ways in found.variables.values() for way in ways[1:]}
        yield read_together(found.entries(), copied=copied), {"also": other_ways, **more}


@_uncollected()
def copies(objects: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[list[Block], dict[str, Any]]:
    """Copies of all values of ``objects``, as of one moment, and the index: what :func:`replace` and :func:`add` of
    ``writing`` write. Raises ContextError in a replica."""
    with _all_of(objects, more, copied=True) as found:
        return found


def strategies_of(objects: Mapping[str, Any]) -> list[Strategy]:
    """The strategies that ``objects`` belong to."""
    return _find(objects).strategies()


def check(path: str) -> None:
    """Read a file back from the disk.

    Raises CheckpointDamagedError if it does not hold what was written, CheckpointError if it is gone, OSError if the
    file system refuses.
    """
    with reading(path, "checking", from_disk=True) as stored:
        stored.verify()


@_uncollected()
def restore(
    path: str, objects: Mapping[str, Any], *, strict: bool, renamed: Mapping[str, str] | None = None
) -> tuple[Status, Mapping[str, Any]]:
    """Set the values of ``objects`` to those of ``path``. Returns the differences and the index.

    ``renamed`` gives objects that have another name in the file: see :func:`renaming.with_names`. Everything is checked
    before anything is set; with ``strict`` a difference is an error.

    Raises CheckpointError (a ValueError) if the file does not exist, has a newer format, or has an array of another
    shape or dtype, CheckpointDamagedError if it is damaged or renamed, CheckpointMismatchError for differences, OSError
    if the file system refuses, ContextError in a replica and inside another strategy's scope.
    """
    _refuse_in_replica("restored")
    found = _find(objects)
    strategies = found.strategies()
    for strategy in strategies:
        require_cross_replica(strategy, "restoring a checkpoint")
    with reading(path, kept_nbytes=TOGETHER_NBYTES) as opened, _held(strategies):
        stored = opened if not renamed else with_names(path, opened, renamed, found.prefixes())
        plan, missing = _planned(path, found, stored)
        used = plan.names()
        if others := stored.keys - used:  # first those that take memory, because there may be too little
            plan = plan.after(found.to_be_made(others))
            used = plan.names()
        unused = {key for key in others - used if not key.startswith(_STRATEGY)}
        if wrong := plan.faults(stored):
            raise CheckpointError(f"{path} does not fit: {'; '.join(wrong)}. Nothing was restored")
        if strict and (missing or unused):
            raise CheckpointMismatchError(f"{path}: {difference(missing, unused)}. Nothing was restored")
        stored.verify()
        for key, entry in plan.single:
            if why := entry.misfit or (entry.fault and entry.fault(stored.array(key))):
                raise CheckpointError(f"{path} does not fit: {key}: {why}. Nothing was restored")
        _set(path, stored, plan)
        matched = len(used) - sum(key.startswith(_STRATEGY) for key, _ in plan.single)
        return Status(path, missing, unused, matched), stored.index


@dataclass
class _Plan:
    """What is set: entries and columns, by the names of their arrays in the file."""

    columns: list[Named]
    single: list[tuple[str, Entry]]

    def names(self) -> set[str]:
        """The names in the file."""
        return {key for key, _ in self.single}.union(*(each.keys for each in self.columns))

    def after(self, first: Entries) -> _Plan:
        """The plan to set ``first``, and then what this one sets."""
        return _Plan([*first.columns, *self.columns], [*first.single.items(), *self.single])

    def faults(self, stored: Stored) -> list[str]:
        """What has another dtype or shape in the file."""
        columns = [stored.faults(each.keys, each.column.dtype, each.column.shapes) for each in self.columns]
        single = [
            stored.faults([key], dtype_name(entry.dtype), [entry.shape])
            for key, entry in self.single
            if not entry.varies
        ]
        return [fault for faults in (*columns, *single) for fault in faults]


def _planned(path: str, found: _Found, stored: Stored) -> tuple[_Plan, list[str]]:
    """What both the objects and the file have, and the names that the file lacks."""
    also = stored.index["also"]
    ways = {ways[0]: ways for ways in found.variables.values()}

    def key_of(name: str) -> str | None:
        keys = (also.get(way, way) for way in ways.get(name, [name]))
        return next((key for key in keys if key in stored.keys), None)

    plan, missing = _Plan([], []), []
    entries = found.entries()
    for each in entries.columns:
        if stored.keys.issuperset(each.keys):
            plan.columns.append(each)
            continue
        keys = [name if name in stored.keys else key_of(name) for name in each.keys]
        missing += [name for name, key in zip(each.keys, keys, strict=True) if key is None]
        plan.columns.append(each.renamed(keys))
    for name, entry in entries.single.items():
        if (there := key_of(name)) is not None:
            plan.single.append((there, entry))
        elif not name.startswith(_STRATEGY) and not entry.varies:
            missing.append(name)
        elif name.endswith("/steps") and f"{_STRATEGY}/seed" in stored.keys:
            _log.warning(
                "an older version saved %s, which did not count the runs of each function; random numbers "
                "continue from the runs that this strategy has counted",
                path,
            )
    return plan, missing


def _set(path: str, stored: Stored, plan: _Plan) -> None:
    setting = Setting(stored)
    try:
        for each in plan.columns:
            setting.set_column(each)
        for key, entry in plan.single:
            setting.set(entry, key)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(
            f"{path} changed while it was being read, after {setting.count} of {len(plan.names())} arrays were set; "
            "restore another checkpoint to set all of them"
        ) from error
    setting.flush()


# --- the content of objects ---------------------------------------------------------------------------------------


def require_trackable(name: str, value: Any) -> None:
    """Raise InvalidArgumentError if ``value`` cannot hold a variable."""
    if isinstance(value, Variable | Optimizer | list | tuple | Mapping) or _is_walked(value):
        return
    if isinstance(value, DistributedIterator | _DATA):
        return
    if isinstance(value, Dataset):
        raise InvalidArgumentError(
            f"{name} is a Dataset, which has no position; give the distributed data set that is made from it, "
            "strategy.experimental_distribute_dataset(dataset), or its iterator"
        )
    raise InvalidArgumentError(
        f"{name} is a {type(value).__name__}, which holds no variables; a checkpoint takes variables, optimizers, "
        "metrics, moving averages, distributed data sets and their iterators, and lists, dicts and objects of them"
    )


def _find(objects: Mapping[str, Any]) -> _Found:
    found = _Found()
    seen: dict[int, Any] = {}
    left = deque(objects.items())
    while left:  # breadth first, because the shortest path is the name
        way, value = left.popleft()
        if isinstance(value, Variable):
            found.variables.setdefault(value, []).append(way)
        elif isinstance(value, Optimizer):
            found.optimizers.setdefault(value, way)
        elif isinstance(value, ExponentialMovingAverage):
            found.averages.setdefault(value, way)
        elif isinstance(value, GradientAccumulator):
            found.accumulators.setdefault(value, way)
        elif isinstance(value, DistributedIterator):
            found.iterators.setdefault(value, way)
        elif isinstance(value, _DATA):
            found.data.setdefault(value, way)
        elif id(value) not in seen:
            seen[id(value)] = value
            left.extend((f"{way}/{name}", part) for name, part in parts(value))
    return found


def _ways_of(optimizer: Optimizer, way: str) -> dict[str, str]:
    """What stands before the label of a variable in the name of each slot."""
    return {slot: f"{way}/{slot}/" for slot in optimizer.slot_names}


def _behind(prefix: str, keys: Iterable[str], labels: Mapping[str, Variable]) -> list[tuple[str, Variable]]:
    """The labels that stand behind ``prefix`` in ``keys``, with their variables."""
    rests = (key[len(prefix) :] for key in keys if key.startswith(prefix))
    return [(rest, labels[rest]) for rest in rests if rest in labels]


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The items or attributes of ``value``, with their names in a path."""
    for name, part in _named(value):
        yield str(name).replace("%", "%25").replace("/", "%2F"), part


def has_parts(value: Any) -> bool:
    """Whether ``value`` is saved part by part."""
    return isinstance(value, Mapping | list | tuple) or _is_walked(value)


def _named(value: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif _is_walked(value):
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__:
            slots = getattr(cls, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, getattr(value, name)


def _is_walked(value: Any) -> bool:
    """Whether the attributes of ``value`` are searched: those of our and of the user's classes, not of a library's."""
    if isinstance(value, type | FunctionType | ModuleType | Handle):
        return False
    return isinstance(value, Composite | Walked) or is_users(type(value).__module__)


# --- names, texts and conditions ----------------------------------------------------------------------------------


def find_file(path: str | os.PathLike[str]) -> str:
    """The file for ``path``, which may lack the suffix."""
    text = disk.path_of("the path of a checkpoint", path)
    return text if Path(text).suffix == SUFFIX else text + SUFFIX


def find_unnumbered(path: str | os.PathLike[str]) -> str:
    """As :func:`find_file`. Raises InvalidArgumentError for the name of a numbered checkpoint."""
    found = find_file(path)
    if re.search(rf"-\d+{re.escape(SUFFIX)}$", found):
        raise InvalidArgumentError(
            f"{found} is the name of a numbered checkpoint; choose a name that does not end in a number, or use "
            "save(), which adds the number"
        )
    return found


@contextlib.contextmanager
def _held(strategies: Iterable[Strategy]) -> Iterator[None]:
    """Keep other threads from running and writing, so that the saved values are of one moment."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(between_steps.within)
        for strategy in strategies:
            stack.enter_context(strategy.controller.exclusively())
        yield


def _refuse_in_replica(what: str) -> None:
    if has_strategy() and get_replica_context() is not None:
        raise ContextError(
            f"a checkpoint can be {what} only in the script or in a merge function, not by every replica"
        )
