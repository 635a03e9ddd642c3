"""What ``cs.summary.TensorBoard`` writes, read by TensorBoard itself, and the recipe for MLflow of the guide."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.processes import ROOT, start
from tests.harness.timing import unit

import central_storage as cs
from central_storage import summary

# Imported by name: make test-interop installs it, and a test that is skipped would hide that it is missing.
reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

TRAINING = """
import sys
import central_storage as cs

directory, end = sys.argv[1:]
writer = cs.summary.TensorBoard(directory, service_every=None)  # nobody closes it
for step in range(1000):
    writer.scalar("loss", 1 / (step + 1), step)
print("written", flush=True)
if end == "exception":
    raise RuntimeError("the end")
while end == "Ctrl-C":
    pass
"""


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point, by the name of the curve."""
    events = reader.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def with_first_look(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when the numbers of the service have been read once."""
    numbers, looked = summary._Service.numbers, threading.Event()

    def looking(service: summary._Service, *, is_last: bool) -> list[summary._Item]:
        found = numbers(service, is_last=is_last)
        if service._before is not None:
            looked.set()
        return found

    monkeypatch.setattr(summary._Service, "numbers", looking)
    return looked


def test_tensorboard_reads_the_curves_of_a_training(
    strategy: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        w = cs.Variable(np.zeros(8, np.float32))
        optimizer = cs.optimizers.SGD(0.1)

    @cs.function
    def step(rows: np.ndarray) -> np.float32:
        optimizer.apply_gradients([(np.ones(8, np.float32), w)])
        return np.float32(rows.sum())

    data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(200).batch(2))
    looked = with_first_look(monkeypatch)
    with cs.summary.TensorBoard(tmp_path, strategy) as writer:
        strategy.run(step, args=(np.zeros(2),))
        looked.wait()
        for number, losses in enumerate(strategy.run_steps(step, data)):
            writer.scalar("loss/train", losses, number)
        runs = strategy.statistics().runs
    found = curves(tmp_path)
    assert found["loss/train"] == [(number, (4 * number + 1) / 2) for number in range(100)]
    assert found.keys() >= {f"service/{name}" for name in ("steps_per_second", "commits", "parameter_bytes")}
    assert found["service/private_bytes"][-1][1] > 1e6
    assert 0 <= found["service/captured_share"][-1][1] <= 1
    assert found["service/commits"][-1][0] == runs


def test_the_last_numbers_of_a_service_that_is_stopped_meanwhile_are_there(
    strategy: cs.CentralStorageStrategy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "_TIMEOUT", 0.1)
    server, looked, named = strategy.statistics().pid, with_first_look(monkeypatch), threading.Event()
    monkeypatch.setattr(summary._log, "warning", lambda *message: named.set())
    writer = cs.summary.TensorBoard(tmp_path, strategy)
    looked.wait()
    os.kill(server, signal.SIGSTOP)
    try:
        closing = threading.Thread(target=writer.close)
        closing.start()
        named.wait()
    finally:
        os.kill(server, signal.SIGCONT)
    closing.join()
    assert "service/commits" in curves(tmp_path)


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("exception", 1), ("Ctrl-C", -signal.SIGINT)])
def test_the_file_is_whole_however_the_script_ends(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    with start(script, tmp_path / "curves", end) as child:
        child.wait_for("written")
        if end == "Ctrl-C":
            child.press_ctrl_c()
        assert child.wait(unit(30)).code == code
    assert [step for step, _ in curves(tmp_path / "curves")["loss"]] == list(range(1000))


def test_the_recipe_for_mlflow(
    strategy: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that it imports
        mlflow = importlib.import_module("mlflow")
        page = (ROOT / "docs/guide/progress.md").read_text()
        [recipe] = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
        with strategy.scope():
            optimizer = cs.optimizers.SGD(0.5)
        batches = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(2))
        names = {"strategy": strategy, "optimizer": optimizer, "batches": batches, "step": lambda rows: rows.sum()}
        exec(recipe, names)
        [run] = mlflow.MlflowClient().search_runs(["0"])
        points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        files = mlflow.MlflowClient().list_artifacts(run.info.run_id)
    assert sorted((point.step, point.value) for point in points) == [(0, 1.0), (1, 5.0), (2, 9.0)]
    assert run.data.params == {"replicas": "2", "rate": "0.5"}
    assert [file.path for file in files] == ["strategy.safetensors"]
