"""Clipping of the summed gradient: by element, by the norm of each variable, by the norm of all variables.

This module owns the meaning of TensorFlow's clip functions: values first, then norms. Norms are added up in double
precision over pieces of fixed size, so they do not depend on the number of threads. It knows no rule and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cs_proto.arithmetic.optimizers import CLIPS, Hyperparameters
from cs_proto.frozen import frozen
from cs_server.rules import Array, summed

__all__ = ["UNBOUNDED", "Clipping", "Workspace", "factors_together", "square_of"]


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


class Workspace:
    """Memory in which one thread adds up and squares one piece after the other. Memory that is new for each piece would
    take several times as long: the kernel clears its pages."""

    def __init__(self, size: int) -> None:
        """``size`` is the most elements of a piece."""
        self._size = size
        self._squares = np.empty(size)
        self._sums: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def square(
        self, clipping: Clipping, gradients: Sequence[Array], piece: slice, weights: Sequence[float] = ()
    ) -> float:
        """The squared norm of ``clipping.total(gradients, piece, weights)``, bit for bit."""
        dtype = gradients[0].dtype
        if dtype not in (np.float32, np.float64):
            return square_of(clipping.total(gradients, piece, weights))
        if dtype not in self._sums:
            self._sums[dtype] = np.empty(self._size, dtype), np.empty(self._size, dtype)
        count = piece.stop - piece.start
        total, product = (array[:count] for array in self._sums[dtype])
        squares, is_first = self._squares[:count], True
        with np.errstate(all="ignore"):
            for gradient, weight in zip(gradients, weights or [1.0] * len(gradients), strict=True):
                if dtype.type(weight) == 0:
                    continue
                source = gradient[piece]
                if weight != 1:
                    source = np.multiply(source, dtype.type(weight), out=product)
                if is_first:
                    np.copyto(total, source)
                else:
                    np.add(total, source, out=total)
                is_first = False
            if is_first:
                total[:] = 0
            clipping.bound(total)
            np.multiply(total, total, out=squares, dtype=np.float64)
            return float(squares.sum())


def square_of(gradient: Array) -> float:
    """The squared norm of a piece, in double precision."""
    with np.errstate(all="ignore"):
        wide = gradient.astype(np.complex128 if gradient.dtype.kind == "c" else np.float64)
        return float((wide * wide.conj()).real.sum())


def _factor(norm: float, bound: float) -> float:
    return norm if math.isnan(norm) else bound / max(norm, bound) if bound or norm else 1.0
