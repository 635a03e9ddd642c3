"""Habits of torch's users that trained wrong in silence before, or not at all."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference, train_alone
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))


def cross_entropy(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y)


def trained(strategy: cs.CentralStorageStrategy, module: nn.Module, loss_of: Any, batches: Any, **options: Any) -> Any:
    """The centralized module after these batches, that of torch alone, and the losses of both."""
    model, alone = centralized(strategy, module, **options)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(*batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, *batch)

    losses = [train(batch) for batch in batches]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches, loss_of)
    return model, alone, losses, theirs


BATCHES = [batch_of(seed, rows) for seed, rows in enumerate([6, 7, 6])]


def test_eval_and_train_in_the_script(two: cs.CentralStorageStrategy) -> None:
    """Of the whole module and of a part, at any time."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.Sequential(nn.Dropout(0.9)), nn.Linear(8, 3))
    model, alone = centralized(two, module)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.0)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    batch = BATCHES[0]
    plain = cross_entropy(alone.eval(), *batch).item()
    assert train(batch) != pytest.approx(plain, abs=1e-4)
    model.eval()
    assert train(batch) == pytest.approx(plain, abs=1e-6)
    model[2].train()
    assert train(batch) != pytest.approx(plain, abs=1e-4)
    model.eval()
    assert train(batch) == pytest.approx(plain, abs=1e-6)
    model.train()
    assert train(batch) != pytest.approx(plain, abs=1e-4)


def test_eval_in_the_function_ends_with_the_run(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.Linear(8, 3)))

    @cst.function(model)
    def look(x: torch.Tensor, y: torch.Tensor, evaluates: bool = False) -> torch.Tensor:
        if evaluates:
            model.eval()
        return cross_entropy(model, x, y)

    plain = cross_entropy(alone.eval(), *BATCHES[0]).item()
    assert look(BATCHES[0], evaluates=True) == pytest.approx(plain, abs=1e-6)
    assert look(BATCHES[0]) != pytest.approx(plain, abs=1e-4)


class Parts(nn.Module):
    """A part that is used, one that is not, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


def test_unused_frozen_and_unfrozen_parameters(two: cs.CentralStorageStrategy) -> None:
    """One without a gradient keeps its value and its state, also under weight decay."""
    model, alone = centralized(two, Parts())
    optimizer = cst.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    for round_ in range(3):
        for module in (model, alone):
            module.frozen.requires_grad_(round_ == 1)
            module.used.bias.requires_grad_(round_ != 1)
        for batch in BATCHES:
            train(batch)
        train_alone(alone, theirs, BATCHES, cross_entropy)
        assert difference(model, alone) < 1e-5
    assert torch.equal(model.state_dict()["unused.weight"], alone.unused.weight)


def test_hooks_of_parameters_and_modules(two: cs.CentralStorageStrategy) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    mask = torch.tensor([[1.0], [0.0], [1.0]])

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def add_hooks(model: Any) -> None:
        model[1].weight.register_hook(lambda gradient: gradient * mask)
        model[0].weight.register_post_accumulate_grad_hook(halve)
        model[0].register_forward_hook(lambda module, args, output: output * 2)
        model[1].register_full_backward_hook(lambda module, given, gradients: None)

    model, alone = centralized(two, module)
    add_hooks(model)
    add_hooks(alone)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    for batch in BATCHES:
        train(batch)
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), BATCHES, cross_entropy)
    assert difference(model, alone) < 1e-6


def test_lstm_and_checkpointing(two: cs.CentralStorageStrategy) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
            self.middle = nn.Linear(6, 150)
            self.out = nn.Linear(150, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.lstm(x.reshape(-1, 2, 4))[0][:, -1]
            return self.out(checkpoint(lambda h: torch.tanh(self.middle(h)), hidden, use_reentrant=False))

    torch.manual_seed(0)
    model, alone, losses, theirs = trained(two, Reads(), cross_entropy, BATCHES)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 1e-5


def test_autocast(two: cs.CentralStorageStrategy) -> None:
    def in_bfloat16(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(module(x).float(), y)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 3))
    model, alone, losses, theirs = trained(two, module, in_bfloat16, BATCHES)
    assert losses == pytest.approx(theirs, abs=1e-2)
    assert 0 < difference(model, alone) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_float32_in_the_server(two: cs.CentralStorageStrategy, dtype: torch.dtype) -> None:
    """Updates smaller than a step of the narrow dtype add up."""
    torch.manual_seed(0)
    model, alone = centralized(two, nn.Sequential(nn.Linear(8, 130), nn.Linear(130, 3)).to(dtype))
    optimizer = cst.optim.SGD(model.parameters(), lr=1e-3)
    master = alone.float()

    def loss_of(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x.to(dtype)).float(), y)

    def narrow(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cast = {name: p.to(dtype) for name, p in module.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(module, cast, (x.to(dtype),)).float(), y)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y)

    losses = [train(batch) for batch in BATCHES * 3]
    theirs = train_alone(master, torch.optim.SGD(master.parameters(), lr=1e-3), BATCHES * 3, narrow)
    assert losses == pytest.approx(theirs, rel=1e-2)
    for name, p in model.named_parameters():
        assert p.variable.dtype == "float32"
        assert model.state_dict()[name].dtype == dtype
        ours, expected = torch.from_numpy(p.variable.numpy()), master.get_parameter(name).detach()
        assert float((ours - expected).abs().max()) < 1e-4


def test_results_of_16_bits(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, nn.Linear(8, 3).to(torch.bfloat16))

    @cst.evaluate(model)
    def predict(x: torch.Tensor) -> Any:
        rows = model(x.bfloat16())
        return {"rows": rows, "mean": rows.mean()}

    found = predict(BATCHES[0][0])
    expected = alone(BATCHES[0][0].bfloat16())
    assert torch.equal(found["rows"], expected.float())
    assert found["mean"] == pytest.approx(expected.mean().item(), rel=1e-2)


class Experts(nn.Module):
    """Rows choose the part that computes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList([nn.Linear(8, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.experts[int(r)](row) for row, r in zip(x, route, strict=True)])


def test_routing(two: cs.CentralStorageStrategy) -> None:
    def loss_of(module: Any, x: torch.Tensor, route: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x, route), y)

    routes = [[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2]]
    batches = [
        (x, torch.tensor(route), y)
        for (x, y), route in zip((batch_of(seed, 6) for seed in range(3)), routes, strict=True)
    ]
    model, alone = centralized(two, Experts())
    refuses = cst.optim.SGD(model.parameters(), lr=0.1)
    agrees = cst.optim.AdamW(model.parameters(), lr=0.1, find_unused_parameters=True)
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.1)

    @cst.step(model, refuses)
    def refused(x: torch.Tensor, route: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, route, y)

    with pytest.raises(cs.errors.MergeMismatchError) as raised:
        refused(batches[0])
    assert "find_unused_parameters=True" in "".join(raised.value.__notes__)
    assert difference(model, alone) == 0

    @cst.step(model, agrees)
    def train(x: torch.Tensor, route: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, route, y)

    for _ in range(2):
        for batch in batches:
            train(batch)
        train_alone(alone, theirs, batches, loss_of)
    assert difference(model, alone) < 1e-5
    assert torch.equal(model.state_dict()["experts.3.weight"], alone.experts[3].weight)  # used by nobody


