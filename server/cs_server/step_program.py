"""Carries out steps that repeat by a program, while the server waits for mail.

The program looks whether each worker has left the mark of the step. It puts what they brought into the account, carries
out the commit, and leaves the marks of its end. All that is prepared while the workers compute. The engine says which
step may be carried out so, and hears of it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cs_proto.messages import Return
from cs_runtime.trace import moments
from cs_runtime.transport.mailboxes import Mailbox, Mailboxes
from cs_runtime.transport.rings import BODY, LEFT, MARK

from .command_runner import CommandRunner
from .compute.prepared import Prepared
from .compute.programs import WORDS_PER_INSTRUCTION, Instruction, Op, Program
from .engine.captured_steps import NextStep
from .engine.store.account import BODY_NBYTES, Account

__all__ = ["StepProgram"]

_moment = moments("server")

# The words of a program of its own: a zero, the number of the account, and then three of each worker.
_ZERO, _NUMBER, _HEAD = 0, 1, 2
_EXPECTED, _END, _BASE, _OF_WORKER = 0, 1, 2, 3


class StepProgram:
    """The program of one server. Used by one thread."""

    def __init__(
        self, mailboxes: Mailboxes[bytes], runner: CommandRunner, account: Account, on_done: Callable[[], object]
    ) -> None:
        """``on_done`` is called when the program has carried out a step. It may call :meth:`prepare`."""
        self._mailboxes = mailboxes
        self._runner = runner
        self._account = account
        self._on_done = on_done
        self._peers: tuple[bytes, ...] = ()
        self._boxes: list[Mailbox] = []
        self._program: Program | None = None
        # Of what the program is made.
        self._made_of: tuple[object, ...] = ()
        self._words = np.zeros(0, np.uint64).data
        self._expected: list[int] = []
        self._is_of_series = False
        #: The run of the step that is looked for, or was carried out last.
        self.run = 0
        self._copies = 0  # the number of the first instruction that fills the account

    @property
    def is_ready(self) -> bool:
        """Whether the marks of a step are looked for."""
        return self._mailboxes.attend is not None

    def prepare(self, step: NextStep, bases: Mapping[bytes, Return]) -> bool:
        """Look for the marks of ``step`` from now on, if each worker may leave one. ``bases`` are the Returns to which
        they refer, by peer. False if no program can carry out such a step."""
        boxes = [self._mailboxes.box(peer) for peer in step.workers]
        if None in boxes or not all(peer in bases for peer in step.workers):
            return True
        prepared = None
        if step.commit is not None and (prepared := self._runner.prepare(step.commit)) is None:
            return False
        variables = () if step.commit is None else [getattr(each, "variables", ()) for each in step.commit.operations]
        made_of = (*boxes, prepared, variables, step.is_of_series)
        if made_of != self._made_of:
            self._make([box for box in boxes if box is not None], step, prepared)
            self._made_of = made_of
        self._peers, self.run = step.workers, step.run
        self._set(step, prepared, bases)
        for box in self._boxes:
            box.keeps_marks = True
        self._mailboxes.attend = self._attend
        return True

    def stop(self) -> None:
        """Let the marks be mail again. Nothing happens if none are looked for."""
        self._mailboxes.stop_attending()

    def _make(self, boxes: list[Mailbox], step: NextStep, prepared: Prepared | None) -> None:
        self._boxes, self._is_of_series = boxes, step.is_of_series
        words = np.zeros(_HEAD + _OF_WORKER * len(boxes), np.uint64)
        self._words = words.data
        address = words.__array_interface__["data"][0]
        own = [address + 8 * (_HEAD + _OF_WORKER * replica) for replica in range(len(boxes))]
        # Whatever the engine has heard since the step was prepared comes before it, and renews the account.
        instructions: list[Instruction] = [(Op.EQUAL, self._account.number_address, address + 8 * _NUMBER, 0)]
        for box, first in zip(boxes, own, strict=True):
            instructions.append((Op.EQUAL, box.address(MARK, is_incoming=True), first + 8 * _EXPECTED, 0))
            instructions.append((Op.EQUAL, box.address(BODY + 1, is_incoming=True), first + 8 * _BASE, 0))
            instructions.append((Op.EQUAL, box.address(LEFT, is_incoming=False), address + 8 * _ZERO, 0))
        self._copies = len(instructions)
        for box in boxes:
            body = self._account.body_address(0, 0)  # set for each step
            instructions.append((Op.COPY, body, box.address(BODY, is_incoming=True), BODY_NBYTES))
        instructions.append((Op.ADD, self._account.begun_address, 1, 0))
        if step.commit is not None and prepared is not None:
            instructions += self._runner.instructions(step.commit, prepared)
        if step.is_of_series:
            for box, first in zip(boxes, own, strict=True):
                instructions.append((Op.MOVE, box.address(MARK, is_incoming=False), first + 8 * _END, 0))
        self._program = Program(instructions, [words, self._account, prepared, *boxes])

    def _set(self, step: NextStep, prepared: Prepared | None, bases: Mapping[bytes, Return]) -> None:
        """Set what changes from one step to the next."""
        if step.commit is not None and prepared is not None:
            prepared.set_ticket(step.commit.ticket)
        assert self._program is not None
        operands, words, run = self._program.words, self._words, step.run
        words[_NUMBER] = self._account.number
        self._expected = [box.incoming.next_mark(run) for box in self._boxes]
        for replica, (box, peer) in enumerate(zip(self._boxes, step.workers, strict=True)):
            first = _OF_WORKER * replica + _HEAD
            words[first + _EXPECTED] = self._expected[replica]
            words[first + _END] = box.outgoing.next_mark(run)
            words[first + _BASE] = bases[peer].run[0]
            operands[(self._copies + replica) * WORDS_PER_INSTRUCTION + 1] = self._account.body_address(run, replica)

    def _attend(self) -> bool:
        """Carry out the step if all marks are there. Whether there was something to do."""
        assert self._program is not None
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
        _moment("found", self.run)
        is_done = self._program.run()
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
