"""``cs.function`` without a service: what it is as a method, and called outside ``run``."""

from __future__ import annotations

import copy
from typing import Any

import cloudpickle
import pytest

import central_storage as cs


class Model:
    def __init__(self, width: int) -> None:
        self.width = width

    @cs.function
    def step(self, x: int) -> int:
        """One step."""
        return self.width * x

    double = cs.function(lambda self: 2 * self.width)
    triple = cs.function(lambda self: 3 * self.width)


class Wider(Model):
    @cs.function
    def step(self, x: int) -> int:
        return super().step(x) + 1


def test_a_function_just_runs_where_it_is_called() -> None:
    frozen = cs.function(lambda x, y=2: x * y)
    assert frozen(3, y=4) == 12
    assert cs.function(frozen) is frozen
    with pytest.raises(TypeError, match="takes a function"):
        cs.function(3)  # type: ignore[arg-type]


def test_a_method_is_one_function_for_each_object() -> None:
    three, four = Model(3), Model(4)
    assert (three.step(2), four.step(2), Model.step(three, 5)) == (6, 8, 15)
    assert three.step is three.step is not four.step
    assert (three.double(), three.triple()) == (6, 9)
    assert three.step.__doc__ == "One step."
    assert Wider(3).step(2) == 7


def test_a_copy_of_an_object_has_methods_of_its_own() -> None:
    model = Model(3)
    assert model.step(1) == 3
    for copied in (copy.copy(model), copy.deepcopy(model), cloudpickle.loads(cloudpickle.dumps(model))):
        copied.width = 7
        assert copied.step(1) == 7
    assert model.step(1) == 3


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"input_signature": [cs.TensorSpec((None,), "float32")], "jit_compile": True},
        {"autograph": False, "reduce_retracing": True, "experimental_relax_shapes": True},
    ],
)
def test_the_keywords_of_tf_function_change_nothing(keywords: dict[str, Any]) -> None:
    @cs.function(**keywords)
    def above(x: Any) -> Any:
        return x + 1

    below = cs.function(lambda x: x + 1, **keywords)
    assert (above(1), below(1)) == (2, 2)
    assert cs.function(above, **keywords) is above


def test_a_keyword_that_tf_function_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="'experimental_speed'"):
        cs.function(experimental_speed=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a function, not 3"):
        cs.function(3)
