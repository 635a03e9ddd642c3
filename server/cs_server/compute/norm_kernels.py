"""Compiled code that adds up the squares of gradients, and code that turns squared norms into factors.

Squares are added up in double precision in one order, whoever adds them: the square of element i of a piece goes to
partial sum i modulo `LANES`, and then the halves of the partial sums are added until one is left. So a vector of
`LANES` elements is added at once, and `clipping.square_reference` gets the same bits in NumPy.

The code is written in LLVM's language, because its vectors and the order of its additions are the definition. It is
assembled within a tenth of a second, so it is not kept in files. It trusts its caller with addresses and lengths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import object_loader

__all__ = ["COMPILED", "LANES", "NO_BOUND", "OF_ALL", "OF_EACH", "factors", "square", "squares"]

LANES = 16
"""The partial sums of a squared norm."""

COMPILED = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
"""The dtypes whose squares compiled code adds up, and their names in LLVM's language."""

NO_BOUND, OF_EACH, OF_ALL = range(3)
"""The bound of a group of gradients: none; `Clipping.clipnorm`, of its only one; `Clipping.global_clipnorm`."""


@cache
def squares(dtype: np.dtype[Any]) -> object_loader.Bind:
    """The code that computes the squared norms of pieces of a summed gradient of this dtype, one of `COMPILED`.

    Its arrays: the addresses of the replicas' gradients, int64 [replicas]; their weights, of the dtype [replicas], of
    which one that is 0 leaves a gradient out; the bound of each element of the sum, of the dtype [1]; the first element
    of each piece and the one after its last, int64 [pieces, 2]; and float64 [pieces] for the squares.
    """
    return object_loader.assembled(_squares_code(COMPILED[dtype]))


@cache
def factors() -> object_loader.Bind:
    """The code that does what `clipping.factors_together` does. What it calls a gradient is a range of dense elements,
    or a table.

    Its arrays: the squares of all pieces, float64 [pieces]; of each gradient the number of the piece after its last,
    int64 [gradients]; of each group of gradients the number of the gradient after its last, and what its bound is,
    int64 [groups, 2]; the bounds of the groups, float64 [groups]; what else each gradient is multiplied by, float64
    [gradients]; the bound of all together and its epsilon, float64 [2], or nothing, float64 [0]; and float64
    [gradients] for the factors. A factor that is not a number has the bits of `math.nan`.
    """
    return object_loader.assembled(_FACTORS.format(symbol=object_loader.SYMBOL, no_bound=NO_BOUND, of_all=OF_ALL))


def square(values: NDArray[Any]) -> float:
    """The squared norm of an array of a dtype in `COMPILED`, as one piece."""
    flat = np.ascontiguousarray(values).reshape(-1)
    found, dtype = np.zeros(1), flat.dtype
    arrays = np.array([flat.ctypes.data], np.int64), np.ones(1, dtype), np.full(1, np.inf, dtype)
    squares(dtype)(*arrays, np.array([[0, len(flat)]], np.int64), found)()
    return float(found[0])


def _squares_code(number: str) -> str:
    kind, nbytes = {"float": ("f32", 4), "double": ("f64", 8)}[number]
    vector, indices = f"<{LANES} x {number}>", f"<{LANES} x i64>"
    return _SQUARES.format(
        symbol=object_loader.SYMBOL,
        number=number,
        nbytes=nbytes,
        vector=vector,
        indices=indices,
        sums=_SUMS,
        mask=f"<{LANES} x i1>",
        masked=f"@llvm.masked.load.v{LANES}{kind}.p0",
        lanes=LANES,
        places="<" + ", ".join(f"i64 {lane}" for lane in range(LANES)) + ">",
        # Adding to it changes no number, not even the sign of a zero.
        nothing="<" + ", ".join([f"{number} -0.0"] * LANES) + ">",
        upper=_splat("upper", "%limit", number),
        weights=_splat("weights.of", "%weight", number),
        left=_splat("left.of", "%left", "i64"),
        widened=f"fpext {vector} %upped to {_SUMS}" if number == "float" else f"fadd {vector} %upped, zeroinitializer",
        fold=_fold(),
    )


_SUMS = f"<{LANES} x double>"


