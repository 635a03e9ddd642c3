"""What all runs of one worker share. Put together once by the loop; it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from central_storage.strategy.service_strategy import CentralStorageStrategy
from cs_runtime.arena import Arena

from .baton import Baton
from .catalogue import Catalogue
from .config import Config
from .conversation import Conversation
from .devices.device import Device
from .interrupts import Interrupts

if TYPE_CHECKING:
    from .merge_controller import MergeController

__all__ = ["WorkerContext"]


@dataclass(frozen=True)
class WorkerContext:
    """The pieces by name. ``variable_sets``: the server's number of a set of variables that an optimizer updates
    together, by (optimizer, ascending variable numbers)."""

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
    variable_sets: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
