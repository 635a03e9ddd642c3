"""One replica of one run: ``central_storage`` calls it while the user's function runs.

It counts the merge points. It keeps those that need no answer yet as notes, and waits at the others. Notes travel with
the next question or with the return. The loop makes one for every run, nested runs too. This module knows neither the
user's function nor sockets.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import ModuleType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
import optree

from central_storage.core.backends import Combining, Group
from central_storage.core.context import reading
from central_storage.core.values import Shared, unshared
from central_storage.core.variable_sets import Numbers
from central_storage.diagnostics.callers import call_site
from central_storage.wire_values.value_codec import from_value, to_exception, to_value
from cs_proto import messages
from cs_proto.arrays import INLINE_NBYTES, Array
from cs_proto.errors import ContextError, LocalProtocolError, MemoryPlanError, ResultError, VariableWrittenError
from cs_proto.failures import error_of
from cs_proto.messages import AssignOp, Error, Note, ReduceOpName, Run, Value, VariableSpec, WriteNote, WriteOp
from cs_proto.records import Record, replace
from cs_runtime.failpoints import failpoint
from cs_runtime.shared_memory.remote_segment import aligned_copy
from cs_worker.devices.device import place
from cs_worker.session.core import path_text

from .catalogue import overlay
from .gradients import GradientBuffers
from .numerics import Numerics, copier, named
from .outgoing import FRAMES, Placing, raised_error, row_gradients
from .worker_context import WorkerContext

__all__ = ["Replica"]

# The most applies that are kept. Each merge point, line, weight and set of gradient buffers makes another one.
_APPLIES = 256

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Record)


def _whole(method: Callable[Concatenate[Replica, P], T]) -> Callable[Concatenate[Replica, P], T]:
    """A method that the user's code calls: in the replica's own thread only, and not torn apart by Ctrl-C."""

    def call(self: Replica, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if get_ident() != self._shop.thread:
            raise ContextError(
                "a replica's variables, optimizers and context are used in the thread of its function; hand arrays to "
                "other threads instead"
            )
        interrupts = self._shop.interrupts
        if interrupts.is_calm:  # several times in a step: without a call
            before, interrupts.in_user_code = interrupts.in_user_code, False
        else:
            before = interrupts.switch(False)
        try:
            return method(self, *args, **kwargs)
        finally:
            reading.epoch = None  # what it has written is to be seen
            if interrupts.is_calm:
                interrupts.in_user_code = before
            if not interrupts.is_calm:  # a signal may have come before the flag was set
                interrupts.switch(before)

    functools.update_wrapper(call, method)
    return call


class Replica:
    """The :class:`central_storage.core.backends.ReplicaBackend` of one run: a facade of all that the function asks."""

    def __init__(self, shop: WorkerContext, run: Run, outer: Replica | None) -> None:
        """``outer`` is the replica that waits in a merge_call for this nested run."""
        self.replica = shop.config.replica
        self.replicas = shop.replicas
        self.devices = shop.device.full_names
        #: How many merge points this replica has brought.
        self.count = 0
        self._shop = shop
        self._run = run.run
        self._sent = run
        self._notes: list[Note] = []
        # The write notes that no commit can contain, because the replica has not waited since. The values of their
        # variables with these notes applied, if they were read: in host memory, and as the function got them.
        self._unseen: list[WriteNote] = []
        self._overlaid: dict[int, np.ndarray] = {}
        self._shown: dict[int, Any] = {}
        self._writes = 0
        self.buffers: GradientBuffers = GradientBuffers(
            shop.catalogue, shop.device, None if outer is None else outer.buffers
        )
        self._numerics = None if run.check_numerics == "off" else Numerics(shop, run)
        self._named: dict[str, Any] = {} if run.check_numerics == "off" else named(shop, run)
        # The variables that this replica has written since the last commit that it knows of.
        self._written: frozenset[int] = frozenset()
        self._stepped: set[int] = set()
        self._failed: Error | None = None
        #: The keys of what merge functions gave to all replicas alike, by ``id()``; ``_kept`` keeps that alive.
        self.shared: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []
        # By ``id()``: a loop may read the same array a thousand times.
        self._held: dict[int, Any] = {}

    # --- reading ----------------------------------------------------------------------------------------------

    def view(self, number: int) -> np.ndarray:
        """The variable's value: read-only, no copy, with the same bits until the run is over. What this replica has
        brought to merge points for it is committed first; what it only noted to write is in a copy of its own. On a
        GPU a copy, made where the variable has changed since the last one; it must not be written to.

        Raises MemoryPlanError if the values that are held through the commit take more memory than there is."""
        if not self._unseen and number not in self._written and get_ident() == self._shop.thread:
            catalogue = self._shop.catalogue
            mapped = catalogue.mapped.get(number)
            if mapped is not None:  # the server's memory, seen before: most reads, which change nothing here
                if not self._written and not catalogue.copies:
                    reading.epoch = catalogue.epoch  # so are all that were shown in it, but for copies
                return mapped
        return self._view(number)

    @_whole
    def _view(self, number: int) -> np.ndarray:
        self._commit_writes_of(number)
        shop, notes = self._shop, self._unseen_of(number)
        value: np.ndarray
        if not notes:
            value = shop.device.view(number, shop.catalogue)
            return value
        if number not in self._shown:
            self._shown[number] = shop.device.bring(self._overlaid_value(number, notes))
        value = self._shown[number]
        return value

    def hold(self, value: Any) -> None:
        """Hold a result of :meth:`view` until this run is over."""
        self._held[id(value)] = value

    @_whole
    def restore(self, numbers: Iterable[int]) -> None:
        """Give back what this process has written in place to these variables."""
        shop = self._shop
        numbers = list(numbers)
        shop.catalogue.restore(numbers)
        shop.device.restore(numbers)
        for number in self._overlaid.keys() & set(numbers):
            own = self._overlaid.pop(number)
            own[...] = self._overlaid_value(number, self._unseen_of(number))
            self._overlaid[number] = own
            if not shop.device.is_host:
                self._shown.pop(number, None)

    @_whole
    def protect(self, numbers: Iterable[int]) -> None:
        """Make the memory in which this process reads these variables unwritable."""
        self._shop.catalogue.written.protect(numbers)

    @_whole
    def refuse_written(self, sites: Mapping[int, str]) -> NoReturn:
        """Raise the error about a write to these variables, by number, with the lines that wrote."""
        self.restore(sites)
        raise self._shop.catalogue.written.fail(sites)

    @_whole
    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's value; with what this replica noted to write to them."""
        self._commit_writes_of(number)
        notes = self._unseen_of(number)
        value: np.ndarray
        if not notes and not self._shop.catalogue.is_carried(number):
            value = self._shop.device.rows(number, rows, self._shop.catalogue)
            return value
        if not notes:
            value = self._shop.catalogue.rows(number, rows)
        elif number in self._overlaid:
            value = self._overlaid[number][rows]
        else:  # of a large table only these
            named, places = np.unique(rows, return_inverse=True)
            own = self._shop.catalogue.rows(number, named)
            for note in notes:
                overlay(own, note, self._shop.catalogue.map, named)
            value = own[places.reshape(rows.shape)]
        brought: np.ndarray = self._shop.device.bring(value)
        return brought

    @_whole
    def is_carried(self, number: int) -> bool:
        """Whether the variable is not in this process's memory: to read all of it fetches all of it."""
        return self._shop.catalogue.is_carried(number)

    @_whole
    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands."""
        self._commit_writes_of(number)
        return self._shop.catalogue.variable(number)

    @_whole
    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order in which they were made; versions are those of the last commit."""
        return self._shop.catalogue.variables()

    @_whole
    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands, with this replica's own steps counted, and with the hyperparameters that
        come with this run, which the server may not have yet."""
        if number in self._stepped:
            self._commit()
        record = self._shop.catalogue.optimizer(number)
        for change in self._sent.changes:
            if change.optimizer == number:
                given = {**dict(record.hyperparameters), **dict(change.hyperparameters)}
                record = replace(record, hyperparameters=tuple(given.items()))
        return record

    @_whole
    def gradient_buffers(self, numbers: Numbers) -> list[np.ndarray]:
        """Writable arrays that lie where the server reads this replica's gradients; their content is undefined. On a
        GPU they lie there, and are copied while the function goes on."""
        return self.buffers.hand_out(numbers, self._commit)

    def array_module(self) -> ModuleType:
        """NumPy, or CuPy on a GPU."""
        module: ModuleType = self._shop.device.array_module
        return module

    def place(self, array: Any, device: str) -> Any:
        """``array`` in the memory of ``device``."""
        return place(array, device)

    # --- merge points -----------------------------------------------------------------------------------------

    @_whole
    def apply(self, groups: Sequence[Group], combining: Combining, site: str) -> None:
        """Note a step of each group's optimizer. The first one of a set of variables is waited for: it may fail."""
        self._refuse_after_failure()
        dense = [pair for group in groups for pair in group.dense]
        buffers = self.buffers.fill(dense, self._commit, copier(self._numerics, combining.weight)) if dense else 0
        if self._numerics is not None and self._numerics.raises:
            self._numerics.look(groups, buffers, combining.weight, site)
        brought = []
        for optimizer, pairs, triples in groups:
            triples = sorted(triples, key=operator.itemgetter(2))
            placed = self._placed([array for values, indices, _ in triples for array in (values, indices)])
            dense_numbers, sparse_numbers = [number for *_, number in pairs], [number for *_, number in triples]
            brought.append((optimizer, tuple(dense_numbers), tuple(sparse_numbers), placed))
        # The arena gives the same descriptor for the same place, and a known point keeps those in its key alive.
        ids = tuple([(*each, tuple(map(id, placed))) for *each, placed in brought])
        key = (self.count, site, ids, buffers, combining, bool(self._named))
        point = self._shop.applies.get(key)
        if point is None:
            parts = [(optimizer, Numbers(d + s), row_gradients(s, placed)) for optimizer, d, s, placed in brought]
            self._learn(key, self._bring_apply(parts, buffers, combining, site))
        else:
            self._note(point)
            self._written = self._written.union(*[numbers for _, *both, _ in brought for numbers in both])
            self._stepped.update([optimizer for optimizer, *_ in brought])
        if dense:
            self.buffers.note()
        if self._numerics is not None and not self._numerics.raises:  # an apply that is refused does not count
            self._numerics.look(groups, buffers, combining.weight, site)

    @_whole
    def apply_buffers(
        self,
        counts: tuple[tuple[int, int], ...],
        gradients: Sequence[np.ndarray],
        numbers: Numbers,
        combining: Combining,
        site: str,
    ) -> bool:
        """As :meth:`apply`, where ``gradients`` are what was handed out last, for these variables; else nothing is done
        and False returned. They need no look one by one."""
        current = self.buffers.handed_out(gradients, numbers)
        if current is None:
            return False
        if self._failed is not None:
            self._refuse_after_failure()
        if self._numerics is not None:
            self._numerics.look_at_buffers(numbers, current, combining.weight, site)
        key = (self.count, site, counts, numbers.key, current, combining, bool(self._named))
        point = self._shop.applies.get(key)
        if point is None:
            parts = [(*each, ()) for each in numbers.divided(counts)]
            self._learn(key, self._bring_apply(parts, current, combining, site))
        else:
            self._note(point)
            self._written = self._written | numbers.members if self._written else numbers.members
            for optimizer, _ in counts:
                self._stepped.add(optimizer)
        self.buffers.note()
        return True

    def _learn(self, key: tuple[object, ...], point: messages.ApplyPoint) -> None:
        """Keep an apply for later runs."""
        known = self._shop.applies
        if not point.needs_answer:  # else it does not have the number of the set
            if len(known) >= _APPLIES:
                known.clear()
            known[key] = point

    def _bring_apply(
        self,
        parts: Sequence[tuple[int, Numbers, tuple[messages.SparseGradient, ...]]],
        buffers: int,
        combining: Combining,
        site: str,
    ) -> messages.ApplyPoint:
        known = self._shop.variable_sets
        keys = [(optimizer, numbers.ascending) for optimizer, numbers, _ in parts]
        updates = [known.get(key) or messages.OptimizerUpdate(key[0], 0, key[1]) for key in keys]
        for which, (_, _, rows) in enumerate(parts):
            if rows:
                updates[which] = replace(updates[which], sparse=rows)
        point = messages.ApplyPoint(self.count, site, tuple(updates), buffers, *combining, is_watched=bool(self._named))
        if point.needs_answer:
            accepted = self._ask(point, messages.Accepted)
            for key, number in zip(keys, accepted.variable_sets, strict=True):
                known[key] = messages.OptimizerUpdate(key[0], number, ())
        else:
            self._note(point)
        self._written = self._written.union(*[numbers.members for _, numbers, _ in parts])
        self._stepped.update([optimizer for optimizer, _, _ in parts])
        return point

    @_whole
    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable, with this replica's own steps done."""
        if optimizer in self._stepped:
            self._commit()
        return self._shop.catalogue.slot(optimizer, variable, slot)

    @_whole
    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Note an aggregated assign; one of a Python number is waited for, since the replicas are compared."""
        self._refuse_after_failure()
        checked = scalar and self.replicas > 1
        # A note travels later than its value may change.
        kept = value if checked or value.nbytes > INLINE_NBYTES else np.array(value)
        array = Placing(self._shop.arena)(kept)
        if checked:
            self._ask(messages.AssignPoint(self.count, site, number, op, array, True), messages.Accepted)
        else:
            self._note(messages.AssignPoint(self.count, site, number, op, array, False))
        self._written |= {number}

    @_whole
    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Note a write that needs no agreement."""
        self._refuse_after_failure()
        if len(self._notes) >= FRAMES:
            self._commit()
        placing = Placing(self._shop.arena)

        def keep(array: np.ndarray) -> Array:  # a note travels later than its value may change
            return placing(array if array.nbytes > INLINE_NBYTES else np.array(array))

        indices = None if rows is None else keep(rows)
        note = WriteNote(self.count, self._writes, site, number, op, keep(value), indices)
        self._notes.append(note)
        self._writes += 1
        self._unseen.append(note)
        was_shown = self._shown.pop(number, None) is not None
        if number in self._overlaid:
            if was_shown:  # that array keeps its bits
                self._overlaid[number] = np.array(self._overlaid[number])
            overlay(self._overlaid[number], note, self._shop.catalogue.map)

    @_whole
    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Make a variable; replica 0's value counts."""
        array = Placing(self._shop.arena)(value)
        created = self._ask(messages.CreatePoint(self.count, site, spec, array), messages.CreatedInRun)
        self._written |= {created.variable.number}
        return self._shop.catalogue.learn(created.variable)

    @_whole
    def all_reduce(self, op: ReduceOpName, leaves: Sequence[np.ndarray], site: str) -> list[np.ndarray]:
        """Combine leaf by leaf over the replicas."""
        return self._combine(leaves, lambda arrays: messages.ReducePoint(self.count, site, op, arrays))

    @_whole
    def all_gather(self, axis: int, leaves: Sequence[np.ndarray], site: str) -> list[np.ndarray]:
        """Concatenate leaf by leaf over the replicas along ``axis``."""
        return self._combine(leaves, lambda arrays: messages.GatherPoint(self.count, site, axis, arrays))

    @_whole
    def merge_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], site: str
    ) -> Any:
        """Call replica 0's function once in the cross-replica context; this replica's share of what it returned.

        While the others wait here, they carry out the runs that the function starts.
        """
        self._refuse_after_failure()
        shop = self._shop
        mark = shop.arena.mark()
        given = (args, dict(kwargs))
        arguments = to_value(given, Placing(shop.arena), "arguments of merge_call", self.shared)
        point = messages.MergeCallPoint(self.count, site, arguments)
        answer: Record = self._ask(point, messages.Token, messages.Merged)
        self._all_committed()
        if isinstance(answer, messages.Merged):
            shop.arena.release(mark)  # the holder has read the arguments, and what nested runs returned
            return self._received(from_value(answer.value, shop.catalogue.copy, shop.catalogue.resolve))
        assert isinstance(answer, messages.Token)
        try:
            return self._received(shop.controller.merge(answer, function, self._sent))
        except Exception as error:
            # The server ends the run for everybody; nothing it would answer is of use any more.
            self._failed = raised_error(error, self.replica, self.count, shop.arena)
            raise

    def send_return(self, value: Value | None, error: Error | None) -> None:
        """Tell the server that the function has returned or raised, with the notes that are left."""
        shop = self._shop
        if not shop.device.is_host:
            shop.device.settle()  # if that fails, this process must end: the arrays of its notes are not there
        failpoint("worker.return")
        if value is None or not shop.conversation.mark_return(self._sent, self._notes, self.count, value):
            self._send_return(value, error)
        failpoint("worker.returned")

    # --- how it is done -----------------------------------------------------------------------------------------

    def _send_return(self, value: Value | None, error: Error | None) -> None:
        shop = self._shop
        returned = messages.Return(
            run=self._run,
            replica=self.replica,
            incarnation=shop.config.incarnation,
            notes=tuple(self._notes),
            count=self.count,
            value=value,
            error=error,
            series=self._sent.series,
            lookahead=self._sent.lookahead,
            client=shop.conversation.session.client,
            changes=self._sent.changes,
            **self._named,
        )
        try:
            shop.conversation.say(self._run, returned)
        except LocalProtocolError as refused:
            too_large = ResultError(f"the result of the replica function is too large to send: {refused}")
            failed = replace(returned, value=None, error=error_of(too_large, self.replica, self.count))
            shop.conversation.say(self._run, failed)

    def _received(self, value: Any) -> Any:
        """What a merge function returned, as the user gets it."""
        for leaf in optree.tree_leaves(value, none_is_leaf=True):
            if isinstance(leaf, Shared):
                self._kept.append(leaf.value)
                self.shared[id(leaf.value)] = leaf.key
        return unshared(value)

    def _combine(
        self,
        leaves: Sequence[np.ndarray],
        point: Callable[[tuple[Array, ...]], messages.ReducePoint | messages.GatherPoint],
    ) -> list[np.ndarray]:
        arena, catalogue = self._shop.arena, self._shop.catalogue
        mark = arena.mark()
        placing = Placing(arena)
        try:
            reduced = self._ask(point(tuple(placing(leaf) for leaf in leaves)), messages.Reduced)
        finally:
            arena.release(mark)  # whatever the answer, every operand has been read
        return [self._shop.device.bring(catalogue.copy(array)) for array in reduced.arrays]

    def _ask(self, point: Any, *answers: type[R]) -> R:
        """Bring a point together with the notes, and wait for its answer. Raises what the server answers."""
        self._refuse_after_failure()
        shop, k = self._shop, point.k
        shop.device.settle()
        is_merge_call = isinstance(point, messages.MergeCallPoint)
        if is_merge_call or isinstance(point, messages.ReadPoint):
            shop.catalogue.preserve()  # a commit follows
        ask = messages.Ask(
            run=self._run,
            replica=self.replica,
            incarnation=shop.config.incarnation,
            notes=tuple(self._notes),
            point=point,
            series=self._sent.series,
            client=shop.conversation.session.client,
            preserved=not shop.catalogue.mapped,
            changes=self._sent.changes,
            **self._named,
        )
        failpoint("worker.ask")
        shop.conversation.link.send_server(ask)
        self._notes.clear()
        if not isinstance(point, messages.ReadPoint):
            self.count += 1
            self._forget_overlays(self.count)

        def wanted(record: Record) -> Record | None:
            if getattr(record, "run", None) != self._run or getattr(record, "k", None) != k:
                return None
            if isinstance(record, messages.PointFailed):
                if record.ends_run:
                    self._failed = record.error
                raise to_exception(record.error, shop.catalogue.copy, shop.catalogue.resolve)
            return record if isinstance(record, (*answers, messages.Preserve)) else None

        what = f"{type(point).__name__} {k} of run {path_text(self._run)} at {point.site}"
        merge_point = (*self._run, k) if is_merge_call else None
        while True:
            answer: Record = shop.conversation.wait(what, wanted, merge_point, ask)
            if not isinstance(answer, messages.Preserve):
                break
            self._preserve()
            ask = replace(ask, preserved=True)
            shop.conversation.link.send_server(ask)
        if self.count > k:
            shop.turns.pass_point(self._run, k)
        assert isinstance(answer, answers)
        return answer

    def _preserve(self) -> None:
        """Preserve the views that are held here, because another replica causes a commit in the middle of the run. If
        that fails, the run is over for this replica, and it does not wait for its answer."""
        try:
            self._shop.catalogue.preserve()
        except (MemoryPlanError, VariableWrittenError) as error:
            self._failed = raised_error(error, self.replica, self.count, self._shop.arena)
            raise

    def _overlaid_value(self, number: int, notes: Sequence[WriteNote]) -> np.ndarray:
        if number not in self._overlaid:
            self._overlaid[number] = own = aligned_copy(self._shop.catalogue.view(number))
            for note in notes:
                overlay(own, note, self._shop.catalogue.map)
        shown = self._overlaid[number].view()
        shown.flags.writeable = False
        return shown

    def _unseen_of(self, number: int) -> list[WriteNote]:
        return [note for note in self._unseen if note.variable == number]

    def _forget_overlays(self, k: int) -> None:
        """Write notes before merge point ``k`` may be in a commit by now: what reads their variables has it made."""
        self._written |= {note.variable for note in self._unseen if note.k < k}
        self._unseen = [note for note in self._unseen if note.k >= k]
        self._overlaid.clear()
        self._shown.clear()

    def _note(self, point: messages.ApplyPoint | messages.AssignPoint) -> None:
        if len(self._notes) >= FRAMES:
            self._commit()
        self._notes.append(point)
        self.count += 1

    def _placed(self, values: Sequence[Any]) -> list[Array]:
        """The arrays in the arena, where they stay until the run is over: a note is read later than it is made."""
        here = iter(self._shop.arena.put_all([value for value in values if isinstance(value, np.ndarray)]))
        return [next(here) if isinstance(value, np.ndarray) else self._fetched(value) for value in values]

    def _fetched(self, value: Any) -> Array:
        """An array of the device, in the arena."""
        arena, device = self._shop.arena, self._shop.device
        if self._shop.catalogue.carries:
            host = np.empty(value.shape, value.dtype.name)
            device.fetch([(value, host)], may_change=True)
            device.settle()
            return arena.put(host.dtype.name, host)
        placed = arena.new(value.dtype.name, value.shape)
        device.fetch([(value, arena.view(placed))], may_change=True)
        return placed

    def _commit_writes_of(self, number: int) -> None:
        if number in self._written:
            self._commit()

    def _commit(self) -> None:
        """Have everything committed that this replica has brought so far."""
        self._ask(messages.ReadPoint(self.count, call_site()), messages.Committed)
        self._all_committed()

    def _all_committed(self) -> None:
        self._forget_overlays(self.count)
        self._written = frozenset()
        self._stepped.clear()
        self.buffers.committed()

    def _refuse_after_failure(self) -> None:
        """Raise again, without a question, what has ended the run as a whole."""
        if self._failed is not None:
            raise to_exception(self._failed, self._shop.catalogue.copy, self._shop.catalogue.resolve)
