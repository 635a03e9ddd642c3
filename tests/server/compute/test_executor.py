"""What commands ask for is what happens to memory, on one thread or several."""

from __future__ import annotations

import mmap
from threading import Event, Semaphore

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from cs_proto.arrays import Array, Location, array_of, frame_view, view_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import AssignOp, ReduceOpName
from cs_server.compute import executor, plans
from cs_server.compute.executor import Executor
from cs_server.events import Apply, Commit, Compute, Dense, Fill, Rows, Update, Write
from cs_server.rules import RULES, reference

SGD = (("learning_rate", 0.25), ("momentum", 0.5), ("nesterov", 0.0))


class Bytes:
    """Segments in ordinary memory."""

    def __init__(self, **segments: np.ndarray) -> None:
        self.segments = segments

    def view(self, array: Array) -> np.ndarray:
        if not isinstance(array.place, Location):
            return frame_view(array)
        flat = self.segments[array.place.segment].view(np.uint8)
        return view_of(array, flat.data[array.place.offset : array.place.offset + array.nbytes])

    def elements(self, name: str, dtype: str) -> np.ndarray:
        return self.segments[name].view(dtype)

    def discard(self, name: str, start: int, stop: int) -> None:
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        self.segments[name].view(np.uint8)[first * mmap.PAGESIZE : max(first, last) * mmap.PAGESIZE] = 0


def at(segment: str, offset: int, like: np.ndarray) -> Array:
    return Array(like.dtype.name, like.shape, Location(segment, offset))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads an update may use; even a small one is spread over them."""
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 1)
    found: int = request.param
    return found


def commit(memory: Bytes, *operations: Apply | Write | Fill, threads: int = 1) -> None:
    arithmetic = Executor(memory, threads)
    try:
        arithmetic.commit(Commit(1, operations))
    finally:
        arithmetic.close()


# --- computations ---------------------------------------------------------------------------------------------------


def test_all_reduce_leaf_by_leaf_in_replica_order() -> None:
    arena = np.array([1e16, 1.0])
    memory = Bytes(arena=arena)
    components = (
        (at("arena", 0, arena[:1]), array_of(np.array([[1, 2]]))),
        (array_of(np.array([1.0])), array_of(np.array([[10, 20]]))),
        (array_of(np.array([-1e16])), array_of(np.array([[100, 200]]))),
    )
    total, other = Executor(memory, 1).compute(Compute(1, "SUM", 0, components))
    assert frame_view(total)[0] == (1e16 + 1.0) - 1e16
    assert frame_view(other).tolist() == [[111, 222]]
    mean, _ = Executor(memory, 1).compute(Compute(1, "MEAN", 0, components[:2]))
    assert frame_view(mean)[0] == (1e16 + 1.0) / 2


def test_all_gather_along_its_axis() -> None:
    components = tuple((array_of(np.full((2, n), n)),) for n in (1, 2))
    (gathered,) = Executor(Bytes(), 1).compute(Compute(1, None, 1, components))
    assert frame_view(gathered).tolist() == [[1, 2, 2], [1, 2, 2]]


def test_an_all_reduce_of_nothing_is_nothing() -> None:
    assert Executor(Bytes(), 1).compute(Compute(1, "SUM", 0, ((), ()))) == ()


@pytest.mark.parametrize(
    ("components", "said"),
    [
        (((array_of(np.zeros(2)),), ()), r"must contribute the same number of arrays, not \[1, 0\]"),
        (((array_of(np.zeros(2)),), (array_of(np.zeros(3)),)), "shape and dtype must agree"),
        (((array_of(np.array(["a"])),),) * 2, "only numbers can be added"),
    ],
)
def test_what_cannot_be_combined(components: tuple[tuple[Array, ...], ...], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        Executor(Bytes(), 1).compute(Compute(1, "SUM", 0, components))


# --- commits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reduce", "expected"),
    [
        ("assign", None, [1, 2]),
        ("assign_add", None, [11, 22]),
        ("assign_sub", None, [9, 18]),
        ("assign", "SUM", [4, 6]),
        ("assign_add", "SUM", [14, 26]),
        ("assign_sub", "MEAN", [8, 17]),
    ],
)
def test_writes(op: AssignOp, reduce: ReduceOpName | None, expected: list[float]) -> None:
    slab = np.array([0, 10, 20, 0], np.float32)
    sources = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
    if reduce is None:
        sources = sources[:1]
    commit(Bytes(slab=slab), Write(at("slab", 4, sources[0]), op, reduce, tuple(map(array_of, sources))))
    assert slab.tolist() == [0, *expected, 0]


def test_a_write_of_another_dtype_than_numpy_would_choose() -> None:
    slab = np.array([250, 1], np.uint8)
    commit(Bytes(slab=slab), Write(at("slab", 0, slab), "assign_add", None, (array_of(np.array([10, 1], np.uint8)),)))
    assert slab.tolist() == [4, 2]


def test_fill() -> None:
    slots = np.zeros(6, np.float64)
    commit(Bytes(slots=slots), Fill("slots", "float64", 2, 5, 0.1))
    assert slots.tolist() == [0, 0, 0.1, 0.1, 0.1, 0]


@pytest.mark.parametrize(("first", "last"), [(2, 5), (100, 5000), (0, 1024), (1000, 2000), (4096, 4096)])
def test_a_lazy_fill_gives_whole_pages_back_and_clears_the_edges(first: int, last: int) -> None:
    slots = np.ones(6000, np.float32)
    commit(Bytes(slots=slots), Fill("slots", "float32", first, last, 0.0, True))
    assert not slots[first:last].any()
    assert slots[:first].all()
    assert slots[last:].all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_apply_has_the_bits_of_the_reference_and_leaves_the_rest_alone(dtype: str, threads: int) -> None:
    random = np.random.default_rng(7)
    length, ranges = 5000, ((3, 700), (701, 702), (1024, 4999))
    w, m, *gradients = (random.standard_normal(length).astype(dtype) for _ in range(5))
    expected_w, expected_m = w.copy(), m.copy()
    rule = RULES["sgd_momentum"]
    for first, last in ranges:
        part = slice(first, last)
        reference(rule, expected_w[part], [g[part] for g in gradients], (expected_m[part],), dict(SGD), 4)
    memory = Bytes(w=w, m=m, g0=gradients[0], g1=gradients[1], g2=gradients[2])
    part = Dense(dtype, ranges, "w", ("m",), ("g0", "g1", "g2"))
    commit(memory, Apply((Update("sgd_momentum", SGD, 4, (part,)),)), threads=threads)
    assert w.tobytes() == expected_w.tobytes()
    assert m.tobytes() == expected_m.tobytes()


LAMB = {"learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-3, "weight_decay": 0.1}


def lamb(w: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, t: int) -> list[np.ndarray]:
    """A whole variable and its slots after update t, as algorithm 2 of the paper says."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-3) + 0.1 * w
    norms = np.linalg.norm(w), np.linalg.norm(direction)
    return [w - 0.1 * (norms[0] / norms[1] if all(norms) else 1.0) * direction, m, v]


