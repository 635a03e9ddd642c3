"""Who else computes on a GPU: from a made-up ``nvidia-smi``, from made-up ``/proc`` trees, from a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from central_storage.diagnostics.gpu_inventory import Gpu
from central_storage.launch import gpu_usage

GPUS = [Gpu("0", "GPU-a", minor="0"), Gpu("1", "GPU-b", minor="1"), Gpu("MIG-1", "GPU-c", minor="2"), Gpu("3")]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name, with this as its text, first on the path."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


@pytest.fixture
def stranger() -> Iterator[int]:
    """The pid of a process that is not of this run: nobody's child here."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"
    pid = int(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True).stdout)
    yield pid
    psutil.Process(pid).kill()


def test_a_gpu_is_named_with_who_uses_it(nvidia_smi: Callable[[str], None], stranger: int) -> None:
    lines = [
        *(f"GPU-b, {stranger}, 30123", f"GPU-a, {os.getpid()}, 5", f"GPU-c, {stranger}, 7"),
        *("GPU-b, 999999999, 8", "GPU-elsewhere, 1, 8", "No running processes found", ""),
    ]
    nvidia_smi(f"test \"$1\" = --query-compute-apps=gpu_uuid,pid,used_memory && printf '%s\\n' '{chr(10).join(lines)}'")
    process = psutil.Process(stranger)
    assert gpu_usage.busy(["gpu:0+gpu:1", "gpu:1", "gpu:2", "gpu:3", "cpu:0"], GPUS) == [
        f"gpu:1 is in use by pid {stranger} ({process.name()} of {process.username()}) with 30123 MiB; "
        "expect it to be slow or to run out of memory"
    ]


def test_memory_that_is_not_said(nvidia_smi: Callable[[str], None], stranger: int) -> None:
    nvidia_smi(f"echo 'GPU-a, {stranger}, [N/A]'")
    (line,) = gpu_usage.busy(["gpu:0"], GPUS)
    assert "MiB" not in line
    assert line.startswith(f"gpu:0 is in use by pid {stranger} (")


def test_what_this_process_has_started_is_no_one_elses(nvidia_smi: Callable[[str], None]) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        nvidia_smi(f"echo 'GPU-a, {child.pid}, 1'")
        assert gpu_usage.busy(["gpu:0"], GPUS) == []
    finally:
        child.kill()
        child.wait()


def test_without_gpus_nobody_is_asked(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    nvidia_smi(f"touch {tmp_path}/asked")
    assert gpu_usage.busy(["cpu:0"], GPUS) == gpu_usage.busy(["gpu:2", "gpu:3"], GPUS) == []
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("script", ["exit 9", "exec /no/such/program"])
def test_an_nvidia_smi_that_fails_says_nothing(nvidia_smi: Callable[[str], None], script: str) -> None:
    nvidia_smi(script)
    assert gpu_usage.from_nvidia_smi() is None


def test_without_nvidia_smi_the_files_speak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stranger: int) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = []

    def users(minors: dict[str, str]) -> dict[str, dict[int, str]]:
        asked.append(minors)
        return {"GPU-b": {stranger: ""}}

    monkeypatch.setattr(gpu_usage, "from_files", users)
    (line,) = gpu_usage.busy(["gpu:0", "gpu:1"], GPUS)
    assert line.startswith(f"gpu:1 is in use by pid {stranger} (sleep of ")
    assert asked == [{"GPU-a": "0", "GPU-b": "1"}]


def test_a_process_computes_where_it_has_the_files_of_cuda_open(tmp_path: Path) -> None:
    opened = {
        "11": ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "socket:[1]"],
        "12": ["/dev/nvidiactl", "/dev/nvidia0"],  # a display
        "13": ["/dev/nvidia-uvm", "/dev/nvidia10"],
        "self": ["/dev/nvidia-uvm", "/dev/nvidia0"],
        "14": [],
    }
    for pid, files in opened.items():
        (tmp_path / pid / "fd").mkdir(parents=True)
        for number, file in enumerate(files):
            (tmp_path / pid / "fd" / str(number)).symlink_to(file)
    (tmp_path / "15").mkdir()  # nobody may look
    assert gpu_usage.from_files({"GPU-a": "0", "GPU-b": "1"}, tmp_path) == {"GPU-b": {11: ""}}
