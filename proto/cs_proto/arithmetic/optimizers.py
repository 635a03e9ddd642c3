"""The table of optimizers: their hyperparameters, the rule of each, and the slots of every rule.

The client checks hyperparameters at once and knows the names of slots. The server checks again and has the arithmetic
of each rule (``cs_server.rules``). The rule is chosen once, when an optimizer is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen

__all__ = [
    "CLIPS",
    "OPTIMIZERS",
    "ROWWISE",
    "SHARED",
    "SLOTS",
    "WITHOUT_DECAY",
    "Hyperparameters",
    "check",
    "check_change",
    "check_exempt",
    "is_flag",
    "only",
    "rule_of",
    "slot_shape",
]

Hyperparameters: TypeAlias = Mapping[str, float]
"""Name to finite number; a flag such as ``amsgrad`` is True or False, or 1.0 or 0.0 as messages carry it."""


@frozen
class _Number:
    """The finite numbers from low to high; `open_end` leaves high itself out."""

    low: float = -math.inf
    high: float = math.inf
    open_end: bool = False

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        return math.isfinite(number) and self.low <= number <= self.high and not (self.open_end and number == self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return "a finite number" if math.isinf(self.low) else f"a finite number of at least {self.low:g}"
        if math.isinf(self.low):
            return f"a finite number of at most {self.high:g}"
        return f"a number in [{self.low:g}, {self.high:g}{')' if self.open_end else ']'}"


@frozen
class _Flag:
    """True or False; also 1 or 0."""

    def holds(self, value: object) -> bool:
        return isinstance(value, int | float) and value in (0, 1)

    def __str__(self) -> str:
        return "True or False"


@frozen
class _Optimizer:
    """The hyperparameters of an optimizer, and the rule that follows from them."""

    hyperparameters: Mapping[str, _Number | _Flag]
    rule: Callable[[Hyperparameters], str]


_RATE = _Number()
_DECAY = _Number(0, 1, open_end=True)
_FRACTION = _Number(0, 1)
_NOT_NEGATIVE = _Number(0)
_FLAG = _Flag()

#: The bounds of the summed gradient.
CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
#: The hyperparameters that every optimizer takes in addition to its own. ``decay`` divides the learning rate by
#: ``1 + decay · iterations``. ``lazy`` is not TensorFlow's: it leaves alone the rows that a sparse gradient does not
#: name, which some rules do anyway.
SHARED: Mapping[str, _Number | _Flag] = {**dict.fromkeys(CLIPS, _NOT_NEGATIVE), "decay": _NOT_NEGATIVE, "lazy": _FLAG}

_ADAM = {"learning_rate": _RATE, "beta_1": _DECAY, "beta_2": _DECAY, "epsilon": _NOT_NEGATIVE}


def _sgd(given: Hyperparameters) -> str:
    if given["momentum"] == 0:
        return "sgd"
    return "sgd_nesterov" if given["nesterov"] else "sgd_momentum"


def _rmsprop(given: Hyperparameters) -> str:
    name = "rmsprop_centered" if given["centered"] else "rmsprop"
    return name if given["momentum"] == 0 else f"{name}_momentum"


def _adam(given: Hyperparameters) -> str:
    return "adam_amsgrad" if given["amsgrad"] else "adam"


def _adamw(given: Hyperparameters) -> str:
    return "adamw_amsgrad" if given["amsgrad"] else "adamw"


def _ftrl(given: Hyperparameters) -> str:
    return "ftrl" if given["learning_rate_power"] == -0.5 else "ftrl_power"


OPTIMIZERS: Mapping[str, _Optimizer] = {
    "SGD": _Optimizer({"learning_rate": _RATE, "momentum": _FRACTION, "nesterov": _FLAG}, _sgd),
    "Adagrad": _Optimizer(
        {"learning_rate": _RATE, "initial_accumulator_value": _NOT_NEGATIVE, "epsilon": _NOT_NEGATIVE},
        lambda given: "adagrad",
    ),
    "RMSprop": _Optimizer(
        {
            "learning_rate": _RATE,
            "rho": _FRACTION,
            "momentum": _FRACTION,
            "epsilon": _NOT_NEGATIVE,
            "centered": _FLAG,
        },
        _rmsprop,
    ),
    "Adam": _Optimizer({**_ADAM, "amsgrad": _FLAG}, _adam),
    "AdamW": _Optimizer({**_ADAM, "weight_decay": _NOT_NEGATIVE, "amsgrad": _FLAG}, _adamw),
    "Adamax": _Optimizer({**_ADAM}, lambda given: "adamax"),
    "Nadam": _Optimizer({**_ADAM}, lambda given: "nadam"),
    "Adadelta": _Optimizer(
        {"learning_rate": _RATE, "rho": _FRACTION, "epsilon": _NOT_NEGATIVE}, lambda given: "adadelta"
    ),
    "Ftrl": _Optimizer(
        {
            "learning_rate": _RATE,
            "learning_rate_power": _Number(high=0),
            "initial_accumulator_value": _NOT_NEGATIVE,
            "l1_regularization_strength": _NOT_NEGATIVE,
            "l2_regularization_strength": _NOT_NEGATIVE,
            "l2_shrinkage_regularization_strength": _NOT_NEGATIVE,
            "beta": _NOT_NEGATIVE,
        },
        _ftrl,
    ),
    "rowwise_adagrad": _Optimizer(
        {
            "learning_rate": _RATE,
            "initial_accumulator_value": _NOT_NEGATIVE,
            "epsilon": _NOT_NEGATIVE,
            "weight_decay": _NOT_NEGATIVE,
        },
        lambda given: "rowwise_adagrad",
    ),
}

#: The slots of every rule, in the order of the arguments of its step.
SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "sgd_momentum": ("momentum",),
    "sgd_nesterov": ("momentum",),
    "adagrad": ("accumulator",),
    "rmsprop": ("rms",),
    "rmsprop_momentum": ("rms", "momentum"),
    "rmsprop_centered": ("rms", "mg"),
    "rmsprop_centered_momentum": ("rms", "momentum", "mg"),
    "adam": ("m", "v"),
    "adam_amsgrad": ("m", "v", "vhat"),
    "adamw": ("m", "v"),
    "adamw_amsgrad": ("m", "v", "vhat"),
    "adamax": ("m", "v"),
    "nadam": ("m", "v"),
    "adadelta": ("accum_grad", "accum_var"),
    "ftrl": ("accumulator", "linear"),
    "ftrl_power": ("accumulator", "linear"),
    "rowwise_adagrad": ("sum",),
}

#: The rules that keep one number for each row of a variable: its first axis.
ROWWISE = frozenset({"rowwise_adagrad"})

#: The rules with weight decay, and the same rules without it, for variables that are exempt.
WITHOUT_DECAY: Mapping[str, str] = {"adamw": "adam", "adamw_amsgrad": "adam_amsgrad"}


def check(kind: str, hyperparameters: Hyperparameters) -> None:
    """Check these hyperparameters of an optimizer; only those of ``SHARED`` may be missing.

    Raises InvalidArgumentError, which says what would be right, for an unknown optimizer, for a hyperparameter that is
    missing, unknown, of the wrong kind or out of its range, and for ``clipnorm`` together with ``global_clipnorm``.
    """
    optimizer = OPTIMIZERS.get(kind)
    if optimizer is None:
        raise InvalidArgumentError(f"unknown optimizer {kind!r}; the optimizers are {', '.join(OPTIMIZERS)}")
    for name, value in hyperparameters.items():
        domain = optimizer.hyperparameters.get(name) or SHARED.get(name)
        if domain is None:
            known = ", ".join([*optimizer.hyperparameters, *SHARED])
            raise InvalidArgumentError(f"{kind} has no hyperparameter {name!r}; it has {known}")
        if not domain.holds(value):
            raise InvalidArgumentError(f"{kind}: {name} must be {domain}, not {value!r}")
    for name, domain in optimizer.hyperparameters.items():
        if name not in hyperparameters:
            raise InvalidArgumentError(f"{kind} needs the hyperparameter {name!r}, {domain}")
    if "clipnorm" in hyperparameters and "global_clipnorm" in hyperparameters:
        raise InvalidArgumentError(f"{kind}: clipnorm and global_clipnorm exclude each other; give only one of them")


def check_exempt(kind: str, rule: str, patterns: Iterable[str]) -> None:
    """Check the patterns of the names that are exempt from weight decay. Raises InvalidArgumentError for a pattern that
    is not a regular expression, and for an optimizer that has no weight decay."""
    for pattern in patterns:
        if rule not in WITHOUT_DECAY:
            raise InvalidArgumentError(f"{kind} has no weight decay, so no variable can be exempt from it")
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgumentError(f"{kind}: {pattern!r:.200} is not a regular expression: {error}") from None


def only(name: str) -> str:
    """The pattern of the one variable of this name, among those that are exempt."""
    return f"^{re.escape(name)}$"


def slot_shape(rule: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a slot of this rule beside a variable of this ``shape``."""
    return shape[:1] if rule in ROWWISE else shape


