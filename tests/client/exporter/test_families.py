"""The metrics of readings: names, labels, counters that never decrease; the board and the guide name what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.client.ctl.conftest import process, reading
from tests.harness.processes import ROOT

from central_storage.ctl.reading import Reading
from central_storage.exporter.families import Metrics

BOARD = json.loads((ROOT / "docs/grafana/central-storage.json").read_text())
GUIDE = (ROOT / "docs/guide/metrics.md").read_text()


class Service:
    """Gives readings to the metrics, one second after the other."""

    def __init__(self) -> None:
        self.time = 0.0
        self.reading = reading()
        self.memory: list[bool] = []
        self.metrics = Metrics(self._look, lambda: self.time)

    def _look(self, memory: bool) -> Reading:
        self.memory.append(memory)
        return self.reading

    def after(self, seconds: float = 1.0, **changes: object) -> dict[str, float]:
        """The samples after so many seconds, if the service has changed so."""
        self.time += seconds
        self.reading = reading(**changes)
        return self.samples()

    def samples(self) -> dict[str, float]:
        families = list(text_string_to_metric_families(self.metrics.text().decode()))
        for family in families:
            assert family.documentation
            assert family.type in ("counter", "gauge")
        return {
            sample.name + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_reading_becomes_samples(service: Service) -> None:
    found = service.samples()
    for name, value in {
        "central_storage_steps_total": 42,
        "central_storage_captured_steps_total": 40,
        "central_storage_uncaptured_steps_total,a failure or Ctrl-C": 2,
        "central_storage_state,running": 1,
        "central_storage_state,failed": 0,
        "central_storage_start_time_seconds": 1000,
        "central_storage_shared_memory_bytes,slots": 800,
        "central_storage_process_up,w1": 1,
        "central_storage_process_private_memory_bytes,server": 1_000_000,
        "central_storage_process_shared_memory_bytes,parameters,w0": 1,
        "central_storage_process_cpu_seconds_total,w1": 1,
        "central_storage_restarts_total,w0,worker": 0,
        "central_storage_max_restarts": 3,
        "central_storage_mailbox_messages_total": 7,
        "central_storage_not_finite_commits_total": 3,
        "central_storage_overflowed_commits_total": 1,
        "central_storage_waits,w1": 0,
    }.items():
        assert found[name] == value, name


HOSTILE = [
    'quo"te',
    "two\nlines",
    "back\\slash\\n",
    'end"} 1\ncentral_storage_steps_total 99\n#',
    "not UTF-8: \udcff",
    "\x1b[2J\x00\x85\u2028\u202e",
    "long " * 100_000,
    "",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_any_name_is_a_label_and_no_sample(service: Service, name: str) -> None:
    """The name of a service is that of a file, and may hold anything but a slash."""
    plain = service.samples()
    names = {"name": name, "transport": name, "parameter_device": name, "kind": name, "uncaptured": {name: 2, "b": 3}}
    hostile = service.after(waiting=(name, f"waits for {name}"), **names)
    assert len(hostile) == len(plain) + 2  # its two reasons
    assert hostile["central_storage_steps_total"] == plain["central_storage_steps_total"] == 42
    assert sorted(value for key, value in hostile.items() if key.startswith("central_storage_uncaptured")) == [2, 2, 3]
    assert len(service.metrics.text()) < 20_000


def test_many_variables_and_reasons_make_no_more_series(service: Service) -> None:
    service.after(uncaptured={})
    few = len(service.after(variables=1, uncaptured={"a": 1}))
    reasons = {f"reason {number}": 1 for number in range(10_000)}
    many = service.after(variables=10_000, uncaptured=reasons)
    assert many["central_storage_variables"] == 10_000
    assert many["central_storage_uncaptured_steps_total,other reasons"] == 10_000 - 50
    assert len(many) == few + 51
    more = service.after(uncaptured={**reasons, "reason 3": 5, "reason 9999": 4})
    assert more["central_storage_uncaptured_steps_total,reason 3"] == 5
    assert more["central_storage_uncaptured_steps_total,other reasons"] == 10_000 - 50 + 3


def test_counters_go_on_when_processes_are_replaced(service: Service) -> None:
    service.samples()
    dead = (process("server", state="ended", cpu_seconds=None), process("w0", pid=7, cpu_seconds=0.25, restarts=1))
    unknown = dict.fromkeys(("runs", "commits", "captured", "uncaptured", "mailbox_messages", "not_finite", "step"))
    found = service.after(processes=dead, **unknown)
    assert found["central_storage_steps_total"] == 42
    assert found["central_storage_uncaptured_steps_total,a failure or Ctrl-C"] == 2
    assert found["central_storage_process_cpu_seconds_total,w0"] == 1.25
    assert found["central_storage_process_cpu_seconds_total,server"] == 1
    assert found["central_storage_restarts_total,w0,worker"] == 1
    assert found["central_storage_process_up,server"] == 0
    assert "central_storage_step" not in found
    other = (process("server", pid=8, cpu_seconds=0.5), process("w0", pid=7, cpu_seconds=0.75, restarts=1))
    found = service.after(processes=other, runs=41, mailbox_messages=3)
    assert found["central_storage_steps_total"] == 42
    assert found["central_storage_mailbox_messages_total"] == 10
    assert found["central_storage_not_finite_commits_total"] == 6
    assert found["central_storage_process_cpu_seconds_total,server"] == 1.5
    assert found["central_storage_process_cpu_seconds_total,w0"] == 1.75


def test_waits_count_for_the_awaited(service: Service) -> None:
    waiting = (
        "replica 0 (pid 5), last seen 3 s ago and replica 1 (pid 6); replica 1 waits at apply 1",
        "w1 (pid 6), which is stopped",
        "a script",
        "the merge function of apply 1",
        "replica 7 (pid 9)",
    )
    found = service.after(state="waiting", waiting=waiting)
    waits = {name.rpartition(",")[2]: value for name, value in found.items() if name.startswith("central_storage_wai")}
    assert waits == {"supervisor": 0, "script": 1, "server": 0, "w0": 1, "w1": 2, "other": 2}


def test_a_service_that_does_not_answer_has_what_is_known(service: Service) -> None:
    nothing = dict.fromkeys(("since", "kind", "transport", "replicas", "runs", "shared_nbytes", "max_restarts"))
    found = service.after(state="over", processes=(), **nothing)
    assert found["central_storage_state,over"] == 1
    assert "central_storage_replicas" not in found
    assert not any(name.startswith("central_storage_process_up") for name in found)


def test_one_look_serves_who_asks_soon_after(service: Service) -> None:
    service.samples()
    service.after(0.1)
    service.after(0.1)
    service.after(14.6)
    service.after(0.4)
    assert service.memory == [True, False, False, True]


def _expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            yield target["expr"]
    for variable in BOARD["templating"]["list"][1:]:
        yield variable["query"]


def test_the_board_names_metrics_and_labels_that_exist(service: Service) -> None:
    text = service.metrics.text().decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    named = set()
    for expression in _expressions():
        found = re.findall(r"\b(?:central_storage|process)_[a-z_]+", expression)
        assert found, expression
        named.update(found)
    assert named <= labels.keys()
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            name = re.findall(r"\b(?:central_storage|process)_[a-z_]+", target["expr"])[0]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[name]


def test_the_guide_lists_every_metric_with_its_type(service: Service) -> None:
    families = text_string_to_metric_families(service.metrics.text().decode())
    types = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in families
        if family.name.startswith("central_storage_")
    }
    listed = dict(re.findall(r"^\| `(central_storage_\w+)` \| (\w+) \|", GUIDE, re.MULTILINE))
    assert listed == types
