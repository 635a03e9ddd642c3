"""``CentralStorageTrainer``: Ray Train and Ray Data train to the bits of one machine, also if workers and ranks die."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import psutil
import pytest
import ray.train
from tests.harness.processes import living_after, run
from tests.harness.timing import unit
from tests.ray.conftest import QUICK, Running
from tests.ray.leavings import run_directories

import central_storage as cs
from central_storage.ray import CentralStorageTrainer, dataset, dataset_shard, report, restore, row_numbers

HERE = Path(__file__).parent
#: Without the process that each start has for news of machines that a cloud takes back.
WITHOUT_WATCHER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}

pytestmark = pytest.mark.timeout(unit(400))


@pytest.fixture(scope="module")
def bits() -> str:
    """The digest of the training on one machine."""
    return run(HERE / "training.py", "0.1", timeout=unit(60)).ok().lines[-1]


def fit(cluster: Running, storage: Path, what: str) -> list[str]:
    """The output of a training, after which nothing is left."""
    environment = {**cluster.environment, **QUICK, **WITHOUT_WATCHER}
    ended = run(HERE / "trained.py", storage, what, environment=environment, timeout=unit(380)).ok()
    assert living_after(unit(20), of_trainings(cluster)) == []
    assert run_directories() == []
    assert drafts() == []
    # Ray prints into the output of any program that an actor was killed.
    return [line for line in ended.lines if "(raylet)" not in line]


def drafts() -> list[Path]:
    """The directories of this test session for checkpoints that Ray does not have yet."""
    return list(Path(tempfile.gettempdir()).glob("cs-checkpoints-*"))


def of_trainings(cluster: Running) -> list[psutil.Process]:
    """The processes on the nodes that are ours."""
    return [each for each in cluster.child.processes() if re.search(" -m (central_storage|cs_)", command(each))]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def test_what_is_killed_is_replaced_and_ranks_are_started_again_from_a_checkpoint(
    cluster: Running, tmp_path: Path, bits: str
) -> None:
    """A killed launcher, row servers and a worker are replaced within the first start. The second start ends with the
    last failure that is allowed, and another training of the same name continues."""
    failed, starts, reported, *others = fit(cluster, tmp_path, "killed")[-6:]
    assert failed == "failed"
    assert re.fullmatch("starts 0 [369] [369]", starts)  # Ray may not have registered the last report
    assert re.fullmatch("reported( [369])+ 12", reported)
    assert others == [
        "fetched 0 True",  # no block by the script but those for which it has asked afterwards
        "checkpoint central_storage.safetensors",
        f"digest 2 {bits}",
    ]
    assert len(list(tmp_path.glob("events/events.out.tfevents.*"))) == 3  # of each start


def test_errors_of_the_function(cluster: Running, tmp_path: Path) -> None:
    said = fit(cluster, tmp_path, "refused")[-11:]
    late = r"NoAnswerError: Ray has not brought block 0 of the data set 'late' \(rows 0 to 1\) to the node [0-9a-f]{56}"
    assert re.match(late + " within 0.5 s; .* pass a larger block_timeout", said.pop(7))
    assert said == [
        "KeyError",
        "InvalidArgumentError: the trainer has no data set 'other'; its datasets: empty, train",
        "InvalidArgumentError: the trainer has no data set 'other'; its datasets: empty, train",
        "InvalidArgumentError: the data set 'empty' has no rows",
        "InvalidArgumentError: batch_size is the size of the global batch and must be at least 1, not 0",
        "TypeError: batch_size must be an int, not '1'",
        "InvalidArgumentError: block_timeout must be more than 0 and less than 1e+09 seconds, not 0",
        "TypeError: metrics must be a dict, not 5",
        "TypeError: checkpoint must be a central_storage.train.Checkpoint or a ray.train.Checkpoint, not 'directory'",
        "TypeError: restore takes a central_storage.train.Checkpoint, not 'directory'",
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: report({}),
        lambda: restore(cs.train.Checkpoint()),
        lambda: dataset_shard(batch_size=2),
        lambda: row_numbers(),
    ],
)
def test_what_works_only_in_a_trainer(call: object) -> None:
    assert callable(call)
    with pytest.raises(cs.errors.ContextError, match="works only in the function of a CentralStorageTrainer"):
        call()


@pytest.mark.parametrize("ranks", [0, (1, 2), True])
def test_numbers_of_ranks_that_no_strategy_has(ranks: object) -> None:
    with pytest.raises(cs.errors.ConfigurationError, match="must be one number from 1"):
        CentralStorageTrainer(print, scaling_config=ray.train.ScalingConfig(num_workers=ranks))


def test_arguments_of_another_type() -> None:
    with pytest.raises(TypeError, match="train_loop must be a function, not 5"):
        CentralStorageTrainer(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dataset takes a ray.data.Dataset, not \[\]"):
        dataset([], 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_the_environment_of_the_user_is_kept() -> None:
    config = ray.train.RunConfig(worker_runtime_env={"env_vars": {"RATE": "1"}})
    CentralStorageTrainer(print, run_config=config)
    assert config.worker_runtime_env == {"env_vars": {"RATE": "1"}}
    assert "RAY_ADDRESS" not in os.environ  # nothing has connected
