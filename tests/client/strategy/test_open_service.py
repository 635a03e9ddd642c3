"""Finding a service: what was started for a strategy ends where the strategy does not come to be."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from central_storage.core.recovery_options import Recovery
from central_storage.errors import DeviceError, ShutdownError
from central_storage.launch import gpu_usage
from central_storage.launch import service as launch
from central_storage.strategy import open_service as opening
from central_storage.strategy.open_service import open_service


class Started:
    """A supervisor that has died before the script could say a word to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_a_supervisor_that_dies_at_once_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()
    monkeypatch.setattr(launch, "start", lambda *_: started)
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    with pytest.raises(ShutdownError, match="supervisor is gone"):
        open_service(["cpu:0"], None, seed=0, start_timeout=1.0, in_process=False, recovery=Recovery())
    assert started.stops == 1
    assert started.socket.fileno() == -1


def test_gpus_without_cupy_and_gpus_in_use_are_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setenv("CS_NVIDIA_DRIVER", str(tmp_path))
    monkeypatch.delenv("CS_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "start", lambda *_: Started())
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"gpu:0 needs CuPy: pip install"):
        open_service(None, "cpu:0", seed=0, start_timeout=1.0, in_process=False, recovery=Recovery())
    assert not caplog.records
    monkeypatch.setattr(opening, "require_cupy", lambda _: None)
    monkeypatch.setattr(gpu_usage, "busy", lambda devices, gpus: [f"{devices} of {len(gpus)} are in use"])
    with pytest.raises(ShutdownError):
        open_service(None, "cpu:0", seed=0, start_timeout=1.0, in_process=False, recovery=Recovery())
    assert caplog.messages == ["['gpu:0', 'gpu:1', 'cpu:0'] of 2 are in use"]
