"""The step that is being captured, as far as all its replicas have asked something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cs_proto import codec
from cs_proto.messages import Ask, Reduced, Return
from cs_proto.records import replace
from cs_server.events import Received

from .step_kinds import Shape
from .store.tables import CapturedStep, Tables, joined
from .stored_steps import OPEN

__all__ = ["Held", "OpenStep", "whole"]


class Held(NamedTuple):
    """A return or a question that waits for those of the other replicas."""

    event: Received
    record: Return | Ask
    now: float
    shape: Shape


def whole(held: Sequence[Held]) -> CapturedStep:
    """These messages as the store has them."""
    heard = tuple([joined(each.event.parts or codec.encode(each.record)) for each in held])
    return CapturedStep(0, tuple([each.now for each in held]), heard)


class OpenStep:
    """The questions that all replicas have asked in the current step, round by round, and their answers.

    A round is written down before it is computed. Its answer is written with the next round: until then another server
    computes it again.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        #: The questions, those of each round as they came.
        self.asked: list[Held] = []
        #: The places of the rounds in the store.
        self.places: list[tuple[int, int]] = []
        #: The bytes of the questions.
        self.nbytes = 0

    def shape(self, replica: int) -> Shape:
        """The shape of what a replica has brought with its questions."""
        return next((held.shape for held in reversed(self.asked) if held.record.replica == replica), ())

    def brought(self, ends: Sequence[Held]) -> list[list[Any]]:
        """The notes that the replicas have brought with their questions and their returns ``ends``, by replica."""
        found: dict[int, list[Any]] = {held.record.replica: [] for held in ends}
        for held in (*self.asked, *ends):
            found[held.record.replica] += held.record.notes
        return [found[held.record.replica] for held in ends]

    def ended(self, ends: Sequence[Held], count: int) -> CapturedStep:
        """The step with the returns of all replicas, as the ``count``-th of its kind."""
        rounds = [*[self._tables.captured[place] for place in self.places], whole(ends)]
        since = [now for each in rounds for now in each.since]
        return CapturedStep(count, tuple(since), tuple([message for each in rounds for message in each.heard]))

    def ask(self, held: Sequence[Held], asked: CapturedStep) -> None:
        """Write a round down, and the answer to the one before it. Raises ControlFull; then nothing is written."""
        place = OPEN, len(self.places)
        before = {last: self._tables.captured[last] for last in self.places[-1:]}
        self._tables.write_captured({**before, place: asked})
        self.asked += held
        self.places.append(place)
        self.nbytes += sum(map(len, asked.heard))

    def answer(self, reduced: Reduced) -> None:
        """Keep the answer to the last round."""
        captured, place = self._tables.captured, self.places[-1]
        step = captured[place]
        heard = (*step.heard, joined(codec.encode(reduced)))
        captured.load(place, replace(step, since=(*step.since, step.since[-1]), heard=heard))
