"""A timeline is a Chrome trace: fields, order, nesting and flows are as the format says."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.timeline.test_rings import TRAINING
from tests.harness.chrome_traces import checked

from central_storage.timeline.chrome_trace import chrome_trace
from central_storage.timeline.rings import Moment


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_a_training_is_a_chrome_trace() -> None:
    pids = {"controller": 4710, "server": 4711, "w0": 4712, "w1": 4713}
    trace = checked(chrome_trace(TRAINING, pids, 1_700_000_000 * 10**9, {"w0": 3}))
    assert [(event["args"]["name"], event["pid"]) for event in named(trace, "process_name")] == [
        ("script", 4710),
        ("server", 4711),
        ("worker 0", 4712),
        ("worker 1", 4713),
    ]
    [slow] = [event for event in named(trace, "function") if event["pid"] == 4713 and event["args"]["run"] == 2]
    assert (slow["ts"], slow["dur"], slow["args"]) == (0.1, 0.048, {"run": 2, "moment": "returned"})
    assert trace["otherData"]["began"] == "2023-11-14T22:13:20Z"
    assert trace["otherData"]["missing moments"] == {"w0": 3}


@pytest.mark.parametrize("pids", [{"server": 7}, {"controller": 7, "server": 8, "w0": 7, "w1": 9}])
def test_processes_are_counted_where_pids_are_not_known_or_not_distinct(pids: dict[str, int]) -> None:
    trace = checked(chrome_trace(TRAINING, pids))
    assert [event["pid"] for event in named(trace, "process_name")] == [1, 2, 3, 4]
    assert named(trace, "process_name")[1]["args"]["name"] == f"server (pid {pids['server']})"


def test_a_flow_leads_from_each_return_to_its_commit() -> None:
    trace = checked(chrome_trace(TRAINING))
    flows = named(trace, "gradient")
    starts = {event["id"]: event for event in flows if event["ph"] == "s"}
    ends = {event["id"]: event for event in flows if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert sorted(event["pid"] for event in starts.values()) == [3, 3, 4, 4]
    commits = [event for event in named(trace, "commit") if event["ph"] == "X"]
    assert len(commits) == 2
    for number, end in ends.items():
        [commit] = [each for each in commits if each["ts"] <= end["ts"] < each["ts"] + each["dur"]]
        sent = next(
            each
            for each in named(trace, "result, encode, send (worker)")
            if (each["pid"], each["ts"]) == (starts[number]["pid"], starts[number]["ts"])
        )
        assert sent["args"]["run"] == commit["args"]["run"]


def test_spans_have_rows_of_their_own_for_each_thread() -> None:
    spans = [Moment(91, "a", 7, 1), Moment(92, "b", 7, 1), Moment(93, "c", 8, 1)]
    spans += [Moment(95, "b", 7, -1), Moment(96, "a", 7, -1), Moment(97, "c", 8, -1)]
    trace = checked(chrome_trace({**TRAINING, "w0": [*TRAINING["w0"], *spans]}))
    rows = {event["name"]: event["tid"] for event in trace["traceEvents"] if event.get("cat") == "span"}
    assert rows == {"a": 5, "b": 5, "c": 6}  # the processes are 1 to 4
    names = {event["tid"]: event["args"]["name"] for event in named(trace, "thread_name") if event["pid"] == 3}
    assert names == {3: "steps", 5: "spans", 6: "spans of thread 2"}


def test_nothing_is_a_trace_too() -> None:
    assert [event["ph"] for event in checked(chrome_trace({"server": []}))["traceEvents"]] == ["M"] * 3
