"""What a training said about itself, step by step, and whether that can be true.

The workload's numbers are integers in float64, so sums are exact in whatever order; only ``moving`` is trained with
Adam, and compared bit by bit with the reference rule. There is one server and one controller, so the history is a
list: a single pass over it with a model of the variables finds every update that was lost, repeated or torn. The
checker knows nothing of the service; it can be given any history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cs_server.rules import RULES, reference

__all__ = [
    "MARKS",
    "MOVING",
    "PARTS",
    "REPLICAS",
    "ROWS",
    "brings_gradients_alone",
    "check",
    "mark_of",
    "meets",
    "noise",
    "reads_its_own",
]

REPLICAS = 2
#: Steps of which the workload can keep account.
MARKS = 100_000
#: Rows of the table, of which most steps update one.
ROWS = 64
#: Elements of the variable that Adam trains.
MOVING = 512
#: The parts of a step that commit, in order. A step that was given up may have committed the first few of them.
PARTS = ("apply", "adam", "total")

_ADAM = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}

Line = Mapping[str, Any]


def noise(k: int, replica: int) -> np.ndarray:
    """The gradient for ``moving`` in step ``k``: float32 of shape [MOVING]."""
    return np.random.default_rng([k, replica]).normal(size=MOVING).astype(np.float32)


def brings_gradients_alone(k: int) -> bool:
    """Whether step ``k`` only trains ``plain``, ``twin`` and ``moving``, as a program carries out steps."""
    return k % 20 >= 13


def meets(k: int) -> bool:
    """Whether the replicas all_reduce something in step ``k``."""
    return k % 3 == 0 and not brings_gradients_alone(k)


def reads_its_own(k: int) -> bool:
    """Whether step ``k`` reads what it has just updated, where the workload does that at all."""
    return k % 7 == 3 and not brings_gradients_alone(k)


def mark_of(k: int, replica: int) -> int:
    """Where a replica leaves its mark of step ``k``."""
    return replica * MARKS + k


@dataclass
class _Model:
    """What the variables hold."""

    plain: float = 0.0
    twin: float = 0.0
    total: float = 0.0
    ledger: float = 0.0
    marked: set[int] = field(default_factory=set)
    rows: dict[int, float] = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)

    def do(self, k: int, parts: Sequence[str] = PARTS) -> None:
        """Step ``k``, or some parts of it."""
        if "apply" in parts:
            self.plain += 3 * (k + 1)
            self.twin += 2
        if "adam" in parts:
            self.moved.append(k)
        if brings_gradients_alone(k):
            return
        if "apply" in parts:
            self.rows[k % ROWS] = self.rows.get(k % ROWS, 0.0) + 3
        if "adam" in parts:
            self.marked.add(k)
        if "total" in parts:
            self.total += 2

    def scalars(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in ("plain", "twin", "total", "ledger")}
        return {**values, "iterations": float(len(self.moved))}

    def after(self, k: int, parts: Sequence[str]) -> dict[str, float]:
        """The scalars as they would be after some parts of step ``k``."""
        return self.scalars() | {
            "plain": self.plain + 3 * (k + 1) * ("apply" in parts),
            "twin": self.twin + 2 * ("apply" in parts),
            "total": self.total + 2 * ("total" in parts and not brings_gradients_alone(k)),
            "iterations": float(len(self.moved) + ("adam" in parts)),
        }


def _never(k: int) -> bool:
    return False


def check(
    history: Iterable[Line], final: Mapping[str, np.ndarray] | None, *, may_lose: Callable[[int], bool] = _never
) -> list[str]:
    """What is wrong with a history, in words; [] where nothing is.

    ``final``: the variables at the end by name; None where nobody could read them, which is a violation itself.
    ``may_lose``: which steps may be given up with ReplicaLostError, any number of their first parts standing.
    """
    model, found = _Model(), []
    lost: int | None = None
    expected = 0
    for line in history:
        op = line["op"]
        if op == "run":
            found += _gap(line["k"], expected)
            found += _step(line, model)
            model.do(line["k"])
            expected = line["k"] + 1
        elif op == "lost":
            found += _gap(line["k"], expected)
            if not may_lose(line["k"]):
                found.append(f"step {line['k']} was given up: {line['error']}: {line['message']}")
            lost, expected = line["k"], line["k"] + 1
        elif op == "add":
            model.ledger += 1
        elif op == "read":
            found += _read(line, model, lost)
            lost = None
        elif op != "address":
            found.append(f"a line of an unknown kind: {line}")
    if lost is not None:
        found.append(f"after step {lost} was given up nothing more was read")
    if final is None:
        found.append("the variables could not be read at the end")
        return found
    return found + list(_end(final, model))


def _gap(k: int, expected: int) -> list[str]:
    return [] if k == expected else [f"step {k} came where step {expected} was due"]


def _step(line: Line, model: _Model) -> Iterator[str]:
    k = line["k"]
    for replica, seen in enumerate(line["seen"]):
        if seen != model.plain:
            yield f"step {k}: replica {replica} began with {seen:g} where {model.plain:g} stood"
    for replica, whole in enumerate(line["whole"]):
        if not whole:
            yield f"step {k}: replica {replica} saw a torn variable"
    for replica, own in enumerate(line["own"]):
        if own is not None and own != model.plain + 3 * (k + 1):
            yield f"step {k}: replica {replica} saw {own:g} after its own update"
    if meets(k):
        right = float(sum(10 * k + replica for replica in range(REPLICAS)))
        if line["met"] != [right] * REPLICAS:
            yield f"step {k}: the replicas met at {line['met']}, not {right:g}"


def _read(line: Line, model: _Model, lost: int | None) -> Iterator[str]:
    """Compare what the controller read, which decides how much of a step that was given up stands."""
    if not line["whole"]:
        yield "the controller read a torn variable"
    seen = {name: line[name] for name in model.scalars()}
    stands = [parts for n in range(len(PARTS) + 1) if seen == model.after(lost or 0, parts := PARTS[:n])]
    if lost is None and seen != model.scalars():
        yield f"the controller read {seen} where {model.scalars()} stood"
    elif lost is not None and not stands:
        yield f"after step {lost} was given up the controller read {seen}: no first parts of it on {model.scalars()}"
    elif lost is not None:
        model.do(lost, stands[0])


def _end(final: Mapping[str, np.ndarray], model: _Model) -> Iterator[str]:
    for name, value in model.scalars().items():
        if name in final and not (final[name] == value).all():
            yield f"at the end {name} is {np.unique(final[name])[:5]}, not {value:g}"
    marks = np.zeros(REPLICAS * MARKS)
    for k in model.marked:
        for replica in range(REPLICAS):
            marks[mark_of(k, replica)] = 1
    for position in np.flatnonzero(final["marks"] != marks)[:10]:
        replica, k = divmod(int(position), MARKS)
        times = final["marks"][position]
        yield f"replica {replica} has marked step {k} {times:g} times, not {marks[position]:g}"
    table = np.zeros_like(final["table"])
    for row, value in model.rows.items():
        table[row] = value
    for row in np.flatnonzero((final["table"] != table).any(axis=1))[:10]:
        yield f"at the end row {row} is {final['table'][row][:3]}, not {table[row][:3]}"
    if not np.array_equal(_adam(model.moved), final["moving"]):
        yield f"at the end moving is not what {len(model.moved)} steps of Adam make, bit by bit"


def _adam(steps: Sequence[int]) -> np.ndarray:
    rule = RULES["adam"]
    moving = np.zeros(MOVING, np.float32)
    slots = tuple(np.full_like(moving, value) for value in rule.initial(_ADAM))
    for t, k in enumerate(steps, 1):
        reference(rule, moving, [noise(k, replica) for replica in range(REPLICAS)], slots, _ADAM, t)
    return moving
