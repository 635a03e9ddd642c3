"""CUDA C for variables on a GPU: generated from the table of update rules, with the loops around it.

This module owns the text of every kernel of the server; `cuda` compiles and launches it. It reads a rule's `step` as
source and rewrites it operator by operator, so the arithmetic of a rule is written once, in `rules`. The result is
plain C with a few words of CUDA, so it can be compiled and compared with `rules.reference` without a GPU.

A kernel works on *pieces*: rows of an int64 table on the device, one for each block of threads. A row has a count of
elements and their addresses, which may be anywhere the device can read: in parts of a slab, in rows of a table, in
gradients in page-locked host memory.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

from cs_proto.errors import InvalidArgumentError
from cs_server.rules import Rule

__all__ = ["THREADS", "loops", "update", "update_name", "width_of"]

THREADS = 256
"""Threads of a block. A piece of fewer elements leaves some without work; one of more gives them several."""

# The stored type of an element, and the type in which it is computed (`computed_in`).
_STORED = {"float16": "unsigned short", "float32": "float", "float64": "double"}
_VALUE = {"float16": "float", "float32": "float", "float64": "double"}

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_FUNCTIONS = {"sqrt": "sqrt", "abs": "fabs", "copysign": "copysign"}  # of C's library
_OWN = ("maximum", "sign")

_HEAD = """\
typedef {stored} stored;
typedef {value} value;
"""

# Halves are converted by the instruction itself, because a server's machine may lack the header for it.
_HALF = """\
#ifdef __CUDACC__
static __device__ value load(const stored *from)
{
    value wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(*from));
    return wide;
}
static __device__ void store(stored *to, value wide)
{
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(*to) : "f"(wide));
}
#else
static value load(const stored *from) { return *(const _Float16 *)from; }
static void store(stored *to, value wide) { *(_Float16 *)to = wide; }
#endif
"""

_WHOLE = """\
static __device__ value load(const stored *from) { return *from; }
static __device__ void store(stored *to, value wide) { *to = wide; }
"""

# As NumPy's functions: a NaN is the maximum, whichever of the two it is, and its own sign.
_OWN_FUNCTIONS = """\
static __device__ value maximum(value a, value b) { return a >= b || a != a ? a : b; }
static __device__ value sign(value a) { return a != a ? a : (value)((a > 0) - (a < 0)); }
"""

# The gradient of one element: summed over the replicas in their order, each times its weight, and clipped. A piece
# without an address has none. The weights (doubles) stand behind the addresses.
_GRADIENT = """\
static __device__ value gradient(const long long *addresses, int replicas, long long i, value limit)
{
    const double *const weights = (const double *)(addresses + replicas);
    value sum = 0;
    int is_first = 1;
    for (int replica = 0; replica < replicas; replica++) {
        const value weight = (value)weights[replica];
        if (weight == 0 || !addresses[replica])
            continue;
        const value term = load((const stored *)addresses[replica] + i) * weight;
        sum = is_first ? term : sum + term;
        is_first = 0;
    }
    return sum < -limit ? -limit : sum > limit ? limit : sum;
}
"""

# A piece: count, whether the variable itself changes, factor (a double), variable, slots, gradients of the replicas and
# their weights.
_UPDATE = """\
extern "C" __global__ void {name}(const long long *pieces, int replicas, value limit{number_parameters})
{{
    const long long *piece = pieces + (long long)blockIdx.x * ({first_gradient} + 2 * replicas);
    const long long count = piece[0];
    const value factor = (value)*(const double *)(piece + 2);
    stored *const w = (stored *)piece[3];
{slot_pointers}\
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {{
        value after[{count_of_arrays}];
        value g = gradient(piece + {first_gradient}, replicas, i, limit) * factor;
        step(load(w + i), g{slot_loads}{number_arguments}, after);
        if (piece[1])
            store(w + i, after[0]);
{slot_stores}\
    }}
}}
"""

# A piece of `squares` is like that of an update, without variable and slots. Every thread has a sum of its own, and one
# thread adds up the sums of a piece, so the order is the same every time.
_LOOPS = """\
extern "C" __global__ void squares(const long long *pieces, int replicas, value limit, double *partial)
{
    const long long *piece = pieces + (long long)blockIdx.x * (1 + 2 * replicas);
    double sum = 0;
    for (long long i = threadIdx.x; i < piece[0]; i += blockDim.x) {
        const double wide = gradient(piece + 1, replicas, i, limit);
        sum = sum + wide * wide;
    }
    partial[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
extern "C" __global__ void fold(const double *partial, int threads, long long count, double *sums)
{
    const long long which = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (which >= count)
        return;
    double sum = 0;
    for (int thread = 0; thread < threads; thread++)
        sum = sum + partial[which * threads + thread];
    sums[which] = sum;
}
extern "C" __global__ void copy(const long long *pieces)
{
    const long long *piece = pieces + (long long)blockIdx.x * 3;
    const stored *const from = (const stored *)piece[1];
    stored *const to = (stored *)piece[2];
    for (long long i = threadIdx.x; i < piece[0]; i += blockDim.x)
        to[i] = from[i];
}
extern "C" __global__ void fill(stored *to, long long count, value with)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        store(to + i, with);
}
"""


@cache
def update(rule: Rule, dtype: str) -> str:
    """The source of the kernel :func:`update_name` of a rule.

    Its parameters are the table of pieces, the number of replicas, the bound of every element of the summed gradient
    (infinity: none) and the rule's numbers. Bound and numbers have the dtype of :func:`computed_in`. A row of the table
    has :func:`width_of` entries: the count of elements, whether the variable itself changes or only its slots, a
    double by which the sum is multiplied, the addresses of the variable, of each slot and of each gradient, and a
    double for each gradient, its weight. A gradient whose weight is 0 is left out.

    Raises InvalidArgumentError for a step with anything but arithmetic, sqrt, abs, sign, maximum and copysign, and for
    a rule with one number for each row.
    """
    if rule.row is not None:
        raise InvalidArgumentError(f"{rule.name} has no kernel for GPUs; the catalogue refuses such variables")
    names = list(inspect.signature(rule.step).parameters)
    slots, numbers = names[2 : 2 + len(rule.slots)], names[2 + len(rule.slots) :]
    places = range(4, 4 + len(slots))
    return _head(dtype) + (
        _step(rule, names, _VALUE[dtype])
        + _UPDATE.format(
            name=update_name(rule, dtype),
            number_parameters="".join(f", value {name}" for name in numbers),
            first_gradient=4 + len(slots),
            count_of_arrays=1 + len(slots),
            slot_pointers="".join(f"    stored *const slot_{at} = (stored *)piece[{at}];\n" for at in places),
            slot_loads="".join(f", load(slot_{at} + i)" for at in places),
            number_arguments="".join(f", {name}" for name in numbers),
            slot_stores="".join(f"        store(slot_{at} + i, after[{at - 3}]);\n" for at in places),
        )
    )


@cache
def loops(dtype: str) -> str:
    """The source of the kernels that depend on no rule.

    ``squares`` (pieces of count, gradients and weights, replicas, bound, one double for each thread) and ``fold``
    (those doubles, their number for each piece, the number of pieces, one double for each piece) give the squared norm
    of the summed gradient. ``copy`` moves pieces of count, address from, address to; ``fill`` sets elements to one
    value.
    """
    return _head(dtype) + _LOOPS


def update_name(rule: Rule, dtype: str) -> str:
    """The name of the kernel of :func:`update`."""
    return f"{rule.kernel}_{dtype}"


def width_of(rule: Rule, replicas: int) -> int:
    """The number of entries in a piece of an update."""
    return 4 + len(rule.slots) + 2 * replicas


def _head(dtype: str) -> str:
    convert = _HALF if dtype == "float16" else _WHOLE
    return _HEAD.format(stored=_STORED[dtype], value=_VALUE[dtype]) + convert + _OWN_FUNCTIONS + _GRADIENT


def _step(rule: Rule, names: list[str], value: str) -> str:
    """The rule's step as a C function, which stores its results in its last argument."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(rule.step))).body
    assert isinstance(function, ast.FunctionDef)
    known = set(names)
    lines = []
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=right):
                lines.append(f"{'' if name in known else 'value '}{name} = {_expression(right, value)};")
                known.add(name)
            case ast.Return(value=ast.Tuple(elts=results)):
                lines += [f"after[{at}] = {_expression(each, value)};" for at, each in enumerate(results)]
            case _:
                raise _untranslated(statement)
    parameters = ", ".join(f"value {name}" for name in names)
    body = "".join(f"    {line}\n" for line in lines)
    return f"static __device__ void step({parameters}, value *after)\n{{\n{body}}}\n"


def _expression(node: ast.expr, value: str) -> str:
    suffix = "f" if value == "float" else ""
    match node:
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_expression(operand, value)})"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"pow{suffix}({_expression(left, value)}, {_expression(right, value)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({_expression(left, value)} {_OPERATORS[type(op)]} {_expression(right, value)})"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr=name), args=args, keywords=[]):
            arguments = ", ".join(_expression(each, value) for each in args)
            if name in _OWN:
                return f"{name}({arguments})"
            if name in _FUNCTIONS:
                return f"{_FUNCTIONS[name]}{suffix}({arguments})"
    raise _untranslated(node)


def _untranslated(node: ast.AST) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the step of a rule may use only arithmetic, sqrt, abs, sign, maximum and copysign, not {ast.unparse(node)!r}"
    )
