"""The rules of merge points by themselves: which error is a run's, and how places are named."""

from __future__ import annotations

import itertools

import pytest
from tests.harness.playbook import applies, assigns, fault, gathers, makes, merge_calls, reads, reduces, scalar, spec

from cs_proto.messages import Error
from cs_server.engine.steps import merge
from cs_server.engine.store.tables import Failure

MISMATCH, LOST, WRITTEN = "cs.MergeMismatchError", "cs.ReplicaLostError", "cs.VariableWrittenError"


@pytest.mark.parametrize(
    ("point", "title"),
    [
        (applies(0), "apply_gradients of optimizer 1 (train.py:10)"),
        (assigns(0, scalar(1), op="assign_sub"), "assign_sub of variable 1 (train.py:20)"),
        (makes(0, spec("w"), scalar(1)), "the creation of variable 'w' (train.py:5)"),
        (reduces(0, op="MEAN"), "all_reduce MEAN (train.py:31)"),
        (gathers(0, axis=-1), "all_gather along axis -1 (train.py:32)"),
        (merge_calls(0), "merge_call (train.py:40)"),
        (reads(0), "a read of what it wrote (train.py:50)"),
    ],
)
def test_every_point_has_a_title(point: merge.Point, title: str) -> None:
    assert merge.title(point) == title


def failure(cause: str, code: str, replica: int = -1, merge_index: int = 0) -> Failure:
    return Failure(cause, replica, fault(code, replica, merge_index))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "returned", "wanted"),
    [
        (None, ["", ""], ""),
        (None, ["", "KeyError"], "KeyError"),
        (None, ["KeyError", "ValueError"], "KeyError"),
        (None, [MISMATCH, ""], MISMATCH),
        (failure("mismatch", MISMATCH), [MISMATCH, MISMATCH], MISMATCH),
        (failure("mismatch", MISMATCH), [MISMATCH, "KeyError"], "KeyError"),
        (failure("operation", "cs.InvalidArgumentError"), ["KeyError", ""], "cs.InvalidArgumentError"),
        (failure("operation", "cs.InvalidArgumentError", merge_index=9), ["KeyError", ""], "KeyError"),
        (failure("lost", LOST, replica=1, merge_index=1), [LOST, ""], LOST),
        (failure("lost", LOST, replica=1, merge_index=9), ["KeyError", ""], "KeyError"),
        (failure("lost", LOST, replica=0), [MISMATCH, "KeyError"], LOST),
        (failure("cancelled", "KeyboardInterrupt", merge_index=9), ["KeyError", ""], "KeyboardInterrupt"),
        (None, ["KeyError", WRITTEN], WRITTEN),
        (failure("operation", "cs.InvalidArgumentError"), ["", WRITTEN], WRITTEN),
        (failure("cancelled", "KeyboardInterrupt", merge_index=9), [WRITTEN, ""], "KeyboardInterrupt"),
    ],
)
def test_the_cause_is_raised_and_not_its_echoes(why: Failure | None, returned: list[str], wanted: str) -> None:
    errors = [fault(code, replica, 3) if code else None for replica, code in enumerate(returned)]
    found = merge.verdict(why, errors)
    assert (found.exception if found else "") == wanted


def test_the_lowest_merge_index_and_then_the_lowest_replica_counts() -> None:
    for indices in itertools.product(range(3), repeat=3):
        errors: list[Error | None] = [fault("KeyError", replica, index) for replica, index in enumerate(indices)]
        found = merge.verdict(None, errors)
        assert found is not None
        assert (found.merge_index, found.replica) == min(zip(indices, range(3), strict=True))
