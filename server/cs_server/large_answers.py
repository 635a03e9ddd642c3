"""When answers with many bytes of variables are made, so that they delay few steps.

Such an answer is copied between two commits, which takes this thread about 0.5 ms for each megabyte. A step that is
under way waits meanwhile. So after an answer to an observer, the next one waits until 200 steps have gone by: fewer
than one of a hundred waits, however fast observers ask. Where steps take longer than the copy, or where there are none,
no observer waits. This module knows no socket and no clock.
"""

from __future__ import annotations

from cs_proto.messages import Get

__all__ = ["LARGE_NBYTES", "LargeAnswers"]

#: An answer with more bytes of variables is made only when its peer can take it.
LARGE_NBYTES = 64 << 10
# If the question of a large answer comes again within so many seconds, it was sent before the answer arrived.
_REPEATED_WITHIN = 2.0
# So many commits lie between two large answers to observers, unless that takes more than so many seconds: then an
# observer would wait too long.
_COMMITS, _LONGEST = 200, 2.0


class LargeAnswers:
    """The large answers that were made. Used by one thread."""

    def __init__(self) -> None:
        # By peer, the last question that had a large answer, and the time when the answer was sent.
        self._answered: dict[bytes, tuple[Get, float]] = {}
        # Of the last one to an observer: the commits before it, when it was sent, and how many seconds it took.
        self._commits, self._sent_at, self._took = 0, 0.0, 0.0

    def is_repeated(self, peer: bytes, question: object, now: float) -> bool:
        """Whether the answer to ``question`` is on its way."""
        answered, since = self._answered.get(peer, (None, 0.0))
        return question == answered and now - since < _REPEATED_WITHIN

    def may_be_made(self, commits: int, now: float) -> bool:
        """Whether an observer may have a large answer now, after so many commits.

        If nothing has been committed since the last one, another delays the same step.
        """
        since = commits - self._commits
        if since == 0 or since >= _COMMITS:
            return True
        return now - self._sent_at >= min(_LONGEST, since * self._took)

    def made(self, peer: bytes, question: Get, now: float) -> None:
        """An answer was sent."""
        self._answered = {p: each for p, each in self._answered.items() if now - each[1] < _REPEATED_WITHIN}
        self._answered[peer] = question, now

    def made_for_observer(self, commits: int, began: float, now: float) -> None:
        """It has delayed a step since ``began``."""
        took = now - began
        self._took = self._took + took if commits == self._commits else took
        self._commits, self._sent_at = commits, now
