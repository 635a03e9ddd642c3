"""Device names, and the devices of this machine.

This module owns the short form that travels (``cpu:0``, ``gpu:1``; ``cpu:0+cpu:1`` for a replica with several logical
devices) and the full form that users of TensorFlow know. ``diagnostics.gpu_inventory`` finds the GPUs without CUDA. The
strategy and the launcher call this module; no other module interprets a device string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from central_storage.diagnostics.gpu_inventory import gpu_count, user_visible
from cs_proto.errors import DeviceError

__all__ = [
    "as_list",
    "canonical",
    "compute_devices",
    "existing",
    "expanded",
    "full_name",
    "logical_devices",
    "of_replica",
    "parameter_device",
]

_DEVICE = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?(?:/device:|/|device:)?(cpu|gpu)(?::([0-9]{1,4}))?", re.IGNORECASE
)

# The most workers that `auto` starts on CPUs.
_MOST_CPUS = 8


def canonical(device: str) -> str:
    """The short form of a device string; the number 0 may be left out.

    >>> canonical("/gpu:1"), canonical("/job:localhost/replica:0/task:0/device:CPU:0"), canonical("cpu")
    ('gpu:1', 'cpu:0', 'cpu:0')

    Raises DeviceError for anything that does not name one device of this machine by kind and number.
    """
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(f"{device!r:.100} is not a device of this machine; write cpu:0, /gpu:1 or a full name")
    return f"{match[1].lower()}:{int(match[2] or 0)}"


def full_name(device: str) -> str:
    """The full name of a device string.

    >>> full_name("gpu:1")
    '/job:localhost/replica:0/task:0/device:GPU:1'
    """
    return f"/job:localhost/replica:0/task:0/device:{canonical(device).upper()}"


def of_replica(devices: str | Sequence[str]) -> str:
    """The short form of the devices of one replica: one device, or several in a tuple or joined by ``+``.

    >>> of_replica(("GPU:0", "/gpu:1")), of_replica("cpu:0")
    ('gpu:0+gpu:1', 'cpu:0')

    Raises DeviceError for anything that is not a device, and for an empty tuple.
    """
    return "+".join(map(canonical, _several(devices)))


def logical_devices(replica: str) -> list[str]:
    """The devices of one replica, from their short form.

    >>> logical_devices("gpu:0+gpu:1")
    ['gpu:0', 'gpu:1']
    """
    return replica.split("+")


def as_list(devices: Sequence[str | Sequence[str]]) -> list[str | Sequence[str]]:
    """``devices`` as a list with the devices of each replica. Raises DeviceError for an empty list and for a string
    instead of a list."""
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        raise DeviceError(
            f"compute_devices must be a list of device strings, such as ['cpu:0', 'cpu:1'], not {devices!r:.100}"
        )
    if not devices:
        raise DeviceError("compute_devices is empty; name at least one device, or leave it out to get the default")
    return list(devices)


def compute_devices(devices: Sequence[str | Sequence[str]] | None) -> list[str]:
    """The devices of the replicas in short form: the given ones, which must exist, or every GPU, or one CPU.

    Raises DeviceError also if one replica owns more devices than another.
    """
    if devices is None:
        return [f"gpu:{number}" for number in range(gpu_count())] or ["cpu:0"]
    replicas = ["+".join(map(existing, _several(entry))) for entry in as_list(devices)]
    if len({replica.count("+") for replica in replicas}) > 1:
        raise DeviceError(f"every replica must own the same number of devices, not {', '.join(replicas)}")
    return replicas


def expanded(devices: Sequence[str], cores: int) -> list[str]:
    """A list for ``cs-launch --devices``, written out: ``gpu:all`` means every GPU; ``auto``, alone, means every GPU
    or, without a GPU, one CPU for each of ``cores``, eight at most.

    Raises DeviceError if ``gpu:all`` finds none.
    """
    gpus = [f"gpu:{number}" for number in range(gpu_count())]
    if [name.lower() for name in devices] == ["auto"]:
        # More processes are seldom faster, because the server reads the gradients of all of them.
        return gpus or [f"cpu:{number}" for number in range(min(cores, _MOST_CPUS))]
    written: list[str] = []
    for name in devices:
        if name.lower() in ("gpu:all", "/gpu:all"):
            if not gpus:
                raise DeviceError(f"device {name!r}: there is no GPU{_limit()}; use auto to run on CPUs instead")
            written += gpus
        else:
            written.append(name)
    return written


def parameter_device(device: str | None, compute: Sequence[str]) -> str:
    """The device of the variables in short form: the given one, or the only compute device, or CPU 0."""
    if device is not None:
        return existing(device)
    return logical_devices(compute[0])[0] if len(compute) == 1 else "cpu:0"


def _several(devices: str | Sequence[str]) -> Sequence[str]:
    several = devices.split("+") if isinstance(devices, str) else devices
    if not isinstance(several, (list, tuple)) or not several:
        raise DeviceError(f"a replica's devices must be one string or a tuple of strings, not {devices!r:.100}")
    return several


def existing(device: str) -> str:
    """The short form of ``device``. Raises a DeviceError that lists the existing devices, if it does not exist."""
    name = canonical(device)
    if name.startswith("gpu:"):
        gpus = gpu_count()
        if int(name[4:]) >= gpus:
            names = ", ".join(f"gpu:{number}" for number in range(gpus)) or "no GPU"
            raise DeviceError(f"device {device!r} does not exist{_limit()}; there is {names}, and cpu:0, cpu:1, ...")
    return name


def _limit() -> str:
    visible = user_visible()
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
