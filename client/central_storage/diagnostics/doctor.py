"""What ``cs-launch --doctor`` says of this machine: what the service finds here, and what is slower than elsewhere."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from .gpu_inventory import visible_gpus

__all__ = ["report", "slower_here"]

_X86 = ("x86_64", "AMD64")


def report() -> list[str]:
    """The lines that ``cs-launch --doctor`` prints."""
    gpus = len(visible_gpus())
    return [
        f"system: {platform.system()} {platform.release()} on {platform.machine()}",
        f"python: {platform.python_version()} ({sys.executable})",
        *(f"{name}: {_version(name)}" for name in ("numpy", "numba", "pyzmq", "cupy")),
        f"processors: {len(os.sched_getaffinity(0))}",
        f"GPUs: {gpus or 'none'}",
        f"kernel cache: {os.environ.get('CS_CACHE_DIR') or _default_cache()}",
        *(slower_here() or ["slower here: nothing"]),
    ]


def slower_here() -> list[str]:
    """A line for each thing that this kind of processor makes slower; none on x86-64."""
    machine = platform.machine()
    if machine in _X86:
        return []
    why = f"{machine} may reorder what a process writes to shared memory"
    return [
        f"slower here: every message of a step goes over ZeroMQ instead of a mailbox, because {why}",
        f"slower here: observers (cs.connect) ask the server instead of reading shared memory, because {why}",
    ]


def _default_cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "central-storage")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
