"""Decorators for the functions of a training: ``step``, ``function`` and ``evaluate``.

What they decorate is called in each replica with its share of a global batch. They add what DistributedDataParallel and
a training loop add: the module is prepared, gradients are collected and weighted by rows, the optimizers step, and the
results of the shares become the result of the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import optree
import torch

from central_storage.core.context import get_replica_context, has_strategy, in_cross_replica_context, streams_here
from central_storage.core.options import RunOptions
from central_storage.data.arguments import can_take
from central_storage.pickling.function import Function
from central_storage.strategy.run_steps import LOOKAHEAD
from central_storage.strategy.step_bar import known, with_bar
from cs_proto.arrays import INLINE_NBYTES
from cs_proto.errors import ContextError, InvalidArgumentError, MergeMismatchError, StructureMismatchError
from cs_runtime.trace import moments

from .batches import distributed, parts, share_of
from .binding import Binding, current

__all__ = ["Decorated", "Step", "clip_grad_norm_", "evaluate", "function", "step"]

_KEEP = RunOptions(keep_per_replica=True)
_moment = moments("worker")


def step(
    module: torch.nn.Module, *optimizers: Any, accumulate: int = 1, allow_nan: bool = False
) -> Callable[[Callable[..., Any]], Step]:
    """Decorate a function that returns the loss of a share, so that a call of it trains on a global batch.

    The function is called in each replica and returns the mean loss of its share. The decorator adds the backward pass
    and the steps of the optimizers. The loss that is trained is the mean over the rows of the global batch, or their
    weighted mean (``cst.batches``), whatever the shares. A parameter that no replica has used keeps its value and its
    state, as in torch. A tuple or list is passed as positional arguments if the function takes so many, and a dict as
    one argument or by its keys. Everything else that the function reads is sent once, at the first call; keyword
    arguments of the call are sent each time, and every replica gets them whole.

    Args:
        module: The centralized module; several as ``torch.nn.ModuleList([a, b])``.
        *optimizers: Optimizers of ``cst.optim``.
        accumulate: In how many parts each replica computes its share, to save memory. The gradients are added up.
        allow_nan: Whether a loss that is NaN is trained. Otherwise it is an error, and nothing changes.

    Returns:
        A decorator. What it returns is called with a global batch, or with its parts as arguments, and returns the mean
        loss; ``ahead`` does so for many batches.

    Raises:
        InvalidArgumentError: A parameter is not centralized, belongs to another strategy, or is not one of the
            module's; ``accumulate`` is out of range (a ValueError).
        TypeError: An optimizer is not one of ``cst.optim``.

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = cst.centralize(torch.nn.Linear(1, 1, bias=False))
        ...     _ = model.load_state_dict({"weight": torch.ones(1, 1)})
        ...     optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
        ...     @cst.step(model, optimizer)
        ...     def train(x, y):
        ...         return (model(x) - y).square().mean()
        ...     loss = train(torch.ones(3, 1), torch.zeros(3, 1))
        ...     print(loss, model.state_dict()["weight"].item())
        1.0 0.0
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidArgumentError(f"accumulate must be an int of at least 1, not {accumulate!r}")
    binding = _binding(module, optimizers)
    if not optimizers:
        raise InvalidArgumentError("step needs at least one optimizer; cst.evaluate computes without one")
    owners: dict[int, Any] = {}
    for optimizer in optimizers:
        for p in (p for _, group in optimizer.groups_for_update() for p in group):
            if owners.setdefault(id(p), optimizer) is not optimizer:
                raise InvalidArgumentError(
                    f"parameter {p.variable.name} is in two optimizers, but each step updates it once; make one "
                    "of them, or let each have a function of its own"
                )
    return lambda fn: Step(fn, binding, functools.partial(_train, accumulate=accumulate, allow_nan=bool(allow_nan)))


