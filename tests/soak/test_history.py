"""The checker of histories: what is true passes, and each way in which an update can go wrong is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.soak.history import (
    MARKS,
    MOVING,
    PARTS,
    REPLICAS,
    ROWS,
    brings_gradients_alone,
    check,
    mark_of,
    meets,
    noise,
    reads_its_own,
)

from cs_server.rules import RULES, reference

History = list[dict[str, Any]]
Final = dict[str, np.ndarray]
HYPERPARAMETERS = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}


class Played:
    """A training played by hand, with the variables as arrays: none of the checker's own bookkeeping."""

    def __init__(self) -> None:
        self.history: History = []
        self.final: Final = {
            "plain": np.zeros(4),
            "twin": np.zeros(4, np.float32),
            "table": np.zeros([ROWS, 8]),
            "marks": np.zeros(REPLICAS * MARKS),
            "moving": np.zeros(MOVING, np.float32),
            "total": np.zeros(3),
            "ledger": np.zeros(3),
        }
        self.slots = (np.zeros(MOVING, np.float32), np.zeros(MOVING, np.float32))
        self.iterations = 0

    def step(self, k: int, parts: tuple[str, ...] = PARTS, own: bool = False) -> None:
        value, before = self.final, float(self.final["plain"][0])
        if "apply" in parts:
            value["plain"] += 3 * (k + 1)
            value["twin"] += 2
            value["table"][k % ROWS] += 0 if brings_gradients_alone(k) else 3
        after = float(value["plain"][0])
        if "adam" in parts:
            for replica in range(REPLICAS):
                value["marks"][mark_of(k, replica)] += not brings_gradients_alone(k)
            self.iterations += 1
            gradients = [noise(k, replica) for replica in range(REPLICAS)]
            reference(RULES["adam"], value["moving"], gradients, self.slots, HYPERPARAMETERS, self.iterations)
        if "total" in parts:
            value["total"] += 0 if brings_gradients_alone(k) else 2
        if parts != PARTS:
            self.history.append({"op": "lost", "k": k, "error": "ReplicaLostError", "message": "died"})
            return
        said = [after if own and reads_its_own(k) else None] * REPLICAS
        met = [20.0 * k + 1 if meets(k) else None] * REPLICAS
        self.history.append({"op": "run", "k": k, "seen": [before] * 2, "whole": [True] * 2, "own": said, "met": met})

    def add(self) -> None:
        self.final["ledger"] += 1
        self.history.append({"op": "add"})

    def read(self) -> None:
        scalars = {name: float(self.final[name][0]) for name in ("plain", "twin", "total", "ledger")}
        self.history.append({"op": "read", "whole": True, "iterations": float(self.iterations), **scalars})


@pytest.fixture
def played() -> Played:
    training = Played()
    for k in range(12):
        training.step(k, own=True)
        if k % 4 == 3:
            training.add()
            training.read()
    return training


def test_what_is_true_passes(played: Played) -> None:
    assert check(played.history, played.final) == []
    for k in range(12, 22):
        played.step(k)
    played.read()
    assert any(brings_gradients_alone(k) for k in range(22))
    assert check(played.history, played.final) == []


@pytest.mark.parametrize("standing", range(len(PARTS)))
def test_of_a_step_that_was_given_up_any_first_parts_may_stand(played: Played, standing: int) -> None:
    played.step(12, PARTS[:standing])
    played.read()
    played.step(13)
    assert check(played.history, played.final, may_lose=lambda k: True) == []
    assert any("step 12 was given up" in line for line in check(played.history, played.final))


@pytest.mark.parametrize("standing", [("adam",), ("apply", "total"), ("total",)])
def test_others_may_not(played: Played, standing: tuple[str, ...]) -> None:
    played.step(12, standing)
    played.read()
    assert any("no first parts of it" in line for line in check(played.history, played.final, may_lose=lambda k: True))


def test_a_step_that_was_given_up_must_be_looked_at(played: Played) -> None:
    played.step(12, ())
    assert any("nothing more was read" in line for line in check(played.history, played.final, may_lose=lambda k: True))


def test_variables_that_cannot_be_read_are_a_violation(played: Played) -> None:
    assert check(played.history, None) == ["the variables could not be read at the end"]


FINAL: dict[str, tuple[Callable[[Final], None], str]] = {
    "an update is lost": (lambda final: final["plain"].__isub__(3.0 * 12), "at the end plain is"),
    "an update is applied to a part": (lambda final: final["twin"][2:].__iadd__(2), "at the end twin is"),
    "a row is updated twice": (lambda final: final["table"][5].__iadd__(3), "at the end row 5 is"),
    "a note is done twice": (
        lambda final: final["marks"][[mark_of(7, 1)]].__iadd__(1) is final["marks"].__setitem__(mark_of(7, 1), 2),
        "replica 1 has marked step 7 2 times",
    ),
    "a note is lost": (
        lambda final: final["marks"].__setitem__(mark_of(7, 0), 0),
        "replica 0 has marked step 7 0 times",
    ),
    "an assign is lost": (lambda final: final["total"].__isub__(2), "at the end total is"),
    "a write of the controller is done twice": (lambda final: final["ledger"].__iadd__(1), "at the end ledger is"),
    "one bit of Adam's differs": (
        lambda final: final["moving"].__setitem__(3, np.nextafter(final["moving"][3], np.float32(9))),
        "moving is not what 12 steps",
    ),
}


@pytest.mark.parametrize("what", sorted(FINAL))
def test_a_wrong_end_is_found(played: Played, what: str) -> None:
    spoil, words = FINAL[what]
    spoil(played.final)
    assert any(words in line for line in check(played.history, played.final)), check(played.history, played.final)


HISTORY: dict[str, tuple[int, dict[str, Any], str]] = {
    "a replica begins with an old value": (5, {"seen": [0.0, 45.0]}, "replica 0 began with 0"),
    "a replica sees half an update": (5, {"whole": [True, False]}, "replica 1 saw a torn variable"),
    "a replica does not see its own update": (3, {"own": [18.0, 30.0]}, "replica 0 saw 18 after its own"),
    "the replicas meet at different values": (0, {"met": [1.0, 2.0]}, "met at [1.0, 2.0]"),
}


@pytest.mark.parametrize("what", sorted(HISTORY))
def test_a_wrong_step_is_found(played: Played, what: str) -> None:
    k, changes, words = HISTORY[what]
    history = copy.deepcopy(played.history)
    (step,) = (line for line in history if line.get("k") == k)
    step.update(changes)
    (found,) = check(history, played.final)
    assert words in found


def test_a_step_that_is_missing_or_said_twice_is_found(played: Played) -> None:
    steps = [line for line in played.history if line["op"] == "run"]
    assert "step 5 came where step 4 was due" in check([*steps[:4], *steps[5:]], played.final)
    assert "step 4 came where step 5 was due" in check([*steps[:5], *steps[4:]], played.final)


def test_a_wrong_or_torn_read_of_the_controller_is_found(played: Played) -> None:
    history = copy.deepcopy(played.history)
    reads = [line for line in history if line["op"] == "read"]
    reads[0]["plain"] -= 1
    reads[1]["whole"] = False
    first, second = check(history, played.final)
    assert "the controller read {'plain': 29" in first
    assert second == "the controller read a torn variable"


def test_a_line_of_no_known_kind_is_found(played: Played) -> None:
    assert check([*played.history, {"op": "jump"}], played.final) == ["a line of an unknown kind: {'op': 'jump'}"]
