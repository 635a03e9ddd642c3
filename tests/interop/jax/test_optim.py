"""The server's rules of optax against optax itself, in one process, on the same batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(300))

STEPS = 50
#: Name, arguments, and whether the optimizer has weight decay.
OPTIMIZERS = [
    ("adam", {}),
    ("adam", {"b1": 0.8, "b2": 0.99, "eps": 1e-3, "eps_root": 1e-5}),
    ("adam", {"nesterov": True}),
    ("adamw", {"weight_decay": 0.1}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adagrad", {}),
    ("adagrad", {"initial_accumulator_value": 0.0, "eps": 1e-10}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.9, "eps_in_sqrt": False}),
    ("rmsprop", {"centered": True, "initial_scale": 1.0}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "nesterov": True}),
    ("rmsprop", {"bias_correction": True}),
    ("lion", {"weight_decay": 0.1}),
    ("lamb", {"weight_decay": 0.1}),
]


def tree_of(dtype: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "a": {"w": jax.random.normal(keys[0], (4, 6), dtype), "b": jnp.full(6, 0.1, dtype)},
        "c": [jax.random.normal(keys[1], (6, 2), dtype)],
    }


def loss(tree: Any, x: Any, y: Any) -> Any:
    # Two leaves have gradients that are far smaller than those of the third.
    return ((jnp.tanh(x @ tree["a"]["w"] + tree["a"]["b"]) @ tree["c"][0] - y) ** 2).mean()


def data(dtype: Any) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(5)
    return [
        (random.normal(size=(6, 4)).astype(dtype), 10.0 ** -(step % 4) * random.normal(size=(6, 2)).astype(dtype))
        for step in range(STEPS)
    ]


def with_optax(transformation: Any, tree: Any, batches: Any, state: Any = None) -> tuple[Any, Any]:
    """The tree and the state after these batches, in optax."""
    state = transformation.init(tree) if state is None else state

    @jax.jit
    def step(tree: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = transformation.update(jax.grad(loss)(tree, x, y), state, tree)
        return optax.apply_updates(tree, updates), state

    for batch in batches:
        tree, state = step(tree, state, *batch)
    return tree, state


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    """Every number differs by ``tolerance`` of the largest of its leaf at most."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        other = np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(float(np.abs(other).max(initial=0)), 1e-30))


def made(module: Any, name: str, arguments: dict[str, Any], *, clip: bool, masked: bool, constant: bool = False) -> Any:
    """The optimizer, of optax or of csj.optim."""
    rate = 0.02 if constant else module.warmup_cosine_decay_schedule(0.0, 0.02, 10, STEPS)
    if masked:
        arguments = {**arguments, "mask": lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)}
    optimizer = getattr(module, name)(rate, **arguments)
    return module.chain(module.clip_by_global_norm(0.5), optimizer) if clip else optimizer


#: Of the largest number of a leaf. In float32 optax computes `b ** t` in float32, too, the server in double precision.
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.mark.parametrize(("dtype", "clip"), [("float32", False), ("float64", True)])
@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=lambda value: str(value))
def test_fifty_steps_as_in_optax(
    one: cs.CentralStorageStrategy, name: str, arguments: dict[str, Any], dtype: str, clip: bool
) -> None:
    masked = "weight_decay" in arguments and clip
    constant = dtype == "float64"  # optax computes schedules in float32
    with jax.enable_x64(dtype == "float64"):
        expected, state = with_optax(
            made(optax, name, arguments, clip=clip, masked=masked, constant=constant), tree_of(dtype), data(dtype)
        )
        with one.scope():
            model = csj.centralize(tree_of(dtype))
        optimizer = made(csj.optim, name, arguments, clip=clip, masked=masked, constant=constant)
        train = csj.step(model, optimizer)(loss)
        for batch in data(dtype):
            train(batch)
        assert_near(csj.read(model), expected, TOLERANCE[dtype])
        assert_near(csj.state(optimizer, model), state, 10 * TOLERANCE[dtype])
        assert optimizer.count == STEPS


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS[::3], ids=lambda value: str(value))
def test_a_training_goes_on_in_optax_and_comes_back(
    two: cs.CentralStorageStrategy, name: str, arguments: dict[str, Any]
) -> None:
    batches = data("float32")
    transformation = made(optax, name, arguments, clip=True, masked=False)
    whole, whole_state = with_optax(transformation, tree_of("float32"), batches)

    tree, state = with_optax(transformation, tree_of("float32"), batches[:10])
    with two.scope():
        model = csj.centralize(tree)
    optimizer = made(csj.optim, name, arguments, clip=True, masked=False)
    csj.load_state(optimizer, model, state)
    train = csj.step(model, optimizer)(loss)
    assert_near(csj.state(optimizer, model), state, 0)  # the same numbers, before the first step
    for batch in batches[10:30]:
        train(batch)
    tree, state = with_optax(transformation, csj.read(model), batches[30:], csj.state(optimizer, model))
    assert_near(tree, whole, 1e-4)
    assert_near(state, whole_state, 1e-3)


