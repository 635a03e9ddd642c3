"""Members of TensorFlow's classes that are not here, and arguments of its optimizers, are answered with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.diagnostics.tensorflow_members import ARGUMENTS, MEMBERS

MADE: dict[str, Callable[[], Any]] = {
    "strategy.base.StrategyBase": cs.get_strategy,
    "strategy.extended.StrategyExtended": lambda: cs.get_strategy().extended,
    "variables.variable.Variable": lambda: cs.Variable([1.0]),
    "optimizers.optimizer.Optimizer": cs.optimizers.AdamW,
    "data.pipeline.Pipeline": lambda: cs.data.Dataset.range(3),
    "data.distributed._Distributed": lambda: cs.DistributedDataset(cs.data.Dataset.range(4).batch(2), 2),
}
#: What remedies call the objects of a class.
NAMED: dict[str, Any] = {
    "strategy": cs.CentralStorageStrategy,
    "extended": type(cs.get_strategy().extended),
    "variable": cs.Variable,
    "optimizer": cs.optimizers.SGD(),
    "dataset": cs.data.Dataset,
    "Dataset": cs.data.Dataset,
    "cs": cs,
    "np": np,
}
ROWS = [(kind, name, instead) for kind, members in MEMBERS.items() for name, instead in members.items()]


@pytest.mark.parametrize(("kind", "name", "instead"), ROWS, ids=[f"{kind}.{name}" for kind, name, _ in ROWS])
def test_a_member_is_answered_with_its_remedy(kind: str, name: str, instead: str) -> None:
    thing = MADE[kind]()
    said = rf"{type(thing).__name__} has no attribute '{name}'; use instead: {re.escape(instead)} \(docs/"
    for asked in (thing, type(thing)):
        with pytest.raises(AttributeError, match=said):
            getattr(asked, name)
    assert name not in dir(thing)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        setattr(thing, name, 1)


@pytest.mark.parametrize("instead", sorted({*ARGUMENTS.values(), *(instead for *_, instead in ROWS)}))
def test_a_remedy_names_what_there_is(instead: str) -> None:
    for owner, name in re.findall(r"\b(\w+)\.(\w+)", instead):
        if owner in NAMED:
            assert hasattr(NAMED[owner], name), instead


def test_every_class_of_the_table_exists_and_no_row_hides_a_member() -> None:
    assert set(MADE) == set(MEMBERS)
    for kind, make in MADE.items():
        bases = {f"{base.__module__}.{base.__name__}": base for base in type(make()).__mro__}
        known = bases[f"central_storage.{kind}"].__mro__[1:]
        assert not [name for name in MEMBERS[kind] for base in known if name in vars(base)], "a row hides a member"


def test_a_class_of_the_user_may_have_such_a_member() -> None:
    class Variable(cs.Variable):
        values = 7

    assert Variable([1.0]).values == 7
    with pytest.raises(AttributeError, match="Variable has no attribute 'graph'; use instead: nothing"):
        _ = Variable([1.0]).graph  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_an_optimizer_is_answered_with_its_remedy(name: str) -> None:
    said = rf"SGD takes no argument '{name}'; use instead: {re.escape(ARGUMENTS[name])} \(docs/"
    with pytest.raises(TypeError, match=said):
        cs.optimizers.SGD(0.1, **{name: 1})