def losses_with_dropout(strategy: cs.CentralStorageStrategy, kills: bool) -> list[float]:
    """The losses of a training whose function reads torch's, Python's and NumPy's random numbers."""
    import numpy as np

    torch.manual_seed(0)
    model = cst.centralize(
        nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3)), strategy=strategy
    )
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, dies: bool = False) -> torch.Tensor:
        if dies and int(cs.get_replica_context().replica_id_in_sync_group) == 1:
            with open("/proc/self/stat") as file:  # the incarnation that is replaced has another start time
                if train_dies(file.read().split()[21]):
                    os.kill(os.getpid(), signal.SIGKILL)
        loss = cross_entropy(model, x + random.random() + np.random.random(), y)
        return loss

    import tempfile

    with tempfile.NamedTemporaryFile("w+") as note:
        name = note.name

        def train_dies(own: str) -> bool:
            with open(name, "r+") as file:
                if file.read():
                    return False
                file.write(own)
                return True

        strategy_steps = strategy.controller.steps()
        losses = [float(train(batch, dies=kills and number == 4)) for number, batch in enumerate(BATCHES * 3)]
        strategy.controller.set_steps(strategy_steps)
        if kills:
            note.seek(0)
            assert note.read()
    return [*losses, float(model.state_dict()["3.weight"].sum())]


def test_dropout_has_the_same_bits_in_each_training_and_after_a_death(two: cs.CentralStorageStrategy) -> None:
    first = losses_with_dropout(two, kills=False)
    assert losses_with_dropout(two, kills=False) == first
    assert losses_with_dropout(two, kills=True) == first


@pytest.mark.slow
def test_a_compiled_module(two: cs.CentralStorageStrategy) -> None:
    torch.manual_seed(0)
    model, alone = centralized(two, nn.Sequential(nn.Linear(8, 130), nn.Tanh(), nn.Linear(130, 3)))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model)

    @cst.step(compiled, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(compiled, x, y)

    losses = [train(batch) for batch in BATCHES * 2]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), BATCHES * 2, cross_entropy)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 1e-5
