"""optax's optimizers, carried out by the server: its names, arguments, defaults and rules.

:func:`step <central_storage.jax.step>` takes one of them. The server keeps the state, adds up the gradients of all
replicas, clips their sum and updates every variable once. A learning rate is a number, one of the schedules here, or
any other function of the count of updates, also one of optax. The numbers of a rule are computed in double precision.

    >>> import central_storage.jax as csj
    >>> schedule = csj.optim.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 1000)
    >>> optimizer = csj.optim.chain(csj.optim.clip_by_global_norm(1.0), csj.optim.adamw(schedule))
"""

from __future__ import annotations

from typing import Any, NoReturn

from cs_proto.errors import InvalidArgumentError

from .optimizer import GlobalNorm, Optimizer, Rate, Rule, as_optimizer
from .schedules import (
    Schedule,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine_decay_schedule,
)

__all__ = [
    "GlobalNorm",
    "Optimizer",
    "Schedule",
    "adagrad",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "lamb",
    "linear_schedule",
    "lion",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "rmsprop",
    "sgd",
    "warmup_cosine_decay_schedule",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"csj.optim has no {name!r}, because the server has no such rule; it has adam, adamw, sgd, adagrad, rmsprop, "
        "lion and lamb, chain and clip_by_global_norm, and schedules"
    )


def adam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> Optimizer:
    """``w -= lr · m̂ / (√(v̂ + eps_root) + eps)`` with the corrected means m̂ and v̂ (Kingma and Ba, 2015).

    Args:
        learning_rate: A number or a function of the count of updates.
        b1: The decay of the mean gradient, in [0, 1).
        b2: The decay of the mean squared gradient, in [0, 1).
        eps: Keeps the divisor from 0.
        eps_root: The same, inside of the root.
        mu_dtype: None: the state has the dtype of the variable.
        nesterov: Whether m̂ looks one step ahead (Dozat, 2016).

    Raises:
        InvalidArgumentError: A number is out of its range (a ValueError).
        NotImplementedError: ``mu_dtype`` is given.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.adam(1e-3).learning_rate
        0.001
    """
    numbers = {"beta_1": b1, "beta_2": b2, "epsilon": eps, "eps_root": eps_root, "nesterov": nesterov}
    arguments = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "nesterov": nesterov}
    return _made("adam", learning_rate, arguments, numbers, mu_dtype=mu_dtype)


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> Optimizer:
    """:func:`adam` with ``w -= lr · weight_decay · w`` (Loshchilov and Hutter, 2019).

    Args:
        learning_rate: As for :func:`adam`.
        b1: As for :func:`adam`.
        b2: As for :func:`adam`.
        eps: As for :func:`adam`.
        eps_root: As for :func:`adam`.
        mu_dtype: As for :func:`adam`.
        weight_decay: The factor of the decay, a number.
        mask: Bools that say which leaves decay, as a pytree that is a prefix of the tree, or a function from the tree
            to one. The function gets the variables, which have ``shape``, ``ndim`` and ``dtype``. None: all.
        nesterov: As for :func:`adam`.

    Raises:
        InvalidArgumentError: A number is out of its range, or ``weight_decay`` is a schedule (a ValueError).
        NotImplementedError: ``mu_dtype`` is given.

    Examples:
        >>> import jax
        >>> import central_storage.jax as csj
        >>> matrices = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
        >>> csj.optim.adamw(1e-3, weight_decay=0.1, mask=matrices).learning_rate
        0.001
    """
    numbers = {"beta_1": b1, "beta_2": b2, "epsilon": eps, "eps_root": eps_root, "nesterov": nesterov}
    arguments = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "nesterov": nesterov}
    decay = {"weight_decay": weight_decay}
    return _made("adamw", learning_rate, arguments | decay, numbers | decay, mask, mu_dtype=mu_dtype)


