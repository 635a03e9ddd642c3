"""Who else computes on the GPUs of a run, as far as that can be known without CUDA.

``nvidia-smi`` says it where it is installed. Elsewhere a process that has both the GPU's device file and the one of
CUDA's unified memory open is one that computes there; only processes of this user can be looked at, root's at all.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from central_storage.diagnostics.gpu_inventory import Gpu

__all__ = ["busy", "free_nbytes", "from_files", "from_nvidia_smi"]

_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_FREE = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
# A driver that is just starting takes seconds to answer; nobody waits longer than this for a warning.
_PATIENCE = 5.0


def busy(devices: Iterable[str], gpus: Sequence[Gpu]) -> list[str]:
    """One line for each GPU of ``devices`` (short form; ``gpus`` are those the user sees) on which other processes
    compute: pid, name, user and memory of each. Processes that this one or, in a script under ``cs-launch``, its
    launcher has started do not count."""
    names = dict.fromkeys(name for device in devices for name in device.split("+") if name.startswith("gpu:"))
    known = {name: gpu for name in names if (gpu := gpus[int(name[4:])]).uuid and not gpu.is_part}
    if not known:
        return []
    users = from_nvidia_smi()
    if users is None:
        users = from_files({gpu.uuid: gpu.minor for gpu in known.values()})
    own = _family()
    lines = []
    for name, gpu in known.items():
        others = [
            who for pid, memory in users.get(gpu.uuid, {}).items() if pid not in own and (who := _who(pid, memory))
        ]
        if others:
            lines.append(f"{name} is in use by {', '.join(others)}; expect it to be slow or to run out of memory")
    return lines


def from_nvidia_smi() -> dict[str, dict[int, str]] | None:
    """For each UUID of a GPU the processes that compute on it, each with its memory in MiB; None where it is not to
    be had."""
    try:
        done = subprocess.run(_QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    users: dict[str, dict[int, str]] = {}
    for line in done.stdout.splitlines():
        uuid, _, rest = line.partition(",")
        pid, _, memory = rest.partition(",")
        if pid.strip().isdecimal():
            users.setdefault(uuid.strip(), {})[int(pid)] = memory.strip()
    return users


def free_nbytes() -> dict[str, int]:
    """The free memory of each GPU in bytes, by UUID; empty if nvidia-smi does not say it."""
    try:
        done = subprocess.run(_FREE, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = [line.partition(",") for line in done.stdout.splitlines()] if not done.returncode else []
    return {uuid.strip(): int(free) << 20 for uuid, _, free in pairs if free.strip().isdecimal()}


def from_files(minors: Mapping[str, str], processes: Path = Path("/proc")) -> dict[str, dict[int, str]]:
    """The same from the files that processes have open; ``minors`` are the numbers of the device files by UUID."""
    users: dict[str, dict[int, str]] = {}
    for process in processes.glob("[0-9]*"):
        opened = set()
        with suppress(OSError):  # somebody else's, or gone
            for descriptor in os.scandir(process / "fd"):
                with suppress(OSError):
                    opened.add(os.readlink(descriptor))
        if "/dev/nvidia-uvm" in opened:
            for uuid, minor in minors.items():
                if f"/dev/nvidia{minor}" in opened:
                    users.setdefault(uuid, {})[int(process.name)] = ""
    return users


def _who(pid: int, memory: str) -> str:
    import psutil  # only where there are GPUs to look at

    size = f" with {memory} MiB" if memory.isdecimal() else ""
    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.name()} of {process.username()}){size}"
    except psutil.NoSuchProcess:
        return ""  # gone, or of another container, where the number says nothing
    except psutil.Error:
        return f"pid {pid}{size}"


def _family() -> set[int]:
    """This process and what belongs to the same run."""
    import psutil

    own = {os.getpid()}
    with suppress(psutil.Error):
        root = psutil.Process(os.getppid() if os.environ.get("CS_ADDRESS") else os.getpid())
        own |= {root.pid, *(child.pid for child in root.children(recursive=True))}
    return own
