"""Carries out steps that repeat by a program, while the server waits for mail.

The program looks whether each worker has left the mark of the step. It puts what they brought into the account, carries
out the commit, and leaves the marks of its end. If there are sparse gradients, the marks say where they lie. All that
is prepared while the workers compute. The engine says which step may be carried out so, and hears of it afterwards. If
the marks are of another kind of step than the one that was prepared, that one is prepared then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cs_proto.codec import MARK_NBYTES
from cs_proto.marks import PLACE_WORDS, Bases, sparse_of
from cs_runtime.trace import moments
from cs_runtime.transport.mailboxes import Mailbox, Mailboxes
from cs_runtime.transport.rings import BODY, LEFT, MARK

from .command_runner import CommandRunner
from .compute.prepared import Prepared
from .compute.programs import WORDS_PER_INSTRUCTION, Instruction, Op, Program
from .engine.step_plans import NextStep
from .engine.store.account import BODY_NBYTES, KIND_NBYTES, KINDS, Account
from .events import Apply, Commit

__all__ = ["StepProgram"]

_moment = moments("server")

# The words of a program of its own: a zero, the number of the account, what the account has of the kind, and then three
# of each worker.
_ZERO, _NUMBER, _KIND = 0, 1, 2
_HEAD = _KIND + 1 + KINDS
_EXPECTED, _END, _BASE, _OF_WORKER = 0, 1, 2, 3
_KIND_WORDS = struct.Struct(f"{1 + KINDS}Q")


class _Made(NamedTuple):
    """A program and what it does after its commit; of what it is made, its own words, and the number of the first
    instruction that fills the account. A program stops after its commit if a sum of gradients was not finite."""

    program: Program
    end: Program
    of: tuple[object, ...]
    words: memoryview
    copies: int


class StepProgram:
    """The programs of one server, one for each kind of step. Used by one thread."""

    def __init__(
        self,
        mailboxes: Mailboxes[bytes],
        runner: CommandRunner,
        account: Account,
        on_done: Callable[[], object],
        on_other: Callable[[bytes, int], object],
    ) -> None:
        """``on_done`` is called when a program has carried out a step. ``on_other`` is called with the first worker and
        the number of its base if that is not the base of the step that is prepared. Both may call :meth:`prepare`."""
        self._mailboxes = mailboxes
        self._runner = runner
        self._account = account
        self._on_done = on_done
        self._on_other = on_other
        self._peers: tuple[bytes, ...] = ()
        self._boxes: list[Mailbox] = []
        self._programs: dict[int, _Made] = {}  # by kind
        self._ready: _Made | None = None
        self._commit: Commit | None = None
        self._prepared: Prepared | None = None
        self._name = ""
        # Where in the page of a mailbox a mark has the places of sparse gradients.
        self._places = slice(0)
        self._expected: list[int] = []
        self._is_of_series = False
        #: The run of the step that is looked for, or was carried out last.
        self.run = 0

    @property
    def is_ready(self) -> bool:
        """Whether the marks of a step are looked for."""
        return self._mailboxes.attend is not None

    def prepare(self, step: NextStep, bases: Mapping[bytes, Bases]) -> bool:
        """Look for the marks of ``step`` from now on, if each worker may leave one. ``bases`` are those of each peer.
        False if no program can carry out such a step."""
        boxes = [box for peer in step.workers if (box := self._mailboxes.box(peer)) is not None]
        numbers: list[int] = []
        for peer, each in zip(step.workers, step.returns, strict=True):
            base = bases[peer].find(each.series, each.lookahead, each.notes, each.count, each.name)
            if base is not None and base.name == each.name:  # the bytes of its marks have the same places
                numbers.append(base.run[0])
        if not len(boxes) == len(numbers) == len(step.workers):
            return True
        prepared = None
        if step.commit is not None and (prepared := self._runner.prepare(step.commit)) is None:
            return False
        name = step.returns[0].name
        first = BODY + 2 + bool(name)
        places = slice(first, first + PLACE_WORDS * (0 if prepared is None else prepared.tables))
        if (places.stop - BODY - 1) * 8 > MARK_NBYTES or (step.commit is not None and not _meet(step, step.commit)):
            return False
        if boxes != self._boxes:
            self._programs.clear()
        self._boxes, self._peers, self.run, self._is_of_series = boxes, step.workers, step.run, step.is_of_series
        variables = () if step.commit is None else [getattr(each, "variables", ()) for each in step.commit.operations]
        made_of = (prepared, variables, step.is_of_series)
        made = self._programs.get(step.kind)
        if made is None or made.of != made_of:
            made = self._programs[step.kind] = self._made(step, prepared, made_of)
        self._set(made, step, numbers)
        if step.commit is not None and prepared is not None:
            prepared.set_ticket(step.commit.ticket)
        self._ready, self._commit, self._name = made, step.commit, name
        self._prepared, self._places = prepared, places
        for box in boxes:
            box.keeps_marks = True
        self._mailboxes.attend = self._attend
        return True

    def stop(self) -> None:
        """Let the marks be mail again. Nothing happens if none are looked for."""
        self._mailboxes.stop_attending()

    def _made(self, step: NextStep, prepared: Prepared | None, made_of: tuple[object, ...]) -> _Made:
        boxes = self._boxes
        words = np.zeros(_HEAD + _OF_WORKER * len(boxes), np.uint64)
        address = words.__array_interface__["data"][0]
        own = [address + 8 * (_HEAD + _OF_WORKER * replica) for replica in range(len(boxes))]
        # Whatever the engine has heard since the step was prepared comes before it, and renews the account.
        instructions: list[Instruction] = [(Op.EQUAL, self._account.number_address, address + 8 * _NUMBER, 0)]
        for box, first in zip(boxes, own, strict=True):
            instructions.append((Op.EQUAL, box.address(MARK, is_incoming=True), first + 8 * _EXPECTED, 0))
            instructions.append((Op.EQUAL, box.address(BODY + 1, is_incoming=True), first + 8 * _BASE, 0))
            instructions.append((Op.EQUAL, box.address(LEFT, is_incoming=False), address + 8 * _ZERO, 0))
        copies = len(instructions)
        # The targets are set for each step.
        instructions.append((Op.COPY, self._account.kind_address(0), address + 8 * _KIND, KIND_NBYTES))
        for replica, box in enumerate(boxes):
            body = self._account.body_address(0, replica)
            instructions.append((Op.COPY, body, box.address(BODY, is_incoming=True), BODY_NBYTES))
        instructions.append((Op.ADD, self._account.begun_address, 1, 0))
        if step.commit is not None and prepared is not None:
            instructions += self._runner.instructions(step.commit, prepared)
            instructions.append((Op.EQUAL, prepared.alarm_address, address + 8 * _ZERO, 0))
        end: list[Instruction] = []
        if step.is_of_series:
            for box, first in zip(boxes, own, strict=True):
                end.append((Op.MOVE, box.address(MARK, is_incoming=False), first + 8 * _END, 0))
        kept = [words, self._account, prepared, *boxes]
        return _Made(Program([*instructions, *end], kept), Program(end, kept), made_of, words.data, copies)

    def _set(self, made: _Made, step: NextStep, bases: Sequence[int]) -> None:
        """Set what changes from one step to the next."""
        operands, words, run = made.program.words, made.words, step.run
        words[_NUMBER] = self._account.number
        _KIND_WORDS.pack_into(words, 8 * _KIND, step.kind, *step.counts)
        targets = [self._account.kind_address(run)]
        self._expected = [box.incoming.next_mark(run) for box in self._boxes]
        for replica, (box, base) in enumerate(zip(self._boxes, bases, strict=True)):
            first = _OF_WORKER * replica + _HEAD
            words[first + _EXPECTED] = self._expected[replica]
            words[first + _END] = box.outgoing.next_mark(run)
            words[first + _BASE] = base
            targets.append(self._account.body_address(run, replica))
        for number, target in enumerate(targets, made.copies):
            operands[number * WORDS_PER_INSTRUCTION + 1] = target

    def _attend(self) -> bool:
        """Carry out the step if all marks are there. Whether there was something to do."""
        are_there = True
        for box, expected in zip(self._boxes, self._expected, strict=True):
            word = box.incoming.words[MARK]
            if word != expected:
                if word != box.incoming.mark:
                    self.stop()  # the mark is of another step
                    return True
                are_there = False
        if not are_there:
            return False
        assert self._ready is not None
        _moment("found", self.run)
        base = self._boxes[0].incoming.words[BODY + 1]
        if base != self._ready.words[_HEAD + _BASE]:
            self.stop()
            self._on_other(self._peers[0], base)
            if not self.is_ready:
                return True
        if self._prepared is not None and self._prepared.tables:
            places = [box.incoming.words[self._places].tolist() for box in self._boxes]
            if not self._prepared.take(places):
                self.stop()
                return True
        is_done = self._ready.program.run()
        if not is_done and self._commit is not None:
            number = self._boxes[0].incoming.words[BODY + 2]  # as in marks.returned, where there is a name
            named = (self._name, number) if self._name else None
            is_done = self._runner.heed_alarm(self._commit, named) and self._ready.end.run()
        self.stop()
        if not is_done:  # the step is not the next one, or a base or a mailbox is not what was expected
            return True
        _moment("committed", self.run)
        for box, expected in zip(self._boxes, self._expected, strict=True):
            box.incoming.mark = expected
        if self._is_of_series:
            self._mailboxes.marked(self._peers)
        self._on_done()
        return True


def _meet(step: NextStep, commit: Commit) -> bool:
    """Whether the commit has the sparse gradients in the order in which the marks of the step have their places."""
    rows = [rows for each in commit.operations if isinstance(each, Apply) for u in each.updates for rows in u.sparse]
    for replica, returned in enumerate(step.returns):
        brought = [each.values for each in sparse_of(returned.notes)]
        if [id(each.gradients[replica][0]) for each in rows] != list(map(id, brought)):
            return False
    return True
