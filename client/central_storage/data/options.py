"""``cs.data.Options`` with TensorFlow's names, so that programs that set options run unchanged.

Elements are computed one after the other, in order. Every option here is a permission or a hint that a data set does
not use. Names and types are still checked: a misspelt option is an error.
"""

from __future__ import annotations

import copy
import difflib
import enum
import typing
from typing import Any

__all__ = [
    "AutoShardPolicy",
    "AutotuneOptions",
    "DistributeOptions",
    "OptimizationOptions",
    "Options",
    "ThreadingOptions",
    "merged",
]


class AutoShardPolicy(enum.IntEnum):
    """How TensorFlow divides a data set among machines. Without effect: there is one machine, and every batch is split
    over the replicas, so no policy loses rows here."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Group:
    """Options with the names and types of the class's annotations. An option that is not set is None."""

    def __init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            is_group = isinstance(kind, type) and issubclass(kind, _Group)
            object.__setattr__(self, name, kind() if is_group else None)

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = _kinds(type(self))
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(kinds)}"
            raise AttributeError(f"{type(self).__name__} has no option {name!r}; {hint}")
        kind = kinds[name]
        is_bool_for_int = isinstance(value, bool) and bool not in typing.get_args(kind)
        if is_bool_for_int or not isinstance(value, kind):
            said = kind.__name__ if isinstance(kind, type) else str(kind)
            raise TypeError(f"{type(self).__name__}.{name} must be {said}, not {value!r:.100}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        said = {name: value for name, value in vars(self).items() if value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


def merged(options: Options, later: Options) -> Options:
    """A copy of ``options``, with the values that ``later`` sets."""
    found = copy.deepcopy(options)
    _set(found, later)
    return found


def _set(group: _Group, later: _Group) -> None:
    for name, value in vars(later).items():
        if isinstance(value, _Group):
            _set(getattr(group, name), value)
        elif value is not None:
            setattr(group, name, value)


def _kinds(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


class AutotuneOptions(_Group):
    """The group ``autotune`` of :class:`Options`.

    Examples:
        >>> import central_storage as cs
        >>> options = cs.data.experimental.AutotuneOptions()
        >>> options.enabled = True
    """

    enabled: bool | None
    cpu_budget: int | None
    ram_budget: int | None


class DistributeOptions(_Group):
    """The group ``experimental_distribute`` of :class:`Options`.

    Examples:
        >>> import central_storage as cs
        >>> options = cs.data.experimental.DistributeOptions()
        >>> options.auto_shard_policy = cs.data.experimental.AutoShardPolicy.DATA
    """

    auto_shard_policy: AutoShardPolicy | None
    num_devices: int | None


class OptimizationOptions(_Group):
    """The group ``experimental_optimization`` of :class:`Options`.

    Examples:
        >>> import central_storage as cs
        >>> options = cs.data.experimental.OptimizationOptions()
        >>> options.apply_default_optimizations = False
    """

    apply_default_optimizations: bool | None
    filter_fusion: bool | None
    filter_parallelization: bool | None
    inject_prefetch: bool | None
    map_and_batch_fusion: bool | None
    map_and_filter_fusion: bool | None
    map_fusion: bool | None
    map_parallelization: bool | None
    noop_elimination: bool | None
    parallel_batch: bool | None
    seq_interleave_prefetch: bool | None
    shuffle_and_repeat_fusion: bool | None


class ThreadingOptions(_Group):
    """The group ``threading`` of :class:`Options`.

    Examples:
        >>> import central_storage as cs
        >>> options = cs.data.ThreadingOptions()
        >>> options.private_threadpool_size = 4
    """

    max_intra_op_parallelism: int | None
    private_threadpool_size: int | None


class Options(_Group):
    """The argument of :meth:`Dataset.with_options`: TensorFlow's options, accepted and without effect.

    The elements of a data set always come in the same order, as with ``deterministic = True``. Batches are split over
    the replicas under every ``experimental_distribute.auto_shard_policy``. An option that does not exist raises
    AttributeError, a value of another type TypeError.

    Examples:
        >>> import central_storage as cs
        >>> options = cs.data.Options()
        >>> options.deterministic = False
        >>> options.threading.private_threadpool_size = 4
        >>> cs.data.Dataset.range(2).with_options(options).options().deterministic
        False
        >>> options.determinstic = True
        Traceback (most recent call last):
        AttributeError: Options has no option 'determinstic'; did you mean 'deterministic'?
    """

    autotune: AutotuneOptions
    dataset_name: str | None
    deterministic: bool | None
    experimental_deterministic: bool | None
    experimental_distribute: DistributeOptions
    experimental_optimization: OptimizationOptions
    experimental_slack: bool | None
    experimental_symbolic_checkpoint: bool | None
    experimental_threading: ThreadingOptions
    experimental_warm_start: bool | None
    threading: ThreadingOptions
