"""The controller during a merge_call: replica 0's worker runs the merge function in the cross-replica context and does
what the client does otherwise. It starts nested runs in all workers (in its own by recursion) and sends the server the
writes of the merge function.

It is always the backend of the strategy handle in a worker, so it refuses operations while this worker holds no token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from central_storage.core import context
from central_storage.core.backends import Carriage, Column, ReadRows, Values, assign_each, every, read_each
from central_storage.core.pipeline import Series
from central_storage.core.values import regroup, select_replica, shared_parts
from central_storage.pickling.function import Function, Pickled
from central_storage.pickling.pickler import digest, dump_arguments, dump_function
from central_storage.strategy.service_strategy import CentralStorageStrategy
from central_storage.wire_values.value_codec import from_value, to_exception, to_value
from cs_proto import messages
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import INLINE_NBYTES, Array, array_of
from cs_proto.errors import ContextError
from cs_proto.function_cache import HeldFunctions
from cs_proto.messages import AssignOp, Counters, Run, Token, VariableSpec, WriteOp
from cs_proto.records import Record, replace
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.shared_memory.remote_segment import aligned_copy
from cs_worker.config import Config
from cs_worker.session.conversation import Conversation
from cs_worker.session.core import path_text
from cs_worker.session.interrupts import Interrupts

from .catalogue import Catalogue
from .outgoing import Placing, raised_error

__all__ = ["MergeController"]

_log = logging.getLogger("central_storage.worker")


class _HeldToken:
    """A token that this worker holds: the merge point of ``run``, and what has been numbered under it."""

    def __init__(self, token: Token, run: Run) -> None:
        self.point = (*token.run, token.k)
        self.client = path_text(self.point)
        self.seed = run.seed
        self.name = run.name
        self.step = run.step
        self.check_numerics = run.check_numerics
        self.runs = 0
        self.sequence = 0


class MergeController:
    """The :class:`central_storage.core.backends.ControllerBackend` of a worker: a facade, as that is."""

    def __init__(
        self,
        config: Config,
        registered: messages.Registered,
        conversation: Conversation,
        catalogue: Catalogue,
        arena: Arena,
        interrupts: Interrupts,
        execute: Callable[[bytes, Run], None],
    ) -> None:
        """``execute`` carries out a nested run as this worker's replica, and sends the Return."""
        self.replicas = registered.replicas
        self.compute_devices = tuple(worker.device for worker in registered.workers)
        self.parameter_device = registered.parameter_device
        self.address = config.run_directory
        self.ended: str | None = None  # when the service ends, so does the worker
        self._config = config
        self._workers = registered.workers
        self._conversation = conversation
        self._catalogue = catalogue
        self._arena = arena
        self._interrupts = interrupts
        self._execute = execute
        self._thread = threading.get_ident()
        self._tokens: list[_HeldToken] = []
        self._held = [HeldFunctions() for _ in registered.workers]
        # The nested runs that are not over, innermost last: what was sent, and the pickled function.
        self._open: list[tuple[list[Run], bytes]] = []
        conversation.note_workers = self._note_workers
        self._strategy = CentralStorageStrategy.from_backend(self, self.compute_devices, self.parameter_device)
        catalogue.strategy = self._strategy

    @property
    def is_busy(self) -> bool:
        """True: a run is under way."""
        return True

    @property
    def strategy(self) -> CentralStorageStrategy:
        """The one handle of the strategy in this worker."""
        return self._strategy

    def merge(self, token: Token, function: Callable[..., Any], run: Run) -> Any:
        """Call ``function`` with all replicas' arguments regrouped, tell the server what it returned or raised, and
        give replica 0's share. Called by replica 0 at its merge point of ``run``."""
        self._tokens.append(_HeldToken(token, run))
        point = (*token.run, token.k)
        try:
            values = self._call(token, function)
            self._conversation.say(point, messages.MergeCallReturn(token.run, token.k, values, None))
        except BaseException as error:
            failure = raised_error(error, self._config.replica, token.k, self._arena)
            self._conversation.say(point, messages.MergeCallReturn(token.run, token.k, (), failure))
            raise
        finally:
            self._tokens.pop()
        return self._from_value(values[self._config.replica])

    def _call(self, token: Token, function: Callable[..., Any]) -> tuple[messages.Value, ...]:
        def call() -> Any:
            args, kwargs = regroup([self._from_value(value) for value in token.arguments])
            with self._interrupts.user_code():
                return function(self._strategy, *args, **kwargs)

        result = context.in_cross_replica(self._strategy, call)
        placing = Placing(self._arena)
        shared = shared_parts(token.k, result) if self.replicas > 1 else {}
        parts = [select_replica(replica, result) for replica in range(self.replicas)]
        return tuple(to_value(part, placing, shared=shared) for part in parts)

    # --- ControllerBackend --------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Run ``function`` once per replica, nested in the run of the merge_call; the results in replica order."""
        token = self._token("strategy.run")
        with self._interrupts.own_code():
            adopt = self._strategy.adopt
            pickled = self._pickle(function)
            mark = self._arena.mark()
            pickles = [dump_arguments(args, kwargs, adopt, self._arena.share) for args, kwargs in arguments]
            results = self._run(token, pickled, isinstance(function, Function), pickles)
            self._arena.release(mark)  # every replica has returned, and the results are copies
            return results

    def series(self, lookahead: int) -> Series:
        """Refused: steps are the script's to send ahead."""
        raise ContextError("run_steps cannot be called inside a merge_call; use run there, or run_steps in your script")

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Make a variable."""
        token = self._token("Variable")
        with self._interrupts.own_code():
            inline = array_of(value) if value.nbytes <= INLINE_NBYTES else None
            token.sequence += 1
            request = messages.Create(token.client, token.sequence, spec, inline)
            created = self._catalogue.ask(request, token.sequence, messages.Created).variable
            if inline is None:
                self._assign(token, created.number, "assign", value)
            return self._catalogue.learn(created)

    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Write a variable once."""
        token = self._token("assign")
        with self._interrupts.own_code():
            self._assign(token, number, op, value)

    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Write a variable once, or rows of it."""
        token = self._token(op)
        with self._interrupts.own_code():
            self._assign(token, number, op, value, rows)

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's current value."""
        self._token("reading a variable outside a replica")
        with self._interrupts.own_code():
            return self._catalogue.rows(number, rows)

    def read(self, number: int) -> np.ndarray:
        """A copy of the variable's current value, which begins at a multiple of 64 bytes."""
        self._token("reading a variable outside a replica")
        with self._interrupts.own_code():
            # Everything before this merge point is committed, and nobody but the holder of the token can go on.
            return aligned_copy(self._catalogue.view(number))

    def sample(self, number: int, most: int) -> np.ndarray | None:
        """Some of the variable's values."""
        return every(self.read(number), most)

    @property
    def workers(self) -> Sequence[messages.Worker]:
        """All workers."""
        return self._workers

    def listens_at(self) -> str:
        """Unknown: the script knows it."""
        return ""

    def processes(self) -> Sequence[tuple[str, int, str, str]]:
        """None: the script shows them."""
        return ()

    def forget(self, kind: str, number: int) -> None:
        """Nothing: other workers and the script may hold it."""

    @property
    def is_running(self) -> bool:
        """True: this worker is part of it."""
        return True

    def settle_names(self) -> None:
        """Nothing: names change only between runs."""

    def configure(
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
        exempt: tuple[str, ...] | None = None,
        steps: Mapping[int, int] | None = None,
    ) -> int:
        """Make an optimizer (``number`` 0) or change one; its number."""
        token = self._token("setting up an optimizer")
        with self._interrupts.own_code():
            pairs = tuple(hyperparameters.items())
            counts = tuple((steps or {}).items())
            token.sequence += 1
            request = messages.Configure(
                token.client, token.sequence, number, kind, pairs, schedule, iterations, exempt, counts
            )
            return self._catalogue.ask(request, token.sequence, messages.Done).number

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable."""
        self._token("reading a slot outside a replica")
        with self._interrupts.own_code():
            return self._catalogue.slot(optimizer, variable, slot)

    def assign_slot(
        self, optimizer: int, variable: int, slot: str, value: np.ndarray, first: int | None = None
    ) -> None:
        """Write a slot once, or its rows from the number ``first`` on."""
        token = self._token("writing a slot")
        with self._interrupts.own_code():
            mark = self._arena.mark()
            token.sequence += 1
            placed = self._arena.place(value)
            request = messages.AssignSlot(token.client, token.sequence, optimizer, variable, slot, placed, first)
            try:
                self._catalogue.ask(request, token.sequence, messages.Done)
            finally:
                self._arena.release(mark)

    def read_all(self, columns: Sequence[Column], *, copied: bool) -> Values:
        """The values of many variables and slots, which are asked for one after the other."""
        return read_each(self, columns, copied=copied)

    def read_in_rows(self, columns: Sequence[Column]) -> list[ReadRows]:
        """How rows of large values are read, one value for each column: the server is asked for each piece."""

        def reader(each: Column) -> ReadRows:
            (number,) = each.numbers
            if each.optimizer:
                return lambda first, stop: self._slot_rows(each.optimizer, number, each.slot, first, stop)
            return lambda first, stop: self.read_rows(number, np.arange(first, stop))

        return list(map(reader, columns))

    def _slot_rows(self, optimizer: int, variable: int, slot: str, first: int, stop: int) -> np.ndarray:
        self._token("reading a slot outside a replica")
        with self._interrupts.own_code():
            return self._catalogue.slot(optimizer, variable, slot, (first, stop))

    def assign_all(self, columns: Sequence[tuple[Column, memoryview]]) -> None:
        """Set many variables and slots, one after the other."""
        assign_each(self, columns)

    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands."""
        self._check_thread()
        with self._interrupts.own_code():
            return self._catalogue.variable(number)

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order in which they were made."""
        self._check_thread()
        with self._interrupts.own_code():
            return self._catalogue.variables()

    def exclusively(self) -> AbstractContextManager[None]:
        """Nobody else runs or writes while this worker holds the token."""
        return nullcontext()

    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands."""
        self._check_thread()
        with self._interrupts.own_code():
            return self._catalogue.optimizer(number)

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which an optimizer has slots."""
        self._check_thread()
        with self._interrupts.own_code():
            return self._catalogue.slotted(optimizer)

    def steps_of(self, optimizer: int) -> dict[int, int]:
        """How often an optimizer has updated each variable beside which it has slots."""
        self._check_thread()
        with self._interrupts.own_code():
            return self._catalogue.steps_of(optimizer)

    def carrier(self) -> Carriage:
        """A plain copy: the other workers do not map this one's memory ahead of a run."""
        return Carriage()

    @property
    def seed(self) -> int:
        """The strategy's seed, from the run of the merge_call."""
        return self._token("the strategy's seed").seed

    def steps(self) -> dict[str, int]:
        """The number of runs of the function of the merge_call, with this one."""
        token = self._token("the number of runs")
        return {token.name: token.step + 1}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Change nothing, and log a warning: the script counts the runs."""
        if steps.get(name := self._token("the number of runs").name) != self.steps()[name]:
            _log.warning(
                "a restore in a merge function does not set the count of runs, so random numbers continue as before; "
                "restore the checkpoint in the script"
            )

    def statistics(self) -> Counters:
        """The server's counters."""
        self._check_thread()
        with self._interrupts.own_code():
            request = self._conversation.session.next_request()
            return self._catalogue.ask(messages.Statistics(request), request, Counters)

    def close(self) -> None:
        """Refused: the service is the script's to stop."""
        raise ContextError("a strategy cannot be shut down inside a worker; do it in your script")

    # --- how it is done -----------------------------------------------------------------------------------------

    def _pickle(self, function: Callable[..., Any]) -> Pickled:
        if isinstance(function, Function):
            return function.pickle_for(self, self._pickle)
        data = dump_function(function, self._strategy.adopt)
        return Pickled(data, digest(data), set())

    def _run(
        self, token: _HeldToken, pickled: Pickled, frozen: bool, pickles: Sequence[tuple[bytes, tuple[Array, ...]]]
    ) -> list[Any]:
        run = (*token.point, token.runs)
        token.runs += 1
        data, hashed = pickled.data, pickled.digest
        records = []
        for worker, (arguments, buffers) in zip(self._workers, pickles, strict=True):
            is_held, self._held[worker.replica] = self._held[worker.replica].touch(hashed, frozen)
            function = None if is_held else self._arena.share(data)
            shared = self._arena.share(arguments)
            record = Run(
                run,
                token.step,
                worker.replica,
                token.seed,
                hashed,
                function,
                frozen,
                shared,
                buffers,
                name=token.name,
                check_numerics=token.check_numerics,
            )
            records.append(record)
            if worker.replica != self._config.replica:
                self._conversation.link.send_worker(worker, record)
        self._open.append((records, data))
        try:
            return self._wait_for(run, records[self._config.replica])
        finally:
            self._open.pop()

    def _note_workers(self, record: messages.Registered | messages.WorkerRestarted) -> None:
        """Note workers that replace others, and hold no functions. One that waits at the merge_call again is sent the
        nested run that it owes."""
        for worker in record.workers if isinstance(record, messages.Registered) else (record.worker,):
            known = self._workers[worker.replica]
            if worker.incarnation > known.incarnation:
                self._conversation.link.forget_worker(known)
                self._workers = (*self._workers[: worker.replica], worker, *self._workers[worker.replica + 1 :])
                self._held[worker.replica] = HeldFunctions()
        if isinstance(record, messages.WorkerRestarted):
            self._send_again(record.run, record.worker)

    def _send_again(self, owed: messages.RunId, worker: messages.Worker) -> None:
        for records, data in self._open:
            run = records[worker.replica]
            if run.run[:-1] == owed[:-1] and run.run >= owed:
                is_held, self._held[worker.replica] = self._held[worker.replica].touch(run.digest, run.frozen)
                again = replace(run, function=None if is_held else self._arena.share(data))
                self._conversation.link.send_worker(worker, again)

    def _wait_for(self, run: messages.RunId, own: Run) -> list[Any]:
        self._execute(self._config.name.encode(), own)

        def wanted(record: Record) -> messages.RunFinished | None:
            return record if isinstance(record, messages.RunFinished) and record.run == run else None

        finished = self._conversation.wait(f"nested run {path_text(run)}", wanted)
        self._conversation.session.note_over(run)
        if finished.error is not None:
            raise to_exception(finished.error, self._catalogue.copy, self._catalogue.resolve)
        return [self._from_value(value) for value in finished.values]

    def _assign(
        self, token: _HeldToken, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        mark = self._arena.mark()
        token.sequence += 1
        place = self._arena.place
        indices = None if rows is None else place(rows)
        request = messages.Assign(token.client, token.sequence, number, op, place(value), indices)
        try:
            self._catalogue.ask(request, token.sequence, messages.Done)
        finally:
            self._arena.release(mark)

    def _from_value(self, value: messages.Value) -> Any:
        return from_value(value, self._catalogue.copy, self._catalogue.resolve)

    def _token(self, what: str) -> _HeldToken:
        self._check_thread()
        if not self._tokens:
            raise ContextError(
                f"{what} in a worker needs the cross-replica context; use get_replica_context().merge_call to get there"
            )
        return self._tokens[-1]

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ContextError(
                "a strategy and its variables are used in the thread of the replica function; hand arrays to other "
                "threads instead"
            )
