"""The strategy over its service, and the default strategy without one. What both can do is in ``base``."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import finalize, ref

from central_storage.core import between_steps, context, opening
from central_storage.core.backends import Carriage, ControllerBackend, ReplicaBackend
from central_storage.core.check_numerics import check_of
from central_storage.core.composites import Composite
from central_storage.core.devices import device_names, logical_devices
from central_storage.core.handles import Handle, HandleTable, handle_id, weakly
from central_storage.core.made_in_replicas import MadeInReplicas
from central_storage.core.options import ValueContext
from central_storage.core.pipeline import Series
from central_storage.core.random_streams import Streams, function_name
from central_storage.core.recovery_options import Recovery
from central_storage.core.tensors.tensor import tensors_in
from central_storage.core.variable_sets import VariableSets
from central_storage.diagnostics.remedies import explain
from central_storage.optimizers import GradientAccumulator, Optimizer, optimizer_of
from central_storage.planning.announcement import announce_plan
from central_storage.variables.moving_averages import ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto import messages
from cs_proto.errors import ConfigurationError, ContextError, ShutdownError
from cs_proto.messages import Counters, NumericsCheck

from . import running
from .base import StrategyBase
from .run_steps import LocalSeries

if TYPE_CHECKING:
    from central_storage.checkpoint.status import Status

__all__ = ["CentralStorageStrategy", "DefaultStrategy", "running_strategies"]


class CentralStorageStrategy(StrategyBase, Handle):
    """Synchronous data-parallel training on one machine; every variable exists once, in the parameter process.

    Without a launcher the constructor starts the service. ``shutdown()``, the end of the ``with`` block, or the end or
    death of the script stops it; so does the loss of the last reference to the strategy. Its variables and optimizers
    refer to it.

    A worker that dies is started again, and the run goes on with the same bits. The server is started again in the same
    way, unless ``server_recovery`` is False. If a replica function prints or writes files before its worker dies, it
    does so once more.

    Args:
        compute_devices: One device per replica (``"cpu:0"``, ``"/gpu:1"``, full names), or a tuple of devices for each;
            every tuple has the same length. A number means as many GPUs, or CPUs where there is no GPU; ``"auto"`` and
            ``"gpu:all"`` are those of ``cs-launch --devices``, which counts instead of this where it is given. None
            means every GPU, else one CPU.
        parameter_device: The device that holds the variables. None means the only compute device, or CPU 0.
        seed: Seeds the random state of Python, NumPy, CuPy and torch in each replica of each run; from 0 to 2**63 - 1.
        in_process: Runs the service in threads of the script, for a debugger and for fast tests. Replicas take turns,
            so ``breakpoint()`` in a replica function works, and results have the same bits. The service is always a new
            one, also under ``cs-launch``. Code that would end a worker process ends the script: ``os._exit``, a crash
            in native code.
        start_timeout: Seconds that the start may take.
        step_timeout: Seconds after which a worker that others wait for, and that has said nothing, is killed and
            started again. It must be more than a replica needs from one merge point to the next. None: no limit.
        server_recovery: Whether a server that dies is started again. False makes updates a little cheaper.
        max_restarts: How many restarts there may be. ``in_process`` ignores these three, ``cs-launch`` has its own.
        check_numerics: ``"warn"`` logs gradients that are not finite, ``"raise"`` raises NumericsError before the
            update. None: ``CS_CHECK_NUMERICS``, else ``"off"``; under ``cs-launch`` the launcher's option counts.
        cluster: Where workers on other machines come from: a ``central_storage.ray.RayCluster``.

    Raises:
        DeviceError: A device does not exist (a ValueError).
        ConfigurationError: An option makes no sense.
        LaunchError: The service does not start.
        ContextError: The constructor was called inside a replica (a RuntimeError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w = cs.Variable(np.zeros(2, np.float32), name="w")
        ...         sgd = cs.optimizers.SGD(learning_rate=0.5)
        ...
        ...     def step(batch):
        ...         sgd.apply_gradients([(batch, w)])
        ...         return batch.sum()
        ...
        ...     batch = cs.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        ...     sums = strategy.run(step, args=(batch,))
        ...     print(strategy.reduce("SUM", sums, axis=None), w.numpy())
        10.0 [-2. -3.]
    """

    def __init__(
        self,
        compute_devices: device_names.Devices | None = None,
        parameter_device: str | None = None,
        *,
        seed: int = 0,
        in_process: bool = False,
        start_timeout: float = 60.0,
        step_timeout: float | None = None,
        server_recovery: bool = True,
        max_restarts: int = 3,
        check_numerics: NumericsCheck | None = None,
        cluster: opening.Cluster | None = None,
    ) -> None:
        if context.is_worker():
            raise ContextError(
                "a strategy cannot be made inside a worker; make it in your script and let the function capture it"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ConfigurationError(f"seed must be an int from 0 to 2**63 - 1, not {seed!r}")
        is_number = isinstance(start_timeout, (int, float)) and not isinstance(start_timeout, bool)
        if not is_number or not 0 < start_timeout < 1e6:
            raise ConfigurationError(
                f"start_timeout must be a number of seconds, more than 0 and less than 1e6, not {start_timeout!r}"
            )
        recovery, check = Recovery(max_restarts, server_recovery, step_timeout), check_of(check_numerics)
        backend = opening.open_service(
            compute_devices,
            parameter_device,
            seed=seed,
            start_timeout=start_timeout,
            in_process=bool(in_process),
            recovery=recovery,
            cluster=cluster,
        )
        try:
            backend.check_numerics = check
            self._init(backend, backend.compute_devices, backend.parameter_device)
            backend.resolve_handles(
                weakly(self.object_for),
                weakly(self.adopt),
                self._handles.get,
                self._made_in_replicas,
                partial(_say_plan, self._handles, backend.compute_devices, backend.parameter_device),
            )
            finalize(self, backend.abandon).atexit = False  # at exit every service is closed in turn
            self._has_run = False
            running.note(self)
        except BaseException:  # Ctrl-C: nobody gets the strategy
            backend.close()
            raise

    @classmethod
    def from_backend(
        cls, backend: ControllerBackend, compute_devices: Sequence[str], parameter_device: str
    ) -> CentralStorageStrategy:
        """The handle of a strategy whose service runs elsewhere; what a worker holds."""
        self = cls.__new__(cls)
        self._init(backend, compute_devices, parameter_device)
        return self

    def _init(self, backend: ControllerBackend, compute_devices: Sequence[str], parameter_device: str) -> None:
        self._backend = backend
        self._compute_devices, self._replicas = tuple(compute_devices), len(compute_devices)
        self._parameter_device = parameter_device
        self._optimizers: list[ref[Optimizer]] = []  # gone through at every run
        self._lock = threading.Lock()  # replicas of one process make optimizers, too
        self._made_in_replicas = MadeInReplicas(lambda kind, name: backend.forget(kind, name))
        self._variable_sets = VariableSets()
        self._has_run = True  # as far as it matters: in a worker
        self._handles: HandleTable = HandleTable(
            {
                "strategy": weakly(self._itself),
                "variable": weakly(self._variable_of),
                "optimizer": weakly(self._optimizer_of),
            }
        )

    def _cs_handle(self) -> tuple[str, int]:
        return ("strategy", 0)

    # --- what the rest of the package needs ---------------------------------------------------------------------

    @property
    def controller(self) -> ControllerBackend:
        """The seam to the service."""
        return self._backend

    @property
    def devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica, as full names."""
        return [
            [device_names.full_name(device) for device in device_names.logical_devices(r)]
            for r in self._compute_devices
        ]

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._replicas

    def call(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Call ``function`` once per replica, in their processes; the results in replica order."""
        self._begin_run()
        self.evaluate_schedules()
        return self._backend.run(function, arguments)

    def series(self, lookahead: int) -> Series:
        """What carries out steps that are sent ahead."""
        self._begin_run()
        return self._backend.series(lookahead)

    def _begin_run(self) -> None:
        if not self._has_run:
            self._has_run = True
            running.name_earlier(self)

    def carrier(self) -> Carriage:
        """What copies an array to where the replicas read it."""
        return self._backend.carrier()

    @property
    def variable_sets(self) -> VariableSets:
        """Those of which replicas of this process have asked gradient buffers."""
        return self._variable_sets

    @property
    def handles(self) -> HandleTable:
        """The objects that stand for things in the server."""
        return self._handles

    @property
    def extended_parameter_device(self) -> str:
        """The parameter device as a full name."""
        return device_names.full_name(self._parameter_device)

    def object_for(self, kind: str, number: int) -> Handle:
        """The one object of this process for a handle that came from another process."""
        return self._handles.resolve(kind, number)

    def adopt(self, handle: Any) -> tuple[str, int]:
        """What stands for ``handle`` on its way to a replica: ``("foreign", 0)`` for another strategy's variable, which
        goes as its value. Raises ContextError for anything else of another strategy."""
        if isinstance(handle, Composite):
            handle.adopt(self)
            return ("composite", 0)
        if isinstance(handle, Optimizer):
            handle.adopt(self)
        elif isinstance(handle, Variable):
            handle.adopt(self)
            if handle.strategy is not self:
                return ("foreign", 0)
        elif (handle if isinstance(handle, CentralStorageStrategy) else handle.strategy) is not self:
            raise ContextError(f"{handle!r} belongs to another strategy and cannot be used in a replica of this one")
        return handle_id(handle)

    def claim(self, owner: object, name: str) -> None:
        """Have :meth:`settle_owners` give a name to a moving average or an accumulator."""
        self._made_in_replicas.claim(owner, name)

    def settle_owners(self) -> None:
        """Free what belongs to moving averages and accumulators that are gone, and give names to the new ones."""
        if not self._made_in_replicas.is_settled:
            self.controller.settle_names()
            self._made_in_replicas.settle()

    def _itself(self, number: int) -> CentralStorageStrategy:
        return self

    def _variable_of(self, number: int) -> Variable:
        return Variable.from_record(self, self._catalogue.variable(number))

    def _optimizer_of(self, number: int) -> Optimizer:
        return optimizer_of(self, self._catalogue.optimizer(number))

    def _handle_of(self, record: messages.Variable) -> Variable:
        found = self._handles.get("variable", record.number)
        return found if isinstance(found, Variable) else Variable.from_record(self, record)

    @property
    def _catalogue(self) -> ControllerBackend | ReplicaBackend:
        return context.current_replica(self) or self._backend

    def remember(self, handle: Handle) -> None:
        """Let ``handle`` be the one object for its number in this process."""
        self._handles.add(handle)
        if isinstance(handle, Optimizer):
            with self._lock:
                living = [known for known in self._optimizers if known() not in (None, handle)]
                self._optimizers = [*living, ref(handle)]

    def take_along(self, optimizer: Optimizer) -> None:
        """Make an optimizer that belongs to no strategy yet one of this strategy. Raises ContextError if it belongs to
        another."""
        context.in_cross_replica(self, lambda: optimizer.adopt(self))

    def evaluate_schedules(self) -> None:
        """Bring learning rates that only the client can work out up to the steps made so far."""
        for known in self._optimizers:
            if (optimizer := known()) is not None:
                optimizer.evaluate_schedule()

    # --- ours ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The run directory of the service: what ``connect`` takes, in any process of the same user."""
        return self._backend.address

    @property
    def is_running(self) -> bool:
        """Whether the service runs, as far as this process has heard."""
        return self._backend.is_running

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Every variable of the strategy, in the order in which they were made."""
        return tuple(map(self._handle_of, self._catalogue.variables()))

    def save(self, directory: str | os.PathLike[str], *, data: Any = None) -> str:
        """Write all variables, optimizers and moving averages, the number of runs of each function, and the positions
        in ``data`` to a file.

        The random numbers of the next run follow from the number of runs of its function. The file is replaced as a
        whole: after a kill at any moment the last whole file is still there.

        Args:
            directory: The directory of the file; it is made if need be.
            data: A distributed data set or an iterator of one, or a list, tuple or dict of them.

        Returns:
            The path of the file.

        Raises:
            OSError: The disk refuses.
            InvalidArgumentError: Something in ``data`` has no position (a ValueError).
            ContextError: Called in a replica (a RuntimeError).
            ShutdownError: Called after ``shutdown()`` (a RuntimeError).

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> with tempfile.TemporaryDirectory() as directory, cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         w = cs.Variable([1.0, 2.0], name="w")
            ...     path = strategy.save(directory)
            ...     _ = w.assign([0.0, 0.0])
            ...     _ = strategy.restore(directory)
            ...     print(w.numpy())
            [1. 2.]
        """
        from central_storage.checkpoint import graph  # late, like below: no step needs it

        path = self._file(directory)
        graph.save(path, self._everything(data), {})
        return path

    def restore(self, directory: str | os.PathLike[str], *, data: Any = None) -> Status:
        """Set variables, optimizers, moving averages and ``data`` to what :meth:`save` wrote.

        Variables are matched by name, optimizers by the order in which they were made. Make all of them first, as the
        script did that saved. The devices may differ from those of the script that saved. Everything is checked before
        anything is set.

        Args:
            directory: The directory that was given to :meth:`save`.
            data: As for :meth:`save`.

        Returns:
            A status object; there is nothing left to check on it, since every difference is an error here.

        Raises:
            CheckpointError: There is no whole checkpoint, or something has another shape or dtype (a ValueError).
            CheckpointMismatchError: The checkpoint or the strategy has something that the other one lacks.

        Examples:
            >>> import tempfile
            >>> import central_storage as cs
            >>> with tempfile.TemporaryDirectory() as directory, cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         w = cs.Variable(1.0, name="w")
            ...     _ = strategy.save(directory)
            ...     _ = strategy.restore(directory)
        """
        from central_storage.checkpoint import graph

        return graph.restore(self._file(directory), self._everything(data), strict=True)[0]

    def _file(self, directory: str | os.PathLike[str]) -> str:
        from central_storage.checkpoint import graph

        return graph.find_file(os.path.join(directory, "strategy"))

    def _everything(self, data: Any) -> dict[str, Any]:
        from central_storage.checkpoint import graph

        if data is not None:
            graph.require_trackable("data", data)
        self.settle_owners()
        averages = self._made_in_replicas.owners(ExponentialMovingAverage)
        accumulators = self._made_in_replicas.owners(GradientAccumulator)
        theirs = {shadow for average in averages.values() for _, shadow in average.averages()}
        theirs |= {kept for accumulator in accumulators.values() for _, kept in accumulator.sums()}
        return {
            "variables": {variable.name: variable for variable in self.variables if variable not in theirs},
            "optimizers": self._handles.of_kind("optimizer"),
            "moving_averages": averages,
            "accumulators": accumulators,
            "data": data,
        }

    def statistics(self) -> Counters:
        """A snapshot of the server's counters, with the share of each replica. Sizes are bytes, times seconds.
        ``captured`` and ``uncaptured`` show which runs the server decided in one pass, and why others took longer.

        Raises:
            ShutdownError: Called after ``shutdown()`` (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         w = cs.Variable([1.0, 2.0])
            ...     strategy.statistics().parameter_nbytes
            8
        """
        return self._backend.statistics()

    def timeline(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record what all processes do during a ``with`` block, for https://ui.perfetto.dev.

        The file is a Chrome trace in JSON: a row for each process with the parts of its steps, rows for the spans of
        :func:`central_storage.span`, and an arrow from each replica's return to the commit of its gradient. It keeps
        the last 200,000 moments, which are about 30 MB; a step has about 10 in each process. If earlier ones are
        missing, a warning and the file say how many.

        Args:
            path: The file, which is replaced as a whole at the end of the block.

        Returns:
            A context manager.

        Raises:
            ConfigurationError: The service keeps no step times, because of ``CS_TIMES=off`` or ``in_process``, or they
                cannot be read here, since this process cannot map its memory or has no x86-64 processor (a ValueError).
            OSError: The file cannot be written.
            ContextError: Called in a replica (a RuntimeError).
            ShutdownError: Called after ``shutdown()`` (a RuntimeError).

        Examples:
            >>> import pathlib, tempfile
            >>> import central_storage as cs
            >>> path = pathlib.Path(tempfile.mkdtemp(), "timeline.json")
            >>> with cs.CentralStorageStrategy(in_process=False) as strategy:
            ...     with strategy.timeline(path):
            ...         result = strategy.run(lambda: 1.0)
            >>> "function" in path.read_text()
            True
        """
        if context.is_worker():
            raise ContextError("a timeline is recorded by the script, and not in a replica")
        if not self.is_running:
            raise ShutdownError("this strategy was shut down; record a timeline while its service runs")
        from central_storage.timeline.chrome_trace import timeline  # only a script that asks for it needs this package

        return timeline(self.address, path)

    def shutdown(self) -> None:
        """Stop the service that this strategy started, or leave the launcher's. Idempotent; also done at exit, and when
        nothing holds the strategy any more.

        Examples:
            >>> import central_storage as cs
            >>> strategy = cs.CentralStorageStrategy(in_process=True)
            >>> strategy.shutdown()
        """
        between_steps.ends(self)
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _repr_html_(self) -> str:
        """What a notebook shows: the processes as they are now. Nobody is asked, so it waits for nothing."""
        from .processes import shown  # late, as nobody needs it but notebooks

        return shown(repr(self).strip("<>"), self._backend)

    def __repr__(self) -> str:
        replicas = f"{self.num_replicas_in_sync} replica{'s' * (self.num_replicas_in_sync > 1)}"
        devices = ", ".join(self._compute_devices)
        return f"<CentralStorageStrategy of {replicas} ({devices}), parameters on {self._parameter_device}>"


def running_strategies() -> tuple[CentralStorageStrategy, ...]:
    """The strategies of this process whose services run, in the order in which they were made.

    A service ends when nothing holds its strategy any more. With this function a notebook finds one whose name it has
    overwritten, and ends it with :meth:`CentralStorageStrategy.shutdown`.

    Examples:
        >>> import central_storage as cs
        >>> before = cs.running_strategies()
        >>> strategy = cs.CentralStorageStrategy(in_process=True)
        >>> cs.running_strategies()[len(before):] == (strategy,)
        True
        >>> strategy.shutdown()
        >>> cs.running_strategies() == before
        True
    """
    return tuple(running.running())


def _say_plan(handles: HandleTable, devices: Sequence[str], parameter_device: str) -> None:
    """Print what the variables, their slots and their gradients will take."""
    variables = [each for each in handles.of_kind("variable") if isinstance(each, Variable)]
    optimizers = [each for each in handles.of_kind("optimizer") if isinstance(each, Optimizer)]
    announce_plan(variables, optimizers, devices, parameter_device)


class DefaultStrategy(StrategyBase):
    """What ``get_strategy()`` gives outside every scope: one local replica, no process, no variables of its own."""

    def __init__(self) -> None:
        self.replica_context = context.ReplicaContext(self, None)
        self._lock = threading.Lock()  # every thread without a strategy has this one
        self._steps: Counter[str] = Counter()  # by function

    @property
    def controller(self) -> NoReturn:
        """There is no service behind the default strategy."""
        _no_service()

    @property
    def variable_sets(self) -> NoReturn:
        """Nobody asks for gradient buffers where there is no service."""
        _no_service()

    @property
    def devices_by_replica(self) -> list[list[str]]:
        """One replica, on the CPU."""
        return [[self.extended_parameter_device]]

    @property
    def extended_parameter_device(self) -> str:
        """The CPU."""
        return device_names.full_name("cpu:0")

    def remember(self, handle: Handle) -> NoReturn:
        """There is nothing that a handle could stand for."""
        _no_service()

    def call(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Call ``function`` here."""
        ((args, kwargs),) = arguments
        name = function_name(function)
        with self._lock:
            step = self._steps[name]
            self._steps[name] += 1
        with context.enter_replica(self, None, Streams(0, name, step, 0)):
            try:
                return [tensors_in(function(*args, **kwargs))]
            except Exception as error:
                explain(error)
                raise

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """``value_fn(ValueContext())`` as it is: there is one replica, and it is here."""
        return value_fn(ValueContext())

    def take_along(self, optimizer: Optimizer) -> None:
        """Raise ContextError if the optimizer belongs to a strategy: this one has none."""
        if optimizer.strategy is not None:
            raise ContextError(f"optimizer {optimizer.name} belongs to another strategy")

    def series(self, lookahead: int) -> LocalSeries:
        """What carries out steps here, one after the other."""
        return LocalSeries(self.call)

    def logical_devices_here(self) -> tuple[Sequence[str], logical_devices.Place]:
        """The CPU, where every array is."""
        return self.devices_by_replica[0], lambda array, device: array

    def __repr__(self) -> str:
        return "<the default strategy: one local replica>"


def _no_service() -> NoReturn:
    raise ShutdownError("the default strategy has no service; make a CentralStorageStrategy and enter its scope")
