"""How far a training has gone through its data, how long the data is, and where it may be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from central_storage.core.context import is_in_replica
from central_storage.diagnostics.html import section, table
from cs_proto.errors import DatasetContextError
from cs_proto.printable import counted

from .pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, say_cardinality
from .transforms import Order

__all__ = ["Place", "length_of", "refuse_in_replica", "shown"]


class Place(NamedTuple):
    """How far a training has gone through its data: the number of the iteration (from 0), the number of elements used
    in it, and the orders of its shuffles at its beginning. A checkpoint holds this for a distributed data set."""

    epoch: int
    position: int
    orders: tuple[Order, ...]
    #: The states of the sources of other libraries, in the order of the sources; None if they have none.
    states: Any = None


def length_of(cardinality: int) -> int:
    """The cardinality of a data set as its length. Raises TypeError if it is infinite or unknown."""
    if cardinality == INFINITE_CARDINALITY:
        raise TypeError("the data set is infinite; take(n) of a cs.data.Dataset gives its first n elements")
    if cardinality == UNKNOWN_CARDINALITY:
        raise TypeError("the length of the data set is unknown; iterate it to count its elements")
    return cardinality


def refuse_in_replica(what: str) -> None:
    """Raise :class:`DatasetContextError` inside a replica function, where no data set can be ``what``."""
    if is_in_replica():
        raise DatasetContextError(
            f"a distributed data set cannot be {what} inside a replica function; do it in the script and pass the "
            "element: strategy.run(fn, args=(next(iterator),))"
        )


def shown(name: str, cardinality: int, replicas: int, sources: Sequence[Any], under_way: tuple[int, int] | None) -> str:
    """A distributed data set as HTML. ``under_way``: the iteration that is, and the elements that it has handed out."""
    kinds = dict.fromkeys(f"{type(source).__module__}.{type(source).__qualname__}" for source in sources)
    rows: list[tuple[object, object]] = [
        ("elements", say_cardinality(cardinality)),
        ("replicas", replicas),
        ("made of", ", ".join(kinds)),
    ]
    if under_way is not None:
        rows.append(("handed out", f"{counted(under_way[1], 'element')} of iteration {under_way[0]}"))
    return section(name, table(rows))
