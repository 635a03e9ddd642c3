"""State dicts of optimizers, in both directions: the slots and counts of the server in torch's own format."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from central_storage.optimizers import Optimizer
from cs_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from .base import CentralOptimizer, Group

__all__ = ["Write", "check", "loaded_groups", "pull", "write"]


class Write(NamedTuple):
    """What the server is to have for a parameter. ``steps``: the number of its updates."""

    optimizer: Optimizer
    variable: Any
    steps: int
    slots: dict[str, np.ndarray]


def pull(optimizer: CentralOptimizer) -> dict[Any, dict[str, Any]]:
    """By parameter, what the server has for it, under torch's names. As in torch, a parameter that was never updated
    has no entry, except with Adagrad."""
    found: dict[Any, dict[str, Any]] = {}
    for (central, params), group in zip(optimizer.groups_for_update(), optimizer.param_groups, strict=True):
        steps = central.steps_of([p.variable for p in params])
        for p, count in zip(params, steps, strict=True):
            if count or optimizer.begins_with_state:
                entry = optimizer.counts(group, count)
                for slot in central.slot_names:
                    value = central.get_slot(p.variable, slot).numpy()
                    entry[optimizer.torch_slots.get(slot, slot)] = torch.from_numpy(value)
                if entry:
                    found[p] = entry
    return found


def loaded_groups(optimizer: CentralOptimizer, given: Mapping[str, Any]) -> list[Group]:
    """The groups of a state dict with this optimizer's parameters. Raises InvalidArgumentError for other groups."""
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= given.keys():
        raise InvalidArgumentError(f"a state dict of {name} has the keys 'state' and 'param_groups', not {[*given]}")
    groups, saved = optimizer.param_groups, copy.deepcopy(given["param_groups"])
    if len(groups) != len(saved):
        raise InvalidArgumentError(f"{name} has {len(groups)} groups, but the state dict has {len(saved)}")
    for index, (group, new) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(new["params"]):
            raise InvalidArgumentError(
                f"{name} group {index} has {len(group['params'])} parameters, but that of the state dict has "
                f"{len(new['params'])}"
            )
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    return list(saved)


def check(optimizer: CentralOptimizer, given: Mapping[str, Any]) -> list[Write]:
    """What is to be written for every parameter. Raises InvalidArgumentError for a state that does not fit; it writes
    nothing."""
    keys = [key for group in given["param_groups"] for key in group["params"]]
    unknown = [key for key in given["state"] if key not in keys]
    if unknown:
        raise InvalidArgumentError(f"the state dict has a state for {unknown[0]!r}, which is in none of its groups")
    made = {(central, variable) for central in optimizer.central for variable, _ in central.slots()}
    writes = []
    for key, (central, p, group) in zip(keys, _parameters(optimizer), strict=True):
        entry = {name: value for name, value in given["state"].get(key, {}).items() if value is not None}
        if entry:
            writes.append(_loaded(optimizer, central, p, group, entry))
        else:
            writes.append(_new(optimizer, central, p, (central, p.variable) in made))
    return writes


def write(writes: list[Write]) -> None:
    """Give the server what :func:`check` has found."""
    steps: defaultdict[Optimizer, dict[Any, int]] = defaultdict(dict)
    for each in writes:
        steps[each.optimizer][each.variable] = each.steps
        for slot, value in each.slots.items():
            each.optimizer.get_slot(each.variable, slot).assign(value)
    for central, counts in steps.items():
        central.set_steps(counts)


def _parameters(optimizer: CentralOptimizer) -> Iterator[tuple[Optimizer, Any, Group]]:
    for (central, params), group in zip(optimizer.groups_for_update(), optimizer.param_groups, strict=True):
        for p in params:
            yield central, p, group


def _new(optimizer: CentralOptimizer, central: Optimizer, p: Any, has_slots: bool) -> Write:
    """The state with which a parameter begins."""
    first = optimizer.defaults.get("initial_accumulator_value", 0.0)
    targets = {slot: central.get_slot(p.variable, slot) for slot in central.slot_names if has_slots}
    slots = {slot: np.full(target.shape, first, target.dtype) for slot, target in targets.items()}
    return Write(central, p.variable, 0, slots)


def _loaded(optimizer: CentralOptimizer, central: Optimizer, p: Any, group: Group, entry: dict[str, Any]) -> Write:
    """The state of a parameter from the entry of a state dict."""
    what = f"{type(optimizer).__name__}: the state of {p.variable.name}"
    names = {slot: optimizer.torch_slots.get(slot, slot) for slot in central.slot_names}
    needed = [*optimizer.counts(group, 0), *names.values()]
    if entry.keys() != {*needed}:
        raise InvalidArgumentError(
            f"{what} has {', '.join(needed) or 'no entry'}, but that of the state dict has {', '.join(entry)}"
        )
    # SGD's state has no count. All that its rule asks is whether there was an update.
    steps = float(entry.get("step", 1))
    if not (steps >= 0 and steps.is_integer()):
        raise InvalidArgumentError(f"{what}: step must be a whole number of at least 0, not {entry['step']!r}")
    for name, value in optimizer.counts(group, int(steps)).items():
        if abs(float(entry[name]) - float(value)) > 1e-6:
            raise InvalidArgumentError(
                f"{what}: {name} is {float(entry[name]):g}, but {float(value):g} follows from the group's numbers and "
                f"{int(steps)} steps, and the server keeps no other"
            )
    slots = {slot: _array(f"{what}: {name}", entry[name], central, p, slot) for slot, name in names.items()}
    return Write(central, p.variable, int(steps), slots)


def _array(what: str, value: Any, central: Optimizer, p: Any, slot: str) -> np.ndarray:
    tensor, target = torch.as_tensor(value).detach(), central.get_slot(p.variable, slot)
    if tuple(tensor.shape) != target.shape:
        raise InvalidArgumentError(f"{what} has shape {target.shape}, but in the state dict {tuple(tensor.shape)}")
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    array: np.ndarray = dense.to("cpu", torch.from_numpy(np.empty(0, target.dtype)).dtype).contiguous().numpy()
    return array
