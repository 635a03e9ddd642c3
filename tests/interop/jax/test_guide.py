"""The guide's two columns are programs, and train the same model."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(unit(200))


def columns() -> tuple[str, str]:
    """The programs in the first table of the page."""
    table = (ROOT / "docs/guide/jax.md").read_text().partition("| --- | --- |\n")[2].partition("\n\n")[0]
    programs: tuple[list[str], list[str]] = [], []
    for row in table.splitlines():
        cells = re.fullmatch(r"\| (.*?) ?\| (.*?) ?\|", row)
        assert cells is not None, row
        for program, cell in zip(programs, cells.groups(), strict=True):
            program += re.findall(r"`([^`]*)`", cell)
    return "\n".join(programs[0]), "\n".join(programs[1])


def make_model(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {"hidden": jax.random.normal(first, (4, 8)), "out": jax.random.normal(second, (8, 3)), "bias": jnp.zeros(3)}


def apply(model: Any, x: Any) -> Any:
    return jnp.tanh(x @ model["hidden"]) @ model["out"] + model["bias"]


def test_both_columns_train_the_same_parameters() -> None:
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(9, 4)).astype(np.float32), random.integers(0, 3, 9).astype(np.int32)) for _ in range(40)
    ]
    given = {
        "make_model": make_model,
        "apply": apply,
        "cross_entropy": optax.softmax_cross_entropy_with_integer_labels,
        "batches": batches,
    }
    alone, here = dict(given), dict(given)
    left, right = columns()
    assert len(left.splitlines()) > len(right.splitlines()) > 10
    exec(left, alone)
    exec(right, here)
    try:
        for name in ("parameters", "moments"):
            assert jax.tree.structure(here[name]) == jax.tree.structure(alone[name])
            for found, wanted in zip(jax.tree.leaves(here[name]), jax.tree.leaves(alone[name]), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
        assert here["value"] == pytest.approx(float(alone["value"]), rel=1e-3)
    finally:
        here["strategy"].shutdown()
