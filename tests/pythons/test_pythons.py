"""The wheel, with what it needs from the package index, under every other Python that it says it is for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def run(*command: object, cwd: Path, seconds: float = 60) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=unit(seconds), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreter(version: str) -> str | None:
    """A Python of that version, on PATH or of pyenv's; None where there is none."""
    candidates = [shutil.which(f"python{version}")]
    if pyenv := shutil.which("pyenv"):
        listed = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True, check=True)
        for name in listed.stdout.split():
            if name.startswith(f"{version}."):
                prefix = subprocess.run([pyenv, "prefix", name], capture_output=True, text=True, check=True)
                candidates.append(f"{prefix.stdout.strip()}/bin/python")
    said = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):  # what pyenv puts on PATH may stand for no interpreter
        done = subprocess.run([candidate, "-c", said], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory, ROOT)
    run(*command, cwd=ROOT)
    [found] = directory.glob("*.whl")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", [v for v in PYTHONS if v != f"{sys.version_info[0]}.{sys.version_info[1]}"])
def test_the_digits_are_learned(version: str, wheel: Path, tmp_path: Path) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"there is no Python {version} here, neither on PATH nor of pyenv's")
    run(found, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    binaries = tmp_path / "environment" / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "-q", "--only-binary=:all:", f"{wheel}[examples]")
    run(*pip, cwd=tmp_path, seconds=900)
    shutil.copy(ROOT / "examples" / "digits.py", tmp_path)
    printed = run(binaries / "cs-launch", "--devices", "cpu:0,cpu:1", "digits.py", cwd=tmp_path, seconds=900)
    assert float(printed.splitlines()[-1].removeprefix("test accuracy ")) >= 0.97
