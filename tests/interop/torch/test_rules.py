"""Every kind ``torch.*`` against the optimizer of ``torch.optim`` whose formula it is.

Both get the same gradients for 50 steps, of sizes from 1 to 1e-10, under a rate that warms up; one parameter misses
every third step. Bound: 32 units in the last place, of the element or of the root mean square of its array, whichever
is larger. Both round every operation of 50 steps, torch fuses some of them, and weight decay feeds differences back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage.optimizers import of_kind
from cs_proto.arithmetic.optimizers import OPTIMIZERS, defaults_of

pytestmark = pytest.mark.timeout(unit(120))

STEPS, ULPS = 50, 32
SCALES = (1.0, 1e-3, 1e-7, 1e-10, 1.0)  # of the gradients; the last parameter misses steps
ALL = {"weight_decay": 0.1, "maximize": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", ALL),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, **ALL}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, **ALL}),
    ("Adam", {"decoupled_weight_decay": True, "beta_1": 0.3, **ALL}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("RMSprop", {"maximize": True}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adamax", ALL),
    ("NAdam", {}),
    ("NAdam", {"decoupled_weight_decay": True, "momentum_decay": 0.1, **ALL}),
    ("RAdam", ALL),
    ("RAdam", {"decoupled_weight_decay": True, "beta_2": 0.9, **ALL}),
    ("Adagrad", {"lr_decay": 0.1, **ALL}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", ALL),
]
NAMES = {"learning_rate": "lr", "epsilon": "eps", "rho": "alpha"}


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(in_process=True) as made:
        yield connected(made)


def of_torch(kind: str, given: dict[str, Any], parameters: list[Any]) -> Any:
    """torch's optimizer with these hyperparameters, which computes one tensor after the other."""
    names = NAMES | ({"rho": "rho"} if kind == "Adadelta" else {})
    renamed = {names.get(name, name): value for name, value in given.items() if not name.startswith("beta_")}
    if "beta_1" in given:
        renamed["betas"] = (given["beta_1"], given["beta_2"])
    foreach = {} if kind == "SparseAdam" else {"foreach": False}
    return getattr(torch.optim, kind)(parameters, **renamed, **foreach)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind.startswith("torch.")])
def test_the_defaults_are_those_of_torch(kind: str) -> None:
    made = of_torch(kind.removeprefix("torch."), {}, [torch.nn.Parameter(torch.zeros(1))])
    theirs = of_torch(kind.removeprefix("torch."), dict(defaults_of(kind)), [torch.nn.Parameter(torch.zeros(1))])
    assert {**made.defaults, "foreach": None} == {**theirs.defaults, "foreach": None}


def assert_close(found: Any, expected: Any, what: str) -> None:
    scale = np.maximum(np.abs(expected), np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    ulps = np.abs(found - expected) / (np.finfo(expected.dtype).eps * scale + np.finfo(expected.dtype).tiny)
    assert ulps.max() <= ULPS, f"{what}: {ulps.max()} ulp"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_fifty_steps_equal_those_of_torch(
    kind: str, changes: dict[str, Any], dtype: str, strategy: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**defaults_of(f"torch.{kind}"), **changes}
    random = np.random.default_rng(1)
    starts = [random.standard_normal(40).astype(dtype) for _ in SCALES]
    with strategy.scope():
        variables = [cs.Variable(start) for start in starts]
        optimizer = of_kind(f"torch.{kind}", **given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # in which torch keeps NAdam's mu_product
    try:
        parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
        theirs = of_torch(kind, given, parameters)
        for t in range(1, STEPS + 1):
            rate = given["learning_rate"] * min(1, t / 10)
            used = range(len(SCALES) - (t % 3 == 0))
            gradients = [(random.standard_normal(40) * SCALES[each]).astype(dtype) for each in used]
            optimizer.learning_rate = rate
            pairs = list(zip(gradients, variables, strict=False))
            strategy.run(lambda o, p: o.apply_gradients(p), args=(optimizer, pairs))
            theirs.param_groups[0]["lr"] = rate
            theirs.zero_grad()
            for gradient, parameter in zip(gradients, parameters, strict=False):
                parameter.grad = torch.tensor(gradient)
            theirs.step()
    finally:
        torch.set_default_dtype(before)
    for scale, variable, parameter in zip(SCALES, variables, parameters, strict=True):
        assert_close(variable.numpy(), parameter.detach().numpy(), f"gradients of {scale}")
        state = theirs.state[parameter]
        for slot in optimizer.slot_names:
            found = optimizer.get_slot(variable, slot).numpy()
            assert_close(found, state[slot].detach().numpy(), f"{slot}, gradients of {scale}")
        assert optimizer.steps_of([variable]) == [int(state.get("step", STEPS - (variable is variables[-1]) * 16))]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("SGD", {"learning_rate": 0.1}),
        ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.3}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("SparseAdam", {"maximize": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sparse_gradients_equal_those_of_torch(
    kind: str, changes: dict[str, Any], dtype: str, strategy: cs.CentralStorageStrategy
) -> None:
    given, random = {**defaults_of(f"torch.{kind}"), **changes}, np.random.default_rng(2)
    start = random.standard_normal((12, 3)).astype(dtype)
    with strategy.scope():
        variable, optimizer = cs.Variable(start), of_kind(f"torch.{kind}", **given)
    parameter = torch.nn.Parameter(torch.tensor(start))
    theirs = of_torch(kind, given, [parameter])
    for t in range(1, STEPS + 1):
        rows, values = random.integers(0, 9, 5), random.standard_normal((5, 3)).astype(dtype)
        rate = optimizer.learning_rate = theirs.param_groups[0]["lr"] = given["learning_rate"] * min(1, t / 10)
        assert rate > 0
        gradient = cs.IndexedSlices(values, rows)
        strategy.run(lambda o, g, v: o.apply_gradients([(g, v)]), args=(optimizer, gradient, variable))
        with torch.sparse.check_sparse_tensor_invariants():  # or torch warns that it checks nothing
            parameter.grad = torch.sparse_coo_tensor(rows[None], values, (12, 3))
            theirs.step()
    assert_close(variable.numpy(), parameter.detach().numpy(), "parameter")
    for slot in optimizer.slot_names:
        kept = theirs.state[parameter][slot]
        assert_close(optimizer.get_slot(variable, slot).numpy(), kept.to_dense().numpy(), slot)
