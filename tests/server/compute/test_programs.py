"""Programs: what each instruction does, by the compiled function and by Python, which agree on any program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from cs_proto.errors import InvalidArgumentError
from cs_runtime import failpoints
from cs_runtime.failpoints import FailpointError, failpoints_of
from cs_server.compute import object_loader, programs
from cs_server.compute.programs import WORDS_PER_INSTRUCTION, Instruction, Op, Program

WORDS = 8


def compiled(program: Program) -> bool:
    return program.run()


def in_python(program: Program) -> bool:
    return program.run_in_python(lambda: None)


ways = pytest.mark.parametrize("run", [compiled, in_python])


class Memory:
    """Some words, and instructions over them, which are written with the numbers of words instead of addresses."""

    def __init__(self, values: Sequence[int]) -> None:
        self.words = np.array(values, np.uint64)
        self._kept: list[object] = [self.words]

    def at(self, word: int) -> int:
        address: int = self.words.ctypes.data
        return address + 8 * word

    def program(self, *instructions: Instruction) -> Program:
        return Program([self._placed(*each) for each in instructions], keep=self._kept)

    def _placed(self, op: Op, a: int, b: int, c: int) -> Instruction:
        if op == Op.CALL:  # a program that adds b to word a
            table = np.array([Op.ADD, self.at(a), b, 0], np.int64)
            callee = programs.compiled()(table)
            self._kept.append(callee)
            return Op.CALL, *callee.call, 0
        return op, self.at(a), b if op == Op.ADD else self.at(b), c


def status_of(code: int) -> tuple[int, Callable[..., int]]:
    """The address of a function that returns this status, and the function."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *words: code)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address, function


LARGEST = (1 << 64) - 1


@ways
@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ((Op.EQUAL, 0, 1, 0), [5, 5, 7, 9]),
        ((Op.ADD, 0, 3, 0), [8, 5, 7, 9]),
        ((Op.ADD, 0, -6, 0), [LARGEST, 5, 7, 9]),
        ((Op.ADD, 0, LARGEST, 0), [4, 5, 7, 9]),
        ((Op.MOVE, 0, 2, 0), [7, 5, 7, 9]),
        ((Op.MOVE, 0, 2, -8), [LARGEST, 5, 7, 9]),
        ((Op.MOVE, 0, 0, 1), [6, 5, 7, 9]),
        ((Op.INVERT, 0, 2, 1), [LARGEST - 8, 5, 7, 9]),
        ((Op.COPY, 0, 2, 16), [7, 9, 7, 9]),
        ((Op.COPY, 0, 2, 0), [5, 5, 7, 9]),
        ((Op.COPY, 1, 0, 16), [5, 5, 5, 9]),  # word by word, from the first
        ((Op.CALL, 3, 2, 0), [5, 5, 7, 11]),
    ],
)
def test_an_instruction(run: Callable[[Program], bool], instruction: Instruction, expected: list[int]) -> None:
    memory = Memory([5, 5, 7, 9])
    assert run(memory.program(instruction)) is True
    assert memory.words.tolist() == expected


@ways
def test_words_that_differ_end_a_program(run: Callable[[Program], bool]) -> None:
    memory = Memory([5, 5, 7])
    program = memory.program((Op.EQUAL, 0, 1, 0), (Op.ADD, 2, 1, 0), (Op.EQUAL, 0, 2, 0), (Op.ADD, 2, 1, 0))
    assert run(program) is False
    assert memory.words.tolist() == [5, 5, 8]


@ways
def test_a_program_without_instructions(run: Callable[[Program], bool]) -> None:
    assert run(Program([])) is True


@ways
def test_a_word_of_an_instruction_can_be_changed_between_two_runs(run: Callable[[Program], bool]) -> None:
    memory = Memory([0, 0])
    program = memory.program((Op.ADD, 0, 1, 0), (Op.MOVE, 1, 0, 10))
    assert run(program)
    program.words[2] = 5
    program.words[WORDS_PER_INSTRUCTION + 3] = -1
    assert run(program)
    assert memory.words.tolist() == [6, 5]


