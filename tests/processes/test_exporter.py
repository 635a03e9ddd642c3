"""Metrics of real services: scraped while processes die, by cs-launch with a script and without, and not unless asked
for."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.harness.processes import Child, living_after, start
from tests.harness.timing import unit
from tests.processes.test_ctl import TRAIN, Training, ctl

from central_storage.ctl import services


class Scraper:
    """Scrapes what a ``cs-launch`` has announced."""

    def __init__(self, child: Child) -> None:
        found = child.wait_for(r"^(?:\[\S+\] )?metrics on (http://\S+), token in (.*)$", stream="err")
        self.url, self.token_file = found[1], Path(found[2])
        self._parts = urlsplit(self.url)
        self._token = self.token_file.read_text().strip()

    def get(self, *, token: str | None = None, method: str = "GET") -> tuple[int, str]:
        """The status and the body of an answer."""
        assert self._parts.hostname is not None
        link = http.client.HTTPConnection(self._parts.hostname, self._parts.port, timeout=unit(30))
        try:
            link.request(method, "/metrics", headers={"Authorization": f"Bearer {token or self._token}"})
            answer = link.getresponse()
            return answer.status, answer.read().decode()
        finally:
            link.close()

    def samples(self) -> dict[str, float]:
        status, text = self.get()
        assert status == 200
        return {
            sample.name + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The first samples of which that holds; the time of the test limits the wait."""
        while not holds(samples := self.samples()):
            pass
        return samples


def exporters(child: Child) -> list[psutil.Process]:
    return [each for each in child.processes() if "central_storage.exporter" in each.cmdline()]


