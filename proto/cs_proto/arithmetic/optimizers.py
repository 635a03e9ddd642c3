"""The table of optimizers: their hyperparameters, the rule of each, and the slots of every rule.

The client checks hyperparameters at once and knows the names of slots. The server checks again and has the arithmetic
of each rule (``cs_server.rules``). The rule is chosen once, when an optimizer is made.

A kind without a prefix is a class of ``central_storage.optimizers``. ``torch.`` and ``optax.`` name the formulas of
``torch.optim`` and of optax. Such a kind has its framework's names of slots and default values; a hyperparameter has
the same name in all kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
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
    "counts_by_variable",
    "defaults_of",
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


_Domains: TypeAlias = Mapping[str, _Number | _Flag]


@frozen
class _Optimizer:
    """The hyperparameters of an optimizer, and the rule that follows from them.

    ``defaults``: the values that the framework gives to hyperparameters that are left out. ``fixed``: numbers that
    never change after the optimizer was made.
    """

    hyperparameters: _Domains
    rule: Callable[[Hyperparameters], str]
    defaults: Hyperparameters = MappingProxyType({})
    fixed: frozenset[str] = frozenset()


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
SHARED: _Domains = {**dict.fromkeys(CLIPS, _NOT_NEGATIVE), "decay": _NOT_NEGATIVE, "lazy": _FLAG}

_ADAM: _Domains = {"learning_rate": _RATE, "beta_1": _DECAY, "beta_2": _DECAY, "epsilon": _NOT_NEGATIVE}


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


def _without_rate(values: Hyperparameters) -> Hyperparameters:
    return {name: value for name, value in values.items() if name != "learning_rate"}


def _with_momentum(name: str) -> Callable[[Hyperparameters], str]:
    return lambda given: f"{name}_momentum" if given["momentum"] else name


def _with_amsgrad(name: str) -> Callable[[Hyperparameters], str]:
    return lambda given: f"{name}_amsgrad" if given["amsgrad"] else name


def _with_mean(name: str) -> Callable[[Hyperparameters], str]:
    return _choosing(lambda given: given["centered"], _with_momentum(f"{name}_centered"), _with_momentum(name))


def _choosing(
    is_first: Callable[[Hyperparameters], object],
    first: Callable[[Hyperparameters], str],
    second: Callable[[Hyperparameters], str],
) -> Callable[[Hyperparameters], str]:
    return lambda given: (first if is_first(given) else second)(given)


#: What torch gives most of its optimizers, and the values of Adam's numbers in torch and optax.
_OF_TORCH: _Domains = {"weight_decay": _NOT_NEGATIVE, "maximize": _FLAG}
_PLAIN = {"weight_decay": 0.0, "maximize": False}
_ADAMS = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}

#: The classes of ``torch.optim`` with the defaults of torch 2.13.
_TORCH: Mapping[str, _Optimizer] = {
    "SGD": _Optimizer(
        {"learning_rate": _RATE, "momentum": _NOT_NEGATIVE, "dampening": _RATE, "nesterov": _FLAG, **_OF_TORCH},
        _with_momentum("torch_sgd"),
        {"learning_rate": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, **_PLAIN},
    ),
    "Adam": _Optimizer(
        {**_ADAM, "amsgrad": _FLAG, "decoupled_weight_decay": _FLAG, **_OF_TORCH},
        _with_amsgrad("torch_adam"),
        {**_ADAMS, "amsgrad": False, "decoupled_weight_decay": False, **_PLAIN},
    ),
    "AdamW": _Optimizer(
        {**_ADAM, "amsgrad": _FLAG, **_OF_TORCH},
        _with_amsgrad("torch_adamw"),
        {**_ADAMS, "amsgrad": False, "weight_decay": 1e-2, "maximize": False},
    ),
    "SparseAdam": _Optimizer(
        {**_ADAM, "maximize": _FLAG}, lambda given: "torch_sparse_adam", {**_ADAMS, "maximize": False}
    ),
    "RMSprop": _Optimizer(
        {
            "learning_rate": _RATE,
            "rho": _FRACTION,
            "epsilon": _NOT_NEGATIVE,
            "momentum": _NOT_NEGATIVE,
            "centered": _FLAG,
            **_OF_TORCH,
        },
        _with_mean("torch_rmsprop"),
        {"learning_rate": 1e-2, "rho": 0.99, "epsilon": 1e-8, "momentum": 0.0, "centered": False, **_PLAIN},
    ),
    "Adamax": _Optimizer(
        {**_ADAM, **_OF_TORCH}, lambda given: "torch_adamax", {**_ADAMS, "learning_rate": 2e-3, **_PLAIN}
    ),
    "NAdam": _Optimizer(
        {**_ADAM, "momentum_decay": _NOT_NEGATIVE, "decoupled_weight_decay": _FLAG, **_OF_TORCH},
        lambda given: "torch_nadam",
        {**_ADAMS, "learning_rate": 2e-3, "momentum_decay": 4e-3, "decoupled_weight_decay": False, **_PLAIN},
        # Its rates depend on the product of the momenta of all updates, which is computed from these numbers.
        frozenset({"beta_1", "momentum_decay"}),
    ),
    "RAdam": _Optimizer(
        {**_ADAM, "decoupled_weight_decay": _FLAG, **_OF_TORCH},
        lambda given: "torch_radam",
        {**_ADAMS, "decoupled_weight_decay": False, **_PLAIN},
    ),
    "Adagrad": _Optimizer(
        {
            "learning_rate": _RATE,
            "lr_decay": _NOT_NEGATIVE,
            "initial_accumulator_value": _NOT_NEGATIVE,
            "epsilon": _NOT_NEGATIVE,
            **_OF_TORCH,
        },
        lambda given: "torch_adagrad",
        {"learning_rate": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "epsilon": 1e-10, **_PLAIN},
    ),
    "Adadelta": _Optimizer(
        {"learning_rate": _RATE, "rho": _FRACTION, "epsilon": _NOT_NEGATIVE, **_OF_TORCH},
        lambda given: "torch_adadelta",
        {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6, **_PLAIN},
    ),
}

_OPTAX_ADAM: _Domains = {**_ADAM, "eps_root": _NOT_NEGATIVE, "nesterov": _FLAG}
_OPTAX_ADAMS = {**_ADAMS, "eps_root": 0.0, "nesterov": False}
_LION: _Domains = {"learning_rate": _RATE, "beta_1": _DECAY, "beta_2": _DECAY, "weight_decay": _NOT_NEGATIVE}


def _optax_adam(given: Hyperparameters) -> str:
    return "optax_adam_nesterov" if given["nesterov"] else "optax_adam"


#: The functions of optax 0.2, whose learning rate has no default. ``initial_accumulator_value`` is also the
#: ``initial_scale`` of rmsprop, and momentum 0 is its None.
_OPTAX: Mapping[str, _Optimizer] = {
    "sgd": _Optimizer(
        {"learning_rate": _RATE, "momentum": _NOT_NEGATIVE, "nesterov": _FLAG},
        _with_momentum("optax_sgd"),
        {"momentum": 0.0, "nesterov": False},
    ),
    "adam": _Optimizer(_OPTAX_ADAM, _optax_adam, _without_rate(_OPTAX_ADAMS)),
    "adamw": _Optimizer(
        {**_OPTAX_ADAM, "weight_decay": _NOT_NEGATIVE},
        _optax_adam,
        {**_without_rate(_OPTAX_ADAMS), "weight_decay": 1e-4},
    ),
    "adagrad": _Optimizer(
        {"learning_rate": _RATE, "initial_accumulator_value": _NOT_NEGATIVE, "epsilon": _NOT_NEGATIVE},
        lambda given: "optax_adagrad",
        {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
    ),
    "rmsprop": _Optimizer(
        {
            "learning_rate": _RATE,
            "rho": _DECAY,
            "epsilon": _NOT_NEGATIVE,
            "initial_accumulator_value": _NOT_NEGATIVE,
            "eps_in_sqrt": _FLAG,
            "centered": _FLAG,
            "momentum": _NOT_NEGATIVE,
            "nesterov": _FLAG,
            "bias_correction": _FLAG,
        },
        _with_mean("optax_rmsprop"),
        {
            "rho": 0.9,
            "epsilon": 1e-8,
            "initial_accumulator_value": 0.0,
            "eps_in_sqrt": True,
            "centered": False,
            "momentum": 0.0,
            "nesterov": False,
            "bias_correction": False,
        },
    ),
    "lion": _Optimizer(_LION, lambda given: "optax_lion", {"beta_1": 0.9, "beta_2": 0.99, "weight_decay": 1e-3}),
    "lamb": _Optimizer(
        {**_ADAM, "eps_root": _NOT_NEGATIVE, "weight_decay": _NOT_NEGATIVE},
        lambda given: "optax_lamb",
        {**_without_rate(_ADAMS), "epsilon": 1e-6, "eps_root": 0.0, "weight_decay": 0.0},
    ),
}

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
        fixed=frozenset({"learning_rate_power"}),
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
    "Lion": _Optimizer({**_LION}, lambda given: "lion"),
    "LAMB": _Optimizer({**_ADAM, "weight_decay": _NOT_NEGATIVE}, lambda given: "lamb"),
    **{f"torch.{name}": optimizer for name, optimizer in _TORCH.items()},
    **{f"optax.{name}": optimizer for name, optimizer in _OPTAX.items()},
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
    **dict.fromkeys(("lion", "lion_without_decay"), ("m",)),
    **dict.fromkeys(("lamb", "lamb_without_decay"), ("m", "v")),
    "torch_sgd": (),
    "torch_sgd_momentum": ("momentum_buffer",),
    **dict.fromkeys(("torch_adam", "torch_adamw", "torch_sparse_adam"), ("exp_avg", "exp_avg_sq")),
    **dict.fromkeys(("torch_adam_amsgrad", "torch_adamw_amsgrad"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "torch_rmsprop": ("square_avg",),
    "torch_rmsprop_momentum": ("square_avg", "momentum_buffer"),
    "torch_rmsprop_centered": ("square_avg", "grad_avg"),
    "torch_rmsprop_centered_momentum": ("square_avg", "momentum_buffer", "grad_avg"),
    "torch_adamax": ("exp_avg", "exp_inf"),
    **dict.fromkeys(("torch_nadam", "torch_radam"), ("exp_avg", "exp_avg_sq")),
    "torch_adagrad": ("sum",),
    "torch_adadelta": ("square_avg", "acc_delta"),
    "optax_sgd": (),
    "optax_sgd_momentum": ("trace",),
    **dict.fromkeys(("optax_adam", "optax_adam_nesterov", "optax_lamb"), ("mu", "nu")),
    "optax_adagrad": ("sum_of_squares",),
    "optax_rmsprop": ("nu",),
    "optax_rmsprop_momentum": ("nu", "trace"),
    "optax_rmsprop_centered": ("nu", "mu"),
    "optax_rmsprop_centered_momentum": ("nu", "trace", "mu"),
    "optax_lion": ("mu",),
}

#: The slots that exist only where the optimizer was made with a momentum.
_MOMENTA = frozenset({"momentum", "momentum_buffer", "trace"})

#: The rules that keep one number for each row of a variable: its first axis.
ROWWISE = frozenset({"rowwise_adagrad"})

#: The rules with weight decay, and the same rules without it, for variables that are exempt.
WITHOUT_DECAY: Mapping[str, str] = {
    "adamw": "adam",
    "adamw_amsgrad": "adam_amsgrad",
    "lion": "lion_without_decay",
    "lamb": "lamb_without_decay",
}


def check(kind: str, hyperparameters: Hyperparameters) -> None:
    """Check these hyperparameters of an optimizer; only those of ``SHARED`` may be missing.

    Raises InvalidArgumentError, which says what would be right, for an unknown optimizer, for a hyperparameter that is
    missing, unknown, of the wrong kind or out of its range, and for ``clipnorm`` together with ``global_clipnorm``.
    """
    optimizer = _optimizer(kind)
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


def _optimizer(kind: str) -> _Optimizer:
    optimizer = OPTIMIZERS.get(kind)
    if optimizer is None:
        raise InvalidArgumentError(f"unknown optimizer {kind!r}; the optimizers are {', '.join(OPTIMIZERS)}")
    return optimizer


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


def counts_by_variable(kind: str) -> bool:
    """Whether the numbers of an update follow from how often its variable was updated. In the other kinds they follow
    from how often the optimizer made an update of any variables."""
    return "." in kind


def defaults_of(kind: str) -> Hyperparameters:
    """The values of the hyperparameters that a framework's own optimizer of this kind may be made without. Raises
    InvalidArgumentError for an unknown kind."""
    return _optimizer(kind).defaults


def rule_of(kind: str, hyperparameters: Hyperparameters) -> str:
    """The name of the rule that an optimizer made with these hyperparameters follows. Raises as ``check`` does."""
    check(kind, hyperparameters)
    return OPTIMIZERS[kind].rule(hyperparameters)


def check_change(kind: str, rule: str, before: Hyperparameters, after: Hyperparameters) -> None:
    """Check whether the hyperparameters of an optimizer with this ``rule`` may change from ``before`` to ``after``.

    Raises InvalidArgumentError as ``check`` does, for a number that is fixed, for a changed flag, and for a momentum if
    the rule has none. The flags of a kind that counts by variable may change where they do not choose the rule.
    """
    check(kind, after)
    for name in after:
        if after[name] != before.get(name, False) and _is_fixed(kind, name, before, after[name]):
            raise InvalidArgumentError(f"{kind}: {name} was fixed when the optimizer was made; make another one")
    if after.get("momentum") and _MOMENTA.isdisjoint(SLOTS[rule]):
        raise InvalidArgumentError(
            f"{kind}: the optimizer was made with momentum 0 and keeps no momentum; make another one"
        )


def _is_fixed(kind: str, name: str, before: Hyperparameters, value: float) -> bool:
    """Whether a hyperparameter of an optimizer with the numbers ``before`` cannot become ``value``."""
    if not is_flag(kind, name):
        return name in OPTIMIZERS[kind].fixed
    return not counts_by_variable(kind) or rule_of(kind, before) != rule_of(kind, {**before, name: value})
