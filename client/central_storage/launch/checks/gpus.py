"""GPUs: the driver, the GPUs that are visible, and the CuPy that fits. No GPU is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from central_storage.diagnostics.gpu_inventory import visible_gpus
from cs_proto.errors import DeviceError
from cs_runtime.gpus import cuda_of, driver_directory, driver_version, require_cupy

from .finding import Finding, bad, good

__all__ = ["cupy", "driver", "installed"]

# The packages of CuPy, each with the major version of CUDA for which it is made.
_CUPY = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13}
_CONTROL = ("nvidiactl", "nvidia-uvm")


def installed(name: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def driver(
    listed: Path | None = None, environment: Mapping[str, str] = os.environ, nodes: Path = Path("/dev")
) -> Iterator[Finding]:
    """The driver and its GPUs. ``listed`` is the directory in which the driver lists them, ``nodes`` that of their
    device files."""
    listed = listed or driver_directory()
    count = len(list(listed.iterdir())) if listed.is_dir() else 0
    has_files = any(nodes.glob("nvidia[0-9]*"))
    if not count:
        if has_files:
            yield bad(
                "GPUs",
                "there are device files, but no driver is loaded",
                "install or load the NVIDIA driver (modprobe nvidia); in a container, install it on the host",
            )
        else:
            yield good("GPUs", "none")
        return
    said = driver_version(listed)
    newest = cuda_of(said) if said else None
    cuda = f"for CUDA {newest} at most" if newest else "too old for every CuPy" if said else "of unknown version"
    visible = len(visible_gpus(listed, environment, nodes))
    yield good("GPUs", f"{visible} of {count} are visible; driver {said or 'unknown'}, {cuda}")
    if not visible:
        yield bad(
            "GPUs",
            "CUDA_VISIBLE_DEVICES hides all GPUs, or names one that is not there",
            "unset CUDA_VISIBLE_DEVICES, or set it to numbers that nvidia-smi -L lists",
        )
    elif has_files and (closed := _closed(nodes)):
        yield bad(
            "GPUs",
            f"this user may not open {', '.join(closed)}",
            "add yourself to the group of these files (ls -l /dev/nvidia*), usually video; in a container, docker run "
            "--gpus all",
        )
    elif not has_files:
        yield good(
            "GPUs",
            "there are no device files yet; the first use of CUDA makes them",
            "in a container: docker run --gpus all, with the NVIDIA Container Toolkit on the host",
        )


def cupy(
    gpus: int | None = None, listed: Path | None = None, version_of: Callable[[str], str] = installed
) -> Iterator[Finding]:
    """CuPy, and whether it fits the driver; without GPUs nobody needs it."""
    found = {name: said for name in (*_CUPY, "cupy") if (said := version_of(name))}
    if not (len(visible_gpus(listed)) if gpus is None else gpus):
        return
    text = ", ".join(f"{name} {said}" for name, said in found.items())
    if not found and find_spec("cupy") is None:
        try:
            require_cupy(["gpu:0"], listed)
        except DeviceError as error:
            yield bad(
                "CuPy", "not installed, and replicas and variables on GPUs need it", str(error).partition(": ")[2]
            )
        return
    if len(found) > 1:
        yield bad(
            "CuPy",
            f"{text}: two packages of CuPy overwrite each other",
            f"pip uninstall {' '.join(found)}, and install the one that fits the driver",
        )
        return
    said = driver_version(listed)
    newest = cuda_of(said) if said else None
    needs = next((_CUPY[name] for name in found if name in _CUPY), None)
    if needs is not None and said and (newest is None or newest < needs):
        remedy = f"pip uninstall {' '.join(found)}; " + (
            f"pip install 'central-storage[cuda{newest}]'" if newest else "install driver 525 or later"
        )
        yield bad("CuPy", f"{text} needs CUDA {needs}, and the driver ({said}) is too old for it", remedy)
    else:
        yield good("CuPy", text or "installed, of unknown version")


def _closed(nodes: Path) -> list[str]:
    """The device files that this user may not open."""
    files = [*sorted(nodes.glob("nvidia[0-9]*")), *(nodes / name for name in _CONTROL)]
    return [file.name for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
