"""Arguments like those of an earlier step: their pickle is the earlier one with the bytes of other arrays.

From step to step most arguments change in the values of their arrays alone. To pickle an array, Python's code is
called several times; to put its bytes into a known pickle it is not.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from central_storage.core.tensors.tensor import Tensor
from cs_proto.arrays import INLINE_NBYTES

from . import reconstruct
from .pickler import NO_ARGUMENTS, NUMBERS, PLAIN, Adopt, dump_arguments

__all__ = ["ArgumentsPickler"]

_ARRAYS = frozenset({np.ndarray, Tensor})
_SEQUENCES = frozenset({tuple, list})
_CONSTANTS = frozenset({type(None), bool, int, float, str, bytes})
# So many patterns are kept. When as many arguments in a row have had none, as with a number that always changes, only
# every 128th gets one, and that one alone is tried.
_MOST, _SELDOM = 8, 128
# A pattern of more nodes takes longer than a pickler, which goes through containers in C.
_MOST_NODES = 64
# A pattern keeps its constants, which may be long texts.
_MOST_NBYTES = 64 << 10
# Stands for the bytes of an array, followed by its number.
_MARK = os.urandom(24)


class ArgumentsPickler:
    """Pickles the arguments of one step after the other."""

    def __init__(self) -> None:
        self._patterns: list[_Pattern] = []
        self._vain = 0  # how many arguments have had no pattern since some had one

    def dump(
        self, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], adopt: Adopt
    ) -> list[tuple[bytes, tuple[memoryview, ...]]]:
        """The arguments of each replica as :func:`~central_storage.pickling.pickler.dump_arguments` returns them, with
        their large buffers where they are. Raises as it does."""
        dumped: list[tuple[bytes, tuple[memoryview, ...]]] = []
        for args, kwargs in arguments:
            data = None if args or kwargs else NO_ARGUMENTS
            for pattern in self._patterns if data is None else ():
                if (data := pattern.filled(args, kwargs)) is not None:
                    if not dumped:  # a pattern that the first replica's arguments were given may fit the others'
                        self._vain = 0
                    break
            dumped.append(self._dump(args, kwargs, adopt) if data is None else (data, ()))
        return dumped

    def _dump(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], adopt: Adopt
    ) -> tuple[bytes, tuple[memoryview, ...]]:
        data, buffers = dump_arguments(args, kwargs, adopt, _in_place)
        self._vain += 1
        is_usual = self._vain <= _MOST
        if (is_usual or self._vain % _SELDOM == 0) and data[-1:] == PLAIN and not buffers:
            pattern = _pattern_of(args, kwargs)
            if pattern is not None:
                self._patterns = [pattern, *self._patterns[: _MOST - 1]] if is_usual else [pattern]
        return data, buffers


class _End:
    """Comes after the parts of a container."""


_END = _End()


class _Pattern:
    """The pickle of some arguments, without the bytes of their arrays."""

    def __init__(self, nodes: Sequence[tuple[Any, Any]], pieces: Sequence[bytes]) -> None:
        """``nodes`` are the parts of the arguments in the order of :meth:`filled`: their types, and the constants that
        they are; for an array its dtype, its shape, and the number of the piece that is its bytes."""
        self._nodes = nodes
        self._pieces = pieces
        places = [place for place, (kind, _) in enumerate(nodes) if kind in _ARRAYS]
        self._arrays = len(places)
        self._several = itemgetter(*places) if places[1:] else None

    def filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
        """The pickle of these arguments; None if they are of another pattern."""
        nodes: list[Any] = [args, kwargs]  # grows while the loop goes through it
        pieces = [*self._pieces]
        for node, (kind, known) in zip(nodes, self._nodes, strict=False):
            if type(node) is not kind:
                return None
            if kind in _ARRAYS:
                dtype, shape, piece = known
                if node.dtype is not dtype or node.shape != shape or not node.flags.c_contiguous:
                    return None
                pieces[piece] = node.tobytes()
            elif kind in _SEQUENCES:
                nodes += (*node, _END)
            elif kind is dict:
                nodes += (*node, *node.values(), _END) if node else (_END,)
            elif node is not known and (kind is float or node != known):  # 0.0 and -0.0 are equal
                return None
        if self._several is not None and len({*map(id, self._several(nodes))}) < self._arrays:
            return None  # an array that comes twice is pickled once
        return b"".join(pieces)


def _pattern_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pattern | None:
    """The pattern of these plain arguments; None if they have other parts than small arrays and constants."""
    nodes: list[Any] = [args, kwargs]  # as in _Pattern.filled
    containers = 0
    marks: dict[int, bytes] = {}
    for node in nodes:
        kind = type(node)
        containers += kind is list or kind is dict
        if len(nodes) > _MOST_NODES or containers > 2:  # kwargs and another one, which cannot come twice
            return None
        if kind in _ARRAYS:
            is_usual = id(node.dtype) in NUMBERS and node.flags.c_contiguous and node.nbytes <= INLINE_NBYTES
            if id(node) in marks or not is_usual:
                return None
            marks[id(node)] = b"%b%02d" % (_MARK, len(marks))
        elif kind in _SEQUENCES:
            nodes += (*node, _END)
        elif kind is dict:
            nodes += (*node, *node.values(), _END)
        elif kind not in _CONSTANTS and node is not _END:
            return None
    pieces, places, rest = [], {}, _marked((args, kwargs), marks)
    for array, mark in sorted(marks.items(), key=lambda each: rest.index(each[1])):
        head, _, rest = rest.partition(pickle.SHORT_BINBYTES + bytes([len(mark)]) + mark)
        pieces += [head, b""]
        places[array] = len(pieces) - 1
    for node in nodes:
        if type(node) in _ARRAYS:
            pieces[places[id(node)] - 1] += _beginning(node.nbytes)
    if sum(map(len, pieces)) + len(rest) > _MOST_NBYTES:
        return None
    known = [(type(node), _known(node, places)) for node in nodes]
    return _Pattern(known, [*pieces, rest + PLAIN])


def _known(node: Any, places: dict[int, int]) -> object:
    if type(node) in _ARRAYS:
        return node.dtype, node.shape, places[id(node)]
    return node if type(node) in _CONSTANTS or node is _END else None


def _beginning(nbytes: int) -> bytes:
    """What comes before so many bytes in a pickle."""
    if nbytes < 256:
        return pickle.SHORT_BINBYTES + bytes([nbytes])
    return pickle.BINBYTES + nbytes.to_bytes(4, "little")


def _marked(root: object, marks: dict[int, bytes]) -> bytes:
    """The pickle of ``root`` with marks for the bytes of the arrays with these ids. Later protocols than this divide a
    pickle into frames, whose sizes depend on those of the arrays."""
    file = io.BytesIO()
    _MarkPickler(file, marks).dump(root)
    return file.getvalue()


class _MarkPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, marks: dict[int, bytes]) -> None:
        super().__init__(file, protocol=3)
        self._marks = marks

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in _ARRAYS:  # reconstruct.array_over
            return NotImplemented
        return reconstruct.array_over, (self._marks[id(obj)], NUMBERS[id(obj.dtype)], obj.shape, "C")


def _in_place(data: memoryview) -> memoryview:
    return data
