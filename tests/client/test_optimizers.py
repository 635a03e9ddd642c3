"""Optimizers as objects: arguments, hyperparameters, schedules, what reaches the backends; over a stand-in for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import central_storage as cs
from central_storage.core import context
from central_storage.core.backends import Combining, Group
from central_storage.optimizers import of_kind, schedules
from central_storage.strategy.service_strategy import CentralStorageStrategy
from cs_proto.arithmetic.optimizers import OPTIMIZERS, SHARED, SLOTS, defaults_of, rule_of
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import Location
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Optimizer as Record
from cs_proto.messages import Variable, VariableSpec

F32 = np.float32
KINDS = ("SGD", "Adagrad", "RMSprop", "Adam", "AdamW", "Adamax", "Nadam", "Adadelta", "Ftrl", "Lion", "LAMB")
KINDS += ("RowwiseAdagrad",)


class Backend:
    """Both backends at once: variables by number, optimizers as the server keeps them, and what was applied."""

    replica = 0
    replicas = 1
    ended = None

    def __init__(self) -> None:
        self.specs: list[VariableSpec] = []
        self.optimizers: dict[int, Record] = {}
        self.configured: list[tuple[int, dict[str, float], Schedule | None, int]] = []
        self.applied: list[Group] = []
        self.combined: list[Combining] = []
        self.slots: dict[tuple[int, int, str], np.ndarray] = {}
        self.runs = 0

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> Variable:
        self.specs.append(spec)
        return self.variable(len(self.specs))

    def variable(self, number: int) -> Variable:
        return Variable(number, self.specs[number - 1], Location("parameters/float32", 0), 0)

    def optimizer(self, number: int) -> Record:
        return self.optimizers[number]

    def configure(
        self,
        number: int,
        kind: str,
        given: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
        exempt: tuple[str, ...] | None = None,
    ) -> int:
        self.configured.append((number, dict(given), schedule, iterations))
        if not number:
            number = len(self.optimizers) + 1
            made = Record(number, kind, rule_of(kind, given), tuple(given.items()), schedule, 0)
        else:
            made = self.optimizers[number]
            made = replace(made, hyperparameters=tuple({**dict(made.hyperparameters), **given}.items()))
        made = made if exempt is None else replace(made, exempt=exempt)
        self.optimizers[number] = made if iterations < 0 else replace(made, iterations=iterations)
        return number

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        return self.slots.setdefault((optimizer, variable, slot), np.zeros(self.specs[variable - 1].shape, F32)).copy()

    def assign_slot(self, optimizer: int, variable: int, slot: str, value: np.ndarray) -> None:
        self.slots[optimizer, variable, slot] = value.copy()

    def apply(self, groups: Sequence[Group], combining: Combining, site: str) -> None:
        self.applied += groups
        self.combined.append(combining)

    def apply_buffers(self, *given: Any) -> bool:
        """Nothing was handed out."""
        return False

    slotted_numbers: tuple[int, ...] = ()

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        return self.slotted_numbers

    def variables(self) -> tuple[Variable, ...]:
        return tuple(self.variable(number) for number in range(1, len(self.specs) + 1))

    def forget(self, kind: str, number: int) -> None:
        """Nobody holds a handle any more."""

    def settle_names(self) -> None:
        """No name changes."""

    def run(self, function: Callable[..., Any], arguments: Any) -> list[Any]:
        self.runs += 1
        return [None]


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def s(backend: Backend) -> CentralStorageStrategy:
    return strategy(backend)


def strategy(backend: Backend) -> CentralStorageStrategy:
    return CentralStorageStrategy.from_backend(backend, ["cpu:0"], "cpu:0")  # type: ignore[arg-type]


@pytest.fixture
def replica(s: CentralStorageStrategy, backend: Backend) -> Callable[[], Any]:
    return lambda: context.enter_replica(s, backend)  # type: ignore[arg-type]


def made(s: CentralStorageStrategy, kind: str = "SGD", **given: Any) -> Any:
    with s.scope():
        return getattr(cs.optimizers, kind)(**given)


def variable(s: CentralStorageStrategy, *shape: int) -> cs.Variable:
    with s.scope():
        return cs.Variable(np.zeros(shape, F32), name="w")


def test_a_variable_that_gets_a_constraint_is_looked_at_again(s: CentralStorageStrategy) -> None:
    w = variable(s, 2)
    s.variable_sets.add([w])
    w._cs_take_code(lambda value: value)
    assert s.variable_sets.find([w]) is None
    assert not s.variable_sets.add([w]).is_free


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_constructors_name_what_the_table_knows(kind: str) -> None:
    cls = getattr(cs.optimizers, kind)
    parameters = list(inspect.signature(cls).parameters)
    assert set(parameters) - {"name", "shared", "exclude_from_weight_decay"} == set(
        OPTIMIZERS[cls.kind].hyperparameters
    )
    assert parameters[0] == "learning_rate"
    optimizer = cls()
    assert optimizer.name == kind
    assert optimizer.iterations == 0
    assert optimizer.slot_names == list(SLOTS[rule_of(cls.kind, optimizer._hyperparameters)])
    for name in SHARED:
        value = True if name == "lazy" else 1.5
        assert cls(**{name: value}).get_config()[name] == value


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("SGD", {"momentum": 2}, "momentum must be a number in"),
        ("SGD", {"momentum": True}, "momentum must be a number, not True"),
        ("SGD", {"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ("SGD", {"learning_rate": "0.1"}, "learning_rate must be a finite number, not '0.1'"),
        ("SGD", {"nesterov": 0.5}, "nesterov must be True or False"),
        ("SGD", {"learning_rate": 10**400}, "learning_rate must be a finite number"),
        ("Adam", {"beta_1": 1.0}, "beta_1"),
        ("Adam", {"clipnorm": -1}, "clipnorm must be a finite number of at least 0"),
        ("Adam", {"clipnorm": 1, "global_clipnorm": 1}, "exclude each other"),
        ("Ftrl", {"learning_rate_power": 0.5}, "at most 0"),
        ("RMSprop", {"rho": 1.5}, "rho"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_given(kind: str, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        getattr(cs.optimizers, kind)(**given)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(
        TypeError, match=r"SGD takes no argument 'size'; it takes learning_rate, momentum, .*clipnorm, clipvalue"
    ):
        cs.optimizers.SGD(0.1, size=0.1)  # type: ignore[call-arg]
    for wrong, right in (("learnrate", "learning_rate"), ("beta2", "beta_2"), ("clip_norm", "clipnorm")):
        with pytest.raises(TypeError, match=f"Adam takes no argument '{wrong}'; did you mean {right}?"):
            cs.optimizers.Adam(**{wrong: 0.1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_makes_an_equal_optimizer(kind: str) -> None:
    first = getattr(cs.optimizers, kind)(0.25, name="mine", clipvalue=2.0, lazy=True)
    config = first.get_config()
    assert config["name"] == "mine"
    again = type(first).from_config(config)
    assert again.get_config() == config
    assert all(isinstance(config[name], bool) for name in config if name in ("nesterov", "amsgrad", "centered", "lazy"))


OTHERS = [kind for kind in OPTIMIZERS if "." in kind]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_kind_of_another_framework_has_its_defaults(kind: str) -> None:
    optimizer = of_kind(kind, learning_rate=0.25)
    config = optimizer.get_config()
    assert (optimizer.name, config.pop("kind"), config.pop("name")) == (kind, kind, kind)
    assert config == {**dict(defaults_of(kind)), "learning_rate": 0.25}
    assert config.keys() == OPTIMIZERS[kind].hyperparameters.keys()
    assert optimizer.slot_names == list(SLOTS[rule_of(kind, config)])
    again = type(optimizer).from_config(optimizer.get_config() | {"name": "mine"})
    assert again.get_config() == optimizer.get_config() | {"name": "mine"}
    assert of_kind(kind, "mine", learning_rate=0.5, clipnorm=2.0, lazy=True).get_config()["clipnorm"] == 2.0


def test_of_kind_refuses_what_it_does_not_know() -> None:
    assert type(of_kind("Lion", learning_rate=0.5)) is cs.optimizers.Lion
    for kind, wrong, reason in [
        ("torch.Adm", {}, "unknown optimizer 'torch.Adm'; the optimizers are SGD"),
        ("torch.Adam", {"eps": 1e-8}, "torch.Adam has no hyperparameter 'eps'; it has learning_rate, beta_1"),
        ("torch.Adam", {"beta_1": 1.0}, "torch.Adam: beta_1 must be a number in"),
        ("torch.SGD", {"momentum": -0.5}, "torch.SGD: momentum must be a finite number of at least 0"),
        ("optax.rmsprop", {"eps_in_sqrt": 0.5}, "eps_in_sqrt must be True or False"),
    ]:
        with pytest.raises(InvalidArgumentError, match=reason):
            of_kind(kind, learning_rate=0.5, **wrong)


def test_the_server_describes_an_optimizer_of_any_kind(s: CentralStorageStrategy, backend: Backend) -> None:
    with s.scope():
        made = of_kind("torch.AdamW", learning_rate=0.5, maximize=True)
    found = cs.optimizers.optimizer_of(s, backend.optimizers[1])
    assert found.get_config() == made.get_config() | {"name": "torch.AdamW"}


# --- hyperparameters --------------------------------------------------------------------------------------------------


def test_several_numbers_change_with_one_message(s: CentralStorageStrategy, backend: Backend) -> None:
    with s.scope():
        optimizer = of_kind("torch.SGD", learning_rate=0.1, momentum=0.9)
    backend.configured.clear()
    optimizer.assign({"learning_rate": 0.2, "momentum": 0.0, "nesterov": True, "maximize": True})
    ((number, given, schedule, iterations),) = backend.configured
    assert (number, schedule, iterations) == (1, None, -1)
    assert given == {"learning_rate": 0.2, "momentum": 0.0, "nesterov": 1.0, "maximize": 1.0}
    decay = schedules.ExponentialDecay(0.5, 10, 0.5)
    optimizer.assign({"learning_rate": decay, "dampening": 0.5})
    assert backend.configured[-1][1:3] == ({"learning_rate": 0.5, "dampening": 0.5}, decay.record())
    before = optimizer.get_config()
    for wrong in ({"learning_rate": 0.3, "rho": 0.5}, {"learning_rate": 0.3, "momentum": -1.0}):
        with pytest.raises(InvalidArgumentError):
            optimizer.assign(wrong)
        assert optimizer.get_config() == before
        assert len(backend.configured) == 2


@pytest.mark.parametrize(
    ("kind", "given", "change", "reason"),
    [
        ("torch.Adam", {}, {"amsgrad": True}, "amsgrad was fixed"),
        ("torch.RMSprop", {}, {"centered": True}, "centered was fixed"),
        ("torch.SGD", {}, {"momentum": 0.5}, "made with momentum 0 and keeps no momentum"),
        ("optax.sgd", {}, {"momentum": 0.5}, "made with momentum 0 and keeps no momentum"),
        ("optax.adam", {}, {"nesterov": True}, "nesterov was fixed"),
        ("torch.NAdam", {}, {"beta_1": 0.5}, "beta_1 was fixed"),
        ("torch.NAdam", {}, {"momentum_decay": 0.5}, "momentum_decay was fixed"),
        ("torch.NAdam", {}, {"decoupled_weight_decay": True, "beta_2": 0.5}, None),
        ("torch.Adam", {}, {"maximize": True, "decoupled_weight_decay": True, "lazy": True}, None),
        ("torch.SGD", {"momentum": 0.5}, {"nesterov": True, "momentum": 0.0}, None),
        ("optax.rmsprop", {}, {"eps_in_sqrt": False, "bias_correction": True}, None),
    ],
)
def test_a_flag_changes_unless_it_chose_the_rule(
    kind: str, given: dict[str, Any], change: dict[str, Any], reason: str | None
) -> None:
    optimizer = of_kind(kind, learning_rate=0.1, **given)
    if reason is None:
        optimizer.assign(change)
        assert optimizer.get_config().items() >= change.items()
    else:
        with pytest.raises(InvalidArgumentError, match=reason):
            optimizer.assign(change)


def test_numbers_change_in_the_server_and_only_those_that_change_are_sent(
    s: CentralStorageStrategy, backend: Backend
) -> None:
    optimizer = made(s, "SGD", learning_rate=0.1, momentum=0.9)
    backend.configured.clear()
    optimizer.learning_rate = np.float32(0.5)
    optimizer.momentum = 0
    assert backend.configured == [(1, {"learning_rate": 0.5}, None, -1), (1, {"momentum": 0.0}, None, -1)]
    assert (optimizer.learning_rate, optimizer.momentum, optimizer.nesterov) == (0.5, 0.0, False)
    assert optimizer.slot_names == ["momentum"]
    optimizer.iterations = 7
    assert backend.configured[-1] == (1, {}, None, 7)
    assert optimizer.iterations == 7


def test_what_chose_the_rule_stays(s: CentralStorageStrategy) -> None:
    for optimizer in (made(s, "SGD"), cs.optimizers.SGD()):
        with pytest.raises(InvalidArgumentError, match="made with momentum 0"):
            optimizer.momentum = 0.9
        with pytest.raises(InvalidArgumentError, match="nesterov was fixed"):
            optimizer.nesterov = True
        with pytest.raises(InvalidArgumentError, match="must be at least 0"):
            optimizer.iterations = -1
        with pytest.raises(InvalidArgumentError, match="learning_rate"):
            optimizer.learning_rate = None
        assert (optimizer.momentum, optimizer.nesterov, optimizer.iterations) == (0.0, False, 0)
        assert optimizer.learning_rate == 0.01


def test_an_optimizer_made_outside_every_scope_takes_its_state_along(
    s: CentralStorageStrategy, backend: Backend
) -> None:
    optimizer = cs.optimizers.Adam(0.1)
    optimizer.iterations = 5
    optimizer.learning_rate = decay = schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer.beta_1 = 0.5
    s.adopt(optimizer)
    ((number, given, schedule, iterations),) = backend.configured
    assert (number, schedule, iterations, given["beta_1"]) == (0, decay.record(), 5, 0.5)
    with pytest.raises(ContextError, match="another strategy"):
        strategy(Backend()).adopt(optimizer)


def test_nothing_is_set_inside_a_replica(s: CentralStorageStrategy, replica: Callable[[], Any]) -> None:
    optimizer, w = made(s), variable(s, 2)
    slot = made(s, "Adam").get_slot(w, "m")
    with replica():
        for name, value in [("learning_rate", 0.1), ("momentum", 0.0), ("iterations", 1)]:
            with pytest.raises(ContextError, match=f"{name} can be set only in the script"):
                setattr(optimizer, name, value)
        with pytest.raises(ContextError, match="slot w/m can be set only in the script"):
            slot.assign(np.zeros(2, F32))
        assert optimizer.learning_rate == 0.01


# --- TensorFlow's other names -----------------------------------------------------------------------------------------


def test_lr_is_another_name_of_the_learning_rate(s: CentralStorageStrategy, backend: Backend) -> None:
    with pytest.warns(DeprecationWarning, match="the argument lr is deprecated; use learning_rate"):
        assert cs.optimizers.Adamax(lr=0.25).learning_rate == 0.25
    optimizer = made(s, "SGD", learning_rate=0.5)
    optimizer.lr = 0.25
    assert backend.configured[-1] == (1, {"learning_rate": 0.25}, None, -1)
    assert optimizer.lr == optimizer.learning_rate == 0.25
    elsewhere = cs.optimizers.SGD()
    elsewhere.lr = decay = schedules.InverseTimeDecay(1.0, 1, 1.0)
    assert elsewhere.lr is decay


def test_decay_is_a_hyperparameter_of_every_optimizer(s: CentralStorageStrategy) -> None:
    assert cs.optimizers.SGD().decay == 0.0
    optimizer = made(s, "Adam", decay=0.5)
    optimizer.decay = 0.25
    assert (optimizer.decay, optimizer.get_config()["decay"], optimizer.learning_rate) == (0.25, 0.25, 0.001)
    with pytest.raises(InvalidArgumentError, match="decay must be a finite number of at least 0"):
        optimizer.decay = -1


def test_weights_are_the_count_and_the_slots(s: CentralStorageStrategy, backend: Backend) -> None:
    optimizer, w, b = made(s, "Adam"), variable(s, 2), variable(s, 3)
    assert [weight.name for weight in optimizer.variables] == ["Adam/iterations"]
    with pytest.raises(InvalidArgumentError, match=r"takes 1 value \(iterations and 0 slots\), not 2; slots"):
        optimizer.set_weights([1, np.zeros(2, F32)])
    backend.slotted_numbers = (w.number, b.number)
    optimizer.build([w, b])
    names = ["Adam/iterations", "w/m", "w_1/m" if b.name == "w_1" else "w/m", "w/v", f"{b.name}/v"]
    assert [weight.name for weight in optimizer.weights] == names
    assert [weight.name for weight in optimizer.variables()] == names
    assert optimizer.get_slot_names() == optimizer.slot_names == ["m", "v"]
    given = [np.int64(7), np.full(2, 1, F32), np.full(3, 2, F32), np.full(2, 3, F32), np.full(3, 4, F32)]
    for wrong in ([*given[:4], np.zeros(2, F32)], [1.5, *given[1:]], given[:4]):
        with pytest.raises(InvalidArgumentError, match="set_weights"):
            optimizer.set_weights(wrong)
    assert [weight.tolist() for weight in optimizer.get_weights()] == [0, [0] * 2, [0] * 3, [0] * 2, [0] * 3]
    optimizer.set_weights(given)
    assert [weight.tolist() for weight in optimizer.get_weights()] == [weight.tolist() for weight in given]


def test_what_needs_a_tape_is_refused_with_the_way_to_do_it(s: CentralStorageStrategy) -> None:
    optimizer, w = made(s), variable(s, 2)
    for refused in (lambda: optimizer.minimize(lambda: 1.0, [w]), lambda: optimizer.get_gradients(1.0, [w])):
        with pytest.raises(NotImplementedError, match=r"compute the gradients .* optimizer.apply_gradients\(zip"):
            refused()


def test_names_are_excluded_from_weight_decay(s: CentralStorageStrategy, backend: Backend) -> None:
    w = variable(s, 2)
    with s.scope():
        first = cs.optimizers.AdamW(exclude_from_weight_decay=["bias", "LayerNorm"])
        second = cs.optimizers.AdamW()
    second.exclude_from_weight_decay(var_list=[w], var_names=["bias$"])
    assert [record.exempt for record in backend.optimizers.values()] == [("bias", "LayerNorm"), ("^w$", "bias$")]
    assert cs.optimizers.AdamW.from_record(s, backend.optimizer(2)).get_config() == second.get_config()
    again = cs.optimizers.AdamW.from_config(first.get_config())
    assert again.get_config()["exclude_from_weight_decay"] == ["bias", "LayerNorm"]
    second.exclude_from_weight_decay()
    assert backend.optimizer(2).exempt == ()
    with pytest.raises(InvalidArgumentError, match=r"AdamW: 'bias\(' is not a regular expression"):
        cs.optimizers.AdamW(exclude_from_weight_decay=["bias("])
    with pytest.raises(TypeError, match=r"takes a list of patterns, not the text 'bias': pass \['bias'\]"):
        second.exclude_from_weight_decay(var_names="bias")
    with pytest.raises(ContextError, match="variable Variable belongs to no strategy yet"):
        second.exclude_from_weight_decay([cs.Variable(1.0)])
    backend.slotted_numbers = (w.number,)
    with pytest.raises(InvalidArgumentError, match="AdamW has made updates already"):
        second.exclude_from_weight_decay(var_names=["bias"])


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (schedules.ExponentialDecay(0.1, 10, 0.5), {0: 0.1, 5: 0.1 * 0.5**0.5, 20: 0.025}),
        (schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True), {9: 0.1, 10: 0.05, 29: 0.025}),
        (schedules.PiecewiseConstantDecay([2, 4], [1.0, 0.5, 0.25]), {0: 1, 2: 1, 3: 0.5, 4: 0.5, 5: 0.25, 99: 0.25}),
        (schedules.PiecewiseConstantDecay([], [0.5]), {0: 0.5, 9: 0.5}),
        (schedules.CosineDecay(0.2, 10), {0: 0.2, 5: 0.1, 10: 0.0, 99: 0.0}),
        (schedules.CosineDecay(0.2, 10, alpha=0.5), {0: 0.2, 5: 0.15, 10: 0.1}),
        (
            schedules.CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4),
            {0: 0.0, 1: 0.25, 4: 1.0, 9: 0.5, 14: 0.0},
        ),
        (schedules.InverseTimeDecay(0.1, 10, 0.5), {0: 0.1, 5: 0.1 / 1.25, 20: 0.05}),
        (schedules.InverseTimeDecay(0.1, 10, 0.5, staircase=True), {9: 0.1, 10: 0.1 / 1.5, 19: 0.1 / 1.5, 20: 0.05}),
        (schedules.CosineDecayRestarts(0.2, 10), {0: 0.2, 5: 0.1, 10: 0.2, 20: 0.1, 30: 0.2, 50: 0.1, 70: 0.2}),
        (schedules.CosineDecayRestarts(0.2, 10, t_mul=1.0, m_mul=0.5, alpha=0.5), {0: 0.2, 10: 0.15, 25: 0.1125}),
        (schedules.CosineDecayRestarts(1.0, 10, t_mul=3.0), {10: 1.0, 40: 1.0, 130: 1.0, 1210: 1.0, 3640: 1.0}),
        (schedules.PolynomialDecay(1.0, 10, 0.5), {0: 1.0, 5: 0.75, 10: 0.5, 50: 0.5}),
        (schedules.PolynomialDecay(1.0, 10, 0.0, power=2.0), {5: 0.25}),
        (schedules.PolynomialDecay(1.0, 10, 0.0, cycle=True), {0: 1.0, 5: 0.5, 10: 0.0, 15: 0.25, 20: 0.0}),
    ],
)
def test_schedules(schedule: Any, rates: dict[int, float], s: CentralStorageStrategy, backend: Backend) -> None:
    for step, rate in rates.items():
        assert schedule(step) == pytest.approx(rate)
        assert schedule(np.int64(step)) == schedule(step)
    assert type(schedule).from_config(schedule.get_config()) == schedule
    optimizer = made(s, learning_rate=schedule)
    assert backend.configured[-1][2] == schedule.record()
    assert backend.configured[-1][1]["learning_rate"] == schedule(0)
    elsewhere = cs.optimizers.SGD.from_record(s, backend.optimizer(1))
    assert elsewhere.learning_rate == schedule
    assert type(optimizer).from_config(optimizer.get_config()).learning_rate == schedule


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "^ExponentialDecay: decay_steps of Exp"),
        (lambda: schedules.CosineDecay(float("inf"), 10), "float that is finite"),
        (lambda: schedules.PiecewiseConstantDecay([1, 2], [1.0, 2.0]), "2 boundaries need 3 values, not 2"),
        (lambda: schedules.PiecewiseConstantDecay([2, 1], [1.0, 2.0, 3.0]), "must ascend"),
        (lambda: schedules.InverseTimeDecay(0.1, 0, 0.5), "decay_steps of InverseTimeDecay must be more than 0"),
        (lambda: schedules.CosineDecayRestarts(0.1, 0), "first_decay_steps of CosineDecayRestarts must be more than 0"),
        (lambda: schedules.CosineDecayRestarts(0.1, 10, t_mul=0.5), "t_mul of CosineDecayRestarts must be at least 1"),
        (lambda: schedules.PolynomialDecay("much", 10), "could not convert"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_make_no_schedule(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        make()


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.floats(-10, 10), st.integers(0, 1 << 40))
def test_a_schedule_is_a_number_at_every_step(initial: float, steps: float, power: float, step: int) -> None:
    for schedule in (
        schedules.ExponentialDecay(initial, steps, power),
        schedules.CosineDecay(initial, steps),
        schedules.PolynomialDecay(initial, steps, 0.0, power, cycle=bool(step % 2)),
        schedules.InverseTimeDecay(initial, steps, power, staircase=bool(step % 2)),
        schedules.CosineDecayRestarts(initial, steps, 1 + abs(power), power),
    ):
        assert isinstance(schedule(step).numpy(), float)


class Halving(schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> float:
        return 0.5**step


@pytest.mark.parametrize("rate", [Halving(), lambda step: 0.5**step])
def test_a_schedule_of_ones_own_is_evaluated_before_every_run(
    rate: Callable[[int], float], s: CentralStorageStrategy, backend: Backend
) -> None:
    optimizer = made(s, learning_rate=rate)
    assert optimizer.learning_rate is rate
    rates = []
    for step in range(3):
        backend.optimizers[1] = replace(backend.optimizers[1], iterations=step)
        s.run(lambda: None)
        rates.append(dict(backend.optimizers[1].hyperparameters)["learning_rate"])
    assert rates == [1.0, 0.5, 0.25]
    optimizer.learning_rate = 0.125
    s.run(lambda: None)
    assert dict(backend.optimizers[1].hyperparameters)["learning_rate"] == 0.125


def test_steps_of_one_run_that_share_a_rate_are_told(s: CentralStorageStrategy, backend: Backend) -> None:
    optimizer = made(s, learning_rate=Halving())
    s.run(lambda: None)
    backend.optimizers[1] = replace(backend.optimizers[1], iterations=3)
    with pytest.warns(UserWarning, match=r"SGD made the steps 0 to 2 in one run, all with the rate of step 0"):
        s.run(lambda: None)
    optimizer.iterations = 7
    s.run(lambda: None)
    optimizer.learning_rate = Halving()
    backend.optimizers[1] = replace(backend.optimizers[1], iterations=9)
    s.run(lambda: None)


def test_a_callable_without_arguments_has_no_step(s: CentralStorageStrategy, backend: Backend) -> None:
    made(s, learning_rate=lambda: 0.5)
    s.run(lambda: None)
    backend.optimizers[1] = replace(backend.optimizers[1], iterations=3)
    s.run(lambda: None)


def test_a_callable_without_arguments_is_asked_before_every_run(s: CentralStorageStrategy, backend: Backend) -> None:
    rates = iter([0.5, 0.25])
    optimizer = made(s, learning_rate=lambda: next(rates))
    s.run(lambda: None)
    assert optimizer.iterations == 0
    assert dict(backend.optimizers[1].hyperparameters)["learning_rate"] == 0.25


def test_a_learning_rate_that_is_no_number_names_its_optimizer(s: CentralStorageStrategy, backend: Backend) -> None:
    optimizer = made(s, learning_rate=lambda step: 0.5 if step < 3 else "half")
    backend.optimizers[1] = replace(backend.optimizers[1], iterations=3)
    with pytest.raises(InvalidArgumentError, match="SGD: at step 3 the learning rate function returned 'half'"):
        s.run(lambda: None)
    optimizer.learning_rate = 0.25
    s.run(lambda: None)
    assert dict(backend.optimizers[1].hyperparameters)["learning_rate"] == 0.25


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_reach_the_backend_dense_and_sparse(
    s: CentralStorageStrategy, backend: Backend, replica: Callable[[], Any]
) -> None:
    optimizer, w, table = made(s), variable(s, 2), variable(s, 5, 3)
    rows = cs.IndexedSlices(np.ones((2, 3), F32), np.array([4, 4], np.int32), (5, 3))
    pairs: Iterator[Any] = zip([[1.0, 2.0], rows], [w, table], strict=True)
    with replica():
        optimizer.apply_gradients(pairs)
    ((number, ((gradient, first),), ((values, indices, second),)),) = backend.applied
    assert (number, first, second) == (1, w.number, table.number)
    assert (gradient.tolist(), gradient.dtype) == ([1, 2], F32)
    assert (values.tolist(), indices.tolist(), indices.dtype) == ([[1, 1, 1]] * 2, [4, 4], np.int64)


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (np.ones(3, F32), r"gradient of w has shape \(3,\), but the variable has shape \(5, 3\)"),
        (np.ones((5, 3)), "dtype float64, the variable float32"),
        (cs.IndexedSlices(np.ones((1, 3), F32), np.array([5])), "of w names row 5, but the variable has 5 rows"),
        (cs.IndexedSlices(np.ones((1, 3), F32), np.array([-1])), "names row -1"),
        (cs.IndexedSlices(np.ones((1, 3), F32), np.array([1 << 63], np.uint64)), "names row 9223372036854775808"),
        (cs.IndexedSlices(np.ones((1, 2), F32), np.array([0])), r"rows of shape \(2,\)"),
        (cs.IndexedSlices(np.ones((1, 3)), np.array([0])), "dtype float64"),
        (cs.IndexedSlices(np.ones((1, 3), F32), np.array([0]), (6, 3)), r"dense_shape \(6, 3\)"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_at_the_call(
    gradient: Any, reason: str, s: CentralStorageStrategy, backend: Backend, replica: Callable[[], Any]
) -> None:
    optimizer, w = made(s), variable(s, 5, 3)
    with replica(), pytest.raises(InvalidArgumentError, match=reason):
        optimizer.apply_gradients([(gradient, w)])
    assert backend.applied == []


def test_a_variable_without_axes_has_no_rows(s: CentralStorageStrategy, replica: Callable[[], Any]) -> None:
    optimizer, w = made(s), variable(s)
    rows = cs.IndexedSlices(np.ones(1, F32), np.array([0]))
    with replica(), pytest.raises(InvalidArgumentError, match="the variable has no rows"):
        optimizer.apply_gradients([(rows, w)])


def test_missing_gradients_are_named_and_skipped(
    s: CentralStorageStrategy, backend: Backend, replica: Callable[[], Any]
) -> None:
    optimizer, w, b = made(s), variable(s, 2), variable(s, 2)
    with replica():
        with pytest.warns(UserWarning, match="SGD.apply_gradients: no gradient for w"):
            optimizer.apply_gradients([(None, w), (np.ones(2, F32), b)])
        with pytest.raises(ValueError, match="every gradient is None"):
            optimizer.apply_gradients([(None, w), (None, b)])
        with pytest.raises(ValueError, match="a variable appears twice"):
            optimizer.apply_gradients([(np.ones(2, F32), w), (np.ones(2, F32), w)])
        with pytest.raises(ValueError, match="updates Variables, not ndarray"):
            optimizer.apply_gradients([(np.ones(2, F32), np.ones(2))])
        with pytest.raises(ValueError, match=r"SGD.apply_gradients takes pairs, as in \[\(gradient, variable\)\]"):
            optimizer.apply_gradients((np.ones(3, F32), w))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            optimizer.apply_gradients(zip([np.ones(2, F32)] * 2, [w], strict=True))
        optimizer.apply_gradients([])
        optimizer.apply_gradients(zip((), (), strict=True))
    assert [[number for _, number in dense] for _, dense, _ in backend.applied] == [[b.number]]


def test_where_gradients_cannot_be_applied(s: CentralStorageStrategy, replica: Callable[[], Any]) -> None:
    optimizer, w = made(s), variable(s, 2)
    pairs = [(np.ones(2, F32), w)]
    for call in (optimizer.apply_gradients, lambda given: cs.get_strategy().run(optimizer.apply_gradients, (given,))):
        with pytest.raises(ContextError, match="inside a replica function of a CentralStorageStrategy"):
            call(pairs)
    with s.scope(), pytest.raises(ContextError, match="inside a replica function"):
        optimizer.apply_gradients(pairs)
    with replica(), pytest.raises(NotImplementedError, match="experimental_aggregate_gradients=False"):
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
    with replica(), pytest.raises(ContextError, match="cannot be made in a replica"):
        cs.optimizers.SGD(0.1)
    foreign = variable(strategy(Backend()), 2)
    with replica(), pytest.raises(ContextError, match="belongs to another strategy than optimizer SGD"):
        optimizer.apply_gradients([(np.ones(2, F32), foreign)])


# --- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_arrays_of_the_variables_shape(s: CentralStorageStrategy) -> None:
    optimizer, w = made(s, "Adam", amsgrad=True), variable(s, 2, 3)
    assert optimizer.slot_names == ["m", "v", "vhat"]
    slot = optimizer.get_slot(w, "v")
    assert (slot.name, slot.shape, slot.dtype) == ("w/v", (2, 3), F32)
    assert slot.assign(np.full((2, 3), 2, F32)) is slot
    assert np.asarray(slot).tolist() == slot.value().tolist() == slot.numpy().tolist() == [[2] * 3] * 2
    assert optimizer.get_slot(w, "m").numpy().tolist() == [[0] * 3] * 2
    assert (slot + 1 - optimizer.get_slot(w, "m")).tolist() == [[3] * 3] * 2
    with pytest.raises(InvalidArgumentError, match="slot w/v is float32"):
        slot.assign(np.zeros((2, 3)))
    with pytest.raises(InvalidArgumentError, match="Adam has no slot 'momentum'; its slots: m, v, vhat"):
        optimizer.get_slot(w, "momentum")
    with pytest.raises(ContextError, match="belongs to no strategy yet"):
        optimizer.get_slot(cs.Variable(1.0), "m")


def test_asking_for_a_slot_adopts_the_optimizer(s: CentralStorageStrategy, backend: Backend) -> None:
    optimizer, w = cs.optimizers.Adagrad(), variable(s, 2)
    assert optimizer.get_slot(w, "accumulator").numpy().tolist() == [0, 0]
    assert list(backend.optimizers) == [1]
