"""A timeline is a Chrome trace: fields, order, nesting and flows are as the format says."""

from __future__ import annotations

from typing import Any

from tests.client.timeline.test_rings import TRAINING
from tests.harness.chrome_traces import checked

from central_storage.timeline.chrome_trace import chrome_trace
from central_storage.timeline.rings import Moment


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_a_training_is_a_chrome_trace() -> None:
    trace = checked(chrome_trace(TRAINING, {"server": 4711}, 1_700_000_000 * 10**9, {"w0": 3}))
    assert [event["args"]["name"] for event in named(trace, "process_name")] == [
        "script",
        "server (pid 4711)",
        "worker 0",
        "worker 1",
    ]
    [slow] = [event for event in named(trace, "function") if event["pid"] == 4 and event["args"]["run"] == 2]
    assert (slow["ts"], slow["dur"], slow["args"]) == (0.1, 0.048, {"run": 2, "moment": "returned"})
    assert trace["otherData"]["began"] == "2023-11-14T22:13:20Z"
    assert trace["otherData"]["missing moments"] == {"w0": 3}


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
    assert rows == {"a": 1, "b": 1, "c": 2}
    names = {event["tid"]: event["args"]["name"] for event in named(trace, "thread_name") if event["pid"] == 3}
    assert names == {0: "steps", 1: "spans", 2: "spans of thread 2"}


def test_nothing_is_a_trace_too() -> None:
    assert [event["ph"] for event in checked(chrome_trace({"server": []}))["traceEvents"]] == ["M"] * 3
