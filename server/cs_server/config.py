"""The configuration of a server: one frozen record, checked when it is made.

The command line builds it from the options alone; it reads the environment only for the log. The engine takes its
options from here only.
"""

from __future__ import annotations

import os
import re

from cs_proto.errors import ConfigurationError, DeviceError
from cs_proto.frozen import frozen
from cs_proto.messages import MOST_REPLICAS
from cs_proto.pace import NAME_AFTER
from cs_proto.peers import server_endpoint

__all__ = ["ServerConfig"]

# A socket's path is limited to 107 bytes by the kernel; the longest name in a run directory takes 20.
_PATH_NBYTES = 87
_DEVICE = re.compile(r"(cpu|gpu):(0|[1-9][0-9]{0,3})")


@frozen
class ServerConfig:
    """The run directory, the service, and the machine.

    ``parameter_device`` is in short form. ``threads`` is the number of cores that one update may use.
    ``machine_nbytes`` is the size of the machine's memory, ``address_nbytes`` the bytes of addresses that the segments
    may take. ``incarnation`` counts the servers of a run from 1. ``recovery``: another server may take the place of
    this one. ``step_timeout``: if others wait for a replica that has sent nothing for this many seconds, its worker is
    killed; None means never. ``name_after``: seconds after which a wait is named.

    Raises ConfigurationError for invalid values, DeviceError for a device that a server cannot use.
    """

    run_directory: str
    parameter_device: str
    replicas: int
    threads: int
    machine_nbytes: int
    address_nbytes: int
    incarnation: int = 1
    recovery: bool = True
    step_timeout: float | None = None
    name_after: float = NAME_AFTER

    def __post_init__(self) -> None:
        path = os.fsencode(self.run_directory)
        if not os.path.isabs(path) or len(path) > _PATH_NBYTES:
            raise ConfigurationError(
                f"run directory {self.run_directory!r} must be an absolute path of at most {_PATH_NBYTES} bytes, "
                "because it holds sockets; choose a shorter one"
            )
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ConfigurationError(f"the number of replicas must be from 1 to {MOST_REPLICAS}, not {self.replicas}")
        if min(self.threads, self.incarnation, self.machine_nbytes, self.address_nbytes) < 1:
            raise ConfigurationError(
                f"threads ({self.threads}), incarnation ({self.incarnation}), the machine's memory "
                f"({self.machine_nbytes} bytes) and the addresses for segments ({self.address_nbytes} bytes) must "
                "be at least 1"
            )
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise ConfigurationError(f"the step timeout must be more than 0 seconds, not {self.step_timeout}")
        if _DEVICE.fullmatch(self.parameter_device) is None:
            raise DeviceError(f"{self.parameter_device!r:.60} is not a device in short form; write it like cpu:0")

    @property
    def endpoint(self) -> str:
        """The address at which the server listens."""
        return server_endpoint(self.run_directory)
