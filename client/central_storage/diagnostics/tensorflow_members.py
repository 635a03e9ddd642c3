"""Members of TensorFlow's classes that the classes here do not have, and arguments that optimizers do not take.

Whoever asks for one gets an error that says what to use instead. ``core.public_objects`` puts the members of
:data:`MEMBERS` into the classes. They are descriptors, because these cost nothing where another name is asked for:
NumPy looks for several names that a variable does not have, at every read.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ARGUMENTS", "MEMBERS", "Missing", "missing_of"]

_NO_SESSIONS = "nothing: there are no sessions"
_NO_GRAPHS = "nothing: there are no graphs"
_MADE_WHOLE = "nothing: a variable has its value as soon as it is made"
_EMA = "cs.train.ExponentialMovingAverage, which keeps averages of variables"
_GRAIN = "grain, whose data sets a strategy takes as they are (docs/guide/data.md)"
_GENERATOR = "Dataset.from_generator, with a generator that does it"
_ROWS = "NumPy on variable.sparse_read(rows), and variable.scatter_update(cs.IndexedSlices(values, rows))"
_WHOLE_ROWS = "variable.scatter_{}(cs.IndexedSlices(values, rows)), which takes whole rows"
_BEFORE = "the same method of the data set, before the strategy distributes it"
_SPEC = "dataset.element_spec"
_OF_SCOPE = "cs.Variable, made under strategy.scope()"

# Of both, because TensorFlow has moved them from one to the other.
_OF_STRATEGIES = {
    "batch_reduce": "strategy.extended.batch_reduce_to(reduce_op, pairs)",
    "broadcast": "strategy.extended.broadcast_to(value, destinations)",
    "configure": "nothing: there are no sessions, and cs-launch describes the cluster",
    "experimental_run": "strategy.run(fn, args=(next(iterator),))",
    "experimental_run_steps_on_iterator": "strategy.run_steps(fn, dataset)",
    "finalize": _NO_SESSIONS,
    "group": "nothing: operations take effect in the order of the program",
    "initialize": _NO_SESSIONS,
    "make_dataset_iterator": "iter(strategy.experimental_distribute_dataset(dataset))",
    "make_input_fn_iterator": "iter(strategy.distribute_datasets_from_function(dataset_fn))",
    "unwrap": "strategy.experimental_local_results(value)",
    "update_config_proto": _NO_SESSIONS,
}
# Those of ``extended`` that older versions have in the strategy.
_MOVED = """batch_reduce_to broadcast_to call_for_each_replica non_slot_devices parameter_devices read_var reduce_to
    should_checkpoint should_save_summary update update_non_slot value_container variable_created_in_scope
    worker_devices"""
# Transformations of data sets, which a distributed one does not have.
_TRANSFORMATIONS = """apply as_numpy_iterator batch cache concatenate enumerate filter flat_map get_single_element
    interleave map options padded_batch prefetch repeat shard shuffle skip take take_while unbatch window with_options
    zip"""

#: By module and name of a class of this package: the members of TensorFlow's class -> what to use instead.
MEMBERS: dict[str, dict[str, str]] = {
    "strategy.base.StrategyBase": {
        **_OF_STRATEGIES,
        **{name: f"strategy.extended.{name}" for name in _MOVED.split()},
        "colocate_vars_with": "strategy.extended.colocate_vars_with(variable)",
        "create_variable": _OF_SCOPE,
        "distribute_dataset": "strategy.experimental_distribute_dataset(dataset)",
        "num_towers": "strategy.num_replicas_in_sync",
    },
    "strategy.extended.StrategyExtended": _OF_STRATEGIES,
    "variables.variable.Variable": {
        "SaveSliceInfo": "strategy.save and strategy.restore",
        "batch_scatter_update": "variable.scatter_update(cs.IndexedSlices(values, rows))",
        "count_up_to": "variable.assign_add(1)",
        "distribute_strategy": "variable.strategy",
        "eval": "variable.numpy()",
        "experimental_ref": "the variable itself, which can be a key of a dict",
        "from_proto": "strategy.save and strategy.restore",
        "gather_nd": "variable.sparse_read(rows), or an index of np.asarray(variable)",
        "get_shape": "variable.shape",
        "graph": _NO_GRAPHS,
        "handle": _NO_GRAPHS,
        "initial_value": "the array that the variable was made of",
        "initialized_value": "variable.numpy()",
        "initializer": _MADE_WHOLE,
        "is_initialized": _MADE_WHOLE,
        "load": "variable.assign(value)",
        "op": _NO_GRAPHS,
        "primary": "variable.numpy(), because there is one copy, in the server",
        "read_value_no_copy": "np.asarray(variable)",
        "ref": "the variable itself, which can be a key of a dict",
        "scatter_div": _ROWS,
        "scatter_max": _ROWS,
        "scatter_min": _ROWS,
        "scatter_mul": _ROWS,
        "scatter_nd_add": _WHOLE_ROWS.format("add"),
        "scatter_nd_max": _ROWS,
        "scatter_nd_min": _ROWS,
        "scatter_nd_sub": _WHOLE_ROWS.format("sub"),
        "scatter_nd_update": _WHOLE_ROWS.format("update"),
        "set_shape": "nothing: a variable keeps its shape",
        "to_proto": "strategy.save and strategy.restore",
        "values": "variable.numpy(), because there is one copy, in the server",
    },
    "optimizers.optimizer.Optimizer": {
        "add_optimizer_variables": _OF_SCOPE,
        "add_slot": "optimizer.build(variables), which makes the slots of the rule",
        "add_variable": _OF_SCOPE,
        "add_variable_from_reference": _OF_SCOPE,
        "add_weight": _OF_SCOPE,
        "aggregate_gradients": "optimizer.apply_gradients(pairs), which sums over the replicas",
        "apply": "optimizer.apply_gradients(zip(gradients, variables))",
        "assign_add": "variable.assign_add(value)",
        "assign_sub": "variable.assign_sub(value)",
        "built": "optimizer.build(variables), which may be called again",
        "compute_gradients": "gradients that the replica function computes, by hand, with torch or with JAX",
        "ema_momentum": _EMA,
        "ema_overwrite_frequency": _EMA,
        "finalize_variable_values": _EMA,
        "get_name": "optimizer.name",
        "get_updates": "optimizer.apply_gradients(zip(gradients, variables))",
        "gradient_accumulation_steps": "cs.optimizers.GradientAccumulator",
        "jit_compile": "nothing: the rules of the server are compiled",
        "load_own_variables": "strategy.restore, or optimizer.set_weights(weights)",
        "loss_scale_factor": "a factor of your own for the loss, by which you divide the gradients",
        "save_own_variables": "strategy.save, or optimizer.get_weights()",
        "scale_loss": "a factor of your own for the loss, by which you divide the gradients",
        "stateless_apply": "optimizer.apply_gradients(zip(gradients, variables))",
        "update_step": "a rule of cs.optimizers, or variable.assign_sub(step) in the replica function",
        "use_ema": _EMA,
    },
    "data.pipeline.Pipeline": {
        "bucket_by_sequence_length": _GRAIN,
        "choose_from_datasets": _GENERATOR,
        "counter": "Dataset.range(first, last)",
        "filter_with_legacy_function": "dataset.filter(predicate)",
        "fingerprint": _GRAIN,
        "flat_map": _GENERATOR,
        "from_sparse_tensor_slices": "Dataset.from_tensor_slices(rows)",
        "group_by_window": _GRAIN,
        "ignore_errors": "try and except in the function of dataset.map",
        "interleave": _GRAIN,
        "list_files": "Python's glob, and Dataset.from_tensor_slices(sorted(names))",
        "load": _GRAIN,
        "make_initializable_iterator": "iter(dataset)",
        "make_one_shot_iterator": "iter(dataset)",
        "map_with_legacy_function": "dataset.map(function)",
        "output_classes": _SPEC,
        "output_shapes": _SPEC,
        "output_types": _SPEC,
        "padded_batch": _GRAIN,
        "ragged_batch": _GRAIN,
        "random": _GENERATOR,
        "rebatch": "dataset.unbatch().batch(size)",
        "rejection_resample": "dataset.filter(predicate)",
        "sample_from_datasets": _GENERATOR,
        "save": _GRAIN,
        "scan": _GENERATOR,
        "snapshot": "dataset.cache()",
        "sparse_batch": _GRAIN,
        "unique": _GENERATOR,
        "window": _GRAIN,
    },
    "data.distributed._Distributed": {
        **dict.fromkeys(_TRANSFORMATIONS.split(), _BEFORE),
        "initialize": "iter(dataset), which begins anew",
        "initializer": "iter(dataset), which begins anew",
        "make_initializable_iterator": "iter(dataset)",
        "make_one_shot_iterator": "iter(dataset)",
        "output_classes": _SPEC,
        "output_shapes": _SPEC,
        "output_types": _SPEC,
    },
}

#: Arguments of TensorFlow's optimizers -> what to use instead.
ARGUMENTS = {
    "ema_momentum": _EMA,
    "ema_overwrite_frequency": _EMA,
    "gradient_accumulation_steps": "cs.optimizers.GradientAccumulator",
    "jit_compile": "nothing: the rules of the server are compiled",
    "loss_scale_factor": "a factor of your own for the loss, by which you divide the gradients",
    "use_ema": _EMA,
    "use_locking": "nothing: an update is applied as a whole",
    "weight_decay": "cs.optimizers.AdamW, LAMB or Lion, or add the decay to the gradients",
}


def missing_of(cls: type) -> dict[str, str]:
    """The row of :data:`MEMBERS` for a class."""
    return MEMBERS.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("central_storage."), {})


class Missing:
    """A member that a class does not have, and what to use instead."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, thing: object, owner: type) -> NoReturn:
        cls: Any = owner
        text = f"{cls.__name__} has no attribute {self._name!r}; use instead: {self._instead}"
        raise AttributeError(f"{text} (docs/from-tensorflow.md)", name=self._name, obj=cls if thing is None else thing)

    def __repr__(self) -> str:
        return f"<not here; use instead: {self._instead}>"
