from __future__ import annotations

import pytest

from central_storage.cluster import cost
from central_storage.planning.estimate import Estimate
from central_storage.planning.network import Request, _missing, lines
from central_storage.planning.plan import Optimizer, planned
from cs_proto.frozen import with_changes
from cs_proto.messages import VariableSpec

MB = 1_000_000
DENSE = {1: VariableSpec("w", "float32", (25_000_000,), True, 0, 0)}
TABLE = {2: VariableSpec("table", "float32", (1_000_000, 64), True, 0, 0, sparse=True)}
NODES = ("a", "a", "b", "b", "c", "c", "d", "d")
ADDRESSES = tuple(f"10.0.0.{4 + ord(node) - ord('a')}" for node in NODES)
REQUEST = Request(("train.py",), None, None, 10e9, True, NODES, ADDRESSES, "10.0.0.4", "Ray 2.60.0 with 5 nodes")


def estimate(
    specs: dict[int, VariableSpec] | None = None,
    available: int = 23_000 * MB,
    arguments: int = 8 * MB,
    workers: int = 8,
) -> Estimate:
    devices = [f"cpu:{rank}" for rank in range(workers)]
    plan = planned(DENSE if specs is None else specs, [Optimizer("adam")], devices, "cpu:0")
    return Estimate(plan, plan.parameters, available, 1, arguments)


def test_it_says_what_lies_where() -> None:
    text = "\n".join(lines(REQUEST, estimate()))
    assert text.startswith("plan: 8 workers on 4 nodes, variables on cpu:0 of 10.0.0.4\nRay 2.60.0 with 5 nodes\n")
    for line in (
        "10.0.0.4 (head)  script, server, gateway         1.2 GB",
        "10.0.0.5         2 workers                       402 MB",
        "at the head: parameters 100 MB, slots 200 MB, gradients 8 x 100 MB, arenas and other",
        "and up to 134 MB of copies that wait to be sent",
        "fits at the head: 23 GB available",
        "each worker: a copy of the variables (100 MB), its gradients (100 MB) and its arguments",
        "a step sends each worker 100 MB of variables and 1.0 MB of arguments, and takes 100 MB of gradients from it",
        "through the network card of the head: 808 MB out, 800 MB in; each worker has a copy of its own",
        "2 of the workers are at the head itself, so less than that passes its card",
    ):
        assert line in text


def test_workers_of_a_node_may_share_a_copy() -> None:
    asked = with_changes(REQUEST, is_shared=True)
    text = "\n".join(lines(asked, estimate()))
    for line in (
        "10.0.0.4 (head)  script, server, gateway         1.2 GB",
        "10.0.0.5         2 workers                       302 MB",
        "each node: a copy of the variables (100 MB), and of each worker its gradients (100 MB) and its arguments",
        "a step sends each node 100 MB of variables, each worker 1.0 MB of arguments, and takes 100 MB of gradients "
        "from each worker",
        "through the network card of the head: 408 MB out, 800 MB in; the workers of a node share its copy",
    ):
        assert line in text
    step = cost.dense(8, estimate().plan.gradients, cost.sealed_rate(10e9), 4)
    assert f"{step.network + 8 * MB / cost.CURVE:.1f} s" in text
    assert step.network < 0.76 * cost.dense(8, estimate().plan.gradients, cost.sealed_rate(10e9)).network


def test_the_times_are_those_of_the_formulas() -> None:
    found = estimate()
    text = lines(REQUEST, found)
    (marked,) = (line for line in text if "Gbit/s *" in line)
    step = cost.dense(8, found.plan.gradients, cost.sealed_rate(10e9))
    ring = cost.ring(4, 2, found.plan.gradients, cost.plain_rate(10e9))
    network = step.network + 8 * MB / cost.CURVE
    total = network + step.update + step.control
    for seconds in (network, total):
        assert f"{seconds:.1f} s" in marked
    for seconds in (step.update, ring.total):
        assert f"{1000 * seconds:.0f} ms" in marked
    (said,) = (line for line in text if line.startswith("a ring all-reduce"))
    assert (
        f"{1000 * ring.total:.0f} ms instead of {total:.1f} s: it is faster here, and so it is from 2 nodes on" in said
    )
    assert "(* assumed: --bandwidth names another)" in "\n".join(text)


