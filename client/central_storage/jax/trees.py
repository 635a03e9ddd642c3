"""Pytrees of variables: made from arrays, and read as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import hijax
from jax.tree_util import GetAttrKey

from central_storage.checkpoint.graph import Walked
from central_storage.core.context import get_strategy, has_strategy, in_cross_replica_context, refuse_in_replica
from central_storage.variables.variable import Variable
from cs_proto.arrays import dtype_name, is_wire_dtype
from cs_proto.errors import ContextError, InvalidArgumentError

if TYPE_CHECKING:
    from central_storage.strategy.base import StrategyBase

__all__ = [
    "Leaves",
    "Narrow",
    "bools",
    "centralize",
    "path_name",
    "read",
    "refuse_changed",
    "refuse_in_trace",
    "variable_of",
]

T = TypeVar("T")


class Narrow(Walked):
    """A leaf of bfloat16, float16 or a narrower float: JAX computes with that dtype, and the server keeps a float32
    variable, which small updates change, too.

    ``variable`` is the float32 variable.

    Examples:
        >>> import jax.numpy as jnp
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     w = csj.centralize(jnp.zeros(2, jnp.bfloat16))
        ...     w.assign(jnp.ones(2, jnp.bfloat16))
        ...     print(w.dtype, w.variable.dtype, w.numpy())
        bfloat16 float32 [1. 1.]
    """

    def __init__(self, variable: Variable, dtype: np.dtype[Any]) -> None:
        self.variable = variable
        #: The dtype with which JAX computes.
        self.dtype = dtype

    @property
    def name(self) -> str:
        """The variable's name."""
        return self.variable.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.variable.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.variable.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.variable.size

    def numpy(self) -> np.ndarray:
        """A copy of the present value, float32."""
        return self.variable.numpy()

    def assign(self, value: Any) -> None:
        """Set the value.

        Args:
            value: An array of floats of this shape.

        Raises:
            InvalidArgumentError: The shape is another (a ValueError).
        """
        self.variable.assign(np.asarray(value).astype(np.float32))

    def __repr__(self) -> str:
        return f"<{self.dtype} of {self.variable!r}>"


def centralize(tree: T, *, trainable: Any = None) -> T:
    """The same tree, with a variable of the scope's strategy in place of every array.

    A variable has the name of its path in the tree, such as ``layers/0/weight``. Variables of floats are trained;
    integers and bools are variables that are not. Arrays of a float that is narrower than 32 bits become a
    :class:`Narrow`, which has a float32 variable. 64-bit NumPy arrays become 32-bit ones unless ``jax_enable_x64`` is
    set, as everywhere in JAX. Python numbers, None, functions and other leaves stay as they are: a compiled loss takes
    them as constants. In a tree of floats alone a Python float is refused, because ``jax.grad`` would train it. A
    variable of the same strategy stays, too.

    Args:
        tree: A pytree: nested dicts and lists, the parameters of flax, a module of equinox.
        trainable: Bools for the leaves, as a pytree that is a prefix of ``tree``, or a function from ``tree`` to one.
            False leaves an array of floats untrained, such as the statistics of a normalization.

    Returns:
        A tree of the same structure.

    Raises:
        ContextError: Called outside ``strategy.scope()`` (a RuntimeError).
        InvalidArgumentError: A leaf is a random key, also one of ``jax.random.PRNGKey``, an array of a dtype that no
            variable has or of another library, a Python float that ``jax.grad`` would train, or a variable of another
            strategy; or ``trainable`` has other leaves than bools (a ValueError). The error names the path. No variable
            is made then.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = csj.centralize({"w": jnp.ones((2, 3)), "act": jax.nn.relu, "bias": None})
        ...     print(model["w"].name, model["w"].shape, model["act"].__name__, model["bias"])
        w (2, 3) relu None
    """
    if not has_strategy() or not in_cross_replica_context():
        refuse_in_replica("a tree of variables")
        raise ContextError("csj.centralize makes variables of a strategy: call it under `with strategy.scope():`")
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    mask = bools(True if trainable is None else trainable, tree, "csj.centralize: trainable")
    plans = [_plan(path_name(path), leaf, may) for (path, leaf), may in zip(found, mask, strict=True)]
    _refuse_numbers_that_jax_trains(found, mask)
    made: T = jax.tree.unflatten(structure, [plan() for plan in plans])
    return made


