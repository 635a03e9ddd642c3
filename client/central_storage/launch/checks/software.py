"""Versions of Python and of the libraries, the container around this process, and an engine to start containers."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cs_proto.version import __version__

from .finding import Finding, bad, good
from .gpus import installed

__all__ = ["container", "engine", "versions"]

_NEEDED = ("numpy", "numba", "llvmlite", "pyzmq", "msgpack", "cloudpickle", "optree", "psutil")
_OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "torch", "jax", "optax", "flax", "rich", "tqdm")
# Seconds that an engine may take to answer.
_PATIENCE = 5.0
_GROUPS = {"docker": "docker", "kubepods": "Kubernetes", "containerd": "containerd", "libpod": "podman", "lxc": "LXC"}


def versions(version_of: Callable[[str], str] = installed) -> Iterator[Finding]:
    """The versions of this project, Python and libraries."""
    found = {name: version_of(name) for name in (*_NEEDED, *_OPTIONAL)}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    text = ", ".join(f"{name} {said}" for name, said in found.items() if said)
    yield good("versions", f"central-storage {__version__}, {python}, {text}")
    if missing := [name for name in _NEEDED if not found[name]]:
        yield bad(
            "versions",
            f"{', '.join(missing)} not installed, although every service needs it",
            f"{Path(sys.executable).name} -m pip install {' '.join(missing)}",
        )


def container(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether this process is in a container."""
    if (root / ".dockerenv").exists():
        kind = "docker"
    elif (root / "run/.containerenv").exists():
        kind = "podman"
    else:
        try:
            groups = (root / "proc/1/cgroup").read_text()
        except OSError:
            groups = ""
        kind = next((name for part, name in _GROUPS.items() if part in groups), "")
    yield good("container", f"inside one ({kind})" if kind else "not inside one, as far as can be seen")


def engine() -> Iterator[Finding]:
    """Whether docker or podman answers this user. Only ``docker-compose.yml`` needs one."""
    there = []
    for name in ("docker", "podman"):
        command = (name, "version", "--format", "{{.Server.Version}}")
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except FileNotFoundError:
            continue
        except (OSError, subprocess.TimeoutExpired):
            there.append(name)
            continue
        said = done.stdout.strip().splitlines()
        if done.returncode == 0 and said:
            yield good("container engine", f"{name} {said[0]:.40} answers this user")
            return
        there.append(name)
    if there:
        yield good(
            "container engine",
            f"{' and '.join(there)} does not answer this user; only docker-compose.yml needs it",
            "for docker-compose: start the engine (systemctl start docker), and join its group "
            '(sudo usermod -aG docker "$USER", then log in again)',
        )
    else:
        yield good("container engine", "none; only docker-compose.yml needs one")
