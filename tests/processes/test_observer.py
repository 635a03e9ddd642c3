"""An observer in another process: it sees whole commits and can change nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.processes import run, start
from tests.harness.services import connected

import central_storage as cs
from central_storage import errors

LOOKS = """
import json, sys
import central_storage as cs

with cs.connect() as observer:
    memory = [line for line in open("/proc/self/maps") if "memfd" in line]
    print(json.dumps({
        "value": observer.get("watched").tolist(),
        "names": [variable.spec.name for variable in observer.variables()],
        "commits": observer.statistics().commits,
        "replicas": observer.replicas,
        "mapped": memory,
    }))
"""

WATCHES = """
import central_storage as cs

torn = 0
with cs.connect() as observer:
    print("watching", flush=True)
    last = 0.0
    while last < 500:
        value = observer.get("watched")
        torn += value.min() != value.max() or value[0] < last
        last = value[0]
print("torn", torn, flush=True)
"""


@pytest.fixture(scope="module")
def own() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy for this file alone, which knows all its variables."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield connected(strategy)


@pytest.fixture
def watched(own: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> cs.Variable:
    monkeypatch.setenv("CS_ADDRESS", own.address)
    with own.scope():
        return cs.Variable(np.zeros(50_000), name="watched", aggregation=cs.VariableAggregation.SUM)


def test_an_observer_in_another_process(own: cs.CentralStorageStrategy, watched: cs.Variable) -> None:
    watched.assign(np.full(50_000, 7.0))
    seen = json.loads(run("-c", LOOKS).ok().out)
    assert set(seen["value"]) == {7.0}
    assert len(seen["value"]) == 50_000
    assert seen["names"] == ["watched"]
    assert seen["commits"] == own.statistics().commits
    assert (seen["replicas"], seen["mapped"]) == (2, [])


def test_what_is_read_while_a_training_writes_is_of_one_commit(
    own: cs.CentralStorageStrategy, watched: cs.Variable
) -> None:
    @cs.function
    def step() -> None:
        watched.assign_add(np.ones(50_000))

    with start("-c", WATCHES) as child:
        child.wait_for("watching")
        for _ in range(300):
            own.run(step)
        assert child.wait_for(r"torn (\d+)").group(1) == "0"
        child.wait().ok()


def test_values_are_read_where_they_lie_whatever_the_server_does(
    own: cs.CentralStorageStrategy, watched: cs.Variable
) -> None:
    with own.scope():
        other = cs.Variable(np.arange(3), name="other")
        gone = cs.Variable(np.zeros(100_000), name="gone")
    with cs.connect() as observer:
        assert observer.get_all(["other", "gone"])[0].tolist() == [0, 1, 2]
        assert observer.transport.startswith("shared memory")
        watched.assign(np.full(50_000, 2.0))
        other.assign_add(np.ones(3, np.int64))
        assert observer.get("watched")[0] == 2
        server = observer.statistics().pid
        os.kill(server, signal.SIGSTOP)
        assert observer.get("other").tolist() == [1, 2, 3]
        os.kill(server, signal.SIGKILL)
        values = observer.get_all(["other", "watched"])
        assert (values[0].tolist(), values[1][-1]) == ([1, 2, 3], 2)
        del gone
        with own.scope():
            again = cs.Variable(np.ones(100_000), name="gone")
        assert observer.get("gone").min() == 1
        assert again.numpy().min() == 1


def test_several_variables_at_once(own: cs.CentralStorageStrategy, watched: cs.Variable) -> None:
    with own.scope():
        other = cs.Variable(np.arange(3), name="other")
    with cs.connect() as observer:
        first, second = observer.get_all(["other", "watched"])
        assert first.tolist() == other.numpy().tolist()
        assert second.tobytes() == watched.numpy().tobytes()
        for wrong in ([], "watched"):
            with pytest.raises(errors.InvalidArgumentError, match="in a list"):
                observer.get_all(wrong)
        with pytest.raises(errors.InvalidArgumentError, match="no_such_variable"):
            observer.get_all(["watched", "no_such_variable"])


def test_an_unknown_name(own: cs.CentralStorageStrategy, watched: cs.Variable) -> None:
    with cs.connect() as observer, pytest.raises(errors.InvalidArgumentError, match="no_such_variable"):
        observer.get("no_such_variable")
    watched.assign(np.ones(50_000))


@pytest.mark.slow
def test_no_service(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    with pytest.raises(errors.ConfigurationError, match="CS_ADDRESS"):
        cs.connect()
    with pytest.raises(errors.LaunchError, match="no service answers"):
        cs.connect(str(tmp_path))
