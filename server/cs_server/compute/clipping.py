"""Clipping of the summed gradient: by element, by the norm of each variable, by the norm of all variables.

This module owns the meaning of TensorFlow's clip functions: values first, then norms. Norms are added up in double
precision in one order (`norm_kernels`, decision 37), so they do not depend on the number of threads, nor on what
carries out a commit. It knows no rule and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from cs_proto.arithmetic.optimizers import CLIPS, Hyperparameters
from cs_proto.frozen import frozen
from cs_server.rules import Array, summed

from . import norm_kernels

__all__ = ["UNBOUNDED", "Clipping", "factors_together", "square_of", "square_reference"]


_CLIPS = frozenset(CLIPS)


@frozen
class Clipping:
    """The bounds of one optimizer; None means no bound."""

    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None

    @classmethod
    def of(cls, hyperparameters: Hyperparameters) -> Clipping | None:
        """The bounds that the hyperparameters set; None if they set none."""
        if _CLIPS.isdisjoint(hyperparameters):
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
            norm = math.sqrt(_sum(found))
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
    is ``min(1, bound / (norm + epsilon))``, as in ``torch.nn.utils.clip_grad_norm_``. The squares are added up so
    exactly that it does not depend on how the variables are divided among optimizers. `norm_kernels.factors` does the
    same, with the same bits.
    """
    factors = [clipping.factors(each) for clipping, each in zip(clippings, squares, strict=True)]
    if bound is None:
        return factors, 1.0
    left = [s * f * f for each, own in zip(squares, factors, strict=True) for s, f in zip(each, own, strict=True)]
    norm = math.sqrt(_sum(left)) + epsilon
    ratio = bound / norm if norm else 1.0
    return factors, 1.0 if ratio >= 1 else ratio  # a NaN stays


def square_of(gradient: Array) -> float:
    """The squared norm of an array, in double precision, with the bits of `square_reference`."""
    if gradient.dtype in norm_kernels.COMPILED:
        return norm_kernels.square(gradient)
    return square_reference(gradient)


def square_reference(gradient: Array) -> float:
    """The squared norm of an array in plain NumPy: the square of element i is added to partial sum i modulo
    `norm_kernels.LANES`, and then the halves of the partial sums are added until one is left."""
    with np.errstate(all="ignore"):
        squares = np.square(gradient.real, dtype=np.float64).reshape(-1)
        if gradient.dtype.kind == "c":
            squares += np.square(gradient.imag, dtype=np.float64).reshape(-1)
        rest = len(squares) % norm_kernels.LANES
        whole = len(squares) - rest
        partial = squares[:whole].reshape(-1, norm_kernels.LANES).sum(axis=0)  # row by row
        partial[:rest] += squares[whole:]
        while len(partial) > 1:
            half = len(partial) // 2
            partial = partial[:half] + partial[half:]
    return float(partial[0])


def _sum(numbers: Iterable[float]) -> float:
    """The sum of numbers, of which the last bit hardly ever depends on their order: what each addition loses by
    rounding is added up, too. `math.fsum` would be exact, but no kernel has it."""
    found = lost = 0.0
    for number in numbers:
        before, found = found, found + number
        taken = found - before
        lost += (before - (found - taken)) + (number - taken)
    return found + lost if math.isfinite(found) else found


def _factor(norm: float, bound: float) -> float:
    return math.nan if math.isnan(norm) else bound / max(norm, bound) if bound or norm else 1.0