@pytest.mark.parametrize("groups", [1, 2, 504])
@pytest.mark.parametrize("bound", [{}, {"clipvalue": 0.5}])
def test_the_rate_follows_the_norms_of_each_variable(
    bound: dict[str, float], groups: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are variables; one is zero, which has no norm, and one is of another update."""
    monkeypatch.setattr(executor, "_PIECE", 100)
    monkeypatch.setattr(executor, "NUMBERS", groups)
    random, ranges = np.random.default_rng(7), ((3, 700), (701, 702), (1024, 4999), (5000, 5100))
    w, m, *gradients = (random.standard_normal(5200) for _ in range(4))
    v, table, moments = m * m, random.standard_normal((30, 4)), [np.zeros((30, 4)) for _ in range(2)]
    w[5000:5100] = 0
    total = sum(gradients)
    total = np.clip(total, -0.5, 0.5) if bound else total
    counts = (4, 4, 4, 9, 2)
    wanted = [lamb(*(a[slice(*r)] for a in (w, m, v, total)), t) for r, t in zip(ranges, counts, strict=False)]
    values, rows = random.standard_normal((5, 4)), np.array([7, 2, 7, 29, 0])
    gradient = np.zeros((30, 4))
    np.add.at(gradient, rows, values)
    wanted_table = lamb(table, *moments, np.clip(gradient, -0.5, 0.5) if bound else gradient, 2)
    memory = Bytes(
        w=w,
        m=m,
        v=v,
        g0=gradients[0],
        g1=gradients[1],
        t=table.reshape(-1),
        **dict(zip("ab", (each.reshape(-1) for each in moments), strict=True)),
    )
    parts = (
        Dense("float64", ranges[:3], "w", ("m", "v"), ("g0", "g1")),
        Dense("float64", ranges[3:], "w", ("m", "v"), ("g0", "g1")),
    )
    of_rows = Rows("float64", 0, (30, 4), "t", ("a", "b"), ((array_of(values), array_of(rows)),))
    given = tuple({**LAMB, **bound}.items())
    update = Update("lamb", given, 4, parts, (of_rows,), counts=(4, 9, 2))
    commit(memory, Apply((update,)), threads=threads)
    for place, arrays in zip(ranges, wanted, strict=True):
        for found, expected in zip((w, m, v), arrays, strict=True):
            np.testing.assert_allclose(found[slice(*place)], expected, rtol=1e-12, atol=1e-14)
    for found, expected in zip((table, *moments), wanted_table, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_rows_that_meet_a_dense_gradient_are_made_dense_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces ask for them. The time would grow with the square of the table."""
    monkeypatch.setattr(executor, "_PIECE", 100)
    made, plain = list[int](), executor.as_dense
    monkeypatch.setattr(executor, "as_dense", lambda *given: made.append(len(made)) or plain(*given))
    memory = Bytes(**{name: np.ones(1000) for name in ("w", "m", "v", "g0", "g1")})
    rows = array_of(np.ones((2, 4))), array_of(np.array([3, 1]))
    part = Dense("float64", ((0, 1000),), "w", ("m", "v"), ("g0", "g1"), rows=(None, rows))
    given = tuple({**LAMB, "clipnorm": 0.5}.items())
    commit(memory, Apply((Update("lamb", given, 1, (part,)),)))
    assert len(made) == 1


def test_lazy_rows_move_by_the_norms_of_the_named_rows() -> None:
    random = np.random.default_rng(7)
    table, moments = random.standard_normal((30, 4)), [np.zeros((30, 4)) for _ in range(2)]
    values, rows = random.standard_normal((2, 4)), np.array([7, 2])
    before = table.copy()
    wanted = lamb(before[rows], np.zeros((2, 4)), np.zeros((2, 4)), values, 1)
    memory = Bytes(t=table.reshape(-1), a=moments[0].reshape(-1), b=moments[1].reshape(-1))
    of_rows = Rows("float64", 0, (30, 4), "t", ("a", "b"), ((array_of(values), array_of(rows)),))
    commit(memory, Apply((Update("lamb", tuple({**LAMB, "lazy": 1.0}.items()), 1, (), (of_rows,)),)))
    for found, expected in zip((table, *moments), wanted, strict=True):
        np.testing.assert_allclose(found[rows], expected, rtol=1e-12)
    others = np.setdiff1d(np.arange(30), rows)
    assert table[others].tolist() == before[others].tolist()


@pytest.mark.parametrize("busy", [1, 2])
def test_the_share_of_a_thread_that_has_other_work_is_done_all_the_same(
    busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 1)
    memory = Bytes(w=np.zeros(1000), g=np.arange(1000.0))
    door, inside, spread = Event(), Semaphore(0), Executor(memory, 3)
    assert spread._pool is not None
    for _ in range(busy):
        spread._pool.submit(lambda: (inside.release(), door.wait()))
        inside.acquire()
    part = Dense("float64", ((0, 1000),), "w", (), ("g",))
    spread.commit(Commit(1, (Apply((Update("sgd", (("learning_rate", 1.0),), 1, (part,)),)),)))
    door.set()
    spread.close()
    assert memory.segments["w"].tolist() == (-np.arange(1000.0)).tolist()


def test_operations_follow_each_other() -> None:
    w, g = np.zeros(64, np.float32), np.ones(64, np.float32)
    plain = (("learning_rate", 1.0), ("momentum", 0.0), ("nesterov", 0.0))
    apply = Apply((Update("sgd", plain, 1, (Dense("float32", ((0, 64),), "w", (), ("g",)),)),))
    add = Write(at("w", 0, w), "assign", None, (array_of(np.full(64, 5, np.float32)),))
    commit(Bytes(w=w, g=g), apply, add, apply, apply)
    assert w.tolist() == [3.0] * 64


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 3000)), max_size=6), st.integers(1, 5))
def test_shares_cover_every_element_once_and_in_order(steps: list[tuple[int, int]], threads: int) -> None:
    ranges, end = [], 0
    for gap, length in steps:
        ranges.append((end + gap, end + gap + length))
        end = ranges[-1][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_ELEMENTS_PER_THREAD", 300)
        halves = tuple(ranges[::2]), tuple(ranges[1::2])
        shares = plans.shares_of(halves, threads)
    assert 1 <= len(shares) <= threads
    sizes = [sum(last - first for _, part in share for first, last in part.tolist()) for share in shares]
    for number, half in enumerate(halves):
        parts = [each for share in shares for part, each in share if part == number]
        covered = [element for part in parts for first, last in part.tolist() for element in range(first, last)]
        assert covered == [element for first, last in half for element in range(first, last)]
        boundaries = {first for first, _ in half}
        assert all(part[0][0] % 64 == 0 or part[0][0] in boundaries for part in parts)
    assert max(sizes) <= -(-sum(sizes) // len(shares)) + 64 * threads
    for share in shares:
        for _, part in share:
            assert part.dtype == np.int64
            assert part.shape[1:] == (2,)
            assert part.flags.carray
