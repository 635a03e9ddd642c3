"""Facts that a process needs before it uses a GPU: its number for CUDA in this process, and whether CuPy is there.

``gpu:n`` is always the n-th GPU that the user's CUDA_VISIBLE_DEVICES shows. A process of the service sees only the
GPUs that it uses, and ``CS_GPUS`` gives their numbers. This module never touches a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cs_proto.errors import DeviceError

__all__ = ["cuda_of", "driver_directory", "driver_version", "local_number", "require_cupy"]

_DRIVER = "/proc/driver/nvidia/gpus"
_VERSION = re.compile(r"NVRM version:.*?\s([0-9]{3,})\.([0-9.]+)\s")
# The oldest driver for each major version of CUDA, newest first.
_CUDA = ((580, 13), (525, 12))


def driver_directory() -> Path:
    """The directory in which the driver lists its GPUs: the kernel's or, for tests, the value of CS_NVIDIA_DRIVER."""
    return Path(os.environ.get("CS_NVIDIA_DRIVER", _DRIVER))


def local_number(device: str) -> int:
    """CUDA's number in this process for ``device`` (``gpu:n`` as the user counts).

    Raises DeviceError if this process does not see the device.
    """
    numbers = os.environ.get("CS_GPUS")
    number = int(device.partition(":")[2])
    if numbers is None:
        return number
    own = [int(text) for text in numbers.split(",") if text]
    if number not in own:
        names = ", ".join(f"gpu:{n}" for n in own) or "no GPU"
        raise DeviceError(f"{device} is not one of this process's devices: it sees {names}")
    return own.index(number)


def driver_version(driver: Path | None = None) -> str:
    """The version of the NVIDIA driver, such as ``535.183.01``; empty if there is none. ``driver`` is the directory in
    which it lists its GPUs (default: :func:`driver_directory`)."""
    try:
        match = _VERSION.search(((driver or driver_directory()).parent / "version").read_text())
    except OSError:
        return ""
    return f"{match[1]}.{match[2]}" if match else ""


def cuda_of(version: str) -> int | None:
    """The newest major version of CUDA for which a CuPy package works with this version of the driver; None if it is
    too old for all.

    Examples:
        >>> cuda_of("580.65.06"), cuda_of("535.183.01"), cuda_of("470.57.02")
        (13, 12, None)
    """
    return next((major for oldest, major in _CUDA if int(version.partition(".")[0]) >= oldest), None)


def require_cupy(devices: Iterable[str], driver: Path | None = None) -> None:
    """Raise a DeviceError that says what to install, if ``devices`` (short form) need CuPy and it is missing."""
    names = [name for device in devices for name in device.split("+") if name.startswith("gpu:")]
    if not names or importlib.util.find_spec("cupy") is not None:
        return
    version = driver_version(driver)
    if not version:
        remedy = "pip install 'central-storage[cuda12]' or, with a driver from 580 on, 'central-storage[cuda13]'"
    else:
        major = cuda_of(version)
        if major is None:
            remedy = f"the driver ({version}) is too old for every CuPy package; install driver 525 or later"
        else:
            remedy = f"pip install 'central-storage[cuda{major}]' (the driver, {version}, supports CUDA {major})"
    raise DeviceError(f"{names[0]} needs CuPy: {remedy}")