def function(module: torch.nn.Module, *optimizers: Any) -> Callable[[Callable[..., Any]], Decorated]:
    """Decorate the body of a training loop, unchanged: ``zero_grad``, ``backward`` and ``step`` are in it.

    The body is called in each replica with its share, as :func:`step` does, and its loss is the mean over the share.
    ``optimizer.step()`` weights the gradients by the rows of the shares, so the mean over the global batch is trained.
    Bound the norm of all gradients by :func:`clip_grad_norm_`, or by ``max_norm`` of the optimizer: torch's function
    would see those of one share. Every call begins without gradients; if it ends with some and no optimizer has
    stepped, that is an error, because they would be lost. After ``optimizer.step()`` a parameter has its new value as
    soon as a module is called again; until then it has none, and ``parameter.variable.numpy()`` returns it.

    Args:
        module: The centralized module; several as ``torch.nn.ModuleList([a, b])``.
        *optimizers: Optimizers of ``cst.optim``: all that the body uses.

    Returns:
        A decorator. What it returns is called with a global batch, or with its parts as arguments. A number or a tensor
        without axes that the body returns becomes the mean over the rows of the batch; other tensors are concatenated
        in the order of the rows. They may be in tuples, lists and dicts.

    Raises:
        Exception: As :func:`step`.

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = cst.centralize(torch.nn.Linear(1, 1, bias=False))
        ...     optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
        ...     @cst.function(model, optimizer)
        ...     def train(x, y):
        ...         optimizer.zero_grad()
        ...         loss = (model(x) - y).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         return loss.item()
        ...     losses = [train(torch.ones(3, 1), torch.zeros(3, 1)) for _ in range(2)]
        ...     print(round(losses[1], 6))
        0.0
    """
    binding = _binding(module, optimizers)
    return lambda fn: Decorated(fn, binding, _body)


def evaluate(module: torch.nn.Module) -> Callable[[Callable[..., Any]], Decorated]:
    """Decorate a function that computes without gradients, with the module in eval mode.

    Args:
        module: The centralized module; several as ``torch.nn.ModuleList([a, b])``.

    Returns:
        A decorator. What it returns is called as that of :func:`function`, and returns the same.

    Raises:
        InvalidArgumentError: A parameter is not centralized, or belongs to another strategy (a ValueError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = cst.centralize(torch.nn.Linear(2, 1))
        ...     @cst.evaluate(model)
        ...     def predict(x):
        ...         return model(x)
        ...     print(predict(torch.ones(3, 2)).shape)
        torch.Size([3, 1])
    """
    binding = _binding(module, ())
    return lambda fn: Decorated(fn, binding, _evaluate)


def clip_grad_norm_(optimizers_or_parameters: Any, max_norm: float) -> None:
    """In a function that :func:`function` has decorated: bound the norm of the gradients of the whole global batch.

    The server bounds it in the next update of these parameters, by the formula of ``torch.nn.utils.clip_grad_norm_``:
    the gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``. The norm is known only there, so nothing is
    returned.

    Args:
        optimizers_or_parameters: An optimizer, parameters, or several of either. All parameters of an optimizer, and
            their optimizers step before the next forward pass.
        max_norm: The bound.

    Raises:
        InvalidArgumentError: ``max_norm`` is not a number of at least 0; or, at the update, the parameters are not
            updated together (a ValueError).
        ContextError: Called elsewhere (a RuntimeError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = cst.centralize(torch.nn.Linear(2, 1))
        ...     optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
        ...     @cst.function(model, optimizer)
        ...     def train(x):
        ...         model(x).sum().backward()
        ...         cst.clip_grad_norm_(model.parameters(), 1.0)
        ...         optimizer.step()
        ...     train(torch.ones(3, 2))
    """
    bound = float(max_norm)
    if not bound >= 0:
        raise InvalidArgumentError(f"max_norm must be a number of at least 0, not {max_norm!r}")
    found = current("cst.clip_grad_norm_")
    given = optimizers_or_parameters
    several = [given] if isinstance(given, torch.Tensor) or hasattr(given, "groups_for_update") else list(given)
    parameters: list[Any] = []
    for each in several:
        groups = each.groups_for_update() if hasattr(each, "groups_for_update") else [(None, [each])]
        parameters += [p for _, group in groups for p in group]
    if found is not None and bound != math.inf:
        found.clip(parameters, bound)


