"""No public object accepts an attribute that it does not have, and the error names the near one."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.checkpoint.status import Status
from central_storage.core.public_objects import Closed, settable

MODULES = ("", ".aio", ".data", ".metrics", ".nest", ".nn", ".optimizers", ".optimizers.schedules", ".train")
#: Classes of objects that public calls return.
RETURNED = (
    "aio.Connecting",
    "checkpoint.graph.Status",
    "core.context.Scope",
    "core.tensors.live_number.LiveNumber",
    "core.devices.logical_devices.LogicalTensor",
    "data.distributed.DistributedFromFunction",
    "data.distributed.OptionalElement",
    "data.element_spec.PerReplicaSpec",
    "data.element_spec.TensorSpec",
    "observer.blocking.Observer",
    "optimizers.slots.Slot",
    "strategy.run_steps.Steps",
    "strategy.service_strategy.DefaultStrategy",
)


def public_classes() -> Iterator[type]:
    for module in MODULES:
        found = importlib.import_module(f"central_storage{module}")
        yield from (value for name in found.__all__ if inspect.isclass(value := getattr(found, name)))
    for path in RETURNED:
        module, _, name = path.rpartition(".")
        yield getattr(importlib.import_module(f"central_storage.{module}"), name)


def some(cls: Any) -> Any:
    """An object of the class, whatever its constructor needs."""
    if issubclass(cls, enum.Enum):
        return next(iter(cls))
    if issubclass(cls, np.ndarray):
        return np.zeros(1).view(cls)
    if issubclass(cls, tuple):
        return tuple.__new__(cls)
    return Status(None, (), ()) if cls is Status else cls.__new__(cls)  # whose end looks at what it has


CLASSES = sorted(set(public_classes()), key=lambda cls: (cls.__module__, cls.__qualname__))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_no_public_object_accepts_an_unknown_attribute(cls: type) -> None:
    made = some(cls)
    with pytest.raises(AttributeError):
        made.surely_unknown = 1
    assert not hasattr(type(made), "surely_unknown")
    assert "surely_unknown" not in getattr(made, "__dict__", {})


def test_the_list_is_not_empty() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert names >= {"CentralStorageStrategy", "Variable", "Dataset", "DistributedIterator", "Adam", "CosineDecay"}
    assert names >= {"Mean", "Checkpoint", "CheckpointManager", "PerReplica", "RunOptions", "ReplicaContext"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("beta1", "beta_1"), ("Beta_1", "beta_1"), ("learnig_rate", "learning_rate"), ("clip_norm", "clipnorm")],
)
def test_the_near_one_is_named(wrong: str, right: str) -> None:
    adam = cs.optimizers.Adam()
    with pytest.raises(AttributeError, match=f"Adam has no attribute '{wrong}'; did you mean {right}"):
        setattr(adam, wrong, 0.5)
    with pytest.raises(AttributeError, match=r"what can be set: amsgrad, beta_1, .*learning_rate, lr"):
        setattr(adam, "zzz", 0.5)  # noqa: B010  (a type checker would refuse it)


class Warm(cs.optimizers.SGD):
    def __init__(self) -> None:
        super().__init__(0.5)
        self.warmup = 10


class Counting(cs.metrics.Metric):
    def __init__(self) -> None:
        super().__init__("counting")
        for number in range(2):
            setattr(self, f"count_{number}", self.add_weight(f"count_{number}"))


def test_a_class_of_the_users_adds_its_own() -> None:
    warm: Any = Warm()
    warm.later = 1
    assert (warm.warmup, warm.later, len(Counting().variables)) == (10, 1, 2)
    with pytest.raises(AttributeError, match="Warm has no attribute 'learningRate'; did you mean learning_rate"):
        warm.learningRate = 0.1
    warm.lr = 0.25
    assert warm.learning_rate == 0.25


def test_a_name_that_is_near_is_refused_to_a_class_of_the_users_too() -> None:
    warm: Any = Warm()
    for name in ("learnig_rate", "nesterow", "clip_norm", "iteration"):
        with pytest.raises(AttributeError, match=f"Warm has no attribute '{name}'; did you mean "):
            setattr(warm, name, 1)

    class Table(cs.Variable):
        __slots__ = ("rows",)

        def __init__(self) -> None:
            super().__init__([1.0])
            self.rows = self.trainables = 7  # in a method, a name may be near

    table: Any = Table()
    table.note = "mine"
    assert (table.rows, table.trainables, table.note) == (7, 7, "mine")
    with pytest.raises(AttributeError, match="did you mean trainable"):
        table.trainble = False


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: cs.Variable([1.0]), "value"),
        (lambda: cs.Variable([1.0]), "numpy"),
        (lambda: cs.metrics.Mean(), "result"),
        (lambda: cs.optimizers.Adam(), "build"),
        (Warm, "get_config"),
    ],
)
def test_a_method_is_replaced_by_a_function_only(made: Any, name: str) -> None:
    thing = made()
    with pytest.raises(AttributeError, match=rf"\.{name} is a method"):
        setattr(thing, name, 1.0)
    assert callable(getattr(thing, name))
    setattr(thing, name, print)  # as a test of the user's may
    assert getattr(thing, name) is print


def test_what_an_object_has_can_be_set() -> None:
    sgd = cs.optimizers.SGD(name="first")
    sgd.name = "second"
    assert sgd.name == "second"
    assert "learning_rate" in settable(cs.optimizers.SGD)
    assert "slot_names" not in settable(cs.optimizers.SGD)


def test_an_attribute_of_a_checkpoint_is_an_object_to_save() -> None:
    checkpoint: Any = cs.train.Checkpoint()
    checkpoint.w = cs.Variable(np.float32(1))
    with pytest.raises(AttributeError, match="Checkpoint has no attribute 'step', and step is a int"):
        checkpoint.step = 3
    with pytest.raises(AttributeError, match="'save' is a method"):
        checkpoint.save = checkpoint.w
    assert "w" in repr(checkpoint)


def test_the_base_has_no_dict_of_its_own() -> None:
    assert not hasattr(Closed(), "__dict__")
