from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from central_storage.core import context
from central_storage.strategy.cluster_resolver import ClusterResolver, ClusterSpec, resolver_of
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Worker

CPU, GPU = Worker(0, 1, 12, "CPU:0"), Worker(1, 1, 91, "GPU:0", "10.0.0.7")
BOTH = {"chief": ["10.0.0.4"], "worker": ["10.0.0.4", "10.0.0.7"], "ps": ["10.0.0.4:5600"]}


def of(workers: Sequence[Worker], endpoint: str = "tcp://10.0.0.4:5600") -> ClusterResolver | None:
    return resolver_of(SimpleNamespace(workers=workers, listens_at=lambda: endpoint))  # type: ignore[arg-type]


def resolver(workers: Sequence[Worker], endpoint: str = "tcp://10.0.0.4:5600") -> ClusterResolver:
    found = of(workers, endpoint)
    assert found is not None
    return found


def test_a_worker_without_a_node_is_where_the_script_is() -> None:
    assert resolver([CPU, GPU]).cluster_spec().as_dict() == BOTH


def test_it_answers_for_the_present_moment() -> None:
    workers = [CPU, GPU]
    found = resolver(workers)
    before = found.cluster_spec()
    workers[1] = Worker(1, 2, 92, "GPU:0", "10.0.0.9")
    assert found.cluster_spec().job_tasks("worker") == ["10.0.0.4", "10.0.0.9"]
    assert before.job_tasks("worker") == ["10.0.0.4", "10.0.0.7"]


def test_addresses_of_version_6() -> None:
    worker = Worker(0, 1, 12, "CPU:0", "fd00::7")
    found = resolver([worker], "tcp://[fd00::4]:5600").cluster_spec().as_dict()
    assert found == {"chief": ["fd00::4"], "ps": ["[fd00::4]:5600"], "worker": ["fd00::7"]}


def test_there_is_none_if_all_are_on_one_machine() -> None:
    assert of([CPU]) is None
    assert of([]) is None


def test_a_worker_does_not_know_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "is_worker", lambda: True)
    assert of([CPU]) is None
    with pytest.raises(ContextError, match="answers in the script"):
        of([CPU, GPU])


def test_the_script_is_the_chief() -> None:
    found = resolver([CPU, GPU])
    assert (found.task_type, found.task_id, found.environment, found.rpc_layer) == ("chief", 0, "", "tcp")
    assert repr(found).startswith("<ClusterResolver: ClusterSpec({'chief': ['10.0.0.4'], 'ps': ")


def test_the_master() -> None:
    found = resolver([CPU, GPU])
    assert found.master() == found.master("worker") == "tcp://10.0.0.4:5600"
    assert found.master("worker", 1) == "tcp://10.0.0.7"
    assert found.master("chief", 0, "grpc") == "grpc://10.0.0.4"


def test_accelerators_are_gpus() -> None:
    found = resolver([CPU, GPU])
    assert found.num_accelerators() == found.num_accelerators("worker", 1) == {"GPU": 1}
    assert found.num_accelerators("worker", 0) == found.num_accelerators("chief", 0) == {}
    with pytest.raises(InvalidArgumentError, match="has no task 2; it has 2"):
        found.num_accelerators("worker", 2)


def test_a_spec_has_the_names_of_tensorflows() -> None:
    spec = ClusterSpec(BOTH)
    assert spec.jobs == list(spec) == ["chief", "ps", "worker"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
    assert spec == ClusterSpec(spec.as_dict())
    assert spec != ClusterSpec({"worker": []})
    assert not ClusterSpec({})
    for job, task, said in (
        ("master", 0, "there is no job 'master'"),
        ("ps", 1, "'ps' has no task 1"),
        ("ps", -1, "has no task -1"),
    ):
        with pytest.raises(ValueError, match=said):
            spec.task_address(job, task)


def test_nobody_changes_a_spec_from_outside() -> None:
    given = {"worker": ["a"]}
    spec = ClusterSpec(given)
    given["worker"].append("b")
    spec.as_dict()["worker"].append("c")
    spec.job_tasks("worker").append("d")
    assert spec.as_dict() == {"worker": ["a"]}
