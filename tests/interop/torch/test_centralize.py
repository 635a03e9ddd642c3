"""``cst.centralize`` and ``cst.pull``: what a centralized module is in the script."""

from __future__ import annotations

import copy
import io
import operator
from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference, train_alone
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, prune

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))


class Tied(nn.Module):
    """One weight used twice, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 8)
        self.out = nn.Linear(8, 5, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.scale = self.scale * 0.9  # another tensor in its place
        return self.out(self.table(ids) * self.scale)


def ids_of(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (rows,), generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def loss_of(module: Any, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(ids), y)


def test_the_module_stays_the_same_object(two: cs.CentralStorageStrategy) -> None:
    module = Tied()
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    with two.scope():
        assert cst.centralize(module) is module
    for name, p in module.named_parameters():
        assert p is parameters[name]
        assert isinstance(p, nn.Parameter | cst.CentralParameter)
        assert (p.shape, p.dim(), p.dtype, p.numel()) == (torch.Size([5, 8]), 2, torch.float32, 40)
        assert p.untyped_storage().nbytes() == 4
    assert module.out.weight is module.table.weight
    assert module.table.weight.variable.name.startswith("table.weight")
    assert dict(module.named_buffers()).keys() == buffers.keys()
    with two.scope():
        assert cst.centralize(module) is module  # a second time changes nothing


def test_tied_parameters_and_buffers_train_as_alone(three: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(three, Tied())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids, y)

    batches = [ids_of(seed, rows) for seed, rows in enumerate([6, 7, 1])]
    losses = [train(batch) for batch in batches]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches, loss_of)
    assert losses == pytest.approx(theirs, abs=1e-6)  # and so were the buffers, also the one that is not saved
    assert difference(model, alone) < 1e-6
    assert model.state_dict()["seen"].item() == 3


def test_state_dicts_both_ways(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, Tied())
    assert difference(model, alone) == 0
    state = model.state_dict()
    assert list(state) == list(alone.state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = Tied()
    with torch.no_grad():
        other.table.weight.mul_(3)
        other.seen.fill_(7)
    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert difference(model, other) == 0
    model.load_state_dict(torch.load(file), assign=True)
    assert difference(model, alone) == 0
    assert isinstance(model.table.weight, cst.CentralParameter)
    assert model.table.state_dict().keys() == {"weight"}  # of a part
    model.table.load_state_dict(other.table.state_dict())
    assert torch.equal(model.state_dict()["out.weight"], other.out.weight)
    kept = model.state_dict(keep_vars=True)
    assert torch.equal(kept["table.weight"], other.table.weight)
    assert not any(p.isfinite().any() for p in model.parameters())  # no memory is held


def test_a_state_dict_of_other_shapes_changes_nothing(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)))
    wrong = nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 3)).state_dict()
    for error in (cst.StateDictError, RuntimeError, ValueError):
        with pytest.raises(error, match=r"1.weight is \[3, 5\] in the state dict and \[3, 4\] in the module"):
            model.load_state_dict(wrong)
    assert difference(model, alone) == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert difference(model, alone) == 0
    partly = {"1.bias": torch.ones(3)}
    assert model.load_state_dict(partly, strict=False).missing_keys
    assert model.state_dict()["1.bias"].tolist() == [1, 1, 1]
    assert torch.equal(model.state_dict()["0.weight"], alone.state_dict()["0.weight"])


def test_a_pulled_module_is_torchs_own(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, Tied())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids, y)

    ids, y = ids_of(0, 6)
    train(ids, y)
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [(ids, y)], loss_of)
    pulled = cst.pull(model)
    assert type(pulled) is Tied
    assert all(type(p) is nn.Parameter for p in pulled.parameters())
    assert pulled.out.weight is pulled.table.weight
    assert torch.allclose(pulled.eval()(ids), alone.eval()(ids), atol=1e-6)
    before = copy.deepcopy(pulled).state_dict()
    train(ids, y)
    assert all(torch.equal(value, before[name]) for name, value in pulled.state_dict().items())
    file = io.BytesIO()
    torch.save(pulled, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids), pulled(ids))
    with two.scope():
        assert isinstance(cst.centralize(pulled), Tied)  # once more, as another module


def test_a_centralized_module_is_not_copied(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, Tied())
    with pytest.raises(TypeError, match=r"cst.pull\(module\) returns a plain copy"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="refers to state in its service"):
        torch.save(model, io.BytesIO())


def norms() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 6)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 3)),
    )


def looks() -> nn.Module:
    """As norms(), but it looks at a number, which a module without memory does not have."""
    made = norms()
    assert torch.ones(1).item() == 1
    return made


@pytest.mark.parametrize("factory", [norms, looks])
def test_a_factory_makes_parametrized_modules(two: cs.CentralStorageStrategy, factory: Any) -> None:
    def loss_of(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x), y)

    torch.manual_seed(3)
    alone = norms()
    with two.scope():
        model = cst.centralize(factory)
    model.load_state_dict(alone.state_dict())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y)

    batches = [batch_of(seed, 6) for seed in range(4)]
    losses = [train(batch) for batch in batches]
    theirs = train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches, loss_of)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 1e-5
    pulled = cst.pull(model)
    x, _ = batches[0]
    assert torch.allclose(pulled.eval()(x), alone.eval()(x), atol=1e-5)
    assert type(model).__name__ == "Sequential"


class Plain(nn.Module):
    """A tensor that is neither a parameter nor a buffer, a number, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2, bias=False)
        self.shift = torch.tensor([1.0, 2.0])
        self.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.factor + self.shift


