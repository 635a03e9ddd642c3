"""The settings of a worker, which it gets at its start. No other module reads a command line or the environment."""

from __future__ import annotations

from pathlib import Path

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen
from cs_proto.peers import worker_endpoint
from cs_runtime.transport.admission import SUFFIX_NBYTES

__all__ = ["Config"]

# sun_path of Linux has 108 bytes, the last of them a zero.
_SOCKET_PATH_NBYTES = 107 - SUFFIX_NBYTES


@frozen
class Config:
    """One worker: the service's directory, the replica that it runs, how often it was started, and its device.

    Raises :class:`ConfigurationError` for numbers out of range and for a directory that cannot hold its socket.
    """

    run_directory: str
    replica: int
    incarnation: int
    device: str

    def __post_init__(self) -> None:
        if self.replica < 0:
            raise ConfigurationError(f"--replica counts from 0, not {self.replica}")
        if self.incarnation < 1:
            raise ConfigurationError(f"--incarnation counts from 1, not {self.incarnation}")
        if not Path(self.run_directory).is_dir():
            raise ConfigurationError(f"--run-directory {self.run_directory} is not a directory")
        nbytes = len(self.endpoint.removeprefix("ipc://").encode())
        if nbytes > _SOCKET_PATH_NBYTES:
            raise ConfigurationError(
                f"the socket {self.endpoint} has a path of {nbytes} bytes, at most {_SOCKET_PATH_NBYTES} work; choose "
                "a shorter --run-directory"
            )

    @property
    def name(self) -> str:
        """``w<replica>.<incarnation>``, also the name of the file of its socket."""
        return f"w{self.replica}.{self.incarnation}"

    @property
    def endpoint(self) -> str:
        """Where this worker listens for runs."""
        return worker_endpoint(self.run_directory, self.replica, self.incarnation)
