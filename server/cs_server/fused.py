# numba's annotations stop short of its decorators and intrinsics.
# mypy: disable-error-code="attr-defined, call-arg, call-overload, no-untyped-call, untyped-decorator"
"""The loops that numba compiles: sum of the replicas' gradients and update rule in one pass over memory.

Owns how machine code is made and nothing else: the code trusts its caller with addresses and lengths, so only
`kernels`, which checks them, may use it. Importing this module imports numba; nothing but `kernels` imports it, and
only when a kernel has to be compiled.

A kernel takes element ranges of one slab, where in the gradients each of them begins, the parameters, the slots, the
base addresses of the replicas' gradients, the rule's numbers, how many elements it does at a time, what of a `Lane` it
needs to survive the server: its word and its area, or two empty arrays; and memory for the sum of a piece, since
compiled code that runs without numba cannot ask for any. Addresses instead of arrays make it one compiled function for
any number of replicas. There is one loop for each number of slots, and each rule gets a copy of that loop in which the
global `step` is its own step.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from cs_server import native
from cs_server.updates import Array, Rule

if TYPE_CHECKING:

    def step(*values: Any) -> tuple[Any, ...]: ...
    def loop(*arguments: Any) -> None: ...


VALUE, COUNT = np.dtype("float32"), 1
"""In a kernel: its dtype, and of how many numbers its rule is."""

# Compiled code is called by compiled code, and by `native`, in none of Python's ways.
_ALONE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# What is done for every row is no call: what calls store stands in line behind the row before, which memory still has.
_INLINED = _ALONE | {"inline": "always"}

_AHEAD = 8  # ranges


def build(rule: Rule, dtype: np.dtype[Any]) -> bytes:
    """The machine code of the kernel of this rule and dtype, for `native.kernel`."""
    inlined = numba.njit(error_model="numpy", forceinline=True, **_ALONE)(rule.step)
    loop, entry = _LOOPS[len(rule.slots)]
    # No fastmath: an update has the bits of the reference.
    compiled = numba.njit(error_model="numpy", **_INLINED)(_with(loop, f"{rule.name}_{dtype}_loop", step=inlined))
    return _machine_code(_with(entry, f"{rule.name}_{dtype}", loop=compiled, VALUE=dtype, COUNT=rule.count_of_numbers))


def build_merge(dtype: np.dtype[Any]) -> bytes:
    """The machine code of the loop that adds up sparse gradients of this dtype."""
    return _machine_code(_with(_enter_merge, f"merge_{dtype}", VALUE=dtype))


def _with(function: Any, name: str, **names: Any) -> Any:
    """A copy of a function of this module in which these global names mean these things."""
    copy = FunctionType(function.__code__, globals() | names, name)
    copy.__qualname__ = name
    return copy


def _machine_code(entry: Any) -> bytes:
    words = types.CPointer(types.int64)
    compiled = numba.njit(types.void(words), error_model="numpy", **_ALONE)(entry)
    [[signature, overload]] = compiled.overloads.items()
    module = llvm.parse_assembly(compiled.inspect_llvm(signature))
    module.get_function(overload.fndesc.llvm_func_name).name = native.SYMBOL
    # numba counts references to the memory of arrays, of which none owns any: this is never called.
    module.link_in(llvm.parse_assembly("define linkonce_odr void @NRT_MemInfo_call_dtor(ptr %0) { unreachable }"))
    code: bytes = native.target().emit_object(module)
    return code


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


@numba.njit(error_model="numpy", **_INLINED)
def _foresee(ranges: Array, r: int, values: Array, chunk: int) -> None:
    """Have the beginning of a range that is updated soon come from memory. A row lies anywhere, so the processor cannot
    foresee it: without this a sparse update takes twice as long."""
    if r + _AHEAD < ranges.shape[0]:
        start = ranges[r + _AHEAD, 0]
        for i in range(start, min(ranges[r + _AHEAD, 1], start + chunk), 64 // values.itemsize):
            _prefetch(values, i)


@numba.njit(error_model="numpy", **_ALONE)
def _tell(progress: Array, value: int) -> None:
    """Set the lane's word."""
    _fence()
    progress[0] = value
    _fence()


@numba.njit(error_model="numpy", **_ALONE)
def _done(progress: Array) -> int:
    """How many pieces a server before this one has done."""
    return progress[0] >> 1 if progress.shape[0] > 0 else 0


