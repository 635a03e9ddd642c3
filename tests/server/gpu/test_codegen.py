"""The generated source itself: compiled as plain C it has the bits of the reference; nvcc takes it as CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.cupy_stand_in.c_kernels import COMPILER, compiled
from tests.harness.updates import ELEMENTWISE
from tests.server.compute.test_kernels import HYPERPARAMETERS, assert_same_bits, state_of

from cs_proto.arithmetic.optimizers import ROWWISE
from cs_proto.errors import InvalidArgumentError
from cs_proto.memory_plan import GPU_DTYPES
from cs_server.gpu import codegen
from cs_server.rules import RULES, Array, Rule, computed_in, reference, scalars, squares

NVCC, PTXAS = shutil.which("nvcc"), shutil.which("ptxas")
STEPS = 5

needs_gcc = pytest.mark.skipif(COMPILER is None, reason="no gcc here to compile the kernels as plain C")


def pieces_of(
    ranges: Sequence[tuple[int, int]],
    arrays: Sequence[Array],
    *,
    moves: bool,
    factor: float,
    weights: Sequence[float] = (1.0,),
) -> Array:
    """A table for an update of these ranges of arrays: the variable, slots, gradients, and weights of these."""
    factor_and_weights = np.array([factor, *weights], np.float64).view(np.int64)
    rows = [
        [
            stop - start,
            moves,
            factor_and_weights[0],
            *(a.ctypes.data + start * a.itemsize for a in arrays),
            *factor_and_weights[1:],
        ]
        for start, stop in ranges
    ]
    return np.array(rows, np.int64)


@pytest.mark.parametrize("name", sorted(ROWWISE))
def test_a_rule_of_rows_has_no_kernel(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} has no kernel for GPUs"):
        codegen.update(RULES[name], "float32")


def launch(rule: Rule, pieces: Array, dtype: str, replicas: int, t: int, limit: float = np.inf) -> None:
    number = computed_in(dtype)
    assert pieces.shape[1] == codegen.width_of(rule, replicas)
    compiled(codegen.update(rule, dtype))[codegen.update_name(rule, dtype)](
        (len(pieces),),
        (codegen.THREADS,),
        (pieces.ctypes.data, np.int32(replicas), number.type(limit), *scalars(rule, HYPERPARAMETERS, t, number)),
    )


@needs_gcc
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_translated_rule_has_the_bits_of_the_reference(name: str, dtype: str) -> None:
    rule = RULES[name]
    parameters, slots, gradients = state_of(rule, 1000, dtype, 3)
    if dtype == "float16":
        parameters, *gradients = (np.clip(a, -4, 4).astype(dtype) for a in (parameters, *gradients))  # no overflow
    ranges = [(1, 300), (300, 301), (303, 1000)]
    expected = [array.copy() for array in (parameters, *slots)]
    ones = [1.0] * len(gradients)
    pieces = pieces_of(ranges, (parameters, *slots, *gradients), moves=True, factor=1.0, weights=ones)
    for t in range(1, STEPS + 1):
        launch(rule, pieces, dtype, len(gradients), t)
        for start, stop in ranges:
            w, *s = (array[start:stop] for array in expected)
            reference(rule, w, [g[start:stop] for g in gradients], tuple(s), HYPERPARAMETERS, t)
    for found, wanted in zip((parameters, *slots), expected, strict=True):
        if rule.is_compiled:
            assert_same_bits(found, wanted)
        else:  # the power of two libraries differs in its last digit, and differences of powers in more
            np.testing.assert_allclose(found, wanted, rtol={"float64": 1e-9, "float32": 1e-4}.get(dtype, 4e-3))


@needs_gcc
def test_bound_factor_and_what_does_not_move() -> None:
    rule, g = RULES["sgd_momentum"], np.array([5.0, -5.0, np.nan, 0.5], "float32")
    w, m = np.ones(4, "float32"), np.zeros(4, "float32")
    launch(rule, pieces_of([(0, 4)], (w, m, g), moves=False, factor=0.5), "float32", 1, 1, limit=2.0)
    assert w.tolist() == [1, 1, 1, 1]
    expected = np.zeros(4, "float32")
    bounded = (np.clip(g, np.float32(-2), np.float32(2)) * np.float32(0.5)).astype("float32")
    reference(rule, np.ones(4, "float32"), [bounded], (expected,), HYPERPARAMETERS, 1)
    assert_same_bits(m, expected)


@needs_gcc
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_weights_and_a_factor_have_the_bits_of_the_reference(dtype: str) -> None:
    rule = RULES["adam"]
    parameters, slots, gradients = state_of(rule, 100, dtype, 4)
    gradients[1][3] = np.nan  # its weight is 0
    weights, factor = (0.3, 0.0, 1.0, 1 / 3), 0.7
    expected = [array.copy() for array in (parameters, *slots)]
    arrays = (parameters, *slots, *gradients)
    launch(rule, pieces_of([(0, 100)], arrays, moves=True, factor=factor, weights=weights), dtype, 4, 1)
    reference(rule, expected[0], gradients, tuple(expected[1:]), HYPERPARAMETERS, 1, (*weights, factor))
    for found, wanted in zip((parameters, *slots), expected, strict=True):
        assert_same_bits(found, wanted)
    assert np.isfinite(parameters.astype("float64")).all()


@needs_gcc
def test_a_piece_without_a_gradient_is_one_of_zeros() -> None:
    rule = RULES["adam"]
    arrays = [np.full(3, v, "float64") for v in (1.0, 0.5, 0.25)]
    expected = [array.copy() for array in arrays]
    pieces = pieces_of([(0, 3)], (*arrays, np.zeros(3)), moves=True, factor=1.0)
    pieces[:, -2] = 0
    launch(rule, pieces, "float64", 1, 2)
    reference(rule, expected[0], [np.zeros(3)], tuple(expected[1:]), HYPERPARAMETERS, 2)
    for found, wanted in zip(arrays, expected, strict=True):
        assert_same_bits(found, wanted)


@needs_gcc
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_norms_are_those_of_the_variable_and_of_its_direction(dtype: str) -> None:
    rule, number, threads = RULES["lamb"], computed_in(dtype), 8
    parameters, slots, gradients = state_of(rule, 1000, dtype, 2)
    ranges = [(0, 10), (10, 700), (700, 1000)]
    pieces = pieces_of(ranges, (parameters, *slots, *gradients), moves=False, factor=0.5, weights=(1, 0.5))
    before = [array.copy() for array in (parameters, *slots)]
    partial, sums = np.zeros((3, 2, threads)), np.zeros((3, 2))
    numbers = scalars(rule, HYPERPARAMETERS, 2, number)
    kernel = compiled(codegen.norms(rule, dtype))[codegen.norms_name(rule, dtype)]
    kernel((3,), (threads,), (pieces.ctypes.data, np.int32(2), number.type(np.inf), *numbers, partial.ctypes.data))
    fold = (partial.ctypes.data, np.int32(threads), np.int64(6), sums.ctypes.data)
    compiled(codegen.loops(dtype))["fold"]((2,), (3,), fold)
    half = number.type(0.5)
    total = (gradients[0].astype(number) + gradients[1].astype(number) * half) * half
    for (start, stop), found in zip(ranges, sums, strict=True):
        piece = slice(start, stop)
        wanted = squares(rule, parameters[piece], total[piece], [s[piece] for s in slots], HYPERPARAMETERS, 2)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for array, was in zip((parameters, *slots), before, strict=True):
        assert_same_bits(array, was)


@needs_gcc
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_squares_copy_and_fill(dtype: str) -> None:
    random = np.random.default_rng(2)
    gradients = [random.standard_normal(1000).astype(dtype) for _ in range(2)]
    kernels, number = compiled(codegen.loops(dtype)), computed_in(dtype).type
    ranges = [(0, 10), (10, 700), (700, 1000)]
    ones = np.ones(2).view(np.int64)
    rows = [[stop - start, *(g.ctypes.data + start * g.itemsize for g in gradients), *ones] for start, stop in ranges]
    pieces, threads = np.array(rows, np.int64), 8
    partial, sums = np.zeros((3, threads)), np.zeros(3)
    kernels["squares"]((3,), (threads,), (pieces.ctypes.data, np.int32(2), number(1.5), partial.ctypes.data))
    kernels["fold"]((2,), (2,), (partial.ctypes.data, np.int32(threads), np.int64(3), sums.ctypes.data))
    total = np.clip(gradients[0].astype(number) + gradients[1].astype(number), -1.5, 1.5).astype(float)
    np.testing.assert_allclose(sums, [float((total[a:b] ** 2).sum()) for a, b in ranges], rtol=1e-14)

    target = np.zeros(1000, dtype)
    moves = np.array([[5, gradients[0].ctypes.data, target.ctypes.data + 3 * target.itemsize]], np.int64)
    kernels["copy"]((1,), (4,), (moves.ctypes.data,))
    assert target[3:8].tolist() == gradients[0][:5].tolist()
    assert not target[8:].any()
    kernels["fill"]((2,), (4,), (target.ctypes.data + target.itemsize, np.int64(998), number(0.1)))
    assert set(target[1:999].tolist()) == {float(np.array(0.1, dtype))}
    assert target[[0, 999]].tolist() == [0, 0]


@needs_gcc
def test_the_maximum_of_a_nan_is_nan_on_either_side() -> None:
    rule = RULES["adamax"]
    arrays = [np.ones(2, "float32"), np.zeros(2, "float32"), np.array([np.nan, 1], "float32")]
    g = np.array([1, np.nan], "float32")
    launch(rule, pieces_of([(0, 2)], (*arrays, g), moves=True, factor=1.0), "float32", 1, 1)
    assert np.isnan(arrays[2]).all()


@pytest.mark.parametrize("step", ["lambda", "literal", "branch", "function"])
def test_what_cannot_be_translated_is_named(step: str) -> None:
    def literal(w: Any, g: Any, rate: Any) -> tuple[Any]:
        return (w - 2 * g,)

    def branch(w: Any, g: Any, rate: Any) -> tuple[Any]:
        if rate:
            return (w,)
        return (g,)

    def function(w: Any, g: Any, rate: Any) -> tuple[Any]:
        return (np.tanh(w),)

    steps: dict[str, Any] = {"literal": literal, "branch": branch, "function": function}
    if step == "lambda":
        steps["lambda"] = branch
    with pytest.raises(InvalidArgumentError, match="may use only arithmetic"):
        codegen.update(replace(RULES["sgd"], step=steps[step]), "float32")


@pytest.mark.long
@pytest.mark.skipif(NVCC is None or PTXAS is None, reason="no nvcc here to compile the kernels for a GPU")
@pytest.mark.parametrize(
    "dtype", [dtype if dtype == "float32" else pytest.param(dtype, marks=pytest.mark.slow) for dtype in GPU_DTYPES]
)
def test_nvcc_takes_the_source(dtype: str, tmp_path: Path) -> None:
    """Every rule in one file, each in a namespace of its own. Nothing is contracted but inside of `pow`, and halves
    are converted by instructions that the assembler knows."""
    sources = [codegen.loops(dtype), *dict.fromkeys(codegen.update(RULES[name], dtype) for name in ELEMENTWISE)]
    sources.append(codegen.norms(RULES["lamb"], dtype))
    file = tmp_path / "kernels.cu"
    file.write_text("".join(f"namespace n{i} {{\n{source}}}\n" for i, source in enumerate(sources)))
    assert NVCC is not None
    assert PTXAS is not None
    command = [NVCC, "-fmad=false", "-Werror", "all-warnings", "-diag-suppress", "177", "-ptx", "-o"]
    done = subprocess.run([*command, str(tmp_path / "kernels.ptx"), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / "kernels.ptx").read_text()
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [PTXAS, f"-arch={architecture}", "-o", str(tmp_path / "kernels.cubin"), str(tmp_path / "kernels.ptx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f".entry {codegen.update_name(rule, dtype)}(" in ptx for rule in map(RULES.__getitem__, ELEMENTWISE))
    # The body of `pow` is a function of its own in float64, and lies in the kernel that calls it in the others.
    places = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?(\w+)\s*\((.*?)\n}", ptx, re.DOTALL)
    assert {name for name, body in places if "fma." in body or "pow" in body} - {"__internal_accurate_pow"} == {
        f"ftrl_power_{dtype}"
    }
