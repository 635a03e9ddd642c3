"""Slots: the optimizer state of a variable, as arrays that can be read and, in the client, written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from central_storage.core.backends import service_of
from central_storage.core.context import current_replica
from central_storage.core.handles import Handle, handle_id
from central_storage.core.public_objects import Closed, presented
from central_storage.core.tensors.tensor import as_tensor
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError

if TYPE_CHECKING:
    from central_storage.core.backends import ControllerBackend

__all__ = ["Slot"]


@presented
class Slot(Closed, np.lib.mixins.NDArrayOperatorsMixin):
    """One slot of one variable: an array of its dtype, and of its shape or that of its first axis, held by the server.
    Every read is a copy, also in operators."""

    def __init__(self, optimizer: Handle, variable: Variable, slot: str, shape: tuple[int, ...]) -> None:
        assert variable.strategy is not None
        self._strategy = variable.strategy
        self._held = optimizer  # so that the server does not free it
        self._optimizer = handle_id(optimizer)[1]
        self._variable = variable
        self._slot = slot
        self._shape = shape

    @property
    def name(self) -> str:
        """The variable's name and the slot's: ``w/momentum``."""
        return f"{self._variable.name}/{self._slot}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's shape; of an optimizer with one number for each row, its first axis."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The variable's dtype."""
        return self._variable.dtype

    def value(self) -> Any:
        """A copy of the current value as a tensor; in a replica, with this replica's own updates."""
        return as_tensor(self.numpy())

    read_value = value

    def numpy(self) -> np.ndarray:
        """As :meth:`value`, a plain array."""
        backend = current_replica(self._strategy) or self._controller
        return backend.slot(self._optimizer, self._variable.number, self._slot)

    def assign(self, value: Any) -> Slot:
        """Set it. Only in the client, between runs (a checkpoint does it), or in a merge function.

        Raises InvalidArgumentError (a ValueError) for another shape or dtype, ContextError (a RuntimeError) in a
        replica.
        """
        if current_replica(self._strategy) is not None:
            raise ContextError(f"slot {self.name} can be set only in the script, between runs, not in a replica")
        array = np.asarray(value)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InvalidArgumentError(
                f"slot {self.name} is {self.dtype}{list(self.shape)}, but the value is {array.dtype}{list(array.shape)}"
            )
        self._controller.assign_slot(self._optimizer, self._variable.number, self._slot, array)
        return self

    @property
    def _controller(self) -> ControllerBackend:
        return service_of(self._strategy, f"slot {self.name}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy."""
        return np.asarray(self.numpy(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's operators and ufuncs act on the value; a slot is never their output."""
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(each, Slot) for each in written):
            raise TypeError(f"slot {self.name} is not changed in place; assign the whole value: slot.assign(array)")
        return getattr(ufunc, method)(*[x.numpy() if isinstance(x, Slot) else x for x in inputs], **kwargs)

    __hash__ = object.__hash__  # the operators compare values

    def __repr__(self) -> str:
        return f"<Slot {self.name!r} {self.dtype}{list(self.shape)}>"
