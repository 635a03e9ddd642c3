"""What a process must know before it uses a GPU: which number CUDA has for it here, and whether CuPy is there.

``gpu:n`` is always the n-th GPU that the user's CUDA_VISIBLE_DEVICES shows. A process of the service sees only those it
uses, and ``CS_GPUS`` says their numbers. Nothing here touches a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cs_proto.errors import DeviceError

__all__ = ["driver_directory", "local_number", "require_cupy"]

_DRIVER = "/proc/driver/nvidia/gpus"
_VERSION = re.compile(r"NVRM version:.*?\s([0-9]{3,})\.([0-9.]+)\s")
# From which driver on a major version of CUDA works, newest first.
_CUDA = ((580, 13), (525, 12))


def driver_directory() -> Path:
    """Where the driver shows its GPUs: the kernel's directory or, for tests, the one that CS_NVIDIA_DRIVER names."""
    return Path(os.environ.get("CS_NVIDIA_DRIVER", _DRIVER))


def local_number(device: str) -> int:
    """The number that CUDA has in this process for ``device`` (``gpu:n`` as the user counts).

    Raises DeviceError where this process does not see it.
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


def require_cupy(devices: Iterable[str], driver: Path | None = None) -> None:
    """Raise DeviceError, which says what to install, where ``devices`` (short form) need CuPy and there is none."""
    names = [name for device in devices for name in device.split("+") if name.startswith("gpu:")]
    if not names or importlib.util.find_spec("cupy") is not None:
        return
    try:
        match = _VERSION.search(((driver or driver_directory()).parent / "version").read_text())
    except OSError:
        match = None
    if match is None:
        remedy = "pip install 'central-storage[cuda12]' or, with a driver from 580 on, 'central-storage[cuda13]'"
    else:
        version = f"{match[1]}.{match[2]}"
        major = next((major for oldest, major in _CUDA if int(match[1]) >= oldest), None)
        if major is None:
            remedy = f"the driver ({version}) is too old for every CuPy package; install driver 525 or later"
        else:
            remedy = f"pip install 'central-storage[cuda{major}]' (the driver, {version}, supports CUDA {major})"
    raise DeviceError(f"{names[0]} needs CuPy: {remedy}")
