"""Updates of variables on a GPU: one kernel for each rule, which works through tables of pieces.

A kernel reads a gradient in one of three places: on the GPU if a worker computed it there, in page-locked host memory,
or in scratch memory to which it was copied. An update yields each change with a mark: once the GPU has passed the mark,
the change is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from cs_proto import segment_names
from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.errors import DeviceError
from cs_proto.frozen import frozen, with_changes
from cs_proto.memory_plan import GPU_DTYPES
from cs_server.compute.clipping import UNBOUNDED, Clipping, factors_together, square_of
from cs_server.compute.executor import Memory, gradients_of, spread
from cs_server.compute.sparse import Merged, merge, weighted
from cs_server.events import Apply, Dense, Rows, Update
from cs_server.rules import RULES, Rule, computed_in, scalars, trust_ratio

from .blocks import Pieces, contiguous, cut, runs, split
from .codegen import THREADS, loops, norms, norms_name, update, update_name, width_of
from .cuda import Gpu
from .dirty_ranges import Change, Changed, of_rows
from .memory import DeviceMemory
from .staging import TABLE_NBYTES, Staging

__all__ = ["DeviceUpdates"]

#: GPU memory for sums of squares.
_SQUARES_NBYTES = 8 << 20
#: The most pieces of one launch, so that the changes of one launch are copied while the next one runs.
_LAUNCH = 2048
#: The number of tables of pieces that are cached, because every step updates the same variables.
_REMEMBERED = 64


@frozen(eq=False)
class _Gradient:
    """The gradient of one replica, 1-D, from element ``first`` of the slab on. If ``segment`` is set, it lies on the
    GPU under that name. If ``is_locked``, a kernel can read it in host memory."""

    values: np.ndarray
    segment: str = ""
    is_locked: bool = False
    first: int = 0

    @property
    def is_staged(self) -> bool:
        """Whether it has to be copied to scratch memory before a kernel can read it."""
        return not (self.segment or self.is_locked)


class DeviceUpdates:
    """Launches the updates of a GPU store. Used by one thread."""

    def __init__(
        self, gpu: Gpu, on_device: DeviceMemory, staging: Staging, memory: Memory, until: float, *, keeps: bool
    ) -> None:
        """``keeps``: gradients that lie on the GPU are in host memory, too, as in :class:`Located`. Raises
        DeviceMemoryError if the GPU is still full at the time ``until``."""
        self._gpu, self._on_device, self._staging, self._memory = gpu, on_device, staging, memory
        self._keeps = keeps
        self._squares = gpu.allocate(_SQUARES_NBYTES, until)
        self._loaded: set[tuple[str, Rule | None]] = set()
        self._remembered: dict[Dense, tuple[Pieces, list[_Gradient]]] = {}

    def load(self, dtype: str, rule: Rule | None = None, until: float = 0.0) -> None:
        """Load the kernels that every variable of ``dtype`` needs or, with ``rule``, those that update it by the rule.

        Raises DeviceMemoryError if the GPU is still full at the time ``until``, DeviceError if it refuses a kernel.
        """
        if (dtype, rule) in self._loaded:
            return
        number = computed_in(dtype).type
        if rule is not None:
            numbers = [number(0)] * (1 + rule.count_of_numbers)
            self._staging.load(update(rule, dtype), update_name(rule, dtype), (np.int32(1), *numbers), until)
            if rule.direction:
                scratch = self._squares.address
                self._staging.load(norms(rule, dtype), norms_name(rule, dtype), (np.int32(1), *numbers, scratch), until)
        else:
            source, scratch = loops(dtype), self._squares.address
            self._staging.load(source, "copy", (), until)
            self._staging.load(source, "squares", (np.int32(1), number(0), scratch), until)
            self._gpu.load(source, "fold", (scratch, np.int32(THREADS), np.int64(0), scratch), until)
            self._gpu.load(source, "fill", (scratch, np.int64(0), number(0)), until)
        self._loaded.add((dtype, rule))

    def forget(self) -> None:
        """Clear the cache, because an address has changed or memory is no longer page-locked."""
        self._remembered.clear()

    def close(self) -> None:
        """Free the scratch memory."""
        self.forget()
        self._squares.free()

    def divided(self, operation: Apply) -> tuple[list[Apply], list[Apply]]:
        """Divide an apply into the part on the GPU and the part in host memory, each a list of at most one.

        Where one bound holds for gradients of both, or for those of several optimizers, the parts have the factors that
        follow from it in its place.
        """
        here = [_part(update, lambda dtype: dtype in GPU_DTYPES) for update in operation.updates]
        there = [_part(update, lambda dtype: dtype not in GPU_DTYPES) for update in operation.updates]
        if any(map(_has_gradients, here)) and (
            operation.global_clipnorm is not None
            or any(
                _has_gradients(one) and _has_gradients(other) and _clipping(one).global_clipnorm is not None
                for one, other in zip(here, there, strict=True)
            )
        ):
            factors = self._factors(operation, here, there)
            here, there = ([_with_factor(*each) for each in zip(part, factors, strict=True)] for part in (here, there))
            operation = with_changes(operation, global_clipnorm=None, clip_epsilon=0.0)
        kept = ([update for update in part if _has_gradients(update)] for part in (here, there))
        ours, others = ([with_changes(operation, updates=tuple(part))] if part else [] for part in kept)
        return ours, others

    def _factors(self, operation: Apply, here: Sequence[Update], there: Sequence[Update]) -> list[float]:
        """The factor of each optimizer's gradients that follows from global bounds."""
        weights, clippings = operation.weights, [_clipping(update) for update in operation.updates]
        squares = []
        for one, other, clipping in zip(here, there, clippings, strict=True):
            found = [square for part in one.dense for square in self._squares_of(part, clipping, weights)]
            found += [square_of(self._sums(part, clipping, weights).sums) for part in one.sparse]
            squares.append(found + [square_of(total) for total in self._totals(other, clipping, weights)])
        own, common = factors_together(clippings, squares, operation.global_clipnorm, operation.clip_epsilon)
        return [
            common * (factors[0] if factors and clipping.global_clipnorm is not None else 1.0)
            for factors, clipping in zip(own, clippings, strict=True)
        ]

    def _totals(self, part: Update, clipping: Clipping, weights: Sequence[float]) -> Iterator[np.ndarray]:
        """The summed gradients of variables that do not lie on the GPU."""
        for dense in part.dense:
            gradients = gradients_of(self._memory, dense)
            yield from (clipping.total(gradients, slice(*each), weights) for each in dense.places)
        for rows in part.sparse:
            yield self._sums(rows, clipping, weights).sums

    def apply(self, operation: Apply) -> Iterator[Changed]:
        """Launch the updates that :meth:`divided` has left to the GPU; yields their changes."""
        for each in operation.updates:
            yield from self._apply(each, operation.weights)

    def _apply(self, update: Update, weights: Sequence[float]) -> Iterator[Changed]:
        rule, given, clipping = RULES[update.rule], dict(update.hyperparameters), _clipping(update)
        dense_parts, sparse_parts = update.parts()
        merged = [self._sums(rows, clipping, weights) for rows in update.sparse]
        factors = np.full(sum(len(part.ranges) for part in update.dense) + len(merged), update.factor)
        if clipping.has_norm:
            squares = [square for part in update.dense for square in self._squares_of(part, clipping, weights)]
            factors *= clipping.factors([*squares, *(square_of(gradient.sums) for gradient in merged)])
        limit = math.inf if clipping.clipvalue is None else clipping.clipvalue
        at = 0
        for part, t in dense_parts:
            pieces, gradients = self._prepared(part)
            targets, of_ranges = (part.parameters, *part.slots), factors[at : at + len(part.ranges)]
            at += len(part.ranges)
            of_pieces = of_ranges[_which_range(part, pieces)]
            own = RULES[part.rule] if part.rule else rule
            for mine, numbers in self._by_trust(own, part, pieces, gradients, given, t, limit, of_pieces, weights):
                some, factor = pieces.part(mine), of_pieces[mine]
                for window, mark in self._update(
                    own, part.dtype, targets, some, gradients, numbers, t, limit, factor, moves=True, weights=weights
                ):
                    for start, stop in runs(some, window):
                        yield from ((Change(name, start, stop - start), part.dtype, mark) for name in targets)
        for (rows, t), gradient, factor in zip(sparse_parts, merged, factors[at:], strict=True):
            yield from self._rows(RULES[rows.rule] if rows.rule else rule, rows, gradient, given, t, float(factor))

    def _by_trust(
        self,
        rule: Rule,
        part: Dense,
        pieces: Pieces,
        gradients: Sequence[_Gradient],
        given: Hyperparameters,
        t: int,
        limit: float,
        factor: np.ndarray,
        weights: Sequence[float],
    ) -> list[tuple[np.ndarray, Hyperparameters]]:
        """Which pieces are updated together, and by which hyperparameters: all, or those of each variable with its
        trust ratio."""
        if not rule.direction:
            return [(np.ones(len(pieces), bool), given)]
        targets, of_range = (part.parameters, *part.slots), _which_range(part, pieces)
        found = self._norms(rule, part.dtype, targets, pieces, gradients, given, t, limit, factor, weights)
        return [
            (of_range == which, _trusted(given, found[of_range == which].sum(axis=0)))
            for which in range(len(part.ranges))
        ]

    def _prepared(self, part: Dense) -> tuple[Pieces, list[_Gradient]]:
        """The pieces of a dense update, and its gradients, page-locked if possible."""
        found = self._remembered.get(part)
        if found is None:
            spans = np.array([(first, last, first) for first, last in part.ranges], np.int64).reshape(-1, 3)
            itemsize = np.dtype(part.dtype).itemsize
            gradients = [
                self._gradient(name, part)
                if rows is None
                else _Gradient(spread(self._memory, part, *rows), first=part.ranges[0][0])
                for name, rows in zip_longest(part.gradients, part.rows)
            ]
            lie_here = (part.parameters, *part.slots, *(g.segment for g in gradients if g.segment))
            borders = self._on_device.borders(lie_here) // itemsize
            found = cut(split(spans, borders)), gradients
            if part.rows:  # the next step has others in the same place
                return found
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[part] = found
        return found

    def _gradient(self, name: str, part: Dense) -> _Gradient:
        itemsize = np.dtype(part.dtype).itemsize
        spans = [(first * itemsize, last * itemsize) for first, last in part.ranges]
        in_memory = segment_names.host_gradients(name)
        values = self._memory.elements(in_memory, part.dtype)
        if name != in_memory:
            if all(self._on_device.covers(name, *span) for span in spans):
                return _Gradient(values, name)
            # The previous server may have had this buffer on the GPU while this one has not.
            if not self._keeps:
                raise DeviceError(f"{self._gpu.name} does not hold the gradients {name}, and nor does host memory")
        start = values.ctypes.data
        locked = [self._gpu.page_lock(start + first, start + last) for first, last in spans]
        return _Gradient(values, is_locked=all(locked))

    def _sums(self, rows: Rows, clipping: Clipping, weights: Sequence[float]) -> Merged:
        gradients = [
            (self._memory.view(values), self._memory.view(indices))
            for values, indices in rows.gradients
            if indices is not None  # the catalogue keeps the rules without them off the GPU
        ]
        merged = merge(weighted(gradients, weights) if weights else gradients, *rows.shape)
        clipping.bound(merged.sums)
        return merged

    def _rows(
        self, rule: Rule, rows: Rows, gradient: Merged, given: Hyperparameters, t: int, factor: float
    ) -> Iterator[Changed]:
        """Update by a sparse gradient that names each row once."""
        height, width = rows.shape
        if not height or not width:
            return
        targets = (rows.parameters, *rows.slots)
        order = np.argsort(gradient.rows)
        named = gradient.rows[order]
        sums = _Gradient(np.ascontiguousarray(gradient.sums[order]).reshape(-1))
        starts = rows.first + named * width
        spans = np.stack([starts, starts + width, np.arange(len(named)) * width], axis=1)
        moving = rule.moving(given)
        rest = cut(np.empty((0, 3), np.int64))
        if moving != "rows":
            begins, ends = np.concatenate([[0], named + 1]), np.concatenate([named, [height]])
            gaps = np.stack([begins * width, ends * width], axis=1)[ends > begins] + rows.first
            rest = cut(np.concatenate([gaps, np.full((len(gaps), 1), -1)], axis=1))
        if rule.direction:
            squares = [
                self._norms(rule, rows.dtype, targets, pieces, [sums], given, t, math.inf, of_pieces).sum(axis=0)
                for pieces, of_pieces in ((cut(spans), factor), (rest, 1.0))
            ]
            given = _trusted(given, squares[0] + squares[1])
        marks = [*self._update(rule, rows.dtype, targets, cut(spans), [sums], given, t, math.inf, factor, moves=True)]
        if len(rest):
            marks += self._update(rule, rows.dtype, targets, rest, [sums], given, t, math.inf, 1.0, moving == "all")
        if not marks:
            return
        mark = marks[-1][1]
        changed = of_rows(rows.parameters, rows.dtype, rows.first, rows.shape, named)
        whole = Change(rows.parameters, rows.first, height * width)
        of_variable = whole if moving == "all" else changed
        of_slots = changed if moving == "rows" else whole
        yield of_variable, rows.dtype, mark
        yield from ((with_changes(of_slots, segment=name), rows.dtype, mark) for name in rows.slots)

    def _update(
        self,
        rule: Rule,
        dtype: str,
        targets: Sequence[str],
        pieces: Pieces,
        gradients: Sequence[_Gradient],
        given: Hyperparameters,
        t: int,
        limit: float,
        factor: float | np.ndarray,
        moves: bool,
        weights: Sequence[float] = (),
    ) -> Iterator[tuple[slice, Any]]:
        """Launch the rule's kernel over ``pieces``; yields the pieces of each launch and the mark behind it."""
        number = computed_in(dtype)
        numbers = (np.int32(len(gradients)), number.type(limit), *scalars(rule, given, t, number))
        for window, table in self._tables(rule, dtype, targets, pieces, gradients, _LAUNCH, factor, moves, weights):
            self._staging.launch(update(rule, dtype), update_name(rule, dtype), table, numbers)
            yield window, self._gpu.mark()

    def _norms(
        self,
        rule: Rule,
        dtype: str,
        targets: Sequence[str],
        pieces: Pieces,
        gradients: Sequence[_Gradient],
        given: Hyperparameters,
        t: int,
        limit: float,
        factor: float | np.ndarray,
        weights: Sequence[float] = (),
    ) -> np.ndarray:
        """The squared norms of the variable and of its direction in each piece, float64 [pieces, 2]."""
        number, found = computed_in(dtype), np.empty(2 * len(pieces))
        numbers = (np.int32(len(gradients)), number.type(limit), *scalars(rule, given, t, number))
        most = _SQUARES_NBYTES // (16 * (THREADS + 1))
        for window, table in self._tables(rule, dtype, targets, pieces, gradients, most, factor, False, weights):
            sums = self._squares.address + 16 * THREADS * len(table)
            arguments = (*numbers, self._squares.address)
            self._staging.launch(norms(rule, dtype), norms_name(rule, dtype), table, arguments)
            fold = (self._squares.address, np.int32(THREADS), np.int64(2 * len(table)), sums)
            self._gpu.launch(loops(dtype), "fold", -(-2 * len(table) // THREADS), fold)
            self._gpu.take(found[2 * window.start : 2 * window.stop], sums, self._gpu.mark())
            self._gpu.wait()
        return found.reshape(-1, 2)

    def _tables(
        self,
        rule: Rule,
        dtype: str,
        targets: Sequence[str],
        pieces: Pieces,
        gradients: Sequence[_Gradient],
        most: int,
        factor: float | np.ndarray,
        moves: bool,
        weights: Sequence[float],
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields at most ``most`` pieces at a time, and their table for the kernels of the rule."""
        width = width_of(rule, len(gradients))
        table = np.empty((len(pieces), width), np.int64)
        table[:, 0], table[:, 1] = pieces.counts, moves
        table[:, 2] = np.broadcast_to(np.asarray(factor, np.float64), len(pieces)).copy().view(np.int64)
        for place, name in enumerate(targets, 3):
            table[:, place] = self._on_device.addresses(name, pieces.starts * np.dtype(dtype).itemsize)
        table[:, -len(gradients) :] = _weights_of(weights, len(gradients))
        for window, addresses in self._staged(pieces, gradients, min(most, TABLE_NBYTES // (8 * width))):
            table[window, 3 + len(targets) : -len(gradients)] = addresses
            yield window, table[window]

    def _staged(self, pieces: Pieces, gradients: Sequence[_Gradient], most: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields at most ``most`` pieces at a time with the addresses of their gradients, int64 [pieces, replicas].
        Gradients that a kernel cannot read in place are copied to scratch memory first."""
        itemsize = gradients[0].values.itemsize
        staged = [which for which, gradient in enumerate(gradients) if gradient.is_staged]
        counts = np.where(pieces.sources >= 0, pieces.counts, 0)
        room = self._staging.stage.nbytes // (itemsize * max(1, len(staged)))
        ends = np.cumsum(counts)
        first = 0
        while first < len(pieces):
            last = min(first + most, len(pieces))
            before = int(ends[first - 1]) if first else 0
            if staged:
                last = min(last, int(np.searchsorted(ends, before + room, side="right")))
            window = slice(first, last)
            sources, has = pieces.sources[window], pieces.sources[window] >= 0
            addresses = np.zeros((last - first, len(gradients)), np.int64)
            for which, gradient in enumerate(gradients):
                if gradient.segment:
                    addresses[has, which] = self._on_device.addresses(gradient.segment, sources[has] * itemsize)
                elif gradient.is_locked:
                    addresses[:, which] = gradient.values.ctypes.data + sources * itemsize
            for number, which in enumerate(staged):
                base = self._staging.stage.address + number * room * itemsize
                offsets = ends[window] - counts[window] - before
                addresses[:, which] = base + offsets * itemsize
                gradient = gradients[which]
                for start, stop, offset in contiguous(sources[has] - gradient.first, counts[window][has], offsets[has]):
                    self._gpu.bring(base + offset * itemsize, gradient.values[start:stop])
            addresses[~has] = 0
            yield window, addresses
            first = last

    def _squares_of(self, part: Dense, clipping: Clipping, weights: Sequence[float]) -> list[float]:
        """The squared norm of the summed gradient of each range, after its elements were clipped."""
        pieces, gradients = self._prepared(part)
        number, replicas = computed_in(part.dtype), len(gradients)
        limit = number.type(math.inf if clipping.clipvalue is None else clipping.clipvalue)
        # The scratch memory holds one double for each thread, followed by one for each piece.
        most = min(_SQUARES_NBYTES // (8 * (THREADS + 1)), TABLE_NBYTES // (8 * (1 + 2 * replicas)))
        found = np.empty(len(pieces))
        for window, addresses in self._staged(pieces, gradients, most):
            of_replicas = np.broadcast_to(_weights_of(weights, replicas), addresses.shape)
            table = np.concatenate([pieces.counts[window, None], addresses, of_replicas], axis=1)
            sums = self._squares.address + 8 * THREADS * len(table)
            self._staging.launch(
                loops(part.dtype), "squares", table, (np.int32(replicas), limit, self._squares.address)
            )
            fold = (self._squares.address, np.int32(THREADS), np.int64(len(table)), sums)
            self._gpu.launch(loops(part.dtype), "fold", -(-len(table) // THREADS), fold)
            self._gpu.take(found[window], sums, self._gpu.mark())
            self._gpu.wait()
        return [float(square) for square in np.bincount(_which_range(part, pieces), found, len(part.ranges))]


def _part(update: Update, is_wanted: Callable[[str], bool]) -> Update:
    """The part of an update with the wanted dtypes."""
    dense, sparse = ([(part, t) for part, t in parts if is_wanted(part.dtype)] for parts in update.parts())
    counts = tuple(t for _, t in (*dense, *sparse)) if update.counts else ()
    parts = {"dense": tuple(part for part, _ in dense), "sparse": tuple(rows for rows, _ in sparse)}
    return with_changes(update, **parts, counts=counts)


def _has_gradients(update: Update) -> bool:
    return bool(update.dense or update.sparse)


def _clipping(update: Update) -> Clipping:
    return Clipping.of(dict(update.hyperparameters)) or UNBOUNDED


def _with_factor(update: Update, factor: float) -> Update:
    """The update with a factor in place of its bound on the global norm."""
    kept = tuple(pair for pair in update.hyperparameters if pair[0] != "global_clipnorm")
    return with_changes(update, hyperparameters=kept, factor=factor)


def _weights_of(weights: Sequence[float], replicas: int) -> np.ndarray:
    """The weights as they stand in the table of pieces."""
    return np.array(weights or [1.0] * replicas, np.float64).view(np.int64)


def _trusted(given: Hyperparameters, squares: np.ndarray) -> Hyperparameters:
    """The hyperparameters of a variable, from the squared norms of it and of its direction."""
    return {**given, "learning_rate": given["learning_rate"] * trust_ratio(float(squares[0]), float(squares[1]))}


def _which_range(part: Dense, pieces: Pieces) -> np.ndarray:
    """The number of the range of an update in which each piece lies."""
    return np.searchsorted(np.array([last for _, last in part.ranges], np.int64), pieces.starts, side="right")