def is_flag(kind: str, name: str) -> bool:
    """Whether a hyperparameter is True or False."""
    return isinstance(OPTIMIZERS[kind].hyperparameters.get(name) or SHARED.get(name), _Flag)


def rule_of(kind: str, hyperparameters: Hyperparameters) -> str:
    """The name of the rule that an optimizer made with these hyperparameters follows. Raises as ``check`` does."""
    check(kind, hyperparameters)
    return OPTIMIZERS[kind].rule(hyperparameters)


def check_change(kind: str, rule: str, before: Hyperparameters, after: Hyperparameters) -> None:
    """Check whether the hyperparameters of an optimizer with this ``rule`` may change from ``before`` to ``after``.

    Raises InvalidArgumentError as ``check`` does, for a changed flag (it has chosen the rule), for a momentum if the
    rule has none, and for another power of Ftrl.
    """
    check(kind, after)
    for name in after:
        if (is_flag(kind, name) or name == "learning_rate_power") and after[name] != before.get(name, False):
            raise InvalidArgumentError(f"{kind}: {name} was fixed when the optimizer was made; make another one")
    if after.get("momentum") and "momentum" not in SLOTS[rule]:
        raise InvalidArgumentError(
            f"{kind}: the optimizer was made with momentum 0 and keeps no momentum; make another one"
        )
