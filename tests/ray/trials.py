"""Two trials of Ray Tune at once, as a test asks for.

    python tests/ray/trials.py STORAGE             # the second is killed once; prints for each the steps of its last
                                                   # process, its threads by OMP_NUM_THREADS, and its digest
    python tests/ray/trials.py STORAGE ITERATIONS  # both are stopped after so many reports; prints their pids

STORAGE is a directory for Tune's results, with a FIFO ``meet``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune
from training import DEVICES, Training

import central_storage as cs

RATES = [0.1, 0.01]
#: A trial is killed after so many steps.
FATAL = 5


def trial(config: dict[str, Any]) -> None:
    """Train, and report a checkpoint after each step."""
    found = tune.get_checkpoint()
    with cs.CentralStorageStrategy(DEVICES) as strategy:
        training = Training(strategy, config["rate"])
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        is_first = config["rate"] == RATES[0]
        if found is None:
            # Opening a FIFO waits for the other end: both services are up at once.
            os.close(os.open(config["meet"], os.O_RDONLY if is_first else os.O_WRONLY))
        else:
            with found.as_directory() as directory:
                training.checkpoint.read(Path(directory, "state"))

        steps = 0

        def report(count: int) -> None:
            nonlocal steps
            steps = count
            with tempfile.TemporaryDirectory() as directory:
                training.checkpoint.write(Path(directory, "state"))
                tune.report({"pids": pids}, checkpoint=tune.Checkpoint.from_directory(directory))
            if config["is_killed"] and count == FATAL and found is None and not is_first:
                os.kill(os.getpid(), signal.SIGKILL)

        digest = training.run(report)
        tune.report({"steps": steps, "threads": os.environ["OMP_NUM_THREADS"], "digest": digest})


def main(storage: str, iterations: str = "") -> None:
    """Run both trials, and print what comes of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ray.init(log_to_driver=False)
    config = {"rate": tune.grid_search(RATES), "meet": f"{storage}/meet", "is_killed": not iterations}
    results = tune.Tuner(
        tune.with_resources(trial, {"CPU": 2}),
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=storage,
            verbose=0,
            stop={"training_iteration": int(iterations)} if iterations else None,
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    ).fit()
    for result in sorted(results, key=lambda result: -result.config["rate"]):
        metrics = result.metrics
        if iterations:
            print("processes", *metrics["pids"], flush=True)
        else:
            print(metrics["steps"], metrics["threads"], metrics["digest"], flush=True)
    print("told", flush=True)
    if iterations:
        signal.sigwait({signal.SIGUSR1})  # the trials have ended because Tune has stopped them


if __name__ == "__main__":
    main(*sys.argv[1:])
