"""Bounds of the summed gradient: TensorFlow's formulas, and the same bits whatever the number of threads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from tests.server.compute.test_executor import Bytes, commit

from cs_proto.arrays import array_of
from cs_server.compute import executor
from cs_server.compute.clipping import Clipping, square_of
from cs_server.events import Apply, Dense, Rows, Update

PLAIN = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": 0.0}


def test_no_bounds_are_no_clipping() -> None:
    assert Clipping.of(PLAIN) is None
    assert Clipping.of({**PLAIN, "clipvalue": 2.0}) == Clipping(2.0, None, None)


@pytest.mark.parametrize(
    ("given", "squares", "factors"),
    [
        ({"clipnorm": 2.0}, [16.0, 1.0, 0.0], [0.5, 1.0, 1.0]),
        ({"clipnorm": 0.0}, [16.0, 0.0], [0.0, 1.0]),
        ({"clipnorm": 2.0}, [math.inf, math.nan], [0.0, math.nan]),
        ({"global_clipnorm": 2.5}, [16.0, 9.0], [0.5, 0.5]),
        ({"global_clipnorm": 5.5}, [16.0, 9.0], [1.0, 1.0]),
        ({"global_clipnorm": 2.0}, [math.inf, 1.0], [math.nan, math.nan]),
        ({"global_clipnorm": 2.0}, [math.nan, 1.0], [math.nan, math.nan]),
        ({"clipvalue": 2.0}, [16.0], [1.0]),
    ],
)
def test_factors(given: Mapping[str, float], squares: list[float], factors: list[float]) -> None:
    clipping = Clipping.of(given)
    assert clipping is not None
    np.testing.assert_array_equal(clipping.factors(squares), factors)


def test_squares_are_added_in_double_precision() -> None:
    assert square_of(np.array([1e20, 1e20], np.float32)) == pytest.approx(2e40)
    assert square_of(np.array([300.0, 400.0], np.float16)) == 250_000.0
    assert square_of(np.array([3 + 4j, 0], np.complex64)) == 25.0
    assert square_of(np.zeros(0, np.float32)) == 0.0


def step(threads: int, **bounds: float) -> list[np.ndarray]:
    """One step on variables of two dtypes and a table; what the gradients were bounded to."""
    random = np.random.default_rng(3)
    gradients = {f"g{r}": random.standard_normal(5000).astype("f4") for r in (0, 1)}
    wide = {f"d{r}": random.standard_normal(70).astype("f8") for r in (0, 1)}
    w, d, t = np.zeros(5000, "f4"), np.zeros(70, "f8"), np.zeros(60, "f4")
    slices = [(random.standard_normal((40, 3)).astype("f4"), random.integers(0, 20, 40)) for _ in (0, 1)]
    dense = (
        Dense("float32", ((0, 3000), (3008, 5000)), "w", (), ("g0", "g1")),
        Dense("float64", ((0, 70),), "d", (), ("d0", "d1")),
    )
    sparse = Rows("float32", 0, (20, 3), "t", (), tuple((array_of(v), array_of(i)) for v, i in slices))
    apply = Apply((Update("sgd", tuple({**PLAIN, **bounds}.items()), 1, dense, (sparse,)),))
    commit(Bytes(w=w, d=d, t=t, **gradients, **wide), apply, threads=threads)
    return [-w[:3000], -w[3008:], -d, -t]


@pytest.mark.parametrize(
    "bounds",
    [{"clipvalue": 0.5}, {"clipnorm": 2.0}, {"global_clipnorm": 3.0}, {"clipvalue": 1.0, "global_clipnorm": 3.0}],
    ids=str,
)
def test_a_step_is_bounded_as_its_whole_gradient_is(bounds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PIECE", 700)
    totals = step(1)
    limit = bounds.get("clipvalue", np.inf)
    totals = [np.clip(total, -limit, limit) for total in totals]
    norms = [math.sqrt(square_of(total)) for total in totals]
    if "global_clipnorm" in bounds:
        scale = bounds["global_clipnorm"] / max(math.hypot(*norms), bounds["global_clipnorm"])
        totals = [total * scale for total in totals]
    if "clipnorm" in bounds:
        totals = [t * bounds["clipnorm"] / max(n, bounds["clipnorm"]) for t, n in zip(totals, norms, strict=True)]
    found = step(1, **bounds)
    for one, expected, threaded in zip(found, totals, step(3, **bounds), strict=True):
        np.testing.assert_allclose(one, expected, rtol=2e-6)
        assert one.tobytes() == threaded.tobytes()
