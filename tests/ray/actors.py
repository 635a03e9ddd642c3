"""Actors of Ray with a service each, as a test asks for.

    python tests/ray/actors.py train RATE RATE   # two at once; prints their digests
    python tests/ray/actors.py end HOW...        # one after the other; prints the processes of each, ends it after a
                                                 # SIGUSR1, and goes on after another

HOW is ``kill`` (while a method runs), ``let-go`` (the last handle is deleted) or ``none`` (somebody else ends it).
With ``-kept`` behind it, Ray leaves the children of the actor alone.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil
import ray
from training import DEVICES, Training

import central_storage as cs


class Trial:
    """An actor that keeps its service from one call to the next."""

    def open(self, rate: float) -> list[int]:
        """Start the service; the pids of this process and of the service's."""
        self.strategy = cs.CentralStorageStrategy(DEVICES)
        self.training = Training(self.strategy, rate)
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    def train(self) -> str:
        """The digest after the training."""
        return self.training.run()

    def close(self) -> None:
        """End the service."""
        self.strategy.shutdown()

    def hang(self) -> None:
        """Never return."""
        print("hangs", flush=True)
        signal.pause()


def train(rates: list[str]) -> None:
    """Open all services, and train when all are up."""
    actors = [ray.remote(num_cpus=2)(Trial).remote() for _ in rates]
    ray.get([actor.open.remote(float(rate)) for actor, rate in zip(actors, rates, strict=True)])
    for digest in ray.get([actor.train.remote() for actor in actors]):
        print(digest, flush=True)
    ray.get([actor.close.remote() for actor in actors])


def end(said: str) -> None:
    """Open a service, and end its actor when told to."""
    how = said.removesuffix("-kept")
    kept = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}} if said != how else {}
    actor = ray.remote(num_cpus=2, runtime_env=kept)(Trial).remote()
    pids = ray.get(actor.open.remote(0.1))
    ray.get(actor.train.remote())
    busy = actor.hang.remote() if how == "kill" else None
    print("processes", said, *pids, flush=True)
    signal.sigwait({signal.SIGUSR1})
    if how == "kill":
        ray.kill(actor)
    elif how == "let-go":
        del actor
    print("told", said, flush=True)
    signal.sigwait({signal.SIGUSR1})  # the actor ends by what it was told, and not because its driver has ended
    del busy


def main(word: str, *more: str) -> None:
    """Do what the command line says."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ray.init(log_to_driver=False)
    if word == "train":
        train(list(more))
    else:
        for how in more:
            end(how)


if __name__ == "__main__":
    main(*sys.argv[1:])
