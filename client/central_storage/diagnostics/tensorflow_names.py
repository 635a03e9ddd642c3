"""Replacements for names of TensorFlow that this package does not have.

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
        "tf.keras, tf.keras.*, tf.layers, tf.Module, tf.initializers, tf.feature_column, tf.estimator",
        f"{_MODEL}; {_LOOP} in place of `fit`; `cs.optimizers` and `cs.metrics`",
    ),
    (
        "tf.GradientTape, tf.gradients, tf.hessians, tf.autodiff, tf.AggregationMethod, tf.UnconnectedGradients",
        _GRADIENT,
    ),
    (
        "tf.stop_gradient, tf.custom_gradient, tf.recompute_grad, tf.grad_pass_through, tf.RegisterGradient",
        _GRADIENT,
    ),
    ("tf.saved_model, tf.saved_model.*, tf.io.write_graph, tf.train.Saver", _CHECKPOINT),
    (
        "tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy, tf.distribute.TPUStrategy, "
        "tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.ParameterServerStrategy, tf.distribute.*Strategy",
        _SERVICE,
    ),
    (
        "tf.distribute.CrossDeviceOps, tf.distribute.NcclAllReduce, tf.distribute.HierarchicalCopyAllReduce, "
        "tf.distribute.ReductionToOneDevice, tf.distribute.experimental.Collective*",
        "nothing: there is one implementation, which adds in replica order",
    ),
    (
        "tf.distribute.cluster_resolver, tf.distribute.coordinator, tf.distribute.Server, tf.distribute.experimental.*",
        "`cs.connect` for another process, `cs-launch` for containers, other machines and Ray",
    ),
    ("tf.tpu, tf.tpu.*, tf.lite, tf.xla, tf.quantization", f"CPUs and NVIDIA GPUs: {_SERVICE}"),
    (
        "tf.config, tf.config.*, tf.ConfigProto, tf.GPUOptions, tf.DeviceSpec",
        "`CentralStorageStrategy(compute_devices)`, and `CUDA_VISIBLE_DEVICES` before the start",
    ),
    ("tf.compat.v1, tf.compat.*, tf.contrib", "the names of TensorFlow 2: `cs.compat.v2` is `cs` itself"),
    (
        "tf.Graph, tf.Session, tf.placeholder, tf.get_variable, tf.variable_scope, tf.name_scope, tf.Operation, "
        "tf.control_dependencies",
        _PYTHON,
    ),
    (
        "tf.group, tf.tuple, tf.no_op, tf.global_variables_initializer, tf.raw_ops, tf.no_gradient, tf.CriticalSection",
        _PYTHON,
    ),
    (
        "tf.enable_*, tf.disable_*, tf.autograph, tf.InteractiveSession, tf.graph_util, tf.import_graph_def, "
        "tf.init_scope, tf.inside_function, tf.get_default_graph, tf.get_current_name_scope, tf.get_static_value",
        _PYTHON,
    ),
    (
        "tf.variable_creator_scope, tf.create_partitioned_variables, tf.zeros_initializer, tf.ones_initializer, "
        "tf.constant_initializer",
        "`cs.Variable`, with an array as its initial value",
    ),
    (
        "tf.cond, tf.case, tf.switch_case, tf.while_loop, tf.map_fn, tf.vectorized_map, tf.foldl, tf.foldr, tf.scan, "
        "tf.py_function, tf.numpy_function, tf.executing_eagerly, tf.config.run_functions_eagerly",
        _PYTHON,
    ),
    (
        "tf.print, tf.Assert, tf.assert_*, tf.debugging, tf.debugging.*",
        "`print` and `assert`; what a replica prints appears behind its name, such as `[w0]`",
    ),
    (
        "tf.logging, tf.get_logger, tf.app, tf.flags, tf.timestamp, tf.test, tf.version, tf.sysconfig, tf.load_*, "
        "tf.experimental, tf.mlir",
        "Python's own `logging`, `argparse`, `time` and `unittest`; `cs.__version__`",
    ),
    (
        "tf.summary.*, tf.profiler",
        "`cs.summary.TensorBoard` for numbers; TensorBoard's own writer, such as torch's, for pictures and texts",
    ),
    (
        "tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.*Dataset",
        f"grain reads files, or {_GRAIN.removeprefix('grain or ')}",
    ),
    ("tf.data.*", f"the methods of `cs.data.Dataset`; {_GRAIN}"),
    ("tf.as_string, tf.edit_distance, tf.fingerprint, tf.queue", "Python's own `str`, `hashlib` and `queue`"),
    ("tf.io, tf.io.*, tf.gfile, tf.image, tf.audio, tf.strings, tf.lookup, tf.ragged", "Python, NumPy and " + _GRAIN),
    ("tf.RaggedTensor, tf.SparseTensor, tf.sparse, tf.TensorArray, tf.sets", "NumPy arrays, lists, `cs.IndexedSlices`"),
    (
        "tf.random.set_seed, tf.random.*, tf.random_*, tf.set_random_seed, tf.truncated_normal",
        "`CentralStorageStrategy(seed=…)`, and in a replica `cs.random.generator()` or `numpy.random`",
    ),
    ("tf.train.*, tf.lookup.*", "`cs.train.Checkpoint`, `cs.optimizers`, and values in variables"),
    ("tf.errors.*", "the classes of `cs.errors` and Python's own"),
    ("tf.nest.*", "`cs.nest.map_structure` and the other functions of `cs.nest`"),
    ("tf.cast, tf.saturate_cast, tf.bitcast, tf.to_*", "the method `astype` of an array"),
    ("tf.reduce_sum, tf.reduce_mean, tf.reduce_*, tf.math.reduce_*", "NumPy: `np.sum`, `np.mean`, `np.max`, `np.all`"),
    ("tf.concat, tf.gather, tf.gather_nd, tf.boolean_mask", "NumPy: `np.concatenate`, and an array as index"),
    ("tf.one_hot, tf.eye", "NumPy: `np.eye(depth, dtype=np.float32)[indices]`"),
    ("tf.clip_by_*", "`np.clip`; `clipnorm`, `clipvalue` or `global_clipnorm` of an optimizer"),
    (
        "tf.nn.relu, tf.nn.softmax, tf.nn.*",
        "NumPy, for example `np.maximum(x, 0)`; torch or JAX in the replica function",
    ),
    (
        "tf.is_tensor, tf.is_symbolic_tensor, tf.TensorShape, tf.types, tf.dtypes, tf.dtypes.*, tf.DType, tf.as_dtype, "
        "tf.string, tf.bfloat16, tf.qint*, tf.quint*, tf.resource, tf.variant",
        "NumPy: `isinstance(x, np.ndarray)`, `np.dtype`",
    ),
    ("tf.TypeSpec, tf.*Spec, tf.type_spec_from_value", "`cs.TensorSpec`"),
    (
        "tf.rank, tf.norm, tf.fill, tf.add_n, tf.scalar_mul, tf.sigmoid, tf.erf, tf.eig, tf.eigvals, tf.conv, "
        "tf.slice, tf.strided_slice, tf.reverse, tf.truediv, tf.floordiv, tf.realdiv, tf.truncate*",
        "NumPy: the methods, operators and slices of arrays",
    ),
    (
        "tf.ensure_shape, tf.broadcast_*_shape, tf.shape_n, tf.identity_n, tf.parallel_stack, tf.make_ndarray, "
        "tf.make_tensor_proto",
        "NumPy: the methods, operators and slices of arrays",
    ),
    (
        "tf.scatter_nd, tf.sequence_mask, tf.dynamic_*, tf.*_to_batch*, tf.batch_to_*, tf.histogram_fixed_width*, "
        "tf.unique_with_counts, tf.reverse_sequence, tf.approx_top_k",
        "NumPy: an array as index, `np.histogram`, `np.unique`",
    ),
    (
        "tf.math, tf.math.*, tf.linalg, tf.linalg.*, tf.matrix_square_root, tf.signal, tf.bitwise, tf.tensor_*",
        "NumPy, or `cs.get_array_module()`",
    ),
)


@functools.cache
def _rows() -> list[tuple[list[str], str]]:
    return [([name.strip() for name in names.split(",")], instead) for names, instead in INSTEAD]


def instead_of(name: str) -> str | None:
    """The replacement for a name of TensorFlow, such as ``tf.keras``; None if it is no such name."""
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
