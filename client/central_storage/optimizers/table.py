"""The optimizers by their kind: the public classes, and handles of the kinds that other frameworks define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from cs_proto.arithmetic.optimizers import OPTIMIZERS, defaults_of
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Optimizer as OptimizerRecord

from .adagrad import Adadelta, Adagrad, RowwiseAdagrad
from .adam import Adam, Adamax, AdamW, Nadam
from .ftrl import Ftrl
from .lamb import LAMB
from .lion import Lion
from .optimizer import LearningRate, Optimizer, Shared, arguments_in
from .rmsprop import RMSprop
from .sgd import SGD

if TYPE_CHECKING:
    from central_storage.core.backends import Strategy

_KINDS: dict[str, type[Optimizer]] = {
    cls.kind: cls
    for cls in (SGD, Adagrad, RowwiseAdagrad, RMSprop, Adam, AdamW, Adamax, Nadam, Adadelta, Ftrl, Lion, LAMB)
}


class _OfKind(Optimizer):
    """An optimizer of a kind that has no class of its own."""

    def __init__(
        self,
        kind: str,
        name: str | None,
        learning_rate: LearningRate,
        shared: Mapping[str, Any],
        own: Mapping[str, float | bool],
    ) -> None:
        self.kind = kind
        super().__init__(name, learning_rate, shared, (), **own)

    def get_config(self) -> dict[str, Any]:
        """The kind, the name and the hyperparameters as :func:`of_kind` takes them."""
        return {"kind": self.kind} | super().get_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A new optimizer with these hyperparameters."""
        made = of_kind(**arguments_in(config))
        assert isinstance(made, cls)
        return made


def of_kind(kind: str, name: str | None = None, *, learning_rate: LearningRate, **hyperparameters: Any) -> Optimizer:
    """A new optimizer of any kind. The packages for torch and JAX call it.

    Args:
        kind: A name in the table of ``cs_proto.arithmetic.optimizers``, such as ``torch.AdamW`` or ``optax.lion``.
        name: The optimizer's name; the kind if None.
        learning_rate: A number, one of ``optimizers.schedules``, or another callable of the step or of nothing.
        **hyperparameters: By the names of the table, with the arguments that every optimizer takes. One that is left
            out has the value that the framework's own optimizer gives it.

    Raises:
        InvalidArgumentError: There is no such kind, it has no such hyperparameter, one is missing, or a value is out of
            its range (a ValueError).
        ContextError: Made inside a replica (a RuntimeError).

    Examples:
        >>> from central_storage.optimizers import of_kind
        >>> of_kind("torch.Adam", learning_rate=0.01, amsgrad=True).slot_names
        ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']
    """
    given = {**defaults_of(kind), **hyperparameters, "learning_rate": learning_rate}
    if kind in _KINDS:
        return _KINDS[kind](name=name, **given)
    shared = {key: given.pop(key) for key in Shared.__annotations__ if key in given}
    return _OfKind(kind, name, given.pop("learning_rate"), shared, given)


def default_of(kind: str) -> Optimizer:
    """An optimizer of a kind that exists, with its default arguments."""
    cls: Any = _KINDS.get(kind)
    return of_kind(kind, learning_rate=0.01) if cls is None else cls(learning_rate=0.01)


def optimizer_of(strategy: Strategy, record: OptimizerRecord) -> Optimizer:
    """The handle of an optimizer that the server already has. The package and the workers call it; users need not.

    Args:
        strategy: The strategy whose server it is.
        record: The record by which the server describes the optimizer.

    Raises:
        PeerProtocolError: This version does not know the kind of optimizer.

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         adam = cs.optimizers.Adam()
        ...     cs.optimizers.optimizer_of(strategy, strategy.controller.optimizer(1)).beta_1
        0.9
    """
    cls = _KINDS.get(record.kind, _OfKind)
    if record.kind not in OPTIMIZERS:
        raise PeerProtocolError(f"the server has an optimizer of kind {record.kind!r}, unknown to this version")
    return cls.from_record(strategy, record)
