"""Clipping of the summed gradient: by element, by the norm of each variable, by the norm of all variables.

This module owns the meaning of TensorFlow's clip functions: values first, then norms. Norms are added up in double
precision over pieces of fixed size, so they do not depend on the number of threads. It knows no rule and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from cs_proto.arithmetic.optimizers import CLIPS, Hyperparameters
from cs_proto.frozen import frozen
from cs_server.rules import Array, summed

__all__ = ["UNBOUNDED", "Clipping", "factors_together", "square_of"]


@frozen
class Clipping:
    """The bounds of one optimizer; None means no bound."""

    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None

    @classmethod
    def of(cls, hyperparameters: Hyperparameters) -> Clipping | None:
        """The bounds that the hyperparameters set; None if they set none."""
        if not any(name in hyperparameters for name in CLIPS):
            return None
        return cls(**{name: hyperparameters.get(name) for name in CLIPS})

    @property
    def by_element(self) -> bool:
        """Whether it is more than one factor for all gradients of the optimizer."""
        return self.clipvalue is not None or self.clipnorm is not None

    @property
    def has_norm(self) -> bool:
        """Whether a norm of the whole gradient is needed before a part of it can be bounded."""
        return self.clipnorm is not None or self.global_clipnorm is not None

    def bound(self, gradient: Array) -> None:
        """Bound every element, in place."""
        if self.clipvalue is not None:
            limit = gradient.dtype.type(self.clipvalue)
            np.clip(gradient, -limit, limit, out=gradient)

    def total(self, gradients: Sequence[Array], piece: slice, weights: Sequence[float] = ()) -> Array:
        """The weighted sum of a piece of the replicas' gradients, with bounded elements."""
        total = summed([gradient[piece] for gradient in gradients], weights, gradients[0].dtype)
        self.bound(total)
        return total

    def factors(self, squares: Iterable[float]) -> list[float]:
        """The factor for the gradient of each variable, from the squared norms of all.

        Under ``global_clipnorm`` a norm that is not finite makes every gradient NaN, as in TensorFlow.
        """
        found = list(squares)
        if self.clipnorm is not None:
            return [_factor(math.sqrt(square), self.clipnorm) for square in found]
        if self.global_clipnorm is not None:
            norm = math.sqrt(sum(found))
            return [_factor(norm, self.global_clipnorm) if math.isfinite(norm) else math.nan] * len(found)
        return [1.0] * len(found)


#: An optimizer without bounds.
UNBOUNDED = Clipping(None, None, None)


def factors_together(
    clippings: Sequence[Clipping], squares: Sequence[Sequence[float]], bound: float | None, epsilon: float
) -> tuple[list[list[float]], float]:
    """From the squared norms of several optimizers' variables: the factors of the gradients by each optimizer's own
    bounds, and then one more factor for all of them.

    ``bound`` holds for the norm of all gradients together that the bounds of the optimizers have left: the last factor
    is ``min(1, bound / (norm + epsilon))``, as in ``torch.nn.utils.clip_grad_norm_``. The sum of the squares is exact,
    so it does not depend on how the variables are divided among optimizers.
    """
    factors = [clipping.factors(each) for clipping, each in zip(clippings, squares, strict=True)]
    if bound is None:
        return factors, 1.0
    left = [s * f * f for each, own in zip(squares, factors, strict=True) for s, f in zip(each, own, strict=True)]
    norm = math.sqrt(_exact_sum(left)) + epsilon
    ratio = bound / norm if norm else 1.0
    return factors, 1.0 if ratio >= 1 else ratio  # a NaN stays


def _exact_sum(squares: Sequence[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def square_of(gradient: Array) -> float:
    """The squared norm of a piece, in double precision."""
    with np.errstate(all="ignore"):
        wide = gradient.astype(np.complex128 if gradient.dtype.kind == "c" else np.float64)
        return float((wide * wide.conj()).real.sum())


def _factor(norm: float, bound: float) -> float:
    return norm if math.isnan(norm) else bound / max(norm, bound) if bound or norm else 1.0
