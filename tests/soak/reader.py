"""An observer that reads the workload's variables over and over, and tells what it saw of them.

A value is right where it is the same in every element, no smaller than the one before, and what some number of steps
makes. Every third time both are read at once, and must be of the same step: one apply changes them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable

import numpy as np
from tests.harness.timing import unit

import central_storage as cs
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

__all__ = ["steps_behind"]


def steps_behind(plain: float) -> int | None:
    """After how many steps ``plain`` holds that; None where after none."""
    steps = (math.isqrt(1 + 8 * round(plain / 3)) - 1) // 2
    return steps if plain == 3 * steps * (steps + 1) / 2 else None


def unguarded(observer: cs.observer.Observer) -> Callable[[str], np.ndarray]:
    """What reads a variable where it lies, whatever is being done to it."""
    arrays = {variable.spec.name: variable.array for variable in observer.variables()}
    supervisor = SupervisorLink(supervisor_link.connect(observer.address), "observer")

    def read(name: str) -> np.ndarray:
        array = arrays[name]
        return np.array(supervisor.segment_of(array).view(array))

    return read


def main(address: str, count: int) -> None:
    """Read ``count`` times, each variable in turn and then both."""
    wrong: list[str] = []
    last = {"plain": 0, "twin": 0}
    with cs.connect(address, timeout=unit(60.0)) as observer:
        read = unguarded(observer) if os.environ.get("CS_SABOTAGE") == "unguarded-read" else observer.get
        for number in range(count):
            if number % 3 == 2:
                plain, twin = observer.get_all(["plain", "twin"])
                if steps_behind(float(plain[0])) != float(twin[0]) / 2 or plain.min() != plain.max():
                    wrong.append(f"read {number} of both is {plain[0]:g} and {twin[0]:g}, of different steps")
                continue
            name = ("plain", "twin")[number % 3]
            value = read(name)
            first = float(value[0])
            steps = steps_behind(first) if name == "plain" else int(first) // 2
            if value.min() != value.max():
                wrong.append(f"read {number} of {name} is torn: {np.unique(value)[:5]}")
            elif steps is None or first % 2 * (name == "twin"):
                wrong.append(f"read {number} of {name} is {first:g}, which no number of steps makes")
            elif steps < last[name]:
                wrong.append(f"read {number} of {name} is of step {steps}, the one before of step {last[name]}")
            else:
                last[name] = steps
    print(json.dumps({"reads": count, "wrong": wrong[:20], "steps": last["plain"]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
