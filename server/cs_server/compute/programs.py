"""Programs: lists of instructions over words of memory, which one compiled function carries out in one call.

What a server does in every step of a series can be prepared while the replicas compute, so that no Python runs between
their last word and the commit. A word has 8 bytes and lies at a multiple of 8. Every instruction but `Op.CALL` changes
memory by single stores of one word, in the order of the program. So a process that is killed has done all of them up to
one and none after it, and another process sees them in this order. LLVM keeps it, because the stores release and the
loads acquire; on x86-64 that takes no other instruction.

A call that is handed to a helper is made between its `Op.HAND` and its `Op.JOIN`, in no order with what lies between.
So it shares no memory with these instructions, and each HAND has its JOIN.

A program trusts its maker with addresses. It holds no lock, and not the GIL. It knows no commits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import TypeAlias

import numpy as np

from cs_proto.errors import InvalidArgumentError
from cs_runtime import failpoints
from cs_runtime.failpoints import failpoint

from . import helpers, object_loader

__all__ = ["WORDS_PER_INSTRUCTION", "Instruction", "Op", "Program", "code", "compiled"]


class Op(IntEnum):
    """What an instruction ``(op, a, b, c)`` does; ``[a]`` is the word at address ``a``. What is not named is 0."""

    EQUAL = 0
    """End the program here, with the result False, unless ``[a]`` and ``[b]`` are equal."""
    ADD = 1
    """Add ``b`` to ``[a]``, modulo 2**64."""
    MOVE = 2
    """Set ``[a]`` to ``[b] + c``, modulo 2**64."""
    INVERT = 3
    """Set ``[a]`` to ``~([b] + c)``."""
    COPY = 4
    """Copy ``c`` bytes, a multiple of 8, from ``b`` to ``a``, word by word from the first to the last."""
    CALL = 5
    """Call the function at ``a`` with the words at ``b``, as `object_loader.Bound.call` has them. A status other than 0
    ends the program with an error."""
    HAND = 6
    """Hand the helper at ``a`` a call: at ``b`` are the addresses of the function and of its words, as in CALL."""
    JOIN = 7
    """Wait until the call that the helper at ``a`` was handed last is done, or make it, if the helper has not begun. A
    status other than 0 ends the program with an error."""


Instruction: TypeAlias = tuple[Op, int, int, int]

WORDS_PER_INSTRUCTION = 4
"""Of instruction k of a program, word ``4 * k`` is the op, and those after it are a, b and c."""

# What the compiled function returns where an EQUAL ends the program, and where an op has been overwritten. No kernel
# returns either.
_UNEQUAL, _UNKNOWN = -(1 << 31), -(1 << 31) + 1
_WORD_NBYTES = 8


class Program:
    """Instructions that can be carried out any number of times.

    `words` is a memoryview of int64, with `WORDS_PER_INSTRUCTION` for each instruction: between two runs, a store
    there changes an operand, which is not checked. ::

        counter = np.zeros(1, np.int64)
        program = Program([(Op.ADD, counter.ctypes.data, 1, 0)], keep=[counter])
        program.run()  # True, and counter is [1]
        program.words[2] = 5
        program.run()  # True, and counter is [6]
    """

    def __init__(self, instructions: Sequence[Instruction], keep: Sequence[object] = ()) -> None:
        """``keep`` lives as long as the program: whatever has the memory at its addresses.

        Raises InvalidArgumentError if an instruction is none.
        """
        for number, instruction in enumerate(instructions):
            _check(number, instruction)
        table = np.array([(op, _signed(a), _signed(b), _signed(c)) for op, a, b, c in instructions], np.int64)
        table = table.reshape(-1)
        self.words = table.data
        self._bound = compiled()(table)
        self._bound.keep([*keep, table])

    @property
    def call(self) -> tuple[int, int]:
        """The addresses of the function and of its words, as a helper is handed them."""
        return self._bound.call

    def run(self) -> bool:
        """Carry out the instructions; False if an EQUAL ended the program. Raises RuntimeError if a kernel fails.

        Where the failpoint "server.pass" is set, Python carries them out, and passes it after each.
        """
        if failpoints.STOPS_IN_PROGRAMS:
            return self.run_in_python(lambda: failpoint("server.pass"))
        status = self._bound.status()
        if status == _UNEQUAL:
            return False
        if status:
            raise _failure(status)
        return True

    def run_in_python(self, after: Callable[[], None]) -> bool:
        """As `run`, by Python, which calls ``after`` after each instruction that does not end the program."""
        words = self.words.tolist()
        for first in range(0, len(words), WORDS_PER_INSTRUCTION):
            if not _carried_out(*words[first : first + WORDS_PER_INSTRUCTION]):
                return False
            after()
        return True


def _check(number: int, instruction: Instruction) -> None:
    op, a, b, c = instruction
    spare = {op: {"c": c} for op in (Op.EQUAL, Op.ADD, Op.CALL, Op.HAND)} | {Op.JOIN: {"b": b, "c": c}}
    words = {Op.ADD: (a,), Op.CALL: (b,), Op.JOIN: (a,)}
    if op not in list(Op):
        raise InvalidArgumentError(f"instruction {number}: there is no op {op}")
    name = Op(op).name
    if not all(-(1 << 63) <= operand < 1 << 64 for operand in (a, b, c)):
        raise InvalidArgumentError(f"instruction {number}: the operands of {name} have 64 bits, not {(a, b, c)}")
    for operand, given in spare.get(op, {}).items():
        if given:
            raise InvalidArgumentError(f"instruction {number}: {name} has no operand {operand}, but {given} is given")
    for address in words.get(op, (a, b)):
        if address <= 0 or address % _WORD_NBYTES:
            raise InvalidArgumentError(f"instruction {number}: {name} has {address} as the address of a word")
    if op == Op.CALL and a <= 0:
        raise InvalidArgumentError(f"instruction {number}: CALL has {a} as the address of a function")
    if op == Op.COPY and (c < 0 or c % _WORD_NBYTES):
        raise InvalidArgumentError(f"instruction {number}: COPY takes whole words, not {c} bytes")


def _failure(status: int) -> RuntimeError:
    if status == _UNKNOWN:
        return RuntimeError("an op of a program has been overwritten")
    return RuntimeError(f"a kernel of a program ended with status {status}")


def _signed(operand: int) -> int:
    return operand - (1 << 64) if operand >= 1 << 63 else operand


def _carried_out(op: int, a: int, b: int, c: int) -> bool:
    """Carry out an instruction; False if it ends the program."""
    word = ctypes.c_int64.from_address  # a store through it is one of 8 bytes, modulo 2**64
    match op:
        case Op.EQUAL:
            return word(a).value == word(b).value
        case Op.ADD:
            word(a).value += b
        case Op.MOVE:
            word(a).value = word(b).value + c
        case Op.INVERT:
            word(a).value = ~(word(b).value + c)
        case Op.COPY:
            for at in range(0, c, _WORD_NBYTES):
                word(a + at).value = word(b + at).value
        case Op.CALL:
            if status := object_loader.call(a, b):
                raise _failure(status)
        case Op.HAND:
            helpers.hand(a, b)
        case Op.JOIN:
            if status := helpers.join(a):
                raise _failure(status)
        case _:
            raise _failure(_UNKNOWN)
    return True


@cache
def compiled() -> object_loader.Bind:
    """The function that carries out a program. Its array is the table of the instructions."""
    return object_loader.assembled(code())


def code() -> str:
    """The same function in LLVM's language."""
    return helpers.DECLARATIONS + _CODE.format(symbol=object_loader.SYMBOL, unequal=_UNEQUAL, unknown=_UNKNOWN)


