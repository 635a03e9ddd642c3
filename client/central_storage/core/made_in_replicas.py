"""The variables that replicas make for moving averages and gradient accumulators of the script.

The script has no handle of such a variable, and finds it by its name. This module knows the names. Before variables are
freed, which gives others new names, it tells moving averages which variables are theirs, and finds those that nobody
needs any more.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from cs_proto import messages

__all__ = ["MadeInReplicas"]


class MadeInReplicas:
    """``forget`` is called with "owner" and a name when the moving average or accumulator of that name is gone. May be
    used from any thread."""

    def __init__(self, forget: Callable[[str, Any], None]) -> None:
        self._forget = forget
        self._lock = threading.RLock()  # the garbage collector may come back here
        self._unnamed: list[tuple[weakref.ref[Any], str]] = []
        self._owners: dict[str, weakref.ref[Any]] = {}
        self._patterns: dict[str, Any] = {}

    def claim(self, owner: Any, name: str) -> None:
        """Have :meth:`settle` give the owner ``name``, or a name like it."""
        self._unnamed.append((weakref.ref(owner), name))

    @property
    def is_settled(self) -> bool:
        """Whether every owner has its name."""
        with self._lock:  # another thread may be about to rename one
            return not self._unnamed

    def settle(self) -> None:
        """Give names to the owners that still lack one: the one that was claimed, or where another has it the first of
        ``name.1``, ``name.2``, … that is free. The variables of an owner that is gone keep its name until they are
        freed, so those that are gone should be freed first."""
        with self._lock:
            while self._unnamed:
                found, asked = self._unnamed.pop(0)
                owner = found()
                if owner is not None:
                    names = itertools.chain([asked], (f"{asked}.{n}" for n in itertools.count(1)))
                    name = next(each for each in names if not self._is_taken(owner, each))
                    self._owners[name], self._patterns[name] = found, owner.names_of_variables(name)
                    weakref.finalize(owner, self._forget, "owner", name).atexit = False
                    owner.rename(name)

    def _is_taken(self, owner: Any, name: str) -> bool:
        """Whether another owner has the name, or variables of the two could not be told apart: the second ``w/average``
        is ``w/average_1``, and so is the first one of ``average_1``."""
        own = owner.names_of_variables(name)
        return any(
            name == other or own.fullmatch(f"w/{other}") or pattern.fullmatch(f"w/{name}")
            for other, pattern in self._patterns.items()
        )

    def owners(self, kind: type) -> dict[str, Any]:
        """Those of that class, by name."""
        with self._lock:
            found = {name: owner() for name, owner in self._owners.items()}
        return {name: owner for name, owner in sorted(found.items()) if isinstance(owner, kind)}

    @property
    def is_empty(self) -> bool:
        """Whether there has been no owner yet."""
        return not self._owners

    def unneeded(
        self, made: Iterable[messages.Variable], freed: Collection[int], is_held: Callable[[int], object]
    ) -> list[int]:
        """The variables among ``made``, all that there are, that belong to an owner that is gone, or to a variable that
        is being ``freed``."""
        with self._lock:
            return list(self._unneeded(list(made), freed, is_held))

    def _unneeded(
        self, made: list[messages.Variable], freed: Collection[int], is_held: Callable[[int], object]
    ) -> Iterator[int]:
        numbers = {variable.spec.name: variable.number for variable in made}
        for name, pattern in list(self._patterns.items()):
            owner, are_left = self._owners[name](), False
            for variable in made:
                match = pattern.fullmatch(variable.spec.name)
                if match is None or variable.number in freed:
                    continue
                of = None  # the variable of an average
                if owner is not None and pattern.groups:
                    of = owner.learn(variable.number, numbers.get(match[1]))
                if (owner is not None and of not in freed) or is_held(variable.number) is not None:
                    are_left = True
                else:
                    yield variable.number
            if owner is None and not are_left:
                del self._owners[name], self._patterns[name]
