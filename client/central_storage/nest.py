"""Nests: containers inside containers with values at the leaves, walked as ``tf.nest`` walks them.

Containers are lists, tuples, named tuples and dicts (also OrderedDict and defaultdict); anything else is a leaf,
also None, PerReplica and IndexedSlices. Dicts are walked in the order of their sorted keys and keep their
own order in results. The walking itself is optree's. Users call this module as ``cs.nest``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optree

from cs_proto.errors import InvalidArgumentError
from cs_proto.printable import counted

from .diagnostics.tensorflow_names import attributes

__all__ = ["assert_same_structure", "flatten", "map_structure", "pack_sequence_as"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.nest")


def map_structure(function: Callable[..., Any], *structures: Any, check_types: bool = True) -> Any:
    """A nest like the first of ``structures`` with ``function(leaf, …)`` at its leaves, one leaf of each structure.

    Args:
        function: The function of the leaves.
        *structures: Nests of one structure.
        check_types: Whether the types of containers must be the same, too.

    Raises:
        TypeError: ``function`` cannot be called, or the types of containers differ.
        ValueError: There are no structures, or they differ.

    Examples:
        >>> import central_storage as cs
        >>> cs.nest.map_structure(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
        {'x': 11, 'y': (22, 33)}
    """
    if not callable(function):
        raise TypeError(f"map_structure needs a function, not {function!r}")
    if not structures:
        raise InvalidArgumentError("map_structure needs at least one structure")
    for other in structures[1:]:
        assert_same_structure(structures[0], other, check_types=check_types)
    leaves = zip(*map(flatten, structures), strict=True)
    return pack_sequence_as(structures[0], [function(*together) for together in leaves])


def flatten(structure: Any) -> list[Any]:
    """The leaves in order.

    Args:
        structure: A nest; a leaf gives the list of itself.

    Raises:
        TypeError: The keys of a dict cannot be sorted.

    Examples:
        >>> import central_storage as cs
        >>> cs.nest.flatten({"b": [2, 3], "a": 1})
        [1, 2, 3]
    """
    leaves, _, order = _walk(structure)
    return [leaves[place] for place in order]


def pack_sequence_as(structure: Any, flat_sequence: Sequence[Any]) -> Any:
    """A nest like ``structure`` with the values of ``flat_sequence`` at its leaves: the inverse of :func:`flatten`.

    Args:
        structure: A nest.
        flat_sequence: As many values as ``structure`` has leaves.

    Raises:
        TypeError: ``flat_sequence`` is not a sequence.
        ValueError: It has more or fewer values than ``structure`` has leaves.

    Examples:
        >>> import central_storage as cs
        >>> cs.nest.pack_sequence_as((0, [0, 0]), [1, 2, 3])
        (1, [2, 3])
    """
    if isinstance(flat_sequence, str | bytes) or not isinstance(flat_sequence, Sequence):
        raise TypeError(f"pack_sequence_as needs a flat sequence of values, not {flat_sequence!r}")
    _, treespec, order = _walk(structure)
    if len(flat_sequence) != len(order):
        raise InvalidArgumentError(
            f"{counted(len(flat_sequence), 'value')} for a structure with {counted(len(order), 'leaf', 'leaves')}: "
            f"{structure!r}"
        )
    packed: list[Any] = [None] * len(order)
    for place, value in zip(order, flat_sequence, strict=True):
        packed[place] = value
    return treespec.unflatten(packed)


def assert_same_structure(nest1: Any, nest2: Any, check_types: bool = True) -> None:
    """Raise where two nests differ in more than their leaves.

    Any two kinds of dict count as one type, and so do named tuples of one name and fields.

    Args:
        nest1: A nest.
        nest2: A nest.
        check_types: Whether the types of containers must be the same, too.

    Raises:
        ValueError: Lengths or keys differ, or a leaf stands where the other nest has a container.
        TypeError: The types of containers differ, such as a list and a tuple.

    Examples:
        >>> import central_storage as cs
        >>> cs.nest.assert_same_structure([1, (2, 3)], [4, (5, 6)])
        >>> cs.nest.assert_same_structure([1, 2], [1])
        Traceback (most recent call last):
        cs_proto.errors.InvalidArgumentError: the structures differ in length: [1, 2] and [1]
    """
    leaf1, leaf2 = _is_leaf(nest1), _is_leaf(nest2)
    if leaf1 and leaf2:
        return
    if leaf1 or leaf2:
        raise InvalidArgumentError(f"the structures differ: {nest1!r} and {nest2!r}: one of them is a leaf")
    if len(nest1) != len(nest2):
        raise InvalidArgumentError(f"the structures differ in length: {nest1!r} and {nest2!r}")
    mapping1, mapping2 = isinstance(nest1, Mapping), isinstance(nest2, Mapping)
    if mapping1 and mapping2:
        if nest1.keys() != nest2.keys():
            raise InvalidArgumentError(f"the structures have different keys: {list(nest1)} and {list(nest2)}")
        pairs = [(nest1[key], nest2[key]) for key in nest1]
    else:
        if check_types and not _same_type(nest1, nest2):
            raise TypeError(f"the structures differ in type: {type(nest1).__name__} and {type(nest2).__name__}")
        pairs = list(zip(*(_children(nest) for nest in (nest1, nest2)), strict=True))
    for child1, child2 in pairs:
        assert_same_structure(child1, child2, check_types=check_types)


def _walk(structure: Any) -> tuple[list[Any], optree.PyTreeSpec, list[int]]:
    """optree's leaves and shape, and the order in which tf.nest meets those leaves.

    Paths that part inside one container part at an index or a key of that container, so sorting the paths sorts the
    keys of every dict; optree itself leaves OrderedDicts as they are.
    """
    paths, leaves, treespec = optree.tree_flatten_with_path(structure, none_is_leaf=True)
    return leaves, treespec, sorted(range(len(paths)), key=paths.__getitem__)


def _is_leaf(structure: Any) -> bool:
    return optree.tree_is_leaf(structure, none_is_leaf=True)


def _children(structure: Any) -> list[Any]:
    if isinstance(structure, Mapping):
        return [structure[key] for key in sorted(structure)]
    return list(structure)


def _same_type(nest1: Any, nest2: Any) -> bool:
    if type(nest1) is type(nest2):
        return True
    fields = getattr(nest1, "_fields", None)
    named_alike = type(nest1).__name__ == type(nest2).__name__ and fields == getattr(nest2, "_fields", ())
    return fields is not None and named_alike