@numba.njit(error_model="numpy", **_INLINED)
def _addends(addresses: Array, like: Array, scratch: Array, start: int, stop: int) -> tuple[Array, Array]:
    """Two arrays whose sum is that of elements start to stop of the gradients, added in replica order.

    The scratch comes filled with -0.0: adding that changes no number, not even the sign of a zero.
    """
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
    scratch: Array,
) -> None:
    done, number = _done(progress), 0
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
    scratch: Array,
) -> None:
    done, number = _done(progress), 0
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
    scratch: Array,
) -> None:
    done, number = _done(progress), 0
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
    scratch: Array,
) -> None:
    done, number = _done(progress), 0
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


@numba.njit(error_model="numpy", **_ALONE)
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


# How kernels are entered: the words are the address and the length of each array, in this order: ranges, addresses,
# numbers, progress, area, scratch (as long as a piece), places, parameters, slots. Of `_enter_merge`: the arguments of
# `_merged`, and two counts: where the result goes, and the elements of a row.


@numba.njit(error_model="numpy", **_ALONE)
def _array(words: Array, place: int, dtype: Any) -> Array:
    return numba.carray(_pointer(words[2 * place], dtype), words[2 * place + 1])


@numba.njit(error_model="numpy", **_ALONE)
def _ranges(words: Array) -> Array:
    return numba.carray(_pointer(words[0], words), (words[1], 2))


@numba.njit(error_model="numpy", **_ALONE)
def _further(words: Array, dtype: Any) -> tuple[Array, Array, Array, Array]:
    addresses, progress = _array(words, 1, words.dtype), _array(words, 3, words.dtype)
    return addresses, progress, _array(words, 4, dtype), _array(words, 5, dtype)


def _enter_no_slot(call: Any) -> None:
    words = numba.carray(call, 16)
    addresses, progress, area, scratch = _further(words, VALUE)
    numbers: Any = to_fixed_tuple(_array(words, 2, VALUE), COUNT)
    ranges, places = _ranges(words), _array(words, 6, words.dtype)
    parameters = _array(words, 7, VALUE)
    loop(ranges, places, parameters, addresses, numbers, len(scratch), progress, area, scratch)


def _enter_one_slot(call: Any) -> None:
    words = numba.carray(call, 18)
    addresses, progress, area, scratch = _further(words, VALUE)
    numbers: Any = to_fixed_tuple(_array(words, 2, VALUE), COUNT)
    ranges, places = _ranges(words), _array(words, 6, words.dtype)
    parameters, slot_a = _array(words, 7, VALUE), _array(words, 8, VALUE)
    loop(ranges, places, parameters, slot_a, addresses, numbers, len(scratch), progress, area, scratch)


def _enter_two_slots(call: Any) -> None:
    words = numba.carray(call, 20)
    addresses, progress, area, scratch = _further(words, VALUE)
    numbers: Any = to_fixed_tuple(_array(words, 2, VALUE), COUNT)
    ranges, places = _ranges(words), _array(words, 6, words.dtype)
    parameters, slot_a, slot_b = _array(words, 7, VALUE), _array(words, 8, VALUE), _array(words, 9, VALUE)
    loop(ranges, places, parameters, slot_a, slot_b, addresses, numbers, len(scratch), progress, area, scratch)


def _enter_three_slots(call: Any) -> None:
    words = numba.carray(call, 22)
    addresses, progress, area, scratch = _further(words, VALUE)
    numbers: Any = to_fixed_tuple(_array(words, 2, VALUE), COUNT)
    ranges, places = _ranges(words), _array(words, 6, words.dtype)
    parameters, slot_a, slot_b, slot_c = (
        _array(words, 7, VALUE),
        _array(words, 8, VALUE),
        _array(words, 9, VALUE),
        _array(words, 10, VALUE),
    )
    loop(ranges, places, parameters, slot_a, slot_b, slot_c, addresses, numbers, len(scratch), progress, area, scratch)


def _enter_merge(call: Any) -> None:
    words = numba.carray(call, 14)
    integers = words.dtype
    addresses, indices, lengths = _array(words, 0, integers), _array(words, 1, integers), _array(words, 2, integers)
    table, rows, counts = _array(words, 3, integers), _array(words, 4, integers), _array(words, 6, integers)
    sums = numba.carray(_pointer(words[10], VALUE), (words[11], counts[1]))
    counts[0] = _merged(addresses, indices, lengths, table, rows, sums)


_LOOPS: tuple[tuple[Callable[..., None], Callable[..., None]], ...] = (
    (_no_slot, _enter_no_slot),
    (_one_slot, _enter_one_slot),
    (_two_slots, _enter_two_slots),
    (_three_slots, _enter_three_slots),
)
