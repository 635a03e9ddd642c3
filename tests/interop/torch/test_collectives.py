"""Sums and gathers with gradients, and BatchNorm over the batch: as one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference, train_alone
from torch import nn
from torch.nn import functional as F  # noqa: N812

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))

BATCHES = [batch_of(seed, rows) for seed, rows in enumerate([12, 7, 4, 2])]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 6))


def contrastive(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each row against the rows of the whole batch."""
    own = F.normalize(module(x), dim=1)
    every, labels = cst.all_gather(own), cst.all_gather(y)
    likeness = own @ every.T * 3
    return (likeness.exp() * (y[:, None] != labels)).sum(1).log1p().mean()


def centred(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The rows without their mean over the batch."""
    rows = module(x)
    count = cst.all_reduce(torch.tensor(float(len(rows))))
    mean = cst.all_reduce(rows.sum(0)) / count
    return F.cross_entropy(rows - mean, y)


@pytest.mark.parametrize("loss_of", [contrastive, centred])
@pytest.mark.parametrize("in_body", [False, True])
def test_gradients_cross_replicas(three: cs.CentralStorageStrategy, loss_of: Any, in_body: bool) -> None:
    """Also where shares differ in rows, and some have none."""
    model, alone = centralized(three, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y)

    @cst.function(model, optimizer)
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [(body if in_body else train)(batch) for batch in BATCHES]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), BATCHES, loss_of)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 1e-5


def test_the_mean_is_that_of_replicas_with_rows(three: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(three, nn.Linear(8, 3))

    @cst.evaluate(model)
    def means(x: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), dtype=torch.float64)
        return torch.stack([cst.all_reduce(one, "mean"), cst.all_reduce(one)]).expand(len(x), 2)

    assert means(torch.ones(6, 1)).tolist() == [[1, 3]] * 6
    assert means(torch.ones(4, 1)).tolist() == [[1, 2]] * 4


def test_outside_of_a_replica_they_change_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    assert cst.all_reduce(x) is x
    assert cst.all_gather(x) is x
    with pytest.raises(cs.errors.InvalidArgumentError, match="op must be 'sum' or 'mean', not 'max'"):
        cst.all_reduce(x, "max")  # type: ignore[arg-type]
    with pytest.raises(cs.errors.InvalidArgumentError, match="dim must be an axis of the tensor, which has 1, not 1"):
        cst.all_gather(x, 1)


def convolutional() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 6),
        nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3),
    )  # fmt: skip


def of_signals(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x[:, None]), y)


@pytest.mark.parametrize("by_factory", [False, True])
def test_synchronized_batchnorm_is_that_of_one_process(three: cs.CentralStorageStrategy, by_factory: bool) -> None:
    alone = convolutional()
    with three.scope():
        model = cst.centralize(convolutional if by_factory else convolutional(), sync_batchnorm=True)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return of_signals(model, x, y)

    losses = [train(batch) for batch in BATCHES * 2]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), BATCHES * 2, of_signals)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 2e-5

    @cst.evaluate(model)
    def predict(x: torch.Tensor) -> torch.Tensor:
        return model(x[:, None])

    x, _ = BATCHES[1]
    assert torch.allclose(predict(x), alone.eval()(x[:, None]), atol=1e-5)
    assert torch.allclose(cst.pull(model).eval()(x[:, None]), alone(x[:, None]), atol=1e-5)


def test_one_batchnorm_layer_with_two_names(two: cs.CentralStorageStrategy) -> None:
    def make() -> nn.Module:
        torch.manual_seed(9)
        norm = nn.BatchNorm1d(8)
        return nn.Sequential(norm, nn.Linear(8, 8), norm, nn.Linear(8, 3))

    alone = make()
    with two.scope():
        model = cst.centralize(make(), sync_batchnorm=True)
    assert model[0] is model[2]
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    losses = [train(batch) for batch in BATCHES[1:]]
    theirs = train_alone(
        alone,
        torch.optim.SGD(alone.parameters(), lr=0.1),
        BATCHES[1:],
        lambda module, x, y: F.cross_entropy(module(x), y),
    )
    assert losses == pytest.approx(theirs, abs=1e-6)
    assert difference(model, alone) < 1e-5


def test_synchronized_batchnorm_needs_more_than_one_value(three: cs.CentralStorageStrategy) -> None:
    """As torch's does."""
    with three.scope():
        model = cst.centralize(convolutional(), sync_batchnorm=True)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return of_signals(model, x, y)

    with pytest.raises(ValueError, match="more than one value for each channel"):
        train(*batch_of(0, 1))


def normalizing() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize("rule", ["first", "mean", "local"])
def test_batchnorm_sees_shares_as_with_ddp(two: cs.CentralStorageStrategy, rule: Any) -> None:
    """Each replica normalizes by its own share. Their statistics become the central ones by the rule."""
    model, _ = centralized(two, normalizing(), buffers=rule)
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    halves = [normalizing(), normalizing()]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    batches = [batch_of(seed, 8) for seed in range(3)]
    for x, y in batches:
        train(x, y)
        for half, one in zip(halves, (slice(0, 4), slice(4, 8)), strict=True):
            half.zero_grad()
            (0.5 * F.cross_entropy(half(x[one]), y[one])).backward()
        for p, q in zip(halves[0].parameters(), halves[1].parameters(), strict=True):
            p.grad = q.grad = p.grad + q.grad  # type: ignore[operator]
        for each in optimizers:
            each.step()
        first, second = (half[1] for half in halves)
        for name in ("running_mean", "running_var"):
            mean = (getattr(first, name) + getattr(second, name)) / 2
            if rule == "mean":
                getattr(first, name).copy_(mean)
            if rule != "local":
                getattr(second, name).copy_(getattr(first, name))
    assert difference(model, halves[0]) < 1e-5
    assert model.state_dict()["1.num_batches_tracked"].item() == 3
    if rule == "local":
        assert (2, 12) in [variable.shape for variable in two.variables]  # a row for each replica


def test_buffers_of_every_kind(two: cs.CentralStorageStrategy) -> None:
    """Constants with infinities stay as they are, whatever the rule; large ones, flags and 16 bits too."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)
            self.register_buffer("mask", torch.full((200, 200), float("-inf")).triu(1))
            self.register_buffer("small", torch.tensor([float("inf"), float("nan"), 0.1]))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("narrow", torch.tensor([0.1, 0.2], dtype=torch.bfloat16))
            self.register_buffer("count", torch.zeros((), dtype=torch.int32))
            self.register_buffer("nothing", None)
            self.register_buffer("again", self.count)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.again is not None
            self.count += 1
            assert int(self.again) == int(self.count)
            self.flags[1] = True
            return self.line(x)

    for rule in ("first", "mean", "local"):
        with two.scope():
            model = cst.centralize(Holds(), buffers=rule)  # type: ignore[call-overload]
        optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

        @cst.step(model, optimizer)
        def train(x: torch.Tensor, model: Any = model) -> torch.Tensor:
            return model(x).mean()

        before = Holds().state_dict()
        for _ in range(3):
            train(torch.ones(4, 2))
        after = model.state_dict()
        for name in ("mask", "small", "narrow"):
            assert torch.equal(after[name].nan_to_num(7), before[name].nan_to_num(7)), (rule, name)
        assert after["flags"].tolist() == [True, True]
        assert (int(after["count"]), int(after["again"])) == (3, 3)
        assert model.nothing is None


def test_a_buffer_of_another_shape_is_named(two: cs.CentralStorageStrategy) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x[:1, 0]])
            return self.line(x)

    model, _ = centralized(two, Grows())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    with pytest.raises(cs.errors.InvalidArgumentError, match=r"buffer seen was torch.float32 \[1\] when .* \[2\] now"):
        train(torch.ones(4, 2))
