"""torch's own optimizers, whose rules the server applies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from .base import CentralOptimizer, scalar_dtype
from .state import Group

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam"]


class SGD(CentralOptimizer, torch.optim.SGD):
    """Stochastic gradient descent, with torch's momentum: the rate stands outside.

    ``b = momentum b + (1 - dampening) g; p -= lr b``, with ``b = g`` in the first update. State: momentum_buffer.
    Source: Sutskever et al., 2013, as ``torch.optim.SGD`` writes it.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        momentum: The decay of ``b``. Whether it is 0 never changes.
        dampening: The part of the gradient that does not enter ``b``.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        nesterov: Whether the step looks ahead: ``p -= lr (g + momentum b)``.
        maximize: Whether the step goes up the gradient.
        foreach: Accepted; it changes nothing.
        differentiable: False; the server refuses True.
        fused: Accepted; it changes nothing.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer.defaults["momentum"]
        0.9
    """

    kind = "torch.SGD"

    def counts(self, group: Group, steps: int) -> dict[str, Any]:
        """None: torch's SGD does not count."""
        return {}


class Adam(CentralOptimizer, torch.optim.Adam):
    """Adam with torch's epsilon, beside the corrected root.

    ``p -= lr / (1 - b1^t) · exp_avg / (sqrt(exp_avg_sq / (1 - b2^t)) + eps)``. State: step, exp_avg, exp_avg_sq.
    Source: Kingma and Ba, 2015.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_avg_sq``, in [0, 1).
        eps: A small number that keeps the divisor from 0; it stands beside the corrected root.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        amsgrad: Whether the largest ``exp_avg_sq`` so far is used. It never changes.
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        capturable: False; the server refuses True.
        differentiable: False; the server refuses True.
        fused: Accepted; it changes nothing.
        decoupled_weight_decay: Whether the decay acts on the parameter, as in :class:`AdamW`.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.Adam(model.parameters(), lr=3e-4)
        >>> optimizer.defaults["lr"]
        0.0003
    """

    kind = "torch.Adam"


class AdamW(CentralOptimizer, torch.optim.AdamW):
    """Adam after ``p -= lr weight_decay p``.

    State: step, exp_avg, exp_avg_sq.
    Source: Loshchilov and Hutter, 2019.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_avg_sq``, in [0, 1).
        eps: A small number that keeps the divisor from 0; it stands beside the corrected root.
        weight_decay: The part of the parameter that is taken away, times the learning rate.
        amsgrad: Whether the largest ``exp_avg_sq`` so far is used. It never changes.
        maximize: Whether the step goes up the gradient.
        foreach: Accepted; it changes nothing.
        capturable: False; the server refuses True.
        differentiable: False; the server refuses True.
        fused: Accepted; it changes nothing.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.AdamW(model.parameters(), lr=3e-4)
        >>> optimizer.defaults["weight_decay"]
        0.01
    """

    kind = "torch.AdamW"
    implied = ("decoupled_weight_decay",)


class SparseAdam(CentralOptimizer, torch.optim.SparseAdam):
    """Adam for the rows that a sparse gradient names, with its epsilon beside the uncorrected root.

    State: step, exp_avg, exp_avg_sq.
    Source: ``torch.optim.SparseAdam``.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_avg_sq``, in [0, 1).
        eps: A small number that keeps the divisor from 0.
        maximize: Whether the step goes up the gradient.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Embedding(3, 2, sparse=True))
        ...     optimizer = cst.optim.SparseAdam(model.parameters(), lr=0.01)
        >>> optimizer.defaults["eps"]
        1e-08
    """

    kind = "torch.SparseAdam"

    def counts(self, group: Group, steps: int) -> dict[str, Any]:
        """torch's SparseAdam counts with a Python number."""
        return {"step": steps}


class RMSprop(CentralOptimizer, torch.optim.RMSprop):
    """RMSprop with the rate outside the momentum, as torch has it.

    ``v = alpha v + (1 - alpha) g²; b = momentum b + g / (sqrt(v) + eps); p -= lr b``. State: step, square_avg.
    Source: Tieleman and Hinton, 2012; ``centered``: Graves, 2013.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        alpha: The decay of ``v``.
        eps: A small number that keeps the divisor from 0.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        momentum: The decay of ``b``. Whether it is 0 never changes.
        centered: Whether the mean gradient is taken from the root. It never changes.
        capturable: False; the server refuses True.
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        differentiable: False; the server refuses True.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.RMSprop(model.parameters(), lr=0.1)
        >>> optimizer.defaults["alpha"]
        0.99
    """

    kind = "torch.RMSprop"


