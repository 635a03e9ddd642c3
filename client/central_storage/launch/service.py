"""A script's own service: starts the supervisor in the background and returns the connection to it.

The service ends with the script, however the script ends. The first :func:`start` of a process registers one hook, with
which forked children close the connection. ``strategy.open_service`` calls it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

from central_storage.core.recovery_options import Recovery
from cs_proto.codec import encode
from cs_proto.errors import LaunchError
from cs_proto.messages import Shutdown

from .packages import python_path
from .service_file import origin

__all__ = ["ServiceProcess", "start"]

# The supervisor kills what has not ended 3 s after it was asked to stop.
_STOP_TIMEOUT = 5.0

_services: weakref.WeakSet[ServiceProcess] = weakref.WeakSet()


class ServiceProcess:
    """A supervisor started by this process; ``socket`` is connected to it and speaks records, one a packet."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process = process
        self.socket = link
        self._owner = os.getpid()

    def stop(self, reason: str = "stop") -> None:
        """End the service and wait for it, at most about 5 s. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        if self.process.returncode is None:
            with suppress(OSError):  # already closed, which tells the supervisor the same
                self.socket.send(b"".join(encode(Shutdown(reason))), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self.socket.close()
            if not self._has_ended(_STOP_TIMEOUT):
                self.process.kill()  # its children die with it
            if self.process.wait() < 0:
                _remove_run_directories()
        self.socket.close()

    def _has_ended(self, timeout: float) -> bool:
        """Whether it has within so many seconds; as Popen.wait, which looks again only every 50 ms."""
        try:
            descriptor = os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # other code has waited for it
            return True
        except OSError:  # the script has no descriptor left
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
            return self.process.returncode is not None
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            return bool(poller.poll(timeout * 1000))
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: close the connection there, so that only the parent's counts."""
        self.socket.close()
        self.process.returncode = 0  # not a child of this process: nothing to wait for


def start(
    devices: Sequence[str],
    parameter_device: str,
    start_timeout: float = 60.0,
    recovery: Recovery | None = None,
    elsewhere: Sequence[str] = (),
) -> ServiceProcess:
    """Start a supervisor for a service on these devices (short form) and return at once. ``recovery`` says what is done
    when a process dies (default: Recovery()). With ``elsewhere``, the workers come from other machines, as these
    options of ``cs-launch`` say, and have no devices here.

    Whether the service comes up within ``start_timeout`` seconds is said on the socket, as Serving or StartFailed.
    Raises LaunchError where not even the supervisor can be started.
    """
    if not sys.executable:
        raise LaunchError("sys.executable is empty: this Python does not say which program could run the service")
    path = python_path(os.environ)
    recovery = recovery or Recovery()
    timeout = recovery.step_timeout
    script, kind = origin()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        *(sys.executable, "-P", "-m", "central_storage.launch.background"),
        *("--client-descriptor", str(theirs.fileno())),
        *("--owner-pid", str(os.getpid())),
        f"--script={script}",
        *("--kind", kind),
        *("--devices", ",".join(devices)),
        *("--parameter-device", parameter_device),
        *("--start-timeout", str(start_timeout)),
        *("--max-restarts", str(recovery.max_restarts)),
        *("--server-recovery", "on" if recovery.server_recovery else "off"),
        *(() if timeout is None else ("--step-timeout", str(timeout))),
        *elsewhere,
    ]
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path} if path else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise LaunchError(f"the service could not be started ({sys.executable!r}: {error.strerror})") from error
    finally:
        theirs.close()
    service = ServiceProcess(process, ours)
    _services.add(service)
    return service


def _remove_run_directories() -> None:
    """Remove the run directory of a supervisor that a signal has ended, which could not do so itself. Ray, for example,
    kills the children of an actor before the actor's own exit handlers run."""
    from .run_directory import clean_up  # late: a supervisor almost never ends by a signal

    clean_up()


def _forget_all() -> None:
    for service in list(_services):
        service.forget()


os.register_at_fork(after_in_child=_forget_all)
