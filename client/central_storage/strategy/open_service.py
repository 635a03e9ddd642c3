"""Finds the service: the launcher's if this script runs under ``cs-launch``, otherwise one of the script's own."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from central_storage.core.devices import device_names
from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import note_uncaught
from central_storage.diagnostics.gpu_inventory import visible_gpus
from central_storage.diagnostics.logging_setup import announce, configure_logging, dump_stacks_on_signal
from central_storage.planning.ending import ENVIRONMENT as ESTIMATE
from central_storage.planning.ending import ending_in
from cs_proto.errors import ConfigurationError, DeviceError
from cs_proto.messages import DeviceChoice
from cs_proto.printable import counted
from cs_runtime import trace
from cs_runtime.gpus import require_cupy
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_runtime.waits import name_waits_after

if TYPE_CHECKING:
    from central_storage.controller.operations import ServiceLink
    from central_storage.core.backends import ServiceBackend
    from central_storage.core.opening import Cluster
    from central_storage.launch import service, threads

__all__ = ["open_service"]

_log = logging.getLogger("central_storage")

# By address. The launcher's service takes one controller; a second strategy of the script starts a service of its own.
# The link is kept alive: if it were garbage, its ZeroMQ context would wait for ever for its open sockets.
_attached: dict[str, ServiceLink] = {}
_links: weakref.WeakSet[ServiceLink] = weakref.WeakSet()
_timelines = itertools.count(1)


def open_service(
    compute_devices: device_names.Devices | None,
    parameter_device: str | None,
    *,
    seed: int,
    start_timeout: float,
    in_process: bool,
    recovery: Recovery,
    cluster: Cluster | None = None,
) -> ServiceBackend:
    """A link to the service this script should use, up and ready; one ``in_process`` is always the script's own.

    The service of ``cs-launch`` gets the devices that the script names, unless its command line names others, which is
    said in a line. A service from elsewhere has its own.

    Raises DeviceError for devices that do not exist, ConfigurationError for a ``cluster`` that does not fit, and
    LaunchError if no service comes up.
    """
    configure_logging("script")
    device_names.refuse_text(compute_devices)
    if cluster is not None:
        _check_cluster(compute_devices, in_process)
    name_waits_after()  # a value that makes no sense is said before anything starts
    trace.is_on()
    dump_stacks_on_signal()
    _note_uncaught()
    if path := os.environ.get(ESTIMATE):
        chosen = _chosen(compute_devices, parameter_device)
        from central_storage.planning.link import PlanningLink  # late: only an estimate needs it

        return PlanningLink(*chosen, seed, ending_in(path), in_process=in_process)
    address = os.environ.get("CS_ADDRESS")
    if cluster is not None:
        owner = device_names.parameter_device(parameter_device, ["cpu:0"])
        link = _start(["elsewhere"] * cluster.workers, owner, seed, start_timeout, in_process, recovery, cluster)
        is_said, parameter_device = False, None
    elif address and address not in _attached and not in_process:
        link = _attached[address] = _attach(address, compute_devices, parameter_device, seed, start_timeout)
        is_said = _is_launched() and not link.carries  # by the launcher
    else:
        chosen = _chosen(compute_devices, parameter_device)
        link = _start(*chosen, seed, start_timeout, in_process, recovery)
        is_said = False
    try:
        if not is_said:
            replicas = f"{counted(link.replicas, 'replica')} ({', '.join(link.compute_devices)})"
            announce(f"[central-storage] {replicas}, parameters on {link.parameter_device}, transport {link.transport}")
        link.listens_at = partial(_listens_at, link.address)
        _say_what_counts(link, compute_devices, parameter_device)
        if path := os.environ.get("CS_TIMELINE"):
            _record(link, path)
        if not _links:
            atexit.register(_close_all)
            os.register_at_fork(after_in_child=_forget_all)
        _links.add(link)
    except BaseException:  # Ctrl-C: nobody would close it
        link.close()
        raise
    return link


@functools.cache
def _note_uncaught() -> None:
    """Once, whatever is opened afterwards."""
    note_uncaught(_links)


def _check_cluster(compute_devices: device_names.Devices | None, in_process: bool) -> None:
    """Raise ConfigurationError for what cannot be together with workers on other machines."""
    if compute_devices is not None or in_process:
        other = "in_process" if in_process else "compute_devices"
        raise ConfigurationError(f"cluster and {other} exclude each other: the workers run where the cluster has room")
    if os.environ.get(ESTIMATE) or os.environ.get("CS_ADDRESS"):
        raise ConfigurationError(
            "this script has a service already, which cs-launch or cs-ctl estimate has started; leave cluster out, or "
            "start the script with python"
        )


def _listens_at(run_directory: str) -> str:
    """Where the service listens for other machines now; "" for nowhere."""
    from central_storage.launch.service_file import ServiceFile  # late: few scripts ask

    file = ServiceFile.read(run_directory)
    return file.listen if file is not None else ""


def _is_launched() -> bool:
    """Whether ``cs-launch`` has started this script."""
    return os.environ.get("CS_ROLE") == "script"


def _options_first() -> bool:
    """Whether the devices that the environment names are options of a command line."""
    return _is_launched() or bool(os.environ.get(ESTIMATE))


def _chosen(compute_devices: device_names.Devices | None, parameter_device: str | None) -> tuple[list[str], str]:
    """The devices of the replicas and of the variables, in short form. The options of ``cs-launch`` come first, then
    what the script names, then ``CS_DEVICES`` and ``CS_PARAMETER_DEVICE``. Raises DeviceError where they cannot be
    used."""
    from central_storage.launch.affinity import core_count  # only a script that chooses needs the launcher's code

    for_all, for_parameters = os.environ.get("CS_DEVICES"), os.environ.get("CS_PARAMETER_DEVICE")
    if for_all and (compute_devices is None or _options_first()):
        compute_devices = for_all
    if for_parameters and (parameter_device is None or _options_first()):
        parameter_device = for_parameters
    chosen = device_names.compute_devices(compute_devices, core_count())
    owner = device_names.parameter_device(parameter_device, chosen)
    if not os.environ.get(ESTIMATE):
        require_cupy([*chosen, owner])
    return chosen, owner


def _record(link: ServiceLink, path: str) -> None:
    """Write a timeline to ``path`` when the link is closed; a further one of this script gets a number before the
    suffix."""
    from central_storage.timeline.chrome_trace import Recording

    number = next(_timelines)
    try:
        recording = Recording(link.address, path if number == 1 else f".{number}".join(os.path.splitext(path)))
    except (ConfigurationError, OSError) as error:
        _log.warning("CS_TIMELINE: no timeline is recorded: %s", error)
        return

    def write() -> None:
        try:
            recording.write()
        except OSError as error:
            _log.warning("CS_TIMELINE: the timeline was not written: %s", error)

    link.after_close = write


def _say_what_counts(
    link: ServiceLink, compute_devices: device_names.Devices | None, parameter_device: str | None
) -> None:
    """Name what the script asked for and did not get."""
    ignored = []
    if compute_devices is not None and _written_out(compute_devices) != list(link.compute_devices):
        ignored.append(f"compute_devices={compute_devices!r:.100}")
    if parameter_device is not None and _written_out(parameter_device) != [link.parameter_device]:
        ignored.append(f"parameter_device={parameter_device!r:.100}")
    if ignored:
        _log.warning(
            "the devices of %s count: %s, parameters on %s; the script's %s is not used",
            "the cs-launch command line" if _is_launched() else f"the service in {link.address}",
            *(", ".join(link.compute_devices), link.parameter_device, " and ".join(ignored)),
        )


def _written_out(named: device_names.Devices) -> list[str]:
    """The devices in short form, or nothing where they do not exist here."""
    from central_storage.launch.affinity import core_count

    with suppress(DeviceError):
        return device_names.compute_devices(named, core_count())
    return []


def _attach(
    address: str,
    compute_devices: device_names.Devices | None,
    parameter_device: str | None,
    seed: int,
    start_timeout: float,
) -> ServiceLink:
    choice = None
    if _is_launched():
        chosen, owner = _chosen(compute_devices, parameter_device)
        choice = DeviceChoice(tuple(chosen), owner)
    connection = SupervisorLink(supervisor_link.connect(address), "controller", run_directory=address, choice=choice)
    try:
        from central_storage.controller.operations import ServiceLink, wait_until_serving

        serving = wait_until_serving(connection, start_timeout)
        return ServiceLink(connection, serving, seed=seed, stop=None).open()
    except BaseException:  # also Ctrl-C: nobody else would let go of the connection
        connection.close()
        raise


def _start(
    chosen: Sequence[str],
    owner: str,
    seed: int,
    start_timeout: float,
    in_process: bool,
    recovery: Recovery,
    cluster: Cluster | None = None,
) -> ServiceLink:
    from central_storage.launch.gpu_usage import busy

    for line in busy([*chosen, owner], visible_gpus()):
        _log.warning("%s", line)
    own: threads.ServiceThreads | None = None
    started: threads.ServiceThreads | service.ServiceProcess
    if in_process:
        from central_storage.launch import threads

        started = own = threads.start(chosen, owner, start_timeout)
    else:
        from central_storage.launch import service

        words = () if cluster is None else cluster.options()
        started = service.start(chosen, owner, start_timeout, recovery, words)
    connection: SupervisorLink | None = None
    try:
        from central_storage.controller.operations import ServiceLink, wait_until_serving

        connection = SupervisorLink(started.socket, "controller")
        serving = wait_until_serving(connection, start_timeout)
        return ServiceLink(connection, serving, seed=seed, stop=started.stop, threads=own).open()
    except BaseException:  # also Ctrl-C: nobody else would end the service
        if connection is not None:
            connection.close()
        started.stop()
        raise


def _close_all() -> None:
    for link in list(_links):
        link.close()


def _forget_all() -> None:
    for link in list(_links):
        link.forget_in_child()
