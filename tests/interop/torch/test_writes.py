"""In-place writes to parameters in a replica: an error names the parameter and the line, and nothing else changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference
from torch import nn
from torch.nn import functional as F  # noqa: N812

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))

BATCH = batch_of(0, 6)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 3))


def clamp(model: Any) -> None:
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)


def add_after_a_view(model: Any) -> None:
    with torch.no_grad():
        model[2].weight[:2].T.add_(1)


def fill_many(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model[0].bias, model[2].weight], 2.0)


def load(model: Any) -> None:
    model[2].load_state_dict({name: torch.zeros_like(p) for name, p in model[2].named_parameters()})


WRITES = {"clamp_": clamp, "add_": add_after_a_view, "_foreach_mul_": fill_many, "load_state_dict": load}


@pytest.mark.parametrize("name", list(WRITES))
@pytest.mark.parametrize("decorator", ["step", "function", "evaluate"])
def test_a_write_is_named_with_its_line(two: cs.CentralStorageStrategy, name: str, decorator: str) -> None:
    write = WRITES[name]
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor, writes: bool = True) -> torch.Tensor:
        if writes:
            write(model)
        return F.cross_entropy(model(x), y)

    def body(x: torch.Tensor, y: torch.Tensor, writes: bool = True) -> None:
        optimizer.zero_grad()
        step(x, y, writes).backward()
        optimizer.step()

    train: Any = {
        "step": lambda: cst.step(model, optimizer)(step),
        "function": lambda: cst.function(model, optimizer)(body),
        "evaluate": lambda: cst.evaluate(model)(step),
    }[decorator]()
    lines, first = inspect.getsourcelines(write)
    line = first + next(number for number, text in enumerate(lines) if name in text and "def" not in text)
    for _ in range(2):  # the worker works as before
        with pytest.raises(cs.errors.VariableWrittenError, match=rf"2.weight\S* .*test_writes.py:{line}"):
            train(*BATCH)
        assert difference(model, alone) == 0
    train(*BATCH, writes=False)
    if decorator != "evaluate":
        assert 0 < difference(model, alone) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_write_behind_torchs_back_fails_the_run(two: cs.CentralStorageStrategy, dtype: torch.dtype) -> None:
    """Through ``.data``, which torch does not count; the worker finds the pages, or the binding the copy of 16 bits."""
    model, alone = centralized(two, net().to(dtype))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, writes: bool = True) -> torch.Tensor:
        if writes:
            model[2].weight.data.add_(1)
        return F.cross_entropy(model(x.to(dtype)), y)

    with pytest.raises(cs.errors.VariableWrittenError, match=r"2.weight"):
        train(*BATCH)
    assert difference(model, alone) == 0
    train(*BATCH, writes=False)
    assert 0 < difference(model, alone) < 1


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_write_in_a_loops_body_is_looked_for_once_and_counts_for_nothing(
    two: cs.CentralStorageStrategy, when: str, through_data: bool
) -> None:
    """Also behind the step, where a parameter of one element can be written without an error of torch."""
    model, alone = centralized(two, nn.Linear(4, 1))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []

    def clear_bias() -> None:
        with torch.no_grad():
            (model.bias.data if through_data else model.bias).fill_(0.01)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, writes: bool = True) -> int:
        calls.append(1)
        if writes and when == "before":
            clear_bias()
        model(x).sum().backward()
        optimizer.step()
        if writes and when != "before":
            clear_bias()
        if when == "between":
            model(x)
        return len(calls)

    line = clear_bias.__code__.co_firstlineno + 2
    with pytest.raises(cs.errors.VariableWrittenError, match=r"bias") as raised:
        train(torch.ones(4, 4))
    seen = not (when == "before" and through_data)  # or else the worker finds it, after the function
    assert (f"test_writes.py:{line}" in str(raised.value)) == seen
    assert difference(model, alone) == 0
    assert train(torch.ones(4, 4), writes=False) == 2 + seen
    assert difference(model, alone) > 0


def test_a_write_that_is_not_repeated_has_no_line(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            clamp(model)
        return F.cross_entropy(model(x), y)

    with pytest.raises(cs.errors.VariableWrittenError, match=r"2.weight") as raised:
        train(*BATCH)
    assert "test_writes.py" not in str(raised.value).partition("Traceback")[0]
    assert difference(model, alone) == 0
    train(*BATCH)


def test_readonly_parameters_end_the_worker(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net(), protect="readonly")
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, writes: bool = False) -> torch.Tensor:
        if writes:
            model[2].weight.data.add_(1)
        return F.cross_entropy(model(x), y)

    train(*BATCH)
    before = model.state_dict()
    with pytest.raises(cs.errors.ReplicaLostError, match="SIGSEGV: something wrote in place to"):
        train(*BATCH, writes=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(*BATCH)
    assert difference(model, alone) > 0
