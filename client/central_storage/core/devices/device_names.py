"""Device names, and the devices of this machine.

This module owns the short form that travels (``cpu:0``, ``gpu:1``; ``cpu:0+cpu:1`` for a replica with several logical
devices) and the full form that users of TensorFlow know. ``diagnostics.gpu_inventory`` finds the GPUs without CUDA. The
strategy and the launcher call this module; no other module interprets a device string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral

from central_storage.diagnostics.gpu_inventory import gpu_count, user_visible
from cs_proto.errors import DeviceError
from cs_proto.messages import MOST_REPLICAS

__all__ = [
    "Devices",
    "canonical",
    "compute_devices",
    "existing",
    "full_name",
    "logical_devices",
    "of_replica",
    "parameter_device",
    "refuse_text",
]

_DEVICE = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?(?:/device:|/|device:)?(cpu|gpu)(?::([0-9]{1,4}))?", re.IGNORECASE
)

#: How a script and ``cs-launch --devices`` name the devices of the replicas; see :func:`compute_devices`.
Devices = int | str | Sequence[str | Sequence[str]]

# The most workers that `auto` starts on CPUs.
_MOST_CPUS = 8
_WORDS = "a number, 'auto', 'gpu:all', or a list of device strings such as ['cpu:0', 'cpu:1']"


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


def compute_devices(devices: Devices | None, cores: int) -> list[str]:
    """The devices of the replicas in short form. A script and ``cs-launch --devices`` name them in the same way:

    - None: every GPU, or one CPU where there is no GPU
    - a number: as many GPUs, or as many logical CPUs where there is no GPU
    - ``"auto"``: every GPU, or where there is none one CPU for each of ``cores``, eight at most
    - ``"gpu:all"``: every GPU
    - a list, or a string with commas: one device for each replica, or several in a tuple or joined by ``+``. A name
      without a number takes the next number of its kind.

    >>> compute_devices(["cpu"] * 2, cores=1), compute_devices("cpu:0,cpu:1", cores=1)
    (['cpu:0', 'cpu:1'], ['cpu:0', 'cpu:1'])

    Raises DeviceError for what names no device, for a device that does not exist, and if one replica owns more devices
    than another.
    """
    if devices is None:
        return _every_gpu() or ["cpu:0"]
    entries = _entries(devices, cores)
    if isinstance(entries, int):
        return _first(entries)
    taken = {canonical(name) for entry in entries for name in entry if not _is_numberless(name)}
    used = {"cpu": 0, "gpu": 0}

    def numbered(name: str) -> str:
        if _is_numberless(name):
            kind = canonical(name)[:3]
            while f"{kind}:{used[kind]}" in taken:
                used[kind] += 1
            taken.add(name := f"{kind}:{used[kind]}")
        return existing(name)

    replicas = ["+".join(map(numbered, entry)) for entry in entries]
    if len({replica.count("+") for replica in replicas}) > 1:
        raise DeviceError(f"every replica must own the same number of devices, not {', '.join(replicas)}")
    return replicas


def refuse_text(devices: Devices | None) -> None:
    """Raise DeviceError if a script names devices in a text, which is one string of a list or a command line's list.
    TensorFlow refuses it, too."""
    if isinstance(devices, str) and devices.strip().lower() not in ("auto", "gpu:all", "/gpu:all"):
        names = [name.strip() for name in devices.split(",") if name.strip()]
        raise DeviceError(f"compute_devices must be {_WORDS}, not the text {devices!r:.100}; write {names!r:.100}")


def _entries(devices: Devices, cores: int) -> int | list[Sequence[str]]:
    """The number of replicas, or the devices of each as they were written."""
    if isinstance(devices, str):
        text = devices.strip()
        if text.isdecimal():
            return int(text)
        devices = [part.strip() for part in text.split(",") if part.strip()]
    elif isinstance(devices, Integral) and not isinstance(devices, bool):
        return int(devices)
    if isinstance(devices, bytes) or not isinstance(devices, Sequence):
        raise DeviceError(f"compute_devices must be {_WORDS}, not {devices!r:.100}")
    if not devices:
        raise DeviceError("compute_devices is empty; name at least one device, or leave it out to get the default")
    if len(devices) == 1 and isinstance(devices[0], str) and devices[0].lower() == "auto":
        # More processes are seldom faster, because the server reads the gradients of all of them.
        names = _every_gpu() or [f"cpu:{number}" for number in range(min(cores, _MOST_CPUS))]
        return [[name] for name in names]
    entries: list[Sequence[str]] = []
    for entry in devices:
        if isinstance(entry, str) and entry.lower() in ("gpu:all", "/gpu:all"):
            gpus = _every_gpu()
            if not gpus:
                raise DeviceError(f"device {entry!r}: there is no GPU{_limit()}; use auto to run on CPUs instead")
            entries += [[name] for name in gpus]
        else:
            entries.append(_several(entry))
    return entries


def _first(count: int) -> list[str]:
    """So many devices of this machine."""
    if not 1 <= count <= MOST_REPLICAS:
        raise DeviceError(f"the number of devices must be from 1 to {MOST_REPLICAS}, not {count}")
    gpus = _every_gpu()
    if gpus and len(gpus) < count:
        raise DeviceError(
            f"{count} devices were asked for, but there is {', '.join(gpus)}{_limit()}; write ['cpu'] * {count} for "
            f"CPUs, or ['gpu:0'] * {count} for replicas that share a GPU"
        )
    return gpus[:count] or [f"cpu:{number}" for number in range(count)]


def _every_gpu() -> list[str]:
    return [f"gpu:{number}" for number in range(gpu_count())]


def _is_numberless(name: object) -> bool:
    match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    return match is not None and match[2] is None


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
