"""The objects that all runs of one worker share. The loop puts them together once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING

import numpy as np

from central_storage.strategy.service_strategy import CentralStorageStrategy
from cs_proto.messages import ApplyPoint, Forget, OptimizerUpdate
from cs_runtime.shared_memory.arena import Arena
from cs_worker.baton import Baton
from cs_worker.config import Config
from cs_worker.devices.device import Device
from cs_worker.session.conversation import Conversation
from cs_worker.session.interrupts import Interrupts

from .catalogue import Catalogue

if TYPE_CHECKING:
    from .merge_controller import MergeController

__all__ = ["WorkerContext"]


@dataclass(frozen=True)
class WorkerContext:
    """The objects by name. ``variable_sets`` maps (optimizer, ascending variable numbers) to what a replica brings for
    this set of variables, which the optimizer updates together: it has the server's number of the set."""

    config: Config
    device: Device
    replicas: int
    interrupts: Interrupts
    conversation: Conversation
    catalogue: Catalogue
    arena: Arena
    controller: MergeController
    strategy: CentralStorageStrategy
    turns: Baton
    #: The thread that is the worker.
    thread: int = field(default_factory=get_ident)
    variable_sets: dict[tuple[int, tuple[int, ...]], OptimizerUpdate] = field(default_factory=dict)
    #: The applies of earlier runs, by all that they are made of: the same come again in every step.
    applies: dict[tuple[object, ...], ApplyPoint] = field(default_factory=dict)
    #: What :meth:`Catalogue.gradient_spans` gave for a set of variables in a set of buffers, or one array for each.
    gradient_spans: dict[tuple[tuple[int, ...], int], list[np.ndarray]] = field(default_factory=dict)
    #: In how many applies the gradient of each variable was not finite, as far as that is warned of.
    bad_gradients: Counter[int] = field(default_factory=Counter)

    def forget(self, freed: Forget) -> None:
        """Forget what the server has freed, and learn the names that changed by it."""
        self.applies.clear()
        self.gradient_spans.clear()
        for optimizer, numbers in list(self.variable_sets):
            if optimizer in freed.optimizers or not set(freed.variables).isdisjoint(numbers):
                del self.variable_sets[optimizer, numbers]
        for number in freed.variables:
            del self.bad_gradients[number]
        self.catalogue.forget(freed.variables, freed.optimizers)
        for number, name in freed.renamed:
            self.catalogue.rename(number, name)
