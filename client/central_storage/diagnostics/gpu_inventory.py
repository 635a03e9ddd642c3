"""The GPUs that CUDA would show to this process, with their numbers, found without CUDA from the driver's files.

``gpu:n`` is always the n-th GPU that the user's CUDA_VISIBLE_DEVICES shows. A process of the service gets a
CUDA_VISIBLE_DEVICES of its own, which shows only the GPUs that it uses; there ``CS_GPUS`` gives their numbers, and
``CS_VISIBLE_DEVICES`` is the value that the user set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cs_proto.errors import DeviceError
from cs_proto.frozen import frozen
from cs_runtime.gpus import driver_directory

__all__ = ["Gpu", "gpu_count", "shown", "user_visible", "visible_gpus"]

_DEVICES = Path("/dev")


@frozen
class Gpu:
    """A GPU that CUDA shows: its ``entry`` in CUDA_VISIBLE_DEVICES and, if known, its UUID, its PCI address and
    ``minor``, the number of its device file."""

    entry: str
    uuid: str = ""
    address: str = ""
    minor: str = ""

    @property
    def is_part(self) -> bool:
        """Whether it is an instance of a divided GPU (MIG)."""
        return self.entry.startswith("MIG-")


def visible_gpus(
    driver: Path | None = None, environment: Mapping[str, str] | None = None, nodes: Path = _DEVICES
) -> list[Gpu]:
    """The GPUs that CUDA shows under ``environment`` (default: this process's), in its order.

    ``driver`` is the directory in which the driver lists them (default: the kernel's or, for tests, the value of
    CS_NVIDIA_DRIVER), ``nodes`` that of the device files. As in CUDA, CUDA_VISIBLE_DEVICES ends at its first entry that
    names no GPU, and an entry that comes twice makes the list empty. CUDA shows a process only the first of several
    instances of divided GPUs; here all of them count, because each process gets its own.
    """
    environment = os.environ if environment is None else environment
    gpus = _gpus(driver or driver_directory(), nodes)
    visible = user_visible(environment)
    if visible is None or not gpus:
        return [_by_index(gpus, str(number), environment) for number in range(len(gpus))]
    found: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _named(gpus, entry, environment)
        if gpu is None:
            break
        if any(gpu.entry == other.entry or (gpu.uuid == other.uuid != "" and not gpu.is_part) for other in found):
            return []
        found.append(gpu)
    return found


def user_visible(environment: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it, also in a process of the service; None if it is not set."""
    return environment.get("CS_VISIBLE_DEVICES" if "CS_GPUS" in environment else "CUDA_VISIBLE_DEVICES")


def gpu_count(driver: Path | None = None, visible: str | None = None) -> int:
    """The number of GPUs that CUDA would show; ``visible`` is CUDA_VISIBLE_DEVICES (default: this process's)."""
    return len(visible_gpus(driver, None if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))


def shown(device: str, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The environment variables with which a process sees only the GPUs of ``device``; none if it is a CPU.

    ``device`` is in short form, several joined by ``+``; ``gpus`` are those that the user sees. Raises DeviceError for
    several instances of divided GPUs, because CUDA shows a process only one.
    """
    numbers = list(dict.fromkeys(int(name[4:]) for name in device.split("+") if name.startswith("gpu:")))
    chosen = [gpus[number] for number in numbers]
    if len(chosen) > 1 and any(gpu.is_part for gpu in chosen):
        raise DeviceError(
            f"{device}: CUDA shows a process only one instance of a divided GPU (MIG); give each replica one"
        )
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.entry for gpu in chosen),
        "CS_GPUS": ",".join(map(str, numbers)),
    }


@frozen
class _Known:
    address: str
    uuid: str
    minor: str
    model: str

    def under(self, entry: str) -> Gpu:
        return Gpu(entry, self.uuid, self.address, self.minor)


def _gpus(driver: Path, nodes: Path) -> list[_Known]:
    """The GPUs the driver shows, by PCI address; in a container only those whose device files it has."""
    minors = {path.name.removeprefix("nvidia") for path in nodes.glob("nvidia[0-9]*")}
    found = []
    for gpu in sorted(driver.iterdir()) if driver.is_dir() else []:
        try:
            lines = (gpu / "information").read_text().splitlines()
        except OSError:
            lines = []
        said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        # If there are no files at all, the first use of CUDA makes them.
        minor = said.get("Device Minor", "")
        if not minors or minor in {"", *minors}:
            found.append(_Known(gpu.name, said.get("GPU UUID", ""), minor, said.get("Model", "")))
    return found


def _by_index(gpus: Sequence[_Known], entry: str, environment: Mapping[str, str]) -> Gpu:
    """The GPU with this index. The order is that of PCI addresses if the user says so or if all GPUs are alike;
    otherwise CUDA puts the fastest first, and only CUDA knows which that is."""
    if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in gpus}) == 1:
        return gpus[int(entry)].under(entry)
    return Gpu(entry)


def _named(gpus: Sequence[_Known], entry: str, environment: Mapping[str, str]) -> Gpu | None:
    if entry.isdecimal():
        return _by_index(gpus, entry, environment) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):  # the driver lists only whole GPUs; an old name contains that of its GPU
        whole = [gpu for gpu in gpus if len(gpus) == 1 or (gpu.uuid and entry.startswith(f"MIG-{gpu.uuid}/"))]
        return whole[0].under(entry) if whole else Gpu(entry)
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0].under(entry) if len(matches) == 1 else None
