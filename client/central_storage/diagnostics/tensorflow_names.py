"""What to use instead of a name of TensorFlow that is not here.

``cs.<name>`` raises an AttributeError that says so. docs/from-tensorflow.md has the rows of :data:`INSTEAD`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

__all__ = ["INSTEAD", "attributes", "instead_of"]

_LOOP = "a loop over `strategy.run` or `strategy.run_steps`"
_GRADIENT = "compute gradients in the replica function, by hand, with torch or with JAX"
_SERVICE = "`cs.CentralStorageStrategy`, with one device for each replica"
_PYTHON = "Python itself: a replica function runs as it is written, and nothing is traced"
_CHECKPOINT = "`strategy.save` and `strategy.restore`, or `cs.train.Checkpoint`"
_GRAIN = "grain or another library; a strategy takes its data sets as they are"
_MODEL = "a function of arrays and `cs.Variable`, or a model of torch or JAX in the replica function"

#: (names of TensorFlow, with ``*`` for any letters; what to use instead). The first row that fits a name is the answer.
INSTEAD: tuple[tuple[str, str], ...] = (
    (
        "tf.keras.optimizers.*, tf.compat.v1.train.*Optimizer",
        "the classes of `cs.optimizers`; there are no others",
    ),
    (
        "tf.keras.metrics.*",
        "the classes of `cs.metrics`; for any other, a class that derives from `cs.metrics.Metric`",
    ),
    ("tf.keras.losses.*, tf.losses", "NumPy for the loss of each example, then `cs.nn.compute_average_loss`"),
    (
        "tf.keras, tf.keras.*, tf.Module, tf.initializers, tf.feature_column, tf.estimator",
        f"{_MODEL}; {_LOOP} in place of `fit`; `cs.optimizers` and `cs.metrics`",
    ),
    ("tf.GradientTape, tf.gradients, tf.hessians, tf.autodiff, tf.stop_gradient, tf.custom_gradient", _GRADIENT),
    ("tf.saved_model, tf.saved_model.*, tf.io.write_graph, tf.train.Saver", _CHECKPOINT),
    (
        "tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy, tf.distribute.Strategy, "
        "tf.distribute.TPUStrategy, tf.distribute.*.TPUStrategy, tf.distribute.MultiWorkerMirroredStrategy, "
        "tf.distribute.*.MultiWorkerMirroredStrategy, tf.distribute.ParameterServerStrategy, "
        "tf.distribute.*.ParameterServerStrategy",
        _SERVICE,
    ),
    (
        "tf.distribute.cluster_resolver, tf.distribute.coordinator, tf.distribute.Server, tf.distribute.*",
        "`cs.connect` for another process, `cs-launch` for containers; there are no clusters",
    ),
    ("tf.tpu, tf.tpu.*, tf.lite, tf.xla, tf.quantization", f"CPUs and NVIDIA GPUs: {_SERVICE}"),
    (
        "tf.config, tf.config.*",
        "`CentralStorageStrategy(compute_devices)`, and `CUDA_VISIBLE_DEVICES` before the start",
    ),
    ("tf.compat.v1, tf.compat.*, tf.contrib", "the names of TensorFlow 2: `cs.compat.v2` is `cs` itself"),
    (
        "tf.Graph, tf.Session, tf.placeholder, tf.get_variable, tf.variable_scope, tf.name_scope, tf.Operation, "
        "tf.control_dependencies, tf.group, tf.no_op, tf.graph_util, tf.init_scope, tf.global_variables_initializer, "
        "tf.no_gradient, tf.raw_ops, tf.autograph",
        _PYTHON,
    ),
    ("tf.variable_creator_scope, tf.create_partitioned_variables", "`cs.Variable`"),
    (
        "tf.cond, tf.case, tf.switch_case, tf.while_loop, tf.map_fn, tf.vectorized_map, tf.foldl, tf.foldr, tf.scan, "
        "tf.py_function, tf.numpy_function, tf.executing_eagerly, tf.config.run_functions_eagerly",
        _PYTHON,
    ),
    (
        "tf.print, tf.Assert, tf.assert_*, tf.debugging, tf.debugging.*",
        "`print` and `assert`; what a replica prints appears behind its name, such as `[w0]`",
    ),
    ("tf.summary, tf.summary.*, tf.profiler", "TensorBoard's own writer, for example that of torch, in the script"),
    (
        "tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.*Dataset",
        f"grain reads files, or {_GRAIN.removeprefix('grain or ')}",
    ),
    ("tf.data.*", f"the methods of `cs.data.Dataset`; {_GRAIN}"),
    ("tf.io, tf.io.*, tf.gfile, tf.image, tf.audio, tf.strings, tf.lookup, tf.ragged", "Python, NumPy and " + _GRAIN),
    ("tf.RaggedTensor, tf.SparseTensor, tf.sparse, tf.TensorArray, tf.sets", "NumPy arrays, lists, `cs.IndexedSlices`"),
    (
        "tf.random.set_seed, tf.random.*, tf.random_*_initializer",
        "`CentralStorageStrategy(seed=…)`, and in a replica `cs.random.generator()` or `numpy.random`",
    ),
    ("tf.train.*, tf.lookup.*", "`cs.train.Checkpoint`, `cs.optimizers`, and values in variables"),
    ("tf.errors.*", "the classes of `cs.errors` and Python's own"),
    ("tf.nest.*", "`cs.nest.map_structure` and the other functions of `cs.nest`"),
    ("tf.cast, tf.saturate_cast, tf.bitcast", "the method `astype` of an array"),
    ("tf.reduce_sum, tf.reduce_mean, tf.reduce_*, tf.math.reduce_*", "NumPy: `np.sum`, `np.mean`, `np.max`, `np.all`"),
    ("tf.concat, tf.gather, tf.gather_nd, tf.boolean_mask", "NumPy: `np.concatenate`, and an array as index"),
    ("tf.one_hot, tf.eye", "NumPy: `np.eye(depth, dtype=np.float32)[indices]`"),
    ("tf.clip_by_*", "`np.clip`; `clipnorm`, `clipvalue` or `global_clipnorm` of an optimizer"),
    (
        "tf.nn.relu, tf.nn.softmax, tf.nn.*",
        "NumPy, for example `np.maximum(x, 0)`; torch or JAX in the replica function",
    ),
    (
        "tf.is_tensor, tf.TensorShape, tf.dtypes, tf.dtypes.*, tf.string",
        "NumPy: `isinstance(x, np.ndarray)`, `np.dtype`",
    ),
    (
        "tf.math, tf.math.*, tf.linalg, tf.linalg.*, tf.signal, tf.bitwise, tf.tensor_*",
        "NumPy, or `cs.get_array_module()`",
    ),
)


@functools.cache
def _rows() -> list[tuple[list[str], str]]:
    return [([name.strip() for name in names.split(",")], instead) for names, instead in INSTEAD]


def instead_of(name: str) -> str | None:
    """What to use instead of a name of TensorFlow, such as ``tf.keras``; None for what is no name of TensorFlow's."""
    for names, instead in _rows():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names):
            return instead
    parent, _, last = name.rpartition(".")
    if parent == "tf" and hasattr(np, last):
        return f"NumPy: `np.{last}`, or `cs.get_array_module().{last}` in a replica on a GPU"
    return None


def attributes(module: str, prefix: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that has the place of ``prefix``, such as ``tf.nn``, in TensorFlow."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807  (what a module calls it)
        refuse(module, prefix, name, ())

    return __getattr__


def refuse(module: str, prefix: str, name: str, public: Iterable[str]) -> NoReturn:
    """Raise the AttributeError for ``name``, which ``module`` does not have. ``public``: names that it has."""
    found = sys.modules.get(module)
    text = f"module {module!r} has no attribute {name!r}"
    public = list(public) or list(getattr(found, "__all__", ()))
    if not name.startswith("_"):
        near = difflib.get_close_matches(name, public, 1, cutoff=0.85)
        instead = instead_of(f"{prefix}.{name}")
        is_named = any(f"{prefix}.{name}" in names for names, _ in _rows())
        if near and not is_named:
            text += f"; did you mean {near[0]!r}?"
        elif instead is not None:
            text += f"; use instead: {instead.replace('`', '')} (docs/from-tensorflow.md)"
    raise AttributeError(text, name=name, obj=found)
