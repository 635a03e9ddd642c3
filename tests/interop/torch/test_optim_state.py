"""State dicts of optimizers: torch's own format, to torch's own optimizers and back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.services import connected
from tests.harness.timing import unit
from tests.interop.torch.by_hand import central, stepper, values
from tests.interop.torch.cases import CASES, Case, Net, gradients, groups_of, linear, train_torch

import central_storage as cs
import central_storage.torch as cst
from cs_proto.errors import InvalidArgumentError

STEPS = 20
pytestmark = pytest.mark.timeout(unit(120))


@pytest.fixture(scope="module")
def alone() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield connected(strategy)


def made(case: Case, strategy: cs.CentralStorageStrategy, state: Any = None) -> tuple[Any, Any, Callable[..., None]]:
    """A central module with these values, an optimizer of it, and a step."""
    net = Net()
    if state is not None:
        net.load_state_dict(state)
    net = central(strategy, net)
    optimizer = getattr(cst.optim, case.name)(groups_of(net), **case.kwargs)
    return net, optimizer, stepper(net, [optimizer], linear)


def of_torch(case: Case, steps: int, state: Any = None) -> tuple[Any, Any]:
    net = Net()
    if state is not None:
        net.load_state_dict(state)
    optimizer = getattr(torch.optim, case.name)(groups_of(net), **case.kwargs)
    train_torch(net, optimizer, None, range(steps), None)
    return net, optimizer


def assert_close(found: Any, expected: Any, steps: int = 2 * STEPS) -> None:
    for name, value in expected.items():
        there = value.detach().numpy()
        bound = 4 * steps * np.spacing(np.maximum(np.abs(there), np.float32(0.1)))
        np.testing.assert_array_less(np.abs(found[name].numpy() - there), bound, err_msg=name)


def same_kind(found: Any, expected: Any) -> None:
    """The same entries, of the same types, shapes and dtypes, with values that are close."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert type(found[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=1e-7, err_msg=str(key))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_dict_is_torchs(alone: cs.CentralStorageStrategy, case: Case) -> None:
    """Before the first step, and after steps in which a parameter was not used."""
    _, optimizer, step = made(case, alone)
    for steps in (0, STEPS):
        for number in range(steps):
            step(*gradients(number))
        found, expected = optimizer.state_dict(), of_torch(case, steps)[1].state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, entry in expected["state"].items():
            same_kind(found["state"][key], entry)
        assert not optimizer.state


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_here_and_half_in_torch_is_all_in_torch(alone: cs.CentralStorageStrategy, case: Case) -> None:
    whole, _ = of_torch(case, 2 * STEPS)
    net, optimizer, step = made(case, alone)
    for number in range(STEPS):
        step(*gradients(number))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    theirs = Net()
    theirs.load_state_dict(values(net))
    reference = getattr(torch.optim, case.name)(groups_of(theirs))
    reference.load_state_dict(torch.load(file))
    train_torch(theirs, reference, None, range(STEPS, 2 * STEPS), None)
    assert_close(theirs.state_dict(), dict(whole.named_parameters()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_in_torch_and_half_here_is_all_in_torch(alone: cs.CentralStorageStrategy, case: Case) -> None:
    whole, _ = of_torch(case, 2 * STEPS)
    theirs, reference = of_torch(case, STEPS)
    net, optimizer, step = made(case, alone, theirs.state_dict())
    step(*gradients(99))  # what it has is replaced
    for name, p in net.named_parameters():
        p.variable.assign(dict(theirs.named_parameters())[name].detach().numpy())
    optimizer.load_state_dict(reference.state_dict())
    for number in range(STEPS, 2 * STEPS):
        step(*gradients(number))
    assert_close(values(net), dict(whole.named_parameters()))


def test_a_resumed_optimizer_goes_on_as_if_nothing_had_been(alone: cs.CentralStorageStrategy) -> None:
    """Here to here, with numbers of groups that a schedule has changed."""
    case = Case("AdamW", {"lr": 0.01, "amsgrad": True})
    net, optimizer, step = made(case, alone)
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] *= 0.9
        step(*gradients(number))
    again, resumed, go_on = made(case, alone, values(net))
    resumed.load_state_dict(optimizer.state_dict())
    for number in range(STEPS, 2 * STEPS):
        step(*gradients(number))
        go_on(*gradients(number))
    for name, value in values(net).items():
        assert torch.equal(values(again)[name], value), name
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.01


def test_a_parameter_without_an_entry_begins_anew(alone: cs.CentralStorageStrategy) -> None:
    case = Case("Adam", {"lr": 0.01})
    net, optimizer, step = made(case, alone)
    fresh = optimizer.state_dict()
    step(*gradients(0))
    optimizer.load_state_dict(fresh)
    assert optimizer.state_dict()["state"] == {}
    start = values(net)
    step(*gradients(1))
    theirs, reference = of_torch(case, 0, start)
    train_torch(theirs, reference, None, range(1, 2), None)
    assert_close(values(net), dict(theirs.named_parameters()), 1)


def test_sgd_without_a_buffer_yet(alone: cs.CentralStorageStrategy) -> None:
    """Older torch keeps None before the first update of a parameter."""
    _, optimizer, step = made(Case("SGD", {"lr": 0.1, "momentum": 0.9}), alone)
    step(*gradients(1))  # `sometimes` has no gradient
    saved = optimizer.state_dict()
    assert {key: list(entry) for key, entry in saved["state"].items()} == {
        0: ["momentum_buffer"],
        3: ["momentum_buffer"],
    }
    saved["state"][4] = {"momentum_buffer": None}
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"].keys() == {0, 3}


def test_the_state_of_sixteen_bit_parameters_stays_exact(alone: cs.CentralStorageStrategy) -> None:
    """The server has float32 for them; torch's optimizer would round its state to the parameter's dtype."""
    net = central(alone, torch.nn.Linear(3, 2))
    net.weight.data = net.weight.data.to(torch.bfloat16)
    optimizer = cst.optim.Adam([net.weight])
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.1), "exp_avg_sq": torch.full((2, 3), 1e-9)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entry}})
    (found,) = optimizer.state_dict()["state"].values()
    assert all(torch.equal(found[key], value) for key, value in entry.items())
    half = {key: value.to(torch.bfloat16) for key, value in entry.items() if key != "step"} | {"step": 3}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: half}})
    (found,) = optimizer.state_dict()["state"].values()
    assert torch.equal(found["exp_avg"], half["exp_avg"].float())


