"""Finds the service: the launcher's if this script runs under ``cs-launch``, otherwise one of the script's own."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from central_storage.core.devices import device_names
from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import note_uncaught
from central_storage.diagnostics.gpu_inventory import visible_gpus
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal, show
from cs_proto.errors import DeviceError
from cs_runtime.gpus import require_cupy
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from central_storage.controller.operations import ServiceLink
    from central_storage.launch import service, threads

__all__ = ["open_service"]

_log = logging.getLogger("central_storage")

# By address. The launcher's service takes one controller; a second strategy of the script starts a service of its own.
# The link is kept alive: if it were garbage, its ZeroMQ context would wait for ever for its open sockets.
_attached: dict[str, ServiceLink] = {}
_links: weakref.WeakSet[ServiceLink] = weakref.WeakSet()


def open_service(
    compute_devices: Sequence[str | Sequence[str]] | None,
    parameter_device: str | None,
    *,
    seed: int,
    start_timeout: float,
    in_process: bool,
    recovery: Recovery,
) -> ServiceLink:
    """A link to the service this script should use, up and ready; one ``in_process`` is always the script's own.

    Raises DeviceError for devices that do not exist or are not the launcher's, LaunchError if no service comes up.
    """
    configure_logging("script")
    dump_stacks_on_signal()
    _note_uncaught()
    address = os.environ.get("CS_ADDRESS")
    if address and address not in _attached and not in_process:
        link = _attached[address] = _attach(address, compute_devices, parameter_device, seed, start_timeout)
    else:
        link = _start(compute_devices, parameter_device, seed, start_timeout, in_process, recovery)
    if not _links:
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_forget_all)
    _links.add(link)
    return link


@functools.cache
def _note_uncaught() -> None:
    """Once, whatever is opened afterwards."""
    note_uncaught(_links)


def _attach(
    address: str,
    compute_devices: Sequence[str | Sequence[str]] | None,
    parameter_device: str | None,
    seed: int,
    start_timeout: float,
) -> ServiceLink:
    from central_storage.controller.operations import ServiceLink, wait_until_serving

    asked = (
        None if compute_devices is None else [device_names.of_replica(d) for d in device_names.as_list(compute_devices)]
    )
    asked_owner = None if parameter_device is None else device_names.canonical(parameter_device)
    with ExitStack() as undo:
        connection = SupervisorLink(supervisor_link.connect(address), "controller", run_directory=address)
        undo.callback(connection.close)
        link = ServiceLink(connection, wait_until_serving(connection, start_timeout), seed=seed, stop=None).open()
        undo.pop_all()
    if asked is not None and asked != list(link.compute_devices):
        link.close()
        raise DeviceError(
            f"this script runs under cs-launch with the devices {', '.join(link.compute_devices)}, but compute_devices "
            f"is {asked}; leave compute_devices out, or pass them to cs-launch --devices"
        )
    if asked_owner is not None and asked_owner != link.parameter_device:
        link.close()
        raise DeviceError(
            f"this script runs under cs-launch with parameters on {link.parameter_device}, but parameter_device is "
            f"{parameter_device!r}"
        )
    if os.environ.get("CS_ROLE") != "script" or link.carries:  # otherwise the launcher has printed it
        show(
            "stderr",
            f"[central-storage] {link.replicas} replicas ({', '.join(link.compute_devices)}), parameters on "
            f"{link.parameter_device}, transport {link.transport}\n",
        )
    return link


def _start(
    compute_devices: Sequence[str | Sequence[str]] | None,
    parameter_device: str | None,
    seed: int,
    start_timeout: float,
    in_process: bool,
    recovery: Recovery,
) -> ServiceLink:
    from central_storage.launch.gpu_usage import busy  # only a script without a launcher needs the supervisor's code

    if compute_devices is None and os.environ.get("CS_DEVICES"):  # a second strategy is not silently a smaller one
        compute_devices = os.environ["CS_DEVICES"].split(",")
        if parameter_device is None:
            parameter_device = os.environ.get("CS_PARAMETER_DEVICE")
    chosen = device_names.compute_devices(compute_devices)
    owner = device_names.parameter_device(parameter_device, chosen)
    require_cupy([*chosen, owner])
    for line in busy([*chosen, owner], visible_gpus()):
        _log.warning("%s", line)
    own: threads.ServiceThreads | None = None
    started: threads.ServiceThreads | service.ServiceProcess
    if in_process:
        from central_storage.launch import threads

        started = own = threads.start(chosen, owner, start_timeout)
    else:
        from central_storage.launch import service

        started = service.start(chosen, owner, start_timeout, recovery)
    with ExitStack() as undo:
        undo.callback(started.stop)
        from central_storage.controller.operations import ServiceLink, wait_until_serving

        connection = SupervisorLink(started.socket, "controller")
        undo.callback(connection.close)
        serving = wait_until_serving(connection, start_timeout)
        link = ServiceLink(connection, serving, seed=seed, stop=started.stop, threads=own).open()
        undo.pop_all()
    return link


def _close_all() -> None:
    for link in list(_links):
        link.close()


def _forget_all() -> None:
    for link in list(_links):
        link.forget_in_child()
