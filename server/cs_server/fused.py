# numba's annotations stop short of its decorators and intrinsics.
# mypy: disable-error-code="attr-defined, call-arg, no-untyped-call, untyped-decorator"
"""The loops that numba compiles: sum of the replicas' gradients and update rule in one pass over memory.

Owns the machine code and nothing else: it trusts its caller with addresses and lengths, so only `kernels`, which checks
them, may use it. Importing this module imports numba; nothing but `kernels` imports it, and only when a kernel is
needed.

A kernel takes element ranges of one slab, where in the gradients each of them begins, the parameters, the slots, the
base addresses of the replicas' gradients, the rule's numbers, how many elements it does at a time, and what of a `Lane`
it needs to survive the server: its word and its area, or two empty arrays. Addresses instead of arrays make it one
compiled function for any number of replicas.
There is one loop for each number of slots, and each rule gets a copy of that loop in which the global `step` is its own
step. (A closure over the step would do as well, but numba's cache would take it for a new function in every process.)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cs_server.updates import Array, Rule

if TYPE_CHECKING:

    def step(*values: Any) -> tuple[Any, ...]: ...


IS_DISABLED = bool(numba.config.DISABLE_JIT)
"""Whether the environment tells numba to compile nothing (NUMBA_DISABLE_JIT)."""

_configuration = threading.Lock()

_AHEAD = 8  # ranges


def build(rule: Rule, dtype: np.dtype[Any], directory: Path | None) -> tuple[Callable[..., None], bool]:
    """The kernel of this rule and dtype, and whether it had to be compiled: else it came from the directory.

    It takes exactly one signature: an argument of another type is a TypeError, never a compilation. With `directory`
    None nothing is read or written.
    """
    loop = _LOOPS[len(rule.slots)]
    inlined = numba.njit(error_model="numpy", forceinline=True)(rule.step)
    function = FunctionType(loop.__code__, globals() | {"step": inlined}, kernel_name(rule, dtype))
    function.__qualname__ = function.__name__
    values = types.Array(numba.from_dtype(dtype), 1, "C")
    addresses = types.Array(types.int64, 1, "C")
    ranges, places = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "A")
    numbers = types.UniTuple(values.dtype, rule.count_of_numbers)
    signature = types.void(
        ranges, places, values, *[values] * len(rule.slots), addresses, numbers, types.int64, addresses, values
    )
    with _cache_in(directory):
        # No fastmath: an update has the bits of the reference.
        kernel = numba.njit(signature, nogil=True, cache=directory is not None, error_model="numpy")(function)
    return kernel, not kernel.stats.cache_hits


def build_merge(dtype: np.dtype[Any], directory: Path | None) -> tuple[Callable[..., int], bool]:
    """The loop that adds up sparse gradients of this dtype, and whether it had to be compiled."""
    function = FunctionType(_merged.__code__, globals(), f"merge_{dtype.name}")
    function.__qualname__ = function.__name__
    addresses = types.Array(types.int64, 1, "C")
    sums = types.Array(numba.from_dtype(dtype), 2, "C")
    with _cache_in(directory):
        kernel = numba.njit(
            types.int64(*[addresses] * 5, sums), nogil=True, cache=directory is not None, error_model="numpy"
        )(function)
    return kernel, not kernel.stats.cache_hits


def kernel_name(rule: Rule, dtype: np.dtype[Any]) -> str:
    """The function's name, with which the names of its cache files begin after the module's."""
    return f"{rule.name}_{dtype.name}"


@contextmanager
def _cache_in(directory: Path | None) -> Iterator[None]:
    """Let numba keep the functions decorated inside in this directory, and in no other place.

    numba's setting is global, so it is put back: the process may be a script that caches functions of its own.
    """
    if directory is None:
        yield
        return
    wanted = {"CACHE_DIR": str(directory), "CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    with _configuration:
        found = {name: getattr(numba.config, name, "") for name in wanted}
        try:
            for name, value in wanted.items():
                setattr(numba.config, name, value)
            yield
        finally:
            for name, value in found.items():
                setattr(numba.config, name, value)


# What is compiled. Slices come first and loops run over their shape, or nothing is vectorized.


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to elements of `like`."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@intrinsic
def _fence(context: Any) -> Any:
    """The compiler keeps stores on their side of it. No instruction: what a killed process has stored is what it stored
    up to some instruction, so no processor needs to wait for another."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst", "singlethread")
        return target.get_dummy_value()

    return types.void(), generate


@intrinsic
def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Have the cache line of an element come, to be written."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = target.make_array(signature.args[0])(target, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [line.type], ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        )
        builder.call(function, [line, number(1), number(3), number(1)])
        return target.get_dummy_value()

    return types.void(array, types.int64), generate


