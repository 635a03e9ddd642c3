"""The optimizers by the name of their rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Optimizer as OptimizerRecord

from .adagrad import Adadelta, Adagrad, RowwiseAdagrad
from .adam import Adam, Adamax, AdamW, Nadam
from .ftrl import Ftrl
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD

if TYPE_CHECKING:
    from central_storage.core.backends import Strategy

_KINDS: dict[str, type[Optimizer]] = {
    cls.kind: cls for cls in (SGD, Adagrad, RowwiseAdagrad, RMSprop, Adam, AdamW, Adamax, Nadam, Adadelta, Ftrl)
}


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
    cls = _KINDS.get(record.kind)
    if cls is None:
        raise PeerProtocolError(f"the server has an optimizer of kind {record.kind!r}, unknown to this version")
    return cls.from_record(strategy, record)
