# numba's annotations stop short of its decorators and intrinsics.
# mypy: disable-error-code="attr-defined, call-arg, call-overload, no-untyped-call, untyped-decorator"
"""The loops that numba compiles: sum of the replicas' gradients and update rule in one pass over memory.

Owns how machine code is made and nothing else: the code trusts its caller with addresses and lengths, so only
`kernels`, which checks them, may use it. Importing this module imports numba; nothing but `kernels` imports it, and
only when a kernel has to be compiled.

A rule has two kernels: a dense one takes element ranges of one slab, a sparse one the rows that gradients name. Both
take the parameters, the slots, the base addresses of the replicas' gradients, the rule's numbers, what of a `Lane` they
need to survive the server: its word and its area, or two empty arrays; the alarm, which they set where a sum is not
finite; and memory for the sum of a piece and for the rows, since compiled code that runs without numba cannot ask for
any. Addresses instead of arrays make it one compiled function for any number of replicas. The code for one piece of
memory depends on the number of slots: it is a text, filled in for each rule. A loop gets the compiled piece as an
argument of the function that makes the loop.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from cs_server.rules import MEAN_LANES, Array, Rule

from . import object_loader

# Compiled code is called by compiled code and by `object_loader`, never by Python.
_ALONE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# What is done for every row is no call: what calls store stands in line behind the row before, which memory still has.
_INLINED = _ALONE | {"inline": "always"}

_AHEAD = 8  # rows
_FACTOR = 0x9E3779B97F4A7C1  # of the hash of a row
_PLACE = np.dtype("int32")
_FACTORS = np.dtype("float64")


def build(rule: Rule, dtype: np.dtype[Any], *, is_sparse: bool = False) -> bytes:
    """The machine code of the kernel of this rule and dtype, for `object_loader.kernel`: of whole ranges, or of the
    rows that sparse gradients name."""
    # No fastmath: an update has the bits of the reference.
    step = _step(rule.step)
    piece, arrays = map(_inlined, unrolled(len(rule.slots), step, dtype))
    if rule.row is not None:
        piece = _inlined(unrolled(0, _step(lambda *given: step(*given)[:1]), dtype)[0])
        loop = _inlined(rowwise(_inlined(squares(_step(rule.row))), piece))
        return _machine_code(_enter_rowwise(loop, arrays, dtype, rule.count_of_numbers))
    if is_sparse:
        return _machine_code(_enter_sparse(_inlined(sparse(piece)), arrays, dtype, rule.count_of_numbers))
    return _machine_code(_enter_dense(_inlined(dense(piece, dtype)), arrays, dtype, rule.count_of_numbers))


def build_merge(dtype: np.dtype[Any]) -> bytes:
    """The machine code of the loop that adds up sparse gradients of this dtype."""
    return _machine_code(_enter_merge(dtype))


def _step(function: Any) -> Any:
    return numba.njit(error_model="numpy", forceinline=True, **_ALONE)(function)


def _inlined(function: Any) -> Any:
    return numba.njit(error_model="numpy", **_INLINED)(function)


def _machine_code(entry: Any) -> bytes:
    words = types.CPointer(types.int64)
    compiled = numba.njit(types.void(words), error_model="numpy", **_ALONE)(entry)
    [[signature, overload]] = compiled.overloads.items()
    module = llvm.parse_assembly(compiled.inspect_llvm(signature))
    module.get_function(overload.fndesc.llvm_func_name).name = object_loader.SYMBOL
    # numba counts references to the memory of arrays, of which none owns any: this is never called.
    module.link_in(llvm.parse_assembly("define linkonce_odr void @NRT_MemInfo_call_dtor(ptr %0) { unreachable }"))
    code: bytes = object_loader.target().emit_object(module)
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
def _elements(address: int, like: Array, count: int) -> Array:
    return numba.carray(_pointer(address, like), count)


@numba.njit(error_model="numpy", **_INLINED)
def _foresee(values: Array, start: int, stop: int) -> None:
    """Have some elements come from memory."""
    for i in range(start, stop, 64 // values.itemsize):
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

    The first half of the scratch comes filled with -0.0: adding that changes no number, not even the sign of a zero.
    """
    last = addresses.shape[0] - 1
    final = numba.carray(_pointer(addresses[last], like), like.shape)[start:stop]
    if last == 0:
        return scratch[: stop - start], final
    first = numba.carray(_pointer(addresses[0], like), like.shape)[start:stop]
    if last == 1:
        return first, final
    second = numba.carray(_pointer(addresses[1], like), like.shape)[start:stop]
    total = scratch[scratch.shape[0] // 2 :][: stop - start]
    for i in range(total.shape[0]):
        total[i] = first[i] + second[i]
    for replica in range(2, last):
        further = numba.carray(_pointer(addresses[replica], like), like.shape)[start:stop]
        for i in range(total.shape[0]):
            total[i] += further[i]
    return total, final


@numba.njit(error_model="numpy", **_INLINED)
def _scaled(
    addresses: Array, like: Array, scale: Array, factor: Any, scratch: Array, start: int, stop: int, alarm: Array
) -> tuple[Array, Array]:
    """As `_addends`, where every gradient is multiplied by its weight, each element of their sum is bounded, and the
    sum is multiplied by a factor: ``scale`` has the weights in replica order and then the bound. A gradient whose
    weight is 0 is left out. ``alarm`` is set if a bound hides a sum that is not finite."""
    total = scratch[scratch.shape[0] // 2 :][: stop - start]
    is_first = True
    for replica in range(addresses.shape[0]):
        weight = scale[replica]
        if weight == 0:
            continue
        gradient = numba.carray(_pointer(addresses[replica], like), like.shape)[start:stop]
        if is_first:
            for i in range(total.shape[0]):
                total[i] = gradient[i] * weight
        else:
            for i in range(total.shape[0]):
                total[i] += gradient[i] * weight
        is_first = False
    if is_first:
        total[:] = 0
    limit = scale[addresses.shape[0]]
    if limit < np.inf:
        is_bad = False
        for i in range(total.shape[0]):
            is_bad |= total[i] - total[i] != 0
            lowered = -limit if total[i] <= -limit else total[i]
            total[i] = limit if lowered >= limit else lowered
        if is_bad:
            alarm[0] = 1
    if factor != 1:
        for i in range(total.shape[0]):
            total[i] *= factor
    return scratch[: stop - start], total


# ``piece`` updates elements start to stop of parameters and slots, the lane's piece of that number, whose gradients are
# ``g + h``. A server before this one may have half done it: it gives what that one has kept back. ``arrays`` makes
# parameters and slots of their addresses and lengths. Compiled code has no loop over arrays, so a text is filled in.
# The sum minus itself is 0 unless it is infinite or NaN. The alarm is set before the piece counts as done.
_UNROLLED = """
def piece(arrays, start, stop, g, h, number, numbers, progress, area, alarm):
    {arrays} = {parts}
    size = w.shape[0]
    if progress.shape[0] > 0:
        {kept} = {areas}
        if progress[0] == 2 * number - 1:
            for i in range(size):
                {elements} = {kept_elements}
        else:
            for i in range(size):
                {kept_elements} = {elements}
            _tell(progress, 2 * number - 1)
    is_bad = False
    for i in range(size):
        total = g[i] + h[i]
        is_bad |= total - total != 0
        {elements} = step(w[i], total, {slot_elements} *numbers)
    if is_bad:
        alarm[0] = 1
    if progress.shape[0] > 0:
        _tell(progress, 2 * number)


def arrays(words, first):
    return {made}
"""


def unrolled(slots: int, step: Callable[..., Any], dtype: np.dtype[Any]) -> tuple[Callable[..., Any], ...]:
    """The functions ``piece`` and ``arrays`` for a rule with this many slots, its ``step`` and its dtype."""

    def each(form: str, first: int = 0) -> str:
        return "".join(f"{form.format(array=name, k=k)}, " for k, name in enumerate("wabc"[: slots + 1]) if k >= first)

    source = _UNROLLED.format(
        arrays=each("{array}"),
        parts=each("arrays[{k}][start:stop]"),
        kept=each("kept_{array}"),
        areas=each("area[{k} * size : ({k} + 1) * size]"),
        elements=each("{array}[i]"),
        kept_elements=each("kept_{array}[i]"),
        slot_elements=each("{array}[i]", 1),
        made=each("_array(words, first + {k}, dtype)"),
    )
    made = {"step": step, "dtype": dtype, "_tell": _tell, "_array": _array}
    exec(source, made)
    return made["piece"], made["arrays"]


def dense(piece: Callable[..., None], dtype: np.dtype[Any]) -> Callable[..., None]:
    """The loop that updates ranges whose gradients, of the addresses, lie where the parameters do. ``scale`` is that of
    `_scaled`, or empty; ``before`` counts the lane's pieces before; ``which`` has each range's factor, in float64."""
    rounded = dtype.type

    def loop(
        ranges: Array,
        addresses: Array,
        scale: Array,
        before: Array,
        factors: Array,
        which: Array,
        arrays: tuple[Array, ...],
        numbers: tuple[Any, ...],
        lane: tuple[Array, Array, Array, Array],
    ) -> None:
        progress, area, scratch, alarm = lane
        done, number, chunk = _done(progress), before[0], len(scratch) // 2
        for r in range(ranges.shape[0]):
            for start in range(ranges[r, 0], ranges[r, 1], chunk):
                number += 1
                if number <= done:
                    continue
                stop = min(start + chunk, ranges[r, 1])
                if scale.shape[0] > 0:
                    factor = rounded(factors[which[r]])
                    g, h = _scaled(addresses, arrays[0], scale, factor, scratch, start, stop, alarm)
                else:
                    g, h = _addends(addresses, arrays[0], scratch, start, stop)
                piece(arrays, start, stop, g, h, number, numbers, progress, area, alarm)

    return loop


def sparse(piece: Callable[..., None]) -> Callable[..., None]:
    """The loop that updates the lane's share of the rows that are named, in the order in which they were first named,
    each by the sum of its gradients in the order of replicas and places. ``share`` is the lane, how many there are, the
    table's height and width; ``scratch`` is of two pieces, the first one of -0.0."""

    def loop(
        values: Array,
        indices: Array,
        lengths: Array,
        share: Array,
        memory: tuple[Array, Array, Array],
        arrays: tuple[Array, ...],
        numbers: tuple[Any, ...],
        lane: tuple[Array, Array, Array, Array],
    ) -> None:
        progress, area, scratch, alarm = lane
        (table, named, brought), chunk = memory, len(scratch) // 2
        like, width = arrays[0], share[3]
        count = _share(values, indices, lengths, share, width * like.itemsize, table, named, brought)
        done, number, ahead = _done(progress), 0, min(width, chunk)
        for k in range(count):
            if k + _AHEAD < count:
                start = named[k + _AHEAD, 0] * width
                for array in arrays:
                    _foresee(array, start, start + ahead)
                _foresee(_elements(brought[named[k + _AHEAD, 1], 0], like, width), 0, ahead)
            for first in range(0, width, chunk):
                number += 1
                if number <= done:
                    continue
                last = min(first + chunk, width)
                g, h = _addends_of_row(brought, named[k, 1], like, width, first, last, scratch)
                start = named[k, 0] * width
                piece(arrays, start + first, start + last, g, h, number, numbers, progress, area, alarm)

    return loop


def rowwise(squares: Callable[..., None], piece: Callable[..., None]) -> Callable[..., None]:
    """The loop as `sparse` makes it, for a rule with one number for each row, which lie in the second of ``arrays``.

    The first piece of a row adds the mean of its squares to its number, from the parameters as they were; the others
    update its parameters. ``partial`` has room for the sums of the squares.
    """

    def loop(
        values: Array,
        indices: Array,
        lengths: Array,
        share: Array,
        memory: tuple[Array, Array, Array],
        partial: Array,
        arrays: tuple[Array, Array],
        numbers: tuple[Any, ...],
        lane: tuple[Array, Array, Array, Array],
    ) -> None:
        progress, area, scratch, alarm = lane
        (table, named, brought), chunk = memory, len(scratch) // 2
        (like, sums), width = arrays, share[3]
        count = _share(values, indices, lengths, share, width * like.itemsize, table, named, brought)
        done, number, ahead = _done(progress), 0, min(width, chunk)
        for k in range(count):
            if k + _AHEAD < count:
                row = named[k + _AHEAD, 0]
                _prefetch(sums, row)
                _foresee(like, row * width, row * width + ahead)
                _foresee(_elements(brought[named[k + _AHEAD, 1], 0], like, width), 0, ahead)
            row, node = named[k, 0], named[k, 1]
            start = row * width
            number += 1
            is_summed = number > done
            if is_summed:
                for part in range(partial.shape[0]):
                    partial[part] = 0
                for first in range(0, width, chunk):
                    last = min(first + chunk, width)
                    g, h = _addends_of_row(brought, node, like, width, first, last, scratch)
                    squares(first, like[start + first : start + last], g, h, numbers, partial)
                _add_mean(sums, row, partial, width, number, progress, area)
            for first in range(0, width, chunk):
                number += 1
                if number <= done:
                    continue
                last = min(first + chunk, width)
                if width > chunk or not is_summed:
                    g, h = _addends_of_row(brought, node, like, width, first, last, scratch)
                given = (sums[row], *numbers)
                piece((like,), start + first, start + last, g, h, number, given, progress, area, alarm)

    return loop


def squares(row: Callable[..., Any]) -> Callable[..., None]:
    """The loop that adds the squares of what a rule makes of parameters and gradients to partial sums: the i-th element
    of a row to that of number i modulo their count, as `cs_server.rules.mean_squares` does. ``first`` is the element of
    the row with which the arrays begin."""

    def loop(first: int, w: Array, g: Array, h: Array, numbers: tuple[Any, ...], partial: Array) -> None:
        whole = 0 if first % MEAN_LANES else w.shape[0] // MEAN_LANES * MEAN_LANES
        for i in range(0, whole, MEAN_LANES):
            for lane in range(MEAN_LANES):
                value = row(w[i + lane], g[i + lane] + h[i + lane], *numbers)
                partial[lane] += value * value
        for i in range(whole, w.shape[0]):
            value = row(w[i], g[i] + h[i], *numbers)
            partial[(first + i) % MEAN_LANES] += value * value

    return loop


@numba.njit(error_model="numpy", **_INLINED)
def _add_mean(sums: Array, row: int, partial: Array, width: int, number: int, progress: Array, area: Array) -> None:
    """Add the mean of a row to its number, as the lane's piece of that ``number``."""
    half = MEAN_LANES // 2
    while half > 0:
        for lane in range(half):
            partial[lane] += partial[lane + half]
        half //= 2
    partial[1] = width  # in the dtype of the sums
    if progress.shape[0] > 0:
        if progress[0] == 2 * number - 1:
            sums[row] = area[0]
        else:
            area[0] = sums[row]
            _tell(progress, 2 * number - 1)
    sums[row] += partial[0] / partial[1]
    if progress.shape[0] > 0:
        _tell(progress, 2 * number)


@numba.njit(error_model="numpy", **_INLINED)
def _addends_of_row(
    brought: Array, node: int, like: Array, width: int, first: int, last: int, scratch: Array
) -> tuple[Array, Array]:
    """Two arrays whose sum is that of elements first to last of the gradients of a row, which begin at ``node``."""
    g, h = _elements(brought[node, 0], like, width)[first:last], scratch[: last - first]
    node = brought[node, 1]
    while node >= 0:
        total = scratch[scratch.shape[0] // 2 :][: last - first]
        for i in range(total.shape[0]):
            total[i] = g[i] + h[i]
        g, h = total, _elements(brought[node, 0], like, width)[first:last]
        node = brought[node, 1]
    return g, h


@numba.njit(error_model="numpy", **_ALONE)
def _share(
    values: Array,
    indices: Array,
    lengths: Array,
    share: Array,
    nbytes: int,
    table: Array,
    named: Array,
    brought: Array,
) -> int:
    """How many different rows of the table the replicas name, of those that fall to the lane.

    ``named`` gets each row, its first gradient and its last one; ``brought`` of each gradient the address and the next
    one of its row, or -1. Both have room for all gradients. ``table``, a power of two, at least twice as many, finds
    the place of a row by its hash; of it so much is used as that takes.
    """
    mine, height = 0, np.uint64(share[2])
    for replica in range(lengths.shape[0]):
        rows = _elements(indices[replica], lengths, lengths[replica])
        for i in range(rows.shape[0]):
            row = rows[i]
            brought[mine, 0] = values[replica] + i * nbytes
            brought[mine, 1] = row
            falls = (row * _FACTOR >> 48 & 0xFFFF) * share[1] >> 16 == share[0]
            mine += falls & (np.uint64(row) < height)  # no branch, of which nobody could foresee the way
    size = 16
    while size < 2 * mine:
        size *= 2
    for slot in range(size):
        table[slot] = -1
    count, mask = 0, size - 1
    for gradient in range(mine):
        row = brought[gradient, 1]
        brought[gradient, 1] = -1
        slot = row * _FACTOR >> 29 & mask
        while table[slot] >= 0 and named[table[slot], 0] != row:
            slot = (slot + 1) & mask
        place = table[slot]
        if place < 0:
            place = table[slot] = count
            named[count, 0] = row
            named[count, 1] = gradient
            count += 1
        else:
            brought[named[place, 2], 1] = gradient
        named[place, 2] = gradient
    return count


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
            slot = row * _FACTOR >> 29 & mask
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


# How kernels are entered: the words are the address and the length of each array. First numbers, progress, area,
# scratch and alarm; then of a dense one ranges, addresses, scale, before, factors, which, of a sparse one the addresses
# of values and of indices, lengths, share, table, named, brought, and partial sums where a rule has one number for each
# row; at last parameters, slots. Of `_enter_merge` the arguments of `_merged`, and two counts: where the result goes,
# and the elements of a row.


@numba.njit(error_model="numpy", **_ALONE)
def _array(words: Array, place: int, dtype: Any) -> Array:
    return numba.carray(_pointer(words[2 * place], dtype), words[2 * place + 1])


@numba.njit(error_model="numpy", **_ALONE)
def _table(words: Array, place: int, width: int) -> Array:
    return numba.carray(_pointer(words[2 * place], words), (words[2 * place + 1], width))


@numba.njit(error_model="numpy", **_ALONE)
def _lane(words: Array, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """What every kernel of a rule has of its lane: progress, area, scratch and alarm."""
    integers = words.dtype
    return _array(words, 1, integers), _array(words, 2, dtype), _array(words, 3, dtype), _array(words, 4, integers)


def _enter_dense(loop: Any, arrays: Any, dtype: np.dtype[Any], count: int) -> Callable[[Any], None]:
    def enter(call: Any) -> None:
        words = numba.carray(call, 30)
        integers = words.dtype
        numbers: Any = to_fixed_tuple(_array(words, 0, dtype), count)
        ranges, addresses = _table(words, 5, 2), _array(words, 6, integers)
        scale, before = _array(words, 7, dtype), _array(words, 8, integers)
        factors, which, made = _array(words, 9, _FACTORS), _array(words, 10, integers), arrays(words, 11)
        loop(ranges, addresses, scale, before, factors, which, made, numbers, _lane(words, dtype))

    return enter


def _enter_sparse(loop: Any, arrays: Any, dtype: np.dtype[Any], count: int) -> Callable[[Any], None]:
    def enter(call: Any) -> None:
        words = numba.carray(call, 32)
        integers = words.dtype
        numbers: Any = to_fixed_tuple(_array(words, 0, dtype), count)
        values, indices, lengths = _array(words, 5, integers), _array(words, 6, integers), _array(words, 7, integers)
        share, table = _array(words, 8, integers), _array(words, 9, _PLACE)
        memory, made = (table, _table(words, 10, 3), _table(words, 11, 2)), arrays(words, 12)
        loop(values, indices, lengths, share, memory, made, numbers, _lane(words, dtype))

    return enter


def _enter_rowwise(loop: Any, arrays: Any, dtype: np.dtype[Any], count: int) -> Callable[[Any], None]:
    def enter(call: Any) -> None:
        words = numba.carray(call, 30)
        integers = words.dtype
        numbers: Any = to_fixed_tuple(_array(words, 0, dtype), count)
        values, indices, lengths = _array(words, 5, integers), _array(words, 6, integers), _array(words, 7, integers)
        share, table, partial = _array(words, 8, integers), _array(words, 9, _PLACE), _array(words, 12, dtype)
        memory, made = (table, _table(words, 10, 3), _table(words, 11, 2)), arrays(words, 13)
        loop(values, indices, lengths, share, memory, partial, made, numbers, _lane(words, dtype))

    return enter


def _enter_merge(dtype: np.dtype[Any]) -> Callable[[Any], None]:
    def enter(call: Any) -> None:
        words = numba.carray(call, 14)
        integers = words.dtype
        addresses, indices, lengths = _array(words, 0, integers), _array(words, 1, integers), _array(words, 2, integers)
        table, rows, counts = _array(words, 3, integers), _array(words, 4, integers), _array(words, 6, integers)
        sums = numba.carray(_pointer(words[10], dtype), (words[11], counts[1]))
        counts[0] = _merged(addresses, indices, lengths, table, rows, sums)

    return enter
