"""Variables on a GPU: their memory there, what a commit does to it, and their mirror in the machine's memory.

Owns variables and slots of the dtypes of `translate.DTYPES`; everything else of such a service, whole numbers and
complex ones, lies in the machine's memory as ever, and its part of a commit is `arithmetic`'s. Values lie on the GPU
under the names and offsets of their segments. The segments themselves are the mirror: after each commit they hold what
the GPU holds, so workers, clients and checkpoints read what they always read, and a server after this one begins with
it. The mirror changes only when the commit has been written down in the `journal`. Without a journal (nobody is to
take this server's place) the variables alone are mirrored at each commit, the slots when somebody asks.

A commit orders kernels and copies and waits once, at its end; it allocates nothing.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from cs_proto import reduction
from cs_proto.arrays import Array, Location
from cs_proto.optimizers import Hyperparameters
from cs_proto.writing import write

from .arithmetic import Arithmetic, Memory
from .clipping import Clipping, square_of
from .cuda import Block, Gpu
from .events import Apply, Commit, Dense, Fill, Rows, Write
from .journal import Change, Journal
from .kernels import ALWAYS
from .rows import Merged, merge
from .translate import DTYPES, THREADS, computed_in, loops, update, update_name, width_of
from .updates import RULES, Rule, scalars

__all__ = ["DeviceMemory", "GpuParameters", "is_on_device"]

#: Elements of one piece of work of a block of threads.
_PIECE = 1 << 13
#: Memory of the GPU for tables of pieces, for sums of squares, and for what is only on its way.
_TABLE_NBYTES = 8 << 20
_SQUARES_NBYTES = 8 << 20
_STAGE_NBYTES = 32 << 20
#: Pieces of one launch, so that what it changed is copied while the next one runs.
_LAUNCH = 2048
#: Memory is taken from the GPU in blocks of at least this.
_BLOCK_NBYTES = 8 << 20
#: Of a table of short rows, or where so many of all rows have changed, the whole table is copied.
_SHORT_ROW_NBYTES = 32
_MANY_ROWS = 4
#: Tables of pieces that are remembered: the same variables are updated in every step.
_REMEMBERED = 64


def is_on_device(segment: str) -> bool:
    """Whether what lies in a segment lies on the GPU where variables do."""
    kind, _, rest = segment.partition("/")
    return kind in ("parameters", "slots") and rest.rpartition("/")[2] in DTYPES


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class _Extent:
    """Bytes of a segment, from ``start`` on and up to the next extent, that lie in ``block`` from ``address`` on."""

    start: int
    stop: int
    address: int
    block: Block


class DeviceMemory:
    """Which bytes of which segments lie where on a GPU. Nothing ever moves, and what was made as one range lies in one
    piece."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._extents: dict[str, list[_Extent]] = {}
        self._starts: dict[str, np.ndarray] = {}
        self._addresses: dict[str, np.ndarray] = {}
        self._made: dict[tuple[str, int], int] = {}
        self._exported: dict[int, tuple[Block, bytes]] = {}

    def make(self, segment: str, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop``, which hold anything afterwards. Raises DeviceMemoryError and changes nothing."""
        if stop <= start:
            return
        extents = self._extents.setdefault(segment, [])
        if not any(each.start <= start and stop <= each.stop for each in extents):
            block = self._block(stop - start)
            kept = [part for each in extents for part in _without(each, start, stop)]
            limit = min((each.start for each in kept if each.start >= stop), default=start + block.nbytes)
            new = _Extent(start, min(start + block.nbytes, limit), block.address, block)
            self._extents[segment] = sorted([*kept, new], key=lambda each: each.start)
        self._made[segment, start] = stop
        self._note(segment)

    def drop(self, segment: str, start: int) -> int:
        """Nobody needs what was made from ``start`` on any more; its bytes. A block goes when all of it is dropped, but
        not one that another process may have opened."""
        stop = self._made.pop((segment, start), start)
        used = {self._extent(name, first).block.address for name, first in self._made if name == segment}
        used |= self._exported.keys()
        self._extents[segment] = [each for each in self._extents.get(segment, ()) if each.block.address in used]
        self._note(segment)
        return stop - start

    def addresses(self, segment: str, offsets: np.ndarray) -> np.ndarray:
        """Where the bytes at ``offsets`` (int64 [n]) of a segment lie, each."""
        starts = self._starts[segment]
        which = np.searchsorted(starts, offsets, side="right") - 1
        found: np.ndarray = self._addresses[segment][which] + (offsets - starts[which])
        return found

    def spans(self, segment: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Bytes ``start`` to ``stop`` as (from, to, address), each of which lies in one piece."""
        cuts = [start, *(each for each in self._starts[segment].tolist() if start < each < stop), stop]
        for first, last in pairwise(cuts):
            yield first, last, int(self.addresses(segment, np.array([first]))[0])

    def borders(self, names: Iterable[str]) -> np.ndarray:
        """The offsets, ascending, at which something of these segments ends and something else begins."""
        return np.unique(np.concatenate([self._starts[name] for name in names]))

    def export(self, segment: str, start: int) -> tuple[bytes, int]:
        """Handle of the block in which a byte lies, and where in it."""
        extent = self._extent(segment, start)
        block = extent.block
        if block.address not in self._exported:
            self._exported[block.address] = block, self._gpu.handle(block)
        return self._exported[block.address][1], extent.address - block.address + start - extent.start

    def close(self) -> None:
        """Give all of it back."""
        for extent in chain.from_iterable(self._extents.values()):
            extent.block.free()
        for block, _ in self._exported.values():
            block.free()

    def _block(self, nbytes: int) -> Block:
        if nbytes < _BLOCK_NBYTES <= self._gpu.available_nbytes() // 2:
            nbytes = _BLOCK_NBYTES
        return self._gpu.allocate(nbytes)

    def _extent(self, segment: str, start: int) -> _Extent:
        return next(each for each in reversed(self._extents[segment]) if each.start <= start)

    def _note(self, segment: str) -> None:
        extents = self._extents[segment]
        self._starts[segment] = np.array([each.start for each in extents], np.int64)
        self._addresses[segment] = np.array([each.address for each in extents], np.int64)


def _without(extent: _Extent, start: int, stop: int) -> Iterator[_Extent]:
    if extent.start < start:
        yield replace(extent, stop=min(extent.stop, start))
    if extent.stop > stop:
        skipped = max(0, stop - extent.start)
        yield replace(extent, start=extent.start + skipped, address=extent.address + skipped)


# --- commits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Work for blocks of threads, int64 [n] each: elements of a segment from ``starts`` on, so many as ``counts``;
    ``sources`` are those of the gradient, -1 where it is zero."""

    starts: np.ndarray
    counts: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, eq=False)
class _Gradient:
    """The gradient of one replica, 1-D; ``is_locked``: a kernel reads it where it lies."""

    values: np.ndarray
    is_locked: bool


class GpuParameters:
    """Variables on one GPU. Used by one thread."""

    def __init__(
        self,
        name: str,
        replicas: int,
        memory: Memory,
        arithmetic: Arithmetic,
        journal: Journal | None,
    ) -> None:
        """``arithmetic`` does the part of a commit that concerns no GPU. The mirror gets what the journal holds.

        Raises DeviceError for a GPU that cannot be used, DeviceMemoryError for one that is full.
        """
        self._gpu = gpu = Gpu(name)
        self._memory, self._arithmetic, self._journal = memory, arithmetic, journal
        self._on_device = DeviceMemory(gpu)
        self._table = gpu.allocate(_TABLE_NBYTES)
        self._squares = gpu.allocate(_SQUARES_NBYTES)
        self._stage = gpu.allocate(max(_STAGE_NBYTES, 8 * _PIECE * replicas))
        for rule, dtype in ALWAYS:
            gpu.compile(loops(dtype), "copy")
            gpu.compile(update(RULES[rule], dtype), update_name(RULES[rule], dtype))
        self._made_nbytes = 0
        self._changes: list[tuple[Change, str, Any]] = []
        self._remembered: dict[Dense, tuple[_Pieces, list[_Gradient]]] = {}
        if journal is not None:
            journal.replay(memory.elements)

    @property
    def uuid(self) -> bytes:
        """Sixteen bytes that name the GPU on every machine."""
        return self._gpu.uuid

    def export(self, array: Array) -> tuple[bytes, int]:
        """What another process opens the memory of a variable with, and where in it the variable lies; no handle for
        one that is not on the GPU."""
        assert isinstance(array.place, Location)
        if not array.nbytes or not is_on_device(array.place.segment):
            return b"", 0
        return self._on_device.export(array.place.segment, array.place.offset)

    def available_nbytes(self) -> int:
        """Bytes of the GPU that variables and slots may still take."""
        return self._gpu.available_nbytes()

    def make(self, segment: str, start: int, stop: int, *, load: bool = False) -> None:
        """Memory for a variable or slot, at bytes ``start`` to ``stop`` of a segment: zeros or, with ``load``, what the
        mirror holds. Whatever does not belong on the GPU is passed over.

        Raises DeviceMemoryError where the GPU has no such memory left, MemoryPlanError where the machine has not.
        """
        if not is_on_device(segment) or stop <= start:
            return
        self._on_device.make(segment, start, stop)
        self._made_nbytes += stop - start
        if self._journal is not None:
            self._journal.reserve(self._made_nbytes)
            self._lock(self._journal.memory, 0, len(self._journal.memory))
        elif segment.startswith("parameters/"):
            self._lock(self._memory.elements(segment, "uint8"), start, stop)
        for first, last, address in self._on_device.spans(segment, start, stop):
            if load:
                self._gpu.bring(address, self._memory.elements(segment, "uint8")[first:last])
            else:
                self._gpu.zero(address, last - first)
        self._gpu.wait()
        self._remembered.clear()

    def discard(self, segment: str, start: int, stop: int) -> None:
        """Nobody needs these bytes of a segment any more: its pages may be given back afterwards."""
        if segment.partition("/")[0] not in ("parameters", "slots", "gradients"):
            return
        self._remembered.clear()
        first = self._memory.elements(segment, "uint8").ctypes.data
        self._gpu.page_unlock(first + start, first + stop)
        if is_on_device(segment):
            self._made_nbytes -= self._on_device.drop(segment, start)

    def commit(self, command: Commit) -> None:
        """Carry out every operation, in order; the mirror holds the outcome when it returns."""
        ours: list[tuple[Apply | Write | Fill, float | None]] = []
        others: list[Apply | Write | Fill] = []
        for operation in command.operations:
            if isinstance(operation, Apply):
                here, there, factor = self._divided(operation)
                ours += [(part, factor) for part in here]
                others += there
            elif is_on_device(operation.segment if isinstance(operation, Fill) else _segment(operation.target)):
                ours.append((operation, None))
            else:
                others.append(operation)
        if ours and (self._journal is None or self._journal.ticket != command.ticket):
            if self._journal is not None:
                self._journal.begin()
            for operation, factor in ours:
                match operation:
                    case Apply():
                        self._apply(operation, factor)
                    case Write():
                        self._write(operation)
                    case Fill():
                        self._fill(operation)
            if len(ours) > 1:  # else nothing was changed twice, and what is done first can be copied first
                self._changes = _union(self._changes, self._gpu.mark())
            self._publish(command.ticket)
        if others:
            self._arithmetic.commit(Commit(command.ticket, tuple(others)))

    def mirror(self, arrays: Iterable[Array]) -> None:
        """See to it that these arrays can be read where they lie in the machine's memory."""
        if self._journal is not None:
            return
        for array in arrays:
            if isinstance(array.place, Location) and is_on_device(array.place.segment) and array.nbytes:
                self._take(array.place.segment, array.place.offset, self._memory.view(array).reshape(-1).view(np.uint8))
        self._gpu.wait()

    def close(self) -> None:
        """Give everything back; nothing may be asked of it any more."""
        self._gpu.close()
        self._remembered.clear()
        self._on_device.close()
        for block in (self._table, self._squares, self._stage):
            block.free()

    # --- updates ------------------------------------------------------------------------------------------------------

    def _divided(self, operation: Apply) -> tuple[list[Apply], list[Apply], float | None]:
        """The part of an update that is made on the GPU and the part that is not; where they share a bound of the norm
        of all gradients, what those of the first are multiplied by."""
        here = _part(operation, lambda dtype: dtype in DTYPES)
        there = _part(operation, lambda dtype: dtype not in DTYPES)
        clipping = Clipping.of(dict(operation.hyperparameters))
        if not here or not there or clipping is None or clipping.global_clipnorm is None:
            return here, there, None
        squares = [square for part in here[0].dense for square in self._squares_of(part, clipping)]
        squares += [square_of(self._sums(part, clipping).sums) for part in here[0].sparse]
        of_others = [square_of(total) for total in self._totals(there[0], clipping)]
        factor = clipping.factors([*squares, *of_others])[0]
        # The other part is scaled alike by a bound of its own.
        norm = math.sqrt(sum(of_others))
        kept = tuple(pair for pair in operation.hyperparameters if pair[0] != "global_clipnorm")
        bound = (("global_clipnorm", factor * norm),) if factor != 1 and norm else ()
        return here, [replace(there[0], hyperparameters=(*kept, *bound))], factor

    def _totals(self, part: Apply, clipping: Clipping) -> Iterator[np.ndarray]:
        """The summed gradients of variables that do not lie on the GPU."""
        for dense in part.dense:
            gradients = [self._memory.elements(name, dense.dtype) for name in dense.gradients]
            for first, last in dense.ranges:
                with np.errstate(all="ignore"):
                    total = gradients[0][first:last].copy()
                    for gradient in gradients[1:]:
                        total += gradient[first:last]
                clipping.bound(total)
                yield total
        for rows in part.sparse:
            yield self._sums(rows, clipping).sums

    def _apply(self, operation: Apply, common: float | None) -> None:
        """``common``: what all gradients are multiplied by, where that has been found out."""
        rule, given, t = RULES[operation.rule], dict(operation.hyperparameters), operation.t
        clipping = Clipping.of(given)
        merged = [self._sums(rows, clipping) for rows in operation.sparse]
        factors = [1.0 if common is None else common] * (
            sum(len(part.ranges) for part in operation.dense) + len(merged)
        )
        if common is None and clipping is not None and clipping.has_norm:
            squares = [square for part in operation.dense for square in self._squares_of(part, clipping)]
            factors = clipping.factors([*squares, *(square_of(gradient.sums) for gradient in merged)])
        limit = math.inf if clipping is None or clipping.clipvalue is None else clipping.clipvalue
        at = 0
        for part in operation.dense:
            pieces, gradients = self._prepared(part)
            targets, of_ranges = (part.parameters, *part.slots), np.array(factors[at : at + len(part.ranges)])
            at += len(part.ranges)
            of_pieces = of_ranges[_which_range(part, pieces)]
            for window, mark in self._update(
                rule, part.dtype, targets, pieces, gradients, given, t, limit, of_pieces, moves=True
            ):
                self._changed(targets, part.dtype, _runs(pieces, window), mark)
        for rows, gradient, factor in zip(operation.sparse, merged, factors[at:], strict=True):
            self._rows(rule, rows, gradient, given, t, factor)

    def _prepared(self, part: Dense) -> tuple[_Pieces, list[_Gradient]]:
        """The pieces of a dense update, and its gradients, locked where that is possible."""
        found = self._remembered.get(part)
        if found is None:
            spans = np.array([(first, last, first) for first, last in part.ranges], np.int64).reshape(-1, 3)
            itemsize = np.dtype(part.dtype).itemsize
            borders = self._on_device.borders((part.parameters, *part.slots)) // itemsize
            gradients = []
            for name in part.gradients:
                values = self._memory.elements(name, part.dtype)
                raw = values.view(np.uint8)
                locked = [self._lock(raw, first * itemsize, last * itemsize) for first, last in part.ranges]
                gradients.append(_Gradient(values, all(locked)))
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            found = self._remembered[part] = _cut(_split(spans, borders)), gradients
        return found

    def _sums(self, rows: Rows, clipping: Clipping | None) -> Merged:
        gradients = [(self._memory.view(values), self._memory.view(indices)) for values, indices in rows.gradients]
        merged = merge(gradients, *rows.shape)
        if clipping is not None:
            clipping.bound(merged.sums)
        return merged

    def _rows(self, rule: Rule, rows: Rows, gradient: Merged, given: Hyperparameters, t: int, factor: float) -> None:
        """Update under a sparse gradient, whose rows are each named once."""
        height, width = rows.shape
        if not height or not width:
            return
        targets = (rows.parameters, *rows.slots)
        order = np.argsort(gradient.rows)
        named = gradient.rows[order]
        sums = _Gradient(np.ascontiguousarray(gradient.sums[order]).reshape(-1), is_locked=False)
        starts = rows.first + named * width
        spans = np.stack([starts, starts + width, np.arange(len(named)) * width], axis=1)
        marks = [*self._update(rule, rows.dtype, targets, _cut(spans), [sums], given, t, math.inf, factor, moves=True)]
        only_named = rule.moves == "rows" or bool(given.get("lazy"))
        if not only_named:
            begins, ends = np.concatenate([[0], named + 1]), np.concatenate([named, [height]])
            gaps = np.stack([begins * width, ends * width], axis=1)[ends > begins] + rows.first
            rest = _cut(np.concatenate([gaps, np.full((len(gaps), 1), -1)], axis=1))
            moves = rule.moves == "all"
            marks += self._update(rule, rows.dtype, targets, rest, [sums], given, t, math.inf, 1.0, moves)
        if not marks:
            return
        mark = marks[-1][1]
        changed = _rows_change(rows.parameters, rows.dtype, rows.first, rows.shape, named)
        whole = Change(rows.parameters, rows.first, height * width)
        of_variable = whole if rule.moves == "all" and not only_named else changed
        of_slots = changed if only_named else whole
        self._changes.append((of_variable, rows.dtype, mark))
        self._changes += [(replace(of_slots, segment=name), rows.dtype, mark) for name in rows.slots]

    def _update(
        self,
        rule: Rule,
        dtype: str,
        targets: Sequence[str],
        pieces: _Pieces,
        gradients: Sequence[_Gradient],
        given: Hyperparameters,
        t: int,
        limit: float,
        factor: float | np.ndarray,
        moves: bool,
    ) -> Iterator[tuple[slice, Any]]:
        """Launch the rule's kernel over ``pieces``; which of them, and the mark behind the launch."""
        number, itemsize = computed_in(dtype), np.dtype(dtype).itemsize
        width = width_of(rule, len(gradients))
        table = np.empty((len(pieces), width), np.int64)
        table[:, 0], table[:, 1] = pieces.counts, moves
        table[:, 2] = np.broadcast_to(np.asarray(factor, np.float64), len(pieces)).copy().view(np.int64)
        for place, name in enumerate(targets, 3):
            table[:, place] = self._on_device.addresses(name, pieces.starts * itemsize)
        numbers = (number.type(limit), *scalars(rule, given, t, number))
        for window, addresses in self._staged(pieces, gradients, min(_LAUNCH, _TABLE_NBYTES // (8 * width))):
            table[window, 3 + len(targets) :] = addresses
            self._launch(
                update(rule, dtype), update_name(rule, dtype), table[window], (np.int32(len(gradients)), *numbers)
            )
            yield window, self._gpu.mark()

    def _staged(self, pieces: _Pieces, gradients: Sequence[_Gradient], most: int) -> Iterator[tuple[slice, np.ndarray]]:
        """At most so many pieces at once, and where their gradients can be read, int64 [pieces, replicas]: where they
        lie, or where they have been brought to by then."""
        itemsize = gradients[0].values.itemsize
        staged = [which for which, gradient in enumerate(gradients) if not gradient.is_locked]
        counts = np.where(pieces.sources >= 0, pieces.counts, 0)
        room = self._stage.nbytes // (itemsize * max(1, len(staged)))
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
                if gradient.is_locked:
                    addresses[:, which] = gradient.values.ctypes.data + sources * itemsize
            for number, which in enumerate(staged):
                base = self._stage.address + number * room * itemsize
                offsets = ends[window] - counts[window] - before
                addresses[:, which] = base + offsets * itemsize
                for start, stop, offset in _contiguous(sources[has], counts[window][has], offsets[has]):
                    self._gpu.bring(base + offset * itemsize, gradients[which].values[start:stop])
            addresses[~has] = 0
            yield window, addresses
            first = last

    def _squares_of(self, part: Dense, clipping: Clipping) -> list[float]:
        """The squared norm of the summed gradient of each range, whose elements are bounded first."""
        pieces, gradients = self._prepared(part)
        number, replicas = computed_in(part.dtype), len(gradients)
        limit = number.type(math.inf if clipping.clipvalue is None else clipping.clipvalue)
        # One double for each thread, and behind them one for each piece.
        most = min(_SQUARES_NBYTES // (8 * (THREADS + 1)), _TABLE_NBYTES // (8 * (1 + replicas)))
        found = np.empty(len(pieces))
        for window, addresses in self._staged(pieces, gradients, most):
            table = np.concatenate([pieces.counts[window, None], addresses], axis=1)
            sums = self._squares.address + 8 * THREADS * len(table)
            self._launch(loops(part.dtype), "squares", table, (np.int32(replicas), limit, self._squares.address))
            fold = (self._squares.address, np.int32(THREADS), np.int64(len(table)), sums)
            self._gpu.launch(loops(part.dtype), "fold", -(-len(table) // THREADS), fold)
            self._gpu.take(found[window], sums, self._gpu.mark())
            self._gpu.wait()
        return [float(square) for square in np.bincount(_which_range(part, pieces), found, len(part.ranges))]

    def _launch(self, source: str, name: str, table: np.ndarray, arguments: Sequence[Any]) -> None:
        self._gpu.bring(self._table.address, np.ascontiguousarray(table))
        self._gpu.launch(source, name, len(table), (self._table.address, *arguments))

    # --- writes -------------------------------------------------------------------------------------------------------

    def _write(self, operation: Write) -> None:
        sources = [self._memory.view(source) for source in operation.sources]
        value = sources[0] if operation.reduce is None else reduction.reduce(operation.reduce, sources)
        target, segment = operation.target, _segment(operation.target)
        if not target.nbytes:
            return
        assert isinstance(target.place, Location)
        first, size = target.place.offset // np.dtype(target.dtype).itemsize, math.prod(target.shape)
        if operation.indices is None:
            new = np.empty(target.shape, target.dtype)
            if operation.op != "assign":
                self._fetch(segment, first, new)
            write(new, operation.op, value)
            self._put(segment, first, new)
            self._changes.append((Change(segment, first, size), target.dtype, self._gpu.mark()))
            return
        height, width = target.shape[0], size // target.shape[0]
        indices = self._memory.view(operation.indices)
        inside = (indices >= 0) & (indices < height)
        named, places = np.unique(indices[inside].astype(np.int64), return_inverse=True)
        if not len(named):
            return
        new = np.empty((len(named), *target.shape[1:]), target.dtype)
        self._fetch_rows(segment, first, named, new)
        write(new, operation.op, value[inside], places)
        self._put_rows(segment, first, named, new)
        changed = _rows_change(segment, target.dtype, first, (height, width), named)
        self._changes.append((changed, target.dtype, self._gpu.mark()))

    def _fill(self, operation: Fill) -> None:
        """Fills begin what nobody has seen yet, so the mirror takes them at once."""
        itemsize = np.dtype(operation.dtype).itemsize
        start, stop = operation.first * itemsize, operation.last * itemsize
        for first, last, address in self._on_device.spans(operation.segment, start, stop):
            if operation.value == 0:
                self._gpu.zero(address, last - first)
                continue
            count = (last - first) // itemsize
            blocks = min(-(-count // _PIECE), _LAUNCH)
            value = computed_in(operation.dtype).type(operation.value)
            self._gpu.launch(loops(operation.dtype), "fill", blocks, (address, np.int64(count), value))
        if self._journal is None and operation.segment.startswith("slots/"):
            return
        elements = self._memory.elements(operation.segment, operation.dtype)[operation.first : operation.last]
        if not operation.is_lazy:
            elements[:] = operation.value
            return
        self._memory.discard(operation.segment, start, stop)
        edge = mmap.PAGESIZE // itemsize  # what lies in pages of neighbours is left
        elements[:edge] = 0
        elements[-edge:] = 0

    # --- the mirror ---------------------------------------------------------------------------------------------------

    def _publish(self, ticket: int) -> None:
        """Bring what has changed to the mirror: all of it, or nothing, if this process ends."""
        changes, self._changes = self._changes, []
        if self._journal is None:
            changes = [each for each in changes if each[0].segment.startswith("parameters/")]
        # What lies in one piece is copied behind its kernel; rows are collected when all is computed.
        late: list[tuple[Change, str, np.ndarray]] = []
        for change, dtype, mark in changes:
            if self._journal is not None:
                place = self._journal.place(change, dtype)
            elif change.rows is None:
                place = self._memory.elements(change.segment, dtype)[change.first : change.first + change.width]
            else:
                place = np.empty(change.size, dtype)
            if change.rows is None:
                self._take(change.segment, change.first * place.itemsize, place.view(np.uint8), mark)
            else:
                late.append((change, dtype, place))
        for change, dtype, place in late:
            assert change.rows is not None
            self._fetch_rows(change.segment, change.first, change.rows, place.reshape(len(change.rows), change.width))
            if self._journal is None:
                change.put(self._memory.elements(change.segment, dtype), place)
        self._gpu.wait()
        if self._journal is not None:
            self._journal.finish(ticket)
            self._journal.replay(self._memory.elements)

    def _changed(self, targets: Iterable[str], dtype: str, runs: Iterable[tuple[int, int]], mark: Any) -> None:
        for start, stop in runs:
            self._changes += [(Change(name, start, stop - start), dtype, mark) for name in targets]

    # --- copies -------------------------------------------------------------------------------------------------------

    def _lock(self, raw: np.ndarray, start: int, stop: int) -> bool:
        """Page-lock the pages of bytes ``start`` to ``stop`` of a segment."""
        first = raw.ctypes.data
        page = mmap.PAGESIZE
        return self._gpu.page_lock((first + start) // page * page, -(-(first + stop) // page) * page)

    def _take(self, segment: str, start: int, raw: np.ndarray, mark: Any = None) -> None:
        """Order a copy from the GPU, of bytes from ``start`` on."""
        mark = self._gpu.mark() if mark is None else mark
        for first, last, address in self._on_device.spans(segment, start, start + raw.nbytes):
            self._gpu.take(raw[first - start : last - start], address, mark)

    def _fetch(self, segment: str, first: int, values: np.ndarray) -> None:
        """Elements from ``first`` on as they stand."""
        self._take(segment, first * values.itemsize, values.reshape(-1).view(np.uint8))
        self._gpu.wait()

    def _put(self, segment: str, first: int, values: np.ndarray) -> None:
        start, raw = first * values.itemsize, values.reshape(-1).view(np.uint8)
        for begin, end, address in self._on_device.spans(segment, start, start + raw.nbytes):
            self._gpu.bring(address, raw[begin - start : end - start])

    def _fetch_rows(self, segment: str, first: int, rows: np.ndarray, values: np.ndarray) -> None:
        """``rows`` of the table that begins at element ``first``, as they stand."""
        for pieces, staged, part in self._in_stages(segment, first, rows, values):
            table = np.stack([pieces.counts, self._addresses_of(segment, pieces, values), staged], axis=1)
            self._launch(loops(values.dtype.name), "copy", table, ())
            self._gpu.take(part, self._stage.address, self._gpu.mark())
            self._gpu.wait()

    def _put_rows(self, segment: str, first: int, rows: np.ndarray, values: np.ndarray) -> None:
        for pieces, staged, part in self._in_stages(segment, first, rows, values):
            self._gpu.bring(self._stage.address, part)
            table = np.stack([pieces.counts, staged, self._addresses_of(segment, pieces, values)], axis=1)
            self._launch(loops(values.dtype.name), "copy", table, ())

    def _addresses_of(self, segment: str, pieces: _Pieces, values: np.ndarray) -> np.ndarray:
        return self._on_device.addresses(segment, pieces.starts * values.itemsize)

    def _in_stages(
        self, segment: str, first: int, rows: np.ndarray, values: np.ndarray
    ) -> Iterator[tuple[_Pieces, np.ndarray, np.ndarray]]:
        """As much of ``rows`` as can be on its way at once: pieces of the table, where each is meanwhile, and the part
        of ``values`` [rows, ...]."""
        width = values.size // len(rows)
        starts = first + rows * width
        pieces = _cut(np.stack([starts, starts + width, np.arange(len(rows)) * width], axis=1))
        flat = values.reshape(-1)
        ends = np.cumsum(pieces.counts)
        begin = 0
        while begin < len(pieces):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + self._stage.nbytes // values.itemsize, side="right"))
            end = min(end, begin + _TABLE_NBYTES // 24)
            part = _Pieces(pieces.starts[begin:end], pieces.counts[begin:end], pieces.sources[begin:end])
            staged = self._stage.address + (part.sources - before) * values.itemsize
            yield part, staged, flat[before : int(ends[end - 1])]
            begin = end


# --- numbers ----------------------------------------------------------------------------------------------------------


def _segment(array: Array) -> str:
    assert isinstance(array.place, Location)
    return array.place.segment


def _part(operation: Apply, is_wanted: Callable[[str], bool]) -> list[Apply]:
    """What of an update concerns the dtypes that are wanted; none where nothing does."""
    dense = tuple(part for part in operation.dense if is_wanted(part.dtype))
    sparse = tuple(part for part in operation.sparse if is_wanted(part.dtype))
    return [replace(operation, dense=dense, sparse=sparse)] if dense or sparse else []


def _which_range(part: Dense, pieces: _Pieces) -> np.ndarray:
    """In which of the ranges of an update each piece lies."""
    return np.searchsorted(np.array([last for _, last in part.ranges], np.int64), pieces.starts, side="right")


def _rows_change(segment: str, dtype: str, first: int, shape: tuple[int, int], rows: np.ndarray) -> Change:
    """These rows of a table as a change, or all of it where that is less work."""
    height, width = shape
    if _MANY_ROWS * len(rows) >= height or width * np.dtype(dtype).itemsize < _SHORT_ROW_NBYTES:
        return Change(segment, first, height * width)
    return Change(segment, first, width, rows)


def _split(spans: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Spans (start, stop, source), ascending, none of which crosses a border."""
    split = []
    for start, stop, source in spans.tolist():
        inside = borders[np.searchsorted(borders, start, side="right") : np.searchsorted(borders, stop)].tolist()
        cuts = [start, *inside, stop]
        split += [(first, last, source + first - start) for first, last in pairwise(cuts)]
    return np.array(split, np.int64).reshape(-1, 3)


def _cut(spans: np.ndarray) -> _Pieces:
    """Spans (start, stop, source or -1), in pieces."""
    lengths = spans[:, 1] - spans[:, 0]
    parts = -(-lengths // _PIECE)
    which = np.repeat(np.arange(len(spans)), parts)
    offset = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * _PIECE
    sources = spans[which, 2]
    return _Pieces(
        spans[which, 0] + offset,
        np.minimum(_PIECE, lengths[which] - offset),
        np.where(sources < 0, -1, sources + offset),
    )


def _runs(pieces: _Pieces, window: slice) -> Iterator[tuple[int, int]]:
    """The elements of some pieces, those that follow each other as one."""
    starts, counts = pieces.starts[window], pieces.counts[window]
    return ((start, stop) for start, stop, _ in _contiguous(starts, counts, np.zeros_like(starts)))


def _contiguous(starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(start, stop, offset of the first) of what follows each other."""
    if not len(starts):
        return
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + counts[:-1]) + 1
    begins, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]])
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        yield int(starts[begin]), int(starts[end - 1] + counts[end - 1]), int(offsets[begin])


def _union(changes: Iterable[tuple[Change, str, Any]], mark: Any) -> list[tuple[Change, str, Any]]:
    """The same changes, what overlaps as one, all behind ``mark``."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    tables: dict[tuple[str, str, int, int], list[np.ndarray]] = {}
    for change, dtype, _ in changes:
        if change.rows is None:
            spans.setdefault((change.segment, dtype), []).append((change.first, change.first + change.width))
        else:
            tables.setdefault((change.segment, dtype, change.first, change.width), []).append(change.rows)
    united: list[tuple[Change, str, Any]] = []
    for (segment, dtype), found in spans.items():
        merged: list[tuple[int, int]] = []
        for first, last in sorted(found):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        united += [(Change(segment, first, last - first), dtype, mark) for first, last in merged]
    for (segment, dtype, first, width), rows in tables.items():
        united.append((Change(segment, first, width, np.unique(np.concatenate(rows))), dtype, mark))
    return united
