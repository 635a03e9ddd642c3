"""Programs: what each instruction does, by the compiled function and by Python, which agree on any program."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
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
from cs_server.compute.helpers import Helper
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


class Helpers:
    """Programs that hand a call to a helper."""

    def __init__(self, memory: Memory) -> None:
        self.helper = Helper()
        self.memory = memory
        self.called_by: list[int] = []

    def program(self, call: Callable[..., int]) -> Program:
        def noted(*words: int) -> int:
            self.called_by.append(threading.get_native_id())
            return call(*words)

        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(noted)
        handed = np.array([ctypes.cast(function, ctypes.c_void_p).value, self.memory.at(0)], np.int64)
        at = self.helper.address
        return Program(
            [
                (Op.HAND, at, handed.ctypes.data, 0),
                (Op.ADD, self.memory.at(1), 1, 0),
                (Op.JOIN, at, 0, 0),
                (Op.MOVE, self.memory.at(2), self.memory.at(0), 0),
            ],
            [function, handed, self.memory],
        )


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    made = Helpers(Memory([0, 0, 0]))
    try:
        yield made
    finally:
        made.helper.close()
        made.helper.close()


@ways
def test_what_is_handed_to_a_helper_is_called_once_before_it_is_joined(
    run: Callable[[Program], bool], helpers: Helpers
) -> None:
    def count(*_: int) -> int:
        helpers.memory.words[0] += 1
        return 0

    program = helpers.program(count)
    for number in range(1, 301):
        assert run(program)
        assert helpers.memory.words.tolist() == [number] * 3
    assert len(helpers.called_by) == 300


@ways
def test_a_call_of_a_helper_that_fails_ends_a_program(run: Callable[[Program], bool], helpers: Helpers) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        run(helpers.program(lambda *_: 3))
    assert helpers.memory.words.tolist() == [0, 1, 0]


def test_a_helper_makes_the_calls_of_a_program_that_is_busy(helpers: Helpers) -> None:
    begun = threading.Event()
    at = helpers.helper.address
    program = helpers.program(lambda *_: begun.set() or 0)
    wait = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: not begun.wait(60))
    words = program.words.tolist()
    own = (Op.CALL, ctypes.cast(wait, ctypes.c_void_p).value, helpers.memory.at(0), 0)
    assert Program([(Op.HAND, at, words[2], 0), own, (Op.JOIN, at, 0, 0)], [program, wait]).run()
    assert helpers.called_by != [threading.get_native_id()]


def test_a_program_makes_the_call_itself_where_the_helper_does_not_run() -> None:
    memory = Memory([0, 0, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: None)
        patch.setattr(threading.Thread, "join", lambda _: None)
        helpers = Helpers(memory)
        program = helpers.program(lambda *_: 0)
        for _ in range(3):
            assert program.run()
        helpers.helper.close()
    assert helpers.called_by == [threading.get_native_id()] * 3


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
        ((8, 8, 8, 0), "there is no op 8"),
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
        ((Op.HAND, 8, 8, 1), "HAND has no operand c"),
        ((Op.HAND, 8, 4, 0), "HAND has 4 as the address of a word"),
        ((Op.JOIN, 8, 1, 0), "JOIN has no operand b"),
        ((Op.JOIN, 4, 0, 0), "JOIN has 4 as the address of a word"),
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
    monkeypatch.setattr(failpoints, "STOPS_IN_PROGRAMS", True)
    monkeypatch.setattr(programs, "failpoint", failpoints_of("server.pass=raise@3"))
    with pytest.raises(FailpointError):
        program.run()
    assert memory.words.tolist() == [3]


@pytest.mark.skipif(llvm.get_process_triple().split("-")[0] != "x86_64", reason="reads its instructions")
def test_every_store_is_one_of_a_word() -> None:
    assembly = object_loader.target().emit_assembly(llvm.parse_assembly(programs.code()))
    assert "movq" in assembly
    assert not [name for name in ("xmm", "ymm", "zmm", "memcpy", "memmove", "movs") if name in assembly]