def _splat(name: str, value: str, element: str) -> str:
    """The instructions that make a vector of one value."""
    vector, choice = f"<{LANES} x {element}>", f"<{LANES} x i32> zeroinitializer"
    return f"""%{name}.first = insertelement {vector} undef, {element} {value}, i64 0
  %{name} = shufflevector {vector} %{name}.first, {vector} undef, {choice}"""


def _fold() -> str:
    """The instructions that add the halves of ``%sums`` until one number is left, ``%half.1``."""
    lines, whole, size = [], "%sums", LANES
    while size > 1:
        vector, half = f"<{size} x double>", size // 2
        for name, first in (("low", 0), ("high", half)):
            choice = ", ".join(f"i32 {first + lane}" for lane in range(half))
            lines.append(f"%{name}.{half} = shufflevector {vector} {whole}, {vector} undef, <{half} x i32> <{choice}>")
        lines.append(f"%half.{half} = fadd <{half} x double> %low.{half}, %high.{half}")
        whole, size = f"%half.{half}", half
    return "\n  ".join(lines)


_SQUARES = """
declare {vector} {masked}(ptr, i32, {mask}, {vector})

define i32 @{symbol}(ptr %result, ptr %raised, ptr %given) {{
entry:
  %addresses = load ptr, ptr %given
  %replicas.at = getelementptr i64, ptr %given, i64 1
  %replicas = load i64, ptr %replicas.at
  %weights.at = getelementptr i64, ptr %given, i64 2
  %weights = load ptr, ptr %weights.at
  %limit.at = getelementptr i64, ptr %given, i64 4
  %limit.of = load ptr, ptr %limit.at
  %limit = load {number}, ptr %limit.of
  {upper}
  %lower = fneg {vector} %upper
  %pieces.at = getelementptr i64, ptr %given, i64 6
  %pieces = load ptr, ptr %pieces.at
  %count.at = getelementptr i64, ptr %given, i64 7
  %count = load i64, ptr %count.at
  %squares.at = getelementptr i64, ptr %given, i64 8
  %squares = load ptr, ptr %squares.at
  br label %next.piece
next.piece:
  %piece = phi i64 [ 0, %entry ], [ %piece.next, %folded ]
  %is.over = icmp eq i64 %piece, %count
  br i1 %is.over, label %over, label %begin
begin:
  %start.at = getelementptr [2 x i64], ptr %pieces, i64 %piece, i64 0
  %stop.at = getelementptr [2 x i64], ptr %pieces, i64 %piece, i64 1
  %start = load i64, ptr %start.at
  %stop = load i64, ptr %stop.at
  br label %next

; The elements from %i on, as many as a vector has.
next:
  %i = phi i64 [ %start, %begin ], [ %i.next, %square ]
  %sums = phi {sums} [ zeroinitializer, %begin ], [ %sums.next, %square ]
  %left = sub i64 %stop, %i
  %is.some = icmp sgt i64 %left, 0
  br i1 %is.some, label %some, label %folded
some:
  %is.whole = icmp sge i64 %left, {lanes}
  {left}
  %is.in = icmp slt {indices} {places}, %left.of
  br label %next.replica
next.replica:
  %replica = phi i64 [ 0, %some ], [ %replica.next, %added ]
  %total = phi {vector} [ {nothing}, %some ], [ %total.next, %added ]
  %is.summed = icmp eq i64 %replica, %replicas
  br i1 %is.summed, label %square, label %weigh
weigh:
  %weight.at = getelementptr {number}, ptr %weights, i64 %replica
  %weight = load {number}, ptr %weight.at
  %is.out = fcmp oeq {number} %weight, 0.0
  br i1 %is.out, label %added, label %read
read:
  %address.at = getelementptr i64, ptr %addresses, i64 %replica
  %gradient = load ptr, ptr %address.at
  %at = getelementptr {number}, ptr %gradient, i64 %i
  br i1 %is.whole, label %whole, label %rest
whole:
  %all = load {vector}, ptr %at, align {nbytes}
  br label %add
rest:
  %few = call {vector} {masked}(ptr %at, i32 {nbytes}, {mask} %is.in, {vector} zeroinitializer)
  br label %add
add:
  %values = phi {vector} [ %all, %whole ], [ %few, %rest ]
  {weights}
  %product = fmul {vector} %values, %weights.of
  %sum = fadd {vector} %total, %product
  br label %added
added:
  %total.next = phi {vector} [ %total, %weigh ], [ %sum, %add ]
  %replica.next = add i64 %replica, 1
  br label %next.replica
square:
  %is.low = fcmp ole {vector} %total, %lower
  %lowered = select {mask} %is.low, {vector} %lower, {vector} %total
  %is.high = fcmp oge {vector} %lowered, %upper
  %upped = select {mask} %is.high, {vector} %upper, {vector} %lowered
  %wide = {widened}
  %squared = fmul {sums} %wide, %wide
  %sums.next = fadd {sums} %sums, %squared
  %i.next = add i64 %i, {lanes}
  br label %next

folded:
  {fold}
  %norm = extractelement <1 x double> %half.1, i64 0
  %square.at = getelementptr double, ptr %squares, i64 %piece
  store double %norm, ptr %square.at
  %piece.next = add i64 %piece, 1
  br label %next.piece
over:
  ret i32 0
}}
"""