@pytest.mark.parametrize("by_factory", [False, True])
def test_a_module_brings_its_own_state(two: cs.CentralStorageStrategy, by_factory: bool) -> None:
    with two.scope():
        model = cst.centralize(Plain if by_factory else Plain())
    model.load_state_dict({"line.weight": torch.eye(2)})
    model.factor = 5.0
    model.line.register_forward_hook(lambda module, args, output: output + 10)

    @cst.evaluate(model)
    def predict(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert predict(torch.ones(3, 2)).tolist() == [[56, 57]] * 3


def overlapping() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight.data = module[0].weight.data
    return module


def holding(buffer: torch.Tensor) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("held", buffer)
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(3), "weight has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight has no plain memory"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "weight has dtype torch.float8_e4m3fn"),
        (lambda: holding(torch.zeros(2).to(torch.float8_e4m3fn)), "buffer held has dtype torch.float8_e4m3fn"),
        (lambda: holding(torch.eye(2).to_sparse()), "buffer held has no plain memory"),
        (overlapping, r"0.weight and 1.weight are two parameters over the same memory"),
    ],
)
def test_what_cannot_be_centralized_is_named(two: cs.CentralStorageStrategy, make: Any, message: str) -> None:
    module = make()
    with two.scope(), pytest.raises(cs.errors.InvalidArgumentError, match=message):
        cst.centralize(module, sync_batchnorm=True)
    assert not any(isinstance(each, cst.CentralParameter) for each in module.parameters())
    assert all(type(each).__module__.startswith("torch.") for each in module.modules())  # nothing has changed


def test_wrong_arguments_are_named(two: cs.CentralStorageStrategy, three: cs.CentralStorageStrategy) -> None:
    with pytest.raises(cs.errors.ContextError, match="pass strategy=strategy"):
        cst.centralize(nn.Linear(1, 1))
    with two.scope():
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module or a function that returns one, not int"):
            cst.centralize(3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"returned int, not a torch.nn.Module"):
            cst.centralize(lambda: 3)  # type: ignore[arg-type,return-value]
        with pytest.raises(cs.errors.InvalidArgumentError, match="buffers must be one of 'first', 'mean', 'local'"):
            cst.centralize(nn.Linear(1, 1), buffers="last")  # type: ignore[call-overload]
        with pytest.raises(cs.errors.InvalidArgumentError, match="protect must be True or 'readonly'"):
            cst.centralize(nn.Linear(1, 1), protect=False)
    with pytest.raises(TypeError, match="strategy must be a CentralStorageStrategy"):
        cst.centralize(nn.Linear(1, 1), strategy=2)  # type: ignore[call-overload]
    model = cst.centralize(nn.Linear(1, 1), strategy=two)
    with pytest.raises(cs.errors.InvalidArgumentError, match="parameter weight belongs to another strategy"):
        cst.centralize(model, strategy=three)
    both = nn.ModuleList([model, cst.centralize(nn.Linear(1, 1), strategy=three)])
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"parameter 1.weight belongs to another strategy"):
        cst.step(both)


