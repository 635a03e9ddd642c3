"""The two sets of gradient buffers of a replica in one run: which may be written, and which belong to the server.

An apply is noted now and committed later. The server's arithmetic reads its buffers until then. So a noted apply takes
the current set away, and the next gradients go into the other set. If that still belongs to the server, too, the run
waits for the commit.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from central_storage.core.variable_sets import Numbers
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_runtime.shared_memory.mapping import address_of
from cs_worker.devices.device import Device

from .catalogue import Catalogue

__all__ = ["Copy", "GradientBuffers"]

# The number of a variable, its gradient, and the place of that in a buffer.
_Move = tuple[int, np.ndarray, np.ndarray]
#: Copies a gradient to its place.
Copy = Callable[[int, np.ndarray, np.ndarray], None]


class GradientBuffers:
    """The sets a run may use; those that a run around it has handed out and not applied are left alone."""

    def __init__(self, catalogue: Catalogue, device: Device, outer: GradientBuffers | None = None) -> None:
        self._catalogue = catalogue
        self._device = device
        self._free: deque[int] = deque((0, 1) if outer is None else outer.unused())
        self._noted: deque[int] = deque()
        self._handed_out: list[tuple[tuple[np.ndarray, ...], Numbers]] = []  # of the current set; the last ones last

    def hand_out(self, numbers: Numbers, commit: Callable[[], None]) -> list[np.ndarray]:
        """Writable arrays of the variables: of the current set, or on a GPU for it. ``commit`` is called where both
        sets are noted."""
        current = self._free[0] if self._free else self._current(commit)
        arrays = None if self._device.is_host else self._on_device(numbers, current)
        if arrays is None:
            arrays = self._device.buffers(self._catalogue.gradients(numbers, current))
        self._handed_out.append((tuple(arrays), numbers))
        return arrays

    def handed_out(self, gradients: Sequence[np.ndarray], numbers: Numbers) -> int | None:
        """The current set if ``gradients`` are the very arrays that were handed out last, for these variables, on the
        host and in memory that the server sees; else None. Then they lie in their places and fit."""
        if not self._handed_out or not self._device.is_host or self._catalogue.carries:
            return None
        arrays, last = self._handed_out[-1]
        are_the_last = (
            last == numbers
            and numbers.are_different
            and len(numbers) == len(gradients)
            and all(map(operator.is_, gradients, arrays))
        )
        return self._free[0] if are_the_last else None

    def fill(self, pairs: Sequence[tuple[np.ndarray, int]], commit: Callable[[], None], copy: Copy) -> int:
        """Bring the gradients of variables into the current set and say which it is; its number is 2 higher where they
        are on the server's GPU. One that was computed there is not copied, and ``copy`` copies the others on a CPU;
        what comes from a GPU, or lies on the server's, is there after the device has settled. Raises
        InvalidArgumentError for a gradient that does not fit, before anything is written, and MemoryPlanError where
        there is no room for them."""
        for gradient, number in pairs:
            self._check(gradient, number)
        current = self._current(commit)
        places = self._places()
        elsewhere = [pair for pair in pairs if places.get(id(pair[0])) != pair[1]]
        numbers = tuple([number for _, number in pairs])
        there = self._on_device(numbers, current)
        if there is not None:
            self._device.put([(gradient, array) for (gradient, _), array in zip(pairs, there, strict=True)])
            if self._catalogue.keeps_gradients:
                targets = self._catalogue.gradients(numbers, current)
                self._device.fetch(list(zip(there, targets, strict=True)), may_change=False)
            return current + 2
        if not self._device.is_host:
            self._fetch(pairs, current)
        elif elsewhere:
            self._bring(elsewhere, pairs, current, copy)
        self._catalogue.deliver(numbers, current)
        return current

    def note(self) -> None:
        """The current set belongs to an apply: what was handed out of it becomes read-only."""
        if self._device.is_host:
            for arrays, _ in self._handed_out:
                for array in arrays:
                    array.setflags(write=False)
        self._handed_out.clear()
        self._noted.append(self._free.popleft())

    def committed(self) -> None:
        """Every noted apply has been committed, so its set may be used again."""
        self._free.extend(self._noted)
        self._noted.clear()

    def _on_device(self, numbers: Sequence[int], current: int) -> list[Any] | None:
        """Arrays on the server's GPU, for the gradients of all these variables; None where that is not this device."""
        if self._device.is_host:
            return None
        arrays = [self._catalogue.place(number).array for number in numbers]
        if not arrays or not all(array.nbytes for array in arrays):
            return None
        # No buffers are made there for one that cannot open the server's memory.
        if self._device.shared([self._catalogue.on_device(numbers[0])], arrays[:1]) is None:
            return None
        return self._device.shared(self._catalogue.gradients_on_device(numbers, current), arrays)

    def _current(self, commit: Callable[[], None]) -> int:
        if not self._free and self._noted:
            commit()
        if not self._free:
            raise ContextError(
                "an enclosing run has asked for its gradient buffers but has not applied them yet; call "
                "apply_gradients there before merge_call"
            )
        return self._free[0]

    def unused(self) -> list[int]:
        """The sets of which nothing is handed out. Called where everything noted is committed."""
        free = [*self._free, *self._noted]
        return free[1:] if self._handed_out else free

    def _bring(
        self,
        elsewhere: Sequence[tuple[np.ndarray, int]],
        pairs: Sequence[tuple[np.ndarray, int]],
        current: int,
        copy: Copy,
    ) -> None:
        """Copy the gradients that do not lie in their places."""
        places = [self._catalogue.gradient(number, current) for _, number in pairs]
        moves = [(number, gradient, self._catalogue.gradient(number, current)) for gradient, number in elsewhere]
        moved = [move for move in moves if not _is_same_memory(*move[1:])]
        for move in _untangled(moved, places):
            copy(*move)

    def _fetch(self, pairs: Sequence[tuple[Any, int]], current: int) -> None:
        """Bring arrays of the device, and of the host, into the current set."""
        ours: list[tuple[Any, np.ndarray]] = []
        theirs: list[tuple[Any, np.ndarray]] = []
        places = self._catalogue.gradients(tuple([number for _, number in pairs]), current)
        known = self._places()
        for (gradient, _), place in zip(pairs, places, strict=True):
            if isinstance(gradient, np.ndarray):
                np.copyto(place, gradient)
            else:
                (ours if id(gradient) in known else theirs).append((gradient, place))
        self._device.fetch(ours, may_change=False)
        self._device.fetch(theirs, may_change=True)

    def _places(self) -> dict[int, int]:
        """The variables of what has been handed out, by the identities of the arrays, which are held."""
        return {id(array): number for pair in self._handed_out for array, number in zip(*pair, strict=True)}

    def _check(self, gradient: np.ndarray, number: int) -> None:
        if not isinstance(gradient, (np.ndarray, self._device.array_module.ndarray)):
            raise InvalidArgumentError(f"a gradient is an array, not a {type(gradient).__name__}")
        spec = self._catalogue.place(number).spec
        if gradient.shape == spec.shape and gradient.dtype == spec.dtype:
            return
        if gradient.shape != spec.shape:
            raise InvalidArgumentError(
                f"the gradient of {spec.name} has shape {gradient.shape}, but the variable has shape {spec.shape}"
            )
        raise InvalidArgumentError(
            f"the gradient of {spec.name} has dtype {gradient.dtype}, but the variable has dtype {spec.dtype}; "
            f"convert it with astype('{spec.dtype}')"
        )


def _is_same_memory(array: np.ndarray, target: np.ndarray) -> bool:
    return address_of(array) == address_of(target) and array.strides == target.strides


def _untangled(moved: Sequence[_Move], places: Sequence[np.ndarray]) -> Sequence[_Move]:
    """What to copy, where a gradient that was computed into the buffer of another variable is saved first."""
    bounds: dict[np.dtype[Any], tuple[int, int]] = {}
    for place in places if moved else ():
        first, last = address_of(place), address_of(place) + place.nbytes
        low, high = bounds.get(place.dtype, (first, last))
        bounds[place.dtype] = min(low, first), max(high, last)

    def is_tangled(source: np.ndarray) -> bool:
        low, high = bounds[source.dtype]
        return low <= address_of(source) < high

    return [(number, np.array(source) if is_tangled(source) else source, target) for number, source, target in moved]