_FACTORS = """
declare double @llvm.sqrt.f64(double)

; Add a number to a sum, of which the second part is what the first one has lost by rounding.
define internal void @add(ptr %sum, double %more) {{
  %lost.at = getelementptr double, ptr %sum, i64 1
  %before = load double, ptr %sum
  %after = fadd double %before, %more
  %taken = fsub double %after, %before
  %kept = fsub double %after, %taken
  %one = fsub double %before, %kept
  %other = fsub double %more, %taken
  %rounded = fadd double %one, %other
  %lost = load double, ptr %lost.at
  %lost.next = fadd double %lost, %rounded
  store double %after, ptr %sum
  store double %lost.next, ptr %lost.at
  ret void
}}

; The square root of a sum.
define internal double @root(ptr %sum) {{
  %lost.at = getelementptr double, ptr %sum, i64 1
  %first = load double, ptr %sum
  %lost = load double, ptr %lost.at
  %exact = fadd double %first, %lost
  %none = fsub double %first, %first
  %is.finite = fcmp oeq double %none, 0.0
  %whole = select i1 %is.finite, double %exact, double %first
  %root = call double @llvm.sqrt.f64(double %whole)
  ret double %root
}}

define i32 @{symbol}(ptr %result, ptr %raised, ptr %given) {{
entry:
  %squares = load ptr, ptr %given
  %ends.at = getelementptr i64, ptr %given, i64 2
  %ends = load ptr, ptr %ends.at
  %count.at = getelementptr i64, ptr %given, i64 3
  %count = load i64, ptr %count.at
  %groups.at = getelementptr i64, ptr %given, i64 4
  %groups = load ptr, ptr %groups.at
  %group.count.at = getelementptr i64, ptr %given, i64 5
  %group.count = load i64, ptr %group.count.at
  %bounds.at = getelementptr i64, ptr %given, i64 6
  %bounds = load ptr, ptr %bounds.at
  %others.at = getelementptr i64, ptr %given, i64 8
  %others = load ptr, ptr %others.at
  %common.at = getelementptr i64, ptr %given, i64 10
  %common.of = load ptr, ptr %common.at
  %common.count.at = getelementptr i64, ptr %given, i64 11
  %common.count = load i64, ptr %common.count.at
  %found.at = getelementptr i64, ptr %given, i64 12
  %found = load ptr, ptr %found.at
  %of.group = alloca [2 x double]
  %of.all = alloca [2 x double]
  store [2 x double] zeroinitializer, ptr %of.all
  br label %next.group

; The squares of the gradients of a group are put where the factors will be.
next.group:
  %group = phi i64 [ 0, %entry ], [ %group.next, %bounded ]
  %first = phi i64 [ 0, %entry ], [ %last, %bounded ]
  %first.piece = phi i64 [ 0, %entry ], [ %piece.of, %bounded ]
  %is.last = icmp eq i64 %group, %group.count
  br i1 %is.last, label %together, label %of
of:
  %last.at = getelementptr [2 x i64], ptr %groups, i64 %group, i64 0
  %kind.at = getelementptr [2 x i64], ptr %groups, i64 %group, i64 1
  %bound.at = getelementptr double, ptr %bounds, i64 %group
  %last = load i64, ptr %last.at
  %kind = load i64, ptr %kind.at
  %bound = load double, ptr %bound.at
  store [2 x double] zeroinitializer, ptr %of.group
  br label %next.gradient
next.gradient:
  %gradient = phi i64 [ %first, %of ], [ %gradient.next, %summed ]
  %piece.of = phi i64 [ %first.piece, %of ], [ %piece, %summed ]
  %is.end = icmp eq i64 %gradient, %last
  br i1 %is.end, label %find, label %sum
sum:
  %end.at = getelementptr i64, ptr %ends, i64 %gradient
  %end = load i64, ptr %end.at
  br label %next.piece
next.piece:
  %piece = phi i64 [ %piece.of, %sum ], [ %piece.next, %more ]
  %square = phi double [ 0.0, %sum ], [ %square.next, %more ]
  %is.whole = icmp eq i64 %piece, %end
  br i1 %is.whole, label %summed, label %more
more:
  %part.at = getelementptr double, ptr %squares, i64 %piece
  %part = load double, ptr %part.at
  %square.next = fadd double %square, %part
  %piece.next = add i64 %piece, 1
  br label %next.piece
summed:
  %square.at = getelementptr double, ptr %found, i64 %gradient
  store double %square, ptr %square.at
  call void @add(ptr %of.group, double %square)
  %gradient.next = add i64 %gradient, 1
  br label %next.gradient

find:
  %norm = call double @root(ptr %of.group)
  %is.longer = fcmp ogt double %norm, %bound
  %longer = select i1 %is.longer, double %norm, double %bound
  %ratio = fdiv double %bound, %longer
  %is.none = fcmp oeq double %longer, 0.0
  %some = select i1 %is.none, double 1.0, double %ratio
  %is.infinite = fcmp oeq double %norm, 0x7FF0000000000000
  %is.of.all = icmp eq i64 %kind, {of_all}
  %is.spoilt = and i1 %is.infinite, %is.of.all
  %is.nan = fcmp uno double %norm, 0.0
  %is.lost = or i1 %is.spoilt, %is.nan
  %own = select i1 %is.lost, double 0x7FF8000000000000, double %some
  %is.free = icmp eq i64 %kind, {no_bound}
  %factor = select i1 %is.free, double 1.0, double %own
  br label %next.bounded
next.bounded:
  %place = phi i64 [ %first, %find ], [ %place.next, %bound.one ]
  %is.bounded = icmp eq i64 %place, %last
  br i1 %is.bounded, label %bounded, label %bound.one
bound.one:
  %place.at = getelementptr double, ptr %found, i64 %place
  %whole = load double, ptr %place.at
  %once = fmul double %whole, %factor
  %twice = fmul double %once, %factor
  call void @add(ptr %of.all, double %twice)
  store double %factor, ptr %place.at
  %place.next = add i64 %place, 1
  br label %next.bounded
bounded:
  %group.next = add i64 %group, 1
  br label %next.group

together:
  %is.alone = icmp eq i64 %common.count, 0
  br i1 %is.alone, label %multiply, label %common
common:
  %limit = load double, ptr %common.of
  %epsilon.at = getelementptr double, ptr %common.of, i64 1
  %epsilon = load double, ptr %epsilon.at
  %left = call double @root(ptr %of.all)
  %length = fadd double %left, %epsilon
  %quotient = fdiv double %limit, %length
  %is.zero = fcmp oeq double %length, 0.0
  %is.short = fcmp oge double %quotient, 1.0
  %is.one = or i1 %is.zero, %is.short
  %shared = select i1 %is.one, double 1.0, double %quotient
  br label %multiply
multiply:
  %for.all = phi double [ 1.0, %together ], [ %shared, %common ]
  br label %next.factor
next.factor:
  %which = phi i64 [ 0, %multiply ], [ %which.next, %set ]
  %is.over = icmp eq i64 %which, %count
  br i1 %is.over, label %over, label %set
set:
  %factor.at = getelementptr double, ptr %found, i64 %which
  %other.at = getelementptr double, ptr %others, i64 %which
  %of.own = load double, ptr %factor.at
  %other = load double, ptr %other.at
  %both = fmul double %of.own, %for.all
  %product = fmul double %both, %other
  %is.no.number = fcmp uno double %product, 0.0
  %final = select i1 %is.no.number, double 0x7FF8000000000000, double %product
  store double %final, ptr %factor.at
  %which.next = add i64 %which, 1
  br label %next.factor
over:
  ret i32 0
}}
"""
