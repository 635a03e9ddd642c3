"""``centralize``: the parameters and buffers of a torch module become variables of the server.

In the script such a module has no values: it is a description with names, shapes and state dicts. Its state dict asks
the server, and ``load_state_dict`` writes to it. A call of the module in the script is an error, because it would
compute with nothing; :func:`pull` returns a plain copy for that.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from central_storage.core.context import get_strategy, has_strategy, in_cross_replica_context
from central_storage.strategy.service_strategy import CentralStorageStrategy
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

from .buffers import RULES, CentralBuffers, buffers_of, central_buffers, forget_buffers
from .errors import StateDictError
from .parameters import (
    CentralParameter,
    check_unchanged,
    check_unconverted,
    empty_like,
    make_empty,
    note,
    stored_dtype,
    value_of,
    write_to,
)
from .sync_batchnorm import synchronized

__all__ = ["centralize", "own_parameters", "pull", "remove_hooks"]

M = TypeVar("M", bound=torch.nn.Module)


def centralize(
    module: M | Callable[[], M],
    buffers: Literal["first", "mean", "local"] = "first",
    sync_batchnorm: bool = False,
    protect: bool | Literal["readonly"] = True,
    *,
    strategy: CentralStorageStrategy | None = None,
) -> M:
    """Move the parameters and buffers of a module into the server. Call it under ``strategy.scope()``.

    The module stays the same object, with the same parameters, ties, groups and hooks; only the values are elsewhere.
    ``state_dict()``, ``load_state_dict()`` and the optimizers of ``cst.optim`` work with it as before. Compute with it
    in functions that ``cst.step``, ``cst.function`` or ``cst.evaluate`` has decorated, and with ``cst.pull(module)`` in
    the script. The weight of an ``Embedding`` or ``EmbeddingBag`` with ``sparse=True`` becomes a table: its gradients
    are rows.

    Args:
        module: A ``torch.nn.Module``, or a function without arguments that returns one. Replicas call the function
            instead of receiving the module, so it may have what cannot be pickled, such as parametrizations.
        buffers: What a step makes of the buffers: "first": replica 0's count, as in DistributedDataParallel; "mean":
            the mean over all rows for floating-point buffers; "local": every replica has its own.
        sync_batchnorm: Whether BatchNorm layers normalize by the whole global batch. They are replaced in the module.
        protect: True: an in-place write to a parameter in a replica is an error that names it, and changes nothing.
            "readonly": a write ends the worker, at the instruction that writes, and the error of the run names the
            parameter.
        strategy: The strategy, outside its scope.

    Returns:
        The module.

    Raises:
        InvalidArgumentError: A parameter has no shape yet, has a dtype that no variable can have, overlaps another one
            in memory or belongs to another strategy; or an argument has an unknown value (a ValueError).
        TypeError: ``module`` is neither a module nor a function that returns one.
        ContextError: There is no strategy, or this is a replica (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = cst.centralize(torch.nn.Linear(3, 2))
        ...     print([tuple(p.shape) for p in model.parameters()], model.state_dict()["weight"].shape)
        [(2, 3), (2,)] torch.Size([2, 3])
    """
    if buffers not in RULES:
        raise InvalidArgumentError(f"buffers must be one of {', '.join(map(repr, RULES))}, not {buffers!r}")
    if protect not in (True, "readonly"):
        raise InvalidArgumentError(f"protect must be True or 'readonly', not {protect!r}")
    owner = _owner(strategy)
    made: Any
    factory: Any
    made, factory = (module, None) if isinstance(module, torch.nn.Module) else (_made_by(module), module)
    _check_all(made, owner)
    if sync_batchnorm:
        made = synchronized(made)
    _move(made, owner, buffers, protect)
    if factory is not None:
        _send_by_factory(made, factory, sync_batchnorm)
    return made  # type: ignore[no-any-return]


def pull(module: M) -> M:
    """A plain copy of a centralized module, with the present values: for inference, export or ``torch.save``.

    The copy belongs to torch alone, and nothing that happens later changes it.

    Args:
        module: A module that :func:`centralize` has prepared, or one that has such modules.

    Returns:
        A module of the same classes with ordinary parameters and buffers.

    Raises:
        ContextError: Called in a replica (a RuntimeError).
        InvalidArgumentError: A parameter or buffer was changed in the script (a ValueError).
        ShutdownError: The service has ended (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     model = cst.centralize(torch.nn.Linear(3, 2))
        ...     copied = cst.pull(model)
        >>> copied(torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """
    if has_strategy() and not in_cross_replica_context():
        raise ContextError("pull cannot be called in a replica, where the module has the present values itself")
    _check_unchanged(module)
    # What refers to the server is replaced by its value, or left out.
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(value_of(p.variable, p.dtype), p.requires_grad)
        for p in module.parameters()
        if isinstance(p, CentralParameter)
    }
    with _loaded_buffers(module), _own_classes(module):
        memo |= {id(found): None for found in central_buffers(module.modules())}
        memo |= {id(t): empty_like(t.shape, t.dtype).clone() for t in _computed(module)}
        made = copy.deepcopy(module, memo)
    remove_hooks(made)
    forget_buffers(made)
    for each in made.modules():
        vars(each).pop(_FACTORY, None)
    return made


def own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, CentralParameter]]:
    """The centralized parameters that a module itself has, with their names there."""
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, CentralParameter):
            yield name, p


@contextmanager
def _loaded_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Let the buffers have their present values for the length of the block."""
    owners = [(owner, found) for owner in module.modules() if (found := buffers_of(owner)) is not None]
    try:
        for owner, found in owners:
            found.load(owner)
        yield
    finally:
        for owner, found in owners:
            found.empty(owner)


def _computed(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Attributes that a hook computes from parameters before each call, as for pruning: torch refuses to copy them."""
    for owner in module.modules():
        for value in vars(owner).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


# --- checks -------------------------------------------------------------------------------------------------------


def _check_unchanged(module: torch.nn.Module) -> None:
    """Raise InvalidArgumentError for a parameter or buffer that was changed in the script: the change would be lost."""
    for p in module.parameters():
        if isinstance(p, CentralParameter):
            check_unchanged(p)
    for found in central_buffers(module.modules()):
        found.check()


def _owner(strategy: CentralStorageStrategy | None) -> CentralStorageStrategy:
    if has_strategy() and not in_cross_replica_context():
        raise ContextError("a module cannot be centralized in a replica; do it in the script")
    found = strategy if strategy is not None else get_strategy()
    if not isinstance(found, CentralStorageStrategy):
        if strategy is not None:
            raise TypeError(f"strategy must be a CentralStorageStrategy, not {strategy!r:.100}")
        raise ContextError(
            "centralize needs a strategy: call it under `with strategy.scope():`, or pass strategy=strategy"
        )
    return found


def _made_by(factory: Any) -> torch.nn.Module:
    if not callable(factory):
        raise TypeError(
            f"centralize takes a torch.nn.Module or a function that returns one, not {type(factory).__name__}"
        )
    made = factory()
    if not isinstance(made, torch.nn.Module):
        raise TypeError(f"the function given to centralize returned {type(made).__name__}, not a torch.nn.Module")
    return made


def _check_all(module: torch.nn.Module, owner: CentralStorageStrategy) -> None:
    """Raise InvalidArgumentError for what cannot be centralized, before anything has changed."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        _check(name, parameter, owner)
    _check_overlap(parameters)
    for name, buffer in module.named_buffers():
        _check_memory(f"buffer {name}", buffer)
    for path, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise InvalidArgumentError(
                f"{path or 'the module'} is a ScriptModule; centralize the module it was made of"
            )
        if getattr(each, "scale_grad_by_freq", False) and owner.num_replicas_in_sync > 1:
            raise InvalidArgumentError(
                f"{path or 'the module'} has scale_grad_by_freq, but each replica counts the rows of its own share; "
                "centralize it without"
            )


def _check_memory(what: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise InvalidArgumentError(f"{what} has no plain memory: {tensor.layout}, {tensor.device}")
    stored_dtype(tensor.dtype, what)


def _check(name: str, parameter: torch.nn.Parameter, owner: CentralStorageStrategy) -> None:
    if isinstance(parameter, CentralParameter):
        if parameter.variable.strategy is not owner:
            raise InvalidArgumentError(f"parameter {name} belongs to another strategy; centralize a copy: cst.pull(…)")
        return
    if isinstance(parameter, torch.nn.UninitializedParameter):
        raise InvalidArgumentError(
            f"parameter {name} has no shape yet; call the module once with a batch before centralize"
        )
    if type(parameter) is not torch.nn.Parameter:
        raise InvalidArgumentError(
            f"parameter {name} is a {type(parameter).__name__}; centralize takes plain torch.nn.Parameters"
        )
    _check_memory(f"parameter {name}", parameter)


def _check_overlap(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise InvalidArgumentError for two parameters over one memory: apart, each would get an update of its own."""
    at: dict[int, str] = {}
    for name, parameter in parameters.items():
        if parameter.numel() and not isinstance(parameter, CentralParameter):
            other = at.setdefault(parameter.data_ptr(), name)
            if other is not name:
                raise InvalidArgumentError(
                    f"{other} and {name} are two parameters over the same memory; to tie them, let both modules have "
                    "one Parameter object"
                )


def _tables(module: torch.nn.Module) -> set[int]:
    """The identities of the weights whose gradients are rows."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(each.weight) for each in module.modules() if isinstance(each, kinds) and each.sparse}


# --- the change ---------------------------------------------------------------------------------------------------


def _move(module: torch.nn.Module, owner: CentralStorageStrategy, rule: str, protect: bool | str) -> None:
    """Make variables of the parameters and buffers, after everything has been checked."""
    tables = _tables(module)
    with owner.scope():
        for name, parameter in list(module.named_parameters()):
            if not isinstance(parameter, CentralParameter):
                _centralize_parameter(name, parameter, is_table=id(parameter) in tables, protect=protect)
        CentralBuffers(module, rule, owner.num_replicas_in_sync)
    for each in module.modules():
        _watch(each)


def _centralize_parameter(name: str, parameter: Any, *, is_table: bool, protect: bool | str) -> None:
    values = parameter.detach().cpu().to(stored_dtype(parameter.dtype, name)).numpy()
    can_train = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    parameter.__class__ = CentralParameter
    # A frozen parameter is trainable, too: it may be unfrozen later.
    parameter.variable = Variable(values, name=name, trainable=can_train, sparse=is_table and can_train)
    parameter.is_protected = protect == "readonly"
    parameter.grad = None
    make_empty(parameter)


#: The attribute of a module that has its :class:`_Factory`.
_FACTORY = "_central_factory"
#: What a user may have added to a module since it was made.
_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if name.startswith(("_forward_", "_backward_")))


class _Factory(NamedTuple):
    """How a module is made in a replica, and the class that it has in torch."""

    function: Callable[[], torch.nn.Module]
    sync_batchnorm: bool
    kind: type


def _send_by_factory(module: Any, function: Callable[[], torch.nn.Module], sync_batchnorm: bool) -> None:
    """Let the module travel as the function that made it. That takes a class of its own, because pickling asks the
    class."""
    kind = type(module)
    vars(module)[_FACTORY] = _Factory(function, sync_batchnorm, kind)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce_by_factory}
    module.__class__ = type(kind.__name__, (kind,), names)


def _reduce_by_factory(module: Any, protocol: object) -> tuple[Any, ...]:
    factory = vars(module)[_FACTORY]
    states = [(path, _plain_state(each)) for path, each in module.named_modules()]
    parameters = list(module.named_parameters(remove_duplicate=False))
    # The state may refer to the module, so it comes after the module.
    return _remade, (factory.function, factory.sync_batchnorm), (states, parameters), None, None, _restore


def _plain_state(module: torch.nn.Module) -> dict[str, Any]:
    """What may have been set on a module since it was made: numbers, text, tensors, hooks and the training flag."""
    kept = (torch.Tensor, bool, int, float, str, CentralBuffers)
    state = {name: value for name, value in vars(module).items() if isinstance(value, kept)}
    for name in _HOOKS & vars(module).keys():
        hooks = vars(module)[name]
        if isinstance(hooks, OrderedDict) and hooks:
            state[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not isinstance(hook, _Guard))
    return state


def _remade(function: Callable[[], torch.nn.Module], sync_batchnorm: bool) -> torch.nn.Module:
    """The module in a replica. It is made without memory if its function can do that."""
    try:
        with torch.device("meta"):
            made = function()
    except Exception:  # noqa: BLE001  (such as a function that looks at the values that it makes)
        made = function()
    return synchronized(made) if sync_batchnorm else made


def _restore(made: torch.nn.Module, state: tuple[list[Any], list[Any]]) -> None:
    """Give a module in a replica what the one in the script has."""
    states, parameters = state
    names = [name for name, _ in made.named_parameters(remove_duplicate=False)]
    paths = [path for path, _ in made.named_modules()]
    if names != [name for name, _ in parameters] or paths != [path for path, _ in states]:
        raise InvalidArgumentError(
            "the function given to centralize makes another module in a replica than in the script; it must make the "
            "same each time, and the module must not get other parts after centralize"
        )
    for name, p in parameters:
        path, _, last = name.rpartition(".")
        setattr(made.get_submodule(path), last, p)
    for path, values in states:
        vars(made.get_submodule(path)).update(values)


@contextmanager
def _own_classes(module: torch.nn.Module) -> Iterator[None]:
    """Let modules that travel by their functions have torch's classes for the length of the block."""
    changed = [(each, type(each)) for each in module.modules() if vars(each).get(_FACTORY) is not None]
    for each, _ in changed:
        each.__class__ = vars(each)[_FACTORY].kind
    try:
        yield
    finally:
        for each, kind in changed:
            each.__class__ = kind


# --- in the script ------------------------------------------------------------------------------------------------


class _Guard:
    """A hook that refuses a call of the module, as long as it has no values."""

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        raise ContextError(
            f"this {type(module).__name__} has no values here: they are in the server. Call it in a function that "
            "cst.step, cst.function or cst.evaluate of this module has decorated; in the script, call the copy that "
            "cst.pull(module) returns"
        )


#: The attribute of a module that has the handles of our hooks.
_HANDLES = "_central_hooks"


def _watch(module: torch.nn.Module) -> None:
    """Connect the state dict of one module, without its parts, with the server."""
    if _HANDLES in vars(module):
        return
    handles = vars(module)[_HANDLES] = [module.register_load_state_dict_pre_hook(_before_load)]
    if buffers_of(module) is not None or any(own_parameters(module)):
        handles += [
            module.register_forward_pre_hook(_Guard()),
            module.register_state_dict_pre_hook(_before_save),
            module.register_state_dict_post_hook(_after_save),
            module.register_load_state_dict_post_hook(_after_load),
        ]


def remove_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks of :func:`centralize` from a module and its parts: they are for the script."""
    for each in module.modules():
        for handle in vars(each).pop(_HANDLES, ()):
            handle.remove()


def _before_save(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    _check_unchanged(module)
    _fill(module)
    for _, p in own_parameters(module):
        note(p)  # a part of the module may have the same parameter


def _after_save(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, p in own_parameters(module):
        if state.get(prefix + name) is p:  # with keep_vars=True
            state[prefix + name] = torch.nn.Parameter(p.data, p.requires_grad)
    _empty(module)


def _before_load(
    module: torch.nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    if not prefix:  # of the module whose method was called: nothing has been written yet
        for p in module.parameters():
            if isinstance(p, CentralParameter):
                check_unconverted(p)
        _check_shapes(module, state)
        for each in module.modules():  # BatchNorm reads one of its buffers before this is called for it
            if (found := buffers_of(each)) is not None:
                found.load(each)
    metadata.pop("assign_to_params_buffers", None)  # the values go to the server, whatever object brings them
    _fill(module)


def _after_load(module: torch.nn.Module, incompatible: object) -> None:
    for _, p in own_parameters(module):
        if p._version != p.noted[0]:  # noqa: SLF001  (one that the state dict has; the server may hold more digits)
            write_to(p.variable, p)
    if (found := buffers_of(module)) is not None:
        found.store(module)
    _empty(module)


def _check_shapes(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for values that do not fit."""
    expected = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    wrong = [
        f"{name} is {list(value.shape)} in the state dict and {list(tensor.shape)} in the module"
        for name, tensor in expected
        if isinstance(value := state.get(name), torch.Tensor)
        and value.shape != tensor.shape
        and not (tensor.dim() == 0 and value.shape == (1,))  # as torch 0.3 saved scalars
    ]
    if wrong:
        raise StateDictError(f"load_state_dict changed nothing: {'; '.join(wrong)}")


def _fill(module: torch.nn.Module) -> None:
    """Give what the module itself has its present values."""
    for _, p in own_parameters(module):
        p.data = value_of(p.variable, p.dtype)
    if (found := buffers_of(module)) is not None:
        found.load(module)


def _empty(module: torch.nn.Module) -> None:
    """Take the values away again."""
    for _, p in own_parameters(module):
        make_empty(p)
    if (found := buffers_of(module)) is not None:
        found.empty(module)