class Adamax(CentralOptimizer, torch.optim.Adamax):
    """Adam with the infinity norm: ``u = max(b2 u, |g| + eps); p -= lr / (1 - b1^t) · exp_avg / u``.

    State: step, exp_avg, exp_inf.
    Source: Kingma and Ba, 2015.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_inf``, in [0, 1).
        eps: A small number that keeps the divisor from 0.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        differentiable: False; the server refuses True.
        capturable: False; the server refuses True.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.Adamax(model.parameters(), lr=0.1)
        >>> optimizer.defaults["lr"]
        0.1
    """

    kind = "torch.Adamax"


class NAdam(CentralOptimizer, torch.optim.NAdam):
    """Adam with Nesterov's momentum, whose ``mu`` grows: ``b1 (1 - .5 · .96^(t momentum_decay))``.

    State: step, mu_product, exp_avg, exp_avg_sq. ``mu_product`` follows from the numbers, so the first beta never
    changes: OneCycleLR and CyclicLR need ``cycle_momentum=False``.
    Source: Dozat, 2016.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, which never changes, and that of ``exp_avg_sq``, in [0, 1). OneCycleLR and
            CyclicLR change the first one unless they get ``cycle_momentum=False``.
        eps: A small number that keeps the divisor from 0; it stands beside the corrected root.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        momentum_decay: The pace at which ``mu`` grows. It never changes.
        decoupled_weight_decay: Whether the decay acts on the parameter, as in :class:`AdamW`.
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        capturable: False; the server refuses True.
        differentiable: False; the server refuses True.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.NAdam(model.parameters(), lr=0.1)
        >>> optimizer.defaults["momentum_decay"]
        0.004
    """

    kind = "torch.NAdam"

    def counts(self, group: Group, steps: int) -> dict[str, Any]:
        """The number of updates, and the product of the momenta of them all."""
        product = _mu_product(group["betas"][0], group["momentum_decay"], steps)
        return super().counts(group, steps) | {"mu_product": torch.tensor(product, dtype=scalar_dtype())}


class RAdam(CentralOptimizer, torch.optim.RAdam):
    """Adam whose step is rectified while the variance is not tractable.

    State: step, exp_avg, exp_avg_sq.
    Source: Liu et al., 2020.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        betas: The decay of ``exp_avg``, and that of ``exp_avg_sq``, in [0, 1).
        eps: A small number that keeps the divisor from 0.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        decoupled_weight_decay: Whether the decay acts on the parameter, as in :class:`AdamW`.
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        capturable: False; the server refuses True.
        differentiable: False; the server refuses True.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.RAdam(model.parameters(), lr=0.1)
        >>> optimizer.defaults["eps"]
        1e-08
    """

    kind = "torch.RAdam"


class Adagrad(CentralOptimizer, torch.optim.Adagrad):
    """``sum += g²; p -= lr / (1 + (t - 1) lr_decay) · g / (sqrt(sum) + eps)``.

    State: step, sum.
    Source: Duchi et al., 2011.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        lr_decay: The pace at which the learning rate falls.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        initial_accumulator_value: The first ``sum``.
        eps: A small number that keeps the divisor from 0.
        foreach: Accepted; it changes nothing.
        maximize: Whether the step goes up the gradient.
        differentiable: False; the server refuses True.
        fused: Accepted; it changes nothing.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.Adagrad(model.parameters(), lr=0.1)
        >>> optimizer.defaults["eps"]
        1e-10
    """

    kind = "torch.Adagrad"
    begins_with_state = True


class Adadelta(CentralOptimizer, torch.optim.Adadelta):
    """``p -= lr · sqrt(acc_delta + eps) / sqrt(square_avg + eps) · g``.

    State: step, square_avg, acc_delta.
    Source: Zeiler, 2012.

    Args:
        params: Parameters that ``cst.centralize`` has prepared, or groups of them.
        lr: The learning rate.
        rho: The decay of both averages.
        eps: A small number, added to both averages.
        weight_decay: What is added to the gradient after clipping, times the parameter (L2).
        foreach: Accepted; it changes nothing.
        capturable: False; the server refuses True.
        maximize: Whether the step goes up the gradient.
        differentiable: False; the server refuses True.
        max_norm: As for :class:`CentralOptimizer`.
        max_value: As for :class:`CentralOptimizer`.
        find_unused_parameters: As for :class:`CentralOptimizer`.
        lazy: As for :class:`CentralOptimizer`.

    Raises:
        InvalidArgumentError: A parameter was not centralized, or the server cannot do what an argument asks for (a
            ValueError).
        ValueError: torch refuses an argument.
        ContextError: Made in a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.Adadelta(model.parameters(), rho=0.95)
        >>> optimizer.defaults["rho"]
        0.95
    """

    kind = "torch.Adadelta"


@functools.lru_cache(maxsize=256)
def _mu_product(beta: float, decay: float, steps: int) -> float:
    """NAdam's ``mu_product`` after this many updates, in float32 as torch keeps it."""
    product = np.float32(1)
    for t in range(1, steps + 1):
        product *= np.float32(beta * (1 - 0.5 * 0.96 ** (t * decay)))
        if product == 0:
            break
    return float(product)
