"""A real Prometheus scrapes a training: its values are those of ``cs-ctl``, and without the token it gets nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import ROOT, Child, start
from tests.processes.test_ctl import TRAIN, Training
from tests.processes.test_exporter import Scraper

from central_storage.ctl import services

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.long,
]

CONFIG = """
global:
  scrape_interval: 200ms
  scrape_timeout: 200ms
scrape_configs:
  - job_name: central-storage
    {authorization}
    static_configs:
      - targets: ["{target}"]
"""


class Prometheus:
    """A Prometheus that has started, as its HTTP API shows it."""

    def __init__(self, child: Child) -> None:
        found = child.wait_for(r"Listening on.* address=(127\.0\.0\.1:\d+)", stream="err")
        child.wait_for("Server is ready to receive web requests", stream="err")
        self._address = f"http://{found[1]}"

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}") as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expression)["result"])

    def until(self, expression: str, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The first result of which that holds; the time of the test limits the wait."""
        while not holds(result := self.query(expression)):
            pass
        return result

    def target(self) -> dict[str, Any]:
        """The target, once it was scraped."""
        while True:
            for target in self.ask("targets")["activeTargets"]:
                if target["health"] != "unknown":
                    return dict(target)


@contextmanager
def prometheus(directory: Path, scraper: Scraper, authorization: str) -> Iterator[Prometheus]:
    directory.mkdir()
    config = directory / "prometheus.yml"
    config.write_text(CONFIG.format(authorization=authorization, target=urllib.parse.urlsplit(scraper.url).netloc))
    promtool = shutil.which("promtool")
    if promtool is not None:
        subprocess.run([promtool, "check", "config", config], check=True, capture_output=True)
    options = (f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}")
    with start("prometheus", *options, "--web.listen-address=127.0.0.1:0") as child:
        yield Prometheus(child)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Scraper]]:
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "train.py").write_text(TRAIN)
    options = ("--metrics-port", "0", "--devices", "cpu:0,cpu:1")
    with start("cs-launch", *options, directory / "train.py", directory / "wait") as child:
        scraper = Scraper(child)
        yield Training(child, directory / "wait"), scraper
    services.clean()


def test_it_gets_the_numbers_of_cs_ctl(training: tuple[Training, Scraper], tmp_path: Path) -> None:
    launched, scraper = training
    shown = f"authorization: {{credentials_file: {scraper.token_file}}}"
    with prometheus(tmp_path / "p", scraper, shown) as server:
        before = float(server.until("central_storage_steps_total", bool)[0]["value"][1])
        status = launched.status()
        assert before <= status["runs"]
        server.until("central_storage_steps_total", lambda found: float(found[0]["value"][1]) > status["runs"])
        assert server.target()["health"] == "up"
        for expression, value in {
            "central_storage_parameter_bytes": status["parameter_nbytes"],
            "central_storage_slot_bytes": status["slot_nbytes"],
            "central_storage_max_restarts": status["max_restarts"],
            'central_storage_state{state="running"}': 1,
            "sum(central_storage_process_up)": len(status["processes"]),
        }.items():
            (found,) = server.query(expression)
            assert float(found["value"][1]) == value, expression
        target = server.target()["labels"]
        board = json.loads((ROOT / "docs/grafana/central-storage.json").read_text())
        for panel in board["panels"]:
            for each in panel["targets"]:
                expression = each["expr"].replace("$__rate_interval", "1m")
                for name in ("job", "instance"):
                    expression = expression.replace(f"${name}", target[name])
                assert server.until(expression, bool), expression


def test_it_gets_nothing_without_the_token(training: tuple[Training, Scraper], tmp_path: Path) -> None:
    _, scraper = training
    with prometheus(tmp_path / "p", scraper, "") as server:
        target = server.target()
        assert target["health"] == "down"
        assert re.search(r"\b401\b", target["lastError"])
        assert server.query("central_storage_steps_total") == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_with_the_metrics(training: tuple[Training, Scraper]) -> None:
    _, scraper = training
    status, text = scraper.get()
    assert status == 200
    ended = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
