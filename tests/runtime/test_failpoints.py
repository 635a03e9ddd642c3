"""Failpoints: what a specification has happen where, and nothing without one."""

from __future__ import annotations

import ast
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.harness.processes import ROOT, Ended, run

from cs_runtime.failpoints import FAILPOINTS, FailpointError, failpoint, failpoints_of

PLACE, OTHER = FAILPOINTS[:2]


def test_without_a_specification_nothing_is_looked_at() -> None:
    failpoint("nowhere")  # refused where there is a specification, see below


def test_an_item_takes_effect_at_its_hit_and_at_no_other() -> None:
    reached = failpoints_of(f"{PLACE}=raise@3")
    reached(PLACE)
    reached(OTHER)
    reached(PLACE)
    with pytest.raises(FailpointError, match=PLACE):
        reached(PLACE)
    reached(PLACE)


def test_several_items_with_spaces_between_them() -> None:
    reached = failpoints_of(f" {PLACE}=raise ; {OTHER}=raise@2; ")
    with pytest.raises(FailpointError):
        reached(PLACE)
    reached(OTHER)
    with pytest.raises(FailpointError):
        reached(OTHER)


@pytest.mark.parametrize(("rank", "raises"), [("1", True), ("0", False), ("", False), ("11", False)])
def test_a_rank_limits_an_item_to_one_replica(rank: str, raises: bool) -> None:
    reached = failpoints_of(f"{PLACE}[1]=raise", rank=rank)
    if raises:
        with pytest.raises(FailpointError):
            reached(PLACE)
    else:
        reached(PLACE)


def test_with_a_directory_an_item_takes_effect_in_one_process_alone(tmp_path: Path) -> None:
    spec = f"{PLACE}=raise@2"
    first, second = (failpoints_of(spec, str(tmp_path)) for _ in range(2))
    for reached in (first, second):
        reached(PLACE)
    with pytest.raises(FailpointError):
        second(PLACE)
    first(PLACE)
    assert [path.name for path in tmp_path.iterdir()] == [spec]


def test_notes_tell_which_places_were_reached(tmp_path: Path) -> None:
    reached = failpoints_of("*=note", str(tmp_path))
    reached(OTHER)
    reached(OTHER)
    failpoints_of("*=note", str(tmp_path))(OTHER)
    assert [path.name for path in tmp_path.iterdir()] == [OTHER]


def test_sleep_sleeps_and_goes_on() -> None:
    failpoints_of(f"{PLACE}=sleep(0.001)")(PLACE)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("nowhere=kill", "there is no 'nowhere', only server.heard, "),
        (f"{PLACE}=explode", "the actions are exit0, kill, "),
        (f"{PLACE}=sleep", "sleep with"),
        (f"{PLACE}=kill(3)", "sleep with"),
        (PLACE, "expected name=action"),
        (f"{PLACE}=kill@x", "expected name=action"),
        (f"{PLACE}=note", "needs a directory"),
    ],
)
def test_a_wrong_specification_is_refused(spec: str, reason: str) -> None:
    with pytest.raises(ValueError, match="failpoint") as refused:
        failpoints_of(spec)
    assert reason in str(refused.value)


def test_a_place_that_is_not_registered_is_refused_where_places_are_looked_at() -> None:
    with pytest.raises(ValueError, match="not in cs_runtime"):
        failpoints_of(f"{PLACE}=raise")("nowhere")


def in_a_process(action: str) -> Ended:
    program = f"from cs_runtime.failpoints import failpoint; failpoint({PLACE!r}); print('went on')"
    return run("-c", program, environment={"CS_FAILPOINTS": f"{PLACE}={action}"})


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV), ("exit0", 0)])
def test_actions_that_end_the_process(action: str, code: int) -> None:
    ended = in_a_process(action)
    assert (ended.code, ended.out) == (code, "")


def test_a_specification_from_the_environment_that_is_wrong_ends_the_process() -> None:
    ended = in_a_process("explode")
    assert ended.code == 1
    assert "ValueError: failpoint" in ended.err


def test_every_place_is_in_the_code_once_and_no_other_is() -> None:
    """That each is reached is shown where training runs with notes of them all."""
    found: Counter[str] = Counter()
    for role in ("proto", "server", "worker", "client"):
        for path in (ROOT / role).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                    assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
                    found[node.args[0].value] += 1
    assert found == Counter(FAILPOINTS)