def test_a_ring_is_not_always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many nodes, a tiny model is quicker without the hops of a ring where messages take less time than those."""
    monkeypatch.setattr(cost, "CONTROL_LINK", 0.0)
    monkeypatch.setattr(cost, "CONTROL_REPLICA", 0.1e-3)
    asked = with_changes(REQUEST, nodes=tuple(map(str, range(256))), addresses=("elsewhere",) * 256)
    tiny = {1: VariableSpec("w", "float32", (250,), True, 0, 0)}
    text = lines(asked, estimate(tiny, arguments=0, workers=256))
    assert "a ring all-reduce would take 51 ms, and is not faster" in text


def test_a_rate_that_is_asked_for_has_a_line_of_its_own() -> None:
    asked = with_changes(REQUEST, bits=2.5e9, is_assumed=False)
    text = lines(asked, estimate())
    assert [line.split()[0] for line in text if "Gbit/s" in line] == ["1", "2.5", "10", "25", "100"]
    assert sum(" * " in line for line in text) == 1
    assert "(* --bandwidth)" in "\n".join(text)


def test_tables_stay_at_the_head() -> None:
    text = "\n".join(lines(REQUEST, estimate(TABLE)))
    assert "no dense variable has gradients, so a ring would have nothing to do" in text
    assert "tables with sparse=True and their slots, up to 768 MB, stay at the head, and only rows travel" in text
    added = cost.rows(8, MB, cost.CURVE)
    assert f"each MB of rows of every worker adds {1000 * (added.network + added.update):.0f} ms to a step" in text
    assert "while replicas compute for 50 ms, this head feeds 22 replicas with 1 MB of rows each" in text
    assert "tables" not in "\n".join(lines(REQUEST, estimate())).partition("not counted")[0]


def test_what_does_not_fit_is_said() -> None:
    small = estimate(available=1000 * MB)
    missing = _missing(REQUEST, small)
    assert 225 * MB < missing < 245 * MB
    assert "does not fit at the head: 23" in "\n".join(lines(REQUEST, small))
    assert _missing(REQUEST, estimate()) == 0
    here = Request(("train.py",), None, None, 10e9, True)
    assert "does not fit: 1" in "\n".join(lines(here, small))


def test_one_machine_needs_no_network() -> None:
    text = "\n".join(lines(Request(("train.py",), None, None, 10e9, True), estimate(workers=2)))
    assert "2 workers on this machine (cpu:0, cpu:1), variables on cpu:0; nothing travels over a network" in text
    assert "ring" not in text
    update, control = (cost.UPDATE + 2 * cost.UPDATE_REPLICA) * 100e6, cost.control_here(2)
    assert f"computation in the replicas: {1000 * (update + control):.0f} ms" in text


def test_many_nodes_are_counted() -> None:
    nodes = tuple(f"machine {number}" for number in range(1, 41))
    asked = with_changes(REQUEST, nodes=nodes, addresses=("elsewhere",) * 40, head="", cluster="")
    text = lines(asked, estimate(workers=40))
    assert text[0] == "plan: 40 workers on 40 nodes, variables on cpu:0 of this machine"
    assert [line.split("  ")[0] for line in text if line.startswith(("machine", "28 more"))] == [
        *(f"machine {number}" for number in range(1, 13)),
        "28 more",
    ]


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_request_travels_as_json(text: str) -> None:
    said = '{"script": ["a.py"], "devices": null, "parameter_device": null, "bits": 1e9, "is_assumed": false'
    found = Request.of_json(
        said + (', "nodes": ["a"], "addresses": ["10.0.0.4"]}' if text else ', "nodes": [], "addresses": []}')
    )
    assert (found.script, found.machines, found.most_on_a_node) == (("a.py",), int(bool(text)), int(bool(text)))