def bools(given: Any, tree: Any, what: str) -> list[bool]:
    """A bool for each leaf of a tree, from a prefix of it or a function from the tree to one. Raises
    InvalidArgumentError, which names ``what`` is given."""
    prefix = given(tree) if callable(given) else given
    try:
        found, _ = jax.tree_util.tree_flatten_with_path(jax.tree.broadcast(prefix, tree))
    except ValueError as error:
        raise InvalidArgumentError(f"{what} is no prefix of the tree: {error}") from error
    for (path, each), leaf in zip(found, jax.tree.leaves(tree), strict=True):
        is_bool = isinstance(each, bool) or (getattr(each, "dtype", None) == np.bool_ and not each.shape)
        if hasattr(leaf, "shape") and not is_bool:
            raise InvalidArgumentError(f"{what} has bools at its leaves, not {each!r:.100} as at {path_name(path)}")
    return [bool(each) for _, each in found]


def _plan(name: str, leaf: Any, may_train: bool) -> Callable[[], Any]:
    """A function that makes what takes the leaf's place. Everything is checked here, so that no leaf fails after
    others have become variables."""
    where = f"csj.centralize: the leaf {name or 'itself'}"
    if isinstance(leaf, Variable | Narrow):
        owner = variable_of(leaf).strategy
        if owner is not None and owner is not get_strategy():
            raise InvalidArgumentError(
                f"{where} is variable {leaf.name} of another strategy; pass an array of its value"
            )
        return lambda: leaf
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or isinstance(leaf, np.ma.MaskedArray):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            raise InvalidArgumentError(
                f"{where} is a {type(leaf).__name__}, no array of JAX or NumPy: make it one by jnp.asarray"
            )
        return lambda: leaf
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key or _looks_like_a_key(leaf):
        what = "a random key" if is_key else f"uint32{list(leaf.shape)}, as a random key of jax.random.PRNGKey is"
        other = "" if is_key else "; if it is no key, convert it with astype('int32')"
        raise InvalidArgumentError(
            f"{where} is {what}. As a part of the model it would draw the same numbers in every step: take it out of "
            "the tree, and call csj.key() in the loss, which gives every step and replica a key of its own" + other
        )
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if leaf.dtype.kind in "iufc" else leaf.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    stored = np.dtype(np.float32) if is_float and dtype.itemsize < 4 else dtype
    if stored.kind not in "biufc" or not is_wire_dtype(dtype_name(stored)):
        raise InvalidArgumentError(f"{where} has dtype {leaf.dtype}, and no variable has; convert it with astype")
    trainable = may_train and jnp.issubdtype(dtype, jnp.inexact)

    def make() -> Any:
        variable = Variable(np.asarray(leaf).astype(stored, copy=False), trainable=trainable, name=name or "parameters")
        return variable if stored == dtype else Narrow(variable, dtype)

    return make


def _looks_like_a_key(leaf: Any) -> bool:
    """Whether an array is like the random keys of ``jax.random.PRNGKey``, which have no dtype of their own."""
    words = 2 if jax.config.jax_default_prng_impl == "threefry2x32" else 4
    return bool(leaf.dtype == np.uint32 and leaf.shape == (words,))


def _refuse_numbers_that_jax_trains(found: list[tuple[Any, Any]], mask: list[bool]) -> None:
    """Refuse a float that stays a constant here, in a tree that ``jax.grad`` takes as it is: it would train the float.

    It takes no tree with other leaves than floats. What takes those apart, such as equinox, trains no number of Python.
    """
    if not all(
        jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact) for _, leaf in found if leaf is not None
    ):
        return
    for (path, leaf), may_train in zip(found, mask, strict=True):
        if type(leaf) in (float, complex) and may_train:
            raise InvalidArgumentError(
                f"csj.centralize: the leaf {path_name(path) or 'itself'} is the number {leaf}, which jax.grad would "
                f"train: write jnp.asarray({leaf}) to train it, or say False for it in trainable= to keep it constant"
            )


