"""What each process of the service holds after an Adam step on 100 MB of variables."""

from __future__ import annotations

import os

import numpy as np
import psutil

import central_storage as cs

NBYTES = 100_000_000


def table() -> str:
    """For people, in MB: what is a process's own alone, and its share where several map the same memory."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variable = cs.Variable(np.zeros(NBYTES // 4, np.float32))
            optimizer = cs.optimizers.Adam()

        def step() -> None:
            [gradient] = cs.gradient_buffers([variable])
            gradient[...] = 1
            optimizer.apply_gradients([(gradient, variable)])

        strategy.run(step)
        counters = strategy.statistics()
        supervisor = psutil.Process(counters.pid).ppid()
        pids = {"this script": os.getpid(), "supervisor": supervisor, "server": counters.pid}
        pids |= {f"worker w{replica.replica}": replica.pid for replica in counters.replicas}
        lines = [f"{'memory after Adam on 100 MB':<32}{'own':>10}{'share':>10}"]
        for name, pid in pids.items():
            info = psutil.Process(pid).memory_full_info()
            lines.append(f"  {name:<30}{info.uss / 1e6:>7.1f} MB{info.pss / 1e6:>7.1f} MB")
    return "\n".join(lines)
