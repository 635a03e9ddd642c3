"""Every kind ``optax.*`` against the function of optax whose formula it is.

Both get the same gradients for 50 steps, of sizes from 1 to 1e-10, under a rate that warms up. Bound: 16 units in the
last place, of the element or of the root mean square of its array, whichever is larger. A corrected variance around
the mean is a difference of equal numbers at the first update, which leaves nothing but rounding errors beside epsilon:
there the bound is 2048 units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage.optimizers import of_kind
from cs_proto.arithmetic.optimizers import OPTIMIZERS, defaults_of

pytestmark = pytest.mark.timeout(unit(120))

STEPS, ULPS = 50, 16
SCALES = (1.0, 1e-3, 1e-7, 1e-10)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("adam", {"eps_root": 1e-12}),
    ("adam", {"nesterov": True}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.1, "nesterov": True, "eps_root": 1e-9}),
    ("adagrad", {}),
    ("adagrad", {"initial_accumulator_value": 0.0, "epsilon": 0.0}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.9, "eps_in_sqrt": False}),
    ("rmsprop", {"momentum": 0.9, "nesterov": True, "bias_correction": True}),
    ("rmsprop", {"centered": True, "initial_accumulator_value": 1.0}),
    ("rmsprop", {"centered": True, "epsilon": 1e-3, "bias_correction": True, "momentum": 0.5}),
    ("lion", {"weight_decay": 0.1}),
    ("lamb", {}),
    ("lamb", {"weight_decay": 0.1, "eps_root": 1e-9}),
]
NAMES = {"beta_1": "b1", "beta_2": "b2", "epsilon": "eps", "rho": "decay"}


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with cs.CentralStorageStrategy(in_process=True) as made:
        yield connected(made)
    jax.config.update("jax_enable_x64", before)


def of_optax(kind: str, given: dict[str, Any], rates: Any) -> Any:
    """optax's transformation with these hyperparameters, and the rate of each step."""
    names = NAMES | ({"initial_accumulator_value": "initial_scale"} if kind == "rmsprop" else {})
    renamed = {names.get(name, name): value for name, value in given.items() if name != "learning_rate"}
    if not renamed.get("momentum", 1.0):
        renamed["momentum"] = None
    return getattr(optax, kind)(lambda count: rates[count], **renamed)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind.startswith("optax.")])
def test_the_defaults_are_those_of_optax(kind: str) -> None:
    import inspect

    name = kind.removeprefix("optax.")
    theirs = {key: each.default for key, each in inspect.signature(getattr(optax, name)).parameters.items()}
    names = NAMES | ({"initial_accumulator_value": "initial_scale"} if name == "rmsprop" else {})
    for key, value in defaults_of(kind).items():
        assert (theirs[names.get(key, key)] or 0.0) == value


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_fifty_steps_equal_those_of_optax(
    kind: str, changes: dict[str, Any], dtype: str, strategy: cs.CentralStorageStrategy
) -> None:
    given = {**defaults_of(f"optax.{kind}"), "learning_rate": 0.01, **changes}
    rates = [0.01 * min(1, t / 10) for t in range(1, STEPS + 1)]
    random = np.random.default_rng(1)
    starts = [random.standard_normal(40).astype(dtype) for _ in SCALES]
    with strategy.scope():
        variables = [cs.Variable(start) for start in starts]
        optimizer = of_kind(f"optax.{kind}", **given)
    theirs = of_optax(kind, given, jax.numpy.asarray(rates, "float64"))
    parameters = [jax.numpy.asarray(start) for start in starts]
    state = theirs.init(parameters)
    for rate in rates:
        gradients = [(random.standard_normal(40) * scale).astype(dtype) for scale in SCALES]
        optimizer.learning_rate = rate
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(lambda o, p: o.apply_gradients(p), args=(optimizer, pairs))
        updates, state = theirs.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    for position, (scale, variable) in enumerate(zip(SCALES, variables, strict=True)):
        found = {"parameter": variable.numpy()}
        found |= {slot: optimizer.get_slot(variable, slot).numpy() for slot in optimizer.slot_names}
        expected = {"parameter": parameters} | {
            slot: optax.tree_utils.tree_get(state, slot) for slot in optimizer.slot_names
        }
        for name, ours in found.items():
            wanted = np.asarray(expected[name][position])
            size = np.maximum(np.abs(wanted), np.sqrt(np.mean(np.square(wanted, dtype=np.float64))))
            ulps = np.abs(ours - wanted) / (np.finfo(dtype).eps * size + np.finfo(dtype).tiny)
            assert ours.dtype == wanted.dtype
            bound = 2048 if given.get("centered") and given["bias_correction"] else ULPS
            assert ulps.max() <= bound, f"{name}, gradients of {scale}: {ulps.max()} ulp"
