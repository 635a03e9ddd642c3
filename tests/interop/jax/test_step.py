"""A step from a loss: the mean over the rows of the global batch, one trace for each shape, and errors that change
nothing."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(200))


def parameters() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "first": {"w": jax.random.normal(first, (5, 8)), "b": jnp.zeros(8)},
        "second": {"w": jax.random.normal(second, (8, 3)) * 0.3, "b": jnp.zeros(3)},
    }


def mean_loss(tree: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ tree["first"]["w"] + tree["first"]["b"])
    scores = hidden @ tree["second"]["w"] + tree["second"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def rows_of(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 5)).astype(np.float32), random.integers(0, 3, rows)


def in_optax(batches: Any, optimizer: Any, loss: Any = mean_loss) -> tuple[Any, list[float]]:
    """The parameters after these batches with optax alone, and the losses."""
    tree, losses = parameters(), []
    state = optimizer.init(tree)
    compiled = jax.jit(jax.value_and_grad(loss))
    for batch in batches:
        value, gradients = compiled(tree, *batch)
        updates, state = optimizer.update(gradients, state, tree)
        tree = optax.apply_updates(tree, updates)
        losses.append(float(value))
    return tree, losses


def assert_close(tree: Any, expected: Any, tolerance: float = 2e-6) -> None:
    for found, wanted in zip(jax.tree.leaves(csj.read(tree)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [[16] * 6, [7, 3, 1, 1, 2, 5]], ids=["even", "uneven and empty"])
@pytest.mark.parametrize("way", ["batches", "plain", "distributed", "ahead"])
def test_the_mean_over_the_batch_is_trained_whatever_the_shares(
    two: cs.CentralStorageStrategy, rows: list[int], way: str
) -> None:
    data = [rows_of(number, count) for number, count in enumerate(rows)]
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(mean_loss)
    if way == "ahead":
        losses = list(train.ahead(csj.batches(two, data)))
    elif way == "batches":
        losses = [train(batch) for batch in csj.batches(two, data)]
    elif way == "distributed":
        losses = [train(batch) for batch in two.experimental_distribute_dataset(data)]
    else:
        losses = [train(batch) for batch in data]
    expected, in_one = in_optax(data, optax.sgd(0.5))
    np.testing.assert_allclose(losses, in_one, rtol=2e-6)
    assert_close(model, expected)


def test_the_same_bits_ahead_and_one_by_one(two: cs.CentralStorageStrategy) -> None:
    data = [rows_of(number, 9) for number in range(8)]
    kept = []
    for ahead in (False, True):
        with two.scope():
            model = csj.centralize(parameters())
        optimizer = csj.optim.adam(csj.optim.cosine_decay_schedule(0.1, 8))
        train = csj.step(model, optimizer)(mean_loss)
        batches = csj.batches(two, data)
        losses = list(train.ahead(batches)) if ahead else [train(batch) for batch in batches]
        kept.append((losses, [leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(csj.read(model)))]))
    assert kept[0] == kept[1]


def test_rows_count_by_their_weights(two: cs.CentralStorageStrategy) -> None:
    def by_tokens(tree: Any, x: Any, y: Any, tokens: Any) -> Any:
        hidden = jnp.tanh(x @ tree["first"]["w"] + tree["first"]["b"])
        scores = hidden @ tree["second"]["w"] + tree["second"]["b"]
        each = optax.softmax_cross_entropy_with_integer_labels(scores, y)
        return (each * tokens).sum() / tokens.sum()

    data = [(*rows_of(number, 5), np.float32([3, 0, 1, 0, 0])) for number in range(4)]  # the second share counts 0
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(by_tokens)
    losses = [train(batch) for batch in csj.batches(two, data, weight=lambda batch: batch[2])]
    expected, in_one = in_optax(data, optax.sgd(0.5), by_tokens)
    np.testing.assert_allclose(losses, in_one, rtol=2e-6)
    assert_close(model, expected)


@pytest.mark.parametrize("weight", [[1, 1], [1, -1, 1], [0, 0, 0], [1, np.nan, 1]])
def test_wrong_weights_are_refused(two: cs.CentralStorageStrategy, weight: list[float]) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="weights of a batch of 3 rows"):
        next(iter(csj.batches(two, [np.zeros((3, 2))], weight=lambda batch: weight)))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((np.zeros((2, 1)), np.zeros(3)), "same number of rows"),
        ((np.zeros((0, 1)),), "at least one row"),
        ((np.zeros((2, 1)), np.float32(1)), "same number of rows"),
    ],
)
def test_a_batch_needs_rows(two: cs.CentralStorageStrategy, batch: Any, said: str) -> None:
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(lambda tree, *share: tree["first"]["b"].sum())
    for feed in (lambda: train(batch), lambda: next(iter(csj.batches(two, [batch])))):
        with pytest.raises(cs.errors.InvalidArgumentError, match=said):
            feed()


def test_arrays_that_a_compiled_function_of_jax_misreads(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(())})
    train = csj.step(model, csj.optim.sgd(0.0))(lambda tree, x: tree["w"] * x.mean())
    x = np.float32([1, 2, 3, 6])
    batches = [x, x.astype(">f4"), np.ma.masked_greater(x, 3)]
    for data in (batches, csj.batches(two, batches), two.experimental_distribute_dataset(batches)):
        first, second, masked = data
        assert train(first) == train(second) == 3  # the second finds what was compiled for its shape and dtype
        with pytest.raises(cs.errors.InvalidArgumentError, match=r"masked array .* use \.filled"):
            train(masked)


def test_a_batch_that_is_no_tuple_is_one_argument(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.zeros(())})
    train = csj.step(model, csj.optim.sgd(1.0))(lambda tree, batch: tree["w"] * batch["x"].mean())
    train({"x": np.float32([1, 2, 3])})
    assert model["w"].numpy() == -2


class Rows(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "loss",
    [
        lambda tree, x, y: tree["w"] * (x * y).mean(),
        lambda tree, *rows: tree["w"] * (rows[0] * rows[1]).mean(),
        lambda tree, rows: tree["w"] * (rows[0] * rows[1]).mean(),
    ],
)
def test_a_loss_takes_the_parts_of_a_batch_or_the_whole(two: cs.CentralStorageStrategy, loss: Any) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(())})
    train = csj.step(model, csj.optim.sgd(0.0))(loss)
    x, y = np.float32([1, 2, 3]), np.float32([1, 1, 4])
    assert train((x, y)) == train([x, y]) == train(x, y) == pytest.approx(5)


def test_a_named_tuple_is_one_argument(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(())})
    train = csj.step(model, csj.optim.sgd(0.0))(lambda tree, rows, power=1: tree["w"] * (rows.x * rows.y**power).mean())
    assert train(Rows(np.float32([1, 2, 3]), np.float32([1, 1, 4]))) == pytest.approx(5)


def test_a_batch_of_another_strategy_is_refused(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(mean_loss)
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        theirs = csj.batches(other, [rows_of(0, 4)])
        with pytest.raises(cs.errors.InvalidArgumentError, match="split over 1 replica"):
            train(next(iter(theirs)))
        with pytest.raises(cs.errors.InvalidArgumentError, match="split over 1 replica"):
            list(train.ahead(theirs))
    assert_close(model, parameters(), 0)


def test_what_a_weight_and_a_batch_must_be(two: cs.CentralStorageStrategy) -> None:
    with pytest.raises(TypeError, match="weight must be a function"):
        csj.batches(two, [rows_of(0, 4)], weight=[1.0] * 4)  # type: ignore[arg-type]
    with pytest.raises(cs.errors.InvalidArgumentError, match="convert it from bfloat16 to float32"):
        next(iter(csj.batches(two, [jnp.ones(4, jnp.bfloat16)])))


def test_the_settings_of_a_step_stay_its_own() -> None:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        with jax.enable_x64(True):
            with strategy.scope():
                model = csj.centralize({"w": jnp.ones(())})
            train = csj.step(model, csj.optim.sgd(0.5))(lambda tree, x: tree["w"] * x.mean())
        train(np.ones(2))
        assert model["w"].dtype == np.float64
        assert strategy.run(lambda: str(jnp.ones(1, float).dtype)) == "float32"
        assert not jax.config.jax_enable_x64


def test_batches_keep_what_a_data_set_knows(two: cs.CentralStorageStrategy) -> None:
    data = csj.batches(two, cs.data.Dataset.range(10).shuffle(10, seed=3).batch(4))
    assert data.cardinality == 3
    batch, weights = data.element_spec
    assert (batch.values[0].dtype, weights.values[0].shape) == (np.int64, (None, 2))
    rows = [two.reduce("SUM", batch, axis=0) for batch, _ in data]
    assert sum(rows) == 45
    orders = data.orders()
    assert len(orders) == 1


def test_ahead_refuses_batches_without_weights(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(mean_loss)
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"csj\.batches"):
        train.ahead(two.experimental_distribute_dataset([rows_of(0, 4)]))
    assert len(list(train.ahead([rows_of(0, 4)] * 3, steps=2))) == 2


def test_a_bar_shows_the_mean_loss_of_the_batch(
    two: cs.CentralStorageStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5))(mean_loss)
    *_, loss = train.ahead([rows_of(0, 4)] * 3, progress="training")
    assert re.fullmatch(rf"training: 3 of 3 steps in .*, loss {loss:.4g}\n", capsys.readouterr().err)


def test_a_loss_is_traced_once_for_each_shape_of_a_share(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(parameters())

    def loss(tree: Any, x: Any, y: Any) -> Any:
        import builtins

        builtins.cs_traces = [*getattr(builtins, "cs_traces", ()), x.shape[0]]  # type: ignore[attr-defined]
        return mean_loss(tree, x, y)

    def traces() -> str:
        import builtins

        return str(builtins.cs_traces)  # type: ignore[attr-defined]

    train = csj.step(model, csj.optim.sgd(0.1))(loss)
    for rows in (8, 8, 5, 8, 5, 1, 1):
        train(rows_of(rows, rows))
    assert two.experimental_local_results(two.run(traces)) == ("[4, 3, 1]", "[4, 2]")


def test_aux_comes_from_every_replica_that_has_rows(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(parameters())

    def loss(tree: Any, x: Any, y: Any) -> Any:
        return mean_loss(tree, x, y), {"x": x, "half": jnp.ones(2, jnp.bfloat16), "w": tree["first"]["w"]}

    train = csj.step(model, csj.optim.sgd(0.1), has_aux=True)(loss)
    x, y = rows_of(0, 5)
    before = model["first"]["w"].numpy()
    value, aux = train((x, y))
    assert value > 0
    np.testing.assert_array_equal(two.gather(aux["x"], axis=0), x)
    assert aux["half"].values[0].dtype == np.float32
    np.testing.assert_array_equal(aux["w"].values[1], before)
    _, aux = train((x[:1], y[:1]))
    assert len(aux["x"].values) == 1


def test_keys_differ_by_step_replica_and_call_and_come_again(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(())})

    def noisy(tree: Any, x: Any) -> Any:
        draws = jnp.stack([jax.random.normal(csj.key()), jax.random.normal(csj.key())])
        return tree["w"] * draws.mean(), draws

    def train_all(strategy: cs.CentralStorageStrategy, model: Any) -> np.ndarray:
        train = csj.step(model, csj.optim.sgd(0.1), has_aux=True)(noisy)
        return np.array([train(np.zeros((2, 1)))[1].values for _ in range(3)])

    draws = train_all(two, model)
    assert len(np.unique(draws)) == 12
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=7, in_process=True) as again:
        with again.scope():
            model = csj.centralize({"w": jnp.ones(())})
        np.testing.assert_array_equal(train_all(again, model), draws)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=8, in_process=True) as other:
        with other.scope():
            model = csj.centralize({"w": jnp.ones(())})
        assert not np.isin(train_all(other, model), draws).any()


def test_a_key_in_a_replica_function(two: cs.CentralStorageStrategy) -> None:
    def draw() -> np.ndarray:
        keys = [csj.key(), csj.key()]
        return np.array([jax.random.normal(key) for key in keys])

    first, second = two.experimental_local_results(two.run(draw))
    assert len({*first, *second}) == 4
    with pytest.raises(cs.errors.ContextError, match="function that a strategy runs"):
        csj.key()
    with pytest.raises(RuntimeError, match=r"csj\.key in a function that JAX traces"):
        two.run(lambda: jax.jit(lambda: csj.key())())


def test_a_worker_that_dies_is_repeated_with_the_same_bits() -> None:
    def trained(dies: bool) -> tuple[list[float], bytes]:
        with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=3) as strategy:
            with strategy.scope():
                model = csj.centralize(parameters())

            def loss(tree: Any, x: Any, y: Any) -> Any:
                keep = jax.random.bernoulli(csj.key(), 0.8, x.shape)
                return mean_loss(tree, x * keep, y)

            train = csj.step(model, csj.optim.adam(0.05))(loss)
            losses = []
            for number in range(4):
                if dies and number == 2:
                    pid = strategy.statistics().replicas[1].pid
                    strategy.run(lambda pid=pid: __import__("os").getpid() == pid)
                    __import__("os").kill(pid, 9)
                losses.append(train(rows_of(number, 6)))
            return losses, b"".join(leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(csj.read(model))))

    assert trained(dies=False) == trained(dies=True)


def test_the_settings_of_jax_are_those_of_the_script(two: cs.CentralStorageStrategy) -> None:
    with jax.enable_x64(True):
        with two.scope():
            model = csj.centralize(parameters())
        train = csj.step(model, csj.optim.sgd(0.5), has_aux=True)(lambda tree, x, y: (mean_loss(tree, x, y), x.sum()))
        assert model["first"]["w"].dtype == np.float64
        x, y = rows_of(0, 4)
        _, seen = train((x.astype(np.float64), y))
    assert seen.values[0].dtype == np.float64
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.5), has_aux=True)(lambda tree, x, y: (mean_loss(tree, x, y), x.sum()))
    assert train((x, y))[1].values[0].dtype == np.float32


def test_untrained_variables_reach_the_loss_and_stay(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        tree = {"w": jnp.ones(2), "shift": jnp.arange(2), "mean": jnp.full(2, 3.0), "factor": 2.0, "act": jnp.tanh}
        model = csj.centralize(
            tree, trainable=lambda tree: {**tree, "mean": False} | dict.fromkeys(("w", "shift"), True)
        )

    def loss(tree: Any, x: Any) -> Any:
        assert tree["factor"] == 2.0
        return (tree["act"](tree["w"] * tree["factor"] + tree["shift"] - tree["mean"]) * x.mean()).sum()

    csj.step(model, csj.optim.adamw(0.1))(loss)(np.ones(4, np.float32))
    np.testing.assert_array_equal(model["mean"].numpy(), [3, 3])
    np.testing.assert_array_equal(model["shift"].numpy(), [0, 1])
    assert (model["w"].numpy() != 1).all()


def _read_now(tree: Any) -> Any:
    return jnp.asarray(_other).sum() + tree["w"].sum()


_other: Any = None


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (lambda tree, x: tree["w"] * x, cs.errors.InvalidArgumentError, r"one real number.*shape \(2, 4\)"),
        (lambda tree, x: tree["w"].sum() * 1j, cs.errors.InvalidArgumentError, "one real number.*complex64"),
        (lambda tree, x: x.sum(), cs.errors.InvalidArgumentError, "does not depend on the tree"),
        (lambda tree, x: 1.0, cs.errors.InvalidArgumentError, "does not depend on the tree"),
        (lambda tree, x: None, cs.errors.InvalidArgumentError, "must return a scalar, not None"),
        (lambda tree, x: (tree["w"].sum(), x), cs.errors.InvalidArgumentError, "has_aux=True"),
        (lambda tree, x: tree["w"].sum() * jnp.nan, FloatingPointError, "is nan for a share of 2 rows"),
        (lambda tree, x: jnp.log(tree["w"].sum() * 0), FloatingPointError, "is -inf"),
        (lambda tree, x: tree["w"].sum() + cs.random.generator().random(), cs.errors.ContextError, r"csj\.key\(\)"),
        (
            lambda tree, x: jax.vmap(lambda row: row * jax.random.normal(csj.key()))(x).sum() * tree["w"].sum(),
            cs.errors.ContextError,
            r"csj\.key\(\) was called in a nested",
        ),
        (
            lambda tree, x: cs.get_replica_context().all_reduce("SUM", np.ones(1)).sum() + tree["w"].sum(),
            cs.errors.ContextError,
            "all_reduce is used in the loss",
        ),
    ],
)
def test_a_wrong_loss_is_named_and_changes_nothing(
    two: cs.CentralStorageStrategy, loss: Any, error: type[Exception], said: str
) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(4)})
    optimizer = csj.optim.adam(0.1)
    with pytest.raises(error, match=f"(?s){said}"):
        csj.step(model, optimizer)(loss)(np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(model["w"].numpy(), np.ones(4))
    assert optimizer.count == 0
    csj.step(model, optimizer)(lambda tree, x: (tree["w"] * x).sum())(np.ones((4, 4), np.float32))  # the next one works
    assert optimizer.count == 1


def test_a_variable_that_the_loss_captures_is_named(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model, other = csj.centralize(({"w": jnp.ones(4)}, jnp.ones(4)))
    for loss in (
        lambda tree, x: (tree["w"] * jnp.asarray(other)).sum(),
        lambda tree, x: (tree["w"] * other).sum(),
        lambda tree, x: (tree["w"] * other.numpy()).sum(),
        lambda tree, x: (tree["w"] * csj.read(other)).sum(),
    ):
        with pytest.raises(
            cs.errors.ContextError, match=r"is read in the loss|csj\.read in a function that JAX traces"
        ):
            csj.step(model, csj.optim.sgd(0.1))(loss)(np.ones((4, 4), np.float32))


def test_a_wrong_tree_is_named(two: cs.CentralStorageStrategy) -> None:
    optimizer = csj.optim.sgd(0.1)
    with two.scope():
        model = csj.centralize({"w": jnp.ones(4), "n": jnp.arange(2)})
        wave = csj.centralize({"w": jnp.ones(2, jnp.complex64)})
    with cs.CentralStorageStrategy(in_process=True) as other:
        with other.scope():
            theirs = csj.centralize({"w": jnp.ones(2)})
        for tree, said in [
            ({"a": model["w"], "b": theirs["w"]}, "the leaf b is variable w of another strategy than the leaf a"),
            ({"a": model["w"], "b": {"c": jnp.ones(2)}}, "the leaf b/c is an array of its own"),
            ({"a": model["n"], "b": None, "c": 1.0}, "no leaf of the tree is a variable that is trained"),
            ({"a": model["w"], "b": model["w"]}, "the leaves a and b are one variable"),
            (wave, "the leaf w is complex"),
            (jnp.ones(2), "the leaf itself is an array of its own"),
        ]:
            with pytest.raises(cs.errors.InvalidArgumentError, match=said):
                csj.step(tree, optimizer)
        csj.step(model, optimizer)(lambda tree, x: tree["w"].sum() * x.sum())
        with pytest.raises(cs.errors.ContextError, match="another strategy"):
            csj.step(theirs, optimizer)(lambda tree, x: tree["w"].sum() * x.sum())


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (optax.adam(0.1), r"csj\.optim\.adam\(\.\.\.\) in place of optax\.adam"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "not one of optax itself"),
        (cs.optimizers.Adam(0.1), r"not cs\.optimizers\.Adam"),
        (csj.optim.clip_by_global_norm(1.0), r"csj\.optim\.chain"),
        (0.1, "not 0.1"),
    ],
)
def test_a_wrong_optimizer_is_named(two: cs.CentralStorageStrategy, optimizer: Any, said: str) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(4)})
    with pytest.raises(TypeError, match=said):
        csj.step(model, optimizer)


def test_the_learning_rate_can_be_set_at_any_step(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.zeros(())})
    optimizer = csj.optim.sgd(1.0)
    train = csj.step(model, optimizer)(lambda tree, x: tree["w"] * x.mean())
    train(np.float32([1, 1]))
    optimizer.learning_rate = 0.5
    train(np.float32([1, 1]))
    assert model["w"].numpy() == -1.5
    optimizer.learning_rate = lambda count: 0.25 * count
    train(np.float32([1, 1]))
    assert model["w"].numpy() == -2.0
    with pytest.raises(cs.errors.InvalidArgumentError, match="learning_rate must be a number"):
        optimizer.learning_rate = "fast"


def test_two_steps_share_an_optimizer(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.zeros(3)})
    optimizer = csj.optim.sgd(1.0, momentum=0.5)
    first = csj.step(model, optimizer)(lambda tree, x: tree["w"].sum() * x.mean())
    second = csj.step(model, optimizer)(lambda tree, x: 2 * tree["w"].sum() * x.mean())
    first(np.ones(2, np.float32))
    second(np.ones(2, np.float32))
    np.testing.assert_array_equal(model["w"].numpy(), [-3.5] * 3)
    assert optimizer.count == 2


def test_a_checkpoint_resumes(two: cs.CentralStorageStrategy, tmp_path: Any) -> None:
    data = cs.data.Dataset.from_tensor_slices(rows_of(0, 60)).shuffle(60, seed=1).batch(8)
    directory = str(tmp_path / "kept")

    def trained(steps: list[int], save_after: int | None) -> tuple[list[float], bytes]:
        with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=3, in_process=True) as strategy:
            with strategy.scope():
                model = csj.centralize(parameters())
            optimizer = csj.optim.adam(csj.optim.exponential_decay(0.1, 2, 0.9))

            def loss(tree: Any, x: Any, y: Any) -> Any:
                return mean_loss(tree, x * jax.random.bernoulli(csj.key(), 0.8, x.shape), y)

            train = csj.step(model, optimizer)(loss)
            batches = csj.batches(strategy, data)
            if save_after is None:
                strategy.restore(directory, data=batches)
            losses = []
            elements = iter(batches)
            for number in steps:
                losses.append(train(next(elements)))
                if number == save_after:
                    strategy.save(directory, data=elements)
            return losses, b"".join(leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(csj.read(model))))

    losses, bits = trained([0, 1, 2, 3, 4, 5], save_after=2)
    assert trained([3, 4, 5], save_after=None) == (losses[3:], bits)
