"""Parameters whose values are in the server: torch parameters that travel as handles.

A central parameter is the object that the module had before, with another class: ties, groups and hooks stay. In the
script it has shape and dtype, but no memory: every element is the same NaN. In a replica ``binding`` points it at the
server's memory. Everything in ``central_storage.torch`` uses this module, and it uses none of the others.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from central_storage.core.context import get_replica_context, has_strategy, replica_here
from central_storage.core.public_objects import INTERNAL
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

__all__ = [
    "HOOKS",
    "CentralParameter",
    "check_unchanged",
    "check_unconverted",
    "empty_like",
    "make_empty",
    "name_of",
    "note",
    "stored_dtype",
    "value_of",
    "write_to",
]

#: The dtype in the server of those that NumPy does not have; a wider one, which holds every value.
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

_grad: Any = torch.Tensor.grad


class CentralParameter(torch.nn.Parameter):
    """A parameter that is a variable of the server. ``centralize`` makes them.

    A parameter of 16 bits is a variable of float32 in the server: the optimizer updates that, and each step casts it.

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        ...     weight = cst.centralize(torch.nn.Linear(2, 1)).weight
        >>> isinstance(weight, cst.CentralParameter), weight.shape, weight.variable.name
        (True, torch.Size([1, 2]), 'weight')
    """

    variable: Variable
    #: Version, address and dtype that :func:`note` has seen, by which a change in the script is noticed.
    noted: tuple[int, int, torch.dtype]
    #: Whether a replica has it in memory that cannot be written.
    is_protected: bool

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, in a replica. Raises ContextError in torch's functions that bound gradients, because they would
        see the gradient of one share alone."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":  # noqa: SLF001
            _refuse_torchs_bound()
        found: torch.Tensor | None = _grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., CentralParameter], tuple[Any, ...]]:
        hooks = [list((getattr(self, name) or {}).values()) for name in HOOKS]
        return _received, (self.variable, self.is_protected, self.requires_grad, self.dtype, *hooks)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"parameter {self.variable.name} lies in the server, so copy.deepcopy would copy nothing; "
            "cst.pull(module) returns a plain copy of the module, with the present values"
        )


def _write(name: str) -> Callable[..., Any]:
    """torch's method of this name, which writes in place. In the script it raises InvalidArgumentError where torch's
    error would be about memory or a leaf."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method, ("__name__",))  # without the documentation, whose examples would be run
    def write(self: CentralParameter, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if replica_here() is not None:
                raise
            raise InvalidArgumentError(
                f"{name} cannot write to parameter {self.variable.name} in the script, where it has no memory, because "
                "its value is in the server; change values by load_state_dict or parameter.variable.assign, or before "
                "cst.centralize"
            ) from error

    return write


for _name in (*INTERNAL["CentralParameter"].split(), "__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"):
    setattr(CentralParameter, _name, _write(_name))


def _refuse_torchs_bound() -> None:
    """Raise ContextError, except in the only replica of a strategy, whose share is the whole batch."""
    context = get_replica_context() if has_strategy() else None
    if context is None or context.num_replicas_in_sync > 1:
        raise ContextError(
            "torch bounds the gradients of one process, and these are of one share, or in no process yet: use "
            "cst.clip_grad_norm_ in a function that cst.function has decorated, or the arguments max_norm and "
            "max_value of the optimizer"
        )


#: The attributes of a tensor that hold its hooks, as ``register_hook`` and ``register_post_accumulate_grad_hook`` set
#: them.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _received(
    variable: Variable, is_protected: bool, requires_grad: bool, dtype: torch.dtype, hooks: list[Any], after: list[Any]
) -> CentralParameter:
    """A parameter in the process to which it was sent."""
    made = CentralParameter(empty_like(variable.shape, dtype), False)
    made.variable, made.is_protected = variable, is_protected
    if hooks or after:
        made.requires_grad_(True)  # without it torch takes no hook
        for hook in hooks:
            made.register_hook(hook)
        for hook in after:
            made.register_post_accumulate_grad_hook(hook)
    made.requires_grad_(requires_grad)
    return made


def empty_like(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape over the memory of one element: NaN where the dtype has one."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


def make_empty(p: CentralParameter) -> None:
    """In the script: let the parameter have a shape and no memory."""
    p.data = empty_like(p.shape, p.dtype)
    note(p)


def note(p: CentralParameter) -> None:
    """In the script: take the parameter as it is now for unchanged."""
    p.noted = _present(p)


def check_unchanged(p: CentralParameter) -> None:
    """Raise InvalidArgumentError if the user has written to the parameter or converted it in the script."""
    if _present(p) != p.noted:
        raise InvalidArgumentError(_change_of(p))


def check_unconverted(p: CentralParameter) -> None:
    """Raise InvalidArgumentError if the parameter has another dtype or shape than in the server."""
    if p.dtype is not p.noted[2] or tuple(p.shape) != p.variable.shape:
        raise InvalidArgumentError(_change_of(p))


def _present(p: CentralParameter) -> tuple[int, int, torch.dtype]:
    return p._version, p.data_ptr(), p.dtype  # noqa: SLF001  (the one way to notice a write)


def stored_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype in the server for a tensor of ``dtype``. Raises InvalidArgumentError, which names the tensor, if there
    is none."""
    found = _WIDER.get(dtype, dtype)
    try:
        torch.empty(0, dtype=found).numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} has dtype {dtype}, which no variable can have; convert it first") from error
    return found


def value_of(variable: Variable, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the present value, in the script."""
    return torch.from_numpy(variable.numpy()).to(dtype)


def write_to(variable: Variable, value: torch.Tensor) -> None:
    """Give the variable the value of a tensor of its shape, in the script."""
    host = value.detach().to("cpu", getattr(torch, np.dtype(variable.dtype).name))
    variable.assign(host.numpy())


def name_of(p: Any) -> str:
    """What an error calls a parameter."""
    return f"parameter {p.variable.name}" if isinstance(p, CentralParameter) else f"a parameter {list(p.shape)}"


def _change_of(p: CentralParameter) -> str:
    """What an error says of a parameter that was changed in the script."""
    shape, dtype = p.variable.shape, p.variable.dtype
    if tuple(p.shape) != shape:
        return (
            f"parameter {p.variable.name} has the shape {list(p.shape)} now, and had {list(shape)} when it was "
            "centralized; centralize the module in its last form"
        )
    return (
        f"parameter {p.variable.name} was written or converted in the script (it is {p.dtype} now), but its value is "
        f"in the server, as {dtype}; convert a module before cst.centralize, and change values by load_state_dict or "
        "parameter.variable.assign"
    )
