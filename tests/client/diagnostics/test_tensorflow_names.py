"""A name of TensorFlow that is not here is answered with its row of docs/from-tensorflow.md; a near name goes first."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from tests.harness.processes import ROOT

import central_storage as cs
from central_storage.diagnostics.tensorflow_names import INSTEAD, instead_of

#: Modules that have the place of one of TensorFlow's.
MODULES = {
    "tf": "",
    "tf.compat": "compat",
    "tf.data": "data",
    "tf.data.experimental": "data.experimental",
    "tf.distribute": "distribute",
    "tf.distribute.experimental": "distribute.experimental",
    "tf.errors": "errors",
    "tf.keras.metrics": "metrics",
    "tf.keras.optimizers": "optimizers",
    "tf.nest": "nest",
    "tf.nn": "nn",
    "tf.random": "random",
    "tf.train": "train",
}
WHOLE = [(name.strip(), instead) for names, instead in INSTEAD for name in names.split(",") if "*" not in name]


def asked(dotted: str) -> str:
    """The error of asking for a name below ``cs``."""
    with pytest.raises(AttributeError) as caught:  # noqa: PT012  (any part of the way may be missing)
        found: Any = cs
        for part in dotted.split("."):
            found = getattr(found, part)
    return str(caught.value)


@pytest.mark.parametrize(("name", "instead"), WHOLE, ids=[name for name, _ in WHOLE])
def test_a_name_is_answered_with_its_row(name: str, instead: str) -> None:
    said = asked(name.removeprefix("tf."))
    parents = [name.rsplit(".", n)[0] for n in range(name.count("."))]  # the first part that is missing answers
    answers = [found.replace("`", "") for parent in parents if (found := instead_of(parent)) is not None]
    assert any(answer in said for answer in answers), said
    assert "docs/from-tensorflow.md" in said


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("keras", "a function of arrays"),
        ("keras.layers.Dense", "a function of arrays"),
        ("GradientTape", "by hand, with torch or with JAX"),
        ("saved_model", "cs.train.Checkpoint"),
        ("data.experimental.make_csv_dataset", "grain"),
        ("data.TFRecordDataset", "grain"),
        ("distribute.MirroredStrategy", "cs.CentralStorageStrategy"),
        ("distribute.experimental.MultiWorkerMirroredStrategy", "cs.CentralStorageStrategy"),
        ("float32", "np.float32"),
        ("matmul", "np.matmul"),
        ("reduce_sum", "np.sum"),
        ("nn.softmax", "NumPy"),
        ("random.uniform", "cs.random.generator"),
        ("optimizers.Adafactor", "cs.optimizers"),
        ("metrics.CosineSimilarity", "cs.metrics.Metric"),
        ("compat.v1", "TensorFlow 2"),
    ],
)
def test_families_of_names(name: str, word: str) -> None:
    assert word in asked(name)


@pytest.mark.parametrize("module", [module for module in MODULES.values() if module != "compat"])
def test_a_misspelt_name_is_answered_with_the_near_one(module: str) -> None:
    found = importlib.import_module(f"central_storage.{module}".rstrip("."))
    name = max(found.__all__, key=len)
    with pytest.raises(AttributeError, match=f"did you mean '{name}'"):
        getattr(found, name[:-1])


def test_what_is_no_name_of_tensorflow_is_just_missing() -> None:
    assert asked("no_such_thing") == "module 'central_storage' has no attribute 'no_such_thing'"
    assert asked("_private").endswith("'_private'")
    assert not hasattr(cs, "keras")


def test_the_page_has_the_rows() -> None:
    page = (ROOT / "docs/from-tensorflow.md").read_text()
    section = page.partition("\n## Names that are not here\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| .* \| (`tf\..*) \|$", section, re.MULTILINE)
    assert rows == [f"`{names.replace(', ', '`, `')}`: {instead}" for names, instead in INSTEAD]