class Decorated:
    """A function over global batches, in the script."""

    def __init__(self, fn: Callable[..., Any], binding: Binding, body: Callable[..., Any]) -> None:
        if not callable(fn):
            raise TypeError(f"the decorator takes a function, not {fn!r:.100}")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._binding = binding
        self._body = body
        self._freeze()

    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        """Call the function on a global batch, or on its parts as arguments. The result is that of the batch."""
        strategy = self._begin()
        element = distributed(batch[0] if len(batch) == 1 else batch, strategy.num_replicas_in_sync)
        flags = self._binding.changes()
        try:
            results = self._run(strategy, (element, flags, kwargs))
        except MergeMismatchError as error:
            self._explain(error)
            raise
        self._count()
        return combined(strategy.experimental_local_results(results))

    def _freeze(self) -> None:
        self._replica = _replica_of(self._fn, self._binding, self._body)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [self._binding.version, *(optimizer.version for optimizer in self._binding.optimizers)]

    def _begin(self) -> Any:
        """The strategy, when replicas will have the optimizers as they are."""
        if has_strategy() and not in_cross_replica_context():
            raise ContextError(f"{self._fn.__name__} trains on global batches: call it in the script, not in a replica")
        if self._versions != self._present_versions():
            self._freeze()  # replicas have copies of the optimizers' groups and of the modules' attributes
        return self._binding.strategy

    def _run(self, strategy: Any, args: tuple[Any, ...]) -> Any:
        """Run the function once, with the numbers of the groups that the script has changed."""
        optimizers = self._binding.optimizers
        changes = [change for optimizer in optimizers for change in optimizer.changes()]
        if not changes:
            return strategy.run(self._replica, args, options=_KEEP)
        try:
            results = strategy.run_changing(changes, self._replica, args)
        except BaseException:  # Ctrl-C, too: nobody knows whether the server has them
            for optimizer in optimizers:
                optimizer.forget_pushed()
            raise
        for optimizer in optimizers:
            optimizer.pushed()
        return results

    def _count(self) -> None:
        """Let schedulers know of a step."""
        for optimizer in self._binding.optimizers:
            optimizer.step()

    def _explain(self, error: MergeMismatchError) -> None:
        if self._binding.optimizers and not isinstance(error, StructureMismatchError):
            error.add_note(
                "If replicas use different parameters in one step, as with routing, make the optimizer with "
                "find_unused_parameters=True."
            )


class Step(Decorated):
    """What :func:`step` makes of a function."""

    def __call__(self, *batch: Any, **kwargs: Any) -> float:
        """Train on a global batch, given whole or as its parts. The result is its mean loss."""
        loss: float = super().__call__(*batch, **kwargs)
        return loss

    def ahead(
        self,
        batches: Any,
        scheduler: Any = None,
        *,
        steps: int | None = None,
        lookahead: int = LOOKAHEAD,
        progress: bool | str = False,
        **kwargs: Any,
    ) -> Iterator[float]:
        """Iterate over the mean losses of many batches, and send steps before the loop asks for their losses.

        The results have the same bits as those of single calls. The scheduler is stepped with each loss, and its rates
        are computed ahead of time.

        Args:
            batches: What ``cst.batches`` returns, or an iterator of it.
            scheduler: A scheduler of ``torch.optim.lr_scheduler`` that does not look at losses, several, or None.
            steps: The largest number of batches; None: all.
            lookahead: How many steps are sent ahead.
            progress: Whether a bar shows the steps and their loss, as for ``strategy.run_steps``.
            **kwargs: Keyword arguments of every call.

        Returns:
            An iterator over the losses. If it is left early, it waits for the steps that were sent.

        Raises:
            Exception: As ``strategy.run_steps`` and the scheduler.
        """
        from .optim.schedules import rates_ahead  # late: single steps do not need it

        strategy = self._begin()
        rates = rates_ahead(self._binding.optimizers, scheduler)
        flags = np.frombuffer(self._binding.present(), np.uint8).copy()
        given: dict[str, Any] = {"flags": flags, "kwargs": kwargs}
        more: dict[str, Any] = {"rates": rates} if rates else {}
        series = strategy.run_steps(self._replica, batches, steps, given, lookahead=lookahead, options=_KEEP, **more)
        return with_bar(self._losses(strategy, series, rates, flags), progress, known(series.__len__, steps))

    def _losses(self, strategy: Any, series: Any, rates: Any, flags: np.ndarray) -> Iterator[float]:
        try:
            for results in series:
                rates.taken()
                yield combined(strategy.experimental_local_results(results))
                flags[:] = np.frombuffer(self._binding.present(), np.uint8)  # for the steps that are sent next
                if self._versions != self._present_versions():
                    raise ContextError(
                        "an attribute or hook of a module, or an argument of an optimizer, has changed within the loop "
                        "of ahead, and replicas have the former one; change it between loops, or in a plain loop"
                    )
        except MergeMismatchError as error:
            self._explain(error)
            raise
        finally:
            series.close()
            rates.settle(series.steps)


