"""``cst.function`` and ``cst.evaluate``: a loop's body unchanged, and results in the order of the rows."""

from __future__ import annotations

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

BATCHES = [batch_of(seed, rows) for seed, rows in enumerate([6, 7, 1])]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 130), nn.ReLU(), nn.Linear(130, 3))


def body_of(module: Any, optimizer: Any, clip: Any = None, set_to_none: bool = True) -> Any:
    """The body of a loop: for both trainings the same lines."""

    def body(x: torch.Tensor, y: torch.Tensor) -> float:
        module.zero_grad(set_to_none=set_to_none)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        if clip is not None:
            clip(module.parameters(), 0.05)
        optimizer.step()
        return loss.item()

    return body


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_body_trains_as_torch_alone(three: cs.CentralStorageStrategy, clips: bool, set_to_none: bool) -> None:
    model, alone = centralized(three, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
    clip, torchs = (cst.clip_grad_norm_, nn.utils.clip_grad_norm_) if clips else (None, None)
    train = cst.function(model, optimizer)(body_of(model, optimizer, clip, set_to_none))
    theirs = body_of(alone, torch.optim.SGD(alone.parameters(), lr=0.5), torchs, set_to_none)
    assert [train(batch) for batch in BATCHES] == pytest.approx([theirs(*batch) for batch in BATCHES], abs=1e-6)
    assert difference(model, alone) < 1e-6


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.makes = nn.Linear(8, 150)
        self.judges = nn.Sequential(nn.Linear(150, 20), nn.Tanh(), nn.Linear(20, 1))


def adversarial(pair: Any, first: Any, second: Any) -> Any:
    """Two optimizers that step in turn: the second one's gradients depend on the first one's update."""

    def body(x: torch.Tensor) -> Any:
        first.zero_grad()
        made = pair.makes(x)
        judged = pair.judges(made.detach()).square().mean()
        judged.backward()
        first.step()
        second.zero_grad()
        fooled = (pair.judges(made) - 1).square().mean()
        fooled.backward()
        second.step()
        return {"judged": judged, "fooled": fooled.item(), "rows": made[:, :2], "name": "pair"}

    return body


def test_two_optimizers_step_in_turn(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, Pair())
    parts = [
        [optim.SGD(part.parameters(), lr=0.2) for part in (module.judges, module.makes)]
        for optim, module in ((cst.optim, model), (torch.optim, alone))
    ]
    train = cst.function(model, *parts[0])(adversarial(model, *parts[0]))
    theirs = adversarial(alone, *parts[1])
    for x, _ in BATCHES:
        found, expected = train(x), theirs(x)
        assert found["judged"] == pytest.approx(expected["judged"].item(), abs=1e-6)
        assert found["fooled"] == pytest.approx(expected["fooled"], abs=1e-6)
        assert torch.allclose(found["rows"], expected["rows"], atol=1e-6)
        assert found["name"] == "pair"
    assert difference(model, alone) < 1e-6


def test_one_norm_over_several_optimizers(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net())

    def body_of(module: Any, optimizers: Any, clip: Any, clipped: Any) -> Any:
        def body(x: torch.Tensor, y: torch.Tensor) -> None:
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
            clip(clipped, 0.02)
            for optimizer in optimizers:
                optimizer.step()

        return body

    ours = [cst.optim.SGD(model[:2].parameters(), lr=0.5), cst.optim.SGD(model[2:].parameters(), lr=0.5)]
    theirs = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (alone[:2], alone[2:])]
    train = cst.function(model, *ours)(body_of(model, ours, cst.clip_grad_norm_, ours))
    expected = body_of(alone, theirs, nn.utils.clip_grad_norm_, list(alone.parameters()))
    for batch in BATCHES:
        assert train(batch) is None
        expected(*batch)
    assert difference(model, alone) < 1e-6

    half = cst.function(model, *ours)(body_of(model, ours, cst.clip_grad_norm_, list(model.parameters())[:1]))
    with pytest.raises(cs.errors.InvalidArgumentError, match="clip whole optimizers"):
        half(BATCHES[0])
    one = cst.function(model, *ours)(body_of(model, ours[:1], cst.clip_grad_norm_, ours))
    with pytest.raises(cs.errors.InvalidArgumentError, match="clip whole optimizers"):
        one(BATCHES[0])
    assert difference(model, alone) < 1e-6


def test_several_passes_before_a_step_and_none(two: cs.CentralStorageStrategy) -> None:
    """Gradients add up until the step; a run without a step changes nothing."""
    model, alone = centralized(two, net())
    ours, theirs = cst.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD(alone.parameters(), lr=0.5)

    def body_of(module: Any, optimizer: Any) -> Any:
        def body(x: torch.Tensor, y: torch.Tensor, steps: bool = True) -> None:
            module.zero_grad()
            (0.5 * F.cross_entropy(module(x), y)).backward()
            (0.5 * F.cross_entropy(module(x * 2), y)).backward()
            if steps:
                optimizer.step()

        return body

    train, expected = cst.function(model, ours)(body_of(model, ours)), body_of(alone, theirs)
    for batch in BATCHES:
        train(batch, steps=False)
        train(batch)
        expected(*batch)
    assert difference(model, alone) < 1e-6


def test_a_gradient_penalty(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net())
    ours, theirs = cst.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)

    def body_of(module: Any, optimizer: Any) -> Any:
        def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            module.zero_grad()
            x.requires_grad_(True)
            loss = F.cross_entropy(module(x), y)
            (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
            (loss + slope.square().sum(1).mean()).backward()
            optimizer.step()
            return loss.detach()

        return body

    train, expected = cst.function(model, ours)(body_of(model, ours)), body_of(alone, theirs)
    for x, y in BATCHES:
        assert train(x, y) == pytest.approx(expected(x.clone(), y).item(), abs=1e-6)
    assert difference(model, alone) < 1e-6


def test_evaluate_gathers_rows_in_order(three: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(three, nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.9)))

    @cst.evaluate(model)
    def predict(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = model(x)
        assert not rows.requires_grad
        assert not model.training
        return rows, {"right": (y == 1).float().mean(), "labels": y, "none": None}

    alone.eval()
    before = model.state_dict()
    for x, y in [*BATCHES, batch_of(9, 2)]:
        rows, rest = predict(x, y)
        assert torch.allclose(rows, alone(x), atol=1e-6)
        assert torch.equal(rest["labels"], y)
        assert rest["right"] == pytest.approx((y == 1).float().mean().item())
        assert rest["none"] is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_different_texts_are_no_result(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))

    @cst.evaluate(model)
    def name(x: torch.Tensor) -> str:
        return f"replica {cs.get_replica_context().replica_id_in_sync_group}"

    with pytest.raises(cs.errors.InvalidArgumentError, match="different values that are no numbers"):
        name(torch.ones(2, 8))


def test_clipping_is_for_a_function(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    with pytest.raises(cs.errors.ContextError, match="must be called in a function that cst.function has decorated"):
        cst.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(cs.errors.InvalidArgumentError, match="max_norm must be a number of at least 0"):
        cst.clip_grad_norm_(model.parameters(), float("nan"))
