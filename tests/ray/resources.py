"""What a service sees of the resources that Ray gives an actor.

Prints the threads of each worker, as Ray sets them and as the runtime environment does; then, for each of two actors
with a GPU, its name and what CUDA shows to the worker.
"""

from __future__ import annotations

import os

import ray

import central_storage as cs


def threads() -> list[int]:
    """The number of threads of each of two workers."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        each = cs.RunOptions(keep_per_replica=True)
        found = strategy.run(lambda: int(os.environ["OMP_NUM_THREADS"]), options=each)
        return [int(number) for number in strategy.experimental_local_results(found)]


class Gpus:
    """An actor with a GPU, which it keeps while others ask for theirs."""

    def look(self) -> tuple[str, int]:
        """The device of ``gpu:all``, and what CUDA shows to the worker."""
        with cs.CentralStorageStrategy("gpu:all") as strategy:
            shown = strategy.run(lambda: int(os.environ["CUDA_VISIBLE_DEVICES"]))
            [device] = strategy.extended.worker_devices
            return device, int(shown)


def main() -> None:
    """Print what was found."""
    ray.init(log_to_driver=False)
    for variables in ({}, {"OMP_NUM_THREADS": "1"}):
        task = ray.remote(num_cpus=2, runtime_env={"env_vars": variables})(threads)
        print(ray.get(task.remote()), flush=True)
    passed = {name: os.environ[name] for name in ("CS_NVIDIA_DRIVER", "PYTHONPATH")}
    actors = [ray.remote(num_gpus=1, runtime_env={"env_vars": passed})(Gpus).remote() for _ in range(2)]
    for device, shown in sorted(ray.get([actor.look.remote() for actor in actors]), key=lambda pair: pair[1]):
        print(device, shown, flush=True)


if __name__ == "__main__":
    main()
