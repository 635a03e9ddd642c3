"""The objects behind ``csj.optim``: an optimizer of the server with a rule of optax, and a bound of the norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import central_storage.optimizers as optimizers
from central_storage.core.public_objects import Closed
from cs_proto.errors import ContextError, InvalidArgumentError

from .schedules import Schedule
from .trees import bools

if TYPE_CHECKING:
    from central_storage.variables.variable import Variable

    from .trees import Leaves

__all__ = ["GlobalNorm", "Groups", "Optimizer", "Rate", "Rule", "apply", "as_optimizer"]

Rate: TypeAlias = float | Schedule
#: Optimizers of the server, each with the places of its variables among those that are trained, and the bound of the
#: norm of all gradients together.
Groups: TypeAlias = tuple[list[tuple[optimizers.Optimizer, list[int]]], float | None]


class Optimizer(Closed):
    """An optimizer of the server with a rule of optax. The functions of this module make one, for
    :func:`step <central_storage.jax.step>`.

    Examples:
        >>> import central_storage.jax as csj
        >>> optimizer = csj.optim.adam(0.1)
        >>> optimizer.learning_rate = 0.01
        >>> optimizer
        <csj.optim.adam learning_rate=0.01 b1=0.9 b2=0.999 eps=1e-08 eps_root=0.0 nesterov=False>
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    @property
    def learning_rate(self) -> Any:
        """The learning rate, or the schedule that gives it; assignable in the script at any step."""
        return self._rule.rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        self._rule.set_rate(value)

    @property
    def count(self) -> int:
        """The number of updates that the server has made; 0 before the first step. Of several trees, that of the tree
        that has had most."""
        return self._rule.count

    @property
    def record(self) -> Rule:
        """What the other modules of this package use."""
        return self._rule

    def __repr__(self) -> str:
        return repr(self._rule)


class Rule:
    """The rule, its numbers, and the optimizers of the server that follow it: for each tree, as optax has one state for
    each, one for the variables whose weights decay and one for the others."""

    def __init__(
        self,
        name: str,
        learning_rate: Rate,
        arguments: dict[str, Any],
        numbers: dict[str, Any],
        mask: Any = None,
        max_norm: float | None = None,
    ) -> None:
        """``arguments`` are optax's, but for ``learning_rate`` and ``mask``; ``numbers`` are the server's names of
        them."""
        if callable(numbers.get("weight_decay")):
            raise InvalidArgumentError(f"csj.optim.{name}: weight_decay is a number here, not a schedule")
        self.rate = _checked_rate(name, learning_rate)
        self._name = name
        self._arguments = arguments
        self._numbers = numbers
        self._mask = mask
        self._max_norm = max_norm
        #: For each tree: its trained variables, and its optimizers by whether the weights decay.
        self._trees: list[tuple[list[Variable], dict[bool, optimizers.Optimizer]]] = []
        #: The loops over steps ahead that were told of no schedule.
        self._plain_loops = 0
        self._make(decays=True)  # refuses numbers out of their range

    def set_rate(self, value: Rate) -> None:
        """Set the learning rate or its schedule. Raises ContextError for a schedule in place of a number in a loop over
        steps that are sent ahead, which were told of no schedule."""
        checked = _checked_rate(self._name, value)
        if callable(checked) and self._plain_loops:
            raise ContextError(
                f"csj.optim.{self._name}: a schedule cannot replace a number inside a loop over step.ahead; set it "
                "before the loop"
            )
        self.rate = checked
        self._push(self._every())

    def push(self, groups: Groups) -> None:
        """Tell the server the learning rate of the next step of these groups, if it is another."""
        self._push(central for central, _ in groups[0])

    def _push(self, every: Iterable[optimizers.Optimizer]) -> None:
        for central in every:
            rate = self._rate_at(int(central.iterations)) if callable(self.rate) else self.rate
            if float(central.learning_rate) != rate:
                central.learning_rate = rate

    @contextmanager
    def ahead(self, groups: Groups) -> Iterator[Mapping[optimizers.Optimizer, Iterable[float]] | None]:
        """The learning rates of the steps of these groups that are sent while the block lasts, for ``run_steps``."""
        self.push(groups)
        if callable(self.rate):
            yield {central: map(self._rate_at, itertools.count(int(central.iterations))) for central, _ in groups[0]}
            return
        self._plain_loops += 1
        try:
            yield None
        finally:
            self._plain_loops -= 1

    def _rate_at(self, count: int) -> float:
        """The learning rate of the update before which ``count`` have been made."""
        if not callable(self.rate):  # set in the loop
            return self.rate
        value: Any = self.rate(count)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"csj.optim.{self._name}: at count {count} the schedule returned {value!r:.80}, which is not a number"
            ) from error

    @property
    def count(self) -> int:
        """The number of updates of the tree that has had most."""
        return max((int(central.iterations) for central in self._every()), default=0)

    def _every(self) -> list[optimizers.Optimizer]:
        return [central for _, known in self._trees for central in known.values()]

    def with_max_norm(self, bound: float) -> Rule:
        """The same rule, for gradients that are clipped first."""
        return Rule(self._name, self.rate, self._arguments, self._numbers, self._mask, bound)

    def bind(self, leaves: Leaves) -> Groups:
        """The optimizers of the server for the trained variables of a tree, which are made for a tree that is new."""
        decayed = self._decayed(leaves)
        known = self._of(leaves)
        groups = {
            decays: [place for place, each in enumerate(decayed) if each is decays] for decays in sorted({*decayed})
        }
        for decays in groups.keys() - known.keys():
            known[decays] = self._make(decays)
            known[decays].adopt(leaves.strategy)
            known[decays].members = tuple(leaves.trained[place].number for place in groups[decays])
        return [(known[decays], places) for decays, places in groups.items()], self._max_norm

    def _of(self, leaves: Leaves) -> dict[bool, optimizers.Optimizer]:
        if any(central.strategy is not leaves.strategy for central in self._every()):
            raise ContextError(
                f"csj.optim.{self._name} trains variables of another strategy; make one for each strategy"
            )
        wanted = {id(variable) for variable in leaves.trained}
        for trained, known in self._trees:
            if {id(variable) for variable in trained} == wanted:
                return known
        self._trees.append((leaves.trained, {}))
        return self._trees[-1][1]

    def trains_part_of(self, leaves: Leaves) -> bool:
        """Whether it trains variables of the tree, but in another tree."""
        wanted = {id(variable) for variable in leaves.trained}
        trees = [{id(variable) for variable in trained} for trained, _ in self._trees]
        return wanted not in trees and any(wanted & tree for tree in trees)

    def _make(self, decays: bool) -> optimizers.Optimizer:
        numbers = (
            self._numbers if decays or "weight_decay" not in self._numbers else self._numbers | {"weight_decay": 0.0}
        )
        return optimizers.of_kind(f"optax.{self._name}", learning_rate=self._rate_at(0), **numbers)

    def _decayed(self, leaves: Leaves) -> list[bool]:
        """For each trained variable, whether its weights decay."""
        mask = True if self._mask is None else self._mask
        return bools(mask, leaves.of_trained(leaves.trained), f"csj.optim.{self._name}: the mask")

    def transformation(self, leaves: Leaves) -> Any:
        """The optimizer of optax itself with these arguments. Raises ModuleNotFoundError without optax."""
        import optax  # late: only those who exchange states with optax need it

        arguments = dict(self._arguments)
        if self._mask is not None:
            arguments["mask"] = leaves.of_trained(self._decayed(leaves))
        made = getattr(optax, self._name)(self.rate, **arguments)
        return made if self._max_norm is None else optax.chain(optax.clip_by_global_norm(self._max_norm), made)

    def __repr__(self) -> str:
        arguments = {"learning_rate": self.rate} | self._arguments
        if self._max_norm is not None:
            arguments["max_norm"] = self._max_norm
        shown = " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in arguments.items())
        return f"<csj.optim.{self._name} {shown}>"


