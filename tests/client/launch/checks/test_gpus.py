"""GPUs: the driver, what is visible, and the CuPy that fits; with a driver directory that is faked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from central_storage.launch.checks import gpus
from central_storage.launch.checks.finding import Finding

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Aug 26 2024\n"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """The directory in which a driver lists two GPUs."""
    for number in (1, 2):
        gpu = tmp_path / f"driver/gpus/0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t Some\nGPU UUID: \t GPU-{number}\nDevice Minor: \t {number - 1}\n")
    (tmp_path / "driver/version").write_text(VERSION.format("535.183.01"))
    return tmp_path / "driver/gpus"


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """The directory of the device files."""
    directory = tmp_path / "dev"
    directory.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (directory / name).touch()
    return directory


def test_a_machine_without_gpus_needs_nothing(tmp_path: Path) -> None:
    [finding] = gpus.driver(tmp_path / "nothing", {}, tmp_path)
    assert (finding.level, finding.text) == ("good", "none")
    assert list(gpus.cupy(0)) == []


def test_gpus_and_their_driver_are_told(listed: Path, nodes: Path) -> None:
    [finding] = gpus.driver(listed, {}, nodes)
    assert (finding.level, finding.text) == ("good", "2 of 2 are visible; driver 535.183.01, for CUDA 12 at most")
    first, hidden = gpus.driver(listed, {"CUDA_VISIBLE_DEVICES": ""}, nodes)
    assert first.text.startswith("0 of 2 are visible")
    assert (hidden.level, hidden.remedy[:26]) == ("bad", "unset CUDA_VISIBLE_DEVICES")


def test_a_driver_that_is_not_loaded_is_bad(tmp_path: Path, nodes: Path) -> None:
    [finding] = gpus.driver(tmp_path / "nothing", {}, nodes)
    assert finding.level == "bad"
    assert "modprobe nvidia" in finding.remedy


def test_device_files_that_may_not_be_opened_are_bad(
    listed: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia-uvm")
    _, finding = gpus.driver(listed, {}, nodes)
    assert (finding.level, finding.text) == ("bad", "this user may not open nvidia-uvm")
    assert "--gpus all" in finding.remedy


def test_missing_device_files_are_told(listed: Path, tmp_path: Path) -> None:
    _, finding = gpus.driver(listed, {}, tmp_path)
    assert (finding.level, "no device files" in finding.text) == ("good", True)


def test_a_driver_of_unknown_version(listed: Path, nodes: Path) -> None:
    (listed.parent / "version").unlink()
    [finding] = gpus.driver(listed, {}, nodes)
    assert finding.text.endswith("driver unknown, of unknown version")


def installed(**said: str) -> Callable[[str], str]:
    return lambda name: said.get(name.replace("-", "_"), "")


def cupy(listed: Path, driver: str, **said: str) -> Finding:
    (listed.parent / "version").write_text(VERSION.format(driver))
    [finding] = gpus.cupy(1, listed, installed(**said))
    return finding


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("580.65.06", {"cupy_cuda13x": "14.1"}),
        ("580.65.06", {"cupy_cuda12x": "14.1"}),
        ("535.183.01", {"cupy_cuda12x": "14.1"}),
        ("535.183.01", {"cupy": "14.1"}),
    ],
)
def test_a_cupy_that_fits_is_good(listed: Path, driver: str, said: dict[str, str]) -> None:
    finding = cupy(listed, driver, **said)
    assert (finding.level, finding.text) == ("good", f"{next(iter(said)).replace('_', '-')} 14.1")


def test_a_cupy_that_does_not_fit_is_bad(listed: Path) -> None:
    finding = cupy(listed, "535.183.01", cupy_cuda13x="14.1")
    assert (finding.level, finding.text) == (
        "bad",
        "cupy-cuda13x 14.1 needs CUDA 13, and the driver (535.183.01) is too old for it",
    )
    assert finding.remedy == "pip uninstall cupy-cuda13x; pip install 'central-storage[cuda12]'"
    finding = cupy(listed, "470.57.02", cupy_cuda12x="14.1")
    assert (finding.level, finding.remedy) == ("bad", "pip uninstall cupy-cuda12x; install driver 525 or later")


def test_two_packages_of_cupy_are_bad(listed: Path) -> None:
    finding = cupy(listed, "580.65.06", cupy_cuda12x="14.1", cupy_cuda13x="14.1")
    assert finding.level == "bad"
    assert finding.remedy.startswith("pip uninstall cupy-cuda12x cupy-cuda13x, and install the one that fits")


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("535.183.01", "pip install 'central-storage[cuda12]' (the driver, 535.183.01, supports CUDA 12)"),
        ("470.57.02", "the driver (470.57.02) is too old for every CuPy package; install driver 525 or later"),
    ],
)
def test_a_missing_cupy_is_bad(listed: Path, driver: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = cupy(listed, driver)
    assert (finding.level, finding.remedy) == ("bad", remedy)


def test_a_cupy_of_unknown_origin_is_told(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: object())
    assert cupy(listed, "535.183.01").text == "installed, of unknown version"
