"""What trials without or with a few violations say about the rate: an upper bound with 95 % confidence.

Clopper and Pearson (Biometrika 26, 1934): the largest rate p at which ``violations`` or fewer among ``trials`` would
still be seen with a probability of 5 %, that is the root of sum_{i<=v} C(n, i) p^i (1-p)^(n-i) = 0.05. Without any
violation that is 1 - 0.05^(1/n), close to 3/n: the rule of three (Hanley and Lippman-Hand, JAMA 249, 1983).
"""

from __future__ import annotations

import math

__all__ = ["upper_bound"]


def upper_bound(violations: int, trials: int, confidence: float = 0.95) -> float:
    """The one-sided Clopper-Pearson bound of the rate of violations; 1 where nothing was tried.

    >>> round(upper_bound(0, 1000), 6)
    0.002991
    >>> round(upper_bound(2, 100), 4)
    0.0616
    """
    if not 0 <= violations <= trials:
        raise ValueError(f"{violations} violations in {trials} trials")
    if violations == trials:
        return 1.0
    low, high = violations / trials, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if _at_most(violations, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(count: int, trials: int, rate: float) -> float:
    """The probability of ``count`` or fewer among ``trials``, 0 < ``rate`` < 1."""
    if rate in (0.0, 1.0):
        return 1.0 - rate
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(i + 1)
        - math.lgamma(trials - i + 1)
        + i * math.log(rate)
        + (trials - i) * math.log1p(-rate)
        for i in range(count + 1)
    ]
    return math.fsum(map(math.exp, logs))