class GlobalNorm(Closed):
    """The bound that :func:`clip_by_global_norm` makes, for :func:`chain`. ``max_norm`` is the bound.

    Examples:
        >>> import central_storage.jax as csj
        >>> isinstance(csj.optim.clip_by_global_norm(1.0), csj.optim.GlobalNorm)
        True
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def __repr__(self) -> str:
        return f"<csj.optim.clip_by_global_norm {self.max_norm}>"


def as_optimizer(given: object, what: str) -> Optimizer:
    """``given``, if it is an optimizer of ``csj.optim``; else a TypeError, which names ``what`` took it."""
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, GlobalNorm):
        raise TypeError(
            f"{what} takes an optimizer, not {given!r} alone: csj.optim.chain({given!r}, csj.optim.adam(...))"
        )
    if hasattr(given, "init") and hasattr(given, "update"):
        raise TypeError(
            f"{what} takes an optimizer of csj.optim, which the server carries out, and not one of optax itself: write "
            "csj.optim.adam(...) in place of optax.adam(...), and so for adamw, sgd, adagrad, rmsprop, lion, lamb, "
            "clip_by_global_norm and chain"
        )
    if isinstance(given, optimizers.Optimizer):
        raise TypeError(
            f"{what} takes an optimizer of csj.optim, such as csj.optim.adam(1e-3), not cs.optimizers.{given.kind}"
        )
    raise TypeError(f"{what} takes an optimizer of csj.optim, such as csj.optim.adam(1e-3), not {given!r:.200}")


def apply(groups: Groups, buffers: Sequence[np.ndarray], variables: Sequence[Variable], weight: float) -> None:
    """In a replica: one update of all groups by the gradients in ``buffers``, each times ``weight``."""
    found, bound = groups
    pairs = [(central, [(buffers[place], variables[place]) for place in places]) for central, places in found]
    optimizers.apply_gradients(pairs, global_clipnorm=bound, weight=weight)


def _checked_rate(name: str, rate: Any) -> Rate:
    if callable(rate):
        return rate  # type: ignore[no-any-return]
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(
            f"csj.optim.{name}: learning_rate must be a number or a function of the count of updates, not {rate!r:.100}"
        )
    return number
