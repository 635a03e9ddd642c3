"""How many examples of a costly property hypothesis tries."""

from __future__ import annotations

import hypothesis

__all__ = ["examples"]

_USUAL = 100


def examples(count: int) -> int:
    """``count`` in the profile quick, and in the others as many times more or fewer as they try of every property."""
    return max(1, count * hypothesis.settings.default.max_examples // _USUAL)
