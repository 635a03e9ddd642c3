"""The worker's loop: accepts work from the controller, runs one function after the other, and sends each Return.

It connects the parts of the worker and orders the steps around a user's function. The session core decides which
records may arrive, and the replica decides what the function may do.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np

from central_storage import nest
from central_storage.core.context import enter_replica
from central_storage.core.random_streams import Streams
from central_storage.diagnostics.remedies import explain
from central_storage.pickling.pickler import are_plain, load_arguments
from central_storage.wire_values.value_codec import to_value
from cs_proto import messages, segment_names
from cs_proto.descriptors import Array, Location
from cs_proto.messages import Prepare, Run, Value
from cs_proto.records import Buffer, Frame
from cs_runtime.failpoints import failpoint
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.trace import trace_of
from cs_runtime.transport.supervisor_link import CARRIED, SupervisorLink

from .baton import Baton
from .config import Config
from .devices.device import Device
from .execution.catalogue import Catalogue
from .execution.functions import Functions
from .execution.merge_controller import MergeController
from .execution.outgoing import Placing, raised_error
from .execution.replica import Replica
from .execution.worker_context import WorkerContext
from .randomness.seeds import Seeds, kept_random_state
from .session.conversation import Conversation
from .session.core import path_text
from .session.interrupts import Interrupts
from .session.session import moment

__all__ = ["Loop"]

_log = logging.getLogger("central_storage.worker")


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Ready: TypeAlias = tuple[Run, Replica, Streams, enter_replica, _Arguments | None]
"""What a run has before its function is called: the arguments only if anyone may load them at any time."""


class Loop:
    """One registered worker at work."""

    def __init__(
        self,
        config: Config,
        device: Device,
        registered: messages.Registered,
        lifeline: SupervisorLink,
        conversation: Conversation,
        interrupts: Interrupts,
        turns: Baton,
    ) -> None:
        conversation.execute = self._execute
        conversation.prepare = self._prepare_step
        catalogue = Catalogue(conversation, lifeline, config.replica, device, registered.parameter_device)
        lifeline.carry = catalogue.carry
        lifeline.may_preserve = device.is_host
        self._own_arena = segment_names.arena(config.replica)
        own = lifeline.segment(self._own_arena)
        self._lifeline = lifeline
        self._has_said_carried = False
        if lifeline.carried_because:
            self._say_carried()
        lifeline.keep_times(trace_of("worker"), f"w{config.replica}")
        arena = Arena(lambda: own)
        controller = MergeController(config, registered, conversation, catalogue, arena, interrupts, self._execute)
        self._shop = WorkerContext(
            config,
            device,
            registered.replicas,
            interrupts,
            conversation,
            catalogue,
            arena,
            controller,
            controller.strategy,
            turns,
        )
        #: Describes the contents of a segment at an offset, for an error.
        self.what_lies_at = catalogue.what_lies_at
        self._programs = Functions(catalogue.map)
        self._seeds = Seeds(None if device.is_host else device.seed)
        # The name and the step of the last run, and the streams of the next one, if it was foreseen.
        self._last: tuple[str, int] | None = None
        self._next: Streams | None = None
        self._own_path = list(sys.path)
        self._under_way: list[Replica] = []
        self._ready: _Ready | None = None
        self._has_worked = False
        self._is_logged = _log.isEnabledFor(logging.DEBUG)  # a process is told at its start; asked in every run

    def serve(self) -> None:
        """Work until the process ends."""
        while not self._shop.interrupts.terminating:
            self.serve_once()

    def serve_once(self) -> None:
        """Wait for the controller's next record and act on it."""
        shop = self._shop
        controller, work = shop.conversation.next_work()
        if isinstance(work, Run):
            shop.conversation.begin_run(controller, work)
            # The client has the results of the last run, or of the step lookahead + 1 before this one. It has copied
            # them, or it holds them where they lie.
            shop.arena.reset(*work.part, work.held)
            with shop.turns.taken(work.run):
                send_return = self._carry_out(controller, work)
            send_return()  # after the turn, because the script's next work is not part of it
            if work.buffers:
                self._restore(work)
            shop.interrupts.install()  # the user's code may have put other handlers in their place
            self._foresee(work)
            if self._lifeline.carried_because:
                self._say_carried()
            if not self._has_worked:
                self._has_worked = True
                shop.conversation.link.send_supervisor(messages.MadeProgress(shop.config.incarnation))
        elif isinstance(work, Prepare):
            self._prepare(work)
        else:
            self._programs.forget(controller, work.functions)
            shop.forget(work)

    def _foresee(self, run: Run) -> None:
        """Set the random states of the next run while the server and the script finish this one. A function that has
        come twice in a row probably comes again."""
        before, self._last = self._last, (run.name, run.step)
        if before == (run.name, run.step - 1) and not self._shop.turns.is_shared:
            self._next = Streams(run.seed, run.name, run.step + 1, run.replica, (), self._shop.device.generator)
            self._seeds.foresee(self._next)

    def _say_carried(self) -> None:
        """Log once that segments cannot be mapped, and why. This may show first at any segment."""
        if not self._has_said_carried:
            self._has_said_carried = True
            _log.warning("transport %s: %s", CARRIED, self._lifeline.carried_because)

    def _prepare(self, prepare: Prepare) -> None:
        """Find modules and files where the script finds them. Entries that only this process needs come last."""
        sys.path[:] = [*prepare.path, *(entry for entry in self._own_path if entry not in prepare.path)]
        importlib.invalidate_caches()
        try:
            os.chdir(prepare.directory)
        except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
            _log.warning("%s cannot enter the script's directory: %s", self._shop.config.name, error)

    def _execute(self, sender: bytes, run: Run) -> None:
        """Carry out a nested run as this replica, and send its Return."""
        self._shop.turns.pass_point(run.run, -1)
        self._carry_out(sender, run)()
        self._restore(run)

    def _carry_out(self, sender: bytes, run: Run) -> Callable[[], None]:
        """Carry out one run as this replica. The function that this returns sends the Return of its result or error."""
        outer = self._under_way[-1] if self._under_way else None
        ready, self._ready = self._ready, None
        if ready is None or ready[0] is not run:
            ready = self._made_ready(run, outer)
        replica = ready[1]
        restore = kept_random_state(self._shop.device.keep_random_state) if outer is not None else None
        value, error = None, None
        failpoint("worker.run")
        self._under_way.append(replica)
        written = self._shop.catalogue.written
        if outer is None:
            if not self._shop.device.is_host:
                self._shop.device.begin_run(self._shop.catalogue)
            written.begin_run(run)
        if self._is_logged:
            _log.debug("run %s begins", path_text(run.run))
        try:
            returned = self._call(sender, ready)
            if outer is None:
                written.end_run()
            value = returned
        # Every exception of the user's code is an answer, also SystemExit and KeyboardInterrupt. The worker continues.
        except BaseException as raised:
            if self._shop.interrupts.terminating:
                raise
            # No name holds what the verdict returns: its traceback holds this frame, and so the user's arrays.
            error = raised_error(
                written.verdict(raised) if outer is None else raised, replica.replica, replica.count, self._shop.arena
            )
        finally:
            self._under_way.pop()
        if restore is not None:
            restore()
        _flush()
        if self._is_logged:
            _log.debug("run %s has ended", path_text(run.run))
        return partial(replica.send_return, value, error)

    def _restore(self, run: Run) -> None:
        """Give back what the function has written to the arguments of ``run``. Not before the Return is sent, because a
        small result may be a view of an argument."""
        for array in run.buffers:
            if isinstance(array.place, Location):
                self._shop.catalogue.written.restore_array(array)

    def _prepare_step(self, run: Run) -> None:
        """Make what a step needs while this worker waits for the end of the step before it. If the step does not begin,
        nobody sees it."""
        if self._ready is not None and self._ready[0] is run:
            return
        data, arguments = run.arguments, None
        pickled = data if type(data) is bytes else data.data if isinstance(data, Frame) else None  # None: in an arena
        is_here = not run.buffers or all(isinstance(array.place, Frame) for array in run.buffers)
        if is_here and pickled is not None and are_plain(pickled):
            try:  # noqa: SIM105  (suppress() is slower, and this runs at every step)
                arguments = load_arguments(pickled, list(map(self._buffer, run.buffers)), self._shop.catalogue.resolve)
            except Exception:  # noqa: BLE001  (it comes again when the step has begun)
                pass
        self._ready = self._made_ready(run, None, arguments)

    def _made_ready(self, run: Run, outer: Replica | None, arguments: _Arguments | None = None) -> _Ready:
        shop = self._shop
        replica = Replica(shop, run, outer)
        streams, self._next = self._next, None
        if streams is None or streams.place != (run.seed, run.run[1:], run.name, run.step, run.replica):
            streams = Streams(run.seed, run.name, run.step, run.replica, run.run[1:], shop.device.generator)
        return run, replica, streams, enter_replica(shop.strategy, replica, streams), arguments

    def _call(self, sender: bytes, ready: _Ready) -> Value:
        shop = self._shop
        run, replica, streams, context, arguments = ready
        with context:
            before = shop.interrupts.switch(True)
            try:
                function = self._programs.load(sender, run, shop.catalogue.resolve)
                if arguments is None:
                    buffers = list(map(self._buffer, run.buffers)) if run.buffers else []
                    arguments = load_arguments(_pickled(shop, run.arguments), buffers, shop.catalogue.resolve)
                args, kwargs = arguments
                if not shop.device.is_host:
                    args, kwargs = nest.map_structure(self._bring, (args, kwargs))
                self._seeds.begin(streams)
                moment("called", run.run[0])
                try:
                    result = function(*args, **kwargs)
                except BaseException as raised:
                    if shop.conversation.link.is_inherited:
                        _end_child(raised)
                    explain(raised)
                    raise
                if shop.conversation.link.is_inherited:
                    _end_child(None)
                moment("returned", run.run[0])
            finally:
                shop.interrupts.switch(before)
            return to_value(result, Placing(shop.arena), shared=replica.shared)

    def _buffer(self, array: Array) -> memoryview:
        """The bytes of an argument, which may be written in place without an effect on others. So a nested run gets a
        copy of what lies in this worker's own arena, which the other replicas map."""
        catalogue = self._shop.catalogue
        is_own = isinstance(array.place, Location) and array.place.segment == self._own_arena
        return (catalogue.copy(array) if is_own else catalogue.map(array)).data

    def _bring(self, leaf: Any) -> Any:
        return self._shop.device.bring(leaf) if isinstance(leaf, np.ndarray) else leaf


def _pickled(shop: WorkerContext, data: bytes | Frame | Array) -> Buffer:
    if type(data) is bytes:
        return data
    if type(data) is Frame:
        return data.data
    assert isinstance(data, Array)
    return data.place.data if isinstance(data.place, Frame) else shop.catalogue.map(data).data


def _end_child(raised: BaseException | None) -> NoReturn:
    """End a process that the function forked, as any program ends. Otherwise it would continue as a second worker
    without connections, and the function may wait for its end."""
    code: object = 0
    if isinstance(raised, SystemExit):
        code = 0 if raised.code is None else raised.code
    elif raised is not None:
        traceback.print_exception(raised)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201  (what the interpreter does with sys.exit("text"))
        code = 1
    _flush()
    os._exit(code & 0xFF)


def _flush() -> None:
    """Write out what the function printed, before its result is sent."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105  (suppress() is slower, and this runs at every step)
            stream.flush()
        except Exception:  # noqa: BLE001  (the user's code may have closed it, or put anything in its place)
            pass