def read(tree: T) -> T:
    """The same tree, with a JAX array in place of every variable.

    In a replica on a CPU nothing is copied: an array lies where the server writes, so it is valid until the replica
    function returns, or until it reads a variable that it has updated itself. What you keep longer, or compute with
    asynchronously, must be a copy, ``jnp.array(x)``. Take the arrays anew in every step. JAX copies an array that is
    donated. In the script an array is a copy.

    Args:
        tree: A tree of :func:`centralize`, or any pytree with variables at its leaves. Other leaves stay.

    Returns:
        A tree of the same structure.

    Raises:
        ContextError: JAX traces the calling function, which would keep the present values for ever (a RuntimeError).
        InvalidArgumentError: A variable has 64 bits, and ``jax_enable_x64`` is not set (a ValueError).

    Examples:
        >>> import jax.numpy as jnp
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = csj.centralize({"w": jnp.arange(3.0)})
        ...     print(strategy.run(lambda: float(csj.read(model)["w"].sum())), csj.read(model)["w"])
        3.0 [0. 1. 2.]
    """
    refuse_in_trace("csj.read")
    leaves, structure = jax.tree.flatten(tree)
    made: T = structure.unflatten(_arrays_of(leaves))
    return made


def _arrays_of(leaves: list[Any]) -> list[Any]:
    """The arrays of leaves that are variables, as :func:`read` gives them; other leaves as they are."""
    found = list(leaves)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Variable | Narrow)]
    values = [_value(variable_of(leaves[place])) for place in places]
    if all(isinstance(value, np.ndarray) for value in values):
        arrays = jax.device_put(values)  # one call: it takes longer than all else for many small arrays
    else:
        arrays = [jax.dlpack.from_dlpack(value) for value in values]
    for place, array in zip(places, arrays, strict=True):
        leaf = leaves[place]
        found[place] = array.astype(leaf.dtype) if isinstance(leaf, Narrow) else array
    return found


def _value(variable: Variable) -> Any:
    if jax.dtypes.canonicalize_dtype(variable.dtype) != variable.dtype:
        raise InvalidArgumentError(
            f"variable {variable.name} has dtype {variable.dtype}, and JAX computes with 32 bits here: set the "
            "environment variable JAX_ENABLE_X64=1, or call jax.config.update('jax_enable_x64', True) in the replica "
            "function, too"
        )
    return variable.current()


def refuse_in_trace(what: str) -> None:
    """Raise ContextError while JAX traces the caller: what it reads would become a constant."""
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ContextError(
            f"{what} in a function that JAX traces would be called once, and its result would stay in the compiled "
            "function: call it outside of jax.jit and pass the result in"
        )


