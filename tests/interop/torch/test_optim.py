"""The optimizers in the script: torch's own classes, what they refuse, and when the server learns of a change."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.harness.services import connected
from tests.interop.torch.chosen_gradients import central

import central_storage as cs
import central_storage.torch as cst
from central_storage.optimizers import Optimizer
from cs_proto.errors import ContextError, InvalidArgumentError

OURS = ("max_norm", "max_value", "find_unused_parameters", "lazy")
TORCHS = ("SGD", "Adam", "AdamW", "SparseAdam", "RMSprop", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta")
ALONE = ("Lion", "LAMB", "RowwiseAdagrad")


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield connected(strategy)


@pytest.fixture
def module(strategy: cs.CentralStorageStrategy) -> torch.nn.Module:
    return central(strategy, torch.nn.Linear(3, 2))


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is assigned to optimizers of the server, one entry for each message."""
    found: list[dict[str, Any]] = []
    assign = Optimizer.assign

    def noting(self: Optimizer, numbers: Any) -> None:
        assign(self, numbers)
        found.append(dict(numbers))

    monkeypatch.setattr(Optimizer, "assign", noting)
    return found


# --- torch's own classes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCHS)
def test_a_class_has_torchs_arguments_and_groups(module: torch.nn.Module, name: str) -> None:
    ours, theirs = getattr(cst.optim, name), getattr(torch.optim, name)
    assert issubclass(ours, theirs)
    taken = list(inspect.signature(ours).parameters.values())
    expected = list(inspect.signature(theirs).parameters.values())
    assert [(each.name, each.default, each.kind) for each in taken[: len(expected)]] == [
        (each.name, each.default, each.kind) for each in expected
    ]
    assert tuple(each.name for each in taken[len(expected) :]) == OURS
    optimizer, alone = ours(module.parameters()), theirs(torch.nn.Linear(3, 2).parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == alone.defaults
    assert [{**group, "params": None} for group in optimizer.param_groups] == [
        {**group, "params": None} for group in alone.param_groups
    ]
    assert not optimizer.state
    assert repr(optimizer) == repr(alone)


@pytest.mark.parametrize("name", TORCHS + ALONE)
def test_the_docstring_lists_every_argument(name: str) -> None:
    doc = inspect.getdoc(getattr(cst.optim, name)) or ""
    section = doc.split("Args:\n")[1].split("\n\n")[0]
    taken = [each.strip("*") for each in inspect.signature(getattr(cst.optim, name)).parameters]
    assert re.findall(r"^    \**(\w+): ", section, re.MULTILINE) == taken


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"lr": -1.0}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"momentum": -0.1}),
        ("Adam", {"betas": (1.0, 0.9)}),
        ("AdamW", {"eps": -1.0}),
        ("Adam", {"fused": True, "foreach": True}),
        ("RMSprop", {"alpha": -1.0}),
        ("SparseAdam", {"lr": 0.0}),
        ("Adagrad", {"lr_decay": -1.0}),
        ("Adadelta", {"rho": 2.0}),
        ("NAdam", {"momentum_decay": -1.0}),
        ("AdamW", {"lrate": 1.0}),
    ],
)
def test_torchs_own_checks_hold(module: torch.nn.Module, name: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError)) as theirs:
        getattr(torch.optim, name)(torch.nn.Linear(3, 2).parameters(), **kwargs)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        getattr(cst.optim, name)(module.parameters(), **kwargs)


def test_no_parameters_at_all_is_torchs_error() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        cst.optim.SGD([])


@pytest.mark.parametrize("name", TORCHS + ALONE)
def test_the_server_has_the_numbers_of_every_group(module: torch.nn.Module, name: str) -> None:
    optimizer = getattr(cst.optim, name)([{"params": [module.weight]}, {"params": [module.bias], "lr": 0.25}])
    assert len(optimizer.central) == 2
    for group, updater in zip(optimizer.param_groups, optimizer.central, strict=True):
        numbers = updater.get_config()
        assert numbers["learning_rate"] == group["lr"]
        for key, value in group.items():
            assert key not in numbers or numbers[key] == value, key
        if "betas" in group:
            assert (numbers["beta_1"], numbers["beta_2"]) == group["betas"]
        if "alpha" in group:
            assert numbers["rho"] == group["alpha"]
        if "eps" in group:
            assert numbers["epsilon"] == group["eps"]
    assert [params for _, params in optimizer.groups_for_update()] == [[module.weight], [module.bias]]