@numba.njit(error_model="numpy")
def _foresee(ranges: Array, r: int, values: Array, chunk: int) -> None:
    """Have the beginning of a range that is updated soon come from memory. A row lies anywhere, so the processor cannot
    foresee it: without this a sparse update takes twice as long."""
    if r + _AHEAD < ranges.shape[0]:
        start = ranges[r + _AHEAD, 0]
        for i in range(start, min(ranges[r + _AHEAD, 1], start + chunk), 64 // values.itemsize):
            _prefetch(values, i)


@numba.njit(error_model="numpy")
def _tell(progress: Array, value: int) -> None:
    """Set the lane's word."""
    _fence()
    progress[0] = value
    _fence()


@numba.njit(error_model="numpy")
def _done(progress: Array) -> int:
    """How many pieces a server before this one has done."""
    return progress[0] >> 1 if progress.shape[0] > 0 else 0


@numba.njit(error_model="numpy")
def _scratch(chunk: int, like: Array) -> Array:
    """Memory for `_addends`. Adding -0.0 changes no number, not even the sign of a zero."""
    scratch = np.empty(chunk, like.dtype)
    for i in range(chunk):
        scratch[i] = -0.0
    return scratch


@numba.njit(error_model="numpy")
def _addends(addresses: Array, like: Array, scratch: Array, start: int, stop: int) -> tuple[Array, Array]:
    """Two arrays whose sum is that of elements start to stop of the gradients, added in replica order."""
    last = addresses.shape[0] - 1
    final = numba.carray(_pointer(addresses[last], like), like.shape)[start:stop]
    if last == 0:
        return scratch[: stop - start], final
    first = numba.carray(_pointer(addresses[0], like), like.shape)[start:stop]
    if last == 1:
        return first, final
    second = numba.carray(_pointer(addresses[1], like), like.shape)[start:stop]
    total = scratch[: stop - start]
    for i in range(total.shape[0]):
        total[i] = first[i] + second[i]
    for replica in range(2, last):
        further = numba.carray(_pointer(addresses[replica], like), like.shape)[start:stop]
        for i in range(total.shape[0]):
            total[i] += further[i]
    return total, final


def _no_slot(
    ranges: Array,
    places: Array,
    parameters: Array,
    addresses: Array,
    numbers: tuple[Any, ...],
    chunk: int,
    progress: Array,
    area: Array,
) -> None:
    scratch, done, number = _scratch(chunk, parameters), _done(progress), 0
    for r in range(ranges.shape[0]):
        shift = places[r] - ranges[r, 0]
        _foresee(ranges, r, parameters, chunk)
        for start in range(ranges[r, 0], ranges[r, 1], chunk):
            number += 1
            if number <= done:
                continue
            stop = min(start + chunk, ranges[r, 1])
            size = stop - start
            g, h = _addends(addresses, parameters, scratch, start + shift, stop + shift)
            w = parameters[start:stop]
            if progress.shape[0] > 0:
                kept_w = area[:size]
                for i in range(size):
                    kept_w[i] = w[i]
                _tell(progress, 2 * number - 1)
            for i in range(w.shape[0]):
                (w[i],) = step(w[i], g[i] + h[i], *numbers)
            if progress.shape[0] > 0:
                _tell(progress, 2 * number)


def _one_slot(
    ranges: Array,
    places: Array,
    parameters: Array,
    slot_a: Array,
    addresses: Array,
    numbers: tuple[Any, ...],
    chunk: int,
    progress: Array,
    area: Array,
) -> None:
    scratch, done, number = _scratch(chunk, parameters), _done(progress), 0
    for r in range(ranges.shape[0]):
        shift = places[r] - ranges[r, 0]
        _foresee(ranges, r, parameters, chunk)
        _foresee(ranges, r, slot_a, chunk)
        for start in range(ranges[r, 0], ranges[r, 1], chunk):
            number += 1
            if number <= done:
                continue
            stop = min(start + chunk, ranges[r, 1])
            size = stop - start
            g, h = _addends(addresses, parameters, scratch, start + shift, stop + shift)
            w = parameters[start:stop]
            a = slot_a[start:stop]
            if progress.shape[0] > 0:
                kept_w = area[:size]
                kept_a = area[size : 2 * size]
                for i in range(size):
                    kept_w[i], kept_a[i] = w[i], a[i]
                _tell(progress, 2 * number - 1)
            for i in range(w.shape[0]):
                w[i], a[i] = step(w[i], g[i] + h[i], a[i], *numbers)
            if progress.shape[0] > 0:
                _tell(progress, 2 * number)


def _two_slots(
    ranges: Array,
    places: Array,
    parameters: Array,
    slot_a: Array,
    slot_b: Array,
    addresses: Array,
    numbers: tuple[Any, ...],
    chunk: int,
    progress: Array,
    area: Array,
) -> None:
    scratch, done, number = _scratch(chunk, parameters), _done(progress), 0
    for r in range(ranges.shape[0]):
        shift = places[r] - ranges[r, 0]
        _foresee(ranges, r, parameters, chunk)
        _foresee(ranges, r, slot_a, chunk)
        _foresee(ranges, r, slot_b, chunk)
        for start in range(ranges[r, 0], ranges[r, 1], chunk):
            number += 1
            if number <= done:
                continue
            stop = min(start + chunk, ranges[r, 1])
            size = stop - start
            g, h = _addends(addresses, parameters, scratch, start + shift, stop + shift)
            w = parameters[start:stop]
            a = slot_a[start:stop]
            b = slot_b[start:stop]
            if progress.shape[0] > 0:
                kept_w = area[:size]
                kept_a = area[size : 2 * size]
                kept_b = area[2 * size : 3 * size]
                for i in range(size):
                    kept_w[i], kept_a[i], kept_b[i] = w[i], a[i], b[i]
                _tell(progress, 2 * number - 1)
            for i in range(w.shape[0]):
                w[i], a[i], b[i] = step(w[i], g[i] + h[i], a[i], b[i], *numbers)
            if progress.shape[0] > 0:
                _tell(progress, 2 * number)


def _three_slots(
    ranges: Array,
    places: Array,
    parameters: Array,
    slot_a: Array,
    slot_b: Array,
    slot_c: Array,
    addresses: Array,
    numbers: tuple[Any, ...],
    chunk: int,
    progress: Array,
    area: Array,
) -> None:
    scratch, done, number = _scratch(chunk, parameters), _done(progress), 0
    for r in range(ranges.shape[0]):
        shift = places[r] - ranges[r, 0]
        _foresee(ranges, r, parameters, chunk)
        _foresee(ranges, r, slot_a, chunk)
        _foresee(ranges, r, slot_b, chunk)
        _foresee(ranges, r, slot_c, chunk)
        for start in range(ranges[r, 0], ranges[r, 1], chunk):
            number += 1
            if number <= done:
                continue
            stop = min(start + chunk, ranges[r, 1])
            size = stop - start
            g, h = _addends(addresses, parameters, scratch, start + shift, stop + shift)
            w = parameters[start:stop]
            a = slot_a[start:stop]
            b = slot_b[start:stop]
            c = slot_c[start:stop]
            if progress.shape[0] > 0:
                kept_w = area[:size]
                kept_a = area[size : 2 * size]
                kept_b = area[2 * size : 3 * size]
                kept_c = area[3 * size : 4 * size]
                for i in range(size):
                    kept_w[i], kept_a[i], kept_b[i], kept_c[i] = w[i], a[i], b[i], c[i]
                _tell(progress, 2 * number - 1)
            for i in range(w.shape[0]):
                w[i], a[i], b[i], c[i] = step(w[i], g[i] + h[i], a[i], b[i], c[i], *numbers)
            if progress.shape[0] > 0:
                _tell(progress, 2 * number)


def _merged(
    value_addresses: Array, index_addresses: Array, lengths: Array, table: Array, rows: Array, sums: Array
) -> int:
    """How many different rows the replicas name. ``table`` (a power of two of -1, at least twice as many as there are
    indices) finds the place of a row by its hash."""
    count = 0
    mask = table.shape[0] - 1
    for replica in range(lengths.shape[0]):
        indices = numba.carray(_pointer(index_addresses[replica], rows), lengths[replica])
        values = numba.carray(_pointer(value_addresses[replica], sums), (lengths[replica], sums.shape[1]))
        for i in range(indices.shape[0]):
            row = indices[i]
            slot = (row * 0x9E3779B97F4A7C1 >> 29) & mask
            while table[slot] >= 0 and rows[table[slot]] != row:
                slot = (slot + 1) & mask
            place = table[slot]
            if place < 0:
                table[slot] = count
                rows[count] = row
                for j in range(sums.shape[1]):
                    sums[count, j] = values[i, j]
                count += 1
            else:
                for j in range(sums.shape[1]):
                    sums[place, j] += values[i, j]
    return count


_LOOPS: tuple[Callable[..., None], ...] = (_no_slot, _one_slot, _two_slots, _three_slots)
