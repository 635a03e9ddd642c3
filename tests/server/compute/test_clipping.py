"""Bounds of the summed gradient: TensorFlow's formulas, and the same bits whatever the number of threads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from tests.server.compute.test_executor import Bytes, commit

from cs_proto.arrays import array_of
from cs_server.compute import norm_kernels, norms
from cs_server.compute.clipping import Clipping, factors_together, square_of, square_reference
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


def in_order(values: np.ndarray) -> float:
    """The squared norm by the definition: a plain loop over partial sums, whose halves are added."""
    partial = [0.0] * norm_kernels.LANES
    for place, value in enumerate(values.astype(float).tolist()):
        partial[place % len(partial)] += value * value
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [low + high for low, high in zip(partial[:half], partial[half:], strict=True)]
    return partial[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 47, 5000])
def test_squares_are_added_in_one_order(count: int, dtype: str) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(dtype)
    assert square_of(values) == square_reference(values) == in_order(values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("weights", "limit"), [((1.0, 1.0), math.inf), ((0.5, 0.0), 0.75), ((0.0, 0.0), 1.0)])
def test_compiled_squares_are_those_of_the_weighted_and_bounded_sum(
    weights: tuple[float, ...], limit: float, dtype: str
) -> None:
    random = np.random.default_rng(1)
    gradients = [random.standard_normal(200).astype(dtype) for _ in weights]
    if not weights[1]:
        gradients[1][:] = np.nan  # it is left out
    places, found = np.array([[3, 4], [4, 60], [60, 60], [61, 200]]), np.full(4, -1.0)
    addresses = np.array([each.ctypes.data for each in gradients], np.int64)
    given = addresses, np.array(weights, dtype), np.full(1, limit, dtype), places, found
    norm_kernels.squares(np.dtype(dtype))(*given)()
    clipping = Clipping(limit, None, None)
    totals = [clipping.total(gradients, slice(*place), weights) for place in places.tolist()]
    assert found.tolist() == [square_reference(total) for total in totals]


SQUARES = [0.0, 1e-300, 0.3, 7.0, 16.0, 1e308, math.inf, math.nan]


@pytest.mark.parametrize("common", [None, (0.0, 0.0), (0.7, 1e-6), (1e9, 0.0)])
@pytest.mark.parametrize("seed", range(20))
def test_compiled_factors_are_those_of_python(seed: int, common: tuple[float, float] | None) -> None:
    random = np.random.default_rng(seed)
    last = len(SQUARES) if seed % 2 else 5  # every other time all are finite
    clippings = [Clipping(None, None, None), Clipping(None, 0.5, None), Clipping(None, None, 2.0)]
    clippings += [Clipping(None, 0.0, None), Clipping(None, None, 0.0)]
    squares = [[SQUARES[which] for which in random.integers(0, last, 3)] for _ in clippings]
    kinds = (norm_kernels.NO_BOUND, *(norm_kernels.OF_EACH, norm_kernels.OF_ALL) * 2)
    groups, bounds = [], []
    for number, (clipping, kind) in enumerate(zip(clippings, kinds, strict=True)):
        ends = range(3 * number + 1, 3 * number + 4) if kind == norm_kernels.OF_EACH else [3 * number + 3]
        groups += [(end, kind) for end in ends]
        bounds += [clipping.clipnorm or clipping.global_clipnorm or 0.0] * len(ends)
    found, others = np.empty(15), random.random(15)
    arrays = (np.array(squares).reshape(-1), np.arange(1, 16), np.array(groups), np.array(bounds), others)
    norm_kernels.factors()(*arrays, np.array(common or ()), found)()
    own, shared = factors_together(clippings, squares, *(common or (None, 0.0)))
    expected = np.array([factor * shared for factors in own for factor in factors]) * others
    expected[np.isnan(expected)] = math.nan
    assert found.tobytes() == expected.tobytes()


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
    monkeypatch.setattr(norms, "_PIECE", 700)
    totals = step(1)
    limit = bounds.get("clipvalue", np.inf)
    totals = [np.clip(total, -limit, limit) for total in totals]
    lengths = [math.sqrt(square_of(total)) for total in totals]
    if "global_clipnorm" in bounds:
        scale = bounds["global_clipnorm"] / max(math.hypot(*lengths), bounds["global_clipnorm"])
        totals = [total * scale for total in totals]
    if "clipnorm" in bounds:
        totals = [t * bounds["clipnorm"] / max(n, bounds["clipnorm"]) for t, n in zip(totals, lengths, strict=True)]
    found = step(1, **bounds)
    for one, expected, threaded in zip(found, totals, step(3, **bounds), strict=True):
        np.testing.assert_allclose(one, expected, rtol=2e-6)
        assert one.tobytes() == threaded.tobytes()
