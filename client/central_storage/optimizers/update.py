"""``apply_gradients``: the gradients of one or more optimizers on their way from a replica to the server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from central_storage.core.backends import Combining, Group
from central_storage.core.context import current_replica, get_replica_context, has_strategy
from central_storage.core.handles import handle_id
from central_storage.core.values import IndexedSlices
from central_storage.diagnostics.callers import call_site, warn
from central_storage.variables.constraints import constraints_after
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

from .checks import fitting, fitting_rows
from .weights import Weights

if TYPE_CHECKING:
    from central_storage.core.backends import ReplicaBackend

__all__ = ["SUMMED", "apply_gradients", "bring", "checked_variable", "unzipped"]


#: The default: gradients are summed, without weight or bound.
SUMMED = Combining()

#: What the user gives for one optimizer: the gradients and their variables. No pair is kept: ten thousand would set the
#: garbage collector off.
Given: TypeAlias = tuple[Weights, list[Any], list[Variable]]


def apply_gradients(
    groups: Iterable[tuple[Weights, Iterable[tuple[Any, Variable]]]],
    global_clipnorm: float | None = None,
    weight: float | None = None,
    clip_epsilon: float = 0.0,
) -> None:
    """Let several optimizers take one step each, on variables of their own, in one update of the server.

    Call it inside a replica function only. The gradients are summed over the replicas, each replica's times its
    ``weight``; then every optimizer updates its variables by its rule, and counts one iteration. ``global_clipnorm``
    bounds the norm of all these sums together: they are multiplied by ``min(1, global_clipnorm / (norm +
    clip_epsilon))``, the formula of ``torch.nn.utils.clip_grad_norm_``, which has an epsilon of 1e-6. An optimizer's
    own ``clipvalue``, ``clipnorm`` or ``global_clipnorm`` bounds its gradients before that. With a norm of infinity the
    factor is 0, and with a norm of NaN all gradients become NaN.

    A replica's weight says how much its gradients count. To train on the mean over the rows of a global batch that is
    split unevenly, compute the gradients of the mean over the replica's own rows, and pass its share of the rows, such
    as ``weight=rows / all_rows``. A replica with weight 0, such as one without rows, contributes nothing, also where
    its gradients are NaN. If all weights are 0, the gradients are 0, and the optimizers still take their steps.

    Args:
        groups: Pairs (optimizer, pairs), where pairs is what ``optimizer.apply_gradients`` takes. An optimizer whose
            pairs are empty takes no step. The optimizers and their variables are the same on all replicas.
        global_clipnorm: The bound, a number of at least 0, the same on all replicas; None for no bound.
        weight: A finite number of at least 0, which may differ between replicas; None is 1.
        clip_epsilon: A finite number of at least 0, the same on all replicas. It has no effect without
            ``global_clipnorm``.

    Raises:
        InvalidArgumentError: A gradient does not fit, names a row that the variable does not have, or a number is out
            of its range (a ValueError).
        ValueError: An optimizer or a variable appears twice, or every gradient is None.
        RuntimeError: A variable with a constraint has a sparse gradient.
        ContextError: Called outside a replica of the optimizers' strategy (a RuntimeError).
        MergeMismatchError: The replicas bring other optimizers, variables or bounds.

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w, b = cs.Variable(np.float32([1, 1])), cs.Variable(np.float32(0))
        ...         fast, slow = cs.optimizers.SGD(1.0), cs.optimizers.SGD(0.5)
        ...     def step(rows):
        ...         groups = [(fast, [(np.float32([3, 0]), w)]), (slow, [(np.float32(4), b)])]
        ...         cs.optimizers.apply_gradients(groups, global_clipnorm=2.5, weight=rows / 4)
        ...     strategy.run(step, (cs.PerReplica([3, 1]),))
        ...     print(w.numpy(), b.numpy(), fast.iterations, slow.iterations)
        [-0.5  1. ] -1.0 1 1
    """
    bring([unzipped(*_checked_group(group)) for group in groups], _combining(global_clipnorm, weight, clip_epsilon))


def checked_variable(optimizer: Weights, variable: object) -> Variable:
    """``variable``, if it is one. Raises InvalidArgumentError."""
    if not isinstance(variable, Variable):
        raise InvalidArgumentError(
            f"{optimizer.name} updates Variables, not {type(variable).__name__}: pass (gradient, Variable)"
        )
    return variable


def bring(given: Sequence[Given], combining: Combining) -> None:
    """Bring what the user gives to the strategy. Raises as :func:`apply_gradients` does."""
    strategy = backend = None
    for optimizer, _, _ in given:
        strategy = optimizer._strategy  # noqa: SLF001  (as all that is asked of it here: in every step)
        backend = current_replica(strategy)
        if backend is None:
            raise ContextError(_why_not_here(optimizer))
    if len(given) > 1:
        optimizers = [optimizer for optimizer, _, _ in given]
        if len(set(optimizers)) < len(optimizers):
            twice = next(each for each in optimizers if optimizers.count(each) > 1)
            raise ValueError(f"apply_gradients: optimizer {twice.name} appears twice; join its pairs in one list")
        given = [each for each in given if each[2]]
    if backend is None or strategy is None or not given or not given[0][2]:
        return
    counts: tuple[tuple[int, int], ...] = ()
    gradients: list[Any] = []
    variables: list[Variable] = []
    for optimizer, each_gradients, each_variables in given:
        counts += ((optimizer._number, len(each_variables)),)  # noqa: SLF001
        gradients += each_gradients
        variables += each_variables
    # If they are exactly the buffers that `gradient_buffers` returned for these variables, nothing has to be checked
    # one by one.
    found = strategy.variable_sets.find(variables)
    are_in_place = (
        found is not None
        and found.is_free
        and backend.apply_buffers(counts, gradients, found.numbers, combining, call_site())
    )
    if not are_in_place:
        _apply(backend, given, combining)


def _combining(global_clipnorm: object, weight: object, clip_epsilon: object) -> Combining:
    if global_clipnorm is None and weight is None and type(clip_epsilon) is float and not clip_epsilon:
        return SUMMED
    bound = None if global_clipnorm is None else _not_negative("global_clipnorm", global_clipnorm)
    epsilon = _not_negative("clip_epsilon", clip_epsilon)
    return Combining(
        1.0 if weight is None else _not_negative("weight", weight), bound, 0.0 if bound is None else epsilon
    )


def _not_negative(name: str, value: Any) -> float:
    is_number = not isinstance(value, bool | str | bytes) and getattr(value, "shape", ()) == ()
    try:
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidArgumentError(f"apply_gradients: {name} must be a finite number of at least 0, not {value!r:.80}")
    return number


def _checked_group(group: Any) -> tuple[Weights, Any]:
    try:
        optimizer, pairs = group
    except (TypeError, ValueError):
        optimizer = pairs = None
    if not isinstance(optimizer, Weights):
        raise InvalidArgumentError(
            "apply_gradients takes pairs of an optimizer and its pairs, as in [(optimizer, [(gradient, variable)])]"
        )
    return optimizer, pairs


def unzipped(optimizer: Weights, pairs: Any) -> Given:
    """The gradients and the variables of ``pairs``. Raises InvalidArgumentError if these are no pairs."""
    gradients, variables = [], []
    for pair in pairs:
        try:
            gradient, variable = pair
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"{optimizer.name}.apply_gradients takes pairs, as in [(gradient, variable)] or zip(gradients, "
                "variables)"
            ) from None
        gradients.append(gradient)
        variables.append(variable)
    return optimizer, gradients, variables


def _why_not_here(optimizer: Weights) -> str:
    """The reason why this is not in a replica of the optimizer's strategy."""
    if not has_strategy():
        return (
            "the default strategy has no server to apply the update rule: call apply_gradients "
            "inside a replica function of a CentralStorageStrategy (strategy.run)"
        )
    if get_replica_context() is None:
        return "apply_gradients must be called inside a replica function (strategy.run)"
    return f"optimizer {optimizer.name} belongs to another strategy"


