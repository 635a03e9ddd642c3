"""The names that the recorded programs use, over the public API.

:func:`perform` runs one case unchanged. What a replica function calls is bound to functions of this module or of
``central_storage``: they go to the replicas by value or by name, like a user's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import central_storage as cs

from .answers import encode
from .cases import Case

#: Makes a strategy of the kind under test; takes what ``CentralStorageStrategy`` takes.
Make = Callable[..., cs.CentralStorageStrategy]


def perform(case: Case, strategies: Sequence[cs.CentralStorageStrategy], make: Make) -> dict[str, Any]:
    """What ``case`` gives under ``strategies`` (its own, and those it makes by ``S(n)``), in the notation of the file.

    Raises what the case raises.
    """
    own, *others = strategies
    if case.kind == "optimizer":
        return _optimizer(own, **case.inputs)
    if case.kind == "training":
        return _training(own, **case.inputs)
    with ExitStack() as made:
        made.callback(cs.experimental_set_strategy, None)  # a program may leave one set

        def strategy_of(n: int) -> cs.CentralStorageStrategy:
            return others.pop(next(i for i, other in enumerate(others) if other.num_replicas_in_sync == n))

        def css(*args: Any, **kwargs: Any) -> cs.CentralStorageStrategy:
            return made.enter_context(make(*args, **kwargs))

        inputs = {key: tuple(x) if key == "axis" and isinstance(x, list) else x for key, x in case.inputs.items()}
        names = {**_NAMES, **inputs, "s": own, "S": strategy_of, "CSS": css, "__name__": "golden_program"}
        exec(compile(case.program, case.id, "exec"), names)
        return encode(names["result"])


# --- programs -------------------------------------------------------------------------------------------------------


def run(s: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
    return s.run(fn, args=args, kwargs=kwargs)


def rid() -> int:
    return int(cs.get_replica_context().replica_id_in_sync_group)


def arr(x: Any, dtype: Any) -> Any:
    return cs.get_array_module().array(x, dtype)  # a GPU's, where the replica is on one


def pr(s: Any, values: Sequence[Any], dtype: Any = None) -> cs.PerReplica:
    return cs.PerReplica([cs.convert_to_tensor(value, dtype) for value in values])


def var(s: Any, init: Any, agg: str = "NONE", dtype: Any = None, **kwargs: Any) -> cs.Variable:
    return var_raw(s, init, cs.VariableAggregation[agg], dtype, **kwargs)


def var_raw(s: Any, init: Any, aggregation: Any, dtype: Any = None, **kwargs: Any) -> cs.Variable:
    with s.scope():
        return cs.Variable(init, aggregation=aggregation, dtype=dtype, **kwargs)


def plain_var(x: Any) -> cs.Variable:
    return cs.Variable(x)


def read(v: cs.Variable) -> np.ndarray:
    return v.read_value()


def gen(batches: Sequence[Any]) -> cs.data.Dataset:
    return cs.data.Dataset.from_generator(lambda: (np.array(batch, "int64") for batch in batches))


def autoshard_off(d: cs.data.Dataset) -> cs.data.Dataset:
    return d  # nothing is sharded over pipelines here: there is one


def steps(s: Any, dist: Any) -> list[list[Any]]:
    return [list(s.experimental_local_results(element)) for element in dist]


def from_fn(s: Any, fn: Any) -> Any:
    return s.distribute_datasets_from_function(fn)


def total(x: Any) -> Any:
    return np.sum(x)


def opt(s: Any, cls: str, **hyperparameters: Any) -> cs.optimizers.Optimizer:
    with s.scope():
        return getattr(cs.optimizers, cls)(**hyperparameters)


def apply(o: cs.optimizers.Optimizer, grads_and_vars: Any) -> Any:
    return o.apply_gradients(grads_and_vars)


def decay(lr: float, steps: int, rate: float) -> Any:
    return cs.optimizers.schedules.ExponentialDecay(lr, steps, rate)


def ema(s: Any, v: cs.Variable, before: Callable[[], Any]) -> list[np.ndarray]:
    average = cs.train.ExponentialMovingAverage(0.5)

    def fn() -> None:
        before()
        average.apply([v])

    values = []
    for _ in range(3):
        s.run(fn)
        values.append(read(average.average(v)))
    return values


def metric(s: Any, family: str) -> Any:
    with s.scope():
        return cs.metrics.Mean()


def ckpt_roundtrip(v: cs.Variable, *others: cs.Variable) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as directory:
        path = cs.train.Checkpoint(v=v).save(str(Path(directory) / "checkpoint"))
        v.assign(np.full(v.shape, 77, v.dtype))
        for variable in (v, *others):
            cs.train.Checkpoint(v=variable).restore(path)
        return [read(variable) for variable in (v, *others)]


def short(names: Sequence[str]) -> list[str]:
    return [name.rpartition("device:")[2].lstrip("/").upper() for name in names]


_NAMES: dict[str, Any] = {
    "run": run,
    "ctx": cs.get_replica_context,
    "rid": rid,
    "const": cs.convert_to_tensor,
    "arr": arr,
    "pr": pr,
    "IS": cs.IndexedSlices,
    "var": var,
    "var_raw": var_raw,
    "plain_var": plain_var,
    "read": read,
    "SUM": cs.ReduceOp.SUM,
    "MEAN": cs.ReduceOp.MEAN,
    "AGG": cs.VariableAggregation,
    "SYNC": cs.VariableSynchronization,
    "in_cross": cs.in_cross_replica_context,
    "has_strategy": cs.has_strategy,
    "get_strategy": cs.get_strategy,
    "rng": cs.data.Dataset.range,
    "ds": cs.data.Dataset.from_tensor_slices,
    "gen": gen,
    "autoshard_off": autoshard_off,
    "steps": steps,
    "from_fn": from_fn,
    "elements": list,
    "total": total,
    "clip": np.clip,
    "opt": opt,
    "apply": apply,
    "decay": decay,
    "ema": ema,
    "metric": metric,
    "ckpt_roundtrip": ckpt_roundtrip,
    "short": short,
    "set_strategy": cs.experimental_set_strategy,
    "InputContext": cs.InputContext,
    "ValueContext": cs.ValueContext,
    "InputOptions": cs.InputOptions,
    "rows": cs.nn.embedding_lookup,
    "average_loss": cs.nn.compute_average_loss,
    "regularization_loss": cs.nn.scale_regularization_loss,
}


# --- optimizers -----------------------------------------------------------------------------------------------------


def _optimizer(
    s: Any, optimizer: str, hparams: dict[str, Any], family: str, initial: Any, gradients: list[list[Any]]
) -> dict[str, Any]:
    """The variable after each step, and the slots at the end where ``family`` names them as we do."""
    made, variable = opt(s, optimizer, **hparams), var(s, initial)

    def step(gradient: Any) -> None:
        made.apply_gradients([(gradient, variable)])

    values: list[Any] = []
    for of_step in gradients:
        s.run(step, args=(cs.PerReplica([_gradient(x, variable.shape) for x in of_step]),))
        values.append(read(variable))
    slots = {name: np.asarray(made.get_slot(variable, name)) for name in made.slot_names} if family == "v2" else {}
    return {"t": "trajectory", "steps": [encode(value) for value in values], "slots": encode(slots)["items"]}


def _gradient(recorded: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(recorded, list):
        return cs.convert_to_tensor(recorded)
    return cs.IndexedSlices(recorded["values"], recorded["indices"], shape)


# --- training -------------------------------------------------------------------------------------------------------


def _training(
    s: Any,
    x: Any,
    y: Any,
    global_batch: int,
    steps: int,
    optimizer: str,
    hparams: dict[str, Any],
    model: str,
    loss: str,
    **weights: Any,
) -> dict[str, Any]:
    """The SUM over the replicas of the loss before each step, and the weights after the last."""
    made = opt(s, optimizer, **hparams)
    variables = {name: var(s, value) for name, value in weights.items()}
    gradients = _linear if len(weights) == 2 else _perceptron
    batches = cs.data.Dataset.from_tensor_slices((arr(x, "float32"), arr(y, "float32"))).batch(global_batch).repeat()

    def step(batch: tuple[np.ndarray, np.ndarray], rows: int) -> np.float32:
        x, y = batch
        loss, found = gradients(x, y, rows, **{name: cs.get_array_module().asarray(v) for name, v in variables.items()})
        made.apply_gradients([(found[name], variables[name]) for name in variables])
        return loss

    losses = []
    for _, batch in zip(range(steps), s.experimental_distribute_dataset(batches), strict=False):
        rows = sum(len(share) for share, _ in s.experimental_local_results(batch))
        losses.append(float(s.reduce("SUM", s.run(step, args=(batch, rows)), axis=None)))
    weights = {name: read(variable) for name, variable in variables.items()}
    return {"t": "training", "losses": losses, "weights": encode(weights)["items"]}


def _linear(x: Any, y: Any, rows: int, W: Any, b: Any) -> tuple[np.float32, dict[str, Any]]:
    error = x @ W + b - y
    slope = 2 * error / np.float32(rows)
    return np.sum(error**2) / np.float32(rows), {"W": x.T @ slope, "b": slope.sum(axis=0)}


def _perceptron(x: Any, y: Any, rows: int, W1: Any, b1: Any, W2: Any, b2: Any) -> tuple[np.float32, dict[str, Any]]:
    hidden = np.tanh(x @ W1 + b1)
    error = hidden @ W2 + b2 - y
    slope = 2 * error / np.float32(rows)
    inner = (slope @ W2.T) * (1 - hidden**2)
    found = {"W1": x.T @ inner, "b1": inner.sum(axis=0), "W2": hidden.T @ slope, "b2": slope.sum(axis=0)}
    return np.sum(error**2) / np.float32(rows), found
