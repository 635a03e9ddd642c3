"""How a new strategy gets its service, and where the default strategy comes from. The package registers both when it
is imported.

A worker holds strategies, too, and the launcher, which starts workers in threads, imports the worker. So the module of
the strategy does not import what opens a service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .backends import ServiceBackend
    from .devices.device_names import Devices
    from .recovery_options import Recovery

__all__ = ["Cluster", "Opener", "before_save", "default_replica", "open_service"]


class Cluster(Protocol):
    """Other machines on which the workers of a strategy run."""

    #: The number of workers.
    workers: int

    def options(self) -> list[str]:
        """The options of ``cs-launch`` that say the same. The caller removes the file of ``--runtime-env``."""


class Opener(Protocol):
    """Finds or starts the service that a new strategy of this script uses."""

    def __call__(
        self,
        compute_devices: Devices | None,
        parameter_device: str | None,
        *,
        seed: int,
        start_timeout: float,
        in_process: bool,
        recovery: Recovery,
        cluster: Cluster | None = None,
    ) -> ServiceBackend:
        """The service, up and ready. Raises DeviceError, ConfigurationError or LaunchError."""


#: Set by ``central_storage/__init__.py``, which every import of the package runs first.
open_service: Opener
#: Makes the ReplicaContext of code outside every context; its strategy is the default strategy. Set there, too.
default_replica: Callable[[], Any]


def _nothing() -> None:
    pass


#: Called before a checkpoint is saved. A script that is only estimated ends there, because it has no values.
before_save: Callable[[], object] = _nothing