def test_names_of_parameters_are_kept_as_in_torch(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.named_parameters(), lr=0.5)
    alone = torch.optim.SGD(torch.nn.Linear(3, 2).named_parameters(), lr=0.5)
    assert optimizer.state_dict() == alone.state_dict()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    del (saved := alone.state_dict())["param_groups"][0]["param_names"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_lion_and_lamb_have_the_defaults_of_their_papers(module: torch.nn.Module) -> None:
    lion, lamb = cst.optim.Lion(module.parameters()), cst.optim.LAMB(module.parameters())
    assert lion.defaults == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert lamb.defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    with pytest.raises(InvalidArgumentError, match=r"Lion group 0: .*beta_1 must be a number in \[0, 1\)"):
        cst.optim.Lion(module.parameters(), betas=(1.5, 0.9))


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capturable": True}, "capturable=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
        ({"lr": torch.tensor(0.1)}, r"lr is a tensor.* pass a number, as in float\(lr\)"),
        ({"max_norm": -1.0}, "max_norm must be a number of at least 0, or None, not -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be a number"),
        ({"max_value": True}, "max_value must be a number"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ],
)
def test_what_the_server_cannot_do_is_refused_by_name(
    module: torch.nn.Module, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cst.optim.Adam(module.parameters(), **kwargs)


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_flags_that_choose_an_implementation_are_accepted(
    module: torch.nn.Module, name: str, kwargs: dict[str, bool]
) -> None:
    optimizer = getattr(cst.optim, name)(module.parameters(), **kwargs)
    assert {key: optimizer.param_groups[0][key] for key in kwargs} == kwargs


@pytest.mark.parametrize("name", ["LBFGS", "ASGD", "Rprop", "Adafactor", "Muon"])
def test_an_optimizer_that_is_missing_names_another(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"cst\.optim has no {name}: .*use \w+"):
        getattr(cst.optim, name)


def test_an_unknown_optimizer_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"cst\.optim has no Adm; it has .*AdamW"):
        cst.optim.Adm


def test_torchs_schedulers_are_at_hand() -> None:
    assert cst.optim.lr_scheduler is torch.optim.lr_scheduler


def test_a_parameter_that_was_not_centralized_is_refused(module: torch.nn.Module) -> None:
    with pytest.raises(InvalidArgumentError, match=r"SGD group 0: parameter 2, of shape \(4,\), .*call cst.centralize"):
        cst.optim.SGD([*module.parameters(), torch.nn.Parameter(torch.zeros(4))])


def test_a_first_group_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="SGD group 0 has no parameters"):
        cst.optim.SGD([{"params": []}])


def test_parameters_of_two_strategies_are_refused(module: torch.nn.Module) -> None:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        more = central(connected(other), torch.nn.Linear(3, 2))
        with pytest.raises(InvalidArgumentError, match="belong to different strategies"):
            cst.optim.SGD([*module.parameters(), *more.parameters()])


def test_a_decay_that_adamw_does_not_have_is_refused(module: torch.nn.Module) -> None:
    with pytest.raises(InvalidArgumentError, match="decoupled_weight_decay is True in this class"):
        cst.optim.AdamW([{"params": list(module.parameters()), "decoupled_weight_decay": False}])


def test_in_a_replica_none_can_be_made(strategy: cs.CentralStorageStrategy, module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD([module.weight])
    bias = module.bias
    with pytest.raises(ContextError, match="cannot be made in a replica"):
        strategy.run(lambda: cst.optim.SGD([bias]))
    with pytest.raises(ContextError, match="cannot be made in a replica"):
        strategy.run(lambda: optimizer.add_param_group({"params": [bias]}))
    for method in (optimizer.push, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ContextError, match="only in the script"):
            strategy.run(lambda method=method: method())


# --- groups -----------------------------------------------------------------------------------------------------


def test_a_group_can_be_added_later(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD([module.weight], lr=0.1)
    version = optimizer.version
    optimizer.add_param_group({"params": module.bias, "lr": 0.5})
    assert optimizer.version != version
    assert [params for _, params in optimizer.groups_for_update()] == [[module.weight], [module.bias]]
    assert float(optimizer.central[1].learning_rate) == 0.5


@pytest.mark.parametrize(
    "group",
    [
        {"params": [torch.nn.Parameter(torch.zeros(4))]},
        {"params": None, "momentum": 1e999},
        {"params": None, "differentiable": True},
    ],
)
def test_a_group_that_is_refused_is_not_there(module: torch.nn.Module, group: dict[str, Any]) -> None:
    optimizer = cst.optim.SGD([module.weight], lr=0.1)
    group = {**group, "params": group["params"] or [module.bias]}
    with pytest.raises(InvalidArgumentError):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == len(optimizer.central) == 1
    optimizer.push()


def test_a_parameter_in_two_groups_is_torchs_error(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD([module.weight], lr=0.1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [module.weight]})


def test_parameters_that_are_changed_by_hand_change_the_version(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}])
    version = optimizer.version
    assert optimizer.version == version
    weights = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = []
    assert optimizer.version != version
    optimizer.param_groups[0]["params"] = [*weights, torch.nn.Parameter(torch.zeros(4))]
    with pytest.raises(InvalidArgumentError, match=r"SGD group 0: parameter 1, of shape \(4,\), lies in this process"):
        optimizer.version


