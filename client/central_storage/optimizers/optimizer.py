"""The common part of all optimizers: hyperparameters kept in the server, and ``apply_gradients`` in a replica."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias, TypedDict

import numpy as np

from central_storage.core.context import (
    current_replica,
    get_strategy,
    has_strategy,
    refuse_in_replica,
)
from central_storage.core.tensors.live_number import LiveNumber
from central_storage.diagnostics.callers import warn, warn_deprecated
from central_storage.diagnostics.tensorflow_members import ARGUMENTS
from central_storage.variables.variable import Variable
from cs_proto.arithmetic.optimizers import CLIPS, SLOTS, check_change, check_exempt, is_flag, rule_of, slot_shape
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Optimizer as OptimizerRecord

from .checks import as_given, as_number
from .counts import Counted
from .schedules import Schedule, schedule_from_config, schedule_of
from .slots import Slot
from .update import SUMMED, bring, checked_variable, unzipped

if TYPE_CHECKING:
    from central_storage.core.backends import Strategy

LearningRate: TypeAlias = float | Schedule | Callable[..., float]


class Shared(TypedDict, total=False):
    """The keywords that every optimizer takes in addition to its own.

    ``clipvalue`` bounds every element of the summed gradient, ``clipnorm`` the norm of each variable's and
    ``global_clipnorm`` the norm of all together; values are clipped first. ``decay`` divides the learning rate by
    ``1 + decay · iterations``. ``lr`` is TensorFlow's older name of ``learning_rate``. ``lazy``, which TensorFlow does
    not have, leaves the rows unchanged that a sparse gradient does not name; TensorFlow's Adam, RMSprop and Nadam
    change these, too.
    """

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    decay: float
    lazy: bool
    lr: LearningRate


def hyperparameter(name: str) -> property:
    """A number of the rule: readable anywhere, assignable in the client at any step. It follows the optimizer."""

    def get(self: Optimizer) -> Any:
        return self._get(name)

    def assign(self: Optimizer, value: float) -> None:
        self._set({name: value})

    return property(get, assign, doc=f"``{name}``; assignable in the client at any step, unless it chose the rule.")


class Optimizer(Counted):
    """Base of the optimizers. The server sums the replicas' gradients in replica order, then applies the rule once.

    An optimizer that is made under ``strategy.scope()`` belongs to that strategy; one that is made outside every scope,
    to the first strategy whose ``run`` takes it along. Change hyperparameters in the script only. Those that choose the
    rule (flags, and whether there is a momentum) never change.

    ``learning_rate`` is a number, one of ``optimizers.schedules``, which the server evaluates at every step, or another
    callable of the step (or of nothing). The script evaluates such a callable before every run, so all steps of a run
    have one rate, and a warning says so; ``run_steps`` then sends nothing ahead.

    Every optimizer takes these arguments by keyword: ``clipvalue`` bounds every element of the summed gradient,
    ``clipnorm`` the norm of each variable's gradient, and ``global_clipnorm`` the norm of all gradients together;
    values are clipped first. ``decay`` divides the learning rate, also that of a schedule, by ``1 + decay ·
    iterations``. ``lr`` is another name of ``learning_rate``. With ``lazy`` the rows that a sparse gradient does not
    name stay as they are; TensorFlow's Adam, RMSprop and Nadam, which have no such argument, move them.

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w = cs.Variable(np.zeros(2, np.float32))
        ...         optimizer: cs.optimizers.Optimizer = cs.optimizers.SGD(learning_rate=1.0)
        ...     strategy.run(lambda: optimizer.apply_gradients([(np.float32([1, 2]), w)]))
        ...     print(w.numpy(), optimizer.iterations)
        [-2. -4.] 1
    """

    #: The numbers of the variables that it updates, if they are known before the first update.
    members: tuple[int, ...] = ()
    #: The step at which the user's callable gave the present rate.
    _evaluated_at: int | None = None

    def __init__(
        self,
        name: str | None,
        learning_rate: LearningRate,
        shared: Mapping[str, Any],
        exempt: tuple[str, ...] = (),
        **own: float | bool,
    ) -> None:
        unknown = [key for key in shared if key not in Shared.__annotations__]
        if unknown:
            raise TypeError(self._unknown(unknown[0]))
        if "lr" in shared:
            warn_deprecated(type(self), "the argument lr", "learning_rate")
            learning_rate = shared["lr"]
        given = {key: value for key, value in shared.items() if value is not None and key != "lr"}
        self.name = name or self.kind
        self._strategy: Strategy | None = None
        self._number = 0
        self._iterations = 0
        #: The slots of a checkpoint that was restored before there was a strategy to hold them.
        self._kept: dict[tuple[Variable, str], np.ndarray] = {}
        self._kept_steps = {}
        self._exempt = exempt
        self._rate = learning_rate if callable(learning_rate) else None
        rate = self._rate_at(0) if self._rate is not None else learning_rate
        self._hyperparameters = {
            key: as_number(self.kind, key, value) for key, value in ({"learning_rate": rate} | own | given).items()
        }
        self._rule = rule_of(self.kind, self._hyperparameters)
        check_exempt(self.kind, self._rule, exempt)
        if has_strategy():
            refuse_in_replica("an optimizer")
            self.adopt(get_strategy())

    def _unknown(self, name: str) -> str:
        if name in ARGUMENTS:
            return f"{self.kind} takes no argument {name!r}; use instead: {ARGUMENTS[name]} (docs/from-tensorflow.md)"
        parameters = inspect.signature(type(self)).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] + list(Shared.__annotations__)
        import difflib  # late: only mistakes need it

        meant = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ";"
        return f"{self.kind} takes no argument {name!r}{hint} it takes {', '.join(known)}"

    @classmethod
    def from_record(cls, strategy: Strategy, record: OptimizerRecord) -> Self:
        """The handle of an optimizer that the server already has."""
        self = cls.__new__(cls)
        self.name = self.kind = record.kind
        self._strategy = strategy
        self._number = record.number
        self._iterations = 0
        self._kept = {}
        self._kept_steps = {}
        self._exempt = record.exempt
        self._rate = None if record.schedule is None else schedule_of(record.schedule)
        self._hyperparameters = dict(record.hyperparameters)
        self._rule = record.rule
        return self

    def adopt(self, strategy: Strategy) -> None:
        """Become an optimizer of ``strategy``. Raises ContextError (a RuntimeError) if it belongs to another."""
        if self._strategy is strategy:
            return
        if self._strategy is not None:
            raise ContextError(f"optimizer {self.name} belongs to another strategy; make one for each")
        self._number = strategy.controller.configure(
            0, self.kind, self._hyperparameters, self._schedule_record(), self._iterations, self._exempt
        )
        self._strategy = strategy
        strategy.remember(self)
        self._cs_keep(strategy.controller.forget)
        kept, self._kept = self._kept, {}
        for (variable, slot), value in kept.items():
            variable.adopt(strategy, shared=True)
            self.set_slot(variable, slot, value)
        steps, self._kept_steps = self._kept_steps, {}
        if steps:
            self.set_steps(steps)

    def _cs_handle(self) -> tuple[str, int]:
        return ("optimizer", self._number)

    # --- what it is -------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> Any:
        """The learning rate, or the schedule that gives it; assignable in the client at any step."""
        if self._strategy is None or self._has_own_schedule:
            return LiveNumber(self, "learning_rate") if self._rate is None else self._rate
        record = self._record()
        if record.schedule is None:
            return LiveNumber(self, "learning_rate")
        held = self._rate
        return held if held is not None and record.schedule == self._schedule_record() else schedule_of(record.schedule)

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self.assign({"learning_rate": value})

    @property
    def lr(self) -> Any:
        """Another name of :attr:`learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: LearningRate) -> None:
        self.learning_rate = value

    @property
    def iterations(self) -> LiveNumber:
        """The number of committed calls of apply_gradients. A call counts once, however many replicas make it.

        The object follows the optimizer; ``int(optimizer.iterations)`` is the present count. It can be assigned in the
        script, as a checkpoint does; the next update counts from there.
        """
        return LiveNumber(self, "iterations")

    @iterations.setter
    def iterations(self, value: SupportsIndex) -> None:
        self._refuse_in_replica("iterations")
        if isinstance(value, Variable):
            raise TypeError(
                f"{self.name}.iterations counts on its own and cannot follow variable {value.name}; for its present "
                "value, assign int(variable)"
            )
        given: Any = value.assigned if isinstance(value, LiveNumber) else value
        count = operator.index(given)
        if not 0 <= count < 1 << 62:
            raise InvalidArgumentError(f"{self.name}.iterations must be at least 0, not {count}")
        if self._strategy is not None:
            self._controller.configure(self._number, self.kind, {}, None, count)
        self._iterations, self._evaluated_at = count, None

    @property
    def strategy(self) -> Strategy | None:
        """The strategy it belongs to, if any yet."""
        return self._strategy

    @property
    def rule(self) -> str:
        """The name of the rule in the table of ``cs_proto.arithmetic.optimizers``."""
        return self._rule

    @property
    def slot_names(self) -> list[str]:
        """The names of the rule's slots."""
        return list(SLOTS[self._rule])

    def slots(self) -> list[tuple[Variable, str]]:
        """The variable and the name of each slot that has been made, in the order in which the variables were made."""
        if self._strategy is None:
            return list(self._kept)
        numbers = set(self._controller.slotted(self._number))
        slotted = [variable for variable in self._strategy.variables if variable.number in numbers]
        return [(variable, slot) for variable in slotted for slot in self.slot_names]

    def get_slot(self, var: Variable, slot_name: str) -> Slot:
        """The slot of a variable. It is made now if no update has made it yet.

        Args:
            var: A variable of the optimizer's strategy.
            slot_name: One of :attr:`slot_names`.

        Raises:
            InvalidArgumentError: The rule has no such slot, or ``var`` is not a variable (a ValueError).
            ContextError: The variable belongs to no strategy yet, or the optimizer to another one (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     w, adagrad = cs.Variable([1.0, 2.0]), cs.optimizers.Adagrad(initial_accumulator_value=0.5)
            ...     adagrad.get_slot(w, "accumulator").numpy().tolist()
            [0.5, 0.5]
        """
        strategy = checked_variable(self, var).strategy
        if strategy is None:
            raise ContextError(f"variable {var.name} belongs to no strategy yet, so it has no slots")
        self.adopt(strategy)
        if slot_name not in SLOTS[self._rule]:
            has = ", ".join(SLOTS[self._rule]) or "none"
            raise InvalidArgumentError(f"{self.name} has no slot {slot_name!r}; its slots: {has}")
        return Slot(self, var, slot_name, self._slot_shape(var))

    def _slot_shape(self, variable: Variable) -> tuple[int, ...]:
        return slot_shape(self._rule, variable.shape)

    def slot_value(self, variable: Variable, slot: str) -> np.ndarray:
        """A copy of a slot, also of an optimizer that belongs to no strategy yet."""
        kept = self._kept.get((variable, slot))
        return self.get_slot(variable, slot).numpy() if kept is None else kept.copy()

    def slot_rows(self, variable: Variable, slot: str, first: int, stop: int) -> np.ndarray:
        """As :meth:`slot_value`, of rows from one number to below another of a slot of an optimizer that belongs to no
        strategy yet."""
        return self._kept[variable, slot][first:stop].copy()

    def set_slot(self, variable: Variable, slot: str, value: np.ndarray) -> None:
        """Set a slot. Where neither the optimizer nor the variable belongs to a strategy yet, the value is kept until
        the optimizer does."""
        if self._strategy is None and variable.strategy is None:
            self._kept[variable, slot] = np.array(value)
            return
        if self._strategy is not None:
            variable.adopt(self._strategy, shared=True)
        self.get_slot(variable, slot).assign(value)

    def set_slot_rows(self, variable: Variable, slot: str, first: int, rows: np.ndarray) -> None:
        """As :meth:`set_slot`, of the rows from the number ``first`` on."""
        if self._strategy is None and variable.strategy is None:
            if (variable, slot) not in self._kept:
                self._kept[variable, slot] = np.zeros(self._slot_shape(variable), variable.dtype)
            self._kept[variable, slot][first : first + len(rows)] = rows
            return
        if self._strategy is not None:
            variable.adopt(self._strategy, shared=True)
        self.get_slot(variable, slot)  # makes the optimizer one of the variable's strategy
        self._controller.assign_slot(self._number, variable.number, slot, rows, first)

    def get_config(self) -> dict[str, Any]:
        """The name and the hyperparameters as :meth:`from_config` takes them.

        Examples:
            >>> import central_storage as cs
            >>> cs.optimizers.SGD(0.5).get_config()["learning_rate"]
            0.5
        """
        current = self._current()
        config: dict[str, Any] = {"name": self.name} | {key: as_given(self.kind, key, current[key]) for key in current}
        rate = self.learning_rate
        if isinstance(rate, Schedule):
            config["learning_rate"] = {"class_name": type(rate).__name__, "config": rate.get_config()}
        elif callable(rate):
            config["learning_rate"] = rate
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A new optimizer with these hyperparameters.

        Args:
            config: A mapping as :meth:`get_config` returns it.

        Raises:
            InvalidArgumentError: A hyperparameter is out of its range, or the schedule is unknown (a ValueError).
            TypeError: The optimizer has no argument of that name.

        Examples:
            >>> import central_storage as cs
            >>> cs.optimizers.SGD.from_config({"learning_rate": 0.5}).learning_rate
            0.5
        """
        return cls(**arguments_in(config))

    def __repr__(self) -> str:
        numbers = ", ".join(f"{key}={value:g}" for key, value in self._hyperparameters.items())
        return f"<{self.kind} {numbers}>"

    clipnorm = hyperparameter("clipnorm")
    clipvalue = hyperparameter("clipvalue")
    global_clipnorm = hyperparameter("global_clipnorm")
    decay = hyperparameter("decay")
    lazy = hyperparameter("lazy")

    def assign(self, hyperparameters: Mapping[str, Any]) -> None:
        """Set several hyperparameters at once, with one message to the server. In the script only.

        Args:
            hyperparameters: New values by name. The learning rate may be anything that :attr:`learning_rate` takes.

        Raises:
            InvalidArgumentError: The optimizer has no such hyperparameter, a value is out of its range, or the
                hyperparameter was fixed when the optimizer was made (a ValueError). Then nothing has changed.
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> adam = cs.optimizers.Adam()
            >>> adam.assign({"learning_rate": 0.01, "beta_1": 0.8})
            >>> adam.beta_1
            0.8
        """
        if not hyperparameters:
            return
        self._refuse_in_replica(", ".join(hyperparameters))
        if "learning_rate" not in hyperparameters:
            self._set(hyperparameters)
            return
        rate = hyperparameters["learning_rate"]
        before, self._rate = self._rate, rate if callable(rate) else None
        self._evaluated_at = None
        try:
            now = self._rate_at(self._count()) if callable(rate) else rate
            self._set({**hyperparameters, "learning_rate": now})
        except BaseException:  # Ctrl-C, too: a number that the server does not have is not kept
            self._rate = before
            raise

    # --- updates ----------------------------------------------------------------------------------------------

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Add this replica's gradients to those of the others, then take one step of the rule for every variable.

        Call it inside a replica function only. The gradients are summed over the replicas; to average, divide the loss
        by the global batch size. Gradients that were computed into ``gradient_buffers`` are not copied. A variable's
        ``constraint`` is applied after the update, by replica 0, which commits.

        Args:
            grads_and_vars: Pairs (gradient, variable). A gradient has its variable's shape and dtype, or is an
                IndexedSlices of rows of it, which may differ between replicas. The variables are the same on all
                replicas. Pairs whose gradient is None are dropped with a warning. No pairs at all is no step.
            name: Accepted; it changes nothing.
            experimental_aggregate_gradients: True.

        Raises:
            InvalidArgumentError: A gradient does not fit, or names a row that the variable does not have (a
                ValueError).
            ValueError: A variable appears twice, or every gradient is None.
            NotImplementedError: ``experimental_aggregate_gradients`` is False.
            RuntimeError: A variable with a constraint has a sparse gradient.
            ContextError: Called outside a replica (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         w, sgd = cs.Variable(np.float32([1, 2])), cs.optimizers.SGD(0.5)
            ...     strategy.run(lambda: sgd.apply_gradients([(np.float32([1, -1]), w)]))
            ...     print(w.numpy())
            [0.5 2.5]
        """
        if not experimental_aggregate_gradients:
            raise NotImplementedError(
                "experimental_aggregate_gradients=False is not supported: gradients are always summed"
            )
        bring([unzipped(self, grads_and_vars)], SUMMED)

    # --- how it is done ---------------------------------------------------------------------------------------

    def refuse_schedule(self) -> None:
        """Raise InvalidArgumentError if a schedule gives the learning rate, so that ``run_steps`` cannot."""
        if self._rate is not None:
            raise InvalidArgumentError(
                f"{self.name} has a schedule of its own, which rates of run_steps would end; assign a number to its "
                "learning_rate first, or leave it out of rates"
            )

    def checked_changes(self, changes: Mapping[str, Any]) -> dict[str, float]:
        """``changes`` of hyperparameters as numbers. Raises InvalidArgumentError if the optimizer cannot take them."""
        numbers = {key: as_number(self.kind, key, value) for key, value in changes.items()}
        check_change(self.kind, self._rule, self._hyperparameters, {**self._hyperparameters, **numbers})
        return numbers

    def took(self, numbers: Mapping[str, float]) -> None:
        """A step of ``run_steps`` has brought these hyperparameters."""
        self._hyperparameters = {**self._hyperparameters, **numbers}

    def evaluate_schedule(self) -> None:
        """Before a run: evaluate a learning rate that is the user's callable at the present step."""
        if self._rate is not None and self._has_own_schedule:
            step = self._count()
            self._warn_of_old_rate(step)
            rate = self._rate_at(step)
            if rate != self._hyperparameters["learning_rate"]:
                self._set({"learning_rate": rate})

    def _warn_of_old_rate(self, step: int) -> None:
        before, self._evaluated_at = self._evaluated_at, step
        if before is not None and step > before + 1 and not _takes_nothing(self._rate):
            warn(
                f"{self.name} made the steps {before} to {step - 1} in one run, all with the rate of step {before}, "
                "because the script evaluates a learning rate function before every run; for a rate of its own in "
                "every step use cs.optimizers.schedules, or make one step in each run",
                UserWarning,
            )

    @property
    def _has_own_schedule(self) -> bool:
        return self._rate is not None and not isinstance(self._rate, Schedule)

    def _rate_at(self, step: int) -> float:
        rate: Any = self._rate
        assert rate is not None
        if isinstance(rate, Schedule):
            return float(rate(step))
        value = rate() if _takes_nothing(rate) else rate(step)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{self.name}: at step {step} the learning rate function returned {value!r:.80}, which is not a "
                "number; assign another function or a number to learning_rate"
            ) from error

    def _schedule_record(self) -> Any:
        return self._rate.record() if isinstance(self._rate, Schedule) else None

    def _record(self) -> OptimizerRecord:
        assert self._strategy is not None
        backend = current_replica(self._strategy) or self._controller
        return backend.optimizer(self._number)

    def _current(self) -> dict[str, float]:
        return self._hyperparameters if self._strategy is None else dict(self._record().hyperparameters)

    def number_of(self, key: str) -> int | float:
        """The present value of ``iterations`` or of a hyperparameter."""
        return self._count() if key == "iterations" else self._current().get(key, 0.0)

    def _count(self) -> int:
        return self._iterations if self._strategy is None else self._record().iterations

    def _get(self, key: str) -> Any:
        if is_flag(self.kind, key) or key in CLIPS:
            value = self._current().get(key)
            return None if value is None else as_given(self.kind, key, value)
        return LiveNumber(self, key)

    def _set(self, changes: Mapping[str, Any]) -> None:
        self._refuse_in_replica(", ".join(changes))
        numbers = self.checked_changes(changes)
        if self._strategy is not None:
            schedule = self._schedule_record() if "learning_rate" in changes else None
            self._controller.configure(self._number, self.kind, numbers, schedule, -1)
        self.took(numbers)


def arguments_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``get_config`` has returned."""
    rate = config.get("learning_rate")
    made = {"learning_rate": schedule_from_config(rate)} if isinstance(rate, Mapping) else {}
    return {**config, **made}


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


__all__ = ["LearningRate", "Optimizer", "Shared", "arguments_in", "hyperparameter"]