def listening(child: Child) -> set[tuple[str, int]]:
    """The TCP addresses on which the processes of a child listen."""
    return {
        (each.laddr.ip, each.laddr.port)
        for process in child.processes()
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metrics") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def training(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Scraper]]:
    """A training with metrics, whose workers may die as often as the tests like."""
    flag = tmp_path_factory.mktemp("flag") / "wait"
    options = ("--metrics-port", "0", "--devices", "cpu:0,cpu:1", "--max-restarts", "1000")
    with start("cs-launch", *options, script, flag) as child:
        scraper = Scraper(child)
        yield Training(child, flag), scraper
    services.clean()  # it is killed at the end


def test_the_numbers_are_those_of_cs_ctl(training: tuple[Training, Scraper]) -> None:
    launched, scraper = training
    before = scraper.until(lambda samples: samples["central_storage_state,running"] == 1)
    status = launched.status()
    after = scraper.until(lambda samples: samples["central_storage_steps_total"] > status["runs"])
    for name, field in (("steps_total", "runs"), ("commits_total", "commits"), ("captured_steps_total", "captured")):
        assert before[f"central_storage_{name}"] <= status[field] <= after[f"central_storage_{name}"]
    for name in ("replicas", "variables", "max_restarts"):
        value = len(status["devices"]) if name == "replicas" else status[name]
        assert after[f"central_storage_{name}"] == value
    assert after["central_storage_parameter_bytes"] == status["parameter_nbytes"] == 1_000_000
    assert after["central_storage_start_time_seconds"] == pytest.approx(status["since"])
    for each in status["processes"]:
        label = each["label"]
        assert after[f"central_storage_process_up,{label}"] == 1
        assert before[f"central_storage_process_cpu_seconds_total,{label}"] <= each["cpu_seconds"]
        assert after[f"central_storage_process_private_memory_bytes,{label}"] > 1_000_000
    assert (status["metrics"], status["metrics_token_file"]) == (scraper.url, str(scraper.token_file))
    assert scraper.token_file.parent == Path(launched.address)
    assert f"metrics:   {scraper.url}, token in {scraper.token_file}" in ctl("status", launched.address).ok().out


def test_nobody_gets_in_without_the_token_and_nothing_is_printed(training: tuple[Training, Scraper]) -> None:
    launched, scraper = training
    printed = launched.child.err
    assert scraper.get(token="0" * 64) == (401, "")
    assert scraper.get(method="PUT") == (405, "")
    assert listening(launched.child) == {("127.0.0.1", urlsplit(scraper.url).port)}
    launched.status()
    assert launched.child.err == printed


def test_the_exporter_has_a_lower_priority_than_the_training(training: tuple[Training, Scraper]) -> None:
    launched, scraper = training
    scraper.samples()  # it works, so it has set its priority
    (exporter,) = exporters(launched.child)
    assert exporter.nice() == min(19, psutil.Process(launched.child.pid).nice() + 10)


def test_counters_go_on_while_processes_die_and_others_scrape(training: tuple[Training, Scraper]) -> None:
    launched, scraper = training
    is_over = threading.Event()
    falls: list[str] = []
    failures: list[BaseException] = []

    def scrape() -> None:
        last: dict[str, float] = {}
        try:
            while not is_over.is_set():
                samples = scraper.samples()
                counters = {name for name in samples if name.partition(",")[0].endswith("_total")}
                fallen = [name for name in last if name not in counters or samples[name] < last[name]]
                falls.extend(f"{name}: from {last[name]} to {samples.get(name)}" for name in fallen)
                last = {name: samples[name] for name in counters}
        except BaseException as error:  # noqa: BLE001 - the test shows it
            failures.append(error)

    others = [threading.Thread(target=scrape) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for label, role in (("w1", "worker"), ("server", "server"), ("w0", "worker")):
            before = scraper.samples()
            os.kill(launched.pid(label), signal.SIGKILL)
            name = f"central_storage_restarts_total,{label},{role}"
            after = scraper.until(
                lambda samples, name=name, before=before: (
                    samples[name] == before[name] + 1
                    and samples["central_storage_state,running"] == 1
                    and samples["central_storage_steps_total"] > before["central_storage_steps_total"]
                )
            )
            assert after[f"central_storage_process_incarnation,{label}"] == before[name] + 2
    finally:
        is_over.set()
        for other in others:
            other.join()
    assert (falls, failures) == ([], [])


def test_a_wait_is_named(training: tuple[Training, Scraper]) -> None:
    launched, scraper = training
    launched.flag.touch()
    samples = scraper.until(lambda samples: samples["central_storage_state,waiting"] == 1)
    launched.flag.unlink()
    assert samples["central_storage_waits,w1"] == 1
    assert samples["central_storage_waits,w0"] == 0


def test_another_exporter_takes_the_place_of_a_dead_one(script: Path, tmp_path: Path) -> None:
    with start("cs-launch", "--metrics-port", "0", "--devices", "cpu:0,cpu:1", script, tmp_path / "wait") as child:
        _kill_exporter(Training(child, tmp_path / "wait"), Scraper(child))
    services.clean()


def _kill_exporter(launched: Training, scraper: Scraper) -> None:
    steps = scraper.samples()["central_storage_steps_total"]
    (exporter,) = exporters(launched.child)
    exporter.kill()
    said = rf"the exporter \(pid {exporter.pid}\) ended by SIGKILL; there are no metrics until another one works"
    launched.child.wait_for(said, stream="err")
    assert scraper.samples()["central_storage_steps_total"] >= steps  # it waits in the queue of the socket
    (other,) = exporters(launched.child)
    assert other.pid != exporter.pid
    assert launched.status()["state"] == "running"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_the_exporter(script: Path, tmp_path: Path, number: signal.Signals) -> None:
    with start("cs-launch", "--metrics-port", "0", "--devices", "cpu:0,cpu:1", script, tmp_path / "wait") as child:
        scraper = Scraper(child)
        Training(child, tmp_path / "wait")
        assert scraper.samples()["central_storage_replicas"] == 2
        found = exporters(child)
        if number == signal.SIGINT:
            child.press_ctrl_c()
        else:
            child.signal(number)
        child.wait()
        assert living_after(unit(20), found) == []
        assert child.left() == []
        address = (urlsplit(scraper.url).hostname, urlsplit(scraper.url).port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert scraper.token_file.exists() == (number == signal.SIGKILL)
    services.clean()
    assert not scraper.token_file.exists()


def test_nothing_listens_unless_it_is_asked_for(script: Path, tmp_path: Path) -> None:
    with start("cs-launch", "--devices", "cpu:0,cpu:1", script, tmp_path / "wait") as child:
        launched = Training(child, tmp_path / "wait")
        assert listening(child) == set()
        assert exporters(child) == []
        assert not os.path.exists(os.path.join(launched.address, "metrics-token"))
        assert launched.status()["metrics"] is None
    services.clean()


def test_a_script_may_be_called_anything(tmp_path: Path) -> None:
    """A name that is not UTF-8, with quotes, line feeds and what begins a sample. Variables make no series."""
    script = Path(os.fsdecode(os.fsencode(tmp_path) + b'/a"\xff\\n\n\x1b[2Jcentral_storage_steps_total 99"}.py'))
    script.write_text(
        "import central_storage as cs\n"
        "strategy = cs.CentralStorageStrategy(['cpu:0'])\n"
        "with strategy.scope():\n"
        "    made = [cs.Variable(0.0, name=f'w\"}} {number}') for number in range(200)]\n"
        "while True:\n"
        "    strategy.run(lambda: 1.0)\n"
    )
    with start("cs-launch", "--metrics-port", "0", "--devices", "cpu:0", script) as child:
        scraper = Scraper(child)
        samples = scraper.until(lambda samples: samples.get("central_storage_variables") == 200)
        assert samples["central_storage_state,running"] + samples["central_storage_state,starting"] == 1
        assert len(samples) < 150
        [info] = [key for key in samples if key.startswith("central_storage_service_info")]
        assert info.isascii()
        assert info.isprintable()
    services.clean()


def test_a_service_without_a_script_has_metrics_and_a_token_of_the_user(tmp_path: Path) -> None:
    directory = Path(os.environ["TMPDIR"]) / "served"  # short enough for sockets
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    options = ("--metrics-port", "0", "--metrics-address", "::1", "--metrics-token-file", token)
    with start("cs-launch", "--serve", "1", "--run-dir", directory, *options) as child:
        scraper = Scraper(child)
        assert scraper.url.startswith("http://[::1]:")
        assert scraper.token_file == token
        waits = scraper.until(lambda samples: samples["central_storage_state,starting"] == 1)
        assert waits["central_storage_process_up,w0"] == 0
        assert waits["central_storage_waits,w0"] == 1
        with start("cs-launch", "--join", "--run-dir", directory):
            samples = scraper.until(lambda samples: samples.get("central_storage_process_up,w0") == 1)
            assert samples["central_storage_waits,script"] in (0, 1)
            scraper.until(lambda samples: samples["central_storage_waits,script"] == 1)
            ctl("stop", "served").ok()
            assert child.wait().code == 0
            assert child.left() == []