def _apply(backend: ReplicaBackend, given: Sequence[Given], combining: Combining) -> None:
    """Note a step of each optimizer, wherever the gradients lie."""
    title = f"{given[0][0].name}.apply_gradients" if len(given) == 1 else "apply_gradients"
    left = [_without_none(each) for each in given]
    if not any(left):
        raise ValueError(f"{title}: every gradient is None, so nothing is left to apply")
    pairs = [pair for each in left for pair in each]
    constrain = constraints_after(pairs)
    seen: set[object] = set()
    for number in [variable.number for _, variable in pairs]:
        if number in seen:
            raise ValueError(f"{title}: a variable appears twice; add its gradients first")
        seen.add(number)
    for (optimizer, gradients, variables), others in zip(given, left, strict=True):
        if len(others) < len(gradients):
            missing = [v.name for gradient, v in zip(gradients, variables, strict=True) if gradient is None]
            warn(f"{optimizer.name}.apply_gradients: no gradient for {', '.join(missing)}; skipped", UserWarning)
    groups = [_group(optimizer, pairs) for (optimizer, _, _), pairs in zip(given, left, strict=True) if pairs]
    backend.apply(groups, combining, call_site())
    context = get_replica_context()
    if constrain is not None and context is not None:
        context.merge_call(constrain)


def _without_none(given: Given) -> list[tuple[Any, Variable]]:
    """The pairs with a gradient. Raises for something else than variables of the optimizer's strategy."""
    optimizer, gradients, variables = given
    for variable in variables:
        if checked_variable(optimizer, variable).strategy is not optimizer.strategy:
            raise ContextError(f"variable {variable.name} belongs to another strategy than optimizer {optimizer.name}")
    return [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]


def _group(optimizer: Weights, pairs: Sequence[tuple[Any, Variable]]) -> Group:
    dense, sparse = [], []
    for gradient, variable in pairs:
        if isinstance(gradient, IndexedSlices):
            sparse.append((*fitting_rows(gradient, variable), variable.number))
        else:
            dense.append((fitting(gradient, variable), variable.number))
    return Group(handle_id(optimizer)[1], dense, sparse)