def test_a_group_that_was_taken_out_is_found(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}])
    del optimizer.param_groups[1]
    with pytest.raises(InvalidArgumentError, match="has 1 groups in param_groups, but 2 were added"):
        optimizer.push()


def test_arguments_that_replicas_keep_change_the_version(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.parameters(), max_norm=1.0, max_value=2.0, find_unused_parameters=True)
    assert (optimizer.max_norm, optimizer.max_value, optimizer.find_unused_parameters) == (1.0, 2.0, True)
    assert optimizer.central[0].clipvalue == 2.0
    versions = [optimizer.version]
    optimizer.max_norm = float("inf")
    assert optimizer.max_norm is None
    versions.append(optimizer.version)
    optimizer.find_unused_parameters = False
    versions.append(optimizer.version)
    assert len(set(versions)) == 3
    with pytest.raises(InvalidArgumentError, match="max_norm"):
        optimizer.max_norm = "1"


# --- numbers ----------------------------------------------------------------------------------------------------


def test_what_has_changed_is_told_once_and_in_one_message(
    module: torch.nn.Module, assigned: list[dict[str, Any]]
) -> None:
    optimizer = cst.optim.AdamW([{"params": [module.weight]}, {"params": [module.bias], "lr": 0.5}])
    optimizer.push()
    assert assigned == []
    first, second = optimizer.param_groups
    first.update(lr=0.25, betas=(0.8, 0.99), weight_decay=0.5, eps=1e-3)
    optimizer.push()
    optimizer.push()
    expected = {"learning_rate": 0.25, "beta_1": 0.8, "beta_2": 0.99, "weight_decay": 0.5, "epsilon": 1e-3}
    assert assigned == [expected]
    second["lr"] = 0.125
    optimizer.push()
    assert assigned[1:] == [{"learning_rate": 0.125}]
    assert [float(each.learning_rate) for each in optimizer.central] == [0.25, 0.125]


@pytest.mark.parametrize(
    ("name", "made", "change", "message"),
    [
        ("Adam", {}, {"amsgrad": True}, "amsgrad"),
        ("SGD", {"momentum": 0.9}, {"nesterov": "yes"}, "nesterov"),
        ("SGD", {}, {"momentum": 0.9}, "momentum"),
        ("SGD", {"momentum": 0.9}, {"momentum": 0}, "momentum was 0.9 when the group was made"),
        ("RMSprop", {}, {"centered": True}, "centered"),
        ("NAdam", {}, {"betas": (0.8, 0.99)}, "beta_1 .* or cycle_momentum=False in a scheduler"),
        ("Adam", {}, {"lr": float("nan")}, "learning_rate must be a finite number"),
        ("Adam", {}, {"betas": (0.8,)}, "betas"),
        ("Adam", {}, {"lr": torch.tensor(0.5)}, "lr is a tensor"),
        ("Adam", {}, {"capturable": True}, "capturable"),
    ],
)
def test_a_change_that_the_server_cannot_make_is_refused_and_changes_nothing(
    module: torch.nn.Module,
    assigned: list[dict[str, Any]],
    name: str,
    made: dict[str, Any],
    change: dict[str, Any],
    message: str,
) -> None:
    optimizer = getattr(cst.optim, name)([{"params": [module.weight]}, {"params": [module.bias]}], **made)
    optimizer.param_groups[0]["lr"] = 0.75
    optimizer.param_groups[1].update(change)
    with pytest.raises(ValueError, match=message) as error:
        optimizer.push()
    assert f"{name} group 1" in str(error.value)
    assert assigned == []
    optimizer.param_groups[1].update({key: optimizer.defaults[key] for key in change})
    optimizer.push()
    assert assigned == [{"learning_rate": 0.75}]