def refuse_changed(tree: Any, before: list[Any], loss: str) -> None:
    """Raise InvalidArgumentError where a loss, whose tree had the leaves ``before``, has put another array into an
    object, such as the statistics of a module of nnx. A dict is the loss's own."""
    known = {id(leaf) for leaf in before}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array) and id(leaf) not in known and isinstance(path[-1], GetAttrKey):
            raise InvalidArgumentError(
                f"the loss {loss} changes {path_name(path)} of the model in place, which has no effect outside of it: "
                "change a copy, such as that of nnx.clone, return the new value by has_aux=True, and assign it after "
                "the step"
            )


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf as text: ``layers/0/weight``."""
    text: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return text


def variable_of(leaf: Any) -> Variable:
    """The variable at a leaf of :func:`centralize`."""
    found: Variable = leaf.variable if isinstance(leaf, Narrow) else leaf
    return found


class Leaves:
    """The leaves of a tree of variables: those that are trained, other variables, and constants.

    Raises InvalidArgumentError, which names the path, for a tree in which nothing is trained, and for a leaf that is an
    array, the variable of another leaf or strategy, or trained and complex.
    """

    def __init__(self, tree: Any, what: str) -> None:
        """``what`` is the function that was given the tree, for errors."""
        self._given = tree, what
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in found]
        self.names = [path_name(path) for path, _ in found]
        self._variables = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Variable | Narrow)]
        self._trained = [place for place in self._variables if variable_of(self._leaves[place]).trainable]
        self._check(what)
        #: The variables that are trained, in the order of the leaves.
        self.trained = [variable_of(self._leaves[place]) for place in self._trained]
        self._fixed = sorted(set(self._variables) - set(self._trained))

    def __reduce__(self) -> tuple[Any, ...]:
        return Leaves, self._given  # a structure of equinox that was pickled is of no use

    def _check(self, what: str) -> None:
        for name, leaf in zip(self.names, self._leaves, strict=True):
            if isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise InvalidArgumentError(
                    f"{what}: the leaf {name or 'itself'} is an array of its own, not a variable, so it would never be "
                    "trained: pass the tree that csj.centralize returned"
                )
        if not self._trained:
            raise InvalidArgumentError(
                f"{what}: no leaf of the tree is a variable that is trained: pass the tree that csj.centralize returned"
            )
        seen: dict[int, str] = {}
        owner = variable_of(self._leaves[self._trained[0]]).strategy
        for place in self._variables:
            name, variable = self.names[place], variable_of(self._leaves[place])
            if variable.strategy is not owner:
                raise InvalidArgumentError(
                    f"{what}: the leaf {name} is variable {variable.name} of another strategy than the leaf "
                    f"{self.names[self._trained[0]]}; centralize the whole tree in one scope"
                )
            if id(variable) in seen:
                raise InvalidArgumentError(
                    f"{what}: the leaves {seen[id(variable)]} and {name} are one variable; keep it once in the tree, "
                    "and let the loss use it twice"
                )
            seen[id(variable)] = name
            if variable.trainable and variable.dtype.kind == "c":
                raise InvalidArgumentError(
                    f"{what}: the leaf {name} is complex, and no rule of the server is: keep its real and imaginary "
                    "parts as two leaves, or centralize it with trainable=False"
                )

    @property
    def strategy(self) -> StrategyBase:
        """The strategy of the variables."""
        owner = self.trained[0].strategy
        if owner is None:
            raise InvalidArgumentError(
                f"variable {self.trained[0].name} belongs to no strategy yet; centralize the tree"
            )
        return cast("StrategyBase", owner)

    def arrays(self) -> tuple[list[Any], list[Any]]:
        """The arrays of the trained leaves and of the other variables, as :func:`read` gives them."""
        arrays = _arrays_of([self._leaves[place] for place in (*self._trained, *self._fixed)])
        return arrays[: len(self._trained)], arrays[len(self._trained) :]

    def tree(self, trained: Iterable[Any], fixed: Iterable[Any]) -> Any:
        """The tree with these in place of the variables; constants stay."""
        leaves = list(self._leaves)
        for place, value in zip(self._trained, trained, strict=True):
            leaves[place] = value
        for place, value in zip(self._fixed, fixed, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self._structure, leaves)

    def of_trained(self, values: Iterable[Any]) -> Any:
        """The tree with these at the trained leaves, and None at all others: what an optimizer has a state for."""
        leaves: list[Any] = [None] * len(self._leaves)
        for place, value in zip(self._trained, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self._structure, leaves)


def _refuse(leaf: Any) -> NoReturn:
    raise InvalidArgumentError(
        f"JAX computes with arrays, and {leaf.name} is a variable: csj.read(tree) gives the arrays of a tree or of one "
        "variable, in a replica without a copy"
    )


# JAX asks these for the type of such an argument. Without an answer, its own error does not name the remedy. A
# `__jax_array__` would copy in silence, and make a constant of a variable in a function that is traced.
for _kind in (Variable, Narrow):
    hijax.register_hitype(_kind, _refuse)
