"""The common part of all optimizers: torch's parameter groups, and one optimizer of the server for each of them."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar, NoReturn

import torch

from central_storage.core.context import current_replica
from central_storage.core.handles import handle_id
from central_storage.optimizers import Optimizer, of_kind
from central_storage.optimizers.checks import as_number
from cs_proto.arithmetic.optimizers import OPTIMIZERS, check_change, defaults_of, rule_of
from cs_proto.errors import ContextError, InvalidArgumentError

from . import state
from .checks import bound, strategy_of
from .state import Group

__all__ = ["CentralOptimizer", "Numbers", "scalar_dtype"]

#: Hyperparameters by the names that the server has for them; a flag is 0.0 or 1.0.
Numbers = dict[str, float]

#: By the key of a torch group, the server's name of each of its numbers.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "betas": ("beta_1", "beta_2"),
    "eps": ("epsilon",),
    "alpha": ("rho",),
} | {
    name: (name,)
    for name in (
        "rho",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "amsgrad",
        "maximize",
        "centered",
        "lr_decay",
        "initial_accumulator_value",
        "momentum_decay",
        "decoupled_weight_decay",
    )
}
#: Flags of torch that no rule of the server has. ``foreach`` and ``fused`` choose an implementation, no result.
_REFUSED = {
    "capturable": "the server applies the rule, and no CUDA graph can capture it",
    "differentiable": "the server applies the rule, and autograd does not see it",
}


class CentralOptimizer(torch.optim.Optimizer):
    """Base of the optimizers: torch's own classes, whose rules the server applies to the variables of the parameters.

    A class of this package has the arguments, defaults, checks, groups and state dicts of torch's class, which is one
    of its bases, so every scheduler works. The script changes numbers of groups, as torch's users do; the next step
    has the change. ``state`` is empty: the server has the state, and :meth:`state_dict` fetches it.

    Args:
        params: Parameters of a module that ``cst.centralize`` has prepared, or groups of them, as torch takes them.
        *args: As for torch's class.
        max_norm: The largest norm of the gradient of all groups together, summed over the replicas, as
            ``torch.nn.utils.clip_grad_norm_`` bounds it; None for no bound.
        max_value: The largest absolute value of an element of that gradient; None for no bound. Values are bounded
            before the norm is.
        find_unused_parameters: Whether replicas may use different parameters in a step. They then agree on them, which
            takes one more message.
        lazy: Whether a sparse gradient leaves the rows alone that it does not name, also where torch's rule moves them.
        **kwargs: As for torch's class.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     first, second = cst.centralize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
        ...     optimizer: cst.optim.CentralOptimizer = cst.optim.SGD(first.parameters(), lr=0.1)
        ...     optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
        ...     optimizer.load_state_dict(optimizer.state_dict())
        ...     optimizer.zero_grad()
        ...     optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1, 0.01]
    """

    #: The name of the rule in ``cs_proto.arithmetic.optimizers``.
    kind: ClassVar[str]
    #: Keys of groups that the server's kind does not have, because it has only one value of them.
    implied: ClassVar[tuple[str, ...]] = ()
    #: torch's names of the server's slots, where they differ.
    torch_slots: ClassVar[Mapping[str, str]] = {}
    #: Whether torch's class has a state for parameters that were never updated.
    begins_with_state: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        max_norm: float | None = None,
        max_value: float | None = None,
        find_unused_parameters: bool = False,
        lazy: bool = False,
        **kwargs: Any,
    ) -> None:
        #: The server's optimizer of each group.
        self.central: list[Optimizer] = []
        #: For each group, its parameters, as replicas know them, and the first parameter of all groups.
        self._known: list[list[Any]] = []
        self._first: Any = None
        #: For each group, the numbers with which it was made, and those that the server is known to have.
        self._made: list[Numbers] = []
        self._pushed: list[Numbers] = []
        #: What was in the groups at the last push, and that with its numbers when changes were asked for last.
        self._seen: list[list[Any]] = []
        self._offered: tuple[list[list[Any]], list[Numbers]] = [], []
        self._version = 0
        #: The replica's run in which the numbers of the groups were read.
        self._read_in: Callable[[], object] = _nothing
        #: In a replica, what the groups have from the script.
        self._received: list[list[Any]] | None = None
        self._lazy = bool(lazy)
        self.max_norm = max_norm
        self._max_value = bound("max_value", max_value)
        self.find_unused_parameters = find_unused_parameters
        # torch's classes make tensors for the state of every parameter that they see, and check their arguments after
        # they have added the groups. So they see no groups.
        self._waiting: list[Group] | None = []
        super().__init__(params, *args, **kwargs)
        groups, self._waiting = self._waiting, None
        for group in groups:
            self.add_param_group(group)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls) and "__init__" not in vars(cls):
            cls.__signature__ = _signature(cls)  # torch's arguments, and those above

    # --- groups -----------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:
        """torch's groups. In a replica their numbers are those that the server has in this run."""
        groups: list[Group] = self.__dict__["param_groups"]
        if self._waiting is not None or not self.central:  # torch's own code makes the object
            return groups
        backend = current_replica(self.central[0].strategy)
        if backend is not None and self._read_in() is not backend:
            self._check_received()
            for group, central in zip(groups, self.central, strict=True):
                held = dict(backend.optimizer(handle_id(central)[1]).hyperparameters)
                group.update(_of_server(group, held, self._keys))
            self._read_in, self._received = weakref.ref(backend), self.values()
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as torch does. In the script, at any time; the next step has it.

        Args:
            param_group: A dict with ``params``, and with the numbers that differ from the defaults.

        Raises:
            InvalidArgumentError: A parameter was not centralized, or the server cannot do what the group asks for (a
                ValueError).
            ValueError: torch refuses the group.
            ContextError: Called in a replica (a RuntimeError).
        """
        if self._waiting is not None:
            self._waiting.append(param_group)
            return
        groups = self.__dict__["param_groups"]
        count = len(groups)
        super().add_param_group(param_group)
        try:
            self._add_central(count, groups[-1])
        except BaseException:  # whatever happened, also Ctrl-C: the group is there whole or not at all
            del groups[count:]
            raise

    def _add_central(self, index: int, group: Group) -> None:
        first = next(chain.from_iterable(each["params"] for each in self.__dict__["param_groups"]), None)
        if first is None:
            raise InvalidArgumentError(f"{self._name(index)} has no parameters, and no group before it has any")
        strategy, self._first = strategy_of(group["params"], self._name(index), first), first
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise InvalidArgumentError(f"{self._name(index)} has a parameter twice; give each once")
        numbers = self._numbers(index, group)
        once = {"lazy": 1.0} if self._lazy else {}
        if self._max_value is not None:
            once["clipvalue"] = self._max_value
        try:
            central = of_kind(self.kind, self._name(index), **numbers, **once)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._name(index)}: {error}") from error
        central.adopt(strategy)
        central.members = tuple(parameter.variable.number for parameter in group["params"])
        self.central.append(central)
        self._known.append(list(group["params"]))
        self._made.append({**defaults_of(self.kind), **numbers})
        self._pushed.append(dict(numbers))
        self._version += 1

    def groups_for_update(self) -> list[tuple[Optimizer, list[Any]]]:
        """The server's optimizer and the parameters of each group, also those without a gradient.

        Raises:
            ContextError: A replica has changed the numbers of a group (a RuntimeError).
        """
        self._check_received()
        groups = self.__dict__["param_groups"]
        return [(central, group["params"]) for central, group in zip(self.central, groups, strict=True)]

    def _check_received(self) -> None:
        """In a replica, nobody but the script changes numbers. A change is undone, so that it is reported once."""
        if self._received is None or self.values() == self._received:
            return
        for index, (group, received) in enumerate(zip(self.__dict__["param_groups"], self._received, strict=True)):
            changed = [key for key, value in zip(self._watched, received, strict=True) if group.get(key) != value]
            if changed:
                given = group.get(changed[0])
                group.update(zip(self._watched, received, strict=True))
                raise ContextError(
                    f"{self._name(index)}: {changed[0]} became {given!r} in a replica, where that has no effect; "
                    "change numbers and step schedulers in the script, between the calls of the decorated function"
                )

    @property
    def version(self) -> int:
        """A number that changes with whatever replicas keep a copy of: the groups' parameters and the arguments of
        this class. The numbers of the groups are in the server."""
        for index, (group, known) in enumerate(zip(self.__dict__["param_groups"], self._known, strict=False)):
            if len(group["params"]) != len(known) or not all(map(operator.is_, group["params"], known)):
                strategy_of(group["params"], self._name(index), self._first)
                self._known[index] = list(group["params"])
                self._version += 1
        return self._version

    @property
    def max_norm(self) -> float | None:
        """The largest norm of the gradient of all groups together, or None. Assignable in the script."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self._max_norm = bound("max_norm", value)
        self._version += 1

    @property
    def max_value(self) -> float | None:
        """The largest absolute value of an element of the gradient, or None."""
        return self._max_value

    @property
    def find_unused_parameters(self) -> bool:
        """Whether replicas may use different parameters in a step. Assignable in the script."""
        return self._find_unused

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._find_unused = bool(value)
        self._version += 1

    # --- numbers ----------------------------------------------------------------------------------------------

    def push(self) -> None:
        """In the script: tell the server what has changed in the groups. Without a change, no message.

        Raises:
            InvalidArgumentError: As :meth:`changes` (a ValueError). Nothing of the server has changed then.
            ContextError: Called in a replica (a RuntimeError).
        """
        for central, numbers in self.changes():
            central.assign(numbers)
        self.pushed()

    def changes(self) -> list[tuple[Optimizer, Numbers]]:
        """In the script, before a run: the optimizers of the server whose numbers have changed, and these. A run takes
        them along, and :meth:`pushed` says that it did.

        Raises:
            InvalidArgumentError: The server cannot do what a group asks for, such as an ``amsgrad`` that was False when
                the group was made (a ValueError).
            ContextError: Called in a replica (a RuntimeError).
        """
        self._refuse_in_replica("push")
        groups = self.__dict__["param_groups"]
        if len(groups) != len(self.central):
            raise InvalidArgumentError(
                f"{type(self).__name__} has {len(groups)} groups in param_groups, but {len(self.central)} were added; "
                "add a group with add_param_group, and make a new optimizer to leave one out"
            )
        values = self.values()
        if values == self._seen:
            self._offered = values, []
            return []
        numbers = self.numbers()
        found = [self._changes(index, each) for index, each in enumerate(numbers)]
        self._offered = values, numbers
        return [(central, changed) for central, changed in zip(self.central, found, strict=True) if changed]

    def pushed(self) -> None:
        """The server has what :meth:`changes` has returned last."""
        self._seen, numbers = self._offered
        self._pushed = numbers or self._pushed

    def forget_pushed(self) -> None:
        """The server's numbers are no longer those of the last :meth:`push`: the next one sends them all."""
        self._pushed, self._seen = [{} for _ in self.central], []

    def _changes(self, index: int, numbers: Numbers) -> Numbers:
        """The numbers of a group that the server is not known to have. Raises InvalidArgumentError if it cannot take
        them."""
        pushed = self._pushed[index]
        changed = {name: value for name, value in numbers.items() if pushed.get(name) != value}
        if changed:
            self._check_change(index, self._made[index], {**self._made[index], **numbers})
        return changed

    def _check_change(self, index: int, made: Numbers, numbers: Numbers) -> None:
        rule = rule_of(self.kind, made)
        try:
            check_change(self.kind, rule, made, numbers)
        except InvalidArgumentError as error:
            is_cycled = "beta_1" in OPTIMIZERS[self.kind].fixed and numbers["beta_1"] != made["beta_1"]
            hint = ", or cycle_momentum=False in a scheduler that changes it" if is_cycled else ""
            raise InvalidArgumentError(f"{self._name(index)}: {error}{hint}") from error
        if rule_of(self.kind, numbers) != rule:
            name = next(name for name in made if rule_of(self.kind, {**made, name: numbers[name]}) != rule)
            raise InvalidArgumentError(
                f"{self._name(index)}: {name} was {made[name]:g} when the group was made, which chose its rule, and "
                f"cannot become {numbers[name]:g}; make another optimizer"
            )

    @functools.cached_property
    def _keys(self) -> dict[str, tuple[str, ...]]:
        """The keys of a group whose values the server has, with its names of the numbers in them."""
        return {key: _NAMES[key] for key in self.defaults if key in _NAMES and key not in self.implied}

    @functools.cached_property
    def _watched(self) -> tuple[str, ...]:
        return (*self._keys, *self.implied, *_REFUSED)

    def values(self) -> list[list[Any]]:
        """What each group has under the keys that :meth:`numbers` reads."""
        return [[group.get(key) for key in self._watched] for group in self.__dict__["param_groups"]]

    def numbers(self) -> list[Numbers]:
        """The numbers of each group by the server's names. Raises InvalidArgumentError for what is no number, and for
        what the server cannot do."""
        return [self._numbers(index, group) for index, group in enumerate(self.__dict__["param_groups"])]

    def _numbers(self, index: int, group: Group) -> Numbers:
        for key, why in _REFUSED.items():
            if group.get(key):
                raise InvalidArgumentError(f"{self._name(index)}: {key}=True is not supported, because {why}")
        for key in self.implied:
            if group.get(key) != self.defaults[key]:
                raise InvalidArgumentError(f"{self._name(index)}: {key} is {self.defaults[key]} in this class")
        numbers: Numbers = {}
        for key, names in self._keys.items():
            if key not in group:
                raise InvalidArgumentError(f"{self._name(index)} has no {key!r}, which the rule needs")
            # torch begins every group with the first sum of the constructor.
            value = self.defaults[key] if key == "initial_accumulator_value" else group[key]
            if type(value) is float:
                numbers[names[0]] = value
            else:
                numbers.update(zip(names, self._parts(index, key, value), strict=True))
        return numbers

    def _parts(self, index: int, key: str, value: Any) -> list[float]:
        """The numbers in the value of a group's key."""
        names = self._keys[key]
        if len(names) > 1 and not (isinstance(value, tuple | list) and len(value) == len(names)):
            raise InvalidArgumentError(f"{self._name(index)}: {key} must be {len(names)} numbers, not {value!r:.100}")
        parts = value if len(names) > 1 else (value,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            raise InvalidArgumentError(
                f"{self._name(index)}: {key} is a tensor, and the server would not see it change; pass a number, as in "
                f"float({key})"
            )
        try:
            return [as_number(self.kind, name, part) for name, part in zip(names, parts, strict=True)]
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._name(index)}: {error}") from error

    def _name(self, index: int) -> str:
        return f"{type(self).__name__} group {index}"

    def _refuse_in_replica(self, what: str) -> None:
        if current_replica(self.central[0].strategy) is not None:
            raise ContextError(f"{type(self).__name__}.{what} can be called only in the script, not in a replica")

    # --- steps ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """In a replica, inside ``cst.function``: apply the gradients. In the script: count a step, for schedulers.

        ``cst.step`` and ``cst.function`` call it in the script after every step. There it also calls the hooks that
        were registered by ``register_step_pre_hook`` and ``register_step_post_hook``: both kinds after the update, once
        a step. Replicas call no hooks of the script.

        Args:
            closure: In a replica, a function that computes the gradients and returns the loss; None if they are there.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ContextError: In the script, with a closure or with gradients that no replica has computed (a RuntimeError).
        """
        if current_replica(self.central[0].strategy) is None:
            self._check_script(closure)
            return None
        from central_storage.torch.binding import apply  # late: only a step in a replica needs it

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        apply([self])
        return loss

    def _check_script(self, closure: object) -> None:
        """A step in the script updates nothing, so nothing may be left to update."""
        computed = [p for _, params in self.groups_for_update() for p in params if p.grad is not None]
        if closure is not None or computed:
            what = "a closure" if closure is not None else f"a gradient of {computed[0].variable.name}"
            raise ContextError(
                f"{type(self).__name__}.step() got {what} in the script, where nothing is updated; compute the loss in "
                "a function that cst.step or cst.function decorates"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the parameters have no gradient, as torch does. Every step begins so; a call changes nothing.

        Args:
            set_to_none: False: the gradients that are there become zeros, so the rule is applied to them.
        """
        for _, params in self.groups_for_update():
            for p in params:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad = p.grad.detach().zero_()

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """``torch.amp.GradScaler.step`` asks for it before it does anything to the optimizer."""
        raise ContextError(
            f"{type(self).__name__} does not work with an enabled GradScaler: each replica would decide on its own "
            "whether to leave a step out. autocast with bfloat16 needs no scaler; GradScaler(enabled=False) is harmless"
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's classes set it with ``fused=True``."""

    # --- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the groups, and the state of every parameter as the server has it, in torch's own format.

        ``torch.optim``'s class of the same name loads it, and so does :meth:`load_state_dict`. In the script.
        """
        self._refuse_in_replica("state_dict")
        self.state.update(state.pull(self))
        try:
            found: dict[str, Any] = super().state_dict()
        finally:
            self.state.clear()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the server and the groups what :meth:`state_dict` of this class or of torch's has returned.

        Everything is checked first, so an error changes nothing. In the script.

        Args:
            state_dict: The numbers of the groups, and the state of every parameter.

        Raises:
            InvalidArgumentError: It does not fit: the number of groups or of parameters, a shape, a missing entry, or
                a flag that chose the rule (a ValueError).
            ContextError: Called in a replica (a RuntimeError).
        """
        self._refuse_in_replica("load_state_dict")
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, given) or given
        before, groups = self.param_groups, state.loaded_groups(self, given)
        self.__setstate__({"param_groups": groups})  # completes what an older torch has saved
        try:
            writes = state.check(self, given)
            for index, numbers in enumerate(self.numbers()):
                self._changes(index, numbers)
        except BaseException:  # whatever happened, also Ctrl-C: nothing is loaded
            self.param_groups = before
            raise
        self.push()
        state.write(writes)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def counts(self, group: Group, steps: int) -> dict[str, Any]:
        """What a state dict has for a parameter beside the slots.

        Args:
            group: The parameter's group.
            steps: The number of its updates.
        """
        return {"step": torch.tensor(float(steps), dtype=scalar_dtype())}

    # --- travelling -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker: parameters and server's optimizers as handles, and no hooks."""
        kept = ("defaults", "param_groups", "central", "_lazy", "_max_norm", "_max_value", "_find_unused", "_version")
        return {name: self.__dict__[name] for name in kept} | {"state": defaultdict(dict)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._waiting, self._read_in = [], _nothing
        super().__setstate__(state)
        self._waiting = None
        self._received = self.values() if "central" in state else None  # without it, a state dict is loaded

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"this {type(self).__name__} refers to state in its service and cannot be copied; make another one of "
            "copied parameters, and load state_dict() of this one"
        )


def scalar_dtype() -> torch.dtype:
    """The dtype in which torch keeps counts."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _nothing() -> None:
    return None


def _of_server(group: Group, held: Mapping[str, float], keys: Iterable[str]) -> Group:
    """The values of a group's ``keys`` from the numbers that the server has."""
    found: Group = {}
    for key in keys:
        values = [held[name] for name in _NAMES[key]]
        value = tuple(values) if len(values) > 1 else values[0]
        found[key] = bool(value) if isinstance(group[key], bool) else value
    return found


def _signature(cls: type[CentralOptimizer]) -> inspect.Signature:
    """The arguments of torch's class, which comes after this one, and the keywords of :class:`CentralOptimizer`."""
    own = inspect.signature(CentralOptimizer.__init__).parameters.values()
    base = next(each for each in cls.__mro__ if each.__module__.startswith("torch.") and "__init__" in vars(each))
    theirs = list(inspect.signature(base).parameters.values())
    return inspect.Signature([*theirs, *(each for each in own if each.kind is each.KEYWORD_ONLY)])
