"""``cst.step``: the mean over the rows of the global batch is trained, whatever the shares."""

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


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 130), nn.ReLU(), nn.Linear(130, 3))


def cross_entropy(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y)


def both(strategy: cs.CentralStorageStrategy, batches: list[Any], accumulate: int = 1) -> tuple[Any, Any, Any, Any]:
    """Modules and losses of both trainings."""
    model, alone = centralized(strategy, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer, accumulate=accumulate)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    losses = [train(batch) for batch in batches]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches, cross_entropy)
    return model, alone, losses, theirs


@pytest.mark.parametrize("accumulate", [1, 3])
def test_uneven_and_empty_shares_train_as_torch_alone(three: cs.CentralStorageStrategy, accumulate: int) -> None:
    batches = [batch_of(seed, rows) for seed, rows in enumerate([12, 7, 4, 1, 2, 12, 5])]
    model, alone, losses, theirs = both(three, batches, accumulate)
    assert losses == pytest.approx(theirs, abs=1e-6)
    assert difference(model, alone) < 1e-6


def test_a_loader_of_batches(two: cs.CentralStorageStrategy) -> None:
    x, y = batch_of(0, 21)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y)

    batches = cst.batches(two, loader)
    losses = [train(batch) for _ in range(3) for batch in batches]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [*loader] * 3, cross_entropy)
    assert losses == pytest.approx(theirs, abs=1e-6)
    assert difference(model, alone) < 1e-6


def test_each_row_counts_its_weight(two: cs.CentralStorageStrategy) -> None:
    """Sequences with different numbers of tokens: the mean over all tokens of the batch."""
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    x, _ = batch_of(0, 35)
    tokens = torch.randint(1, 9, (35,), generator=torch.Generator().manual_seed(1))

    def mean(module: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = module(x).square().sum(1)
        return (rows * tokens).sum() / tokens.sum()

    @cst.step(model, optimizer, accumulate=2)
    def train(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return mean(model, x, tokens)

    loader = [(x[first : first + 7], tokens[first : first + 7]) for first in range(0, 35, 7)]
    losses = [train(batch) for batch in cst.batches(two, loader, weight=lambda batch: batch[1])]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), loader, mean)
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert difference(model, alone) < 1e-6


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_share_whose_rows_count_nothing(two: cs.CentralStorageStrategy, accumulate: int, is_sparse: bool) -> None:
    """Its loss is NaN, as a mean over nothing, and so are its gradients; those of the whole batch are not."""
    model, alone = centralized(two, nn.Sequential(nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 3)))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(2)
    loader = [(torch.randint(0, 9, (4, 5), generator=random), torch.ones(4, 5)) for _ in range(4)]
    loader[0][1][2:] = 0
    loader[1][1][:3] = 0
    loader[3][1][2:] = 0

    def mean(module: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (module(x).square().sum(2) * mask).sum() / mask.sum()

    @cst.step(model, optimizer, accumulate=accumulate)
    def train(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mean(model, x, mask)

    @cst.function(model, optimizer)
    def body(x: torch.Tensor, mask: torch.Tensor) -> float:
        loss = mean(model, x, mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    batches = list(cst.batches(two, loader, weight=lambda batch: batch[1].sum(1)))
    losses = [*map(train, batches[:3]), body(batches[3])]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), loader, mean)
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert difference(model, alone) < 2e-6


def test_losses_that_are_no_mean_over_rows(two: cs.CentralStorageStrategy) -> None:
    """As the guide says it: a mean weighted by classes, a mean over tokens, and a sum."""
    model, alone = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.tensor([0.1, 1.0, 5.0])

    def loss_of(module: Any, x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "sum":
            return F.cross_entropy(module(x), y, reduction="sum")
        return F.cross_entropy(module(x), y, weight=weights if kind == "classes" else None, ignore_index=0)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, kind: str, rows: int = 0) -> torch.Tensor:
        return F.cross_entropy(model(x), y) * rows if kind == "sum" else loss_of(model, x, y, kind)

    x, y = batch_of(0, 7)
    losses = []
    for kind, weigh in {"classes": lambda b: weights[b[1]] * (b[1] != 0), "tokens": lambda b: b[1] != 0}.items():
        losses += [train(batch, kind=kind) for batch in cst.batches(two, [(x, y)], weight=weigh)]
    losses.append(train(x, y, kind="sum", rows=len(x)))
    theirs = [
        train_alone(
            alone, torch.optim.SGD(alone.parameters(), lr=0.1), [(x, y)], lambda *b, kind=kind: loss_of(*b, kind)
        )[0]
        for kind in ("classes", "tokens", "sum")
    ]
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert difference(model, alone) < 1e-6


def test_every_shape_of_a_batch(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.0)
    x, y = batch_of(0, 6)
    expected = F.cross_entropy(cst.pull(model)(x), y).item()

    @cst.step(model, optimizer)
    def of_parts(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * F.cross_entropy(model(x), y)

    @cst.step(model, optimizer)
    def of_one(batch: Any) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(model(x), y)

    @cst.step(model, optimizer)
    def of_nested(inputs: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs["x"]), y)

    losses = [
        of_parts((x, y)),
        of_parts([x, y]),
        of_parts(x, y),
        of_parts({"x": x, "y": y}),
        of_parts(x.numpy(), y),
        of_parts((x, y), scale=2.0) / 2,
        of_one((x, y)),
        of_one({"x": x, "y": y}),
        of_nested({"x": x}, y),
    ]
    assert losses == pytest.approx([expected] * len(losses), abs=1e-6)
    assert losses[0].item() == float(losses[0])  # as a tensor has it


def test_the_function_is_sent_once(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        train_calls.append(1)
        return cross_entropy(model, x, y) + len(train_calls)

    train_calls: list[int] = []
    batch = batch_of(0, 4)
    losses = [train(batch) for _ in range(3)]
    assert [round(float(loss)) for loss in losses] == [2, 3, 4]  # the list lives in the workers


def test_arguments_may_be_changed_in_place(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.0)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x[:, 0] = 0
        y.zero_()
        return F.cross_entropy(model(x), y)

    for rows in (4, 20_000):  # within a message, and in a mapping
        x, y = batch_of(0, rows)
        seen = x.clone()
        expected = F.cross_entropy(cst.pull(model)(torch.cat([torch.zeros(rows, 1), x[:, 1:] + 1], 1)), y * 0).item()
        assert [train(x, y) for _ in range(3)] == pytest.approx([expected] * 3, abs=1e-5)
        assert torch.equal(x, seen)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("rows", cs.errors.InvalidArgumentError, r"train must return one loss, the mean over its rows, not \[2, 3\]"),
        ("detached", cs.errors.InvalidArgumentError, "depends on no parameter that needs a gradient"),
        ("number", TypeError, "train must return the loss as a tensor, not float"),
        ("nan", FloatingPointError, r"the loss of train is NaN in call \d+ in replica \d.*allow_nan=True"),
    ],
)
def test_what_is_no_loss_is_refused(
    two: cs.CentralStorageStrategy, kind: str, error: type[Exception], message: str
) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, kind: str = "") -> Any:
        rows = model(x)
        given = {"rows": rows, "detached": rows.mean().detach(), "number": 0.5, "nan": rows.mean() * float("nan")}
        return given.get(kind, rows.square().mean())

    before = model.state_dict()
    with pytest.raises(error, match=message):
        train(torch.ones(4, 8), kind=kind)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert train(torch.ones(4, 8)) > 0