def test_a_state_of_another_structure_changes_nothing(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(tree_of("float32"))
    optimizer = csj.optim.adam(0.1)
    train = csj.step(model, optimizer)(loss)
    train(data("float32")[0])
    before = csj.state(optimizer, model)
    other = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), before)
    for wrong, said in [
        (optax.sgd(0.1, momentum=0.9).init(tree_of("float32")), "has the structure"),
        (optax.adam(0.1).init({"w": jnp.ones(2)}), "has the structure"),
        (other, r"\[0\]\.count has shape \(3,\)"),
        (None, "has the structure"),
    ]:
        with pytest.raises(cs.errors.InvalidArgumentError, match=said):
            csj.load_state(optimizer, model, wrong)
    for found, kept in zip(jax.tree.leaves(csj.state(optimizer, model)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, kept)


def test_the_state_of_a_tree_with_other_leaves(two: cs.CentralStorageStrategy) -> None:
    tree = {
        "w": jnp.ones(2, jnp.bfloat16),
        "n": jnp.arange(3),
        "act": jax.nn.relu,
        "rate": 0.5,
        "mu": {"nu": jnp.ones(1)},
    }
    with two.scope():
        model = csj.centralize(tree)
    optimizer = csj.optim.adamw(0.1, mask={"w": True, "n": False, "act": False, "rate": False, "mu": False})
    csj.step(model, optimizer)(lambda tree, x: (tree["w"].sum() + tree["mu"]["nu"].sum()) * x.mean())(np.ones(2))
    moments = csj.state(optimizer, model)[0]
    assert moments.mu["n"] is None
    assert moments.mu["act"] is None
    assert moments.mu["w"].dtype == jnp.float32
    np.testing.assert_allclose(moments.mu["mu"]["nu"], 0.1, rtol=1e-6)
    assert int(moments.count) == 1


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_bfloat16_trains_as_float32_that_is_cast_in_the_loss(one: cs.CentralStorageStrategy, name: str) -> None:
    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    transformation, tree = (
        getattr(optax, name)(0.01),
        jax.tree.map(lambda a: a.astype(jnp.float32), cast(tree_of("float32"))),
    )
    state = transformation.init(tree)
    with one.scope():
        model = csj.centralize(cast(tree_of("float32")))
    train = csj.step(model, getattr(csj.optim, name)(0.01))(loss)
    for batch in data("float32")[:20]:
        gradients = jax.grad(lambda tree, *batch: loss(cast(tree), *batch))(tree, *batch)
        updates, state = transformation.update(gradients, state, tree)
        tree = optax.apply_updates(tree, updates)
        train(batch)
    for found, wanted in zip(jax.tree.leaves(model), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-2, atol=1e-3)


SCHEDULES = [
    ("constant_schedule", (0.1,)),
    ("polynomial_schedule", (1.0, 0.1, 2, 20, 5)),
    ("polynomial_schedule", (1.0, 0.1, 2, 0)),
    ("linear_schedule", (0.0, 1.0, 10, 3)),
    ("piecewise_constant_schedule", (1.0, {5: 0.5, 10: 0.1})),
    ("piecewise_constant_schedule", (1.0,)),
    ("exponential_decay", (1.0, 5, 0.5)),
    ("exponential_decay", (1.0, 5, 0.5, 3, True, 0.2)),
    ("exponential_decay", (1.0, 5, 2.0, 0, False, 3.0)),
    ("exponential_decay", (1.0, 0, 2.0)),
    ("cosine_decay_schedule", (1.0, 20, 0.1, 2.0)),
    ("warmup_cosine_decay_schedule", (0.0, 1.0, 10, 30, 0.1, 1.5)),
    ("warmup_cosine_decay_schedule", (0.0, 0.0, 10, 30)),
]


@pytest.mark.parametrize(("name", "arguments"), SCHEDULES, ids=lambda value: str(value))
def test_a_schedule_is_that_of_optax(name: str, arguments: tuple[Any, ...]) -> None:
    ours, theirs = getattr(csj.optim, name)(*arguments), getattr(optax, name)(*arguments)
    for count in range(40):
        assert ours(count) == pytest.approx(float(theirs(count)), rel=1e-5, abs=1e-7)
    joined = [
        module.join_schedules([made, module.constant_schedule(3.0)], [7])
        for module, made in ((csj.optim, ours), (optax, theirs))
    ]
    for count in range(10):
        assert joined[0](count) == pytest.approx(float(joined[1](count)), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_schedule_of_optax_itself_does_as_well(two: cs.CentralStorageStrategy, ahead: bool) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.zeros(())})
    train = csj.step(model, csj.optim.sgd(optax.linear_schedule(1.0, 0.0, 4)))(lambda tree, x: tree["w"] * x.mean())
    batches = [np.ones(2, np.float32)] * 4
    for _ in train.ahead(batches) if ahead else map(train, batches):
        pass
    assert model["w"].numpy() == -2.5


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: csj.optim.adam(0.1, b1=1.0), cs.errors.InvalidArgumentError, "beta_1"),
        (lambda: csj.optim.adam("fast"), cs.errors.InvalidArgumentError, "learning_rate"),
        (lambda: csj.optim.adam(float("nan")), cs.errors.InvalidArgumentError, "learning_rate"),
        (lambda: csj.optim.adam(0.1, mu_dtype=jnp.bfloat16), NotImplementedError, "mu_dtype"),
        (lambda: csj.optim.sgd(0.1, accumulator_dtype=jnp.bfloat16), NotImplementedError, "accumulator_dtype"),
        (lambda: csj.optim.adamw(0.1, weight_decay=lambda count: 0.1), cs.errors.InvalidArgumentError, "weight_decay"),
        (lambda: csj.optim.clip_by_global_norm(0.0), cs.errors.InvalidArgumentError, "bound above 0"),
        (
            lambda: csj.optim.chain(csj.optim.adam(0.1), csj.optim.clip_by_global_norm(1.0)),
            cs.errors.InvalidArgumentError,
            "and then one optimizer",
        ),
        (lambda: csj.optim.chain(), cs.errors.InvalidArgumentError, "and then one optimizer"),
        (lambda: csj.optim.chain(optax.scale(0.5), csj.optim.adam(0.1)), TypeError, "not one of optax itself"),
        (lambda: csj.optim.adafactor, AttributeError, "adafactor.*adamw"),
        (lambda: csj.optim.cosine_decay_schedule(1.0, 0), cs.errors.InvalidArgumentError, "decay_steps"),
        (lambda: csj.optim.piecewise_constant_schedule(1.0, {2: -1.0}), cs.errors.InvalidArgumentError, "at least 0"),
        (lambda: csj.optim.join_schedules([], []), cs.errors.InvalidArgumentError, "one boundary less"),
    ],
)
def test_what_the_server_cannot_do_is_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_a_mask_that_does_not_fit_is_refused(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(tree_of("float32"))
    with pytest.raises(cs.errors.InvalidArgumentError, match="the mask is no prefix of the tree"):
        csj.step(model, csj.optim.adamw(0.1, mask={"a": True}))(loss)
    with pytest.raises(
        cs.errors.InvalidArgumentError, match="adamw: the mask has bools at its leaves, not 'no' as at c/0"
    ):
        csj.step(model, csj.optim.adamw(0.1, mask={"a": True, "c": "no"}))(loss)


def test_a_schedule_that_gives_no_number_is_named(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(tree_of("float32"))
    train = csj.step(model, csj.optim.sgd(lambda count: 0.1 if count < 1 else None))(loss)
    train(data("float32")[0])
    with pytest.raises(cs.errors.InvalidArgumentError, match="at count 1 the schedule returned None"):
        train(data("float32")[0])


def test_a_rate_can_be_set_in_a_loop_ahead(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.zeros(())})
    batches = [np.ones(2, np.float32)] * 4
    for first in (1.0, optax.constant_schedule(1.0)):
        model["w"].assign(np.float32(0))
        optimizer = csj.optim.sgd(first)
        train = csj.step(model, optimizer)(lambda tree, x: tree["w"] * x.mean())
        for number, _ in enumerate(train.ahead(batches, lookahead=1)):
            if number == 0:
                optimizer.learning_rate = 0.5  # from the third step on: the second has been sent
                if first == 1.0:
                    with pytest.raises(cs.errors.ContextError, match="set it before the loop"):
                        optimizer.learning_rate = optax.constant_schedule(0.1)
        assert model["w"].numpy() == -3.0
    optimizer.learning_rate = optax.constant_schedule(0.5)
    train(batches[0])
    assert model["w"].numpy() == -3.5


@pytest.mark.parametrize("ahead", [False, True])
def test_every_tree_has_a_state_of_its_own(two: cs.CentralStorageStrategy, ahead: bool) -> None:
    trees = [tree_of("float32"), jax.tree.map(jnp.zeros_like, tree_of("float32"))]
    rate = optax.linear_schedule(0.1, 0.0, 6)
    expected = [with_optax(optax.adam(rate), tree, data("float32")[:5]) for tree in trees]
    with two.scope():
        models = [csj.centralize(tree) for tree in trees]
    optimizer = csj.optim.adam(rate)
    steps = [csj.step(model, optimizer)(loss) for model in models]
    if ahead:
        for train in steps:
            list(train.ahead(csj.batches(two, data("float32")[:5])))
    else:
        for batch in data("float32")[:5]:
            for train in steps:
                train(batch)
    for model, (tree, state) in zip(models, expected, strict=True):
        assert_near(csj.read(model), tree, 1e-5)
        assert_near(csj.state(optimizer, model), state, 1e-4)
    with pytest.raises(cs.errors.InvalidArgumentError, match="pass the tree that csj"):
        csj.state(optimizer, models[0]["a"])
    csj.step(models[0]["a"], optimizer)(loss)  # a tree of its own from now on, as after init in optax
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(csj.state(optimizer, models[0]["a"])))
