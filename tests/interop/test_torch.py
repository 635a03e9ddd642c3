"""torch in a replica function and torch's data sets: the same numbers as torch alone, and no copy either way."""

from __future__ import annotations

import re
import runpy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.processes import ROOT, run
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage.core.context import current_replica

EXAMPLE = "examples/torch_step.py"
pytestmark = pytest.mark.timeout(unit(300))  # three processes import torch


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: __import__("torch").get_num_threads())  # imported, and every socket is connected
        yield strategy


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the example defines."""
    return runpy.run_path(str(ROOT / EXAMPLE))


def test_the_example_trains_as_torch_alone() -> None:
    lines = run(sys.executable, "-W", "error", EXAMPLE, timeout=unit(200)).ok().lines
    losses = [float(found[1]) for line in lines if (found := re.fullmatch(r"epoch \d  loss (\d\.\d{4})", line))]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 4
    difference = re.fullmatch(r"largest difference from torch alone: (\S+)", lines[-1])
    assert difference is not None
    assert float(difference[1]) < 1e-4


class Net(torch.nn.Module):
    """A convolution, a normalisation, an embedding, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1)
        self.norm = torch.nn.LayerNorm(8)
        self.table = torch.nn.Embedding(5, 8)
        self.out = torch.nn.Linear(8, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Any, ids: Any) -> Any:
        hidden = torch.tanh(self.norm(self.conv(x[:, None]).mean(dim=1) + self.table(ids)))
        return self.out(hidden)


def rows_of(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 8)).astype(np.float32), random.integers(0, 5, rows), random.integers(0, 5, rows)


@pytest.mark.parametrize("rows", [16, 7, 1])  # an even split, an uneven one, an empty share
def test_any_module_trains_as_torch_alone(two: cs.CentralStorageStrategy, example: dict[str, Any], rows: int) -> None:
    centralize, bind, load = example["centralize"], example["bind"], example["load"]
    torch.manual_seed(3)
    module, alone = Net(), Net()
    alone.load_state_dict(module.state_dict())
    with two.scope():
        variables = centralize(module)
        optimizer = cs.optimizers.SGD(learning_rate=0.1, momentum=0.9)

    @cs.function
    def step(batch: tuple[np.ndarray, ...]) -> Any:
        x, ids, y = map(torch.from_dlpack, batch)
        gradients = bind(module, variables)
        loss = torch.nn.functional.cross_entropy(module(x, ids), y, reduction="sum") / rows
        loss.backward()
        optimizer.apply_gradients(zip(gradients, variables.values(), strict=True))
        return loss.detach()

    torch_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number in range(12):
        batch = rows_of(number, rows)
        (share,) = two.experimental_distribute_dataset([batch])
        loss = two.reduce("SUM", two.run(step, args=(share,)), axis=None)
        torch_optimizer.zero_grad()
        x, ids, y = map(torch.from_numpy, batch)
        expected = torch.nn.functional.cross_entropy(alone(x, ids), y)
        expected.backward()
        torch_optimizer.step()
        assert loss == pytest.approx(expected.item(), abs=1e-4)
    load(module, variables)
    trained = module.state_dict()
    for name, value in alone.state_dict().items():
        np.testing.assert_allclose(trained[name], value, atol=1e-4, err_msg=name)


def test_nothing_is_copied(two: cs.CentralStorageStrategy, example: dict[str, Any]) -> None:
    """The parameters are the server's memory, the gradients the buffers, before and after the pass and at the apply."""
    centralize, bind = example["centralize"], example["bind"]
    module = torch.nn.Linear(300, 100)
    with two.scope():
        variables = centralize(module)
        optimizer = cs.optimizers.SGD(learning_rate=0.1)

    def step(x: np.ndarray) -> dict[str, Any]:
        from cs_worker.execution.gradients import GradientBuffers

        def refuse(*_: Any) -> None:
            raise AssertionError("a gradient was copied")

        kept, GradientBuffers._bring = GradientBuffers._bring, refuse
        try:
            gradients = bind(module, variables)
            module(torch.from_dlpack(x)).sum().backward()
            seen = {}
            for (name, variable), buffer in zip(variables.items(), gradients, strict=True):
                parameter = module.get_parameter(name)
                seen[name] = (
                    parameter.data_ptr() == np.asarray(variable).__array_interface__["data"][0],
                    parameter.grad.data_ptr() == buffer.__array_interface__["data"][0],
                    not np.asarray(variable).flags.writeable,
                    bool((buffer != 0).any()),
                )
            optimizer.apply_gradients(zip(gradients, variables.values(), strict=True))
        finally:
            GradientBuffers._bring = kept
        return seen

    before = {name: variable.numpy() for name, variable in variables.items()}
    for _ in range(3):  # both sets of buffers, and the first again
        result = two.run(step, args=(np.ones((4, 300), np.float32),))
        assert result == dict.fromkeys(variables, (True, True, True, True))
    assert all((variables[name].numpy() != before[name]).all() for name in before)


