"""Looks for numbers in the gradients of a replica that are not finite, if the run asks for it.

``raise`` looks before the apply is noted, so nothing of it can be committed. A number that is so large that the sum
over the replicas may overflow counts, too: then the server has nothing to look at. ``warn`` looks at sparse gradients.
The dense ones are watched by the server, which sees in the pass of the commit whether their sum is finite, unless the
variables lie on a GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from central_storage.core.backends import Group
from cs_proto.arithmetic.finite import Bad, are_fine_on_device, copied_fine, first_bad, is_fine, limit_of
from cs_proto.errors import NumericsError
from cs_proto.messages import Run

from .gradients import Copy
from .worker_context import WorkerContext

__all__ = ["Numerics", "copier", "named"]

_log = logging.getLogger("central_storage.worker")

# The arrays are kept for so many sets of variables.
_SETS_KEPT = 64
# Gradients of fewer bytes are looked at together, after they were copied: to look at each costs more than to read it.
_TOGETHER_NBYTES = 256 << 10
_REMEDY = (
    "find the operation that makes it, or lower the learning rate; clipping helps only before gradients grow so large; "
    "to skip such steps, catch NumericsError around the run, and go on"
)


class _Found(NamedTuple):
    """The first bad number in the gradient of a variable, at the variable's index."""

    number: int
    dtype: np.dtype[Any]
    bad: Bad


def named(shop: WorkerContext, run: Run) -> dict[str, Any]:
    """The fields of messages by which the server names the step of ``run``, if it watches the dense gradients."""
    is_watched = run.check_numerics == "warn" and shop.catalogue.is_on_host
    return {"name": run.name, "offset": run.step - run.run[0]} if is_watched else {}