@ways
def test_a_kernel_that_fails_ends_a_program(run: Callable[[Program], bool]) -> None:
    memory = Memory([0])
    address, function = status_of(3)
    program = Program(
        [(Op.ADD, memory.at(0), 1, 0), (Op.CALL, address, memory.at(0), 0), (Op.ADD, memory.at(0), 1, 0)], [function]
    )
    with pytest.raises(RuntimeError, match="ended with status 3"):
        run(program)
    assert memory.words.tolist() == [1]


@ways
def test_an_op_that_was_overwritten_ends_a_program(run: Callable[[Program], bool]) -> None:
    memory = Memory([0, 0])
    program = memory.program((Op.ADD, 0, 1, 0), (Op.ADD, 1, 1, 0))
    program.words[WORDS_PER_INSTRUCTION] = len(Op)
    with pytest.raises(RuntimeError, match="has been overwritten"):
        run(program)
    assert memory.words.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ((6, 8, 8, 0), "there is no op 6"),
        ((Op.EQUAL, 8, 8, 1), "EQUAL has no operand c, but 1 is given"),
        ((Op.ADD, 8, 8, 1), "ADD has no operand c"),
        ((Op.CALL, 8, 8, 1), "CALL has no operand c"),
        ((Op.EQUAL, 12, 8, 0), "EQUAL has 12 as the address of a word"),
        ((Op.EQUAL, 8, 0, 0), "EQUAL has 0 as the address of a word"),
        ((Op.ADD, 9, 1, 0), "ADD has 9 as the address of a word"),
        ((Op.MOVE, -8, 8, 1), "MOVE has -8 as the address of a word"),
        ((Op.INVERT, 8, 1, 1), "INVERT has 1 as the address of a word"),
        ((Op.COPY, 8, 16, 12), "COPY takes whole words, not 12 bytes"),
        ((Op.COPY, 8, 16, -8), "COPY takes whole words, not -8 bytes"),
        ((Op.CALL, 0, 8, 0), "CALL has 0 as the address of a function"),
        ((Op.CALL, 5, 4, 0), "CALL has 4 as the address of a word"),
        ((Op.ADD, 8, 1 << 64, 0), "the operands of ADD have 64 bits"),
    ],
)
def test_what_is_no_instruction(instruction: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^instruction 1: {said}"):
        Program([(Op.ADD, 8, 1, 0), instruction])


def instructions() -> st.SearchStrategy[Instruction]:
    word = st.integers(0, WORDS - 1)
    number = st.integers(-(1 << 63), LARGEST)
    nothing = st.just(0)
    return st.one_of(
        st.tuples(st.just(Op.EQUAL), word, word, nothing),
        st.tuples(st.just(Op.ADD), word, number, nothing),
        st.tuples(st.just(Op.MOVE), word, word, number),
        st.tuples(st.just(Op.INVERT), word, word, number),
        st.tuples(word, word, word).map(
            lambda given: (Op.COPY, given[0], given[1], 8 * min(given[2], WORDS - given[0], WORDS - given[1]))
        ),
        st.tuples(st.just(Op.CALL), word, st.integers(0, 9), nothing),
    )


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, 2) | st.integers(0, LARGEST), min_size=WORDS, max_size=WORDS),
    st.lists(instructions(), max_size=12),
)
def test_both_ways_agree(values: list[int], given: list[Instruction]) -> None:
    found = []
    for run in (compiled, in_python):
        memory = Memory(values)
        found.append((run(memory.program(*given)), memory.words.tolist()))
    assert found[0] == found[1]


def test_with_failpoints_each_instruction_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory([0])
    program = memory.program(*[(Op.ADD, 0, 1, 0)] * 4)
    monkeypatch.setattr(failpoints, "IS_SET", True)
    monkeypatch.setattr(programs, "failpoint", failpoints_of("server.pass=raise@3"))
    with pytest.raises(FailpointError):
        program.run()
    assert memory.words.tolist() == [3]


@pytest.mark.skipif(llvm.get_process_triple().split("-")[0] != "x86_64", reason="reads its instructions")
def test_every_store_is_one_of_a_word() -> None:
    assembly = object_loader.target().emit_assembly(llvm.parse_assembly(programs.code()))
    assert "movq" in assembly
    assert not [name for name in ("xmm", "ymm", "zmm", "memcpy", "memmove", "movs") if name in assembly]