def _binding(module: Any, optimizers: tuple[Any, ...]) -> Binding:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the first argument must be a torch.nn.Module, not {type(module).__name__}")
    return Binding(module, optimizers)


def _replica_of(fn: Callable[..., Any], binding: Binding, body: Callable[..., Any]) -> Function:
    """What is sent to the replicas: ``body`` around the user's function. Its runs are counted under the user's name."""

    @functools.wraps(fn)
    def replica(element: Any, flags: bytes | None, kwargs: dict[str, Any]) -> Any:
        return body(fn, binding, element, flags, kwargs)

    return Function(replica)


# --- in a replica -------------------------------------------------------------------------------------------------


def _train(
    fn: Callable[..., Any],
    binding: Binding,
    element: Any,
    flags: bytes | None,
    kwargs: dict[str, Any],
    *,
    accumulate: int,
    allow_nan: bool,
) -> tuple[float, bool, float]:
    context: Any = get_replica_context()
    data, share, weights = share_of(element, context.backend.replica, context.num_replicas_in_sync)
    run = binding.begin(share, flags, is_training=True, steps_itself=True)
    _moment("bound")
    try:
        total = 0.0
        for position, (part, weight) in enumerate(parts(data, share, weights, accumulate)):
            run.repeat = functools.partial(_repeat, fn, part, kwargs)
            earlier = run.hide_gradients() if position else []  # the function may call zero_grad
            loss = call(fn, part, kwargs)
            run.refuse_computed()
            run.show_gradients(earlier)
            value = _checked_loss(loss, fn, share.replica, allow_nan=allow_nan or not share.weight * weight)
            _moment("forward")
            if accumulate == 1:
                loss.backward()
            elif weight:
                loss.backward(torch.full_like(loss, weight))
            _moment("backward")
            total += weight * value if weight else 0.0
        for optimizer in binding.optimizers:
            run.take(optimizer)
        run.end()
        _moment("applied")
    finally:
        run.leave()
    return share.weight, share.is_empty, total


def _body(fn: Any, binding: Binding, element: Any, flags: bytes | None, kwargs: Any) -> tuple[float, bool, Any]:
    return _call_bound(fn, binding, element, flags, kwargs, is_training=True)


def _evaluate(fn: Any, binding: Binding, element: Any, flags: bytes | None, kwargs: Any) -> tuple[float, bool, Any]:
    with torch.no_grad():
        return _call_bound(fn, binding, element, flags, kwargs, is_training=False)


def _call_bound(
    fn: Any, binding: Binding, element: Any, flags: bytes | None, kwargs: Any, *, is_training: bool
) -> tuple[float, bool, Any]:
    context: Any = get_replica_context()
    data, share, _ = share_of(element, context.backend.replica, context.num_replicas_in_sync)
    run = binding.begin(share, flags, is_training=is_training)
    try:
        run.repeat = functools.partial(_repeat, fn, data, kwargs)
        result = optree.tree_map(_sendable, call(fn, data, kwargs), none_is_leaf=True)
        run.refuse_left()
        run.end()
    except RuntimeError as error:
        run.explain(error)
        raise
    finally:
        run.leave()
    return share.weight, share.is_empty, result


def call(fn: Callable[..., Any], data: Any, kwargs: dict[str, Any]) -> Any:
    """Call the user's function with tensors of its own, which it may change. What it does to torch's grad mode ends
    with the call."""
    tensors = optree.tree_map(_tensor, data, none_is_leaf=True)
    args, named = _arguments(fn, tensors, kwargs)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return fn(*args, **named)