def sgd(
    learning_rate: Rate, momentum: float | None = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> Optimizer:
    """``w -= lr · g`` or, with momentum, ``t = g + momentum · t; w -= lr · t``.

    Args:
        learning_rate: A number or a function of the count of updates.
        momentum: The decay of the trace; None: no trace.
        nesterov: Whether the trace looks one step ahead.
        accumulator_dtype: None: the trace has the dtype of the variable.

    Raises:
        InvalidArgumentError: A number is out of its range (a ValueError).
        NotImplementedError: ``accumulator_dtype`` is given.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.sgd(0.1, momentum=0.9).learning_rate
        0.1
    """
    arguments = {"momentum": momentum or None, "nesterov": nesterov}
    numbers = {"momentum": momentum or 0.0, "nesterov": nesterov}
    return _made("sgd", learning_rate, arguments, numbers, accumulator_dtype=accumulator_dtype)


def adagrad(learning_rate: Rate, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> Optimizer:
    """``s += g²; w -= lr · g / √(s + eps)``, and no update where s is 0 (Duchi et al., 2011).

    Args:
        learning_rate: A number or a function of the count of updates.
        initial_accumulator_value: Where the sum s begins.
        eps: Keeps the divisor from 0.

    Raises:
        InvalidArgumentError: A number is out of its range (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.adagrad(0.1).learning_rate
        0.1
    """
    arguments = {"initial_accumulator_value": initial_accumulator_value, "eps": eps}
    numbers = {"initial_accumulator_value": initial_accumulator_value, "epsilon": eps}
    return _made("adagrad", learning_rate, arguments, numbers)


def rmsprop(
    learning_rate: Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> Optimizer:
    """``v = decay · v + (1 - decay) · g²; w -= lr · g / √(v + eps)`` (Tieleman and Hinton, 2012).

    Args:
        learning_rate: A number or a function of the count of updates.
        decay: The decay of the mean squared gradient, in [0, 1).
        eps: Keeps the divisor from 0.
        initial_scale: Where v begins.
        eps_in_sqrt: Whether ``eps`` is inside of the root.
        centered: Whether the squared mean gradient is subtracted from v.
        momentum: The decay of a trace of the updates, which have the rate in them; None: no trace.
        nesterov: Whether the trace looks one step ahead.
        bias_correction: Whether the means are corrected, as Adam's are.

    Raises:
        InvalidArgumentError: A number is out of its range (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.rmsprop(0.01, centered=True).learning_rate
        0.01
    """
    shared = {
        "eps_in_sqrt": eps_in_sqrt,
        "centered": centered,
        "nesterov": nesterov,
        "bias_correction": bias_correction,
    }
    arguments = {"decay": decay, "eps": eps, "initial_scale": initial_scale, "momentum": momentum or None}
    numbers = {"rho": decay, "epsilon": eps, "initial_accumulator_value": initial_scale, "momentum": momentum or 0.0}
    return _made("rmsprop", learning_rate, arguments | shared, numbers | shared)


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    weight_decay: float = 1e-3,
    mask: Any = None,
) -> Optimizer:
    """``w -= lr · (sign(b1 · m + (1 - b1) · g) + weight_decay · w)`` (Chen et al., 2023).

    Args:
        learning_rate: A number or a function of the count of updates.
        b1: The weight of the mean in the update, in [0, 1).
        b2: The decay of the mean gradient m, in [0, 1).
        mu_dtype: As for :func:`adam`.
        weight_decay: As for :func:`adamw`.
        mask: As for :func:`adamw`.

    Raises:
        InvalidArgumentError: A number is out of its range, or ``weight_decay`` is a schedule (a ValueError).
        NotImplementedError: ``mu_dtype`` is given.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.lion(1e-4).learning_rate
        0.0001
    """
    arguments = {"b1": b1, "b2": b2, "weight_decay": weight_decay}
    numbers = {"beta_1": b1, "beta_2": b2, "weight_decay": weight_decay}
    return _made("lion", learning_rate, arguments, numbers, mask, mu_dtype=mu_dtype)


def lamb(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> Optimizer:
    """:func:`adamw` with every variable's update scaled to ``‖w‖ / ‖update‖`` (You et al., 2020).

    Args:
        learning_rate: A number or a function of the count of updates.
        b1: As for :func:`adam`.
        b2: As for :func:`adam`.
        eps: As for :func:`adam`.
        eps_root: As for :func:`adam`.
        weight_decay: As for :func:`adamw`.
        mask: As for :func:`adamw`.

    Raises:
        InvalidArgumentError: A number is out of its range, or ``weight_decay`` is a schedule (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> def large_batches(rate):
        ...     return csj.optim.lamb(rate, weight_decay=0.01)
    """
    arguments = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    numbers = {"beta_1": b1, "beta_2": b2, "epsilon": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    return _made("lamb", learning_rate, arguments, numbers, mask)


def clip_by_global_norm(max_norm: float) -> GlobalNorm:
    """A bound of the norm of all gradients together, summed over the replicas: the first member of a :func:`chain`.

    Args:
        max_norm: The bound, above 0.

    Raises:
        InvalidArgumentError: The bound is not above 0 (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.clip_by_global_norm(1.0)
        <csj.optim.clip_by_global_norm 1.0>
    """
    bound = float(max_norm)
    if not 0 < bound < float("inf"):
        raise InvalidArgumentError(f"clip_by_global_norm takes a bound above 0, not {max_norm!r}")
    return GlobalNorm(bound)


def chain(*members: Optimizer | GlobalNorm) -> Optimizer:
    """An optimizer that clips the gradients first.

    Args:
        *members: At most one of :func:`clip_by_global_norm`, and then one optimizer.

    Raises:
        InvalidArgumentError: The members have another number or order (a ValueError).
        TypeError: A member is none of this module.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.chain(csj.optim.clip_by_global_norm(1.0), csj.optim.sgd(0.1)).learning_rate
        0.1
    """
    for member in members:
        if not isinstance(member, GlobalNorm):
            as_optimizer(member, "csj.optim.chain")
    kinds = [type(member) for member in members]
    if kinds not in ([Optimizer], [GlobalNorm, Optimizer]):
        raise InvalidArgumentError(
            "csj.optim.chain takes clip_by_global_norm(bound) and then one optimizer, because the server clips before "
            f"it updates, not {members!r:.300}"
        )
    *bounds, last = members
    assert isinstance(last, Optimizer)
    for bound in bounds:
        assert isinstance(bound, GlobalNorm)
        return Optimizer(last.record.with_max_norm(bound.max_norm))
    return last


def _made(
    name: str, rate: Rate, arguments: dict[str, Any], numbers: dict[str, Any], mask: Any = None, **dtypes: Any
) -> Optimizer:
    for key, dtype in dtypes.items():
        if dtype is not None:
            raise NotImplementedError(
                f"csj.optim.{name}: the server keeps the state in the dtype of the variable; leave out {key}={dtype!r}"
            )
    return Optimizer(Rule(name, rate, arguments, numbers, mask))