class Numerics:
    """The look at the gradients of one replica in one run."""

    def __init__(self, shop: WorkerContext, run: Run) -> None:
        self._shop = shop
        self._run = run
        #: Whether a bad number is an error.
        self.raises = run.check_numerics == "raise"
        self._is_watched = bool(named(shop, run))
        # The variables of the apply that is under way whose gradients were seen to be fine.
        self._fine: set[int] = set()

    def copier(self, weight: float) -> Copy:
        """What copies the gradients of an apply. It looks at large ones meanwhile, so that :meth:`look` need not read
        them from memory again."""
        self._fine.clear()
        return _copied if self._is_watched else partial(self._copy, weight)

    def _copy(self, weight: float, number: int, gradient: np.ndarray, place: np.ndarray) -> None:
        if place.nbytes < _TOGETHER_NBYTES:
            np.copyto(place, gradient)
            return
        with np.errstate(all="ignore"):
            if copied_fine(place, gradient, self._limit(place.dtype, weight)):
                self._fine.add(number)

    def look(self, groups: Sequence[Group], buffers: int, weight: float, site: str) -> None:
        """Look at the gradients of an apply, of which the dense ones have been brought into a set of buffers. With
        ``raise``, raises NumericsError for the first bad number."""
        rows = [triple for group in groups for triple in group.sparse]
        pairs = [pair for group in groups for pair in group.dense if not self._is_watched]
        if not self._shop.device.is_host:
            self._report(self._looked_at(pairs, rows, weight), site)
            return
        if numbers := tuple([number for _, number in pairs if number not in self._fine]):
            self.look_at_buffers(numbers, buffers, weight, site)
        if rows:
            self._report(self._looked_at([], rows, weight), site)

    def look_at_buffers(self, numbers: tuple[int, ...], buffers: int, weight: float, site: str) -> None:
        """As :meth:`look`, at gradients on a CPU that lie in their places."""
        if not self._is_watched:
            self._report(self._in_buffers(numbers, buffers, weight), site)

    def _in_buffers(self, numbers: tuple[int, ...], buffers: int, weight: float) -> Generator[_Found, None, None]:
        catalogue = self._shop.catalogue
        with np.errstate(all="ignore"):
            spans = self._spans(numbers, buffers)
            if all(is_fine(span, self._limit(span.dtype, weight)) for span in spans):
                return
            is_found = False
            for number, place in zip(numbers, catalogue.gradients(numbers, buffers), strict=True):
                for found in self._in_array(number, place, self._limit(place.dtype, weight)):
                    is_found = True
                    yield found
            if not is_found:  # it was what lies between them
                places = catalogue.gradients(numbers, buffers)
                self._shop.gradient_spans[numbers, buffers] = [place.reshape(-1) for place in places]

    def _spans(self, numbers: tuple[int, ...], buffers: int) -> list[np.ndarray]:
        """Arrays in which the gradients lie, as few as possible; the same come again in every step."""
        known, key = self._shop.gradient_spans, (numbers, buffers)
        if key not in known:
            if len(known) >= _SETS_KEPT:
                known.clear()
            known[key] = self._shop.catalogue.gradient_spans(numbers, buffers)
        return known[key]

    def _looked_at(
        self, pairs: Iterable[tuple[Any, int]], rows: Iterable[tuple[Any, Any, int]], weight: float
    ) -> Generator[_Found, None, None]:
        """What is found in arrays as the user gave them, on the host or on the device."""
        given = [(array, number, None, self._limit(array.dtype, weight)) for array, number in pairs]
        given += [
            (values, number, indices, self._limit(values.dtype, weight, len(indices)))
            for values, indices, number in rows
        ]
        there = [(array, limit) for array, *_, limit in given if limit < math.inf and not isinstance(array, np.ndarray)]
        is_fine_there = not there or are_fine_on_device(self._shop.device.array_module, there)
        with np.errstate(all="ignore"):
            for array, number, indices, limit in given:
                is_here = isinstance(array, np.ndarray)
                if not is_here and is_fine_there:
                    continue
                for found in self._in_array(number, array if is_here else array.get(), limit):
                    place, value = found.bad
                    if indices is not None:
                        place = (int(indices[place[0]]), *place[1:])
                    yield _Found(number, found.dtype, Bad(place, value))

    def _limit(self, dtype: np.dtype[Any], weight: float, rows: int = 1) -> float:
        return limit_of(dtype, self._shop.replicas, weight, rows)

    def _in_array(self, number: int, values: np.ndarray, limit: float) -> Generator[_Found, None, None]:
        if not is_fine(values, limit) and (bad := first_bad(values, limit)) is not None:
            yield _Found(number, values.dtype, bad)

    def _report(self, found: Generator[_Found, None, None], site: str) -> None:
        """Raise NumericsError for the first one, or log a line: of a variable when it comes for the first, tenth,
        hundredth time and so on; of several one, with their count."""
        counts, named = self._shop.bad_gradients, []
        with closing(found):  # before an error leaves: it has changed what NumPy does about errors
            for each in found:
                if self.raises:
                    raise NumericsError(f"{self._said(each, site)}. Nothing of this update was applied; {_REMEDY}")
                counts[each.number] += 1
                if _is_power_of_ten(counts[each.number]):
                    named.append(each)
        if named:
            times = counts[named[0].number]
            again = f"; so it was {times} times" if times > 1 else ""
            others = f"; so are those of {len(named) - 1} more variables" if len(named) > 1 else ""
            _log.warning("%s%s%s; the update is not held back", self._said(named[0], site), others, again)

    def _said(self, found: _Found, site: str) -> str:
        place, value = found.bad
        at = f" at {list(place)}" if place else ""
        too_large = ""
        if np.isfinite(value):
            too_large = f", so the sum over {self._shop.replicas} replicas may exceed the largest {found.dtype}"
        run, name = self._run, self._shop.catalogue.name(found.number)
        return (
            f"the gradient of {name!r} has {value!r}{at}{too_large}, in step {run.step} of {run.name} on replica "
            f"{run.replica} ({site})"
        )


def copier(numerics: Numerics | None, weight: float) -> Copy:
    """What copies the gradients of an apply in a run with this look at them, or with none."""
    return _copied if numerics is None else numerics.copier(weight)


def _copied(_number: int, gradient: np.ndarray, place: np.ndarray) -> None:
    np.copyto(place, gradient)


def _is_power_of_ten(count: int) -> bool:
    return set(str(count)[1:]) <= {"0"} and str(count)[0] == "1"
