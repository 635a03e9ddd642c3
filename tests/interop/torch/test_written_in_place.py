"""torch writes in place, which it does without asking whether memory is read-only: to parameters and to batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.replicas import replica
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage.core.context import current_replica
from central_storage.errors import VariableWrittenError

pytestmark = pytest.mark.timeout(unit(300))  # three processes import torch
ROWS, COLUMNS = 300, 40


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: __import__("torch").get_num_threads())
        yield connected(strategy)


def local(strategy: cs.CentralStorageStrategy, value: Any) -> list[Any]:
    return [np.asarray(each).tolist() for each in strategy.experimental_local_results(value)]


def embedding(p: Any) -> None:
    """A forward pass that writes: the rows that are looked up are made shorter."""
    torch.nn.functional.embedding(torch.tensor([1, 2]), p, max_norm=0.1)


def by_out(p: Any) -> None:
    torch.add(p, 1, out=p)


def by_slice(p: Any) -> None:
    p[3:5] = 7


def by_foreach(p: Any) -> None:
    torch._foreach_mul_([p], 2)


def by_threads(p: Any) -> None:
    """By torch's own threads."""
    torch.set_num_threads(2)
    p.copy_(torch.randn_like(p))


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda p: p.add_(1),
    "clamp_": lambda p: p.clamp_(max=0.5),
    "data": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach().zero_(),
    "numpy": lambda p: p.numpy().fill(9),
    "init": lambda p: torch.nn.init.normal_(p),
    "embedding": embedding,
    "out": by_out,
    "slice": by_slice,
    "foreach": by_foreach,
    "threads": by_threads,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_parameter_that_torch_writes_is_named_and_the_next_step_works(
    two: cs.CentralStorageStrategy, write: Callable[[Any], Any]
) -> None:
    with two.scope():
        w = cs.Variable(np.full((ROWS, COLUMNS), 4, np.float32), name="weight")
        b = cs.Variable(np.full(COLUMNS, 4, np.float32), name="bias")
        optimizer = cs.optimizers.SGD(0.5)

    def step(written: bool) -> tuple[float, int]:
        p, q = torch.from_dlpack(w), torch.from_dlpack(b)
        if written and replica() == 1:
            with torch.no_grad():
                write(p)
        optimizer.apply_gradients([(np.ones_like(w), w), (np.ones_like(b), b)])
        return float(p.sum() + q.sum()), os.getpid()

    before = local(two, two.run(step, args=(False,))[1])
    with pytest.raises(VariableWrittenError, match=f"replica 1: something wrote in place to variable '{w.name}'"):
        two.run(step, args=(True,))
    sums, workers = two.run(step, args=(False,))
    assert local(two, sums) == [3 * (ROWS + 1) * COLUMNS] * 2  # one update, of 0.5 for each replica
    assert local(two, workers) == before
    assert (w.numpy() == 2).all()
    assert (b.numpy() == 2).all()


def test_training_with_a_step_that_wrote_ends_as_torch_does_without_it(two: cs.CentralStorageStrategy) -> None:
    random = np.random.default_rng(5)
    start = random.normal(size=(COLUMNS, ROWS)).astype(np.float32)
    batches = [random.normal(size=(8, ROWS)).astype(np.float32) for _ in range(10)]
    with two.scope():
        w = cs.Variable(start)
        optimizer = cs.optimizers.SGD(0.01)

    @cs.function
    def step(x: np.ndarray, written: bool) -> None:
        p = torch.from_dlpack(w).requires_grad_()
        loss = torch.nn.functional.linear(torch.from_dlpack(x), p).square().sum()
        loss.backward()
        if written:
            p.data.clamp_(-0.1, 0.1)
        optimizer.apply_gradients([(p.grad.numpy(), w)])

    alone = torch.tensor(start, requires_grad=True)
    for number, batch in enumerate(batches):
        (share,) = two.experimental_distribute_dataset([batch])
        if number in (3, 7):
            with pytest.raises(VariableWrittenError):
                two.run(step, args=(share, True))
            continue
        two.run(step, args=(share, False))
        (gradient,) = torch.autograd.grad(
            torch.nn.functional.linear(torch.from_numpy(batch), alone).square().sum(), alone
        )
        with torch.no_grad():
            alone -= 0.01 * gradient
    np.testing.assert_allclose(w.numpy(), alone.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 5000, 200_000])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_batch_may_be_changed_in_place_whatever_its_size(
    two: cs.CentralStorageStrategy, rows: int, kind: str
) -> None:
    x = np.ones((rows, 8), np.float32)

    def step(x: Any) -> tuple[float, float, Any]:
        torch.set_num_threads(2)  # which a large operation uses
        x = x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)
        before = float(x.sum())
        x.add_(1 + replica()).mul_(2)
        return before, float(x.sum()), x[:1]

    given = torch.from_numpy(x) if kind == "tensor" else x
    for _ in range(3):
        before, after, view = two.run(step, args=(given,))
        assert local(two, before) == [rows * 8] * 2
        assert local(two, after) == [rows * 8 * 4, rows * 8 * 6]
        assert local(two, view) == [[[4] * 8], [[6] * 8]]
        assert (x == 1).all()


def test_batches_of_a_data_set_may_be_changed_in_place(two: cs.CentralStorageStrategy) -> None:
    def step(x: np.ndarray) -> float:
        tensor = torch.from_dlpack(x)
        seen = float(tensor.max())
        tensor.zero_()
        return seen

    numbers = range(1, 15)
    batches = two.experimental_distribute_dataset([np.full((2, 20_001), number, np.float32) for number in numbers])
    assert [local(two, each) for each in two.run_steps(step, batches)] == [[number] * 2 for number in numbers]


def test_a_framework_that_sees_the_version_of_a_tensor_names_the_line(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.ones((ROWS, COLUMNS), np.float32), name="seen")
    number = w._cs_handle()[1]

    def step(deed: str) -> list[float]:
        backend = current_replica(two)
        assert backend is not None
        p = torch.from_dlpack(w)
        version = p._version
        p.add_(1)
        assert p._version != version
        if deed == "refuse":
            backend.refuse_written({number: "model.py:12 in forward"})
        wrong = float(p[0, 0])
        backend.restore([number])
        return [wrong, float(p[0, 0]), float(np.asarray(w)[0, 0])]

    assert local(two, two.run(step, args=("restore",))) == [[2, 1, 1]] * 2
    with pytest.raises(VariableWrittenError, match=rf"'{w.name}' \(model.py:12 in forward\)"):
        two.run(step, args=("refuse",))
    assert local(two, two.run(step, args=("restore",))) == [[2, 1, 1]] * 2


def test_a_tensor_that_is_held_through_an_update_keeps_its_bits_and_is_not_taken_for_a_write(
    two: cs.CentralStorageStrategy,
) -> None:
    with two.scope():
        w = cs.Variable(np.zeros((ROWS, COLUMNS), np.float32), aggregation=cs.VariableAggregation.SUM)

    def step() -> list[float]:
        old = torch.from_dlpack(w)
        first = float(old[0, 0])
        w.assign_add(np.ones((ROWS, COLUMNS), np.float32))
        new = torch.from_dlpack(w)
        return [first, float(old[0, 0]), float(new[0, 0])]

    for count in range(3):
        assert local(two, two.run(step)) == [[2 * count, 2 * count, 2 * count + 2]] * 2