def test_a_loss_that_is_nan_can_be_let_pass(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer, allow_nan=True)
    def train(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() * float("nan")

    loss = train(torch.ones(4, 8))
    assert loss != loss
    assert model.state_dict()["bias"].isnan().all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(4, 8), torch.ones(5)), r"the same number of rows, but have \[4, 5\]"),
        ((torch.ones(0, 8),), "a batch has no rows"),
        ((torch.ones(4, 8), torch.tensor(1.0)), "holds a scalar, which has no rows"),
        ((), "holds no tensor"),
        ((torch.ones(4, 8).to(torch.float8_e5m2),), "Tensor"),
    ],
)
def test_what_is_no_batch_is_refused(two: cs.CentralStorageStrategy, batch: Any, message: str) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))

    @cst.evaluate(model)
    def rows(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return model(x)

    with pytest.raises(cs.errors.InvalidArgumentError, match=message):
        rows(batch)
    assert rows(torch.ones(3, 8)).shape == (3, 3)


def test_what_is_no_step_is_refused(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, nn.Linear(8, 3))
    other, _ = centralized(two, nn.Linear(8, 3))
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"call cst.centralize\(module\) first"):
        cst.step(alone)
    with pytest.raises(cs.errors.InvalidArgumentError, match="which is not a parameter of the module"):
        cst.step(model, cst.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"use the optimizer of the same name in cst.optim"):
        cst.step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(cs.errors.InvalidArgumentError, match="step needs at least one optimizer"):
        cst.step(model)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module"):
        cst.step(model.parameters())  # type: ignore[arg-type]
    for wrong in (0, True, 1.5):
        with pytest.raises(cs.errors.InvalidArgumentError, match="accumulate must be an int of at least 1"):
            cst.step(model, accumulate=wrong)  # type: ignore[arg-type]


def test_a_step_is_for_the_script(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))

    def call() -> str:
        try:
            cst.centralize(torch.nn.Linear(1, 1))
        except cs.errors.ContextError as error:
            return str(error)
        return ""

    assert "cannot be centralized in a replica" in two.run(call)
    with pytest.raises(cs.errors.ContextError, match=r"call the copy that cst.pull\(module\) returns"):
        model(torch.ones(1, 8))
