"""``cs-launch --health``: the health check of a container.

It asks the supervisor whether all processes are ready and alive, and the server for its counters.
"""

from __future__ import annotations

from central_storage.controller.operations import wait_until_serving
from central_storage.observer import blocking
from cs_proto.errors import LaunchError
from cs_proto.messages import Died
from cs_proto.printable import counted
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

__all__ = ["health"]


def health(run_directory: str, timeout: float) -> str:
    """A line about the service in ``run_directory``, which serves.

    Raises LaunchError where it does not, has lost a process or is not up within ``timeout`` seconds, NoAnswerError
    where its server does not answer within as many.
    """
    connection = SupervisorLink(supervisor_link.connect(run_directory), "observer")
    try:
        serving = wait_until_serving(connection, timeout)
        said = connection.receive_nowait()
        if isinstance(said, Died):
            raise LaunchError(f"{said.role} {said.rank} ended by {said.cause}")
    finally:
        connection.close()
    with blocking.connect(run_directory, timeout) as asking:
        counters = asking.statistics()
        return (
            f"serving {counted(asking.replicas, 'replica')}, {counted(counters.variables, 'variable')}, "
            f"transport {serving.transport}; asked over {asking.transport}"
        )
