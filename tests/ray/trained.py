"""The training of ``training.py`` by Ray Train, with two ranks and its rows in Ray Data, as a test asks for.

    python tests/ray/trained.py STORAGE kept      # the worker of the other rank is killed
    python tests/ray/trained.py STORAGE killed    # rank 0 is killed and, after that start, the other rank

It prints at which step each start began, and what comes of it. STORAGE is the ``storage_path``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import ray.data
import ray.train
from training import BATCH, STEPS, Training, batches

import central_storage as cs
from central_storage.ray import CentralStorageTrainer, dataset_shard, report, restore

#: A checkpoint is reported after every so many steps, and a process is killed after that one. When a report returns,
#: Ray may not know of it yet, but it knows of the one before.
EVERY, FATAL = 3, 11


def train(config: dict[str, Any]) -> str:
    """Train, and report a checkpoint after every few steps and at the end."""
    strategy = cs.CentralStorageStrategy()
    training = Training(strategy, 0.1, dataset_shard(batch_size=BATCH))
    restore(training.checkpoint)
    begun = int(training.optimizer.iterations)
    with open(config["starts"], "a") as file:
        print(begun, file=file)
    start = len(Path(config["starts"]).read_text().split())

    def after(count: int) -> None:
        done = begun + count
        if done % EVERY == 0 and done < STEPS:
            report({"done": done}, training.checkpoint)
        if done == FATAL and start <= len(config["kills"]):
            _kill(config["kills"][start - 1])

    digest = training.run(after, lookahead=1)
    report({"done": STEPS, "digest": digest, "replicas": strategy.num_replicas_in_sync}, training.checkpoint)
    return digest


def _kill(what: str) -> None:
    launchers = [
        process
        for process in psutil.process_iter()
        if process.name() != "" and _is_launcher(process) and process.ppid() != os.getpid()
    ]
    if what == "rank 0":
        os.kill(os.getpid(), signal.SIGKILL)
    [launcher] = launchers
    if what == "worker":
        [worker] = launcher.children()
        worker.kill()
    else:
        launcher.parent().kill()


def _is_launcher(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:  # it has just ended
        return False
    return command[:1] == [sys.executable] and "central_storage.ray.node" in command


def main(storage: str, what: str) -> None:
    """Train, and print what comes of it."""
    ray.init(log_to_driver=False)
    rows = np.concatenate(batches())
    blocks = np.split(rows, [50, 57, 120])  # which are no batches
    starts = f"{storage}/starts"
    result = CentralStorageTrainer(
        train,
        train_loop_config={"starts": starts, "kills": ["worker"] if what == "kept" else ["rank 0", "other rank"]},
        datasets={"train": ray.data.from_numpy(blocks)},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            name=what, storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    ).fit()
    print("starts", *Path(starts).read_text().split())
    print("reported", *result.metrics_dataframe["done"])
    print("checkpoint", *sorted(os.listdir(result.checkpoint.path)))
    print("digest", result.metrics["replicas"], result.metrics["digest"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