# A program is called as a kernel is, and calls kernels so.
_CODE = """
define i32 @{symbol}(ptr %result, ptr %raised, ptr %given) {{
entry:
  %table = load ptr, ptr %given
  %length.at = getelementptr i64, ptr %given, i64 1
  %length = load i64, ptr %length.at
  %end = getelementptr i64, ptr %table, i64 %length
  br label %next
next:
  %instruction = phi ptr [ %table, %entry ], [ %following, %done ]
  %is.end = icmp eq ptr %instruction, %end
  br i1 %is.end, label %ended, label %read
read:
  %a.at = getelementptr i64, ptr %instruction, i64 1
  %b.at = getelementptr i64, ptr %instruction, i64 2
  %c.at = getelementptr i64, ptr %instruction, i64 3
  %op = load i64, ptr %instruction
  %a = load i64, ptr %a.at
  %b = load i64, ptr %b.at
  %c = load i64, ptr %c.at
  %target = inttoptr i64 %a to ptr
  %source = inttoptr i64 %b to ptr
  switch i64 %op, label %unknown [
    i64 0, label %equal
    i64 1, label %add
    i64 2, label %move
    i64 3, label %invert
    i64 4, label %copy
    i64 5, label %call
    i64 6, label %hand
    i64 7, label %join
  ]
done:
  %following = getelementptr i64, ptr %instruction, i64 4
  br label %next

equal:
  %one = load atomic volatile i64, ptr %target acquire, align 8
  %other = load atomic volatile i64, ptr %source acquire, align 8
  %is.equal = icmp eq i64 %one, %other
  br i1 %is.equal, label %done, label %unequal
add:
  %before = load atomic volatile i64, ptr %target acquire, align 8
  %sum = add i64 %before, %b
  store atomic volatile i64 %sum, ptr %target release, align 8
  br label %done
move:
  %moved = load atomic volatile i64, ptr %source acquire, align 8
  %shifted = add i64 %moved, %c
  store atomic volatile i64 %shifted, ptr %target release, align 8
  br label %done
invert:
  %taken = load atomic volatile i64, ptr %source acquire, align 8
  %plain = add i64 %taken, %c
  %inverse = xor i64 %plain, -1
  store atomic volatile i64 %inverse, ptr %target release, align 8
  br label %done
copy:
  %words = lshr i64 %c, 3
  br label %copy.next
copy.next:
  %word = phi i64 [ 0, %copy ], [ %word.next, %copy.word ]
  %is.copied = icmp eq i64 %word, %words
  br i1 %is.copied, label %done, label %copy.word
copy.word:
  %from = getelementptr i64, ptr %source, i64 %word
  %to = getelementptr i64, ptr %target, i64 %word
  %copied = load atomic volatile i64, ptr %from acquire, align 8
  store atomic volatile i64 %copied, ptr %to release, align 8
  %word.next = add i64 %word, 1
  br label %copy.next
call:
  %status = call i32 %target(ptr %result, ptr %raised, ptr %source)
  %is.good = icmp eq i32 %status, 0
  br i1 %is.good, label %done, label %failed
hand:
  call void @hand(ptr %target, ptr %source)
  br label %done
join:
  %joined = call i32 @join(ptr %target, ptr %result, ptr %raised)
  %is.joined = icmp eq i32 %joined, 0
  br i1 %is.joined, label %done, label %failed

ended:
  ret i32 0
unequal:
  ret i32 {unequal}
failed:
  %reason = phi i32 [ %status, %call ], [ %joined, %join ]
  ret i32 %reason
unknown:
  ret i32 {unknown}
}}
"""
