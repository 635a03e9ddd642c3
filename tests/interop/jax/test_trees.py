"""Trees of variables: what becomes one, and what its arrays are."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(200))


def test_neither_the_package_nor_its_own_modules_import_jax() -> None:
    code = "import central_storage as cs, sys; cs.optimizers, cs.Variable; print('jax' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_it_is_an_attribute_of_the_package() -> None:
    code = "import central_storage as cs; print(cs.jax.centralize.__module__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip().startswith("central_storage.jax")


def test_arrays_become_variables_that_are_named_by_their_paths(two: cs.CentralStorageStrategy) -> None:
    def act(x: Any) -> Any:
        return x

    tree = {
        "paths": [{"w": jnp.ones((2, 3)), "b": np.zeros(3, np.float32)}],
        "steps": jnp.arange(3),
        "mask": jnp.array([True, False]),
        "numbers": (1, 2.5, True, None),
        "act": act,
        "relu": jax.nn.relu,
        "text": "gelu",
    }
    with two.scope():
        model = csj.centralize(tree)
    assert model["paths"][0]["w"].name == "paths/0/w"
    assert model["paths"][0]["w"].trainable
    assert not model["steps"].trainable
    assert not model["mask"].trainable
    assert model["steps"].dtype == np.int32
    assert model["numbers"] == (1, 2.5, True, None)
    assert (model["act"], model["relu"], model["text"]) == (act, jax.nn.relu, "gelu")
    for original, there in ((tree["paths"][0]["w"], model["paths"][0]["w"]), (tree["mask"], model["mask"])):
        np.testing.assert_array_equal(original, there.numpy())


def test_what_is_a_variable_already_stays(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(2)})
        assert csj.centralize({"again": model["w"]})["again"] is model["w"]


def test_leaves_can_stay_untrained(two: cs.CentralStorageStrategy) -> None:
    tree = {"params": {"w": jnp.ones(2)}, "stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    with two.scope():
        by_prefix = csj.centralize(tree, trainable={"params": True, "stats": False})
        by_function = csj.centralize(tree, trainable=lambda tree: jax.tree.map(lambda leaf: leaf.sum() == 2, tree))
        with pytest.raises(cs.errors.InvalidArgumentError, match="trainable is no prefix"):
            csj.centralize(tree, trainable={"params": True})
        with pytest.raises(
            cs.errors.InvalidArgumentError, match="trainable has bools at its leaves, not 'frozen' as at s"
        ):
            csj.centralize(tree, trainable={"params": True, "stats": "frozen"})
    assert [leaf.trainable for leaf in jax.tree.leaves(by_prefix)] == [True, False, False]
    assert [leaf.trainable for leaf in jax.tree.leaves(by_function)] == [True, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_floats_have_float32_variables(two: cs.CentralStorageStrategy, dtype: str) -> None:
    values = jnp.arange(5, dtype=dtype)
    with two.scope():
        model = csj.centralize({"w": values})
    assert isinstance(model["w"], csj.Narrow)
    assert (model["w"].variable.dtype, model["w"].dtype, model["w"].shape) == (np.float32, values.dtype, (5,))
    assert (model["w"].ndim, model["w"].size, model["w"].variable.name) == (1, 5, model["w"].name)
    assert csj.read(model)["w"].dtype == values.dtype

    def seen() -> tuple[str, Any]:
        array = csj.read(model)["w"]
        return str(array.dtype), np.asarray(array, np.float32)

    name, array = two.experimental_local_results(two.run(seen))[1]
    assert name == dtype
    np.testing.assert_array_equal(array, np.arange(5))
    model["w"].assign(values * 2)
    np.testing.assert_array_equal(model["w"].numpy(), np.arange(5) * 2)


def test_64_bits_are_kept_where_jax_has_them(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        assert csj.centralize(np.zeros(2)).dtype == np.float32  # as jnp.asarray makes it
        with jax.enable_x64(True):
            wide = csj.centralize({"w": np.full(2, 1 / 3), "n": np.arange(2)})
    assert (wide["w"].dtype, wide["n"].dtype) == (np.float64, np.int64)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(csj.read(wide)["w"], np.full(2, 1 / 3))
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"variable n has dtype int64.*JAX_ENABLE_X64"):
        csj.read(wide)
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"variable n has dtype int64.*JAX_ENABLE_X64"):
        two.run(lambda: csj.read(wide)["w"].sum())


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (jax.random.key(0), r"the leaf layers/1 is a random key.*csj\.key\(\)"),
        (
            jax.random.PRNGKey(0),
            r"the leaf layers/1 is uint32\[2\], as a random key of .*csj\.key\(\).*astype\('int32'\)",
        ),
        (np.zeros(2, np.uint32), r"the leaf layers/1 is uint32\[2\], as a random key of jax\.random\.PRNGKey is"),
        (jnp.zeros(2, jnp.int4), "the leaf layers/1 has dtype int4"),
        (np.array(["a"]), "the leaf layers/1 has dtype <U1"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "the leaf layers/1 is a MaskedArray"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "the leaf layers/1 is a ShapeDtypeStruct"),
        (0.5, r"the leaf layers/1 is the number 0\.5, which jax\.grad would train"),
    ],
)
def test_a_leaf_that_cannot_be_a_variable_is_named(two: cs.CentralStorageStrategy, leaf: Any, said: str) -> None:
    before = len(two.variables)
    with two.scope(), pytest.raises(cs.errors.InvalidArgumentError, match=said):
        csj.centralize({"layers": [jnp.ones(2), leaf]})
    assert len(two.variables) == before


def test_uint32_arrays_of_other_shapes_are_variables(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"edges": jnp.zeros((3, 2), jnp.uint32), "pair": jnp.zeros(2, jnp.int32)})
    assert [leaf.trainable for leaf in jax.tree.leaves(model)] == [False, False]


def test_a_number_is_a_constant_where_jax_would_not_train_it(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        assert csj.centralize({"w": jnp.ones(2), "scale": 0.5}, trainable={"w": True, "scale": False})["scale"] == 0.5
        assert csj.centralize({"w": jnp.ones(2), "scale": 0.5, "act": jax.nn.relu})["scale"] == 0.5
        assert csj.centralize({"w": jnp.ones(2), "scale": np.float32(0.5)})["scale"].trainable


def test_a_variable_of_another_strategy_is_named(two: cs.CentralStorageStrategy) -> None:
    with cs.CentralStorageStrategy(in_process=True) as other:
        with other.scope():
            theirs = csj.centralize({"w": jnp.ones(2)})
        with two.scope(), pytest.raises(cs.errors.InvalidArgumentError, match="leaf a/w is variable w of another"):
            csj.centralize({"a": theirs})


def test_it_needs_a_scope(two: cs.CentralStorageStrategy) -> None:
    with pytest.raises(cs.errors.ContextError, match=r"strategy\.scope\(\)"):
        csj.centralize({"w": jnp.ones(2)})
    with pytest.raises(RuntimeError, match="in a replica"):
        two.run(lambda: csj.centralize({"w": np.ones(2)}))


def test_a_replica_reads_the_servers_memory(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones((300, 100)), "scalar": jnp.float32(3), "act": jax.nn.relu, "n": 2})

    def places() -> list[bool]:
        arrays = csj.read(model)
        assert arrays["n"] == 2
        assert callable(arrays["act"])
        return [
            arrays[name].unsafe_buffer_pointer() == np.asarray(model[name]).__array_interface__["data"][0]
            for name in ("w", "scalar")
        ]

    assert two.run(places) == [True, True]


def test_what_the_script_reads_stays(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(1000)})
    before = csj.read(model)
    model["w"].assign(np.zeros(1000, np.float32))
    assert isinstance(before["w"], jax.Array)
    np.testing.assert_array_equal(before["w"], np.ones(1000))


def test_donating_what_was_read_changes_nothing(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(4096)})

    def donate() -> tuple[float, float]:
        given = csj.read(model)["w"]
        made = jax.jit(lambda x: x * 2, donate_argnums=0)(given)
        return float(made.sum()), float(np.asarray(model["w"]).sum())

    assert two.experimental_local_results(two.run(donate))[0] == (8192, 4096)
    np.testing.assert_array_equal(model["w"].numpy(), np.ones(4096))


def test_reading_in_a_traced_function_is_refused(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(2)})
    with pytest.raises(cs.errors.ContextError, match=r"csj\.read in a function that JAX traces"):
        jax.jit(lambda x: x + csj.read(model)["w"])(1.0)
    with pytest.raises(RuntimeError, match=r"csj\.read in a function that JAX traces"):
        two.run(lambda: jax.jit(lambda x: x + csj.read(model)["w"])(1.0).sum())


@pytest.mark.parametrize(
    "use",
    [
        lambda w: jax.jit(lambda x: x)(w),
        lambda w: jax.grad(lambda x: x.sum())(w),
        lambda w: jax.vmap(lambda x: x)(w),
        lambda w: jnp.sum(w),
        lambda w: jnp.dot(jnp.ones(2), w),
        lambda w: jax.lax.sin(w),
        lambda w: jax.jit(lambda x: x["w"])({"w": w}),
        lambda w: jax.jit(lambda x: x + jnp.sum(w))(1.0),
        lambda w: jax.device_put(w),
    ],
)
def test_jax_says_how_to_read_a_variable(use: Any, two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        wide, narrow = csj.centralize((jnp.ones(2), jnp.ones(2, jnp.bfloat16)))
    for leaf in (wide, narrow):
        with pytest.raises(cs.errors.InvalidArgumentError, match=rf"{leaf.name} is a variable: csj\.read"):
            use(leaf)
    with pytest.raises(ValueError, match=r"is a variable: csj\.read"):
        two.run(lambda: use(csj.read and wide))


def test_an_operand_of_a_traced_array_says_so_too(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = csj.centralize(jnp.ones(2))
    np.testing.assert_array_equal(jnp.ones(2) * w, np.ones(2))  # as ever, outside of traced functions
    for use in (lambda x: x * w, lambda x: w @ x):
        with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
            jax.jit(use)(jnp.ones(2))
        assert any("csj.read(variable)" in note for note in caught.value.__notes__)


def test_a_checkpoint_holds_the_leaves(two: cs.CentralStorageStrategy, tmp_path: Any) -> None:
    with two.scope():
        model = csj.centralize({"w": jnp.ones(2), "n": jnp.full(2, 2, jnp.bfloat16)})
    checkpoint = cs.train.Checkpoint(model=model)
    path = checkpoint.save(str(tmp_path / "kept"))
    for leaf in jax.tree.leaves(model):
        leaf.assign(np.zeros(2, np.float32))
    checkpoint.restore(path).assert_consumed()
    assert [leaf.numpy().tolist() for leaf in jax.tree.leaves(model)] == [[2, 2], [1, 1]]


def test_bfloat16_outside_a_tree_is_refused_with_a_remedy() -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match=r"use astype\('float32'\)"):
        cs.Variable(jnp.zeros(2, jnp.bfloat16))
