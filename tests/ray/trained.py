"""The training of ``training.py`` by Ray Train, with two ranks and its rows in Ray Data, as a test asks for.

    python tests/ray/trained.py STORAGE killed     # the launcher of the other rank's worker is killed, then the row
                                                   # servers, the worker and rank 0; after the second start, the other
                                                   # rank, which ends the training; another one continues it
    python tests/ray/trained.py STORAGE refused    # does not train: compares the batches of the script, and prints the
                                                   # errors of the function

The first prints at which step each start began, and what comes of it. STORAGE is the ``storage_path``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import ray
import ray.data
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from training import BATCH, STEPS, Training, batches

import central_storage as cs
from central_storage.ray import CentralStorageTrainer, dataset, dataset_shard, report, restore, row_numbers, rows
from central_storage.ray.row_client import VARIABLE, node_of
from central_storage.ray.row_server import RowServer

#: A checkpoint is reported after every so many steps. When a report returns, Ray may not know of its checkpoint yet,
#: but it knows of the one before.
EVERY = 3
#: For each start, what is killed after which step.
KILLS = [{4: "launcher", 7: "row servers", 9: "worker", 11: "rank 0"}, {11: "other rank"}]


def train(config: dict[str, Any]) -> str:
    """Train, and report a checkpoint after every few steps and at the end."""
    strategy = cs.CentralStorageStrategy()
    fetched = watch_blocks()
    training = Training(strategy, 0.1, dataset_shard(batch_size=BATCH), lambda batch: batch["data"])
    is_restored = restore(training.checkpoint)
    begun = int(training.optimizer.iterations)
    assert is_restored == (begun > 0)
    with open(config["starts"], "a") as file:
        file.write(f"{begun}\n")  # Ray 2.52 has a print of its own
    start = len(Path(config["starts"]).read_text().split())

    def after(count: int) -> None:
        done = begun + count
        writer.scalar("done", done, done)
        if done % EVERY == 0 and done < STEPS:
            report({"done": done}, training.checkpoint)
        if start <= len(KILLS) and done in KILLS[start - 1]:
            kill(KILLS[start - 1][done])

    with cs.summary.TensorBoard(config["events"], service_every=None) as writer:
        digest = training.run(after, lookahead=0)
    of_training = len(fetched)
    every_way = strategy.experimental_distribute_dataset(EveryWay())
    assert sum(1 for _ in strategy.run_steps(same_rows, every_way)) == STEPS
    first, *_ = dataset_shard(batch_size=BATCH)
    assert np.array_equal(first["data"], batches()[0])
    metrics = {"digest": digest, "replicas": strategy.num_replicas_in_sync}
    metrics["fetched"] = f"{of_training} {of_training < len(fetched)}"
    report({"done": STEPS, **metrics}, training.checkpoint)
    return digest


class EveryWay:
    """Batches, the numbers of their rows, and the rows themselves, which the script fetches."""

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        sent = ray.train.get_dataset_shard("train").iter_batches(batch_size=BATCH, batch_format="numpy")
        return zip(dataset_shard(batch_size=BATCH), row_numbers().batch(BATCH), sent, strict=True)


@cs.function
def same_rows(element: tuple[Any, Any, Any]) -> None:
    """The rows of a replica are the same ones in every way."""
    batch, numbers, sent = element
    for found in (batch["data"], rows(numbers)["data"]):
        assert found.dtype == sent["data"].dtype
        assert np.array_equal(found, sent["data"])


def watch_blocks() -> list[pyarrow.Table]:
    """All blocks of Ray Data that this process fetches from now on."""
    fetched = []
    get = ray.get

    def watched(*arguments: Any, **more: Any) -> Any:
        found = get(*arguments, **more)
        several = found if isinstance(found, list) else [found]
        fetched.extend(each for each in several if isinstance(each, pyarrow.Table))
        return found

    ray.get = watched
    return fetched


def kill(what: str) -> None:
    """Kill a process of this training: the only one on these nodes."""
    if what == "rank 0":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "row servers":
        servers = [*row_servers()]
        assert servers
        for server in servers:
            server.kill()
        return
    [launcher] = [each for each in launchers() if each.ppid() != os.getpid()]
    if what == "launcher":
        launcher.kill()
    elif what == "worker":
        [worker] = launcher.children()
        worker.kill()
    else:
        launcher.parent().kill()


def launchers() -> Iterator[psutil.Process]:
    """The launchers of workers by this Python."""
    for process, command in on_these_nodes():
        if command[:1] == [sys.executable] and "central_storage.ray.node" in command:
            yield process


def row_servers() -> Iterator[psutil.Process]:
    """The actors that have the rows."""
    for process, command in on_these_nodes():
        if command[:1] and command[0].startswith("ray::RowServer"):
            yield process


def on_these_nodes() -> Iterator[tuple[psutil.Process, list[str]]]:
    """The processes of the program that keeps these nodes, with their command lines."""
    program = str(Path(__file__).with_name("cluster.py"))
    [keeper] = [each for each in psutil.Process().parents() if program in each.cmdline()]
    for process in keeper.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            yield process, process.cmdline()


def refuse() -> None:
    """Raise an error that holds what the function is told about calls that make no sense."""
    calls: list[Callable[[], object]] = [
        lambda: dataset_shard("other", batch_size=1),
        lambda: row_numbers("other"),
        lambda: row_numbers("empty"),
        lambda: dataset_shard(batch_size=0),
        lambda: dataset_shard(batch_size="1"),  # type: ignore[arg-type]
        lambda: dataset_shard(batch_size=1, block_timeout=0),
        step_without_its_block,
        lambda: report(5),  # type: ignore[arg-type]
        lambda: report({}, "directory"),  # type: ignore[arg-type]
        lambda: restore("directory"),  # type: ignore[arg-type]
    ]
    said = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError, TimeoutError) as error:
            said.append(f"{type(error).__name__}: {error}")
    raise KeyError(*said)


def wait_for_ever() -> None:
    signal.pause()


def step_without_its_block() -> None:
    """A step whose rows are in a block that Ray never brings."""
    never = ray.remote(num_cpus=0)(wait_for_ever).remote()
    where = os.environ[VARIABLE]
    there = NodeAffinitySchedulingStrategy(node_of(where), soft=False)
    server = ray.remote(num_cpus=0)(RowServer).options(scheduling_strategy=there).remote(where, "late", [never], [2])
    ray.get(server.is_up.remote())
    cs.CentralStorageStrategy().run(lambda: rows(np.arange(1), "late", block_timeout=0.5))


def compare(blocks: ray.data.Dataset) -> None:
    """The batches of the script have the rows in their order, and in each iteration the same ones."""
    first, *_ = dataset(blocks, batch_size=BATCH)
    assert np.array_equal(first["data"], batches()[0])
    # The second iteration has the rows of the first one, which a new process would get. Ray 2.52 may have ints only.
    shuffled = dataset(blocks.random_shuffle(seed=getattr(ray.data, "RandomSeedConfig", int)(1)), batch_size=BATCH)
    once, again = (np.concatenate([batch["data"] for batch in shuffled]) for _ in range(2))
    assert np.array_equal(once, again)


def main(storage: str, what: str) -> None:
    """Train, and print what comes of it."""
    ray.init(log_to_driver=False)
    items = [{"data": row} for row in np.concatenate(batches()).tolist()]
    parts = ray.data.from_items(items, override_num_blocks=5)  # which are no batches
    # Each by a task of its own, of which two run at once: more would be more processes, and no more disorder.
    blocks = parts.map_batches(lambda rows: rows, batch_size=None, concurrency=2)
    if what == "refused":
        compare(blocks)
    starts = f"{storage}/starts"
    trainer = CentralStorageTrainer(
        refuse if what == "refused" else train,
        train_loop_config={"starts": starts, "events": f"{storage}/events"},
        datasets={"train": blocks, "empty": ray.data.range(0)},
        scaling_config=ray.train.ScalingConfig(num_workers=1 if what == "refused" else 2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            name=what,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=1 if what == "killed" else 0),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as failed:
        if what == "refused":
            error = failed.worker_failures[0]
            error = getattr(error, "_base_exc", error)  # Ray 2.52 wraps it
            print(type(error).__name__, *error.args, sep="\n", flush=True)
            return
        print("failed", flush=True)
    result = trainer.fit()  # under the same name, as after the death of the head
    print("starts", *Path(starts).read_text().split())
    print("reported", *result.metrics_dataframe["done"])
    print("fetched", result.metrics["fetched"])
    print("checkpoint", *sorted(os.listdir(result.checkpoint.path)))
    print("digest", result.metrics["replicas"], result.metrics["digest"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