def test_a_number_that_was_taken_out_of_a_group_is_named(module: torch.nn.Module) -> None:
    optimizer = cst.optim.Adam(module.parameters())
    del optimizer.param_groups[0]["eps"]
    with pytest.raises(InvalidArgumentError, match="Adam group 0 has no 'eps'"):
        optimizer.push()


# --- steps ------------------------------------------------------------------------------------------------------


def test_a_step_in_the_script_only_counts_and_calls_hooks(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.parameters(), lr=1.0)
    seen: list[Any] = []
    before = module.weight.variable.numpy()
    optimizer.register_step_pre_hook(lambda *given: seen.append(("before", *given)))
    optimizer.register_step_post_hook(lambda *given: seen.append(("after", *given)))
    assert optimizer.step() is None
    assert seen == [("before", optimizer, (optimizer,), {}), ("after", optimizer, (optimizer,), {})]
    assert (module.weight.variable.numpy() == before).all()
    assert int(optimizer.central[0].iterations) == 0


def test_a_step_of_gradients_that_the_script_computed_is_refused(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.parameters(), lr=1.0)
    module.weight.grad = torch.ones(2, 3)
    with pytest.raises(ContextError, match=r"got a gradient of weight\w* in the script, where nothing is updated"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(ContextError, match="got a closure in the script"):
        optimizer.step(lambda: 1.0)


def test_zero_grad_is_harmless(module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.parameters())
    module.weight.grad = torch.ones(2, 3)
    optimizer.zero_grad(set_to_none=False)
    assert module.weight.grad.tolist() == [[0.0] * 3] * 2
    assert module.bias.grad is None
    optimizer.zero_grad()
    assert module.weight.grad is None


def test_a_grad_scaler_is_refused_unless_it_is_disabled(module: torch.nn.Module) -> None:
    for fused in (False, True):
        optimizer = cst.optim.SGD(module.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ContextError, match=r"does not work with an enabled GradScaler.*bfloat16 needs no scaler"):
            scaler.step(optimizer)
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


# --- travelling -------------------------------------------------------------------------------------------------


def test_a_replica_has_the_groups_and_numbers_of_its_run(
    strategy: cs.CentralStorageStrategy, module: torch.nn.Module
) -> None:
    optimizer = cst.optim.AdamW([{"params": [module.weight]}, {"params": [module.bias], "lr": 1}], max_norm=3.0)

    @cs.function
    def look() -> Any:
        names = [[p.variable.name for p in params] for _, params in optimizer.groups_for_update()]
        numbers = [(group["lr"], group["betas"], group["amsgrad"]) for group in optimizer.param_groups]
        return names, numbers, optimizer.max_norm, len(optimizer.state)

    expected = [(1e-3, (0.9, 0.999), False), (1, (0.9, 0.999), False)]
    names = [[module.weight.variable.name], [module.bias.variable.name]]
    assert strategy.run(look) == (names, expected, 3.0, 0)
    optimizer.param_groups[1].update(lr=0.25, betas=(0.5, 0.75))
    optimizer.push()
    assert strategy.run(look)[1] == [expected[0], (0.25, (0.5, 0.75), False)]
    assert optimizer.param_groups[1]["lr"] == 0.25


def test_hooks_of_the_script_stay_there(strategy: cs.CentralStorageStrategy, module: torch.nn.Module) -> None:
    optimizer = cst.optim.SGD(module.parameters())
    optimizer.register_step_pre_hook(lambda *given: None)
    assert strategy.run(lambda: len(optimizer._optimizer_step_pre_hooks)) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(module: torch.nn.Module, copied: Callable[[Any], Any]) -> None:
    optimizer = cst.optim.SGD(module.parameters())
    with pytest.raises(TypeError, match=r"refers to state in its service and cannot be .*copied"):
        copied(optimizer)


def test_central_storage_alone_does_not_import_torch() -> None:
    from tests.harness.processes import run

    code = "import sys, central_storage, central_storage.optimizers; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, timeout=60).ok().lines == ["False"]