def test_the_module_is_sent_without_its_memory(example: dict[str, Any]) -> None:
    from central_storage.pickling.pickler import dump_arguments

    module = torch.nn.Linear(2000, 1000)
    variables = example["centralize"](module)
    assert {name: variable.shape for name, variable in variables.items()} == {"weight": (1000, 2000), "bias": (1000,)}

    def refuse(_: Any) -> Any:
        raise AssertionError

    assert len(dump_arguments((module,), {}, refuse, refuse)[0]) < 10_000


def test_tensors_as_arguments_and_results(two: cs.CentralStorageStrategy) -> None:
    def twice(x: Any) -> dict[str, Any]:
        assert isinstance(x, torch.Tensor)
        return {"twice": x * 2, "grad": x.clone().requires_grad_() * 1}

    for x in (torch.arange(3.0), torch.ones(40_000)):
        result = two.run(twice, args=(x,))
        for value in two.experimental_local_results(result["twice"]):
            assert isinstance(value, np.ndarray)
            assert value.tolist() == (x * 2).tolist()
        assert result["grad"].values[0].tolist() == x.tolist()


class Squares(torch.utils.data.Dataset):  # type: ignore[misc]
    """Row n is n and n squared."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return torch.full((2,), float(row)), row**2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(two: cs.CentralStorageStrategy, workers: int) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    distributed = two.experimental_distribute_dataset(loader)
    assert distributed.cardinality == 3
    assert distributed.element_spec[1].values[0].dtype == np.int64

    def look(batch: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        x, y = batch
        return x[:, 0] * 1, y * 1

    for _ in range(2):
        seen = [two.run(look, args=(batch,)) for batch in distributed]
        rows = [[share.tolist() for share in x.values] for x, _ in seen]
        assert rows == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
        assert [share.tolist() for share in seen[2][1].values] == [[64], [81]]


def test_a_data_loader_left_half_way(two: cs.CentralStorageStrategy) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    for number, _ in enumerate(two.experimental_distribute_dataset(loader)):
        if number == 2:
            break
    assert [thread.name for thread in threading.enumerate() if thread.name == "cs-read-ahead"] == []


def test_a_data_loader_that_fails(two: cs.CentralStorageStrategy) -> None:
    class Broken(Squares):
        def __getitem__(self, row: int) -> tuple[Any, int]:
            if row == 5:
                raise KeyError("row 5")
            return super().__getitem__(row)

    loader = torch.utils.data.DataLoader(Broken(), batch_size=2)
    iterator = iter(two.experimental_distribute_dataset(loader))
    next(iterator), next(iterator)
    with pytest.raises(KeyError, match="row 5"):
        next(iterator)


@pytest.mark.parametrize("make", [lambda: torch.ones(4, dtype=torch.bfloat16), lambda: torch.ones(4).to_sparse()])
def test_tensors_that_no_array_can_hold(make: Any) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="Tensor"):
        next(iter(cs.get_strategy().experimental_distribute_dataset([make()])))


@pytest.fixture(scope="module")
def mortal() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of one replica whose workers may die as often as a test likes."""
    with cs.CentralStorageStrategy(["cpu:0"], max_restarts=1000) as strategy:
        yield connected(strategy)


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_write_to_a_protected_variable_is_named_as_the_cause(mortal: cs.CentralStorageStrategy, size: int) -> None:
    with mortal.scope():
        weights = cs.Variable(np.zeros(size, np.float32), name="weights")
    number = weights._cs_handle()[1]

    def step() -> None:
        import torch

        backend = current_replica(mortal)
        assert backend is not None
        backend.protect([number])
        torch.set_num_threads(4)  # which a large operation uses
        torch.from_dlpack(weights).add_(1)

    named = rf"variable 'weights\w*' \(float32\[{size}\]\)"
    with pytest.raises(cs.errors.ReplicaLostError, match=f"SIGSEGV: something wrote in place to {named}.*clone"):
        mortal.run(step)
    assert not weights.numpy().any()
    assert mortal.run(lambda: 5) == 5


def test_a_tensor_over_a_variable_keeps_its_value_through_updates(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.ones((300, 100), np.float32))
        optimizer = cs.optimizers.SGD(learning_rate=1.0)

    def step() -> float:
        old = torch.from_dlpack(w)
        parts = [old[3:, 1], old.T, torch.as_tensor(np.asarray(w)), torch.from_numpy(w[2:5])]
        seen = [part.clone() for part in (old, *parts)]
        optimizer.apply_gradients([(np.full(w.shape, -1, np.float32), w)])
        new = torch.from_dlpack(w)
        optimizer.apply_gradients([(np.full(w.shape, -1, np.float32), w)])
        newest = torch.from_dlpack(w)
        assert all(torch.equal(part, before) for part, before in zip((old, *parts), seen, strict=True))
        assert float((newest - new).min()) == float((new - old).max()) == 2
        return float(old[0, 0])

    assert two.experimental_local_results(two.run(step)) == (1.0, 1.0)
    assert two.experimental_local_results(two.run(step)) == (5.0, 5.0)
