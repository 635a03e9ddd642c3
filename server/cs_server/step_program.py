"""Carries out steps that repeat by a program, while the server waits for mail.

The program looks whether each worker has left the mark of the step. It puts what they brought into the account, carries
out the commit, and leaves the marks of its end. If there are sparse gradients, the marks say where they lie. All that
is prepared while the workers compute. The engine says which step may be carried out so, and hears of it afterwards. If
the marks are of another kind of step than the one that was prepared, that one is prepared then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from cs_proto.codec import MARK_NBYTES
from cs_proto.marks import PLACE_WORDS, Bases, sparse_of
from cs_runtime.trace import moments
from cs_runtime.transport.mailboxes import Mailbox, Mailboxes
from cs_runtime.transport.rings import BODY, LEFT, MARK, next_mark

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
    """A program and what it does after its commit; of what it is made, its own words, the number of the first
    instruction that fills the account, its commit, and where in the page of a mailbox a mark has the places of sparse
    gradients. A program stops after its commit if a sum of gradients was not finite."""

    program: Program
    end: Program
    of: tuple[object, ...]
    words: memoryview
    copies: int
    prepared: Prepared | None
    places: slice


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
        # Of each kind, what its steps had alike and their program, for which everything else was found. That holds
        # until something other than steps by programs is heard.
        self._found: dict[int, tuple[object, _Made]] = {}
        self._ready: tuple[_Made, NextStep] | None = None
        self._expected: list[int] = []
        #: The run of the step that is looked for, or was carried out last.
        self.run = 0

    @property
    def is_ready(self) -> bool:
        """Whether the marks of a step are looked for."""
        return self._mailboxes.attend is not None

    def prepare(self, step: NextStep, bases: Mapping[bytes, Bases]) -> bool:
        """Look for the marks of ``step`` from now on, if each worker may leave one. ``bases`` are those of each peer.
        False if no program can carry out such a step."""
        if self._mailboxes.attend is None:
            self._found.clear()
        alike, made = self._found.get(step.kind, (None, None))
        if made is None or alike is not step.alike:
            found = self._find(step, bases)
            if isinstance(found, bool):
                return found
            self._found[step.kind], made = (step.alike, found), found
        elif made.prepared is not None and step.commit is not None:
            made.prepared.set_numbers(step.commit.operations)
        self._set(made, step)
        self._ready, self.run = (made, step), step.run
        for box in self._boxes:
            box.keeps_marks = True
        self._mailboxes.attend = self._attend
        return True

    def _find(self, step: NextStep, bases: Mapping[bytes, Bases]) -> _Made | bool:
        """The program of a step, in which everything is set that does not change from step to step. False if no program
        can carry out such a step, and True if none can now."""
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
        first = BODY + 2 + bool(step.returns[0].name)
        places = slice(first, first + PLACE_WORDS * (0 if prepared is None else prepared.tables))
        if (places.stop - BODY - 1) * 8 > MARK_NBYTES or (step.commit is not None and not _meet(step, step.commit)):
            return False
        if boxes != self._boxes:
            self._programs.clear()
        self._boxes, self._peers = boxes, step.workers
        variables = () if step.commit is None else [getattr(each, "variables", ()) for each in step.commit.operations]
        made_of = (prepared, variables, step.is_of_series, places)
        made = self._programs.get(step.kind)
        if made is None or made.of != made_of:
            made = self._programs[step.kind] = self._made(step, prepared, places, made_of)
        made.words[_NUMBER] = self._account.number
        for replica, number in enumerate(numbers):
            made.words[_OF_WORKER * replica + _HEAD + _BASE] = number
        return made

    def stop(self) -> None:
        """Let the marks be mail again. Nothing happens if none are looked for."""
        self._mailboxes.stop_attending()

    def _made(self, step: NextStep, prepared: Prepared | None, places: slice, made_of: tuple[object, ...]) -> _Made:
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
        program, ended = Program([*instructions, *end], kept), Program(end, kept)
        return _Made(program, ended, made_of, words.data, copies, prepared, places)

    def _set(self, made: _Made, step: NextStep) -> None:
        """Set what changes from one step to the next."""
        operands, words, run, expected = made.program.words, made.words, step.run, []
        _KIND_WORDS.pack_into(words, 8 * _KIND, step.kind, *step.counts)
        copy, own = made.copies * WORDS_PER_INSTRUCTION, _HEAD
        target = operands[copy + 1] = self._account.kind_address(run)
        target += KIND_NBYTES
        for box in self._boxes:
            mark = words[own + _EXPECTED] = next_mark(box.incoming.mark, run)
            if step.is_of_series:
                words[own + _END] = next_mark(box.outgoing.words[MARK], run)
            expected.append(mark)
            copy, own = copy + WORDS_PER_INSTRUCTION, own + _OF_WORKER
            operands[copy + 1] = target
            target += BODY_NBYTES
        self._expected = expected
        if made.prepared is not None and step.commit is not None:
            made.prepared.set_ticket(step.commit.ticket)

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
        if base != self._ready[0].words[_HEAD + _BASE]:
            self.stop()
            self._on_other(self._peers[0], base)
            if not self.is_ready:
                return True
        made, step = self._ready
        if made.prepared is not None and made.prepared.tables:
            places = [box.incoming.words[made.places].tolist() for box in self._boxes]
            if not made.prepared.take(places):
                self.stop()
                return True
        is_done = made.program.run()
        if not is_done and step.commit is not None:
            number = self._boxes[0].incoming.words[BODY + 2]  # as in marks.returned, where there is a name
            named = (step.returns[0].name, number) if step.returns[0].name else None
            is_done = self._runner.heed_alarm(step.commit, named) and made.end.run()
        if not is_done:  # the step is not the next one, or a base or a mailbox is not what was expected
            self.stop()
            return True
        _moment("committed", self.run)
        for box, expected in zip(self._boxes, self._expected, strict=True):
            box.incoming.mark = expected
        if step.is_of_series:
            self._mailboxes.marked(self._peers)
        self._mailboxes.attend = _nothing  # until the next step is prepared
        self._on_done()
        if self._mailboxes.attend is _nothing:
            self.stop()
        return True


def _nothing() -> bool:
    """What is done at a look for mail while the engine hears of a step."""
    return False


def _meet(step: NextStep, commit: Commit) -> bool:
    """Whether the commit has the sparse gradients in the order in which the marks of the step have their places."""
    rows = [rows for each in commit.operations if isinstance(each, Apply) for u in each.updates for rows in u.sparse]
    for replica, returned in enumerate(step.returns):
        brought = [each.values for each in sparse_of(returned.notes)]
        if [id(each.gradients[replica][0]) for each in rows] != list(map(id, brought)):
            return False
    return True
