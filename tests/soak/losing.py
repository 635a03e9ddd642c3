"""P5: a training in this process over a network that drops, doubles and delays messages."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
from tests.soak.lossy import WAYS, Faults, lossy_service

import central_storage as cs

__all__ = ["UPDATES", "train"]

#: Merge points of one kind in a step.
_ASSIGNS = 9
_APPLIES = 1
REPLICAS = 2
# Steps of so many messages that some are doubled.
_ENOUGH = 50
#: Updates of one step: what each replica brings to each of its merge points that change something, and its mark.
UPDATES = REPLICAS * (_ASSIGNS + _APPLIES + 1)


def train(rng: random.Random, updates: int, faults: Faults, on_updates: Callable[[int], None]) -> list[str]:
    """Make about ``updates`` updates while messages are lost; what is wrong with the variables, in words."""
    steps = -(-updates // UPDATES)
    found: list[str] = []
    seed, mailboxes = rng.getrandbits(32), rng.random() < 0.5 and os.environ.get("CS_MAILBOXES") != "off"
    with (
        lossy_service(seed, faults, mailboxes=mailboxes) as network,
        cs.CentralStorageStrategy(["cpu:0"] * REPLICAS, in_process=True) as strategy,
    ):
        with strategy.scope():
            total, ledger, moved, marks = (
                cs.Variable(np.zeros(size), aggregation=cs.VariableAggregation.SUM)
                for size in (3, 3, 3, steps * REPLICAS)
            )
            sgd = cs.optimizers.SGD(learning_rate=1.0)

        @cs.function
        def step(k: int) -> tuple[float, tuple[float, ...]]:
            context = cs.get_replica_context()
            assert context is not None
            replica = int(context.replica_id_in_sync_group)
            seen = tuple(float(np.asarray(variable)[0]) for variable in (total, moved, ledger))
            for _ in range(_ASSIGNS):
                total.assign_add(np.ones(3))
            marks.scatter_add(cs.IndexedSlices(np.ones(1), np.array([k * REPLICAS + replica])))
            met = float(context.all_reduce("SUM", np.array(k + 0.5 * replica)))
            for _ in range(_APPLIES):
                sgd.apply_gradients([(-np.ones(3), moved)])
            return met, seen

        strategy.run(step, args=(0,))
        network.begin()
        for k in range(1, steps):
            said = strategy.experimental_local_results(strategy.run(step, args=(k,)))
            right = 2 * k + 0.5, (float(k * _ASSIGNS * REPLICAS), float(k * _APPLIES * REPLICAS), float((k - 1) // 2))
            if said != (right,) * REPLICAS:
                found.append(f"step {k}: the replicas met at, and had seen, {said}, not {right}")
            if k % 2 == 0:
                ledger.assign_add(np.ones(3))
            on_updates(UPDATES)
        network.end()
        for name, variable, value in (
            ("total", total, float(steps * _ASSIGNS * REPLICAS)),
            ("moved", moved, float(steps * _APPLIES * REPLICAS)),
            ("ledger", ledger, float((steps - 1) // 2)),
            ("marks", marks, 1.0),
        ):
            values = variable.numpy()
            if not (values == value).all():
                wrong = np.flatnonzero(values != value)[:5]
                found.append(f"{name} is {values[wrong]} at {wrong}, not {value:g}")
        if steps >= _ENOUGH:
            lost = {way: network.dropped[way] for way in WAYS if way != "past the server"}
            for what, share, counts in (("lost", faults.dropped, lost), ("doubled", faults.doubled, network.doubled)):
                found += [f"no message {way} was {what}" for way, count in counts.items() if share and not count]
    return found