def test_integers_need_no_gradient(two: cs.CentralStorageStrategy) -> None:
    module = nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    model, _ = centralized(two, module)

    @cst.evaluate(model)
    def codes(x: torch.Tensor) -> torch.Tensor:
        return model.codes + x[:1, 0].long() * 0

    assert codes(torch.ones(2, 1)).tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(RuntimeError, match="floating point"):
        model.codes.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to(torch.float64), r"weight was written or converted in the script \(it is torch.float64 now\)"),
        (lambda m: m.half(), r"weight was written or converted in the script \(it is torch.float16 now\)"),
        (lambda m: setattr(m.weight, "data", torch.ones(5, 8)), r"weight has the shape \[5, 8\] now, and had \[3, 8\]"),
        (lambda m: setattr(m.weight, "data", torch.ones(3, 8)), "weight was written or converted in the script"),
        (lambda m: nn.init.zeros_(m.weight), "weight was written or converted in the script"),
    ],
)
def test_a_change_after_centralize_is_named(two: cs.CentralStorageStrategy, change: Any, message: str) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))

    @cst.evaluate(model)
    def predict(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert predict(torch.ones(2, 8)).shape == (2, 3)
    change(model)
    with pytest.raises(cs.errors.InvalidArgumentError, match=message):
        predict(torch.ones(2, 8))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.clamp_(-1, 1),
        lambda p: p.copy_(torch.ones(3, 8)),
        nn.init.normal_,
        lambda p: operator.iadd(p, 1),
        lambda p: operator.setitem(p, slice(None), torch.ones(3, 8)),
    ],
)
def test_a_write_that_torch_refuses_names_the_parameter(
    two: cs.CentralStorageStrategy, write: Any, gradients: bool
) -> None:
    model, alone = centralized(two, nn.Linear(8, 3))
    message = r"_ cannot write to parameter weight\S* in the script, .*load_state_dict or parameter.variable.assign"
    with torch.set_grad_enabled(gradients), pytest.raises(cs.errors.InvalidArgumentError, match=message):
        write(model.weight)
    assert difference(model, alone) == 0


def reset_statistics(model: Any) -> None:
    model[1].reset_running_stats()


def replace_weights(model: Any) -> None:
    model[0].weight.data = torch.zeros(3, 8)


@pytest.mark.parametrize("look", [lambda m: m.state_dict(), cst.pull])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.half(), r"was written or converted in the script \(it is torch.float16 now\)"),
        (replace_weights, "was written or converted in the script"),
        (reset_statistics, "buffer 1.running_mean was changed in the script"),
    ],
)
def test_a_state_dict_does_not_hide_a_change(
    two: cs.CentralStorageStrategy, change: Any, message: str, look: Any
) -> None:
    model, _ = centralized(two, nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))
    predict = cst.evaluate(model)(lambda x: model(x))
    change(model)
    with pytest.raises(cs.errors.InvalidArgumentError, match=message):
        look(model)
    with pytest.raises(cs.errors.InvalidArgumentError, match="in the script"):
        predict(torch.ones(2, 8))


def test_load_state_dict_undoes_a_write_but_no_conversion(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))
    replace_weights(model)
    reset_statistics(model)
    model.load_state_dict(alone.state_dict())
    assert difference(model, alone) == 0
    model.half()
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"converted in the script \(it is torch.float16 now\)"):
        model.load_state_dict(alone.state_dict())


def test_a_parameter_of_a_module_and_of_its_part_is_in_the_state_dict_twice(two: cs.CentralStorageStrategy) -> None:
    outer = nn.Linear(8, 3)
    outer.inner = nn.Linear(8, 3, bias=False)
    outer.inner.weight = outer.weight
    model, alone = centralized(two, outer)
    assert difference(model, alone) == 0
    assert difference(model, alone) == 0


def test_a_pulled_module_computes_what_hooks_compute(two: cs.CentralStorageStrategy) -> None:
    layer = nn.Linear(8, 3)
    prune.random_unstructured(layer, "weight", 0.5)
    state, x = {name: value.clone() for name, value in layer.state_dict().items()}, torch.ones(2, 8)
    with two.scope():
        model = cst.centralize(layer)
    model.load_state_dict({**state, "bias": torch.ones(3)})
    pulled = cst.pull(model)
    assert pulled.weight.isnan().all()
    assert torch.equal(pulled(x), x @ (state["weight_orig"] * state["weight_mask"]).T + 1)
