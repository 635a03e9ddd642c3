"""Habits of torch's users that the server cannot follow, or could only follow wrong: each is an error that says what to
do instead, changes nothing, and lets the next step work. What follows the script is beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.harness.services import connected
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference, train_alone
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))


class Net(nn.Module):
    """Attributes and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(6, 3)
        self.tau = 1.0
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.body(x)))) * self.scale / self.tau


def cross_entropy(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y)


BATCHES = [batch_of(seed, rows) for seed, rows in enumerate([6, 7, 6])]


class Training:
    """A module, its optimizer, a step, and the same with torch alone."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        torch.manual_seed(0)
        model, self.alone = centralized(strategy, Net(), sync_batchnorm=True)
        self.model = model
        self.optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
        self.torch_optimizer = torch.optim.SGD(self.alone.parameters(), lr=0.1)

        @cst.step(model, self.optimizer)
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model, x, y)

        self.train = train

    def check(self) -> None:
        """Both train to the same numbers."""
        losses = [self.train(batch) for batch in BATCHES]
        assert losses == pytest.approx(train_alone(self.alone, self.torch_optimizer, BATCHES, cross_entropy), abs=1e-6)
        assert difference(self.model, self.alone) < 1e-6


@pytest.fixture(scope="module")
def one() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield connected(strategy)


@pytest.fixture
def training(two: cs.CentralStorageStrategy) -> Iterator[Training]:
    return Training(two)


def in_a_step(body: Callable[..., Any]) -> Callable[[Training], Any]:
    def attempt(t: Training) -> Any:
        return cst.step(t.model, t.optimizer)(lambda x, y: body(t.model, t.optimizer, x, y))(BATCHES[0])

    return attempt


def in_a_function(body: Callable[..., Any]) -> Callable[[Training], Any]:
    def attempt(t: Training) -> Any:
        return cst.function(t.model, t.optimizer)(lambda x, y: body(t.model, t.optimizer, x, y))(BATCHES[0])

    return attempt


def computes_itself(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model, x, y)
    loss.backward(retain_graph=True)
    return loss


def steps_itself(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model, x, y)
    loss.backward(retain_graph=True)
    optimizer.step()
    return loss


def is_complex(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x, y) * 1j


def rebinds(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.head.weight.data = model.head.weight.data * 0.5
    return cross_entropy(model, x, y)


def clips_by_norm(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    cross_entropy(model, x, y).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clips_by_value(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    cross_entropy(model, x, y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()


def steps_twice(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.step()  # nothing to do, as in torch
    cross_entropy(model, x, y).backward()
    optimizer.step()
    optimizer.step()


def computes_in_its_second_part(t: Training) -> Any:
    seen: list[int] = []

    @cst.step(t.model, t.optimizer, accumulate=2)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        loss = cross_entropy(t.model, x, y)
        if len(seen) == 2:
            loss.backward(retain_graph=True)
        return loss

    return train(BATCHES[0])


def computes_without_values(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        (model.head.weight.square().sum() * x.mean()).backward()
        optimizer.step()


def writes_after_the_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    cross_entropy(model, x, y).backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def rebinds_after_the_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    cross_entropy(model, x, y).backward()
    optimizer.step()
    model.head.weight.data = torch.zeros(3, 6)


def rebinds_between_steps(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    rebinds_after_the_step(model, optimizer, x, y)
    model(x)


def under_autocast(t: Training) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        t.train(BATCHES[0])


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (in_a_step(computes_itself), cs.errors.ContextError, r"called backward\(\), which cst.step does"),
        (computes_in_its_second_part, cs.errors.ContextError, r"called backward\(\), which cst.step does"),
        (in_a_step(steps_itself), cs.errors.ContextError, r"called optimizer.step\(\), which cst.step does"),
        (in_a_step(is_complex), TypeError, "must return a real loss, not one of torch.complex64"),
        (in_a_step(rebinds), cs.errors.VariableWrittenError, "head.weight"),
        (in_a_function(clips_by_norm), cs.errors.ContextError, "use cst.clip_grad_norm_ in .* max_norm"),
        (in_a_function(clips_by_value), cs.errors.ContextError, "max_value of the optimizer"),
        (lambda t: clip_grad_norm_(t.model.parameters(), 1.0), cs.errors.ContextError, "use cst.clip_grad_norm_"),
        (
            in_a_function(computes_without_values),
            cs.errors.ContextError,
            r"head.weight\S* has no value since an earlier",
        ),
        (in_a_function(steps_twice), cs.errors.ContextError, "an earlier step has taken them"),
        (in_a_function(writes_after_the_step), cs.errors.ContextError, r"parameter.variable.assign\(value\)"),
        (in_a_function(rebinds_after_the_step), cs.errors.VariableWrittenError, "head.weight"),
        (in_a_function(rebinds_between_steps), cs.errors.VariableWrittenError, "head.weight"),
        (under_autocast, cs.errors.ContextError, "autocast is enabled in the script"),
    ],
)
def test_what_would_be_wrong_is_refused_and_changes_nothing(
    training: Training, attempt: Callable[[Training], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attempt(training)
    training.check()


def test_a_table_has_no_dense_gradient(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Embedding(9, 4, sparse=True))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() + model.weight.square().sum()

    with pytest.raises(cs.errors.InvalidArgumentError, match=r"has a dense gradient.*sparse=False"):
        train(torch.arange(4))


def test_torch_may_bound_the_gradients_of_an_only_replica(one: cs.CentralStorageStrategy) -> None:
    """Its share is the whole batch."""
    model, alone = centralized(one, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        clips_by_norm(model, optimizer, x, y)

    train(BATCHES[0])
    clips_by_norm(alone, torch.optim.SGD(alone.parameters(), lr=0.1), *BATCHES[0])
    assert difference(model, alone) < 1e-7


def test_each_parameter_has_one_optimizer_in_a_step(training: Training) -> None:
    model = training.model
    again = cst.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"parameter head.weight\S* is in two optimizers"):
        cst.step(model, training.optimizer, again)
    with pytest.raises(cs.errors.InvalidArgumentError, match="an optimizer was given twice"):
        cst.function(model, again, again)
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(cs.errors.InvalidArgumentError, match="SGD group 0 has a parameter twice"),
    ):
        cst.optim.SGD([model.head.weight, model.head.weight], lr=0.1)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_in_the_function_of_a_step_drops_nothing(two: cs.CentralStorageStrategy, set_to_none: bool) -> None:
    """Also where a share is computed in parts."""
    model, alone = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer, accumulate=2)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none)
        model.zero_grad(set_to_none)
        return cross_entropy(model, x, y)

    losses = [train(batch) for batch in BATCHES]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), BATCHES, cross_entropy)
    assert losses == pytest.approx(theirs, abs=1e-6)
    assert difference(model, alone) < 1e-6


def test_what_a_function_does_to_the_grad_mode_ends_with_it(training: Training) -> None:
    def turned_off(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return cross_entropy(model, x, y)

    with pytest.raises(cs.errors.InvalidArgumentError, match="computed under no_grad"):
        in_a_step(turned_off)(training)
    training.check()


def test_attributes_follow_the_script(training: Training) -> None:
    """Numbers, texts and tensors, of every part, also those that are new."""
    for number, batch in enumerate([*BATCHES, *BATCHES]):
        for module in (training.model, training.alone):
            module.tau = 1.0 + number // 2
            if number == 3:
                module.tau = torch.tensor([1.0, 2.0, 3.0])
            module.dropout.p = 0.0 if number else 1.0
            module.head.told = "a text that nobody reads"
            module.head.pair = torch.zeros(2), torch.ones(3)
        assert training.train(batch) == pytest.approx(
            train_alone(training.alone, training.torch_optimizer, [batch], cross_entropy)[0], abs=1e-6
        )
    assert difference(training.model, training.alone) < 1e-6


def test_hooks_follow_the_script(training: Training) -> None:
    """Those of modules and of parameters, also when they are removed."""
    training.check()
    handles = [
        handle
        for module in (training.model, training.alone)
        for handle in (
            module.head.register_forward_hook(lambda module, args, output: output * 0.5),
            module.body.weight.register_hook(lambda gradient: gradient * 2),
        )
    ]
    training.check()
    for handle in handles:
        handle.remove()
    training.check()


@pytest.mark.parametrize("what", ["attribute", "max_norm"])
def test_a_loop_of_ahead_keeps_its_attributes(two: cs.CentralStorageStrategy, training: Training, what: str) -> None:
    losses = training.train.ahead(cst.batches(two, BATCHES))
    next(losses)
    if what == "attribute":
        training.model.tau = 2.0
    else:
        training.optimizer.max_norm = 1.0
    with pytest.raises(cs.errors.ContextError, match="has changed within the loop of ahead"):
        next(losses)


def exchange_the_head(model: Any) -> None:
    model.head = nn.Linear(6, 3)


def add_a_part(model: Any) -> None:
    model.tail = nn.Linear(3, 3)


def remove_a_parameter(model: Any) -> None:
    model.head.bias = None


@pytest.mark.parametrize("change", [exchange_the_head, add_a_part, remove_a_parameter])
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_part_that_changes_later_is_an_error(training: Training, change: Any, is_sent: bool) -> None:
    if is_sent:
        training.train(BATCHES[0])
    change(training.model)
    with pytest.raises(cs.errors.InvalidArgumentError, match="added, removed or exchanged since the function was"):
        training.train(BATCHES[0])


def write_in_place(model: Any) -> None:
    model.scale.fill_(3.0)


def put_another(model: Any) -> None:
    model.scale = torch.tensor([3.0])


def reset(model: Any) -> None:
    model.norm.reset_running_stats()


@pytest.mark.parametrize("change", [write_in_place, put_another, reset])
def test_a_buffer_that_is_changed_in_the_script_is_an_error(training: Training, change: Any) -> None:
    state = training.model.state_dict()
    change(training.model)
    with pytest.raises(cs.errors.InvalidArgumentError, match="was changed in the script"):
        training.train(BATCHES[0])
    training.model.load_state_dict(state)
    training.check()


def test_buffers_have_no_values_in_the_script(training: Training) -> None:
    """Where they are asked for, they have the present ones; what a state dict lacks stays as it is."""
    training.check()
    assert training.model.scale.isnan().all()
    assert training.model.norm.running_mean.isnan().all()
    pulled, state = cst.pull(training.model), training.model.state_dict()
    assert torch.equal(pulled.norm.running_mean, state["norm.running_mean"])
    assert int(pulled.norm.num_batches_tracked) == int(state["norm.num_batches_tracked"]) == len(BATCHES)
    training.model.load_state_dict({"scale": torch.tensor([2.0])}, strict=False)
    training.model.load_state_dict(state, assign=True)
    training.check()


def test_the_default_dtype_follows_the_script(training: Training) -> None:
    @cst.evaluate(training.model)
    def default(x: torch.Tensor) -> str:
        return str(torch.ones(1).dtype)

    found = [default(torch.ones(2))]
    torch.set_default_dtype(torch.float64)
    try:
        found.append(default(torch.ones(2)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [*found, default(torch.ones(2))] == ["torch.float32", "torch.float64", "torch.float32"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.ModuleList([torch.jit.script(nn.Linear(2, 2))]), "0 is a ScriptModule"),
        (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "the module has scale_grad_by_freq"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modules_that_would_train_otherwise_are_refused(
    two: cs.CentralStorageStrategy, make: Callable[[], nn.Module], message: str
) -> None:
    with two.scope(), pytest.raises(cs.errors.InvalidArgumentError, match=message):
        cst.centralize(make())
