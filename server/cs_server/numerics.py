"""Says which gradients are not finite, when a commit has found that their sum is not.

The kernels only set an alarm. While the replicas wait for the end of the commit, their gradients lie where they were,
so this module looks at them, finds the first number of each variable that is not finite, and logs a line. It looks only
at applies that are watched, and counts all commits with an alarm.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cs_proto.arithmetic.finite import Bad, first_bad
from cs_proto.arithmetic.optimizers import CLIPS
from cs_proto.arrays import Location
from cs_proto.messages import Ask, Counters, Return, Variable
from cs_proto.records import replace
from cs_server.compute.executor import Memory, gradients_of
from cs_server.events import Apply, Commit
from cs_server.rules import computed_in, summed

__all__ = ["Numerics"]

_log = logging.getLogger("cs_server.numerics")

_CLIPS = frozenset(CLIPS)
# In place of a replica: the sum over all of them.
_SUM = -1
# Elements that are added up in one go.
_PIECE = 1 << 16


class _Found(NamedTuple):
    """The first number of a variable that is not finite: in the gradient of a replica, or in the sum of all."""

    replica: int
    variable: Variable
    bad: Bad
    #: The call site of the apply.
    site: str


class Numerics:
    """What one server has found since its start."""

    def __init__(self, memory: Memory, variable: Callable[[int], Variable]) -> None:
        """``variable`` finds a variable by its number."""
        self._memory, self._variable = memory, variable
        self._heard: tuple[str, int] | None = None
        self._commits = self._overflowed = 0
        self._of_replicas: Counter[int] = Counter()
        # How often each variable was found, by its name and the replica.
        self._times: Counter[tuple[str, int]] = Counter()

    def heard(self, record: Ask | Return) -> None:
        """A replica has sent a message, whose commit comes before anything else is heard of another run."""
        if record.name:
            self._heard = record.name, record.run[0] + record.offset

    def counted(self, record: Counters) -> Counters:
        """The counters with what has been found."""
        replicas = [replace(each, not_finite=self._of_replicas[each.replica]) for each in record.replicas]
        return replace(record, replicas=tuple(replicas), not_finite=self._commits, overflowed=self._overflowed)

    def look(self, command: Commit, step: tuple[str, int] | None = None) -> None:
        """Look at the gradients of a commit in which a sum was not finite. ``step``: the name of the function and the
        number of the step, if they are not those of the last message."""
        self._commits += 1
        found: list[_Found] = []
        for operation in command.operations:
            if isinstance(operation, Apply) and operation.watched:
                found += self._in_apply(operation)
        replicas = sorted({each.replica for each in found})
        self._of_replicas.update(replicas)
        self._overflowed += replicas == [_SUM]
        for replica in replicas:
            self._report([each for each in found if each.replica == replica], step or self._heard)

    def _in_apply(self, apply: Apply) -> Iterator[_Found]:
        """What is found in the dense gradients of an apply."""
        parts = [(update, part) for update in apply.updates for part in update.dense]
        for number in apply.variables:
            variable = self._variable(number)
            slab, first, last = _elements(variable)
            for update, part in parts:
                # A table lies in a slab of its own, at the offsets of other variables.
                if part.parameters == slab and any(begin <= first < end for begin, end in part.ranges):
                    own = slice(None) if part.rows else slice(first, last)
                    gradients = [each[own] for each in gradients_of(self._memory, part)]
                    has_bound = apply.global_clipnorm is not None or not _CLIPS.isdisjoint(dict(update.hyperparameters))
                    yield from _in_variable(variable, gradients, apply, has_bound=has_bound)

    def _report(self, found: Sequence[_Found], step: tuple[str, int] | None) -> None:
        """Log a line: of a variable when it is found for the first, tenth, hundredth time and so on in this replica; of
        several variables one, with their count."""
        named = []
        for each in found:
            key = each.variable.spec.name, each.replica
            self._times[key] += 1
            if _is_power_of_ten(self._times[key]):
                named.append(each)
        if not named:
            return
        first = named[0]
        times = self._times[first.variable.spec.name, first.replica]
        again = f"; so it was {times} times" if times > 1 else ""
        others = f"; so are those of {len(named) - 1} more variables" if len(named) > 1 else ""
        _log.warning("%s%s%s; the update is not held back", _said(first, step), others, again)


def _said(found: _Found, step: tuple[str, int] | None) -> str:
    name, at = found.variable.spec.name, f" at {list(found.bad.place)}" if found.bad.place else ""
    said, where = f"the gradient of {name!r} has {found.bad.value!r}{at}", f" on replica {found.replica}"
    if found.replica == _SUM:
        said = f"the sum of the gradients of {name!r} overflows: it has {found.bad.value!r}{at}, and each is finite"
        where = ""
    when = "" if step is None else f", in step {step[1]} of {step[0]}"
    return f"{said}{when}{where} ({found.site})"


def _in_variable(
    variable: Variable, gradients: Sequence[np.ndarray], apply: Apply, *, has_bound: bool
) -> Iterator[_Found]:
    """The first number that is not finite of each gradient; if there is none, that of their sum. Halves are added up in
    single precision unless a bound holds for the sum."""
    dtype = gradients[0].dtype
    wide, limit = computed_in(dtype), float(np.finfo(dtype).max)
    weights, is_found = apply.weights or (1.0,) * len(gradients), False
    with np.errstate(all="ignore"):
        for replica, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            bad = first_bad(gradient, limit) if wide.type(weight) else None
            if bad is not None:
                is_found = True
                yield _Found(replica, variable, _placed(bad, 0, variable), apply.watched)
        if is_found:
            return
        summed_in = dtype if has_bound else wide
        for begin in range(0, len(gradients[0]), _PIECE):
            pieces = [gradient[begin : begin + _PIECE] for gradient in gradients]
            bad = first_bad(summed(pieces, weights, summed_in), float(np.finfo(summed_in).max))
            if bad is not None:
                yield _Found(_SUM, variable, _placed(bad, begin, variable), apply.watched)
                return


def _placed(bad: Bad, begin: int, variable: Variable) -> Bad:
    """A number of the gradient, from its element ``begin`` on, at its index in the variable."""
    return Bad(tuple(map(int, np.unravel_index(begin + bad.place[0], variable.spec.shape))), bad.value)


def _elements(variable: Variable) -> tuple[str, int, int]:
    """The segment of a variable, and the elements that it covers there: the first, and the one after the last."""
    array = variable.array
    assert isinstance(array.place, Location)
    first = array.place.offset // np.dtype(array.dtype).itemsize
    return array.place.segment, first, first + array.nbytes // np.dtype(array.dtype).itemsize


def _is_power_of_ten(count: int) -> bool:
    return set(str(count)[1:]) <= {"0"} and str(count)[0] == "1"
