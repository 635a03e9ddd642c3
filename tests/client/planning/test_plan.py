"""The plan: which optimizer's slots count, what lies where, and the line of a training."""

from __future__ import annotations

import pytest

from central_storage.planning.announcement import line
from central_storage.planning.plan import KINDS, Optimizer, Plan, planned
from cs_proto.memory_plan import KEPT_NBYTES, PAGE_NBYTES, undo_nbytes
from cs_proto.messages import VariableSpec

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def spec(count: int = 1 << 20, dtype: str = "float32", *, trainable: bool = True, sparse: bool = False) -> VariableSpec:
    return VariableSpec("w", dtype, (count, 1), trainable, 0, 0, sparse=sparse)


def plan(*optimizers: Optimizer, device: str = "cpu:0", **specs: VariableSpec) -> Plan:
    return planned({int(name[1:]): each for name, each in specs.items()}, optimizers, DEVICES, device)


def test_every_byte_belongs_to_one_process() -> None:
    made = planned({1: spec(), 2: spec(7)}, [Optimizer("adam")], DEVICES, "cpu:0", arenas=4096)
    assert list(made.by_process) == ["server", "w0", "w1", "w2", "script"]
    for kind in KINDS:
        assert sum(kinds[kind] for kinds in made.by_process.values()) == made.by_kind[kind]
    assert made.nbytes == sum(made.by_kind.values())
    assert made.by_process["w1"]["gradients"] == (4 << 20) + PAGE_NBYTES
    assert made.by_process["script"] == {**dict.fromkeys(KINDS, 0), "arenas": 4096}


@pytest.mark.parametrize(
    ("optimizers", "slots", "is_upper_bound"),
    [
        ([], 0, False),
        ([Optimizer("sgd")], 0, False),
        ([Optimizer("adam")], 16, False),
        ([Optimizer("adam", frozenset({1, 2}))], 16, False),
        ([Optimizer("adam", frozenset({1})), Optimizer("sgd_momentum", frozenset({2}))], 12, False),
        (
            [Optimizer("adam", frozenset({1})), Optimizer("sgd_momentum", frozenset({1}))],
            12,
            False,
        ),  # both update the first
        (
            [Optimizer("adam", frozenset({1})), Optimizer("sgd_momentum")],
            12,
            False,
        ),  # the second one is left for the other
        ([Optimizer("adam"), Optimizer("adamw")], 16, False),  # whichever it is
        ([Optimizer("adam"), Optimizer("sgd")], 16, True),
        ([Optimizer("rowwise_adagrad", frozenset({1, 2}))], 8, False),
    ],
)
def test_the_slots_of_the_optimizers_that_may_update(
    optimizers: list[Optimizer], slots: int, is_upper_bound: bool
) -> None:
    made = plan(*optimizers, v1=spec(), v2=spec())
    assert (made.slots >> 20, made.is_upper_bound) == (slots, is_upper_bound)


def test_what_is_not_trained_or_sparse_has_no_gradients() -> None:
    made = plan(Optimizer("adam"), v1=spec(trainable=False), v2=spec(dtype="int64"), v3=spec(sparse=True), v4=spec(16))
    assert made.gradients == PAGE_NBYTES
    assert made.slots == (8 << 20) + 2 * PAGE_NBYTES
    assert made.parameters == (4 << 20) + (8 << 20) + (4 << 20) + PAGE_NBYTES
    assert made.sparse == 12 << 20


def test_segments_take_whole_pages_and_small_variables_share_them() -> None:
    """The slots of an optimizer lie at the offsets of its variables: it takes the pages in which it has any."""
    page = PAGE_NBYTES
    specs = {number: spec(page // 16) for number in range(8)}  # four on a page
    made = planned(specs, [Optimizer("adam", frozenset({0, 1, 7})), Optimizer("sgd_momentum")], DEVICES, "cpu:0")
    assert made.parameters == made.gradients == 2 * page
    assert made.slots == 2 * 2 * page + 2 * page
    assert planned({1: spec(3), 2: spec(3, "int32"), 3: spec(3, sparse=True)}, [], DEVICES, "cpu:0").parameters == (
        3 * page
    )


def test_what_the_server_keeps_of_old_values() -> None:
    dense, by_norm, lanes, whole = (
        planned({1: spec()}, [Optimizer(rule)], DEVICES, "cpu:0", lanes=lanes).other
        for rule, lanes in [("adam", 1), ("lamb", 1), ("lamb", 2), ("lamb", 999)]
    )
    piece = 3 * KEPT_NBYTES + PAGE_NBYTES
    assert by_norm - dense == piece - undo_nbytes(1, 0, 0)
    assert lanes - by_norm == piece
    assert whole - by_norm == 15 * piece + (999 - 16) * undo_nbytes(1, 0, 0)  # 4 MB have 16 pieces


def test_on_a_gpu_there_is_a_copy_there_and_room_for_a_journal() -> None:
    of = {"v1": spec(), "v2": spec(dtype="int64")}
    host, there = (plan(Optimizer("adam"), device=each, **of) for each in ("cpu:0", "gpu:0"))
    assert (host.on_gpu, there.on_gpu) == (0, 12 << 20)
    with_replica = planned({1: spec()}, [Optimizer("adam")], ["gpu:0", "gpu:1"], "gpu:0")
    assert with_replica.on_gpu == 16 << 20  # and the gradients of the replica there
    assert there.other - host.other == (12 << 20) - undo_nbytes(1, 0, 0)  # and no memory for old values


def test_the_line_says_whether_it_fits() -> None:
    said = [line({1: spec()}, [Optimizer("adam")], DEVICES, "cpu:0", nbytes) for nbytes in (20 << 20, 19 << 20)]
    assert said[0].endswith("21 MB of these 25 MB are still to come, 21 MB available")
    assert said[1].endswith("20 MB available: they do not fit")