def _repeat(fn: Callable[..., Any], data: Any, kwargs: dict[str, Any]) -> None:
    loss = call(fn, data, kwargs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        loss.backward()


def _tensor(leaf: Any) -> Any:
    """A tensor that the function may change; texts stay an array. A large array lies in memory that is private to this
    process, and only a small one is copied."""
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in "biufc":
            return leaf
        return torch.tensor(np.asarray(leaf)) if leaf.nbytes <= INLINE_NBYTES else torch.from_dlpack(leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf.clone() if leaf.nbytes <= INLINE_NBYTES else leaf
    return torch.from_dlpack(leaf) if hasattr(leaf, "__dlpack__") else leaf


def _arguments(fn: Callable[..., Any], data: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by which the function takes a batch."""
    if type(data) is tuple:
        return (data if _takes(fn, len(data)) else (data,)), kwargs
    if type(data) is dict and not _takes(fn, 1):
        return (), {**data, **kwargs}
    return (data,), kwargs


#: By function, whether it can be called with a number of positional arguments: to read a signature takes longer than
#: the rest of a small step.
_known: WeakKeyDictionary[Callable[..., Any], dict[int, bool]] = WeakKeyDictionary()


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether the function can be called with so many positional arguments."""
    known = _known.setdefault(fn, {})
    if count not in known:
        known[count] = can_take(fn, count)
    return known[count]


def _checked_loss(loss: Any, fn: Callable[..., Any], replica: int, *, allow_nan: bool) -> float:
    """The loss as a number. Raises for what cannot be trained; then this step changes nothing."""
    name = getattr(fn, "__name__", "the function")
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"{name} must return the loss as a tensor, not {type(loss).__name__}")
    if loss.is_complex():
        raise TypeError(f"{name} must return a real loss, not one of {loss.dtype}; use its absolute value or real part")
    if loss.numel() != 1:
        raise InvalidArgumentError(
            f"{name} must return one loss, the mean over its rows, not {list(loss.shape)} values"
        )
    if not loss.requires_grad:
        raise InvalidArgumentError(
            f"the loss that {name} returned depends on no parameter that needs a gradient: it was detached, computed "
            "under no_grad or made from numbers, or every parameter that it depends on is frozen"
        )
    value = loss.item()
    if not allow_nan and math.isnan(value):
        streams = streams_here()
        number = "" if streams is None else f" in call {streams.place[3]}"
        raise FloatingPointError(
            f"the loss of {name} is NaN{number} in replica {replica}; nothing has changed. allow_nan=True of cst.step "
            "trains on it as torch does"
        )
    return float(value)


def _sendable(leaf: Any) -> Any:
    """A result as data: a tensor without axes as a number."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    found = leaf.detach()
    if not found.dim():
        return found.item()
    found = found.cpu()
    return (found.float() if found.dtype in (torch.bfloat16, torch.float16) else found).contiguous().numpy()


# --- results in the script ----------------------------------------------------------------------------------------


def combined(shares: tuple[tuple[float, bool, Any], ...]) -> Any:
    """The result of a batch from (weight, whether there are no rows, result) of each replica."""
    own = [(weight, result) for weight, is_empty, result in shares if not is_empty]
    weights, results = [weight for weight, _ in own], [result for _, result in own]
    if type(results[0]) is float:  # a step
        return np.float64(sum(w * each for w, each in zip(weights, results, strict=True) if w))
    leaves, structure = optree.tree_flatten(results[0], none_is_leaf=True)
    columns = zip(leaves, *[structure.flatten_up_to(each) for each in results[1:]], strict=True)
    return structure.unflatten(_merged(column, weights) for column in columns)


def _merged(leaves: tuple[Any, ...], weights: list[float]) -> Any:
    first = leaves[0]
    if isinstance(first, np.ndarray) and first.ndim:
        return torch.cat([torch.from_numpy(np.array(leaf)) for leaf in leaves])
    if isinstance(first, bool) or not isinstance(first, int | float | complex | np.generic | np.ndarray):
        if any(leaf != first for leaf in leaves):
            raise InvalidArgumentError(
                f"the replicas returned different values that are no numbers: {', '.join(map(repr, leaves)):.200}"
            )
        return first
    mean = sum(w * leaf for w, leaf in zip(weights, leaves, strict=True) if w)
    return np.float64(mean) if not isinstance(mean, complex) else mean