def test_hooks_of_state_dicts_are_called(alone: cs.CentralStorageStrategy) -> None:
    _, optimizer, step = made(Case("Adam", {}), alone)
    step(*gradients(0))
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda each: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda each, found: {**found, "more": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda each, found: {key: found[key] for key in ("state", "param_groups")}
    )
    optimizer.register_load_state_dict_post_hook(lambda each: seen.append(each.state_dict()["state"].keys()))
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["before", 1, "before", saved["state"].keys()]


def _without(saved: Any, key: int, name: str) -> Any:
    del saved["state"][key][name]
    return saved


def _with(saved: Any, key: int, **entries: Any) -> Any:
    saved["state"][key].update(entries)
    return saved


def _numbers(saved: Any, **numbers: Any) -> Any:
    saved["param_groups"][1].update(numbers)
    return saved


def _group(saved: Any, change: Callable[[list[Any]], Any]) -> Any:
    change(saved["param_groups"])
    return saved


WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no state": ("Adam", lambda saved: {"param_groups": []}, "has the keys 'state' and 'param_groups'"),
    "a group less": ("Adam", lambda saved: _group(saved, list.pop), "has 2 groups, but the state dict has 1"),
    "a parameter less": (
        "Adam",
        lambda saved: _group(saved, lambda groups: groups[1]["params"].pop()),
        "Adam group 1 has 2 parameters, but that of the state dict has 1",
    ),
    "a shape": (
        "Adam",
        lambda saved: _with(saved, 3, exp_avg=torch.zeros(8)),
        r"the state of second\w*: exp_avg has shape \(7,\), but in the state dict \(8,\)",
    ),
    "no second moment": (
        "Adam",
        lambda saved: _without(saved, 3, "exp_avg_sq"),
        "has step, exp_avg, exp_avg_sq, but that of the state dict has step, exp_avg",
    ),
    "amsgrad's state": ("Adam", lambda saved: _with(saved, 3, max_exp_avg_sq=torch.zeros(7)), "max_exp_avg_sq"),
    "a half step": ("Adam", lambda saved: _with(saved, 3, step=torch.tensor(1.5)), "step must be a whole number"),
    "a step back": ("Adam", lambda saved: _with(saved, 3, step=-1), "step must be a whole number"),
    "an unknown parameter": ("Adam", lambda saved: {**saved, "state": {9: {}}}, "has a state for 9"),
    "amsgrad": ("Adam", lambda saved: _numbers(saved, amsgrad=True), "Adam group 1: .*amsgrad"),
    "a rate": ("Adam", lambda saved: _numbers(saved, lr=float("inf")), "Adam group 1: .*learning_rate"),
    "a tensor": ("Adam", lambda saved: _numbers(saved, lr=torch.tensor(0.1)), "lr is a tensor"),
    "momentum": ("SGD", lambda saved: _numbers(saved, momentum=0.9), "momentum"),
    "a product": (
        "NAdam",
        lambda saved: _with(saved, 3, mu_product=torch.tensor(0.3)),
        r"mu_product is 0.3, but 0\.\d+ follows from",
    ),
    "another class": (
        "Adam",
        lambda saved: torch.optim.SGD(groups_of(Net())).state_dict(),
        "Adam group 0 has no 'betas'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(
    alone: cs.CentralStorageStrategy, what: str
) -> None:
    name, change, message = WRONG[what]
    _, optimizer, step = made(Case(name, {"lr": 0.01}), alone)
    step(*gradients(0))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.load_state_dict(change(copy.deepcopy(before)))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for key, entry in before["state"].items():
        assert all(np.array_equal(after["state"][key][name], value) for name, value in entry.items())
    optimizer.push()
    step(*gradients(1))
