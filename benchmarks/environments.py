"""The virtual environments of the peers, one for each family, made once under build/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parent.parent / "build"
PACKAGES = {"torch": ["torch==2.13.0", "ray", "scikit-learn"], "tensorflow": ["tensorflow-cpu"]}


def python_of(family: str) -> str:
    """The interpreter of a family; ``""`` is the one that runs this, in which the service is installed."""
    return str(BUILD / f"bench-{family}" / "bin" / "python") if family else sys.executable


def make(family: str) -> None:
    """Make the environment unless it is whole already. Raises CalledProcessError where pip fails."""
    directory = BUILD / f"bench-{family}"
    stamp, packages = directory / "installed", " ".join(PACKAGES[family])
    if stamp.exists() and stamp.read_text() == packages:
        return
    print(f"installing {packages} into {directory}, once", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    subprocess.run([python_of(family), "-m", "pip", "install", "--quiet", *PACKAGES[family]], check=True)
    stamp.write_text(packages)


def versions(family: str) -> dict[str, str]:
    """What is installed of the packages that were asked for."""
    names = [name.partition("==")[0] for name in PACKAGES[family]]
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python_of(family), "-c", program, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, found.stdout.split(), strict=True))
