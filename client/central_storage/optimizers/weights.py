"""An optimizer's state as a list of numbers and arrays, and the other names of TensorFlow's ``OptimizerV2``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from central_storage.core.handles import Handle
from central_storage.core.tensors.live_number import LiveNumber
from central_storage.variables.variable import Variable
from cs_proto.errors import InvalidArgumentError
from cs_proto.printable import counted

from .slots import Slot

if TYPE_CHECKING:
    from central_storage.core.backends import Strategy

__all__ = ["Weights"]


class _List(list[Any]):
    """``optimizer.variables``, which is a method in some versions of TensorFlow and an attribute in others."""

    def __call__(self) -> Self:
        return self


class Weights(Handle):
    """Base of :class:`~central_storage.optimizers.Optimizer`: the methods on what TensorFlow calls weights or
    variables."""

    name: str

    @property
    def strategy(self) -> Strategy | None:
        """The strategy it belongs to, if any yet."""
        raise NotImplementedError

    @property
    def iterations(self) -> LiveNumber:
        """The count of updates."""
        raise NotImplementedError

    @property
    def counts_by_variable(self) -> bool:
        """Whether the rule counts the updates of each variable."""
        raise NotImplementedError

    @property
    def slot_names(self) -> list[str]:
        """The names of the rule's slots."""
        raise NotImplementedError

    def slots(self) -> list[tuple[Variable, str]]:
        """The variable and the name of each slot that has been made."""
        raise NotImplementedError

    def get_slot(self, var: Variable, slot_name: str) -> Slot:
        """The slot of a variable."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Any]:
        """``iterations``, then the slots that have been made: those of the first name, in the order in which their
        variables were made, then those of the next. The names are those of :attr:`slot_names`."""
        slots = [] if self.strategy is None else self.slots()
        slots.sort(key=lambda slot: self.slot_names.index(slot[1]))
        return _List([self.iterations, *(self.get_slot(variable, name) for variable, name in slots)])

    @property
    def variables(self) -> Any:
        """As :attr:`weights`; also as a method, ``variables()``."""
        return self.weights

    def get_weights(self) -> list[np.ndarray]:
        """Copies of the values of :attr:`weights`, as :meth:`set_weights` takes them.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     w, adagrad = cs.Variable([1.0, 2.0]), cs.optimizers.Adagrad(initial_accumulator_value=0.5)
            ...     adagrad.build([w])
            ...     [weight.tolist() for weight in adagrad.get_weights()]
            [0, [0.5, 0.5]]
        """
        return [np.asarray(weight) for weight in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set ``iterations`` and the slots. All values are checked before the first is set. In the script only.

        Args:
            weights: As :meth:`get_weights` of an optimizer of the same kind returns them, for variables of the same
                shapes.

        Raises:
            InvalidArgumentError: Their number or a shape differs (a ValueError).
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> first, second = cs.optimizers.SGD(), cs.optimizers.SGD()
            >>> first.iterations = 7
            >>> second.set_weights(first.get_weights())
            >>> int(second.iterations)
            7
        """
        if self.counts_by_variable:
            raise InvalidArgumentError(
                f"{self.name}.set_weights cannot set how often each variable was updated; use a checkpoint, or "
                "set_slot and set_steps"
            )
        count, *slots = self.weights
        if len(weights) != len(slots) + 1:
            raise InvalidArgumentError(
                f"{self.name}.set_weights takes {counted(len(slots) + 1, 'value')} (iterations and "
                f"{counted(len(slots), 'slot')}), not {len(weights)}; slots are made by the first apply_gradients, or "
                "by build(variables)"
            )
        values = [np.asarray(value) for value in weights]
        for target, value in zip((count, *slots), values, strict=True):
            if value.shape != target.shape or not np.can_cast(value.dtype, target.dtype, "same_kind"):
                raise InvalidArgumentError(
                    f"{self.name}.set_weights: {target.name} is {target.dtype}{list(target.shape)}, but the value is "
                    f"{value.dtype}{list(value.shape)}"
                )
        for target, value in zip((count, *slots), values, strict=True):
            target.assign(value.astype(target.dtype))

    def get_slot_names(self) -> list[str]:
        """As :attr:`slot_names`.

        Examples:
            >>> import central_storage as cs
            >>> cs.optimizers.Adam().get_slot_names()
            ['m', 'v']
        """
        return self.slot_names

    def build(self, var_list: Iterable[Variable]) -> None:
        """Make the slots of these variables now, and not in the first ``apply_gradients``.

        Args:
            var_list: Variables of the optimizer's strategy.

        Raises:
            Exception: As :meth:`get_slot`.

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     w, adam = cs.Variable([1.0, 2.0], name="w"), cs.optimizers.Adam()
            ...     adam.build([w])
            ...     [weight.name for weight in adam.variables]
            ['Adam/iterations', 'w/m', 'w/v']
        """
        for variable in var_list:
            for name in self.slot_names[:1]:  # the server makes all slots of a variable together
                self.get_slot(variable, name).value()

    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: str | None = None, tape: Any = None
    ) -> NoReturn:
        """Refused, because there are no gradient tapes.

        Args:
            loss: Not used.
            var_list: Not used.
            grad_loss: Not used.
            name: Not used.
            tape: Not used.

        Raises:
            NotImplementedError: Always; the error says what to call instead.

        Examples:
            >>> import central_storage as cs
            >>> sgd = cs.optimizers.SGD(0.5)
            >>> def step(w, x):  # in place of sgd.minimize(lambda: (w * x) ** 2, [w])
            ...     sgd.apply_gradients([(2 * w * x * x, w)])
        """
        self._refuse("minimize")

    def get_gradients(self, loss: Any, params: Any) -> NoReturn:
        """Refused: as :meth:`minimize`.

        Args:
            loss: Not used.
            params: Not used.

        Raises:
            NotImplementedError: Always.

        Examples:
            >>> import central_storage as cs
            >>> try:
            ...     cs.optimizers.SGD().get_gradients(None, [])
            ... except NotImplementedError as error:
            ...     print(str(error)[:39])
            SGD.get_gradients needs a gradient tape
        """
        self._refuse("get_gradients")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{self.name}.{what} needs a gradient tape, and there is none: compute the gradients in the replica "
            "function, by hand or with torch or JAX, and call optimizer.apply_gradients(zip(gradients, variables))"
        )
