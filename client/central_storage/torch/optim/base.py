"""The common part of all optimizers: torch's parameter groups, and one optimizer of the server for each of them."""

from __future__ import annotations

import inspect
import math
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
from cs_proto.arithmetic.optimizers import check_change, rule_of
from cs_proto.errors import ContextError, InvalidArgumentError

from . import state

__all__ = ["CentralOptimizer", "Group", "Numbers", "scalar_dtype"]

#: A parameter group as torch has it: ``params``, the numbers of the rule, and whatever schedulers add.
Group = dict[str, Any]
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
        #: For each group, the numbers with which it was made, and those that the server is known to have.
        self._made: list[Numbers] = []
        self._pushed: list[Numbers] = []
        self._version = 0
        #: The replica's run in which the numbers of the groups were read.
        self._read_in: Callable[[], object] = _nothing
        self._lazy = bool(lazy)
        self.max_norm = max_norm
        self._max_value = _bound("max_value", max_value)
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
            for group, central in zip(groups, self.central, strict=True):
                held = dict(backend.optimizer(handle_id(central)[1]).hyperparameters)
                group.update(_of_server(group, held, self._keys()))
            self._read_in = weakref.ref(backend)
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
        except BaseException:
            del groups[count:]
            raise

    def _add_central(self, index: int, group: Group) -> None:
        strategy = _strategy_of([*chain.from_iterable(each["params"] for each in self.__dict__["param_groups"])])
        numbers = self._numbers(index, group)
        once = {"lazy": 1.0} if self._lazy else {}
        if self._max_value is not None:
            once["clipvalue"] = self._max_value
        try:
            central = of_kind(self.kind, self._name(index), **numbers, **once)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._name(index)}: {error}") from error
        central.adopt(strategy)
        self.central.append(central)
        self._made.append(numbers)
        self._pushed.append(dict(numbers))
        self._version += 1

    def groups_for_update(self) -> list[tuple[Optimizer, list[Any]]]:
        """The server's optimizer and the parameters of each group, also those without a gradient."""
        groups = self.__dict__["param_groups"]
        return [(central, group["params"]) for central, group in zip(self.central, groups, strict=True)]

    @property
    def version(self) -> int:
        """A number that changes with whatever replicas keep a copy of: the groups' parameters and the arguments of
        this class. The numbers of the groups are in the server."""
        return self._version

    @property
    def max_norm(self) -> float | None:
        """The largest norm of the gradient of all groups together, or None. Assignable in the script."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self._max_norm = _bound("max_norm", value)
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
        """In the script, before a run: tell the server what has changed in the groups. Without a change, no message.

        Raises:
            InvalidArgumentError: The server cannot do what a group asks for, such as an ``amsgrad`` that was False when
                the group was made (a ValueError). Nothing of the server has changed then.
            ContextError: Called in a replica (a RuntimeError).
        """
        self._refuse_in_replica("push")
        groups = self.__dict__["param_groups"]
        if len(groups) != len(self.central):
            raise InvalidArgumentError(
                f"{type(self).__name__} has {len(groups)} groups in param_groups, but {len(self.central)} were added; "
                "add a group with add_param_group, and make a new optimizer to leave one out"
            )
        changes = [self._changes(index, numbers) for index, numbers in enumerate(self.numbers())]
        for central, pushed, changed in zip(self.central, self._pushed, changes, strict=True):
            if changed:
                central.assign(changed)
                pushed.update(changed)

    def numbers(self) -> list[Numbers]:
        """The numbers of each group by the server's names."""
        return [self._numbers(index, group) for index, group in enumerate(self.__dict__["param_groups"])]

    def forget_pushed(self) -> None:
        """The server's numbers are no longer those of the last :meth:`push`: the next one sends them all."""
        self._pushed = [{} for _ in self.central]

    def _changes(self, index: int, numbers: Numbers) -> Numbers:
        """The numbers of a group that the server is not known to have. Raises InvalidArgumentError if it cannot take
        them."""
        pushed = self._pushed[index]
        changed = {name: value for name, value in numbers.items() if pushed.get(name) != value}
        if changed:
            self._check_change(index, self._made[index], numbers)
        return changed

    def _check_change(self, index: int, made: Numbers, numbers: Numbers) -> None:
        rule = rule_of(self.kind, made)
        try:
            check_change(self.kind, rule, made, numbers)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._name(index)}: {error}") from error
        if rule_of(self.kind, numbers) != rule:
            name = next(name for name in made if rule_of(self.kind, {**made, name: numbers[name]}) != rule)
            raise InvalidArgumentError(
                f"{self._name(index)}: {name} was {made[name]:g} when the group was made, which chose its rule, and "
                f"cannot become {numbers[name]:g}; make another optimizer"
            )

    def _keys(self) -> list[str]:
        """The keys of a group whose values the server has."""
        return [key for key in self.defaults if key in _NAMES and key not in self.implied]

    def _numbers(self, index: int, group: Group) -> Numbers:
        """The numbers of a group by the server's names. Raises InvalidArgumentError for what is no number, and for what
        the server cannot do."""
        for key, why in _REFUSED.items():
            if group.get(key):
                raise InvalidArgumentError(f"{self._name(index)}: {key}=True is not supported, because {why}")
        for key in self.implied:
            if group.get(key) != self.defaults[key]:
                raise InvalidArgumentError(f"{self._name(index)}: {key} is {self.defaults[key]} in this class")
        numbers: Numbers = {}
        for key in self._keys():
            if key not in group:
                raise InvalidArgumentError(f"{self._name(index)} has no {key!r}, which the rule needs")
            # torch begins every group with the first sum of the constructor.
            value = self.defaults[key] if key == "initial_accumulator_value" else group[key]
            for name, part in zip(_NAMES[key], self._parts(index, key, value), strict=True):
                try:
                    numbers[name] = as_number(self.kind, name, part)
                except InvalidArgumentError as error:
                    raise InvalidArgumentError(f"{self._name(index)}: {error}") from error
        return numbers

    def _parts(self, index: int, key: str, value: Any) -> tuple[Any, ...]:
        """The numbers in the value of a group's key."""
        count = len(_NAMES[key])
        if count > 1 and not (isinstance(value, tuple | list) and len(value) == count):
            raise InvalidArgumentError(f"{self._name(index)}: {key} must be {count} numbers, not {value!r:.100}")
        parts = tuple(value) if count > 1 else (value,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            raise InvalidArgumentError(
                f"{self._name(index)}: {key} is a tensor, and the server would not see it change; pass a number, as in "
                f"float({key})"
            )
        return parts

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
        from central_storage.torch import binding  # late: it knows optimizers, too

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding.apply([self])
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
            writes = state.check(self, given["state"])
            for index, numbers in enumerate(self.numbers()):
                self._changes(index, numbers)
        except BaseException:
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


def _strategy_of(params: list[Any]) -> Any:
    """The strategy of these parameters. Raises InvalidArgumentError for one that was not centralized, and for another
    strategy's."""
    first = None
    for number, p in enumerate(params):
        variable = getattr(p, "variable", None)
        if variable is None or variable.strategy is None:
            raise InvalidArgumentError(
                f"parameter {number} of the optimizer, of shape {tuple(p.shape)}, lies in this process and not in the "
                "server; call cst.centralize(module) first, and make the optimizer of the module's parameters"
            )
        first = variable if first is None else first
        if variable.strategy is not first.strategy:
            raise InvalidArgumentError(
                f"{variable.name} and {first.name} belong to different strategies; make an optimizer for each"
            )
    if first is None:
        raise InvalidArgumentError("an optimizer needs at least one parameter, and a group of none was added first")
    return first.strategy


def _bound(name: str, value: float | None) -> float | None:
    """A bound of the gradient; an infinite one is none."""
    if value is None or value == math.inf:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgumentError(f"{name} must be a number of at least 0, or None, not {value!r}")
    return float(value)


def _signature(cls: type[CentralOptimizer]) -> inspect.Signature:
    """The arguments of torch's class, which comes after this one, and the keywords of :class:`CentralOptimizer`."""
    own = inspect.signature(CentralOptimizer.__init__).parameters.values()
    base = next(each for each in cls.__mro__ if each.__module__.startswith("torch.") and "__init__" in vars(each))
    theirs = list(inspect.signature(base).parameters.values())
    return inspect.Signature([*theirs, *(each for each in own if each.kind is each.KEYWORD_ONLY)])
