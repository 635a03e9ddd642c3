"""A user's file: typed code over the package for JAX, which must pass mypy --strict and pyright. It is not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import central_storage as cs
import central_storage.jax as csj

Model = dict[str, dict[str, Any]]


def train(strategy: cs.CentralStorageStrategy, model: Model, data: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    with strategy.scope():
        model = csj.centralize(model, trainable={"body": True, "statistics": False})
    rate: csj.optim.Schedule = csj.optim.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100, end_value=1e-5)
    rate = csj.optim.join_schedules([rate, csj.optim.constant_schedule(1e-5)], [100])
    optimizer: csj.optim.Optimizer = csj.optim.chain(
        csj.optim.clip_by_global_norm(1.0), csj.optim.adamw(rate, weight_decay=0.1, mask=lambda tree: tree)
    )

    @csj.step(model, optimizer, has_aux=True)
    def step(model: Model, x: Any, y: Any) -> Any:
        return (x - y).mean(), {"key": csj.key()}

    batches: cs.DistributedDataset = csj.batches(strategy, data, weight=lambda batch: batch[1])
    for batch in batches:
        loss, aux = step(batch)
        print(loss, strategy.gather(aux["key"], axis=0))
    results: Iterator[Any] = step.ahead(batches, steps=10, lookahead=4)
    print(list(results), float(optimizer.learning_rate), optimizer.count)
    leaf: csj.Narrow = model["body"]["w"]
    print(leaf.variable.name, leaf.dtype, leaf.shape)
    csj.load_state(optimizer, model, csj.state(optimizer, model))
    values: Model = csj.read(model)
    other: csj.Step = csj.step(model, csj.optim.sgd(0.1, momentum=0.9))(lambda model, x: x.sum())
    return values, other, cs.jax.read(model)
